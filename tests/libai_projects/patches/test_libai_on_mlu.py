"""LiBai's GPT on an MLU without a card: a fake that computes on the CPU and lacks its operators."""

from __future__ import annotations

import json
from pathlib import Path

from tests.launch import run_process

REFERENCE = json.loads((Path(__file__).parent / "tiny_gpt_losses.json").read_text())


def test_gpt_trains_without_the_missing_operators_on_a_fake_card() -> None:
    losses = ",".join(map(str, REFERENCE["losses"]))
    process = run_process(["-m", "tests.libai_projects.patches.mlu_worker", losses], timeout=200)
    assert process.returncode == 0, process.stdout
    for line in (
        "fused operators are switched off: no fused_* operator has a kernel there",
        "trained on the fake card",
        "dropped out on the fake card",
        "refused a graph",
        "dropped paths on the fake card",
    ):
        assert line in process.stdout, process.stdout
