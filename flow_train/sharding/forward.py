"""How units run: what a unit's module has in the place of its forward method, and the backward
passes that gather a unit's tensors anew, recompute it and reduce its gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from oneflow_accel.precision import autocast_of_now

import oneflow as flow
from oneflow import nn

from flow_train.rng import seed_of
from flow_train.sharding.units import Unit, synchronized


class UnitForward:
    """Runs a unit by the options it was made with."""

    def __init__(self, unit: Unit) -> None:
        self.unit, self._run = unit, unit.module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        unit, options = self.unit, self.unit.options
        # Without gradients the whole tensors are needed for this call only.
        if not flow.is_grad_enabled():
            with unit.gathered(train=False):
                return self._run(*args, **kwargs)
        # Dropout draws by the unit's own seed: a pass that is computed again draws the same.
        _seed(_seed_of(unit))
        with synchronized([unit], train=True):
            # Gathered tensors that autograd keeps stay until the backward pass; recomputing lets go
            # of them here, and gathers them anew there.
            if options.recompute:
                kept = None if options.reshard_after_forward else _all_gathered(unit)
                return _recomputed(unit, self._run, (args, kwargs), kept)
            with unit.unsharded(_all_gathered(unit)):
                return self._run(*args, **kwargs)


class RootForward(UnitForward):
    """The root's tensors, gathered with a gradient, are there as long as the backward pass needs
    them."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        unit = self.unit
        for each in unit.inner:
            each.base_seed = flow.initial_seed()
            # Left by a pass that failed in the middle.
            each.prefetched = None
        train = flow.is_grad_enabled()
        with (
            synchronized([*unit.inner, unit], train),
            unit.unsharded(_all_gathered(unit)) if train else unit.gathered(),
        ):
            return self._run(*args, **kwargs)


class LinearForward(UnitForward):
    """A linear layer that keeps its input for the backward pass and gathers its weight anew."""

    def __call__(self, x: flow.Tensor) -> flow.Tensor:
        unit = self.unit
        if not flow.is_grad_enabled():
            with unit.gathered(train=False):
                return self._run(x)
        wanted = x.requires_grad

        class Linear(flow.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: flow.Tensor, *shards: flow.Tensor) -> flow.Tensor:
                ctx.save_for_backward(x)
                with unit.gathered():
                    return self._run(x)

            @staticmethod
            def backward(ctx: Any, gradient: flow.Tensor) -> Any:
                (x,) = ctx.saved_tensors
                weight, *bias = unit.all_gather(unit.preceding)
                rows, dtype = gradient.reshape(-1, gradient.shape[-1]), gradient.dtype
                # Under autocast the layer has multiplied copies in the dtype of its result.
                of_x = flow.matmul(gradient, weight.to(dtype)).to(x.dtype) if wanted else None
                columns = x.reshape(-1, x.shape[-1]).to(dtype)
                of_weight = flow.matmul(rows, columns, transpose_a=True).to(weight.dtype)
                of_bias = [rows.to(weight.dtype).sum(dim=0)] if bias else []
                del weight, bias
                return (of_x, *unit.reduce_scatter([of_weight, *of_bias]))

        return Linear.apply(x, *unit.parameters)


def _all_gathered(unit: Unit) -> list[flow.Tensor]:
    """A unit's whole tensors, whose gradients go to its shards."""

    # A class of its own for each call: what a context of oneflow 0.9.0 is given as an attribute
    # ends the process in the backward pass, so the state is in closures.
    class AllGather(flow.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *shards: flow.Tensor) -> Any:
            found = unit.all_gather(unit.following)
            return tuple(found) if len(found) > 1 else found[0]

        @staticmethod
        def backward(ctx: Any, *gradients: flow.Tensor) -> Any:
            pieces = unit.reduce_scatter(list(gradients))
            return tuple(pieces) if len(pieces) > 1 else pieces[0]

    if not unit.shards:
        return []
    found = AllGather.apply(*unit.parameters)
    return list(found) if isinstance(found, tuple | list) else [found]


def _recomputed(
    unit: Unit, run: Callable[..., Any], arguments: Any, kept: list[flow.Tensor] | None
) -> Any:
    """`run(*args, **kwargs)` of `arguments`, a pair, computed again in the backward pass from its
    inputs; with `kept` the tensors of the unit stay in between."""
    # A Function takes tensors one by one: those in the arguments first, then the unit's.
    inputs: list[flow.Tensor] = []
    _mapped(arguments, inputs.append)
    count = len(inputs)
    shards = [shard.parameter for shard in unit.shards for _ in shard.places]
    wanted = [x.requires_grad for x in [*inputs, *(shards if kept is None else kept)]]
    seed = _seed_of(unit)
    autocast = autocast_of_now(inputs[0])

    def call(given: Sequence[flow.Tensor]) -> Any:
        each = iter(given)
        values, named = _mapped(arguments, lambda _: next(each))
        return run(*values, **named)

    class Recompute(flow.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: flow.Tensor) -> Any:
            ctx.save_for_backward(*(tensors if kept is not None else tensors[:count]))
            with unit.gathered() if kept is None else unit.unsharded(tensors[count:]):
                return call(tensors[:count])

        @staticmethod
        def backward(ctx: Any, *gradients: flow.Tensor) -> Any:
            # The same pass once more, from the saved inputs and with the same draws, this time with
            # a graph of its own; its gradients end in `leaves`.
            saved = ctx.saved_tensors
            own = saved[count:] if kept is not None else unit.all_gather(unit.preceding)
            leaves = list(map(_leaf, [*saved[:count], *own], wanted))
            own = leaves[count:]
            with flow.enable_grad(), unit.unsharded(own), _once_more(unit.module, seed), autocast():
                out = call(leaves[:count])
            outs = list(out) if isinstance(out, tuple | list) else [out]
            found = _gradients(outs, gradients, leaves)
            # The whole tensors and activations go before the gradients are sent: both at once would
            # be the step's largest moment.
            del out, outs, own, leaves
            of_inputs, of_own = found[:count], found[count:]
            del found
            result = (*of_inputs, *(of_own if kept is not None else unit.reduce_scatter(of_own)))
            return result if len(result) > 1 else result[0]

    return Recompute.apply(*inputs, *(unit.parameters if kept is None else kept))


def _mapped(value: Any, change: Callable[[flow.Tensor], Any]) -> Any:
    """`value` with `change` of each tensor in it, also in tuples, lists and dicts."""
    if isinstance(value, flow.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(each, change) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return type(value)([_mapped(each, change) for each in value])
    return value


def _leaf(tensor: flow.Tensor, wanted: bool) -> flow.Tensor:
    """The same numbers, in no graph yet. `detach` of oneflow 0.9.0 forgets where in its memory a
    view begins, so that views of what it gives are of other numbers."""
    with flow.no_grad():
        offset = 0 if tensor.is_global else tensor.storage_offset()
        found = tensor.detach()
        if offset:
            found = tensor.as_strided(tensor.shape, tensor.stride(), offset)
    return found.requires_grad_(wanted)


def _gradients(
    outs: Sequence[flow.Tensor], gradients: Sequence[flow.Tensor], leaves: Sequence[flow.Tensor]
) -> list[flow.Tensor | None]:
    """Of all leaves that want one, zeros where the outputs do not depend on it."""
    # OneFlow refuses a leaf that no operation has used, and gives a number, of any value, for one
    # that the outputs do not depend on.
    used = [leaf for leaf in leaves if leaf.requires_grad and leaf.grad_fn is not None]
    pairs = [pair for pair in zip(outs, gradients, strict=True) if pair[0].requires_grad]
    found = {}
    if used and pairs:
        ends, of_ends = map(list, zip(*pairs, strict=True))
        found = dict(zip(map(id, used), flow.autograd.grad(ends, used, of_ends), strict=True))
    result = []
    for leaf in leaves:
        gradient = found.pop(id(leaf), None)
        if leaf.requires_grad and (gradient is None or gradient.shape != leaf.shape):
            gradient = flow.zeros_like(leaf)
        result.append(gradient)
    return result


@contextlib.contextmanager
def _once_more(module: nn.Module, seed: int | None) -> Iterator[None]:
    """Inside, a module draws by `seed`, as it did the first time; afterwards its buffers, such as
    running statistics, and the seed are as before."""
    buffers = [b for m in module.modules() if m.training for b in m.buffers(recurse=False)]
    values = [buffer.clone() for buffer in buffers]
    before = flow.initial_seed()
    _seed(seed)
    try:
        yield
    finally:
        _seed(None if seed is None else before)
        with flow.no_grad():
            for buffer, value in zip(buffers, values, strict=True):
                buffer.copy_(value)


def _seed(seed: int | None) -> None:
    """Draw by `seed` from here on; what was asked for before, whose kernels may not have run, is
    drawn before."""
    if seed is not None:
        flow._oneflow_internal.eager.Sync()
        flow.manual_seed(seed)


def _seed_of(unit: Unit) -> int | None:
    """What a unit's random numbers of this forward pass hang on; None where it draws none, by
    dropout and the like."""
    for each in unit.module.modules():
        draws = isinstance(each, nn.Dropout) or getattr(each, "draws_random_factors", False)
        if draws and each.training and getattr(each, "p", 0) > 0:
            return seed_of(f"oneflow_accel {unit.base_seed}, unit {unit.name}")
    return None
