"""Contractions over the same results become one kernel with several sums a thread.

They share an operand and something reads both sums (gate and up), or they are only
added up (the gradients that q, k and v give to what they were computed from).
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from ..ir import expr as E
from .arrangement import Arrangement
from .contract_plan import Contraction, Parts, analyse, parts_of, sides
from .contract_registers import likely_blocks, milliseconds
from .contract_shapes import tiling_cost, tilings
from .group import Group
from .member import Member, anchor_axes
from .target import Target
from .templates import signature

# Products of one kernel, and sums that a thread keeps apart: each adds to the time that
# a driver takes to compile it.
_MOST, _MOST_APART = 4, 4

# On a GPU large tiles of two sums do as well as tiles of one, of three they do not.
_MOST_APART_GPU = 2


@dataclass(eq=False)
class _Bundle:
    """Groups of the graph, and the group that computes them all."""

    groups: list[Group]
    one: Group


#: About the times of groups, by all that decides them: layers are alike.
_times: OrderedDict[Any, float | None] = OrderedDict()
_KEPT = 1024


def join_contractions(a: Arrangement, target: Target) -> None:
    """Make one kernel of contractions over the same results, where that pays."""
    bundles: dict[Group, _Bundle] = {}
    for g in a.partition.groups:
        if g.kind != "contract" or not a.untouched(g):
            continue
        own = _Bundle([g], g)
        for b in _candidates(g, bundles, a, target):
            own = _join(b, own, a, target) or own
        bundles.update(dict.fromkeys(own.groups, own))
    for b in dict.fromkeys(bundles.values()):
        if len(b.groups) > 1:
            a.replace(b.groups[0], [b.one])


def _join(b: _Bundle, own: _Bundle, a: Arrangement, target: Target) -> _Bundle | None:
    """Both as one, if that is possible and faster."""
    groups = [*b.groups, *own.groups]
    one = _joined(b.one, own.one, a) if len(groups) <= _MOST else None
    if one is None:
        return None
    one.why.append(f"{len(groups)} contractions over the same results")
    cost = _time(one, target)
    if cost is None:
        return None
    before = [_time(x.one, target) or 0.0 for x in (b, own)]
    if cost > sum(before):
        a.log.append(f"{_names(b)} and {_names(own)} are faster apart")
        return None
    return _Bundle(groups, one) if a.allow((), groups, True) else None


def _names(b: _Bundle) -> str:
    return ", ".join(m.stage.name for m in b.one.stored)


def _candidates(
    g: Group, bundles: dict[Group, _Bundle], a: Arrangement, target: Target
) -> list[_Bundle]:
    """Bundles whose results a group reads, then those that share an operand."""
    loads = dict.fromkeys(n.data for m in g.members for n in m.loads)
    producers = [a.partition.group.get(s) for s in loads]
    found = {bundles[p]: None for p in producers if p in bundles}
    if target.family == "software":
        # Others than these can still stand side by side on a GPU.
        for b in bundles.values():
            if b.one.rows == g.rows and any(
                n.data in loads for m in b.one.members for n in m.loads
            ):
                found[b] = None
    return list(found)


def _joined(h: Group, g: Group, a: Arrangement) -> Group | None:
    """The group of both, or None where their axes differ."""
    rows = _rows(h, g)
    if rows is None or a.disturbs(h, g):
        return None
    lanes = _shared_lanes(h, g, rows)
    rest = [q for q in range(len(g.rows), len(g.space)) if q not in lanes]
    lanes.update({q: len(h.space) + i for i, q in enumerate(rest)})
    more = tuple(g.space[q] for q in rest)
    place = {**rows, **lanes}
    one = Group("contract", h.rows, h.lanes + more)
    partition = a.partition
    one.members = sorted(
        [*h.members, *g.members], key=lambda m: partition.position.get(m, -1)
    )
    one.axes.update(h.axes)
    one.axes.update({m: [place[q] for q in axes] for m, axes in g.axes.items()})
    inside = set(one.members)
    one.stored = [
        m
        for m in one.members
        if m in {*h.stored, *g.stored}
        and (
            m.stage in partition.outs
            or m.stage.keep == "store"
            or any(r not in inside for r in partition.readers.get(m.stage, ()))
        )
    ]
    one.targets = {**h.targets, **g.targets}
    one.anchors = h.anchors
    one.why = [x for x in (*h.why, *g.why) if "over the same results" not in x]
    inner = {m.stage for m in one.members}
    loaded = {n.data for m in one.members for n in m.loads} - inner
    if len(loaded) + len(one.stored) > a.target.limits.max_storage_buffers:
        return None
    return one if sides(one) is not None else None


def _rows(h: Group, g: Group) -> dict[int, int] | None:
    """For each row axis of g the one of h, by what g reads of h; else the same ones."""
    later = {m.stage for m in g.members}
    if any(n.data in later for m in h.members for n in m.loads):
        return None
    made = {m.stage: m for m in h.members}
    found: dict[int, int] = {}
    for m in g.members:
        own = dict(zip(m.axes, g.axes[m], strict=True))
        for n in m.loads:
            producer = made.get(n.data)
            if producer is None:
                continue
            axes = anchor_axes(n, m.space)
            if m.role != "map" or axes is None:
                return None
            for x, q in zip(axes, _out_axes(h, producer), strict=True):
                if found.setdefault(own[x], q) != q:
                    return None
    if not found:
        found = {q: q for q in range(len(g.rows))}
    complete = sorted(found) == sorted(found.values()) == [*range(len(h.rows))]
    if not complete or len(g.rows) != len(h.rows):
        return None
    return found if all(g.rows[q] == h.rows[r] for q, r in found.items()) else None


def _out_axes(g: Group, m: Member) -> list[int]:
    return g.axes[m][: len(m.out)]


def _shared_lanes(h: Group, g: Group, rows: dict[int, int]) -> dict[int, int]:
    """Axes of k for which a factor of g is one of h; none without such a factor."""
    theirs = [parts_of(h, m) for m in h.members if m.role == "contract"]
    ours = [parts_of(g, m) for m in g.members if m.role == "contract"]
    for x, own in itertools.product(theirs, ours):
        if len(x.k) != len(own.k):
            continue
        for order in itertools.permutations(x.k):
            lanes = dict(zip(own.k, order, strict=True))
            if any(g.space[q] != h.space[r] for q, r in lanes.items()):
                continue
            if _same_factor(x, own, {**rows, **lanes}):
                return lanes
    return {}


def _same_factor(x: Parts, own: Parts, place: dict[int, int]) -> bool:
    names = {q: E.index(r) for q, r in place.items()}
    mine = [E.substitute(e, names) for e in (own.left, own.right)]
    return any(e is f for e in mine for f in (x.left, x.right))


def _time(g: Group, target: Target) -> float | None:
    """About the time of a group, None if its products have too little in common."""
    key = (signature(g)[0], target)
    if key not in _times:
        c = analyse(g, target)
        _times[key] = _cost(c) if len(c.products) == 1 or _close(c, target) else None
        while len(_times) > _KEPT:
            _times.popitem(last=False)
    return _times[key]


def _close(c: Contraction, target: Target) -> bool:
    """Whether each product shares a factor or an accumulator with another one."""
    apart = _MOST_APART if target.family == "software" else _MOST_APART_GPU
    if len(c.results) > apart:
        return False
    accs = [x.acc for x in c.products]
    factors = [f for x in c.products for f in (x.left, x.right)]
    return all(
        accs.count(x.acc) > 1 or factors.count(x.left) > 1 or factors.count(x.right) > 1
        for x in c.products
    )


def _cost(c: Contraction) -> float:
    if c.target.family == "software":
        return milliseconds(c, likely_blocks(c)[0])
    return min(tiling_cost([c], t) for t in tilings([c], 1 << 30))
