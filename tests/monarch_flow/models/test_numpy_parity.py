"""Models that timm does not have give the results of numpy at float64, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from monarch_flow.models import create_model
from tests.monarch_flow.models import numpy_vision, seeded_vision, spec_fixture
from tests.tolerances import assert_close

Forward = Callable[[dict[str, np.ndarray], np.ndarray], np.ndarray]
# 48 wide: blocks of 12 and 36; 45 wide is no multiple of 4, so inputs are padded and outputs cut.
VIT = {"img_size": 16, "patch_size": 4, "num_classes": 6, "depth": 2, "num_heads": 3}
MONARCH = {
    "Monarch MLP": {**VIT, "embed_dim": 48, "mlp_cfg": "monarch"},
    "Monarch MLP, padded": {**VIT, "embed_dim": 45, "mlp_ratio": 2.5, "mlp_cfg": "monarch"},
    "Monarch attention": {**VIT, "embed_dim": 48, "attnlinear_cfg": "monarch", "mlp_ratio": 3.0},
    "Monarch both, with bias": {
        **VIT,
        "embed_dim": 48,
        "qkv_bias": True,
        "attnlinear_cfg": {"_target_": "monarch_flow.layers.MonarchLinear", "nblocks": 6},
        "mlp_cfg": {
            "_target_": "src.models.layers.mlp.MlpCustom",
            "linear1_cfg": {
                "_target_": "src.models.layers.monarch_linear.MonarchLinear",
                "nblocks": 3,
            },
            "linear2_cfg": None,
        },
    },
}
T2T = {"img_size": 32, "num_classes": 6, "embed_dim": 24, "depth": 2, "num_heads": 3}


def _vit(arguments: dict[str, Any]) -> tuple[nn.Module, Forward]:
    model = create_model("vit_small_patch16_224", **arguments)
    return model, lambda state, images: numpy_vision.vit(state, images, 2, 3, 1e-5)


def _mixer() -> tuple[nn.Module, Forward]:
    sizes = {"img_size": 16, "patch_size": 4, "num_classes": 6, "embed_dim": 32, "depth": 2}
    model = create_model(
        "mixer_s16_224", **sizes, mlp_cfg="monarch", token_mlp_cfg=model_mlp("monarch")
    )
    return model, lambda state, images: numpy_vision.mixer(state, images, 2, 1e-6)


def model_mlp(layer: str) -> dict[str, Any]:
    return {
        "_target_": "monarch_flow.layers.MlpCustom",
        "linear1_cfg": {"_target_": layer},
        "linear2_cfg": {"_target_": layer},
    }


def _t2t(tokens_type: str, **more: Any) -> tuple[nn.Module, Forward]:
    model = create_model("t2t_vit_14", tokens_type=tokens_type, **T2T, **more)
    attention = getattr(numpy_vision, f"token_{tokens_type}")
    return model, lambda state, images: numpy_vision.t2t(state, images, 2, 3, attention)


CASES: dict[str, Callable[[], tuple[nn.Module, Forward]]] = {
    **{name: lambda arguments=arguments: _vit(arguments) for name, arguments in MONARCH.items()},
    "Mixer, Monarch on both sides": _mixer,
    "T2T with transformers": lambda: _t2t("transformer"),
    "T2T with performers": lambda: _t2t("performer"),
    "T2T with performers and Monarch": lambda: _t2t("performer", mlp_cfg="monarch"),
}


def _seeded(model: nn.Module) -> dict[str, np.ndarray]:
    """Fills the model; its state at float64. The table of positions stays."""
    shapes = [(name, tuple(value.shape)) for name, value in model.state_dict().items()]
    state = seeded_vision.state((n, s) for n, s in shapes if n != "pos_embed.pe")
    model.load_state_dict({n: flow.tensor(a) for n, a in state.items()}, strict=False)
    return {name: array.astype(np.float64) for name, array in state.items()}


@pytest.mark.parametrize("name", list(CASES))
def test_logits_and_gradients_equal_numpy(name: str) -> None:
    model, forward = CASES[name]()
    model.eval()
    state = _seeded(model)
    size = model.img_size
    images = seeded_vision.images({"in_chans": 3, "img_size": size}).astype(np.float64)
    logits = model(flow.tensor(images.astype(np.float32)))
    expected = forward(state, images)
    assert 0.1 < np.abs(expected).max() < 30
    assert_close(logits.numpy(), expected, reduced=1000)

    # The derivative along one random direction, against a difference of numpy's.
    weights = seeded_vision.probe("logits", expected.shape)
    (logits * flow.tensor(weights.astype(np.float32))).sum().backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    directions = {n: seeded_vision.probe(n, tuple(p.shape)) for n, p in trained.items()}
    for part in ("", "blocks.1", "blocks.0", "attention1"):
        chosen = [n for n in trained if part in n]
        if not chosen:
            continue
        found = sum((trained[n].grad.numpy() * directions[n]).sum() for n in chosen)
        step = 1e-5
        moved = [
            {n: a + sign * step * directions[n] if n in chosen else a for n, a in state.items()}
            for sign in (1, -1)
        ]
        difference = [(forward(state_, images) * weights).sum() for state_ in moved]
        derivative = (difference[0] - difference[1]) / (2 * step)
        assert abs(found - derivative) < 1e-4 * max(abs(derivative), 1.0), (part, found, derivative)


FIXTURE = {
    # First 8 logits of the first image and standard deviation of all, of an independent
    # implementation that loads the published code's weights (../shared/docs/vitae_spec.md, 2.4).
    "t2t_vit_7": (
        [1.794385, 1.194470, -0.868754, -1.521572, 0.859037, 1.831734, 0.383479, -2.031938],
        1.411317,
    ),
    "t2t_vit_14": (
        [1.577381, -0.544222, -0.719717, 1.166312, -0.350706, -1.067214, 1.105047, 0.434814],
        1.081133,
    ),
    "t2t_vit_t_14": (
        [1.603452, -0.518415, -0.766353, 1.188807, -0.289514, -1.081619, 1.098368, 0.444024],
        1.080416,
    ),
}


@pytest.mark.parametrize("name", list(FIXTURE))
def test_full_size_t2t_equals_the_published_codes_fixture(name: str) -> None:
    model = create_model(name).eval()
    state = {}
    for key, value in model.state_dict().items():
        if key != "pos_embed.pe":
            published = key.replace("patch_embed.", "tokens_to_token.")
            array = spec_fixture.entry(published, tuple(value.shape)).astype(np.float32)
            state[key] = flow.tensor(array)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["pos_embed.pe"], [])
    with flow.no_grad():
        logits = model(flow.tensor(spec_fixture.images())).numpy()
    first, std = FIXTURE[name]
    # The fixture's own figures are of float32.
    assert np.abs(logits[0, :8] - first).max() < 1e-4
    assert abs(logits.std(ddof=1) - std) < 1e-4
