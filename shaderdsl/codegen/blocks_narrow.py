"""A product of which only a part is read is that part, and so are its derivatives.

Before: ``X[t] = Σ_k x[t, k] · w[k]`` of which only ``X[t + c]`` for t < n is read, and
``D[t] = where(c ≤ t < c + n, d[t - c], 0)`` in sums over it. After: a product and sums
over n rows each. Logits without their last position are such a part.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..ir import expr as E
from ..ir.expr import Expr
from ..ir.indexmap import affine
from ..ir.stage import (
    Stage,
    factors,
    inline_load,
    map_stage,
    product,
    reduce_stage,
    topo_stages,
)
from .blocks_rows import own_indices

Range = tuple[int, int]  # the first position, and how many


def narrowed(outs: Sequence[Stage], products: Sequence[Stage]) -> list[Stage]:
    """The same outputs, with these products cut down to what is read of them."""
    order = topo_stages(outs)
    views: set[Stage] = set(products) - set(outs)
    opened: dict[Stage, Expr] = {}
    for s in order:
        if s.body is not None:
            opened[s] = _open(s.body, s.space, views)
            view = s.kind == "map" and opened[s].kind == "load" and s not in outs
            # Whole products under another shape; a part of one is a reader.
            if view and opened[s].data in views and opened[s].data.size == s.size:
                views.add(s)
    readers = {s: e for s, e in opened.items() if s not in views or s in products}
    parts = {x: _read_part(x, readers) for x in products if x in views}
    parts = {x: p for x, p in parts.items() if p}
    if not parts:
        return list(outs)
    least = min(x.size for x in parts) // 2
    new: dict[Stage, Stage] = {}
    for s in order:
        if s.body is None:
            new[s] = s
            continue
        if s in views and s.kind == "map":
            new[s] = s
            continue
        body = _moved(opened[s], new, parts)
        if s in parts:
            new[s] = _cut(s, body, parts[s])
        elif s.kind == "reduce":
            new[s] = _sum(s, body, least)
        elif body is s.body and s.kind == "map":
            new[s] = s
        else:
            new[s] = map_stage(
                s.ext,
                body,
                s.name,
                groups=s.groups,
                dtype=s.dtype,
                loc=s.loc,
                keep=s.keep,
            )
    return [new[s] for s in outs]


def _open(body: Expr, space: Sequence[int], views: set[Stage]) -> Expr:
    """A body that reads what views show."""

    def leaf(n: Expr, args: tuple[Expr, ...]) -> Expr:
        n = E.rebuild(n, args) if args else n
        while n.kind == "load" and n.data.kind == "map" and n.data in views:
            n = inline_load(n, n.args, space)
        return n

    return E.rewrite(body, leaf)


def _read_part(x: Stage, readers: dict[Stage, Expr]) -> dict[int, Range]:
    """For each axis of a product of which all readers read one part, that part."""
    seen: list[set[Range]] = [set() for _ in x.ext]
    for s, body in readers.items():
        for n in E.loads(body):
            if n.data is not x:
                continue
            for a, i in enumerate(own_indices(n, s.space)):
                form = affine(i)
                axes = list(form.axes.items())
                plain = not form.rest and len(axes) == 1 and axes[0][1] == 1
                whole = (0, x.ext[a])
                seen[a].add((form.const, s.space[axes[0][0]]) if plain else whole)
    return {
        a: next(iter(found))
        for a, found in enumerate(seen)
        if len(found) == 1 and found != {(0, x.ext[a])}
    }


def _moved(
    body: Expr,
    new: dict[Stage, Stage],
    parts: dict[Stage, dict[int, Range]],
) -> Expr:
    """A body on the new stages."""

    def leaf(n: Expr, args: tuple[Expr, ...]) -> Expr:
        if n.kind != "load":
            return E.rebuild(n, args) if args else n
        stage: Stage = n.data
        if stage in parts:
            args = tuple(
                affine(i - parts[stage][a][0]).expr() if a in parts[stage] else i
                for a, i in enumerate(args)
            )
        node = E.load(new[stage], args)
        node.loc, node.label = node.loc or n.loc, node.label or n.label
        return node

    return E.rewrite(body, leaf)


def _cut(s: Stage, body: Expr, part: dict[int, Range]) -> Stage:
    """A reduction of which only a part of some axes is computed."""
    space = [part[a][1] if a in part else n for a, n in enumerate(s.space)]
    axes = {a: E.index(a) + first for a, (first, _) in part.items() if first}
    ones = {a: E.const(part[a][0]) for a, n in enumerate(space) if a in part and n == 1}
    body = E.substitute(body, {**axes, **ones})
    no = len(s.ext)
    assert s.monoid is not None
    return reduce_stage(space[:no], space[no:], s.monoid, body, s.name, s.loc)


def _sum(s: Stage, body: Expr, least: int) -> Stage:
    """A sum of a large map that is 0 outside of a part, over that part alone."""

    def leaf(n: Expr, args: tuple[Expr, ...]) -> Expr:
        if n.kind == "load" and n.data.kind == "map" and n.data.size >= least:
            inner = inline_load(n, args, s.space)
            if inner.kind == "apply" and inner.data == "where":
                return inner
        return E.rebuild(n, args) if args else n

    assert s.monoid is not None
    plain = reduce_stage(s.ext, s.rext, s.monoid, body, s.name, s.loc)
    if s.monoid != "sum" or s.dtype != "f32":
        return plain
    opened = E.rewrite(body, leaf)
    if opened is body:
        return plain
    number, fs, guards = factors(opened)
    part: dict[int, Range] = {}
    for a, n in enumerate(s.space):
        low, high = 0, n
        for g in guards:
            bound = _bound(g, a)
            if bound is not None:
                low, high = max(low, bound[0]), min(high, bound[1])
        if (low, high) != (0, n) and low < high:
            part[a] = low, high - low
    if not part:
        return plain
    rest = [g for g in guards if not any(_bound(g, a) for a in part)]
    value = product([*fs, *([E.const(number)] if number != 1.0 else [])])
    small = _cut(s, E.guard(rest, value), part)
    if all(a >= len(s.ext) for a in part):
        return small
    out = {a: r for a, r in part.items() if a < len(s.ext)}
    at = [E.index(a) - out[a][0] if a in out else E.index(a) for a in range(len(s.ext))]
    inside = [
        E.apply(name, *sides)
        for a, (first, n) in out.items()
        for name, sides in (
            ("le", (E.const(first), E.index(a))),
            ("lt", (E.index(a), E.size(first + n))),
        )
    ]
    return map_stage(
        s.ext, E.guard(inside, E.load(small, at)), s.name, dtype=s.dtype, loc=s.loc
    )


def _bound(g: Expr, axis: int) -> Range | None:
    """``low ≤ axis < high`` of a condition on one axis alone."""
    if g.kind != "apply" or g.data not in ("le", "lt"):
        return None
    left, right = g.args
    if left.dtype != "i32":
        return None
    form = affine(right - left)
    if form.rest or set(form.axes) != {axis}:
        return None
    # coefficient · axis + const ≥ 0
    const = form.const - (1 if g.data == "lt" else 0)
    if form.axes[axis] == 1:
        return -const, 1 << 31
    return (-(1 << 31), const + 1) if form.axes[axis] == -1 else None
