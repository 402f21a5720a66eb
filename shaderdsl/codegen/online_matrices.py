"""A streamed chain whose products are of subgroups' matrices (tensor cores).

As in `online_stream`: the same tiles, masks, maxima and sums of single scores. Only the
products differ: both factors lie in workgroup memory as f16, a tile of scores is
computed in matrices of f32, laid down, and read by the threads that go on with it. The
weights exp(y - m) of a tile are rounded to f16 for their product with the values, whose
sums over a tile come back the same way and are added in f32.

For chains with a maximum, whose weights lie between 0 and 1: others (the gradient of
the scores) may be far too small for f16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..ir.expr import Expr
from .choice import pick
from .contract_matrices import is_half, with_matrices
from .contract_tile import plus
from .kernel_text import indent
from .online_masks import sum_value
from .online_plan import Online, plain_tensors, steps_of
from .online_stream import Streaming
from .online_stream_parts import LOG2E, Share, gentle, take_out
from .online_stream_shape import Stream
from .online_tile import BARRIER
from .program import Kernel
from .schedule import finish, fold, kernel_name
from .spelling import WIDTH
from .writer import Writer

#: Rows and columns of a matrix, and lanes of a subgroup.
_SIDE, _LANES = 16, 32
#: Elements of f16, and of f32, between rows that keep them on different banks.
_PAD, _PAD_SUMS = 8, 4
#: Columns of sums that come back from matrices at a time.
_BACK = 64


@dataclass(frozen=True)
class MatrixStream(Stream):
    """A tile, and how its subgroups lie along rows and lines (columns)."""

    down: int = 2
    across: int = 2

    def bytes(self, columns: int) -> int:
        """Workgroup memory, for sums of so many columns."""
        halves = self.rows * (self.dc + _PAD) + self.lines * (self.rows + _PAD)
        halves += max(self.lines * (self.dc + _PAD), self.lc * (columns + _PAD))
        return 2 * halves + 4 * self.laid(columns) + 16 * self.spare

    def laid(self, columns: int) -> int:
        """Elements of f32 through which matrices come back."""
        back = self.rows * (min(columns, _BACK) + _PAD_SUMS)
        return max(self.lines * (self.rows + _PAD_SUMS), back)

    @property
    def spare(self) -> int:
        """vec4s in which lanes combine values of a row."""
        return self.tx * self.rows // WIDTH


STREAMS = (
    MatrixStream(64, 64, 8, 16, 64, 64),
    MatrixStream(64, 64, 8, 16, 32, 64),
    MatrixStream(64, 64, 8, 16, 32, 32),
    MatrixStream(32, 64, 8, 8, 128, 64, down=1),
    MatrixStream(32, 64, 8, 8, 64, 64, down=1),
    MatrixStream(32, 64, 8, 8, 32, 64, down=1),
    MatrixStream(32, 64, 8, 8, 32, 32, down=1),
    MatrixStream(32, 64, 8, 8, 16, 32, down=1),
)


def choose_matrix_stream(o: Online) -> MatrixStream | None:
    """The first shape that fits, or what was tuned; None where a factor is no f16, or
    the device has no such matrices.
    """
    if o.target.features.matrix != (_SIDE, _SIDE, _SIDE, _LANES) or not _halves(o):
        return None
    every = [t for t in STREAMS if _fits(o, t)]
    if not every:
        return None
    return pick(
        o.target, "online_matrices", every[0], lambda: every, every.__contains__
    )


def _halves(o: Online) -> bool:
    """Whether all that is multiplied is of f16, or a weight of a maximum."""
    if o.score is None:
        return False
    o = gentle(o)
    assert o.score is not None
    sums = [s for s in o.sums if s.column is not None]
    for p in o.products:
        if not all(is_half(take_out(x, p.inner)[0]) for x in (p.near, p.far)):
            return False
    for s in sums:
        assert s.column is not None
        core, extra = take_out(s.weight, s.column)
        if extra or not is_half(core) or sum_value(s, o.score) is not s.power:
            return False
    return bool(sums)


def _fits(o: Online, t: MatrixStream) -> bool:
    """Whether a tile divides the products and keeps to the limits."""
    limits = o.target.limits
    columns = [o.extent(s.column) for s in o.sums if s.column is not None]
    deep, wide = t.dc // WIDTH, max(columns) // WIDTH
    return (
        not any(o.extent(p.inner) % t.dc for p in o.products)
        and not any(n % (t.tx * WIDTH) or n > 128 for n in columns)
        and all(min(n, _BACK) % (t.across * _SIDE) == 0 for n in columns)
        and t.size % deep == 0
        and t.rows * deep % t.size == 0
        and t.lines * deep % t.size == 0
        and t.size % wide == 0
        and all(t.lc * (n // WIDTH) % t.size == 0 for n in columns)
        and t.size == t.down * t.across * _LANES
        and o.extent(o.row) >= t.rows
        and o.extent(o.line) >= t.lines
        and t.bytes(max(columns)) <= limits.max_workgroup_storage
        and t.size <= limits.max_invocations
    )


def on_matrices(o: Online, shape: MatrixStream) -> Kernel:
    """Print the kernel."""
    o = gentle(o)
    w = Writer(o.group.space, o.target)
    plain_tensors(o, w)
    w.spellings["exp"] = f"exp2({{0}} * {{F}}({LOG2E}))"
    lines = MatrixStreaming(o, w, shape).lines()
    count = steps_of(o.extent(o.row), shape.rows) * o.batches
    grid = fold(count, o.target)
    name = kernel_name(o.group)
    kernel = finish(o.group, w, o.layout, lines, name, "online", shape.size, grid)
    return with_matrices(replace(kernel, in_range=True))


class Halves(Share):
    """A share in f16, which lies in workgroup memory as it lies in memory."""

    word = "vec4<f16>"

    def __init__(
        self,
        owner: MatrixStreaming,
        factor: Expr,
        axis: int,
        rows: int,
        length: int,
        array: str,
        stem: str,
    ):
        self.array, self.stride = array, length + _PAD
        super().__init__(owner, factor, axis, rows, length, stem)

    def lie(self, slot: str) -> tuple[str, ...]:
        at = f"{slot} * {self.stride}u + {self.inside} * {WIDTH}u"
        return (self.owner.w.let(at, 0, "e"),)

    def carried(self, value: str) -> str:
        return f"{self.word}({value})"

    def keep(self) -> list[str]:
        """Lines that store the share to workgroup memory."""
        return [
            f"{self.array}[{plus(at, e)}] = {name}[{e}];"
            for name, (at,) in zip(self.names, self.at, strict=True)
            for e in range(WIDTH)
        ]


class MatrixStreaming(Streaming):
    """The text of one thread."""

    t: MatrixStream

    def memory(self) -> None:
        o, w, t = self.o, self.w, self.t
        widest = max(o.extent(s.column) for s in self.matrices if s.column is not None)
        fars = max(t.lines * (t.dc + _PAD), t.lc * (widest + _PAD))
        w.shared += [
            f"var<workgroup> sm: array<vec4<f32>, {t.spare}>;",
            f"var<workgroup> nears: array<f16, {t.rows * (t.dc + _PAD)}>;",
            f"var<workgroup> fars: array<f16, {fars}>;",
            f"var<workgroup> powers: array<f16, {t.lines * (t.rows + _PAD)}>;",
            f"var<workgroup> sums: array<f32, {t.laid(widest)}>;",
        ]

    def prepare(self) -> None:
        o, w, t = self.o, self.w, self.t
        w.line(f"let down = sg / {t.across}u * {t.rows // t.down}u;")
        w.line(f"let across = sg % {t.across}u * {_SIDE}u;")
        self.pairs: dict[int, tuple[Halves, Halves]] = {}
        self.weighted: dict[int, Halves] = {}
        for i, p in enumerate(o.products):
            near, far = self.factors[i]
            self.pairs[i] = (
                Halves(self, near, p.inner, t.rows, t.dc, "nears", f"n{i}_"),
                Halves(self, far, p.inner, t.lines, t.dc, "fars", f"f{i}_"),
            )
        for i, s in enumerate(self.matrices):
            assert s.column is not None
            length = o.extent(s.column)
            self.weighted[i] = Halves(
                self, self.weights[i], s.column, t.lc, length, "fars", f"w{i}_"
            )

    @property
    def stays(self) -> bool:
        """Whether the rows' factor is in workgroup memory for all tiles."""
        o = self.o
        return len(o.products) == 1 and o.extent(o.products[0].inner) == self.t.dc

    def fetch_first(self, phase: tuple[str, int], at: str, depth: int) -> None:
        kind, i = phase
        if kind == "sum":
            stream = self.weighted[i]
            stream.fetch(stream.lines_at(at, depth), "0u", depth)
            return
        near, far = self.pairs[i]
        far.fetch(far.lines_at(at, depth), "0u", depth)
        if depth > 1 and self.stays:
            return
        near.fetch(near.rows_at(depth), "0u", depth)
        if self.stays:
            self.w.line(BARRIER, depth)
            self.w.blocks[depth] += near.keep()

    # -------------------------------------------------------------- matrices

    def cleared(self, stem: str, down: int, across: int) -> list[list[str]]:
        """Matrices of sums that are 0."""
        kind = f"subgroup_matrix_result<f32, {_SIDE}, {_SIDE}>"
        names = [[f"{stem}{a}x{b}" for b in range(across)] for a in range(down)]
        self.w.blocks[-1] += [f"var {n} = {kind}();" for line in names for n in line]
        return names

    def multiplied(
        self,
        names: list[list[str]],
        length: int,
        left: Callable[[int, int], str],
        right: Callable[[int, int], str],
    ) -> list[str]:
        """Multiply chunks of a length: texts of a row's and of a column's matrix."""
        out = ["{"]
        for k in range(0, length, _SIDE):
            for a in range(len(names)):
                out.append(f"  let l{k}x{a} = {left(k, a)};")
            for b in range(len(names[0])):
                out.append(f"  let r{k}x{b} = {right(k, b)};")
            for a, line in enumerate(names):
                for b, n in enumerate(line):
                    call = f"subgroupMatrixMultiplyAccumulate(l{k}x{a}, r{k}x{b}, {n})"
                    out.append(f"  {n} = {call};")
        return [*out, "}"]

    def product(self, i: int, ahead: Callable[[], None]) -> None:
        o, w, t = self.o, self.w, self.t
        near, far = self.pairs[i]
        down = t.rows // t.down // _SIDE
        every = t.lines // _SIDE // t.across
        names = self.cleared(f"m{i}_", down, every)

        def multiply() -> list[str]:
            return self.multiplied(
                names,
                t.dc,
                lambda k, a: loaded(
                    "left", "row", "nears", near.stride, "down", a, k, True
                ),
                lambda k, b: loaded(
                    "right", "col", "fars", far.stride, "across", b * t.across, k, True
                ),
            )

        chunks = o.extent(o.products[i].inner) // t.dc
        if chunks > 1:
            places = near.rows_at(2), far.lines_at("l", 2)
            w.open()
            w.line(BARRIER)
            w.blocks[-1] += [*near.keep(), *far.keep()]
            w.line(BARRIER)
            for s, own in zip((near, far), places, strict=True):
                s.fetch(own, "(d + 1u)", 3)
            w.blocks[-1] += multiply()
            body = w.close()
            w.line(f"for (var d = 0u; d < {chunks - 1}u; d = d + 1u) {{")
            w.blocks[-1] += [*indent(body), "}"]
        w.line(BARRIER)
        w.blocks[-1] += [*([] if self.stays else near.keep()), *far.keep()]
        w.line(BARRIER)
        ahead()
        w.blocks[-1] += multiply()
        stride = t.rows + _PAD_SUMS
        for a, line in enumerate(names):
            for b, n in enumerate(line):
                at = f"(across + {b * t.across * _SIDE}u) * {stride}u"
                at += f" + {plus('down', a * _SIDE)}"
                w.line(f"subgroupMatrixStore<col_major>(&sums, {at}, {n}, {stride}u);")
        w.line(BARRIER)
        for g, line in enumerate(self.names(i)):
            for j, n in enumerate(line):
                place = f"(tx * {WIDTH}u + {j // WIDTH * t.tx * WIDTH + j % WIDTH}u)"
                at = f"{place} * {stride}u + (ty + {g * t.ty}u) * {WIDTH}u"
                w.line(f"var {n} = {self.four(at)};")
        self.known_products(i)

    def four(self, at: str) -> str:
        """Four neighbouring sums."""
        at = self.w.let(at, len(self.w.blocks) - 1, "p")
        parts = (f"sums[{plus(at, e)}]" for e in range(WIDTH))
        return f"vec4<f32>({', '.join(parts)})"

    # -------------------------------------------------------------- weighted sums

    def accumulate(self, i: int, ahead: Callable[[], None]) -> None:
        o, w, t = self.o, self.w, self.t
        stream, column = self.weighted[i], self.matrices[i].column
        assert column is not None
        length = o.extent(column)
        stride = t.rows + _PAD
        for g, line in enumerate(self.values(i)):
            for j, n in enumerate(line):
                place = f"(tx * {WIDTH}u + {j // WIDTH * t.tx * WIDTH + j % WIDTH}u)"
                at = f"{place} * {stride}u + (ty + {g * t.ty}u) * {WIDTH}u"
                at = w.let(at, 2, "p")
                half = w.let(f"vec4<f16>({n})", 2, "p")
                w.blocks[-1] += [
                    f"powers[{plus(at, e)}] = {half}[{e}];" for e in range(WIDTH)
                ]
        down = t.rows // t.down // _SIDE
        every = length // _SIDE // t.across
        names = self.cleared(f"o{i}_", down, every)
        chunks = t.lines // t.lc
        for chunk in range(chunks):
            w.line(BARRIER)
            w.blocks[-1] += stream.keep()
            w.line(BARRIER)
            if chunk + 1 < chunks:
                at = f"l + {(chunk + 1) * t.lc}u"
                stream.fetch(stream.lines_at(at, 2), "0u", 2)
            else:
                ahead()
            first = chunk * t.lc
            w.blocks[-1] += self.multiplied(
                names,
                t.lc,
                lambda k, a, first=first: loaded(  # type: ignore[misc]
                    "left", "col", "powers", stride, "down", a, first + k, False
                ),
                lambda k, b: loaded(
                    "right",
                    "row",
                    "fars",
                    stream.stride,
                    "across",
                    b * t.across,
                    k,
                    False,
                ),
            )
        self.come_back(i, names, length)

    def come_back(self, i: int, names: list[list[str]], length: int) -> None:
        """Add the sums of a tile to those of all lines."""
        w, t = self.w, self.t
        width = min(length, _BACK)
        stride = width + _PAD_SUMS
        at_once = width // _SIDE // t.across
        held = width // WIDTH // t.tx
        for part in range(length // width):
            if part:
                w.line(BARRIER)
            for a, line in enumerate(names):
                for b in range(at_once):
                    at = f"({plus('down', a * _SIDE)}) * {stride}u + across"
                    at = plus(at, b * t.across * _SIDE)
                    n = line[part * at_once + b]
                    w.line(
                        f"subgroupMatrixStore<row_major>(&sums, {at}, {n}, {stride}u);"
                    )
            w.line(BARRIER)
            for r in range(t.tm):
                row = r // WIDTH * t.ty * WIDTH + r % WIDTH
                for c in range(held):
                    at = f"(ty * {WIDTH}u + {row}u) * {stride}u"
                    at += f" + (tx + {c * t.tx}u) * {WIDTH}u"
                    total = f"a{i}r{r}c{part * held + c}"
                    w.line(f"{total} = {total} + {self.four(at)};")


def loaded(
    side: str,
    order: str,
    array: str,
    stride: int,
    base: str,
    number: int,
    k: int,
    by_outer: bool,
) -> str:
    """The text of a matrix: the one of a number along rows (columns), from k on.

    ``by_outer``: k runs along rows of the array.
    """
    outer = f"({plus(base, number * _SIDE)})"
    at = f"{outer} * {stride}u" if by_outer else outer
    at = plus(at, k if by_outer else k * stride)
    kind = f"subgroup_matrix_{side}<f16, {_SIDE}, {_SIDE}>"
    return f"subgroupMatrixLoad<{kind}, {order}_major>(&{array}, {at}, {stride}u)"
