"""Contraction without workgroup memory: each thread keeps a block of results in registers and reads storage.

The best form where loads cost much and workgroup memory costs more still, as on drivers that run on the CPU.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..ir import expr as E
from .contract_plan import Contraction, Copies, inner_axis, plain_tensors
from .address import Address, Term
from .program import Kernel, Scratch, Tensor
from .schedule import BUILTINS, finish, fold
from .target import Target
from .writer import WIDTH, Writer, contiguous, indent

_XYZW = "xyzw"


@dataclass(frozen=True)
class Block:
    """Tile shapes: results of a thread, and how threads of a workgroup lie."""

    tm: int
    tn: int
    x: int = 8
    y: int = 8
    lanes: int = 0  # lanes that share out the loads of the rows, 0 for none

    @property
    def size(self) -> int:
        """Invocations of a workgroup."""
        return self.x * self.y


def sharing_lanes(target: Target) -> int:
    """Lanes of a subgroup that surely exist, 0 without subgroups."""
    if not target.features.subgroups:
        return 0
    bits = re.search(r"llvmpipe.*?(\d+) bits", target.name)
    return min(8, int(bits[1]) // 32) if bits else 4


def choose_block(c: Contraction) -> Block:
    """Large blocks need few loads; small problems need enough threads and little waste at the edges."""
    best, cost = Block(4, 4), math.inf
    lanes = sharing_lanes(c.target)
    for tm in (1, 2, 4, 8, 16, 32, 64):
        for tn in (1, 2, 4, 8, 16):
            block = Block(tm, tn, 8, 1, lanes)
            if tm * tn <= 256 and block_fits(c, block) and (estimate := milliseconds(c, block)) < cost:
                best, cost = block, estimate
    return best


def block_fits(c: Contraction, b: Block) -> bool:
    """Whether rows and columns come in whole vec4s where they must."""
    return not ((c.left_mode == "m" and not b.lanes and b.tm % WIDTH) or (c.wide and b.tn % WIDTH))


def milliseconds(c: Contraction, b: Block) -> float:
    """Time of twenty runs and one compilation on the software driver, fitted to measurements.

    A load of a word costs as much as some twenty multiplications of 8 lanes.
    """
    batch, m, n, k = c.sizes
    tiles = batch * -(-m // (b.tm * b.y)) * -(-n // (b.tn * b.x)) * b.y * b.x / 8
    tiles = -(-tiles // 4) * 4
    left = b.tm * (0.5 if c.left_mode == "k" or (c.left_mode == "m" and not b.lanes) else 1.0)
    right = b.tn * (0.5 if c.right_mode else 1.0)
    step = 35 * (left / (b.lanes or 1) + right) + 1.6 * b.tm * b.tn + 0.5 * b.tm + 40 / c.unroll
    return 20 * tiles * (k * step + 100 * b.tm * b.tn) * 1e-6 + 50 + 1.1 * b.tm * b.tn


def registers(c: Contraction, name: str, block: Block, splits: int = 1, scratch: Scratch | None = None) -> Kernel:
    """Print the kernel. With ``splits`` the sums over pieces of k go to ``scratch``, in order of the pieces."""
    if block.lanes and c.left_mode == "m":
        c.left_mode = ""  # a lane loads single rows
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
    kernel = finish(c.group, w, c.layout, lines, name, "contract", block.size, grid)
    if block.lanes:
        builtins = f"{BUILTINS}, @builtin(subgroup_invocation_id) sub: u32"
        enable = "enable subgroups;\n" if c.target.enable_subgroups_directive else ""
        kernel = replace(kernel, wgsl=enable + kernel.wgsl.replace(BUILTINS, builtins))
    return kernel


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
        if not b.lanes:
            w.line(f"if (m0 >= {self.m_end} || n0 >= {self.n_end}) {{ return; }}")
        own = {a: a for g in c.batch for a in g}
        self.copies.place(own, c.batch, batch, 0)

    def shared_rows(self) -> list[str]:
        """Positions of the rows that this lane loads for all the lanes."""
        w, b = self.w, self.block
        lane = w.let(f"sub % {b.lanes}u", 0, "l")
        return [
            w.let(f"min({plus('m0', i)} + {lane}, {self.m_end} - 1u)", 0, "m") for i in range(0, b.tm, b.lanes)
        ]

    def units(self, wide: bool, count: int, start: str, stop: str, stem: str, depth: int = 0) -> list[str]:
        """Positions of a thread's rows or columns (vec4s of them), clamped into the array."""
        step = WIDTH if wide else 1
        if wide:
            start, stop = f"{start} / {WIDTH}u", f"{stop} / {WIDTH}u"
        return [
            self.w.let(f"min({plus(start, i)}, {stop} - 1u)", depth, stem) for i in range(count // step)
        ]

    def multiply(self) -> list[str]:
        """The loop over k; gives its lines, accumulators included."""
        c, w, b = self.c, self.w, self.block
        u = c.unroll
        if b.lanes:
            places = self.shared_rows()
        else:
            places = self.units(c.left_mode == "m", b.tm, "m0", self.m_end, "m")
        rows = [self.placed(c.m, at, c.left_mode == "m") for at in places]
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
            start = w.let(f"piece * {piece}", 0, "s")
            stop = w.let(f"min({start} + {piece}, {steps})", 0, "s")
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
                if b.lanes:
                    x = w.let(f"subgroupBroadcast({left[i // b.lanes][s]}, {i % b.lanes}u)", 1, "l")
                elif c.left_mode == "m":
                    x = left[i // WIDTH][s] + "." + _XYZW[i % WIDTH]
                else:
                    x = left[i][s]
                for j in range(len(columns)):
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
        c = self.c
        stores = [(c.group.target(x)[0], c.store(x), body) for x, body in c.epilogue.items()]
        self.finish(stores, c.number)

    def partial(self, scratch: Scratch) -> None:
        """Sums over a piece of k, to memory that a second kernel adds up."""
        c, w = self.c, self.w
        piece = len(w.space)
        w.space.append(self.splits)
        w.axis(piece, "piece", 0)
        size = c.member.stage.size
        term = Term(size, ("axes", tuple(range(len(c.group.rows)))), piece)
        form = c.store(c.member)
        form = Address((*form.terms, term), form.const)
        if not c.wide or not contiguous(form, inner_axis(c, c.n)):
            w.plain.add(scratch)
        self.finish([(scratch, form, c.result[0])], 1.0)

    def finish(self, stores: Sequence[tuple[Tensor, Address, E.Expr]], number: float) -> None:
        """Stores of every row and column that is inside of the array."""
        c, w, b = self.c, self.w, self.block
        step = WIDTH if c.wide else 1
        columns = [
            self.placed(c.n, at, c.wide, 1) for at in self.units(c.wide, b.tn, "n0", self.n_end, "n", 1)
        ]
        axis = inner_axis(c, c.n)
        factor = None if abs(number) == 1.0 else w.param(("number",), number, "f32", "number")
        for i in range(b.tm):
            w.open()
            row = self.placed(c.m, f"row{i}", False, 2)
            for j, column in enumerate(columns):
                w.open()
                copies = {**row, **column}
                w.vector = column[axis] if c.wide and axis is not None else None
                value = self.result(i, j, c.wide)
                if factor or number == -1.0:
                    value = w.let(f"{value} * {factor}" if factor else f"-{value}", 2, "r")
                elif value.startswith("vec4"):
                    value = w.let(value, 2, "r")
                for n in c.result:
                    w.local[E.substitute(n, {a: E.index(q) for a, q in copies.items()})] = value
                new = [(t, self.copies.move(f, copies), self.copies.bring(e, copies)) for t, f, e in stores]
                # All of them before the first store, which may overwrite what another one reads.
                values = [w.splat(e) if c.wide else w.value(e) for _, _, e in new]
                for (tensor, form, e), v in zip(new, values, strict=True):
                    w.store(tensor, form, v, e.dtype, c.wide)
                w.vector = None
                lines = w.close()
                w.line(f"if ({plus('n0', j * step)} < {self.n_end}) {{")
                w.blocks[-1] += [*indent(lines), "}"]
            lines = w.close()
            w.line(f"let row{i} = {plus('m0', i)};")
            w.line(f"if (row{i} < {self.m_end}) {{")
            w.blocks[-1] += [*indent(lines), "}"]


def plus(name: str, i: int) -> str:
    """A sum without an idle zero."""
    return f"{name} + {i}u" if i else name
