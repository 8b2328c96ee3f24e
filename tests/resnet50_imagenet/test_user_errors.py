"""Bad input: one sentence that says what to do, exit code 2, no traceback, nothing lost."""

from __future__ import annotations

import importlib

from oneflow_accel.errors import UserError

import numpy as np
import pytest
import safetensors.numpy

from flow_train.checkpoint.folders import read_checkpoint
from resnet50_imagenet import main
from resnet50_imagenet.models import _head, create_model
from resnet50_imagenet.options import parse_options
from tests.resnet50_imagenet.conftest import SMALL, losses


def refused(run_main, *args, **kwargs) -> str:
    result = run_main(*args, ok=False, **kwargs)
    # With several processes oneflow's launcher adds a traceback of its own.
    if kwargs.get("processes", 1) == 1:
        assert "Traceback" not in result.stdout, result.stdout
        assert result.returncode == 2, result.stdout
    return result.stdout


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("-a", "resnet51"), "did you mean resnet50 or resnet18"),
        (("--learning-speed", "1"), "--learning-speed"),
        (("--amp",), "--precision float16: cpu cannot do this: CPUs have no kernels in float16"),
        (("--start-epoch", "5", "--max-steps", "2"), "is step 60, and the run ends at step 2"),
        (("-e", "--model-ema"), "--model-ema: there are no moving averages to evaluate"),
        (("-e", "--predictions", "/"), "--predictions /: Is a directory"),
        (("--device", "mlu"), "oneflow_mlu"),
        (("--gpu", "3"), "--gpu 3"),
        (("--dist-url", "env"), "tcp://HOST:PORT"),
        (("--dist-backend", "nccl"), "--dist-backend"),
        (("--weights", "none.pth"), "none.pth"),
        (("--pretrained",), "ONEFLOW_ACCEL_WEIGHTS"),
        (("--resume", "nowhere"), "nowhere"),
        (("-e", "--resume", "auto"), "there is no checkpoint in runs"),
        (("-b", "200"), "96"),
        (("--seed", "99999999999999999999999"), "from 0 to 9223372036854775807"),
        (("--reset-head",), "add --weights or --pretrained"),
        (("-a", "vit_tiny_patch16_224"), "doesn't match model (224)"),
        (("-a", "inception_v3", "--image-size", "64"), "for those of 299 pixels a side"),
        (("-a", "dla46x_c", "--image-size", "64"), "the images are too small for it"),
    ],
)
def test_bad_option(shapes, run_main, options, part):
    output = refused(run_main, shapes, *SMALL, *options)
    assert part in output
    # Not the names of all models.
    assert len(output) < 1000


def test_missing_data_and_classes_are_named(shapes, run_main, tmp_path):
    assert str(tmp_path / "nothing" / "val") in refused(run_main, tmp_path / "nothing", *SMALL)
    (tmp_path / "train").symlink_to(shapes / "train")
    (tmp_path / "val").mkdir()
    for kind in ("disk", "square"):
        (tmp_path / "val" / kind).symlink_to(shapes / "val" / kind)
    assert "stripes" in refused(run_main, tmp_path, *SMALL)


def test_batch_that_does_not_divide(monkeypatch):
    monkeypatch.setattr(main.distributed, "local_world_size", lambda: 2)
    options = parse_options(["-b", "9", "--dummy", "--seed", "1"])
    with pytest.raises(UserError, match="9 is not a multiple of the 2 processes"):
        main._loader(options, main._datasets(options)[0], train=True)


def test_another_runs_folder_is_left_alone(shapes, run_main, tmp_path):
    """By a new run, and by one that goes on from elsewhere."""
    runs = {name: tmp_path / name for name in "ABC"}
    for name in "AB":
        run_main(shapes, *SMALL, "--max-steps", "2", "--output-dir", runs[name])
    content = lambda: {p: p.read_bytes() for p in runs["B"].rglob("*") if p.is_file()}  # noqa: E731
    before = content()
    resume = ("--max-steps", "4", "--save-freq", "1", "--resume", runs["A"] / "checkpoints/latest")
    for options in (("--max-steps", "2"), resume):
        output = refused(run_main, shapes, *SMALL, *options, "--output-dir", runs["B"])
        assert "B already holds a run" in output
        assert content() == before
    run_main(shapes, *SMALL, *resume, "--output-dir", runs["C"])
    assert sorted(losses(runs["C"])) == [3, 4]


def test_channels_last_without_the_plug_in(shapes, run_main):
    output = refused(
        run_main, shapes, *SMALL, "--channels-last", env={"ONEFLOW_ACCEL_PLUGIN": "off"}
    )
    assert "ONEFLOW_ACCEL_PLUGIN=off" in output


def test_loss_that_is_not_finite_stops_the_run_and_names_the_step(shapes, run_main, tmp_path):
    out = tmp_path / "out"
    output = refused(run_main, shapes, *SMALL, "--lr", "1e30", "-p", "7", "--output-dir", out)
    assert "at step 2" in output
    assert not list(out.glob("checkpoints/step-*")), "a model that is not finite was saved"


@pytest.mark.parametrize("options", [(), ("--no-fold", "--graph"), ("--bf16",)])
def test_evaluation_of_weights_with_nan_says_so(shapes, run_main, nan_weights, options):
    output = refused(run_main, shapes, *SMALL, "-e", "--weights", nan_weights, *options)
    assert "Loss nan" in output
    assert "the loss on the validation images is nan" in output


@pytest.fixture(scope="module")
def nan_weights(tmp_path_factory):
    """Weights for three classes, with NaN in one channel of the first convolution."""
    model = create_model("shufflenet_v2_x0_5", 3)
    arrays = {name: value.numpy() for name, value in model.state_dict().items()}
    arrays["conv1.0.weight"] = arrays["conv1.0.weight"].copy()
    arrays["conv1.0.weight"][5] = np.nan
    file = tmp_path_factory.mktemp("nan") / "nan.safetensors"
    safetensors.numpy.save_file(arrays, file)
    return file


def test_checkpoint_of_another_model(shapes, run_main, tmp_path):
    out = tmp_path / "out"
    run_main(shapes, *SMALL, "--max-steps", "1", "--output-dir", out)
    options = ("-a", "resnet18", "--resume", "auto", "--output-dir", out)
    output = refused(run_main, shapes, *SMALL, *options)
    assert "shufflenet_v2_x0_5 with 3 classes, this run is resnet18 with 3" in output
    for split in ("train", "val"):
        for name in ("disk", "square", "zebra"):
            target = shapes / split / name.replace("zebra", "stripes")
            (tmp_path / "data" / split).mkdir(parents=True, exist_ok=True)
            (tmp_path / "data" / split / name).symlink_to(target)
    for options in (("--resume", "auto", "--output-dir", out), ("-e", "--resume", out)):
        output = refused(run_main, tmp_path / "data", *SMALL, *options)
        assert "class 2 is 'stripes' there and 'zebra' in this data" in output


def test_corrupt_checkpoint_falls_back_to_the_one_before(shapes, run_main, tmp_path):
    out = tmp_path / "out"
    options = ("--save-freq", "1", "--output-dir", out)
    run_main(shapes, *SMALL, *options, "--max-steps", "3")
    weights = out / "checkpoints" / "step-00000003" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    result = run_main(shapes, *SMALL, *options, "--max-steps", "4", "--resume", "auto")
    assert "step-00000003" in result.stdout
    assert "resumed at epoch 0, step 2" in result.stdout


def test_weights_that_do_not_fit_are_listed(shapes, run_main, tmp_path):
    file = tmp_path / "weights.safetensors"
    arrays = {"fc.weight": np.zeros((5, 512), np.float32), "head": np.zeros(3, np.float32)}
    safetensors.numpy.save_file(arrays, file)
    output = refused(run_main, shapes, *SMALL, "--weights", file)
    for part in ("weights.safetensors", "conv1.0.weight", "and 278 more", "head", "(5, 512)"):
        assert part in output


def test_new_head_for_other_classes(shapes, run_main, tmp_path):
    """Weights of 1,000 classes on a folder of three."""
    file, out = tmp_path / "weights.safetensors", tmp_path / "out"
    arrays = {
        name: value.numpy()
        for name, value in create_model("shufflenet_v2_x0_5", 1000).state_dict().items()
    }
    safetensors.numpy.save_file(arrays, file)
    options = ("--lr", "0", "--weights", file, "--max-steps", "1", "--output-dir", out)
    output = refused(run_main, shapes, *SMALL, *options)
    assert "are for 1000 classes and the data has 3: --reset-head begins" in output
    result = run_main(shapes, *SMALL, *options, "--reset-head")
    assert "the head begins anew: fc.weight, fc.bias" in result.stdout
    kept = read_checkpoint(out / "checkpoints").model
    assert kept["fc.weight"].shape == (3, 1024)
    for name in (name for name in arrays if "running" not in name and "tracked" not in name):
        if not name.startswith("fc."):
            np.testing.assert_array_equal(kept[name], arrays[name], err_msg=name)
    result = run_main(shapes, *SMALL, "-e", "--weights", out)
    assert f"weights of {out / 'checkpoints' / 'step-00000001'}" in result.stdout


def test_a_model_may_have_several_heads():
    heads = {"AuxLogits.fc", "fc"}
    names = {f"{head}.{kind}" for head in heads for kind in ("weight", "bias")}
    assert set(_head("inception_v3", 3)) == names
    assert set(_head("mobilenet_v2", 3)) == {"classifier.1.weight", "classifier.1.bias"}


def test_models_of_22k_classes_can_be_built(monkeypatch):
    """flowvision's set the number of classes themselves."""
    module = importlib.import_module("flowvision.models.convnext")
    whole = module.ConvNeXt
    narrow = {"depths": [1, 1, 1, 1], "dims": [4, 4, 4, 8], "num_classes": 7}
    # Whole ones take gigabytes, and a wide head many seconds.
    monkeypatch.setattr(module, "ConvNeXt", lambda **options: whole(**{**options, **narrow}))
    model = create_model("convnext_base_224_22k", 3)
    assert tuple(model.head.weight.shape) == (3, 8)
