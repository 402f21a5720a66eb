"""What every schedule of a contraction starts from: factors, loops, copies of axes.

A thread works on several rows and columns at once. Each of them gets axes of its own
(a copy), so that the writer keeps their values apart and still shares what does not
depend on them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..ir import expr as E
from ..ir.expr import Expr
from .address import Address, contiguous, load_address
from .group import Group
from .member import Member, contract_parts
from .schedule import Layout, kernel_bodies, lay_out, visible
from .spelling import WIDTH
from .target import Target
from .writer import Writer

Loop = Sequence[Sequence[int]]


@dataclass(eq=False)
class Factor:
    """One side of a product; ``mode`` says along which class of axes it is read as
    vec4: ``m`` (``n`` on the right), ``k`` or none.
    """

    expr: Expr
    mode: str = ""


@dataclass(eq=False)
class Product:
    """``left(batch, m, k) · right(batch, n, k)``, summed over k to an accumulator."""

    member: Member
    left: Factor
    right: Factor
    acc: int


@dataclass(eq=False)
class Pass:
    """A loop over k and the products that it sums up: they share factors."""

    k: Loop
    lefts: list[Factor]
    rights: list[Factor]
    products: list[Product]
    extent: int

    @property
    def unroll(self) -> int:
        """Positions of k that one step takes."""
        every = [*self.lefts, *self.rights]
        return WIDTH if any(f.mode == "k" for f in every) else 1


@dataclass(eq=False)
class Contraction:
    """Sums of products over the same results (batch, m, n), and what is stored of them.

    All over the kernel's axes. ``numbers`` and ``results`` belong to the accumulators:
    a factor, and the loads that mean the sum times that factor. ``epilogue`` holds the
    stored members with their bodies.
    """

    group: Group
    target: Target
    member: Member
    passes: list[Pass]
    numbers: list[float]
    results: list[tuple[Expr, ...]]
    layout: Layout
    epilogue: dict[Member, Expr]
    batch: Loop
    m: Loop
    n: Loop
    wide: bool = False  # results are handled as vec4 along n after the sum

    def extent(self, loop: Loop) -> int:
        """Positions of a class of axes."""
        return math.prod(self.group.space[a] for q in loop for a in q)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Extents of batch, m and n, and steps of k in all loops."""
        return (
            self.extent(self.batch),
            self.extent(self.m),
            self.extent(self.n),
            sum(p.extent for p in self.passes),
        )

    @property
    def products(self) -> list[Product]:
        """The products of all loops."""
        return [x for p in self.passes for x in p.products]

    def address(self, n: Expr) -> Address:
        """A load's address without axes that merged into others."""
        return visible(self.layout, self.layout.addresses[n])

    def store(self, m: Member) -> Address:
        """A store's address without axes that merged into others."""
        return visible(self.layout, self.layout.stores[m])


@dataclass
class Parts:
    """A contraction's parts over the kernel's axes."""

    member: Member
    number: float
    left: Expr
    right: Expr
    m: list[int]
    n: list[int]
    k: list[int]


def parts_of(g: Group, member: Member) -> Parts:
    """Take a member apart."""
    parts = contract_parts(member.stage, member.body)
    assert parts is not None
    names = g.renaming(member)
    place = dict(zip(member.axes, g.axes[member], strict=True))
    left, right = E.substitute(parts.left, names), E.substitute(parts.right, names)
    m, n, k = ([place[a] for a in part] for part in (parts.m, parts.n, parts.k))
    return Parts(member, parts.number, left, right, m, n, k)


def sides(g: Group) -> list[Parts] | None:
    """A group's contractions, turned so that all have the rows of the first; None if
    their factors divide the results in different ways.
    """
    out = [parts_of(g, m) for m in g.members if m.role == "contract"]
    first = out[0]
    for x in out[1:]:
        if set(x.m) == set(first.n) and set(x.n) == set(first.m):
            x.left, x.right, x.m, x.n = x.right, x.left, x.n, x.m
        elif set(x.m) != set(first.m) or set(x.n) != set(first.n):
            return None
    return out


def analyse(g: Group, target: Target) -> Contraction:
    """Take a group apart."""
    parts = sides(g)
    assert parts is not None
    first = parts[0]
    batch = [q for q in range(len(g.rows)) if q not in first.m and q not in first.n]
    every = kernel_bodies(g)
    own = [g.own_load(x.member) for x in parts]
    epilogue = {x: every[x] for x in g.stored}
    for x, load in zip(parts, own, strict=True):
        if x.member in epilogue:
            epilogue[x.member] = load
    accs, numbers = list(range(len(parts))), [x.number for x in parts]
    if len(parts) > 1:
        epilogue = {x: _named(b, parts, own) for x, b in epilogue.items()}
        accs = share_sums(epilogue, own, numbers)
        numbers = [numbers[accs.index(a)] for a in range(max(accs) + 1)]
    results = [
        tuple(load for load, b in zip(own, accs, strict=True) if b == a)
        for a in range(len(numbers))
    ]
    if len(parts) == 1:
        same = {first.member.stage}
        found = {n for b in epilogue.values() for n in E.loads(b) if n.data in same}
        results = [tuple(found | {own[0]})]
    passes = _passes(parts, accs, g)
    factors = [f.expr for p in passes for f in (*p.lefts, *p.rights)]
    shape = lay_out(g, epilogue, [], factors)
    order = shape.stores[g.stored[0]].axes()
    classes = [
        sorted(batch, key=lambda a: -order.get(a, 0)),
        sorted(first.m, key=lambda a: -order.get(a, 0)),
        sorted(first.n, key=lambda a: -order.get(a, 0)),
    ]
    for p in passes:
        reads = [load_address(x, g.space).axes() for x in E.loads(p.lefts[0].expr)]
        key = {a: max([abs(r.get(a, 0)) for r in reads] or [0]) for a in p.k[0]}
        classes.append(sorted(p.k[0], key=lambda a: -key[a]))
    layout = lay_out(g, epilogue, classes, factors)
    for p, loop in zip(passes, layout.loops[3:], strict=True):
        p.k = loop
    c = Contraction(
        g,
        target,
        first.member,
        passes,
        numbers,
        results,
        layout,
        epilogue,
        *_three(layout.loops),
    )
    for p in passes:
        for f in p.lefts:
            f.mode = _mode(c, f.expr, c.m, p.k, "m")
        for f in p.rights:
            f.mode = _mode(c, f.expr, c.n, p.k, "n")
    for a in range(len(numbers)):
        # An accumulator is a vec4 along n for all of its products or for none.
        rights = [x.right for x in c.products if x.acc == a]
        if any(f.mode != "n" for f in rights):
            for f in rights:
                f.mode = f.mode.replace("n", "")
    c.wide = inner_axis(c, c.n) is not None and (
        any(f.mode == "n" for p in passes for f in p.rights)
        or any(contiguous(c.store(x), inner_axis(c, c.n)) for x in g.stored)
    )
    return c


def _three(loops: Sequence[Loop]) -> tuple[Loop, Loop, Loop]:
    return loops[0], loops[1], loops[2]


def _named(body: Expr, parts: Sequence[Parts], own: Sequence[Expr]) -> Expr:
    """A body in which each sum is one load, however it was spelled."""
    loads = {x.member.stage: load for x, load in zip(parts, own, strict=True)}
    return E.rewrite(
        body,
        lambda n, args: (
            loads[n.data]
            if n.kind == "load" and n.data in loads
            else (E.rebuild(n, args) if n.args else n)
        ),
    )


def _passes(parts: Sequence[Parts], accs: Sequence[int], g: Group) -> list[Pass]:
    """Products by their axes of k; a factor that two of them have is one."""
    found: dict[frozenset[int], Pass] = {}
    for x, acc in zip(parts, accs, strict=True):
        extent = math.prod(g.space[a] for a in x.k)
        p = found.setdefault(frozenset(x.k), Pass([x.k], [], [], [], extent))
        pair = []
        for side, e in ((p.lefts, x.left), (p.rights, x.right)):
            factor = next((f for f in side if f.expr is e), None)
            if factor is None:
                factor = Factor(e)
                side.append(factor)
            pair.append(factor)
        p.products.append(Product(x.member, pair[0], pair[1], acc))
    return list(found.values())


def share_sums(
    bodies: dict[Member, Expr], sums: Sequence[Expr], numbers: Sequence[float]
) -> list[int]:
    """Give sums that are only added to each other one accumulator.

    Before: ``f(a + x + b)``. After: ``f(x + b)``, with what a meant in b's accumulator.

    Args:
        bodies: what is stored; changed in place.
        sums: the loads that mean the sums.
        numbers: a factor of each sum; only equal ones can be added up before it.

    Returns:
        The accumulator of each sum.
    """
    into = list(range(len(sums)))
    for i in range(len(sums)):
        users = _users(bodies.values())
        top = _top(sums[i], users)
        for j in range(i + 1, len(sums)):
            if top is sums[i] or numbers[j] != numbers[i]:
                continue
            if top is _top(sums[j], users):
                (node,) = users[sums[i]]
                rest = node.args[1] if node.args[0] is sums[i] else node.args[0]
                for m, b in bodies.items():
                    bodies[m] = E.replace(b, node, rest)
                into[i] = j
                break
    for i in reversed(range(len(sums))):
        into[i] = into[into[i]]
    order = sorted(set(into))
    return [order.index(j) for j in into]


def _users(bodies: Iterable[Expr]) -> dict[Expr, list[Expr]]:
    """For each value who uses it, once for each use; a stored one uses itself."""
    roots = list(bodies)
    users: dict[Expr, list[Expr]] = {b: [b] for b in roots}
    for n in E.topo(*roots):
        for x in n.args:
            users.setdefault(x, []).append(n)
    return users


def _top(n: Expr, users: Mapping[Expr, list[Expr]]) -> Expr:
    """The whole sum of which a value is one term and nothing else."""
    while True:
        up = users.get(n, [])
        if len(up) != 1 or up[0] is n or up[0].kind != "apply" or up[0].data != "add":
            return n
        n = up[0]


def inner_axis(c: Contraction, loop: Loop) -> int | None:
    """The innermost axis of a class if vec4s fit along it."""
    return (
        loop[-1][-1] if loop and c.layout.extents[loop[-1][-1]] % WIDTH == 0 else None
    )


def _mode(c: Contraction, factor: Expr, outer: Loop, k: Loop, name: str) -> str:
    """Along which axis a factor is read as vec4: as its largest array lies."""
    best, size = "", -1
    for x in E.values(factor):
        if x.kind != "load":
            continue
        form = c.address(x)
        for mode, loop in ((name, outer), ("k", k)):
            a = inner_axis(c, loop)
            if a is not None and contiguous(form, a) and x.data.size > size:
                best, size = mode, x.data.size
    return best


class Placed(Protocol):
    """A kernel whose addresses are known."""

    @property
    def group(self) -> Group:
        """What it computes."""
        ...

    @property
    def layout(self) -> Layout:
        """How it touches memory."""
        ...

    def address(self, n: Expr) -> Address:
        """A load's address without axes that merged into others."""
        ...


class Copies:
    """A writer with copies of axes.

    Args:
        c: the kernel.
        w: its writer; the copies are axes after the kernel's own.
    """

    def __init__(self, c: Placed, w: Writer):
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
    for p in c.passes if factors else ():
        modes = {
            "m": inner_axis(c, c.m),
            "n": inner_axis(c, c.n),
            "k": inner_axis(c, p.k),
        }
        for f in (*p.lefts, *p.rights):
            uses += [(n, modes.get(f.mode)) for n in _all_loads(c, f.expr)]
    if epilogue:
        axis = inner_axis(c, c.n) if c.wide else None
        for x, body in c.epilogue.items():
            uses += [(n, axis) for n in _all_loads(c, body)]
            if not contiguous(c.store(x), axis):
                w.plain.add(c.group.target(x)[0])
    for n, a in uses:
        if a is None or not n.free >> a & 1 or not contiguous(c.address(n), a):
            w.plain.add(n.data)


def _all_loads(c: Contraction, root: Expr) -> list[Expr]:
    return [n for n in E.loads(root) if n in c.layout.addresses]
