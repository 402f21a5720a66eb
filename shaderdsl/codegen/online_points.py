"""Sums that read products at places of their own: each place computes its product.

The gradient of a learned bias adds up ``f(X[i, i - r])`` over i for each r: no row of
X, so no run along it. Here the lanes of a workgroup share out the places of one sum;
whoever has a place takes the product's dot product straight from its factors, if the
guards let the place count at all. The order of addition is fixed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..ir import expr as E
from ..ir.expr import Expr
from ..ir.indexmap import split
from ..ir.stage import Stage, factors, product
from .address import clamped, contiguous
from .group import Group
from .kernel_text import indent
from .online_bands import band_kernels, find_bands
from .online_readers import UNROLLED, lanes_of
from .online_runs import parts_of
from .program import Kernel
from .reduction import Tree
from .schedule import (
    decode,
    finish,
    fold,
    kernel_bodies,
    kernel_name,
    lay_out,
    visible,
)
from .spelling import WIDTH
from .target import Target
from .writer import Writer


@dataclass(eq=False)
class _Product:
    """``number · Σ_inner near · far`` over the axes that the kernel keeps for it."""

    number: float
    near: Expr
    far: Expr
    axes: list[int]
    inner: int


def points_kernels(g: Group, target: Target) -> list[Kernel]:
    """Print a group of such sums and the maps of them."""
    bands = find_bands(g, target)
    return [_Points(g, target).kernel()] if bands is None else band_kernels(bands)


class _Points:
    """Blocks of the writer: 0 the workgroup, 1 a sum, 2 a place, 3 one that counts."""

    def __init__(self, g: Group, target: Target):
        self.g, self.target = g, target
        self.sums = [m for m in g.members if m.role == "points"]
        online = [m for m in g.members if m.role == "online"]
        self.bodies = {m: E.substitute(m.body, g.renaming(m)) for m in self.sums}
        self.products: dict[Stage, _Product] = {}
        for m in online:
            parts, names = parts_of(m), g.renaming(m)
            own = dict(zip(m.axes, g.axes[m], strict=True))
            self.products[m.stage] = _Product(
                parts.number,
                E.substitute(parts.left, names),
                E.substitute(parts.right, names),
                [own.get(a, -1) for a in range(len(m.stage.ext))],
                own[m.red[0]],
            )
        first = self.sums[0]
        self.rows = list(range(len(g.rows)))
        self.lanes = [g.axes[first][first.axes.index(a)] for a in first.red]
        every = kernel_bodies(g)
        self.epilogue = {
            m: g.own_load(m) if m.role == "points" else every[m] for m in g.stored
        }
        places = [
            i
            for b in self.bodies.values()
            for n in E.loads(b)
            if n.data in self.products
            for i in n.args
        ]
        dots = [x for p in self.products.values() for x in (p.near, p.far)]
        roots = [*self.bodies.values(), *places, *dots]
        self.layout = lay_out(g, self.epilogue, [self.rows, self.lanes], roots)
        self.w = Writer(g.space, target)
        self._tensors(dots)
        self.w.virtual = dict.fromkeys(self.products, self._dot)

    def _tensors(self, dots: Sequence[Expr]) -> None:
        """Say which addresses there are, and which tensors are read as vec4."""
        w, layout = self.w, self.layout
        inner = {p.inner: p for p in self.products.values()}
        wide = {n for x in dots for n in E.loads(x)}
        for n, form in layout.addresses.items():
            w.addresses[n] = visible(layout, form)
            along = [a for a in inner if n.free >> a & 1]
            if n not in wide or not along or not contiguous(form, along[0]):
                w.plain.add(n.data)
        w.plain |= {m.stage for m in self.g.stored}

    def kernel(self) -> Kernel:
        """The kernel."""
        g, w, target = self.g, self.w, self.target
        n = math.prod(g.space[a] for a in self.lanes)
        count = math.prod(g.rows)
        width, rows = lanes_of(n, target)
        size = width * rows
        w.line(f"let l = lane % {width}u;")
        w.line(f"let first = (group.y * groups.x + group.x) * {rows}u;")
        w.line(f"let row = first + lane / {width}u;")
        end = w.param(("rows",), count, stem="rows")
        w.line(f"let at = min(row, {end} - 1u);")
        decode(w, "at", self.layout.loops[0], 0)
        w.open()
        for k in range(len(self.sums)):
            w.line(f"var sum{k} = 0.0;")
        w.open()
        decode(w, "i", self.layout.loops[1], 2)
        self._place()
        place = w.close()
        w.line(f"for (var i = l; i < {w.extent(self.lanes)}; i = i + {width}u) {{")
        w.blocks[-1] += [*indent(place), "}"]
        tree = Tree(w, size, width, "l")
        names = [f"sum{k}" for k in range(len(self.sums))]
        totals = tree.reduce([("sum", "f32", v) for v in names], 1)
        for m, total in zip(self.sums, totals, strict=True):
            w.memo[1][g.own_load(m)] = total
        w.base = 1
        values = {m: w.value(body) for m, body in self.epilogue.items()}
        w.open()
        for m, value in values.items():
            form = visible(self.layout, self.layout.stores[m])
            tensor = g.target(m)[0]
            w.store(tensor, form, value, m.body.dtype, False)
        stores = w.close()
        w.line(f"if (l == 0u && row < {end}) {{")
        w.blocks[-1] += [*indent(stores), "}"]
        inner = w.close()
        w.blocks[0] += inner
        name = kernel_name(g)
        grid = fold(-(-count // rows), target)
        return finish(g, w, self.layout, w.blocks[0], name, "points", size, grid)

    def _place(self) -> None:
        """One place: what it adds, if the guards that all sums have let it count."""
        w = self.w
        parts = [factors(self.bodies[m]) for m in self.sums]
        common = [c for c in parts[0][2] if all(c in p[2] for p in parts)]
        common = [
            c for c in common if not any(n.data in self.products for n in E.loads(c))
        ]
        condition = E.all_of(common)
        test = "" if condition is None else w.value(condition)
        w.open()
        known = {a: w.depth[a] for a in self.lanes}
        if test:
            w.depth |= dict.fromkeys(self.lanes, 3)
        for k, (number, fs, guards) in enumerate(parts):
            value = E.guard([c for c in guards if c not in common], product(fs))
            text = w.value(value)
            if number != 1.0:
                text = f"{w.param(('number', k), number, 'f32', 'number')} * {text}"
            w.line(f"sum{k} = sum{k} + {text};", 3 if test else 2)
        lines = w.close()
        w.depth |= known
        if test:
            w.line(f"if ({test}) {{")
            w.blocks[-1] += [*indent(lines), "}"]

    def _dot(self, n: Expr, level: int) -> str:
        """A product at a place, from its factors."""
        w, p = self.w, self.products[n.data]
        stage: Stage = n.data
        place: dict[int, Expr] = {}
        for i, group, extent in zip(n.args, stage.groups, stage.shape, strict=True):
            own = [stage.ext[a] for a in group]
            for a, e in zip(group, split(clamped(i, extent, w.space), own, w.space)):
                if p.axes[a] >= 0:
                    place[p.axes[a]] = e
        near, far = (E.substitute(x, place) for x in (p.near, p.far))
        extent = w.space[p.inner]
        wide = extent % WIDTH == 0
        count = extent // WIDTH if wide else extent
        depth = len(w.blocks)
        loop = "k" if count > UNROLLED else ""
        total = w.fresh("dot")
        w.line(f"var {total} = 0.0;", level)
        for chunk in range(1 if loop else count):
            w.open()
            w.axis(p.inner, loop or f"{chunk}u", depth)
            w.vector = p.inner if wide else None
            x, y = (w.splat(e) if wide else w.value(e) for e in (near, far))
            w.vector = None
            term = f"dot({x}, {y})" if wide else f"{x} * {y}"
            w.line(f"{total} = {total} + {term};")
            lines = w.close()
            if loop:
                head = f"for (var k = 0u; k < {count}u; k = k + 1u) {{"
                lines = [head, *indent(lines), "}"]
            w.blocks[level] += lines
        if p.number == 1.0:
            return total
        scale = w.param(("number", stage.name), p.number, "f32", "number")
        return w.let(f"{total} * {scale}", level)
