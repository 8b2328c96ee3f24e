"""What a training step takes, by a model's sizes: multiply-accumulates, FLOPs, bytes of memory.

The log's MFU, `--dry_run` of vit_10b and `--estimate` of the Llama count by these formulas;
`macs.py` finds the multiply-accumulates of a model that is there.
"""

from __future__ import annotations

# Bytes of a number.
FLOAT32 = 4
# One multiply-accumulate is a multiplication and an addition.
FLOPS_PER_MAC = 2


def attention_macs(tokens: int, width: int) -> int:
    """Multiply-accumulates of query key^T and of weights value for one sequence: tokens^2 width
    each, whatever the number of heads, which are `width` wide together. What a causal rule hides is
    counted."""
    return 2 * tokens * tokens * width


def transformer_macs(weights: int, layers: int, width: int, tokens: int) -> int:
    """Multiply-accumulates of a forward pass of one token in a sequence of so many: it meets each
    of the `weights` once, and each of the `layers` has attention `width` wide."""
    return weights + layers * attention_macs(tokens, width) // tokens


def training_flops(macs: float) -> float:
    """FLOPs of training by the multiply-accumulates of a forward pass: the backward pass multiplies
    once for the gradient of the weights, and once for the inputs'. For a transformer this is
    6 N + 12 L h T for each token (Chowdhery et al. 2022, "PaLM", appendix B)."""
    return 3 * FLOPS_PER_MAC * macs


def adamw_states(parameters: int) -> dict[str, int]:
    """Bytes of so many weights, their gradients, and what AdamW keeps, all in float32."""
    size = FLOAT32 * parameters
    return {"weights": size, "gradients": size, "AdamW's moments": 2 * size}
