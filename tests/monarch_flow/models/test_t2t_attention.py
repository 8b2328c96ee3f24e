"""T2T-ViT's attention by windows and features: fly's values, options, costs and weights."""

import json
from pathlib import Path

from oneflow_accel import layouts
from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
import pytest

from flow_train.metrics.macs import macs_by_module
from monarch_flow.config import compose
from monarch_flow.engine.weights import with_our_names
from monarch_flow.models import create_model
from monarch_flow.models.local_attention import LocalAttention
from monarch_flow.models.t2t_vit import TokenTransformer

GOLDEN = json.loads(Path(__file__).with_name("t2t_attention.json").read_text())
# By hand, of one token: the window's keys and values; random rows; sums, and what reads them.
MACS = {"local": 98 * 128, "performer": 2 * 49 * 64 + 49 * 129}
MACS["sblocal"] = 49 * (128 + 24) + 2 * 12 * 64 + 24 * 129


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: str(golden["cfg"]))
def test_outputs_and_gradients_are_those_of_fly(golden):
    model = TokenTransformer(4, 3)
    model.attn.attention_layer = LocalAttention(3, 0.5, golden["cfg"])
    state = model.double().state_dict()
    model.load_state_dict({name: flow.tensor(np.array(golden[name])) for name in state})
    x = flow.tensor(np.array(golden["x"])).requires_grad_()
    out = model(x)
    (out * out).sum().backward()
    found = {"out": out, "x.grad": x.grad, "qkv.grad": model.attn.qkv.weight.grad}
    assert max(np.abs(found[name].numpy() - golden[name]).max() for name in found) < 1e-6


@pytest.mark.parametrize("kind", MACS)
def test_weights_of_softmax_fit_and_costs_are_counted(kind):
    cfg = compose(["experiment=imagenet/t2tvit/t2tvit14t", f"model/t2tattn_cfg={kind}"]).model
    arguments = {name: cfg[name] for name in ("t2tattn1_cfg", "t2tattn2_cfg")}
    model, other = (create_model("t2t_vit_t_14", depth=1, **more) for more in (arguments, {}))
    weights = with_our_names(layouts.standard_state_dict(other), model)
    layouts.load_standard_state_dict(model, weights, strict=True)
    (macs, *_) = (m.macs for m in macs_by_module(model, 224) if m.kind == "LocalAttention")
    assert macs == 3136 * MACS[kind]
    with pytest.raises(UserError, match="local_context"):
        create_model("t2t_vit_7", t2tattn1_cfg={"local_context": 3})
