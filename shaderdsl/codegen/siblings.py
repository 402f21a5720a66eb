"""Kernels that share an operand become one, side by side, to fill a device better.

They are q, k and v and their gradients, and the turning of q and k.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from ..ir import expr as E
from ..ir.stage import Stage
from .arrangement import Arrangement
from .contract_plan import analyse
from .contract_shapes import choose_shape, workgroups
from .partition import Group
from .target import Target

# Parts of one kernel: each adds to the time that a driver takes to compile it.
_MOST = 4

# Workgroups beyond which a contraction fills a device by itself.
_ENOUGH = 512


def merge_siblings(a: Arrangement, target: Target) -> None:
    """Make one kernel of contractions that read the same large array."""
    if target.family == "software":
        # Mesa's driver on the CPU walks both sides of a branch (docs/rejected.md).
        return
    found: dict[Group, list[tuple[Stage, int]]] = {}
    for g in a.partition.groups:
        if g.kind != "contract" or not a.untouched(g):
            continue
        c = analyse(g, target)
        if workgroups(c, choose_shape([c], 1 << 30)[0]) > _ENOUGH:
            continue
        factors = [f.expr for x in c.products for f in (x.left, x.right)]
        keys = [(n.data, c.sizes[3]) for n in E.loads(*factors)]
        if keys:
            found[g] = keys
    for groups in _sets(found):
        _merge(groups, a, target)


def merge_maps(a: Arrangement, target: Target) -> None:
    """Make one kernel of maps of different sizes that read the same array.

    They are the turning of q and of k, which read the same tables.
    """
    if target.family == "software":  # as above
        return
    found: dict[Group, list[Stage]] = {}
    for g in a.partition.groups:
        if g.kind == "map" and a.untouched(g) and not g.targets and g.space:
            arrays = [n.data for m in g.members for n in m.loads if n.free]
            if arrays:
                found[g] = arrays
    for groups in _sets(found):
        _merge(groups, a, target)


def _sets(found: Mapping[Group, Sequence[Hashable]]) -> list[list[Group]]:
    """Groups by the one of their keys that most of them have."""
    count = Counter(key for keys in found.values() for key in dict.fromkeys(keys))
    sets: dict[Hashable, list[Group]] = {}
    for g, keys in found.items():
        sets.setdefault(max(keys, key=lambda key: count[key]), []).append(g)
    return list(sets.values())


def _merge(groups: list[Group], a: Arrangement, target: Target) -> None:
    chosen: list[Group] = []
    for g in groups:
        together = [*chosen, g]
        limit = target.limits.max_storage_buffers
        fits = len(together) <= _MOST and _bindings(together) <= limit
        apart = not _touch(together, a) and not any(a.disturbs(h, g) for h in chosen)
        if fits and apart and (not chosen or a.allow((), together)):
            chosen = together
            continue
        _replace(chosen, a)
        chosen = [g]
    _replace(chosen, a)


def _bindings(groups: list[Group]) -> int:
    """Arrays that one kernel would bind; sums in pieces take no more."""
    inside = {m.stage for g in groups for m in g.members}
    loaded = {n.data for g in groups for m in g.members for n in m.loads} - inside
    return len(loaded) + sum(max(len(g.stored), 1) for g in groups)


def _touch(groups: list[Group], a: Arrangement) -> bool:
    """Whether one reads what another one computes."""
    made = {m.stage: g for g in groups for m in g.members}
    return any(
        made.get(n.data, g) is not g for g in groups for m in g.members for n in m.loads
    )


def _replace(groups: list[Group], a: Arrangement) -> None:
    if len(groups) < 2:
        return
    contract = groups[0].kind == "contract"
    one = Group("siblings" if contract else "map siblings", (), ())
    for g in groups:
        one.members += g.members
        one.axes.update(g.axes)
        one.stored += g.stored
        one.targets.update(g.targets)
        one.why += g.why
    one.anchors = groups[0].anchors
    one.stands_for = groups
    what = "contractions that share an operand" if contract else "maps of one array"
    one.why.append(f"{len(groups)} {what}")
    a.replace(groups[0], [one])
