"""Changes a global tensor's layout: all that tensor-parallel ranks exchange goes through here."""

from __future__ import annotations

from collections.abc import Sequence

import oneflow as flow


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


def read(parameter: flow.Tensor, sbp: Sequence[flow.sbp.sbp]) -> flow.Tensor:
    """The value of a global parameter for one forward pass, in the layout `sbp` it was made with.

    ZeRO leaves the parameters of a trained model split. A graph of several processes on CPUs aborts
    where a variable itself is sent to another one, so it is read through an identity operator.
    """
    value = parameter
    if parameter.is_lazy and flow.env.get_world_size() > 1:
        value = flow._C.identity(parameter)
    return value if tuple(value.sbp) == tuple(sbp) else value.to_global(sbp=list(sbp))
