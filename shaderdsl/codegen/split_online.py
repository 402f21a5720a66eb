"""Long rows of a softmax: maximum and sum of exponentials from one reading.

Before: ``m[i] = max_j y(i, j)``, ``s[i] = Σ_j w · exp(y - m)``, which reads y again for
the sum. After: each share has a maximum of its own, ``m[i, c]`` and ``s[i, c] = Σ_j w ·
exp(y - m[i, c])``, from a row that stays in registers, and the shares are combined as
``s[i] = Σ_c s[i, c] · exp(m[i, c] - m[i])``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..ir import expr as E
from ..ir.expr import Expr
from ..ir.stage import Stage, factors, reduce_stage
from .member import Inliner, contract_parts
from .online_runs import conjuncts, maximum_of, unwrapped
from .shares import Shares, own_axes
from .spelling import WIDTH
from .target import Target

#: Elements of a share that a workgroup's registers hold.
HELD = {"software": 1 << 11, "gpu": 1 << 13}


def find_pairs(
    order: Sequence[Stage], longest: int, target: Target
) -> dict[Stage, Stage]:
    """Sums over rows of so many elements at least → the maximum that they subtract."""
    found: dict[Stage, Stage] = {}
    for s in order:
        if s.kind == "reduce" and s.monoid == "sum" and s.dtype == "f32":
            if math.prod(s.rext) < longest:
                continue
            term = _term(s)
            if term is not None and not _computed_again(s, target):
                found[s] = term[1]
    return found


def _term(s: Stage) -> tuple[Expr, Stage] | None:
    """The factor exp(y - m) of a sum, and the maximum m of the same y."""
    assert s.body is not None
    inliner = Inliner(set())
    _, fs, guards = factors(inliner.body(s.body, s.space))
    for f in fs:
        if not (f.kind == "apply" and f.data == "exp" and f.args[0].kind == "apply"):
            continue
        if f.args[0].data != "sub":
            continue
        y, shift = f.args[0].args
        n = maximum_of(shift)
        if n is None or n.data.monoid != "max":
            continue
        m: Stage = n.data
        assert m.body is not None
        if (m.ext, m.rext) != (s.ext, s.rext):
            continue
        if any(i is not E.index(a) for a, i in enumerate(n.args) if m.ext[a] != 1):
            continue
        body = inliner.body(m.body, m.space)
        if body is not y and body.kind == "apply" and body.data == "where":
            mask, seen, nothing = body.args
            lowest = nothing.kind == "const" and nothing.data == -math.inf
            asked = {c for g in guards for c in conjuncts(g)}
            if lowest and set(conjuncts(mask)) <= asked:
                # Outside of the mask nothing is added, whatever y is there.
                body = seen
        others = [g for g in (*fs, *guards) if g is not f]
        if body is y and not any(o.data is m for o in E.loads(*others, y)):
            return (f, m) if fs.count(f) == 1 else None
    return None


def _computed_again(s: Stage, target: Target) -> bool:
    """Whether the rows are a product that a kernel in one pass may want for itself."""
    assert s.body is not None
    body = Inliner(set()).body(s.body, s.space)
    read = {n.data for n in E.loads(body)}
    return target.online and any(
        x.body is not None and contract_parts(x, x.body) is not None for x in read
    )


def held_shares(s: Stage, target: Target) -> int:
    """Shares that stay in registers; an exact divisor in whole vec4s where one is."""
    n = max(s.rext)
    held = max(1, HELD.get(target.family, HELD["gpu"]) // (math.prod(s.rext) // n))
    least = -(-n // held)
    for d in range(least, 2 * least):
        if n % d == 0 and n // d % WIDTH == 0:
            return d
    return least


def rescaled(s: Stage, shares: Shares, m: Stage) -> Stage:
    """The sum in two stages.

    Args:
        s: the sum, which subtracts ``m``.
        shares: of the maximum.
        m: the maximum, in two stages as well.
    """
    found = _term_of(s, m)
    body, f = (E.substitute(e, shares.moved) for e in found)
    own = own_axes(shares.first.ext)
    plain = maximum_of(f.args[0].args[1])
    # The sum's own way with a maximum that is not finite: where(isinf(m), 0, m) or m.
    guarded = unwrapped(f.args[0].args[1]) is not plain
    share, row = E.load(shares.first, own), E.load(m, own[:-1])
    largest = _finite(share) if guarded else share
    exponential = E.apply("exp", f.args[0].args[0] - largest)
    part = E.load(shares.stage_of(s, E.replace(body, f, exponential)), own)
    scale = E.apply("exp", largest - (_finite(row) if guarded else row))
    # A share of nothing but -inf has no maximum to speak of.
    none = E.apply("eq", part, E.const(0.0))
    if not guarded:
        # Nor has it one where the row has: only a row that is all -inf gives NaN.
        other = E.apply("ne", E.apply("isinf", share), E.apply("isinf", row))
        none = E.apply("or", none, other)
    total = E.where(none, E.const(0.0), part * scale)
    return reduce_stage(s.ext, [shares.count], "sum", total, s.name, s.loc)


def _term_of(s: Stage, m: Stage) -> tuple[Expr, Expr]:
    """The inlined body of a sum, and its factor that subtracts m."""
    assert s.body is not None
    body = Inliner(set()).body(s.body, s.space)
    for f in factors(body)[1]:
        if f.kind == "apply" and f.data == "exp" and f.args[0].data == "sub":
            n = maximum_of(f.args[0].args[1])
            if n is not None and n.data is m:
                return body, f
    raise AssertionError(f"{s.name} does not subtract {m.name}")


def _finite(m: Expr) -> Expr:
    return E.where(E.apply("isinf", m), E.const(0.0), m)
