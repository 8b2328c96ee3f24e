"""One run of our trainer on LiBai's GPT, as a process or several; run by test_engine_*.py.

    engine_run.py '{"folder": ..., "dist": {...}, "graph": bool, "resume": bool, "set": {...}}'

`set` gives config values by dotted name; `libais` takes LiBai's own trainer; `full_disk` limits
rank 0's files to 1000 bytes after training and saves once more. Rank 0 writes FOLDER/result.json:
losses, results of the evaluation, samples seen (first tokens of each global batch).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import oneflow_accel
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
    import oneflow as flow
    from libai.engine.trainer import HookBase

    config = make_config(options)
    resume = options.get("resume", False)
    if os.environ.get(VARIABLE) or options.get("libais"):
        from libai.engine import DefaultTrainer as Base
        from libai.engine import default_setup

        default_setup(config, argparse.Namespace(resume=resume, config_file=""))
    else:
        from libai_projects.engine import adapt
        from libai_projects.engine.trainer import Trainer as Base
        from libai_projects.engine.trainer import set_up

        logging.getLogger("libai_projects").addHandler(logging.StreamHandler(sys.stdout))
        logging.getLogger("libai_projects").setLevel(logging.INFO)
        lines = adapt.adapt_to_device(config, oneflow_accel.current_backend())
        print(*lines, sep="\n")
        set_up(config, resume)
    flow.manual_seed(3)
    losses: dict[int, float] = {}
    samples: list[list[int]] = []
    full_disk = ""

    class Record(HookBase):
        def after_step(self) -> None:
            if flow.env.get_rank() == 0:
                history = self.trainer.storage.history("total_loss")
                losses[self.trainer.iter] = history.latest()
            if self.trainer.iter == options.get("kill_after", -1):
                os.kill(os.getpid(), signal.SIGKILL)

    class Trainer(Base):
        @classmethod
        def get_batch(cls, data: Any, *mixup_func: Any) -> dict[str, Any]:
            batch = super().get_batch(data, *mixup_func)
            # The evaluation gives no function to mix samples up.
            if mixup_func:
                samples.append(batch["input_ids"].numpy()[:, 0].tolist())
            return batch

    trainer = Trainer(config)
    trainer.register_hooks([Record()])
    trainer.train()
    if options.get("full_disk"):
        if flow.env.get_rank() == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        try:
            trainer.checkpointer.save("model_0000099")
        except UserError as error:
            full_disk = str(error)
        if flow.env.get_rank() == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    return {
        "losses": losses,
        "samples": samples,
        "evaluation": getattr(trainer, "_last_eval_results", None),
        "full_disk": full_disk,
        "amp": config.train.amp.enabled,
        "period": config.train.checkpointer.period,
        "eval_period": config.train.evaluation.eval_period,
        "lr": trainer.lr_scheduler.get_last_lr(),
    }


def main() -> int:
    options = json.loads(sys.argv[1])
    try:
        result = run(options)
    except UserError as error:
        print(f"user error: {error}\n", end="", flush=True)
        return 2
    from oneflow_accel import distributed

    if distributed.is_main():
        Path(options["folder"], options.get("result", "result.json")).write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
