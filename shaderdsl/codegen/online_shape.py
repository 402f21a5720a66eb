"""Shapes of the tiles of a chain, and which one fits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from .choice import pick
from .online_plan import Online, steps_of
from .target import Target
from .writer import WIDTH


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


def choose_tiles(o: Online) -> Tiles:
    """The largest tile whose accumulators stay in registers, or what was tuned."""
    every = [t for t in _tiles() if _fits(o, t)]
    assert every
    light = [t for t in every if _kept(o, t) <= _REGISTERS and _tall(o, t)]
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
    columns = max(o.extent(s.column) for s in o.sums if s.column is not None)
    return (
        not any(o.extent(p.inner) % t.dc for p in o.products)
        and t.memory(columns) * 16 <= limits.max_workgroup_storage
        and t.size <= limits.max_invocations
    )


def _kept(o: Online, t: Tiles) -> int:
    """Registers that a thread's accumulators take."""
    columns = [o.extent(s.column) for s in o.sums if s.column is not None]
    kept = len(o.products) * t.tm * t.tl
    return kept + sum(t.tm * t.columns(n) * WIDTH for n in columns)


def _tall(o: Online, t: Tiles) -> bool:
    return t.rows <= 64 or o.extent(o.row) >= 256


@dataclass(frozen=True)
class Stream(Tiles):
    """The shape of a chain whose chunks stream; ``ku`` lines unrolled in a sum."""

    ku: int = 8

    @property
    def near_row(self) -> int:
        """vec4s of a position of the inner axis, rows apart in their banks."""
        return self.rows // WIDTH + 1

    @property
    def far_row(self) -> int:
        """The same of lines."""
        return self.lines // WIDTH + 1

    @property
    def value_row(self) -> int:
        """vec4s of a line's values."""
        return self.rows // WIDTH + 2

    def memory(self, columns: int) -> int:
        """vec4s of workgroup memory, for sums of so many columns."""
        factors = self.dc * (self.near_row + self.far_row)
        values = self.lc * (self.value_row + self.columns(columns) * self.tx)
        return max(factors, values, self.tx * self.rows // WIDTH)


#: Shapes of streams, from large to small.
STREAMS = (
    Stream(128, 64, 8, 16, 8, 16),
    Stream(64, 64, 16, 8, 16, 16),
    Stream(64, 64, 16, 8, 8, 16),
)
#: Accumulators of a thread in a stream; more spill.
_STREAM_REGISTERS = 192
#: Workgroups below which a smaller tile keeps more of a large device busy.
_STREAM_GROUPS = 264


def choose_stream(o: Online) -> Stream | None:
    """The shape of a stream, None where none fits."""
    limits = o.target.limits
    inner = [o.extent(p.inner) for p in o.products]
    columns = [o.extent(s.column) for s in o.sums if s.column is not None]
    for t in STREAMS:
        if any(n % t.dc for n in inner):
            continue
        if o.extent(o.row) < t.rows or o.extent(o.line) < t.lines:
            continue
        kept = len(inner) * t.tm * t.tl
        kept += sum(t.tm * t.columns(n) * WIDTH for n in columns)
        fits = t.memory(max(columns)) * 16 <= limits.max_workgroup_storage
        if not fits or t.size > limits.max_invocations:
            continue
        if t.rows > 64:
            groups = steps_of(o.extent(o.row), t.rows) * o.batches
            if kept > 128 or groups < _STREAM_GROUPS:
                continue
        if kept <= _STREAM_REGISTERS:
            return t
    return None


def shuffles(target: Target, tx: int) -> bool:
    """Whether lanes that share rows surely are neighbours in one subgroup."""
    return target.features.subgroups and "NVIDIA" in target.name and tx <= 32
