"""What every schedule of a contraction starts from: factors, loops, copies of axes.

A thread works on several rows and columns at once. Each of them gets axes of its own
(a copy), so that the writer keeps their values apart and still shares what does not
depend on them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..ir import expr as E
from ..ir.expr import Expr
from .address import Address, load_address
from .member import Member, contract_parts
from .partition import Group
from .schedule import Layout, kernel_bodies, lay_out, visible
from .target import Target
from .writer import WIDTH, Writer, contiguous

Loop = Sequence[Sequence[int]]


@dataclass(eq=False)
class Contraction:
    """``number · Σ_k left(batch, m, k) · right(batch, n, k)`` and what is stored of it.

    All over the kernel's axes. ``epilogue`` holds the stored members with their bodies;
    ``result`` are the loads that mean the sum itself. The vector modes say along which
    class of axes a factor is read as vec4: ``m`` (``n``), ``k`` or none.
    """

    group: Group
    target: Target
    member: Member
    number: float
    left: Expr
    right: Expr
    layout: Layout
    epilogue: dict[Member, Expr]
    result: tuple[Expr, ...]
    batch: Loop
    m: Loop
    n: Loop
    k: Loop
    left_mode: str = ""
    right_mode: str = ""
    wide: bool = False  # results are handled as vec4 along n after the sum

    def extent(self, loop: Loop) -> int:
        """Positions of a class of axes."""
        return math.prod(self.group.space[a] for q in loop for a in q)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Extents of batch, m, n and k."""
        return (
            self.extent(self.batch),
            self.extent(self.m),
            self.extent(self.n),
            self.extent(self.k),
        )

    @property
    def unroll(self) -> int:
        """Positions of k that one step takes."""
        return WIDTH if "k" in (self.left_mode, self.right_mode) else 1

    def address(self, n: Expr) -> Address:
        """A load's address without axes that merged into others."""
        return visible(self.layout, self.layout.addresses[n])

    def store(self, m: Member) -> Address:
        """A store's address without axes that merged into others."""
        return visible(self.layout, self.layout.stores[m])


def analyse(g: Group, target: Target) -> Contraction:
    """Take a group apart."""
    member = next(m for m in g.members if m.role == "contract")
    parts = contract_parts(member.stage, member.body)
    assert parts is not None
    names = g.renaming(member)
    place = dict(zip(member.axes, g.axes[member], strict=True))
    left, right = E.substitute(parts.left, names), E.substitute(parts.right, names)
    m, n, k = ([place[a] for a in part] for part in (parts.m, parts.n, parts.k))
    batch = [q for q in range(len(g.rows)) if q not in m and q not in n]
    own = g.own_load(member)
    every = kernel_bodies(g)
    epilogue = {x: own if x is member else every[x] for x in g.stored}
    result = {own}
    for body in epilogue.values():
        result |= {x for x in E.loads(body) if x.data is member.stage}
    shape = lay_out(g, epilogue, [], [left, right])
    order = shape.stores[g.stored[0]].axes()
    reads = [load_address(x, g.space).axes() for x in E.loads(left)] or [{}]
    classes = [
        sorted(batch, key=lambda a: -order.get(a, 0)),
        sorted(m, key=lambda a: -order.get(a, 0)),
        sorted(n, key=lambda a: -order.get(a, 0)),
        sorted(k, key=lambda a: -max(abs(r.get(a, 0)) for r in reads)),
    ]
    layout = lay_out(g, epilogue, classes, [left, right])
    c = Contraction(
        g,
        target,
        member,
        parts.number,
        left,
        right,
        layout,
        epilogue,
        tuple(result),
        *_four(layout.loops),
    )
    c.left_mode, c.right_mode = _mode(c, left, c.m, "m"), _mode(c, right, c.n, "n")
    c.wide = inner_axis(c, c.n) is not None and (
        c.right_mode == "n"
        or any(contiguous(c.store(x), inner_axis(c, c.n)) for x in g.stored)
    )
    return c


def _four(loops: Sequence[Loop]) -> tuple[Loop, Loop, Loop, Loop]:
    batch, m, n, k = loops
    return batch, m, n, k


def inner_axis(c: Contraction, loop: Loop) -> int | None:
    """The innermost axis of a class if vec4s fit along it."""
    return (
        loop[-1][-1] if loop and c.layout.extents[loop[-1][-1]] % WIDTH == 0 else None
    )


def _mode(c: Contraction, factor: Expr, outer: Loop, name: str) -> str:
    """Along which axis a factor is read as vec4: as its largest array lies."""
    best, size = "", -1
    for x in E.values(factor):
        if x.kind != "load":
            continue
        form = c.address(x)
        for mode, loop in ((name, outer), ("k", c.k)):
            a = inner_axis(c, loop)
            if a is not None and contiguous(form, a) and x.data.size > size:
                best, size = mode, x.data.size
    return best


class Copies:
    """A writer with copies of axes.

    Args:
        c: the contraction.
        w: its writer; the copies are axes after the kernel's own.
    """

    def __init__(self, c: Contraction, w: Writer):
        self.c, self.w = c, w

    def make(self, loop: Loop) -> dict[int, int]:
        """New axes for a class."""
        copies: dict[int, int] = {}
        for q in loop:
            for a in q:
                copies[a] = len(self.w.space)
                self.w.space.append(self.c.group.space[a])
        return copies

    def place(
        self,
        copies: Mapping[int, int],
        loop: Loop,
        flat: str,
        depth: int,
        vector: bool = False,
    ) -> None:
        """Name copies from a flat position (in vec4s if ``vector``)."""
        w, current = self.w, flat
        for j in reversed(range(len(loop))):
            q = loop[j]
            for a in q:
                w.depth[copies[a]] = depth
            last = copies[q[-1]]
            if j == 0:
                w.names[last] = current
            else:
                n = w.extent(q, WIDTH if vector and j == len(loop) - 1 else 1)
                w.names[last] = w.let(f"{current} % {n}", depth, "i")
                current = w.let(f"{current} / {n}", depth, "q")

    def bring(self, root: Expr, copies: Mapping[int, int]) -> Expr:
        """An expression over copies.

        Its addresses are carried over, so that equal strides stay one parameter.
        """
        axes = {a: E.index(q) for a, q in copies.items()}
        new = E.substitute(root, axes)
        for n in E.loads(root):
            if n in self.c.layout.addresses:
                self.w.addresses[E.substitute(n, axes)] = self.move(
                    self.c.address(n), copies
                )
        return new

    def move(self, form: Address, copies: Mapping[int, int]) -> Address:
        """An address over copies."""
        axes = {a: E.index(q) for a, q in copies.items()}
        terms = []
        for t in form.terms:
            what = (
                copies.get(t.what, t.what)
                if isinstance(t.what, int)
                else E.substitute(t.what, axes)
            )
            if isinstance(t.what, Expr):
                self.bring(t.what, copies)
            terms.append(type(t)(t.coefficient, t.key, what))
        return Address(tuple(terms), form.const)


def plain_tensors(
    c: Contraction, w: Writer, epilogue: bool = True, factors: bool = True
) -> None:
    """Tell the writer which tensors have an access that is no vec4."""
    uses: list[tuple[Expr, int | None]] = []
    if factors:
        modes = {
            "m": inner_axis(c, c.m),
            "n": inner_axis(c, c.n),
            "k": inner_axis(c, c.k),
        }
        for factor, mode in ((c.left, c.left_mode), (c.right, c.right_mode)):
            uses += [(n, modes.get(mode)) for n in _all_loads(c, factor)]
    if epilogue:
        axis = inner_axis(c, c.n) if c.wide else None
        for x, body in c.epilogue.items():
            uses += [(n, axis) for n in _all_loads(c, body)]
            if not contiguous(c.store(x), axis):
                w.plain.add(x.stage)
    for n, a in uses:
        if a is None or not n.free >> a & 1 or not contiguous(c.address(n), a):
            w.plain.add(n.data)


def _all_loads(c: Contraction, root: Expr) -> list[Expr]:
    return [n for n in E.loads(root) if n in c.layout.addresses]
