"""Testing a trained run, and evaluating a checkpoint without training."""

from __future__ import annotations

import logging
from pathlib import Path

from oneflow_accel import layouts
from oneflow_accel.backends import Backend
from oneflow_accel.errors import CheckpointError, UserError
from oneflow_accel.training import distributed
from oneflow_accel.training.checkpoint import CheckpointManager
from oneflow_accel.training.resume import checkpoint_folder
from oneflow_accel.training.validation import validate

from omegaconf import DictConfig
from oneflow import nn

from monarch_flow.data import ImageDataModule
from monarch_flow.engine import snapshot
from monarch_flow.engine.build import build_data, build_model
from monarch_flow.engine.initialize import read_model_arrays
from monarch_flow.engine.options import read_trainer_options, section
from monarch_flow.engine.trainer import Trainer, as_logged, named, val_batches
from monarch_flow.optim import build_loss

logger = logging.getLogger("oneflow_accel")


def test(
    trainer: Trainer, data: ImageDataModule, run_dir: Path, cfg: DictConfig
) -> dict[str, float]:
    """Test a run that has ended, with its best checkpoint, or as it is where it kept none.

    Returns:
        "test/loss", "test/acc" and "test/acctop5", the latter two in percent; nothing where
        trainer.limit_val_batches is 0.
    """
    loader = data.test_loader()
    if val_batches(loader, trainer.options) == 0:
        return {}
    best = CheckpointManager(checkpoint_folder(run_dir)).best()
    # Process 0 has written it.
    path = distributed.all_gather_json(None if best is None else str(best))[0]
    if path is None or "model_checkpoint" not in trainer.callbacks:
        accuracy = trainer.evaluate(loader)
    else:
        # A model of its own: the best may be from before the layers became dense.
        name, model = build_model(cfg, data)
        load_for_evaluation(model, path, name)
        accuracy = validate(
            model.to(trainer.backend.device()).eval(),
            loader,
            trainer.backend,
            max_batches=val_batches(loader, trainer.options),
            criterion=trainer.data.val_loss,
        )
    trainer.log_now(as_logged(accuracy), split="test")
    logger.info("test %s", accuracy)
    return named(accuracy, "test")


def evaluate_checkpoint(cfg: DictConfig, backend: Backend) -> dict[str, float]:
    """Evaluate `eval.ckpt` on the validation images, the test images, or both.

    Returns:
        "val/loss", "val/acc", "val/acctop5", and the same of "test".

    Raises:
        UserError: the checkpoint or the data is not there, they do not fit, or neither is wanted.
    """
    options = section(cfg, "eval")
    wanted = [split for split in ("val", "test") if options.get(f"run_{split}", True)]
    if not wanted:
        raise UserError("nothing to evaluate: set eval.run_val or eval.run_test to true")
    data = build_data(cfg, int(cfg.get("seed") or 0))
    name, model = build_model(cfg, data)
    load_for_evaluation(model, options["ckpt"], name)
    model = model.to(backend.device()).eval()
    criterion = build_loss(section(cfg, "train").get("loss_fn_val"), reduction="sum")
    trainer_options = read_trainer_options(cfg)
    metrics: dict[str, float] = {}
    for split in wanted:
        loader = data.val_loader() if split == "val" else data.test_loader()
        accuracy = validate(
            model,
            loader,
            backend,
            max_batches=val_batches(loader, trainer_options),
            criterion=criterion,
        )
        logger.info("%s %s", split, accuracy)
        metrics |= named(accuracy, split)
    data.close()
    return metrics


def load_for_evaluation(model: nn.Module, path: str, name: str) -> None:
    """Load a checkpoint or a file of weights; where they are dense and the model is structured,
    the model becomes dense.

    Raises:
        CheckpointError: the weights are of another model; names both.
        UserError: they cannot be read.
    """
    arrays, phase = read_model_arrays(path)
    snapshot.match_layers(model, arrays, phase)
    try:
        layouts.load_standard_state_dict(model, arrays, strict=True)
    except UserError as error:
        raise CheckpointError(
            f"eval.ckpt={path} is of another model than {name}: {error}"
        ) from error
