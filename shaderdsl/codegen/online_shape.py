"""Shapes of the tiles of a chain, and which one fits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from .choice import pick
from .online_plan import Online, steps_of
from .spelling import WIDTH
from .target import Target


@dataclass(frozen=True)
class Tiles:
    """Rows and lines of a tile; ``tx`` by ``ty`` threads; lengths of chunks."""

    rows: int
    lines: int
    tx: int
    ty: int
    dc: int
    lc: int

    @property
    def size(self) -> int:
        """Invocations of a workgroup."""
        return self.tx * self.ty

    @property
    def tm(self) -> int:
        """Rows of a thread."""
        return self.rows // self.ty

    @property
    def tl(self) -> int:
        """Lines of a thread."""
        return self.lines // self.tx

    def columns(self, n: int) -> int:
        """vec4s of a row that a thread keeps, of ``n`` elements."""
        return steps_of(n, WIDTH * self.tx)

    def memory(self, columns: int) -> int:
        """vec4s of workgroup memory, for sums of so many columns."""
        factors = self.dc * (self.rows + self.lines) // WIDTH
        values = self.lc * (self.rows // WIDTH + self.columns(columns) * self.tx)
        return max(factors, values, self.tx * self.rows // WIDTH)


#: From large to small.
SHAPES = (
    (128, 64, 8, 16),
    (64, 64, 16, 8),
    (64, 64, 16, 16),
    (64, 32, 8, 8),
    (32, 32, 8, 8),
)
#: Registers that a thread's accumulators may take.
_REGISTERS = 144


def choose_tiles(o: Online) -> Tiles | None:
    """The largest tile whose accumulators stay in registers, or what was tuned; None
    where the device has too little workgroup memory for any.
    """
    every = [t for t in _tiles() if _fits(o, t)]
    if not every:
        return None
    light = [t for t in every if kept(o, t) <= _REGISTERS and _tall(o, t)]
    default = (light or every[-1:])[0]
    return pick(
        o.target,
        "online_tiles",
        default,
        lambda: [*light, *(t for t in every if t not in light)],
        lambda t: t in every,
    )


def _tiles() -> Iterator[Tiles]:
    for rows, lines, tx, ty in SHAPES:
        for dc, lc in itertools.product((16, 8, 4), (2 * tx, tx)):
            if lc <= 16:
                yield Tiles(rows, lines, tx, ty, dc, lc)


def _fits(o: Online, t: Tiles) -> bool:
    """Whether a tile divides the products and keeps to the limits."""
    limits = o.target.limits
    columns = max(
        (o.extent(s.column) for s in o.sums if s.column is not None), default=0
    )
    return (
        not any(_whole(o.extent(p.inner)) % t.dc for p in o.products)
        and t.memory(columns) * 16 <= limits.max_workgroup_storage
        and t.size <= limits.max_invocations
    )


def _whole(n: int) -> int:
    """An extent in whole vec4s."""
    return steps_of(n, WIDTH) * WIDTH


def kept(o: Online, t: Tiles) -> int:
    """Registers that a thread's accumulators take."""
    columns = [o.extent(s.column) for s in o.sums if s.column is not None]
    kept = len(o.products) * t.tm * t.tl
    return kept + sum(t.tm * t.columns(n) * WIDTH for n in columns)


def _tall(o: Online, t: Tiles) -> bool:
    return t.rows <= 64 or o.extent(o.row) >= 256


def shuffles(target: Target, tx: int) -> bool:
    """Whether lanes that share rows surely are neighbours in one subgroup."""
    return target.features.subgroups and "NVIDIA" in target.name and tx <= 32
