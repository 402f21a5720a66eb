"""Few long rows: a reduction that one workgroup would walk alone is cut into shares,
and a second reduction combines them.

Before: ``S[i] = Σ_j f(i, j)`` with few i and very many j. After: ``P[i, c] = Σ_j f(i,
c·n + j)``, ``S[i] = Σ_c P[i, c]``. Both are ordinary stages, so nothing else has to
know.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..ir import expr as E
from ..ir.expr import Expr
from ..ir.indexmap import Affine
from ..ir.stage import MONOIDS, Stage, reduce_stage, retarget, topo_stages
from .member import contract_parts, scatter_parts
from .scan_form import scan_parts
from .target import Target

#: Elements of a row from which several workgroups share it, and how many each takes at
#: least.
LONG_ROW, SHARE = 1 << 16, 1 << 13
#: Rows from which a device is busy with a workgroup a row.
ENOUGH_ROWS = 64
#: Contributions that one scatter puts in order by comparing each with all.
SCATTER = 1 << 15


def split_long(outs: Sequence[Stage], target: Target) -> list[Stage]:
    """The same outputs, with long reductions in two stages."""
    if target.family == "cpu":
        return list(outs)
    order = topo_stages(outs)
    if not any(_wanted(s) for s in order):
        return list(outs)
    new: dict[Stage, Stage] = {}
    for s in order:
        moved = retarget(s, new)
        new[s] = _split(moved) if _wanted(moved) else moved
    return [new[s] for s in outs]


def _wanted(s: Stage) -> bool:
    if s.kind != "reduce" or s.body is None or math.prod(s.rext) < LONG_ROW // 2:
        return False
    if s.monoid == "sum" and s.dtype in E.FLOATS:
        if scan_parts(s, s.body) is not None or contract_parts(s, s.body) is not None:
            return False
        if scatter_parts(s, s.body) is not None:
            return math.prod(s.rext) > SCATTER
    return math.prod(s.rext) >= LONG_ROW and math.prod(s.ext) < ENOUGH_ROWS


def _split(s: Stage) -> Stage:
    k = max(range(len(s.rext)), key=lambda q: s.rext[q])
    n = s.rext[k]
    return in_shares(s, _shares(n, math.prod(s.rext) // n))


def in_shares(s: Stage, shares: int) -> Stage:
    """A reduction whose longest axis is walked in so many shares."""
    assert s.body is not None and s.monoid is not None
    no = len(s.ext)
    k = max(range(len(s.rext)), key=lambda q: s.rext[q])
    n, axis = s.rext[k], no + k
    if shares < 2:
        return s
    per = -(-n // shares)
    shares = -(-n // per)
    # Axes of the first stage: outputs, the share, then the reduced ones with `axis`
    # shortened.
    moved: dict[int, Expr] = {no + q: E.index(no + 1 + q) for q in range(len(s.rext))}
    position = Affine({no: per, axis + 1: 1}, 0, ()).expr()
    moved[axis] = position
    body = E.substitute(s.body, moved)
    if per * shares != n:
        identity = E.const(MONOIDS[s.monoid].identity[body.dtype], body.dtype)
        body = E.where(E.apply("lt", position, E.size(n)), body, identity)
    rext = [per if q == k else m for q, m in enumerate(s.rext)]
    first = reduce_stage(
        [*s.ext, shares], rext, s.monoid, body, f"{s.name}_shares", s.loc
    )
    again = E.load(first, [E.index(q) for q in range(no + 1)])
    return reduce_stage(s.ext, [shares], s.monoid, again, s.name, s.loc)


def _shares(n: int, others: int) -> int:
    """About as many shares as keep each at SHARE elements; an exact divisor where one
    is near.
    """
    wanted = max(1, min(n, n * others // SHARE, 1024))
    for d in range(wanted, wanted // 2, -1):
        if n % d == 0:
            return d
    return wanted
