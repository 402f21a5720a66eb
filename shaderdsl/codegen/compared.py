"""What is compared with its own maximum: this is not computed again.

``x == max(x)`` holds for the element that gave the maximum only if x has the same bits
in both places. Another schedule of a product adds in another order, and a driver may
contract ``a * b + c`` in one kernel and not in another. Then no element equals the
maximum: its gradient, or the position of it, would be lost.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Sequence

from ..ir import expr as E
from ..ir.expr import Expr
from ..ir.stage import Stage
from .member import Inliner
from .online_runs import maximum_of

_COMPARISONS = ("eq", "ne", "lt", "le")


def compared(
    order: Sequence[Stage], outs: Iterable[Stage], products: Iterable[Stage]
) -> set[Stage]:
    """Those of some products that must keep their bits.

    The derivative of a maximum that is only subtracted in exponentials is no reason:
    it cancels, whichever element gets it.
    """
    return _compared(order, set(outs), set(products), Inliner(set()))


def _compared(
    order: Sequence[Stage], outs: set[Stage], products: set[Stage], inliner: Inliner
) -> set[Stage]:
    wanted = [s for s in order if s.body is not None and s.monoid in ("max", "min")]
    if not products or not wanted:
        return set()
    compares = set(filter(_compares, order))
    if not compares:
        return set()
    below = _below(order, products)
    of: dict[Stage, set[Stage]] = {}  # extremes → products that they are of
    for m in wanted:
        assert m.body is not None
        # The second stage of a long row is an extreme of what its shares are of.
        mine = {x for n in m.loads if n.data.monoid == m.monoid
                for x in of.get(n.data, ())}  # fmt: skip
        if below[m]:
            body = inliner.body(m.body, m.space)
            mine |= {n.data for n in E.loads(body)} & products
        if mine:
            of[m] = mine
    # Only what compares and reads an extreme, itself or through maps, is looked at.
    below = _below(order, of)
    comparing = _below(order, compares, own=True)
    bodies = {
        s: inliner.body(s.body, s.space)
        for s in order
        if s.body is not None
        and (s.kind == "reduce" or s in outs)
        and below[s]
        and comparing[s]
    }
    bodies = {s: b for s, b in bodies.items() if any(n.data in of for n in E.loads(b))}
    counts: set[Stage] = set()
    shifts: set[Expr] = set()
    for body in bodies.values():
        for n in E.values(body):
            tie = _tie(n, of, inliner)
            if tie is not None:
                shifts.add(tie[0])
                counts |= {x.data for x in E.loads(tie[1])}
    found: set[Stage] = set()
    for s, body in bodies.items():
        for n in E.values(body):
            if n not in shifts and not (s in counts and body.args[0] is n):
                found |= set(_pairs(n, of))
    return found


#: Maps whose result is an operand, or has no other rounding than that of f32 itself.
_EXACT = frozenset(
    {"neg", "abs", "maximum", "minimum", "where", "stop_gradient", "after"}
    | {"floor", "ceil", "round", "trunc", "sign", "round_f16", "to_f32"}
)
#: One of these has one rounding; two of them can be contracted.
_ROUNDED = frozenset({"add", "sub", "mul", "mulz"})


def recomputed(
    order: Sequence[Stage], outs: Iterable[Stage], anchors: Container[Stage]
) -> set[Stage]:
    """Maps of more than one rounding that are compared with their own extreme, and that
    two kernels would compute each for itself.
    """
    maps: set[Stage] = set()
    for m in order:
        if m.monoid in ("max", "min") and m.dtype in E.FLOATS:
            for x in {_seen(n.data) for n in m.loads}:
                if x.kind == "map" and x not in anchors and _roundings(x, anchors) > 1:
                    maps.add(x)
    return _compared(order, {*outs, *maps}, maps, Inliner(maps)) if maps else maps


def _seen(s: Stage) -> Stage:
    """What a view shows."""
    while s.kind == "map" and s.body is not None and s.body.kind == "load":
        s = s.body.data
    return s


def _roundings(s: Stage, anchors: Container[Stage]) -> int:
    """How many roundings, 2 at most, lie between what is stored and a map."""
    assert s.body is not None
    count = 0
    for n in E.values(s.body):
        if n.kind == "apply" and n.dtype in E.FLOATS and n.data not in _EXACT:
            count += 1 if n.data in _ROUNDED or _halves(n) else 2
        elif n.kind == "load" and n.data.kind == "map" and n.data not in anchors:
            count += _roundings(n.data, anchors)
        if count > 1:
            return 2
    return count


def _halves(n: Expr) -> bool:
    """A division by a power of two. Others are a division in one kernel, and a product
    with the inverse where many values share the divisor.
    """
    if n.data != "div" or n.args[1].kind != "const":
        return False
    return abs(math.frexp(n.args[1].data)[0]) == 0.5


def _below(
    order: Sequence[Stage], chosen: Container[Stage], own: bool = False
) -> dict[Stage, bool]:
    """Whether each stage reads a chosen one, at once or through maps (or, with ``own``,
    is one).
    """
    below: dict[Stage, bool] = {}
    for s in order:
        below[s] = (own and s in chosen) or any(
            (n.data in chosen and not own)
            or (n.data.kind == "map" and below.get(n.data, False))
            for n in s.loads
        )
    return below


def _compares(s: Stage) -> bool:
    body = s.body
    if body is None:
        return False
    found: bool = E.known(
        body, "compares", lambda: any(map(_is_comparison, E.values(body)))
    )
    return found


def _is_comparison(n: Expr) -> bool:
    return n.kind == "apply" and n.data in _COMPARISONS and n.args[0].dtype in E.FLOATS


def _pairs(n: Expr, of: dict[Stage, set[Stage]]) -> Iterator[Stage]:
    """Products on one side of a comparison that has an extreme of them on the other."""
    if not _is_comparison(n):
        return
    sides = [{x.data for x in E.loads(a)} for a in n.args]
    for one, other in (sides, sides[::-1]):
        for m in one & of.keys():
            yield from other & of[m]


def _tie(
    n: Expr, of: dict[Stage, set[Stage]], inliner: Inliner
) -> tuple[Expr, Expr] | None:
    """``x == m`` and the number of ties in ``d · where(x == m, 1 / ties, 0)``, if d is
    a sum of what subtracts m in an exponential.
    """
    if n.kind != "apply" or n.data not in ("mul", "mulz"):
        return None
    for share, d in (n.args, n.args[::-1]):
        if share.kind != "apply" or share.data != "where":
            continue
        equal, value, _ = share.args
        if not _is_comparison(equal) or value.kind != "apply" or value.data != "div":
            continue
        extremes = {x.data for x in E.loads(equal)} & of.keys()
        if any(_falls(d, m, inliner) for m in extremes):
            return equal, value.args[1]
    return None


def _falls(e: Expr, m: Stage, inliner: Inliner | None) -> bool:
    """Whether each term of a sum has a factor exp(y - m); sums that are read count as
    their terms do.
    """
    falls: dict[Expr, bool] = {}
    for n in E.topo(e, into=lambda n: n.kind != "load"):
        own = [falls.get(x, False) for x in n.args]
        found = False
        if n.kind == "load":
            s: Stage = n.data
            total = s.kind == "reduce" and s.monoid == "sum" and s.body is not None
            if total and inliner is not None:
                assert s.body is not None
                found = _falls(inliner.body(s.body, s.space), m, None)
        elif n.data in ("mul", "mulz"):
            found = any(own)
        elif n.data in ("add", "sub"):
            found = all(own)
        elif n.data in ("neg", "div"):
            found = own[0]
        elif n.data == "where":
            found = own[1] and n.args[2] is E.const(0.0)
        elif n.data == "exp" and n.args[0].data == "sub":
            shift = maximum_of(n.args[0].args[1])
            found = shift is not None and shift.data is m
        falls[n] = found
    return falls[e]
