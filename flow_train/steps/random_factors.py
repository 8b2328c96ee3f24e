"""The random factors, 0 or 1 / (1 - p), that dropout and drop path multiply their input with.

Eagerly they come from the generator that `manual_seed` seeds. An operator of an nn.Graph cannot
draw like that: it keeps a generator of its own, whose position nobody can store or set. So what
trains under nn.Graph finds out once which factors a forward pass needs (`recorded_sites`), draws
them eagerly before each step (`Site.draw`), and gives them to the graph as inputs
(`given_factors`). They are then the factors of the eager step with the same seed, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import oneflow as flow


@dataclass(frozen=True)
class Site:
    """One call that multiplies by random factors of `shape`, the batch's axis first; `p` is the
    probability of a 0."""

    shape: tuple[int, ...]
    p: float

    def draw(self, device: flow.device) -> flow.Tensor:
        """float32 factors from the device's default generator; all 0 where p is 1."""
        return flow._C.dropout(flow.ones(self.shape, device=device), self.p, True)


# The attribute of the modules that call `random_factors` in training.
DRAWS_FACTORS = "draws_random_factors"

# Gives the factors in place of a generator, inside `recorded_sites` and `given_factors`.
_source: Callable[[Site], flow.Tensor] | None = None


@contextmanager
def recorded_sites(device: flow.device) -> Iterator[list[Site]]:
    """Note each call meanwhile, in order, in the list that this gives; the factors are all 1, and
    no number is drawn."""
    sites: list[Site] = []

    def note(site: Site) -> flow.Tensor:
        sites.append(site)
        return flow.ones(site.shape, device=device)

    with _from(note):
        yield sites


@contextmanager
def given_factors(factors: Sequence[flow.Tensor]) -> Iterator[None]:
    """Take the factors of each call meanwhile from `factors`, in order. RuntimeError if the calls
    ask for other shapes, or for more or fewer factors."""
    used = 0

    def give(site: Site) -> flow.Tensor:
        nonlocal used
        found = tuple(factors[used].shape) if used < len(factors) else None
        if found != site.shape:
            raise RuntimeError(
                f"random factors number {used}: the model asks for {site.shape}, and {found} is "
                "there: its forward pass has to draw the same in each call"
            )
        used += 1
        return factors[used - 1]

    with _from(give):
        yield
    if used != len(factors):
        raise RuntimeError(f"the model asks for {used} random factors, not {len(factors)}")


@contextmanager
def _from(source: Callable[[Site], flow.Tensor]) -> Iterator[None]:
    global _source
    before, _source = _source, source
    try:
        yield
    finally:
        _source = before


def are_drawn_by_an_operator(x: flow.Tensor) -> bool:
    """Whether dropout of `x` may be one operator of OneFlow, which draws what `Site.draw` does."""
    return _source is None and not x.is_lazy and not x.is_global


def random_factors(x: flow.Tensor, shape: Sequence[int], p: float) -> flow.Tensor:
    """Factors for `x` (samples, ...), local or global, eager or of a graph, in its dtype and on its
    device or placement; `shape` broadcasts to that of `x`, `p` is the probability of a 0."""
    site = Site(tuple(shape), p)
    if _source is not None:
        factors = _source(site)
    elif x.is_lazy or x.is_global:
        factors = _compared(x, site)
    else:
        factors = site.draw(x.device)
    return factors.to(x.dtype)


def _compared(x: flow.Tensor, site: Site) -> flow.Tensor:
    """Factors from uniform numbers: for global tensors, whose ranks must agree on them, and for
    graphs that nobody gives factors to. Those draw anew at each run, from where they were compiled
    on."""
    if x.is_global:
        # A number is the same on every rank that has a part of what it multiplies.
        sbp = [_layout_of_factors(part, x, site.shape) for part in x.sbp]
        numbers = flow.rand(*site.shape, placement=x.placement, sbp=sbp)
    else:
        numbers = flow.rand(*site.shape, device=x.device, generator=_generator_of_its_own())
    kept = (numbers >= site.p).to(flow.float32)
    return kept / (1 - site.p) if site.p < 1 else kept


def _layout_of_factors(part: flow.sbp.sbp, x: flow.Tensor, shape: tuple[int, ...]) -> flow.sbp.sbp:
    """Split where x is, on axes that the factors have in full; parts of a sum get the same ones."""
    for axis, (size, whole) in enumerate(zip(shape, x.shape, strict=True)):
        if part == flow.sbp.split(axis) and size == whole:
            return part
    return flow.sbp.broadcast


def _generator_of_its_own() -> Any:
    """A generator seeded from the default one: an operator of a graph starts at the seed of the
    generator that it is given, so with one generator all of them would draw the same numbers."""
    with flow._oneflow_internal.lazy_mode.guard(False):
        seed = int(flow.randint(0, 2**31 - 1, (1,)).numpy()[0])
    generator = flow.Generator()
    generator.manual_seed(seed)
    return generator
