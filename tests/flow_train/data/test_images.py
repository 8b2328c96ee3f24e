"""The image loader: order, content, bad files, and resuming inside an epoch."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from oneflow_accel.errors import DataError

import numpy as np
import pytest
from PIL import Image

from flow_train.data.images import Batch, ImageFolder, ImageLoader, SyntheticImages
from flow_train.data.transforms import EvalTransform, TrainTransform
from tests.launch import run_process


def load(root: Path, *, train: bool = True, **options) -> ImageLoader:
    size = 16
    transform = TrainTransform(size) if train else EvalTransform(size)
    options = {"batch_size": 8, "seed": 3, **options}
    return ImageLoader(ImageFolder(root), transform=transform, train=train, **options)


def epoch(loader: ImageLoader, number: int = 0, start_batch: int = 0) -> list[Batch]:
    loader.set_epoch(number, start_batch)
    batches = list(loader)
    loader.close()
    return batches


def assert_same(actual: list[Batch], expected: list[Batch]) -> None:
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a.indices, b.indices)
        np.testing.assert_array_equal(a.labels, b.labels)
        np.testing.assert_array_equal(a.images, b.images)


def joined(parts: list[list[Batch]]) -> list[Batch]:
    return [
        Batch(
            *(
                np.concatenate([getattr(b, f) for b in ranks])
                for f in ("images", "labels", "indices")
            )
        )
        for ranks in zip(*parts, strict=True)
    ]


def test_folder_lists_classes_and_files_sorted(image_folder):
    (image_folder / "bee" / "deeper").mkdir()
    shutil.copy(image_folder / "bee" / "001.jpg", image_folder / "bee" / "deeper" / "x.JPEG")
    (image_folder / "bee" / "notes.txt").write_text("no image")
    (image_folder / "README").write_text("no class")
    folder = ImageFolder(image_folder)
    assert folder.classes == ["ant", "bee", "cat"]
    assert len(folder) == len(folder.samples) == 241
    paths = [Path(path) for path, _ in folder.samples]
    assert paths == sorted(paths)
    assert all(
        folder.classes[label] == path.relative_to(image_folder).parts[0]
        for (_, label), path in zip(folder.samples, paths, strict=True)
    )
    assert folder.samples[-1] == folder.samples[240]
    assert folder.samples[1:3] == [folder.samples[1], folder.samples[2]]
    with pytest.raises(IndexError):
        folder.samples[241]


def test_file_names_need_not_be_text(image_folder):
    shutil.copy(image_folder / "ant" / "000.jpg", os.fsencode(image_folder) + b"/ant/\xff\xe9.jpg")
    assert len(epoch(load(image_folder, train=False, batch_size=300))[0].labels) == 241


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: None, "No such file or directory.*expected .*CLASS/IMAGE"),
        (lambda root: root.write_text(""), "Not a directory"),
        (lambda root: root.mkdir(), "has no folders in it"),
        (lambda root: (root / "a").mkdir(parents=True), "1 of 1 class folders .* hold no images"),
    ],
)
def test_what_is_no_image_folder_is_explained(tmp_path, make, message):
    make(tmp_path / "data")
    with pytest.raises(DataError, match=message) as caught:
        ImageFolder(tmp_path / "data")
    assert str(tmp_path / "data") in str(caught.value)


def test_class_without_images_is_named(image_folder):
    (image_folder / ".ipynb_checkpoints").mkdir()
    with pytest.raises(DataError, match=r"1 of 4 class folders .*: \.ipynb_checkpoints"):
        ImageFolder(image_folder)


def test_training_epoch_is_a_permutation_without_the_rest(image_folder):
    loader = load(image_folder, batch_size=50)
    assert len(loader) == 4
    assert load(image_folder, batch_size=50, rank=1, world_size=2).global_batch_size == 100
    batches = epoch(loader)
    assert [len(batch.labels) for batch in batches] == [50] * 4
    indices = np.concatenate([batch.indices for batch in batches])
    assert len(set(indices.tolist())) == 200
    assert indices.tolist() != sorted(indices.tolist())
    for batch in batches:
        assert batch.labels.tolist() == [loader.dataset.samples[i][1] for i in batch.indices]
    other = np.concatenate([batch.indices for batch in epoch(loader, 1)])
    assert other.tolist() != indices.tolist()


@pytest.mark.parametrize("channels_last", [True, False])
def test_arrays(image_folder, channels_last):
    batch = epoch(load(image_folder, channels_last=channels_last))[0]
    assert batch.images.shape == ((8, 16, 16, 3) if channels_last else (8, 3, 16, 16))
    assert batch.images.dtype == np.float32
    assert batch.images.flags.c_contiguous
    assert batch.labels.dtype == batch.indices.dtype == np.int64


def test_layouts_hold_the_same_images(image_folder):
    last = epoch(load(image_folder, channels_last=True))[0].images
    first = epoch(load(image_folder, channels_last=False))[0].images
    np.testing.assert_array_equal(last.transpose(0, 3, 1, 2), first)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_change_nothing(image_folder, train, workers):
    options = {"train": train, "batch_size": 7}
    expected = epoch(load(image_folder, **options), 1)
    assert_same(epoch(load(image_folder, workers=workers, **options), 1), expected)


@pytest.mark.parametrize("world_size", [2, 4])
def test_world_size_changes_nothing(image_folder, world_size):
    expected = epoch(load(image_folder, batch_size=16), 2)
    parts = [
        epoch(load(image_folder, batch_size=16 // world_size, rank=r, world_size=world_size), 2)
        for r in range(world_size)
    ]
    assert_same(joined(parts), expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_inside_an_epoch_is_exact(image_folder, workers):
    expected = epoch(load(image_folder, workers=workers), 5)
    assert_same(epoch(load(image_folder, workers=workers), 5, start_batch=11), expected[11:])


def test_iteration_left_early_does_not_disturb_the_next(image_folder):
    loader = load(image_folder, workers=2)
    for number in range(3):
        loader.set_epoch(number)
        for count, _ in enumerate(loader):
            if count == number:
                break
    assert_same(epoch(loader, 1), epoch(load(image_folder), 1))


def test_batches_kept_by_the_caller_stay_as_they_are(image_folder):
    loader = load(image_folder, workers=2)
    kept, copies = [], []
    for batch in loader:
        kept.append(batch.images)
        copies.append(batch.images.copy())
    for images, copy in zip(kept, copies, strict=True):
        np.testing.assert_array_equal(images, copy)
    loader.close()


def test_seed_and_epoch_change_the_augmentation(image_folder):
    first = epoch(load(image_folder, batch_size=240))[0]
    other = epoch(load(image_folder, batch_size=240), 1)[0]
    seeded = epoch(load(image_folder, batch_size=240, seed=4))[0]
    by_index = [batch.images[np.argsort(batch.indices)] for batch in (first, other, seeded)]
    for changed in by_index[1:]:
        assert np.mean(np.abs(by_index[0] - changed).max(axis=(1, 2, 3)) > 0.01) > 0.9


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_takes_every_image_once(image_folder, world_size, workers):
    seen = []
    for rank in range(world_size):
        loader = load(image_folder, train=False, rank=rank, world_size=world_size, workers=workers)
        batches = epoch(loader)
        assert len(batches) == len(loader)
        seen += [int(index) for batch in batches for index in batch.indices]
    assert sorted(seen) == list(range(240))


def spoil(path: Path, how: str) -> None:
    data = path.read_bytes()
    contents = {
        "truncated": data[: len(data) // 2],
        "text": b"<html>404 Not Found</html>",
        "empty": b"",
        "png header": b"\x89PNG\r\n\x1a\n" + bytes(20),
    }
    path.write_bytes(contents[how])


def spoil_two(root: Path, how: str = "truncated") -> list[str]:
    """Two neighbors of 240, which is within 1 %."""
    samples = ImageFolder(root).samples
    paths = [samples[i][0] for i in (100, 101)]
    for path in paths:
        spoil(Path(path), how)
    return paths


@pytest.mark.parametrize("how", ["truncated", "text", "empty", "png header"])
@pytest.mark.parametrize("workers", [0, 2])
def test_bad_files_are_named_once_and_replaced_in_training(image_folder, caplog, workers, how):
    bad = spoil_two(image_folder, how)
    loader = load(image_folder, workers=workers)
    with caplog.at_level(logging.WARNING, logger="oneflow_accel"):
        for number in range(2):
            loader.set_epoch(number)
            indices = np.concatenate([batch.indices for batch in loader]).tolist()
            assert len(indices) == 240
            # The next readable image of the data set stands in for both.
            assert indices.count(102) == 3
            assert not {100, 101} & set(indices)
    loader.close()
    assert sorted(loader.bad_files) == sorted(bad)
    assert all(loader.bad_files.values())
    for path in bad:
        assert sum(path in message for message in caplog.messages) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_files_are_left_out_of_evaluation(image_folder, workers):
    bad = spoil_two(image_folder)
    loader = load(image_folder, train=False, workers=workers, batch_size=2)
    seen = [int(index) for batch in epoch(loader) for index in batch.indices]
    assert seen == [i for i in range(240) if i not in (100, 101)]
    assert sorted(loader.bad_files) == sorted(bad)


def test_replacement_is_the_same_in_any_world_size(image_folder):
    spoil_two(image_folder)
    expected = epoch(load(image_folder, batch_size=8))
    parts = [
        epoch(load(image_folder, batch_size=4, rank=r, world_size=2, workers=r)) for r in range(2)
    ]
    assert_same(joined(parts), expected)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_more_than_one_percent_bad_is_an_error(image_folder, train, workers):
    spoil_two(image_folder)
    third = ImageFolder(image_folder).samples[7][0]
    spoil(Path(third), "text")
    loader = load(image_folder, train=train, workers=workers)
    with pytest.raises(DataError, match=r"3 of the 240 images .* more than 1 %") as caught:
        list(loader)
    assert third in str(caught.value)
    assert loader._pool is None


def test_real_photos(flowers):
    dataset = ImageFolder(flowers / "val")
    assert dataset.classes == ["daisy", "dandelion", "roses", "sunflowers", "tulips"]
    loader = ImageLoader(
        dataset, batch_size=25, transform=EvalTransform(64), workers=2, train=False
    )
    batches = epoch(loader)
    assert [len(batch.labels) for batch in batches] == [25, 25, 10]
    assert loader.bad_files == {}
    pixels = np.concatenate([batch.images for batch in batches])
    # Normalized with ImageNet's statistics, photos have a mean near 0 and a spread near 1.
    assert abs(pixels.mean()) < 0.5
    assert 0.8 < pixels.std() < 1.5


def test_training_set_smaller_than_a_global_batch_is_an_error(image_folder):
    with pytest.raises(DataError, match="240 images, fewer than one global batch of 256"):
        load(image_folder, batch_size=128, world_size=2)


@pytest.mark.parametrize("workers", [0, 2])
def test_synthetic_images_need_no_disk_and_split_over_ranks(workers):
    dataset = SyntheticImages(40, (4, 4, 3), classes=10, seed=1)

    def synthetic(**options) -> list[Batch]:
        options = {"batch_size": 8, "train": True, "transform": TrainTransform(4), **options}
        return epoch(ImageLoader(dataset, workers=workers, **options))

    batches = synthetic()
    assert [batch.images.shape for batch in batches] == [(8, 3, 4, 4)] * 5
    labels = np.concatenate([batch.labels for batch in batches])
    assert set(labels.tolist()) <= set(range(10))
    assert len(set(labels.tolist())) > 3
    assert_same(synthetic(), batches)
    assert_same(joined([synthetic(batch_size=4, rank=r, world_size=2) for r in range(2)]), batches)
    pixels = np.concatenate([batch.images for batch in batches])
    assert abs(pixels.mean()) < 0.1
    assert abs(pixels.std() - 1) < 0.1
    evaluated = synthetic(train=False, batch_size=16)
    assert np.concatenate([batch.indices for batch in evaluated]).tolist() == list(range(40))


def test_undecodable_for_any_reason(image_folder, monkeypatch):
    """A file that vanished, and one that would unpack to a huge picture."""
    samples = ImageFolder(image_folder).samples
    loader = load(image_folder, train=False)
    os.unlink(samples[0][0])
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10000)
    Image.new("1", (1000, 1000)).save(Path(samples[1][0]).with_suffix(".png"))
    os.replace(Path(samples[1][0]).with_suffix(".png"), samples[1][0])
    assert epoch(loader)[0].indices.tolist() == list(range(2, 8))
    assert "No such file" in loader.bad_files[samples[0][0]]
    assert "decompression bomb" in loader.bad_files[samples[1][0]]


def test_a_loop_of_links_is_read_once(image_folder):
    before = ImageFolder(image_folder)
    (image_folder / "ant" / "again").symlink_to(image_folder / "ant")
    (image_folder / "bee" / "up").symlink_to(image_folder / "bee", target_is_directory=True)
    # A folder of its own that a link leads to counts.
    (image_folder.parent / "more").mkdir()
    shutil.copy(before.samples[0][0], image_folder.parent / "more" / "one.jpg")
    (image_folder / "cat" / "more").symlink_to(image_folder.parent / "more")
    after = ImageFolder(image_folder)
    assert len(after) == len(before) + 1
    more = np.bincount(after.labels) - np.bincount(before.labels)
    assert more.tolist() == [0, 0, 1]


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


def test_a_loader_that_outlives_its_module_ends_quietly(image_folder):
    code = (
        "import builtins, sys\n"
        "from flow_train.data.images import ImageFolder, ImageLoader\n"
        "from flow_train.data.transforms import EvalTransform\n"
        f"loader = ImageLoader(ImageFolder({str(image_folder)!r}), batch_size=8, workers=1,\n"
        "                     transform=EvalTransform(16), train=False)\n"
        "next(iter(loader))\n"
        # As the traceback of an error keeps it.
        "builtins.kept = loader\n"
        "sys.modules['flow_train.data.images'].__dict__['sys'] = None\n"
        "del loader\n"
    )
    done = run_process(["-c", code])
    assert done.returncode == 0, done.stdout
    assert "Exception ignored" not in done.stdout
