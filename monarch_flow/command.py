"""What the training and validation command lines share: flags, overrides and errors."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from oneflow_accel.command import Parser, log_to_stdout
from oneflow_accel.command import run as run_command
from oneflow_accel.errors import UserError
from oneflow_accel.launched import launched
from oneflow_accel.launched import rank as launched_rank

from omegaconf import DictConfig, OmegaConf

from flow_train.config.help import help_text
from monarch_flow.config import COMPOSER, check_data_dir

logger = logging.getLogger("oneflow_accel")


_VITAE = "What options of ViTAE's and timm's programs are here: monarch_flow/docs/vitae_options.md"


class _Parser(Parser):
    word = "flag"

    def error(self, message: str) -> NoReturn:
        # ViTAE's programs and timm's take a file there.
        file = "; a file of settings is DIR/experiment/NAME.yaml, for --config-dir DIR"
        more = file if "argument -c/--cfg: invalid" in message else ""
        super().error(f"{message}{more}")

    def unknown(self, name: str) -> str:
        if name in ("-m", "--multirun"):
            return (
                f"there is no flag {name}: a command is one run; several one after the other, each "
                "in a process of its own, are a study, which python -m monarch_flow.compare runs"
            )
        return super().unknown(name)

    def refuse(self, unknown: Sequence[str]) -> None:
        try:
            super().refuse(unknown)
        except UserError as error:
            raise UserError(f"{error}\n{_VITAE}") from None


@dataclass(frozen=True)
class Command:
    """A command that takes a configuration.

    `head` and `keys` are shown by --help. `adjust` may change the typed overrides. `check` looks at
    the configuration before anything runs and raises UserError. `report` gets the metrics of a run,
    on process 0.
    """

    program: str
    head: str = ""
    keys: Sequence[str] = ()
    adjust: Callable[[Sequence[str]], Sequence[str]] = tuple
    check: Callable[[DictConfig], None] = check_data_dir
    report: Callable[[Mapping[str, float]], None] = lambda metrics: None

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Flags and overrides, in any order; UserError names the nearest known flag."""
        parser = _Parser(prog=self.program, add_help=False, allow_abbrev=False)
        parser.add_argument("-h", "--help", action="store_true")
        parser.add_argument("-c", "--cfg", choices=["job"])
        parser.add_argument("--resolve", action="store_true")
        parser.add_argument("-cd", "--config-dir", metavar="DIR")
        flags = [*parser.flags(), "-cjob"]
        others = [text for text in argv if text[:1] == "-" and text.split("=")[0] not in flags]
        # Here, as argparse would read -cfg as -c with the value fg.
        parser.refuse(others)
        options, words = parser.parse_known_args(argv)
        options.overrides = words
        return options

    def prepare(self, argv: Sequence[str]) -> DictConfig | None:
        """The configuration to run, or None where the command line asked for a text, which is
        printed."""
        options = self.parse(argv)
        for text in options.overrides:
            if "=" not in text and Path(text).is_dir():
                raise UserError(f"{text}: a folder of data is given as datamodule.data_dir={text}")
        overrides = list(self.adjust(options.overrides))
        if options.help:
            asked = (overrides, options.config_dir)
            _print(help_text(COMPOSER, *asked, head=self.head, keys=self.keys))
            return None
        composed = COMPOSER.compose_raw(overrides, options.config_dir)
        if options.cfg and not options.resolve:
            _print(OmegaConf.to_yaml(composed.raw, resolve=False))
            return None
        cfg = COMPOSER.resolve(composed)
        if options.cfg:
            _print(OmegaConf.to_yaml(cfg))
            return None
        if not composed.experiment and not options.overrides:
            raise UserError("nothing to do: name an experiment, experiment=NAME; --help lists them")
        self.check(cfg)
        return cfg

    def main(self, argv: Sequence[str] | None) -> int:
        """Run; user errors become lines on stderr and a non-zero exit code."""
        log_to_stdout()
        arguments = sys.argv[1:] if argv is None else argv
        smaller = (
            "take a smaller datamodule.batch_size, more trainer.accumulate_grad_batches, "
            "trainer.precision=bfloat16 or trainer.fsdp=full_shard"
        )
        return run_command(self.program, lambda: self._run(arguments), smaller)

    def _run(self, argv: Sequence[str]) -> None:
        if launched():
            # Here, as --help of one process takes two seconds less without oneflow.
            from oneflow_accel.agree import everywhere

            cfg = everywhere(lambda: self.prepare(argv))
        else:
            cfg = self.prepare(argv)
        if cfg is None:
            return
        if launched_rank() == 0:
            logger.setLevel(logging.DEBUG if cfg.verbose else logging.INFO)
        # Here, as --help and --cfg take a quarter of a second less without it.
        from monarch_flow.engine.run import run

        metrics = run(cfg)
        if launched_rank() == 0:
            self.report(metrics)


def _print(text: str) -> None:
    if launched_rank() == 0:
        print(text, end="" if text.endswith("\n") else "\n")
