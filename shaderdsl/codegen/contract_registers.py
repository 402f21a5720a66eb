"""Contraction without workgroup memory: each thread keeps a block of results in registers and reads storage.

The best form where loads cost much and workgroup memory costs more still, as on drivers that run on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..ir import expr as E
from .contract_plan import Contraction, Copies, inner_axis, plain_tensors
from .program import Kernel, Scratch
from .schedule import finish, fold
from .writer import WIDTH, Writer, indent

_XYZW = "xyzw"


@dataclass(frozen=True)
class Block:
    """Tile shapes: results of a thread, and how threads of a workgroup lie."""

    tm: int
    tn: int
    x: int = 8
    y: int = 8

    @property
    def size(self) -> int:
        """Invocations of a workgroup."""
        return self.x * self.y


def choose_block(c: Contraction) -> Block:
    """Large blocks need few loads; small problems need enough threads and little waste at the edges."""
    batch, m, n, _ = c.sizes
    best, cost = Block(8, 8), math.inf
    for tm in (1, 2, 4, 8, 16):
        for tn in (1, 2, 4, 8, 16):
            if (c.left_mode == "m" and tm % WIDTH) or (c.wide and tn % WIDTH):
                continue
            # Threads run eight at a time along n.
            rows, columns = -(-m // tm), -(-n // (8 * tn))
            work = batch * rows * columns * (8 * (tm + tn) + 0.5 * tm * tn + 8)
            waste = batch * rows * columns < 16
            if work * (2 if waste else 1) < cost:
                best, cost = Block(tm, tn), work * (2 if waste else 1)
    y = 1
    while y < 8 and y * best.tm < m:
        y *= 2
    return Block(best.tm, best.tn, 8, y)


def registers(c: Contraction, name: str, block: Block, splits: int = 1, scratch: Scratch | None = None) -> Kernel:
    """Print the kernel. With ``splits`` the sums over pieces of k go to ``scratch``, in order of the pieces."""
    w = Writer(c.group.space, c.target)
    plain_tensors(c, w, epilogue=scratch is None)
    tile = _Tile(c, w, block, splits)
    tile.begin()
    loop = tile.multiply()
    if scratch is None:
        tile.epilogue()
    else:
        tile.partial(scratch)
    lines = [*w.blocks[0], *loop, *w.blocks[1], *tile.end]
    grid = fold(tile.count, c.target)
    return finish(c.group, w, c.layout, lines, name, "contract", block.size, grid)


class _Tile:
    """The text of one thread's block."""

    def __init__(self, c: Contraction, w: Writer, block: Block, splits: int):
        self.c, self.w, self.block, self.splits = c, w, block, splits
        self.copies = Copies(c, w)
        self.end: list[str] = []
        batch, m, n, _ = c.sizes
        self.across = -(-n // (block.tn * block.x))
        self.down = -(-m // (block.tm * block.y))
        self.count = self.across * self.down * batch * splits

    def begin(self) -> None:
        """Which block this thread works on."""
        c, w, b = self.c, self.w, self.block
        w.line(f"let tile = group.y * groups.x + group.x;")
        w.line(f"if (tile >= {w.param(('tiles',), self.count, stem='tiles')}) {{ return; }}")
        across, down = w.param(("across",), self.across, stem="across"), w.param(("down",), self.down, stem="down")
        w.line(f"let n0 = (tile % {across} * {b.x}u + lane % {b.x}u) * {b.tn}u;")
        w.line(f"let rest = tile / {across};")
        w.line(f"let m0 = (rest % {down} * {b.y}u + lane / {b.x}u) * {b.tm}u;")
        w.line(f"let outer = rest / {down};")
        batch = "outer"
        if self.splits > 1:
            splits = w.param(("splits",), self.splits, stem="splits")
            w.line(f"let piece = outer % {splits};")
            batch = w.let(f"outer / {splits}", 0, "q")
        self.m_end, self.n_end = w.extent(q for g in c.m for q in g), w.extent(q for g in c.n for q in g)
        w.line(f"if (m0 >= {self.m_end} || n0 >= {self.n_end}) {{ return; }}")
        own = {a: a for g in c.batch for a in g}
        self.copies.place(own, c.batch, batch, 0)

    def units(self, wide: bool, count: int, start: str, stop: str, stem: str) -> list[str]:
        """Positions of a thread's rows or columns (vec4s of them), clamped into the array."""
        w, step = self.w, WIDTH if wide else 1
        out = []
        for i in range(count // step):
            at = f"{start} / {WIDTH}u + {i}u" if wide else f"{start} + {i}u"
            last = f"{stop} / {WIDTH}u - 1u" if wide else f"{stop} - 1u"
            out.append(w.let(f"min({at}, {last})", 0, stem))
        return out

    def multiply(self) -> list[str]:
        """The loop over k; gives its lines, accumulators included."""
        c, w, b = self.c, self.w, self.block
        u = c.unroll
        rows = [
            self.placed(c.m, at, c.left_mode == "m")
            for at in self.units(c.left_mode == "m", b.tm, "m0", self.m_end, "m")
        ]
        columns = [
            self.placed(c.n, at, c.right_mode == "n")
            for at in self.units(c.right_mode == "n", b.tn, "n0", self.n_end, "n")
        ]
        self.acc = [[f"c{i}x{j}" for j in range(len(columns))] for i in range(b.tm)]
        kind = "vec4<f32>" if c.right_mode == "n" else "f32"
        head = [f"var {x}: {kind};" for line in self.acc for x in line]
        steps = w.extent([q for g in c.k for q in g], u)
        start, stop = "0u", steps
        if self.splits > 1:
            piece = w.param(("piece",), self.chunk(), stem="piece")
            start = w.let(f"piece * {piece}", 0, "k")
            stop = w.let(f"min({start} + {piece}, {steps})", 0, "k")
        w.open()
        whole = self.placed(c.k, "k", True, 1) if u > 1 else {}
        ks = []
        for s in range(u):
            at = "k" if u == 1 else w.let(f"k * {WIDTH}u + {s}u", 1, "k")
            ks.append(self.placed(c.k, at, False, 1))
        left = [self.factor(c.left, c.left_mode, c.m, r, whole, ks) for r in rows]
        right = [self.factor(c.right, c.right_mode, c.n, r, whole, ks) for r in columns]
        for s in range(u):
            for i in range(b.tm):
                for j in range(len(columns)):
                    x = left[i // WIDTH][s] + "." + _XYZW[i % WIDTH] if c.left_mode == "m" else left[i][s]
                    acc = self.acc[i][j]
                    w.line(f"{acc} = {acc} + {x} * {right[j][s]};")
        body = w.close()
        w.open()
        return [*head, f"for (var k = {start}; k < {stop}; k = k + 1u) {{", *indent(body), "}"]

    def chunk(self) -> int:
        """Steps of one piece of k."""
        return -(-(-(-self.c.sizes[3] // self.c.unroll)) // self.splits)

    def placed(self, loop: Sequence[Sequence[int]], at: str, vector: bool, depth: int = 0) -> dict[int, int]:
        """Copies of a class at a position."""
        copies = self.copies.make(loop)
        self.copies.place(copies, loop, at, depth, vector)
        return copies

    def factor(
        self, factor: E.Expr, mode: str, outer: Sequence[Sequence[int]], own: dict[int, int], whole: dict[int, int],
        ks: list[dict[int, int]],
    ) -> list[str]:  # fmt: skip
        """One row's (column's) factor at each of the step's positions of k."""
        w = self.w
        if mode == "k":
            w.vector = whole[self.c.k[-1][-1]]
            v = w.splat(self.copies.bring(factor, {**own, **whole}))
            w.vector = None
            return [f"{v}.{_XYZW[s]}" for s in range(WIDTH)]
        w.vector = own[outer[-1][-1]] if mode else None
        values = [self.copies.bring(factor, {**own, **k}) for k in ks]
        out = [w.splat(v) if mode else w.value(v) for v in values]
        w.vector = None
        return out

    # -------------------------------------------------------------- results

    def result(self, i: int, j: int, wide: bool) -> str:
        """A row's result at a column (at a vec4 of columns)."""
        row = self.acc[i]
        if wide and self.c.right_mode != "n":
            return f"vec4<f32>({', '.join(row[j * WIDTH : j * WIDTH + WIDTH])})"
        return row[j]

    def epilogue(self) -> None:
        """Everything that is computed from the result, and the stores."""
        c, w, b = self.c, self.w, self.block
        step = WIDTH if c.wide else 1
        w.base = 0
        columns = []
        for j in range(b.tn // step):
            at = f"n0 / {WIDTH}u + {j}u" if c.wide else f"n0 + {j}u"
            name = w.let(f"min({at}, {self.n_end}{f' / {WIDTH}u' if c.wide else ''} - 1u)", 1, "n")
            columns.append(self.placed(c.n, name, c.wide, 1))
        axis = inner_axis(c, c.n)
        number = None
        if c.number not in (1.0, -1.0):
            number = w.param(("number",), c.number, "f32", "number")
        for i in range(b.tm):
            w.open()
            row = self.placed(c.m, f"row{i}", False, 2)
            for j, column in enumerate(columns):
                w.open()
                copies = {**row, **column}
                w.vector = column[axis] if c.wide and axis is not None else None
                value = self.result(i, j, c.wide)
                if number or c.number == -1.0:
                    value = w.let(f"{value} * {number}" if number else f"-{value}", 2, "r")
                elif not value[0] == "c":
                    value = w.let(value, 2, "r")
                for n in c.result:
                    w.local[E.substitute(n, {a: E.index(q) for a, q in copies.items()})] = value
                for x, body in c.epilogue.items():
                    new = self.copies.bring(body, copies)
                    v = w.splat(new) if c.wide else w.value(new)
                    w.store(x.stage, self.copies.move(c.store(x), copies), v, new.dtype, c.wide)
                w.vector = None
                lines = w.close()
                w.line(f"if (n0 + {j * step}u < {self.n_end}) {{")
                w.blocks[-1] += [*indent(lines), "}"]
            lines = w.close()
            w.line(f"let row{i} = m0 + {i}u;")
            w.line(f"if (row{i} < {self.m_end}) {{")
            w.blocks[-1] += [*indent(lines), "}"]

    def partial(self, scratch: Scratch) -> None:
        """Sums over a piece of k, to memory that a second kernel adds up."""
        raise NotImplementedError
