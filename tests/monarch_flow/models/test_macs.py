"""The counter of multiply-accumulates, against formulas worked out by hand, and its command."""

from __future__ import annotations

import oneflow as flow
import pytest
from oneflow import nn

from flow_train.metrics.macs import (
    count_macs,
    count_parameters,
    macs_by_module,
    macs_of_call,
    macs_table,
)
from monarch_flow.models import create_model
from monarch_flow.models.__main__ import main

VIT = {"embed_dim": 32, "depth": 3, "num_heads": 4, "num_classes": 10}


def test_any_model_and_any_call() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.same = self.linear
            self.conv = nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2)

        def forward(self, x: flow.Tensor, image: flow.Tensor) -> flow.Tensor:
            return self.same(self.linear(x)).sum() + self.conv(image).sum()

    model = Twice().train()
    modules = macs_of_call(model, flow.randn(2, 5, 6), flow.randn(1, 4, 8, 8))
    assert [(m.name, m.macs) for m in modules] == [
        ("linear", 2 * 10 * 36),
        ("conv", 8 * 16 * 2 * 9),
    ]
    assert modules[0].shape == (2, 5, 6)
    assert model.training
    assert not model.linear._forward_hooks


def test_counting_leaves_no_trace_where_the_forward_fails() -> None:
    model = create_model("vit_tiny_patch4_28", **VIT).train()
    with pytest.raises(ValueError, match="images"):
        count_macs(model, 32)
    assert model.training
    assert all(not module._forward_hooks for module in model.modules())


def test_table_adds_up_and_joins_equal_blocks() -> None:
    model = create_model("t2t_vit_7", img_size=32, embed_dim=32, num_heads=4)
    parameters = count_parameters(model)
    text = macs_table(macs_by_module(model, 32), parameters.total)
    lines = {line.split()[0]: line for line in text.splitlines()}
    assert lines["blocks.*.mlp.fc1"].split()[1:3] == ["Linear", "7"]
    assert f"{parameters.total:,}" in lines["all"]
    assert f"{count_macs(model, 32) / 1e6:,.2f}" in lines["all"]
    # Of a performer itself: its random features.
    assert "2,048" in lines["patch_embed.attention1"]


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "vit_small_patch16_224" in capsys.readouterr().out
    assert main(["vitae*_S*"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "ViTAE_basic_Small"
    ]
    assert main(["swin*"]) == 2
    assert "no model fits swin*" in capsys.readouterr().err
    assert main(["vit_tiny_patch4_28", "embed_dim=32", "depth=1", "mlp_cfg=monarch"]) == 0
    assert "MonarchLinear" in capsys.readouterr().out
    assert main(["vit_tiny_patch4_28", "mlp_cfg=monach"]) == 2
    assert "did you mean 'monarch'" in capsys.readouterr().err
    assert main(["vit_tiny_patch4_28", "depth"]) == 2
    assert "key=value" in capsys.readouterr().err
