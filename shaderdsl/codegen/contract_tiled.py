"""Contraction for GPUs: tiles of both factors in workgroup memory.

Each thread keeps a block of results in registers. While one chunk of k is multiplied
the next one is on its way into registers. Lanes of 32 threads lie 4 by 8 in a zigzag,
so that their reads of workgroup memory meet few banks twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..ir import expr as E
from .contract_plan import Contraction, Factor, Pass, inner_axis, plain_tensors
from .contract_seen import asked_later, seen
from .contract_shapes import Shape
from .contract_split import Pieces
from .contract_tile import XYZW, Tile, plus
from .kernel_text import indent
from .program import Kernel
from .schedule import finish, fold
from .spelling import WIDTH
from .writer import Writer


def tiled(
    c: Contraction,
    name: str,
    shape: Shape,
    splits: int = 1,
    pieces: Pieces | None = None,
) -> Kernel:
    """Print the kernel. With ``splits`` the sums over pieces of k go to memory."""
    return print_tile(c, name, lambda w: Tiled(c, w, shape, splits), declare, pieces)


def print_tile(
    c: Contraction,
    name: str,
    make: Callable[[Writer], Tiled],
    declare: Callable[[dict[str, int]], list[str]],
    pieces: Pieces | None,
) -> Kernel:
    """The kernel of a tile that a writer makes."""
    w = Writer(c.group.space, c.target)
    plain_tensors(c, w, epilogue=pieces is None)
    tile = make(w)
    lines = tile.lines(pieces)
    w.shared += declare(tile.memory())
    size, grid = tile.shape.size, fold(tile.count, c.target)
    return finish(c.group, w, c.layout, lines, name, "contract", size, grid)


def declare(arrays: dict[str, int]) -> list[str]:
    """Declarations of workgroup memory."""
    return [f"var<workgroup> {a}: array<vec4<f32>, {n}>;" for a, n in arrays.items()]


@dataclass
class Share:
    """What a thread brings of one factor, and where each piece lies in the tile."""

    factor: E.Expr
    asked: E.Expr | None  # where it is 0 instead, asked when it is kept
    mode: str  # "x" along the outer axis, "k", or one by one
    axis: int | None
    width: int  # vec4s of a row of workgroup memory
    array: str
    places: list[
        tuple[str, str]
    ]  # outer position and position of k within the tile, in vec4s where they are
    copies: list[dict[int, int]]
    names: list[str]
    total: int  # places in all


class Tiled(Tile):
    """The text of one thread; several of them may share a kernel."""

    def __init__(
        self,
        c: Contraction,
        w: Writer,
        shape: Shape,
        splits: int,
        number: str | None = None,
    ):
        _, m, n, _ = c.sizes
        across, down = -(-n // shape.bn), -(-m // shape.bm)
        super().__init__(c, w, across, down, shape.tm, shape.tn, splits, number)
        self.shape = shape
        self.tx, self.ty = shape.bn // shape.tn, shape.bm // shape.tm
        self.arrays: dict[str, int] = {}
        self.begin()

    def begin(self) -> None:
        """Which tile, and the part of a thread."""
        w, s = self.w, self.shape
        self.seen = seen(self.c, s.bm, s.bn)
        # The longest tiles first, so that none is left for the end.
        self.decode(s.bm if self.seen.grows else 0)
        w.line(f"let m0 = tile_m * {s.bm}u;")
        w.line(f"let n0 = tile_n * {s.bn}u;")
        self.firsts, self.ends = self.seen.texts(self)
        self.divide()

    def divide(self) -> None:
        """Which part of its tile."""
        w = self.w
        w.line("let column = (lane & 1u) | ((lane >> 1u) & 6u);")
        w.line("let row = ((lane >> 1u) & 1u) | ((lane >> 3u) & 2u);")
        warps = self.tx // 8
        w.line(
            f"let tx = lane / 32u % {warps}u * 8u + column;"
            if warps > 1
            else "let tx = column;"
        )
        w.line(f"let ty = lane / {32 * warps}u * 4u + row;")

    def memory(self) -> dict[str, int]:
        """Workgroup memory: vec4s of each array."""
        return self.arrays

    def lines(self, pieces: Pieces | None) -> list[str]:
        """The whole text."""
        loops = self.multiply()
        self.w.open()
        if pieces is None:
            self.epilogue()
        else:
            self.partial(pieces)
        return [*self.w.blocks[0], *loops, *self.w.blocks[1]]

    # ------------------------------------------------------ into workgroup memory

    def shares(self, p: Pass, depth: int) -> dict[Factor, Share]:
        """Divide the factors' tiles of a loop among the threads."""
        s = self.shape
        out = {}
        for i, f in enumerate(p.lefts):
            name = f"lefts{i or ''}"
            width = s.bm // WIDTH + s.pad
            out[f] = self.share(f, p, True, name, s.bm, width, depth)
        for i, f in enumerate(p.rights):
            # Words that come along k are scattered over the rows.
            pad = s.pad if f.mode == "k" else 0
            name = f"rights{i or ''}"
            out[f] = self.share(f, p, False, name, s.bn, s.bn // WIDTH + pad, depth)
        for x in out.values():
            size = s.bk * x.width
            self.arrays[x.array] = max(size, self.arrays.get(x.array, 0))
        return out

    def share(
        self,
        f: Factor,
        p: Pass,
        left: bool,
        array: str,
        extent: int,
        width: int,
        depth: int,
    ) -> Share:
        """Divide a factor's tile among the threads."""
        c, w, s = self.c, self.w, self.shape
        outer = c.m if left else c.n
        base, end = ("m0", self.m_end) if left else ("n0", self.n_end)
        mode = f.mode if f.mode in ("", "k") else "x"
        per_outer = WIDTH if mode == "x" else 1
        fast = (
            s.bk // WIDTH if mode == "k" else extent // per_outer
        )  # neighbours in memory
        total = extent * s.bk // (WIDTH if mode else 1)
        count = max(total // s.size, 1)
        places = []
        if s.size % fast == 0:
            one, two = (
                w.let(f"lane % {fast}u", depth, "e"),
                w.let(f"lane / {fast}u", depth, "e"),
            )
            if (
                total < s.size
            ):  # threads to spare: their loads repeat, their stores are left out
                two = w.let(f"min({two}, {total // fast - 1}u)", depth, "e")
            step = s.size // fast
            split = [(one, plus(two, j * step)) for j in range(count)]
        else:
            flat = [w.let(plus("lane", j * s.size), depth, "e") for j in range(count)]
            split = [
                (
                    w.let(f"{f} % {fast}u", depth, "e"),
                    w.let(f"{f} / {fast}u", depth, "e"),
                )
                for f in flat
            ]
        for a, b in split:
            places.append((b, a) if mode == "k" else (a, b))
        axis = (
            inner_axis(c, p.k)
            if mode == "k"
            else inner_axis(c, outer)
            if mode == "x"
            else None
        )
        prefix = f"{base} / {WIDTH}u" if mode == "x" else base
        stop = f"{end} / {WIDTH}u" if mode == "x" else end
        known: dict[str, dict[int, int]] = {}
        copies = []
        for o, _ in places:
            if o not in known:
                at = w.let(self.kept_inside(f"{prefix} + {o}", stop, left), depth, "o")
                known[o] = self.placed(outer, at, mode == "x", depth)
            copies.append(known[o])
        factor, asked = asked_later(f.expr)
        return Share(
            factor,
            asked,
            mode,
            axis,
            width,
            array,
            places,
            copies,
            [f"{array}_next{j}" for j in range(count)],
            total,
        )

    def kept_inside(self, at: str, stop: str, left: bool) -> str:
        """A row (column) of a tile that exists."""
        return f"min({at}, {stop} - 1u)"

    def fetch(self, x: Share, p: Pass, exact: bool, chunk: str, depth: int) -> None:
        """Bring a thread's share of a chunk of k into its registers."""
        w = self.w
        known: dict[str, dict[int, int]] = {}
        k_end = w.extent([q for g in p.k for q in g])
        limit = f"{k_end} / {WIDTH}u" if x.mode == "k" else k_end
        for (_, k), own, name in zip(x.places, x.copies, x.names, strict=True):
            if k not in known:
                at = w.let(self.position(x, chunk, k), depth, "k")
                if not exact:
                    at = w.let(f"min({at}, {limit} - 1u)", depth, "k")
                known[k] = self.placed(p.k, at, x.mode == "k", depth)
            value = self.carried(x.factor, {**own, **known[k]}, x.axis)
            w.line(f"{name} = {value};", depth)

    def carried(self, factor: E.Expr, copies: dict[int, int], axis: int | None) -> str:
        """A word of a factor, as a thread keeps it for a while."""
        return self.read(factor, copies, axis)

    def position(self, x: Share, chunk: str, k: str) -> str:
        """A position of k in a chunk, in vec4s if the share lies along k."""
        return f"{chunk} / {WIDTH}u + {k}" if x.mode == "k" else f"{chunk} + {k}"

    def keep(self, x: Share, p: Pass, exact: bool, stop: str, depth: int) -> None:
        """Store a thread's share to workgroup memory, 0 where it does not count.

        What counts is asked here: to ask when a word is fetched means to wait for it.
        """
        w = self.w
        known: dict[str, dict[int, int]] = {}
        inside: dict[str, str] = {}
        end = f"{stop} / {WIDTH}u" if x.mode == "k" else stop
        zero = f"{self.word(x.mode)}(0.0)"
        out = []
        for (o, k), own, name in zip(x.places, x.copies, x.names, strict=True):
            if k not in known and (x.asked is not None or not exact):
                at = w.let(self.position(x, "chunk", k), depth, "k")
                known[k] = self.placed(p.k, at, x.mode == "k", depth)
                if not exact:
                    inside[k] = w.let(f"{at} < {end}", depth, "b")
            value = name
            if x.asked is not None:
                yes = self.read(x.asked, {**own, **known[k]}, x.axis)
                value = w.let(f"select({zero}, {value}, {yes})", depth, "x")
            if not exact:
                value = w.let(f"select({zero}, {value}, {inside[k]})", depth, "x")
            out += self.put(x, o, k, value)
        if x.total < self.shape.size:
            out = [f"if (lane < {x.total}u) {{", *indent(out), "}"]
        w.blocks[depth] += out

    def word(self, mode: str) -> str:
        """The type in which a thread brings a factor."""
        return "vec4<f32>" if mode else "f32"

    def put(self, x: Share, o: str, k: str, value: str) -> list[str]:
        """Store a word of a share to workgroup memory."""
        if x.mode == "x":
            return [f"{x.array}[({k}) * {x.width}u + {o}] = {value};"]
        if x.mode == "k":
            rows = (f"(({k}) * {WIDTH}u + {e}u) * {x.width}u" for e in range(WIDTH))
            return [
                f"{x.array}[{row} + ({o}) / {WIDTH}u][({o}) % {WIDTH}u] = {value}.{e};"
                for row, e in zip(rows, XYZW, strict=True)
            ]
        at = f"({k}) * {x.width}u + ({o}) / {WIDTH}u"
        return [f"{x.array}[{at}][({o}) % {WIDTH}u] = {value};"]

    # -------------------------------------------------------------- the sum

    def multiply(self) -> list[str]:
        """Accumulators, and the loops over chunks of k."""
        s = self.shape
        self.acc, lines = [], []
        for acc in range(len(self.c.results)):
            prefix = f"c{acc}x" if acc else "c"
            names = [
                [f"{prefix}{i}x{j}" for j in range(s.tn // WIDTH)] for i in range(s.tm)
            ]
            self.acc.append(names)
            lines += [f"var {a}: vec4<f32>;" for line in names for a in line]
        return lines + self.loops()

    def loops(self) -> list[str]:
        """The loops, one after the other."""
        if len(self.c.passes) == 1:
            return self.loop(self.c.passes[0], 0)
        lines = []
        for p in self.c.passes:
            # In braces, so that no value of one loop is kept throughout another one.
            self.w.open()
            loop = self.loop(p, 1)
            lines += ["{", *indent([*self.w.close(), *loop]), "}"]
        return lines

    def loop(self, p: Pass, depth: int) -> list[str]:
        """One loop over chunks of k; what comes before it is said in a given block."""
        w, s = self.w, self.shape
        # Positions of k in a piece, whole chunks.
        length = math.ceil(math.ceil(p.extent / self.splits) / s.bk) * s.bk
        # Without remainder and empty pieces nothing needs to be cut off.
        exact = p.extent % s.bk == 0 and (self.splits - 1) * length < p.extent
        start, stop = self.needed(*self.piece(p, length, 1, depth), depth)
        first = start
        if self.firsts or self.ends:  # fetched even where nothing is needed
            # The last chunk may be a part of one: it begins below stop - bk + 1.
            last = f"(max({stop}, 1u) - 1u) / {s.bk}u * {s.bk}u"
            first = w.let(f"min({start}, {last})", depth, "s")
        shares = self.shares(p, depth)
        for x in shares.values():
            w.blocks[depth] += [f"var {n}: {self.word(x.mode)};" for n in x.names]
        for x in shares.values():
            self.fetch(x, p, exact, first, depth)
        w.open()
        w.line("workgroupBarrier();")
        for x in shares.values():
            self.keep(x, p, exact, stop, depth + 1)
        w.line("workgroupBarrier();")
        # Beyond the end the last chunk comes again: a load under a condition would
        # keep its registers around the loop.
        last = f"max({stop}, {s.bk}u) - {s.bk}u" if exact else stop
        w.line(f"let ahead = min(chunk + {s.bk}u, {last});")
        for x in shares.values():
            self.fetch(x, p, exact, "ahead", depth + 1)
        w.blocks[-1] += self.multiplications(p, shares)
        body = w.close()
        return [
            f"for (var chunk = {start}; chunk < {stop}; chunk = chunk + {s.bk}u) {{",
            *indent(body),
            "}",
        ]

    def needed(self, start: str, stop: str, depth: int) -> tuple[str, str]:
        """The part of a piece of k, in whole chunks, outside of which factors are 0."""
        w, bk = self.w, self.shape.bk
        for e in self.ends:
            chunks = f"(u32(max({e}, 0)) + {bk - 1}u) / {bk}u * {bk}u"
            stop = w.let(f"min({stop}, {chunks})", depth, "s")
        for e in self.firsts:
            chunks = f"u32(max({e}, 0)) / {bk}u * {bk}u"
            start = w.let(f"max({start}, {chunks})", depth, "s")
        return start, stop

    def multiplications(self, p: Pass, shares: dict[Factor, Share]) -> list[str]:
        """Multiply the chunk that lies in workgroup memory."""
        s = self.shape
        out = []
        for k in range(s.bk):
            names = {}
            for side, letter, count, at, step in (
                (p.lefts, "l", s.tm // WIDTH, "ty", self.ty),
                (p.rights, "r", s.tn // WIDTH, "tx", self.tx),
            ):
                for i, f in enumerate(side):
                    x = shares[f]
                    names[f] = [f"{letter}{i or ''}_{k}x{g}" for g in range(count)]
                    out += [
                        f"let {n} = {x.array}[{plus(at, k * x.width + g * step)}];"
                        for g, n in enumerate(names[f])
                    ]
            for q in p.products:
                left, right = names[q.left], names[q.right]
                for i, line in enumerate(self.acc[q.acc]):
                    value = f"vec4<f32>({left[i // WIDTH]}.{XYZW[i % WIDTH]})"
                    out += [
                        f"{acc} = fma({value}, {r}, {acc});"
                        for acc, r in zip(line, right, strict=True)
                    ]
        return out

    # -------------------------------------------------------------- results

    def row_at(self, i: int) -> str:
        return plus(f"m0 + ty * {WIDTH}u", i // WIDTH * self.ty * WIDTH + i % WIDTH)

    def column_at(self, j: int) -> str:
        if self.c.wide:
            return plus(f"n0 / {WIDTH}u + tx", j * self.tx)
        return plus(f"n0 + tx * {WIDTH}u", j // WIDTH * self.tx * WIDTH + j % WIDTH)

    def result(self, acc: int, i: int, j: int) -> str:
        row = self.acc[acc][i]
        return row[j] if self.c.wide else f"{row[j // WIDTH]}.{XYZW[j % WIDTH]}"
