"""`python -m oneflow_accel`: what works on this machine, and why the rest does not.

Exit code 0; 2 if the device asked for (--device or ONEFLOW_ACCEL_DEVICE) cannot be used or the
environment is wrong in another way.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from oneflow_accel import backends, command, conformance, report
from oneflow_accel.errors import UserError
from oneflow_accel.kernels import registry
from oneflow_accel.patching import disk as patch_command

from rich.console import Console

# Reasons are sentences; in a pipe or a file there is room for them.
_WIDTH_WITHOUT_TERMINAL = 120


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit code."""
    return command.run("oneflow_accel", lambda: _run(_parser().parse_args(argv)))


def _run(args: argparse.Namespace) -> int:
    if args.command == "patch":
        return patch_command.run(args)
    if args.command == "kernels":
        return report.list_kernels(args, _width())
    if args.command == "conformance":
        return conformance.run(args, _width())
    if args.command == "explain":
        return _explain(args)
    state = report.collect(args.device)
    if args.json:
        print(json.dumps(state, indent=2))
    else:
        report.render(state, Console(width=_width()))
    if state["selection"]["device"] is None:
        raise UserError(state["selection"]["why"])
    return 0


def _width() -> int | None:
    return None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL


def _explain(args: argparse.Namespace) -> int:
    # A device need not be there to be asked about.
    known = args.device in backends.available_backends()
    device = args.device if known else backends.resolve(args.device).backend.name
    operations = registry.operations()
    for name in args.operations or operations:
        print(registry.explain(name, device))
    return 0


def _parser() -> command.Parser:
    parser = command.Parser(prog="python -m oneflow_accel", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the state as JSON")
    parser.add_argument("--device", help="device to use; exit code 2 if it cannot be used")
    commands = parser.add_subparsers(
        dest="command", metavar="[patch | kernels | explain | conformance]"
    )
    patch = commands.add_parser("patch", help="apply patches to installed packages, or revert them")
    patch_command.add_arguments(patch)
    kernels = commands.add_parser("kernels", help="which CPU kernel each operator gets, and why")
    report.add_kernel_arguments(kernels)
    explain = commands.add_parser(
        "explain", help="what computes an operation on each device, which was chosen, and why"
    )
    explain.add_argument("operations", nargs="*", metavar="OP", help="default: all operations")
    conforms = commands.add_parser(
        "conformance", help="whether a device does what this code base asks of one, check by check"
    )
    conformance.add_arguments(conforms)
    return parser


if __name__ == "__main__":
    sys.exit(main())
