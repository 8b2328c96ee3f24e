"""A whole model, cut: which modules become units, and what can be done with all shards."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from oneflow_accel import distributed
from oneflow_accel.collectives import Mesh

import numpy as np
import oneflow as flow
from oneflow import nn

from flow_train.checkpoint.shards import OwnPieces, ShardLayout
from flow_train.sharding.forward import LinearForward, RootForward, UnitForward
from flow_train.sharding.global_tensors import make_unit
from flow_train.sharding.units import Shard, ShardingOptions, Unit, unit_of

IsUnit = Callable[[str, nn.Module], bool]
# As in PyTorch's and torch_xla's clip_grad_norm_.
_EPSILON = 1e-6
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
    Calling the model gathers what it needs; under `no_grad` that is all that happens. One that has
    been cut stays as it is.

    Args:
        is_unit: says by name and module what is a unit; a unit may hold others. None: `blocks`. One
            that shares a parameter with what is outside is none: the parameter is the root's.
        mesh: the processes; None for one group of all.
        options: those of `ShardingOptions`.
    """
    if isinstance(model.forward, RootForward):
        root = model.forward.unit
        return Sharding([*root.inner, root], root.mesh)
    mesh, is_unit = mesh or Mesh.of(), is_unit or blocks(model)
    modules = {name: m for name, m in model.named_modules() if name and is_unit(name, m)}
    # The inner ones first, so that an outer one does not take their tensors.
    for name, module in reversed(_without_shared(model, modules).items()):
        shard_unit(name, module, mesh=mesh, **options)
    root = make_unit("", model, mesh, ShardingOptions(**options))
    for before, after in itertools.pairwise(root.inner):
        before.following, after.preceding = after, before
    model.forward = RootForward(root)
    return Sharding([*root.inner, root], mesh)


def shard_unit(name: str, module: nn.Module, *, mesh: Mesh, **options: Any) -> None:
    """Cut a module that will be the unit `name` of a model, as soon as it is made: no process ever
    holds more than one whole unit then. `mesh` and `options` are those that `fully_shard` gets
    afterwards. Nothing where it has been cut; a collective call."""
    if unit_of(module) is not None:
        return
    settings = ShardingOptions(**options)
    if settings.reshard_after_forward and not settings.recompute:
        uses = _uses(module, set())
        for path, linear in module.named_modules():
            shared = any(uses[id(value)] > 1 for value in linear.parameters())
            if type(linear) is nn.Linear and path and not shared:
                linear.forward = LinearForward(make_unit(f"{name}.{path}", linear, mesh, settings))
    module.forward = UnitForward(make_unit(name, module, mesh, settings))


def blocks(model: nn.Module) -> IsUnit:
    """What to take for units where a model has lists of blocks, as transformers and ResNets do:
    entries of a ModuleList or Sequential that have modules inside, not in one another."""
    modules, found = dict(model.named_modules()), list[str]()
    for name, module in modules.items():
        is_entry = isinstance(modules[name.rpartition(".")[0]], nn.ModuleList | nn.Sequential)
        inside = name.startswith(tuple(f"{unit}." for unit in found))
        has_parts = any(True for _ in module.children()) and any(True for _ in module.parameters())
        if name and is_entry and has_parts and not inside:
            found.append(name)
    return lambda name, module: name in found


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


class Sharding:
    """What `fully_shard` has cut. `units` are in the order of the modules, the root last."""

    def __init__(self, units: list[Unit], mesh: Mesh) -> None:
        self.units, self.mesh = units, mesh

    @property
    def shards(self) -> list[Shard]:
        return [shard for unit in self.units for shard in unit.shards]

    @property
    def layout(self) -> ShardLayout:
        """How the shards make up the tensors, with the names and shapes that these had."""
        groups = {shard.name: (shard.slots, shard.length) for shard in self.shards}
        for place in [place for unit in self.units for place in unit.places]:
            for twin in place.twins:
                groups[twin.slot.name] = ([twin.slot], groups[place.slot.name][1])
        return ShardLayout(self.mesh.shards, self.mesh.place, groups)

    def named_weights(self) -> Iterator[tuple[str, flow.Tensor]]:
        """Each tensor by its name, whole and local, as `model.named_parameters()` gave it before it
        was cut, one shard at a time; a collective call."""
        for shard in self.shards:
            yield from self._named(shard, shard.piece.detach())

    def whole(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Whole arrays by KEY/TENSOR, of this process's pieces by KEY/SHARD, whatever KEY is there;
        a collective call."""
        found: dict[str, np.ndarray] = {}
        for key in dict.fromkeys(name.partition("/")[0] for name in arrays):
            for shard in self.shards:
                piece = arrays.get(f"{key}/{shard.name}")
                if piece is not None:
                    own = flow.tensor(piece, device=shard.parameter.device)
                    found |= {f"{key}/{n}": each.numpy() for n, each in self._named(shard, own)}
        return found

    def named_gradients(self) -> Iterator[tuple[str, flow.Tensor]]:
        """The same of the gradients, in the same order, of the tensors that have one."""
        for shard in self.shards:
            if shard.gradient is not None:
                yield from self._named(shard, shard.gradient)

    def _named(self, shard: Shard, piece: flow.Tensor) -> Iterator[tuple[str, flow.Tensor]]:
        names = [slot.name for slot in shard.slots]
        return zip(names, shard.tensors(self.mesh.gather(piece)), strict=True)

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

    def clip(self, largest: float) -> flow.Tensor:
        """Scale the gradients so that their norm is at most `largest`; the norm before."""
        norm = self.gradient_norm()
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
                shard.piece.copy_(flow.tensor(pieces.piece("", shard.name)))
