"""Contraction for GPUs whose subgroups multiply matrices of f16 (tensor cores).

As in `contract_tiled`, chunks of both factors lie in workgroup memory and the next one
is on its way while one is multiplied; but they lie there as f16, in the order in which
they lie in memory, and a subgroup keeps its block of results as matrices of f32. Those
go through workgroup memory, one row of matrices at a time, to what follows the sum.

A factor must be a value of f16 already, so only the order of addition differs from the
plain expression.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ..ir import expr as E
from .address import contiguous
from .contract_plan import Contraction, Factor, Pass
from .contract_split import Pieces
from .contract_tile import XYZW, Tile, plus
from .contract_tiled import Share, Tiled, print_tile
from .kernel_text import indent
from .program import Kernel
from .schedule import BUILTINS
from .spelling import WIDTH
from .writer import Writer

#: Elements between rows of a chunk that keep them on different banks.
_PAD = 8

BARRIER = "workgroupBarrier();"


@dataclass(frozen=True)
class MatrixShape:
    """Results of a workgroup, ``bk`` positions of k at a time, and its subgroups along
    m and n; ``lanes`` of them each, with matrices of ``rows`` rows and so on.

    So many matrices of each subgroup as ``laid`` are in workgroup memory at a time when
    the sums are done.
    """

    bm: int
    bn: int
    bk: int
    down: int
    across: int
    laid: int = 1
    rows: int = 16
    columns: int = 16
    depth: int = 16
    lanes: int = 32

    @property
    def size(self) -> int:
        """Invocations of a workgroup."""
        return self.down * self.across * self.lanes

    @property
    def block(self) -> tuple[int, int]:
        """Matrices of a subgroup along m and n."""
        return self.bm // self.down // self.rows, self.bn // self.across // self.columns

    def elements(self, outer: int) -> int:
        """Elements of f16 that a chunk takes, however it lies."""
        return max(self.bk * (outer + _PAD), outer * (self.bk + _PAD))

    @property
    def sums(self) -> int:
        """Sums that lie in workgroup memory at a time."""
        return self.down * self.across * self.rows * self.stride

    @property
    def stride(self) -> int:
        """Elements from one row of sums to the next, on different banks."""
        return self.laid * self.columns + (8 if self.laid > 1 else 0)

    def fits(self, c: Contraction) -> bool:
        """Whether a workgroup can hold what a contraction takes."""
        limits = c.target.limits
        results = len(c.results)
        chunks = max(
            len(p.lefts) * self.elements(self.bm)
            + len(p.rights) * self.elements(self.bn)
            for p in c.passes
        )
        down, across = self.block
        if across % self.laid:
            return False
        sums = down * across * self.rows * self.columns // self.lanes
        return (
            (self.rows, self.columns, self.depth, self.lanes)
            == c.target.features.matrix
            and 2 * chunks + 4 * self.sums * len(c.results)
            <= limits.max_workgroup_storage
            and self.size <= limits.max_invocations
            and sums * results <= 128
        )


def has_matrices(c: Contraction) -> bool:
    """Whether subgroups of the target can multiply a contraction's factors."""
    return bool(c.target.features.matrix) and all(
        is_half(f.expr) for p in c.passes for f in (*p.lefts, *p.rights)
    )


def is_half(n: E.Expr) -> bool:
    """Whether a value is one of f16, whatever it is computed from."""
    if n.kind == "load":
        return str(n.data.dtype) == "f16"
    if n.kind == "const":
        with np.errstate(over="ignore"):
            return n.dtype == "f32" and float(np.float16(n.data)) == float(n.data)
    if n.kind != "apply":
        return False
    if n.data == "round_f16":
        return True
    if n.data == "where":
        return is_half(n.args[1]) and is_half(n.args[2])
    if n.data in ("neg", "abs", "maximum", "minimum", "stop_gradient"):
        return all(is_half(x) for x in n.args)
    return False


def matrices(
    c: Contraction,
    name: str,
    shape: MatrixShape,
    splits: int = 1,
    pieces: Pieces | None = None,
) -> Kernel:
    """Print the kernel. With ``splits`` the sums over pieces of k go to memory."""
    kernel = print_tile(
        c, name, lambda w: Matrices(c, w, shape, splits), declare_matrices, pieces
    )
    return with_matrices(kernel)


def declare_matrices(arrays: Mapping[str, int]) -> list[str]:
    """Declarations of workgroup memory."""
    return [
        f"var<workgroup> {a}: array<{'f32' if a == 'sums' else 'f16'}, {n}>;"
        for a, n in arrays.items()
    ]


def with_matrices(kernel: Kernel) -> Kernel:
    """A kernel with the directives and the builtin that matrices take."""
    comments, rest = [], kernel.wgsl.splitlines(keepends=True)
    while rest[0].startswith("//"):
        comments.append(rest.pop(0))
    text = "".join(rest).replace("enable f16;\n", "")
    directives = "enable f16, subgroups, chromium_experimental_subgroup_matrix;\n"
    if "@builtin(subgroup_id)" not in text:
        text = text.replace(BUILTINS, f"{BUILTINS}, @builtin(subgroup_id) sg: u32")
    return replace(kernel, wgsl="".join(comments) + directives + text)


class Matrices(Tiled):
    """The text of one thread; several of them may share a kernel."""

    shape: MatrixShape  # type: ignore[assignment]

    def __init__(
        self,
        c: Contraction,
        w: Writer,
        shape: MatrixShape,
        splits: int,
        number: str | None = None,
    ):
        _, m, n, _ = c.sizes
        width = shape.laid * shape.columns
        unit = WIDTH if c.wide else 1
        #: Lanes along a row of sums, and rows that a subgroup takes at a time.
        self.beside = min(width // unit, shape.lanes)
        self.at_once = shape.lanes // self.beside
        rows = shape.rows // self.at_once
        columns = width // self.beside
        across, down = -(-n // shape.bn), -(-m // shape.bm)
        Tile.__init__(self, c, w, across, down, rows, columns, splits, number)
        self.shape = shape
        self.stride = shape.stride
        self.area = shape.rows * self.stride
        self.arrays: dict[str, int] = {}
        self.begin()

    def divide(self) -> None:
        w, s = self.w, self.shape
        w.line(f"let left0 = sg / {s.across}u * {s.bm // s.down}u;")
        w.line(f"let right0 = sg % {s.across}u * {s.bn // s.across}u;")

    # ------------------------------------------------------ into workgroup memory

    def shares(self, p: Pass, depth: int) -> dict[Factor, Share]:
        s = self.shape
        out = {}
        for left, factors, outer in ((True, p.lefts, s.bm), (False, p.rights, s.bn)):
            for i, f in enumerate(factors):
                name = f"{'lefts' if left else 'rights'}{i or ''}"
                width = (s.bk if f.mode == "k" else outer) + _PAD
                x = out[f] = self.share(f, p, left, name, outer, width, depth)
                size = width * (outer if f.mode == "k" else s.bk)
                self.arrays[x.array] = max(size, self.arrays.get(x.array, 0))
        self.arrays["sums"] = s.sums * len(self.c.results)
        return out

    def word(self, mode: str) -> str:
        return "vec4<f16>" if mode else "f16"

    def carried(self, factor: E.Expr, copies: dict[int, int], axis: int | None) -> str:
        w = self.w
        kind = self.word("" if axis is None else "x")
        plain = factor.kind == "load" and factor not in w.local
        if plain and factor.data not in w.virtual and factor.data not in w.parts:
            # As it lies in memory, without a turn through f32.
            w.vector = None if axis is None else copies[axis]
            new = self.copies.bring(factor, copies)
            form = w.addresses[new]
            whole = axis is None or (
                factor.data not in w.plain and contiguous(form, w.vector)
            )
            if whole:
                vector = axis is not None
                buffer = w.binding(factor.data, vector, False, factor.label)
                at = w.address(form, WIDTH if vector else 1)
                w.vector = None
                return f"{buffer}[{at}]"
            w.vector = None
        return f"{kind}({self.read(factor, copies, axis)})"

    def kept_inside(self, at: str, stop: str, left: bool) -> str:
        _, m, n, _ = self.c.sizes
        whole = m % self.shape.bm == 0 if left else n % self.shape.bn == 0
        # Fewer registers: places then differ by numbers that all threads share.
        return at if whole else super().kept_inside(at, stop, left)

    def put(self, x: Share, o: str, k: str, value: str) -> list[str]:
        if not x.mode:
            return [f"{x.array}[({k}) * {x.width}u + {o}] = {value};"]
        row, at = (o, k) if x.mode == "k" else (k, o)
        place = self.w.let(f"({row}) * {x.width}u + ({at}) * {WIDTH}u", self.deep, "p")
        return [
            f"{x.array}[{plus(place, e)}] = {value}.{XYZW[e]};" for e in range(WIDTH)
        ]

    @property
    def deep(self) -> int:
        """The innermost block."""
        return len(self.w.blocks) - 1

    # -------------------------------------------------------------- the sum

    def multiply(self) -> list[str]:
        s = self.shape
        down, across = s.block
        kind = f"subgroup_matrix_result<f32, {s.columns}, {s.rows}>"
        self.acc, lines = [], []
        for acc in range(len(self.c.results)):
            prefix = f"c{acc}x" if acc else "c"
            names = [[f"{prefix}{i}x{j}" for j in range(across)] for i in range(down)]
            self.acc.append(names)
            lines += [f"var {a}: {kind};" for line in names for a in line]
        return lines + self.loops()

    def multiplications(self, p: Pass, shares: dict[Factor, Share]) -> list[str]:
        s = self.shape
        down, across = s.block
        left = f"subgroup_matrix_left<f16, {s.depth}, {s.rows}>"
        right = f"subgroup_matrix_right<f16, {s.columns}, {s.depth}>"
        out = []
        for k in range(0, s.bk, s.depth):
            names = {}
            for side, letter, kind, count, base, step in (
                (p.lefts, "l", left, down, "left0", s.rows),
                (p.rights, "r", right, across, "right0", s.columns),
            ):
                for i, f in enumerate(side):
                    x = shares[f]
                    names[f] = [f"{letter}{i or ''}_{k}x{g}" for g in range(count)]
                    # A left matrix's rows, a right one's columns are along `outer`.
                    by_outer = x.mode == "k"
                    order = "row" if by_outer == (letter == "l") else "col"
                    for g, n in enumerate(names[f]):
                        at = (
                            plus(f"{base} * {x.width}u", g * step * x.width + k)
                            if by_outer
                            else plus(base, g * step + k * x.width)
                        )
                        out.append(
                            f"let {n} = subgroupMatrixLoad<{kind}, {order}_major>"
                            f"(&{x.array}, {at}, {x.width}u);"
                        )
            for q in p.products:
                for line, a in zip(self.acc[q.acc], names[q.left], strict=True):
                    for acc, b in zip(line, names[q.right], strict=True):
                        call = f"subgroupMatrixMultiplyAccumulate({a}, {b}, {acc})"
                        out.append(f"{acc} = {call};")
        return out

    # -------------------------------------------------------------- results

    def lines(self, pieces: Pieces | None) -> list[str]:
        loops = self.multiply()
        out = []
        down, across = self.shape.block
        # One after the other: in a loop over them the sums leave their registers.
        steps = itertools.product(range(down), range(0, across, self.shape.laid))
        for part, first in steps:
            self.w.open()
            self.place(part, first)
            if pieces is None:
                self.epilogue()
            else:
                self.partial(pieces)
            text = self.w.close()
            out += [BARRIER, *self.laid_down(part, first), BARRIER]
            out += ["{", *indent(text), "}"]
        return [*self.w.blocks[0], *loops, *out]

    def place(self, part: int, first: int) -> None:
        """Where a thread's sums of some matrices are, and where they belong."""
        s, w = self.shape, self.w
        unit = WIDTH if self.c.wide else 1
        own = f"lane % {s.lanes}u"
        down, beside = f"{own} / {self.beside}u", f"{own} % {self.beside}u"
        row = plus("m0 + left0", part * s.rows)
        w.line(f"let row = {row} + {down};")
        start = plus("n0 + right0", first * s.columns)
        start = start if unit == 1 else f"({start}) / {unit}u"
        w.line(f"let column = {start} + {beside};")
        w.line(
            f"let own = sg * {self.area * len(self.acc)}u + {down} * {self.stride}u + "
            f"{beside} * {unit}u;"
        )

    def laid_down(self, part: int, first: int) -> list[str]:
        """Store the sums of some matrices to workgroup memory."""
        out = []
        for acc, names in enumerate(self.acc):
            for j, a in enumerate(names[part][first : first + self.shape.laid]):
                at = acc * self.area + j * self.shape.columns
                place = plus(f"sg * {self.area * len(self.acc)}u", at)
                out.append(
                    f"subgroupMatrixStore<row_major>(&sums, {place}, {a}, "
                    f"{self.stride}u);"
                )
        return out

    def row_at(self, i: int) -> str:
        return plus("row", i * self.at_once)

    def column_at(self, j: int) -> str:
        return plus("column", j * self.beside)

    def result(self, acc: int, i: int, j: int) -> str:
        unit = WIDTH if self.c.wide else 1
        down, beside = i * self.at_once * self.stride, j * self.beside * unit
        at = acc * self.area + down + beside
        if not self.c.wide:
            return f"sums[{plus('own', at)}]"
        parts = (f"sums[{plus('own', at + e)}]" for e in range(WIDTH))
        return f"vec4<f32>({', '.join(parts)})"
