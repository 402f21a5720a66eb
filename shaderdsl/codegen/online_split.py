"""A chain with few rows and long lines: lines shared out, then combined.

A token against a cache would be one workgroup's work in a pass over all lines. Here
each workgroup takes some rows and a *piece* of their lines, and leaves its maximum and
its sums; a second kernel brings those of a row on one scale and adds them, in order.
How long a piece is follows at run time from what the masks leave of the line: a cache
that is mostly empty costs what is in it, and a longer one compiles nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from .contract_registers import sharing_lanes
from .contract_tile import XYZW, plus
from .kernel_text import indent
from .online_combine import Combine
from .online_pieces import BARRIER, Pieces, Shares
from .online_plan import (
    LOWEST,
    Online,
    Product,
    Sum,
    exponential,
    is_one,
    plain_tensors,
    steps_of,
)
from .online_registers import with_subgroups
from .program import Kernel, Scratch
from .reduction import Tree
from .schedule import finish, fold, kernel_name
from .spelling import WIDTH
from .writer import Writer

#: Most rows of a workgroup (drivers on the CPU compile slowly), and workgroups that
#: keep a device busy.
_ROWS = {"software": 4, "gpu": 8}
_BUSY = {"software": 16, "gpu": 1024}


def choose_pieces(o: Online) -> Pieces:
    """Enough pieces for the device and for the budget of loops; none below a step."""
    target = o.target
    size = 64 if target.family == "software" else 128
    rows = min(o.extent(o.row), _ROWS.get(target.family, 8))
    p = Pieces(rows, size, 1, o)
    while p.bytes > target.limits.max_workgroup_storage and (rows > 1 or size > 32):
        rows, size = (rows // 2, size) if rows > 1 else (1, size // 2)
        p = Pieces(rows, size, 1, o)
    steps = steps_of(o.extent(o.line), size)
    inner = sum(
        steps_of(o.extent(q.inner), WIDTH) // unrolled(o, q) for q in o.products
    )
    loops = 1 + inner + sum(size // p.lanes_down(s) for s in p.matrices)
    needed = steps_of(steps * loops, target.loop_budget * 4 // 5)
    blocks = steps_of(o.extent(o.row), rows) * o.batches
    wanted = steps_of(_BUSY.get(target.family, 1024), blocks)
    return replace(p, count=max(1, needed, min(steps, wanted)))


def unrolled(o: Online, p: Product) -> int:
    """vec4s of the inner axis that one step of a product takes."""
    n = steps_of(o.extent(p.inner), WIDTH)
    return next(u for u in (4, 3, 2, 1) if n % u == 0)


def split_kernels(o: Online) -> list[Kernel]:
    """The pieces' kernel and the one that combines them."""
    pieces = choose_pieces(o)
    name = kernel_name(o.group)
    rows = o.batches * o.extent(o.row)
    scratch = Scratch(f"{name}_pieces", "f32", pieces.count * rows * pieces.words * 4)
    w = Writer(o.group.space, o.target)
    plain_tensors(o, w)
    lines = _Piece(o, w, pieces, scratch).lines()
    blocks = steps_of(o.extent(o.row), pieces.rows) * o.batches
    grid = fold(pieces.count * blocks, o.target)
    first = finish(o.group, w, o.layout, lines, name, "online", pieces.size, grid)
    if "subgroupBroadcast(" in first.wgsl:
        first = with_subgroups(first, o.target)
    w = Writer(o.group.space, o.target)
    plain_tensors(o, w)
    lines = Combine(o, w, pieces, scratch).lines()
    grid = fold(rows, o.target)
    stem = f"{name}_combine"
    second = finish(o.group, w, o.layout, lines, stem, "online", pieces.size, grid)
    why = "; ".join(x for x in (first.reason, "lines in pieces, then combined") if x)
    return [
        replace(first, members=(), writes=(), reason=why),
        replace(second, flops=0, reason="combines the pieces of each row, in order"),
    ]


class _Piece(Shares):
    """Blocks of the writer: 0 the piece, 1 some of its lines, 2 an inner loop."""

    def lines(self) -> list[str]:
        """The kernel's text."""
        o, w, p = self.o, self.w, self.p
        tiles = w.param(("tiles",), steps_of(o.extent(o.row), p.rows), stem="tiles")
        blocks = steps_of(o.extent(o.row), p.rows) * o.batches
        every = w.param(("all",), blocks * p.count, stem="groups")
        pieces = w.param(("pieces",), p.count, stem="pieces")
        w.line("let flat = group.y * groups.x + group.x;")
        w.line(f"if (flat >= {every}) {{ return; }}")
        w.line(f"let piece = flat % {pieces};")
        w.line(f"let block = flat / {pieces};")
        self.begin(w.let(f"block / {tiles}", 0, "batch"), f"block % {tiles}")
        w.line("let begin = first + piece * per;")
        w.line("if (begin >= stop) { return; }")
        w.line("let end = min(begin + per, stop);")
        self.numbers = [w.let(plus("top", i), 0, "row") for i in range(p.rows)]
        self.own = [
            self.axes.at(o.row, w.let(f"min({n}, {self.row_end} - 1u)", 0), 0)
            for n in self.numbers
        ]
        self.tree = Tree(w, p.size, p.size, "lane")
        w.shared.append(f"var<workgroup> sm: array<vec4<f32>, {p.memory}>;")
        self.declare()
        software = o.target.family == "software"
        self.sharing = sharing_lanes(o.target) if software else 0
        self.near = [self.held(q) for q in o.products] if self.sharing else []
        w.open()
        self.step()
        body = w.close()
        w.line(f"for (var l = begin; l < end; l = l + {p.size}u) {{")
        w.blocks[-1] += [*indent(body), "}"]
        self.leave()
        return w.blocks[0]

    def declare(self) -> None:
        """Running values: maxima and sums of this lane's lines, shares of columns."""
        o, w, p = self.o, self.w, self.p
        for i in range(p.rows):
            if o.maximum is not None:
                w.line(f"var most{i} = {LOWEST!r};")
            for k in range(len(p.scalars)):
                w.line(f"var s{k}r{i} = 0.0;")
            for k, s in enumerate(p.matrices):
                for c in range(p.steps(s)):
                    w.line(f"var a{k}r{i}c{c} = vec4<f32>(0.0);")

    def step(self) -> None:
        """A line for each lane: its products, the maxima, what it adds to the sums."""
        o, w, p = self.o, self.w, self.p
        w.line("let inside = l + lane < end;")
        line = self.axes.at(o.line, w.let("min(l + lane, end - 1u)", 1), 1)
        for k, q in enumerate(o.products):
            self.product(k, q, line)
        if o.score is not None:
            self.grow(line)
        for k, s in enumerate(p.scalars):
            for i, row in enumerate(self.own):
                v = self.term(s, i, {**row, **line})
                if not is_one(s.weight):
                    v = w.let(f"{v} * {self.axes.value(s.weight, line)}", 1, "p")
                w.line(f"s{k}r{i} = s{k}r{i} + {v};")
        for k, s in enumerate(p.matrices):
            self.accumulate(k, s, line)

    def product(self, k: int, q: Product, line: dict[int, int]) -> None:
        """A product of each row with this lane's line."""
        w = self.w
        names = [f"x{k}r{i}" for i in range(self.p.rows)]
        w.blocks[-1] += [f"var {n} = 0.0;" for n in names]
        if self.sharing:
            self.handed_around(k, q, line)
        else:
            self.loop(q, line, names)
        for n, row in zip(names, self.own):
            text = n
            if q.number == -1.0:
                text = w.let(f"-{n}", 1)
            elif q.number != 1.0:
                number = w.param(("number", k), q.number, "f32", "number")
                text = w.let(f"{n} * {number}", 1)
            self.axes.known(q.results, {**row, **line}, text)

    def held(self, q: Product) -> list[list[str]]:
        """A lane's share of each row's factor, for the lanes of its subgroup."""
        o, w, lanes = self.o, self.w, self.sharing
        count = steps_of(o.extent(q.inner), WIDTH)
        out: list[list[str]] = [[] for _ in self.own]
        for j in range(steps_of(count, lanes)):
            at = w.let(f"min({plus(f'sub % {lanes}u', j * lanes)}, {count - 1}u)", 0)
            inner = self.axes.at(q.inner, at, 0, True)
            for own, row in zip(out, self.own):
                near = self.axes.value(q.near, {**row, **inner}, q.inner)
                own.append(self.axes.within(near, q.inner, at, 0))
        return out

    def handed_around(self, k: int, q: Product, line: dict[int, int]) -> None:
        """A product where a load costs more than to hand a value around."""
        o, w, lanes = self.o, self.w, self.sharing
        for c in range(steps_of(o.extent(q.inner), WIDTH)):
            inner = self.axes.at(q.inner, f"{c}u", 1, True)
            far = self.axes.value(q.far, {**line, **inner}, q.inner)
            far = self.axes.within(far, q.inner, f"{c}u", 1)
            for i, own in enumerate(self.near[k]):
                near = f"subgroupBroadcast({own[c // lanes]}, {c % lanes}u)"
                w.line(f"x{k}r{i} = x{k}r{i} + dot({near}, {far});")

    def loop(self, q: Product, line: dict[int, int], names: Sequence[str]) -> None:
        """A product by a loop over its inner axis."""
        o, w = self.o, self.w
        count, by = steps_of(o.extent(q.inner), WIDTH), unrolled(o, q)
        w.open()
        for u in range(by):
            at = w.let(plus("d", u), 2, "d") if u else "d"
            inner = self.axes.at(q.inner, at, 2, True)
            far = self.axes.value(q.far, {**line, **inner}, q.inner)
            far = self.axes.within(far, q.inner, at, 2)
            for n, row in zip(names, self.own):
                near = self.axes.value(q.near, {**row, **inner}, q.inner)
                near = self.axes.within(near, q.inner, at, 2)
                w.line(f"{n} = {n} + dot({near}, {far});")
        body = w.close()
        w.line(f"for (var d = 0u; d < {count}u; d = d + {by}u) {{")
        w.blocks[-1] += [*indent(body), "}"]

    def grow(self, line: dict[int, int]) -> None:
        """The rows' running maxima, and all sums on the new scale."""
        o, w, p = self.o, self.w, self.p
        assert o.score is not None
        scores = []
        for row in self.own:
            x = self.axes.value(o.score, {**row, **line})
            scores.append(w.let(f"select({LOWEST!r}, {x}, inside)", 1))
        best = self.tree.reduce([("max", "f32", x) for x in scores], 1)
        for i, x in enumerate(best):
            new = w.let(f"max(most{i}, {x})", 1, "m")
            shrink = w.let(exponential(w, f"most{i} - {new}"), 1, "shrink")
            w.line(f"most{i} = {new};")
            for k, s in enumerate(p.scalars):
                if s.power is not None:
                    w.line(f"s{k}r{i} = s{k}r{i} * {shrink};")
            for k, s in enumerate(p.matrices):
                if s.power is not None:
                    for c in range(p.steps(s)):
                        w.line(f"a{k}r{i}c{c} = a{k}r{i}c{c} * {shrink};")

    def term(self, s: Sum, i: int, copies: dict[int, int]) -> str:
        """What a line contributes to a row, its weight apart; 0 beyond the end."""
        w = self.w
        if s.power is not None:
            power = self.axes.bring(s.power, copies)
            if w.find(power) is None:
                y = w.value(power.args[0].args[0])
                w.memo[1][power] = w.let(exponential(w, f"{y} - most{i}"), 1, "p")
        return w.let(f"select(0.0, {self.axes.value(s.value, copies)}, inside)", 1, "p")

    def accumulate(self, k: int, s: Sum, line: dict[int, int]) -> None:
        """Values of the lines times their weights: lanes along columns, and down."""
        o, w, p = self.o, self.w, self.p
        assert s.column is not None
        values = [self.term(s, i, {**row, **line}) for i, row in enumerate(self.own)]
        w.line(BARRIER)
        for g in range(p.groups):
            part = [*values[g * WIDTH : (g + 1) * WIDTH], "0.0", "0.0", "0.0"]
            at = plus("lane", g * p.size)
            w.line(f"sm[{at}] = vec4<f32>({', '.join(part[:WIDTH])});")
        w.line(BARRIER)
        down = p.lanes_down(s)
        # Loads of several lines are under way at a time, those beyond the end again of
        # the last one.
        by = min(4, p.size // down) if o.target.family == "gpu" else 1
        stop = w.let(f"min({p.size}u, end - l)", 1)
        w.open()
        for u in range(by):
            at = w.let(plus("k", u * down), 2, "k") if u else "k"
            own = w.let(f"min(l + {at}, end - 1u)" if u else f"l + {at}", 2)
            near = self.axes.at(o.line, own, 2)
            for g in range(p.groups):
                w.line(f"let p{g}u{u} = sm[{plus(at, g * p.size)}];")
            for c, column in enumerate(self.columns(s, 1)):
                copies = {**near, **self.axes.at(s.column, column, 1, True)}
                v = self.axes.value(s.weight, copies, s.column)
                if u:
                    v = w.let(f"select(vec4<f32>(0.0), {v}, {at} < {stop})", 2)
                for i in range(p.rows):
                    x = f"vec4<f32>(p{i // WIDTH}u{u}.{XYZW[i % WIDTH]})"
                    w.line(f"a{k}r{i}c{c} = fma({x}, {v}, a{k}r{i}c{c});")
        body = w.close()
        start = f"lane / {p.lanes_along(s)}u"
        w.line(f"for (var k = {start}; k < {stop}; k = k + {by * down}u) {{")
        w.blocks[-1] += [*indent(body), "}"]

    # -------------------------------------------------------------- the end

    def leave(self) -> None:
        """Store the piece's maxima and sums."""
        o, w, p = self.o, self.w, self.p
        sums = [
            ("sum", "f32", f"s{k}r{i}")
            for i in range(p.rows)
            for k in range(len(p.scalars))
        ]
        totals: Iterator[str] = iter(self.tree.reduce(sums, 0) if sums else ())
        for i, number in enumerate(self.numbers):
            words = [f"most{i}"] if o.maximum is not None else []
            words += [next(totals) for _ in p.scalars]
            words += ["0.0"] * (-len(words) % WIDTH)
            stores = []
            for at in range(0, len(words), WIDTH):
                value = f"vec4<f32>({', '.join(words[at : at + WIDTH])})"
                place = self.place("piece", number, at // WIDTH)
                stores.append(w.write(self.scratch, place, value, True))
            if stores:
                w.line(f"if (lane == 0u && {number} < {self.row_end}) {{")
                w.blocks[-1] += [*indent(stores), "}"]
        for k, s in enumerate(p.matrices):
            names = [
                [f"a{k}r{i}c{c}" for i in range(p.rows)] for c in range(p.steps(s))
            ]
            for c, rows in enumerate(names):
                for g in range(p.groups):
                    self.store(s, c, g, rows[g * WIDTH : (g + 1) * WIDTH])

    def store(self, s: Sum, step: int, group: int, names: Sequence[str]) -> None:
        """Add up the lanes of each column for some rows, and store the sums."""
        o, w, p = self.o, self.w, self.p
        assert s.column is not None
        along, down = p.lanes_along(s), p.lanes_down(s)
        w.line(BARRIER)
        for j, n in enumerate(names):
            w.line(f"sm[{plus('lane', j * p.size)}] = {n};")
        w.line(BARRIER)
        w.open()
        w.line(f"let at = e / {along}u * {p.size}u + e % {along}u;")
        w.line("var total = sm[at];")
        for y in range(1, down):
            w.line(f"total = total + sm[at + {y * along}u];")
        number = w.let(plus(f"top + e / {along}u", group * WIDTH), 1, "row")
        column = w.let(plus(f"e % {along}u", step * along), 1, "n")
        place = self.place("piece", number, p.offset(s), column)
        store = w.write(self.scratch, place, "total", True)
        width = steps_of(o.extent(s.column), WIDTH)
        w.line(f"if ({number} < {self.row_end} && {column} < {width}u) {{ {store} }}")
        body = w.close()
        count = len(names) * along
        w.line(f"for (var e = lane; e < {count}u; e = e + {p.size}u) {{")
        w.blocks[-1] += [*indent(body), "}"]
