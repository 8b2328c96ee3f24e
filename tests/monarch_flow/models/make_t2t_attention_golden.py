"""Makes t2t_attention.json: outputs and gradients of the transformers of fly's tokens-to-token
module, for tests to compare with.

`.venv-peer/bin/python -m tests.monarch_flow.models.make_t2t_attention_golden CHECKOUT` from the
root; CHECKOUT has the folder src of github.com/HazyResearch/fly at 6b73449. All is in float64.
What is fly's is run as it is. Not installed here, and so written below by what they define: the two
products of fast_transformers.local_product (compiled, float32 only), einops (that of functorch),
hydra.utils.instantiate, torchvision's StochasticDepth at rate 0.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from functorch.einops import rearrange

from tests.golden import seeded_weights
from tests.monarch_flow.models import seeded_vision

IN_DIM, DIM, TOKENS, BATCH = 12, 8, 37, 2
_FLY = "src.models.attention"
_LAYERS = {
    (True, False): f"{_FLY}.local_attention.LocalAttention",
    (True, True): f"{_FLY}.sblocal_attention.SBLocalAttention",
    (False, True): f"{_FLY}.performer_attention.PerformerAttention",
}
# The options of attention by case, and what the projection's weights are multiplied by.
CASES: dict[str, tuple[dict[str, int], float]] = {
    "window of an even number": ({"local_context": 10}, 3),
    "window of an odd number": ({"local_context": 7}, 3),
    "one key": ({"local_context": 1}, 3),
    "window of nearly all": ({"local_context": 36}, 3),
    "window and features": ({"local_context": 7, "nb_features": 6}, 3),
    "more features than numbers": ({"local_context": 12, "nb_features": 41}, 3),
    "large scores": ({"local_context": 5, "nb_features": 6}, 12),
    "features": ({"nb_features": 5}, 3),
}


def _window(context: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x (batch, heads, keys, n) as each query sees it, (..., queries, context, n), and where there
    are such keys."""
    keys = x.shape[2]
    place = torch.arange(keys)[:, None] - context // 2 + torch.arange(context)
    return x[:, :, place.clamp(0, keys - 1)], (place >= 0) & (place < keys)


def _local_dot(q: Any, k: Any, mask: Any, lengths: Any, context: int) -> torch.Tensor:
    keys, there = _window(context, k)
    return torch.where(there, torch.einsum("bhte,bhtce->bhtc", q, keys), -1e24)


def _local_average(weights: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    values, there = _window(weights.shape[-1], v)
    return torch.einsum("bhtc,bhtcd->bhtd", weights * there, values)


def _instantiate(cfg: dict[str, Any], _recursive_: bool, **more: Any) -> torch.nn.Module:
    module, _, name = cfg["_target_"].rpartition(".")
    options = {key: value for key, value in cfg.items() if key != "_target_"}
    return getattr(importlib.import_module(module), name)(**options, **more)


def _stub(name: str, **content: Any) -> None:
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(content, __path__=[])


def _install(checkout: str) -> None:
    sys.path.insert(0, checkout)
    expand = lambda x, pattern, b, h: x.expand(b, h, *x.shape)  # noqa: E731
    _stub("einops", rearrange=rearrange, repeat=expand, reduce=None)
    _stub("hydra", utils=types.SimpleNamespace(instantiate=_instantiate))
    products = {"local_dot_product": _local_dot, "local_weighted_average": _local_average}
    _stub("fast_transformers")
    _stub("fast_transformers.local_product", **products)
    _stub("torchvision")
    _stub("torchvision.ops", StochasticDepth=lambda rate, mode: torch.nn.Identity())


def _case(options: dict[str, int], factor: float) -> dict[str, Any]:
    from src.models.modules.token_transformer import Token_transformer  # type: ignore

    has_window, has_features = "local_context" in options, "nb_features" in options
    cfg: dict[str, Any] = {"_target_": _LAYERS[has_window, has_features], **options}
    if has_features:
        cfg |= {"dim_heads": DIM, "softmax_eps": 0.0}
        cfg |= {} if has_window else {"normalization_eps": 0.0}
    model = Token_transformer(IN_DIM, DIM, num_heads=1, attn_cfg=cfg).double()
    x = torch.from_numpy(seeded_weights.uniform("x", (BATCH, TOKENS, IN_DIM), -2, 2)).double()
    # fly draws the features' matrix in the first call, and keeps it.
    model(x)
    ours = {name: name.replace("layer.proj", "layer.feature_map.proj") for name in model.state_dict()}
    shapes = [(ours[name], tuple(value.shape)) for name, value in model.state_dict().items()]
    state = seeded_vision.state(shapes)
    state["attn.qkv.weight"] *= factor
    model.load_state_dict({name: torch.from_numpy(state[ours[name]]) for name in ours})
    x.requires_grad_()
    out = model(x)
    (out * torch.from_numpy(seeded_vision.probe("out", tuple(out.shape)))).sum().backward()
    found = {name: value.grad.numpy() for name, value in (*model.named_parameters(), ("x", x))}
    products = {
        name: [np.linalg.norm(g), (g * seeded_vision.probe(name, g.shape)).sum()]
        for name, g in found.items()
    }
    rounded = np.vectorize(lambda number: float(f"{number:.9g}"))
    gradients = {name: rounded(values).tolist() for name, values in products.items()}
    return {"shapes": shapes, "out": rounded(out.detach()).tolist(), "gradients": gradients}


def main() -> None:
    _install(sys.argv[1])
    golden = {name: _case(*case) for name, case in CASES.items()}
    target = Path(__file__).with_name("t2t_attention.json")
    target.write_text(json.dumps(golden, separators=(",", ":")).replace("]],", "]],\n") + "\n")
    print(f"{target.name}: {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
