"""What both kernels of a chain in pieces agree on: shapes, bounds, places."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .contract_tile import plus
from .online_masks import Masks
from .online_plan import Axes, Online, Sum, steps_of
from .program import Scratch
from .spelling import WIDTH
from .writer import Writer

BARRIER = "workgroupBarrier();"


@dataclass(frozen=True)
class Pieces:
    """Rows and invocations of a workgroup; pieces that a line is cut into."""

    rows: int
    size: int
    count: int
    o: Online

    @cached_property
    def matrices(self) -> list[Sum]:
        """Weighted sums."""
        return [s for s in self.o.sums if s.column is not None]

    @cached_property
    def scalars(self) -> list[Sum]:
        """Sums without a column."""
        return [s for s in self.o.sums if s.column is None]

    @property
    def groups(self) -> int:
        """vec4s that hold a value of each row."""
        return steps_of(self.rows, WIDTH)

    @property
    def memory(self) -> int:
        """vec4s of workgroup memory."""
        return self.size * max(self.groups, min(self.rows, WIDTH))

    @property
    def bytes(self) -> int:
        """Bytes of workgroup memory, with the trees of all rows' maxima and sums."""
        trees = 4 * self.size * self.rows * max(1, len(self.scalars))
        return 16 * self.memory + trees

    def width(self, s: Sum) -> int:
        """vec4s of a weighted sum's row."""
        assert s.column is not None
        return steps_of(self.o.extent(s.column), WIDTH)

    def lanes_along(self, s: Sum) -> int:
        """Lanes along the columns, a power of two."""
        return min(self.size, 1 << (self.width(s).bit_length() - 1))

    def lanes_down(self, s: Sum) -> int:
        """Lanes that share a column."""
        return self.size // self.lanes_along(s)

    def steps(self, s: Sum) -> int:
        """vec4s of a row that a lane keeps."""
        return steps_of(self.width(s), self.lanes_along(s))

    @property
    def heads(self) -> int:
        """vec4s of a row's maximum and plain sums."""
        return steps_of((self.o.maximum is not None) + len(self.scalars), WIDTH)

    def offset(self, s: Sum) -> int:
        """Where a weighted sum begins among the results of a row."""
        at = self.heads
        for m in self.matrices:
            if m is s:
                return at
            at += self.width(m)
        raise AssertionError

    @property
    def words(self) -> int:
        """vec4s of a row's results."""
        return self.heads + sum(map(self.width, self.matrices))


class Shares:
    """The beginning of both kernels."""

    def __init__(self, o: Online, w: Writer, pieces: Pieces, scratch: Scratch):
        self.o, self.w, self.p, self.scratch = o, w, pieces, scratch
        self.axes = Axes(o, w)

    def begin(self, batch: str, tile: str) -> None:
        """Name the batch, the tile's first row, and how its lines are cut."""
        o, w, p = self.o, self.w, self.p
        self.row_end = w.extent([o.row])
        self.batch = batch
        self.axes.place({a: a for q in o.batch for a in q}, o.batch, batch, 0)
        w.line(f"let top = {tile} * {p.rows}u;")
        ends = (self.row_end, w.extent([o.line]))
        start, stop = Masks(o, self.axes, p.rows, ends).bounds(0)
        pieces = w.param(("pieces",), p.count, stem="pieces")
        w.line(f"let first = {start};")
        w.line(f"let stop = {stop};")
        w.line("let span = select(0u, stop - first, stop > first);")
        w.line(f"let share = (span + {pieces} - 1u) / {pieces};")
        w.line(f"let per = max((share + {p.size - 1}u) / {p.size}u, 1u) * {p.size}u;")

    def place(self, piece: str, row: str, offset: int, column: str = "") -> str:
        """Where a result lies, in vec4s."""
        rows = self.w.param(
            ("rows",), self.o.batches * self.o.extent(self.o.row), stem="rows"
        )
        line = f"{self.batch} * {self.row_end} + {row}"
        text = plus(f"({piece} * {rows} + {line}) * {self.p.words}u", offset)
        return f"{text} + {column}" if column else text

    def columns(self, s: Sum, depth: int) -> list[str]:
        """The vec4s of a row that this lane takes, those beyond its end at the end."""
        w, p = self.w, self.p
        along, width = p.lanes_along(s), p.width(s)
        out = []
        for c in range(p.steps(s)):
            text = plus(f"lane % {along}u", c * along)
            if (c + 1) * along > width:
                text = f"min({text}, {width - 1}u)"
            out.append(w.let(text, depth, "n"))
        return out
