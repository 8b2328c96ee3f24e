"""The command `python -m oneflow_accel patch`."""

from __future__ import annotations

import argparse
import sys

from oneflow_accel.errors import PatchError, UserError
from oneflow_accel.patching import disk, session
from oneflow_accel.patching.packages import install_folder
from oneflow_accel.patching.series import patch_root, series_versions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to a parser."""
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument(
        "--apply", action="store_true", help="write the patches that are needed into site-packages"
    )
    action.add_argument("--revert", action="store_true", help="put the original files back")
    action.add_argument("--status", action="store_true", help="list the patches")
    parser.add_argument("--package", help="only this package (default: all that have patches)")


def run(args: argparse.Namespace) -> int:
    """Carry the command out.

    Returns:
        The exit code: 0; 1 if `--status` lists a refused patch; `UserError.EXIT_CODE` on an error.
    """
    try:
        names = _names(args.package)
        if args.status:
            return _print_status(names)
        for name in names:
            files = (
                disk.apply(patch_root(), name, session.find_device)
                if args.apply
                else disk.revert(name)
            )
            done = "patched" if args.apply else "put back"
            print(f"{name}: {done} {', '.join(files)}" if files else f"{name}: nothing to do")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.EXIT_CODE
    return 0


def _names(package: str | None) -> list[str]:
    known = series_versions(patch_root())
    if package is None:
        return [name for name in known if install_folder(name) is not None]
    if package not in known:
        raise PatchError(f"there are no patches for {package!r}, only for {', '.join(known)}")
    return [package]


def _print_status(names: list[str]) -> int:
    shown = [status for status in session.status() if status.package in names]
    for status in shown:
        print(f"{status.package}-{status.version}/{status.name}: {status.state} ({status.reason})")
    return int(any(status.state == "refused" for status in shown))
