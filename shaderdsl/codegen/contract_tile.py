"""What kernels of a contraction share: which tile it is, and what follows the sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..ir import expr as E
from .address import Address
from .contract_plan import Contraction, Copies, Loop, Pass, inner_axis
from .contract_split import Pieces
from .kernel_text import indent
from .parts import FLAT
from .program import Tensor
from .spelling import WIDTH
from .writer import Writer

XYZW = "xyzw"


class Tile:
    """The text of one thread's part of a tile.

    Blocks of the writer: 0 before the sum, 1 after it, 2 a row, 3 a store.

    Args:
        across, down: workgroups along n and m.
        rows, columns: results of a thread.
        number: the workgroup's number among those of this contraction, if the kernel
            computes several.
    """

    def __init__(
        self,
        c: Contraction,
        w: Writer,
        across: int,
        down: int,
        rows: int,
        columns: int,
        splits: int,
        number: str | None = None,
    ):
        self.c, self.w, self.splits, self.number = c, w, splits, number
        self.across, self.down, self.rows, self.columns = across, down, rows, columns
        self.copies = Copies(c, w)
        self.count = across * down * c.sizes[0] * splits
        self.m_end, self.n_end = (
            w.extent(q for g in c.m for q in g),
            w.extent(q for g in c.n for q in g),
        )

    def decode(self, backwards: int = 0) -> None:
        """Names ``tile_n``, ``tile_m``, ``piece`` and the batch axes.

        Args:
            backwards: where later rows take longer, the rows of a tile: tiles then
                come from the last rows on, those of all batches together.
        """
        c, w = self.c, self.w
        w.line(f"let tile = {self.number or FLAT};")
        if self.number is None:
            count = w.param(("tiles",), self.count, stem="tiles")
            w.line(f"if (tile >= {count}) {{ return; }}")
        across, down = (
            w.param(("across",), self.across, stem="across"),
            w.param(("down",), self.down, stem="down"),
        )
        if backwards:
            many = w.param(("batches",), self.count // self.across // self.down)
            run = self.c.group.space[c.m[-1][-1]] if len(c.m) > 1 else c.sizes[1]
            tiles = w.param(("run",), -(-run // backwards), stem="run")
            runs = w.param(("runs",), c.sizes[1] // run, stem="runs")
            w.line(f"let tile_n = tile / {many} % {across};")
            w.line(f"let order = tile / {many} / {across};")
            back = f"{tiles} - 1u - order / {runs}"
            w.line(f"let tile_m = order % {runs} * {tiles} + ({back});")
            batch = w.let(f"tile % {many}", 0, "b")
        else:
            w.line(f"let tile_n = tile % {across};")
            w.line(f"let tile_m = tile / {across} % {down};")
            batch = w.let(f"tile / {across} / {down}", 0, "b")
        if self.splits > 1:
            splits = w.param(("splits",), self.splits, stem="splits")
            w.line(f"let piece = {batch} % {splits};")
            batch = w.let(f"{batch} / {splits}", 0, "b")
        self.copies.place({a: a for g in c.batch for a in g}, c.batch, batch, 0)

    def piece(self, p: Pass, steps: int, unit: int, depth: int = 0) -> tuple[str, str]:
        """First and last step of this piece of k, ``unit`` positions a step."""
        w = self.w
        whole = w.extent([q for g in p.k for q in g], unit)
        if self.splits == 1:
            return "0u", whole
        number = self.c.passes.index(p)
        key = ("piece", number) if number else ("piece",)
        length = w.param(key, steps, stem="piece")
        start = w.let(f"piece * {length}", depth, "s")
        return start, w.let(f"min({start} + {length}, {whole})", depth, "s")

    def placed(
        self, loop: Loop, at: str, vector: bool, depth: int = 0
    ) -> dict[int, int]:
        """Copies of a class at a position."""
        copies = self.copies.make(loop)
        self.copies.place(copies, loop, at, depth, vector)
        return copies

    def read(self, factor: E.Expr, copies: dict[int, int], axis: int | None) -> str:
        """A factor's value over copies, as a vec4 along one of them if asked."""
        self.w.vector = None if axis is None else copies[axis]
        new = self.copies.bring(factor, copies)
        value = self.w.value(new) if axis is None else self.w.splat(new)
        self.w.vector = None
        return value

    # ----------------------------------------------------- said by each kernel

    def row_at(self, i: int) -> str:
        """Position of a thread's row."""
        raise NotImplementedError

    def column_at(self, j: int) -> str:
        """Position of a thread's column, in vec4s if results are ``wide``."""
        raise NotImplementedError

    def result(self, acc: int, i: int, j: int) -> str:
        """A row's sum at a column (at a vec4 of columns)."""
        raise NotImplementedError

    # -------------------------------------------------------------- results

    def epilogue(self) -> None:
        """Everything that is computed from the result, and the stores."""
        c = self.c
        stores = [
            (c.group.target(x)[0], c.store(x), body) for x, body in c.epilogue.items()
        ]
        self.finish(stores, c.numbers)

    def partial(self, pieces: Pieces) -> None:
        """Sums over a piece of k, to memory that a second kernel adds up."""
        c, w = self.c, self.w
        piece = len(w.space)
        w.space.append(self.splits)
        w.axis(piece, "piece", 0)
        if pieces.lies_plain(c):
            w.plain.add(pieces.scratch)
        stores = [
            (pieces.scratch, form, loads[0])
            for form, loads in zip(pieces.forms(c, piece), c.results, strict=True)
        ]
        self.finish(stores, [1.0] * len(stores))

    def finish(
        self,
        stores: Sequence[tuple[Tensor, Address, E.Expr]],
        numbers: Sequence[float],
    ) -> None:
        """Stores of every row and column that is inside of the array."""
        c, w = self.c, self.w
        step = WIDTH if c.wide else 1
        end = f"{self.n_end} / {WIDTH}u" if c.wide else self.n_end
        positions = [
            w.let(self.column_at(j), 1, "n") for j in range(self.columns // step)
        ]
        columns = [
            self.placed(c.n, w.let(f"min({at}, {end} - 1u)", 1, "n"), c.wide, 1)
            for at in positions
        ]
        scales = [self.scale(acc, x) for acc, x in enumerate(numbers)]

        def row(i: int) -> list[str]:
            w.open()
            copies = self.placed(c.m, f"row{i}", False, 2)
            for j, column in enumerate(columns):
                w.open()
                self.store(stores, {**copies, **column}, scales, i, j)
                lines = w.close()
                w.line(f"if ({positions[j]} < {end}) {{")
                w.blocks[-1] += [*indent(lines), "}"]
            lines = w.close()
            return [
                f"let row{i} = {self.row_at(i)};",
                f"if (row{i} < {self.m_end}) {{",
                *indent(lines),
                "}",
            ]

        w.blocks[-1] += self.every_row(row)

    def every_row(self, row: Callable[[int], list[str]]) -> list[str]:
        """The text of all of a thread's rows, made of that of single ones."""
        return [line for i in range(self.rows) for line in row(i)]

    def store(
        self,
        stores: Sequence[tuple[Tensor, Address, E.Expr]],
        copies: dict[int, int],
        scales: Sequence[str],
        i: int,
        j: int,
    ) -> None:
        """Stores of a row at a column, in the innermost block."""
        c, w = self.c, self.w
        axis = inner_axis(c, c.n)
        w.vector = copies[axis] if c.wide and axis is not None else None
        for acc, scale in enumerate(scales):
            value = scale.replace("{}", self.result(acc, i, j))
            if "(" in value or scale != "{}":
                value = w.let(value, 2, "r")
            for n in c.results[acc]:
                axes = {a: E.index(q) for a, q in copies.items()}
                w.local[E.substitute(n, axes)] = value
        new = [
            (t, self.copies.move(f, copies), self.copies.bring(e, copies))
            for t, f, e in stores
        ]
        # All before the first store: it may overwrite what another one reads.
        values = [w.splat(e) if c.wide else w.value(e) for _, _, e in new]
        for (tensor, form, e), v in zip(new, values, strict=True):
            w.store(tensor, form, v, e.dtype, c.wide)
        w.vector = None

    def scale(self, acc: int, number: float) -> str:
        """The text of a sum ``{}`` times its factor."""
        if abs(number) == 1.0:
            return "-{}" if number < 0 else "{}"
        key = ("number", acc) if acc else ("number",)
        return "{} * " + self.w.param(key, number, "f32", "number")


def plus(name: str, i: int) -> str:
    """A sum without an idle zero."""
    return f"{name} + {i}u" if i else name
