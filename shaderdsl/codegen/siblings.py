"""Contractions that share an operand become one kernel, to fill a device better.

They are q, k and v, gate and up, and their gradients.
"""

from __future__ import annotations

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
        # Any of them fills a driver on the CPU; and Mesa's walks both sides of a
        # branch, so that a step with its contractions merged took longer there.
        return
    sets: dict[tuple[Stage, int], list[Group]] = {}
    for g in a.partition.groups:
        if g.kind == "contract" and a.untouched(g):
            c = analyse(g, target)
            if workgroups(c, choose_shape([c], 1 << 30)[0]) <= _ENOUGH:
                factors = {
                    n.data
                    for x in c.products
                    for n in E.loads(x.left.expr, x.right.expr)
                }
                shared = max(factors, key=lambda s: len(_readers(a, s)))
                sets.setdefault((shared, c.sizes[3]), []).append(g)
    for groups in sets.values():
        _merge(groups, a, target)


def _readers(a: Arrangement, s: Stage) -> set[Group]:
    found = {a.partition.group[m.stage] for m in a.partition.readers.get(s, ())}
    return {g for g in found if g.kind == "contract"}


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
    one = Group("siblings", (), ())
    for g in groups:
        one.members += g.members
        one.axes.update(g.axes)
        one.stored += g.stored
        one.targets.update(g.targets)
        one.why += g.why
    one.anchors = groups[0].anchors
    one.stands_for = groups
    one.why.append(f"{len(groups)} contractions that share an operand")
    a.replace(groups[0], [one])
