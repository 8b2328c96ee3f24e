"""Makes tests/libai_projects/patches/tiny_gpt_losses.json: losses of a float64 PyTorch GPT on the
batches of tiny_gpt.py. Run it from the root, where make_torchvision_resnet.py describes:

    python -m tests.golden.make_tiny_gpt_losses

The model is that of LiBai 0.1.1: layer norm before attention and MLP, queries, keys and values
interleaved per head, erf GELU, logits tied to the token embedding.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch.nn import functional

from tests.libai_projects.patches import tiny_gpt as tiny

FILE = Path(__file__).resolve().parent.parent / "libai_projects/patches/tiny_gpt_losses.json"


def logits(p: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """(batch, sequence, vocabulary) from token ids (batch, sequence)."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = p[f"{name}.weight"], p[f"{name}.bias"]
        return functional.layer_norm(x, (tiny.HIDDEN,), weight, bias, tiny.LAYER_NORM_EPSILON)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ p[f"{name}.weight"] + p[f"{name}.bias"]

    batch, sequence = ids.shape
    words = p["embeddings.token_embeddings.weight"]
    x = words[ids] + p["embeddings.position_embeddings.weight"][:sequence]
    for i in range(tiny.LAYERS):
        layer = f"transformer.layers.{i}"
        qkv = linear(norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attention.query_key_value")
        heads = qkv.view(batch, sequence, tiny.HEADS, -1).transpose(1, 2)
        context = functional.scaled_dot_product_attention(*heads.chunk(3, dim=-1), is_causal=True)
        context = context.transpose(1, 2).reshape(batch, sequence, tiny.HIDDEN)
        x = x + linear(context, f"{layer}.self_attention.dense")
        hidden = linear(norm(x, f"{layer}.post_attention_layernorm"), f"{layer}.mlp.dense_h_to_4h")
        x = x + linear(functional.gelu(hidden), f"{layer}.mlp.dense_4h_to_h")
    return norm(x, "transformer.layernorm_f") @ words.T


def main() -> None:
    p = {
        name: torch.tensor(value, dtype=torch.float64, requires_grad=True)
        for name, value in tiny.parameters().items()
    }
    optimizer = torch.optim.AdamW(p.values(), lr=tiny.LEARNING_RATE, weight_decay=tiny.WEIGHT_DECAY)
    data = torch.from_numpy(tiny.batches())

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(
            logits(p, batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
        )

    losses = []
    for batch in data:
        loss = loss_of(batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(p.values(), tiny.CLIP_NORM)
        optimizer.step()
        losses.append(loss.item())
    after = loss_of(data[0]).item()
    FILE.write_text(json.dumps({"losses": losses, "evaluation": after}, indent=1) + "\n")


if __name__ == "__main__":
    main()
