"""Derivatives of graphs. One rule a primitive (its pullback), one a monoid, one for a
load; none for an op.

The result is an ordinary graph: it is fused, printed and differentiated again like any
other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import CompilerError
from . import expr as E
from . import remat, verify
from .expr import Expr
from .indexmap import affine, digits, merge
from .load_adjoint import Contribution, pull_load
from .primitives import PRIMITIVES
from .stage import (
    Stage,
    factors,
    inline_load,
    make_reduce,
    map_stage,
    topo_stages,
    whole,
)


def dependent_stages(order: Sequence[Stage], wrt: Sequence[Stage]) -> set[Stage]:
    """The float stages that depend on any of ``wrt`` through differentiable paths."""
    dep = {s for s in wrt if s.dtype in E.FLOATS}
    for s in order:
        if s.body is not None and s.dtype in E.FLOATS and s.body in _dependent(s, dep):
            dep.add(s)
    return dep


def _dependent(stage: Stage, dep: set[Stage]) -> set[Expr]:
    """Nodes of the body whose value depends on a stage of ``dep``."""
    assert stage.body is not None
    hot: set[Expr] = set()
    for n in E.values(stage.body):
        if n.kind == "load" and n.data in dep:
            hot.add(n)
        elif n.dtype == "f32" and n.kind == "apply":
            smooth = PRIMITIVES[n.data].pull is not None
            if smooth and any(x in hot for x in n.args):
                hot.add(n)
    return hot


# ------------------------------------------------------------------ reverse mode


@dataclass
class _Adjoint:
    """What has been collected for one stage: contributions, and the digits that its
    readers see.
    """

    parts: list[Contribution] = field(default_factory=list)
    once: dict[Any, tuple[int, Expr]] = field(default_factory=dict)
    cuts: list[set[int]] = field(default_factory=list)


def vjp(
    outs: Sequence[Stage],
    cotangents: Sequence[Stage | None],
    wrt: Sequence[Stage],
    regions: Sequence[remat.Region] = (),
) -> list[Stage | None]:
    """Cotangents of ``wrt`` given those of ``outs``; None where nothing depends on it.

    What lies inside of ``regions`` is computed again.
    """
    order = topo_stages([*outs, *wrt])
    dep = dependent_stages(order, wrt)
    adjoints = {s: _Adjoint() for s in order}
    for out, g in zip(outs, cotangents, strict=True):
        if g is not None and out in dep:
            adjoints[out].parts.append(_read(g))
    result: dict[Stage, Stage] = {}
    for s in reversed(order):
        if s not in dep or not adjoints[s].parts:
            continue
        a = result[s] = _collect(s, adjoints[s])
        if s.body is not None:
            _pull_stage(s, a, dep, adjoints)
    grads = remat.recomputed(regions, order, result, [result.get(s) for s in wrt])
    found = [_narrow(g, s) for g, s in zip(grads, wrt)]
    verify.check([s for s in found if s is not None], "after the derivative")
    return found


def _narrow(adjoint: Stage | None, s: Stage) -> Stage | None:
    """A gradient is stored in the dtype of what it belongs to."""
    if adjoint is None or adjoint.dtype == s.dtype:
        return adjoint
    return map_stage(
        adjoint.ext, whole(adjoint), adjoint.name, groups=adjoint.groups, dtype=s.dtype
    )


def _read(g: Stage) -> Contribution:
    return lambda ext, groups: E.load(g, [merge(x, ext) for x in groups])


def _collect(s: Stage, adjoint: _Adjoint) -> Stage:
    """Sum the contributions over the common refinement of the axes that the producer
    and its readers use.
    """
    ext, groups = s.ext, s.groups
    if adjoint.cuts:
        ext, groups = (), ()
        for cuts, n in zip(adjoint.cuts, s.shape, strict=True):
            radices = [0]
            if n:
                steps = sorted(cuts | {1}, reverse=True)
                radices = [hi // lo for hi, lo in zip([n, *steps], steps, strict=False)]
                radices = [r for r in radices if r != 1] or [1]
            groups += (tuple(range(len(ext), len(ext) + len(radices))),)
            ext += tuple(radices)
    total: Expr | None = None
    for part in adjoint.parts:
        value = part(ext, groups)
        total = value if total is None else _add(total, value)
    assert total is not None
    # An array that is given has no line; its gradient is of the line that reads it.
    loc = s.loc or next((n.loc for n in reversed(E.values(total)) if n.loc), None)
    return map_stage(ext, total, f"d_{s.name}", groups=groups, dtype="f32", loc=loc)


def _pull_stage(
    s: Stage, a: Stage, dep: set[Stage], adjoints: dict[Stage, _Adjoint]
) -> None:
    """Pull the cotangent of one stage through its monoid and its body to the stages
    that it loads.
    """
    assert s.body is not None
    g = _pull_monoid(s, _guarded(a, [merge(x, s.ext) for x in s.groups], s.space))
    hot = _dependent(s, dep)
    early = _early(s)
    # The cotangents of a node, by the axes that have been summed already.
    local: dict[Expr, dict[frozenset[int], Expr]] = {s.body: {frozenset(): g}}
    for n in reversed(E.values(s.body)):
        if n not in local or n not in hot:
            continue
        g_n, gone = _summed(n, local[n], n in early, s)
        if n.kind == "load":
            target = adjoints[n.data]
            _refine(target, n, s.space)
            left = [a for a in range(len(s.space)) if a not in gone]
            axes = {a: E.index(k) for k, a in enumerate(left)}
            own, g_own = E.substitute(n, axes), E.substitute(g_n, axes)
            inside = bool(early) and n not in early
            _contribute(target, own, g_own, tuple(s.space[a] for a in left), inside)
            continue
        conditions, core = _peel(g_n)
        pull = PRIMITIVES[n.data].pull
        assert pull is not None
        for x, p in zip(n.args, pull(core, n.args, n), strict=True):
            if p is None or x not in hot or (p.kind == "const" and p.data == 0):
                continue
            p = E.guard(conditions, p)
            _blame(p, n.loc or s.loc)
            have = local.setdefault(x, {})
            have[gone] = _add(have[gone], p) if gone in have else p


def _early(s: Stage) -> set[Expr]:
    """Nodes that read contractions: axes that these lack are summed before them.

    Before: ``Σ_ic e(x[i, j]) · dy[i, c] · v[j, c]``. After: ``Σ_i e(x[i, j]) · dp[i,
    j]`` with ``dp = Σ_c dy · v``: fewer operations, and a stage that others have too.
    """
    assert s.body is not None
    out: set[Expr] = set()
    for n in E.values(s.body):
        reads = n.kind == "load" and _contraction(n.data)
        if reads or (n.kind == "apply" and any(x in out for x in n.args)):
            out.add(n)
    return out


def _contraction(s: Stage) -> bool:
    """Whether a stage is a sum of a product whose factors have different axes."""
    if s.kind != "reduce" or s.monoid != "sum" or s.body is None:
        return False
    return _sided(s.body, (1 << len(s.ext)) - 1)


def _sided(body: Expr, axes: int = -1) -> bool:
    """Whether a product has factors of which neither has all axes of the other."""
    masks = {f.free & axes for f in factors(body)[1]}
    return any(a & ~b and b & ~a for a in masks for b in masks)


def _summed(
    n: Expr, given: dict[frozenset[int], Expr], early: bool, s: Stage
) -> tuple[Expr, frozenset[int]]:
    """A node's cotangent, and the axes that are summed in it: those that were summed in
    any part of it, and, where it is early, all that the node lacks.
    """
    gone = frozenset(a for part in given for a in part)
    if early:
        free = 0
        for g in given.values():
            free |= g.free
        gone |= set(E.bits(free & ~n.free))
    total: Expr | None = None
    for before, g in given.items():
        axes = sorted(gone - before)
        if axes:
            left = [a for a in range(len(s.space)) if a not in gone]
            g = make_reduce("sum", g, left, axes, s.space, f"d_{s.name}", loc=n.loc)
        total = g if total is None else _add(total, g)
    assert total is not None
    return total, gone


def _blame(p: Expr, loc: str | None) -> None:
    """Note the line of the operation that new nodes of a cotangent are of."""
    stack = [p] if loc else []
    while stack:
        n = stack.pop()
        if n.kind == "apply" and n.loc is None:
            n.loc = loc
            stack += n.args


def _guarded(a: Stage, at: Sequence[Expr], space: Sequence[int]) -> Expr:
    """The load of an adjoint, under the conditions outside of which it is a structural
    zero: there, whatever it is multiplied by, it stays zero.
    """
    value = E.load(a, at)
    if a.kind != "map" or value.kind != "load":
        return value
    conditions, _ = _peel(inline_load(value, at, space))
    return E.guard(conditions, value)


def _add(a: Expr, b: Expr) -> Expr:
    """The sum of two cotangents; conditions that both have stay outside."""
    (first, x), (second, y) = _peel(a), _peel(b)
    return E.guard(first, x + y) if first and first == second else a + b


def _peel(g: Expr) -> tuple[list[Expr], Expr]:
    """``where(c, g, 0)`` as (conditions, g): pullbacks are linear, so a structural zero
    stays an exact zero.
    """
    conditions = []
    while (
        g.kind == "apply"
        and g.data == "where"
        and g.args[2].kind == "const"
        and g.args[2].data == 0
    ):
        conditions.append(g.args[0])
        g = g.args[1]
    return conditions[::-1], g


def _pull_monoid(s: Stage, g: Expr) -> Expr:
    """The cotangent of the body, given that of the stage at its own axes."""
    if s.kind == "map" or s.monoid == "sum":
        return g
    assert s.body is not None and s.monoid is not None
    return E.apply("mulz", g, monoid_partial(s))


def monoid_partial(s: Stage) -> Expr:
    """∂ stage / ∂ body for max, min and prod, over the stage's whole space."""
    assert s.body is not None
    x, y, space = s.body, whole(s), s.space
    out, red = range(len(s.ext)), range(len(s.ext), len(space))
    if s.monoid in ("max", "min"):
        # Ties share the cotangent equally.
        hit = E.where(E.apply("eq", x, y), 1.0, 0.0)
        count = make_reduce("sum", hit, out, red, space, f"{s.name}_ties", loc=s.loc)
        return E.where(E.apply("eq", x, y), 1.0 / count, 0.0)
    if s.monoid == "prod":
        if math.prod(s.ext) * math.prod(s.rext) ** 2 <= _FEW:
            return _others(s)
        is_zero = E.apply("eq", x, 0.0)
        zeros = make_reduce(
            "sum",
            E.where(is_zero, 1.0, 0.0),
            out,
            red,
            space,
            f"{s.name}_zeros",
            loc=s.loc,
        )
        others = make_reduce(
            "prod",
            E.where(is_zero, 1.0, x),
            out,
            red,
            space,
            f"{s.name}_nonzero",
            loc=s.loc,
        )
        at_zero = E.where(E.apply("eq", zeros, 1.0), others, 0.0)
        elsewhere = E.where(E.apply("eq", zeros, 0.0), others / x, 0.0)
        return E.where(is_zero, at_zero, elsewhere)
    raise CompilerError(f"no derivative for the monoid {s.monoid}")


# Up to so many factors in all, the product of the others is taken factor by factor.
_FEW = 1 << 22


def _others(s: Stage) -> Expr:
    """∏ over j ≠ i of x[j]: exact with zeros, also when it is differentiated again."""
    assert s.body is not None
    no, n = len(s.ext), len(s.rext)
    extents = [*s.space, *s.rext]
    body = E.substitute(s.body, {no + k: E.index(no + n + k) for k in range(n)})
    same = E.all_of(
        E.apply("eq", E.index(no + k), E.index(no + n + k)) for k in range(n)
    )
    assert same is not None
    factors = E.where(same, 1.0, body)
    return make_reduce(
        "prod",
        factors,
        range(no + n),
        range(no + n, no + 2 * n),
        extents,
        f"{s.name}_others",
        loc=s.loc,
    )


def _refine(adjoint: _Adjoint, n: Expr, space: Sequence[int]) -> None:
    """Note the digits in which this reader walks each dimension of the target."""
    target: Stage = n.data
    if not adjoint.cuts:
        adjoint.cuts = [
            {math.prod(target.ext[q] for q in g[k + 1 :]) for k in range(len(g))} or {1}
            for g in target.groups
        ]
    for dim, i in enumerate(n.args):
        d = digits(i, space)
        if (
            d is None
            or math.prod(o.extent for o in d) != target.shape[dim]
            or target.shape[dim] == 0
        ):
            continue
        cuts = adjoint.cuts[dim] | {
            math.prod(o.extent for o in d[k + 1 :]) for k in range(len(d))
        }
        steps = sorted(cuts | {1})
        if all(
            b % a == 0
            for a, b in zip(steps, [*steps[1:], target.shape[dim]], strict=True)
        ):
            adjoint.cuts[dim] = cuts


def _contribute(
    target: _Adjoint, n: Expr, g: Expr, space: tuple[int, ...], inside: bool
) -> None:
    """Add what one load of the target passes on.

    Loads inside of a function of a contraction, and gathers, add up before they are
    summed: two stages that both read exp(x + bias) then give the bias one sum.
    """
    key = None
    if (inside or any(affine(i).rest for i in n.args)) and not _sided(g):
        key = n, space
    if key in target.once:
        at, before = target.once[key]
        g = _add(before, g)
        target.parts[at] = pull_load(n, g, space)
    else:
        at = len(target.parts)
        target.parts.append(pull_load(n, g, space))
    if key is not None:
        target.once[key] = at, g


# ------------------------------------------------------------------ forward mode


def jvp(
    outs: Sequence[Stage], wrt: Sequence[Stage], tangents: Sequence[Stage]
) -> list[Stage | None]:
    """Tangents of ``outs`` given those of ``wrt``; None for a zero derivative."""
    order = topo_stages([*outs, *wrt])
    dep = dependent_stages(order, wrt)
    tangent: dict[Stage, Stage] = dict(zip(wrt, tangents, strict=True))
    for s in order:
        if s in tangent or s not in dep or s.body is None:
            continue
        t = _push(s, dep, tangent)
        if t is not None:
            tangent[s] = t
    found = [_narrow(tangent.get(s), s) for s in outs]
    verify.check([s for s in found if s is not None], "after the derivative")
    return found


def _push(s: Stage, dep: set[Stage], tangent: dict[Stage, Stage]) -> Stage | None:
    assert s.body is not None
    hot = _dependent(s, dep)
    local: dict[Expr, Expr] = {}
    for n in E.values(s.body):
        if n not in hot:
            continue
        if n.kind == "load":
            if n.data in tangent:
                local[n] = E.load(tangent[n.data], n.args)
            continue
        pull = PRIMITIVES[n.data].pull
        assert pull is not None
        total: Expr | None = None
        for k, x in enumerate(n.args):
            if x in local:
                p = pull(local[x], n.args, n)[k]
                if p is not None:
                    total = p if total is None else total + p
        if total is not None:
            local[n] = total
    t = local.get(s.body)
    if t is None:
        return None
    if s.kind == "reduce":
        if s.monoid != "sum":
            t = t * monoid_partial(s)
        out, red = range(len(s.ext)), range(len(s.ext), len(s.space))
        t = make_reduce("sum", t, out, red, s.space, f"t_{s.name}", loc=s.loc)
    return map_stage(s.ext, t, f"t_{s.name}", groups=s.groups, dtype="f32", loc=s.loc)
