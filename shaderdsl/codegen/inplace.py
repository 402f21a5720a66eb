"""Maps that overwrite what they read: slices, and elementwise results.

``update_slice`` is a map like any other: the new elements inside of the slice, the old
ones elsewhere. Where nobody needs the old array any more, only the slice is written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..ir import expr as E
from ..ir.expr import Expr
from ..ir.stage import Stage
from .address import Address, linear, load_address
from .arrangement import Arrangement
from .group import Group
from .member import Member
from .schedule import kernel_bodies
from .slices import Slice, find_slices


def write_in_place(a: Arrangement, block: bool = False) -> None:
    """Give results the memory of an operand that nobody reads afterwards.

    Args:
        block: in a loop over blocks, rows that add to an operand or replace one too.
    """
    for g in a.partition.groups:
        if not a.untouched(g):
            continue
        if g.kind == "map":
            if not _update_slices(g, a):
                _overwrite(g, a)
        elif g.kind == "contract" or (block and g.kind == "row"):
            _overwrite(g, a)
        if block:
            _overwrite_rows(g, a)


def _update_slices(g: Group, a: Arrangement) -> bool:
    """Write the slices alone, if what surrounds them is there already."""
    if len(g.stored) != 1:
        return False
    (m,) = g.stored
    slices, rest = find_slices(kernel_bodies(g)[m], g.space)
    if not slices or rest.kind != "load":
        return False
    base: Stage = rest.data
    others = [n.data for s in slices for n in E.loads(s.new, s.start)]
    if (
        not _same_place(g, m, rest)
        or base in others
        or not _may_take(base, m.stage, g, a)
    ):
        return False
    a.place(m.stage, base)
    parts = [_slice_group(g, m, s, base) for s in slices]
    parts[-1].stands_for = [g]
    a.replace(g, parts)
    a.log.append(
        f"{m.stage.name} {list(m.stage.shape)} is written into {base.name}: "
        f"{len(slices)} slice(s) alone"
    )
    return True


def _may_take(base: Stage, result: Stage, g: Group, a: Arrangement) -> bool:
    """Whether a result may overwrite a tensor: nobody needs it later."""
    if (base.size, base.dtype) != (result.size, result.dtype) or result in a.places:
        return False
    if base in a.outs or base in a.gone:
        return False
    if base not in (a.donated if base.kind == "input" else a.partition.group):
        return False
    return a.allow(a.before(base, g))


def _same_place(g: Group, m: Member, load: Expr) -> bool:
    """Whether a load reads exactly the element that the member is stored to."""
    store = linear(m.stage.shape, g.own_load(m).args, g.space)
    return _plain(store) is not None and _plain(store) == _plain(
        load_address(load, g.space)
    )


def _plain(f: Address) -> dict[int, int] | None:
    """The coefficients of an address that is a sum of axes."""
    return (
        None if f.const or any(isinstance(t.what, Expr) for t in f.terms) else f.axes()
    )


def _slice_group(g: Group, m: Member, s: Slice, base: Stage) -> Group:
    """The map over a slice alone, stored into the whole array."""
    extents = list(g.space)
    extents[s.axis] = s.length
    live = [a for a in range(len(extents)) if extents[a] != 1]
    renamed = {a: E.index(i) for i, a in enumerate(live)}
    axes = {a: renamed.get(a, E.const(0)) for a in range(len(extents))}
    inner = axes[s.axis]  # the position in the slice
    outer = {**axes, s.axis: s.start + inner}
    # What reads ``axis - start`` reads the position in the slice; to say so saves the
    # check that it is in range.
    offset, mark = E.index(s.axis) - s.start, E.index(len(extents))
    new = E.rewrite(
        s.new,
        lambda n, args: mark if n is offset else (E.rebuild(n, args) if n.args else n),
    )
    body = E.substitute(new, {**outer, len(extents): inner})
    ext = tuple(extents[a] for a in live)
    stage = Stage("map", ext, (), None, body, None, m.stage.dtype, m.stage.name)
    stage.loc = m.stage.loc
    member = Member(
        stage, body, "map", tuple(range(len(ext))), (), tuple(E.loads(body))
    )
    indices = [E.substitute(i, outer) for i in g.own_load(m).args]
    return Group(
        "map",
        (),
        ext,
        members=[member],
        axes={member: list(range(len(ext)))},
        stored=[member],
        why=[
            *g.why,
            "only the slice is written: nobody reads the old array afterwards",
        ],
        anchors=g.anchors,
        targets={stage: (base, indices)},
        stands_for=[],
    )


def _overwrite(g: Group, a: Arrangement) -> None:
    """Store results over donated operands that are read at the same element only."""
    bodies = [b for m, b in kernel_bodies(g).items() if m in g.stored]
    loads: dict[Stage, list[Expr]] = {}
    for n in E.loads(*bodies):
        loads.setdefault(n.data, []).append(n)
    inner = [n.data for m in g.members if m not in g.stored for n in m.loads]
    for m in g.stored:
        if m.role != "map" or m.stage not in a.outs:
            continue
        if g.kind == "map" and m.stage.size != math.prod(g.space):
            continue
        # Halves of words are written atomically, beside which a plain load is refused.
        if m.stage.dtype == "f16" and not a.target.features.f16:
            continue
        for base, reads in loads.items():
            if base not in a.donated or not all(_same_place(g, m, n) for n in reads):
                continue
            if base in inner:
                continue
            if _may_take(base, m.stage, g, a):
                g.targets[m.stage] = (base, reads[0].args)
                a.place(m.stage, base)
                a.log.append(
                    f"{m.stage.name} {list(m.stage.shape)} overwrites {base.name}"
                )
                break


def _overwrite_rows(g: Group, a: Arrangement) -> None:
    """Store rows over the rows that they are computed from: the kernel of a row reads
    all of it before it writes any of it.
    """
    if g.kind != "row" or any(m.role == "column" for m in g.members):
        return
    bodies = kernel_bodies(g)
    loads = E.loads(*bodies.values())
    for m in g.stored:
        if m.role != "map" or m.stage in a.outs or m.stage in g.targets:
            continue
        if math.prod(m.space) != math.prod(g.space) or m.stage.dtype != "f32":
            continue
        own = g.own_load(m).args
        for base in dict.fromkeys(n.data for n in E.loads(bodies[m])):
            if base.kind == "input" or base.shape != m.stage.shape:
                continue
            if not all(_same_row(g, own, n) for n in loads if n.data is base):
                continue
            # What is written last must not read what others have written by then.
            last = [bodies[x] for x in g.stored if x.role == "map" and _wide(g, x)]
            if not all(_same_place(g, m, n) for n in E.loads(*last) if n.data is base):
                continue
            if _may_take(base, m.stage, g, a):
                g.targets[m.stage] = (base, own)
                a.place(m.stage, base)
                a.log.append(f"rows of {m.stage.name} overwrite those of {base.name}")
                break


def _wide(g: Group, m: Member) -> bool:
    return any(q >= len(g.rows) for q in g.axes[m])


def _same_row(g: Group, own: Sequence[Expr], load: Expr) -> bool:
    """Whether a load stays within the row that is stored at these indices."""
    lanes = sum(1 << q for q in range(len(g.rows), len(g.space)))
    return all(
        bool(i.free & lanes) or i is n for i, n in zip(own, load.args, strict=True)
    )
