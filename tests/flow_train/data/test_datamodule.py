"""The loaders of a run: data sets, sharding, resuming, mixing in training only, errors."""

from __future__ import annotations

import shutil
import tarfile

import oneflow_accel  # noqa: F401
from oneflow_accel.errors import DataError, UserError

import numpy as np
import pytest

from flow_train.data.datamodule import ImageDataModule
from tests.flow_train.data.batches import assert_same, epoch

MIXUP = {"mixup_alpha": 0.8, "cutmix_alpha": 1.0}


def test_mnist(digits):
    data = ImageDataModule(digits, "mnist", 32, 20, val_split=60, seed=3)
    assert (data.num_classes, data.image_shape) == (10, (1, 32, 32))
    train, held_out = epoch(data.train_loader), epoch(data.val_loader)
    assert len(train) == len(data.train_loader) == 12
    assert train[0].images.shape == (20, 1, 32, 32)
    assert (train[0].images.dtype, train[0].labels.dtype) == (np.float32, np.int64)
    # Six of each class: a split keeps the classes' shares.
    counts = np.bincount(np.concatenate([batch.labels for batch in held_out]))
    assert counts.tolist() == [6] * 10
    assert sum(len(batch.labels) for batch in epoch(data.test_loader)) == 40
    # No image is in both parts.
    other = ImageDataModule(digits, "mnist", 32, 20, val_split=60, seed=4)
    rows, kept, moved = (
        {image.tobytes() for batch in batches for image in batch.images}
        for batches in (train, held_out, epoch(other.val_loader))
    )
    assert (len(rows), len(kept)) == (240, 60)
    assert not rows & kept
    assert moved != kept
    same = ImageDataModule(digits, "mnist", 32, 20, val_split=0.2, seed=3)
    assert_same(epoch(same.val_loader), held_out)


def test_mnist_trains_on_everything_and_validates_without_training_images(digits):
    data = ImageDataModule(digits, "mnist", 28, 30, val_split=0)
    assert len(data.train_loader) == 10
    expected = epoch(data.val_loader)
    assert_same(expected, epoch(data.test_loader))
    for file in digits.glob("train-*"):
        file.unlink()
    data = ImageDataModule(digits, "mnist", 28, 30, val_split=0, training=False)
    assert_same(epoch(data.val_loader), expected)
    with pytest.raises(DataError, match="train-images"):
        ImageDataModule(digits, "mnist", 28, 30, val_split=60, training=False)


def test_mnist_in_the_models_channels_and_size(digits):
    half = [0.5, 0.5, 0.5]
    data = ImageDataModule(digits, "mnist", 48, 8, val_split=60, mean=half, std=half)
    images = next(iter(data.train_loader)).images
    assert data.image_shape == images.shape[1:] == (3, 48, 48)
    np.testing.assert_array_equal(images[:, 0], images[:, 2])


def test_workers_do_not_change_what_is_read(digits):
    options = {"val_split": 60, "train_transforms": {"scale": [0.7, 1.0], "hflip": 0.0}}
    options |= {"mixup": MIXUP}
    alone = ImageDataModule(digits, "mnist", 28, 16, **options)
    helped = ImageDataModule(digits, "mnist", 28, 16, num_workers=2, **options)
    try:
        assert_same(epoch(helped.train_loader, 1), epoch(alone.train_loader, 1))
        assert_same(epoch(helped.val_loader), epoch(alone.val_loader))
        # A loader is one object, whose workers stay.
        assert helped.train_loader is helped.train_loader
    finally:
        helped.close()


def test_resume_inside_an_epoch_mixes_as_before(photos):
    options = {"train_transforms": {"auto_augment": "rand-m9-mstd0.5-inc1", "re_prob": 0.5}}
    options |= {"mixup": MIXUP, "num_aug_repeats": 2, "seed": 5}
    whole = epoch(ImageDataModule(photos, "folder", 16, 4, **options).train_loader, 2)
    assert len(whole) == 6
    rest = epoch(ImageDataModule(photos, "folder", 16, 4, **options).train_loader, 2, 3)
    assert_same(rest, whole[3:])


def test_mixup_in_training_only(photos):
    data = ImageDataModule(photos, "folder", 16, 6, mixup=MIXUP)
    plain = ImageDataModule(photos, "folder", 16, 6)
    changed = 0
    for a, b in zip(epoch(data.train_loader, 1), epoch(plain.train_loader, 1), strict=True):
        assert (a.labels.shape, a.labels.dtype) == ((6, 3), np.float32)
        # Between an image's own class and its partner's.
        np.testing.assert_allclose(a.labels.sum(axis=1), 1, atol=1e-6)
        own, other = np.eye(3)[b.labels], np.eye(3)[b.labels[::-1]]
        assert (a.labels[(own + other) == 0] == 0).all()
        changed += (a.images != b.images).any()
    assert changed >= 3
    for name in ("val_loader", "test_loader"):
        assert_same(epoch(getattr(data, name)), epoch(getattr(plain, name)))


@pytest.mark.parametrize("repeats", [0, 3])
def test_two_processes_share_each_global_batch(photos, repeats):
    options = {"train_transforms": {"auto_augment": "rand-m9-n2"}, "num_aug_repeats": repeats}
    one = ImageDataModule(photos, "folder", 16, 8, **options)
    options |= {"world_size": 2}
    two = [ImageDataModule(photos, "folder", 16, 4, rank=rank, **options) for rank in range(2)]
    assert two[0].train_loader.global_batch_size == 8
    whole = epoch(one.train_loader, 3)
    shards = [epoch(data.train_loader, 3) for data in two]
    for number, batch in enumerate(whole):
        together = np.concatenate([shard[number].indices for shard in shards])
        assert sorted(together.tolist()) == sorted(batch.indices.tolist())
        images = {row.tobytes() for shard in shards for row in shard[number].images}
        assert images == {row.tobytes() for row in batch.images}
    seen = [batch.indices for data in two for batch in epoch(data.val_loader)]
    assert sorted(np.concatenate(seen).tolist()) == list(range(9))


def test_flat_folder_is_split_by_class(photos):
    flat = photos / "train"
    data = ImageDataModule(flat, "folder", 16, 4, val_split=6)
    labels = np.concatenate([batch.labels for batch in epoch(data.val_loader)])
    assert np.bincount(labels).tolist() == [2, 2, 2]
    assert len(data.train_loader) == 18 // 4
    # A tenth where nothing is said.
    tenth = ImageDataModule(flat, "folder", 16, 4)
    assert sum(len(batch.labels) for batch in epoch(tenth.val_loader)) == 2


def test_a_test_folder_is_used_if_there_is_one(photos):
    data = ImageDataModule(photos, "folder", 16, 4)
    assert_same(epoch(data.test_loader), epoch(data.val_loader))
    (photos / "test").symlink_to(photos / "train")
    data = ImageDataModule(photos, "folder", 16, 3)
    for loader, count in ((data.test_loader, 24), (data.val_loader, 9)):
        assert sum(len(batch.labels) for batch in epoch(loader)) == count


def test_order_of_the_data_set_without_shuffling(photos, caplog):
    data = ImageDataModule(photos, "folder", 16, 8, shuffle=False, drop_last=False)
    batches = epoch(data.train_loader, 1)
    assert np.concatenate([b.indices for b in batches]).tolist() == list(range(24))
    assert "drop_last=False" in caplog.text


def test_evaluation_batches_and_kept_images(photos):
    options = {"dataset": "folder", "image_size": 16, "batch_size": 2, "batch_size_eval": 4}
    loader = ImageDataModule(photos, cache_val_dataset=True, **options).val_loader
    assert (loader.batch_size, len(loader)) == (4, 3)
    next(iter(loader))
    first, again = epoch(loader), epoch(loader, 1)
    assert [len(batch.labels) for batch in first] == [4, 4, 1]
    assert all(a.images is b.images for a, b in zip(first, again, strict=True))
    assert_same(epoch(ImageDataModule(photos, **options).val_loader), first)


def test_synthetic_images_need_no_disk():
    sizes = {"image_size": 8, "batch_size": 4, "num_images": 18, "num_classes": 5}
    data = ImageDataModule(dataset="synthetic", mixup=MIXUP, **sizes)
    assert (data.num_classes, data.image_shape) == (5, (3, 8, 8))
    train = epoch(data.train_loader)
    assert (len(train), train[0].labels.shape) == (4, (4, 5))
    assert sum(len(batch.labels) for batch in epoch(data.val_loader)) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "cifar"}, "datamodule.dataset='cifar': it must be folder, mnist or synthetic"),
        ({"data_dir": None}, "datamodule.data_dir is not set"),
        ({"batch_size": 0}, "datamodule.batch_size=0"),
        ({"num_workers": -1}, "datamodule.num_workers=-1"),
        ({"mean": [0.5]}, "mean and datamodule.std go together"),
        ({"mean": [0.5, 0.5], "std": [1, 1]}, "expected 1 or 3 values each; three for color"),
        ({"num_classes": 7}, "datamodule.num_classes is 7, .* has 3 classes"),
        ({"val_split": 5}, "val_split is 5, but .* has a folder 'val'"),
        ({"train_transforms": {"flip": 1}}, r"no key datamodule\.train_transforms\.flip"),
        ({"test_transforms": {"crop": 1}}, r"no key datamodule\.test_transforms\.crop"),
    ],
)
def test_wrong_options_are_named(photos, options, message):
    with pytest.raises(UserError, match=message):
        ImageDataModule(**{"data_dir": photos, "image_size": 16, "batch_size": 4, **options})


def test_wrong_data_is_named(photos, tmp_path):
    with pytest.raises(DataError, match="no image data at"):
        ImageDataModule(tmp_path / "nowhere", "folder", 16, 4)
    with pytest.raises(DataError, match="has 24 images, fewer than one global batch of 25"):
        ImageDataModule(photos, "folder", 16, 25)
    (photos / "val" / "cat").rename(photos / "val" / "cow")
    with pytest.raises(DataError, match="only one of them has cat, cow"):
        ImageDataModule(photos, "folder", 16, 4)
    (photos / "val").rename(photos / "valid")
    for training in (True, False):
        with pytest.raises(DataError, match=r"has no folder 'val'; expected .*val/CLASS/IMAGE$"):
            ImageDataModule(photos, "folder", 16, 4, training=training)
    for split in (0, 24, 1.5):
        with pytest.raises(UserError, match=r"val_split(=| is)"):
            ImageDataModule(photos / "train", "folder", 16, 4, val_split=split)


def test_validation_needs_no_training_images(photos):
    expected = epoch(ImageDataModule(photos, "folder", 16, 4).val_loader)
    (photos / "val").rename(photos / "validation")
    (photos / "train").rename(photos / "elsewhere")
    data = ImageDataModule(photos, "folder", 16, 4, training=False)
    assert data.num_classes == 3
    assert_same(epoch(data.val_loader), expected)
    assert data.test_loader.dataset is data.val_loader.dataset
    assert data.train_loader is None
    with pytest.raises(DataError, match=r"has no folder 'train'; expected .*/train/CLASS/IMAGE"):
        ImageDataModule(photos, "folder", 16, 4)
    (photos / "test" / "dog").mkdir(parents=True)
    (photos / "test" / "dog" / "1.png").write_bytes(b"")
    with pytest.raises(DataError, match="only one of them has ant, bee, cat, dog"):
        ImageDataModule(photos, "folder", 16, 4, training=False)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("map.txt", "zebra\ndog  a dog, hot\n\nbee\tan insect\nant\ncat\n"),
        ("map.json", '["zebra", "dog", "bee", "ant", "cat"]'),
        ("map.json", '{"dog": 1, "zebra": 0, "bee": 2, "cat": 4, "ant": 3}'),
        (
            "map.json",
            '{"1": ["dog", "a dog"], "0": ["zebra"], "2": ["bee"], "4": ["cat"], "3": ["ant"]}',
        ),
    ],
    ids=["text", "list", "by-name", "by-index"],
)
def test_folders_of_a_part_of_the_classes(photos, tmp_path, name, text):
    """Labels are the numbers in the map, in folders and archives, with empty folders too."""
    own = ImageDataModule(photos, "folder", 16, 4).val_loader.dataset
    number = {"zebra": 0, "dog": 1, "bee": 2, "ant": 3, "cat": 4}
    wanted = [number[own.classes[label]] for label in own.labels]
    path, archive = tmp_path / name, tmp_path / "photos.tar"
    path.write_text(text)
    with tarfile.open(archive, "w") as file:
        file.add(photos, ".")
    for part in ("train", "val"):
        (photos / part / "zebra").mkdir()
    for source in (photos, archive):
        data = ImageDataModule(source, "folder", 16, 4, class_map=str(path))
        assert data.num_classes == 5
        assert data.val_loader.dataset.labels.tolist() == wanted


def test_class_maps_that_do_not_fit(photos, tmp_path):
    path = tmp_path / "map.json"
    for text, error, words in (
        ('["ant", "bee"]', DataError, "1 of 3 class folders in .*train are not among the 2"),
        ('["ant", "bee", "ant"]', UserError, "map.json: ant is there more than once"),
        ("[]", UserError, "it has no class"),
        ('{"ant": 1}', UserError, "neither lines .*the indices are not 0 to 0"),
        ("{", UserError, "neither lines"),
        ("3", UserError, "neither lines"),
    ):
        path.write_text(text)
        with pytest.raises(error, match=words):
            ImageDataModule(photos, "folder", 16, 4, class_map=str(path))
    with pytest.raises(DataError, match="/nowhere cannot be read"):
        ImageDataModule(photos, "folder", 16, 4, class_map="/nowhere")
    with pytest.raises(UserError, match="dataset=synthetic has none"):
        ImageDataModule(dataset="synthetic", class_map="/nowhere")
    whole = ImageDataModule(photos, "folder", 16, 4, class_map=str(photos / "train"))
    assert whole.num_classes == 3


def test_empty_class_folders(photos):
    shutil.rmtree(photos / "val" / "ant")
    (photos / "val" / "ant").mkdir()
    with pytest.raises(DataError, match="hold no images"):
        ImageDataModule(photos, "folder", 16, 4)
    data = ImageDataModule(photos, "folder", 16, 4, allow_empty=True)
    assert set(data.val_loader.dataset.labels) == {1, 2}
