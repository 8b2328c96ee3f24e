"""Whatever a program imports first works, and it says nothing that is no concern of its user."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launch import REPOSITORY, run_distributed, run_process

IMPORT_EACH = Path(__file__).with_name("import_each.py")
PACKAGES = ("oneflow_accel", "flow_train", "monarch_flow", "resnet50_imagenet", "vit_10b")
PACKAGES += ("libai_projects",)
# As the READMEs have them.
NAMED = (
    "from monarch_flow.models import create_model; create_model('vit_tiny_patch4_28')",
    "from monarch_flow.layers import replace_linears",
    "import oneflow_accel; oneflow_accel.select_device()",
)


def modules(package: str) -> list[str]:
    found = []
    for file in sorted((REPOSITORY / package).rglob("*.py")):
        path = file.relative_to(REPOSITORY)
        folders = [REPOSITORY / parent for parent in path.parents if parent.parts]
        if all((folder / "__init__.py").exists() for folder in folders):
            parts = path.with_suffix("").parts
            found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return found


def packages() -> list[str]:
    """Those with an `__init__.py`, however deep."""
    return [
        module
        for package in PACKAGES
        for module in modules(package)
        if (REPOSITORY / module.replace(".", "/")).is_dir()
    ]


def import_each(first: str, names: list[str], folder: Path) -> dict[str, str]:
    process = run_process([IMPORT_EACH, first, *names], timeout=280, cwd=folder)
    assert process.returncode == 0, process.stdout
    line = next(line for line in process.stdout.splitlines() if line.startswith("wrong "))
    wrong: dict[str, str] = json.loads(line.removeprefix("wrong "))
    return wrong


@pytest.mark.parametrize("first", PACKAGES[:-1])
def test_every_module_imports_by_itself_and_in_silence(first: str, tmp_path: Path) -> None:
    names = modules(first)
    assert len(names) > 5
    assert import_each(first, names, tmp_path) == {}


def test_every_package_on_libai_imports_by_itself_and_in_silence(tmp_path: Path) -> None:
    names = [name for name in packages() if name.startswith("libai_projects")]
    assert len(names) > 5
    assert import_each("libai_projects", names, tmp_path) == {}


@pytest.mark.release
def test_every_package_imports_after_oneflow(tmp_path: Path) -> None:
    names = packages()
    assert {"monarch_flow.models", "libai_projects.configs", "oneflow_accel.kernels"} <= set(names)
    # To fork, oneflow waits for its scheduler, and has begun then.
    late = "oneflow_accel was imported late: oneflow had begun, "
    wrong = import_each("oneflow", names, tmp_path)
    assert {name: said for name, said in wrong.items() if not said.startswith(late)} == {}
    assert all(said.count("\n") == 1 for said in wrong.values())


@pytest.mark.parametrize("statement", NAMED)
def test_what_the_readmes_import_first(statement: str, tmp_path: Path) -> None:
    process = run_process(["-c", f"import oneflow; {statement}"], cwd=tmp_path)
    assert process.returncode == 0, process.stdout
    assert "imported late" not in process.stdout


def test_a_thread_may_be_the_first_to_import(tmp_path: Path) -> None:
    """Two at once, one of which imports oneflow first, while the main thread waits."""
    script = tmp_path / "threads.py"
    script.write_text(
        "import threading\n"
        "failed = []\n"
        "def run(code):\n"
        "    try: exec(code, {})\n"
        "    except BaseException as error: failed.append(error)\n"
        "codes = ['import oneflow', 'import oneflow_accel', 'import monarch_flow.layers']\n"
        "threads = [threading.Thread(target=run, args=(code,)) for code in codes]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()\n"
        "assert not failed, failed\n"
        "from oneflow_accel import patching\n"
        "states = {s.state for s in patching.status() if s.package == 'oneflow'}\n"
        "assert states <= {'applied', 'not-needed'}, states\n"
        "import oneflow as flow\n"
        "print('sum', flow.ones(8).sum().item())\n"
    )
    process = run_process([script], cwd=tmp_path)
    assert process.returncode == 0, process.stdout
    assert "sum 8.0" in process.stdout


def test_processes_that_have_met_import_it_after_oneflow(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, pathlib, oneflow as flow\n"
        "import oneflow_accel\n"
        "x = flow.ones(2, placement=flow.placement.all('cpu'), sbp=flow.sbp.split(0)) + 1\n"
        "total = x.sum().to_global(sbp=flow.sbp.broadcast).to_local().item()\n"
        "pathlib.Path('rank' + os.environ['RANK']).write_text(str(total))\n"
    )
    process = run_distributed([script], 2, timeout=60, cwd=tmp_path)
    assert process.returncode == 0, process.stdout
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["4.0", "4.0"]
    assert "imported late" not in process.stdout
