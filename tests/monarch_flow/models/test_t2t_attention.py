"""Attention to windows and by random features in T2T-ViT: fly's outputs and gradients, and the way
of its options and weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import oneflow as flow
import pytest

from monarch_flow.models.t2t_vit import TokenTransformer
from tests.golden import seeded_weights
from tests.monarch_flow.models import seeded_vision

GOLDEN = json.loads(Path(__file__).with_name("t2t_attention.json").read_text())


@pytest.mark.parametrize("case", list(GOLDEN))
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_values(case: str, dtype: str) -> None:
    golden = GOLDEN[case]
    print(golden.keys())
    factor = 12 if case=="large scores" else 3
    cfg={"window of an even number": ({"local_context": 10}, 3),
    "window of an odd number": ({"local_context": 7}, 3),
    "one key": ({"local_context": 1}, 3),
    "window of nearly all": ({"local_context": 36}, 3),
    "window and features": ({"local_context": 7, "nb_features": 6}, 3),
    "more features than numbers": ({"local_context": 12, "nb_features": 41}, 3),
    "large scores": ({"local_context": 5, "nb_features": 6}, 12),
    "features": ({"nb_features": 5}, 3)}[case][0]
    model = TokenTransformer(12, 8, cfg).eval()
    shapes = [(n, tuple(s)) for n, s in golden["shapes"]]
    assert sorted((k, tuple(v.shape)) for k, v in model.state_dict().items()) == sorted(shapes)
    state = seeded_vision.state(shapes)
    state["attn.qkv.weight"] *= factor
    model.load_state_dict({k: flow.tensor(v) for k, v in state.items()})
    x = flow.tensor(seeded_weights.uniform("x", (2, 37, 12), -2, 2))
    dt = getattr(flow, dtype)
    model = model.to(dt); x = x.to(dt).requires_grad_()
    out = model(x)
    (out * flow.tensor(seeded_vision.probe("out", tuple(out.shape))).to(dt)).sum().backward()
    print(case, dtype, "out", np.abs(out.numpy() - np.array(golden["out"])).max())
    for name, p in (*model.named_parameters(), ("x", x)):
        g = p.grad.numpy().astype(np.float64)
        found = [np.linalg.norm(g), (g * seeded_vision.probe(name, g.shape)).sum()]
        exp = golden["gradients"][name]
        print("   ", name, np.abs(np.array(found) - exp) / exp[0])
