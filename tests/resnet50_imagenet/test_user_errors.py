"""Bad input: one sentence that says what to do, exit code 2, no traceback, nothing lost."""

from __future__ import annotations

import numpy as np
import pytest
import safetensors.numpy

from tests.resnet50_imagenet.conftest import SMALL


def refused(run_main, *args, **kwargs) -> str:
    result = run_main(*args, ok=False, **kwargs)
    # With several processes oneflow's launcher adds a traceback of its own.
    if kwargs.get("processes", 1) == 1:
        assert "Traceback" not in result.stdout, result.stdout
        assert result.returncode == 2, result.stdout
    return result.stdout


def test_missing_data_names_the_folder(run_main, tmp_path):
    output = refused(run_main, tmp_path / "nothing", *SMALL, fresh=True)
    assert str(tmp_path / "nothing" / "val") in output


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("-a", "resnet51"), "resnet51"),
        (("-b", "0"), "0 is less than 1"),
        (("--lr", "nan"), "--lr"),
        (("--epochs", "many"), "many"),
        (("--learning-speed", "1"), "--learning-speed"),
        (("--amp",), "add --graph"),
        (("--amp", "--graph"), "float16"),
        (("--device", "mlu"), "oneflow_mlu"),
        (("--device", "cuda"), "NVIDIA driver"),
        (("--device", "gpu"), "devices are"),
        (("--gpu", "3"), "--gpu 3"),
        (("--dist-url", "env"), "tcp://HOST:PORT"),
        (("--dist-backend", "nccl"), "--dist-backend"),
        (("--weights", "none.pth"), "none.pth"),
        (("--pretrained",), "ONEFLOW_ACCEL_WEIGHTS"),
        (("--resume", "nowhere"), "nowhere"),
        (("-b", "200"), "96"),
    ],
)
def test_bad_option(shapes, run_main, options, part):
    assert part in refused(run_main, shapes, *SMALL, *options)


def test_channels_last_without_the_plug_in(shapes, run_main):
    output = refused(
        run_main, shapes, *SMALL, "--channels-last", env={"ONEFLOW_ACCEL_PLUGIN": "off"}
    )
    assert "ONEFLOW_ACCEL_PLUGIN=off" in output


def test_batch_that_does_not_divide(shapes, run_main):
    output = refused(run_main, shapes, *SMALL, "-b", "9", processes=2)
    assert "9 is not a multiple of the 2 processes" in output


def test_loss_that_is_not_finite_stops_the_run_and_names_the_step(shapes, run_main, tmp_path):
    out = tmp_path / "out"
    output = refused(run_main, shapes, *SMALL, "--lr", "1e30", "-p", "7", "--output-dir", out)
    assert "at step 2" in output
    assert not list(out.glob("checkpoints/step-*")), "a model that is not finite was saved"


def test_second_run_in_the_same_folder_destroys_nothing(shapes, run_main, tmp_path):
    out = tmp_path / "out"
    run_main(shapes, *SMALL, "--max-steps", "2", "--output-dir", out)
    before = (out / "metrics.jsonl").read_bytes()
    output = refused(run_main, shapes, *SMALL, "--max-steps", "2", "--output-dir", out)
    assert "already holds checkpoints" in output
    assert (out / "metrics.jsonl").read_bytes() == before
    assert [path.name for path in out.glob("checkpoints/step-*")] == ["step-00000002"]


def test_checkpoint_of_another_model(shapes, run_main, tmp_path):
    out = tmp_path / "out"
    run_main(shapes, *SMALL, "--max-steps", "1", "--output-dir", out)
    options = ("-a", "resnet34", "--resume", "auto", "--output-dir", out)
    output = refused(run_main, shapes, *SMALL, *options)
    assert "resnet18 with 3 classes, this run is resnet34 with 3" in output


def test_corrupt_checkpoint_falls_back_to_the_one_before(shapes, run_main, tmp_path):
    out = tmp_path / "out"
    options = ("--save-freq", "1", "--output-dir", out)
    run_main(shapes, *SMALL, *options, "--max-steps", "3")
    weights = out / "checkpoints" / "step-00000003" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    result = run_main(shapes, *SMALL, *options, "--max-steps", "4", "--resume", "auto")
    assert "step-00000003" in result.stdout
    assert "resumed at epoch 0, step 2" in result.stdout


def test_finished_run_says_so(shapes, run_main, tmp_path):
    out = tmp_path / "out"
    options = ("--max-steps", "1", "--output-dir", out)
    run_main(shapes, *SMALL, *options)
    assert "nothing to train" in refused(run_main, shapes, *SMALL, *options, "--resume", "auto")


def test_weights_that_do_not_fit_are_listed(shapes, run_main, tmp_path):
    file = tmp_path / "weights.safetensors"
    arrays = {"fc.weight": np.zeros((5, 512), np.float32), "head": np.zeros(3, np.float32)}
    safetensors.numpy.save_file(arrays, file)
    output = refused(run_main, shapes, *SMALL, "--weights", file)
    for part in ("weights.safetensors", "conv1.weight", "head", "(5, 512)"):
        assert part in output


def test_different_classes_in_train_and_val(shapes, run_main, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "train").symlink_to(shapes / "train")
    (data / "val").mkdir()
    for kind in ("disk", "square"):
        (data / "val" / kind).symlink_to(shapes / "val" / kind)
    assert "stripes" in refused(run_main, data, *SMALL)
