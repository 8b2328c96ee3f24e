"""Whole models of PyTorch's, as they are, compiled or in an engine for inference: timm's ResNet50
and ViT-S/16, transformers' GPT-2 small."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from benchmarks.both import Both
from benchmarks.items import LLAMA
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


def llama_train(batch: int, tokens: int) -> Step:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**LLAMA, attn_implementation="sdpa", use_cache=False))
    ids = torch.randint(LLAMA["vocab_size"], (batch, tokens))
    forward = BOTH.best(model.train())
    return BOTH.train(BOTH.adamw(model), lambda: forward(ids, labels=ids).loss)


def gpt2_greedy(batch: int, prompt: int, tokens: int) -> Step:
    model = _gpt2(use_cache=True).eval()
    ids = torch.randint(50257, (batch, prompt))
    # As many tokens each time, whatever they are.
    model.generation_config.eos_token_id = None

    def step() -> None:
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            pad_token_id=50256,
            max_new_tokens=tokens,
            do_sample=False,
        )

    return step


MAKERS: dict[str, Maker] = {
    **{make.__name__: make for make in (resnet50_forward, resnet50_inference, resnet50_train)},
    "resnet50_train_graph": resnet50_train,
    "vit_forward": partial(BOTH.classifier, BOTH.forward, _vit),
    "vit_inference": partial(BOTH.classifier, _inference, _vit),
    "vit_train": partial(BOTH.classifier_train, _vit),
    **{make.__name__: make for make in (gpt2_forward, gpt2_train, llama_train, gpt2_greedy)},
    **BOTH.makers(),
}
