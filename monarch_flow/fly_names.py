"""Keys and experiments of HazyResearch/fly under our names: its commands are typed as they are."""

from __future__ import annotations

# What a key begins with there, and here.
_KEYS = {
    "data_dir": "datamodule.data_dir",
    "model.channel_mlp_cfg": "model.mlp_cfg",
    "train.cooldown_epochs": "scheduler.cooldown",
    "train.mixup": "datamodule.mixup",
    "train.optimizer": "optimizer",
    "train.optimizer_param_grouping": "optimizer_param_grouping",
    "train.scheduler": "scheduler",
    "trainer.gpus": "trainer.devices",
}
_EXPERIMENTS = {"imagenet-t2tvit-eval": "imagenet/t2tvit/t2tvit14t-eval"}


def with_our_names(override: str) -> str:
    """A text such as "model.channel_mlp_cfg.linear1_cfg.nblocks=8" with the key, or the experiment,
    that is meant here; any other text as it is."""
    key, equals, value = override.partition("=")
    if key == "experiment":
        return f"experiment={_EXPERIMENTS.get(value.removesuffix('.yaml'), value)}"
    signs = key[: len(key) - len(key.lstrip("+"))]
    bare = key[len(signs) :]
    for theirs, ours in _KEYS.items():
        if equals and f"{bare}.".startswith(f"{theirs}."):
            return f"{signs}{ours}{bare.removeprefix(theirs)}={value}"
    return override
