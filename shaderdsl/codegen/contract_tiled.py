"""Contraction for GPUs: tiles of both factors in workgroup memory.

Each thread keeps a block of results in registers. While one chunk of k is multiplied
the next one is on its way into registers. Lanes of 32 threads lie 4 by 8 in a zigzag,
so that their reads of workgroup memory meet few banks twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..ir import expr as E
from .choice import pick
from .contract_plan import Contraction, Loop, inner_axis, plain_tensors
from .contract_tile import XYZW, Tile, plus
from .program import Kernel, Scratch
from .schedule import finish, fold
from .target import Target
from .writer import WIDTH, Writer, indent


@dataclass(frozen=True)
class Shape:
    """Results of a workgroup and of a thread; ``bk`` positions of k at a time."""

    bm: int
    bn: int
    bk: int
    tm: int
    tn: int
    pad: int = 1  # vec4s that keep rows of workgroup memory on different banks

    @property
    def size(self) -> int:
        """Invocations of a workgroup."""
        return self.bm // self.tm * (self.bn // self.tn)

    @property
    def memory(self) -> int:
        """Bytes of workgroup memory."""
        return self.bk * (self.bm // WIDTH + self.bn // WIDTH + 2 * self.pad) * 16


#: From large to small, with a guess of the share of the best speed that each reaches on
#: a large product.
SHAPES = (
    (Shape(128, 128, 8, 16, 8), 1.0),
    (Shape(64, 128, 8, 8, 8), 0.9),
    (Shape(64, 64, 16, 8, 8), 0.75),
    (Shape(32, 64, 16, 4, 8), 0.55),
    (Shape(16, 128, 16, 4, 4), 0.4),
    (Shape(32, 32, 16, 4, 4), 0.35),
)


def tiled(
    c: Contraction,
    name: str,
    shape: Shape,
    splits: int = 1,
    scratch: Scratch | None = None,
) -> Kernel:
    """Print the kernel. With ``splits`` the sums over pieces of k go to ``scratch``."""
    w = Writer(c.group.space, c.target)
    plain_tensors(c, w, epilogue=scratch is None)
    tile = Tiled(c, w, shape, splits)
    lines = tile.lines(scratch)
    w.shared += declare(tile.memory())
    return finish(
        c.group,
        w,
        c.layout,
        lines,
        name,
        "contract",
        shape.size,
        fold(tile.count, c.target),
    )


def declare(arrays: dict[str, int]) -> list[str]:
    """Declarations of workgroup memory."""
    return [f"var<workgroup> {a}: array<vec4<f32>, {n}>;" for a, n in arrays.items()]


@dataclass
class _Share:
    """What a thread brings of one factor, and where each piece lies in the tile."""

    factor: E.Expr
    mode: str  # "x" along the outer axis, "k", or one by one
    outer: Loop
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
        _, m, n, k = c.sizes
        across, down = -(-n // shape.bn), -(-m // shape.bm)
        super().__init__(c, w, across, down, shape.tm, shape.tn, splits, number)
        self.shape = shape
        # Positions of k in a piece, whole chunks.
        self.length = math.ceil(math.ceil(k / splits) / shape.bk) * shape.bk
        # Without remainder nothing needs to be cut off.
        self.exact = k % shape.bk == 0
        self.tx, self.ty = shape.bn // shape.tn, shape.bm // shape.tm
        self.begin()

    def begin(self) -> None:
        """Which tile, and which part of it."""
        w, s = self.w, self.shape
        self.decode()
        w.line(f"let m0 = tile_m * {s.bm}u;")
        w.line(f"let n0 = tile_n * {s.bn}u;")
        w.line("let column = (lane & 1u) | ((lane >> 1u) & 6u);")
        w.line("let row = ((lane >> 1u) & 1u) | ((lane >> 3u) & 2u);")
        warps = self.tx // 8
        w.line(
            f"let tx = lane / 32u % {warps}u * 8u + column;"
            if warps > 1
            else "let tx = column;"
        )
        w.line(f"let ty = lane / {32 * warps}u * 4u + row;")
        self.left = self.share("left", s.bm, s.bm // WIDTH + s.pad)
        # Words that come along k are scattered over the rows.
        pad = s.pad if self.c.right_mode == "k" else 0
        self.right = self.share("right", s.bn, s.bn // WIDTH + pad)

    def memory(self) -> dict[str, int]:
        """Workgroup memory: vec4s of each array."""
        return {x.array: self.shape.bk * x.width for x in (self.left, self.right)}

    def lines(self, scratch: Scratch | None) -> list[str]:
        """The whole text."""
        loop = self.multiply()
        self.w.open()
        if scratch is None:
            self.epilogue()
        else:
            self.partial(scratch)
        return [*self.w.blocks[0], *loop, *self.w.blocks[1]]

    # ------------------------------------------------------ into workgroup memory

    def share(self, side: str, extent: int, width: int) -> _Share:
        """Divide a factor's tile among the threads."""
        c, w, s = self.c, self.w, self.shape
        left = side == "left"
        mode, outer = (c.left_mode, c.m) if left else (c.right_mode, c.n)
        base, end = ("m0", self.m_end) if left else ("n0", self.n_end)
        mode = mode if mode in ("", "k") else "x"
        per_outer = WIDTH if mode == "x" else 1
        fast = (
            s.bk // WIDTH if mode == "k" else extent // per_outer
        )  # neighbours in memory
        total = extent * s.bk // (WIDTH if mode else 1)
        count = max(total // s.size, 1)
        places = []
        if s.size % fast == 0:
            one, two = (
                w.let(f"lane % {fast}u", 0, "e"),
                w.let(f"lane / {fast}u", 0, "e"),
            )
            if (
                total < s.size
            ):  # threads to spare: their loads repeat, their stores are left out
                two = w.let(f"min({two}, {total // fast - 1}u)", 0, "e")
            step = s.size // fast
            split = [(one, plus(two, j * step)) for j in range(count)]
        else:
            flat = [w.let(plus("lane", j * s.size), 0, "e") for j in range(count)]
            split = [
                (w.let(f"{f} % {fast}u", 0, "e"), w.let(f"{f} / {fast}u", 0, "e"))
                for f in flat
            ]
        for a, b in split:
            places.append((b, a) if mode == "k" else (a, b))
        axis = (
            inner_axis(c, c.k)
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
                at = w.let(f"min({prefix} + {o}, {stop} - 1u)", 0, "o")
                known[o] = self.placed(outer, at, mode == "x")
            copies.append(known[o])
        letter = "a" if left else "b"
        names = [f"{letter}next{j}" for j in range(count)]
        return _Share(
            c.left if left else c.right,
            mode,
            outer,
            axis,
            width,
            f"{side}s",
            places,
            copies,
            names,
            total,
        )

    def fetch(self, x: _Share, chunk: str, stop: str, depth: int) -> None:
        """Bring a thread's share of a chunk of k into its registers."""
        c, w = self.c, self.w
        known: dict[str, dict[int, int]] = {}
        inside: dict[str, str] = {}
        k_end = w.extent([q for g in c.k for q in g])
        for (_, k), own, name in zip(x.places, x.copies, x.names, strict=True):
            if k not in known:
                at = w.let(
                    f"{chunk} / {WIDTH}u + {k}" if x.mode == "k" else f"{chunk} + {k}",
                    depth,
                    "k",
                )
                limit = f"{k_end} / {WIDTH}u" if x.mode == "k" else k_end
                if not self.exact:
                    inside[k] = w.let(
                        f"{at} < {stop}{f' / {WIDTH}u' if x.mode == 'k' else ''}",
                        depth,
                        "b",
                    )
                    at = w.let(f"min({at}, {limit} - 1u)", depth, "k")
                known[k] = self.placed(c.k, at, x.mode == "k", depth)
            value = self.read(x.factor, {**own, **known[k]}, x.axis)
            if not self.exact:
                zero = "vec4<f32>(0.0)" if x.mode else "0.0"
                value = f"select({zero}, {value}, {inside[k]})"
            w.line(f"{name} = {value};", depth)

    def keep(self, x: _Share) -> list[str]:
        """Lines that store a thread's share to workgroup memory."""
        out = []
        for (o, k), name in zip(x.places, x.names, strict=True):
            if x.mode == "x":
                out.append(f"{x.array}[({k}) * {x.width}u + {o}] = {name};")
            elif x.mode == "k":
                for e in range(WIDTH):
                    at = f"(({k}) * {WIDTH}u + {e}u) * {x.width}u + ({o}) / {WIDTH}u"
                    out.append(f"{x.array}[{at}][({o}) % {WIDTH}u] = {name}.{XYZW[e]};")
            else:
                at = f"({k}) * {x.width}u + ({o}) / {WIDTH}u"
                out.append(f"{x.array}[{at}][({o}) % {WIDTH}u] = {name};")
        if x.total < self.shape.size:
            return [f"if (lane < {x.total}u) {{", *indent(out), "}"]
        return out

    # -------------------------------------------------------------- the sum

    def multiply(self) -> list[str]:
        """Accumulators and the loop over chunks of k."""
        w, s = self.w, self.shape
        start, stop = self.piece(self.length, 1)
        self.acc = [[f"c{i}x{j}" for j in range(s.tn // WIDTH)] for i in range(s.tm)]
        for x in (self.left, self.right):
            w.blocks[0] += [
                f"var {n}: {'vec4<f32>' if x.mode else 'f32'};" for n in x.names
            ]
        for x in (self.left, self.right):
            self.fetch(x, start, stop, 0)
        head = [f"var {a}: vec4<f32>;" for line in self.acc for a in line]
        w.open()
        w.line("workgroupBarrier();")
        for x in (self.left, self.right):
            w.blocks[-1] += self.keep(x)
        w.line("workgroupBarrier();")
        # Beyond the end the last chunk comes again: a load under a condition would
        # keep its registers around the loop.
        last = f"max({stop}, {s.bk}u) - {s.bk}u" if self.exact else stop
        w.line(f"let ahead = min(chunk + {s.bk}u, {last});")
        for x in (self.left, self.right):
            self.fetch(x, "ahead", stop, 1)
        w.blocks[-1] += self.products()
        body = w.close()
        return [
            *head,
            f"for (var chunk = {start}; chunk < {stop}; chunk = chunk + {s.bk}u) {{",
            *indent(body),
            "}",
        ]

    def products(self) -> list[str]:
        """Multiply the chunk that lies in workgroup memory."""
        s = self.shape
        out = []
        for k in range(s.bk):
            left = [f"l{k}x{g}" for g in range(s.tm // WIDTH)]
            right = [f"r{k}x{g}" for g in range(s.tn // WIDTH)]
            out += [
                f"let {x} = lefts[{plus('ty', k * self.left.width + g * self.ty)}];"
                for g, x in enumerate(left)
            ]
            out += [
                f"let {x} = rights[{plus('tx', k * self.right.width + g * self.tx)}];"
                for g, x in enumerate(right)
            ]
            for i, line in enumerate(self.acc):
                for j, acc in enumerate(line):
                    x = f"{left[i // WIDTH]}.{XYZW[i % WIDTH]}"
                    out.append(f"{acc} = fma(vec4<f32>({x}), {right[j]}, {acc});")
        return out

    # -------------------------------------------------------------- results

    def row_at(self, i: int) -> str:
        return plus(f"m0 + ty * {WIDTH}u", i // WIDTH * self.ty * WIDTH + i % WIDTH)

    def column_at(self, j: int) -> str:
        if self.c.wide:
            return plus(f"n0 / {WIDTH}u + tx", j * self.tx)
        return plus(f"n0 + tx * {WIDTH}u", j // WIDTH * self.tx * WIDTH + j % WIDTH)

    def result(self, i: int, j: int) -> str:
        return (
            self.acc[i][j]
            if self.c.wide
            else f"{self.acc[i][j // WIDTH]}.{XYZW[j % WIDTH]}"
        )


@dataclass(frozen=True)
class Tiling:
    """A tile shape, and into how many pieces k is cut."""

    shape: Shape
    splits: int


def choose_shape(cs: Sequence[Contraction], longest: int) -> tuple[Shape, int]:
    """Tile shape and pieces of k for contractions that share a kernel.

    Large tiles load least, but a device wants about two workgroups a processor.
    """
    target = cs[0].target
    k = max(c.sizes[3] for c in cs)
    costs = {t: _cost(cs, t) for t in _tilings(cs, longest)}
    default = min(costs, key=lambda t: costs[t])

    def fits(t: Tiling) -> bool:
        known = t.shape in [shape for shape, _ in SHAPES]
        return (
            known
            and _within(t.shape, target)
            and t.splits >= 1
            and math.ceil(k / t.splits) <= max(longest, t.shape.bk)
        )

    chosen = pick(
        target, "tiles", default, lambda: sorted(costs, key=lambda t: costs[t]), fits
    )
    return chosen.shape, chosen.splits


def _within(shape: Shape, target: Target) -> bool:
    limits = target.limits
    return (
        shape.memory <= limits.max_workgroup_storage
        and shape.size <= limits.max_invocations
    )


def _tilings(cs: Sequence[Contraction], longest: int) -> Iterator[Tiling]:
    """Shapes that the device allows, with pieces that are neither tiny nor too long."""
    k = max(c.sizes[3] for c in cs)
    for shape, _ in SHAPES:
        if not _within(shape, cs[0].target):
            continue
        needed = math.ceil(k / longest)
        for splits in (1, 2, 4, 8, 16, 32) if needed <= 32 else (needed,):
            if 1 < splits != needed and math.ceil(k / splits) < 8 * shape.bk:
                break
            if splits >= needed:
                yield Tiling(shape, splits)


def _cost(cs: Sequence[Contraction], t: Tiling) -> float:
    """Time in multiplications of a workgroup, with reading and writing of pieces."""
    shape, splits = t.shape, t.splits
    piece = math.ceil(max(c.sizes[3] for c in cs) / splits)
    groups = splits * sum(workgroups(c, shape) for c in cs)
    waves = max(math.ceil(2 * groups / _FULL) / 2, 1.0)
    cost = waves * shape.bm * shape.bn * (piece + 2 * shape.bk) / dict(SHAPES)[shape]
    if splits > 1:
        results = sum(math.prod(c.sizes[:3]) for c in cs)
        cost += results * (splits + 1) * 12 / _FULL + 40_000
    return cost


def workgroups(c: Contraction, shape: Shape) -> int:
    """Tiles of a contraction."""
    batch, m, n, _ = c.sizes
    return batch * math.ceil(m / shape.bm) * math.ceil(n / shape.bn)


#: Workgroups that fill a large device.
_FULL = 264
