"""`python -m monarch_flow.convert`, as users call it."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors
from oneflow import nn
from safetensors.numpy import save_file

from flow_train.checkpoint.weights import bfloat16_names, read_weights
from monarch_flow.convert import main, t2t_names
from monarch_flow.layers import LinearConfig
from monarch_flow.projection import monarch_to_dense, project_to_monarch

PUBLISHED = Path(__file__).resolve().parents[2] / "data" / "torch_checkpoints"


def dense_state(dtype: str = "float32") -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {
        "cls_token": (1, 1, 10),
        "blocks.0.attn.qkv.weight": (30, 10),
        "blocks.0.mlp.fc1.weight": (14, 10),
        "blocks.0.mlp.fc1.bias": (14,),
        "blocks.0.mlp.fc2.weight": (10, 14),
        "blocks.0.mlp.fc2.bias": (10,),
        "head.weight": (3, 10),
    }
    state = {name: random.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    return {**state, "steps": np.array(5)}


def convert(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    code = main([str(arg) for arg in args])
    output = capsys.readouterr()
    assert code == 0, output.err
    return output.out


def refused(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    assert main([str(arg) for arg in args]) == 2
    error = capsys.readouterr().err
    assert error.startswith("convert: error: ")
    assert "Traceback" not in error
    return error


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_project_and_densify_a_file(
    dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = dense_state(dtype)
    dense, monarch, again = (tmp_path / f"{n}.safetensors" for n in ("dense", "monarch", "again"))
    save_file(state, dense)
    kept = dense.read_bytes()
    table = convert(capsys, "project", dense, monarch, "--config", "monarch")
    assert dense.read_bytes() == kept
    assert "blocks.0.mlp.fc1  (14, 10)     monarch(4)" in table
    assert "2 layers" in table

    structured = read_weights(monarch)
    assert {name for name in structured if "fc1" in name} == {
        f"blocks.0.mlp.fc1.{name}" for name in ("bias", "blkdiag1", "blkdiag2")
    }
    factors = structured["blocks.0.mlp.fc1.blkdiag1"], structured["blocks.0.mlp.fc1.blkdiag2"]
    wanted = project_to_monarch(state["blocks.0.mlp.fc1.weight"], 4)
    for factor, other in zip(factors, wanted, strict=True):
        np.testing.assert_array_equal(factor, other)
    for name in ("head.weight", "blocks.0.attn.qkv.weight", "steps", "blocks.0.mlp.fc2.bias"):
        np.testing.assert_array_equal(structured[name], state[name])
        assert structured[name].dtype == state[name].dtype

    convert(capsys, "densify", monarch, again)
    densified = read_weights(again)
    assert set(densified) == set(state)
    weight = densified["blocks.0.mlp.fc1.weight"]
    assert weight.dtype == dtype
    # Both paddings: the file says the true sizes.
    np.testing.assert_array_equal(weight, monarch_to_dense(*factors, 14, 10))


def test_dtype_is_that_of_the_sums_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file(dense_state(), tmp_path / "dense.safetensors")
    out = tmp_path / "wide.safetensors"
    convert(
        capsys, "project", tmp_path / "dense.safetensors", out, "--config", "monarch",
        "--dtype", "float64",
    )  # fmt: skip
    wide = read_weights(out)
    assert {array.dtype.name for array in wide.values()} == {"float64", "int64"}
    weight = dense_state()["blocks.0.mlp.fc2.weight"].astype(np.float64)
    wanted = monarch_to_dense(*project_to_monarch(weight, 4))
    found = monarch_to_dense(*(wide[f"blocks.0.mlp.fc2.blkdiag{i}"] for i in (1, 2)))
    np.testing.assert_array_equal(found, wanted)


def test_yaml_configs_and_patterns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense, out = tmp_path / "dense.safetensors", tmp_path / "out.safetensors"
    save_file(dense_state(), dense)
    config = tmp_path / "mlp.yaml"
    config.write_text(
        "mlp_cfg:\n"
        "  _target_: src.models.modules.mlp.MlpCustom\n"
        "  linear1_cfg: {_target_: MonarchLinear, nblocks: 2}\n"
        "  linear2_cfg: ${model.mlp_cfg.linear1_cfg}\n"
    )
    table = convert(capsys, "project", dense, out, "--config", config)
    assert table.count("monarch(2)") == 2
    config.write_text("linear1_cfg: {_target_: LowRank, rank: 2}\nlinear2_cfg: null\n")
    convert(capsys, "project", dense, out, "--config", config, "--overwrite")
    names = set(read_weights(out))
    assert "blocks.0.mlp.fc1.lr_weight1" in names
    assert "blocks.0.mlp.fc2.weight" in names
    inline = "{_target_: monarch_flow.layers.BlockdiagLinear, nblocks: 2}"
    convert(
        capsys, "project", dense, out, "--overwrite", "--config", inline, "--include", ".",
        "--exclude", "head|fc1",
    )  # fmt: skip
    state = read_weights(out)
    assert {name for name, array in state.items() if array.ndim == 3} == {
        "cls_token",
        "blocks.0.attn.qkv.weight",
        "blocks.0.mlp.fc2.weight",
    }


def test_configs_of_the_models_are_known_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense, out = tmp_path / "dense.safetensors", tmp_path / "out.safetensors"
    random = np.random.default_rng(0)
    shapes = {f"blocks.{i}.mlp.fc{j}.weight": (32, 32) for i in (0, 2, 10) for j in (1, 2)}
    save_file({name: random.standard_normal(shape) for name, shape in shapes.items()}, dense)
    table = convert(capsys, "project", dense, out, "--config", "butterflyblockdiag")
    names = [line.split()[0] for line in table.splitlines()[1:7]]
    assert names == [name.removesuffix(".weight") for name in shapes]
    assert table.count("monarch(4)") == 6
    assert "mlp_cfg is null" in refused(capsys, "project", dense, out, "--config", "none")


def test_a_file_of_another_program_is_densified_by_its_shapes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = project_to_monarch(np.random.default_rng(1).standard_normal((14, 10)), 4)
    pixelfly = LinearConfig.of(
        {"_target_": "SparseLRLinear", "sparse_cfg": "monarch", "rank": 2, "gating": False}
    ).build(8, 12)
    state = {f"x.{name}": value.numpy() for name, value in pixelfly.state_dict().items()}
    state |= {"fc.blkdiag1": first, "fc.blkdiag2": second, "fc.bias": np.zeros(14)}
    source, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_file(state, source)
    convert(capsys, "densify", source, out)
    dense = read_weights(out)
    assert dense["fc.weight"].shape == (14, 12)
    np.testing.assert_allclose(dense["x.weight"], pixelfly.dense().numpy(), atol=1e-6)
    convert(capsys, "densify", source, out, "--overwrite", "--size", r"^fc$=14x10")
    np.testing.assert_array_equal(
        read_weights(out)["fc.weight"], monarch_to_dense(first, second, 14, 10)
    )
    assert "has room for 14x12" in refused(
        capsys, "densify", source, out, "--overwrite", "--size", "fc=14x13"
    )
    assert "expected REGEX=OUTxIN" in refused(
        capsys, "densify", source, out, "--overwrite", "--size", "14"
    )


def test_packed_attention_can_be_split_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense, out = tmp_path / "dense.safetensors", tmp_path / "out.safetensors"
    save_file(dense_state(), dense)
    convert(
        capsys, "project", dense, out, "--config", "monarch", "--split-qkv", "--include", "_proj$"
    )
    state = read_weights(out)
    weight = dense_state()["blocks.0.attn.qkv.weight"]
    for index, part in enumerate(("q_proj", "k_proj", "v_proj")):
        factors = project_to_monarch(weight[10 * index : 10 * (index + 1)], 4)
        for number, factor in enumerate(factors, 1):
            name = f"blocks.0.attn.{part}.blkdiag{number}"
            np.testing.assert_array_equal(state[name], factor)
    assert not any("qkv" in name for name in state)


def published_t2t() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {
        "cls_token": (1, 1, 8),
        "pos_embed": (1, 5, 8),
        "tokens_to_token.attention1.attn.qkv.weight": (12, 7),
        "tokens_to_token.project.bias": (8,),
        "blocks.0.attn.qkv.weight": (24, 8),
        "norm.weight": (8,),
        "head.bias": (3,),
    }
    return {name: random.standard_normal(shape).astype("f4") for name, shape in shapes.items()}


def test_t2t_names() -> None:
    state = published_t2t()
    renamed = t2t_names(state)
    assert list(renamed) == [
        "cls_token",
        "pos_embed.pe",
        "patch_embed.attention1.attn.qkv.weight",
        "patch_embed.project.bias",
        "blocks.0.attn.qkv.weight",
        "norm.weight",
        "head.bias",
    ]
    for array, old in zip(renamed.values(), state.values(), strict=True):
        assert array is old


@pytest.mark.parametrize("stem", ["t2t_ema", "t2t_training"])
def test_t2t_reads_the_published_layouts_and_refuses_others(
    stem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files that torch has written: tests/golden/make_t2t_checkpoints.py."""
    out = tmp_path / "out.safetensors"
    source = PUBLISHED / f"{stem}.pth"
    kept = source.read_bytes()
    convert(capsys, "t2t", source, out)
    assert source.read_bytes() == kept
    converted = read_weights(out)
    with np.load(PUBLISHED / "t2t_expected.npz") as arrays:
        wanted = dict(arrays)
    assert set(converted) == set(t2t_names(wanted))
    for name, array in t2t_names(wanted).items():
        np.testing.assert_array_equal(converted[name], array)
    assert "have our names already" in refused(capsys, "t2t", out, tmp_path / "2.safetensors")
    save_file(dense_state(), tmp_path / "vit.safetensors")
    assert "not a published T2T-ViT" in refused(
        capsys, "t2t", tmp_path / "vit.safetensors", tmp_path / "2.safetensors"
    )


def test_errors_say_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense, out = tmp_path / "dense.safetensors", tmp_path / "out.safetensors"
    save_file(dense_state(), dense)
    kept = dense.read_bytes()
    project = ("project", dense, out, "--config", "monarch")
    link = tmp_path / "link.safetensors"
    link.symlink_to(dense)
    for target in (dense, link):
        text = refused(capsys, "project", dense, target, "--config", "monarch", "--overwrite")
        assert "is the input itself" in text
    assert dense.read_bytes() == kept
    out.write_bytes(b"mine")
    assert "replace it with --overwrite" in refused(capsys, *project)
    assert out.read_bytes() == b"mine"
    out.unlink()
    assert "ends in .safetensors" in refused(
        capsys, "project", dense, tmp_path / "out.pth", "--config", "monarch"
    )
    assert "there is no folder" in refused(
        capsys, "project", dense, tmp_path / "none" / "o.safetensors", "--config", "monarch"
    )
    text = refused(capsys, *project, "--include", "attention")
    assert "no layer's name fits" in text
    assert "blocks.0.mlp.fc1" in text
    sparse = tmp_path / "sparse.safetensors"
    save_file({"blocks.0.mlp.fc1.blkdiag1": np.zeros((4, 2, 2), np.float32)}, sparse)
    text = refused(capsys, "project", sparse, out, "--config", "monarch")
    assert "structured already (blocks.0.mlp.fc1.blkdiag1)" in text
    assert "monarch_flow.convert densify" in text
    assert "is not a regular expression" in refused(capsys, *project, "--include", "(")
    for config, message in (
        ("monrach", "did you mean 'monarch'"),
        ("none.yaml", "No such file"),
        ("{_target_: MonarchLinear, nblocks: 0}", "nblocks"),
        ("{_target_: [", "cannot be read as YAML"),
        ("{_target_: os.system}", "is not a linear layer of this package"),
    ):
        assert message in refused(capsys, "project", dense, out, "--config", config)
    assert "it is dense already" in refused(capsys, "densify", dense, out)
    assert "cannot read weights" in refused(capsys, "densify", tmp_path / "none.pth", out)
    state = dense_state()
    state["blocks.0.mlp.fc1.weight"][0, 0] = np.nan
    save_file(state, dense)
    assert "blocks.0.mlp.fc1: the weight holds NaN" in refused(capsys, *project)
    gated = LinearConfig.of("pixelfly").build(512, 512)
    model = nn.Sequential(gated)
    save_file({name: value.numpy() for name, value in model.state_dict().items()}, dense)
    assert "0: a SparseLR layer with a gate" in refused(capsys, "densify", dense, out)
    assert not out.exists()


def save_bfloat16(state: dict[str, np.ndarray], path: Path) -> dict[str, np.ndarray]:
    """Write matrices as bfloat16, by truncating random bits, and the rest as it is; the values."""
    header, parts, values, begin = {}, [], {}, 0
    for name, array in state.items():
        kind, data, values[name] = {"f": "F32", "i": "I64"}[array.dtype.kind], array, array
        if array.ndim > 1:
            data = (array.view(np.uint32) >> 16).astype(np.uint16)
            kind, values[name] = "BF16", (data.astype(np.uint32) << 16).view(np.float32)
        offsets = [begin, begin + data.nbytes]
        header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": offsets}
        parts.append(data.tobytes())
        begin += data.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))
    return values


def test_bfloat16_stays_bfloat16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense, monarch, again, wide = (tmp_path / f"{name}.safetensors" for name in "abcd")
    values = save_bfloat16(dense_state(), dense)
    full = "{_target_: monarch_flow.layers.MonarchLinear, nblocks: 1}"
    text = convert(capsys, "project", dense, monarch, "--config", full)
    assert "(bfloat16, float32, int64)" in text
    with safetensors.safe_open(monarch, framework="numpy") as file:
        names = ("blocks.0.mlp.fc1.blkdiag1", "head.weight", "blocks.0.mlp.fc1.bias")
        dtypes = [file.get_slice(name).get_dtype() for name in names]
    assert dtypes == ["BF16", "BF16", "F32"]
    convert(capsys, "densify", monarch, again)
    found = read_weights(again)
    for name, array in values.items():
        # One block is the whole matrix, in two factors that are rounded to 8 bits each.
        close = 0.05 if ".mlp.fc" in name and array.ndim == 2 else 0.0
        np.testing.assert_allclose(found[name], array, atol=close, err_msg=name)
    assert bfloat16_names(again) == bfloat16_names(dense)
    convert(capsys, "densify", monarch, wide, "--dtype", "float32")
    assert not bfloat16_names(wide)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"blkdiag1": (2, 2, 2), "blkdiag2": (3, 2, 2)}, "fc: .* blkdiag1 .2, 2, 2., blkdiag2 .3"),
        ({"blkdiag1": (4, 4), "blkdiag2": (2, 2, 2)}, "are to have 3 and 3 axes"),
        ({"lr_weight1": (2, 5), "lr_weight2": (4, 3)}, "fc: its arrays do not fit"),
        ({"weight": (3, 2, 2), "layout": (2, 2)}, "fc: its arrays do not fit"),
        ({"blkdiag1": (2, 2, 2), "blkdiag2": (2, 2, 2), "bias": (9,)}, "fc: its arrays do not fit"),
    ],
)
def test_arrays_that_do_not_fit_each_other(arrays, words, tmp_path, capsys) -> None:
    state = {f"fc.{name}": np.ones(shape, np.float32) for name, shape in arrays.items()}
    save_file(state, tmp_path / "in.safetensors")
    text = refused(capsys, "densify", tmp_path / "in.safetensors", tmp_path / "out.safetensors")
    assert re.search(words, text), text
    assert text.count("\n") == 1
