"""ViTAE through `python -m monarch_flow.convert`: files and training checkpoints, both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn
from safetensors.numpy import save_file

from flow_train.checkpoint.folders import Checkpoint, CheckpointManager, read_checkpoint
from flow_train.checkpoint.weights import read_weights
from monarch_flow.convert import main
from monarch_flow.layers import replace_linears
from monarch_flow.models import create_model
from tests.tolerances import assert_close

TINY: dict[str, Any] = {
    "img_size": 32,
    "num_classes": 5,
    "embed_dims": [8, 8, 16],
    "token_dims": [8, 8, 32],
    "depth": 2,
    "num_heads": 2,
    "conv_groups": 4,
}
MONARCH = {"_target_": "monarch_flow.layers.MonarchLinear", "nblocks": 4}
MLP = {"_target_": "MlpCustom", "linear1_cfg": MONARCH, "linear2_cfg": MONARCH}
FACTORS = ("blkdiag1", "blkdiag2")


def vitae(**options: Any) -> nn.Module:
    """A model whose running statistics and batch counts are not those it is born with."""
    model = create_model("ViTAE_basic_Tiny", **TINY, **options).train()
    for _ in range(2):
        model(images())
    return model.eval()


def images() -> flow.Tensor:
    return flow.tensor(np.random.default_rng(0).standard_normal((2, 3, 32, 32)).astype(np.float32))


def arrays(model: nn.Module) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in model.state_dict().items()}


def convert(*args: object) -> None:
    assert main([str(arg) for arg in args]) == 0


def loaded(path: Path, **options: Any) -> nn.Module:
    model = create_model("ViTAE_basic_Tiny", **TINY, **options).eval()
    state = {name: flow.tensor(value) for name, value in read_weights(path).items()}
    model.load_state_dict(state, strict=True)
    return model


def test_the_default_is_the_mlps_of_the_normal_cells(tmp_path, capsys):
    """Both ways, strictly loaded; all that is no such layer stays as it is, to the last bit."""
    dense, monarch, again = (tmp_path / f"{n}.safetensors" for n in ("dense", "monarch", "again"))
    model = vitae()
    save_file(arrays(model), dense)
    convert("project", dense, monarch, "--config", "monarch")
    table = capsys.readouterr().out.splitlines()
    layers = [f"layers.2.NC.{i}.mlp.fc{j}" for i in range(2) for j in (1, 2)]
    assert [line.split()[0] for line in table[1:5]] == layers
    assert table[5].startswith("4 layers")
    structured = loaded(monarch, mlp_cfg=MLP)
    before, after = arrays(model), arrays(structured)
    replaced = {f"{layer}.weight" for layer in layers}
    assert set(before) - set(after) == replaced
    for name in set(before) - replaced:
        np.testing.assert_array_equal(after[name], before[name], err_msg=name)
        assert after[name].dtype == before[name].dtype
    assert after["layers.2.NC.1.PCM.4.num_batches_tracked"] == 2
    convert("densify", monarch, again)
    assert_close(loaded(again)(images()).numpy(), structured(images()).numpy(), reduced=64)


def test_attention_that_was_replaced_where_it_stands(tmp_path):
    """Packed `qkv` and `proj` as one Monarch layer each, and the performers' layers."""
    model = vitae()
    names = replace_linears(model, MONARCH, include=r"attn\.(qkv|kqv|proj|mlp\.[02])$")
    assert len(names) == 2 * 2 + 2 * 4
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_file(arrays(model), source)
    convert("densify", source, target)
    assert_close(loaded(target)(images()).numpy(), model(images()).numpy(), reduced=64)


def test_attention_in_three_layers_becomes_packed_again(tmp_path, capsys):
    model = vitae(mlp_cfg=MLP, attnlinear_cfg=MONARCH)
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_file(arrays(model), source)
    convert("densify", source, target, "--join-qkv")
    dense = loaded(target)
    assert_close(dense(images()).numpy(), model(images()).numpy(), reduced=64)
    # Dense layers that stand apart, as sparse to dense leaves them, are joined as well.
    apart = tmp_path / "apart.safetensors"
    convert("densify", source, apart)
    convert("densify", apart, target, "--join-qkv", "--overwrite")
    for name, value in arrays(dense).items():
        np.testing.assert_array_equal(read_weights(target)[name], value, err_msg=name)
    capsys.readouterr()
    assert main(["densify", str(target), str(apart), "--join-qkv", "--overwrite"]) == 2
    assert "no dense layers q_proj" in capsys.readouterr().err


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    model = vitae(mlp_cfg=MLP, attnlinear_cfg=MONARCH)
    random = np.random.default_rng(3)
    state = arrays(model)
    optimizer = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            shape = tuple(parameter.shape)
            optimizer[f"exp_avg/{name}"] = random.standard_normal(shape).astype(np.float32)
            optimizer[f"exp_avg_sq/{name}"] = random.random(shape).astype(np.float32)
            optimizer[f"ema/{name}"] = state[name] * np.float32(0.9)
    for name in state:
        if "running_" in name:
            optimizer[f"ema/{name}"] = state[name] * np.float32(0.9)
    manager = CheckpointManager(tmp_path / "run" / "checkpoints")
    whole = Checkpoint(state, optimizer, {"step": 7, "phase": "monarch"}, "ViTAE_basic_Tiny")
    manager.save(whole, step=7)
    manager.close()
    return tmp_path / "run"


def test_checkpoints(run_dir: Path, tmp_path: Path, capsys):
    """To a checkpoint with moments and averages, and to a file of the averages."""
    before = read_checkpoint(run_dir / "checkpoints")
    convert("densify", run_dir, tmp_path / "dense", "--join-qkv")
    after = read_checkpoint(tmp_path / "dense")
    twin = create_model("ViTAE_basic_Tiny", **TINY)
    assert set(after.model) == set(arrays(twin))
    trained = {name for name, value in twin.named_parameters() if value.requires_grad}
    statistics = {name for name in after.model if "running_" in name}
    for prefix, names in (
        ("exp_avg/", trained),
        ("exp_avg_sq/", trained),
        ("ema/", trained | statistics),
    ):
        found = {
            k.removeprefix(prefix): a for k, a in after.optimizer.items() if k.startswith(prefix)
        }
        assert set(found) == names
        for name, array in found.items():
            assert array.shape == after.model[name].shape
            if prefix + name in before.optimizer:
                np.testing.assert_array_equal(array, before.optimizer[prefix + name])
    joined = np.concatenate(
        [before.optimizer[f"exp_avg/layers.2.NC.0.attn.{part}_proj.bias"] for part in "qkv"]
    )
    np.testing.assert_array_equal(after.optimizer["exp_avg/layers.2.NC.0.attn.qkv.bias"], joined)
    assert after.state["step"] == 7
    again = ["densify", str(run_dir), str(tmp_path / "dense"), "--overwrite"]
    assert main(again) == 2
    assert "is a folder that holds something" in capsys.readouterr().err
    target = tmp_path / "averages.safetensors"
    convert("densify", run_dir, target, "--join-qkv")
    averages = arrays(loaded(target))
    for name in statistics:
        np.testing.assert_array_equal(averages[name], after.optimizer[f"ema/{name}"])
    # And a dense checkpoint back to one with Monarch layers.
    convert("project", tmp_path / "dense", tmp_path / "sparse", "--config", "monarch")
    sparse = read_checkpoint(tmp_path / "sparse")
    names = set(arrays(create_model("ViTAE_basic_Tiny", **TINY, mlp_cfg=MLP)))
    assert set(sparse.model) == names
    assert {key.removeprefix("ema/") for key in sparse.optimizer} == {
        name for name in names if not name.endswith((".w", "num_batches_tracked"))
    }
    for name in statistics:
        np.testing.assert_array_equal(sparse.model[name], before.model[name])


def test_a_run_without_its_average(run_dir: Path, tmp_path: Path):
    target = tmp_path / "last.safetensors"
    convert("densify", run_dir, target, "--no-ema")
    before, after = read_checkpoint(run_dir / "checkpoints").model, read_weights(target)
    name = "layers.2.NC.0.PCM.1.running_mean"
    np.testing.assert_array_equal(after[name], before[name])
    np.testing.assert_array_equal(after["head.weight"], before["head.weight"])
