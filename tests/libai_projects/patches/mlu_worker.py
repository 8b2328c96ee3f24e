"""Trains and evaluates LiBai's GPT on a pretended MLU card; started by test_libai_on_mlu.py.

The driver's files, the vendor's package and a oneflow that knows the device are fakes; placements
on the card are on the CPU. Operators without a kernel on MLU raise what OneFlow raises then: it
shows which operators are called, and nothing about the card's own kernels.
"""

from __future__ import annotations

import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import oneflow_accel
from oneflow_accel.backends import mlu
from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
import pytest

# What oneflow_mlu 0.0.1 lacks, by the names that oneflow 0.9.0 has in Python.
MISSING = {
    flow: ["tril", "triu", "rand", "masked_fill", "cumsum", "multinomial", "var", "sort", "flip"],
    flow._C: [
        "tril",
        "triu",
        "rand",
        "uniform",
        "masked_fill",
        "cumsum",
        "var",
        "fused_bias_add_gelu",
        "fused_bias_add_dropout",
        "fused_scale_mask_softmax",
        "fused_scale_mask_softmax_dropout",
        "fused_scale_tril",
        "fused_scale_tril_softmax_mask_scale",
        "amp_white_identity",
    ],
    flow.Tensor: ["tril", "triu", "masked_fill", "var"],
}
COMPARISONS = ["__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"]


def no_kernel(name: str) -> Callable[..., NoReturn]:
    def function(*args: object, **options: object) -> NoReturn:
        raise RuntimeError(f"Cannot find the kernel matching Current OperatorConf: {name}")

    return function


def checked_comparison(compare: Callable[..., flow.Tensor]) -> Callable[..., flow.Tensor]:
    def function(self: flow.Tensor, other: object) -> flow.Tensor:
        if isinstance(self, flow.Tensor) and self.dtype == flow.int64:
            raise RuntimeError("Cannot find the kernel: a comparison of int64")
        return compare(self, other)

    return function


def pretend_card(folder: Path) -> None:
    (folder / "cambricon_dev0").touch()
    mlu.DEVICE_NODES = str(folder / "cambricon_dev[0-9]*")
    mlu.oneflow_knows = lambda device_type: True
    # The first release that knows the device.
    flow.__version__ = "1.0.0"
    package = types.ModuleType(mlu.VENDOR_PACKAGE)
    package.__spec__ = types.SimpleNamespace(name=mlu.VENDOR_PACKAGE, origin="fake")  # type: ignore
    sys.modules[mlu.VENDOR_PACKAGE] = package
    mlu.MluBackend.placement = lambda self, ranks=None: flow.placement("cpu", ranks)  # type: ignore
    assert oneflow_accel.select_device("mlu").name == "mlu"


def remove_kernels() -> None:
    for holder, names in MISSING.items():
        for name in names:
            if hasattr(holder, name):
                setattr(holder, name, no_kernel(name))
    for name in COMPARISONS:
        setattr(flow.Tensor, name, checked_comparison(getattr(flow.Tensor, name)))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        pretend_card(Path(folder))
        from tests.libai_projects.layouts_worker import Case, losses
        from tests.libai_projects.patches import tiny_gpt
        from tests.libai_projects.test_parallel_layouts import DROPOUT, FUSED, SCALED

        remove_kernels()
        # Everything that the card lacks is asked for.
        trained = losses(Case(model="libai", config=SCALED))
        reference = [float(loss) for loss in sys.argv[1].split(",")]
        np.testing.assert_allclose(trained, reference, rtol=0, atol=1e-5)
        print("trained on the fake card", flush=True)
        dropped = losses(Case(model="libai", config={**FUSED, **DROPOUT}))
        assert np.isfinite(dropped).all()
        assert dropped != trained
        print("dropped out on the fake card", flush=True)
        with pytest.raises(UserError, match=r"set graph\.enabled=False"):
            losses(Case(model="libai", graph=True))
        print("refused a graph", flush=True)
        drop_path_without_rand(tiny_gpt.HIDDEN)


def drop_path_without_rand(width: int) -> None:
    from libai.layers import DropPath
    from libai.utils import distributed

    sbp = distributed.get_hidden_sbp()
    x = flow.ones(2000, width, placement=distributed.get_layer_placement(0), sbp=sbp)
    y = DropPath(0.25).train()(x).numpy()
    kept = y[:, 0] != 0
    assert (y == np.where(kept, np.float32(1 / 0.75), 0)[:, None]).all()
    assert 0.7 < kept.mean() < 0.8
    print("dropped paths on the fake card", flush=True)


if __name__ == "__main__":
    main()
