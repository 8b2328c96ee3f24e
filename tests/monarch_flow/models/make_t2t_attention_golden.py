"""`.venv-peer/bin/python tests/monarch_flow/models/make_t2t_attention_golden.py CHECKOUT` makes
t2t_attention.json: outputs and gradients of fly's token transformers, in float64.

CHECKOUT has the folder src of github.com/HazyResearch/fly at 6b73449, whose modules run as they
are. What they import and cannot be installed here is stubbed by what it computes: both products of
fast_transformers.local_product (compiled, float32 only), einops, hydra, StochasticDepth(0).
"""

from __future__ import annotations

import json
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from functorch.einops import rearrange
from torch import Tensor
from torch.nn.functional import pad

FAR = {"dim_heads": 3, "softmax_eps": 0.0}
# A layer, options, those that only fly has, and what the projection is multiplied by.
CASES: list[Any] = [("local.LocalAttention", {"local_context": c}, {}, 3) for c in (7, 70)]
CASES += [("performer.PerformerAttention", {"nb_features": 3}, FAR | {"normalization_eps": 0}, 3)]
for c, m, factor in ((7, 6, 3), (12, 4, 3), (5, 6, 20)):
    CASES += [("sblocal.SBLocalAttention", {"local_context": c, "nb_features": m}, FAR, factor)]


def windows(x: Tensor, context: int) -> Tensor:
    """What queries see of x (..., keys, n), 0 where nothing is: (..., queries, n, context)."""
    return pad(x, (0, 0, context // 2, (context - 1) // 2)).unfold(2, context, 1)


def dot(query: Tensor, key: Tensor, mask: Any, lengths: Any, context: int) -> Tensor:
    there = windows(torch.ones_like(key), context)[..., 0, :] > 0
    return torch.where(there, (query[..., None] * windows(key, context)).sum(-2), -1e24)


def average(weights: Tensor, value: Tensor) -> Tensor:
    return (weights[..., None, :] * windows(value, weights.shape[-1])).sum(-1)


def golden(layer: str, options: dict[str, int], others: dict[str, Any], factor: int) -> Any:
    module, name = layer.split(".")
    kind = getattr(import_module(f"src.models.attention.{module}_attention"), name)
    fly = import_module("src.models.modules.token_transformer").Token_transformer
    model = fly(4, 3, 1, attn_cfg=partial(kind, **options, **others)).double()
    x = torch.randn(2, 67, 4).double().round(decimals=3).requires_grad_()
    model(x)  # draws the matrix of features, which stays
    model.attn.qkv.weight.data *= factor
    for value in model.double().state_dict().values():
        value.copy_(value.round(decimals=3))
    out = model(x)
    out.square().sum().backward()
    state = {n.replace("r.proj", "r.feature_map.proj"): v for n, v in model.state_dict().items()}
    state |= {"x": x, "out": out, "x.grad": x.grad, "qkv.grad": model.attn.qkv.weight.grad}
    return {"cfg": options} | {name: value.detach().tolist() for name, value in state.items()}


def stub(name: str, **content: Any) -> None:
    sys.modules[name] = SimpleNamespace(**content)  # type: ignore[assignment]


stub("einops", rearrange=rearrange, repeat=lambda x, _, b, h: x.expand(b, h, *x.shape), reduce=0)
stub("hydra", utils=SimpleNamespace(instantiate=lambda cfg, _recursive_, **more: cfg(**more)))
stub("fast_transformers.local_product", local_dot_product=dot, local_weighted_average=average)
stub("torchvision.ops", StochasticDepth=lambda rate, mode: torch.nn.Identity())
sys.path.insert(0, sys.argv[1])
torch.manual_seed(1)
text = json.dumps([golden(*case) for case in CASES])
short = json.loads(text, parse_float=lambda number: round(float(number), 7))
text = json.dumps(short, separators=(",", ":")).replace("},{", "},\n{")
Path(__file__).with_name("t2t_attention.json").write_text(f"{text}\n")
