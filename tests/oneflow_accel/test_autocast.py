"""Autocast on CPUs: `oneflow.autocast(device_type="cpu", dtype=oneflow.bfloat16)`, eagerly and in
what an nn.Graph traces."""

from __future__ import annotations

from collections.abc import Callable

from oneflow_accel.kernels import plugin
from oneflow_accel.kernels.attention import (
    causal_softmax_mask_scale,
    packed_attention,
    performer_attention,
    scaled_dot_product_attention,
)
from oneflow_accel.kernels.convolution import channels_last_conv2d
from oneflow_accel.kernels.linear import bias_mask_scale, linear
from oneflow_accel.kernels.loss import cross_entropy, linear_cross_entropy
from oneflow_accel.kernels.monarch import monarch_multiply
from oneflow_accel.kernels.operators import Operator
from oneflow_accel.kernels.transformer import add_rms_norm, rope, swiglu

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn
from oneflow.nn import functional

pytestmark = pytest.mark.skipif(not plugin.state().loaded, reason="OneFlow alone never does it")

RNG = np.random.default_rng(3)
NORM = nn.BatchNorm1d(8)


def bfloat16() -> flow.autocast:
    return flow.autocast(device_type="cpu", dtype=flow.bfloat16)


def random(*shape: int) -> flow.Tensor:
    return flow.tensor(RNG.standard_normal(shape).astype(np.float32)).requires_grad_()


def angles(time: int, half: int) -> tuple[flow.Tensor, flow.Tensor]:
    turns = np.outer(np.arange(time), 1 / 100 ** (np.arange(half) / half)).astype(np.float32)
    return flow.tensor(np.cos(turns)), flow.tensor(np.sin(turns))


def kept(*shape: int) -> flow.Tensor:
    """Truth values, the same at every call, some in each row."""
    return flow.tensor(np.arange(np.prod(shape)).reshape(shape) % 3 != 1)


def dropped(operation: Callable[..., flow.Tensor]) -> Callable[..., flow.Tensor]:
    """`operation` with the same random numbers at every call."""

    def run(*tensors: flow.Tensor) -> flow.Tensor:
        flow.manual_seed(1)
        return operation(*tensors)

    return run


PRODUCTS = {
    "matmul": (lambda x, w: flow.matmul(x, w), [(6, 8), (8, 5)]),
    "bmm": (lambda x, w: flow.bmm(x, w), [(2, 6, 8), (2, 8, 5)]),
    "linear": (linear, [(3, 6, 8), (5, 8), (5,)]),
    "nn-linear": (functional.linear, [(3, 6, 8), (5, 8), (5,)]),
    "attention": (lambda q, k, v: scaled_dot_product_attention(q, k, v), [(2, 3, 7, 8)] * 3),
    "packed-attention": (lambda qkv: packed_attention(qkv, 2, causal=True), [(2, 7, 48)]),
    "swiglu": (swiglu, [(6, 9)] * 2),
    "bias-gelu": (lambda x, b: flow._C.fused_bias_add_gelu(x, b, axis=1), [(6, 8), (8,)]),
    "bias-dropout": (
        dropped(lambda x, b: flow._C.fused_bias_add_dropout(x, b, p=0.25, axis=1)),
        [(6, 8), (8,)],
    ),
    "bias-mask-scale": (lambda x, b: bias_mask_scale(x, b, kept(6, 8), 1.25), [(6, 8), (8,)]),
    "bias-softmax-dropout": (
        dropped(
            lambda x, b: flow._C.fused_bias_add_scale_mask_softmax_dropout(
                x, b, kept(2, 1, 8), fill_value=-1e4, scale=0.5, p=0.25, training=True
            )[0]
        ),
        [(2, 6, 8), (1, 6, 8)],
    ),
    "monarch": (monarch_multiply, [(6, 8), (2, 3, 4), (2, 5, 3)]),
    "monarch-bias": (monarch_multiply, [(3, 12, 8), (2, 3, 4), (2, 5, 3), (10,)]),
}


@pytest.mark.parametrize(("operation", "shapes"), PRODUCTS.values(), ids=PRODUCTS)
def test_products_run_in_bfloat16_with_their_gradients(
    operation: Callable[..., flow.Tensor], shapes: list[tuple[int, ...]]
) -> None:
    inputs = [random(*shape) for shape in shapes]
    exact = operation(*inputs)
    weight = flow.tensor(RNG.standard_normal(exact.shape).astype(np.float32))
    expected = flow.autograd.grad((exact * weight).sum(), inputs)
    seen: list[flow.dtype] = []
    with bfloat16():
        out = operation(*inputs)
    assert out.dtype == flow.bfloat16
    out.register_hook(lambda grad: seen.append(grad.dtype))
    found = flow.autograd.grad((out.float() * weight).sum(), inputs)
    # The gradient comes to the operator in bfloat16; what it gives is cast to its input's float32.
    assert seen == [flow.bfloat16]
    for mine, theirs in zip((out.float(), *found), (exact, *expected), strict=True):
        assert mine.dtype == flow.float32
        size = theirs.abs().max().item()
        assert np.abs(mine.numpy() - theirs.numpy()).max() <= 2**-6 * size
        # In float32 they would be equal.
        assert (mine != theirs).any()


FOLLOWING = {
    "gelu": functional.gelu,
    "relu": functional.relu,
    "silu": functional.silu,
    "tanh": flow.tanh,
    "sigmoid": flow.sigmoid,
    "quick-gelu": lambda x: flow._C.quick_gelu(x),
    "add": lambda x: x + x,
    "subtract": lambda x: x - x * 0.25,
    "multiply": lambda x: x * x,
    "scale": lambda x: x * 0.5 + 1,
    "divide": lambda x: x / 3,
    "sum": lambda x: x.sum(dim=0),
    "batch-norm-frozen": lambda x: NORM.eval()(x),
    "batch-norm": lambda x: NORM.train()(x) * x,
    "view": lambda x: x.reshape(8, 6).transpose(0, 1)[1:],
    "cat": lambda x: flow.cat([x, x], dim=1),
    "rope": lambda x: rope(x.reshape(2, 3, 8), *angles(3, 4)),
    "dropout": dropped(lambda x: functional.dropout(x, 0.25)),
    "mask-softmax": lambda x: flow._C.fused_scale_mask_softmax(
        x.reshape(2, 3, 8), kept(2, 1, 8), fill_value=-1e4, scale=0.5
    ),
    "mask-softmax-dropout": dropped(
        lambda x: flow._C.fused_scale_mask_softmax_dropout(
            x.reshape(2, 3, 8), kept(2, 1, 8), fill_value=-1e4, scale=0.5, p=0.25, training=True
        )[0]
    ),
    "causal-softmax": lambda x: causal_softmax_mask_scale(x, kept(6, 8), 0.5, 1.25),
    "performer": lambda x: performer_attention(x.reshape(2, 4, 6) * 0.25, angles(5, 2)[0])[0],
    "layer-norm": lambda x: functional.layer_norm(x, (8,)) * x,
    "rms-norm": lambda x: flow._C.rms_norm(x, None, (8,), 1e-5) * x,
}


@pytest.mark.parametrize("operation", FOLLOWING.values(), ids=FOLLOWING)
def test_what_follows_a_product_stays_in_bfloat16(
    operation: Callable[[flow.Tensor], flow.Tensor],
) -> None:
    x, w = random(6, 4), random(4, 8)
    exact = operation(x @ w)
    expected = flow.autograd.grad(exact.square().sum(), [x, w])
    seen: list[flow.dtype] = []
    with bfloat16():
        product = x @ w
        out = operation(product)
    assert out.dtype == flow.bfloat16
    product.register_hook(lambda grad: seen.append(grad.dtype))
    found = flow.autograd.grad(out.float().square().sum(), [x, w])
    assert set(seen) == {flow.bfloat16}
    for mine, theirs in zip((out.float(), *found), (exact, *expected), strict=True):
        assert np.abs(mine.numpy() - theirs.numpy()).max() <= 2**-5 * theirs.abs().max().item()


ALWAYS_FLOAT32 = {
    "norm": lambda x: functional.layer_norm(x, (8,), flow.ones(8), flow.zeros(8)),
    "softmax": lambda x: functional.softmax(x, dim=-1),
    "exp": flow.exp,
    "cross-entropy": lambda x: functional.cross_entropy(x, flow.zeros(6, dtype=flow.int64)),
    "rope": lambda x: rope(x.reshape(2, 3, 8), *angles(3, 4)).float(),
    "group-norm": lambda x: nn.GroupNorm(2, 4)(x.reshape(3, 4, 4)),
    "instance-norm": lambda x: nn.InstanceNorm1d(2)(x.reshape(3, 2, 8)),
    "hardsigmoid": lambda x: nn.Hardsigmoid(inplace=True)(x * 0.25),
    "leaky-relu": nn.LeakyReLU(inplace=True),
}


@pytest.mark.parametrize("operation", ALWAYS_FLOAT32.values(), ids=ALWAYS_FLOAT32)
def test_the_rest_runs_in_float32(operation: Callable[[flow.Tensor], flow.Tensor]) -> None:
    x, w = random(6, 4), random(4, 8)
    exact = operation(x @ w)
    weight = flow.tensor(RNG.standard_normal(exact.shape).astype(np.float32))
    expected = flow.autograd.grad((exact * weight).sum(), [x, w])
    with bfloat16():
        out = operation(x @ w)
        assert out.dtype == flow.float32
        # What is float32 stays so.
        assert functional.gelu(x).dtype == flow.float32
    assert (x @ w).dtype == flow.float32
    found = flow.autograd.grad((out * weight).sum(), [x, w])
    for mine, theirs in zip((out, *found), (exact, *expected), strict=True):
        assert np.abs(mine.numpy() - theirs.numpy()).max() <= 2**-4 * theirs.abs().max().item()


def test_uniform_numbers_of_bfloat16_are_those_of_float32() -> None:
    drawn = []
    for dtype in (flow.bfloat16, flow.float32):
        flow.manual_seed(1)
        drawn.append(flow.rand(3, 5, dtype=dtype))
    assert drawn[0].dtype == flow.bfloat16
    np.testing.assert_array_equal(drawn[0].numpy(), drawn[1].bfloat16().numpy())


def test_losses_of_bfloat16_logits_are_float32_and_their_gradient_is_not() -> None:
    x, w = random(6, 4), random(4, 8)
    labels = flow.tensor([0, 7, -100, 3, 3, 1], dtype=flow.int64)
    exact = cross_entropy(x @ w, labels)
    expected = flow.autograd.grad(exact.mean(), [x, w])
    seen: list[flow.dtype] = []
    with bfloat16():
        logits = x @ w
        losses = cross_entropy(logits, labels)
    assert (logits.dtype, losses.dtype) == (flow.bfloat16, flow.float32)
    logits.register_hook(lambda grad: seen.append(grad.dtype))
    found = flow.autograd.grad(losses.mean(), [x, w])
    assert seen == [flow.bfloat16]
    for mine, theirs in zip((losses, *found), (exact, *expected), strict=True):
        assert np.abs(mine.numpy() - theirs.numpy()).max() <= 2**-5 * theirs.abs().max().item()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


def _trained(in_graph: bool) -> tuple[list[float], np.ndarray]:
    flow.manual_seed(1)
    model = nn.Sequential(Block(), Block())
    optimizer = flow.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = flow.tensor(np.random.default_rng(5).standard_normal((4, 16)).astype(np.float32))

    def loss_of(model: nn.Module, x: flow.Tensor) -> flow.Tensor:
        with bfloat16():
            return functional.mse_loss(model(x).float(), x * 0.5)

    class Graph(nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.add_optimizer(optimizer)

        def build(self, x: flow.Tensor) -> flow.Tensor:
            loss = loss_of(self.model, x)
            loss.backward()
            return loss

    def step(x: flow.Tensor) -> flow.Tensor:
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = Graph() if in_graph else step
    losses = [run(x).item() for _ in range(5)]
    return losses, model[0].up.weight.numpy()


def test_a_graph_trains_as_eager_code_does() -> None:
    losses, weight = _trained(in_graph=False)
    graph_losses, graph_weight = _trained(in_graph=True)
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(graph_losses, losses, rtol=2e-2)
    np.testing.assert_allclose(graph_weight, weight, atol=2e-3)


def test_other_dtypes_are_refused_with_a_warning() -> None:
    with (
        pytest.warns(UserWarning, match="CPU autocast knows bfloat16 only"),
        flow.autocast(device_type="cpu", dtype=flow.float16),
    ):
        assert (random(2, 3) @ random(3, 2)).dtype == flow.float32


# What a gradient operator of ours is given under autocast: all that is as large as the activations.
# Those of linear cross entropies and of add_rms_norm, whose residual is float32, are float32.
IN_BFLOAT16, IN_FLOAT32 = True, False
DIFFERENTIABLE = {
    "monarch": (lambda x: monarch_multiply(x, random(2, 3, 4), random(2, 5, 3)), IN_BFLOAT16),
    "conv2d": (
        lambda x: channels_last_conv2d(x.reshape(1, 2, 3, 8), random(4, 8, 1, 1)),
        IN_BFLOAT16,
    ),
    "attention": (lambda x: packed_attention(x.reshape(1, 2, 24), 2), IN_BFLOAT16),
    "separate attention": (
        lambda x: scaled_dot_product_attention(*[x.reshape(1, 2, 3, 8)] * 3),
        IN_BFLOAT16,
    ),
    "performer": (
        lambda x: performer_attention(x.reshape(2, 4, 6) * 0.25, angles(5, 2)[0])[0],
        IN_BFLOAT16,
    ),
    "rope": (lambda x: rope(x.reshape(2, 3, 8), *angles(3, 4)), IN_BFLOAT16),
    "swiglu": (lambda x: swiglu(x, x), IN_BFLOAT16),
    "batch norm": (lambda x: NORM.eval()(x), IN_BFLOAT16),
    "cross entropy": (lambda x: cross_entropy(x, flow.tensor([1] * 6)), IN_BFLOAT16),
    "linear cross entropy": (
        lambda x: linear_cross_entropy(x, random(9, 8), flow.tensor([1] * 6)),
        IN_FLOAT32,
    ),
    "add rms norm": (
        lambda x: add_rms_norm(x.float(), random(6, 8), random(8), epsilon=1e-5)[0],
        IN_FLOAT32,
    ),
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_of_our_functions_run_in_bfloat16(name: str, monkeypatch) -> None:
    """Of every autograd.Function there is."""
    operation, in_bfloat16 = DIFFERENTIABLE[name]
    calls: list[tuple[str, list[flow.dtype]]] = []
    run = Operator.__call__

    def recorded(self: Operator, *tensors: flow.Tensor | None, **attributes: object) -> object:
        kinds = [t.dtype for t in tensors if t is not None and t.is_floating_point()]
        calls.append((self.name, kinds))
        return run(self, *tensors, **attributes)

    monkeypatch.setattr(Operator, "__call__", recorded)
    x, w = random(6, 4), random(4, 8)
    with bfloat16():
        out = operation(x @ w)
    calls.clear()
    out.float().square().sum().backward()
    assert x.grad.dtype == w.grad.dtype == flow.float32
    assert calls
    assert all((flow.bfloat16 in kinds) == in_bfloat16 for _, kinds in calls)
