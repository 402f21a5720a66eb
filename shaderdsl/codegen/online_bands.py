"""Sums along diagonals of products, a band of them at a time.

The gradient of a bias by distance adds up ``f(X[i, i - u])`` over i for each u. Taken
place by place every dot product fetches both of its factors. Here a workgroup walks a
band of neighbouring diagonals in tiles, as the kernels of rows do: a lane has a row,
the lines of a tile go around by broadcast, and each pair (lane, line of the tile) meets
one and the same distance in all tiles of the band. What the pairs have added up is left
in memory; a second kernel adds those of a distance, in order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..ir import expr as E
from ..ir.expr import Expr
from ..ir.indexmap import affine, interval, split
from ..ir.stage import factors, product
from .contract_registers import sharing_lanes
from .group import Group
from .online_masks import Masks
from .online_plan import Online, Product, Sum, close_turns, plain_tensors, steps_of
from .online_registers import Registers, Rows, with_subgroups
from .online_runs import parts_of
from .online_steps import shift
from .program import Kernel, Scratch
from .schedule import (
    decode,
    finish,
    fold,
    kernel_bodies,
    kernel_name,
    lay_out,
    visible,
)
from .target import Target
from .writer import Writer


@dataclass(frozen=True)
class _Slope:
    """``line = alpha · row + beta · distance + offset``, of axes."""

    row: int
    line: int
    distance: int
    alpha: int
    beta: int
    offset: Expr


@dataclass(eq=False)
class Bands:
    """Sums along diagonals as sums over rows and lines.

    Args:
        o: the sums' values, of a row and a line.
        lanes: rows of a tile, and lines.
    """

    o: Online
    slope: _Slope
    lanes: int

    @property
    def distances(self) -> int:
        """How many sums there are of each batch."""
        return self.o.extent(self.slope.distance)

    @property
    def count(self) -> int:
        """Bands; neighbours share all distances but one."""
        return (self.distances - 1) // self.lanes + 2

    @property
    def steps(self) -> tuple[int, int]:
        """By how much the distance grows with the lane, and with the tile's line."""
        return -self.slope.alpha * self.slope.beta, self.slope.beta

    @property
    def least(self) -> int:
        """The least distance of a tile, from that of its first lane and line."""
        return (self.lanes - 1) * sum(min(k, 0) for k in self.steps)


def find_bands(g: Group, target: Target) -> Bands | None:
    """Such sums in a group, where values go around in subgroups; None if it has others.

    Few distances are taken place by place.
    """
    lanes = sharing_lanes(target) if target.family == "software" else 0
    sums = [m for m in g.members if m.role == "points"]
    products = [m for m in g.members if m.role == "online"]
    bodies = {m: E.substitute(m.body, g.renaming(m)) for m in sums}
    slope = _slope(g, list(bodies.values()))
    if not lanes or slope is None or g.space[slope.distance] < lanes:
        return None
    c = slope
    at = E.index(c.line) - E.index(c.row) * c.alpha - c.offset
    moved = {m: shift(b, c.distance, at * c.beta) for m, b in bodies.items()}
    found = [_product(g, m.stage, c, list(moved.values())) for m in products]
    taken = [_value(g, b, c) for b in moved.values()]
    if any(x is None for x in (*found, *taken)):
        return None
    own: list[Product] = []
    for m, f in zip(products, found, strict=True):
        assert f is not None
        own.append(replace(f, member=m))
    one = E.const(1.0)
    values = []
    for m, v in zip(sums, taken, strict=True):
        assert v is not None
        values.append(Sum(m, v, one, None, one, None, [], g.own_load(m)))
    first = sums[0]
    reduced = [g.axes[first][first.axes.index(a)] for a in first.red]
    outer = [a for a in reduced if a != c.row]
    batch = [a for a in range(len(g.rows)) if a != c.distance]
    roots = [*(s.value for s in values), *(x for p in own for x in (p.near, p.far))]
    layout = lay_out(g, {}, [batch], [*roots, c.offset])
    o = Online(
        g,
        target,
        own,
        None,
        None,
        values,
        {},
        {},
        layout,
        c.row,
        c.line,
        outer,
        layout.loops[0],
        [],
    )
    steps = steps_of(g.space[c.row], lanes) * o.extent(*outer)
    return Bands(o, c, lanes) if steps <= target.loop_budget * 0.9 else None


def _places(g: Group, n: Expr) -> dict[int, Expr]:
    """A product's own axes (as the group's) at a load of it."""
    member = next(m for m in g.members if m.role == "online" and m.stage is n.data)
    place: dict[int, Expr] = {}
    for i, group, _ in zip(n.args, n.data.groups, n.data.shape, strict=True):
        own = [n.data.ext[a] for a in group]
        for a, e in zip(group, split(i, own, g.space), strict=True):
            if a in member.axes:
                place[g.axes[member][member.axes.index(a)]] = e
    return place


def _slope(g: Group, bodies: list[Expr]) -> _Slope | None:
    """How the line of the first product that is read follows from row and distance."""
    inside = {m.stage for m in g.members if m.role == "online"}
    for n in E.loads(*bodies):
        if n.data not in inside:
            continue
        place = _places(g, n)
        rows = [e.data for e in place.values() if e.kind == "index"]
        for axis, e in place.items():
            form = affine(e)
            moving = [a for a, k in form.axes.items() if abs(k) == 1]
            for row in moving:
                for distance in moving:
                    if row in rows and distance < len(g.rows) <= row:
                        kept = {a: k for a, k in form.axes.items() if k}
                        if set(kept) != {row, distance}:
                            continue
                        zero = {row: E.const(0), distance: E.const(0)}
                        rest = E.substitute(e, zero)
                        if E.loads(rest) or rest.free:
                            continue
                        alpha, beta = kept[row], kept[distance]
                        return _Slope(row, axis, distance, alpha, beta, rest)
        return None
    return None


def _product(g: Group, stage: object, c: _Slope, bodies: list[Expr]) -> Product | None:
    """A product over row and line, if it is read at nothing but those."""
    member = next(m for m in g.members if m.role == "online" and m.stage is stage)
    results = {n for b in bodies for n in E.loads(b) if n.data is stage}
    if len(results) != 1:
        return None
    place = _places(g, next(iter(results)))
    parts, names = parts_of(member), g.renaming(member)
    both = [
        E.substitute(E.substitute(x, names), place) for x in (parts.left, parts.right)
    ]
    row, line = 1 << c.row, 1 << c.line
    near = [x for x in both if x.free & row and not x.free & line]
    far = [x for x in both if x.free & line and not x.free & row]
    if len(near) != 1 or len(far) != 1:
        return None
    inner = g.axes[member][member.axes.index(member.red[0])]
    return Product(member, parts.number, near[0], far[0], inner, tuple(results))


def _value(g: Group, body: Expr, c: _Slope) -> Expr | None:
    """What a row and a line add, if lines that do not exist add nothing."""
    number, fs, guards = factors(body)
    line, size = E.index(c.line), E.size(g.space[c.line])
    bounds = [E.apply("le", 0, line), E.apply("lt", line, size)]
    if any(b not in guards for b in bounds) or body.free >> c.distance & 1:
        return None
    value = product(fs)
    if number != 1.0:
        value = value * E.const(number)
    return E.guard([x for x in guards if not _always(g, x)], value)


def _always(g: Group, c: Expr) -> bool:
    """Whether a condition holds by the extents of its axes alone."""
    if c.kind != "apply" or c.data not in ("le", "lt") or c.args[0].dtype != "i32":
        return False
    high = interval(c.args[0], g.space)[1]
    low = interval(c.args[1], g.space)[0]
    return high <= low if c.data == "le" else high < low


# ------------------------------------------------------------------ kernels


def band_kernels(b: Bands) -> list[Kernel]:
    """The bands' kernel and the one that adds up what they left."""
    o, g = b.o, b.o.group
    name = kernel_name(g)
    words = len(o.sums) * o.batches * b.count * b.lanes * b.lanes
    scratch = Scratch(f"{name}_bands", "f32", words * 4)
    w = Writer(g.space, o.target)
    plain_tensors(o, w)
    lines = _Band(b, w, scratch).lines()
    grid = fold(b.count * o.batches, o.target)
    first = finish(g, w, o.layout, lines, name, "points", b.lanes, grid)
    first = with_subgroups(first, o.target)
    why = "; ".join(x for x in (first.reason, "a band of distances at a time") if x)
    return [
        replace(first, members=(), writes=(), reason=why),
        replace(_combine(b, scratch), reason="adds up the bands of each distance"),
    ]


class _Band(Registers):
    """Blocks of the writer: 0 a band, 1 an outer position, 2 a tile."""

    def __init__(self, b: Bands, w: Writer, scratch: Scratch):
        super().__init__(b.o, w, Rows(b.lanes, b.lanes, True))
        self.b, self.scratch = b, scratch

    def lines(self) -> list[str]:
        """The kernel's text."""
        o, w, b = self.o, self.w, self.b
        n, c = b.lanes, b.slope
        bands = w.param(("bands",), b.count, stem="bands")
        every = w.param(("all",), b.count * o.batches, stem="groups")
        w.line("let flat = group.y * groups.x + group.x;")
        w.line(f"if (flat >= {every}) {{ return; }}")
        w.line(f"let band = flat % {bands};")
        batch = w.let(f"flat / {bands}", 0, "batch")
        self.axes.place({a: a for q in o.batch for a in q}, o.batch, batch, 0)
        self.row_end, self.line_end = w.extent([o.row]), w.extent([o.line])
        self.masks = Masks(o, self.axes, n, (self.row_end, self.line_end))
        w.line(f"let start = i32(band * {n}u) - {n + b.least};")
        sign = "" if c.beta > 0 else "-"
        # The line of a tile's first position at row 0.
        w.line(f"let zero = {sign}start + {w.value(c.offset)};")
        low, high = "-zero", f"i32({self.line_end}) - zero"
        if c.alpha < 0:
            low, high = f"zero - i32({self.line_end}) + {n}", f"zero + {n}"
        low = f"max({low} - {n - 1}, 0)"
        w.line(f"let first = u32({low}) / {n}u * {n}u;")
        w.line(f"var stop = min({self.row_end}, u32(max({high}, 0)));")
        for test in self.empty():
            w.line(f"stop = select(stop, 0u, {test});")
        names = [[f"s{k}e{e}" for e in range(n)] for k in range(len(o.sums))]
        w.blocks[-1] += [f"var {x} = 0.0;" for own in names for x in own]
        w.open()
        if o.outer:
            self.axes.place({a: a for a in o.outer}, [[a] for a in o.outer], "turn", 1)
        w.open()
        self.tile()
        for s, own in zip(o.sums, names, strict=True):
            for x, v in zip(own, self.values(s), strict=True):
                w.line(f"{x} = {x} + {v};")
        w.loop(f"for (var top = first; top < stop; top = top + {n}u)")
        close_turns(o, w)
        for k, own in enumerate(names):
            rows = w.param(("batches",), o.batches, stem="batches")
            w.line(f"let at{k} = ({k}u * {rows} + {batch}) * {bands} + band;")
            for e, x in enumerate(own):
                place = f"(at{k} * {n}u + {e}u) * {n}u + lane"
                w.line(w.write(self.scratch, place, x, False))
        return w.blocks[0]

    def empty(self) -> list[str]:
        """Conditions that the same distances fail in all tiles: a band without any."""
        o, w, n, c = self.o, self.w, self.b.lanes, self.b.slope
        out = []
        turning = sum(1 << a for a in (c.row, c.line, *o.outer))
        guards = [factors(s.value)[2] for s in o.sums]
        for x in guards[0]:
            if x.data not in ("le", "lt") or any(x not in own for own in guards):
                continue
            # a - b ≤ 0 (< 0), of which the row and the line are taken out.
            form = affine(x.args[0] - x.args[1])
            row, line = (form.axes.pop(a, 0) for a in (c.row, c.line))
            rest = form.expr()
            if not line or row + c.alpha * line or rest.free & turning:
                continue
            least = (n - 1) * (min(row, 0) + min(line, 0))
            text = f"{w.value(rest)} + {line} * zero + {least}"
            out.append(f"{text} {'>' if x.data == 'le' else '>='} 0")
        return out

    def tile(self) -> None:
        """Rows and lines of a tile, and their products."""
        o, w, n, c = self.o, self.w, self.b.lanes, self.b.slope
        w.line("let row = top + lane;")
        w.line(f"let at = min(row, {self.row_end} - 1u);")
        self.own = self.axes.at(o.row, "at", 2)
        sign = "+" if c.alpha > 0 else "-"
        w.line(f"let l = zero {sign} i32(top);")
        end = w.let(f"i32({self.line_end})", 0, "end")
        exact = o.extent(o.row) % n == 0
        self.places, self.inside = [], []
        for e in range(n):
            test = f"l + {e} >= 0 && l + {e} < {end}"
            if not exact:
                test += f" && row < {self.row_end}"
            self.inside.append(w.let(test, 2, "b"))
            name = w.let(f"u32(clamp(l + {e}, 0, {end} - 1))", 2)
            self.places.append(self.axes.at(o.line, name, 2))
        mine = w.let(f"u32(clamp(l + i32(sub % {n}u), 0, {end} - 1))", 2)
        self.multiply(self.near(), self.axes.at(o.line, mine, 2))


def _combine(b: Bands, scratch: Scratch) -> Kernel:
    """For each sum the pairs of its distance, one of each lane."""
    o, g, n = b.o, b.o.group, b.lanes
    every = kernel_bodies(g)
    epilogue = {m: g.own_load(m) if m.role == "points" else every[m] for m in g.stored}
    batch = [a for a in range(len(g.rows)) if a != b.slope.distance]
    layout = lay_out(g, epilogue, [batch, [b.slope.distance]])
    w = Writer(g.space, o.target)
    for load, form in layout.addresses.items():
        w.addresses[load] = visible(layout, form)
        w.plain.add(load.data)
    w.plain |= {m.stage for m in g.stored}
    total = math.prod(g.rows)
    w.line("let flat = (group.y * groups.x + group.x) * 64u + lane;")
    w.line(f"if (flat >= {w.param(('rows',), total, stem='rows')}) {{ return; }}")
    many = w.extent([b.slope.distance])
    w.line(f"let batch = flat / {many};")
    decode(w, "batch", layout.loops[0], 0)
    decode(w, w.let(f"flat % {many}", 0), layout.loops[1], 0)
    bands = w.param(("bands",), b.count, stem="bands")
    rows = w.param(("batches",), o.batches, stem="batches")
    by_lane, by_line = b.steps
    for k, s in enumerate(o.sums):
        text = ""
        for lane in range(n):
            # (band - 1) · n + by_line · line, with 4 · n added.
            shifted = 4 * n + b.least - by_lane * lane
            z = w.let(f"{w.names[b.slope.distance]} + {shifted}u", 0, "z")
            line = f"{z} % {n}u" if by_line > 0 else f"({n}u - {z} % {n}u) % {n}u"
            e = w.let(line, 0, "e")
            band = f"({z} {'-' if by_line > 0 else '+'} {e}) / {n}u - 3u"
            at = f"({k}u * {rows} + batch) * {bands} + {band}"
            part = w.read(scratch, f"(({at}) * {n}u + {e}) * {n}u + {lane}u", False)
            text = f"{text} + {part}" if text else part
        w.memo[0][s.own] = w.let(text, 0, "sum")
    for m, body in epilogue.items():
        value = w.value(body)
        form = visible(layout, layout.stores[m])
        w.store(g.target(m)[0], form, value, m.body.dtype, False)
    name = f"{kernel_name(g)}_bands"
    grid = fold(steps_of(total, 64), o.target)
    return finish(g, w, layout, w.blocks[0], name, "points", 64, grid)
