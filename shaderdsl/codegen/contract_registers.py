"""Contraction without workgroup memory: a thread keeps a block of results in registers.

The best form where loads cost much and workgroup memory costs more still, as on drivers
that run on the CPU. With subgroups each lane loads some of the rows for all of them:
handing a value around costs a small part of a load there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from .contract_plan import Contraction, inner_axis, plain_tensors
from .contract_tile import XYZW, Tile, plus
from .program import Kernel, Scratch
from .schedule import BUILTINS, finish, fold
from .target import Target
from .writer import WIDTH, Writer, indent


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
        if tm * tn <= 256
    ]
    blocks = [b for b in blocks if block_fits(c, b)] or [Block(4, 4)]
    return sorted(blocks, key=lambda b: milliseconds(c, b))[:_LIKELY]


def block_fits(c: Contraction, b: Block) -> bool:
    """Whether rows and columns come in whole vec4s where they must."""
    return not (
        (c.left_mode == "m" and not b.lanes and b.tm % WIDTH)
        or (c.wide and b.tn % WIDTH)
    )


def milliseconds(c: Contraction, b: Block) -> float:
    """Time of twenty runs and one compilation, fitted to the software driver.

    A load of a word costs as much as some twenty multiplications of 8 lanes.
    """
    batch, m, n, k = c.sizes
    tiles = batch * -(-m // (b.tm * b.y)) * -(-n // (b.tn * b.x)) * b.y * b.x / 8
    tiles = -(-tiles // 4) * 4
    left = b.tm * (
        0.5 if c.left_mode == "k" or (c.left_mode == "m" and not b.lanes) else 1.0
    )
    right = b.tn * (0.5 if c.right_mode else 1.0)
    step = (
        35 * (left / (b.lanes or 1) + right)
        + 1.6 * b.tm * b.tn
        + 0.5 * b.tm
        + 40 / c.unroll
    )
    return 20 * tiles * (k * step + 100 * b.tm * b.tn) * 1e-6 + 50 + 1.1 * b.tm * b.tn


def registers(
    c: Contraction,
    name: str,
    block: Block,
    splits: int = 1,
    scratch: Scratch | None = None,
) -> Kernel:
    """Print the kernel. With ``splits`` the sums over pieces of k go to ``scratch``."""
    if block.lanes and c.left_mode == "m":
        c.left_mode = ""  # a lane loads single rows
    w = Writer(c.group.space, c.target)
    plain_tensors(c, w, epilogue=scratch is None)
    tile = _Registers(c, w, block, splits)
    tile.begin()
    loop = tile.multiply()
    w.open()
    if scratch is None:
        tile.epilogue()
    else:
        tile.partial(scratch)
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
        """The loop over k; gives its lines, accumulators included."""
        c, w, b = self.c, self.w, self.block
        u = c.unroll
        places = (
            self.shared_rows()
            if b.lanes
            else self.units(c.left_mode == "m", b.tm, "m0", self.m_end, "m")
        )
        rows = [self.placed(c.m, at, c.left_mode == "m") for at in places]
        columns = [
            self.placed(c.n, at, c.right_mode == "n")
            for at in self.units(c.right_mode == "n", b.tn, "n0", self.n_end, "n")
        ]
        self.acc = [[f"c{i}x{j}" for j in range(len(columns))] for i in range(b.tm)]
        kind = "vec4<f32>" if c.right_mode == "n" else "f32"
        head = [f"var {x}: {kind};" for line in self.acc for x in line]
        steps = -(-c.sizes[3] // u)
        start, stop = self.piece(-(-steps // self.splits), u)
        w.open()
        whole = self.placed(c.k, "k", True, 1) if u > 1 else {}
        ks = []
        for s in range(u):
            at = "k" if u == 1 else w.let(plus(f"k * {WIDTH}u", s), 1, "k")
            ks.append(self.placed(c.k, at, False, 1))
        left = [self.factor("left", r, whole, ks) for r in rows]
        right = [self.factor("right", r, whole, ks) for r in columns]
        for s in range(u):
            for i in range(b.tm):
                if b.lanes:
                    x = w.let(
                        f"subgroupBroadcast({left[i // b.lanes][s]}, {i % b.lanes}u)",
                        1,
                        "l",
                    )
                elif c.left_mode == "m":
                    x = left[i // WIDTH][s] + "." + XYZW[i % WIDTH]
                else:
                    x = left[i][s]
                for j in range(len(columns)):
                    acc = self.acc[i][j]
                    w.line(f"{acc} = {acc} + {x} * {right[j][s]};")
        body = w.close()
        return [
            *head,
            f"for (var k = {start}; k < {stop}; k = k + 1u) {{",
            *indent(body),
            "}",
        ]

    def factor(
        self,
        side: str,
        own: dict[int, int],
        whole: dict[int, int],
        ks: list[dict[int, int]],
    ) -> list[str]:
        """One row's (column's) factor at each of the step's positions of k."""
        c = self.c
        factor, mode, outer = (
            (c.left, c.left_mode, c.m)
            if side == "left"
            else (c.right, c.right_mode, c.n)
        )
        if mode == "k":
            v = self.read(factor, {**own, **whole}, inner_axis(c, c.k))
            return [f"{v}.{XYZW[s]}" for s in range(WIDTH)]
        axis = inner_axis(c, outer) if mode else None
        return [self.read(factor, {**own, **k}, axis) for k in ks]

    def row_at(self, i: int) -> str:
        return plus("m0", i)

    def column_at(self, j: int) -> str:
        return plus(f"n0 / {WIDTH}u" if self.c.wide else "n0", j)

    def result(self, i: int, j: int) -> str:
        row = self.acc[i]
        if self.c.wide and self.c.right_mode != "n":
            return f"vec4<f32>({', '.join(row[j * WIDTH : j * WIDTH + WIDTH])})"
        return row[j]
