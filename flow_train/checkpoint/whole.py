"""Whole arrays of a job, one at a time, so that no process holds all of them: those of global
tensors on the way to a file, and those of a file on the way to all processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping

from oneflow_accel.agree import on_rank_0, whole

import numpy as np
import oneflow as flow


class Gathered(Mapping[str, np.ndarray]):
    """The values of global tensors on the main process. To read one is a collective call; each is
    read once, in the order of the names, and other processes get nothing of it."""

    def __init__(self, tensors: Mapping[str, flow.Tensor]) -> None:
        self._tensors = dict(tensors)
        self._left = deque(self._tensors)

    def kinds(self) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        """Dtype and shape by name, without a look at the values."""
        found = {}
        for name, tensor in self._tensors.items():
            dtype = np.dtype(flow.convert_oneflow_dtype_to_numpy_dtype(_kind(tensor)))
            found[name] = dtype, tuple(tensor.shape)
        return found

    def __getitem__(self, name: str) -> np.ndarray:
        due = self._left.popleft()
        if name != due:
            raise KeyError(f"{name} is not the next of the tensors to be gathered, {due}")
        tensor = self._tensors[name]
        return whole(tensor).to(_kind(tensor)).numpy()

    def drain(self) -> None:
        """Take part in what another process reads, to the last one."""
        while self._left:
            self[self._left[0]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _kind(tensor: flow.Tensor) -> flow.dtype:
    # NumPy has no bfloat16.
    return flow.float32 if tensor.dtype == flow.bfloat16 else tensor.dtype


class Spread(Mapping[str, np.ndarray]):
    """The arrays that the process `rank` has, on all processes: to read one is a collective call.
    Others give any mapping, and all the same names."""

    def __init__(
        self, arrays: Mapping[str, np.ndarray], names: Collection[str], rank: int = 0
    ) -> None:
        self._arrays, self._names, self._rank = arrays, dict.fromkeys(names), rank

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise KeyError(name)
        return on_rank_0(lambda: self._arrays[name], rank=self._rank)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
