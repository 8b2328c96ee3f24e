"""GPT-2 (Radford et al. 2019) in float64 numpy, from the paper and Hugging Face's file format.

State dicts are HF-named: `wte.weight`, `h.0.attn.c_attn.weight` ..., linear weights (in, out), the
head tied to `wte.weight` where there is no `lm_head.weight`; a prefix `transformer.` is taken off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

State = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Shape:
    """What a state dict alone does not say, and what `random_state` needs."""

    layers: int = 2
    width: int = 64
    heads: int = 4
    vocabulary: int = 96
    positions: int = 32
    epsilon: float = 1e-5

    def config(self) -> dict[str, int]:
        """The sizes by the keys of `cfg.model.cfg`."""
        return {
            "num_layers": self.layers,
            "vocab_size": self.vocabulary,
            "hidden_size": self.width,
            "ffn_hidden_size": 4 * self.width,
            "num_attention_heads": self.heads,
            "max_seq_length": self.positions,
        }


def random_state(shape: Shape, seed: int = 0, scale: float = 0.1) -> dict[str, np.ndarray]:
    """Normal float32 weights; norms and biases too, so that one left out or mixed up shows."""
    rng = np.random.default_rng(seed)

    def normal(*size: int) -> np.ndarray:
        return (rng.standard_normal(size) * scale).astype(np.float32)

    width = shape.width
    state = {"wte.weight": normal(shape.vocabulary, width)}
    state["wpe.weight"] = normal(shape.positions, width)
    for i in range(shape.layers):
        sizes = {
            "attn.c_attn": (width, 3 * width),
            "attn.c_proj": (width, width),
            "mlp.c_fc": (width, 4 * width),
            "mlp.c_proj": (4 * width, width),
        }
        for name, size in sizes.items():
            state[f"h.{i}.{name}.weight"] = normal(*size)
            state[f"h.{i}.{name}.bias"] = normal(size[1])
        for name in ("ln_1", "ln_2"):
            state[f"h.{i}.{name}.weight"] = 1 + normal(width)
            state[f"h.{i}.{name}.bias"] = normal(width)
    state["ln_f.weight"] = 1 + normal(width)
    state["ln_f.bias"] = normal(width)
    return state


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), Hendrycks and Gimpel 2016."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu_erf(x: np.ndarray) -> np.ndarray:
    """x Phi(x), Hendrycks and Gimpel 2016."""
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def forward(
    state: State,
    ids: np.ndarray,
    heads: int,
    *,
    positions: np.ndarray | None = None,
    mask: np.ndarray | None = None,
    epsilon: float = 1e-5,
    gelu: str = "tanh",
    by_layer: bool = False,
) -> np.ndarray:
    """Logits (batch, time, vocabulary), float64, of tokens `ids` (batch, time) by HF-named weights.

    `positions` are rows of `wpe` (None for 0, 1, 2 ...); `mask` is False at padding, which nobody
    sees, and whose logits are meaningless; `epsilon` is of the layer norms; `gelu` "tanh", "erf" or
    "relu"; `by_layer`: scores of layer i, from 0, are divided by i + 1.
    """
    weights = {k.removeprefix("transformer."): v.astype(np.float64) for k, v in state.items()}
    batch, time = ids.shape
    if positions is None:
        positions = np.broadcast_to(np.arange(time), ids.shape)
    seen = np.broadcast_to(np.tril(np.ones((time, time), dtype=bool)), (batch, time, time))
    if mask is not None:
        # A token always sees itself, else a row of padding would see nothing at all.
        seen = seen & (mask[:, None, :] | np.eye(time, dtype=bool))
    relu = partial(np.maximum, 0.0)
    activation = {"tanh": gelu_tanh, "erf": gelu_erf, "relu": relu}[gelu]
    x = weights["wte.weight"][ids] + weights["wpe.weight"][positions]
    layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("h."))
    for i in range(layers):
        part = {
            name.removeprefix(f"h.{i}."): value
            for name, value in weights.items()
            if name.startswith(f"h.{i}.")
        }
        divisor = i + 1 if by_layer else 1
        x = x + _attention(part, _norm(part, "ln_1", x, epsilon), heads, seen, divisor)
        hidden = activation(_linear(part, "mlp.c_fc", _norm(part, "ln_2", x, epsilon)))
        x = x + _linear(part, "mlp.c_proj", hidden)
    head = weights.get("lm_head.weight", weights["wte.weight"])
    return _norm(weights, "ln_f", x, epsilon) @ head.T


def token_losses(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Cross entropy of each token in nats: logits (..., vocabulary), labels (...) to (...)."""
    top = logits.max(-1, keepdims=True)
    log_sum = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
    return log_sum - np.take_along_axis(logits, labels[..., None], -1)[..., 0]


def greedy(state: State, prompt: list[int], heads: int, new_tokens: int) -> list[int]:
    """`prompt` and the `new_tokens` most likely tokens after it."""
    ids = list(prompt)
    for _ in range(new_tokens):
        ids.append(int(forward(state, np.array([ids]), heads)[0, -1].argmax()))
    return ids


def to_libai(state: State, heads: int, vocabulary: int | None = None) -> dict[str, np.ndarray]:
    """HF-named weights as libai 0.1.1's (libai_spec 3.2), with zero rows up to `vocabulary`."""
    blocks = {
        "ln_1": "input_layernorm",
        "ln_2": "post_attention_layernorm",
        "attn.c_attn": "self_attention.query_key_value",
        "attn.c_proj": "self_attention.dense",
        "mlp.c_fc": "mlp.dense_h_to_4h",
        "mlp.c_proj": "mlp.dense_4h_to_h",
    }
    result = {}
    for full_name, given in state.items():
        name, value = full_name.removeprefix("transformer."), given
        module, _, kind = name.rpartition(".")
        if module == "wte":
            extra = (vocabulary or len(value)) - len(value)
            value = np.pad(value, ((0, extra), (0, 0)))
            target = "embeddings.token_embeddings"
        elif module == "wpe":
            target = "embeddings.position_embeddings"
        elif module == "lm_head":
            target = module
        elif module == "ln_f":
            target = "transformer.layernorm_f"
        else:
            _, layer, part = module.split(".", 2)
            if part == "attn.c_attn":
                parts = value.reshape(*value.shape[:-1], 3, heads, -1)
                value = np.swapaxes(parts, -3, -2).reshape(value.shape)
            target = f"transformer.layers.{layer}.{blocks[part]}"
        result[f"GPT_model.{target}.{kind}"] = np.ascontiguousarray(value)
    return result


def _norm(weights: State, name: str, x: np.ndarray, epsilon: float) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def _linear(weights: State, name: str, x: np.ndarray) -> np.ndarray:
    return x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]


def _attention(
    weights: State, x: np.ndarray, heads: int, seen: np.ndarray, divisor: int
) -> np.ndarray:
    batch, time, width = x.shape
    query, key, value = (
        part.reshape(batch, time, heads, width // heads).transpose(0, 2, 1, 3)
        for part in np.split(_linear(weights, "attn.c_attn", x), 3, axis=-1)
    )
    scores = query @ key.transpose(0, 1, 3, 2) / math.sqrt(width // heads) / divisor
    scores = np.where(seen[:, None], scores, -np.inf)
    odds = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = (odds / odds.sum(-1, keepdims=True)) @ value
    mixed = mixed.transpose(0, 2, 1, 3).reshape(batch, time, width)
    return _linear(weights, "attn.c_proj", mixed)
