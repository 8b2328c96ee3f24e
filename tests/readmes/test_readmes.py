"""Each command, import and block of READMEs and --help is run, or entries.py says why not."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from documents import DOCUMENTS, Document, is_python, read_document, read_help
from entries import BLOCKS, CI, COMMANDS, Code, Dry, Help, NotRun, Run

from tests.launch import REPOSITORY, run_process
from tests.readmes.conftest import World

PROGRAMS = (
    "resnet50_imagenet/main.py",
    "resnet50_imagenet.demo",
    "vit_10b/run_vit_training.py",
    "vit_10b.consolidate",
    "libai_projects/tools/train_net.py",
    "libai_projects/tools/preprocess_data.py",
    "libai_projects/projects/MagicPrompt/prepare.py",
    "libai_projects/projects/MagicPrompt/pipeline.py",
    "libai_projects/projects/Llama/pretrain.py",
    "libai_projects.weights.convert",
    "monarch_flow.train",
    "monarch_flow.validate",
    "monarch_flow.compare",
    "monarch_flow.compare transforms",
    "monarch_flow.convert",
    "monarch_flow.convert project",
    "monarch_flow.convert densify",
    "monarch_flow.convert t2t",
    "monarch_flow.models",
    "oneflow_accel",
    "oneflow_accel kernels",
    "oneflow_accel conformance",
    "oneflow_accel explain",
    "oneflow_accel patch",
    "benchmarks",
    "benchmarks.breakdown",
    "benchmarks.flash",
    "benchmarks.batches",
    "benchmarks.contention",
    "benchmarks.sharded",
    "benchmarks.memory",
    "oneflow_accel.launch",
)
# Of other programs.
OTHER_OPTIONS = {
    "oneflow.distributed.launch": ("--nproc_per_node", "--nnodes", "--node_rank", "--master_addr"),
    "pip": ("--build-constraint",),
    "bochs": ("--enable-x86-64", "--enable-avx", "--enable-evex", "--enable-amx", "--with-nogui"),
}

READ = [read_document(name) for name in DOCUMENTS]


@pytest.fixture(scope="session")
def helps() -> dict[str, str]:
    result = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "all_helps.py"), *PROGRAMS],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def all_documents(helps: dict[str, str]) -> list[Document]:
    return [*READ, *(read_help(name, text) for name, text in helps.items())]


def test_every_document_is_read() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True
    )
    assert sorted(listed.stdout.split()) == sorted([*DOCUMENTS, "CHANGELOG.md"])


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if "zh-CN" in name])
def test_a_chinese_twin_says_the_same(name: str) -> None:
    """The same commands, blocks, names and headings of the same depth, in the same order."""
    english = re.sub("_zh-CN|zh-CN/", "", name)
    ours, theirs = read_document(name), read_document(english)
    assert ours.blocks == theirs.blocks
    assert sorted(ours.commands) == sorted(theirs.commands)
    assert sorted(ours.spans) == sorted(theirs.spans)
    depths = [
        [
            line.split()[0]
            for line in (REPOSITORY / file).read_text().splitlines()
            if "# " in line[:5]
        ]
        for file in (name, english)
    ]
    assert depths[0] == depths[1]


def anchors(path: Path) -> set[str]:
    """Of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_link_leads_somewhere(name: str) -> None:
    """Files, and headings in them; not what lies on other hosts."""
    here = REPOSITORY / name
    for link in re.findall(r"\]\(([^)\s]+)\)", here.read_text(encoding="utf-8")):
        if not link.startswith("https://"):
            file, _, anchor = link.partition("#")
            target = (here.parent / file) if file else here
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_every_command_has_an_entry(
    helps: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """... and every entry a document. Prints how many are run."""
    documents = all_documents(helps)
    assert min(map(len, helps.values())) > 150
    found = {command: d.name for d in reversed(documents) for command in d.commands}
    blocks = {beginning(block): d.name for d in documents for block in d.blocks}
    for entries, there in ((COMMANDS, found), (BLOCKS, blocks)):
        missing = [f"{name}: {text}" for text, name in there.items() if text not in entries]
        assert not missing, "entries.py has to say how to run\n" + "\n".join(missing)
        left = [text for text in entries if text not in there]
        assert not left, "entries.py has what no document has any more\n" + "\n".join(left)

    run = sum(isinstance(entry, Run) for entry in COMMANDS.values())
    dry = sum(isinstance(entry, Dry) for entry in COMMANDS.values())
    reasons = Counter(
        entry.reason
        for entry in [*COMMANDS.values(), *BLOCKS.values()]
        if isinstance(entry, NotRun)
    )
    with capsys.disabled():
        print(
            f"\n{sum(len(d.commands) for d in documents)} commands in {len(documents)} documents, "
            f"{len(COMMANDS)} different ones: {run} run, {dry} as make -n; "
            f"{len(python_blocks())} imports and blocks of Python or YAML run. Not run:"
        )
        for reason, count in reasons.items():
            print(f"  {count}: {reason}")


@pytest.mark.parametrize(
    "command",
    [
        # What measures takes long.
        pytest.param(name, marks=pytest.mark.release if "-m benchmarks." in name else ())
        for name, entry in COMMANDS.items()
        if isinstance(entry, Run)
    ],
    # Of longer ones pytest leaves a number.
    ids=lambda command: command[:95],
)
def test_command(world: World, command: str) -> None:
    world.run(command)


def test_help(helps: dict[str, str]) -> None:
    for command, entry in COMMANDS.items():
        if isinstance(entry, Help):
            assert entry.expect in helps[entry.program], command


def test_targets_of_make() -> None:
    """`make` knows what the commands name that are not run here."""
    for command, entry in COMMANDS.items():
        if isinstance(entry, Dry) or (entry is CI and "make" in command):
            for part in command.split(" && "):
                line = part.replace("make ", "make -n ", 1)
                result = subprocess.run(
                    ["bash", "-c", line],
                    cwd=REPOSITORY,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    timeout=60,
                )
                assert result.returncode == 0, result.stdout


def beginning(block: str) -> str:
    """The key of its entry; where there is none, its first line."""
    fit = [key for key in BLOCKS if block.startswith(key)]
    return max(fit, key=len, default=block.splitlines()[0])


def python_blocks() -> list[str]:
    """Blocks that are run, each once."""
    blocks = {block: None for document in READ for block in document.blocks}
    return [block for block in blocks if isinstance(BLOCKS[beginning(block)], Code)]


@pytest.mark.parametrize("block", python_blocks(), ids=lambda block: block.splitlines()[0][:60])
def test_block(world: World, block: str) -> None:
    entry = BLOCKS[beginning(block)]
    for needed in entry.after:
        world.run(needed)
    if entry.yaml:
        parts = [f"text = {block!r}", entry.check]
    else:
        assert is_python(block)
        imports = [
            ast.unparse(node)
            for node in ast.parse(block).body
            if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        # Once more with the block itself, which does no harm.
        parts = ["\n".join(imports), world.filled(entry.before), block, entry.check]
    result = run_process(
        ["-c", "\n".join(parts)],
        # Without the folder of the repository, as a user's program.
        env={**world.environment, "PYTHONPATH": str(REPOSITORY) if "tests." in parts[1] else ""},
        cwd=world.checkout,
    )
    assert result.returncode == 0, f"{parts}\n{result.stdout}"


def test_options_that_are_named_exist(helps: dict[str, str]) -> None:
    known = set(re.findall(r"--?[a-z][\w-]*", " ".join(helps.values())))
    known.update(*OTHER_OPTIONS.values())
    for document in READ:
        # Half of its table are other programs' options.
        if document.name == "monarch_flow/docs/vitae_options.md":
            continue
        for span in document.spans:
            # Those of pytest, and of commands of other projects.
            if not isinstance(COMMANDS.get(span), NotRun):
                options = re.findall(r"(?<=[ `])--?[a-z][\w-]*|^--?[a-z][\w-]*", span)
                assert set(options) <= known, f"{document.name}: {span}"


def test_files_and_names_that_are_named_exist() -> None:
    """`tests/x/test_y.py` and `oneflow_accel.errors.UserError` in the text."""
    names = set()
    for document in READ:
        for span in document.spans:
            for word in span.split():
                if re.fullmatch(r"(tests|benchmarks|requirements|scripts)(/\w+)+(\.\w+)?/?", word):
                    assert (REPOSITORY / word).exists(), f"{document.name}: {word}"
            name = re.fullmatch(r"((oneflow_accel|monarch_flow|benchmarks)(\.\w+)+)(\(.*)?", span)
            if name is not None:
                names.add(name[1])
    assert "oneflow_accel.errors.UserError" in names
    code = (
        "import pkgutil, sys, oneflow_accel\n"
        "for name in sys.argv[1:]:\n"
        "    pkgutil.resolve_name(name)"
    )
    result = run_process(["-c", code, *sorted(names)])
    assert result.returncode == 0, result.stdout
