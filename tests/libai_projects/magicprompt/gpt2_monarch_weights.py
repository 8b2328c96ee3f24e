"""Weights of a GPT-2 with Monarch or block-diagonal layers, and the dense one of that function."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from tests.libai_projects import reference_gpt2
from tests.libai_projects.reference_gpt2 import Shape

LINEAR = {
    "attn.c_attn": "self_attention.query_key_value",
    "attn.c_proj": "self_attention.dense",
    "mlp.c_fc": "mlp.dense_h_to_4h",
    "mlp.c_proj": "mlp.dense_4h_to_h",
}
QKV_PARTS = ("q_proj", "k_proj", "v_proj")


def dense(blkdiag1: np.ndarray, blkdiag2: np.ndarray) -> np.ndarray:
    """The matrix (out, in) of two factors, float64, entry by entry (monarch_spec 1.1)."""
    blocks1, inner, width1 = blkdiag1.shape
    blocks2, outer, width2 = blkdiag2.shape
    result = np.zeros((outer * blocks2, blocks1 * width1))
    for slot in range(blocks2 * width2):
        (kappa, iota), (rho, lam) = divmod(slot, inner), divmod(slot, blocks2)
        columns = slice(kappa * width1, (kappa + 1) * width1)
        result[lam::blocks2, columns] += np.outer(
            blkdiag2[lam, :, rho].astype(np.float64), blkdiag1[kappa, iota]
        )
    return result


def block_diagonal(blocks: np.ndarray) -> np.ndarray:
    """The matrix (out, in) with these blocks on its diagonal, padding included."""
    count, rows, columns = blocks.shape
    result = np.zeros((count * rows, count * columns))
    for index, block in enumerate(blocks):
        at = slice(index * rows, (index + 1) * rows), slice(index * columns, (index + 1) * columns)
        result[at] = block
    return result


def _matrix(given: Mapping[str, np.ndarray], below: str) -> np.ndarray:
    if f"{below}blkdiag1" in given:
        return dense(given[f"{below}blkdiag1"], given[f"{below}blkdiag2"])
    return block_diagonal(given[f"{below}weight"])


def of_model(
    shapes: Mapping[str, Iterable[int]], shape: Shape, scale: float = 0.1, rows: int | None = None
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A model's weights by its parameters' `shapes`, and HF-named dense ones of the same function.

    `scale` is of the dense weights; `rows` of the token embedding, None for the vocabulary's.
    """
    dense_state = reference_gpt2.random_state(shape, scale=scale)
    state = reference_gpt2.to_libai(dense_state, shape.heads, rows)
    rng = np.random.default_rng(11)
    given = {}
    for name, sizes in shapes.items():
        if name in state and state[name].shape == tuple(sizes):
            given[name] = state[name]
            continue
        sizes = tuple(sizes)
        sigma = scale if len(sizes) == 1 else sizes[-1] ** -0.5
        given[name] = (sigma * rng.standard_normal(sizes)).astype(np.float32)
    for layer in range(shape.layers):
        for hf_name, part in LINEAR.items():
            prefix = f"GPT_model.transformer.layers.{layer}.{part}."
            below = [f"{prefix}{name}." for name in QKV_PARTS] if "c_attn" in hf_name else [prefix]
            weight = given.get(f"{below[0]}weight")
            if f"{below[0]}blkdiag1" not in given and (weight is None or weight.ndim == 2):
                continue
            biases = [given[f"{each}bias"] for each in below]
            pairs = zip(below, biases, strict=True)
            matrices = [_matrix(given, each)[: len(bias)] for each, bias in pairs]
            target = f"h.{layer}.{hf_name}"
            width = dense_state[f"{target}.weight"].shape[0]
            dense_state[f"{target}.weight"] = np.concatenate(matrices)[:, :width].T
            dense_state[f"{target}.bias"] = np.concatenate(biases)
    return given, dense_state
