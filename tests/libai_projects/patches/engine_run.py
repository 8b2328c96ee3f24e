"""One run on LiBai's GPT, as a process or several; run by test_engine_*.py.

    engine_run.py '{"folder": ..., "dist": {...}, "graph": bool, "resume": bool, "set": {...}}'

`set` gives config values by dotted name; `libais` takes LiBai's own trainer, with our samplers;
`kill_after` so many steps the process kills itself; `full_disk` limits rank 0's files to 1000 bytes
after training and saves once more. Rank 0 writes FOLDER/result.json: losses by the number of steps
done, results of the last evaluation, samples seen (first tokens of each global batch).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import oneflow_accel
from oneflow_accel import distributed
from oneflow_accel.errors import UserError

import numpy as np

VOCAB, LENGTH = 96, 16


def write_dataset(prefix: Path, documents: list[np.ndarray]) -> None:
    """The two files of an mmap dataset, one sequence per document, by the format's description."""
    tokens = np.concatenate(documents).astype("<u2")
    Path(f"{prefix}.bin").write_bytes(tokens.tobytes())
    sizes = np.array([len(document) for document in documents], "<i4")
    pointers = (np.concatenate([[0], np.cumsum(sizes)[:-1]]) * 2).astype("<i8")
    index = b"MMIDIDX\0\0" + np.array(1, "<u8").tobytes() + np.array(8, "u1").tobytes()
    index += np.array([len(sizes), len(sizes) + 1], "<u8").tobytes()
    index += sizes.tobytes() + pointers.tobytes()
    index += np.arange(len(sizes) + 1, dtype="<i8").tobytes()
    Path(f"{prefix}.idx").write_bytes(index)


def make_documents(seed: int = 0, count: int = 90) -> list[np.ndarray]:
    """Documents of 3 to 30 tokens that a model can learn something from: runs of numbers."""
    rng = np.random.default_rng(seed)
    return [(rng.integers(VOCAB) + np.arange(rng.integers(3, 31))) % VOCAB for _ in range(count)]


def make_config(options: dict[str, Any]) -> Any:
    from libai.config import LazyCall
    from libai.models import GPTForPreTraining
    from libai.scheduler import WarmupCosineLR
    from omegaconf import OmegaConf

    from libai_projects.configs.common.data.gpt_dataset import dataloader
    from libai_projects.configs.common.models.gpt import cfg
    from libai_projects.configs.common.models.graph import graph
    from libai_projects.configs.common.optim import optim
    from libai_projects.configs.common.train import train

    model = LazyCall(GPTForPreTraining)(cfg=cfg)
    scheduler = LazyCall(WarmupCosineLR)(warmup_factor=0.1, alpha=0.1)
    parts = {"model": model, "optim": optim, "dataloader": {"train": dataloader["train"]}}
    parts |= {"graph": graph, "train": {**train, "scheduler": scheduler}}
    config = OmegaConf.create(parts, flags={"allow_objects": True})
    # GPT2Dataset wants a tokenizer, and uses none.
    config.dataloader.train.dataset[0].tokenizer = None
    config.dataloader.train.dataset[0].data_prefix = f"{options['folder']}/data"
    layout = {f"{kind}_parallel_size": 1 for kind in ("data", "tensor", "pipeline")}
    layout |= options.get("dist", {})
    rows = 4 // layout["data_parallel_size"]
    dropout = ("embedding_dropout_prob", "attention_dropout_prob", "output_dropout_prob")
    changes = {
        **{f"model.cfg.{name}": options.get("dropout", 0.0) for name in dropout},
        "model.cfg.num_layers": 2,
        "model.cfg.vocab_size": VOCAB,
        "model.cfg.hidden_size": 32,
        "model.cfg.ffn_hidden_size": 64,
        "model.cfg.num_attention_heads": 2,
        "model.cfg.max_seq_length": LENGTH,
        "optim.lr": 1e-2,
        "dataloader.train.splits": [[70.0, 28.0, 2.0]],
        "dataloader.train.num_workers": 0,
        "graph.enabled": options.get("graph", False),
        "train.output_dir": f"{options['folder']}/out",
        "train.train_micro_batch_size": rows,
        "train.test_micro_batch_size": rows,
        "train.train_iter": 6,
        "train.warmup_ratio": 0.34,
        "train.log_period": 1,
        "train.checkpointer.period": 3,
        "train.evaluation.eval_period": 100,
        "train.evaluation.eval_iter": 1000,
        "train.evaluation.eval_metric": "lm_loss_PPL",
        "train.dist": layout,
        **options.get("set", {}),
    }
    for name, value in changes.items():
        OmegaConf.update(config, name, value)
    return config


def run(options: dict[str, Any]) -> dict[str, Any]:
    result = {"losses": {}, "samples": [], "evaluation": {}, "full_disk": ""}
    config = make_config(options)
    (run_libais if options.get("libais") else run_ours)(config, options, result)
    return {
        **result,
        "amp": config.train.amp.enabled,
        "period": config.train.checkpointer.period,
        "eval_period": config.train.evaluation.eval_period,
    }


def run_libais(config: Any, options: dict[str, Any], result: dict[str, Any]) -> None:
    import oneflow as flow
    from libai.engine import DefaultTrainer, default_setup
    from libai.engine.trainer import HookBase

    from libai_projects.text.loaders import use_ours

    class Record(HookBase):
        def after_step(self) -> None:
            if flow.env.get_rank() == 0:
                history = self.trainer.storage.history("total_loss")
                result["losses"][self.trainer.iter + 1] = history.latest()

    class Trainer(DefaultTrainer):
        @classmethod
        def get_batch(cls, data: Any, *mixup_func: Any) -> dict[str, Any]:
            batch = super().get_batch(data, *mixup_func)
            # The evaluation gives no function to mix samples up.
            if mixup_func:
                result["samples"].append(batch["input_ids"].numpy()[:, 0].tolist())
            return batch

        @classmethod
        def build_train_loader(cls, cfg: Any, tokenizer: Any = None) -> Any:
            # LiBai's own sampler begins a resumed run with the first sample.
            use_ours(cfg.dataloader.train)
            cfg.dataloader.train.consumed_samples = cfg.dataloader.consumed_samples
            return super().build_train_loader(cfg, tokenizer)

    arguments = argparse.Namespace(resume=options.get("resume", False), config_file="")
    default_setup(config, arguments)
    flow.manual_seed(3)
    trainer = Trainer(config)
    trainer.register_hooks([Record()])
    trainer.train()
    result["evaluation"] = getattr(trainer, "_last_eval_results", None)


def run_ours(config: Any, options: dict[str, Any], result: dict[str, Any]) -> None:
    from libai_projects.command import adapt
    from libai_projects.engine import parts
    from libai_projects.engine import run as engine
    from libai_projects.engine.task import LibaiTask

    class Record(engine.MetricsJson):
        def log(self, step: int, values: Mapping[str, float], split: str) -> None:
            super().log(step, values, split)
            if split == "train":
                result["losses"][step] = values["loss"]
            else:
                result["evaluation"][split] = dict(values)
            if split == "train" and step == options.get("kill_after"):
                os.kill(os.getpid(), signal.SIGKILL)

    class Task(LibaiTask):
        def laid_out(self, batch: Any) -> dict[str, Any]:
            found = super().laid_out(batch)
            result["samples"].append(found["input_ids"].numpy()[:, 0].tolist())
            return found

    engine.MetricsJson, parts.LibaiTask = Record, Task
    for name in ("libai_projects", "oneflow_accel"):
        logging.getLogger(name).addHandler(logging.StreamHandler(sys.stdout))
        logging.getLogger(name).setLevel(logging.INFO)
    backend, resume = oneflow_accel.current_backend(), options.get("resume", False)
    print(*adapt.adapt_to_device(config, backend), sep="\n")
    parts.set_up(config, resume)
    trainer = engine.train(config, backend, resume=resume)
    if not options.get("full_disk"):
        return
    limits = (1000, resource.RLIM_INFINITY), (resource.RLIM_INFINITY,) * 2
    if distributed.is_main():
        resource.setrlimit(resource.RLIMIT_FSIZE, limits[0])
    try:
        # As the best one, or the step that is on disk would not be written again.
        trainer.save_checkpoint(best=True)
    except UserError as error:
        result["full_disk"] = str(error)
    if distributed.is_main():
        resource.setrlimit(resource.RLIMIT_FSIZE, limits[1])


def main() -> int:
    options = json.loads(sys.argv[1])
    try:
        result = run(options)
    except UserError as error:
        print(f"user error: {error}\n", end="", flush=True)
        return 2
    if distributed.is_main():
        Path(options["folder"], options.get("result", "result.json")).write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
