"""Images read from .tar and .zip archives are those of the folder."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

from oneflow_accel.errors import DataError

import numpy as np
import pytest

from flow_train.data.datamodule import ImageDataModule
from tests.flow_train.data.batches import assert_same, epoch


def packed(folder: Path, kind: str, above: str = "") -> Path:
    path = folder.with_suffix(f".{kind.removesuffix('-deflated')}")
    files = [file for file in sorted(folder.rglob("*"), reverse=True) if file.is_file()]
    method = zipfile.ZIP_DEFLATED if kind.endswith("deflated") else zipfile.ZIP_STORED
    is_tar = kind == "tar"
    with tarfile.open(path, "w") if is_tar else zipfile.ZipFile(path, "w", method) as archive:
        add = archive.add if is_tar else archive.write
        for file in files:
            add(file, above + str(file.relative_to(folder)))
    return path


@pytest.mark.parametrize(("kind", "workers"), [("tar", 2), ("zip", 2), ("zip-deflated", 0)])
def test_equal_to_the_folder(photos, kind, workers):
    (photos / "train" / "notes.txt").write_text("no image")
    options = {"image_size": 16, "batch_size": 4, "num_workers": workers}
    from_folder = ImageDataModule(photos, **options)
    from_archive = ImageDataModule(packed(photos, kind, above="data/"), **options)
    assert from_archive.num_classes == 3
    for name in ("train_loader", "val_loader"):
        found, expected = (epoch(getattr(each, name)) for each in (from_archive, from_folder))
        assert len(found) == len(expected) > 0
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a.images, b.images)
            np.testing.assert_array_equal(a.labels, b.labels)


def test_a_part_of_its_own_for_tests(photos):
    (photos / "train").rename(photos / "test")
    archive = packed(photos, "tar")
    data = ImageDataModule(archive, image_size=16, batch_size=4, training=False)
    for loader, count in ((data.test_loader, 24), (data.val_loader, 9)):
        assert sum(len(batch.labels) for batch in loader) == count


def test_what_cannot_be_read_is_named(photos, tmp_path):
    compressed, broken = tmp_path / "compressed.tar", tmp_path / "broken.zip"
    with tarfile.open(compressed, "w:gz") as tar:
        tar.add(photos, "photos")
    broken.write_bytes(b"PK\x03\x04 and nothing")
    for archive, message in (
        (packed(photos / "train", "tar"), "has no images in a folder 'train'"),
        (compressed, r"expected an uncompressed \.tar or a \.zip"),
        (broken, "cannot read the archive"),
    ):
        with pytest.raises(DataError, match=message):
            ImageDataModule(archive, image_size=16, batch_size=4)


def test_a_damaged_member_is_a_bad_file_and_no_crash(photos, caplog):
    archive = packed(photos, "tar")
    with tarfile.open(archive) as tar:
        member = next(info for info in tar if info.name.startswith("train/") and info.isreg())
    with archive.open("r+b") as file:
        file.seek(member.offset_data)
        file.write(b"\0" * 64)
    data = ImageDataModule(archive, image_size=16, batch_size=24)
    # One of 24 is more than 1 %, so it is an error, which names archive and member.
    with pytest.raises(DataError, match=rf"{archive}:{member.name}"):
        list(data.train_loader)


def test_validation_alone(photos):
    """Of an archive without training images; its part may be called validation."""
    expected = epoch(ImageDataModule(photos, image_size=16, batch_size=4).val_loader)
    archive = packed(photos / "val", "zip", above="imagenet/validation/")
    data = ImageDataModule(archive, image_size=16, batch_size=4, training=False)
    assert_same(epoch(data.val_loader), expected)
