"""Sums over both sides of a product, in steps that a kernel can take.

A gradient of a captured array adds up what a product gives over its rows *and* its
lines. Two rewritings make that of ordinary stages:

- One side first. Before: ``S[v] = Σ_ij where(v == e[j], f(X[i, j]), 0)``. After:
  ``P[j] = Σ_i f(X[i, j])``, ``S[v] = Σ_j where(v == e[j], P[j], 0)``.
- Along diagonals. Before: ``S[v] = Σ_ij where(v == e(i - j), f(X[i, j]), 0)``. After:
  ``D[u] = Σ_i f(X[i, i - u])``, ``S[v] = Σ_u where(v == e(u), D[u], 0)``.

What stays a sum over both sides is cut into shares where it is long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..ir import expr as E
from ..ir.expr import Expr
from ..ir.indexmap import affine
from ..ir.stage import Stage, factors, product, reduce_stage, retarget, topo_stages
from .member import Inliner, Member, anchor_axes, make_member
from .online_runs import find_products, parts_of, soft_maps
from .split import in_shares
from .target import Target

#: Positions that the lanes of a workgroup, together, walk in one kernel at most.
_LONGEST = 1 << 18


def sums_in_steps(outs: Sequence[Stage], target: Target) -> list[Stage]:
    """The same outputs, with sums over both sides of a product in two stages."""
    order = [s for s in topo_stages(outs) if s.kind != "input" and s.size > 0]
    anchors = {s for s in order if s.kind == "reduce"} | set(outs)
    products = find_products(order, anchors, set(outs)) if target.online else {}
    if not products:
        return list(outs)
    soft = soft_maps(order, products)
    inliner = Inliner(anchors)
    new: dict[Stage, Stage] = {}
    for s in order:
        hot = any(n.data in products or n.data in soft for n in s.loads)
        if hot and s.kind == "reduce" and s.monoid == "sum" and s.dtype == "f32":
            assert s.body is not None
            body = inliner.body(s.body, s.space)
            new[s] = retarget(_in_steps(make_member(s, body), products), new)
        else:
            new[s] = retarget(s, new)
    return [new.get(s, s) for s in outs]


@dataclass
class _Sum:
    """A sum taken apart. ``hot`` are the factors that read products."""

    member: Member
    number: float
    hot: list[Expr]
    rest: list[Expr]
    guards: list[Expr]
    sides: tuple[int, int]  # masks of the products' axes
    walks: int
    reduced: int


def _in_steps(m: Member, products: dict[Stage, Member]) -> Stage:
    """The sum itself, or the second of the two stages that give it."""
    s = _take_apart(m, products)
    if s is None:
        return m.stage
    a, b = (side & s.reduced for side in s.sides)
    if not a or not b:
        # A run already, but where batches are summed as well.
        side = a | b
        more = side and s.reduced & ~side
        return (_one_side(s, side) if more else None) or m.stage
    # A side that is reduced whole is walked by the kernels of its gradients as well.
    whole = [side & s.reduced == side for side in s.sides]
    choices = [b, a] if whole[1] or not whole[0] else [a, b]
    for side in choices:
        found = _one_side(s, side)
        if found is not None:
            return found
    found = _diagonals(s, a, b)
    if found is not None:
        return found
    return in_shares(m.stage, -(-math.prod(m.stage.rext) // _LONGEST))


def _take_apart(m: Member, products: dict[Stage, Member]) -> _Sum | None:
    sides: tuple[int, int] | None = None
    walks = 0
    for n in m.loads:
        if n.data not in products:
            continue
        axes = anchor_axes(n, m.space)
        if axes is None:
            return None
        x = products[n.data]
        place = dict(zip(x.out, axes, strict=True))
        parts = parts_of(x)
        masks = [sum(1 << place[q] for q in part) for part in (parts.m, parts.n)]
        if sides is None:
            sides = (masks[0], masks[1])
        elif set(sides) != set(masks):
            return None
        walks |= sum(1 << q for q in place.values())
    if sides is None:
        return None
    number, fs, guards = factors(m.body)
    hot = [f for f in fs if any(n.data in products for n in E.loads(f))]
    rest = [f for f in fs if f not in hot]
    if any(n.data in products for n in E.loads(*guards)):
        return None
    return _Sum(m, number, hot, rest, guards, sides, walks, sum(1 << q for q in m.red))


def _one_side(s: _Sum, side: int) -> Stage | None:
    """Sum over one side first, if nothing but the products' axes is left by that."""
    inner = [f for f in s.rest if f.free & side]
    guards = [c for c in s.guards if c.free & side]
    free = 0
    for e in (*s.hot, *inner, *guards):
        free |= e.free
    if free & ~side & ~s.walks:
        return None
    body = E.guard(guards, product([*s.hot, *inner]))
    outer = [f for f in s.rest if f not in inner]
    return _two_stages(
        s,
        body,
        list(E.bits(free & ~side)),
        list(E.bits(side)),
        {},
        outer,
        [c for c in s.guards if c not in guards],
    )


def _diagonals(s: _Sum, a: int, b: int) -> Stage | None:
    """Sum along i - j (or i + j) first, if all else depends on nothing but that."""
    space = s.member.space
    foreign = ~s.walks
    outer = [f for f in s.rest if f.free & foreign]
    outer_guards = [c for c in s.guards if c.free & foreign]
    for i in E.bits(a):
        for j in E.bits(b):
            both = 1 << i | 1 << j
            for sign in (1, -1):
                # Row i of diagonal u: j = i - u + low, or j = u - i.
                u = len(space)
                low = space[j] - 1 if sign > 0 else 0
                at = (
                    E.index(i) - E.index(u) + low
                    if sign > 0
                    else E.index(u) - E.index(i)
                )
                moved = [shift(e, j, at) for e in (*outer, *outer_guards)]
                if any(e.free & both for e in moved):
                    continue
                inner = [f for f in s.rest if f not in outer]
                guards = [c for c in s.guards if c not in outer_guards]
                body = shift(E.guard(guards, product([*s.hot, *inner])), j, at)
                on = [E.apply("le", 0, at), E.apply("lt", at, E.size(space[j]))]
                body = E.guard([shift(c, j, at) for c in on], body)
                keep = body.free & ~(1 << i)
                # Whatever else is reduced and not needed later goes along.
                need = 1 << u
                for e in moved:
                    need |= e.free
                gone = [q for q in E.bits(body.free & s.reduced & ~need) if q != i]
                keep &= ~sum(1 << q for q in gone)
                return _two_stages(
                    s,
                    body,
                    list(E.bits(keep)),
                    [*gone, i],
                    {u: space[i] + space[j] - 1},
                    moved[: len(outer)],
                    moved[len(outer) :],
                )
    return None


def shift(e: Expr, axis: int, at: Expr) -> Expr:
    """An expression with an axis replaced; what cancels in indices is gone."""
    new = E.substitute(e, {axis: at})

    def tidy(n: Expr, args: tuple[Expr, ...]) -> Expr:
        n = E.rebuild(n, args) if n.args else n
        if n.kind == "apply" and n.dtype == "i32" and n.data in ("add", "sub", "mul"):
            form = affine(n)
            return form.expr() if len(form.axes) + len(form.rest) < 3 else n
        return n

    return E.rewrite(new, tidy)


def _two_stages(
    s: _Sum,
    body: Expr,
    keep: list[int],
    gone: list[int],
    more: dict[int, int],
    outer: list[Expr],
    guards: list[Expr],
) -> Stage:
    """``Σ gone`` of the body as a stage, and the sum over the rest that reads it."""
    stage = s.member.stage
    space = {**dict(enumerate(s.member.space)), **more}
    first = reduce_stage(
        [space[q] for q in keep],
        [space[q] for q in gone],
        "sum",
        E.substitute(body, {q: E.index(k) for k, q in enumerate([*keep, *gone])}),
        f"{stage.name}_part",
        stage.loc,
    )
    no = len(stage.ext)
    value = product([E.load(first, [E.index(q) for q in keep]), *outer])
    if s.number != 1.0:
        value = value * E.const(s.number)
    total = E.guard(guards, value)
    left = [
        q
        for q in range(no, len(s.member.space))
        if q not in gone and total.free >> q & 1
    ]
    left += list(more)
    # An axis that was summed away stands for nothing; one that nothing reads any more
    # cannot be: a sum over it would have been a factor.
    axes = {q: E.index(q) for q in range(no)}
    axes |= {q: E.index(no + k) for k, q in enumerate(left)}
    total = E.substitute(total, axes)
    return reduce_stage(
        stage.ext, [space[q] for q in left], "sum", total, stage.name, stage.loc
    )
