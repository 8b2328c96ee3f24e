"""Changes of the layout of a global tensor: all that tensor-parallel ranks exchange goes through
here."""

from __future__ import annotations

from collections.abc import Sequence

import oneflow as flow


def relayout(x: flow.Tensor, axis: int, sbp: flow.sbp.sbp) -> flow.Tensor:
    """`x` with `sbp` on one axis of its placement; on the others it stays as it is.

    The gradient goes back the same way: OneFlow would leave it in the layout in which it arrives,
    and the next operator would gather it.

    Args:
        x: global, eager or of a graph.
        axis: which axis of the placement, counted from 0.
        sbp: split(dim) or broadcast.
    """
    if x.sbp[axis] == sbp:
        return x
    target = [sbp if i == axis else each for i, each in enumerate(x.sbp)]
    # The gradient of parts of a sum is whole on each rank.
    back = [flow.sbp.broadcast if each == flow.sbp.partial_sum else each for each in x.sbp]
    return x.to_global(sbp=target, grad_sbp=back)


def read(parameter: flow.Tensor, sbp: Sequence[flow.sbp.sbp]) -> flow.Tensor:
    """The value of a parameter for one forward pass, in the layout it was made with.

    ZeRO leaves the parameters of a trained model split. A graph of several processes on CPUs aborts
    where a variable itself is sent to another one, so it is read through an identity operator.

    Args:
        parameter: global; of a graph or eager.
        sbp: the layout it was made with.
    """
    value = parameter
    if parameter.is_lazy and flow.env.get_world_size() > 1:
        value = flow._C.identity(parameter)
    return value if tuple(value.sbp) == tuple(sbp) else value.to_global(sbp=list(sbp))
