"""The image loader: order, content, bad files, and resuming inside an epoch."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import sys
from pathlib import Path

from oneflow_accel.errors import DataError

import numpy as np
import pytest
from PIL import Image

from flow_train.data import images as images_module
from flow_train.data.images import Batch, ImageFolder, ImageLoader, SyntheticImages
from flow_train.data.transforms import EvalTransform, TrainTransform
from tests.flow_train.data.batches import assert_same, epoch


def load(root: Path, *, train: bool = True, **options) -> ImageLoader:
    size = 16
    transform = TrainTransform(size) if train else EvalTransform(size)
    options = {"batch_size": 8, "seed": 3, **options}
    return ImageLoader(ImageFolder(root), transform=transform, train=train, **options)


def joined(parts: list[list[Batch]]) -> list[Batch]:
    fields = ("images", "labels", "indices")
    return [
        Batch(*(np.concatenate([getattr(batch, field) for batch in ranks]) for field in fields))
        for ranks in zip(*parts, strict=True)
    ]


def test_folder_lists_classes_and_files_sorted(image_folder):
    """A loop of links is read once, what is no file is left out; names need not be text."""
    (image_folder / "bee" / "deeper").mkdir()
    photo = image_folder / "bee" / "001.jpg"
    shutil.copy(photo, image_folder / "bee" / "deeper" / "x.JPEG")
    shutil.copy(photo, os.fsencode(image_folder) + b"/bee/\xff\xe9.jpg")
    (image_folder / "bee" / "notes.txt").write_text("no image")
    (image_folder / "README").write_text("no class")
    (image_folder / "ant" / "again").symlink_to(image_folder / "ant")
    (image_folder / "bee" / "up").symlink_to(image_folder / "bee", target_is_directory=True)
    # A folder of its own that a link leads to counts.
    (image_folder.parent / "more").mkdir()
    shutil.copy(photo, image_folder.parent / "more" / "one.jpg")
    (image_folder / "cat" / "more").symlink_to(image_folder.parent / "more")
    folder = ImageFolder(image_folder)
    assert folder.classes == ["ant", "bee", "cat"]
    assert np.bincount(folder.labels).tolist() == [80, 82, 81]
    assert len(folder) == len(folder.samples) == 243
    paths = [Path(path) for path, _ in folder.samples]
    assert paths == sorted(paths)
    for (_, label), path in zip(folder.samples, paths, strict=True):
        assert folder.classes[label] == path.relative_to(image_folder).parts[0]
    assert len(epoch(load(image_folder, train=False, batch_size=300))[0].labels) == 243
    with pytest.raises(IndexError):
        folder.samples[243]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: None, "No such file or directory.*expected .*CLASS/IMAGE"),
        (lambda root: root.write_text(""), "Not a directory"),
        (lambda root: root.mkdir(), "has no folders in it"),
        (lambda root: (root / ".a").mkdir(parents=True), r"1 of 1 class folders .*: \.a"),
    ],
)
def test_what_is_no_image_folder_is_explained(tmp_path, make, message):
    make(tmp_path / "data")
    with pytest.raises(DataError, match=message) as caught:
        ImageFolder(tmp_path / "data")
    assert str(tmp_path / "data") in str(caught.value)


def test_training_epoch_is_a_permutation_without_the_rest(image_folder):
    """Another seed or epoch is another one, with another augmentation."""
    loader = load(image_folder, batch_size=50)
    assert len(loader) == 4
    assert load(image_folder, batch_size=50, rank=1, world_size=2).global_batch_size == 100
    batches = epoch(loader)
    assert [len(batch.labels) for batch in batches] == [50] * 4
    for batch in batches:
        assert batch.labels.tolist() == [loader.dataset.samples[i][1] for i in batch.indices]
    assert len(set(np.concatenate([batch.indices for batch in batches]).tolist())) == 200
    first, *others = (
        epoch(load(image_folder, batch_size=240, seed=seed), number)[0]
        for seed, number in ((3, 0), (3, 1), (4, 0))
    )
    assert first.indices.tolist() != list(range(240))
    for other in others:
        assert other.indices.tolist() != first.indices.tolist()
        a, b = (each.images[np.argsort(each.indices)] for each in (first, other))
        assert np.mean(np.abs(a - b).max(axis=(1, 2, 3)) > 0.01) > 0.9


def test_layouts_hold_the_same_images(image_folder):
    last, first = (
        epoch(load(image_folder, channels_last=channels_last))[0] for channels_last in (True, False)
    )
    assert (last.images.shape, first.images.shape) == ((8, 16, 16, 3), (8, 3, 16, 16))
    for batch in (last, first):
        assert batch.images.dtype == np.float32
        assert batch.images.flags.c_contiguous
        assert batch.labels.dtype == batch.indices.dtype == np.int64
    np.testing.assert_array_equal(last.images.transpose(0, 3, 1, 2), first.images)


@pytest.mark.parametrize(("train", "workers"), [(True, 3), (False, 2)])
def test_workers_change_nothing(image_folder, train, workers):
    options = {"train": train, "batch_size": 7}
    expected = epoch(load(image_folder, **options), 1)
    assert_same(epoch(load(image_folder, workers=workers, **options), 1), expected)


def test_resume_inside_an_epoch_is_exact(image_folder):
    expected = epoch(load(image_folder, workers=2), 5)
    assert_same(epoch(load(image_folder), 5, start_batch=11), expected[11:])
    assert_same(epoch(load(image_folder, workers=2), 5, start_batch=11), expected[11:])


def test_iteration_left_early_does_not_disturb_the_next(image_folder):
    """Batches that the caller keeps stay as they are."""
    loader = load(image_folder, workers=2)
    loader.set_epoch(0)
    for count, _ in enumerate(loader):
        if count == 2:
            break
    loader.set_epoch(1)
    kept = [(batch, batch.images.copy()) for batch in loader]
    loader.close()
    assert_same([batch for batch, _ in kept], epoch(load(image_folder), 1))
    for batch, copy in kept:
        np.testing.assert_array_equal(batch.images, copy)


@pytest.mark.parametrize(("world_size", "workers"), [(3, 2), (7, 0)])
def test_evaluation_takes_every_image_once(image_folder, world_size, workers):
    seen = []
    for rank in range(world_size):
        loader = load(image_folder, train=False, rank=rank, world_size=world_size, workers=workers)
        batches = epoch(loader)
        assert len(batches) == len(loader)
        seen += [int(index) for batch in batches for index in batch.indices]
    assert sorted(seen) == list(range(240))


SPOILED = {
    "text": b"<html>404 Not Found</html>",
    "empty": b"",
    "png header": b"\x89PNG\r\n\x1a\n" + bytes(20),
}


def spoil(path: Path, how: str) -> None:
    data = path.read_bytes()
    path.write_bytes(SPOILED.get(how, data[: len(data) // 2]))


def spoil_two(root: Path, *ways: str) -> list[str]:
    """Two neighbors of 240, which is within 1 %."""
    samples = ImageFolder(root).samples
    paths = [samples[i][0] for i in (100, 101)]
    for path, how in zip(paths, ways, strict=True):
        spoil(Path(path), how)
    return paths


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_files_are_named_once_and_replaced_in_training(image_folder, caplog, workers):
    bad = spoil_two(image_folder, "truncated", "text")
    loader = load(image_folder, workers=workers)
    with caplog.at_level(logging.WARNING, logger="oneflow_accel"):
        for number in range(2):
            loader.set_epoch(number)
            indices = np.concatenate([batch.indices for batch in loader]).tolist()
            # The next readable image of the data set stands in for both.
            assert sorted(indices) == sorted([*range(100), 102, 102, *range(102, 240)])
    loader.close()
    assert sorted(loader.bad_files) == sorted(bad)
    assert all(loader.bad_files.values())
    for path in bad:
        assert sum(path in message for message in caplog.messages) == 1


def test_bad_files_are_left_out_of_evaluation(image_folder):
    bad = spoil_two(image_folder, "empty", "png header")
    loader = load(image_folder, train=False, workers=2, batch_size=2)
    seen = [int(index) for batch in epoch(loader) for index in batch.indices]
    assert seen == [i for i in range(240) if i not in (100, 101)]
    assert sorted(loader.bad_files) == sorted(bad)


def test_world_size_changes_nothing_not_even_replacements(image_folder):
    spoil_two(image_folder, "text", "empty")
    expected = epoch(load(image_folder, batch_size=16), 2)
    parts = [
        epoch(load(image_folder, batch_size=4, rank=r, world_size=4, workers=r % 2), 2)
        for r in range(4)
    ]
    assert_same(joined(parts), expected)


@pytest.mark.parametrize(("train", "workers"), [(True, 2), (False, 0)])
def test_more_than_one_percent_bad_is_an_error(image_folder, train, workers):
    spoil_two(image_folder, "truncated", "text")
    third = ImageFolder(image_folder).samples[7][0]
    spoil(Path(third), "text")
    loader = load(image_folder, train=train, workers=workers)
    with pytest.raises(DataError, match=r"3 of the 240 images .* more than 1 %") as caught:
        list(loader)
    assert third in str(caught.value)
    assert loader._pool is None


def test_training_set_smaller_than_a_global_batch_is_an_error(image_folder):
    with pytest.raises(DataError, match="240 images, fewer than one global batch of 256"):
        load(image_folder, batch_size=128, world_size=2)


def test_synthetic_images_need_no_disk():
    dataset = SyntheticImages(40, (4, 4, 3), classes=10, seed=1)
    options = {"batch_size": 8, "train": True, "transform": TrainTransform(4)}
    batches = epoch(ImageLoader(dataset, **options))
    assert [batch.images.shape for batch in batches] == [(8, 3, 4, 4)] * 5
    labels = np.concatenate([batch.labels for batch in batches])
    assert set(labels.tolist()) <= set(range(10))
    assert len(set(labels.tolist())) > 3
    assert_same(epoch(ImageLoader(dataset, workers=2, **options)), batches)
    pixels = np.concatenate([batch.images for batch in batches])
    assert abs(pixels.mean()) < 0.1
    assert abs(pixels.std() - 1) < 0.1


def test_undecodable_for_any_reason(image_folder, monkeypatch):
    """A file that vanished, and one that would unpack to a huge picture."""
    gone, huge = (Path(path) for path, _ in ImageFolder(image_folder).samples[:2])
    loader = load(image_folder, train=False)
    gone.unlink()
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10000)
    with huge.open("wb") as file:
        Image.new("1", (1000, 1000)).save(file, "PNG")
    assert epoch(loader)[0].indices.tolist() == list(range(2, 8))
    assert "No such file" in loader.bad_files[str(gone)]
    assert "decompression bomb" in loader.bad_files[str(huge)]


def test_what_is_no_file_is_left_out_and_a_dangling_link_is_named(image_folder, caplog):
    os.mkfifo(image_folder / "ant" / "pipe.jpg")
    (image_folder / "bee" / "gone.jpg").symlink_to(image_folder / "nowhere.jpg")
    folder = ImageFolder(image_folder)
    assert "pipe.jpg is left out: it is not a file" in caplog.text
    paths = [path for path, _ in folder.samples]
    assert not [path for path in paths if path.endswith("pipe.jpg")]
    # At the end it would be a bad file among 241: less than 1 %.
    loader = ImageLoader(folder, batch_size=64, transform=EvalTransform(16), train=False)
    assert sum(len(batch.labels) for batch in loader) == 240
    assert "gone.jpg" in caplog.text


def test_a_loader_that_outlives_its_module_ends_quietly(image_folder, monkeypatch):
    loader = load(image_folder, workers=1)
    next(iter(loader))
    said = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    monkeypatch.setattr(images_module, "sys", None)
    del loader
    gc.collect()
    assert not said
