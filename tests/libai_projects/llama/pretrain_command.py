"""pretrain.py as its command runs it, with LiBai imported beforehand, for a CommandServer."""

from __future__ import annotations

from oneflow_accel.command import run

from libai_projects.projects.Llama import pretrain
from libai_projects.tools import train_net  # noqa: F401 - takes its time


def main(argv: list[str]) -> int:
    return run("pretrain.py", lambda: pretrain.main(argv))
