"""The command line: a checked-in list of options, and every one with its default in --help."""

from __future__ import annotations

from oneflow_accel.errors import UserError

import pytest

from resnet50_imagenet.models import classification_models
from resnet50_imagenet.options import build_parser, parse_options

# A change here is a change of the public command line: it belongs in the changelog.
OPTIONS = {
    "model": "-a --arch --weights --pretrained --reset-head --channels-last --freeze-bn --conv-cfg",
    "training": "--epochs --start-epoch --max-steps -b --batch-size --lr --learning-rate "
    "--momentum --wd --weight-decay --graph --fsdp --precision --dtype --amp --seed --scheduler "
    "--optimizer --grad-accum-steps --clip-grad --smoothing --model-ema --model-ema-decay "
    "--reduce-dtype",
    "data": "-j --workers --image-size --scale --hflip --dummy --aa --reprob --mixup --cutmix "
    "--mixup-prob --mixup-switch-prob --mixup-mode",
    "run": "-h --help --device --profile -e --evaluate --benchmark --fold --no-fold --bf16 "
    "--predictions --output-dir --resume --save-freq -p --print-freq",
    "several processes": "--multiprocessing-distributed --world-size --rank --dist-url "
    "--dist-backend --gpu",
}


def test_options_are_the_ones_listed():
    ours = [option for action in build_parser()._actions for option in action.option_strings]
    assert sorted(ours) == sorted(" ".join(OPTIONS.values()).split())


def test_defaults_are_the_reference_ones(monkeypatch):
    monkeypatch.setenv("IMAGENET_DIR", "from-environment")
    assert parse_options(["from-argument"]).data == "from-argument"
    options = parse_options([])
    assert options.data == "from-environment"
    expected = {"arch": "resnet50", "epochs": 90, "start_epoch": 0, "batch_size": 192, "lr": 0.1}
    expected |= {"momentum": 0.9, "weight_decay": 1e-4, "print_freq": 10, "workers": 4}
    expected |= {"seed": None, "gpu": None, "channels_last": False, "image_size": 224}
    assert {name: getattr(options, name) for name in expected} == expected


@pytest.mark.parametrize(("arch", "size"), [("inception_v3", 299), ("vit_base_patch16_384", 384)])
def test_images_are_as_large_as_the_model_was_made_for(arch, size):
    assert parse_options(["-a", arch]).image_size == size
    assert parse_options(["-a", arch, "--image-size", "96"]).image_size == 96


def test_models_are_classifiers_only():
    names = classification_models()
    assert {"resnet50", "vgg16", "mobilenet_v2"} <= set(names)
    assert not [name for name in names if "rcnn" in name or "deeplab" in name or "iresnet" in name]


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("--weights a.pth --pretrained", "--weights and --pretrained"),
        ("--gpu 0 --multiprocessing-distributed", "--gpu"),
        ("--scale 0.9 0.5", "--scale"),
        ("--profile 3 --graph", "--profile"),
        ("--predictions a.csv", "--predictions"),
        ("--amp --precision bfloat16", "--amp and --precision ask for different"),
        ("--amp --bf16", "--amp and --bf16 ask for different"),
        ("--model-ema-decay 0.9", "add --model-ema"),
        (
            "-b 0 --scale 1 2",
            "^--batch-size 0: .*\n--scale 1 2: it must be 2 values, each .* 0 to 1$",
        ),
        ("--optimizer adamw --momentum 0.9", "--momentum is for --optimizer sgd: leave it out"),
        ("--aa rand-m99", "m99 is out of range"),
        ("--fsdp ful_shard", "did you mean full_shard"),
        ("--fsdp --precision fp16", "--fsdp trains in float32 or bfloat16"),
        ("--reduce-dtype bfloat16 --graph", "--reduce-dtype is for eager training"),
        ("--precision fp8", "precision 'fp8' is none of float32, float32-bf16-products"),
    ],
)
def test_contradictions_are_refused(line, names):
    with pytest.raises(UserError, match=names):
        parse_options(line.split())


@pytest.mark.parametrize(
    ("line", "mode", "data"),
    [
        ("--fsdp images", "full_shard", "images"),
        ("--fsdp --epochs 1 {}", "full_shard", True),
        ("--fsdp shard_grad_op {}", "shard_grad_op", True),
        ("--fsdp=hybrid_shard {}", "hybrid_shard", True),
    ],
)
def test_fsdp_takes_a_mode_or_none(line, mode, data, tmp_path):
    options = parse_options(line.format(tmp_path).split())
    assert (options.fsdp, options.data) == (mode, str(tmp_path) if data is True else data)


@pytest.mark.parametrize(
    ("line", "name"),
    [("", "float32"), ("--amp", "float16"), ("--bf16 --precision bf16", "bfloat16")],
)
def test_one_precision(line, name):
    options = parse_options(line.split())
    assert (options.precision, options.model_ema_decay) == (name, 0.9998)
