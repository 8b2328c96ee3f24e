"""Where the time of a step goes: which parts there are, and that the figures add up."""

from __future__ import annotations

import oneflow as flow
import pytest

from benchmarks import breakdown
from benchmarks.breakdown import OPTIMIZER, REST, STEP, Breakdown, Row
from flow_train.metrics.macs import count_macs
from monarch_flow.models import create_model

VIT = {"embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 10}


def measured(name: str, size: int, **arguments: object) -> tuple[Breakdown, dict[str, Row]]:
    model = create_model(name, img_size=size, **arguments).train()
    images = flow.randn(2, getattr(model, "in_chans", 3), size, size)
    found = Breakdown(model, images, lambda: None)
    found.round()
    return found, {row.kind: row for row in found.rows()}


def test_a_part_is_without_the_parts_in_it() -> None:
    found, rows = measured("vit_tiny_patch4_28", 28, **VIT)
    found.forget()
    found.steps.append((1.0, 2.0, 0.25))
    for name, part in found.parts.items():
        block = name.startswith("blocks.") and name.count(".") == 1
        part.seconds.append((0.25, 0.5) if block else (0.03125, 0.0625))
    rows = {row.kind: row for row in found.rows()}
    # In a block: two norms, attention and an MLP.
    cells = rows["sums and maps of cells"]
    assert (cells.modules, cells.forward, cells.backward) == (2, 0.25, 0.5)
    assert (rows["MLP"].modules, rows["layer norm"].modules) == (2, 5)
    assert (rows["attention"].forward, rows["attention"].backward) == (0.0625, 0.125)
    assert (rows[OPTIMIZER].forward, rows[OPTIMIZER].backward) == (0, 0.25)
    assert (rows[STEP].forward, rows[STEP].backward) == (1.0, 2.25)
    # Two blocks, the last norm, the embedding and the head.
    assert rows[REST].forward == 1.0 - 2 * 0.25 - 3 * 0.03125
    assert rows[REST].backward == 2.0 - 2 * 0.5 - 3 * 0.0625


def test_every_multiply_accumulate_is_in_one_row() -> None:
    found, rows = measured("vit_tiny_patch4_28", 28, mlp_cfg="monarch", **VIT)
    parts = [row for kind, row in rows.items() if kind != STEP]
    assert sum(row.macs for row in parts) == rows[STEP].macs == count_macs(found.model, 28)
    assert rows["MLP"].macs == 2 * 50 * 2 * (4 * 8 * 8 + 4 * 32 * 8)
    assert rows[REST].macs == 0
    assert all(row.seconds > 0 for row in parts if row.kind not in (REST, "sums and maps of cells"))
    assert all(not module._forward_hooks for module in found.model.modules())


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    small = [f"{key}={value}" for key, value in VIT.items()]
    command = ["vit_tiny_patch4_28", *small, "--batch", "2", "--rounds", "1"]
    assert breakdown.main([*command, "--beside", "mlp_cfg=monarch"]) == 0
    lines = capsys.readouterr().out.splitlines()
    columns = lines[0].count("|")
    assert [line.count("|") for line in lines if line.startswith("|")] == [columns] * 11
    assert any(line.startswith("| MLP (2) |") for line in lines)
    assert lines[-1].startswith("vit_tiny_patch4_28 embed_dim=32")
    assert "mlp_cfg=monarch: " in lines[-1]
    assert breakdown.main(["vit_tinny", "--batch", "2"]) == 2
    assert "vit_tiny" in capsys.readouterr().err
