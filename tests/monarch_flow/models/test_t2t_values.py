"""T2T-ViT gives the logits of the published code, and gradients are those of its logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import oneflow as flow
import pytest

from monarch_flow.models import create_model
from tests.monarch_flow.models import seeded_vision, spec_fixture

FIXTURE = {
    # First 8 logits of the first image and standard deviation of all, of an independent
    # implementation that loads the published code's weights (../shared/docs/vitae_spec.md, 2.4).
    "t2t_vit_7": (
        [1.794385, 1.194470, -0.868754, -1.521572, 0.859037, 1.831734, 0.383479, -2.031938],
        1.411317,
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


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "transformers": ("t2t_vit_14", {"tokens_type": "transformer", "img_size": 32}),
    "performers and Monarch": ("t2t_vit_7", {"img_size": 32, "mlp_cfg": "monarch"}),
    "ViT, Monarch with padding": (
        "vit_small_patch16_224",
        {
            "img_size": 16,
            "patch_size": 4,
            "qkv_bias": True,
            "mlp_ratio": 2.5,
            "attnlinear_cfg": {"_target_": "monarch_flow.layers.MonarchLinear", "nblocks": 6},
            "mlp_cfg": "monarch",
        },
    ),
}


@pytest.mark.parametrize("case", list(CASES))
def test_gradients_are_differences_of_the_loss(case: str) -> None:
    """Along one random direction for each part of the model, in float64."""
    name, arguments = CASES[case]
    sizes = {"embed_dim": 45, "depth": 2, "num_heads": 3, "num_classes": 6}
    model = create_model(name, **sizes, **arguments).double().eval()
    shapes = [(key, tuple(value.shape)) for key, value in model.state_dict().items()]
    state = seeded_vision.state((k, shape) for k, shape in shapes if k != "pos_embed.pe")
    model.load_state_dict({k: flow.tensor(a).double() for k, a in state.items()}, strict=False)
    images = flow.tensor(seeded_vision.images({"in_chans": 3, "img_size": model.img_size})).double()
    weights = flow.tensor(seeded_vision.probe("logits", (seeded_vision.BATCH, 6)))
    loss = lambda: (model(images) * weights).sum()  # noqa: E731
    loss().backward()
    trained = {key: value for key, value in model.named_parameters() if value.requires_grad}
    for part in ("patch_embed", "blocks.1", "blocks.0", "head", "cls_token"):
        chosen = {key: value for key, value in trained.items() if part in key}
        assert chosen, part
        steps = {k: seeded_vision.probe(k, tuple(v.shape)) for k, v in chosen.items()}
        found = sum((value.grad.numpy() * steps[key]).sum() for key, value in chosen.items())
        ends = []
        with flow.no_grad():
            for length in (1e-5, -2e-5, 1e-5):
                for key, value in chosen.items():
                    value.add_(flow.tensor(length * steps[key]))
                ends.append(float(loss().numpy()))
        difference = (ends[0] - ends[1]) / 2e-5
        assert found == pytest.approx(difference, rel=1e-5, abs=1e-5), part
