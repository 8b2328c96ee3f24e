"""Fits a config to a device: what the device cannot do is switched off, and a line says so."""

from __future__ import annotations

import copy
from pathlib import Path

from oneflow_accel import precision
from oneflow_accel.agree import require_same
from oneflow_accel.backends.base import Backend

from libai.config import LazyCall, try_get_key
from omegaconf import DictConfig, ListConfig, OmegaConf

from flow_train.metrics.profile import ProfileSteps
from libai_projects.command.config import name_of
from libai_projects.models.gpt2.options import FUSIONS
from libai_projects.text import token_files
from libai_projects.text.loaders import RandomTokens
from libai_projects.text.token_files import HELD_OUT_SUFFIX


def adapt_to_device(cfg: DictConfig, backend: Backend) -> list[str]:
    """Change `cfg` in place so that `backend` can run it; one line per change, for the log."""
    lines: list[str] = []

    def switch_off(key: str, feature: str, value: object = False) -> None:
        support = backend.supports(feature)
        if try_get_key(cfg, key, default=None) not in (None, False) and not support:
            OmegaConf.update(cfg, key, value)
            text = "null" if value is None else str(value).lower()
            lines.append(f"{backend.name}: {key}={text}: {support.reason}")

    feature = precision.feature_of(amp_precision(cfg, default="float16"))
    if feature is not None:
        switch_off("train.amp.enabled", feature)
    switch_off("graph.enabled", "graph")
    if name_of(cfg.get("optim")) in ("Adam", "AdamW"):
        switch_off("graph.enabled", "graph_adamw")
    for fusion in FUSIONS:
        switch_off(f"model.cfg.{fusion}", "fused_transformer")
    switch_off("optim.params.clip_grad_max_norm", "gradient_clipping", None)
    return lines


def amp_precision(cfg: DictConfig, default: str = "float32") -> str:
    """The precision that the run trains in; `default` where train.amp is not enabled."""
    if not try_get_key(cfg, "train.amp.enabled", default=False):
        return default
    return precision.canonical(try_get_key(cfg, "train.amp.precision", default="float16"))


def complete(cfg: DictConfig) -> None:
    """Fill in what older or shorter configs leave out, and make numbers what LiBai needs."""
    for key in ("train_micro_batch_size", "global_batch_size", "num_accumulation_steps"):
        cfg.train.setdefault(key, None)
    for key, value in (("load_weight", ""), ("seed", 1234), ("start_iter", 0), ("log_period", 20)):
        cfg.train.setdefault(key, value)
    if try_get_key(cfg, "dataloader.train.splits", default=None) is not None:
        # LiBai divides the shares in place, which numpy refuses for whole numbers.
        cfg.dataloader.train.splits = [
            [float(share) for share in split]
            for split in cfg.dataloader.train.splits
            if isinstance(split, ListConfig)
        ]


def use_held_out(cfg: DictConfig) -> list[str]:
    """Validate on PREFIX_valid, which `prepare.py --validation` has held out, where it is there, or
    on the token files of `dataloader.validation_data`, and train on validation's share of the
    blocks. Every process calls it; returns lines for the log."""
    datasets = try_get_key(cfg, "dataloader.train.dataset", default=None)
    splits = try_get_key(cfg, "dataloader.train.splits", default=None) or []
    # Other splits stay as they are; wrong ones are for the checks to report.
    if not isinstance(datasets, ListConfig) or len(datasets) != 1:
        return []
    if [len(split) for split in splits] != [3]:
        return []
    key = "path" if "path" in datasets[0] else "data_prefix"
    if key == "path":
        held_out = cfg.dataloader.get("validation_data") or token_files.held_out(datasets[0].path)
        there = held_out is not None
    else:
        held_out = f"{datasets[0].get(key)}{HELD_OUT_SUFFIX}"
        there = Path(f"{held_out}.idx").is_file()
    require_same({"held-out data beside those of training": there})
    if not there:
        return []
    training, validation, test = splits[0]
    datasets.append(copy.deepcopy(datasets[0]))
    datasets[1][key] = held_out
    cfg.dataloader.train.splits = [[training + validation, 0.0, test], [0.0, 1.0, 0.0]]
    cfg.dataloader.train.weights = [1.0, 1.0]
    return [
        f"validation is on {held_out}, and all of the other data but the test's is for training"
    ]


def use_dummy(cfg: DictConfig) -> list[str]:
    """Train on random tokens in place of files; no tokenizer is needed. Returns lines for the
    log."""
    cfg.tokenization = None
    cfg.dataloader.train.dataset = [
        LazyCall(RandomTokens)(
            vocab_size=cfg.model.cfg.get("vocab_size_real") or cfg.model.cfg.vocab_size,
            max_seq_length=cfg.model.cfg.max_seq_length,
        )
    ]
    cfg.dataloader.train.splits, cfg.dataloader.train.weights = [[949.0, 50.0, 1.0]], [1.0]
    cfg.dataloader.test = []
    if "masked_lm_only" in cfg.model.cfg:
        # There are no pairs of sentences.
        cfg.model.cfg.masked_lm_only = True
    return ["--dummy: random tokens, so the loss stays near that of guessing"]


def for_profile(cfg: DictConfig, steps: int) -> list[str]:
    """Make the run one of --profile: so many steps in eager mode as a profile needs, no evaluation.
    Returns lines for the log."""
    cfg.train.train_epoch, cfg.train.train_iter = 0, ProfileSteps.all_steps_of(steps)
    cfg.train.output_dir = str(Path(cfg.train.output_dir) / "profile")
    if "evaluation" in cfg.train:
        cfg.train.evaluation.enabled = False
    if not cfg.graph.enabled:
        return []
    cfg.graph.enabled = False
    return ["--profile is of eager mode: graph.enabled=false"]


def shorten(cfg: DictConfig) -> None:
    """Make the run one of --fast-dev-run: 20 steps, evaluation every 10, a log line for each."""
    train = cfg.train
    train.train_epoch = 0
    train.train_iter = 20
    train.log_period = 1
    if "evaluation" in train:
        train.evaluation.eval_period = 10
        train.evaluation.eval_after_n_epoch = None
        train.evaluation.eval_iter = min(10, train.evaluation.eval_iter)
    if "checkpointer" in train:
        train.checkpointer.period = 10
        train.checkpointer.save_model_after_n_epoch = None
