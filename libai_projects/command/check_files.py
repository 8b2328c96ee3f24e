"""Checks of what a run reads and writes: vocabulary, data, weights, output directory."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from oneflow_accel import distributed
from oneflow_accel.agree import on_rank_0, plain_values
from oneflow_accel.errors import UserError

import yaml
from libai.config import instantiate, try_get_key
from omegaconf import DictConfig, ListConfig, OmegaConf

from flow_train.checkpoint.folders import newest_checkpoint
from flow_train.metrics.work import adamw_states
from libai_projects.command.arguments import Options
from libai_projects.command.config import name_of
from libai_projects.models.families import table_of
from libai_projects.text import token_files
from libai_projects.text.indexed_dataset import MMapTokenDataset
from libai_projects.text.loaders import TokenFiles
from libai_projects.weights import old_runs
from libai_projects.weights.libai_checkpoints import is_libai

CONFIG_BACKUP = "config.yaml"
# These keys must be equal for a checkpoint to fit the model.
_SHAPE_KEYS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "max_seq_length",
    "vocab_size_real",
)
# What the keys of values end with that may differ between machines.
OF_A_MACHINE = ("dir", "path", "prefix", "file", "load_weight", "num_workers", "validation_data")

Note = Callable[[Callable[[], object]], bool]


def check_all(cfg: DictConfig, options: Options, note: Note) -> None:
    """Run every check of this file through `note`, which collects what they raise."""
    note(lambda: check_vocabulary(cfg))
    for key, dataset in datasets(cfg):
        note(lambda key=key, dataset=dataset: check_dataset(cfg, key, dataset))
    note(lambda: check_output(cfg, options))
    if options.resume and not options.eval_only:
        note(lambda: check_resume(cfg))
    note(lambda: on_rank_0(lambda: check_weights(cfg, options)))


def datasets(cfg: DictConfig) -> Iterator[tuple[str, DictConfig]]:
    """Each data set of a config with its key: those of dataloader.train, then dataloader.test."""
    train = try_get_key(cfg, "dataloader.train.dataset", default=None)
    if isinstance(train, ListConfig):
        for index, dataset in enumerate(train):
            yield f"dataloader.train.dataset.{index}", dataset
    elif train is not None:
        yield "dataloader.train.dataset", train
    for index, loader in enumerate(try_get_key(cfg, "dataloader.test", default=None) or []):
        yield f"dataloader.test.{index}.dataset", loader.dataset


def check_vocabulary(cfg: DictConfig) -> None:
    """Check that the tokenizer can be made (UserError), and fill in how many tokens it knows."""
    tokenizer = try_get_key(cfg, "tokenization.tokenizer", default=None)
    if tokenizer is None:
        return
    try:
        made = instantiate(tokenizer)
    except UserError as error:
        hint = (
            "set tokenization.tokenizer.vocab_file and .merges_file, or MAGICPROMPT_VOCAB and "
            "MAGICPROMPT_MERGES"
        )
        raise UserError(f"{error} ({hint})") from error
    if "vocab_size_real" in (try_get_key(cfg, "model.cfg", default=None) or {}):
        cfg.model.cfg.vocab_size_real = made.vocab_size


def check_dataset(cfg: DictConfig, key: str, dataset: DictConfig) -> None:
    """Check token files, and a data set in the mmap format: whole files, and of the latter enough
    for a batch of each split."""
    if name_of(dataset) == TokenFiles.__name__:
        instantiate(dataset)
        return
    indexed = dataset.get("indexed_dataset")
    if indexed is None or indexed.get("data_impl", "mmap") != "mmap":
        return
    vocabulary = try_get_key(cfg, "model.cfg.vocab_size_real", default=None)
    try:
        tokens = MMapTokenDataset(indexed.data_prefix, vocabulary).tokens
    except UserError as error:
        raise UserError(f"{key}.data_prefix: {error}") from error
    length = dataset.get("max_seq_length")
    if not length or not key.startswith("dataloader.train"):
        return
    samples = (tokens - 1) // length
    shares = [list(split) for split in try_get_key(cfg, "dataloader.train.splits", default=[])]
    index = int(key.rsplit(".", 1)[-1]) if key[-1].isdigit() else 0
    share = shares[index] if index < len(shares) else [1.0]
    if len(share) != 3 or min(share) < 0 or not sum(share):
        raise UserError(
            f"dataloader.train.splits={shares}: three shares for each data set, such as "
            "[[949,50,1]] for training, validation and test; 0 takes nothing"
        )
    training = int(samples * share[0] / sum(share))
    batch = cfg.train.get("global_batch_size") or 1
    trained_on = [each for each in shares if each[:1] != [0]]
    if training < batch and trained_on in ([], [share]):
        raise UserError(
            f"{key}: {tokens} tokens make {samples} sequences of max_seq_length={length}, "
            f"{training} of them for training, fewer than one batch of "
            f"train.global_batch_size={batch}; take more data, shorter sequences or smaller batches"
        )


def check_output(cfg: DictConfig, options: Options) -> None:
    """Check that train.output_dir can be written to and has room for two checkpoints."""
    output = Path(cfg.train.output_dir)
    existing = output
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise UserError(f"train.output_dir={output}: {existing} is a file, not a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(
            f"train.output_dir={output}: no permission to write to {existing}; choose another one"
        )
    if options.eval_only:
        return
    needed = 2 * checkpoint_bytes(cfg)
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise UserError(
            f"train.output_dir={output}: {_size(free)} are free on its disk, and two checkpoints "
            f"of this model (one kept while the next is written) take {_size(needed)}; make room "
            "or choose another disk"
        )


def checkpoint_bytes(cfg: DictConfig) -> int:
    """About how large a checkpoint is: float32 weights and the two values that AdamW keeps."""
    model, target = (try_get_key(cfg, f"model.{key}", default=None) for key in ("cfg", "_target_"))
    try:
        states = adamw_states(table_of(target).count(model))
    except (AttributeError, KeyError, TypeError):
        # Another model, whose weights have other names for their sizes.
        return 0
    return states["weights"] + states["AdamW's moments"]


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def of_all_machines(cfg: DictConfig, options: Options) -> dict[str, Any]:
    """What must be the same on all machines of a job: flags, and the config but for paths."""
    flags = {"--resume": options.resume, "--eval-only": options.eval_only}
    flags |= {"--dummy": options.dummy, "--fast-dev-run": options.fast_dev_run}
    plain = OmegaConf.to_container(cfg, resolve=True)
    return {**flags, "--profile": options.profile, **plain_values(plain, OF_A_MACHINE)}


def contents(cfg: DictConfig) -> dict[str, Any]:
    """The same of what the files say: the vocabulary, and the sizes of the data sets."""
    key = "model.cfg.vocab_size_real"
    found = {key: try_get_key(cfg, key, default=None)}
    for key, dataset in datasets(cfg):
        indexed = (dataset.get("indexed_dataset") or {}).get("data_prefix")
        if indexed or dataset.get("path"):
            files = [Path(f"{indexed}.bin")] if indexed else token_files.files_of(dataset.path)
            found[f"the bytes of {key}"] = sum(file.stat().st_size for file in files)
    return found


def check_resume(cfg: DictConfig) -> None:
    """Check that the run to resume, if there is one, is of this model; and that one of LiBai's form
    is whole, and where the main process reads it. Every process calls it."""
    output = Path(cfg.train.output_dir)

    def check() -> bool:
        found = newest_checkpoint(output) or old_runs.last(output)
        if found is not None:
            check_same_model(cfg, output / CONFIG_BACKUP)
        return found is not None

    found = on_rank_0(check)
    newest = [str(path) for path in old_runs.numbered(output)][-1:]
    everywhere = distributed.all_gather_json([socket.gethostname(), newest])
    elsewhere = next((each for each in everywhere if each[1]), None)
    if elsewhere and not found:
        raise UserError(
            f"--resume: {elsewhere[1][0]} is on {elsewhere[0]}, and process 0 on "
            f"{everywhere[0][0]}, which reads it for all, has none: copy the run's folder there, "
            "or let that machine be the first"
        )


def check_same_model(cfg: DictConfig, backup: Path) -> None:
    """Check that an earlier run's config.yaml has the same model; the error lists what differs."""
    # Without a readable backup the shapes in the checkpoint decide.
    earlier = try_get_key(OmegaConf.create(read_backup(backup)), "model.cfg", default=None)
    if not isinstance(earlier, DictConfig):
        return
    now = try_get_key(cfg, "model.cfg", default={})
    different = [
        f"{key}={now.get(key)} (there: {earlier[key]})"
        for key in _SHAPE_KEYS
        if key in earlier and key in now and earlier[key] != now.get(key)
    ]
    if different:
        raise UserError(
            f"{backup.parent} holds a run of another model: model.cfg.{', '.join(different)}; "
            "choose another train.output_dir, or the model of that run"
        )


class _PlainLoader(yaml.SafeLoader):
    """Reads what LiBai writes; a Python tuple becomes a list, any other Python object None."""


_PlainLoader.add_constructor(
    "tag:yaml.org,2002:python/tuple", lambda loader, node: loader.construct_sequence(node)
)
_PlainLoader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


def read_backup(backup: Path) -> dict[str, Any]:
    """A run's config.yaml as plain values, empty where it cannot be read."""
    try:
        return dict(yaml.load(backup.read_text(encoding="utf-8"), Loader=_PlainLoader))
    except (OSError, yaml.YAMLError, TypeError, ValueError):
        return {}


def check_weights(cfg: DictConfig, options: Options) -> None:
    """Check that the weights to start from, or to evaluate, are there."""
    weights, output = try_get_key(cfg, "train.load_weight", default=""), Path(cfg.train.output_dir)
    if weights:
        if not options.resume or options.eval_only:
            weights_format(weights)
    elif options.eval_only and not (newest_checkpoint(output) or old_runs.last(output)):
        raise UserError(
            f"--eval-only: {cfg.train.output_dir} holds no checkpoint; set train.output_dir to "
            "that of the run, or train.load_weight to the weights"
        )


def weights_format(path: str) -> str:
    """ "libai" or "huggingface", by what lies in the directory; a UserError if it is neither."""
    folder = Path(path)
    if is_libai(folder):
        return "libai"
    if not folder.exists():
        raise UserError(
            f"train.load_weight={path} does not exist; it names a checkpoint such as "
            "OUTPUT_DIR/checkpoints/step-00001000, or a Hugging Face directory"
        )
    if (folder / "config.json").is_file():
        return "huggingface"
    raise UserError(
        f"train.load_weight={path} is neither a checkpoint of a run (a directory with state.json, "
        "or LiBai's with model/) nor a Hugging Face one (with config.json)"
    )
