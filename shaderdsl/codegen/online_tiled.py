"""A chain for GPUs: tiles of rows and lines in workgroup memory.

A thread keeps blocks of each product and of each weighted sum in registers. Both
factors of a product stream through workgroup memory a chunk of the inner axis at a
time; then the values of the tile go there, some lines at a time, beside their weights.
While one chunk is multiplied the next one is on its way into registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..ir.expr import Expr
from .contract_tile import XYZW, plus
from .kernel_text import indent
from .online_masks import scores_agree, sum_value
from .online_plan import (
    Online,
    Product,
    Sum,
    close_turns,
    exponential,
    is_one,
    plain_tensors,
    steps_of,
)
from .online_shape import Tiles
from .online_tile import BARRIER, Tile
from .program import Kernel
from .schedule import finish, fold, kernel_name
from .spelling import WIDTH
from .writer import Writer


def tiled(o: Online, tiles: Tiles) -> Kernel:
    """Print the kernel."""
    w = Writer(o.group.space, o.target)
    plain_tensors(o, w)
    lines = _Tiled(o, w, tiles).lines()
    count = steps_of(o.extent(o.row), tiles.rows) * o.batches
    grid = fold(count, o.target)
    name = kernel_name(o.group)
    return finish(o.group, w, o.layout, lines, name, "online", tiles.size, grid)


class _Tiled(Tile):
    def lines(self) -> list[str]:
        """The kernel's text."""
        o, w, t = self.o, self.w, self.t
        columns = (o.extent(s.column) for s in self.matrices if s.column is not None)
        widest = max(columns, default=0)
        w.shared.append(f"var<workgroup> sm: array<vec4<f32>, {t.memory(widest)}>;")
        self.begin()
        self.declare()
        w.open()
        if o.outer:
            copies = {a: a for a in o.outer}
            self.axes.place(copies, [[a] for a in o.outer], "turn", 1)
        self.agree = o.score is not None and scores_agree(o)
        first, stop = self.masks.bounds(1)
        self.masks.prove()
        w.open()
        start = f"{first} / {t.lines}u * {t.lines}u" if first != "0u" else first
        self.tile()
        w.loop(f"for (var l = {start}; l < {stop}; l = l + {t.lines}u)")
        close_turns(o, w)
        self.epilogue()
        return w.blocks[0]

    def tile(self) -> None:
        """Products of a tile, then its maximum, then what it adds to the sums."""
        o, w = self.o, self.w
        for i, p in enumerate(o.products):
            self.product(i, p)
        self.columns()
        for i, p in enumerate(o.products):
            factor = self.number(i, p)
            for r, row in enumerate(self.own):
                for j, line in enumerate(self.places):
                    name = f"x{i}g{r // WIDTH}j{j}.{XYZW[r % WIDTH]}"
                    if factor:
                        name = w.let(f"{factor}{name}", 2)
                    self.axes.known(p.results, {**row, **line}, name)
        self.kept: dict[Expr, list[list[str]]] = {}
        if o.score is not None:
            self.grow(o.score)
        for i, s in enumerate(self.scalars):
            for g, values in enumerate(self.values(s)):
                for v, line in zip(values, self.places):
                    if not is_one(s.weight):
                        v = f"{v} * {self.axes.value(s.weight, line)}"
                    w.line(f"s{i}g{g} = s{i}g{g} + {v};")
        for i, s in enumerate(self.matrices):
            self.accumulate(i, s, self.values(s))

    def number(self, i: int, p: Product) -> str:
        """What stands before a product."""
        if p.number == 1.0:
            return ""
        if p.number == -1.0:
            return "-"
        return self.w.param(("number", i), p.number, "f32", "number") + " * "

    def product(self, i: int, p: Product) -> None:
        """One product of the tile: both factors a chunk at a time."""
        o, w, t = self.o, self.w, self.t
        right = t.dc * t.rows // WIDTH
        names = [[f"x{i}g{g}j{j}" for j in range(t.tl)] for g in range(self.groups)]
        # Said aloud: front ends clear a variable of a loop only where it is first met.
        zero = "vec4<f32>(0.0)"
        w.blocks[-1] += [f"var {n} = {zero};" for line in names for n in line]
        shares = [
            _Share(self, p, True, f"n{i}_", 0),
            _Share(self, p, False, f"f{i}_", right),
        ]
        for s in shares:
            w.blocks[-1] += [f"var {n}: vec4<f32>;" for n in s.names]
        for s in shares:
            s.fetch("0u", 2)
        end = steps_of(o.extent(p.inner), WIDTH) * WIDTH
        w.open()
        w.line(BARRIER)
        for s in shares:
            w.blocks[-1] += s.keep()
        w.line(BARRIER)
        if end > t.dc:
            # The last chunk comes again: a load under a condition would keep its
            # registers around the loop.
            w.line(f"let ahead = min(d + {t.dc}u, {end - t.dc}u);")
            for s in shares:
                s.fetch("ahead", 3)
        for k in range(t.dc):
            for g in range(self.groups):
                at = plus("ty", k * (t.rows // WIDTH) + g * t.ty)
                w.line(f"let a{k}g{g} = sm[{at}];")
            for j in range(t.tl // WIDTH):
                at = plus("tx", right + k * (t.lines // WIDTH) + j * t.tx)
                w.line(f"let b{k}j{j} = sm[{at}];")
            for g in range(self.groups):
                for j in range(t.tl):
                    b = f"vec4<f32>(b{k}j{j // WIDTH}.{XYZW[j % WIDTH]})"
                    w.line(f"{names[g][j]} = fma(a{k}g{g}, {b}, {names[g][j]});")
        body = w.close()
        w.line(f"for (var d = 0u; d < {end}u; d = d + {t.dc}u) {{")
        w.blocks[-1] += [*indent(body), "}"]

    def masked(self, body: Expr, nothing: str) -> list[list[str]]:
        """A value of each score, as vec4s along rows; ``nothing`` where none counts."""

        def at(g: int, line: dict[int, int], e: Expr) -> str:
            rows = self.own[g * WIDTH : (g + 1) * WIDTH]
            lanes = [self.axes.value(e, {**row, **line}) for row in rows]
            return f"vec4<f32>({', '.join(lanes)})"

        n = len(self.places)
        texts = [
            partial(at, g, line) for g in range(self.groups) for line in self.places
        ]
        inside = self.inside * self.groups
        names = self.masks.masked(body, f"vec4<f32>({nothing})", texts, inside)
        return [names[g * n : (g + 1) * n] for g in range(self.groups)]

    def grow(self, score: Expr) -> None:
        """The rows' running maxima, and all sums on the new scale."""
        o, w, t = self.o, self.w, self.t
        low = w.let("bitcast<f32>(sd_bits(0xff800000u))", 0, "inf")
        names = self.masked(score, low)
        best = []
        for own in names:
            m = own[0]
            for x in own[1:]:
                m = w.let(f"max({m}, {x})", 2, "m")
            best.append(m)
        found = self.across(best, "max({0}, {1})", 2)
        for g, x in enumerate(found):
            w.line(f"let new{g} = max(most{g}, {x});")
            w.line(f"let shrink{g} = {exponential(w, f'most{g} - new{g}', True)};")
            w.line(f"most{g} = new{g};")
        for i, s in enumerate(self.scalars):
            if s.power is not None:
                for g in range(self.groups):
                    w.line(f"s{i}g{g} = s{i}g{g} * shrink{g};")
        for i, s in enumerate(self.matrices):
            if s.power is None or s.column is None:
                continue
            for r in range(t.tm):
                shrink = f"shrink{r // WIDTH}.{XYZW[r % WIDTH]}"
                for c in range(t.columns(o.extent(s.column))):
                    w.line(f"a{i}r{r}c{c} = a{i}r{r}c{c} * {shrink};")
        self.powers(names)
        if self.agree:  # exp(y - m) of a masked score is 0 by itself
            self.kept |= {p: names for s in o.sums if (p := s.power) is not None}

    def powers(self, names: list[list[str]]) -> None:
        """exp(y - m), from the scores if all of them are of these."""
        w = self.w
        powers = [s.power for s in self.o.sums if s.power is not None]
        for g, own in enumerate(names):
            for j, (y, line) in enumerate(zip(own, self.places)):
                if self.agree:
                    own[j] = w.let(exponential(w, f"{y} - most{g}", True), 2, "p")
                for e in range(WIDTH):
                    copies = {**self.own[g * WIDTH + e], **line}
                    for p in powers:
                        power = self.axes.bring(p, copies)
                        if self.agree:
                            w.memo[2][power] = f"{own[j]}.{XYZW[e]}"
                        elif w.find(power) is None:
                            y = w.value(power.args[0].args[0])
                            text = exponential(w, f"{y} - most{g}.{XYZW[e]}")
                            w.memo[2][power] = w.let(text, 2, "p")

    def values(self, s: Sum) -> list[list[str]]:
        """What every four rows add to a sum at each line, its weight apart."""
        score = self.o.score
        value = sum_value(s, score) if score is not None and self.agree else s.value
        if value not in self.kept:
            self.kept[value] = self.masked(value, "0.0")
        return self.kept[value]

    def accumulate(self, i: int, s: Sum, values: list[list[str]]) -> None:
        """Values of the tile times their weights, some lines at a time."""
        o, w, t = self.o, self.w, self.t
        assert s.column is not None
        cw = t.columns(o.extent(s.column))
        width = cw * t.tx
        right = t.lc * t.rows // WIDTH
        held = t.lc // t.tx  # lines of a thread in a chunk
        count = steps_of(t.lc * width, t.size)
        names = [f"w{i}_{q}" for q in range(count)]
        w.blocks[-1] += [f"var {n}: vec4<f32>;" for n in names]
        chunks = t.tl // held
        self.weights(s, names, 0, width)
        for chunk in range(chunks):
            w.line(BARRIER)
            for q, n in enumerate(names):
                at = f"lane + {right + q * t.size}u"
                if (q + 1) * t.size > t.lc * width:
                    w.line(f"if (lane + {q * t.size}u < {t.lc * width}u) {{")
                    w.line(f"  sm[{at}] = {n};")
                    w.line("}")
                else:
                    w.line(f"sm[{at}] = {n};")
            for h in range(held):
                for g in range(self.groups):
                    slot = f"({h * t.tx}u + tx) * {t.rows // WIDTH}u"
                    value = values[g][chunk * held + h]
                    w.line(f"sm[{slot} + ty + {g * t.ty}u] = {value};")
            w.line(BARRIER)
            if chunk + 1 < chunks:
                self.weights(s, names, chunk + 1, width)
            w.open()
            for u in range(4):
                row = f"(k + {u}u) * {t.rows // WIDTH}u + ty"
                for g in range(self.groups):
                    w.line(f"let p{u}g{g} = sm[{row} + {g * t.ty}u];")
                for c in range(cw):
                    at = f"{right}u + (k + {u}u) * {width}u + tx + {c * t.tx}u"
                    w.line(f"let v{u}c{c} = sm[{at}];")
                for r in range(t.tm):
                    x = f"vec4<f32>(p{u}g{r // WIDTH}.{XYZW[r % WIDTH]})"
                    for c in range(cw):
                        a = f"a{i}r{r}c{c}"
                        w.line(f"{a} = fma({x}, v{u}c{c}, {a});")
            body = w.close()
            w.line(f"for (var k = 0u; k < {t.lc}u; k = k + 4u) {{")
            w.blocks[-1] += [*indent(body), "}"]

    def weights(self, s: Sum, names: Sequence[str], chunk: int, width: int) -> None:
        """A thread's share of the weights of a chunk, into registers."""
        o, w, t = self.o, self.w, self.t
        assert s.column is not None
        held = t.lc // t.tx
        last = steps_of(o.extent(s.column), WIDTH) - 1
        for q, n in enumerate(names):
            e = w.let(f"lane + {q * t.size}u", 2, "e")
            if (q + 1) * t.size > t.lc * width:
                e = w.let(f"min({e}, {t.lc * width - 1}u)", 2, "e")
            slot = w.let(f"{e} / {width}u", 2, "e")
            column = w.let(f"min({e} % {width}u, {last}u)", 2, "e")
            # Slot h · tx + x of a chunk holds the thread x's line of that number.
            number = w.let(f"{chunk * held}u + {slot} / {t.tx}u", 2, "e")
            group = f"({slot} % {t.tx}u + {number} / {WIDTH}u * {t.tx}u)"
            at = w.let(f"l + {group} * {WIDTH}u + {number} % {WIDTH}u", 2, "n")
            if not self.exact:
                at = w.let(f"min({at}, {self.line_end} - 1u)", 2, "n")
            copies = self.axes.at(o.line, at, 2)
            copies |= self.axes.at(s.column, column, 2, True)
            w.line(f"{n} = {self.axes.value(s.weight, copies, s.column)};")


class _Share:
    """What a thread brings of one factor of a product: blocks of 4 rows by a vec4."""

    def __init__(self, owner: _Tiled, p: Product, near: bool, stem: str, base: int):
        t, w, o = owner.t, owner.w, owner.o
        self.owner, self.base = owner, base
        self.factor, self.inner = (p.near if near else p.far), p.inner
        extent = t.rows if near else t.lines
        self.width = extent // WIDTH
        self.total = self.width * (t.dc // WIDTH)
        self.count = steps_of(self.total, t.size)
        self.names: list[str] = []
        self.blocks: list[tuple[str, str, str, list[dict[int, int]]]] = []
        for q in range(self.count):
            e = w.let(plus("lane", q * t.size), 2, "e")
            kept = e
            if (q + 1) * t.size > self.total:
                kept = w.let(f"min({e}, {self.total - 1}u)", 2, "e")
            group = w.let(f"{kept} % {self.width}u", 2, "e")
            inner = w.let(f"{kept} / {self.width}u", 2, "e")
            copies = []
            for k in range(WIDTH):
                at = f"{'top' if near else 'l'} + {group} * {WIDTH}u + {k}u"
                end = owner.row_end if near else owner.line_end
                name = w.let(f"min({at}, {end} - 1u)", 2, "n")
                copies.append(owner.axes.at(o.row if near else o.line, name, 2))
            self.blocks.append((e, group, inner, copies))
            self.names += [f"{stem}{q}_{k}" for k in range(WIDTH)]

    def fetch(self, chunk: str, depth: int) -> None:
        """Bring the share of a chunk into registers."""
        owner = self.owner
        w = owner.w
        names = iter(self.names)
        for _, _, inner, copies in self.blocks:
            at = w.let(f"{chunk} / {WIDTH}u + {inner}", depth, "d")
            place = owner.axes.at(self.inner, at, depth, True)
            for own in copies:
                v = owner.axes.value(self.factor, {**own, **place}, self.inner)
                v = owner.axes.within(v, self.inner, at, depth)
                w.line(f"{next(names)} = {v};", depth)

    def keep(self) -> list[str]:
        """Lines that store the share to workgroup memory, turned."""
        out: list[str] = []
        t = self.owner.t
        for q, (e, group, inner, _) in enumerate(self.blocks):
            names = self.names[q * WIDTH : q * WIDTH + WIDTH]
            lines = []
            for k in range(WIDTH):
                parts = ", ".join(f"{n}.{XYZW[k]}" for n in names)
                at = f"{self.base}u + ({inner} * {WIDTH}u + {k}u) * {self.width}u"
                lines.append(f"sm[{at} + {group}] = vec4<f32>({parts});")
            if (q + 1) * t.size > self.total:
                lines = [f"if ({e} < {self.total}u) {{", *indent(lines), "}"]
            out += lines
        return out
