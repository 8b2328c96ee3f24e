"""Stochastic depth, dropout, inference copies and a few training steps of the models."""

from __future__ import annotations

import oneflow_accel
from oneflow_accel.inference import prepare

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from flow_train.optim import build_optimizer
from monarch_flow.models import create_model
from monarch_flow.models.attention import Attention, TokenPerformer
from monarch_flow.models.blocks import Block, map_to_tokens, tokens_to_map
from monarch_flow.models.vitae import NormalCell
from tests.tolerances import assert_close

SMALL = {"embed_dim": 32, "depth": 2, "num_heads": 4, "img_size": 16, "in_chans": 3}


def _block(**rates: float) -> Block:
    rates = {"drop": 0.0, "attn_drop": 0.0, "drop_path_rate": 0.0, **rates}
    block = Block(
        16, 2, 2.0, qkv_bias=True, norm_eps=1e-5, mlp_cfg=None, attnlinear_cfg=None, **rates
    )
    for parameter in block.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, 0.0, 0.3)
    return block


def test_a_branch_is_left_out_for_whole_samples_independently_of_the_other() -> None:
    block = _block(drop_path_rate=0.5)
    x = flow.randn(400, 3, 16)
    out = block.train()(x).numpy()
    mixed = block.attn(block.norm1(x))
    middles = [x, x + 2 * mixed]
    results = [
        (middle + factor * block.mlp(block.norm2(middle))).numpy()
        for middle in middles
        for factor in (0, 2)
    ]
    distances = np.stack([np.abs(out - result).max((1, 2)) for result in results])
    assert distances.min(0).max() < 1e-5
    counts = np.bincount(distances.argmin(0), minlength=4)
    # 100 expected of each, with a standard deviation of 9.
    assert counts.min() > 60
    plain = (middles[0] + mixed).numpy()
    assert_close(
        block.eval()(x).numpy(),
        plain + block.mlp(block.norm2(flow.tensor(plain))).numpy(),
        reduced=100,
    )


def _drop_path_rates(model: nn.Module) -> list[tuple[float, float]]:
    return [
        tuple(getattr(module, "p", 0.0) for module in (block.drop_path1, block.drop_path2))
        for block in model.blocks
    ]


def test_rates_rise_in_a_transformer_and_are_constant_in_a_mixer() -> None:
    arguments = {**SMALL, "drop_path_rate": 0.3, "depth": 4}
    for name in ("vit_tiny_patch4_28", "t2t_vit_7"):
        rates = _drop_path_rates(create_model(name, **arguments))
        np.testing.assert_allclose(rates, np.repeat([0.0, 0.1, 0.2, 0.3], 2).reshape(4, 2))
    del arguments["num_heads"]
    mixer = create_model("mixer_s16_224", **arguments)
    assert _drop_path_rates(mixer) == [(0.3, 0.3)] * 4


def test_dropout_acts_in_training_only_and_follows_the_seed() -> None:
    for name in ("vit_tiny_patch4_28", "mixer_s16_224"):
        arguments = {key: SMALL[key] for key in ("embed_dim", "depth", "img_size", "in_chans")}
        model = create_model(name, drop_rate=0.3, **arguments)
        nn.init.normal_(model.head.weight)
        images = flow.randn(2, 3, 16, 16)
        flow.manual_seed(11)
        first = model.train()(images).numpy()
        assert np.abs(model(images).numpy() - first).max() > 1e-3
        flow.manual_seed(11)
        np.testing.assert_array_equal(model(images).numpy(), first)
        model.eval()
        np.testing.assert_array_equal(model(images).numpy(), model(images).numpy())


def test_attention_dropout_computes_what_the_packed_operation_does() -> None:
    attention = Attention(32, 4, attn_drop=1e-9)
    x = flow.randn(2, 5, 32)
    assert_close(attention.train()(x).numpy(), attention.eval()(x).numpy(), reduced=100)
    # At a rate of 1/2 the mean over draws is the value without dropout.
    attention = Attention(32, 4, attn_drop=0.5).train()
    many = x[:1].expand(4000, -1, -1)
    mean = attention(many).numpy().mean(0)
    expected = attention.eval()(x[:1]).numpy()[0]
    assert np.abs(mean - expected).max() < 0.1 * np.abs(expected).max()
    assert np.abs(attention.train()(x).numpy() - attention.eval()(x).numpy()).max() > 1e-3


NAMES = {
    "vit": ("vit_tiny_patch4_28", {"attnlinear_cfg": "monarch", "mlp_cfg": "monarch"}),
    "mixer": ("mixer_s16_224", {"num_heads": None, "mlp_cfg": "monarch"}),
    "t2t": ("t2t_vit_7", {}),
    "t2t-t": ("t2t_vit_t_14", {"mlp_cfg": "monarch"}),
}


def _model(case: str) -> nn.Module:
    name, more = NAMES[case]
    arguments = {key: value for key, value in {**SMALL, **more}.items() if value is not None}
    model = create_model(name, num_classes=5, drop_rate=0.1, drop_path_rate=0.1, **arguments)
    nn.init.normal_(model.head.weight, 0.0, 0.3)
    return model


@pytest.mark.parametrize("case", list(NAMES))
def test_copies_for_inference_give_the_same_logits(case: str) -> None:
    model = _model(case).eval()
    images = flow.randn(4, 3, 16, 16)
    with flow.no_grad():
        expected = model(images).numpy()
        assert_close(prepare(model)(images).numpy(), expected, reduced=100)
        if not oneflow_accel.current_backend().supports("bfloat16_inference"):
            pytest.skip(oneflow_accel.current_backend().supports("bfloat16_inference").reason)
        logits = prepare(model, dtype=flow.bfloat16)(images)
    assert logits.dtype == flow.float32
    # Two blocks of bfloat16, whose numbers have 8 bits.
    spread = expected.std()
    assert np.abs(logits.numpy() - expected).max() < 0.05 * max(spread, 1.0)


VITAE = {"embed_dims": [8, 8, 16], "token_dims": [8, 16, 32], "num_heads": 4}
VITAE |= {"conv_groups": 8, "mlp_cfg": "monarch", "img_size": 32, "depth": 1}


class _Step(nn.Graph):
    def __init__(self, model: nn.Module, optimizer: flow.optim.Optimizer) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)

    def build(self, images: flow.Tensor, labels: flow.Tensor) -> flow.Tensor:
        loss = nn.functional.cross_entropy(self.model(images), labels)
        loss.backward()
        return loss


@pytest.mark.parametrize("case", ["vit", "mixer", "t2t", "vitae"])
def test_graph_and_eager_train_alike(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, running statistics and what is frozen, without dropout, whose numbers differ. AdamW
    would make whole steps of rounding in biases before batch norm."""
    monkeypatch.setattr("monarch_flow.models.attention.DROPOUT", 0.0)
    name, more = ("ViTAE_basic_Tiny", VITAE) if case == "vitae" else NAMES[case]
    arguments = more if case == "vitae" else {**SMALL, **more}
    arguments = {key: value for key, value in arguments.items() if value is not None}
    side = arguments["img_size"]
    images, labels = flow.randn(4, 3, side, side), flow.tensor([0, 1, 2, 3])
    start = create_model(name, num_classes=5, **arguments).state_dict()
    losses, states = [], []
    for in_graph in (False, True):
        model = create_model(name, num_classes=5, **arguments).train()
        model.load_state_dict({key: value.clone() for key, value in start.items()})
        optimizer = build_optimizer(model, {"name": "sgd", "lr": 0.05, "momentum": 0.9})
        step = _Step(model, optimizer) if in_graph else None
        losses.append([])
        for _ in range(3):
            if step is None:
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            else:
                loss = step(images, labels)
            losses[-1].append(float(loss.numpy()))
        states.append({key: value.numpy() for key, value in model.state_dict().items()})
        frozen = {key: value for key, value in model.named_parameters() if not value.requires_grad}
        assert set(frozen) == {key for key in start if key.endswith(".w")}
        for key, parameter in frozen.items():
            assert parameter.grad is None
            np.testing.assert_array_equal(parameter.numpy(), start[key].numpy())
        held = {id(p) for group in optimizer.param_groups for p in group.parameters}
        assert not held & {id(parameter) for parameter in frozen.values()}
    assert losses[0][2] < losses[0][0]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5, atol=1e-6)
    running = [key for key in start if key.endswith(("running_mean", "running_var"))]
    assert bool(running) == (case == "vitae")
    for key in running:
        assert np.abs(states[0][key] - start[key].numpy()).max() > 1e-4, key
        assert_close(states[1][key], states[0][key], reduced=1000)


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
    model = create_model("ViTAE_basic_Tiny", **VITAE).train()
    images = flow.randn(2, 3, 32, 32)
    assert np.abs(model(images).numpy() - model(images).numpy()).max() > 1e-6
    model.eval()
    np.testing.assert_array_equal(model(images).numpy(), model(images).numpy())
