"""Rows that all read one array, such as a product of a single row, where loads cost
most: a thread takes several whole rows, and what they share is loaded once for them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..ir import expr as E
from ..ir.expr import Expr
from .address import Address
from .choice import pick
from .contract_plan import Copies
from .group import Group
from .kernel_text import indent
from .member import Member
from .program import Kernel
from .reduction import combine, horizontal, identity
from .schedule import (
    Layout,
    decode,
    finish,
    fold,
    kernel_bodies,
    kernel_name,
    lay_out,
    make_writer,
    vector_axis,
    visible,
)
from .spelling import WIDTH, wgsl_type
from .target import Target

#: Threads of a workgroup: a subgroup of most software drivers.
_SIZE = 8
#: Positions that one running sum takes at most, as in products.
_LONGEST = 16_384


@dataclass(frozen=True)
class Several:
    """Rows of a thread."""

    rows: int


@dataclass(eq=False)
class _Rows:
    """What `Copies` asks of a kernel."""

    group: Group
    layout: Layout

    def address(self, n: Expr) -> Address:
        """A load's address without axes that merged into others."""
        return visible(self.layout, self.layout.addresses[n])


def shared_rows(g: Group, target: Target) -> Kernel | None:
    """Print a group this way, if it is one of these and the driver is such a one."""
    if target.family != "software" or g.stands_for is not None:
        return None
    bodies = kernel_bodies(g)
    sums = [m for m in g.members if m.role == "row"]
    count, length = math.prod(g.rows), math.prod(g.lanes)
    longest = min(_LONGEST, target.loop_budget // 2)
    if count < 4 * _SIZE or length > longest or not _suits(g, bodies, sums):
        return None
    # The fewer threads, the fewer processors have work.
    default = Several(max(1, min(4, count // (8 * _SIZE))))

    def candidates() -> list[Several]:
        return [Several(n) for n in (1, 2, 4, 8)]

    def fits(s: Several) -> bool:
        return 1 <= s.rows <= 16

    chosen = pick(target, "row_shared", default, candidates, fits)
    return _print(g, target, bodies, sums, chosen.rows)


def _suits(g: Group, bodies: dict[Member, Expr], sums: list[Member]) -> bool:
    """Whether reductions of one phase share a load, and nothing else has lanes."""
    own = {m.stage for m in sums}
    lanes = sum(1 << a for a in range(len(g.rows), len(g.space)))
    rows = (1 << len(g.rows)) - 1
    loads = {n for m in sums for n in E.loads(bodies[m])}
    return (
        bool(sums)
        and all(m.role in ("row", "map") for m in g.members)
        and not any(n.data in own for n in loads)
        and any(n.free & lanes and not n.free & rows for n in loads)
        and any(n.free & lanes and n.free & rows for n in loads)
        and not any(q >= len(g.rows) for m in g.stored for q in _places(g, m))
        and not {g.target(m)[0] for m in g.stored}
        & {n.data for b in bodies.values() for n in E.loads(b)}
    )


def _places(g: Group, m: Member) -> tuple[int, ...]:
    """The kernel's axes that a member has an element for."""
    return tuple(g.axes[m][: len(m.out)])


def _wide(m: Member, body: Expr, vector: int | None) -> bool:
    """Whether a reduction's value is a vec4; that of a sum or product always is."""
    if vector is None:
        return False
    return m.stage.monoid in ("sum", "prod") or bool(body.free >> vector & 1)


def _print(
    g: Group, target: Target, bodies: dict[Member, Expr], sums: list[Member], many: int
) -> Kernel:
    rows, lanes = range(len(g.rows)), range(len(g.rows), len(g.space))
    layout = lay_out(g, bodies, [rows, lanes])
    vector = vector_axis(layout, layout.loops[1])
    w = make_writer(g, layout, target, vector)
    copies = Copies(_Rows(g, layout), w)
    count = math.prod(g.rows)
    end = w.param(("rows",), count, stem="rows")
    w.line(f"let first = ((group.y * groups.x + group.x) * {_SIZE}u + lane) * {many}u;")
    w.line(f"if (first >= {end}) {{ return; }}")
    places = []
    for r in range(many):
        at = w.let(f"min(first + {r}u, {end} - 1u)", 0, "at")
        places.append(copies.make(layout.loops[0]))
        copies.place(places[-1], layout.loops[0], at, 0)
    maps = [m for m in g.stored if m.role == "map"]
    wide = {m: _wide(m, bodies[m], vector) for m in sums}

    def moved(m: Member, place: dict[int, int]) -> Expr:
        own = {a: E.index(q) for a, q in place.items()}
        return E.substitute(g.own_load(m), own)

    names: dict[Member, list[str]] = {}
    for m in sums:
        dtype, monoid = m.body.dtype, m.stage.monoid or "sum"
        start = identity(w, monoid, dtype, wide[m])
        names[m] = [w.fresh("acc") for _ in places]
        for name in names[m]:
            w.line(f"var {name}: {wgsl_type(dtype, wide[m])} = {start};")
    w.open()
    decode(w, "i", layout.loops[1], 1, vector)
    for m in sums:
        dtype, monoid = m.body.dtype, m.stage.monoid or "sum"
        for name, place in zip(names[m], places, strict=True):
            e = copies.bring(bodies[m], place)
            v = w.splat(e) if wide[m] else w.value(e)
            w.line(f"{name} = {combine(monoid, name, v, dtype, wide[m])};")
    n = w.extent(lanes, WIDTH if vector is not None else 1)
    w.loop(f"for (var i = 0u; i < {n}; i = i + 1u)")
    for r, place in enumerate(places):
        for m in sums:
            text = names[m][r]
            if wide[m]:
                monoid = m.stage.monoid or "sum"
                text = w.let(horizontal(monoid, text, m.body.dtype), 0, "r")
            w.memo[0][moved(m, place)] = text
        values = [(m, w.value(copies.bring(bodies[m], place))) for m in maps]
        values += [(m, w.memo[0][moved(m, place)]) for m in sums if m in g.stored]
        w.open()
        for m, value in values:
            tensor = g.target(m)[0]
            w.plain.add(tensor)
            form = copies.move(visible(layout, layout.stores[m]), place)
            w.store(tensor, form, value, m.body.dtype, False)
        stores = w.close()
        if r:
            stores = [f"if (first + {r}u < {end}) {{", *indent(stores), "}"]
        w.blocks[0] += stores
    groups = -(-count // (many * _SIZE))
    grid = fold(groups, target)
    name = kernel_name(g)
    return finish(g, w, layout, w.blocks[0], name, "row", _SIZE, grid)
