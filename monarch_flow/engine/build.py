"""Data and model from the configuration."""

from __future__ import annotations

from oneflow_accel.errors import UserError

from omegaconf import DictConfig
from oneflow import nn

from flow_train.data.datamodule import ImageDataModule
from flow_train.options import limited, section
from monarch_flow.models import create_model


def build_data(cfg: DictConfig, seed: int, *, training: bool = True) -> ImageDataModule:
    """The data module of `datamodule`; `seed` is used where the section has none. Raises UserError
    where the data is not there, or an option is wrong."""
    options = section(cfg, "datamodule")
    options.pop("_target_", None)
    options.setdefault("seed", seed)
    if not training:
        part = section(cfg, "eval").get("class_map")
        options["class_map"] = part or options.get("class_map")
    trainer, step = section(cfg, "trainer"), section(cfg, "train").get("global_batch_size")
    limit = trainer.get("limit_val_batches")

    def most(images: int) -> int:
        # A whole number means the images of so many steps, whatever an evaluation's batch size.
        if limit is None or limit == 0 or trainer.get("fast_dev_run"):
            return images
        is_share = isinstance(limit, float) and limit <= 1
        return limited(images, limit if is_share else limit * int(step or 1))

    return ImageDataModule(**options, training=training, limit_eval=most)


def build_model(cfg: DictConfig, data: ImageDataModule) -> tuple[str, nn.Module]:
    """The model's name and the model, on the CPU, for the data's classes and images. Raises
    UserError for an unknown name or argument, or one that contradicts the data."""
    arguments = section(cfg, "model")
    arguments.pop("_target_", None)
    name = arguments.pop("name")
    channels, height, width = data.image_shape
    told = {
        "num_classes": data.num_classes,
        "img_size": height if height == width else (height, width),
        "in_chans": channels,
    }
    for key, value in told.items():
        if arguments.get(key) not in (None, value):
            raise UserError(
                f"model.{key} is {arguments[key]}, and the data has {value}; leave it out, or "
                "change the datamodule"
            )
    return name, create_model(name, **{**arguments, **told})
