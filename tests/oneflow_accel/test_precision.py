"""The names of precisions, and what a device without them says."""

from __future__ import annotations

import dataclasses

from oneflow_accel import current_backend, precision, settings
from oneflow_accel.errors import UserError
from oneflow_accel.kernels import plugin
from oneflow_accel.kernels.loss import linear_cross_entropy_mean

import numpy as np
import oneflow as flow
import pytest

from tests.launch import REPOSITORY, run_process

MAIN = REPOSITORY / "resnet50_imagenet" / "main.py"
TINY = ("-a", "resnet18", "--dummy", "--image-size", "32", "-b", "16", "-j", "0", "--seed", "1")
TINY += ("--max-steps", "3", "--epochs", "1", "-p", "1", "--lr", "0.01", "--device", "cpu")

needs_plugin = pytest.mark.skipif(
    not plugin.state().loaded, reason="stock OneFlow has no bfloat16 on CPUs"
)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (32, "float32"),
        ("fp32", "float32"),
        (16, "float16"),
        ("bf16", "bfloat16"),
        ("bf16-mixed", "bfloat16"),
        ("bfloat16", "bfloat16"),
        ("float32-bf16-products", "float32-bf16-products"),
    ],
)
def test_aliases(value: str | int, name: str) -> None:
    assert precision.canonical(value) == name


def test_another_name_is_an_error_that_lists_them() -> None:
    with pytest.raises(UserError, match="precision 'fp8' is none of float32, float32-bf16-pro"):
        precision.canonical("fp8")


def test_cpu_without_bfloat16_says_so(tmp_path) -> None:
    """Whatever this one has."""
    command = [MAIN, *TINY, "--precision", "bfloat16", "--output-dir", tmp_path]
    process = run_process(command, env={"ONEFLOW_ACCEL_ISA": "avx2"})
    assert process.returncode == 2
    assert "Traceback" not in process.stdout
    words = "no AVX-512 BF16 instructions" if plugin.state().loaded else "the CPU plug-in"
    assert words in process.stdout
    assert "--precision bfloat16: cpu cannot do this" in process.stdout
    if plugin.state().loaded:
        assert f"{settings.EMULATE_BFLOAT16.name}=1 computes the same" in process.stdout


def test_what_is_emulated_is_training(monkeypatch) -> None:
    monkeypatch.setattr(
        plugin, "state", lambda: dataclasses.replace(plugin.load(), fast_bfloat16=False)
    )
    kinds = ("bfloat16_training", "bfloat16_products", "bfloat16_inference")
    backend = current_backend()
    assert not any(backend.supports(kind) for kind in kinds)
    monkeypatch.setenv(settings.EMULATE_BFLOAT16.name, "1")
    emulated = [plugin.state().loaded, plugin.state().loaded, False]
    assert [bool(backend.supports(kind)) for kind in kinds] == emulated


@needs_plugin
def test_a_loss_of_its_own_logits_is_rounded_too() -> None:
    """Its logits are scratch memory, which rounding must not write over."""
    random = np.random.default_rng(4)
    x, w = (
        flow.tensor(random.standard_normal(shape).astype(np.float32)).requires_grad_()
        for shape in ((64, 32), (500, 32))
    )
    labels = flow.tensor(random.integers(0, 500, 64))
    exact = linear_cross_entropy_mean(x, w, labels)
    expected = flow.autograd.grad(exact, [x, w])
    try:
        precision.set_products("bfloat16")
        with flow.autocast(device_type="cpu", dtype=flow.bfloat16):
            found = linear_cross_entropy_mean(x.bfloat16(), w, labels, chunk_rows=24)
        gradients = flow.autograd.grad(found, [x, w])
        for mine, theirs in zip((found, *gradients), (exact, *expected), strict=True):
            error = np.abs(mine.numpy() - theirs.numpy()).max()
            assert 0 < error <= 2**-6 * theirs.abs().max().item()
    finally:
        precision.set_products("float32")


@needs_plugin
def test_products_are_rounded_from_when_it_is_asked_for_until_it_is_not() -> None:
    random = np.random.default_rng(2)
    a, b = (flow.tensor(random.standard_normal((64, 64)).astype(np.float32)) for _ in range(2))
    exact = a.numpy().astype(np.float64) @ b.numpy()
    try:
        precision.set_products("float32-bf16-products")
        rounded = a @ b
    finally:
        precision.set_products("float32")
    error = np.abs(rounded.numpy() - exact).max()
    assert 1e-4 < error / np.abs(exact).max() < 2**-7
    np.testing.assert_allclose((a @ b).numpy(), exact, atol=1e-4)
    assert rounded.dtype == flow.float32
