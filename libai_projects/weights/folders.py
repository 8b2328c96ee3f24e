"""Writes a model's folder whole or not at all, and reads the settings in it."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from oneflow_accel.errors import CheckpointError, UserError

from flow_train.files import TEMPORARY, TRASH, publish_folder, write_synced

# What a folder of weights consists of; anything else in it keeps --force from replacing it.
_KNOWN = re.compile(
    r"(.*\.(safetensors|bin|index\.json)|(libai_|generation_|tokenizer_)?config\.json"
    r"|vocab\.json|merges\.txt|tokenizer\.(json|model)|special_tokens_map\.json|added_tokens\.json"
    r"|README\.md|LICENSE|\.gitattributes|model|pickled_data|(global_)?tensor_\d+)\Z"
)
_GENERATION_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object; a UserError for any other file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); is the file whole?") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}, not an object with settings")
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """A new JSON file, keys sorted, on the disk."""
    write_synced(path, (json.dumps(content, indent=2, sort_keys=True) + "\n").encode())


def generation_of(*contents: Mapping[str, Any]) -> dict[str, int]:
    """Token ids from generation_config.json or config.json; the first that has one counts."""
    found: dict[str, int] = {}
    for content in contents:
        found = {
            key: content[key] for key in _GENERATION_KEYS if type(content.get(key)) is int
        } | found
    return found


def check_target(folder: Path, *, force: bool) -> None:
    """A UserError where something is at `folder`, unless `force` and it holds weights alone."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UserError(f"{folder} is a file; give the name of a folder to write")
    entries = sorted(entry.name for entry in folder.iterdir())
    if entries and not force:
        raise UserError(f"{folder} exists and is not empty; give --force to replace it")
    strange = [name for name in entries if not _KNOWN.match(name)]
    if strange:
        raise UserError(
            f"{folder} holds more than weights ({', '.join(strange[:3])}), so it is not replaced; "
            "choose another folder"
        )


@contextmanager
def replaced_folder(folder: Path, *, force: bool = False) -> Iterator[Path]:
    """Give an empty folder to write to, which becomes `folder` when the block ends.

    If the block raises, `folder` is as before; else all is on the disk before it is renamed. Raises
    UserError as `check_target`, and CheckpointError where it could not be written (disk full, no
    permission ...).
    """
    check_target(folder, force=force)
    folder = Path(os.path.abspath(folder))
    temporary = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        prefix = f"{TEMPORARY}{folder.name}-"
        temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
        yield temporary
        for path in temporary.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        temporary.chmod(0o755)
        old = temporary.with_name(f"{TRASH}{temporary.name}")
        if folder.exists():
            os.rename(folder, old)
        try:
            publish_folder(temporary, folder)
        except OSError:
            if old.exists():
                os.rename(old, folder)
            raise
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        hint = "; free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise CheckpointError(
            f"{folder} could not be written: {error.strerror or error}{hint}"
        ) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
