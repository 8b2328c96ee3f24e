"""Checks of what a run reads: vocabulary, data and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from oneflow_accel.agree import on_rank_0, plain_values
from oneflow_accel.errors import UserError

from libai.config import instantiate, try_get_key
from omegaconf import DictConfig, ListConfig, OmegaConf

from flow_train.checkpoint.folders import newest_checkpoint
from libai_projects.command import output
from libai_projects.command.arguments import Options
from libai_projects.command.config import name_of
from libai_projects.text import token_files
from libai_projects.text.indexed_dataset import MMapTokenDataset
from libai_projects.text.loaders import TokenFiles
from libai_projects.text.masked import MaskedText
from libai_projects.weights import old_runs
from libai_projects.weights.libai_checkpoints import is_libai

# What the keys of values end with that may differ between machines.
OF_A_MACHINE = ("dir", "path", "prefix", "file", "load_weight", "num_workers", "validation_data")

Note = Callable[[Callable[[], object]], bool]


def check_all(cfg: DictConfig, options: Options, note: Note) -> None:
    """Run every check of this file through `note`, which collects what they raise."""
    note(lambda: check_vocabulary(cfg))
    for key, dataset in datasets(cfg):
        note(lambda key=key, dataset=dataset: check_dataset(cfg, key, dataset))
    note(lambda: output.check_output(cfg, options))
    if options.resume and not options.eval_only:
        note(lambda: output.check_resume(cfg))
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
    if name_of(dataset) == MaskedText.__name__:
        MMapTokenDataset(dataset.data_prefix, try_get_key(cfg, "model.cfg.vocab_size_real"))
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
        indexed = (dataset.get("indexed_dataset") or dataset).get("data_prefix")
        if indexed or dataset.get("path"):
            files = [Path(f"{indexed}.bin")] if indexed else token_files.files_of(dataset.path)
            found[f"the bytes of {key}"] = sum(file.stat().st_size for file in files)
    return found


def check_weights(cfg: DictConfig, options: Options) -> None:
    """Check that the weights to start from, or to evaluate, are there."""
    weights, folder = try_get_key(cfg, "train.load_weight", default=""), Path(cfg.train.output_dir)
    if weights:
        if not options.resume or options.eval_only:
            weights_format(weights)
    elif options.eval_only and not (newest_checkpoint(folder) or old_runs.last(folder)):
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
