"""Every operation on every device: an implementation, or the reason why there is none.

No GPU and no card is here, so what is written for them runs on CPU tensors: OneFlow's own functions
compute the same there, all but its attention, of which the test has a stand-in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oneflow_accel.__main__ import main
from oneflow_accel.backends import cuda
from oneflow_accel.backends.cuda import CudaBackend
from oneflow_accel.backends.registry import PROBE_ORDER
from oneflow_accel.kernels import attention, convolution, linear, registry

import numpy as np
import oneflow as flow
import pytest

from tests.tolerances import assert_close

OPERATIONS = registry.operations()
generator = np.random.default_rng(0)


def tensor(*shape: int, gradient: bool = False) -> flow.Tensor:
    values = generator.normal(size=shape).astype(np.float32)
    return flow.tensor(values, requires_grad=gradient)


def written_for_cuda(operation: str) -> Callable[..., Any]:
    (found,) = [i for i in OPERATIONS[operation].implementations if i.backend == CudaBackend.name]
    assert found.never_run
    return found.function


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("device", PROBE_ORDER)
def test_each_operation_has_a_row_for_each_device(name: str, device: str) -> None:
    operation = OPERATIONS[name]
    implemented = [i for i in operation.implementations if i.backend == device]
    reason = operation.lacks.get(device)
    assert bool(implemented) != bool(reason), f"{name} on {device}: {implemented} or {reason!r}"
    # Only the CPU's have run.
    assert all(i.never_run for i in implemented) == (device != "cpu" or not implemented)


def test_explain_prints_every_row_and_which_was_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    text = capsys.readouterr().out
    for name, operation in OPERATIONS.items():
        assert f"{name}: " in text
        for candidate in operation.implementations:
            assert candidate.describe() in text
        for device, reason in operation.lacks.items():
            assert f"none for {device}: {reason}" in text
    assert text.count("CHOSEN") == len(OPERATIONS)
    assert "never run on such a device" in text


def test_explain_for_a_device_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cuda", "explain", "linear", "monarch_multiply"]) == 0
    text = capsys.readouterr().out
    assert "CHOSEN: cublas_lt (cuda" in text
    assert text.count("CHOSEN: reference") == 1


@pytest.mark.parametrize("addend", [False, True])
@pytest.mark.parametrize("chosen_here", [False, True])
def test_linear_and_all_its_gradients(addend: bool, chosen_here: bool) -> None:
    function = linear.linear if chosen_here else written_for_cuda("linear")
    x, weight, bias = tensor(2, 3, 4), tensor(5, 4), tensor(5)
    tensors = [x, weight, bias, *([tensor(2, 3, 5)] if addend else [])]
    for each in tensors:
        each.requires_grad = True
    y = function(*tensors)
    want = x.numpy() @ weight.numpy().T + bias.numpy()
    assert_close(y.numpy(), want + (tensors[3].numpy() if addend else 0))
    y.sum().backward()
    ones = np.ones((2, 3, 5), np.float32)
    gradients = [ones @ weight.numpy(), np.tensordot(ones, x.numpy(), ((0, 1), (0, 1)))]
    gradients += [ones.sum((0, 1)), ones]
    for each, gradient in zip(tensors, gradients, strict=False):
        assert_close(each.grad.numpy(), gradient)


def test_channels_last_convolution_by_oneflows_operator() -> None:
    x, weight, bias = tensor(2, 7, 6, 8), tensor(4, 4, 3, 3), tensor(4)
    geometry = {"stride": (2, 1), "padding": (1, 0), "dilation": (1, 1), "groups": 2}
    ours = written_for_cuda("channels_last_conv2d")(x, weight, bias, **geometry)
    assert_close(ours.numpy(), convolution._reference(x, weight, bias, **geometry).numpy())


def attention_of_heads(
    query: flow.Tensor,
    key: flow.Tensor,
    value: flow.Tensor,
    num_heads: int,
    causal: bool,
    **cut: int,
) -> flow.Tensor:
    """As OneFlow v0.9.0's own test has it: rows of all heads side by side, or a slice of such."""
    parts = []
    for name, rows in (("query", query), ("key", key), ("value", value)):
        start = cut.get(f"{name}_hidden_slice_start", 0)
        end = cut.get(f"{name}_hidden_slice_end", rows.shape[2])
        array = rows.numpy()[:, :, start:end].astype(np.float64)
        parts.append(array.reshape(*array.shape[:2], num_heads, -1).transpose(0, 2, 1, 3))
    q, k, v = parts
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if causal:
        scores += np.triu(np.full(scores.shape[-2:], -np.inf), 1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = (weights / weights.sum(-1, keepdims=True)) @ v
    out = out.transpose(0, 2, 1, 3).reshape(*query.shape[:2], -1)
    return flow.tensor(out.astype(np.float32))


@pytest.mark.parametrize("causal", [False, True])
def test_attention_gives_oneflows_operator_what_it_takes(
    causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow._C, "fused_multi_head_attention_inference", attention_of_heads)
    query, key, value = (tensor(2, 3, 5, 8) for _ in range(3))
    ours = written_for_cuda("scaled_dot_product_attention")(
        query, key, value, causal=causal, scale=8**-0.5
    )
    want = attention._composition(query, key, value, causal=causal, scale=8**-0.5)
    assert_close(ours.numpy(), want.numpy())
    qkv = tensor(2, 5, 3, 3, 8)
    ours = written_for_cuda("packed_attention")(qkv, causal=causal, scale=8**-0.5)
    want = attention._packed_operation.reference(qkv, causal=causal, scale=8**-0.5)
    assert_close(ours.numpy(), want.numpy())


def test_attention_for_inference_says_what_it_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [type("Gpu", (), {"capability": capability}) for capability in ((6, 1), (8, 0))]
    asked: list[int] = []
    current = 0

    def gpu(backend: CudaBackend) -> type:
        asked.append(current)
        return gpus[current]

    monkeypatch.setattr(CudaBackend, "_gpu", gpu)
    monkeypatch.setattr(CudaBackend, "current_device", lambda self: current)
    cuda._capability.cache_clear()
    query, key = tensor(1, 2, 3, 4, gradient=True), tensor(1, 2, 5, 4)
    none = None, None
    reasons = attention._inference_reasons(query, key, key, *none, causal=True, scale=1.0)
    assert [reason.split(",")[0] for reason in reasons] == [
        "needs compute capability 7.0 or newer",
        "has no gradient",
        "scales by 1 / sqrt(4)",
        "hides columns by their number",
    ]
    current = 1
    for _ in range(3):
        packed = tensor(1, 3, 3, 2, 4)
        assert attention._inference_reasons(packed, *none, causal=True, scale=0.5) == []
    # The driver is asked once for each GPU.
    assert asked == [0, 1]
    cuda._capability.cache_clear()
