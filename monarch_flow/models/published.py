"""Names in published checkpoints that differ from ours."""

from __future__ import annotations

from collections.abc import Mapping

from oneflow_accel.errors import UserError

import numpy as np

_T2T_TOKENS = "tokens_to_token."


def is_published_t2t(state: Mapping[str, np.ndarray]) -> bool:
    return "pos_embed" in state and any(name.startswith(_T2T_TOKENS) for name in state)


def t2t_names(state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A published T2T-ViT's state dict under our names: `tokens_to_token.*` becomes
    `patch_embed.*`, `pos_embed` the buffer `pos_embed.pe`. Raises UserError for any other state
    dict."""
    if "pos_embed.pe" in state:
        raise UserError("these weights have our names already (they have 'pos_embed.pe')")
    if not is_published_t2t(state):
        raise UserError(
            f"not a published T2T-ViT: there is no 'pos_embed' and '{_T2T_TOKENS}*'; it has "
            f"{', '.join(list(state)[:6])} ..."
        )
    renamed = {}
    for name, array in state.items():
        if name == "pos_embed":
            name = "pos_embed.pe"
        elif name.startswith(_T2T_TOKENS):
            name = f"patch_embed.{name.removeprefix(_T2T_TOKENS)}"
        renamed[name] = array
    return renamed
