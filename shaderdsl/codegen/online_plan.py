"""What every schedule of a chain starts from: products, sums, what follows them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..ir import expr as E
from ..ir.expr import Expr
from ..ir.stage import Stage, product
from .address import Address, contiguous
from .contract_plan import Copies
from .group import Group
from .member import Member
from .online_runs import (
    Run,
    conjuncts,
    maximum_of,
    parts_of,
    split_run,
    zero_guards,
)
from .schedule import Layout, kernel_bodies, lay_out, visible
from .spelling import WIDTH, spell
from .target import Target
from .writer import Writer

#: Below every score: the running maximum before anything is seen. Finite, so that no
#: difference of two maxima is ever NaN.
LOWEST = -3.4028234663852886e38


@dataclass(eq=False)
class Product:
    """``number · Σ_d near(row, d) · far(line, d)``, over the kernel's axes."""

    member: Member
    number: float
    near: Expr
    far: Expr
    inner: int
    results: tuple[Expr, ...]  # the loads that mean it


@dataclass(eq=False)
class Sum:
    """``outer · Σ value · weight``.

    ``power`` is the factor exp(y - m) of the value where m is the running maximum.
    """

    member: Member
    value: Expr
    weight: Expr
    column: int | None
    outer: Expr
    power: Expr | None
    guards: list[Expr]
    own: Expr


@dataclass(eq=False)
class Online:
    """A chain over the kernel's axes.

    ``guards`` are the conditions without which a position changes nothing: tiles in
    which one of them fails everywhere are skipped.
    """

    group: Group
    target: Target
    products: list[Product]
    maximum: Member | None
    score: Expr | None  # what the maximum is taken of
    sums: list[Sum]
    epilogue: dict[Member, Expr]
    maps: dict[Member, Expr]  # values of single scores that are stored
    layout: Layout
    row: int
    line: int
    outer: list[int]
    batch: list[list[int]]
    guards: list[Expr]

    def extent(self, *axes: int) -> int:
        """Positions of axes."""
        return math.prod(self.group.space[a] for a in axes)

    def address(self, n: Expr) -> Address:
        """A load's address without axes that merged into others."""
        return visible(self.layout, self.layout.addresses[n])

    def store(self, m: Member) -> Address:
        """A store's address without axes that merged into others."""
        return visible(self.layout, self.layout.stores[m])

    @property
    def batches(self) -> int:
        """Positions of everything that is neither row nor line nor summed."""
        return self.extent(*(a for q in self.batch for a in q))


def analyse(g: Group, target: Target) -> Online:
    """Take a group apart."""
    rows = len(g.rows)
    row, line = rows - 1, rows
    online = [m for m in g.members if m.role == "online"]
    inside = {m.stage for m in online}
    summed = [m for m in online if not any(n.data in inside for n in m.loads)]
    stages = {m.stage for m in summed}
    bodies = {m: E.substitute(m.body, g.renaming(m)) for m in online}
    products = []
    for m in summed:
        parts, names = parts_of(m), g.renaming(m)
        own = g.axes[m]
        place = dict(zip(m.axes, own, strict=True))
        first = line in {place[a] for a in parts.n}
        near, far = (parts.left, parts.right) if first else (parts.right, parts.left)
        results = {n for b in bodies.values() for n in E.loads(b) if n.data is m.stage}
        products.append(
            Product(
                m,
                parts.number,
                E.substitute(near, names),
                E.substitute(far, names),
                place[m.red[0]],
                tuple(results),
            )
        )
    maximum = next((m for m in online if m.stage.monoid == "max"), None)
    sums, guards = [], None
    maps = {m: bodies[m] for m in online if m.stage.kind == "map"}
    for m in online:
        if m in summed:
            continue
        if m is maximum:
            found = _identity_guards(bodies[m])
        elif m in maps:
            found = zero_guards(bodies[m])
        else:
            sums.append(_sum(g, m, stages, maximum))
            found = sums[-1].guards
        guards = found if guards is None else [c for c in guards if c in found]
    every = kernel_bodies(g)
    epilogue = {
        m: g.own_load(m) if m.role == "online" else every[m]
        for m in g.stored
        if m not in maps
    }
    lanes = range(line + 1, len(g.space))
    apart = {p.inner for p in products} | {s.column for s in sums}
    outer = [a for a in lanes if a not in apart]
    roots = [x for p in products for x in (p.near, p.far)]
    roots += [x for s in sums for x in (s.value, s.weight, s.outer)]
    roots += [*(guards or []), *maps.values()]
    score = bodies[maximum] if maximum is not None else None
    roots += [score] if score is not None else []
    layout = lay_out(g, epilogue, [range(row)], roots)
    return Online(
        g,
        target,
        products,
        maximum,
        score,
        sums,
        epilogue,
        maps,
        layout,
        row,
        line,
        outer,
        layout.loops[0],
        guards or [],
    )


def _sum(g: Group, m: Member, products: set[Stage], maximum: Member | None) -> Sum:
    names = g.renaming(m)
    place = dict(zip(m.axes, g.axes[m], strict=True))
    columns = [a for a in m.out if place[a] >= len(g.rows)]
    column = columns[0] if columns else None
    places: dict[Stage, dict[int, int]] = {
        n.data: {} for n in m.loads if n.data in products
    }
    terms = split_run(Run(m, places, column))
    assert terms is not None
    power = None
    if maximum is not None:
        for f in terms.values:
            if f.kind == "apply" and f.data == "exp" and f.args[0].data == "sub":
                load = maximum_of(f.args[0].args[1])
                if load is not None and load.data is maximum.stage:
                    power = f
                    break
    value = product(terms.values) if terms.values else E.const(1.0)
    guards = [*terms.guards]
    for f in terms.values:
        found = [*zero_guards(f), *_faded(f, maximum)]
        guards += [c for c in found if c not in guards]
    outer = product(terms.outer) if terms.outer else E.const(1.0)
    if terms.number != 1.0:
        outer = outer * E.const(terms.number)

    def moved(e: Expr) -> Expr:
        return E.substitute(e, names)

    return Sum(
        m,
        moved(E.guard(terms.guards, value)),
        moved(product(terms.weight)) if terms.weight else E.const(1.0),
        None if column is None else place[column],
        moved(outer),
        None if power is None else moved(power),
        [moved(c) for c in guards],
        g.own_load(m),
    )


# ------------------------------------------------------------------ what may be skipped


def _faded(f: Expr, maximum: Member | None) -> list[Expr]:
    """Conditions of which each one's failure makes exp(y - m) 0: y is -∞ then, and m
    is not: the running maximum, or one that is replaced where it is infinite.
    """
    if not (f.kind == "apply" and f.data == "exp" and f.args[0].kind == "apply"):
        return []
    if f.args[0].data != "sub":
        return []
    y, m = f.args[0].args
    load = maximum_of(m)
    own = load is not None and maximum is not None and load.data is maximum.stage
    replaced = load is not None and any(n.data == "where" for n in E.values(m))
    return _identity_guards(y) if own or replaced else []


def _identity_guards(e: Expr) -> list[Expr]:
    """Conditions of which each one's failure makes a score -∞."""
    if e.kind != "apply" or e.data != "where" or e.args[2].kind != "const":
        return []
    if e.args[2].data != -math.inf:
        return []
    return [*conjuncts(e.args[0]), *_identity_guards(e.args[1])]


class Axes(Copies):
    """Copies of axes for a chain's kernels."""

    def __init__(self, o: Online, w: Writer):
        self.c: Any = o
        self.w = w
        self.o = o

    def at(
        self, axis: int, name: str, depth: int, vector: bool = False
    ) -> dict[int, int]:
        """A copy of one axis, at a position (in vec4s if ``vector``)."""
        copies = self.make([[axis]])
        self.place(copies, [[axis]], name, depth, vector)
        return copies

    def value(self, e: Expr, copies: dict[int, int], vector: int | None = None) -> str:
        """A value over copies, as a vec4 along one of them if asked."""
        if vector is None:
            return self.w.value(self.bring(e, copies))
        self.along(vector, copies)
        text = self.w.splat(self.bring(e, copies))
        self.along(None)
        return text

    def along(
        self, vector: int | None, copies: Mapping[int, int] | None = None
    ) -> None:
        """Let values be vec4s along (the copy of) an axis from here on."""
        if vector is None or copies is None:
            self.w.vector, self.w.ragged = None, False
        else:
            self.w.vector = copies[vector]
            self.w.ragged = self.ragged(vector)

    def ragged(self, axis: int) -> bool:
        """Whether an axis is no whole number of vec4s."""
        return self.o.extent(axis) % WIDTH != 0

    def within(self, text: str, axis: int, chunk: str, depth: int) -> str:
        """A vec4 along an axis, zero beyond its end: a factor of a dot product."""
        if not self.ragged(axis):
            return text
        places = f"vec4<u32>({chunk} * 4u) + vec4<u32>(0u, 1u, 2u, 3u)"
        test = f"{places} < vec4<u32>({self.o.extent(axis)}u)"
        return self.w.let(f"select(vec4<f32>(), {text}, {test})", depth, "x")

    def known(self, nodes: Sequence[Expr], copies: dict[int, int], text: str) -> None:
        """Say what some loads are at a place."""
        axes = {a: E.index(q) for a, q in copies.items()}
        for n in nodes:
            self.w.local[E.substitute(n, axes)] = text


def close_turns(o: Online, w: Writer) -> None:
    """End the block of one turn: a loop over the outer positions, if there are any."""
    if o.outer:
        w.loop(f"for (var turn = 0u; turn < {w.extent(o.outer)}; turn = turn + 1u)")
    else:
        turn = w.close()
        w.blocks[-1] += turn


def plain_tensors(o: Online, w: Writer) -> None:
    """Tell the writer which tensors have an access that is no vec4."""

    def ragged(axis: int) -> bool:
        return o.extent(axis) % WIDTH != 0

    uses: list[tuple[Expr, int | None]] = []
    for p in o.products:
        uses += [(n, p.inner) for x in (p.near, p.far) for n in E.loads(x)]
    for s in o.sums:
        uses += [(n, s.column) for n in E.loads(s.weight)]
        uses += [(n, None) for x in (s.value, s.outer) for n in E.loads(x)]
    uses += [
        (n, None)
        for x in (*o.guards, *([o.score] if o.score else []))
        for n in E.loads(x)
    ]
    for m, body in o.epilogue.items():
        axis = column_of(o, m)
        uses += [(n, axis) for n in E.loads(body)]
        if axis is None or ragged(axis) or not contiguous(o.store(m), axis):
            w.plain.add(o.group.target(m)[0])
    for n, a in uses:
        if n not in o.layout.addresses:
            continue
        along = a is not None and n.free >> a & 1 and not ragged(a)
        if not along or not contiguous(o.address(n), a):
            w.plain.add(n.data)


def column_of(o: Online, m: Member) -> int | None:
    """The axis of a stored member beyond the rows, if it has one."""
    beyond = [a for a in o.group.axes[m][: len(m.out)] if a >= len(o.group.rows)]
    return beyond[0] if beyond else None


def is_one(e: Expr) -> bool:
    """Whether a value is the number 1."""
    return e.kind == "const" and e.data == 1.0


def steps_of(extent: int, step: int) -> int:
    """Steps that cover an extent."""
    return -(-extent // step)


def exponential(w: Writer, text: str, vector: bool = False) -> str:
    """exp of a text."""
    return spell("exp", [w.let(text, len(w.blocks) - 1)], "f32", vector)
