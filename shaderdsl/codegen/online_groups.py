"""Sums over several axes of a product, one after another, to keep a GPU busy.

The gradient of a key that several query heads share is a sum over those heads and over
queries. In one kernel a workgroup would walk all of it, and few workgroups walk long.
Before: ``S[k, c] = Σ_g Σ_i f(X[g, i, k]) · w[g, i, c]``. After: ``P[g, k, c] = Σ_i …``,
``S[k, c] = Σ_g P[g, k, c]``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from ..ir import expr as E
from ..ir.stage import Stage, map_stage, reduce_stage, retarget, topo_stages
from .member import Inliner, anchor_axes, make_member
from .online_runs import find_products, soft_maps
from .target import Target

#: Rows of a workgroup, and workgroups with which a large device is busy to the end:
#: with fewer the longest ones decide.
_ROWS, _BUSY = 64, 1024
#: Parts that are added in one expression.
_FEW = 8


def sums_by_group(outs: Sequence[Stage], target: Target) -> list[Stage]:
    """The same outputs, with such sums in two stages where workgroups are few."""
    if target.family != "gpu" or not target.online:
        return list(outs)
    order = [s for s in topo_stages(outs) if s.kind != "input" and s.size > 0]
    anchors = {s for s in order if s.kind == "reduce"} | set(outs)
    products = find_products(order, anchors, set(outs))
    soft = soft_maps(order, products)
    inliner = Inliner(anchors)
    new: dict[Stage, Stage] = {}
    for s in order:
        hot = any(n.data in products or n.data in soft for n in s.loads)
        if hot and s.kind == "reduce" and s.monoid == "sum" and s.dtype == "f32":
            assert s.body is not None
            member = make_member(s, inliner.body(s.body, s.space))
            walked: set[int] | None = None
            for n in member.loads:
                if n.data in products:
                    axes = anchor_axes(n, member.space)
                    same = axes is not None and walked in (None, set(axes))
                    walked = set(axes) if axes is not None and same else set()
            new[s] = _by_group(retarget(s, new), walked or set())
        else:
            new[s] = retarget(s, new)
    return [new.get(s, s) for s in outs]


def _by_group(s: Stage, walked: set[int]) -> Stage:
    """The sum, or the second of two stages; ``walked`` are its product's axes."""
    no = len(s.ext)
    red = [a for a in range(no, len(s.space)) if s.space[a] != 1]
    rows = [a for a in range(no) if a in walked]
    if len(red) < 2 or not set(red) <= walked or not rows:
        return s
    line = max(red, key=lambda a: (s.space[a], a))
    groups = math.prod(s.space[a] for a in rows) // _ROWS
    if s.space[line] < _ROWS or groups >= _BUSY:
        return s
    assert s.body is not None
    others = [a for a in red if a != line]
    n = len(others)
    axes = {a: E.index(n + a) for a in range(no)}
    axes |= {a: E.index(k) for k, a in enumerate(others)}
    axes[line] = E.index(n + no)
    # An axis of one position stands for nothing.
    axes |= {a: E.index(n + no) for a in range(no, len(s.space)) if a not in axes}
    first = reduce_stage(
        [*(s.space[a] for a in others), *s.ext],
        [s.space[line]],
        "sum",
        E.substitute(s.body, axes),
        f"{s.name}_part",
        s.loc,
    )
    last = [E.index(a) for a in range(no)]
    if math.prod(s.space[a] for a in others) <= _FEW:
        total: E.Expr | None = None
        for place in itertools.product(*(range(s.space[a]) for a in others)):
            part = E.load(first, [*(E.const(k) for k in place), *last])
            total = part if total is None else total + part
        assert total is not None
        return map_stage(s.ext, total, s.name, loc=s.loc)
    body = E.load(first, [*(E.index(no + k) for k in range(n)), *last])
    return reduce_stage(s.ext, [s.space[a] for a in others], "sum", body, s.name, s.loc)
