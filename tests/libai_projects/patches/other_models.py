"""LiBai's other models, tiny, without dropout, with data for one step (test_libai_patches.py)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import oneflow as flow
from libai.models import BertForPreTraining, SwinTransformer, T5ForPreTraining, VisionTransformer
from libai.models.utils import GraphBase
from libai.utils import distributed
from omegaconf import OmegaConf
from oneflow import nn

Inputs = dict[str, flow.Tensor]
BATCH, SEQUENCE, VOCABULARY = 4, 8, 96
_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "embedding_dropout_prob": 0.0,
    "max_position_embeddings": 16,
    "num_tokentypes": 2,
    "add_pooling_layer": True,
    "add_binary_head": True,
    "initializer_range": 0.02,
    "layernorm_eps": 1e-5,
    "bias_gelu_fusion": None,
    "bias_dropout_fusion": None,
    "scale_mask_softmax_fusion": None,
    "apply_query_key_layer_scaling": True,
    "amp_enabled": False,
}


def _tensor(values: np.ndarray) -> flow.Tensor:
    sbp = distributed.get_nd_sbp([flow.sbp.split(0), flow.sbp.broadcast])
    return flow.tensor(values, placement=distributed.get_layer_placement(0), sbp=sbp)


def _tokens(upper: int = VOCABULARY, shape: tuple[int, ...] = (BATCH, SEQUENCE)) -> flow.Tensor:
    return _tensor(np.random.default_rng(0).integers(0, upper, shape))


def _ones(*shape: int) -> flow.Tensor:
    return _tensor(np.ones((BATCH, *shape), np.int64))


def bert() -> tuple[nn.Module, Inputs]:
    flow.manual_seed(0)
    inputs = {
        "input_ids": _tokens(),
        "attention_mask": _ones(SEQUENCE),
        "lm_labels": _tokens(),
        "loss_mask": _ones(SEQUENCE),
        "ns_labels": _tokens(2, (BATCH,)),
    }
    return BertForPreTraining(OmegaConf.create(_TEXT)), inputs


def t5() -> tuple[nn.Module, Inputs]:
    flow.manual_seed(0)
    causal = np.tri(SEQUENCE, dtype=np.int64)[None].repeat(BATCH, 0)
    inputs = {
        "encoder_input_ids": _tokens(),
        "decoder_input_ids": _tokens(),
        "encoder_attn_mask": _ones(SEQUENCE, SEQUENCE),
        "decoder_attn_mask": _tensor(causal),
        "encoder_decoder_attn_mask": _ones(SEQUENCE, SEQUENCE),
        "lm_labels": _tokens(),
        "loss_mask": _ones(SEQUENCE),
    }
    return T5ForPreTraining(OmegaConf.create(_TEXT)), inputs


def _images() -> Inputs:
    images = np.random.default_rng(0).normal(size=(BATCH, 3, 16, 16)).astype(np.float32)
    return {"images": _tensor(images), "labels": _tokens(10, (BATCH,))}


def vision_transformer() -> tuple[nn.Module, Inputs]:
    flow.manual_seed(0)
    model = VisionTransformer(
        img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=4, num_classes=10
    )
    return model, _images()


def swin() -> tuple[nn.Module, Inputs]:
    flow.manual_seed(0)
    model = SwinTransformer(
        img_size=16,
        patch_size=2,
        embed_dim=16,
        depths=[1, 1],
        num_heads=[2, 2],
        window_size=4,
        drop_path_rate=0.0,
        num_classes=10,
    )
    return model, _images()


MODELS: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {
    "bert": bert,
    "t5": t5,
    "vision transformer": vision_transformer,
    "swin": swin,
}


def losses(model: nn.Module, inputs: Inputs, *, graph: bool) -> list[float]:
    """The summed loss of each of three steps of AdamW on one batch."""
    optimizer = flow.optim.AdamW(model.parameters(), lr=1e-3)
    constant = flow.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0, total_iters=1)
    model.train()
    step = GraphBase(model, optimizer, constant) if graph else model
    found = []
    for _ in range(3):
        parts = step(**inputs)
        if not graph:
            sum(parts.values()).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(sum(float(distributed.tton(part)) for part in parts.values()))
    return found
