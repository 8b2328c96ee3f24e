"""Monarch and block-diagonal layers on OneFlow's global tensors, their blocks split over
tensor-parallel ranks.

Rank d of P holds blocks d k/P to (d+1) k/P - 1 of blkdiag1 and d l/P to (d+1) l/P - 1 of blkdiag2.
Stage 1 takes the features of the rank's own blocks, which lie side by side. Stage 2's block lambda
takes the slots t with t mod l = lambda, which come from all blocks of stage 1: this permutation is
the one exchange between the stages, an all-to-all. The output feature sigma l + lambda comes from
block lambda: as a grid (s, l) it is split over its last axis, that is, a rank has every feature
whose number mod l is in its range.

What works element by element (bias, GELU, dropout) takes the grid as it is. Another Monarch layer
needs features side by side, and each of its blocks has features of every residue: `features` turns
the grid by a second all-to-all, or gathers it where all ranks need all features. A layer that
instead took its blocks by residue would be another matrix.

With P ranks, changing how w numbers are split costs w (P - 1) / P numbers on all links together,
and giving w numbers to every rank w (P - 1). So the pair 768 -> 3072 -> 768 with a whole input and
output moves 3072 numbers per token on 2 ranks and 5760 on 4 in the forward pass, and as many back;
a pair of dense layers, with 3.2 times the products, moves 1536 and 4608.
"""

from __future__ import annotations

from oneflow_accel.errors import UserError
from oneflow_accel.kernels.monarch import monarch_multiply

import oneflow as flow
from oneflow import nn

from monarch_flow.layers import BlockdiagLinear, MonarchLinear, StructuredLinear

WHOLE, SPLIT = "whole", "split"


def relayout(x: flow.Tensor, axis: int, sbp: flow.sbp.sbp) -> flow.Tensor:
    """`x` with `sbp` on one axis of its placement; on the others it stays as it is.

    The gradient goes back the same way: OneFlow would leave it in the layout in which it arrives,
    and the next operator would gather it.
    """
    if x.sbp[axis] == sbp:
        return x
    target = [sbp if i == axis else each for i, each in enumerate(x.sbp)]
    # The gradient of parts of a sum is whole on each rank.
    back = [flow.sbp.broadcast if each == flow.sbp.partial_sum else each for each in x.sbp]
    return x.to_global(sbp=target, grad_sbp=back)


def check_blocks(nblocks: int, ranks: int) -> None:
    """Raise UserError where the ranks cannot share the blocks; it names numbers that fit."""
    if nblocks % ranks == 0:
        return
    fitting = [size for size in range(1, nblocks + 1) if nblocks % size == 0]
    raise UserError(
        f"a Monarch layer of nblocks={nblocks} cannot be split over a tensor-parallel world size "
        f"of {ranks}: each process holds as many blocks; take an nblocks that {ranks} divides, "
        f"such as {-(-nblocks // ranks) * ranks}, or {', '.join(map(str, fitting))} processes"
    )


def split_multiply(
    x: flow.Tensor, blkdiag1: flow.Tensor, blkdiag2: flow.Tensor, axis: int
) -> flow.Tensor:
    """x M^T for the Monarch matrix M of two factors (Dao et al. 2022, section 3.1).

    The two batched products are plain operators, so that eager mode, nn.Graph and every device take
    them.

    Args:
        x: (..., k p), global; on `axis` split over its features, or whole, of which each rank takes
            its part without an exchange.
        blkdiag1: (k, q, p), split over k on `axis`.
        blkdiag2: (l, s, r), split over l on `axis`; l r = k q.

    Returns:
        The grid (..., s, l) of features s l, split over its last axis on `axis`.

    Raises:
        UserError: the ranks do not divide k or l.
    """
    blocks1, _, width1 = blkdiag1.shape
    blocks2, outer, width2 = blkdiag2.shape
    ranks = rank_count(x.placement, axis)
    for blocks in (blocks1, blocks2):
        check_blocks(blocks, ranks)
    lead = tuple(x.shape[:-1])
    x = relayout(x, axis, flow.sbp.split(x.ndim - 1))
    rows = x.reshape(-1, blocks1, width1).permute(1, 0, 2)
    slots = flow._C.matmul(rows, blkdiag1, transpose_b=True).permute(1, 0, 2)
    middle = exchange_slots(slots, blocks2, width2, axis)
    out = flow._C.matmul(middle, blkdiag2, transpose_b=True)
    return out.permute(1, 2, 0).reshape(*lead, outer, blocks2)


def exchange_slots(slots: flow.Tensor, blocks: int, width: int, axis: int) -> flow.Tensor:
    """The permutation between the factors, with `blocks` = l and `width` = r, l r = k q.

    Stage 1's `slots` (rows, k, q), split over k on `axis`, become stage 2's (l, rows, r), split
    over l: slot rho l + lambda at (lambda, rho).
    """
    if width % rank_count(slots.placement, axis):
        # A rank's slots end within a row of the grid, so no axis of the grid has their split.
        slots = relayout(slots, axis, flow.sbp.broadcast)
    grid = slots.reshape(-1, width, blocks).permute(2, 0, 1)
    return relayout(grid, axis, flow.sbp.split(0))


def features(grid: flow.Tensor, axis: int, *, split: bool) -> flow.Tensor:
    """The grid (..., s, l) of `split_multiply` as features (..., s l) side by side. `split` leaves
    each rank its part of them, where the ranks divide s; otherwise all ranks get all."""
    outer, blocks = grid.shape[-2:]
    split = split and outer % rank_count(grid.placement, axis) == 0
    grid = relayout(grid, axis, flow.sbp.split(grid.ndim - 2) if split else flow.sbp.broadcast)
    return grid.reshape(*grid.shape[:-2], outer * blocks)


def rank_count(placement: flow.placement, axis: int) -> int:
    return int(placement.ranks.shape[axis])


class _ParallelLinear(StructuredLinear):
    """The function of the layer it is made of, with the blocks split over ranks.

    Names and logical shapes of its parameters are that layer's, so that state dicts fit both. Its
    input may be whole on the tensor-parallel ranks or split over its features. Its output is whole,
    or split over its features as another such layer takes them; GELU between the two needs no
    exchange.

    Args:
        layer: local, the same on each rank, as one seed makes it; otherwise the first rank's
            counts.
        placement: the ranks. Others make the layer too and hold nothing.
        axis: the placement's axis of tensor-parallel ranks; on the others the layer is repeated
            (data parallelism). None: repeated on all of them.
        output: "whole" or "split".

    Raises:
        UserError: the ranks do not divide the number of blocks.
    """

    def __init__(
        self,
        layer: MonarchLinear | BlockdiagLinear,
        placement: flow.placement,
        axis: int | None = 0,
        output: str = WHOLE,
    ) -> None:
        nn.Module.__init__(self)
        if output not in (WHOLE, SPLIT):
            raise UserError(f"output is {output!r}; it is '{WHOLE}' or '{SPLIT}'")
        for name, value in vars(layer).items():
            # Widths and switches.
            if isinstance(value, int) and name != "training" and not name.startswith("_"):
                setattr(self, name, value)
        self.axis, self.output = axis, output
        if axis is not None:
            check_blocks(self.nblocks, rank_count(placement, axis))
        self._layouts: dict[str, list[flow.sbp.sbp]] = {}
        everywhere = [flow.sbp.broadcast] * len(placement.ranks.shape)
        if layer.bias is None:
            self.register_parameter("bias", None)
        for name, parameter in layer.named_parameters():
            layout = list(everywhere)
            if axis is not None and (name != "bias" or output == SPLIT):
                layout[axis] = flow.sbp.split(0)
            self._layouts[name] = layout
            # Copy, as training must not change the layer it was made of.
            value = parameter.detach().clone().to_global(placement=placement, sbp=everywhere)
            value = value if layout == everywhere else value.to_global(sbp=layout)
            self.register_parameter(name, nn.Parameter(value, parameter.requires_grad))

    def read_bias(self) -> flow.Tensor | None:
        """The bias for one forward pass, split as the output is."""
        return None if self.bias is None else self.read("bias")

    def read(self, name: str) -> flow.Tensor:
        """A parameter for one forward pass, in the layout that it was made with.

        ZeRO leaves the parameters of a trained model split. A graph of several processes on CPUs
        aborts where a variable itself is sent to another one, so it is read through an identity
        operator.
        """
        value, layout = getattr(self, name), self._layouts[name]
        if value.is_lazy and flow.env.get_world_size() > 1:
            value = flow._C.identity(value)
        return value if tuple(value.sbp) == tuple(layout) else value.to_global(sbp=layout)

    def on_ranks(self, x: flow.Tensor, axis: int) -> flow.Tensor:
        """The input with zeros for the widths that the blocks add, split as the blocks are."""
        if self.in_features_extended != self.in_features:
            x = self.pad(relayout(x, axis, flow.sbp.broadcast))
        return relayout(x, axis, flow.sbp.split(x.ndim - 1))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, axis={self.axis}, output={self.output}"


class ParallelMonarchLinear(_ParallelLinear, MonarchLinear):
    """A MonarchLinear with its blocks split over ranks."""

    def with_bias(self, x: flow.Tensor) -> flow.Tensor:
        if self.axis is None:
            return self._repeated(x, self.read_bias())
        return self.add_bias(self.matmul(x))

    def matmul(self, x: flow.Tensor) -> flow.Tensor:
        """x M^T without the bias, for a global x (..., in_features) of 2 or more axes. The result
        (..., out_features) is on `axis` whole or split over its last axis, as `output` says."""
        if self.axis is None:
            return self._repeated(x, None)
        factors = self.read("blkdiag1"), self.read("blkdiag2")
        grid = split_multiply(self.on_ranks(x, self.axis), *factors, self.axis)
        split = self.output == SPLIT
        cropped = self.out_features_extended != self.out_features
        y = self.crop(features(grid, self.axis, split=split and not cropped))
        return relayout(y, self.axis, flow.sbp.split(y.ndim - 1)) if split else y

    def _repeated(self, x: flow.Tensor, bias: flow.Tensor | None) -> flow.Tensor:
        factors = self.read("blkdiag1"), self.read("blkdiag2")
        return monarch_multiply(x, *factors, bias, out_features=self.out_features)


class ParallelBlockdiagLinear(_ParallelLinear, BlockdiagLinear):
    """A BlockdiagLinear with its blocks split over ranks: only padding and a whole output need an
    exchange. The layer must not shuffle."""

    def matmul(self, x: flow.Tensor) -> flow.Tensor:
        """As ParallelMonarchLinear's."""
        assert not self.shuffle, "a rank has the inputs of its own blocks only"
        weight = self.read("weight")
        x = self.pad(x) if self.axis is None else self.on_ranks(x, self.axis)
        blocks, block_out, block_in = weight.shape
        rows = x.reshape(-1, blocks, block_in).permute(1, 0, 2)
        out = flow._C.matmul(rows, weight, transpose_b=True).permute(1, 0, 2)
        y = out.reshape(*x.shape[:-1], blocks * block_out)
        if self.axis is None:
            return self.crop(y)
        if self.output == WHOLE or self.out_features_extended != self.out_features:
            y = self.crop(relayout(y, self.axis, flow.sbp.broadcast))
        split = flow.sbp.split(y.ndim - 1)
        return relayout(y, self.axis, split) if self.output == SPLIT else y
