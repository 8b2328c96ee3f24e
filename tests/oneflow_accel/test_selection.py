"""Which device is chosen, and what is said when it cannot be."""

from __future__ import annotations

import logging

from oneflow_accel import backends, settings
from oneflow_accel.backends import registry
from oneflow_accel.errors import DeviceUnavailableError

import pytest

from tests.launch import run_process

SELECT = (
    "import logging, sys; logging.basicConfig(level=logging.INFO, format='%(message)s');"
    "from oneflow_accel import backends;"
    "name = sys.argv[1] if len(sys.argv) > 1 else None;"
    "print('chosen', backends.select_device(name).name, backends.current_backend().name)"
)


def select_in_a_process(*argument: str, variable: str | None = None) -> tuple[int, str]:
    env = {settings.DEVICE.name: variable or "", "CUDA_VISIBLE_DEVICES": ""}
    process = run_process(["-c", SELECT, *argument], env=env)
    return process.returncode, process.stdout


def test_probe_takes_cpu_where_there_is_nothing_else_and_says_why() -> None:
    code, output = select_in_a_process()
    assert code == 0, output
    assert "chosen cpu cpu" in output
    assert "device cpu (the first usable one of mlu, cuda, cpu; " in output
    assert "says why not mlu and cuda" in output


def test_argument_beats_variable() -> None:
    code, output = select_in_a_process("cpu", variable="mlu")
    assert code == 0, output
    assert "device cpu (asked for)" in output


def test_variable_that_cannot_be_had_is_an_error_not_cpu() -> None:
    code, output = select_in_a_process(variable="cuda")
    assert code != 0
    assert "chosen" not in output
    assert "device 'cuda' (ONEFLOW_ACCEL_DEVICE=cuda) cannot be used: " in output


@pytest.mark.parametrize(
    ("name", "hint"),
    [("cdua", "Did you mean 'cuda'?"), ("CPU", "Did you mean 'cpu'?"), ("xyzzy", "")],
)
def test_unknown_name_lists_the_names(fresh_registry: None, name: str, hint: str) -> None:
    with pytest.raises(DeviceUnavailableError) as caught:
        backends.select_device(name)
    assert f"no device is called '{name}'" in str(caught.value)
    assert "devices are: mlu, cuda, cpu" in str(caught.value)
    assert hint in str(caught.value)


def test_a_failed_selection_leaves_the_chosen_device(fresh_registry: None) -> None:
    chosen = backends.select_device("cpu")
    with pytest.raises(DeviceUnavailableError):
        backends.select_device("mlu")
    assert backends.current_backend() is chosen


def test_current_backend_selects_once(
    fresh_registry: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="oneflow_accel"):
        first = backends.current_backend()
        assert backends.current_backend() is first
    assert sum(record.message.startswith("device ") for record in caplog.records) == 1


def test_nothing_usable_lists_every_reason(
    fresh_registry: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in registry._BUILT_IN:
        problem = f"{kind.name} is unplugged"
        monkeypatch.setattr(kind, "_problems", lambda self, problem=problem: [problem])
    with pytest.raises(DeviceUnavailableError) as caught:
        backends.select_device()
    for name in registry.PROBE_ORDER:
        assert f"{name}: {name} is unplugged" in str(caught.value)
