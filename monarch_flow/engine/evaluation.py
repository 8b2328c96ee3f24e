"""Testing a trained run, and evaluating a checkpoint without training."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oneflow_accel import distributed, layouts
from oneflow_accel.agree import everywhere, on_rank_0, require_same
from oneflow_accel.backends import Backend
from oneflow_accel.errors import UserError

import numpy as np
from omegaconf import DictConfig
from oneflow import nn

from flow_train.checkpoint.folders import CheckpointManager, agreed_checkpoint, checkpoint_folder
from flow_train.checkpoint.shards import MODEL
from flow_train.compare.results import ON_VALIDATION_IMAGES
from flow_train.data.datamodule import ImageDataModule
from flow_train.data.real_labels import RealLabels, read_real_labels
from flow_train.files import replace_file, writing
from flow_train.loop import Trainer, val_batches
from flow_train.metrics.console import evaluation_lines
from flow_train.metrics.macs import count_parameters
from flow_train.optim import EMA, build_loss
from flow_train.options import read_trainer_options, section
from flow_train.sharding import sharding_options
from flow_train.task import Evaluation, ImageTask
from monarch_flow.engine.build import build_data, build_model
from monarch_flow.engine.weights import (
    match_layers,
    misfit,
    model_arrays,
    read_model_arrays,
    with_our_names,
)
from monarch_flow.projection import structured_layers

logger = logging.getLogger("oneflow_accel")


def test(
    trainer: Trainer, data: ImageDataModule, run_dir: Path, cfg: DictConfig
) -> dict[str, float]:
    """Test a run that has ended with its best checkpoint, or as it is where it kept none.

    Returns "test/loss", and "test/acc" and "test/acctop5" in percent; nothing where
    trainer.limit_val_batches is 0. Raises UserError where the checkpoint or the data cannot be
    read.
    """
    loader = data.test_loader
    if val_batches(trainer.options) == 0:
        return {}
    # Process 0 has written it, or all of them their shards.
    manager = CheckpointManager(checkpoint_folder(run_dir))
    path, fsdp = on_rank_0(manager.best), trainer.options.fsdp
    if path is None or "model_checkpoint" not in trainer.hooks:
        accuracy = trainer.evaluate(loader)
    else:
        # This needs a new model, as the best checkpoint may be from before the layers became dense.
        name, model = build_model(cfg, data)
        if fsdp is None:
            load_for_evaluation(model, str(path), name)
        else:
            best, mesh = str(manager.directory / "best"), sharding_options(fsdp)["mesh"]
            found = agreed_checkpoint(best, run_dir, mesh, whole=(MODEL, EMA))
            assert found is not None
            _load(model, model_arrays(found), best, name)
        accuracy = trainer.task.evaluate(
            model.to(trainer.backend.device()).eval(),
            loader,
            trainer.backend,
            max_batches=val_batches(trainer.options),
        )
    figures = {**accuracy.as_logged(), ON_VALIDATION_IMAGES: float(_is_validation(data))}
    trainer.log_now(figures, split="test")
    logger.info("%s %s", _heading("test", data), accuracy)
    return trainer.task.named(accuracy.as_logged(), "test")


def evaluate_checkpoint(cfg: DictConfig, backend: Backend) -> dict[str, float]:
    """Evaluate `eval.ckpt` on the validation images, the test images or both.

    No training images are needed. The metrics are "val/loss", "val/acc" and "val/acctop5", the same
    of "test", and with real labels "val/real_acc" and "val/real_acctop5" (of "test" too where its
    images are the same). Accuracy is in percent. Raises UserError where something cannot be read or
    written or does not fit, and where the loss is not finite.
    """
    options = cfg.eval
    wanted = [split for split in ("val", "test") if options[f"run_{split}"]]
    if not wanted:
        raise UserError("nothing to evaluate: set eval.run_val or eval.run_test to true")
    path = options.results_file
    if path:
        # The main process writes it.
        on_rank_0(lambda: _require_writable(Path(path)))
    data = everywhere(lambda: build_data(cfg, cfg.seed or 0, training=False))
    require_same(data.contents())
    try:
        real_labels = on_rank_0(lambda: _real_labels(options.real_labels, data, wanted))
        name, model = build_model(cfg, data)
        load_for_evaluation(model, options.ckpt, name, use_ema=options.use_ema)
        results = _described(cfg, name, model)
        model = model.to(backend.device()).eval()
        criterion = build_loss(cfg.train.loss_fn_val, reduction="sum")
        trainer_options = read_trainer_options(cfg)
        metrics: dict[str, float] = {}
        accuracies: list[Evaluation] = []
        for split in wanted:
            loader = data.val_loader if split == "val" else data.test_loader
            begin = time.perf_counter()
            limit = val_batches(trainer_options)
            task = ImageTask(validation=criterion, real_labels=real_labels.get(split))
            with evaluation_lines(loader, split, trainer_options.log_every, limit) as watch:
                accuracy = task.evaluate(model, loader, backend, max_batches=limit, watch=watch)
            logger.info("%s %s", _heading(split, data), accuracy)
            if distributed.is_main():
                _suspect(accuracy, data.num_classes, use_ema=options.use_ema)
            results[split] = _figures(accuracy, time.perf_counter() - begin)
            accuracies.append(accuracy)
            metrics |= task.named(accuracy.as_logged(), split)
    finally:
        data.close()
    if path:
        text = json.dumps(results, indent=2) + "\n"
        write = writing(f"eval.results_file={path}")(replace_file)
        on_rank_0(lambda: write(Path(path), text.encode()))
    for accuracy in accuracies:
        accuracy.check()
    return metrics


def _is_validation(data: ImageDataModule) -> bool:
    return data.test_loader.dataset is data.val_loader.dataset


def _heading(split: str, data: ImageDataModule) -> str:
    if split == "test" and _is_validation(data):
        return "test (on the validation images: the data has no others)"
    return split


def load_for_evaluation(model: nn.Module, path: str, name: str, *, use_ema: bool = True) -> None:
    """Load a checkpoint or a weights file; dense weights make a structured model dense first.

    `path` is a run, its checkpoints' folder, a checkpoint, or a .pth, .pth.tar or .safetensors
    file; `use_ema` takes the moving average where there is one. Raises CheckpointError for weights
    of another model, UserError where they cannot be read.
    """
    _load(model, on_rank_0(lambda: read_model_arrays(path, use_ema=use_ema)), path, name)


def _load(
    model: nn.Module, found: tuple[Mapping[str, np.ndarray], str | None], path: str, name: str
) -> None:
    arrays, phase = found
    arrays = with_our_names(arrays, model)
    structured = structured_layers(model)
    match_layers(model, arrays, phase)
    if structured and phase is not None and not structured_layers(model):
        logger.info("the run's layers are dense, and so %s is evaluated with dense layers", name)
    elif structured and not structured_layers(model):
        logger.warning(
            "the weights in %s are dense, so %s is evaluated with dense layers; python -m "
            "monarch_flow.convert project, or train.init_from with project, makes them structured",
            path,
            name,
        )
    try:
        layouts.load_standard_state_dict(model, arrays, strict=True)
    except UserError as error:
        raise misfit(
            f"eval.ckpt={path} is of another model than {name}: {error}",
            arrays,
            model,
            for_head="where the data has a part of the model's classes, name them all with "
            "datamodule.class_map=FILE; for other classes train a new head with "
            "train.init_from.path and train.init_from.reset_head=true",
            for_dense="python -m monarch_flow.convert project makes them structured",
        ) from error


def _real_labels(
    path: str | None, data: ImageDataModule, wanted: list[str]
) -> dict[str, RealLabels]:
    """Real labels of the validation images, and of the test images where they are the same. Raises
    UserError where they cannot be read or are those of other images."""
    if not path:
        return {}
    dataset = data.val_loader.dataset
    splits = [s for s in wanted if s == "val" or _is_validation(data)]
    if not splits:
        raise UserError(
            "eval.real_labels are those of the validation images, which are not evaluated: set "
            "eval.run_val=true, or leave the real labels out"
        )
    names = [dataset.name(index) for index in range(len(dataset))]
    labels = read_real_labels(path, names, data.num_classes)
    logger.info("use real labels: %s, for %d images", path, len(labels))
    return dict.fromkeys(splits, labels)


def _suspect(accuracy: Evaluation, num_classes: int, *, use_ema: bool) -> None:
    """Warn where the moving averages are about as good as guessing.

    ViTAE's released code keeps averages that never move with a global batch below 512: the decay
    .99996 is raised to a floor division that gives 0.
    """
    guessed = math.isfinite(accuracy["loss"]) and accuracy["acc1"] < 200 / num_classes
    if use_ema and num_classes >= 10 and guessed:
        logger.warning(
            "the accuracy is that of guessing. If the checkpoint has moving averages, those were "
            "evaluated, and they may be no good: eval.use_ema=false takes the last weights"
        )


def _require_writable(path: Path) -> None:
    """Raise UserError for an unwritable path before an evaluation, which may take hours."""
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UserError(
            f"eval.results_file={path} cannot be written: it has to be a file in a folder that is "
            "there and can be written to"
        )


def _described(cfg: DictConfig, name: str, model: nn.Module) -> dict[str, Any]:
    """What was evaluated, for the file of results."""
    data, options = cfg.datamodule, cfg.eval
    transforms = section(data, "val_transforms")
    parameters = count_parameters(model)
    return {
        "model": name,
        "parameters": parameters.total,
        "trainable_parameters": parameters.trainable,
        "checkpoint": options.ckpt,
        "use_ema": options.use_ema,
        "data_dir": data.data_dir,
        "image_size": data.image_size,
        "crop_pct": transforms.get("crop_pct"),
        "interpolation": transforms.get("interpolation"),
        "real_labels": options.real_labels,
    }


def _figures(accuracy: Evaluation, seconds: float) -> dict[str, Any]:
    """Accuracy, in percent, and the seconds it took, for the file of results."""
    figures = {
        "images": accuracy.count,
        # JSON has no NaN.
        "loss": accuracy["loss"] if math.isfinite(accuracy["loss"]) else None,
        "top1": accuracy["acc1"],
        "top5": accuracy["acc5"],
        "seconds": round(seconds, 3),
    }
    if "real_acc1" in accuracy.sums:
        figures |= {"real_top1": accuracy["real_acc1"], "real_top5": accuracy["real_acc5"]}
        figures["real_images"] = int(accuracy.sums["real_acc1"][1])
    return figures
