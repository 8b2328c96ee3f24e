"""Options, the plan of a run, and the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
import pytest

from flow_train.metrics.macs import count_macs
from tests.launch import REPOSITORY, run_process
from vit_10b.model import Shape, ViT
from vit_10b.options import LAYERS, build_parser, parse_options, shape_of
from vit_10b.plan import GIB, Plan, largest_models, report, require_memory
from vit_10b.run_vit_training import run

# 3 divides no width.
STRUCTURED = {"mlp_cfg": {"_target_": "monarch", "nblocks": 3}, "attnlinear_cfg": "blockdiag"}
STRUCTURED["attnproj_cfg"] = "monarch"
# fsdp_llama_spec A.1.
DEFAULTS = {
    "data_dir": Path("/datasets/imagenet-1k"),
    "fake_data": False,
    "num_workers": 4,
    "resume_epoch": 0,
    "ckpt_epoch_interval": 10,
    "test_epoch_interval": 10,
    "log_step_interval": 20,
    "image_size": 224,
    "patch_size": 14,
    "embed_dim": 5120,
    "num_heads": 32,
    "num_blocks": 32,
    "mlp_ratio": 4.0,
    "pos_dropout": 0.0,
    "att_dropout": 0.0,
    "mlp_dropout": 0.0,
    "num_classes": 1000,
    "batch_size": 1024,
    "num_epochs": 300,
    "lr": 1e-3,
    "weight_decay": 0.1,
    "clip_grad_norm": 1.0,
    "warmup_steps": 10000,
    "grad_ckpt": True,
    "reshard_after_forward": True,
    "flatten_parameters": False,
    "run_without_fsdp": False,
    "shard_on_cpu": False,
    "mark_step_after_forward": False,
}


def test_names_and_defaults_are_those_of_the_published_command() -> None:
    options = parse_options([]).model_dump()
    assert {name: options[name] for name in DEFAULTS} == DEFAULTS
    flags = build_parser().flags()
    renamed = {"grad_ckpt": "no_grad_ckpt", "reshard_after_forward": "no_reshard_after_forward"}
    assert {f"--{renamed.get(name, name)}" for name in (*DEFAULTS, "ckpt_dir")} <= set(flags)


# fsdp_llama_spec A.3: width, blocks, heads; of a block, around them, together.
SIZES = [
    (5120, 32, 32, 314_639_360, 9_457_640, 10_077_917_160),
    (10240, 96, 40, 1_258_424_320, 18_914_280, 120_827_649_000),
    (192, 12, 3, 444_864, 355_624, 5_693_992),
]


@pytest.mark.parametrize(("dim", "depth", "heads", "block", "root", "total"), SIZES)
def test_parameters_are_those_of_the_table(
    dim: int, depth: int, heads: int, block: int, root: int, total: int
) -> None:
    shape = Shape(embed_dim=dim, num_blocks=depth, num_heads=heads)
    assert (shape.block_parameters, shape.root_parameters) == (block, root)
    assert shape.parameters == total


def test_the_count_is_that_of_the_model() -> None:
    shape = Shape(embed_dim=192, num_blocks=12, num_heads=3)
    assert sum(value.numel() for value in ViT(shape).parameters()) == 5_693_992


@pytest.mark.parametrize(
    ("flatten", "own"), [(False, 78_754_432), (True, 78_737_664)], ids=["tensors", "flat"]
)
def test_shards_of_128_processes_are_those_of_the_published_run(flatten: bool, own: int) -> None:
    """Where shards are multiples of 128 numbers."""
    given = ["--shard_multiple", "128", *(["--flatten_parameters"] if flatten else [])]
    options = parse_options(given)
    plan = Plan.of(options, shape_of(options), 128)
    assert plan.own_parameters == own
    assert plan.flops_per_image == pytest.approx(15.60e12, rel=1e-3)
    assert plan.computed_flops_per_image * 1024 == pytest.approx(21.3e15, rel=1e-3)


# MiB of a process of four, besides what it is without tensors.
MEMORY = {
    "": 55_485,
    "--run_without_fsdp": 216_782,
    "--no_grad_ckpt": 62_367,
    "--no_reshard_after_forward": 92_693,
    "--prefetch": 56_685,
    "--shard_group 2": 107_769,
}


@pytest.mark.parametrize("option", MEMORY)
def test_memory_of_each_way_to_cut(option: str) -> None:
    options = parse_options(["--batch_size", "8", *option.split()])
    plan = Plan.of(options, shape_of(options), 4)
    assert (plan.bytes - plan.process) / 2**20 == pytest.approx(MEMORY[option], abs=1)


@pytest.mark.parametrize(
    "layers", [{}, {"mlp_cfg": "blockdiag"}, STRUCTURED, {"attnlinear_cfg": "dense"}], ids=str
)
def test_work_and_parameters_are_what_a_count_of_the_model_finds(layers: dict[str, Any]) -> None:
    shape = Shape(image_size=42, embed_dim=32, num_heads=2, num_blocks=3, num_classes=5, **layers)
    model = ViT(shape)
    macs = count_macs(model, shape.image_size)
    assert Plan(shape, world=1, batch=1, group=1).flops_per_image == 6 * macs
    found = [tuple(each.shape) for each in model.blocks[0].parameters()]
    assert sorted(shape.block_shapes.values()) == sorted(found)
    assert shape.parameters == sum(each.numel() for each in model.parameters())


def test_structured_layers_take_what_the_readme_says() -> None:
    """Parameters of a block by monarch_spec 1.3: (n^2 + n m) / 4 in place of n m, and (n m + m^2) /
    4; where it was square, half."""
    counts = {}
    text = (REPOSITORY / "vit_10b" / "README.md").read_text().partition("## With Monarch layers")[2]
    text = text.partition("\n## ")[0]
    rows = [row.split("|")[2:-1] for row in text.splitlines() if row.startswith("| ")][2:]
    every = [{}, {"mlp_cfg": "monarch"}, dict.fromkeys(LAYERS, "monarch")]
    for layers, row in zip(every, rows, strict=True):
        argv = [f"--{name}={value}" for name, value in layers.items()]
        options = parse_options(argv)
        plan = Plan.of(options, shape_of(options), 128)
        counts[len(layers)] = plan.shape.block_parameters
        memory = plan.memory()
        states = sum(memory[name] for name in ("weights", "gradients", "AdamW's moments"))
        sizes = [states, memory["gathered weights"], plan.bytes - plan.process]
        found = f"{plan.shape.parameters:,}", f"{plan.flops_per_image / 1e12:.2f}"
        assert [cell.strip() for cell in row] == [*found, *(f"{size / GIB:.2f}" for size in sizes)]
    dim, hidden = 5120, 20480
    assert counts[0] - counts[1] == 2 * dim * hidden - 2 * (dim**2 + dim * hidden) // 4
    assert counts[1] - counts[3] == 4 * dim**2 // 2


def test_what_structured_layers_keep() -> None:
    """Between factors there are as many numbers as the narrower side has."""
    shape = Shape(embed_dim=64, num_heads=2)
    plans = [Plan(each, 1, 2, 1) for each in (shape, replace(shape, mlp_cfg="monarch"))]
    kept = [plan.memory()["activations"] for plan in plans]
    # Of two images and two layers, as much again goes backward.
    assert kept[1] - kept[0] == 2 * 4 * 2 * shape.tokens * 2 * 64


def test_the_defaults_are_refused_before_anything_is_built() -> None:
    options = parse_options([])
    plan = Plan.of(options, shape_of(options), 1)
    with pytest.raises(UserError, match=r"10,077,917,160 parameters on 1 processes need") as error:
        require_memory(plan, 16 * GIB)
    found = plan.smallest(16 * GIB)
    assert found is not None
    assert f"it takes {found.world} processes" in str(error.value)
    assert found.bytes <= 16 * GIB
    fewer = [each for each in plan.worlds() if each.world < found.world]
    assert all(each.bytes > 16 * GIB for each in fewer)


def test_a_dry_run_says_what_it_takes() -> None:
    script = REPOSITORY / "vit_10b" / "run_vit_training.py"
    args = ["--dry_run", "--num_devices", "128", "--device_memory", "16"]
    result = run_process([script, *args])
    assert result.returncode == 0, result.stdout
    for text in ("10,077,917,160", "78,733,728 on 128", "15.60 TFLOP", "20.79", "15.97 PFLOP"):
        assert text in result.stdout
    assert "AdamW's moments             0.59" in result.stdout
    assert "for a device of 16.0 GiB" in result.stdout


def test_the_table_of_largest_models_is_that_of_the_readme() -> None:
    options = parse_options(["--dry_run", "--largest"])
    rows = largest_models(Plan.of(options, shape_of(options), 1)).splitlines()[2:]
    found = [row.split()[:4] for row in rows]
    text = (REPOSITORY / "vit_10b" / "README.md").read_text()
    table = text.partition("## The largest model")[2].partition("\n\nThe count")[0].splitlines()
    assert found == [[cell.strip() for cell in row.split("|")[2:6]] for row in table[-6:]]


def test_where_nothing_fits_the_report_says_so() -> None:
    options = parse_options(["--batch_size", "4"])
    with pytest.raises(UserError, match="--batch_size 4 is not a multiple of the 3 processes"):
        Plan.of(options, shape_of(options), 3)
    plan = Plan.of(options, shape_of(options), 4)
    assert "no number of processes" in report(plan, GIB, told=True)


MISTAKES = {
    "--image_size 30 is not a multiple of --patch_size 14": ["--image_size", "30"],
    "--embed_dim 5120 is not a multiple of --num_heads 33": ["--num_heads", "33"],
    "--batch_size -1: it must be a whole number of at least 1": ["--batch_size", "-1"],
    "--mlp_ratio inf: it must be a number above 0": ["--mlp_ratio", "inf"],
    "--mlp_ratio 0.0001: the MLPs of --embed_dim 64 have no hidden unit; take 0.016 or more": [
        *("--mlp_ratio", "0.0001", "--embed_dim", "64")
    ],
    "--mlp_cfg: there is no linear layer 'monach'; did you mean": ["--mlp_cfg", "monach"],
    "--attnproj_cfg: there are dense, Monarch and block-diagonal layers": [
        *("--attnproj_cfg", "low_rank")
    ],
    "--sparse_to_dense: all layers are dense; give one of": ["--sparse_to_dense", "0.5"],
    "--precision float16: it is not there; take bfloat16": ["--precision", "float16"],
    "--run_without_fsdp cuts nothing: leave --prefetch out": ["--run_without_fsdp", "--prefetch"],
    "--resume_epoch and --resume": ["--resume", "auto", "--resume_epoch", "1"],
    "there is no option --embed_dims; did you mean --embed_dim": ["--embed_dims", "3"],
}


@pytest.mark.parametrize(("sentence", "argv"), MISTAKES.items(), ids=list(MISTAKES))
def test_wrong_options_are_named(sentence: str, argv: list[str]) -> None:
    with pytest.raises(UserError, match=sentence):
        parse_options(argv)


def test_what_this_machine_cannot_do_is_said_first(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "run"
    with pytest.raises(UserError, match=f"cannot be written to {folder}/checkpoints: Not a dir"):
        run(["--image_size", "28", "--embed_dim", "32", "--ckpt_dir", str(folder)])


def test_norms_have_the_published_epsilons_and_weights_the_published_start() -> None:
    shape = Shape(image_size=28, embed_dim=32, num_heads=2, num_blocks=2, num_classes=3)
    model = ViT(shape)
    assert [model.blocks[0].norm1.eps, model.blocks[1].norm2.eps, model.norm.eps] == [
        1e-5,
        1e-5,
        1e-6,
    ]
    assert float(model.pos_embed.std().numpy()) == pytest.approx(0.02, rel=0.3)
    # Kaiming's uniform rule with a = sqrt(5): within 1 / sqrt(fan-in).
    assert float(model.head.weight.abs().max().numpy()) == pytest.approx(32**-0.5, rel=0.1)
    timm = ViT(shape, timm_init=True)
    assert float(timm.blocks[0].mlp.fc1.weight.std().numpy()) == pytest.approx(0.02, rel=0.1)
    assert float(timm.head.bias.abs().max().numpy()) == 0.0


def test_scores_are_of_the_mean_of_the_normalized_tokens() -> None:
    flow.manual_seed(0)
    shape = Shape(image_size=28, embed_dim=32, num_heads=2, num_blocks=2, num_classes=3)
    model = ViT(shape).eval()
    images = flow.randn(2, 3, 28, 28)
    with flow.no_grad():
        x = model.blocks(model.patch_embed(images) + model.pos_embed).numpy().astype(np.float64)
        scores = model(images).numpy()
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    expected = x.mean(1) @ model.head.weight.numpy().T + model.head.bias.numpy()
    np.testing.assert_allclose(scores, expected, atol=1e-5)
