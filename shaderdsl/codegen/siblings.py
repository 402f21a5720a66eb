"""Kernels that share an operand become one, side by side, to fill a device better.

They are q, k and v and their gradients, the turning of q and k, and all of these for
a single token, with what goes into a cache.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from ..ir import expr as E
from ..ir.stage import Stage
from .arrangement import Arrangement
from .contract_plan import analyse
from .contract_shapes import choose_shape, workgroups
from .group import Group
from .program import Tensor
from .row import row_shape
from .schedule import kernel_bodies
from .target import Target
from .templates import signature

# Parts of one kernel: each adds to the time that a driver takes to compile it.
_MOST = 4

# What several groups of a kind become, and why.
_KINDS = {
    "contract": ("siblings", "contractions that share an operand"),
    "map": ("map siblings", "maps of one array"),
    "row": ("row siblings", "products of one row"),
}

# Workgroups beyond which a contraction fills a device by itself.
_ENOUGH = 512


def merge_siblings(a: Arrangement, target: Target) -> None:
    """Make one kernel of contractions that read the same large array."""
    if target.family == "software":
        # Mesa's driver on the CPU walks both sides of a branch (docs/rejected.md).
        return
    found: dict[Group, list[tuple[Tensor, int]]] = {}
    known: dict[Any, list[tuple[int, int]]] = {}  # the layers of a model are alike
    for g in a.partition.groups:
        if g.kind != "contract" or not a.untouched(g):
            continue
        key, numbers = signature(g)
        if key not in known:
            known[key] = [(numbers[s], k) for s, k in _operands(g, target)]
        arrays = list(numbers)
        if known[key]:
            found[g] = [(arrays[i], k) for i, k in known[key]]
    for groups in _sets(found):
        _merge(groups, a, target)


def _operands(g: Group, target: Target) -> list[tuple[Stage, int]]:
    """Arrays that a contraction reads, with its length; none if it fills a device."""
    c = analyse(g, target)
    if workgroups(c, choose_shape([c], 1 << 30)[0]) > _ENOUGH:
        return []
    factors = [f.expr for x in c.products for f in (x.left, x.right)]
    return [(n.data, c.sizes[3]) for n in E.loads(*factors)]


def merge_maps(a: Arrangement, target: Target) -> None:
    """Make one kernel of maps of different sizes that read the same array.

    They are the turning of q and of k, which read the same tables, and slices that
    are written into arrays at the same place.
    """
    if target.family == "software":  # as above
        return
    found: dict[Group, list[Stage]] = {}
    for g in a.partition.groups:
        p = a.printed(g)
        if p is None or p.kind != "map" or not p.space or (p is g and g.targets):
            continue
        arrays = [n.data for n in _loads(p) if n.free or p is not g]
        if arrays:
            found[g] = arrays
    for groups in _connected(found):
        _merge(groups, a, target)


def merge_rows(a: Arrangement, target: Target) -> None:
    """Make one kernel of products of one row that they all read."""
    if target.family == "software":  # as above
        return
    found: dict[Group, list[Hashable]] = {}
    for g in a.partition.groups:
        if g.kind != "row" or not a.untouched(g) or g.targets:
            continue
        if math.prod(g.rows) == 1 or any(m.role == "column" for m in g.members):
            continue
        lanes = sum(1 << q for q in range(len(g.rows), len(g.space)))
        bodies = kernel_bodies(g)
        loads = E.loads(*(bodies[m] for m in g.members if m.role == "row"))
        shape = row_shape(g, target)[1:]
        keys = [(n.data, shape) for n in loads if n.free and not n.free & ~lanes]
        if keys:
            found[g] = [*keys]
    for groups in _sets(found):
        _merge(groups, a, target)


def _sets(found: Mapping[Group, Sequence[Hashable]]) -> list[list[Group]]:
    """Groups by the one of their keys that most of them have."""
    count = Counter(key for keys in found.values() for key in dict.fromkeys(keys))
    sets: dict[Hashable, list[Group]] = {}
    for g, keys in found.items():
        sets.setdefault(max(keys, key=lambda key: count[key]), []).append(g)
    return list(sets.values())


def _connected(found: Mapping[Group, Sequence[Hashable]]) -> list[list[Group]]:
    """Groups that hang together by keys that two of them have, in their order."""
    sets: list[tuple[set[Hashable], list[Group]]] = []
    for g, own in found.items():
        keys, groups, rest = set(own), [g], []
        for other in sets:
            if keys.isdisjoint(other[0]):
                rest.append(other)
            else:
                groups = [*other[1], *groups]
                keys |= other[0]
        sets = [*rest, (keys, groups)]
    order = {g: i for i, g in enumerate(found)}
    return [sorted(groups, key=order.__getitem__) for _, groups in sets]


def _merge(groups: list[Group], a: Arrangement, target: Target) -> None:
    printed = {g: a.printed(g) or g for g in groups}
    chosen: list[Group] = []
    for g in groups:
        together = [*chosen, g]
        limit = target.limits.max_storage_buffers
        texts = [printed[h] for h in together]
        fits = len(together) <= _MOST and _bindings(texts) <= limit
        apart = not _touch(together, a) and not any(
            a.disturbs(p, printed[g]) for p in texts[:-1]
        )
        if fits and apart and (not chosen or a.allow((), together)):
            chosen = together
            continue
        _replace(chosen, printed, a)
        chosen = [g]
    _replace(chosen, printed, a)


def _bindings(groups: list[Group]) -> int:
    """Arrays that one kernel would bind; sums in pieces take no more."""
    inside = {m.stage for g in groups for m in g.members}
    loaded = {n.data for g in groups for n in _loads(g)} - inside
    return len(loaded) + sum(max(len(g.stored), 1) for g in groups)


def _loads(g: Group) -> list[E.Expr]:
    """What a group reads, to know where it stores included."""
    places = (i for _, indices in g.targets.values() for i in indices)
    return [*(n for m in g.members for n in m.loads), *E.loads(*places)]


def _touch(groups: list[Group], a: Arrangement) -> bool:
    """Whether one reads what another one computes."""
    made = {m.stage: g for g in groups for m in g.members}
    return any(
        made.get(n.data, g) is not g for g in groups for m in g.members for n in m.loads
    )


def _replace(
    groups: list[Group], printed: Mapping[Group, Group], a: Arrangement
) -> None:
    if len(groups) < 2:
        return
    texts = [printed[g] for g in groups]
    kind = groups[0].kind
    one = Group(_KINDS[kind][0], (), ())
    for g in texts:
        one.members += g.members
        one.axes.update(g.axes)
        one.stored += g.stored
        one.targets.update(g.targets)
        one.why += g.why
    one.anchors = groups[0].anchors
    one.stands_for = texts
    one.why.append(f"{len(groups)} {_KINDS[kind][1]}")
    a.replace(groups[0], [one])
