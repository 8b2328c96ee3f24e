"""The models' forward passes in numpy at float64, from the papers' formulas and a state dict."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from scipy.special import erf

State = Mapping[str, np.ndarray]


def monarch(x: np.ndarray, first: np.ndarray, second: np.ndarray, out_features: int) -> np.ndarray:
    """Slot t is in block t div q, then in block t mod l, whose output j is j l + (t mod l)."""
    (k, q, p), (blocks, s, _) = first.shape, second.shape
    padded = np.concatenate([x, np.zeros((*x.shape[:-1], k * p - x.shape[-1]))], axis=-1)
    y = np.zeros((*x.shape[:-1], blocks * s))
    for slot in range(k * q):
        kappa, lam = slot // q, slot % blocks
        middle = padded[..., kappa * p : (kappa + 1) * p] @ first[kappa, slot % q]
        y[..., lam::blocks] += middle[..., None] * second[lam, :, slot // blocks]
    return y[..., :out_features]


def linear(state: State, name: str, x: np.ndarray, out_features: int | None = None) -> np.ndarray:
    """Dense or Monarch, whichever the state dict holds under this name."""
    if f"{name}.weight" in state:
        y = x @ state[f"{name}.weight"].T
    else:
        factors = state[f"{name}.blkdiag1"], state[f"{name}.blkdiag2"]
        bias = state.get(f"{name}.bias")
        width = len(bias) if bias is not None else out_features
        y = monarch(x, *factors, width)
    return y + state.get(f"{name}.bias", 0.0)


def layer_norm(state: State, name: str, x: np.ndarray, eps: float) -> np.ndarray:
    centered = x - x.mean(-1, keepdims=True)
    scaled = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + eps)
    return scaled * state[f"{name}.weight"] + state[f"{name}.bias"]


def gelu(x: np.ndarray) -> np.ndarray:
    return x * (1 + erf(x / np.sqrt(2))) / 2


def softmax(x: np.ndarray) -> np.ndarray:
    exponentials = np.exp(x - x.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def attend(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, heads: int, scale: float
) -> np.ndarray:
    """(N, T, C) three times, to (N, T, C): head h has the h-th part of C."""
    parts = []
    for q, k, v in zip(*(np.split(t, heads, axis=-1) for t in (query, key, value)), strict=True):
        parts.append(softmax(scale * np.einsum("ntc,nsc->nts", q, k)) @ v)
    return np.concatenate(parts, axis=-1)


def mlp(state: State, name: str, x: np.ndarray) -> np.ndarray:
    return linear(state, f"{name}.fc2", gelu(linear(state, f"{name}.fc1", x)))


def block(state: State, name: str, x: np.ndarray, heads: int, eps: float) -> np.ndarray:
    width = x.shape[-1]
    normed = layer_norm(state, f"{name}.norm1", x, eps)
    if f"{name}.attn.qkv.weight" in state:
        parts = np.split(linear(state, f"{name}.attn.qkv", normed), 3, axis=-1)
    else:
        parts = [linear(state, f"{name}.attn.{part}_proj", normed, width) for part in "qkv"]
    mixed = attend(*parts, heads=heads, scale=(width // heads) ** -0.5)
    x = x + linear(state, f"{name}.attn.proj", mixed)
    return x + mlp(state, f"{name}.mlp", layer_norm(state, f"{name}.norm2", x, eps))


def patches(x: np.ndarray, kernel: int, stride: int, padding: int) -> np.ndarray:
    """(N, C, H, W) to (N, places, C kernel kernel), places row by row."""
    x = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    windows = np.lib.stride_tricks.sliding_window_view(x, (kernel, kernel), axis=(2, 3))
    windows = windows[:, :, ::stride, ::stride].transpose(0, 2, 3, 1, 4, 5)
    return windows.reshape(x.shape[0], windows.shape[1] * windows.shape[2], -1)


def embed(state: State, name: str, images: np.ndarray) -> np.ndarray:
    weight = state[f"{name}.proj.weight"]
    flat = patches(images, weight.shape[2], weight.shape[2], 0)
    return flat @ weight.reshape(len(weight), -1).T + state[f"{name}.proj.bias"]


def trunk(
    state: State, tokens: np.ndarray, position: np.ndarray, depth: int, heads: int, eps: float
) -> np.ndarray:
    first = np.broadcast_to(state["cls_token"], (len(tokens), 1, tokens.shape[-1]))
    x = np.concatenate([first, tokens], axis=1) + position
    for index in range(depth):
        x = block(state, f"blocks.{index}", x, heads, eps)
    return linear(state, "head", layer_norm(state, "norm", x, eps)[:, 0])


def vit(state: State, images: np.ndarray, depth: int, heads: int, eps: float) -> np.ndarray:
    tokens = embed(state, "patch_embed", images)
    return trunk(state, tokens, state["pos_embed"], depth, heads, eps)


def mixer(state: State, images: np.ndarray, depth: int, eps: float) -> np.ndarray:
    x = embed(state, "stem", images)
    for index in range(depth):
        name = f"blocks.{index}"
        turned = layer_norm(state, f"{name}.norm1", x, eps).transpose(0, 2, 1)
        x = x + mlp(state, f"{name}.mlp_tokens", turned).transpose(0, 2, 1)
        x = x + mlp(state, f"{name}.mlp_channels", layer_norm(state, f"{name}.norm2", x, eps))
    return linear(state, "head", layer_norm(state, "norm", x, eps).mean(1))


def token_transformer(state: State, name: str, x: np.ndarray) -> np.ndarray:
    normed = layer_norm(state, f"{name}.norm1", x, 1e-5)
    query, key, value = np.split(linear(state, f"{name}.attn.qkv", normed), 3, axis=-1)
    mixed = attend(query, key, value, heads=1, scale=x.shape[-1] ** -0.5)
    x = value + linear(state, f"{name}.attn.proj", mixed)
    return x + mlp(state, f"{name}.mlp", layer_norm(state, f"{name}.norm2", x, 1e-5))


def token_performer(
    state: State, name: str, x: np.ndarray, local: np.ndarray | float = 0.0
) -> np.ndarray:
    """`local` is added between the attention and the MLP."""
    normed = layer_norm(state, f"{name}.norm1", x, 1e-5)
    key, query, value = np.split(linear(state, f"{name}.kqv", normed), 3, axis=-1)
    w = state[f"{name}.w"]

    def phi(t: np.ndarray) -> np.ndarray:
        return np.exp(t @ w.T - (t**2).sum(-1, keepdims=True) / 2) / np.sqrt(len(w))

    # As attention with a matrix of weights over all pairs of tokens.
    weights = phi(query) @ phi(key).transpose(0, 2, 1)
    mixed = weights @ value / (weights.sum(-1, keepdims=True) + 1e-8)
    x = value + linear(state, f"{name}.proj", mixed) + local
    hidden = gelu(linear(state, f"{name}.mlp.0", layer_norm(state, f"{name}.norm2", x, 1e-5)))
    return x + linear(state, f"{name}.mlp.2", hidden)


def sinusoid(tokens: int, width: int) -> np.ndarray:
    table = np.zeros((tokens, width))
    for position in range(tokens):
        for column in range(width):
            angle = position / 10000 ** (2 * (column // 2) / width)
            table[position, column] = np.cos(angle) if column % 2 else np.sin(angle)
    return table


def t2t(
    state: State,
    images: np.ndarray,
    depth: int,
    heads: int,
    attention: Callable[[State, str, np.ndarray], np.ndarray],
) -> np.ndarray:
    """For images whose three maps are squares."""

    def as_map(x: np.ndarray) -> np.ndarray:
        side = int(np.sqrt(x.shape[1]))
        return x.transpose(0, 2, 1).reshape(len(x), -1, side, side)

    x = attention(state, "patch_embed.attention1", patches(images, 7, 4, 2))
    x = attention(state, "patch_embed.attention2", patches(as_map(x), 3, 2, 1))
    tokens = linear(state, "patch_embed.project", patches(as_map(x), 3, 2, 1))
    position = sinusoid(tokens.shape[1] + 1, tokens.shape[2])
    return trunk(state, tokens, position, depth, heads, 1e-5)
