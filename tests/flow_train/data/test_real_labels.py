"""Reassessed labels of ImageNet's validation images: how they count, and whose they are."""

from __future__ import annotations

import json
from pathlib import Path

from oneflow_accel.errors import DataError, UserError

import numpy as np
import pytest

from flow_train.data.real_labels import RealLabels, read_real_labels


def written(folder: Path, content: object) -> Path:
    path = folder / "real.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def file_name(number: int) -> str:
    return f"some/where/n01/ILSVRC2012_val_{number:08d}.JPEG"


def test_a_hit_is_any_of_the_labels_and_images_without_one_are_left_out():
    labels = RealLabels([[3], [], [1, 4], [7, 2], [6]])
    best = np.array([[0, 3, 1, 2, 4], [5, 6, 7, 0, 1], [4, 0, 2, 3, 5], [0, 1, 3, 4, 5]])
    #                 among the five   no label         the first        none
    assert labels.count(np.array([0, 1, 2, 3]), best) == (3, 1, 2)
    assert labels.count(np.array([4]), np.array([[6, 0]])) == (1, 1, 1)
    assert labels.count(np.array([], np.int64), np.empty((0, 5), np.int64)) == (0, 0, 0)
    assert len(labels) == 5


def test_labels_go_by_the_number_in_the_name(tmp_path):
    path = written(tmp_path, [[5], [], [0, 2]])
    labels = read_real_labels(path, [file_name(n) for n in (3, 1, 2)], 6)
    first = [labels.count(np.array([i]), np.array([[b]])) for i, b in ((0, 2), (1, 5), (2, 5))]
    assert first == [(1, 1, 1), (1, 1, 1), (0, 0, 0)]
    part = read_real_labels(path, [file_name(3), file_name(1)])
    assert part.count(np.arange(2), np.array([[2], [5]])) == (2, 2, 2)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["a/1.png", file_name(2), "val/ILSVRC2012_val_3.JPEG"], "2 of the 3 .* such as a/1.png"),
        ([file_name(n) for n in (1, 2, 2)], "3 validation images; one is there more than once"),
        ([file_name(n) for n in (1, 2, 3, 4)], "4 validation images; number 4 is not among them"),
        ([file_name(0)], "1 validation images; number 0 is not among them"),
        ([], "there are 0 validation images; leave"),
    ],
)
def test_other_images_are_refused(names, words, tmp_path):
    with pytest.raises(DataError, match=words):
        read_real_labels(written(tmp_path, [[0], [1], [2]]), names)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "are no JSON.*reassessed-imagenet"),
        ("[" * 100_000, "are no JSON"),
        ({"1": [2]}, "not a list with a list of classes"),
        ([[1], 2], "entry 2 is not a list of class indices, but '2'"),
        ([[1], [True]], "entry 2"),
        ([[-1]], "entry 1"),
        ([[1], [5]], "name class 5, and there are 5"),
    ],
)
def test_other_files_are_refused(content, words, tmp_path):
    names = [file_name(1), file_name(2)]
    with pytest.raises(UserError, match=rf"real\.json.* {words}"):
        read_real_labels(written(tmp_path, content), names, 5)


def test_a_missing_file_says_where_to_get_it(tmp_path):
    with pytest.raises(UserError, match=r"none\.json: No such file.*reassessed-imagenet"):
        read_real_labels(tmp_path / "none.json", [])
