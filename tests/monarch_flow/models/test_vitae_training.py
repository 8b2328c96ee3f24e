"""Randomness in ViTAE's training, training under nn.Graph, and copies for inference."""

from __future__ import annotations

from typing import Any

import oneflow_accel
from oneflow_accel.inference import prepare

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from flow_train.optim import build_optimizer
from monarch_flow.models import create_model
from monarch_flow.models.attention import TokenPerformer
from monarch_flow.models.blocks import map_to_tokens, tokens_to_map
from monarch_flow.models.vitae import NormalCell
from tests.monarch_flow.models.training_steps import eager_step, graph_step
from tests.tolerances import Tolerance, assert_close

NARROW: dict[str, Any] = {
    "embed_dims": [8, 8, 16],
    "token_dims": [8, 16, 32],
    "depth": 2,
    "num_heads": 4,
    "conv_groups": 8,
    "num_classes": 5,
    "img_size": 32,
}
NARROW_PATCH: dict[str, Any] = {
    "embed_dim": 32,
    "patch_size": 8,
    "depth": 2,
    "num_heads": 4,
    "conv_groups": 8,
    "num_classes": 5,
    "img_size": 32,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("ViTAE_basic_Tiny", NARROW),
    "Monarch": ("ViTAE_basic_Tiny", {**NARROW, "mlp_cfg": "monarch"}),
    "patches": ("ViTAE_basic_Base", NARROW_PATCH),
}


def test_the_three_branches_of_a_cell_are_left_out_independently() -> None:
    cell = NormalCell(
        8, 2, 2.0, 4, drop=0.0, attn_drop=0.0, drop_path_rate=0.5, mlp_cfg=None, attnlinear_cfg=None
    ).train()
    for parameter in cell.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, 0.0, 0.3)
    x, grid = flow.randn(800, 4, 8), (2, 2)
    with flow.no_grad():
        out = cell(x, grid).numpy()
        # The convolutions see what comes in, and attention its norm.
        local = map_to_tokens(cell.PCM(tokens_to_map(x, grid)))
        mixed = cell.attn(cell.norm1(x))
        results = []
        for kept in range(8):
            keep_local, keep_mixed, keep_mlp = (2 * (kept >> bit & 1) for bit in range(3))
            middle = x + keep_mixed * mixed + keep_local * local
            results.append((middle + keep_mlp * cell.mlp(cell.norm2(middle))).numpy())
    distances = np.stack([np.abs(out - result).max((1, 2)) for result in results])
    assert distances.min(0).max() < 1e-4
    counts = np.bincount(distances.argmin(0), minlength=8)
    # 100 expected of each, with a standard deviation of 9.
    assert counts.min() > 60, counts


def test_performers_drop_out_a_tenth_in_training_whatever_the_rates_of_the_model() -> None:
    performer = TokenPerformer(12, 16).train()
    nn.init.zeros_(performer.proj.weight)
    nn.init.ones_(performer.proj.bias)
    x = flow.randn(4, 50, 12)
    value = performer.kqv(performer.norm1(x)).numpy()[:, :, 32:]
    added = performer.attention(x).numpy() - value
    dropped = np.abs(added) < 1e-5
    # Of 3,200, with a standard deviation of 17.
    assert abs(dropped.sum() - 320) < 80
    np.testing.assert_allclose(added[~dropped], 1 / 0.9, rtol=1e-4)
    model = create_model("ViTAE_basic_Tiny", **NARROW).train()
    images = flow.randn(2, 3, 32, 32)
    assert np.abs(model(images).numpy() - model(images).numpy()).max() > 1e-6
    model.eval()
    np.testing.assert_array_equal(model(images).numpy(), model(images).numpy())


# Compiling a graph takes a second for each cell; dense ones are in test_vitae_values.py.
@pytest.mark.parametrize("case", ["Monarch", "patches"])
def test_graph_and_eager_train_alike(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without dropout; AdamW would make whole steps of rounding in biases before batch norm."""
    monkeypatch.setattr("monarch_flow.models.attention.DROPOUT", 0.0)
    name, arguments = CASES[case][0], {**CASES[case][1], "depth": 1}
    images, labels = flow.randn(4, 3, 32, 32), flow.tensor([0, 1, 2, 3])
    losses, states = [], []
    start = create_model(name, **arguments).state_dict()
    for in_graph in (False, True):
        model = create_model(name, **arguments).train()
        model.load_state_dict({key: value.clone() for key, value in start.items()})
        optimizer = build_optimizer(model, {"name": "sgd", "lr": 0.05, "momentum": 0.9})
        step = graph_step(model, optimizer) if in_graph else eager_step(model, optimizer)
        losses.append([float(step(images, labels).numpy()) for _ in range(3)])
        states.append({key: value.numpy() for key, value in model.state_dict().items()})
        _check_frozen(model, optimizer, start)
    assert losses[0][2] < losses[0][0]
    tolerance = Tolerance(rtol=1e-5, atol=1e-6)
    reason = "losses of training, not one operation"
    assert_close(np.array(losses[1]), np.array(losses[0]), override=tolerance, reason=reason)
    running = [key for key in start if key.endswith(("running_mean", "running_var"))]
    assert running
    for key in running:
        assert np.abs(states[0][key] - start[key].numpy()).max() > 1e-4, key
        assert_close(states[1][key], states[0][key], reduced=1000)


def _check_frozen(
    model: nn.Module, optimizer: flow.optim.Optimizer, start: dict[str, flow.Tensor]
) -> None:
    """The random features get no gradient and no moments, and stay what they were."""
    frozen = {key: p for key, p in model.named_parameters() if not p.requires_grad}
    assert set(frozen) == {key for key in start if key.endswith(".attn.w")}
    for key, parameter in frozen.items():
        assert parameter.grad is None
        np.testing.assert_array_equal(parameter.numpy(), start[key].numpy())
    held = {id(p) for group in optimizer.param_groups for p in group.parameters}
    assert not held & {id(parameter) for parameter in frozen.values()}


@pytest.mark.parametrize("case", list(CASES))
def test_copies_for_inference_give_the_same_logits(case: str) -> None:
    name, arguments = CASES[case]
    model = create_model(name, drop_rate=0.1, drop_path_rate=0.1, **arguments).train()
    nn.init.normal_(model.head.weight, 0.0, 0.3)
    images = flow.randn(4, 3, 32, 32)
    # Statistics of batch norm that are not the initial ones.
    model(images)
    model.eval()
    with flow.no_grad():
        expected = model(images).numpy()
        assert_close(prepare(model)(images).numpy(), expected, reduced=100)
        if not oneflow_accel.current_backend().supports("bfloat16_inference"):
            pytest.skip(oneflow_accel.current_backend().supports("bfloat16_inference").reason)
        logits = prepare(model, dtype=flow.bfloat16)(images)
    assert logits.dtype == flow.float32
    # Some ten layers of bfloat16, whose numbers have 8 bits.
    assert np.abs(logits.numpy() - expected).max() < 0.05 * max(expected.std(), 1.0)
