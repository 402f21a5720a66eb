"""The frame of a tiled chain: which rows a workgroup has, and what follows the sums."""

from __future__ import annotations

from collections.abc import Sequence

from .contract_tile import XYZW, plus
from .kernel_text import indent
from .online_masks import Masks, line_bounds
from .online_plan import (
    LOWEST,
    Axes,
    Online,
    Sum,
    column_of,
    is_one,
    steps_of,
)
from .online_shape import Tiles, shuffles
from .spelling import WIDTH
from .writer import Writer

BARRIER = "workgroupBarrier();"


class Tile:
    """Blocks of the writer: 0 the rows, 1 an outer position, 2 a tile, 3 a chunk."""

    def __init__(self, o: Online, w: Writer, tiles: Tiles):
        self.o, self.w, self.t = o, w, tiles
        self.axes = Axes(o, w)
        self.groups = tiles.tm // WIDTH
        self.matrices = [s for s in o.sums if s.column is not None]
        self.scalars = [s for s in o.sums if s.column is None]
        self.exact = o.extent(o.line) % tiles.lines == 0
        self.places: list[dict[int, int]] = []  # a thread's lines
        self.inside: list[str | None] = []  # whether they exist
        self.whole: str | None = None  # whether all of the tile counts

    def begin(self) -> None:
        """Which rows this workgroup and this thread work on."""
        o, w, t = self.o, self.w, self.t
        many = steps_of(o.extent(o.row), t.rows)
        tiles = w.param(("tiles",), many, stem="tiles")
        heads = w.param(("batches",), o.batches, stem="batches")
        w.line("let flat = group.y * groups.x + group.x;")
        w.line(f"if (flat >= {tiles} * {heads}) {{ return; }}")
        self.row_end = w.extent([o.row])
        self.line_end = w.extent([o.line])
        copies = {a: a for q in o.batch for a in q}
        self.axes.place(copies, o.batch, w.let(f"flat % {heads}", 0), 0)
        ends = (self.row_end, self.line_end)
        self.masks = Masks(o, self.axes, t.rows, ends, t.lines, self.exact)
        # The longest rows first, so that none is left for the end.
        at = f"flat / {heads}"
        if any(sign > 0 for _, sign in line_bounds(o)[1]):
            at = f"{tiles} - 1u - {at}"
        w.line(f"let top = ({at}) * {t.rows}u;")
        self.lanes()
        self.rows = [w.let(self.row_at(i), 0, "r") for i in range(t.tm)]
        self.own = [self.clamped_row(r, 0) for r in self.rows]

    def lanes(self) -> None:
        """Which rows and columns of a tile a thread has."""
        self.w.line(f"let tx = lane % {self.t.tx}u;")
        self.w.line(f"let ty = lane / {self.t.tx}u;")

    def steps(self) -> list[int]:
        """Distances of lanes by which values of one row come together."""
        return [1 << i for i in range(self.t.tx.bit_length() - 1)]

    def row_at(self, i: int) -> str:
        """A thread's row."""
        return plus(f"top + ty * {WIDTH}u", i // WIDTH * self.t.ty * WIDTH + i % WIDTH)

    def clamped_row(self, at: str, depth: int) -> dict[int, int]:
        """A row that exists."""
        name = self.w.let(f"min({at}, {self.row_end} - 1u)", depth)
        return self.axes.at(self.o.row, name, depth)

    def declare(self) -> None:
        """Running values: vec4s along rows, those of weighted sums along columns."""
        w, o, t = self.w, self.o, self.t
        if o.maximum is not None:
            for g in range(self.groups):
                w.line(f"var most{g} = vec4<f32>({LOWEST!r});")
        for i in range(len(self.scalars)):
            w.blocks[-1] += [f"var s{i}g{g}: vec4<f32>;" for g in range(self.groups)]
        for i, s in enumerate(self.matrices):
            assert s.column is not None
            for c in range(t.columns(o.extent(s.column))):
                w.blocks[-1] += [f"var a{i}r{r}c{c}: vec4<f32>;" for r in range(t.tm)]

    def columns(self) -> None:
        """A thread's lines of a tile, whether they exist, whether the tile is whole."""
        w, t = self.w, self.t
        columns = []
        for j in range(t.tl):
            at = f"l + (tx + {j // WIDTH * t.tx}u) * {WIDTH}u + {j % WIDTH}u"
            columns.append(w.let(at, 2, "n"))
        self.inside = [
            None if self.exact else w.let(f"{n} < {self.line_end}", 2, "b")
            for n in columns
        ]
        self.places = [
            self.axes.at(
                self.o.line,
                n if self.exact else w.let(f"min({n}, {self.line_end} - 1u)", 2, "n"),
                2,
            )
            for n in columns
        ]
        self.whole = self.masks.tile()

    def across(self, values: Sequence[str], how: str, depth: int) -> list[str]:
        """Combine values of the lanes that share rows."""
        w, t = self.w, self.t
        if shuffles(self.o.target, t.tx):
            out = []
            for v in values:
                for step in self.steps():
                    other = f"subgroupShuffleXor({v}, {step}u)"
                    v = w.let(how.format(v, other), depth, "v")
                out.append(v)
            w.uses_subgroups = True
            return out
        width = t.rows // WIDTH
        w.line(BARRIER, depth)
        for g, v in enumerate(values):
            w.line(f"sm[tx * {width}u + ty + {g * t.ty}u] = {v};", depth)
        w.line(BARRIER, depth)
        out = []
        for g in range(len(values)):
            v = w.let(f"sm[{plus('ty', g * t.ty)}]", depth, "v")
            for x in range(1, t.tx):
                other = f"sm[{plus('ty', x * width + g * t.ty)}]"
                v = w.let(how.format(v, other), depth, "v")
            out.append(v)
        w.line(BARRIER, depth)
        return out

    def epilogue(self) -> None:
        """Everything that is computed from the sums, and the stores."""
        o, w, t = self.o, self.w, self.t
        if o.maximum is not None:
            low = w.let("bitcast<f32>(sd_bits(0xff800000u))", 0, "inf")
            for r, own in enumerate(self.own):
                most = f"most{r // WIDTH}.{XYZW[r % WIDTH]}"
                text = f"select({most}, {low}, {most} <= {LOWEST!r})"
                final = w.let(text, 0, "m")
                self.axes.known([o.group.own_load(o.maximum)], own, final)
        for i, s in enumerate(self.scalars):
            parts = [f"s{i}g{g}" for g in range(self.groups)]
            for g, v in enumerate(self.across(parts, "{0} + {1}", 0)):
                for e in range(WIDTH):
                    own = self.own[g * WIDTH + e]
                    total = self.finished(s, f"{v}.{XYZW[e]}", own)
                    self.axes.known([s.own], own, total)
        for r, own in enumerate(self.own):
            w.open()
            w.base = 1
            for m, body in o.epilogue.items():
                column = column_of(o, m)
                tensor = o.group.target(m)[0]
                if column is None:
                    v = self.axes.value(body, own)
                    w.open()
                    w.store(
                        tensor, self.axes.move(o.store(m), own), v, body.dtype, False
                    )
                    stores = w.close()
                    w.line("if (tx == 0u) {")
                    w.blocks[-1] += [*indent(stores), "}"]
                    continue
                vectors = steps_of(o.extent(column), WIDTH)
                for c in range(t.columns(o.extent(column))):
                    whole = (c + 1) * t.tx <= vectors
                    at = plus("tx", c * t.tx)
                    place = at if whole else f"min({at}, {vectors - 1}u)"
                    copies = {
                        **own,
                        **self.axes.at(column, w.let(place, 1, "n"), 1, True),
                    }
                    for i, s in enumerate(self.matrices):
                        if s.column == column:
                            total = self.finished(s, f"a{i}r{r}c{c}", own)
                            self.axes.known([s.own], copies, total)
                    v = self.axes.value(body, copies, column)
                    form = self.axes.move(o.store(m), copies)
                    self.axes.along(column, copies)
                    w.open()
                    w.store(tensor, form, v, body.dtype, True)
                    stores = w.close()
                    self.axes.along(None)
                    if whole:
                        w.blocks[-1] += stores
                    else:
                        w.line(f"if ({at} < {vectors}u) {{")
                        w.blocks[-1] += [*indent(stores), "}"]
            lines = w.close()
            w.base = 0
            w.line(f"if ({self.rows[r]} < {self.row_end}) {{")
            w.blocks[0] += [*indent(lines), "}"]

    def finished(self, s: Sum, name: str, copies: dict[int, int]) -> str:
        """A sum with what stands before it."""
        if is_one(s.outer):
            return name
        depth = len(self.w.blocks) - 1
        return self.w.let(f"{name} * {self.axes.value(s.outer, copies)}", depth, "r")
