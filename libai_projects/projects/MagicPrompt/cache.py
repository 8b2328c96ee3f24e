"""What generation keeps from step to step: keys and values of each layer, or only the tokens."""

from __future__ import annotations

import numpy as np
import oneflow as flow


class KeyValueCache:
    """Keys and values of the layers of this process's stage.

    They grow by concatenation: a buffer of the full length would have to be made contiguous for the
    attention operator at every step, which copies as much.

    Attributes:
        batch_size: rows.
        length: tokens held of each row.
    """

    def __init__(self, batch_size: int, layers: int) -> None:
        self.batch_size = batch_size
        self.length = 0
        self._pairs: list[tuple[flow.Tensor, flow.Tensor] | None] = [None] * layers

    def held(self, layer: int) -> tuple[flow.Tensor, flow.Tensor] | None:
        """A layer's keys and values, None before its first ones."""
        return self._pairs[layer]

    def replace(self, layer: int, key: flow.Tensor, value: flow.Tensor) -> None:
        """Hold these of a layer."""
        self._pairs[layer] = (key, value)

    def extend(
        self, layer: int, key: flow.Tensor, value: flow.Tensor
    ) -> tuple[flow.Tensor, flow.Tensor]:
        """Append (batch, heads, new, head_size) to a layer and return all of it."""
        held = self._pairs[layer]
        if held is not None:
            key, value = flow._C.concat([held[0], key], 2), flow._C.concat([held[1], value], 2)
        self.replace(layer, key, value)
        return key, value

    def select(self, rows: np.ndarray) -> None:
        """Keep, reorder or repeat rows."""
        self.batch_size = len(rows)
        for layer, held in enumerate(self._pairs):
            if held is not None:
                index = flow.tensor(rows, dtype=flow.int64, device=held[0].device)
                self._pairs[layer] = (
                    flow._C.gather(held[0], index, axis=0),
                    flow._C.gather(held[1], index, axis=0),
                )


class TokenCache:
    """The tokens and their positions, for computing everything again at every step.

    Attributes:
        batch_size: rows.
        ids: (batch, length) int64.
        positions: likewise.
    """

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.ids = np.empty((batch_size, 0), dtype=np.int64)
        self.positions = self.ids

    @property
    def length(self) -> int:
        return int(self.ids.shape[1])

    def extend(self, ids: np.ndarray, positions: np.ndarray) -> None:
        """Append (batch, new) tokens."""
        self.ids = np.concatenate([self.ids, ids], axis=1)
        self.positions = np.concatenate([self.positions, positions], axis=1)

    def select(self, rows: np.ndarray) -> None:
        """Keep, reorder or repeat rows."""
        self.ids, self.positions = self.ids[rows], self.positions[rows]
        self.batch_size = len(rows)
