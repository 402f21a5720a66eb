"""Shapes of tiles on a GPU, and how one is chosen for contractions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from .choice import pick
from .contract_plan import Contraction
from .contract_seen import seen
from .spelling import WIDTH


@dataclass(frozen=True)
class Shape:
    """Results of a workgroup and of a thread; ``bk`` positions of k at a time."""

    bm: int
    bn: int
    bk: int
    tm: int
    tn: int
    pad: int = 1  # vec4s that keep rows of workgroup memory on different banks

    @property
    def size(self) -> int:
        """Invocations of a workgroup."""
        return self.bm // self.tm * (self.bn // self.tn)

    @property
    def memory(self) -> int:
        """Bytes of workgroup memory for one product."""
        return self.needed(1, 1)

    def needed(self, lefts: int, rights: int) -> int:
        """Bytes of workgroup memory for so many factors of each side."""
        left, right = self.bm // WIDTH + self.pad, self.bn // WIDTH + self.pad
        return self.bk * (lefts * left + rights * right) * 16

    def fits(self, c: Contraction) -> bool:
        """Whether a workgroup can hold what a contraction takes."""
        limits = c.target.limits
        memory = max(self.needed(len(p.lefts), len(p.rights)) for p in c.passes)
        return (
            memory <= limits.max_workgroup_storage
            and self.size <= limits.max_invocations
            and self.tm * self.tn * len(c.results) <= _MOST_SUMS
        )


#: Sums of a thread, beyond which they do not stay in registers.
_MOST_SUMS = 128

#: From large to small, with a guess of the share of the best speed that each reaches on
#: a large product.
SHAPES = (
    (Shape(128, 128, 8, 16, 8), 1.0),
    (Shape(64, 128, 16, 8, 8), 0.98),
    (Shape(128, 64, 16, 8, 8), 0.98),
    (Shape(64, 128, 8, 8, 8), 0.88),
    (Shape(64, 64, 16, 8, 8), 0.88),
    (Shape(32, 64, 16, 4, 8), 0.55),
    (Shape(16, 128, 16, 4, 4), 0.4),
    (Shape(32, 32, 16, 4, 4), 0.35),
)


class Tile(Protocol):
    """What is common to shapes: results of a workgroup."""

    @property
    def bm(self) -> int:
        """Rows."""
        ...

    @property
    def bn(self) -> int:
        """Columns."""
        ...


@dataclass(frozen=True)
class Tiling:
    """A tile shape, and into how many pieces k is cut."""

    shape: Shape
    splits: int


def choose_shape(cs: Sequence[Contraction], longest: int) -> tuple[Shape, int]:
    """Tile shape and pieces of k for contractions that share a kernel.

    Large tiles load least, but a device wants about two workgroups a processor.
    """
    target = cs[0].target
    k = max(p.extent for c in cs for p in c.passes)
    costs = {t: tiling_cost(cs, t) for t in tilings(cs, longest)}
    default = min(costs, key=lambda t: costs[t])

    def fits(t: Tiling) -> bool:
        known = t.shape in [shape for shape, _ in SHAPES]
        return (
            known
            and all(t.shape.fits(c) for c in cs)
            and t.splits >= 1
            and math.ceil(k / t.splits) <= max(longest, t.shape.bk)
        )

    chosen = pick(
        target, "tiles", default, lambda: sorted(costs, key=lambda t: costs[t]), fits
    )
    return chosen.shape, chosen.splits


def tilings(cs: Sequence[Contraction], longest: int) -> Iterator[Tiling]:
    """Shapes that the device allows, with pieces that are neither tiny nor too long."""
    k = max(p.extent for c in cs for p in c.passes)
    for shape, _ in SHAPES:
        if not all(shape.fits(c) for c in cs):
            continue
        if cs[0].target.family == "cpu":  # NumPy has no threads to keep busy
            yield Tiling(shape, 1)
            continue
        for splits in pieces_of_k(k, longest, shape.bk, _SPLITS):
            yield Tiling(shape, splits)


def pieces_of_k(
    k: int, longest: int, step: int, counts: Iterable[int]
) -> Iterator[int]:
    """As few pieces as may be, then those of ``counts`` that are not tiny: below eight
    steps of a loop.
    """
    needed = math.ceil(k / longest)
    yield needed
    for splits in counts:
        if splits > needed:
            if math.ceil(k / splits) < 8 * step:
                return
            yield splits


def tiling_cost(cs: Sequence[Contraction], t: Tiling) -> float:
    """Time in multiplications of a workgroup, with reading and writing of pieces."""
    shape, splits = t.shape, t.splits
    steps = max(sum(p.extent * len(p.products) for p in c.passes) for c in cs)
    loops = max(len(c.passes) for c in cs)
    groups = splits * sum(workgroups(c, shape) for c in cs)
    waves = _waves(shape, groups, min(len(c.results) for c in cs))
    length = math.ceil(steps / splits) + 2 * shape.bk * loops
    speed = _speed(shape, cs)
    apart = min(len(c.results) for c in cs)
    if shape.bm * apart < 128 and any(
        f.mode == "k" for c in cs for p in c.passes for f in p.rights
    ):
        speed *= _SCATTERED
    if any(seen(c, shape.bm, shape.bn).grows for c in cs):
        if shape.bm == 32 and all(c.sizes[2] <= shape.bn for c in cs):
            speed = _LOW
        length = (
            length // 2 + shape.bm // 2
        )  # rows need half of k, a tile what one needs
    cost = waves * shape.bm * shape.bn * length / speed + _LAUNCH
    if splits > 1:
        results = sum(math.prod(c.sizes[:3]) * len(c.results) for c in cs)
        cost += results * (splits + 1) * _PIECE + _SECOND
    return cost


def _waves(shape: Shape, groups: int, sums: int) -> float:
    """Times that two workgroups a processor take for a number of them."""
    at_once = max(_REGISTERS // (shape.size * (shape.tm * shape.tn * sums + 72)), 1)
    full, left = divmod(groups, _PROCESSORS * at_once)
    many = math.ceil(left / _PROCESSORS)
    if 0 < full < _SPREAD and at_once == 2:
        # All are done at a time, and the first processors take two of what is left.
        many = min(left, 2)
    # Few workgroups on a processor wait for memory and for one another.
    idle = 1 - many / at_once
    return (full * at_once + many / (1 - _IDLE * idle * idle)) / 2


def _speed(shape: Shape, cs: Sequence[Contraction]) -> float:
    """The share of the best speed that a shape reaches.

    A tile of two sums takes as many loads a multiplication as the next larger tile.
    """
    speeds = dict(SHAPES)
    place = list(speeds).index(shape)
    apart = min(len(c.results) for c in cs)
    return list(speeds.values())[max(place + 1 - apart, 0)]


def workgroups(c: Contraction, shape: Tile) -> int:
    """Tiles of a contraction."""
    batch, m, n, _ = c.sizes
    return batch * math.ceil(m / shape.bm) * math.ceil(n / shape.bn)


#: Pieces of k that are worth a comparison.
_SPLITS = (2, 3, 4, 5, 6, 7, 8, 11, 16, 32)

#: What a launch costs, in multiplications of a workgroup; what a second stage costs
#: beside it, and each result of a piece, which is written and read.
_LAUNCH, _SECOND, _PIECE = 40_000, 350_000, 0.08
#: Turns after which processors are done at different times.
_SPREAD = 4
#: What is lost by the square of the share of workgroups that a processor lacks.
_IDLE = 0.6
#: Processors of a large device, and registers of each.
_PROCESSORS, _REGISTERS = 132, 1 << 16
#: Speed of low tiles where rows need ever more of k and one column of tiles reads it:
#: the longest tile ends sooner, and there is less of the diagonal in it.
_LOW = 1.05
#: Speed of lower tiles where words of both factors are scattered over rows.
_SCATTERED = 0.97
