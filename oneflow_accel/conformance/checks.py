"""What a device has to do, in the order in which a vendor fills it: `CHECKS`, each a function that
raises where the device is wrong. They compare with NumPy in float64, or with the CPU's float64."""

from __future__ import annotations

import operator
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from oneflow_accel import distributed, inference, layouts, precision
from oneflow_accel.agree import whole
from oneflow_accel.backends.base import Backend
from oneflow_accel.tolerances import assert_close

import numpy as np
import oneflow as flow
import oneflow.nn.functional as F  # noqa: N812 - its usual name
from oneflow import nn

MIB = 2**20
# By step, what it shows.
STEPS = {
    "device": "it is found, counted and named",
    "memory": "memory is taken, counted, given back, and can run out",
    "copies": "tensors go to the device and come back",
    "streams": "work is done in the order in which it was given",
    "primitives": "fill, cast, add, and copies of parts",
    "kernels": "products, elementwise operators, reductions, choices",
    "operators": "layers of the models, with their gradients",
    "random": "random numbers, and their seed",
    "training": "steps of a small network",
    "graph": "the same under nn.Graph",
    "precision": "float16 and bfloat16",
    "files": "what is saved on one device is read on the other",
    "collectives": "two processes exchange tensors, and train",
}


class NotSupportedError(Exception):
    """The check has nothing to look at on this device or machine; the text says why."""


@dataclass(frozen=True)
class Check:
    """`needs` is a key of FEATURES: where the backend lacks it, the check may fail."""

    step: str
    name: str
    run: Callable[[Backend], None]
    needs: str | None = None

    @property
    def processes(self) -> int:
        return 2 if self.step == "collectives" else 1


CHECKS: list[Check] = []


def check(step: str, name: str, needs: str | None = None) -> Callable[[Any], None]:
    return lambda run: CHECKS.append(Check(step, name, run, needs))


def array(*shape: int, seed: int = 0) -> np.ndarray:
    """Normal numbers, float64, that float32 has too."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(np.float64)


def on(backend: Backend, values: Any, dtype: flow.dtype = flow.float32) -> flow.Tensor:
    return flow.tensor(np.asarray(values)).to(dtype).to(backend.device())


def host(tensor: flow.Tensor) -> np.ndarray:
    """Of any dtype; NumPy has no bfloat16."""
    tensor = tensor.detach().cpu()
    return tensor.float().numpy() if tensor.dtype == flow.bfloat16 else tensor.numpy()


def name_of(dtype: flow.dtype) -> str:
    return str(dtype).rpartition(".")[2]


def require(holds: Any, text: str) -> None:
    if not holds:
        raise AssertionError(text)


def equal(tensor: flow.Tensor, expected: Any) -> None:
    np.testing.assert_array_equal(host(tensor), expected)


def close(
    backend: Backend,
    ours: Callable[..., flow.Tensor],
    theirs: Callable[..., Any],
    arrays: Sequence[np.ndarray],
    dtype: flow.dtype = flow.float32,
) -> None:
    """Compare with NumPy in float64, on what the dtype makes of the numbers."""
    tensors = [on(backend, values, dtype) for values in arrays]
    given = [host(tensor).astype(np.float64) for tensor in tensors]
    found = host(ours(*tensors))
    assert_close(found, theirs(*given), dtype=name_of(dtype), reduced=arrays[0].size)


@check("device", "it is there, counted and named")
def _is_there(backend: Backend) -> None:
    require(backend.is_available(), f"is_available() says no: {backend.unavailable_reason()}")
    count, current = backend.device_count(), backend.current_device()
    require(0 <= current < count, f"the current device is {current} of {count}")
    require(backend.device(current).index == current, "device(n) is another device")
    require(backend.properties().name, "properties() has no name")
    require(backend.supported_dtypes(), "supported_dtypes() is empty")


@check("memory", "taken and written")
def _takes_memory(backend: Backend) -> None:
    for size in (0, 1, 1000, 8 * MIB):
        ones = flow.ones(size, device=backend.device())
        require(float(host(ones).sum()) == size, f"{size} ones are others on the host")


@check("memory", "counted and given back", "memory_stats")
def _counts_memory(backend: Backend) -> None:
    before = backend.memory_allocated() or 0
    backend.reset_peak_memory_stats()
    tensor = flow.ones(24 * MIB, device=backend.device())
    backend.synchronize()
    held, peak = backend.memory_allocated() or 0, backend.max_memory_allocated() or 0
    require(held - before >= 64 * MIB, f"of 96 MiB that were taken {held - before} B are counted")
    require(peak >= held, f"the peak, {peak}, is below what is in use, {held}")
    del tensor
    backend.synchronize()
    backend.empty_cache()
    left = backend.memory_allocated() or 0
    require(held - left >= 64 * MIB, f"of 96 MiB {held - left} B were given back")
    backend.reset_peak_memory_stats()
    require((backend.max_memory_allocated() or 0) < peak, "the peak does not begin anew")


@check("memory", "running out is an error with sizes")
def _runs_out(backend: Backend) -> None:
    limit = backend.properties().total_memory
    if limit is None:
        raise NotSupportedError("the backend does not know how much memory there is")
    try:
        flow.zeros(limit // 2, device=backend.device()).sum().numpy()
    except (RuntimeError, MemoryError) as error:
        require(re.search(r"(?is)memory.*\d", str(error)), f"it names no sizes: {error}")
    else:
        raise AssertionError(f"there were {2 * limit} B on a device of {limit} B")
    backend.empty_cache()
    equal(on(backend, [1, 2]).sum(), 3)


@check("memory", "the host can read it", "host_memory")
def _is_host_memory(backend: Backend) -> None:
    tensor = flow.ones(4, device=backend.device())
    seen = tensor.numpy()
    tensor.add_(1)
    backend.synchronize()
    require((seen == 2).all(), "the host has a copy")


def _copy(backend: Backend, name: str) -> None:
    dtype = getattr(flow, name)
    values = flow.tensor(np.arange(24).reshape(2, 3, 4) % 5).to(dtype)
    for tensor in (values, values.permute(2, 0, 1), values[:, ::2], values[:0]):
        there = tensor.to(backend.device())
        require(there.dtype == dtype, f"it became {there.dtype}")
        require(there.device.type == backend.device().type, f"it is on {there.device}")
        equal(there, host(tensor))
        equal(there.clone(), host(tensor))


_TYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool")
for _name in _TYPES:
    CHECKS.append(Check("copies", _name, partial(_copy, name=_name)))


@check("copies", "from one device to another")
def _copies_over(backend: Backend) -> None:
    if backend.device_count() < 2:
        raise NotSupportedError("there is one device")
    other = backend.device(1 - min(1, backend.current_device()))
    equal(on(backend, array(3, 4)).to(other), array(3, 4))


@check("streams", "a chain of operators before a copy")
def _chain(backend: Backend) -> None:
    tensor = flow.zeros(100_000, device=backend.device())
    for number in range(300):
        tensor = tensor + number if number % 2 else tensor.add_(number)
    equal(tensor, np.full(100_000, 299 * 150))


@check("streams", "copies see what was there, and nothing later")
def _copies_in_order(backend: Backend) -> None:
    for number in range(20):
        source = flow.ones(200_000) * number
        there = source.to(backend.device(), copy=True)
        source.add_(1)
        back = there.to(_CPU, copy=True)
        there.add_(2)
        require((back.numpy() == number).all(), "a copy was too early or too late")


@check("primitives", "fill")
def _fill(backend: Backend) -> None:
    for dtype in (*backend.supported_dtypes(), flow.int64, flow.int32):
        tensor = flow.full((3, 5), 7, dtype=dtype, device=backend.device())
        equal(tensor, np.full((3, 5), 7))
        equal(flow.zeros_like(tensor), np.zeros((3, 5)))


@check("primitives", "cast")
def _cast(backend: Backend) -> None:
    dtypes = (*backend.supported_dtypes(), flow.int64, flow.int32)
    for before, after in ((before, after) for before in dtypes for after in dtypes):
        tensor = on(backend, np.arange(-3, 9), before).to(after)
        require(tensor.dtype == after, f"{before} became {tensor.dtype}, not {after}")
        equal(tensor, np.arange(-3, 9))


@check("primitives", "add")
def _add(backend: Backend) -> None:
    for dtype in backend.supported_dtypes():
        close(backend, operator.add, np.add, [array(3, 4), array(4, seed=1)], dtype)
    many = [array(5, seed=seed) for seed in range(5)]
    close(backend, lambda *tensors: flow.add(*tensors), lambda *all_: sum(all_), many)


@check("kernels", "matmul")
def _matmul(backend: Backend) -> None:
    x, y = array(2, 33, 20), array(2, 20, 17, seed=1)
    for dtype in backend.supported_dtypes():
        for factors in ((x, y), (x, y[0]), (x[0], y[0])):
            close(backend, flow.matmul, np.matmul, factors, dtype)
        close(backend, lambda a: flow.matmul(a, a.t()), lambda a: a @ a.T, [x[0]], dtype)


def _assigned(a: Any) -> Any:
    a[1:3, ::2] = 7
    return a


def function(step: str, name: str, ours: Any, theirs: Any = None, needs: str | None = None) -> None:
    """Add a check of a function of a tensor of (4, 6, 5); `theirs` is that of an array."""
    values = [abs(array(4, 6, 5)) + 0.5]
    run = partial(close, ours=ours, theirs=theirs or ours, arrays=values)
    CHECKS.append(Check(step, name, run, needs))


function("primitives", "a part", lambda a: a[1:3, ::2, -2:])
function("primitives", "a part set", _assigned)
function("primitives", "joined", lambda a: flow.cat([a[:, :2], a[:, 2:]], 1), np.array)
function("primitives", "permuted", lambda a: a.permute(2, 0, 1) + 0, lambda a: a.transpose(2, 0, 1))
for _name in ("exp", "log", "sqrt", "square", "abs", "tanh"):
    function("kernels", _name, getattr(flow, _name), getattr(np, _name))
for _sign in (operator.sub, operator.mul, operator.truediv):
    function("kernels", _sign.__name__, lambda a, sign=_sign: sign(a, a[0]))
function("kernels", "sum", lambda a: a.sum((0, 2)))
function("kernels", "mean", lambda a: a.mean())
function("kernels", "amax", lambda a: a.amax(1), lambda a: a.max(1))
function("kernels", "argmax", lambda a: a.argmax(1))
function("kernels", "greater", lambda a: a > 1)
function("kernels", "where", lambda a: flow.where(a > 1, a, -a), lambda a: np.where(a > 1, a, -a))
function("kernels", "tril", flow.tril, np.tril, "causal_mask")
function("kernels", "triu", flow.triu, np.triu, "causal_mask")
function(
    *("kernels", "masked_fill", lambda a: a.masked_fill(a > 1, 5)),
    *(lambda a: np.where(a > 1, 5, a), "causal_mask"),
)


def filled(module: nn.Module) -> nn.Module:
    """With weights that are the same each time."""
    for number, parameter in enumerate(module.parameters()):
        parameter.data.copy_(flow.tensor(array(*parameter.shape, seed=number + 1) / 4).float())
    return module


def outcome(module: nn.Module, values: Any, device: Any, dtype: flow.dtype) -> list[np.ndarray]:
    """Output, gradients of the input and of the parameters, and statistics of a module."""
    module, given = module.to(dtype).to(device), flow.tensor(values).to(device)
    if given.is_floating_point():
        given = given.to(dtype)
        given.requires_grad = True
    result = module(given)
    (result * result).sum().backward()
    tensors = [result, given.grad, *(parameter.grad for parameter in module.parameters())]
    tensors += [buffer for buffer in module.buffers() if buffer.is_floating_point()]
    return [host(tensor) for tensor in tensors if tensor is not None]


def agree(
    backend: Backend, make: Callable[[], nn.Module], values: Any, reference: Any = None
) -> None:
    """Compare with the CPU in float64; `reference` makes the module there, if it is another."""
    found = outcome(filled(make()), values, backend.device(), flow.float32)
    expected = outcome(filled((reference or make)()), values, _CPU, flow.float64)
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs, reduced=200)


class Of(nn.Module):
    """A module of a function and of the modules that it uses."""

    def __init__(self, function: Callable[..., flow.Tensor], *modules: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(modules)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        return self.function(x, *self.parts)


def _loss(x: flow.Tensor) -> flow.Tensor:
    return F.cross_entropy(x, flow.tensor([1, 0, 3, 4]).to(x.device))


def _fused(x: flow.Tensor, norm: nn.Module) -> flow.Tensor:
    statistics = norm.running_mean, norm.running_var, norm.weight, norm.bias
    how = {"axis": 1, "epsilon": norm.eps, "momentum": norm.momentum, "is_training": True}
    return flow._C.normalization_add_relu(x, x * 2, *statistics, **how)


def _last(x: flow.Tensor, net: nn.Module) -> flow.Tensor:
    return net(x.permute(0, 2, 3, 1).contiguous()).permute(0, 3, 1, 2)


_CPU = flow.device("cpu:0")
_IMAGES, _TOKENS, _WORDS = array(2, 6, 9, 9), array(2, 7, 12), np.arange(12).reshape(3, 4) % 7
_OPERATORS: tuple[tuple[Any, ...], ...] = (
    ("linear", lambda: nn.Linear(12, 5), _TOKENS),
    ("conv2d", lambda: nn.Conv2d(6, 4, 3, stride=2, padding=1), _IMAGES),
    ("conv2d in groups", lambda: nn.Conv2d(6, 6, 3, padding=1, groups=6), _IMAGES),
    ("batch norm", lambda: nn.BatchNorm2d(6), _IMAGES),
    ("batch norm, evaluation", lambda: nn.BatchNorm2d(6).eval(), _IMAGES),
    ("max pool", lambda: nn.MaxPool2d(3, 2, 1), _IMAGES),
    ("average pool", lambda: nn.AdaptiveAvgPool2d(1), _IMAGES),
    ("layer norm", lambda: nn.LayerNorm(12), _TOKENS),
    ("softmax", lambda: nn.Softmax(-1), _TOKENS),
    ("gelu", nn.GELU, _TOKENS),
    ("relu", nn.ReLU, _TOKENS),
    ("sigmoid", nn.Sigmoid, _TOKENS),
    ("embedding", lambda: nn.Embedding(9, 5), _WORDS),
    ("cross entropy", lambda: Of(_loss), array(4, 5)),
)
for _name, _make, _values in _OPERATORS:
    CHECKS.append(Check("operators", _name, partial(agree, make=_make, values=_values)))


@check("operators", "the layer_norm operator", "native_layer_norm")
def _layer_norm(backend: Backend) -> None:
    how = {"begin_norm_axis": 2, "begin_params_axis": 2, "epsilon": 1e-5}
    agree(
        backend,
        lambda: Of(lambda x: flow._C.layer_norm(x, **how)),
        _TOKENS,
        lambda: Of(lambda x: (x - x.mean(-1, True)) * flow.rsqrt(x.var(-1, False, True) + 1e-5)),
    )


@check("operators", "batch norm, add and relu in one", "fused_bn_add_relu_train")
def _fused_norm(backend: Backend) -> None:
    apart = Of(lambda x, norm: flow.relu(norm(x) + x * 2), nn.BatchNorm2d(6))
    agree(backend, lambda: Of(_fused, nn.BatchNorm2d(6)), _IMAGES, lambda: apart)


@check("operators", "silu", "silu")
def _silu(backend: Backend) -> None:
    agree(backend, nn.SiLU, _TOKENS)


@check("operators", "max pool, channels last", "nhwc_max_pool")
def _pools_channels_last(backend: Backend) -> None:
    how = {"kernel_size": 3, "stride": 2, "data_format": "channels_last"}
    agree(
        backend,
        lambda: Of(lambda x: flow._C.max_pool2d(x, **how)[0]),
        array(2, 9, 9, 6),
        lambda: Of(lambda x: F.max_pool2d(x.permute(0, 3, 1, 2), 3, 2).permute(0, 2, 3, 1)),
    )


@check("operators", "channels last", "nhwc")
def _channels_last(backend: Backend) -> None:
    def make() -> nn.Module:
        return filled(nn.Sequential(nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8), nn.MaxPool2d(2)))

    last = Of(_last, layouts.to_channels_last(make(), backend))
    found = outcome(last, _IMAGES, backend.device(), flow.float32)
    expected = outcome(make(), _IMAGES, _CPU, flow.float64)
    for ours, theirs in zip(found, expected, strict=True):
        # The weight of a convolution has its channels last, too.
        shown = ours.transpose(0, 3, 1, 2) if ours.shape != theirs.shape else ours
        assert_close(shown, theirs, reduced=200)


@check("operators", "fused operators of transformers", "fused_transformer")
def _fused_transformer(backend: Backend) -> None:
    x, bias, scores = array(4, 6), array(6, seed=1), array(2, 3, 5, 5)
    found = flow._C.fused_bias_add_gelu(on(backend, x), on(backend, bias), axis=1)
    assert_close(host(found), F.gelu(flow.tensor(x + bias)).numpy())
    how = {"p": 0.0, "diagonal": 0, "tril_scale_value": 0.5, "tril_fill_value": -1e4}
    found = flow._C.fused_scale_tril_softmax_mask_scale(on(backend, scores), **how)[0]
    kept = np.tril(np.exp(scores * 0.5))
    assert_close(host(found), kept / kept.sum(-1, keepdims=True), reduced=5)


@check("operators", "the touch operator of DDP", "ddp_stream_touch")
def _touch(backend: Backend) -> None:
    flow._C.stream_touch([on(backend, [1, 2])])


def _repeats(backend: Backend, draw: Callable[[], flow.Tensor]) -> np.ndarray:
    backend.manual_seed(5)
    first, second = host(draw()), host(draw())
    require((first != second).any(), "two draws are the same")
    backend.manual_seed(5)
    equal(draw(), first)
    return first


@check("random", "normal")
def _normal(backend: Backend) -> None:
    drawn = _repeats(backend, lambda: flow.randn(10_000, device=backend.device()))
    require(abs(drawn.mean()) < 0.1 and abs(drawn.std() - 1) < 0.1, "mean or deviation is off")


@check("random", "uniform", "uniform_random")
def _uniform(backend: Backend) -> None:
    drawn = _repeats(backend, lambda: flow.rand(10_000, device=backend.device()))
    require(drawn.min() >= 0 and drawn.max() < 1 and abs(drawn.mean() - 0.5) < 0.05, "it is not")


@check("random", "dropout")
def _dropout(backend: Backend) -> None:
    x = flow.ones(10_000, device=backend.device(), requires_grad=True)
    dropped = nn.Dropout(0.25)(x)
    dropped.sum().backward()
    kept = host(dropped)
    require(np.isin(kept, np.array([0, 4 / 3], np.float32)).all(), "it gives other values")
    require(abs((kept > 0).mean() - 0.75) < 0.05, f"it keeps {(kept > 0).mean():.0%} of 75 %")
    equal(x.grad, kept)


def _net() -> nn.Module:
    parts = (nn.Conv2d(6, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(392, 4))
    return filled(nn.Sequential(*parts))


def train(
    device: Any,
    dtype: flow.dtype,
    optimizer: Callable[..., Any],
    *,
    clip: float | None = None,
    graph: bool = False,
    part: slice | None = None,
) -> list[np.ndarray]:
    """Losses of six steps and the last weights; with a part of the images, in parallel."""
    rows = part or slice(None)
    net = _net().to(dtype).to(device)
    x = flow.tensor(array(8, 6, 9, 9)[rows]).to(dtype).to(device)
    labels = flow.tensor((np.arange(8) % 4)[rows]).to(device)
    clipping = {"clip_grad_max_norm": clip, "clip_grad_norm_type": 2.0} if clip else {}
    update = optimizer([{"params": list(net.parameters()), **clipping}])
    model = nn.parallel.DistributedDataParallel(net) if part else net

    def loss_and_gradients(model: nn.Module) -> flow.Tensor:
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        return loss

    class Graph(nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = net
            self.add_optimizer(update)

        def build(self) -> flow.Tensor:
            return loss_and_gradients(self.model)

    def step() -> flow.Tensor:
        loss = loss_and_gradients(model)
        if clip:
            update.clip_grad()
        update.step()
        update.zero_grad()
        return loss

    run = Graph() if graph else step
    losses = np.array([float(host(run())) for _ in range(6)])
    return [losses, *(host(parameter) for parameter in net.parameters())]


def _trains(backend: Backend, optimizer: Any, clip: Any = None, graph: bool = False) -> None:
    """As the CPU does in float64; rounding grows over the steps."""
    found = train(backend.device(), flow.float32, optimizer, clip=clip, graph=graph)
    require(found[0][-1] < found[0][0], f"the loss does not fall: {found[0]}")
    expected = train(_CPU, flow.float64, optimizer, clip=clip)
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs, reduced=100_000)


_SGD, _MOMENTUM = partial(flow.optim.SGD, lr=0.02), partial(flow.optim.SGD, lr=0.02, momentum=0.9)
# A large eps, as Adam's steps are signs of gradients, of rounded ones too.
_ADAM, _ADAMW = (
    partial(kind, lr=1e-2, weight_decay=0.1, eps=1e-2)
    for kind in (flow.optim.Adam, flow.optim.AdamW)
)
_TRAININGS: tuple[tuple[str, str, str | None, Any], ...] = (
    ("training", "SGD with momentum", None, partial(_trains, optimizer=_MOMENTUM)),
    ("training", "SGD", "plain_sgd", partial(_trains, optimizer=_SGD)),
    ("training", "Adam", None, partial(_trains, optimizer=_ADAM)),
    ("training", "AdamW", None, partial(_trains, optimizer=_ADAMW)),
    ("training", "clipping", "gradient_clipping", partial(_trains, optimizer=_SGD, clip=0.5)),
    ("graph", "SGD with momentum", "graph", partial(_trains, optimizer=_MOMENTUM, graph=True)),
    ("graph", "AdamW", "graph_adamw", partial(_trains, optimizer=_ADAMW, graph=True)),
)
CHECKS += [Check(step, name, run, needs) for step, name, needs, run in _TRAININGS]


def _autocast(backend: Backend, name: str) -> None:
    model, x = nn.Linear(64, 8).to(backend.device()), on(backend, array(4, 64))
    exact = host(model(x))
    with precision.autocast(backend, name):
        found = model(x)
    require(name_of(found.dtype) == name, f"products are {found.dtype}")
    assert_close(host(found), exact, dtype=name, reduced=64)
    found.float().sum().backward()
    require(model.weight.grad.dtype == flow.float32, "gradients of weights are not float32")


for _name, _needs in (("float16", "amp"), ("bfloat16", "bfloat16_training")):
    _run = partial(_autocast, name=_name)
    CHECKS.append(Check("precision", f"autocast in {_name}", _run, _needs))


def _in_bfloat16(found: np.ndarray, exact: np.ndarray) -> None:
    assert_close(found, exact, dtype="bfloat16", reduced=100)
    require(abs(found - exact).max() > 1e-4 * abs(exact).max(), "it is as exact as float32")


@check("precision", "products of float32 in bfloat16", "bfloat16_products")
def _products(backend: Backend) -> None:
    x, y = array(64, 64), array(64, 64, seed=1)
    precision.set_products("float32-bf16-products")
    try:
        _in_bfloat16(host(flow.matmul(on(backend, x), on(backend, y))), x @ y)
    finally:
        precision.set_products("float32")


@check("precision", "inference in bfloat16", "bfloat16_inference")
def _inference(backend: Backend) -> None:
    model, x = _net().to(backend.device()).eval(), on(backend, _IMAGES)
    prepared = inference.prepare(model, dtype=flow.bfloat16, backend=backend)
    _in_bfloat16(host(prepared(x)), host(model(x)))


@check("files", "from the device, and to it")
def _files(backend: Backend) -> None:
    x = array(3, 4)
    with tempfile.TemporaryDirectory() as folder:
        flow.save({"x": on(backend, x)}, f"{folder}/there")
        flow.save({"x": flow.tensor(x).float()}, f"{folder}/here")
        here = flow.load(f"{folder}/there", map_location=_CPU)["x"]
        there = flow.load(f"{folder}/here", map_location=backend.device())["x"]
    require(there.device.type == backend.device().type, f"it was read to {there.device}")
    equal(here, x)
    equal(there, x)


@check("collectives", "all_reduce, broadcast, all_gather")
def _collectives(backend: Backend) -> None:
    tensor, both = on(backend, array(5, seed=distributed.rank())), [array(5), array(5, seed=1)]
    gathered = [flow.zeros(5, device=backend.device()) for _ in both]
    flow.comm.all_gather(gathered, tensor)
    equal(flow.stack(gathered), both)
    summed = tensor.clone()
    flow.comm.all_reduce(summed)
    assert_close(host(summed), both[0] + both[1])
    distributed.broadcast([tensor])
    equal(tensor, both[0])


@check("collectives", "global tensors")
def _global(backend: Backend) -> None:
    full, me, placement = array(6, 4), distributed.rank(), backend.placement()
    rows = on(backend, full[3 * me : 3 * me + 3]).to_global(placement, flow.sbp.split(0))
    for layout in (flow.sbp.broadcast, flow.sbp.split(1)):
        equal(whole(rows.to_global(placement, layout), to=None), full)
    partial_sum = on(backend, full * (1 + me)).to_global(placement, flow.sbp.partial_sum)
    assert_close(host(whole(partial_sum, to=None)), full * 3)


@check("collectives", "bfloat16", "bfloat16_collectives")
def _sixteen_bits(backend: Backend) -> None:
    full, placement = array(6, 4), backend.placement()
    split = on(backend, full[3 * distributed.rank() :][:3], flow.bfloat16)
    split = split.to_global(placement, flow.sbp.split(0))
    found = whole(split.to_global(placement, flow.sbp.broadcast), to=None)
    assert_close(host(found), full, dtype="bfloat16")


@check("collectives", "DistributedDataParallel")
def _ddp(backend: Backend) -> None:
    me = distributed.rank()
    part = slice(4 * me, 4 * me + 4)
    _, *found = train(backend.device(), flow.float32, _MOMENTUM, part=part)
    _, *expected = train(flow.device("cpu", me), flow.float64, _MOMENTUM)
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs, reduced=100_000)


CHECKS.sort(key=lambda check: list(STEPS).index(check.step))
