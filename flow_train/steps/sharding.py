"""Parameters, gradients and the optimizer's state cut over the processes of a job: ZeRO stage 3
(Rajbhandari et al. 2020, "ZeRO", section 5), in the form of fully sharded data parallelism (Zhao et
al. 2023, "PyTorch FSDP").

    with watchdog.guard():
        sharding = fully_shard(model)
        optimizer = flow.optim.AdamW(model.parameters())
        loss(model(images)).backward()
        norm = sharding.clip(1.0)
        optimizer.step()

The guard (`oneflow_accel.watchdog`) ends all processes where one fails, on several machines too.

A *unit* is a module whose tensors are there together: gathered before it runs, freed after it.
What no unit has belongs to the root, which is gathered for a whole step. Each tensor is flattened,
padded with zeros and cut evenly; a process keeps one piece, the *shard*, which takes the tensor's
place among the parameters. So an optimizer over `model.parameters()` is sharded too.

On CPUs of one machine the shards lie in memory that the processes share, so that gathering is no
more than waiting until all have written theirs.

A unit's backward pass gathers its tensors anew, runs the unit once more from its input
(activation checkpointing, Chen et al. 2016) and gives every process its piece of the mean gradient.
A unit with dropout seeds the generators before it runs, so that it draws the same masks again.

Without recomputation the linear layers inside a unit gather their weights anew for themselves.
`ShardedStep` trains a sharded model in the loop; a checkpoint of it is one of its shards.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from oneflow_accel import agree, distributed
from oneflow_accel.backends.base import Backend
from oneflow_accel.collectives import Mesh, Window
from oneflow_accel.errors import UserError
from oneflow_accel.precision import autocast_of_now

import numpy as np
import oneflow as flow
from oneflow import nn

from flow_train.checkpoint.shards import Layout, OwnPieces, Slot
from flow_train.rng import seed_of
from flow_train.steps.eager import EagerStep, NamedGradient
from flow_train.task import Task

IsUnit = Callable[[str, nn.Module], bool]
# As in PyTorch's and torch_xla's clip_grad_norm_.
_EPSILON = 1e-6
FLAT = "flat_shard"
# Numbers, of whole tensors, that are gathered in one go where each alone is fewer: 16 MB.
_BUNDLE = 1 << 22
# Through shared memory a collective of little takes 0.2 ms: a bundle's copies soon take longer.
_SHARED_BUNDLE = 1 << 17


@dataclass(eq=False)
class Place:
    """Where a tensor of a module is set while its unit runs; `twins` are other modules' places that
    have the same tensor."""

    owner: nn.Module
    attribute: str
    slot: Slot
    twins: list[Place] = field(default_factory=list)

    @property
    def value(self) -> nn.Parameter:
        return self.owner._parameters[self.attribute]

    def show(self, tensor: flow.Tensor) -> None:
        for place in (self, *self.twins):
            object.__setattr__(place.owner, place.attribute, tensor)

    def clear(self) -> None:
        """Leave the shard there, or None where it has another name."""
        for place in (self, *self.twins):
            if place.attribute in place.owner._parameters:
                object.__delattr__(place.owner, place.attribute)
            else:
                object.__setattr__(place.owner, place.attribute, None)

    def keep(self, shard: nn.Parameter | None) -> None:
        """Take the tensor out, and have its shard under its name, or nothing."""
        for place in (self, *self.twins):
            del place.owner._parameters[place.attribute]
            if shard is None:
                object.__setattr__(place.owner, place.attribute, None)
            else:
                place.owner.register_parameter(place.attribute, shard)


@dataclass(eq=False)
class Shard:
    """This process's piece of one tensor or, flattened, of several one after the other. `name` is
    that of the parameter, (length,), whose pieces of all processes are the tensors, then zeros."""

    name: str
    parameter: nn.Parameter
    places: list[Place]
    length: int

    @property
    def slots(self) -> list[Slot]:
        return [place.slot for place in self.places]

    @property
    def gradient(self) -> flow.Tensor | None:
        """This process's piece of it."""
        return None if self.parameter.grad is None else _own(self.parameter.grad)


@dataclass(frozen=True)
class Options:
    """See `fully_shard`."""

    reshard_after_forward: bool = True
    recompute: bool = True
    flatten: bool = False
    multiple: int = 1
    gather_dtype: flow.dtype | None = None
    prefetch: bool = False


# By the names that PyTorch's sharding strategies have.
MODES: Mapping[str, Mapping[str, Any]] = {
    "full_shard": {},
    "full_shard_no_recompute": {"recompute": False},
    "shard_grad_op": {"recompute": False, "reshard_after_forward": False},
    "hybrid_shard": {},
}


def sharding_options(mode: str) -> dict[str, Any]:
    """What `fully_shard` takes for one of MODES."""
    local = distributed.local_world_size() if mode == "hybrid_shard" else None
    return {**MODES[mode], "mesh": Mesh.of(local)}


class Unit:
    """The tensors of `module` that no unit inside it has."""

    def __init__(self, name: str, module: nn.Module, mesh: Mesh, options: Options) -> None:
        self.name, self.module, self.mesh, self.options = name, module, mesh, options
        # Units inside, whose tensors are theirs.
        self.inner = [
            each.forward.unit for each in module.modules() if isinstance(each.forward, _Forward)
        ]
        self.window: Window | None = None
        self.shards = self._cut(self._places())
        # Small shards travel together: on CPUs a collective takes some milliseconds, however little
        # it sends.
        most = _BUNDLE if self.window is None else _SHARED_BUNDLE
        self._bundles = _bundled(self.shards, most // self.mesh.shards)
        # The seed of the forward pass of the whole model.
        self.base_seed = 0
        # Full gradients that `no_sync` has kept, by shard.
        self._waiting: dict[str, flow.Tensor] = {}
        self.syncs = True
        # The units that run after and before this one, where tensors are gathered ahead.
        self.following: Unit | None = None
        self.preceding: Unit | None = None
        self._ahead: list[flow.Tensor] | None = None
        # Whether the root runs, which has seen to it that all processes have written their shards.
        self.inside = False

    def _places(self) -> list[Place]:
        prefix = f"{self.name}." if self.name else ""
        # What units inside have is cut already, under the same names.
        cut = {id(shard.parameter) for unit in self.inner for shard in unit.shards}
        found: dict[int, Place] = {}
        for path, owner in self.module.named_modules():
            before = f"{prefix}{path}." if path else prefix
            for attribute, value in owner._parameters.items():
                if value is not None and id(value) not in cut:
                    slot = Slot(before + attribute, tuple(value.shape))
                    place = Place(owner, attribute, slot)
                    first = found.setdefault(id(value), place)
                    if first is not place:
                        first.twins.append(place)
        return list(found.values())

    def _groups(self, places: list[Place]) -> list[list[Place]]:
        """What makes up each shard."""
        together = []
        if self.options.flatten:
            # What is frozen, or has several names, keeps its own.
            together = [each for each in places if each.value.requires_grad and not each.twins]
        return [*([together] if together else []), *([p] for p in places if p not in together)]

    def _cut(self, places: list[Place]) -> list[Shard]:
        """Put shards in the place of the tensors, whose memory is freed."""
        groups = self._groups(places)
        lengths = [self._length(sum(place.slot.size for place in group)) for group in groups]
        self._prepare(places, lengths)
        shards = []
        for index, (group, length) in enumerate(zip(groups, lengths, strict=True)):
            values = [place.value for place in group]
            pieces = [agree.whole(value, to=None).reshape(-1) for value in values]
            whole = _padded(_joined(pieces), length * self.mesh.shards)
            own = self._kept(index, whole[self.mesh.place * length :][:length].clone())
            parameter = nn.Parameter(own, requires_grad=values[0].requires_grad)
            for place in group:
                place.keep(parameter if len(group) == 1 else None)
            name = group[0].slot.name
            if len(group) > 1:
                self.module.register_parameter(FLAT, parameter)
                name = f"{self.name}.{FLAT}".lstrip(".")
            shards.append(Shard(name, parameter, group, length))
        return shards

    def _prepare(self, places: Sequence[Place], lengths: Sequence[int]) -> None:
        values = [place.value for place in places]
        plain = self.options.gather_dtype in (None, flow.float32)
        if values and plain and all(value.dtype == flow.float32 for value in values):
            self.window = Window.of(self.mesh, lengths, values[0].device)

    def _kept(self, index: int, piece: flow.Tensor) -> flow.Tensor:
        """A new shard's piece where it will stay."""
        if self.window is None:
            return piece
        own = self.window.own(index)
        own.copy_(piece)
        return own

    def _length(self, numbers: int) -> int:
        every = self.mesh.shards * self.options.multiple
        return -(-numbers // every) * self.options.multiple

    def gather(self, ahead: Unit | None = None) -> list[flow.Tensor]:
        """The whole tensors, in the order of the slots; a collective call. With prefetching those
        of the unit `ahead` are on their way afterwards."""
        found, self._ahead = self._ahead or self._gathered(), None
        if ahead is not None and self.options.prefetch and self.window is None:
            ahead._ahead = ahead._gathered()
        return found

    def forget(self) -> None:
        """Drop what was gathered ahead, as by a pass that failed in the middle."""
        self._ahead = None

    def _gathered(self) -> list[flow.Tensor]:
        found = []
        if self.window is not None:
            for index, shard in enumerate(self.shards):
                found += _parts(self.window.whole(index), shard.slots)
            return found
        for bundle in self._bundles:
            pieces = [shard.parameter.detach() for shard in bundle]
            part, dtype = _joined(pieces), self.options.gather_dtype
            if dtype is not None and dtype != part.dtype:
                whole = self.mesh.gather(part.to(dtype)).to(part.dtype)
            else:
                whole = self.mesh.gather(part)
            for shard, tensor in zip(bundle, self._apart(whole, bundle), strict=True):
                found += _parts(tensor, shard.slots)
        return found

    def _apart(self, whole: flow.Tensor, bundle: Sequence[Shard]) -> list[flow.Tensor]:
        """The shards of all processes by shard, of those by process, each with all of a bundle."""
        if len(bundle) == 1:
            return [whole]
        lengths = [shard.length for shard in bundle]
        rows = whole.reshape(self.mesh.shards, -1)
        return [part.reshape(-1) for part in rows.split(lengths, dim=1)]

    def reduce(self, gradients: list[flow.Tensor | None]) -> list[flow.Tensor | None]:
        """Each shard's piece of the mean gradient over all processes, None where it is frozen, from
        those of the whole tensors, which are emptied; a collective call."""
        pieces = []
        if self.window is not None:
            self.window.drop()
        for bundle in self._bundles:
            wholes = []
            for shard in bundle:
                mine = [gradients.pop(0) for _ in shard.slots]
                flat = [
                    self._zeros(slot.size, shard) if gradient is None else gradient.reshape(-1)
                    for slot, gradient in zip(shard.slots, mine, strict=True)
                ]
                mine.clear()
                wholes.append(self._with_waiting(shard, _joined(flat)))
                flat.clear()
            pieces += self._synced(bundle, wholes)
        wanted = [parameter.requires_grad for parameter in self.parameters]
        return [piece if asked else None for piece, asked in zip(pieces, wanted, strict=True)]

    def _with_waiting(self, shard: Shard, whole: flow.Tensor) -> flow.Tensor:
        waiting = self._waiting.pop(shard.name, None)
        whole = whole if waiting is None else whole + waiting
        if not self.syncs:
            self._waiting[shard.name] = whole
        return whole

    def _zeros(self, numbers: int, shard: Shard) -> flow.Tensor:
        return flow.zeros(numbers, device=shard.parameter.device)

    def _synced(self, bundle: Sequence[Shard], wholes: list[flow.Tensor]) -> list[flow.Tensor]:
        """The shards' pieces of the mean; the list is emptied."""
        lengths, mesh = [shard.length for shard in bundle], self.mesh
        if not self.syncs:
            return [flow.zeros(length, device=wholes[0].device) for length in lengths]
        padded = [
            _padded(wholes.pop(0), length * mesh.shards).reshape(mesh.shards, length)
            for length in lengths
        ]
        rows = flow.cat(padded, dim=1) if len(padded) > 1 else padded[0]
        padded.clear()
        if self.window is not None:
            # The sum is of values that are there once this has run: after all that reads the whole
            # tensors. No process changes its piece of these before it has the sum.
            rows[:1, :1].mul_(1.0)
        piece = mesh.scatter_sum(rows.reshape(-1))
        if mesh.size > 1:
            piece.div_(mesh.size)
        return list(piece.split(lengths)) if len(lengths) > 1 else [piece]

    @contextlib.contextmanager
    def showing(self, tensors: Sequence[flow.Tensor]) -> Iterator[None]:
        """Let the module see these in the place of its shards."""
        places = [place for shard in self.shards for place in shard.places]
        for place, tensor in zip(places, tensors, strict=True):
            place.show(tensor)
        try:
            yield
        finally:
            for place in places:
                place.clear()

    @contextlib.contextmanager
    def whole(self, *, train: bool = True, ahead: bool = True) -> Iterator[list[flow.Tensor]]:
        """Inside, the module sees its tensors, which are gathered and freed; a collective call."""
        with met([self], train):
            tensors = self.gather(self.following if ahead else None)
            with self.showing(tensors):
                yield tensors
        if self.window is not None:
            self.window.drop()

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [shard.parameter for shard in self.shards]

    @property
    def shown(self) -> list[nn.Parameter]:
        """The shard of each tensor."""
        return [shard.parameter for shard in self.shards for _ in shard.places]

    def seed(self) -> int | None:
        """What its random numbers of this forward pass hang on; None where it draws none."""
        if not _draws(self.module):
            return None
        return seed_of(f"oneflow_accel {self.base_seed}, unit {self.name}")


class GlobalUnit(Unit):
    """A unit of global tensors that each process has whole. Its shards are global too, split over
    the processes, and so are their gradients: sums over the parts that a global loss is made of."""

    def _prepare(self, places: Sequence[Place], lengths: Sequence[int]) -> None:
        values = [place.value for place in places]
        for place, value in zip(places, values, strict=True):
            name = place.slot.name
            if not value.is_global or value.placement != values[0].placement:
                raise UserError(f"{name}: a unit's tensors must all be global, of one placement")
            if any(sbp != flow.sbp.broadcast for sbp in value.sbp):
                raise UserError(
                    f"{name} is split by another parallelism already, sbp {value.sbp}: take data "
                    "parallelism alone, or LiBai's train.zero_optimization"
                )
            ranks = sorted(value.placement.ranks.reshape(-1))
            if ranks != list(range(self.mesh.size)) or self.mesh.replicas > 1:
                raise UserError(
                    f"{name} is on {value.placement}: global tensors are cut over all processes "
                    "in one row; take no pipeline stages and no hybrid mesh"
                )
        self._placement = values[0].placement

    def _kept(self, index: int, piece: flow.Tensor) -> flow.Tensor:
        return piece.to_global(placement=self._placement, sbp=self._everywhere(flow.sbp.split(0)))

    def _everywhere(self, sbp: flow.sbp.sbp) -> list[flow.sbp.sbp]:
        return [sbp] * self._placement.ranks.ndim

    def _gathered(self) -> list[flow.Tensor]:
        found = []
        for shard in self.shards:
            value, dtype = shard.parameter.detach(), self.options.gather_dtype
            sent = value if dtype is None else value.to(dtype)
            whole = sent.to_global(sbp=self._everywhere(flow.sbp.broadcast)).to(value.dtype)
            found += _parts(whole, shard.slots)
        return found

    def _zeros(self, numbers: int, shard: Shard) -> flow.Tensor:
        sbp = self._everywhere(flow.sbp.broadcast)
        return flow.zeros(numbers, placement=self._placement, sbp=sbp)

    def _synced(self, bundle: Sequence[Shard], wholes: list[flow.Tensor]) -> list[flow.Tensor]:
        pieces = []
        for shard in bundle:
            whole, missing = wholes.pop(0), self.mesh.shards * shard.length
            missing -= whole.numel()
            if not self.syncs:
                whole = self._zeros(whole.numel(), shard)
            if missing:
                whole = flow.cat([whole, self._zeros(missing, shard)])
            pieces.append(whole.to_global(sbp=self._everywhere(flow.sbp.split(0))))
        return pieces


def _unit(name: str, module: nn.Module, mesh: Mesh, options: Options) -> Unit:
    is_global = any(value.is_global for value in module.parameters())
    return (GlobalUnit if is_global else Unit)(name, module, mesh, options)


@contextlib.contextmanager
def met(units: Sequence[Unit], train: bool) -> Iterator[None]:
    """Inside, the units' windows have what all processes have written before, and nobody writes.
    After `train` nobody does before the backward pass has summed the gradients."""
    outside = [unit for unit in units if not unit.inside]
    windows = [unit.window for unit in outside if unit.window is not None]
    Window.meet(windows)
    for unit in outside:
        unit.inside = True
    try:
        yield
    finally:
        for unit in outside:
            unit.inside = False
    if not train:
        Window.meet(windows)


class Sharding:
    """A model that `fully_shard` has cut. `units` are in the order of the modules, the root last.

    `full_shapes` has the shape of each tensor by its name, as parameters are now one-dimensional.
    """

    def __init__(self, model: nn.Module, units: list[Unit], mesh: Mesh) -> None:
        self.model, self.units, self.mesh = model, units, mesh
        slots = [slot for unit in units for shard in unit.shards for slot in shard.slots]
        self.full_shapes = {slot.name: slot.shape for slot in slots}

    @property
    def layout(self) -> Layout:
        """How the shards make up the tensors."""
        groups = {shard.name: (shard.slots, shard.length) for shard in self.shards}
        for place in [place for shard in self.shards for place in shard.places]:
            for twin in place.twins:
                groups[twin.slot.name] = ([twin.slot], groups[place.slot.name][1])
        return Layout(self.mesh.shards, self.mesh.place, groups)

    @property
    def own_numbers(self) -> int:
        """Parameters that this process keeps, padding included."""
        return sum(shard.length for shard in self.shards)

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
        gradients = [shard.gradient for shard in self.shards]
        squares = [(each * each).sum().reshape(1) for each in gradients if each is not None]
        own = sum(squares[1:], squares[0]) if squares else flow.zeros(1)
        # Replicas have the same pieces.
        return (self.mesh.sum(own) / self.mesh.replicas) ** 0.5

    def clip(self, largest: float, norm: flow.Tensor | None = None) -> flow.Tensor:
        """Scale the gradients so that their norm is at most `largest`; the norm before."""
        norm = self.gradient_norm() if norm is None else norm
        factor = (largest / (norm + _EPSILON)).clamp(max=1.0)
        for shard in self.shards:
            if shard.gradient is not None:
                shard.gradient.mul_(factor)
        return norm

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Give the shards their pieces of whole tensors, by the names that these had."""
        pieces = OwnPieces(arrays, self.layout)
        with flow.no_grad():
            for shard in self.shards:
                _own(shard.parameter).copy_(flow.tensor(pieces.piece("", shard.name)))

    def full_arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """Each tensor by its name, whole, one unit at a time; a collective call."""
        for unit in self.units:
            names = [slot.name for shard in unit.shards for slot in shard.slots]
            # What a backward pass has gathered ahead is older than the optimizer's step.
            unit.forget()
            with unit.whole(train=False, ahead=False) as tensors:
                arrays = [agree.whole(tensor, to=None).numpy() for tensor in tensors]
            yield from zip(names, arrays, strict=True)


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

    Every process must have the same values; tensors may be global if each process has them whole,
    as LiBai's are where there is data parallelism only. Modules keep their classes and names, and
    `model.parameters()` are the shards from here on, one-dimensional; make the optimizer now.
    Calling the model gathers what it needs; under `no_grad` that is all that happens.

    Args:
        is_unit: says by name and module what is a unit; a unit may hold others. None: `blocks`. One
            that shares a parameter with what is outside is none: the parameter is the root's.
        mesh: the processes; None for one group of all.
        reshard_after_forward: False keeps a unit's tensors from the forward to the backward pass
            (ZeRO stage 2: only gradients and optimizer are cut in between).
        recompute: False keeps a unit's activations in place of computing them again.
        flatten: one shard per unit, not one per tensor.
        multiple: shards are padded to a multiple of so many numbers.
        gather_dtype: what shards are sent as, such as bfloat16; they stay float32.
        prefetch: gather the next unit's tensors while this one runs, which takes their memory.
    """
    settings = Options(**options)
    if settings.multiple < 1:
        raise UserError(f"multiple={settings.multiple}: a whole number from 1 on")
    mesh, is_unit = mesh or Mesh.of(), is_unit or blocks(model)
    modules = {name: m for name, m in model.named_modules() if name and is_unit(name, m)}
    # The inner ones first, so that an outer one does not take their tensors.
    for name, module in reversed(_without_shared(model, modules).items()):
        shard_unit(name, module, mesh, settings)
    root = _unit("", model, mesh, settings)
    for before, after in itertools.pairwise(root.inner):
        before.following, after.preceding = after, before
    model.forward = _RootForward(root)
    return Sharding(model, [*root.inner, root], mesh)


def shard_unit(name: str, module: nn.Module, mesh: Mesh, options: Options) -> None:
    """Cut a module that will be the unit `name` of a model, as soon as it is made: no process ever
    holds more than one whole unit then. Nothing where it has been cut; a collective call."""
    if isinstance(module.forward, _Forward):
        return
    if options.reshard_after_forward and not options.recompute:
        uses = _uses(module, set())
        for inside, linear in module.named_modules():
            shared = any(uses[id(value)] > 1 for value in linear.parameters())
            if type(linear) is nn.Linear and inside and not shared:
                unit = _unit(f"{name}.{inside}", linear, mesh, options)
                linear.forward = _LinearForward(unit)
    module.forward = _UnitForward(_unit(name, module, mesh, options))


def _uses(module: nn.Module, units: set[int]) -> Counter[int]:
    """How often each parameter, by id, is one of a module or of those in it, but for `units`."""
    found = Counter(id(value) for value in module._parameters.values() if value is not None)
    for child in module.children():
        if id(child) not in units:
            found += _uses(child, units)
    return found


def _without_shared(model: nn.Module, modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """The units that share no parameter with another or with the root."""
    units = {id(module) for module in modules.values()}
    sharers = Counter(itertools.chain(*(_uses(m, units) for m in [model, *modules.values()])))
    alone = {
        name: module
        for name, module in modules.items()
        if all(sharers[value] == 1 for value in _uses(module, units))
    }
    # What a unit inside shared is the outer one's now.
    return alone if len(alone) == len(modules) else _without_shared(model, alone)


class _Forward:
    """What a unit's module has in the place of its forward method."""

    def __init__(self, unit: Unit) -> None:
        self.unit, self._run = unit, unit.module.forward


class _RootForward(_Forward):
    """The root's tensors, gathered with a gradient, are there as long as the backward pass needs
    them."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        unit = self.unit
        for each in unit.inner:
            each.base_seed = flow.initial_seed()
            each.forget()
        train = flow.is_grad_enabled()
        with (
            met([*unit.inner, unit], train),
            unit.showing(gathered(unit)) if train else unit.whole(),
        ):
            return self._run(*args, **kwargs)


class _UnitForward(_Forward):
    """Runs a unit by the options it was made with."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        unit, options = self.unit, self.unit.options
        if not flow.is_grad_enabled():
            with unit.whole(train=False):
                return self._run(*args, **kwargs)
        _seed(unit.seed())
        with met([unit], train=True):
            if options.reshard_after_forward and options.recompute:
                return _recomputed(unit, self._run, args, kwargs)
            tensors = gathered(unit)
            if options.recompute:
                return _recomputed(unit, self._run, args, kwargs, tensors)
            with unit.showing(tensors):
                return self._run(*args, **kwargs)


class _LinearForward(_Forward):
    """A linear layer that keeps its input for the backward pass and gathers its weight anew."""

    def __call__(self, x: flow.Tensor) -> flow.Tensor:
        unit = self.unit
        if not flow.is_grad_enabled():
            with unit.whole(train=False):
                return self._run(x)
        wanted = x.requires_grad

        class Linear(flow.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: flow.Tensor, *shards: flow.Tensor) -> flow.Tensor:
                ctx.save_for_backward(x)
                with unit.whole():
                    return self._run(x)

            @staticmethod
            def backward(ctx: Any, gradient: flow.Tensor) -> Any:
                (x,) = ctx.saved_tensors
                weight, *bias = unit.gather(unit.preceding)
                rows, dtype = gradient.reshape(-1, gradient.shape[-1]), gradient.dtype
                # Under autocast the layer has multiplied copies in the dtype of its result.
                of_x = flow.matmul(gradient, weight.to(dtype)).to(x.dtype) if wanted else None
                columns = x.reshape(-1, x.shape[-1]).to(dtype)
                of_weight = flow.matmul(rows, columns, transpose_a=True).to(weight.dtype)
                of_bias = [rows.to(weight.dtype).sum(dim=0)] if bias else []
                del weight, bias
                return (of_x, *unit.reduce([of_weight, *of_bias]))

        return Linear.apply(x, *unit.parameters)


def gathered(unit: Unit) -> list[flow.Tensor]:
    """A unit's tensors whose gradients go to its shards."""

    # A class of its own for each call: what a context of oneflow 0.9.0 is given as an attribute
    # ends the process in the backward pass, so the state is in closures.
    class Gather(flow.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *shards: flow.Tensor) -> Any:
            found = unit.gather(unit.following)
            return tuple(found) if len(found) > 1 else found[0]

        @staticmethod
        def backward(ctx: Any, *gradients: flow.Tensor) -> Any:
            pieces = unit.reduce(list(gradients))
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
    inputs: list[flow.Tensor] = []
    _mapped((args, kwargs), inputs.append)
    count = len(inputs)
    seed = unit.seed()
    autocast = autocast_of_now(inputs[0])

    def call(given: Sequence[flow.Tensor]) -> Any:
        each = iter(given)
        values, named = _mapped((args, kwargs), lambda _: next(each))
        return run(*values, **named)

    class Recompute(flow.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: flow.Tensor) -> Any:
            ctx.save_for_backward(*(tensors if kept is not None else tensors[:count]))
            with unit.whole() if kept is None else unit.showing(tensors[count:]):
                return call(tensors[:count])

        @staticmethod
        def backward(ctx: Any, *gradients: flow.Tensor) -> Any:
            saved = ctx.saved_tensors
            own = saved[count:] if kept is not None else unit.gather(unit.preceding)
            wanted = [x.requires_grad for x in [*inputs, *(unit.shown if kept is None else kept)]]
            leaves = [
                _leaf(x, asked) for x, asked in zip([*saved[:count], *own], wanted, strict=True)
            ]
            own = leaves[count:]
            with (
                flow.enable_grad(),
                unit.showing(own),
                _once_more(unit.module, seed),
                autocast(),
            ):
                out = call(leaves[:count])
            outs = list(out) if isinstance(out, tuple | list) else [out]
            found = _gradients(outs, gradients, leaves)
            del out, outs, own, leaves
            of_inputs, of_own = found[:count], found[count:]
            del found
            result = (*of_inputs, *(of_own if kept is not None else unit.reduce(of_own)))
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
        if tensor.is_global or not tensor.storage_offset():
            found = tensor.detach()
        else:
            offset = tensor.storage_offset()
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
    training = [each for each in module.modules() if each.training]
    buffers = [buffer for each in training for buffer in each.buffers(recurse=False)]
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


def _draws(module: nn.Module) -> bool:
    """Whether random numbers are drawn in its forward pass, by dropout and the like."""
    return any(
        each.training and getattr(each, "p", 0) > 0
        for each in module.modules()
        if isinstance(each, nn.Dropout) or getattr(each, "draws_random_factors", False)
    )


def _bundled(shards: Sequence[Shard], most: int) -> list[list[Shard]]:
    """Bundles of neighbours, of at most `most` numbers where they are more than one."""
    found: list[list[Shard]] = []
    for shard in shards:
        if found and sum(each.length for each in found[-1]) + shard.length <= most:
            found[-1].append(shard)
        else:
            found.append([shard])
    return found


def _own(shard: flow.Tensor) -> flow.Tensor:
    """This process's piece, in the same memory."""
    return shard.to_local() if shard.is_global else shard


def _joined(pieces: Sequence[flow.Tensor]) -> flow.Tensor:
    return flow.cat(list(pieces)) if len(pieces) > 1 else pieces[0]


def _parts(whole: flow.Tensor, slots: Sequence[Slot]) -> list[flow.Tensor]:
    """The tensors of a shard. Vectors are copied: the gradient of batch normalization in eval mode
    reads its weights at the beginning of the memory that they are a view of (see `_leaf`)."""
    found, begin = [], 0
    for slot in slots:
        part = whole[begin : begin + slot.size].reshape(*slot.shape)
        found.append(part.clone() if len(slot.shape) == 1 else part)
        begin += slot.size
    return found


def _padded(whole: flow.Tensor, length: int) -> flow.Tensor:
    missing = length - whole.numel()
    if not missing:
        return whole
    return flow.cat([whole, flow.zeros(missing, dtype=whole.dtype, device=whole.device)])


class ShardedStep(EagerStep):
    """Eager steps of a model that is cut over the processes; see `fully_shard`, whose options
    `sharding` takes. A model that is cut already is trained as it is.

    The model's forward passes, in evaluations too, are collective calls: every process must make as
    many of them.
    """

    is_collective = True

    def __init__(
        self,
        model: nn.Module,
        backend: Backend,
        make_optimizer: Callable[[nn.Module], flow.optim.Optimizer],
        task: Task,
        *,
        sharding: Sharding | Mapping[str, Any],
        **settings: Any,
    ) -> None:
        if not isinstance(sharding, Sharding):
            sharding = fully_shard(model, **sharding)
        self.sharding = sharding
        super().__init__(model, backend, make_optimizer(model), task, forward=model, **settings)
        if self._scaler is not None:
            # Processes would not agree on which steps to leave out.
            raise UserError("float16: a model in shards trains in float32 or bfloat16")
        self._frees_gradients = True

    def _clipped(self, parameters: Sequence[flow.Tensor]) -> flow.Tensor | None:
        if self.clip is not None:
            return self.sharding.clip(self.clip)
        return self.sharding.gradient_norm() if self.wants_norm else None

    def gradients(self) -> Iterator[NamedGradient]:
        for shard in self.sharding.shards:
            if shard.gradient is not None:
                own, gather = _own(shard.parameter.detach()), self.sharding.mesh.gather
                names = [slot.name for slot in shard.slots]
                weights, gradients = (
                    _parts(gather(piece), shard.slots) for piece in (own, shard.gradient)
                )
                yield from map(NamedGradient, names, weights, gradients)

    @property
    def layout(self) -> Layout:
        return self.sharding.layout

    def own(self, arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        return OwnPieces(arrays, self.layout)
