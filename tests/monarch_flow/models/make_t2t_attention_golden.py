"""`.venv-peer/bin/python tests/monarch_flow/models/make_t2t_attention_golden.py CHECKOUT` makes
t2t_attention.json: outputs and gradients, in float64, of the token transformers in the folder src
of github.com/HazyResearch/fly at 6b73449. Stubbed by what they compute, as they cannot be installed
here: both products of fast_transformers.local_product (compiled, float32 only), einops, hydra,
StochasticDepth(0).
"""

import json
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import torch
from functorch.einops import rearrange
from torch import nn

FAR = {"dim_heads": 3, "softmax_eps": 0.0}
# A layer, options, those that only fly has, and what the projection is multiplied by.
CASES = [("local.LocalAttention", {"local_context": c}, {}, 3) for c in (7, 70)]
CASES += [("performer.PerformerAttention", {"nb_features": 3}, FAR | {"normalization_eps": 0.0}, 3)]
for c, m, factor in ((7, 6, 3), (12, 4, 3), (5, 6, 20)):
    CASES += [("sblocal.SBLocalAttention", {"local_context": c, "nb_features": m}, FAR, factor)]


def windows(x, context):
    """What queries see of x (..., keys, n), 0 where nothing is: (..., queries, n, context)."""
    return nn.functional.pad(x, (0, 0, context // 2, (context - 1) // 2)).unfold(2, context, 1)


def dot(query, key, mask, lengths, context):
    there = windows(torch.ones_like(key), context)[..., 0, :] > 0
    return torch.where(there, (query[..., None] * windows(key, context)).sum(-2), -1e24)


def golden(layer, options, others, factor):
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


average = lambda weights, v: (weights[..., None, :] * windows(v, weights.shape[-1])).sum(-1)  # noqa: E731
products = {"local_dot_product": dot, "local_weighted_average": average}
repeat = {"repeat": lambda x, _, b, h: x.expand(b, h, *x.shape), "reduce": None}
hydra = SimpleNamespace(instantiate=lambda cfg, _recursive_, **more: cfg(**more))
sys.modules["einops"] = SimpleNamespace(rearrange=rearrange, **repeat)
sys.modules["fast_transformers.local_product"] = SimpleNamespace(**products)
sys.modules["hydra"] = SimpleNamespace(utils=hydra)
sys.modules["torchvision.ops"] = SimpleNamespace(StochasticDepth=lambda rate, mode: nn.Identity())
sys.path.insert(0, sys.argv[1])
torch.manual_seed(1)
text = json.dumps([golden(*case) for case in CASES])
short = json.loads(text, parse_float=lambda number: round(float(number), 7))
text = json.dumps(short, separators=(",", ":")).replace("},{", "},\n{") + "\n"
Path(__file__).with_name("t2t_attention.json").write_text(text)
