"""Starting from weights that were saved elsewhere: other names, other classes, other layers."""

from __future__ import annotations

from pathlib import Path

import oneflow_accel
from oneflow_accel import layouts
from oneflow_accel.errors import CheckpointError, UserError

import numpy as np
import pytest
from oneflow import nn

from monarch_flow.engine.evaluation import load_for_evaluation
from monarch_flow.engine.weights import initialize, read_model_arrays
from monarch_flow.models import create_model
from tests.monarch_flow.engine.engine_runs import last_checkpoint
from tests.torch_writer import save_torch_file

SMALL = {"img_size": 28, "in_chans": 1, "patch_size": 7, "embed_dim": 32, "depth": 1}
SMALL |= {"num_heads": 2, "mlp_ratio": 2.0}
T2T = {"img_size": 32, "num_classes": 5, "embed_dim": 32, "depth": 1, "num_heads": 2}


def small(num_classes: int, seed: int, **options: object) -> nn.Module:
    oneflow_accel.select_device().manual_seed(seed)
    return create_model("vit_tiny_patch4_28", num_classes=num_classes, **{**SMALL, **options})


def arrays_of(model: nn.Module) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in layouts.standard_state_dict(model).items()}


def saved(model: nn.Module, path: Path) -> Path:
    return save_torch_file(path, {"state_dict": arrays_of(model)})


def test_new_head_for_other_classes(tmp_path, caplog):
    caplog.set_level("INFO", "oneflow_accel")
    source, model = small(7, 0), small(10, 1)
    path = saved(source, tmp_path / "seven.pth.tar")
    fresh = arrays_of(model)
    with pytest.raises(CheckpointError, match=r"7 classes and the data has 10: .*reset_head=true"):
        initialize(model, path, project=False)
    for name, array in arrays_of(model).items():
        np.testing.assert_array_equal(array, fresh[name], err_msg=name)
    initialize(model, path, project=False, reset_head=True)
    theirs = arrays_of(source)
    for name, array in arrays_of(model).items():
        wanted = fresh if name.startswith("head.") else theirs
        np.testing.assert_array_equal(array, wanted[name], err_msg=name)
    for name in ("head.weight (7, 32)", "head.bias (7,)"):
        assert f"{name} is left out: the head begins anew" in caplog.text


def test_a_file_of_weights_is_no_run_to_go_on_with(run_tiny, tmp_path):
    path = saved(small(10, 0), tmp_path / "w.pth.tar")
    with pytest.raises(CheckpointError, match=r"file of weights.*train\.init_from\.path=\S+tar$"):
        run_tiny(tmp_path / "run", f"resume={path}")


def test_new_head_and_projection_together(tmp_path):
    """One block is a dense matrix itself, so that nothing is lost."""
    whole = {"_target_": "monarch_flow.layers.MonarchLinear", "nblocks": 1}
    source, model = small(7, 0), small(10, 1, attnlinear_cfg=whole)
    initialize(model, saved(source, tmp_path / "seven.pth"), project=True, reset_head=True)
    packed = arrays_of(source)["blocks.0.attn.qkv.weight"]
    for part, rows in zip(("q_proj", "k_proj", "v_proj"), np.split(packed, 3), strict=True):
        layer = getattr(model.blocks[0].attn, part)
        np.testing.assert_allclose(layer.dense().detach().numpy(), rows, atol=1e-6)


def test_training_on_other_classes_starts_from_the_rest(run_tiny, tmp_path):
    """By the configuration; with a learning rate of 0 all stays as it began."""
    model = {"name": "vit_tiny_patch4_28", **SMALL}
    model = {key: value for key, value in model.items() if key not in ("img_size", "in_chans")}
    path = saved(small(7, 0), tmp_path / "seven.pth")
    stay = ("optimizer.lr=0.0", "scheduler.lr_min=0.0", "scheduler.warmup_lr_init=0.0")
    once = ("trainer.max_epochs=1", "test_after_training=false")
    source = (f"train.init_from.path={path}", "train.init_from.reset_head=true")
    run_tiny(tmp_path / "run", *stay, *once, *source, model=model)
    ours, theirs = last_checkpoint(tmp_path / "run").model, arrays_of(small(7, 0))
    assert ours["head.weight"].shape == (10, 32)
    for name, array in theirs.items():
        if not name.startswith("head."):
            np.testing.assert_array_equal(ours[name], array, err_msg=name)


def test_moving_averages_or_the_last_weights_of_a_run(run_tiny, tmp_path):
    run_tiny(tmp_path / "run", "trainer.max_epochs=1", "callbacks.ema={decay: 0.9}")
    checkpoint = last_checkpoint(tmp_path / "run")
    last = checkpoint.model
    averages = {name: checkpoint.optimizer[f"ema/{name}"] for name in last}
    assert any((averages[name] != last[name]).any() for name in last)
    for use_ema, wanted in ((True, averages), (False, last)):
        arrays, _ = read_model_arrays(tmp_path / "run", use_ema=use_ema)
        assert arrays.keys() == wanted.keys()
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, wanted[name], err_msg=name)
    once = ("trainer.max_steps=1", "test_after_training=false", "optimizer.lr=0.0")
    once += ("scheduler.lr_min=0.0", "scheduler.warmup_lr_init=0.0")
    source = (f"train.init_from.path={tmp_path / 'run'}", "train.init_from.use_ema=false")
    run_tiny(tmp_path / "next", *once, *source)
    for name, array in last_checkpoint(tmp_path / "next").model.items():
        np.testing.assert_array_equal(array, last[name], err_msg=name)


def published(model: nn.Module) -> dict[str, np.ndarray]:
    """The names that the authors of T2T-ViT use."""
    names = {"pos_embed.pe": "pos_embed"}
    return {
        names.get(name, name.replace("patch_embed.", "tokens_to_token.")): array
        for name, array in arrays_of(model).items()
    }


def test_published_t2t_vit_needs_no_converter(tmp_path, caplog):
    caplog.set_level("INFO", "oneflow_accel")
    source, model = (create_model("t2t_vit_7", **T2T) for _ in range(2))
    state = published(source)
    assert {"pos_embed", "tokens_to_token.project.weight"} <= state.keys()
    path = save_torch_file(tmp_path / "T2T.pth.tar", {"state_dict_ema": state})
    for load in (
        lambda: load_for_evaluation(model, str(path), "t2t_vit_7"),
        lambda: initialize(model, path, project=False),
    ):
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        load()
        for name, array in arrays_of(source).items():
            np.testing.assert_array_equal(arrays_of(model)[name], array, err_msg=name)
    assert caplog.text.count("they are renamed") == 2


def test_dense_weights_for_a_structured_model(tmp_path):
    """The hint to project; and where only some layers are dense, too."""
    path = saved(small(10, 0), tmp_path / "dense.pth")
    with pytest.raises(CheckpointError, match=r"are dense: train\.init_from\.project=true"):
        initialize(small(10, 1, mlp_cfg="monarch"), path, project=False)
    both = small(10, 1, mlp_cfg="monarch", attnlinear_cfg="monarch")
    path = saved(small(10, 0, attnlinear_cfg="monarch"), tmp_path / "half.pth")
    with pytest.raises(CheckpointError, match=r"are dense: python -m monarch_flow.convert project"):
        load_for_evaluation(both, str(path), "vit")


def test_a_packed_bias_that_a_model_lacks_is_no_structured_layer(tmp_path):
    path = saved(small(10, 0), tmp_path / "biased.pth")
    with pytest.raises(CheckpointError, match=r"qkv\.bias") as raised:
        initialize(small(10, 1, qkv_bias=False), path, project=False)
    assert "structured" not in str(raised.value)


def test_timms_small_vit_is_named(tmp_path):
    """Two models have the name vit_small_patch16_224."""
    theirs = create_model("deit_small_patch16_224", depth=1, num_classes=10)
    path = saved(theirs, tmp_path / "vit_small_patch16_224.pth")
    model = create_model("vit_small_patch16_224", depth=1, num_classes=10)
    with pytest.raises(CheckpointError, match=r"timm's is deit_small_patch16_224 here, model/t2t"):
        initialize(model, path, project=False)
    with pytest.raises(CheckpointError, match=r"timm's is deit_small_patch16_224 here, model/t2t"):
        load_for_evaluation(model, str(path), "vit_small_patch16_224")


def test_a_model_without_head_cannot_get_a_new_one(tmp_path):
    path = save_torch_file(tmp_path / "w.pth", {"weight": np.zeros((2, 2), "f4")})
    with pytest.raises(UserError, match=r"Linear has no head\.\*"):
        initialize(nn.Linear(2, 2), path, project=False, reset_head=True)
