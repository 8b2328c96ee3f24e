"""Whole models of PyTorch's, as they are, compiled or in an engine for inference: timm's ResNet50
and ViT-S/16, transformers' GPT-2 small."""

from __future__ import annotations

import time
from functools import partial

import torch
from torch import nn

from benchmarks.both import Both
from benchmarks.items import LLAMA, LLAMA_CPP
from benchmarks.peers import engines, torchvision
from benchmarks.serve import Maker, Step


def _timm(name: str) -> nn.Module:
    torchvision.install()
    import timm

    return timm.create_model(name, pretrained=False)


def _gpt2(use_cache: bool = False) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=use_cache)
    return GPT2LMHeadModel(config)


# v1.5 (He et al. 2015, table 1, with the stride in the 3 x 3 convolution), as ours.
_resnet50, _vit = partial(_timm, "resnet50"), partial(_timm, "vit_small_patch16_224")
BOTH = Both(torch, {"resnet50": _resnet50, "gpt2": _gpt2})


def _channels_last(model: nn.Module, batch: int) -> tuple[nn.Module, torch.Tensor]:
    last = {"memory_format": torch.channels_last}
    return model.to(**last), torch.randn(batch, 3, 224, 224).to(**last)


def resnet50_forward(batch: int) -> Step:
    model, images = _channels_last(_resnet50().eval(), batch)
    return BOTH.forward(model, images)


def resnet50_inference(batch: int, dtype: str) -> Step:
    if BOTH.peer in engines.MAKERS:
        return BOTH.classifier(_inference, _resnet50, batch, dtype=dtype)
    return resnet50_forward(batch)


def _inference(model: nn.Module, images: torch.Tensor, dtype: str) -> Step:
    """In an engine where the peer is one."""
    engine = engines.MAKERS.get(BOTH.peer)
    return engine(model, images, dtype) if engine else BOTH.forward(model, images)


def resnet50_train(batch: int) -> Step:
    model, images = _channels_last(_resnet50(), batch)
    labels = torch.randint(1000, (batch,))
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.001, momentum=0.9, weight_decay=1e-4, fused=True
    )
    forward = BOTH.best(model)
    return BOTH.train(
        optimizer, lambda: nn.functional.cross_entropy(forward(images).float(), labels)
    )


def gpt2_forward(batch: int, tokens: int) -> Step:
    return BOTH.forward(_gpt2().eval(), torch.randint(50257, (batch, tokens)))


def gpt2_train(batch: int, tokens: int) -> Step:
    model = _gpt2().train()
    ids = torch.randint(50257, (batch, tokens))
    forward = BOTH.best(model)
    return BOTH.train(BOTH.adamw(model), lambda: forward(ids, labels=ids).loss)


def _llama(use_cache: bool = False) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**LLAMA, attn_implementation="sdpa", use_cache=use_cache)
    return LlamaForCausalLM(config)


def llama_train(batch: int, tokens: int) -> Step:
    model = _llama()
    ids = torch.randint(LLAMA["vocab_size"], (batch, tokens))
    forward = BOTH.best(model.train())
    return BOTH.train(BOTH.adamw(model), lambda: forward(ids, labels=ids).loss)


def decode(model: str, weights: str, batch: int, prompt: int, tokens: int) -> Step:
    """In llama.cpp with these `weights`, else in the dtype that suits the machine best."""
    net = {"GPT-2": _gpt2, "Llama": _llama}[model](use_cache=True).eval()
    if BOTH.peer == LLAMA_CPP:
        from benchmarks.peers import llama

        return llama.decode(net, weights, prompt, tokens)
    return _decode(net.to(fastest_dtype(net, batch)), batch, prompt, tokens)


def _decode(model: nn.Module, batch: int, prompt: int, tokens: int) -> Step:
    from transformers import DynamicCache

    past = DynamicCache()
    ids = torch.randint(model.config.vocab_size, (batch, prompt))

    def read(ids: torch.Tensor) -> torch.Tensor:
        logits = model(ids, past_key_values=past, logits_to_keep=1).logits
        return logits.argmax(-1)

    def step() -> None:
        last = first
        for _ in range(tokens):
            last = read(last)
        past.crop(-tokens)

    with torch.no_grad():
        first = read(ids)
    return BOTH.without_gradient(step)


def fastest_dtype(model: nn.Module, batch: int) -> torch.dtype:
    """Of float32 and bfloat16, the one whose tokens take less time; the model is then bfloat16."""
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        step = _decode(model.to(dtype), batch, 8, 8)
        step()
        start = time.perf_counter()
        step()
        seconds[dtype] = time.perf_counter() - start
    return min(seconds, key=seconds.__getitem__)


MAKERS: dict[str, Maker] = {
    **{make.__name__: make for make in (resnet50_forward, resnet50_inference, resnet50_train)},
    "resnet50_train_graph": resnet50_train,
    "vit_forward": partial(BOTH.classifier, BOTH.forward, _vit),
    "vit_inference": partial(BOTH.classifier, _inference, _vit),
    "vit_train": partial(BOTH.classifier_train, _vit),
    **{make.__name__: make for make in (gpt2_forward, gpt2_train, llama_train, decode)},
    **BOTH.makers(),
}
