"""Shapes of the tiles of a streamed chain, and which one fits."""

from __future__ import annotations

from dataclasses import dataclass

from .choice import pick
from .online_masks import line_bounds
from .online_plan import Online, steps_of
from .online_shape import Tiles, kept
from .spelling import WIDTH


@dataclass(frozen=True)
class Stream(Tiles):
    """The shape of a chain whose chunks stream.

    ``ku`` lines are unrolled in a sum. Values of a tile go to workgroup memory a chunk
    at a time, or all at once if ``whole``: that takes more of it, but no registers.
    """

    ku: int = 8
    whole: int = 0

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
        values = self.held * self.value_row + self.lc * self.columns(columns) * self.tx
        return max(factors, values, self.tx * self.rows // WIDTH)

    @property
    def held(self) -> int:
        """Lines whose values are in workgroup memory at a time."""
        return self.lines if self.whole else self.lc


#: 8 × 8 results a thread, for one product and sums of up to 64 columns.
TALL = Stream(128, 64, 8, 16, 8, 16, 16)
#: The same for up to 128 columns.
WIDE = Stream(128, 128, 16, 16, 16, 32, 16)
#: 8 × 4 results a thread: more lanes a row, for fewer rows or two products.
SLIM = Stream(128, 64, 16, 16, 16, 16, 16)
LOW = Stream(64, 64, 16, 8, 16, 16, 8)
FLAT = Stream(64, 64, 16, 8, 8, 16, 16)
#: For two sums, narrow and wide: fewer registers, less text, more memory.
HELD = Stream(64, 64, 16, 8, 16, 16, 16, 1)
WHOLE = Stream(128, 64, 16, 16, 16, 16, 8, 1)
#: For few rows: more workgroups.
SHORT = Stream(32, 64, 16, 8, 16, 16, 16)
#: The same for narrow sums.
BRIEF = Stream(32, 64, 16, 8, 16, 16, 16, 1)
STREAMS = (TALL, WIDE, SLIM, WHOLE, HELD, LOW, FLAT, SHORT, BRIEF)
#: Accumulators of a thread: what leaves registers to spare, and what does not spill.
_LIGHT, _REGISTERS = 128, 192
#: Workgroups that fill a large device.
_FULL = 264


def choose_stream(o: Online) -> Stream | None:
    """The shape of a stream by what was measured, or tuned; None where none fits."""
    columns = any(s.column is not None for s in o.sums)
    every = [t for t in STREAMS if columns and _fits(o, t)]
    if not every:
        return None
    low = _groups(o, LOW) >= _FULL
    two = sum(1 for s in o.sums if s.column is not None) > 1
    # Of few workgroups the longest decide, and those of two sums are long.
    narrow = two and kept(o, FLAT) <= _LIGHT
    if narrow and _groups(o, LOW) < 2 * _FULL:
        order = [BRIEF, SHORT, FLAT]
    elif two and low:
        order = [HELD, FLAT] if narrow else [WHOLE, LOW, FLAT]
    elif len(o.products) > 1 and low:
        order = [LOW, FLAT]
    elif two or len(o.products) > 1:
        order = [SHORT, FLAT]
    else:
        order = _of_one_sum(o)
    order = [t for t in order if t in every]
    light = [t for t in order if kept(o, t) <= _LIGHT or t.whole]
    default = (light or order or every[-1:])[0]
    return pick(o.target, "online_stream", default, lambda: every, every.__contains__)


def _of_one_sum(o: Online) -> list[Stream]:
    """Shapes of one product with one sum, as attention's forward is.

    Where masks shorten some rows, the workgroups of long ones decide unless there are
    many: then small tiles win before they fill the device.
    """
    tall = _groups(o, TALL)
    if tall >= _FULL:
        return [TALL, WIDE, LOW]
    if 4 * tall >= 3 * _FULL:
        return [WIDE, SLIM, FLAT]
    if _groups(o, LOW) < _FULL:
        return [SHORT, FLAT]
    short = [BRIEF, SHORT] if kept(o, FLAT) <= _LIGHT // 2 else [SHORT]
    uneven = any(sign for bounds in line_bounds(o) for _, sign in bounds)
    return [*short, FLAT] if uneven else [FLAT, *short]


def _groups(o: Online, t: Stream) -> int:
    """Workgroups of a shape."""
    return steps_of(o.extent(o.row), t.rows) * o.batches


def _fits(o: Online, t: Stream) -> bool:
    """Whether a tile divides the products and keeps to the limits."""
    limits = o.target.limits
    columns = [o.extent(s.column) for s in o.sums if s.column is not None]
    shares = [
        t.rows * t.dc // WIDTH,
        t.lines * t.dc // WIDTH,
        *(
            t.lc * t.columns(o.extent(s.column)) * t.tx
            for s in o.sums
            if s.column is not None
        ),
    ]
    return (
        not any(o.extent(p.inner) % t.dc for p in o.products)
        and not any(n % t.size for n in shares)
        and o.extent(o.row) >= t.rows
        and o.extent(o.line) >= t.lines
        and kept(o, t) <= _REGISTERS
        and t.memory(max(columns)) * 16 <= limits.max_workgroup_storage
        and t.size <= limits.max_invocations
    )
