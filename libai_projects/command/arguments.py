"""The command line of tools/train_net.py: flags and config overrides, in any order."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import model_validator

from flow_train import cli
from flow_train.cli import Parser
from flow_train.config.flags import Flags, flag
from flow_train.config.keys import Positive

# The config keys that most runs set. tests/libai_projects/train checks that each one exists.
COMMON_KEYS = {
    "dataloader.train.dataset.0.data_prefix": "data set: the path before .idx and .bin",
    "tokenization.tokenizer.vocab_file": "vocab.json of the tokenizer",
    "tokenization.tokenizer.merges_file": "merges.txt of the tokenizer",
    "train.output_dir": "where checkpoints and logs go",
    "train.load_weight": "weights to start from: a LiBai checkpoint or a Hugging Face directory",
    "train.train_iter": "optimizer steps; with train_epoch the larger of the two",
    "train.train_epoch": "passes over the training data",
    "train.train_micro_batch_size": "samples per data-parallel rank and accumulation step",
    "train.num_accumulation_steps": "gradient accumulation",
    "train.global_batch_size": "micro batch x data parallel x accumulation; any two give the third",
    "train.dist.tensor_parallel_size": "processes that share each layer",
    "train.dist.pipeline_parallel_size": "pipeline stages; what is left is data parallel",
    "train.activation_checkpoint.enabled": "recompute activations (graph mode)",
    "train.zero_optimization.enabled": "shard the optimizer (graph mode; .stage: 1, 2 or 3)",
    "train.evaluation.eval_period": "steps between evaluations",
    "train.checkpointer.period": "steps between checkpoints",
    "train.log_period": "steps between log lines",
    "train.seed": "seed of weights, dropout and data order",
    "optim.lr": "learning rate",
    "graph.enabled": "nn.Graph (true) or eager mode (false)",
    "model.cfg.num_layers": "layers of the model",
    "model.cfg.hidden_size": "width of the model",
    "model.cfg.mlp_cfg": "monarch or blockdiag layers in the feed-forward network (null: dense)",
}


class Options(Flags):
    """What the command line says. `overrides` are "key=value" texts in the order given."""

    intermixed: ClassVar[bool] = True

    config_file: str = flag(None, "CONFIG")
    "config, .py or .yaml (default: the argument CONFIG)"
    resume: bool = flag(False)
    "go on from the last checkpoint in train.output_dir, if any (default: a new run)"
    eval_only: bool = flag(False)
    """evaluate train.load_weight, or else the last checkpoint in train.output_dir, on the
    validation and test data (default: train)"""
    fast_dev_run: bool = flag(False)
    """20 steps, evaluation every 10, a log line for each: does everything work? (default: the
    whole run)"""
    dummy: bool = flag(False, text="random tokens of the model's vocabulary, no disk")
    profile: Positive | None = flag(None, "STEPS", cli.PROFILE)
    device: str | None = flag(None, None, cli.DEVICE)
    overrides: list[str] = flag(
        [], "KEY=VALUE", argparse.SUPPRESS, names="overrides", how={"nargs": "*"}
    )

    @model_validator(mode="before")
    @classmethod
    def _with_config(cls, given: dict[str, Any]) -> dict[str, Any]:
        """The config: the first text that is not a flag's value and changes no key."""
        texts = list(given.get("overrides", ()))
        if "config_file" in given:
            return given
        file = next((text for text in texts if "=" not in text and not text.startswith("~")), None)
        if file is None:
            raise ValueError("no config is given: type its file first, or --config-file FILE")
        texts.remove(file)
        return {**given, "config_file": file, "overrides": texts}


def build_parser() -> Parser:
    """The parser of tools/train_net.py."""
    width = max(map(len, COMMON_KEYS))
    keys = "\n".join(f"  {name:{width}}  {text}" for name, text in COMMON_KEYS.items())
    parser = Parser(
        prog="train_net.py",
        description="Train or evaluate a model of a LiBai config.",
        usage="%(prog)s CONFIG [flags] [KEY=VALUE ...]   (in any order)",
        epilog="overrides: KEY=VALUE changes a key of the config, +KEY=VALUE adds one; lists as "
        f"[1,2], nothing as null.\nThe keys that most runs set:\n{keys}\n"
        "All keys and their values of a run: OUTPUT_DIR/config.yaml.",
        allow_abbrev=False,
    )
    Options.add_to(parser)
    return parser


def parse_options(argv: Sequence[str]) -> Options:
    """Read the command line; UserError for an option that does not exist (names the nearest one),
    or one without its value."""
    return Options.parse(build_parser(), argv)
