"""The MLU backend, with a fake vendor's package, driver's files and oneflow that knows mlu."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from pathlib import Path

from oneflow_accel.backends import mlu
from oneflow_accel.backends.mlu import MluBackend
from oneflow_accel.errors import DeviceUnavailableError

import pytest

COUNTING_PACKAGE = (
    "import builtins\nbuiltins.mlu_imports = getattr(builtins, 'mlu_imports', 0) + 1\n"
)


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(mlu.VISIBLE_VARIABLE, raising=False)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of a driver with two cards."""
    for index, name in enumerate(["MLU370-X8", "MLU370-S4"]):
        (tmp_path / f"cambricon_dev{index}").touch()
        information = tmp_path / f"0000:0{index}:00.0" / "information"
        information.parent.mkdir()
        information.write_text(f"Device name              : {name}\nDriver Version: v4.20.6\n")
    monkeypatch.setattr(mlu, "DEVICE_NODES", str(tmp_path / "cambricon_dev[0-9]*"))
    monkeypatch.setattr(mlu, "INFORMATION_FILES", str(tmp_path / "*" / "information"))
    return tmp_path


@pytest.fixture
def vendor_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package oneflow_mlu that counts how often it is imported, and a oneflow that knows mlu."""
    file = tmp_path / "packages" / f"{mlu.VENDOR_PACKAGE}.py"
    file.parent.mkdir()
    file.write_text(COUNTING_PACKAGE)
    monkeypatch.syspath_prepend(str(file.parent))
    monkeypatch.setattr("builtins.mlu_imports", 0, raising=False)
    monkeypatch.setattr(mlu, "oneflow_knows", lambda device_type: True)
    yield file
    sys.modules.pop(mlu.VENDOR_PACKAGE, None)


def imports() -> int:
    return int(getattr(builtins, "mlu_imports", 0))


def test_all_that_is_missing_here_is_named() -> None:
    reason = str(MluBackend().unavailable_reason())
    assert "no Cambricon driver or card" in reason
    assert "the package oneflow_mlu is not installed" in reason
    assert "oneflow 0.9.0 does not know the device type 'mlu'" in reason


@pytest.mark.usefixtures("driver", "vendor_package")
def test_probing_imports_nothing_and_activating_imports_once_with_fake_vendor_module() -> None:
    backend = MluBackend()
    assert backend.unavailable_reason() is None
    assert backend.is_available()
    assert imports() == 0
    backend.activate()
    MluBackend().activate()
    assert imports() == 1


@pytest.mark.usefixtures("driver")
def test_vendor_package_that_fails_is_named_with_fake_vendor_module(vendor_package: Path) -> None:
    vendor_package.write_text("raise ImportError('libcnrt.so: cannot open shared object file')")
    with pytest.raises(DeviceUnavailableError, match=r"import oneflow_mlu failed: libcnrt.so"):
        MluBackend().activate()


@pytest.mark.usefixtures("driver", "vendor_package")
def test_visible_devices_with_fake_vendor_module(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MluBackend().device_count() == 2
    monkeypatch.setenv(mlu.VISIBLE_VARIABLE, "1")
    assert MluBackend().device_count() == 1
    monkeypatch.setenv(mlu.VISIBLE_VARIABLE, "")
    assert MluBackend().unavailable_reason() == (
        "MLU_VISIBLE_DEVICES hides all 2 cards of this machine"
    )


@pytest.mark.usefixtures("driver", "vendor_package")
def test_properties_with_fake_vendor_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MluBackend, "current_device", lambda self: 0)
    properties = MluBackend().properties()
    assert properties.name == "MLU370-X8"
    assert properties.peak_flops == {"float32": None, "float16": 96e12, "bfloat16": 96e12}
    monkeypatch.setenv(mlu.VISIBLE_VARIABLE, "1")
    properties = MluBackend().properties()
    assert properties.name == "MLU370-S4"
    assert set(properties.peak_flops.values()) == {None}


@pytest.mark.parametrize(
    "feature",
    ["amp", "plain_sgd", "fused_bn_add_relu_train", "causal_mask", "uniform_random", "graph_adamw"],
)
def test_missing_kernels_have_a_reason(feature: str) -> None:
    answer = MluBackend().supports(feature)
    assert not answer
    assert len(answer.reason) > 20


def test_cards_whose_kernels_are_in_oneflow_need_no_package_with_fake_driver(
    driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlu, "oneflow_knows", lambda device_type: True)
    loaded = driver / "maps"
    monkeypatch.setattr(mlu, "LOADED_FILES", str(loaded))
    loaded.write_text("7f00-7f01 r-xp 0 08:01 9 /usr/local/neuware/lib64/libcnrt.so.6\n")
    assert "oneflow_mlu is not installed" in str(MluBackend().unavailable_reason())
    loaded.write_text("7f00-7f01 r-xp 0 08:01 9 /usr/local/neuware/lib64/libcnnl.so.1.15\n")
    assert MluBackend().unavailable_reason() is None
    MluBackend().activate()
    assert mlu.VENDOR_PACKAGE not in sys.modules


def test_memory_is_unknown_and_says_so() -> None:
    assert MluBackend().memory_allocated() is None
    assert MluBackend().max_memory_allocated() is None
    assert "cnmon" in MluBackend().supports("memory_stats").reason
