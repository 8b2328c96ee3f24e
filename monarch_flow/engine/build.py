"""Data and model from the configuration."""

from __future__ import annotations

from oneflow_accel.errors import UserError

from omegaconf import DictConfig, OmegaConf
from oneflow import nn

from flow_train.data.datamodule import ImageDataModule
from flow_train.options import limited, section
from monarch_flow.models import create_model


def build_data(cfg: DictConfig, seed: int, *, training: bool = True) -> ImageDataModule:
    """The data module of `datamodule`. Raises UserError where the data is not there, or an option
    is wrong."""
    options = section(cfg, "datamodule")
    if not training:
        options["class_map"] = cfg.eval.class_map or options["class_map"]
    limit = cfg.trainer.limit_val_batches

    def most(images: int) -> int:
        # A whole number means the images of so many steps, whatever an evaluation's batch size.
        if limit is None or limit == 0 or cfg.trainer.fast_dev_run:
            return images
        is_share = isinstance(limit, float) and limit <= 1
        return limited(images, limit if is_share else limit * cfg.train.global_batch_size)

    return ImageDataModule(**options, seed=seed, training=training, limit_eval=most)


def build_model(cfg: DictConfig, data: ImageDataModule) -> tuple[str, nn.Module]:
    """The model's name and the model, on the CPU, for the data's classes and images. Raises
    UserError for an unknown name or argument, or one that contradicts the data."""
    channels, height, width = data.image_shape
    told = {
        "num_classes": data.num_classes,
        "img_size": height if height == width else (height, width),
        "in_chans": channels,
    }
    for key, value in told.items():
        if cfg.model.get(key) not in (None, value):
            raise UserError(
                f"model.{key} is {cfg.model[key]}, and the data has {value}; leave it out, or "
                "change the datamodule"
            )
    plain = OmegaConf.to_container
    return cfg.model.name, create_model(**{**plain(cfg.model), **told})  # type: ignore[dict-item]
