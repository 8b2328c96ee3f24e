"""Whole models of PyTorch's, as they are, compiled or in an engine for inference: ResNet50, timm's
ViT-S/16, transformers' GPT-2 small."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from benchmarks.both import Both
from benchmarks.items import LLAMA
from benchmarks.peers import engines, torchvision
from benchmarks.peers.resnet50 import resnet50
from benchmarks.serve import Maker, Step

BOTH = Both(torch)


def _images(batch: int, size: int = 224) -> torch.Tensor:
    return torch.randn(batch, 3, size, size)


def resnet50_forward(batch: int) -> Step:
    model = resnet50().to(memory_format=torch.channels_last)
    return BOTH.forward(model.eval(), _images(batch).to(memory_format=torch.channels_last))


def _inference(make: Callable[[], nn.Module], forward: Maker) -> Maker:
    """In an engine where the peer is one, else by `forward`."""

    def maker(batch: int, dtype: str) -> Step:
        engine = engines.MAKERS.get(BOTH.peer)
        return engine(make().eval(), _images(batch), dtype) if engine else forward(batch)

    return maker


def resnet50_train(batch: int) -> Step:
    model = resnet50().to(memory_format=torch.channels_last)
    images = _images(batch).to(memory_format=torch.channels_last)
    labels = torch.randint(1000, (batch,))
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.001, momentum=0.9, weight_decay=1e-4, fused=True
    )
    forward = BOTH.best(model)
    return BOTH.train(
        optimizer, lambda: nn.functional.cross_entropy(forward(images).float(), labels)
    )


def _vit() -> nn.Module:
    torchvision.install()
    import timm

    return timm.create_model("vit_small_patch16_224", pretrained=False)


def classifier_forward(
    model: nn.Module, batch: int, size: int = 224, dtype: torch.dtype = torch.float32
) -> Step:
    return BOTH.forward(model.to(dtype).eval(), _images(batch, size).to(dtype))


def vit_forward(batch: int) -> Step:
    return classifier_forward(_vit(), batch)


def vit_train(batch: int) -> Step:
    return BOTH.classifier_train(_vit().train(), batch)


def _gpt2(use_cache: bool = False) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=use_cache)
    return GPT2LMHeadModel(config)


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
    "resnet50_forward": resnet50_forward,
    "resnet50_inference": _inference(resnet50, resnet50_forward),
    "resnet50_train": resnet50_train,
    "resnet50_train_graph": resnet50_train,
    "vit_forward": vit_forward,
    "vit_inference": _inference(_vit, vit_forward),
    "vit_train": vit_train,
    "gpt2_forward": gpt2_forward,
    "gpt2_train": gpt2_train,
    "llama_train": llama_train,
    "gpt2_greedy": gpt2_greedy,
}
