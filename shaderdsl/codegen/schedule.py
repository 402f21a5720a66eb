"""What every archetype shares: bodies over a kernel's axes, analysis of its addresses,
the frame of a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..ir import expr as E
from ..ir.expr import Expr
from ..ir.stage import Stage
from .address import Address, collapse, contiguous, linear, load_address, used_alone
from .group import Group
from .member import Member
from .program import Kernel
from .spelling import WIDTH
from .target import Target
from .writer import Writer

#: Archetypes whose every index is in range: positions are cut off at their extents
#: before anything is loaded, what an interval does not prove is clamped, and places in
#: workgroup memory follow from the invocation's number.  `tests/test_index_audit.py`
#: watches each index of them.
IN_RANGE = frozenset({"map", "row", "column", "contract", "scatter"})

BUILTINS = (
    "@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: "
    "vec3<u32>, "
    "@builtin(local_invocation_index) lane: u32"
)


@dataclass
class Layout:
    """How a kernel's bodies touch memory.

    ``loops`` are the classes of axes (rows, lanes, …), each a list of merged groups;
    ``addresses`` belong to the loads, ``stores`` to the members that are written.
    """

    bodies: dict[Member, Expr]
    addresses: dict[Expr, Address]
    stores: dict[Member, Address]
    loops: list[list[list[int]]]
    extents: dict[int, int]  # of the merged groups, by their last axis

    def loads(self) -> list[Expr]:
        """Loads from memory."""
        return list(self.addresses)


def kernel_bodies(g: Group) -> dict[Member, Expr]:
    """Members' bodies over the kernel's axes; maps of the kernel itself are written
    into their readers.
    """
    by_stage = {m.stage: m for m in g.members}
    bodies: dict[Member, Expr] = {}
    for m in g.members:
        body = E.substitute(m.body, g.renaming(m))
        if any(n.data in by_stage and by_stage[n.data].role == "map" for n in m.loads):
            body = E.rewrite(
                body,
                lambda n, args: (
                    bodies[by_stage[n.data]]
                    if n.kind == "load"
                    and n.data in by_stage
                    and by_stage[n.data].role == "map"
                    else (E.rebuild(n, args) if n.args else n)
                ),
            )
        bodies[m] = body
    return bodies


def lay_out(
    g: Group,
    bodies: Mapping[Member, Expr],
    classes: Sequence[Sequence[int]],
    more: Sequence[Expr] = (),
) -> Layout:
    """Addresses of every access, and the loops left once neighbours are merged."""
    inside = {m.stage for m in g.members if m.role != "map"}
    space = g.space
    addresses: dict[Expr, Address] = {}
    roots = [*bodies.values(), *more]
    stack = [n for n in E.values(*roots) if n.kind == "load"]
    while stack:  # an index may load as well
        n = stack.pop()
        if n.data in inside or n in addresses:
            continue
        addresses[n] = load_address(n, space)
        for t in addresses[n].terms:
            if isinstance(t.what, Expr):
                stack += [x for x in E.values(t.what) if x.kind == "load"]
    targets = {m: g.target(m) for m in g.members}
    stores = {
        m: linear(tensor.shape, indices, space)
        for m, (tensor, indices) in targets.items()
    }
    walks = [a.axes() for a in addresses.values()] + [
        stores[m].axes() for m in g.stored
    ]
    blocked = used_alone(roots, addresses)
    loops = [collapse(c, space, walks, blocked) for c in classes]
    extents = {
        group[-1]: math.prod(space[a] for a in group)
        for loop in loops
        for group in loop
    }
    return Layout(dict(bodies), addresses, stores, loops, extents)


def vector_axis(
    layout: Layout, loop: Sequence[Sequence[int]], strict: bool = True
) -> int | None:
    """The lane axis that a vec4 can run along: some access is contiguous there and its
    extent is a multiple of 4.
    """
    if not loop:
        return None
    a = loop[-1][-1]
    if layout.extents[a] % WIDTH:
        return None
    every = [*layout.addresses.values(), *layout.stores.values()]
    touching = [f for f in every if f.coefficient(a) or f.rest_free() >> a & 1]
    good = [f for f in touching if contiguous(_merged(f, layout, a), a)]
    return a if good and 2 * len(good) >= len(touching) else None


def _merged(f: Address, layout: Layout, axis: int) -> Address:
    """An address without the axes that merged into others."""
    last = {group[-1] for loop in layout.loops for group in loop}
    return Address(
        tuple(t for t in f.terms if not isinstance(t.what, int) or t.what in last),
        f.const,
    )


def make_writer(g: Group, layout: Layout, target: Target, vector: int | None) -> Writer:
    """A writer that knows the addresses, and which tensors cannot be bound as vec4."""
    w = Writer(g.space, target, vector)
    hidden = {a for loop in layout.loops for group in loop for a in group[:-1]}
    wide: set[Stage] = set()
    alone: set[Stage] = set()
    for n, f in layout.addresses.items():
        w.addresses[n] = Address(
            tuple(
                t
                for t in f.terms
                if t.what not in hidden or not isinstance(t.what, int)
            ),
            f.const,
        )
        if vector is None or not n.free >> vector & 1:
            alone.add(n.data)
        elif contiguous(w.addresses[n], vector):
            wide.add(n.data)
        else:
            w.plain.add(n.data)
    # A single element of what is read in vec4s, such as a row's label, is part of one.
    w.parts = (alone & wide) - w.plain
    w.plain |= alone - wide
    return w


def visible(layout: Layout, f: Address) -> Address:
    """A store's address without merged axes."""
    hidden = {a for loop in layout.loops for group in loop for a in group[:-1]}
    return Address(
        tuple(
            t for t in f.terms if not isinstance(t.what, int) or t.what not in hidden
        ),
        f.const,
    )


def decode(
    w: Writer,
    flat: str,
    loop: Sequence[Sequence[int]],
    depth: int,
    vector: int | None = None,
) -> None:
    """Name the axes of one class from a flat position (in vec4s along ``vector``)."""
    current = flat
    for j in reversed(range(len(loop))):
        group = loop[j]
        a = group[-1]
        for hidden in group[
            :-1
        ]:  # walked by the last one; values that depend on it live here too
            w.depth[hidden] = depth
        if j == 0:
            w.axis(a, current, depth)
        else:
            n = w.extent(group, WIDTH if a == vector else 1)
            w.axis(a, w.let(f"{current} % {n}", depth, "i"), depth)
            current = w.let(f"{current} / {n}", depth, "q")


def flops(members: Sequence[Member], bodies: Mapping[Member, Expr]) -> int:
    """Floating-point operations: one for each arithmetic node and position."""
    total = 0
    for m in dict.fromkeys([*members, *bodies]):
        # A contraction is laid out without its product.
        whole = m.role == "contract" or m not in bodies
        values = E.values(m.body if whole else bodies[m])
        nodes = sum(1 for n in values if n.kind == "apply" and n.dtype == "f32")
        total += (nodes + (1 if m.stage.kind == "reduce" else 0)) * math.prod(m.space)
    return total


def traffic(tensors: Sequence[Stage]) -> int:
    """Bytes when each array moves once."""
    return sum(t.nbytes for t in tensors)


def fold(workgroups: int, target: Target) -> tuple[int, int, int]:
    """A one-dimensional grid, folded into two where it is longer than a dimension may
    be.
    """
    limit = target.limits.max_workgroups
    if workgroups <= limit:
        return (workgroups, 1, 1)
    rows = -(-workgroups // limit)
    return (-(-workgroups // rows), rows, 1)


def finish(
    g: Group,
    w: Writer,
    layout: Layout,
    body: Sequence[str],
    name: str,
    archetype: str,
    size: int,
    grid: tuple[int, int, int],
) -> Kernel:
    """Put the text together with what it computes."""
    tensors = [t for t in w.bound if isinstance(t, Stage)]
    comment = list(
        dict.fromkeys(
            f"{m.stage.name} ({_short(m.stage.loc)})" for m in g.members if m.stage.loc
        )
    )[:8]
    return Kernel(
        name=name,
        archetype=archetype,
        wgsl=w.text(comment, (size, 1, 1), BUILTINS, body),
        workgroup_size=(size, 1, 1),
        workgroups=grid,
        bindings=w.bindings(),
        params=w.param_block(),
        members=members_of(g),
        writes=writes_of(g),
        flops=flops(g.members, layout.bodies),
        bytes=_moved(g, layout, tensors),
        reason="; ".join(dict.fromkeys(g.why)),
        in_range=archetype in IN_RANGE,
    )


def _moved(g: Group, layout: Layout, tensors: Sequence[Stage]) -> int:
    """Bytes that the kernel moves; what is stored inside of another tensor counts by
    itself.
    """
    into = {tensor for tensor, _ in g.targets.values()}
    read = {n.data for n in layout.addresses}
    inside = [m.stage for m in g.stored if m.stage in g.targets]
    return traffic([t for t in tensors if t not in into or t in read] + inside)


def members_of(g: Group) -> tuple[Stage, ...]:
    """The stages of the graph that a group computes, with the maps written into them,
    in order.
    """
    return tuple(dict.fromkeys(s for h in _of_graph(g) for s in _with_inlined(h)))


def writes_of(g: Group) -> tuple[Stage, ...]:
    """The stages of the graph that a group stores."""
    return tuple(m.stage for h in _of_graph(g) for m in h.stored)


def _of_graph(g: Group) -> list[Group]:
    """The groups of the graph that a group computes."""
    if g.stands_for is None:
        return [g]
    return [x for h in g.stands_for for x in _of_graph(h)]


def _with_inlined(g: Group) -> tuple[Stage, ...]:
    """The members and the maps written into them, in order: what the device `cpu`
    evaluates.
    """
    out: dict[Stage, None] = {}
    for m in g.members:
        stack = [(m.stage, False)]
        while stack:
            s, ready = stack.pop()
            if ready:
                out[s] = None
                continue
            if s in out:
                continue
            stack.append((s, True))
            stack += [
                (n.data, False)
                for n in s.loads
                if n.data.kind == "map" and n.data not in g.anchors
            ]
    return tuple(out)


def _short(loc: str | None) -> str:
    """The last part of a path with its line: texts must not depend on where a project
    lies.
    """
    inner = (loc or "").rsplit("(", 1)[-1].rstrip(")")
    return inner.replace("\\", "/").rsplit("/", 1)[-1]


def kernel_name(g: Group) -> str:
    """A name for people, from what the kernel stores."""
    names = list(dict.fromkeys(m.stage.name for m in g.stored or g.members))
    return f"{g.kind}_{'_'.join(names[:3])}"
