"""The environment variables: all are checked, at import, and their page has them as they are."""

from __future__ import annotations

import logging
import re

from oneflow_accel import settings
from oneflow_accel.errors import UserError
from oneflow_accel.kernels import plugin

import pytest

from tests.launch import REPOSITORY, run_process

WRONG = {
    settings.THREADS: ["0", "-1", "many", "1.5", "1025", "100000"],
    settings.ISA: ["AMX", "sse2"],
    settings.SCRATCH: ["1.5", "-0.1", "nan", "2GB"],
    settings.WATCHDOG: ["bogus", "65536", "-1"],
    settings.PEAK: ["fast", "0", "-1", "nan", "inf"],
    settings.BLAS: ["openblas"],
    settings.ALLOCATOR: ["jemalloc"],
    settings.EMULATED_DEVICES: ["0", "two"],
    settings.EMULATED_MEMORY: ["much", "2 Gi B", "-1GiB"],
    settings.EMULATED_FAULTS: ["lost=soon", "fail=conv2d", "fail=conv2d:0", "lost=3,", "delay=-1"],
}
# Anything goes: folders, and names that are looked up where they are used.
FREE = {settings.DEVICE, settings.DISABLE, settings.WEIGHTS, settings.CACHE, settings.EMULATE}
WRONG |= {item: ["maybe", "ON"] for item in settings.ALL.values() if item not in {*WRONG, *FREE}}
ROW = re.compile(r"^\| `((?:ONEFLOW_ACCEL|FLOW_TRAIN)_\w+)` \|(.*?)\|(.*?)\|$", re.MULTILINE)

COMMANDS = {
    "a program": ["-c", "import oneflow_accel"],
    "oneflow_accel": ["-m", "oneflow_accel"],
    "launch": ["-m", "oneflow_accel.launch", "main.py"],
    "main.py": ["resnet50_imagenet/main.py", "-h"],
    "vit_10b": ["vit_10b/run_vit_training.py", "-h"],
    "monarch_flow": ["-m", "monarch_flow.train", "-h"],
    "libai": ["libai_projects/tools/train_net.py", "-h"],
}
CAUGHT = """
try:
    import oneflow_accel
except Exception as error:
    print("caught", type(error).__name__)
raise ValueError("another")
"""


@pytest.mark.parametrize(
    ("variable", "text"), [(variable, text) for variable in WRONG for text in WRONG[variable]]
)
def test_what_is_not_allowed_is_a_sentence(
    variable: settings.Variable, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable.name, text)
    with pytest.raises(UserError) as caught:
        settings.check()
    assert str(caught.value).startswith(f"{variable.name}={text!r} is n")
    assert "\n" not in str(caught.value)


def test_what_is_allowed_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in settings.ALL.values():
        monkeypatch.setenv(variable.name, "")
        assert variable.get() == variable.default
        for choice in variable.choices:
            monkeypatch.setenv(variable.name, choice)
            assert variable.get() in (choice, choice == "1")
    assert settings.ISA.choices == tuple(level.name for level in plugin.LEVELS)
    for variable, text, value in (
        (settings.THREADS, "3", 3),
        (settings.SCRATCH, "0.5", 0.5),
        (settings.WATCHDOG, "29500", "29500"),
        (settings.PEAK, "312", 312.0),
    ):
        monkeypatch.setenv(variable.name, text)
        assert variable.get() == value
    settings.check()


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_every_command_says_it_and_exits_with_2(command: list[str]) -> None:
    process = run_process(command, env={"FLOW_TRAIN_CURVES": "maybe"})
    assert process.returncode == 2, process.stdout
    (line,) = process.stdout.splitlines()
    assert re.match(r"[\w.]+: error: FLOW_TRAIN_CURVES='maybe' is neither 'on' nor 'off' \(", line)


def test_a_program_can_catch_it() -> None:
    process = run_process(["-c", CAUGHT], env={"ONEFLOW_ACCEL_ISA": "AMX"})
    assert process.returncode == 1
    assert process.stdout.startswith("caught UserError\nTraceback")
    assert process.stdout.endswith("ValueError: another\n")


def test_a_mistyped_name_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("ONEFLOW_ACCEL_THREAD", "FLOW_TRAIN_CURVE"):
        monkeypatch.setenv(name, "1")
    with caplog.at_level(logging.WARNING):
        settings.check()
    assert [record.getMessage() for record in caplog.records] == [
        "there is no variable FLOW_TRAIN_CURVE, it changes nothing: did you mean "
        "FLOW_TRAIN_CURVES?",
        "there is no variable ONEFLOW_ACCEL_THREAD, it changes nothing: did you mean "
        "ONEFLOW_ACCEL_THREADS?",
    ]


@pytest.mark.parametrize("page", ["docs/environment.md", "docs/zh-CN/environment.md"])
def test_the_page_has_them_all(page: str) -> None:
    rows = {name: cells for name, *cells in ROW.findall((REPOSITORY / page).read_text())}
    assert set(rows) == set(settings.ALL)
    for name, (meaning, default) in rows.items():
        variable = settings.ALL[name]
        if variable.choices:
            # A switch's row names the one that is not the default.
            shown = {False: "0"}.get(variable.default, variable.default)
            assert default.strip() == f"`{shown}`" or shown is None, name
            for choice in set(variable.choices) - {shown}:
                assert f"`{choice}`" in meaning, (name, choice)
