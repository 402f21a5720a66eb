"""Long rows: a reduction that one workgroup would walk alone is cut into shares, and a
second reduction combines them.

Before: ``S[i] = Σ_j f(i, j)`` with few i and very many j. After: ``P[i, c] = Σ_j f(i,
c·n + j)``, ``S[i] = Σ_c P[i, c]``. Both are ordinary stages, so nothing else has to
know. A sum of exp(y - max y) goes along with its maximum, see `split_online`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..ir import expr as E
from ..ir.stage import Stage, retarget, topo_stages
from .anchors import Anchored
from .budget import longest_row
from .member import Inliner, classify, contract_parts, scatter_parts
from .online_runs import may_be_product
from .scan_form import scan_parts
from .shares import Shares, combined
from .split_online import find_pairs, held_shares, rescaled
from .split_scan import long_scan, scan_in_pieces
from .target import Target

#: Elements of a row from which several workgroups share it, and how many each takes at
#: least.
LONG_ROW, SHARE = 1 << 16, 1 << 13
#: Rows from which a device is busy with a workgroup a row.
ENOUGH_ROWS = 64
#: Rows from which a GPU is as busy with a workgroup a row as memory allows, and their
#: longest ones: a good part of a row stays on the chip where it is wanted again.
BUSY_ROWS, BUSY_LONGEST = 256, 1 << 17
#: Contributions that one scatter puts in order by comparing each with all.
SCATTER = 1 << 15


def split_long(outs: Sequence[Stage], target: Target) -> list[Stage]:
    """The same outputs, with long reductions in two stages."""
    if target.family == "cpu":
        return list(outs)
    order = topo_stages(outs)
    pairs = {
        s: m
        for s, m in find_pairs(order, LONG_ROW, target).items()
        if target.family == "software"
        or math.prod(s.ext) < BUSY_ROWS
        or math.prod(s.rext) > min(longest_row(target), BUSY_LONGEST)
    }
    scans = {s for s in order if long_scan(s, target) is not None}
    long = [s for s in order if s in pairs or s in scans or _wanted(s, target)]
    if not long:
        return list(outs)
    whole: set[Stage] = set()
    if any(_of_a_product(s) for s in long):
        # What runs along a product is cut by a schedule of its own.
        whole = set(Anchored(outs, target).online.runs)
        pairs = {s: m for s, m in pairs.items() if not {s, m} & whole}
    new: dict[Stage, Stage] = {}
    cut: dict[Stage, Shares] = {}  # a maximum in two stages → what it was made from
    for s in order:
        moved = retarget(s, new)
        if s in whole:
            new[s] = moved
        elif s in pairs.values():
            shares = Shares(moved, held_shares(moved, target))
            new[s] = combined(shares)
            cut[new[s]] = shares
        elif s in pairs:
            new[s] = rescaled(moved, cut[new[pairs[s]]], new[pairs[s]])
        elif s in scans:
            parts = long_scan(moved, target)
            new[s] = moved if parts is None else scan_in_pieces(moved, parts, target)
        else:
            new[s] = _split(moved, target) if _wanted(moved, target) else moved
    return [new[s] for s in outs]


def _of_a_product(s: Stage) -> bool:
    """Whether a stage reads what may be computed again instead of stored."""
    seen: set[Stage] = set()
    stack = [s]
    while stack:
        for n in stack.pop().loads:
            t: Stage = n.data
            if may_be_product(t):
                return True
            if t.kind == "map" and t not in seen:
                seen.add(t)
                stack.append(t)
    return False


def _wanted(s: Stage, target: Target) -> bool:
    if s.kind != "reduce" or s.body is None:
        return False
    n = math.prod(s.rext)
    beyond = n > longest_row(target)
    if n < LONG_ROW // 2 and n <= longest_scatter(target) and not beyond:
        return False
    body = Inliner(set()).body(s.body, s.space) if beyond else s.body
    if s.monoid == "sum" and s.dtype in E.FLOATS:
        if scan_parts(s, body) is not None or contract_parts(s, body) is not None:
            return False
        if scatter_parts(s, body) is not None:
            return n > longest_scatter(target)
    if beyond and classify(s, body) in ("row", "scatter"):
        return True
    return n >= LONG_ROW and math.prod(s.ext) < ENOUGH_ROWS


def longest_scatter(target: Target) -> int:
    """Contributions of one scatter, whose longest chain is one invocation's work."""
    return min(SCATTER, max(1, target.loop_budget * 9 // 10))


def _split(s: Stage, target: Target) -> Stage:
    k = max(range(len(s.rext)), key=lambda q: s.rext[q])
    n = s.rext[k]
    assert s.body is not None
    longest = longest_row(target)
    if scatter_parts(s, s.body) is not None:
        longest = min(longest, longest_scatter(target))
    return in_shares(s, _shares(n, math.prod(s.rext) // n, longest))


def in_shares(s: Stage, shares: int) -> Stage:
    """A reduction whose longest axis is walked in so many shares."""
    return s if shares < 2 else combined(Shares(s, shares))


def _shares(n: int, others: int, longest: int) -> int:
    """About as many shares as keep each at SHARE elements, and none beyond the longest
    that there may be; an exact divisor where one is near.
    """
    least = min(n, -(-n * others // longest))
    wanted = max(1, least, min(n, n * others // SHARE, 1024))
    for d in range(wanted, max(wanted // 2, least - 1), -1):
        if n % d == 0:
            return d
    return wanted
