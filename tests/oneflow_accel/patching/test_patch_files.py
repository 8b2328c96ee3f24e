"""Reading patch files: headers, series and diffs, and what is refused in them."""

from __future__ import annotations

from pathlib import Path

from oneflow_accel.errors import PatchError
from oneflow_accel.patching.series import (
    apply_hunks,
    join,
    load_patch,
    load_series,
    source_lines,
)

import pytest


def test_header_fields_and_continuation_lines(fake) -> None:
    with pytest.raises(PatchError, match=r"Last-Update is '2026-01-31 x', not a date"):
        load_patch(fake.add_patch(Last_Update="2026-01-31\n x"))
    file = fake.add_patch(Description="Short.\n And more.", Forwarded="https://example.org/1")
    assert load_patch(file).release == f"{fake.name}-1.0"


@pytest.mark.parametrize("field", ["Description", "Author", "Forwarded", "Last-Update"])
def test_every_header_field_is_required(fake, field: str) -> None:
    with pytest.raises(PatchError, match=rf"0001-change.patch: broken header: no .*{field}"):
        load_patch(fake.add_patch(drop=field))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"Forwarded": "maybe"}, "Forwarded is 'maybe'"),
        ({"Last_Update": "yesterday"}, "Last-Update is 'yesterday', not a date"),
        ({"Aplies_To": "x"}, "unknown field 'Aplies-To'"),
        ({"Bug": "x\nno field here"}, "is not 'Field: value'"),
        ({"Bug": "x\nAuthor: twice"}, "Author is there twice"),
    ],
)
def test_broken_header(fake, fields: dict[str, str], message: str) -> None:
    with pytest.raises(PatchError, match=rf"0001-change.patch: broken header: .*{message}"):
        load_patch(fake.add_patch(**fields))


def test_broken_diffs(fake) -> None:
    good = fake.diff("numbers", "return 1", "return 10")
    path = f"{fake.name}/numbers.py"
    cases = {
        "no unified diff": "nothing\n",
        "broken diff: Hunk is shorter": good[: good.rindex(" # filler")],
        "lines outside of any hunk": good + "+one more\n",
        "is numbered wrongly": good.replace("+1,", "+2,"),
        "which is not a Python file of": good.replace(path, "elsewhere/numbers.py"),
        r"\.\./x.py, which is not a Python file of": good.replace(path, f"{fake.name}/../x.py"),
        "adds, removes or renames": good.replace(f"--- a/{path}", "--- /dev/null"),
        "adds, removes or renames .*new.py": good.replace(
            f"+++ b/{path}", f"+++ b/{fake.name}/new.py"
        ),
    }
    for message, diff in cases.items():
        with pytest.raises(PatchError, match=message):
            load_patch(fake.add_patch(diff=diff))


def test_no_newline_at_the_end_of_a_file(fake) -> None:
    path = f"{fake.name}/numbers.py"
    end = "\\ No newline at end of file\n"
    diff = f"--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-x = 1\n{end}+x = 2\n{end}"
    patch = load_patch(fake.add_patch(diff=diff))
    result = apply_hunks(source_lines("x = 1"), patch.hunks[path], label="l", path=path)
    assert join(result) == "x = 2"
    with pytest.raises(PatchError, match="does not fit"):
        apply_hunks(source_lines("x = 1\n"), patch.hunks[path], label="l", path=path)


def test_hunks_that_only_add(fake) -> None:
    path = f"{fake.name}/numbers.py"
    diff = f"--- a/{path}\n+++ b/{path}\n@@ -0,0 +1 @@\n+a\n@@ -2,0 +4,2 @@\n+b\n+c\n"
    patch = load_patch(fake.add_patch(diff=diff))
    result = apply_hunks(source_lines("1\n2\n3\n"), patch.hunks[path], label="l", path=path)
    assert join(result) == "a\n1\n2\nb\nc\n3\n"
    assert [line.number for line in result] == [None, 1, 2, None, None, 3]


def test_a_form_feed_ends_no_line() -> None:
    assert join(source_lines("a\f\nb\u2028c\n")) == "a\f\nb\u2028c\n"
    assert [line.number for line in source_lines("a\f\nb\u2028c\n")] == [1, 2]


def test_series_refuses_a_missing_or_misnamed_patch(fake, tmp_path: Path) -> None:
    series = fake.add_patch().parent / "series"
    series.write_text("# comment\n\n0001-change.patch  # trailing\n")
    assert [patch.name for patch in load_series(fake.root, fake.name, "1.0")] == [
        "0001-change.patch"
    ]
    series.write_text("0002-missing.patch\n")
    with pytest.raises(PatchError, match=r"0002-missing\.patch is in the series but"):
        load_series(fake.root, fake.name, "1.0")
    series.write_text("change.diff\n")
    with pytest.raises(PatchError, match="the name is not NNNN-"):
        load_series(fake.root, fake.name, "1.0")
    with pytest.raises(PatchError, match=r"3.0 has no series"):
        load_series(fake.root, fake.name, "3.0")
