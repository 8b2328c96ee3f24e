"""Trains or evaluates a vision model with dense or structured layers.

    python -m monarch_flow.train experiment=imagenet/vit/vit-s-butterflyblockdiag-mlp \
        datamodule.data_dir=DIR
    python -m oneflow.distributed.launch --nproc_per_node 4 -m monarch_flow.train experiment=...

`python -m monarch_flow.train --help` lists flags, groups with their options, and keys.
"""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

try:
    from oneflow_accel.errors import UserError

    from omegaconf import DictConfig, OmegaConf

    from monarch_flow.config import check_data_dir, compose_raw, resolve
    from monarch_flow.config_help import help_text
    from monarch_flow.engine.run import run
except ImportError as error:
    sys.exit(
        f"{error}. monarch_flow.train runs in the project's environment: type `make setup` in the "
        "repository, then `source .venv/bin/activate`."
    )

PROGRAM = "monarch_flow.train"
INTERRUPTED = 130

logger = logging.getLogger("oneflow_accel")


class _Parser(argparse.ArgumentParser):
    """Raises what is wrong instead of ending the process: only one rank may print it."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help lists the flags")


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """Flags and overrides, in any order.

    Raises:
        UserError: a flag that does not exist (names the nearest), or one without its value.
    """
    parser = _Parser(prog=PROGRAM, add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-c", "--cfg", choices=["job"])
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("-cd", "--config-dir", metavar="DIR")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options, unknown = parser.parse_known_intermixed_args(list(argv))
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        near = difflib.get_close_matches(unknown[0].split("=")[0], flags, n=1)
        hint = f"did you mean {near[0]}?" if near else "--help lists the flags"
        raise UserError(f"there is no flag {unknown[0]}; {hint}")
    return options


def prepare(argv: Sequence[str]) -> DictConfig | None:
    """The configuration to run, or None where the command line asked for a text, which is printed.

    Raises:
        UserError: anything that is wrong with the command line or the configuration; the same in
            every process of a job.
    """
    options = parse_options(argv)
    if options.help:
        _print(help_text(options.overrides, options.config_dir))
        return None
    composed = compose_raw(options.overrides, options.config_dir)
    if options.cfg and not options.resolve:
        _print(OmegaConf.to_yaml(composed.raw, resolve=False))
        return None
    cfg = resolve(composed)
    if options.cfg:
        _print(OmegaConf.to_yaml(cfg))
        return None
    if not composed.experiment and not options.overrides:
        raise UserError("nothing to do: name an experiment, experiment=NAME; --help lists them")
    check_data_dir(cfg)
    return cfg


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; user errors become lines on stderr and a non-zero exit code."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stdout)
    try:
        cfg = prepare(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        if _rank() == 0:
            _complain(error)
        return UserError.EXIT_CODE
    if cfg is None:
        return 0
    if _rank() == 0:
        logger.setLevel(logging.DEBUG if cfg.verbose else logging.INFO)
    try:
        run(cfg)
    except UserError as error:
        _complain(error)
        return UserError.EXIT_CODE
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; continue with resume=auto\n")
        return INTERRUPTED
    return 0


def _complain(error: UserError) -> None:
    # One string, so that several processes do not write into each other's lines.
    where = f" (process {_rank()})" if _rank() else ""
    sys.stderr.write(f"{PROGRAM}: error{where}: {error}\n")


def _print(text: str) -> None:
    if _rank() == 0:
        print(text, end="" if text.endswith("\n") else "\n")


def _rank() -> int:
    # As the launcher says; oneflow would have to reach the other processes first.
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdigit() else 0


if __name__ == "__main__":
    sys.exit(main())
