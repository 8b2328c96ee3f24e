"""The command line of tools/train_net.py: flags and config overrides, in any order."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field

from flow_train.cli import Parser, add_dummy_option, add_profile_option

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


@dataclass(frozen=True)
class Options:
    """What the command line says. `device` None lets the device layer choose; `overrides` are
    "key=value" texts in the order given."""

    config_file: str
    resume: bool = False
    eval_only: bool = False
    fast_dev_run: bool = False
    dummy: bool = False
    profile: int | None = None
    device: str | None = None
    overrides: list[str] = field(default_factory=list)


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
    parser.add_argument(
        "--config-file",
        metavar="CONFIG",
        help="config, .py or .yaml (default: the argument CONFIG)",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the last checkpoint in train.output_dir, if any (default: a new run)",
    )
    parser.add_argument(
        "--eval-only",
        action="store_true",
        help="evaluate train.load_weight, or else the last checkpoint in train.output_dir, on the "
        "validation and test data (default: train)",
    )
    parser.add_argument(
        "--fast-dev-run",
        action="store_true",
        help="20 steps, evaluation every 10, a log line for each: does everything work? "
        "(default: the whole run)",
    )
    add_dummy_option(parser, "tokens of the model's vocabulary")
    add_profile_option(parser)
    parser.add_argument(
        "--device", help="device by name (default: ONEFLOW_ACCEL_DEVICE, else the best that works)"
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=argparse.SUPPRESS)
    return parser


def parse_options(argv: Sequence[str]) -> Options:
    """Read the command line.

    Raises:
        UserError: an option that does not exist (names the nearest one), or one without its value.
        SystemExit: after --help.
    """
    parser = build_parser()
    options = vars(parser.parse_intermixed_args(argv))
    if options["config_file"] is None:
        texts = options["overrides"]
        file = next((text for text in texts if "=" not in text and not text.startswith("~")), None)
        if file is None:
            parser.error("no config is given: type its file first, or --config-file FILE")
        texts.remove(file)
        options["config_file"] = file
    return Options(**options)
