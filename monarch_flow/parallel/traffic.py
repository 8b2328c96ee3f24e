"""What ranks exchange for a split Monarch layer, per row (token), from shapes alone.

With P ranks, changing how w numbers are split costs w (P - 1) / P numbers on all links together
(all-to-all: each rank keeps 1/P of its w/P); giving w numbers to every rank costs w (P - 1)
(all-gather). A pair of dense layers split by columns, then by rows, costs one all-reduce of its
output instead, 2 w (P - 1).

So the pair 768 -> 3072 -> 768 with a whole input and output moves 3072 numbers per token on 2 ranks
and 5760 on 4 in the forward pass, and as many back; dense layers, with 3.2 times the products, move
1536 and 4608.
"""

from __future__ import annotations

from dataclasses import dataclass

from monarch_flow.layers import monarch_shapes


@dataclass(frozen=True)
class Traffic:
    """Bytes that all ranks together receive for one row.

    `input` brings x to each rank's blocks, `permutation` goes between the factors, and `output`
    brings the grid of outputs to the layer's result.
    """

    input: int
    permutation: int
    output: int

    @property
    def total(self) -> int:
        return self.input + self.permutation + self.output


def forward_traffic(
    in_features: int,
    out_features: int,
    nblocks: int,
    ranks: int,
    *,
    split_input: bool = False,
    split_output: bool = False,
    itemsize: int = 4,
) -> Traffic:
    """The forward pass of a ParallelMonarchLinear; `ranks` must divide `nblocks`. An input or
    output that is not split is whole on each rank; `itemsize` is bytes per number."""
    sizes = _Sizes(in_features, out_features, nblocks, ranks)
    given = 0
    if split_input and sizes.padded_input:
        given = _all_gather(in_features, ranks)
    if split_output and sizes.even_output:
        returned = _all_to_all(sizes.output, ranks)
    else:
        returned = _all_gather(sizes.output, ranks)
    return Traffic(given * itemsize, sizes.permutation * itemsize, returned * itemsize)


def backward_traffic(
    in_features: int,
    out_features: int,
    nblocks: int,
    ranks: int,
    *,
    split_input: bool = False,
    split_output: bool = False,
    itemsize: int = 4,
) -> Traffic:
    """The backward pass: the way of `forward_traffic` back. A whole input gathers its gradient from
    the ranks; a whole output has its gradient on each rank already."""
    sizes = _Sizes(in_features, out_features, nblocks, ranks)
    given = _all_gather(sizes.input, ranks)
    if split_input and not sizes.padded_input:
        given = 0
    returned = 0
    if split_output:
        returned = (
            _all_to_all(sizes.output, ranks)
            if sizes.even_output
            else _all_gather(out_features, ranks)
        )
    return Traffic(given * itemsize, sizes.permutation * itemsize, returned * itemsize)


class _Sizes:
    """Widths of a layer and how they divide."""

    def __init__(self, in_features: int, out_features: int, nblocks: int, ranks: int) -> None:
        (blocks, inner, block_in), (_, block_out, _) = monarch_shapes(
            in_features, out_features, nblocks
        )
        self.input, self.output = blocks * block_in, blocks * block_out
        self.padded_input = self.input != in_features
        self.even_output = self.output == out_features and block_out % ranks == 0
        exchange = _all_gather if inner % ranks else _all_to_all
        self.permutation = exchange(blocks * inner, ranks)


def _all_to_all(width: int, ranks: int) -> int:
    return width * (ranks - 1) // ranks


def _all_gather(width: int, ranks: int) -> int:
    return width * (ranks - 1)
