"""Contraction without workgroup memory: a thread keeps a block of results in registers.

The best form where loads cost much and workgroup memory costs more still, as on drivers
that run on the CPU. With subgroups each lane loads some of the rows for all of them:
handing a value around costs a small part of a load there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..ir.expr import Expr
from .address import Address
from .contract_plan import (
    Contraction,
    Factor,
    Loop,
    Pass,
    inner_axis,
    plain_tensors,
)
from .contract_split import Pieces
from .contract_tile import XYZW, Tile, plus
from .kernel_text import indent
from .program import Kernel, Tensor
from .schedule import BUILTINS, finish, fold
from .spelling import WIDTH
from .target import Target
from .writer import Writer


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


#: Blocks that are worth a measurement.
_LIKELY = 12


def likely_blocks(c: Contraction) -> list[Block]:
    """The blocks that should be fastest, the best first.

    Large blocks need few loads; small problems want threads and little waste.
    """
    lanes = sharing_lanes(c.target)
    blocks = [
        Block(tm, tn, 8, 1, lanes)
        for tm in (1, 2, 4, 8, 16, 32, 64)
        for tn in (1, 2, 4, 8, 16)
        if tm * tn * len(c.results) <= 256
    ]
    blocks = [b for b in blocks if block_fits(c, b)] or [Block(4, 4)]
    return sorted(blocks, key=lambda b: milliseconds(c, b))[:_LIKELY]


def block_fits(c: Contraction, b: Block) -> bool:
    """Whether rows and columns come in whole vec4s where they must."""
    by_rows = any(f.mode == "m" for p in c.passes for f in p.lefts)
    return not ((by_rows and not b.lanes and b.tm % WIDTH) or (c.wide and b.tn % WIDTH))


def milliseconds(c: Contraction, b: Block) -> float:
    """Time of twenty runs and one compilation, fitted to the software driver.

    A load of a word costs as much as some twenty multiplications of 8 lanes.
    """
    batch, m, n, _ = c.sizes
    tiles = batch * -(-m // (b.tm * b.y)) * -(-n // (b.tn * b.x)) * b.y * b.x / 8
    tiles = -(-tiles // 4) * 4
    time, text = 0.0, 0
    for p in c.passes:
        half = ("k",) if b.lanes else ("k", "m")
        left = sum(0.5 if f.mode in half else 1.0 for f in p.lefts) * b.tm
        right = sum(0.5 if f.mode else 1.0 for f in p.rights) * b.tn
        block = b.tm * b.tn * len(p.products)
        time += p.extent * (
            35 * (left / (b.lanes or 1) + right)
            + 1.6 * block
            + 0.5 * b.tm * len(p.lefts)
            + 40 / p.unroll
        )
        text += block
    time += 100 * b.tm * b.tn * len(c.results)
    return 20 * tiles * time * 1e-6 + 50 + 1.1 * text


def registers(
    c: Contraction,
    name: str,
    block: Block,
    splits: int = 1,
    pieces: Pieces | None = None,
) -> Kernel:
    """Print the kernel. With ``splits`` the sums over pieces of k go to memory."""
    if block.lanes:  # a lane loads single rows
        for p in c.passes:
            for f in p.lefts:
                f.mode = f.mode.replace("m", "")
    w = Writer(c.group.space, c.target)
    plain_tensors(c, w, epilogue=pieces is None)
    tile = _Registers(c, w, block, splits)
    tile.begin()
    loop = tile.multiply()
    w.open()
    if pieces is None:
        tile.epilogue()
    else:
        tile.partial(pieces)
    lines = [*w.blocks[0], *loop, *w.blocks[1]]
    kernel = finish(
        c.group,
        w,
        c.layout,
        lines,
        name,
        "contract",
        block.size,
        fold(tile.count, c.target),
    )
    if block.lanes:
        builtins = f"{BUILTINS}, @builtin(subgroup_invocation_id) sub: u32"
        enable = "enable subgroups;\n" if c.target.enable_subgroups_directive else ""
        kernel = replace(kernel, wgsl=enable + kernel.wgsl.replace(BUILTINS, builtins))
    return kernel


class _Registers(Tile):
    def __init__(self, c: Contraction, w: Writer, block: Block, splits: int):
        _, m, n, _ = c.sizes
        across, down = -(-n // (block.tn * block.x)), -(-m // (block.tm * block.y))
        super().__init__(c, w, across, down, block.tm, block.tn, splits)
        self.block = block

    def begin(self) -> None:
        """Which block this thread works on."""
        w, b = self.w, self.block
        self.decode()
        w.line(f"let n0 = (tile_n * {b.x}u + lane % {b.x}u) * {b.tn}u;")
        row = "tile_m" if b.y == 1 else f"(tile_m * {b.y}u + lane / {b.x}u)"
        w.line(f"let m0 = {row} * {b.tm}u;")
        if not b.lanes:  # lanes that share must all stay
            w.line(f"if (m0 >= {self.m_end} || n0 >= {self.n_end}) {{ return; }}")

    def shared_rows(self) -> list[str]:
        """Positions of the rows that this lane loads for all the lanes."""
        w, b = self.w, self.block
        lane = w.let(f"sub % {b.lanes}u", 0, "l")
        return [
            w.let(f"min({plus('m0', i)} + {lane}, {self.m_end} - 1u)", 0, "m")
            for i in range(0, b.tm, b.lanes)
        ]

    def units(
        self, wide: bool, count: int, start: str, stop: str, stem: str
    ) -> list[str]:
        """Positions of a thread's rows or columns (vec4s of them), kept inside."""
        step = WIDTH if wide else 1
        if wide:
            start, stop = f"{start} / {WIDTH}u", f"{stop} / {WIDTH}u"
        return [
            self.w.let(f"min({plus(start, i)}, {stop} - 1u)", 0, stem)
            for i in range(count // step)
        ]

    def multiply(self) -> list[str]:
        """The loops over k; gives their lines, accumulators included."""
        b = self.block
        rows = self.rows_by_mode()
        columns = self.columns_by_mode()
        vectors = {x.acc for x in self.c.products if x.right.mode == "n"}
        self.acc, lines = [], []
        for acc in range(len(self.c.results)):
            prefix = f"c{acc}x" if acc else "c"
            kind, step = ("vec4<f32>", WIDTH) if acc in vectors else ("f32", 1)
            names = [
                [f"{prefix}{i}x{j}" for j in range(b.tn // step)] for i in range(b.tm)
            ]
            self.acc.append(names)
            lines += [f"var {x}: {kind};" for line in names for x in line]
        for p in self.c.passes:
            lines += self.loop(p, rows, columns)
        return lines

    def rows_by_mode(self) -> dict[bool, list[dict[int, int]]]:
        """Copies of this thread's rows, one by one and as vec4s."""
        b, c = self.block, self.c
        if b.lanes:
            return {False: [self.placed(c.m, at, False) for at in self.shared_rows()]}
        modes = {f.mode == "m" for p in c.passes for f in p.lefts}
        return {
            wide: [
                self.placed(c.m, at, wide)
                for at in self.units(wide, b.tm, "m0", self.m_end, "m")
            ]
            for wide in sorted(modes)
        }

    def columns_by_mode(self) -> dict[bool, list[dict[int, int]]]:
        """Copies of this thread's columns, one by one and as vec4s."""
        b, c = self.block, self.c
        modes = {f.mode == "n" for p in c.passes for f in p.rights}
        return {
            wide: [
                self.placed(c.n, at, wide)
                for at in self.units(wide, b.tn, "n0", self.n_end, "n")
            ]
            for wide in sorted(modes)
        }

    def loop(
        self,
        p: Pass,
        rows: dict[bool, list[dict[int, int]]],
        columns: dict[bool, list[dict[int, int]]],
    ) -> list[str]:
        """One loop over k: loads, then each row times each column."""
        w, b, u = self.w, self.block, p.unroll
        steps = -(-p.extent // u)
        start, stop = self.piece(p, -(-steps // self.splits), u)
        w.open()
        whole = self.placed(p.k, "k", True, 1) if u > 1 else {}
        ks = []
        for s in range(u):
            at = "k" if u == 1 else w.let(plus(f"k * {WIDTH}u", s), 1, "k")
            ks.append(self.placed(p.k, at, False, 1))
        left = {
            f: [self.factor(f, self.c.m, r, p, whole, ks) for r in rows[f.mode == "m"]]
            for f in p.lefts
        }
        right = {
            f: [
                self.factor(f, self.c.n, r, p, whole, ks)
                for r in columns[f.mode == "n"]
            ]
            for f in p.rights
        }
        for s in range(u):
            for i in range(b.tm):
                value = {f: self.row_value(f, left[f], i, s) for f in p.lefts}
                for x in p.products:
                    for acc, r in zip(self.acc[x.acc][i], right[x.right], strict=True):
                        w.line(f"{acc} = {acc} + {value[x.left]} * {r[s]};")
        body = w.close()
        return [
            f"for (var k = {start}; k < {stop}; k = k + 1u) {{",
            *indent(body),
            "}",
        ]

    def row_value(self, f: Factor, loaded: list[list[str]], i: int, s: int) -> str:
        """A row's factor at one of the step's positions of k."""
        lanes = self.block.lanes
        if lanes:
            own = loaded[i // lanes][s]
            return self.w.let(f"subgroupBroadcast({own}, {i % lanes}u)", 1, "l")
        if f.mode == "m":
            return loaded[i // WIDTH][s] + "." + XYZW[i % WIDTH]
        return loaded[i][s]

    def factor(
        self,
        f: Factor,
        outer: Loop,
        own: dict[int, int],
        p: Pass,
        whole: dict[int, int],
        ks: list[dict[int, int]],
    ) -> list[str]:
        """One row's (column's) factor at each of the step's positions of k."""
        if f.mode == "k":
            v = self.read(f.expr, {**own, **whole}, inner_axis(self.c, p.k))
            return [f"{v}.{XYZW[s]}" for s in range(WIDTH)]
        axis = inner_axis(self.c, outer) if f.mode else None
        return [self.read(f.expr, {**own, **k}, axis) for k in ks]

    def finish(
        self,
        stores: Sequence[tuple[Tensor, Address, Expr]],
        numbers: Sequence[float],
    ) -> None:
        # Bare stores compile as quickly one after another.
        sums = {n for found in self.c.results for n in found}
        self.rolled = self.block.tm > 1 and any(e not in sums for _, _, e in stores)
        super().finish(stores, numbers)

    def every_row(self, row: Callable[[int], list[str]]) -> list[str]:
        """All rows; in a loop if much follows the sum.

        The driver takes milliseconds to compile each load, and more the longer a text.
        What picks a row's sums is cheap beside what follows.
        """
        if not self.rolled:
            return super().every_row(row)
        picked = []
        for acc, names in enumerate(self.acc):
            for own, column in zip(self.own(acc), zip(*names, strict=True)):
                text = column[0]
                for i, other in enumerate(column[1:], 1):
                    text = f"select({text}, {other}, turn == {i}u)"
                picked.append(f"let {own} = {text};")
        return [
            f"for (var turn = 0u; turn < {self.block.tm}u; turn = turn + 1u) {{",
            *indent([*picked, *row(0)]),
            "}",
        ]

    def own(self, acc: int) -> list[str]:
        """Names of the sums of the row whose turn it is."""
        return [f"own{acc}x{j}" for j in range(len(self.acc[acc][0]))]

    def row_at(self, i: int) -> str:
        return "m0 + turn" if self.rolled else plus("m0", i)

    def column_at(self, j: int) -> str:
        return plus(f"n0 / {WIDTH}u" if self.c.wide else "n0", j)

    def result(self, acc: int, i: int, j: int) -> str:
        row = self.own(acc) if self.rolled else self.acc[acc][i]
        if self.c.wide and len(row) == self.block.tn:
            return f"vec4<f32>({', '.join(row[j * WIDTH : j * WIDTH + WIDTH])})"
        return row[j]
