"""What is cut and how: tensors of a unit become shards, whose pieces `all_gather` makes whole and
whose gradients `reduce_scatter` hands out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from oneflow_accel import agree
from oneflow_accel.collectives import Mesh, Window
from oneflow_accel.errors import UserError

import oneflow as flow
from oneflow import nn

from flow_train.checkpoint.shards import Slot

FLAT = "flat_shard"
# Numbers, of whole tensors, that are gathered in one go where each alone is fewer: 16 MB.
_BUNDLE = 1 << 22
# Through shared memory a collective of little takes 0.2 ms: a bundle's copies soon take longer.
_SHARED_BUNDLE = 1 << 17


@dataclass(frozen=True)
class ShardingOptions:
    """How a model is cut and trained. UserError for a `multiple` below 1.

    Attributes:
        reshard_after_forward: False keeps a unit's tensors from the forward to the backward pass
            (ZeRO stage 2: only gradients and optimizer are cut in between).
        recompute: False keeps a unit's activations in place of computing them again.
        flatten: one shard per unit, not one per tensor.
        multiple: shards are padded to a multiple of so many numbers.
        gather_dtype: what shards are sent as, such as bfloat16; they stay float32.
        prefetch: gather the next unit's tensors while this one runs, which takes their memory.
    """

    reshard_after_forward: bool = True
    recompute: bool = True
    flatten: bool = False
    multiple: int = 1
    gather_dtype: flow.dtype | None = None
    prefetch: bool = False

    def __post_init__(self) -> None:
        if self.multiple < 1:
            raise UserError(f"multiple={self.multiple}: a whole number from 1 on")


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

    def shard(self, parameter: nn.Parameter | None) -> None:
        """Have the shard in the tensor's place; None where the shard has another name."""
        for place in (self, *self.twins):
            place.owner._parameters[place.attribute] = parameter

    def unshard(self, tensor: flow.Tensor) -> None:
        """Have the whole tensor there, which hides the parameter."""
        for place in (self, *self.twins):
            object.__setattr__(place.owner, place.attribute, tensor)

    def reshard(self) -> None:
        for place in (self, *self.twins):
            object.__delattr__(place.owner, place.attribute)


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
    def piece(self) -> flow.Tensor:
        """The parameter as a local tensor, in the same memory."""
        return self.parameter.to_local() if self.parameter.is_global else self.parameter

    @property
    def gradient(self) -> flow.Tensor | None:
        """This process's piece of it, in the same memory."""
        found = self.parameter.grad
        return found.to_local() if found is not None and found.is_global else found

    def tensors(self, whole: flow.Tensor) -> list[flow.Tensor]:
        """Those of the slots, of the pieces of all processes. Vectors are copied: the gradient of
        batch normalization in eval mode reads its weights at the beginning of the memory that they
        are a view of (see `forward._leaf`)."""
        found, begin = [], 0
        for slot in self.slots:
            part = whole[begin : begin + slot.size].reshape(*slot.shape)
            found.append(part.clone() if len(slot.shape) == 1 else part)
            begin += slot.size
        return found


class Unit:
    """The tensors of `module` that no unit inside it has."""

    def __init__(self, name: str, module: nn.Module, mesh: Mesh, options: ShardingOptions) -> None:
        self.name, self.module, self.mesh, self.options = name, module, mesh, options
        # Units inside, whose tensors are theirs.
        units = map(unit_of, module.modules())
        self.inner = [unit for unit in units if unit is not None]
        self.window: Window | None = None
        self.shards = self._cut(self._uncut())
        # Small shards travel together: on CPUs a collective takes some milliseconds, however little
        # it sends.
        most = _BUNDLE if self.window is None else _SHARED_BUNDLE
        self._bundles = _bundled(self.shards, most // self.mesh.shards)
        # The seed of the forward pass of the whole model.
        self.base_seed = 0
        # False inside `Sharding.no_sync`, whose full gradients wait here, by shard.
        self.syncs = True
        self._unsynced: dict[str, flow.Tensor] = {}
        # The units that run after and before this one, where tensors are gathered ahead.
        self.following: Unit | None = None
        self.preceding: Unit | None = None
        self.prefetched: list[flow.Tensor] | None = None
        self.is_synchronized = False

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [shard.parameter for shard in self.shards]

    @property
    def places(self) -> list[Place]:
        return [place for shard in self.shards for place in shard.places]

    def _uncut(self) -> list[Place]:
        prefix = f"{self.name}." if self.name else ""
        # What units inside have is cut already, under the same names.
        cut = {id(parameter) for unit in self.inner for parameter in unit.parameters}
        found: dict[int, Place] = {}
        for path, owner in self.module.named_modules():
            before = f"{prefix}{path}." if path else prefix
            for attribute, value in owner._parameters.items():
                if value is not None and id(value) not in cut:
                    place = Place(owner, attribute, Slot(before + attribute, tuple(value.shape)))
                    first = found.setdefault(id(value), place)
                    if first is not place:
                        first.twins.append(place)
        return list(found.values())

    def _cut(self, places: list[Place]) -> list[Shard]:
        """Put shards in the place of the tensors, whose memory is freed."""
        groups = self._groups(places)
        every = self.mesh.shards * self.options.multiple
        sizes = [sum(place.slot.size for place in group) for group in groups]
        lengths = [-(-size // every) * self.options.multiple for size in sizes]
        self._prepare(places, lengths)
        shards = []
        for index, (group, length) in enumerate(zip(groups, lengths, strict=True)):
            values = [place.value for place in group]
            pieces = [agree.whole(value, to=None).reshape(-1) for value in values]
            whole = _padded(_joined(pieces), length * self.mesh.shards)
            own = self._stored(index, whole[self.mesh.place * length :][:length].clone())
            parameter = nn.Parameter(own, requires_grad=values[0].requires_grad)
            for place in group:
                place.shard(parameter if len(group) == 1 else None)
            name = group[0].slot.name
            if len(group) > 1:
                self.module.register_parameter(FLAT, parameter)
                name = f"{self.name}.{FLAT}".lstrip(".")
            shards.append(Shard(name, parameter, group, length))
        return shards

    def _groups(self, places: list[Place]) -> list[list[Place]]:
        """What makes up each shard."""
        # What is frozen, or has several names, keeps its own.
        flat = [p for p in places if self.options.flatten and p.value.requires_grad and not p.twins]
        return [group for group in (flat, *([p] for p in places if p not in flat)) if group]

    def _prepare(self, places: Sequence[Place], lengths: Sequence[int]) -> None:
        """Before anything is cut: see where shards can lie."""
        values = [place.value for place in places]
        plain = self.options.gather_dtype in (None, flow.float32)
        if values and plain and all(value.dtype == flow.float32 for value in values):
            self.window = Window.of(self.mesh, lengths, values[0].device)

    def _stored(self, index: int, piece: flow.Tensor) -> flow.Tensor:
        """A new shard's piece where it will stay."""
        if self.window is None:
            return piece
        own = self.window.own(index)
        own.copy_(piece)
        return own

    def put_together(self) -> None:
        """Give the module its whole tensors and its own forward method again; a collective call."""
        for shard in self.shards:
            wholes = shard.tensors(self.mesh.gather(shard.piece.detach()))
            trains = shard.parameter.requires_grad
            for place, whole in zip(shard.places, wholes, strict=True):
                place.shard(nn.Parameter(whole.clone(), requires_grad=trains))
        self.module._parameters.pop(FLAT, None)
        del self.module.forward

    @contextlib.contextmanager
    def unsharded(self, tensors: Sequence[flow.Tensor]) -> Iterator[None]:
        """Inside, the module has these whole tensors in the place of its shards."""
        places = self.places
        for place, tensor in zip(places, tensors, strict=True):
            place.unshard(tensor)
        try:
            yield
        finally:
            for place in places:
                place.reshard()

    @contextlib.contextmanager
    def gathered(self, *, train: bool = True) -> Iterator[None]:
        """Inside, the module is unsharded by `all_gather`; a collective call."""
        with synchronized([self], train), self.unsharded(self.all_gather(self.following)):
            yield
        if self.window is not None:
            self.window.drop()

    def all_gather(self, ahead: Unit | None) -> list[flow.Tensor]:
        """The whole tensors, in the order of the places; a collective call. With prefetching those
        of the unit `ahead` are on their way afterwards."""
        found, self.prefetched = self.prefetched or self._all_gather(), None
        if ahead is not None and self.options.prefetch and self.window is None:
            ahead.prefetched = ahead._all_gather()
        return found

    def _all_gather(self) -> list[flow.Tensor]:
        found = []
        if self.window is not None:
            for index, shard in enumerate(self.shards):
                found += shard.tensors(self.window.whole(index))
            return found
        for bundle in self._bundles:
            part = _joined([shard.parameter.detach() for shard in bundle])
            dtype = self.options.gather_dtype
            sent = part if dtype in (None, part.dtype) else part.to(dtype)
            rows = self.mesh.gather(sent).to(part.dtype).reshape(self.mesh.shards, -1)
            # The shards of all processes by shard, of those by process, each with all of a bundle.
            lengths = [shard.length for shard in bundle]
            wholes = rows.split(lengths, dim=1) if len(lengths) > 1 else [rows]
            for shard, whole in zip(bundle, wholes, strict=True):
                found += shard.tensors(whole.reshape(-1))
        return found

    def reduce_scatter(self, gradients: list[flow.Tensor | None]) -> list[flow.Tensor | None]:
        """Each shard's piece of the mean gradient over all processes, None where it is frozen, from
        those of the whole tensors, which are emptied; a collective call."""
        pieces = []
        if self.window is not None:
            self.window.drop()
        for bundle in self._bundles:
            wholes = [self._flat_gradient(shard, gradients) for shard in bundle]
            if self.syncs:
                pieces += self._reduce_scatter(bundle, wholes)
            else:
                pieces += [flow.zeros_like(shard.parameter) for shard in bundle]
                self._unsynced |= zip([shard.name for shard in bundle], wholes, strict=True)
        wanted = [parameter.requires_grad for parameter in self.parameters]
        return [piece if asked else None for piece, asked in zip(pieces, wanted, strict=True)]

    def _flat_gradient(self, shard: Shard, gradients: list[flow.Tensor | None]) -> flow.Tensor:
        """A shard's whole gradient, flattened, from the next ones of its tensors."""
        flat = []
        for slot in shard.slots:
            gradient = gradients.pop(0)
            flat.append(self._zeros(slot.size, shard) if gradient is None else gradient.reshape(-1))
        unsynced = self._unsynced.pop(shard.name, None)
        return _joined(flat) if unsynced is None else _joined(flat) + unsynced

    def _zeros(self, numbers: int, shard: Shard) -> flow.Tensor:
        return flow.zeros(numbers, device=shard.parameter.device)

    def _reduce_scatter(self, bundle: list[Shard], wholes: list[flow.Tensor]) -> list[flow.Tensor]:
        """The shards' pieces of the mean; `wholes` is emptied."""
        lengths, mesh = [shard.length for shard in bundle], self.mesh
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


def unit_of(module: nn.Module) -> Unit | None:
    """What a module that has been cut is; its forward method knows."""
    return getattr(module.forward, "unit", None)


@contextlib.contextmanager
def synchronized(units: Sequence[Unit], train: bool) -> Iterator[None]:
    """Inside, the units' windows have what all processes have written before, and nobody writes.
    After `train` nobody does before the backward pass has summed the gradients. Nothing for units
    that are synchronized already, as all are inside the root."""
    outside = [unit for unit in units if not unit.is_synchronized]
    windows = [unit.window for unit in outside if unit.window is not None]
    Window.meet(windows)
    for unit in outside:
        unit.is_synchronized = True
    try:
        yield
    finally:
        for unit in outside:
            unit.is_synchronized = False
    if not train:
        Window.meet(windows)


def _bundled(shards: Sequence[Shard], most: int) -> list[list[Shard]]:
    """Bundles of neighbours, of at most `most` numbers where they are more than one."""
    found: list[list[Shard]] = []
    for shard in shards:
        if found and sum(each.length for each in found[-1]) + shard.length <= most:
            found[-1].append(shard)
        else:
            found.append([shard])
    return found


def _joined(pieces: Sequence[flow.Tensor]) -> flow.Tensor:
    return flow.cat(list(pieces)) if len(pieces) > 1 else pieces[0]


def _padded(whole: flow.Tensor, length: int) -> flow.Tensor:
    missing = length - whole.numel()
    if not missing:
        return whole
    return flow.cat([whole, flow.zeros(missing, dtype=whole.dtype, device=whole.device)])
