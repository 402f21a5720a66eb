"""The second kernel of a chain in pieces: one scale, sums in order, what follows."""

from __future__ import annotations

from .contract_tile import XYZW, plus
from .kernel_text import indent
from .online_pieces import BARRIER, Shares
from .online_plan import LOWEST, Sum, column_of, exponential, is_one
from .reduction import Tree
from .spelling import WIDTH


class Combine(Shares):
    """A workgroup a row. Blocks of the writer: 0 the row, 1 a piece, or the stores."""

    def lines(self) -> list[str]:
        """The kernel's text."""
        o, w, p = self.o, self.w, self.p
        self.row_end = w.extent([o.row])
        every = w.param(("rows",), o.batches * o.extent(o.row), stem="rows")
        w.line("let flat = group.y * groups.x + group.x;")
        w.line(f"if (flat >= {every}) {{ return; }}")
        w.line(f"let row = flat % {self.row_end};")
        self.begin(w.let(f"flat / {self.row_end}", 0, "batch"), f"row / {p.rows}u")
        w.line("let used = (span + per - 1u) / per;")
        self.own = self.axes.at(o.row, "row", 0)
        self.tree = Tree(w, p.size, p.size, "lane")
        self.numbers()
        w.shared.append(f"var<workgroup> sm: array<vec4<f32>, {p.size}>;")
        totals = [self.matrix(k, s) for k, s in enumerate(p.matrices)]
        self.epilogue(totals)
        return w.blocks[0]

    def part(self, word: int) -> str:
        """A number of the piece ``q``, in an inner block."""
        w, key = self.w, ("part", word // WIDTH)
        if key not in w.memo[1]:
            at = self.place("q", "row", word // WIDTH)
            w.memo[1][key] = w.let(w.read(self.scratch, at, True), 1, "h")
        return f"{w.memo[1][key]}.{XYZW[word % WIDTH]}"

    def numbers(self) -> None:
        """The row's maximum and its plain sums."""
        o, w, p = self.o, self.w, self.p
        lane = f"for (var q = lane; q < used; q = q + {p.size}u) {{"
        if o.maximum is not None:
            w.line(f"var best = {LOWEST!r};")
            w.open()
            w.line(f"best = max(best, {self.part(0)});")
            body = w.close()
            w.blocks[0] += [lane, *indent(body), "}"]
            (self.most,) = self.tree.reduce([("max", "f32", "best")], 0)
            low = w.let("bitcast<f32>(sd_bits(0xff800000u))", 0, "inf")
            final = w.let(f"select({self.most}, {low}, {self.most} <= {LOWEST!r})", 0)
            self.axes.known([o.group.own_load(o.maximum)], self.own, final)
        if not p.scalars:
            return
        names = [f"s{k}" for k in range(len(p.scalars))]
        w.blocks[0] += [f"var {n} = 0.0;" for n in names]
        w.open()
        for k, (n, s) in enumerate(zip(names, p.scalars)):
            word = self.part(k + (o.maximum is not None))
            w.line(f"{n} = {n} + {word}{self.scale(s)};")
        body = w.close()
        w.blocks[0] += [lane, *indent(body), "}"]
        found = self.tree.reduce([("sum", "f32", n) for n in names], 0)
        for s, n in zip(p.scalars, found):
            self.axes.known([s.own], self.own, self.finished(s, n))

    def scale(self, s: Sum) -> str:
        """What brings the piece ``q`` on the row's scale."""
        w = self.w
        if s.power is None:
            return ""
        key = ("scale",)
        if key not in w.memo[1]:
            text = exponential(w, f"{self.part(0)} - {self.most}")
            w.memo[1][key] = w.let(text, 1, "scale")
        return f" * {w.memo[1][key]}"

    def matrix(self, k: int, s: Sum) -> list[str]:
        """A weighted sum: the vec4s that this lane shows."""
        w, p = self.w, self.p
        along, down = p.lanes_along(s), p.lanes_down(s)
        columns = self.columns(s, 0)
        w.blocks[0] += [f"var a{k}c{c} = vec4<f32>(0.0);" for c in range(len(columns))]
        w.open()
        for c, n in enumerate(columns):
            at = self.place("q", "row", p.offset(s), n)
            part = w.read(self.scratch, at, True)
            w.line(f"a{k}c{c} = a{k}c{c} + {part}{self.scale(s)};")
        body = w.close()
        w.line(f"for (var q = lane / {along}u; q < used; q = q + {down}u) {{")
        w.blocks[0] += [*indent(body), "}"]
        totals = []
        for c in range(len(columns)):
            w.blocks[0] += [BARRIER, f"sm[lane] = a{k}c{c};", BARRIER]
            w.line(f"var t{k}c{c} = sm[lane % {along}u];")
            for y in range(1, down):
                w.line(f"t{k}c{c} = t{k}c{c} + sm[lane % {along}u + {y * along}u];")
            totals.append(self.finished(s, f"t{k}c{c}"))
        return totals

    def finished(self, s: Sum, name: str) -> str:
        """A sum with what stands before it."""
        if is_one(s.outer):
            return name
        return self.w.let(f"{name} * {self.axes.value(s.outer, self.own)}", 0, "r")

    def epilogue(self, totals: list[list[str]]) -> None:
        """Everything that is computed from the sums, and the stores."""
        o, w, p = self.o, self.w, self.p
        for m, body in o.epilogue.items():
            tensor, column = o.group.target(m)[0], column_of(o, m)
            if column is None:
                v = self.axes.value(body, self.own)
                w.open()
                form = self.axes.move(o.store(m), self.own)
                w.store(tensor, form, v, body.dtype, False)
                stores = w.close()
                w.blocks[0] += ["if (lane == 0u) {", *indent(stores), "}"]
                continue
            first = next(s for s in p.matrices if s.column == column)
            along, width = p.lanes_along(first), p.width(first)
            for c, n in enumerate(self.columns(first, 0)):
                copies = {**self.own, **self.axes.at(column, n, 0, True)}
                for s, found in zip(p.matrices, totals):
                    if s.column == column:
                        self.axes.known([s.own], copies, found[c])
                v = self.axes.value(body, copies, column)
                form = self.axes.move(o.store(m), copies)
                self.axes.along(column, copies)
                w.open()
                w.store(tensor, form, v, body.dtype, True)
                stores = w.close()
                self.axes.along(None)
                # The lanes of the first row of each block of columns store.
                condition = f"lane < {along}u"
                if (c + 1) * along > width:
                    condition += f" && {plus('lane', c * along)} < {width}u"
                w.blocks[0] += [f"if ({condition}) {{", *indent(stores), "}"]
