"""What the documents tell their readers to type: commands, and blocks of Python and YAML."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.launch import REPOSITORY


def _pages(folder: str, names: str) -> list[str]:
    """A folder's README and, of its docs/, these names; each with its Chinese twin."""
    twins = [f"{folder}docs/{part}{name}.md" for name in names.split() for part in ("", "zh-CN/")]
    return [f"{folder}README.md", f"{folder}README_zh-CN.md", *twins]


# A history and not an instruction: CHANGELOG.md.
DOCUMENTS = (
    *_pages("", "coming_from devices environment install precision speed troubleshooting"),
    *_pages("resnet50_imagenet/", ""),
    *_pages("vit_10b/", ""),
    *_pages("libai_projects/projects/MagicPrompt/", ""),
    *_pages("libai_projects/projects/BERT/", ""),
    *_pages("libai_projects/projects/Llama/", "ablation estimate flags measured"),
    *_pages("monarch_flow/", "layers measured models training"),
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "flow_train/README.md",
    "oneflow_accel/README.md",
    "monarch_flow/docs/vitae_options.md",
    "oneflow_accel/csrc/README.md",
    "oneflow_accel/emulated/README.md",
    "docs/bring_up_a_device.md",
)

_PROGRAMS = r"python3?|make|bash|cd|curl|pip|source|export|apt-get|uv|pyenv|git|\.ci/run"
_COMMAND = re.compile(rf"([A-Z_]+=\S+ )*({_PROGRAMS})( |$)")
# Of a command in running text, as in a program's help: what its arguments look like.
_IN_TEXT = re.compile(r"\bpython3? (-m )?[\w./]+( (--?\w[\w-]*|[A-Z]+|\d+|[^\s[]*\w[./=]\S+))*")


@dataclass
class Document:
    """A file's or a --help's commands (one line each, no comment), blocks and `code` spans."""

    name: str
    commands: list[str] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)
    spans: list[str] = field(default_factory=list)


def read_document(name: str) -> Document:
    document = Document(name)
    prose = []
    for is_code, text in _parts((REPOSITORY / name).read_text(encoding="utf-8")):
        if not is_code:
            prose.append(text)
        elif _is_command(text):
            document.commands += _lines(text)
        else:
            document.blocks.append(text)
    for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", "\n".join(prose)):
        span = " ".join(code.split())
        document.spans.append(span)
        if _is_command(span) and (" " in span or "/" in span):
            document.commands.append(span)
    return document


def read_help(name: str, text: str) -> Document:
    """Of the text that a program's --help prints, less how it is called."""
    document = Document(name)
    body = text.partition("\n\n")[2] if text.startswith("usage") else text
    for line in body.splitlines():
        command = re.split(r"  +", line.strip())[0]
        # Further in stands running text.
        if re.match(r" {0,4}\S", line) and _is_command(command) and " " in command:
            document.commands.append(command)
    flat = " ".join(body.split())
    for found in _IN_TEXT.finditer(flat):
        command = found[0].rstrip(".,")
        if command.count(" ") < 2 + command.count(" -m "):
            # Only the name of a program.
            continue
        # One that stands on a line of its own has been found above, quotes and all.
        if not any(known.startswith(command) for known in document.commands):
            document.commands.append(command)
    document.commands += re.findall(r"`(make [^`]+)`", flat)
    return document


def is_python(block: str) -> bool:
    """Whether it is Python that does something; YAML that is Python too does not."""
    try:
        tree = ast.parse(block)
    except SyntaxError:
        return False
    kinds = (ast.Import, ast.ImportFrom, ast.Call)
    return any(isinstance(node, kinds) for node in ast.walk(tree))


def _is_command(text: str) -> bool:
    return _COMMAND.match(text) is not None


def _parts(text: str) -> Iterator[tuple[bool, str]]:
    """(is it code, text) of each block that is fenced or indented by four, and of what is between.

    Code inside a list's item counts as text where it is not fenced.
    """
    code: list[str] = []
    fenced = False
    for line in [*text.splitlines(), ""]:
        if line.startswith("```"):
            fenced = not fenced
            if not fenced:
                yield True, "\n".join(code)
                code = []
            continue
        if fenced:
            code.append(line)
        elif line.startswith("    ") or (code and not line.strip()):
            code.append(line[4:])
        else:
            if code:
                yield True, "\n".join(code).strip("\n")
                code = []
            yield False, line
    if code:
        yield True, "\n".join(code).strip("\n")


def _lines(block: str) -> Iterator[str]:
    for line in re.sub(r"\\\n\s*", "", block).splitlines():
        # Two spaces and more before a comment, as everywhere.
        command = re.split(r"\s+# ", line)[0].strip()
        if command:
            yield command
