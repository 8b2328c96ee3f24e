"""Parameters, gradients and the optimizer's state cut over the processes of a job: ZeRO stage 3
(Rajbhandari et al. 2020, "ZeRO", section 5), in the form of fully sharded data parallelism (Zhao et
al. 2023, "PyTorch FSDP").

    sharding = fully_shard(model)
    optimizer = flow.optim.AdamW(model.parameters())
    loss(model(images)).backward()
    norm = sharding.clip(1.0)
    optimizer.step()

A *unit* is a module whose tensors are there together: gathered before it runs, freed after it.
What no unit has belongs to the root, which is gathered for a whole step. Each tensor is flattened,
padded with zeros and cut evenly; a process keeps one piece, the *shard*, which takes the tensor's
place among the parameters. So an optimizer over `model.parameters()` is sharded too.

A unit's backward pass gathers its tensors anew, runs the unit once more from its input
(activation checkpointing, Chen et al. 2016) and gives every process its piece of the mean gradient.
A unit with dropout seeds the generators before it runs, so that it draws the same masks again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from oneflow_accel.collectives import Mesh
from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
from oneflow import nn

from flow_train.rng import seed_of

IsUnit = Callable[[str, nn.Module], bool]
# As in PyTorch's and torch_xla's clip_grad_norm_.
_EPSILON = 1e-6
FLAT = "flat_shard"


@dataclass(eq=False)
class Slot:
    """A tensor of a module: where it is set while its unit runs, and its shape."""

    owner: nn.Module
    attribute: str
    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(eq=False)
class Shard:
    """This process's piece of one tensor or, flattened, of several one after the other. `name` is
    that of the parameter, (length,), whose pieces of all processes are `slots`, then zeros."""

    name: str
    parameter: nn.Parameter
    slots: list[Slot]
    length: int

    @property
    def size(self) -> int:
        return sum(slot.size for slot in self.slots)


@dataclass(frozen=True)
class Options:
    """See `fully_shard`."""

    reshard_after_forward: bool = True
    recompute: bool = True
    flatten: bool = False
    multiple: int = 1
    compute_dtype: flow.dtype | None = None
    prefetch: bool = False


class Unit:
    """The tensors of `module` that no unit inside it has."""

    def __init__(
        self, name: str, module: nn.Module, taken: Sequence[nn.Module], mesh: Mesh, options: Options
    ) -> None:
        self.name, self.module, self.mesh, self.options = name, module, mesh, options
        self.shards = self._cut(list(_slots(name, module, taken)))
        # The seed of the forward pass of the whole model.
        self.base_seed = 0
        # Full gradients that `no_sync` has kept, by shard.
        self._waiting: dict[int, flow.Tensor] = {}
        self.syncs = True

    def _cut(self, slots: list[Slot]) -> list[Shard]:
        """Put shards in the place of the tensors, whose memory is freed."""
        groups = [slots] if self.options.flatten and slots else [[slot] for slot in slots]
        shards = []
        for group in groups:
            values = [slot.owner._parameters[slot.attribute] for slot in group]
            pieces = [value.detach().reshape(-1) for value in values]
            whole = flow.cat(pieces) if len(pieces) > 1 else pieces[0]
            length = self._length(whole.numel())
            whole = _padded(whole, length * self.mesh.shards)
            own = whole[self.mesh.place * length :][:length].clone()
            parameter = nn.Parameter(own, requires_grad=values[0].requires_grad)
            for slot in group:
                slot.owner._parameters.pop(slot.attribute)
            if len(group) > 1:
                self.module.register_parameter(FLAT, parameter)
                name = f"{self.name}.{FLAT}".lstrip(".")
            else:
                # Under the tensor's own name.
                group[0].owner.register_parameter(group[0].attribute, parameter)
                name = group[0].name
            shards.append(Shard(name, parameter, group, length))
        return shards

    def _length(self, numbers: int) -> int:
        every = self.mesh.shards * self.options.multiple
        return -(-numbers // every) * self.options.multiple

    def gather(self) -> list[flow.Tensor]:
        """The whole tensors, in the order of the slots; a collective call."""
        found = []
        for shard in self.shards:
            part, dtype = shard.parameter.detach(), self.options.compute_dtype
            if dtype is not None and dtype != part.dtype:
                whole = self.mesh.gather(part.to(dtype)).to(part.dtype)
            else:
                whole = self.mesh.gather(part)
            found += _parts(whole, shard.slots)
        return found

    def reduce(self, gradients: Sequence[flow.Tensor | None]) -> list[flow.Tensor]:
        """Each shard's piece of the mean gradient over all processes, from those of the whole
        tensors, which are emptied; a collective call."""
        given = list(gradients)
        pieces = []
        for number, shard in enumerate(self.shards):
            mine = [given.pop(0) for _ in shard.slots]
            flat = [
                flow.zeros(slot.size, device=shard.parameter.device)
                if gradient is None
                else gradient.reshape(-1)
                for slot, gradient in zip(shard.slots, mine, strict=True)
            ]
            mine.clear()
            whole = flow.cat(flat) if len(flat) > 1 else flat[0]
            flat.clear()
            pieces.append(self._synced(number, shard, whole))
        return pieces

    def _synced(self, number: int, shard: Shard, whole: flow.Tensor) -> flow.Tensor:
        if number in self._waiting:
            whole = whole + self._waiting.pop(number)
        if not self.syncs:
            self._waiting[number] = whole
            return flow.zeros(shard.length, device=whole.device)
        mesh = self.mesh
        return mesh.scatter_sum(_padded(whole, shard.length * mesh.shards)) / mesh.size

    @contextlib.contextmanager
    def showing(self, tensors: Sequence[flow.Tensor]) -> Iterator[None]:
        """Let the module see these in the place of its shards."""
        slots = [slot for shard in self.shards for slot in shard.slots]
        for slot, tensor in zip(slots, tensors, strict=True):
            object.__setattr__(slot.owner, slot.attribute, tensor)
        try:
            yield
        finally:
            for slot in slots:
                object.__delattr__(slot.owner, slot.attribute)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [shard.parameter for shard in self.shards]

    def seed(self) -> int | None:
        """What its random numbers of this forward pass hang on; None where it draws none."""
        if not _draws(self.module):
            return None
        return seed_of(f"oneflow_accel {self.base_seed}, unit {self.name}")


class Sharding:
    """A model that `fully_shard` has cut. `units` are in the order of the modules, the root last.

    `full_shapes` has the shape of each tensor by its name, as parameters are now one-dimensional.
    """

    def __init__(self, model: nn.Module, units: list[Unit], mesh: Mesh) -> None:
        self.model, self.units, self.mesh = model, units, mesh
        slots = [slot for unit in units for shard in unit.shards for slot in shard.slots]
        self.full_shapes = {slot.name: slot.shape for slot in slots}

    @property
    def shards(self) -> list[Shard]:
        return [shard for unit in self.units for shard in unit.shards]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in it exchange nothing: every process keeps its own whole gradients,
        which the next backward pass outside adds to its own. Costs the memory of all gradients."""
        for unit in self.units:
            unit.syncs = False
        try:
            yield
        finally:
            for unit in self.units:
                unit.syncs = True

    def gradient_norm(self) -> flow.Tensor:
        """The norm of all gradients as if they were one vector, on every process, (1,) float32; a
        collective call."""
        squares = [
            (shard.parameter.grad * shard.parameter.grad).sum().reshape(1)
            for shard in self.shards
            if shard.parameter.grad is not None
        ]
        own = sum(squares[1:], squares[0]) if squares else flow.zeros(1)
        # Replicas have the same pieces.
        return (self.mesh.sum(own) / self.mesh.replicas).sqrt()

    def clip(self, largest: float, norm: flow.Tensor | None = None) -> flow.Tensor:
        """Scale the gradients so that their norm is at most `largest`; the norm before."""
        norm = self.gradient_norm() if norm is None else norm
        factor = (largest / (norm + _EPSILON)).clamp(max=1.0)
        for shard in self.shards:
            if shard.parameter.grad is not None:
                shard.parameter.grad.mul_(factor)
        return norm

    def full_arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """Each tensor by its name, whole, one unit at a time; a collective call."""
        for unit in self.units:
            names = [slot.name for shard in unit.shards for slot in shard.slots]
            for name, tensor in zip(names, unit.gather(), strict=True):
                yield name, tensor.numpy()


def blocks(model: nn.Module) -> IsUnit:
    """What to take for units where a model has lists of blocks, as transformers and ResNets do:
    entries of a ModuleList or Sequential that have modules inside, not in one another."""
    lists = {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
    }
    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{unit}.") for unit in found)
        has_parts = any(True for _ in module.children()) and any(True for _ in module.parameters())
        if name.rpartition(".")[0] in lists and name and has_parts and not inside:
            found.append(name)
    return lambda name, module: name in found


def fully_shard(
    model: nn.Module,
    is_unit: IsUnit | None = None,
    *,
    mesh: Mesh | None = None,
    **options: Any,
) -> Sharding:
    """Cut the parameters of a model in place; a collective call.

    Every process must have the same values. Modules keep their classes and names, and
    `model.parameters()` are the shards from here on, one-dimensional; make the optimizer now.
    Calling the model gathers what it needs; under `no_grad` that is all that happens.

    Args:
        is_unit: says by name and module what is a unit; a unit may hold others. None: `blocks`.
        mesh: the processes; None for one group of all.
        reshard_after_forward: False keeps a unit's tensors from the forward to the backward pass
            (ZeRO stage 2: only gradients and optimizer are cut in between).
        recompute: False keeps a unit's activations in place of computing them again.
        flatten: one shard per unit, not one per tensor.
        multiple: shards are padded to a multiple of so many numbers.
        compute_dtype: what shards are sent as, such as bfloat16; they stay float32.
    """
    settings = Options(**options)
    if settings.multiple < 1:
        raise UserError(f"multiple={settings.multiple}: a whole number from 1 on")
    mesh, is_unit = mesh or Mesh.of(), is_unit or blocks(model)
    modules = [(name, m) for name, m in model.named_modules() if name and is_unit(name, m)]
    # The inner ones first, so that an outer one does not take their tensors.
    units: list[Unit] = []
    taken: list[nn.Module] = []
    for name, module in reversed(modules):
        units.append(Unit(name, module, taken, mesh, settings))
        taken.append(module)
    units.reverse()
    for unit in units:
        unit.module.forward = _UnitForward(unit)
    root = Unit("", model, taken, mesh, settings)
    model.forward = _RootForward(root, units)
    return Sharding(model, [*units, root], mesh)


class _RootForward:
    """The root's tensors, gathered with a gradient, are there as long as the backward pass needs
    them."""

    def __init__(self, unit: Unit, inner: Sequence[Unit]) -> None:
        self._unit, self._inner, self._run = unit, inner, unit.module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        unit = self._unit
        for each in self._inner:
            each.base_seed = flow.initial_seed()
        tensors = gathered(unit) if flow.is_grad_enabled() else unit.gather()
        with unit.showing(tensors):
            return self._run(*args, **kwargs)


class _UnitForward:
    """Runs a unit by the options it was made with."""

    def __init__(self, unit: Unit) -> None:
        self._unit, self._run = unit, unit.module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        unit, options = self._unit, self._unit.options
        if not flow.is_grad_enabled():
            with unit.showing(unit.gather()):
                return self._run(*args, **kwargs)
        _seed(unit.seed())
        if options.reshard_after_forward and options.recompute:
            return _recomputed(unit, self._run, args, kwargs)
        tensors = gathered(unit)
        if options.recompute:
            return _recomputed(unit, self._run, args, kwargs, tensors)
        with unit.showing(tensors):
            return self._run(*args, **kwargs)


def gathered(unit: Unit) -> list[flow.Tensor]:
    """A unit's tensors whose gradients go to its shards."""

    # A class of its own for each call: what a context of oneflow 0.9.0 is given as an attribute
    # ends the process in the backward pass, so the state is in closures.
    class Gather(flow.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *shards: flow.Tensor) -> Any:
            found = unit.gather()
            return tuple(found) if len(found) > 1 else found[0]

        @staticmethod
        def backward(ctx: Any, *gradients: flow.Tensor) -> Any:
            pieces = unit.reduce(gradients)
            return tuple(pieces) if len(pieces) > 1 else pieces[0]

    if not unit.shards:
        return []
    found = Gather.apply(*unit.parameters)
    return list(found) if isinstance(found, tuple | list) else [found]


def _recomputed(
    unit: Unit,
    run: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    kept: list[flow.Tensor] | None = None,
) -> Any:
    """`run(*args, **kwargs)`, computed again in the backward pass from its inputs; with `kept` the
    tensors of the unit stay in between."""
    places = [index for index, value in enumerate(args) if isinstance(value, flow.Tensor)]
    inputs = [args[index] for index in places]
    wants = [x.requires_grad for x in inputs]
    count = len(inputs)
    seed = unit.seed()

    def call(given: Sequence[flow.Tensor]) -> Any:
        values = list(args)
        for index, value in zip(places, given, strict=True):
            values[index] = value
        return run(*values, **kwargs)

    class Recompute(flow.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: flow.Tensor) -> Any:
            own = list(tensors[count:]) if kept is not None else unit.gather()
            ctx.save_for_backward(*(tensors if kept is not None else tensors[:count]))
            with unit.showing(own):
                return call(tensors[:count])

        @staticmethod
        def backward(ctx: Any, *gradients: flow.Tensor) -> Any:
            saved = ctx.saved_tensors
            own = saved[count:] if kept is not None else unit.gather()
            leaves = [
                x.detach().requires_grad_(wanted)
                for x, wanted in zip(saved[:count], wants, strict=True)
            ]
            own = [tensor.detach().requires_grad_() for tensor in own]
            with flow.enable_grad(), unit.showing(own), _once_more(unit.module, seed):
                out = call(leaves)
            outs = list(out) if isinstance(out, tuple | list) else [out]
            differentiated = [x for x in leaves if x.requires_grad] + own
            found = list(flow.autograd.grad(outs, differentiated, list(gradients)))
            of_inputs = [found.pop(0) if wanted else None for wanted in wants]
            del out, outs, own, differentiated
            of_own = found if kept is not None else unit.reduce(found)
            result = (*of_inputs, *of_own)
            return result if len(result) > 1 else result[0]

    return Recompute.apply(*inputs, *(unit.parameters if kept is None else kept))


@contextlib.contextmanager
def _once_more(module: nn.Module, seed: int | None) -> Iterator[None]:
    """Inside, a module draws by `seed`, as it did the first time; afterwards its buffers, such as
    running statistics, and the seed are as before."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()] if module.training else []
    before = flow.initial_seed()
    _seed(seed)
    yield
    _seed(None if seed is None else before)
    with flow.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)


def _seed(seed: int | None) -> None:
    """Draw by `seed` from here on; what was asked for before, whose kernels may not have run, is
    drawn before."""
    if seed is not None:
        flow._oneflow_internal.eager.Sync()
        flow.manual_seed(seed)


def _draws(module: nn.Module) -> bool:
    """Whether random numbers are drawn in its forward pass, by dropout and the like."""
    return module.training and any(
        getattr(each, "p", 0) > 0
        for each in module.modules()
        if isinstance(each, nn.Dropout) or getattr(each, "draws_random_factors", False)
    )


def _slots(name: str, module: nn.Module, taken: Sequence[nn.Module]) -> Iterator[Slot]:
    """The tensors of a module and those inside it, without what units inside it have."""
    inside = {id(each) for other in taken for each in other.modules()}
    prefix = f"{name}." if name else ""
    for below, each in module.named_modules():
        if id(each) in inside:
            continue
        place = f"{prefix}{below}." if below else prefix
        for attribute, value in list(each._parameters.items()):
            if value is not None:
                yield Slot(each, attribute, place + attribute, tuple(value.shape))


def _parts(whole: flow.Tensor, slots: Sequence[Slot]) -> list[flow.Tensor]:
    found, begin = [], 0
    for slot in slots:
        found.append(whole[begin : begin + slot.size].reshape(*slot.shape))
        begin += slot.size
    return found


def _padded(whole: flow.Tensor, length: int) -> flow.Tensor:
    missing = length - whole.numel()
    if not missing:
        return whole
    return flow.cat([whole, flow.zeros(missing, dtype=whole.dtype, device=whole.device)])
