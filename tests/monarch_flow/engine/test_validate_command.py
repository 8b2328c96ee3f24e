"""python -m monarch_flow.validate: both kinds of labels, whose weights, what it prints."""

from __future__ import annotations

import argparse
import json
import os
from collections import OrderedDict
from pathlib import Path

import oneflow_accel
from oneflow_accel import layouts

import numpy as np
import oneflow as flow
import pytest
from PIL import Image

from flow_train.data.datamodule import ImageDataModule
from monarch_flow import validate
from monarch_flow.models import create_model
from tests.launch import run_distributed
from tests.torch_writer import save_torch_file

CLASSES, IMAGES = 8, 28
MODEL = {"patch_size": 7, "embed_dim": 32, "depth": 2, "num_heads": 2, "mlp_ratio": 2.0}
STATISTICS = {"mean": [0.449], "std": [0.226]}
Arrays = dict[str, np.ndarray]


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "DATA_DIR", "RESULT_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """DIR/validation only, with ImageNet's file names, whose numbers are in no order of classes."""
    root = tmp_path_factory.mktemp("imagenet")
    random = np.random.default_rng(5)
    for number in range(1, IMAGES + 1):
        folder = root / "validation" / f"n{number * 3 % CLASSES:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 256, (32, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"ILSVRC2012_val_{number:08d}.JPEG", quality=95)
    random = np.random.default_rng(6)
    lists = [random.permutation(CLASSES)[: random.integers(4)].tolist() for _ in range(IMAGES)]
    (root / "real.json").write_text(json.dumps(lists))
    return root


def weights(seed: int, **options: object) -> Arrays:
    """A model's state dict with scores far apart."""
    oneflow_accel.select_device().manual_seed(seed)
    model = create_model("vit_tiny_patch4_28", **{"num_classes": CLASSES, **MODEL, **options})
    arrays = {name: value.numpy() for name, value in model.state_dict().items()}
    arrays["head.weight"] = arrays["head.weight"] * 30
    return arrays


@pytest.fixture(scope="module")
def averaged() -> Arrays:
    return weights(1)


@pytest.fixture(scope="module")
def last() -> Arrays:
    return weights(2)


@pytest.fixture(scope="module")
def checkpoint(averaged, last, tmp_path_factory) -> Path:
    content = {
        "epoch": 309,
        "arch": "ViTAE_basic_Tiny",
        "state_dict": OrderedDict((f"module.{name}", array) for name, array in last.items()),
        "optimizer": {"state": {0: {"step": 1, "exp_avg": last["head.bias"]}}, "param_groups": []},
        "version": 2,
        "args": argparse.Namespace(model="ViTAE_basic_Tiny", lr=1e-3, opt_betas=None),
        "amp_scaler": {"scale": 65536.0},
        "state_dict_ema": OrderedDict(averaged),
        "metric": 75.3,
    }
    return save_torch_file(tmp_path_factory.mktemp("weights") / "ViTAE-T.pth.tar", content)


def arguments(photos: Path, *more: object) -> list[str]:
    data = ["datamodule=folder", "datamodule.image_size=28", "datamodule.num_workers=0"]
    data += [f"datamodule.{key}={value}" for key, value in STATISTICS.items()]
    data += ["datamodule.batch_size_eval=5", f"datamodule.data_dir={photos}"]
    model = [f"model.{key}={value}" for key, value in MODEL.items()]
    return ["experiment=mnist/vit", *data, *model, *map(str, more)]


def by_numpy(photos: Path, arrays: Arrays, classes: range = range(CLASSES)) -> dict[str, float]:
    """Percent, from a forward pass of its own over all images of these classes."""
    model = create_model("vit_tiny_patch4_28", num_classes=CLASSES, **MODEL)
    layouts.load_standard_state_dict(model, arrays)
    model.eval()
    options = {"val_transforms": {"interpolation": "bicubic", "crop_pct": 0.875}, **STATISTICS}
    data = ImageDataModule(photos, image_size=28, batch_size=99, training=False, **options)
    (batch,) = data.val_loader
    wanted = np.isin(batch.labels, classes)
    labels, indices = batch.labels[wanted], batch.indices[wanted]
    with flow.no_grad():
        scores = model(flow.tensor(batch.images[wanted])).numpy().astype(np.float64)
    best = np.argsort(-scores, axis=1)[:, :5]
    lists = json.loads((photos / "real.json").read_text())
    dataset = data.val_loader.dataset
    numbers = [int(Path(dataset.name(int(i))).stem[-8:]) for i in indices]
    assert len(set(numbers)) == (IMAGES if len(classes) == CLASSES else len(labels))
    assert any(lists)
    assert not all(lists)
    real = [
        (row[0] in lists[number - 1], bool(set(row) & set(lists[number - 1])))
        for row, number in zip(best.tolist(), numbers, strict=True)
        if lists[number - 1]
    ]
    hits = best == labels[:, None]
    logs = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    return {
        "loss": -logs[np.arange(len(labels)), labels].mean(),
        "top1": 100 * hits[:, 0].mean(),
        "top5": 100 * hits.any(axis=1).mean(),
        "real_top1": 100 * np.mean([first for first, _ in real]),
        "real_top5": 100 * np.mean([among for _, among in real]),
    }


def expected_lines(figures: dict[str, float]) -> list[str]:
    keys = {"Top-1": "top1", "Top-5": "top5", "Top-1 real": "real_top1", "Top-5 real": "real_top5"}
    return [f"{name} accuracy of the model is: {figures[k]:.1f}%" for name, k in keys.items()]


@pytest.mark.parametrize("use_ema", [True, False])
def test_accuracy_of_a_published_checkpoint(
    photos, checkpoint, averaged, last, use_ema, tmp_path, capsys, caplog
):
    """The four last lines, and the same figures in a file; moving averages or the last weights."""
    results = tmp_path / "results.json"
    more = [f"eval.ckpt={checkpoint}", f"eval.real_labels={photos / 'real.json'}"]
    more += [f"eval.results_file={results}", f"eval.use_ema={str(use_ema).lower()}"]
    assert validate.main(arguments(photos, *more)) == 0
    wanted = by_numpy(photos, averaged if use_ema else last)
    assert wanted != by_numpy(photos, last if use_ema else averaged)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-4:] == expected_lines(wanted)
    (progress,) = [line for line in lines if line.startswith("val: [")]
    assert progress.startswith("val: [6/6]\tLoss ")
    assert f"Acc@1 {wanted['top1']:.3f}\t" in progress
    assert progress.endswith("images/s\tETA 0:00:00")
    assert "use real labels" in caplog.text
    found = json.loads(results.read_text())
    for name, value in wanted.items():
        assert found["val"][name] == pytest.approx(value, rel=1e-5), name
    assert found["val"]["images"] == IMAGES
    assert (found["model"], found["use_ema"]) == ("vit_tiny_patch4_28", use_ema)
    assert found["parameters"] == sum(array.size for array in last.values())
    assert "test" not in found


def test_two_processes_count_each_image_once(photos, checkpoint, averaged):
    more = (f"eval.ckpt={checkpoint}", f"eval.real_labels={photos / 'real.json'}")
    launched = run_distributed(["-m", "monarch_flow.validate", *arguments(photos, *more)], 2)
    assert launched.returncode == 0, launched.stdout
    lines = [line for line in launched.stdout.splitlines() if "accuracy of the model" in line]
    assert lines == expected_lines(by_numpy(photos, averaged))
    assert launched.stdout.count("use real labels") == 1
    assert f"({IMAGES} images)" in launched.stdout


def test_without_real_labels_nothing_is_made_up(photos, checkpoint, capsys):
    assert validate.main(arguments(photos, f"eval.ckpt={checkpoint}", "eval.real_labels=")) == 0
    lines = capsys.readouterr().out.splitlines()[-4:]
    assert all(line.endswith("%") for line in lines[:2])
    assert all(line.endswith("not measured, see eval.real_labels") for line in lines[2:])


class _RunsCode:
    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return os.system, ("touch code-from-the-checkpoint-ran",)


def test_code_in_a_checkpoint_is_not_run(photos, averaged, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "hostile.pth.tar"
    save_torch_file(path, {"state_dict_ema": averaged, "args": _RunsCode()})
    assert validate.main(arguments(photos, f"eval.ckpt={path}")) == 2
    assert "wants to run `posix.system`" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["hostile.pth.tar"]


def test_weights_of_other_layers_and_classes(photos, averaged, tmp_path, capsys, caplog):
    dense = save_torch_file(tmp_path / "dense.pth", averaged)
    options = ("model/vitmlp_cfg=butterflyblockdiag",)
    assert validate.main(arguments(photos, f"eval.ckpt={dense}", *options)) == 0
    assert (
        capsys.readouterr().out.splitlines()[-4:-2]
        == expected_lines(by_numpy(photos, averaged))[:2]
    )
    assert "evaluated with dense layers; python -m monarch_flow.convert project" in caplog.text
    monarch = save_torch_file(tmp_path / "monarch.pth", weights(3, mlp_cfg="monarch"))
    assert validate.main(arguments(photos, f"eval.ckpt={monarch}")) == 2
    text = capsys.readouterr().err
    assert "structured layers (blocks.0.mlp.fc1.blkdiag1)" in text
    assert "monarch_flow.convert densify" in text
    wide = save_torch_file(tmp_path / "wide.pth", weights(3, num_classes=11))
    assert validate.main(arguments(photos, f"eval.ckpt={wide}")) == 2
    text = capsys.readouterr().err
    assert "The weights are for 11 classes and the data has 8" in text
    assert "train.init_from.reset_head=true" in text


def test_scores_that_are_no_numbers_are_an_error(photos, averaged, tmp_path, capsys):
    """Once the file of results, which says so too, is written."""
    bias = np.full_like(averaged["head.bias"], np.nan)
    path = save_torch_file(tmp_path / "nan.pth", {**averaged, "head.bias": bias})
    results = tmp_path / "results.json"
    command = arguments(photos, f"eval.ckpt={path}", f"eval.results_file={results}")
    assert validate.main(command) == 2
    assert "the loss on the validation images is nan" in capsys.readouterr().err
    assert '"loss": null' in results.read_text()


def test_accuracy_of_guessing_is_suspected(photos, tmp_path, caplog):
    """What the averages of ViTAE's code are with one GPU: those of the untrained model."""
    from flow_train.task import Evaluation, ImageTask
    from monarch_flow.engine.evaluation import _suspect

    def found(loss: float, correct: float) -> Evaluation:
        sums = {"loss": (loss * 50_000, 50_000.0), "acc1": (correct, 50_000.0)}
        return Evaluation(ImageTask(), sums)

    _suspect(found(6.9, 75), 1000, use_ema=True)
    assert "eval.use_ema=false" in caplog.text
    caplog.clear()
    _suspect(found(1.0, 37_650), 1000, use_ema=True)
    _suspect(found(6.9, 75), 1000, use_ema=False)
    assert not caplog.text


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ((), ["which weights?", "eval.ckpt=PATH", "runs/mnist-vit, which is not there"]),
        (("eval.ckpt={ckpt}", "datamodule.data_dir=/nowhere"), ["must hold val/CLASS/IMAGE"]),
        (
            ("eval.ckpt={ckpt}", "datamodule.data_dir={empty}"),
            ["has no folders in it; expected val/CLASS/IMAGE, or CLASS/IMAGE alone"],
        ),
        (("eval.ckpt={ckpt}", "eval.real_labels=/nowhere.json"), ["/nowhere.json", "No such file"]),
        (("eval.ckpt={ckpt}", "eval.results_file=/nowhere/f.json"), ["/nowhere/f.json"]),
        (("eval.ckpt={ckpt}", "eval.run_val=false"), ["nothing to evaluate"]),
        (
            ("--model", "ViTAE_basic_Tiny", "--eval_checkpoint", "x", "-b", "64"),
            ["no flag --model", "no flag -b", "monarch_flow/docs/vitae_options.md"],
        ),
        (("{photos}",), ["datamodule.data_dir={photos}"]),
    ],
)
def test_mistakes_are_one_message(more, words, photos, checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {"ckpt": checkpoint, "photos": photos, "empty": tmp_path}
    assert validate.main(arguments(photos, *(text.format(**names) for text in more))) == 2
    err = capsys.readouterr().err
    assert err.startswith("monarch_flow.validate: error: ")
    for word in words:
        assert word.format(**names) in err, err


@pytest.mark.parametrize("how", ["eval.class_map", "empty-folders"])
def test_a_part_of_the_classes(photos, checkpoint, averaged, tmp_path, capsys, how):
    """A model of 8 classes, images of three: both accuracies are of the same images of all."""
    names = sorted(path.name for path in (photos / "validation").iterdir())
    present = range(2, 5)
    (tmp_path / "val").mkdir()
    for number in present:
        (tmp_path / "val" / names[number]).symlink_to(photos / "validation" / names[number])
    more = [f"eval.ckpt={checkpoint}", f"eval.real_labels={photos / 'real.json'}"]
    assert validate.main(arguments(tmp_path, more[0])) == 2
    assert "datamodule.class_map=FILE" in capsys.readouterr().err
    if how.endswith("class_map"):
        classes = tmp_path / "classes.txt"
        classes.write_text("".join(f"{name} something, what it is\n" for name in names))
        more.append(f"{how}={classes}")
    else:
        for name in set(names) - {names[number] for number in present}:
            (tmp_path / "val" / name).mkdir()
        more.append("datamodule.allow_empty=true")
    results = tmp_path / "figures.json"
    capsys.readouterr()
    assert validate.main(arguments(tmp_path, *more, f"eval.results_file={results}")) == 0
    lines = capsys.readouterr().out.splitlines()[-4:]
    assert lines == expected_lines(by_numpy(photos, averaged, present))


def test_real_labels_are_those_of_the_validation_images(photos, checkpoint, tmp_path, capsys):
    """A part of its own for tests has other images; where it is the same, both are counted."""
    real = f"eval.real_labels={photos / 'real.json'}"
    more = (f"eval.ckpt={checkpoint}", real, "eval.run_val=false", "eval.run_test=true")
    assert validate.main(arguments(photos, *more)) == 0
    assert "real accuracy of the model is: not" not in capsys.readouterr().out
    (tmp_path / "val").symlink_to(photos / "validation")
    (tmp_path / "test").symlink_to(photos / "validation")
    assert validate.main(arguments(tmp_path, *more)) == 2
    assert "eval.run_val=true" in capsys.readouterr().err


def test_help_and_the_configuration(capsys):
    assert validate.main(["--help", "experiment=mnist/vit"]) == 0
    assert "DIR/validation" in capsys.readouterr().out
    assert validate.main(["experiment=mnist/vit", "--cfg", "job"]) == 0
    assert "run_test: false" in capsys.readouterr().out
