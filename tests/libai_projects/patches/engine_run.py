"""One run on LiBai's GPT, as a process or several; run by test_engine_*.py.

    engine_run.py '{"folder": ..., "dist": {...}, "graph": bool, "resume": bool, "set": {...}}'

`set` gives config values by dotted name; `libais` takes LiBai's own trainer, with our samplers
where `our_data` is set; `kill_after` so many
steps the process kills itself; `full_disk` limits rank 0's files to 1000 bytes after training and
saves once more. Rank 0 writes FOLDER/result.json: losses by the number of steps done, results of
the last evaluation, samples seen (first tokens of each global batch).
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

from tests.libai_projects.patches.partial_series import VARIABLE  # before libai

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
    import oneflow as flow
    from libai.config import LazyCall
    from libai.data.build import build_nlp_train_val_test_loader
    from libai.data.data_utils import get_indexed_dataset
    from libai.data.datasets import GPT2Dataset
    from libai.evaluation import PPLEvaluator
    from libai.models import GPTForPreTraining
    from libai.models.utils import GraphBase
    from libai.optim import get_default_optimizer_params
    from libai.scheduler import WarmupCosineLR
    from omegaconf import OmegaConf

    prefix = f"{options['folder']}/data"
    model = LazyCall(GPTForPreTraining)(
        cfg={
            "num_layers": 2,
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "ffn_hidden_size": 64,
            "num_attention_heads": 2,
            "max_seq_length": LENGTH,
            "embedding_dropout_prob": options.get("dropout", 0.0),
            "attention_dropout_prob": options.get("dropout", 0.0),
            "output_dropout_prob": options.get("dropout", 0.0),
            "layernorm_epsilon": 1e-5,
            "initializer_range": 0.02,
            "use_scaled_init_for_output_weights": True,
            "bias_gelu_fusion": False,
            "bias_dropout_fusion": False,
            "scale_mask_softmax_fusion": False,
            "apply_query_key_layer_scaling": False,
            "amp_enabled": False,
        }
    )
    optim = LazyCall(flow.optim.AdamW)(
        params=LazyCall(get_default_optimizer_params)(
            clip_grad_max_norm=1.0,
            clip_grad_norm_type=2.0,
            weight_decay_norm=0.0,
            weight_decay_bias=0.0,
        ),
        lr=1e-2,
        # A list of omegaconf in the state of the optimizer.
        betas=[0.9, 0.999],
        weight_decay=0.01,
    )
    loader = LazyCall(build_nlp_train_val_test_loader)(
        dataset=[
            LazyCall(GPT2Dataset)(
                data_prefix=prefix,
                indexed_dataset=LazyCall(get_indexed_dataset)(
                    data_prefix=prefix, data_impl="mmap", skip_warmup=True
                ),
                max_seq_length=LENGTH,
            )
        ],
        splits=[[70.0, 28.0, 2.0]],
        weights=[1.0],
        num_workers=0,
    )
    # GPT2Dataset wants a tokenizer, and uses none.
    loader.dataset[0].tokenizer = None
    layout = {
        "data_parallel_size": 1,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "pipeline_num_layers": 2,
        **options.get("dist", {}),
    }
    config = OmegaConf.create(
        {
            "model": model,
            "optim": optim,
            "dataloader": {"train": loader},
            "graph": {
                "enabled": options.get("graph", False),
                "train_graph": LazyCall(GraphBase)(is_train=True),
                "eval_graph": LazyCall(GraphBase)(is_train=False),
            },
            "train": {
                "output_dir": f"{options['folder']}/out",
                "train_micro_batch_size": 4 // layout["data_parallel_size"],
                "test_micro_batch_size": 4 // layout["data_parallel_size"],
                "global_batch_size": None,
                "num_accumulation_steps": None,
                "train_iter": 6,
                "train_epoch": 0,
                "warmup_ratio": 0.34,
                "log_period": 1,
                "seed": 7,
                "load_weight": "",
                "amp": {"enabled": False},
                "checkpointer": {"period": 3, "max_to_keep": 5},
                "evaluation": {
                    "enabled": True,
                    "evaluator": LazyCall(PPLEvaluator)(),
                    "eval_period": 100,
                    "eval_iter": 1000,
                    "eval_metric": "lm_loss_PPL",
                    "eval_mode": "min",
                },
                "scheduler": LazyCall(WarmupCosineLR)(warmup_factor=0.1, alpha=0.1),
                "dist": layout,
            },
        },
        flags={"allow_objects": True},
    )
    for name, value in options.get("set", {}).items():
        OmegaConf.update(config, name, value)
    return config


def run(options: dict[str, Any]) -> dict[str, Any]:
    libais = options.get("libais") or os.environ.get(VARIABLE)
    result = {"losses": {}, "samples": [], "evaluation": {}, "full_disk": ""}
    config = make_config(options)
    (run_libais if libais else run_ours)(config, options, result)
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
            if options.get("our_data"):
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
