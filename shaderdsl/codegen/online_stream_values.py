"""What a streamed chain computes of single scores: exp(y - m), sums' values, masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..ir import expr as E
from ..ir.expr import Expr
from .contract_tile import XYZW, plus
from .kernel_text import indent
from .member import Member
from .online_masks import sum_value, without
from .online_plan import Online, Sum, is_one
from .online_stream_parts import LOG2E, take_out
from .online_stream_shape import Stream
from .online_tile import Tile
from .spelling import WIDTH
from .writer import Writer


class Values(Tile):
    """A tile whose threads have four rows by some lines of each product.

    ``order`` are its phases, products and sums; ``shared`` and ``extra`` the divisors
    of a whole row or line that products and weights had.
    """

    t: Stream

    def __init__(self, o: Online, w: Writer, shape: Stream):
        super().__init__(o, w, shape)
        self.t = shape
        # Divisors that a factor's elements share are taken once for a whole result.
        self.factors: list[tuple[Expr, Expr]] = []
        self.shared: list[list[Expr]] = []
        for p in o.products:
            near, far = take_out(p.near, p.inner), take_out(p.far, p.inner)
            self.factors.append((near[0], far[0]))
            self.shared.append([*near[1], *far[1]])
        self.weights: list[Expr] = []
        self.extra: list[list[Expr]] = []
        for s in self.matrices:
            assert s.column is not None
            core, shared = take_out(s.weight, s.column)
            self.weights.append(core)
            self.extra.append(shared)
        self.order = self.phases()

    def phases(self) -> list[tuple[str, int]]:
        """Products and sums, each sum as soon as its products are there."""
        out: list[tuple[str, int]] = []
        done: set[int] = set()

        def need(e: Sequence[Expr]) -> list[int]:
            found = set(E.loads(*e))
            return [i for i, p in enumerate(self.o.products) if found & set(p.results)]

        if self.o.score is not None:
            done = set(range(len(self.o.products)))
            out += [("product", i) for i in sorted(done)]
        others = [*(s.value for s in self.scalars), *self.o.maps.values()]
        late = {i for e in others for i in need([e])}
        sums = sorted(
            range(len(self.matrices)), key=lambda i: len(need([self.matrices[i].value]))
        )
        for i in sums:
            wanted = set(need([self.matrices[i].value]))
            if i == sums[-1]:
                wanted |= late
            out += [("product", p) for p in sorted(wanted - done)]
            done |= wanted
            out.append(("sum", i))
        return out

    def names(self, i: int) -> list[list[str]]:
        """Registers of a product."""
        return [[f"x{i}g{g}j{j}" for j in range(self.t.tl)] for g in range(self.groups)]

    def inverse(self, divisor: Expr, g: int, line: dict[int, int]) -> str:
        """1 / divisor at a line, or at four rows."""
        one = E.apply("div", E.const(1.0), divisor)
        if not divisor.free >> self.o.row & 1:
            return self.axes.value(one, line)
        rows = self.own[g * WIDTH : g * WIDTH + WIDTH]
        lanes = [self.axes.value(one, r) for r in rows]
        return f"vec4<f32>({', '.join(lanes)})"

    # -------------------------------------------------------------- single scores

    def branch(self, print_: Callable[[bool], None]) -> None:
        """Write what asks the masks, and beside it what need not."""
        w = self.w
        if self.whole is None:
            print_(False)
            return
        sides = []
        for whole in (True, False):
            w.open()
            w.base = 3
            print_(whole)
            w.base = 0
            sides.append(w.close())
        w.line(f"if ({self.whole}) {{")
        w.blocks[-1] += [*indent(sides[0]), "} else {", *indent(sides[1]), "}"]

    def grow(self) -> None:
        """The rows' running maxima, all sums on the new scale, and exp(y - m)."""
        o, w, t = self.o, self.w, self.t
        assert o.score is not None
        # Scores take the place of the last product.
        names = self.names(len(o.products) - 1)
        low = f"vec4<f32>({w.let('bitcast<f32>(sd_bits(0xff800000u))', 0, 'inf')})"

        def scores(whole: bool) -> None:
            body = o.score
            assert body is not None
            if whole:
                body = without(body, self.masks.sure)
            for g in range(self.groups):
                for j, line in enumerate(self.places):
                    lanes = [
                        self.axes.value(body, {**self.own[g * WIDTH + e], **line})
                        for e in range(WIDTH)
                    ]
                    v = f"vec4<f32>({', '.join(lanes)})"
                    if not whole and self.inside[j] is not None:
                        v = f"select({low}, {v}, {self.inside[j]})"
                    w.line(f"{names[g][j]} = {v};")

        self.branch(scores)
        best = []
        for g in range(self.groups):
            m = names[g][0]
            for x in names[g][1:]:
                m = w.let(f"max({m}, {x})", 2, "m")
            best.append(m)
        found = self.across(best, "max({0}, {1})", 2)
        for g, x in enumerate(found):
            w.line(f"let new{g} = max(most{g}, {x});")
            w.line(f"let shrink{g} = exp2((most{g} - new{g}) * {LOG2E});")
            w.line(f"most{g} = new{g};")
            # A row without a key keeps the lowest number, which times log2(e) is none.
            w.line(f"let below{g} = max(new{g}, vec4<f32>(-2e38)) * -{LOG2E};")
            for n in names[g]:
                w.line(f"{n} = exp2(fma({n}, vec4<f32>({LOG2E}), below{g}));")
        for i in range(len(self.scalars)):
            for g in range(self.groups):
                w.line(f"s{i}g{g} = s{i}g{g} * shrink{g};")
        for i, s in enumerate(self.matrices):
            assert s.column is not None
            for r in range(t.tm):
                shrink = f"shrink{r // WIDTH}.{XYZW[r % WIDTH]}"
                for c in range(t.columns(o.extent(s.column))):
                    w.line(f"a{i}r{r}c{c} = a{i}r{r}c{c} * {shrink};")
        for s in o.sums:
            assert s.power is not None
            for g in range(self.groups):
                for j, line in enumerate(self.places):
                    for e in range(WIDTH):
                        copies = {**self.own[g * WIDTH + e], **line}
                        power = self.axes.bring(s.power, copies)
                        w.memo[2][power] = f"{names[g][j]}.{XYZW[e]}"
        for i, s in enumerate(self.scalars):
            for g in range(self.groups):
                for j, line in enumerate(self.places):
                    v = self.grown(s, g, j)
                    if not is_one(s.weight):
                        v = f"{v} * {self.axes.value(s.weight, line)}"
                    w.line(f"s{i}g{g} = s{i}g{g} + {v};")

    def grown(self, s: Sum, g: int, j: int) -> str:
        """What four rows add to a sum of exp(y - m) at a line, its weight apart."""
        assert self.o.score is not None and s.power is not None
        rest = sum_value(s, self.o.score)
        if rest is s.power:
            return self.names(len(self.o.products) - 1)[g][j]
        lanes = [
            self.axes.value(rest, {**self.own[g * WIDTH + e], **self.places[j]})
            for e in range(WIDTH)
        ]
        return self.w.let(f"vec4<f32>({', '.join(lanes)})", 2, "p")

    def values(self, i: int) -> list[list[str]]:
        """What every four rows add to a sum at each line, its weight apart."""
        w, s = self.w, self.matrices[i]
        if self.o.maximum is not None:
            out = [
                [self.grown(s, g, j) for j in range(self.t.tl)]
                for g in range(self.groups)
            ]
        else:
            out = [
                [f"v{i}g{g}j{j}" for j in range(self.t.tl)] for g in range(self.groups)
            ]
            w.blocks[-1] += [f"var {n}: vec4<f32>;" for line in out for n in line]
            scalars = self.scalars if i == self.order[-1][1] else []

            maps = self.o.maps if i == self.order[-1][1] else {}

            def each(whole: bool) -> None:
                self.single(s, out, whole)
                for m, body in maps.items():
                    self.store_map(m, body, whole)
                for k, x in enumerate(scalars):
                    names = [
                        [f"u{k}g{g}j{j}" for j in range(self.t.tl)]
                        for g in range(self.groups)
                    ]
                    w.blocks[-1] += [f"var {n}: vec4<f32>;" for y in names for n in y]
                    self.single(x, names, whole)
                    for g, line in enumerate(names):
                        for j, n in enumerate(line):
                            v = n
                            if not is_one(x.weight):
                                weight = self.axes.value(x.weight, self.places[j])
                                v = f"{n} * {weight}"
                            w.line(f"s{k}g{g} = s{k}g{g} + {v};")

            self.branch(each)
        for divisor in self.extra[i]:
            for j, line in enumerate(self.places):
                r = self.inverse(divisor, 0, line)
                for row in out:
                    row[j] = w.let(f"{row[j]} * {r}", 2, "p")
        return out

    def store_map(self, m: Member, body: Expr, whole: bool) -> None:
        """Store a value of each score, four neighbouring rows at a time."""
        w, o, t = self.w, self.o, self.t
        tensor = o.group.target(m)[0]
        if whole:
            body = without(body, self.masks.sure)
        ends = o.extent(o.row) % t.rows != 0
        depth = len(w.blocks) - 1
        for g in range(self.groups):
            at = w.let(plus("top / 4u + ty", g * t.ty), depth, "r")
            row = self.axes.at(o.row, at, depth, True)
            for j, line in enumerate(self.places):
                lanes = [
                    self.axes.value(body, {**self.own[g * WIDTH + e], **line})
                    for e in range(WIDTH)
                ]
                v = w.let(f"vec4<f32>({', '.join(lanes)})", depth, "p")
                w.vector = row[o.row]
                form = self.axes.move(o.store(m), {**row, **line})
                w.open()
                w.store(tensor, form, v, "f32", True)
                stores = w.close()
                w.vector = None
                asked = [f"{at} < {self.row_end} / 4u"] if ends else []
                if not whole and self.inside[j] is not None:
                    asked.append(str(self.inside[j]))
                if asked:
                    stores = [f"if ({' && '.join(asked)}) {{", *indent(stores), "}"]
                w.blocks[-1] += stores

    def single(self, s: Sum, names: list[list[str]], whole: bool) -> None:
        """Values of a sum without a maximum, into registers."""
        value = without(s.value, self.masks.sure) if whole else s.value
        for g in range(self.groups):
            for j, line in enumerate(self.places):
                lanes = [
                    self.axes.value(value, {**self.own[g * WIDTH + e], **line})
                    for e in range(WIDTH)
                ]
                v = f"vec4<f32>({', '.join(lanes)})"
                if not whole and self.inside[j] is not None:
                    v = f"select(vec4<f32>(0.0), {v}, {self.inside[j]})"
                self.w.line(f"{names[g][j]} = {v};")
