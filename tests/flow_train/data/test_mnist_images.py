"""Reading MNIST: the real files, and files that are missing, damaged or of something else."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable
from pathlib import Path

from oneflow_accel.errors import DataError

import numpy as np
import pytest

from flow_train.data.mnist import MnistImages
from flow_train.data.transforms import IMAGENET, Normalization, PlainTransform

TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"
GRAY = Normalization((0.1307,), (0.3081,))


def test_the_real_files(mnist_folder):
    # MD5 of the files' contents as published, see shared/data/SOURCES.md.
    for part, count, published in (
        ("train", 60000, "6bbc9ace898e44ae57da46a324031adb"),
        ("test", 10000, "2646ac647ad5339dbf082846283269ea"),
    ):
        images = MnistImages(mnist_folder, part)
        assert images.pixels.shape == (count, 28, 28)
        header = bytes((0, 0, 8, 3)) + b"".join(n.to_bytes(4, "big") for n in (count, 28, 28))
        assert hashlib.md5(header + images.pixels.tobytes()).hexdigest() == published


def test_images_labels_and_names(digits):
    train = MnistImages(digits, "train")
    assert (len(train), train.classes) == (300, list("0123456789"))
    assert train.labels.dtype == np.int64
    assert train.labels.tolist()[:4] == [0, 7, 4, 1]
    assert "train image 5" in train.name(5)
    assert train.shape(PlainTransform(GRAY)) == (28, 28, 1)
    expected = (train.pixels[5] / 255 - 0.1307) / 0.3081
    # In one channel and three, one by one and in one go.
    for transform in (PlainTransform(GRAY), PlainTransform(IMAGENET)):
        image = train.read(5, transform, np.random.default_rng(0))
        many = train.read_many(np.array([7, 5]), transform)
        assert many.dtype == np.float32
        np.testing.assert_array_equal(many[1], image)
        if image.shape[2] == 1:
            np.testing.assert_allclose(image[:, :, 0], expected, atol=1e-6)
    assert train.read_many(np.array([5]), lambda image, rng: np.zeros((1, 1, 1))) is None


def test_padding_is_black_and_centered(digits):
    plain, padded = MnistImages(digits, "test"), MnistImages(digits, "test", pad_to=33)
    assert padded.pixels.shape == (40, 33, 33)
    np.testing.assert_array_equal(padded.pixels[:, 2:30, 2:30], plain.pixels)
    assert padded.pixels.sum() == plain.pixels.sum()
    with pytest.raises(ValueError, match="do not fit into 20 x 20"):
        MnistImages(digits, "test", pad_to=20)


def corrupted(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :]


def wrong_checksum(data: bytes) -> bytes:
    return data[:-8] + bytes([data[-8] ^ 0xFF]) + data[-7:]


def repacked(change: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    return lambda data: gzip.compress(change(gzip.decompress(data)))


HUGE = b"\0\0\x08\x03" + b"\xff" * 12
TWO_LABELS = b"\0\0\x08\x01\0\0\0\x02\x01\x02"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (TRAIN_IMAGES, lambda data: data[:2000], "cannot read|only"),
        (TRAIN_IMAGES, corrupted, "cannot read"),
        (TRAIN_LABELS, wrong_checksum, "cannot read .*CRC"),
        (TRAIN_IMAGES, lambda data: b"", "is not an IDX file .* begins with nothing"),
        (TRAIN_IMAGES, lambda data: b"<html>404", "is not an IDX file .* 3c 68 74 6d"),
        (
            TRAIN_IMAGES,
            repacked(lambda idx: idx[:-100]),
            "235200 bytes of data and has only 235100",
        ),
        (TRAIN_IMAGES, repacked(lambda idx: idx + b"x"), "235200 bytes of data and has more"),
        (TRAIN_IMAGES, repacked(lambda _: HUGE), "claims to hold an array"),
        (TRAIN_LABELS, repacked(lambda idx: TWO_LABELS), "300 images and .* 2 labels"),
        (
            TRAIN_LABELS,
            repacked(lambda idx: idx[:-1] + b"\xc8"),
            "has the label 200; labels are 0 to",
        ),
    ],
)
def test_bad_files_are_named(digits: Path, name, change, message):
    path = digits / name
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=message) as caught:
        MnistImages(digits, "train")
    assert name in str(caught.value)


def test_missing_files_are_named_and_torchvisions_folder_is_found(digits, tmp_path):
    raw = tmp_path / "data" / "MNIST" / "raw"
    raw.parent.mkdir(parents=True)
    digits.rename(raw)
    assert len(MnistImages(tmp_path / "data", "train")) == 300
    (raw / TRAIN_LABELS).unlink()
    with pytest.raises(DataError, match=r"no train-labels-idx1-ubyte\.gz in .*data_dir has to be"):
        MnistImages(raw, "train")
    with pytest.raises(DataError, match=r"no train-images-idx3-ubyte\.gz"):
        MnistImages(tmp_path / "nowhere", "train")
