"""Numbers of rows side by side in one array, where kernels would bind too many.

The gradients of attention read a maximum and a delta of each row, beside q, k, v, dy
and what hooks capture. A device that binds eight arrays has no room for all. Before:
``f(X[i, j], m[i], d[i])``. After: ``P[0, i] = m[i]``, ``P[1, i] = d[i]``, ``f(X[i, j],
P[0, i], P[1, i])``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..ir import expr as E
from ..ir.expr import Expr
from ..ir.stage import Stage, map_stage, reduce_stage, retarget, topo_stages
from .member import Inliner, Member
from .online_find import find_chains
from .online_runs import find_products, soft_maps
from .target import Target

#: Arrays of one kernel, beyond which there is room for all.
_ROOM = 12


def numbers_of_rows(outs: Sequence[Stage], target: Target) -> list[Stage]:
    """The same outputs, with numbers of rows in one array if more fits then."""
    if not target.online or target.limits.max_storage_buffers >= _ROOM:
        return list(outs)
    crowded = _crowded(outs, target)
    new = _packed(outs) if crowded else list(outs)
    return new if _crowded(new, target) < crowded else list(outs)


def _crowded(outs: Sequence[Stage], target: Target) -> int:
    """Kernels that would bind too many arrays."""
    order, anchors = _stages(outs)
    return find_chains(order, anchors, set(outs), target).crowded


def _stages(outs: Sequence[Stage]) -> tuple[list[Stage], set[Stage]]:
    order = [s for s in topo_stages(outs) if s.kind != "input" and s.size > 0]
    kept = {s for s in order if s.kind == "reduce" or s.keep == "store"}
    return order, kept | set(outs)


def _packed(outs: Sequence[Stage]) -> list[Stage]:
    order, anchors = _stages(outs)
    products = find_products(order, anchors, set(outs))
    soft = soft_maps(order, products)
    inliner = Inliner(anchors)
    bodies: dict[Stage, Expr] = {}
    for s in order:
        hot = any(n.data in products or n.data in soft for n in s.loads)
        if hot and s.kind == "reduce" and s.body is not None:
            bodies[s] = inliner.body(s.body, s.space)
    rows = _rows(list(bodies.values()), products)
    if len(rows) < 2:
        return list(outs)
    pack = _side_by_side(rows)
    place = {a: E.const(k) for k, a in enumerate(rows)}

    def leaf(n: Expr, args: tuple[Expr, ...]) -> Expr:
        if n.kind == "load" and n.data in place:
            return E.load(pack, [place[n.data], *args])
        return E.rebuild(n, args) if n.args else n

    before = set(topo_stages([pack]))
    new: dict[Stage, Stage] = {}
    for s in order:
        if s in before:  # nothing that it needs is changed
            continue
        if s in bodies and s.shape == s.ext:
            body = E.rewrite(bodies[s], leaf)
            s_new = reduce_stage(s.ext, s.rext, str(s.monoid), body, s.name, s.loc)
            new[s] = retarget(s_new, new)
        else:
            new[s] = retarget(s, new)
    return [new.get(s, s) for s in outs]


def _rows(bodies: Sequence[Expr], products: Mapping[Stage, Member]) -> list[Stage]:
    """Arrays of one shape that values of scores read at one place of each row."""
    found: list[list[Stage]] = []
    for body in bodies:
        loads = E.loads(body)
        walked = 0
        for n in loads:
            walked |= n.free if n.data in products else 0
        places: dict[tuple[Expr, ...], dict[Stage, None]] = {}
        for n in loads:
            plain = n.args and all(i.kind == "index" for i in n.args)
            single = plain and not n.free & ~walked and n.free != walked
            if single and n.data.dtype == "f32" and n.data not in products:
                places.setdefault(n.args, {})[n.data] = None
        for own in places.values():
            found.append([x for x in own if x.shape == next(iter(own)).shape])
    return max(found, key=len, default=[])


def _side_by_side(rows: Sequence[Stage]) -> Stage:
    shape = rows[0].shape
    at = [E.index(1 + k) for k in range(len(shape))]
    body = E.load(rows[-1], at)
    for k in reversed(range(len(rows) - 1)):
        mine = E.apply("eq", E.index(0), E.const(k))
        body = E.where(mine, E.load(rows[k], at), body)
    return map_stage([len(rows), *shape], body, "rows", keep="store")
