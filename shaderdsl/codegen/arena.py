"""One kernel for many equal updates: their arrays lie side by side in arenas.

An optimiser's step is the same few lines for every parameter. Where all parameters lie
in one piece of memory, and so their gradients and moments, one map over the whole
computes every step at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..ir import expr as E
from ..ir.expr import Expr
from ..ir.stage import ITEMSIZE, Stage, input_stage
from .address import Address
from .arrangement import Arrangement, Edge
from .group import Group
from .member import Member
from .schedule import kernel_bodies, lay_out, visible

#: Parts begin at multiples of so many elements: 256 bytes of the smallest dtype, as
#: WebGPU wants of a binding.
ALIGN = 128

#: Bytes that may be copied at each call for a dispatch that is saved; more if results
#: overwrite operands, so that all else stays where it is.
COPY_BYTES = 1 << 20
COPY_BYTES_IN_PLACE = 4 << 20

_slots: dict[tuple[int, str], Stage] = {}


def _slot(number: int, dtype: str) -> Stage:
    """What stands for an operand in bodies that are compared."""
    key = (number, dtype)
    if key not in _slots:
        _slots[key] = input_stage((2,), dtype, f"operand{number}")
    return _slots[key]


@dataclass(eq=False)
class Update:
    """A group that computes its results element by element.

    ``bodies`` belong to ``stored`` and load the operands as slots; ``operands[k]`` is
    what slot k stands for.
    """

    group: Group
    stored: list[Member]
    bodies: tuple[Expr, ...]
    operands: list[Stage]
    labels: list[str | None]
    size: int

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for equal computations on different arrays."""
        return self.bodies, tuple(m.stage.dtype for m in self.stored)


def identity(f: Address, axis: int) -> bool:
    """Whether an address walks its tensor from end to end along an axis."""
    return not f.const and len(f.terms) == 1 and f.coefficient(axis) == 1


def find_update(g: Group, a: Arrangement) -> Update | None:
    """A group as an update, if its maps read and write whole arrays in one order."""
    if g.kind != "map" or not g.space or any(m.stage not in a.outs for m in g.stored):
        return None
    stored = sorted(g.stored, key=lambda m: a.outs[m.stage])
    bodies = {m: b for m, b in kernel_bodies(g).items() if m in stored}
    layout = lay_out(g, bodies, [range(len(g.space))])
    (loop,) = layout.loops
    if len(loop) != 1:
        return None
    axis, size = loop[0][-1], math.prod(g.space)
    if not all(identity(visible(layout, layout.stores[m]), axis) for m in stored):
        return None
    slots: dict[Expr, Expr] = {}
    operands: list[Stage] = []
    labels: list[str | None] = []
    for n in E.loads(*(bodies[m] for m in stored)):
        if not n.free or n in slots:
            continue
        if (
            n.data.size != size
            or n.data in operands
            or not identity(visible(layout, layout.addresses[n]), axis)
        ):
            return None
        slots[n] = E.load(_slot(len(operands), n.data.dtype), [E.index(0)])
        operands.append(n.data)
        labels.append(n.label)
    canonical = tuple(
        E.rewrite(
            bodies[m],
            lambda n, args: slots.get(n) or (E.rebuild(n, args) if n.args else n),
        )
        for m in stored
    )
    if not operands or any(n.kind == "index" for n in E.values(*canonical)):
        return None
    return Update(g, stored, canonical, operands, labels, size)


def merge_updates(a: Arrangement) -> None:
    """Make one kernel of updates that differ in their arrays alone."""
    classes: dict[tuple[object, ...], list[Update]] = {}
    for g in a.partition.groups:
        u = find_update(g, a)
        if u is not None:
            classes.setdefault(u.key, []).append(u)
    for updates in classes.values():
        updates.sort(key=lambda u: a.outs[u.stored[0].stage])
        # Operands that lie in arenas already must lie in the same ones, e.g. moments
        # that two kernels read.
        apart: dict[tuple[Stage | None, ...], list[Update]] = {}
        for u in _distinct(updates):
            apart.setdefault(
                tuple(a.places[s][0] if s in a.places else None for s in u.operands), []
            ).append(u)
        for together in apart.values():
            for chunk in _chunks(together, a):
                if len(chunk) > 1:
                    _merge(chunk, a)


def _distinct(updates: Sequence[Update]) -> list[Update]:
    """Without those that share an array: it can lie in one place only."""
    numbers = {n.data for u in updates for n in E.loads(*u.bodies) if not n.free}
    seen: set[Stage] = set()
    out = []
    for u in updates:
        arrays = {*u.operands, *(m.stage for m in u.stored)}
        if len(arrays) == len(u.operands) + len(u.stored) and not arrays & (
            seen | numbers
        ):
            seen |= arrays
            out.append(u)
    return out


def _chunks(updates: Sequence[Update], a: Arrangement) -> list[list[Update]]:
    """As many at a time as one binding can hold."""
    if not updates:
        return []
    first = updates[0]
    item = max(
        ITEMSIZE[s.dtype] for s in (*first.operands, *(m.stage for m in first.stored))
    )
    limit = (
        min(a.target.limits.max_binding_bytes, a.target.limits.max_buffer_bytes) // item
    )
    chunks: list[list[Update]] = [[]]
    used = 0
    for u in updates:
        size = _padded(u.size)
        if size > limit:
            continue
        if used + size > limit:
            chunks.append([])
            used = 0
        chunks[-1].append(u)
        used += size
    return chunks


def _padded(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def _merge(updates: list[Update], a: Arrangement) -> None:
    """Place the arrays of these updates in arenas and put one kernel in their place."""
    first = updates[0]
    offsets = [0]
    for u in updates:
        offsets.append(offsets[-1] + _padded(u.size))
    total = offsets.pop()
    homes = [
        _common_home([u.operands[k] for u in updates], offsets, total, a)
        for k in range(len(first.operands))
    ]
    if any(
        h is None and any(u.operands[k] in a.places for u in updates)
        for k, h in enumerate(homes)
    ):
        return
    overwritten = _overwritten(updates, a)
    copied = [
        k
        for k, h in enumerate(homes)
        if h is None
        and k not in overwritten.values()
        and any(u.operands[k] in a.inputs for u in updates)
    ]
    nbytes = sum(u.operands[k].nbytes for k in copied for u in updates)
    what = f"{len(updates)} × {first.stored[0].stage.name}"
    worth = COPY_BYTES_IN_PLACE if overwritten else COPY_BYTES
    if nbytes > (len(updates) - 1) * worth:
        a.log.append(f"{what} stay apart: {nbytes:,} bytes would be copied first")
        return
    groups = [u.group for u in updates]
    edges: list[Edge] = []
    for k in overwritten.values():
        edges += [
            e
            for u in updates
            for e in a.before(u.operands[k], u.group)
            if e[0] not in groups
        ]
    if not a.allow(edges, groups):
        overwritten = {}
        if not a.allow([], groups):
            a.log.append(f"{what} stay apart: they need one another")
            return
    arenas = [
        h or input_stage((total,), s.dtype, f"{label or s.name}_arena")
        for h, s, label in zip(homes, first.operands, first.labels, strict=True)
    ]
    results = [
        arenas[overwritten[j]]
        if j in overwritten
        else input_stage((total,), m.stage.dtype, f"{m.stage.name}_arena")
        for j, m in enumerate(first.stored)
    ]
    for u, offset in zip(updates, offsets, strict=True):
        for s, arena in [
            *zip(u.operands, arenas, strict=True),
            *zip([m.stage for m in u.stored], results, strict=True),
        ]:
            a.places.setdefault(s, (arena, offset))
    a.gone |= {u.operands[k] for k in overwritten.values() for u in updates}
    a.replace(first.group, [_merged(updates, arenas, results, total)])
    names = ", ".join(dict.fromkeys(m.stage.name for m in first.stored))
    a.log.append(
        f"{len(updates)} × {names} are one kernel over arenas of {total:,} elements; "
        f"{len(overwritten)} of {len(results)} results overwrite what they come from"
        + (
            f"; {nbytes:,} bytes of arguments are copied in unless they lie there"
            if nbytes
            else ""
        )
    )


def _common_home(
    stages: Sequence[Stage], offsets: Sequence[int], total: int, a: Arrangement
) -> Stage | None:
    """The arena in which these lie already just so, if there is one."""
    places = [a.places.get(s) for s in stages]
    if places[0] is None or places[0][0].size != total:
        return None
    parent = places[0][0]
    return (
        parent
        if all(p == (parent, o) for p, o in zip(places, offsets, strict=True))
        else None
    )


def _overwritten(updates: Sequence[Update], a: Arrangement) -> dict[int, int]:
    """For each result the donated operand whose memory it takes over, if any."""
    first = updates[0]
    given_up = a.donated - a.gone
    free = {
        k
        for k in range(len(first.operands))
        if all(u.operands[k] in given_up for u in updates)
    }
    used = [{n.data for n in E.loads(b)} for b in first.bodies]
    slots = [_slot(k, s.dtype) for k, s in enumerate(first.operands)]
    chosen: dict[int, int] = {}
    for j, m in enumerate(first.stored):
        fits = [
            k for k in free if slots[k] in used[j] and slots[k].dtype == m.stage.dtype
        ]
        if fits:
            # What few results need is what this one is the next state of.
            chosen[j] = min(fits, key=lambda k: (sum(slots[k] in u for u in used), k))
            free.remove(chosen[j])
    return chosen


def _merged(
    updates: Sequence[Update],
    arenas: Sequence[Stage],
    results: Sequence[Stage],
    total: int,
) -> Group:
    """The group of one map over whole arenas."""
    first = updates[0]
    loads = {}
    for k, arena in enumerate(arenas):
        node = E.load(arena, [E.index(0)])
        node.label = first.labels[k]
        loads[_slot(k, first.operands[k].dtype)] = node
    g = Group("map", (), (total,), stands_for=[u.group for u in updates])
    for m, body, result in zip(first.stored, first.bodies, results, strict=True):
        whole = E.rewrite(
            body,
            lambda n, args: (
                loads[n.data]
                if n.kind == "load" and n.data in loads
                else (E.rebuild(n, args) if n.args else n)
            ),
        )
        # Not interned: two results of equal bodies are two.
        stage = Stage(
            "map", (total,), (), None, whole, None, m.stage.dtype, m.stage.name
        )
        stage.loc = m.stage.loc
        member = Member(stage, whole, "map", (0,), (), tuple(E.loads(whole)))
        g.members.append(member)
        g.axes[member] = [0]
        g.stored.append(member)
        g.targets[stage] = (result, [E.index(0)])
    g.anchors = first.group.anchors
    g.why.append(f"{len(updates)} updates are alike but for their arrays")
    return g
