"""Facts about a trainer, told by engine_facts.py."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import oneflow_accel  # noqa: F401 - before oneflow and libai, which it patches

import oneflow as flow

from tests.libai_projects.patches.partial_series import VARIABLE  # before libai

if os.environ.get(VARIABLE):
    from libai.engine import DefaultTrainer as Trainer
    from libai.engine import default, default_setup
    from libai.engine.trainer import EagerTrainer

    def set_up(cfg: Any, resume: bool) -> None:
        default_setup(cfg, Namespace(resume=resume, config_file=""))

    EVALUATES = (default, "inference_on_dataset")
else:
    from libai_projects.engine import trainer as ours
    from libai_projects.engine.trainer import EagerTrainer, Trainer, set_up

    EVALUATES = (ours, "evaluate_on")

FOLDER = Path(sys.argv[1])
PLACED = {"placement": flow.placement("cpu", [0]), "sbp": flow.sbp.broadcast}


def names_of_results() -> Any:
    """What results of a validation, a test and another test set are called."""
    loaders = [SimpleNamespace(dataset=range(rows)) for rows in (10, 4, 1)]
    loaders[0].split_name, loaders[1].split_name = "validation", "test"
    setattr(*EVALUATES, lambda model, loader, *_: {"rows": len(loader.dataset)})
    from omegaconf import OmegaConf

    cfg = OmegaConf.create({"train": {"test_micro_batch_size": 4, "evaluation": {"eval_iter": 1}}})
    return Trainer.test(cfg, loaders, None, evaluator="one")


def loaded_weights() -> Any:
    from omegaconf import OmegaConf

    loaded: list[str] = []
    if not os.environ.get(VARIABLE):
        ours.load_weights = lambda model, path: loaded.append(path)
    trainer = SimpleNamespace(
        cfg=OmegaConf.create({"train": {"load_weight": "weights"}}),
        checkpointer=SimpleNamespace(load=lambda path, **_: loaded.append(path)),
        _resume_from="",
        model=None,
    )
    Trainer.resume_or_load(trainer, resume=False)
    return loaded


def steps_of_the_schedule() -> Any:
    """Steps of schedule and optimizer in 4 iterations, eager, 2 batches accumulated."""
    from libai.engine import hooks

    model = flow.nn.Linear(1, 1).to_global(**PLACED)
    optimizer = flow.optim.SGD(model.parameters(), lr=1.0)
    taken = {"schedule": 0, "optimizer": 0}
    step = optimizer.step

    def count(name: str) -> None:
        taken[name] += 1

    optimizer.step = lambda: (step(), count("optimizer"))
    schedule = SimpleNamespace(
        step=lambda: count("schedule"), get_last_lr=lambda: [1.0], state_dict=dict
    )
    data = [flow.ones(1, 1, **PLACED)] * 20
    trainer = EagerTrainer(Mean(model), data, optimizer, grad_acc_steps=2)
    trainer.cfg = SimpleNamespace(train=SimpleNamespace(global_batch_size=2))
    run_step = trainer.run_step
    trainer.run_step = lambda: run_step(lambda batch, mixup: {"x": batch})
    trainer.register_hooks([hooks.LRScheduler(optimizer, schedule)])
    trainer.train(0, 4)
    return taken


class Mean(flow.nn.Module):
    def __init__(self, layer: flow.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Any) -> Any:
        return {"loss": self.layer(x).mean()}


def setup(**train: Any) -> list[float]:
    from omegaconf import OmegaConf

    told: list[float] = []
    nccl = flow.boxing.nccl
    nccl.set_fusion_threshold_mbytes = nccl.set_fusion_max_ops_num = told.append
    layout = {f"{kind}_parallel_size": 1 for kind in ("data", "tensor", "pipeline")}
    train = {
        "train_micro_batch_size": 1,
        "output_dir": str(FOLDER / "setup"),
        "dist": layout,
        **train,
    }
    set_up(OmegaConf.create({"train": train}), resume=False)
    return told


def options_of_nccl() -> Any:
    """On this device, which has no NCCL, without options and with them; then on one that has it."""
    from oneflow_accel.backends.cpu import CpuBackend

    options = {"nccl_fusion_threshold_mb": 32, "nccl_fusion_max_ops": 8}
    told = [setup(), setup(**options)]
    CpuBackend.collective_backend = "nccl"
    try:
        return [*told, setup(), setup(**options)]
    finally:
        CpuBackend.collective_backend = "ccl"


def rdma() -> Any:
    started: list[bool] = []
    flow.env.init_rdma = lambda: started.append(True)
    flow.sysconfig.with_rdma = lambda: False
    setup(rdma_enabled=False)
    try:
        setup(rdma_enabled=True)
    except Exception as error:
        return [started, f"{type(error).__name__}: {error}"]
    return [started, ""]


FACTS: list[Callable[[], Any]] = [
    names_of_results,
    loaded_weights,
    steps_of_the_schedule,
    options_of_nccl,
    rdma,
]
