"""A chain without workgroup memory: a thread keeps a whole row in registers.

The best form where loads cost most: each lane loads one line for all lanes of its
subgroup, and a line goes around by broadcast.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from ..ir import expr as E
from ..ir.expr import Expr
from .contract_registers import sharing_lanes
from .kernel_text import indent
from .member import Member
from .online_masks import Masks, scores_agree, sum_value
from .online_plan import (
    LOWEST,
    Axes,
    Online,
    Product,
    Sum,
    close_turns,
    column_of,
    exponential,
    is_one,
    plain_tensors,
    steps_of,
)
from .program import Kernel
from .schedule import BUILTINS, finish, fold, kernel_name
from .spelling import WIDTH
from .target import Target
from .writer import Writer

#: vec4s from which on a loop takes what would be long straight-line text: the driver
#: compiles a thousand statements in seconds. vec4s that a turn of such a loop reads.
_LONG, _AT_ONCE = 32, 8


@dataclass(frozen=True)
class Rows:
    """Lanes of a workgroup, a row each; ``step`` lines at a time; shared or not.

    Where it is ``rolled``, long rows are read, multiplied and stored in loops.
    """

    size: int
    step: int
    shared: bool
    rolled: bool = False


def choose_rows(o: Online) -> Rows:
    """As many lines at a time as a driver compiles in reasonable time."""
    lanes = sharing_lanes(o.target)
    if not lanes:
        return Rows(32, 2, False)
    # The driver hands a value around as quickly where the lane is a variable, if
    # subgroups have eight lanes.
    rolled = lanes == 8 and _iterations(o, lanes) <= o.target.loop_budget * 9 // 10
    return Rows(lanes, lanes, True, rolled)


def _iterations(o: Online, step: int) -> int:
    """Iterations of all loops of a thread, those over long rows included."""
    parts = [o.extent(p.inner) for p in o.products]
    parts += [o.extent(s.column) for s in o.sums if s.column is not None]
    counts = [steps_of(n, WIDTH) for n in parts if n >= _LONG * WIDTH]
    turns = sum(steps_of(n, _AT_ONCE) for n in counts)
    steps = o.extent(*o.outer) * steps_of(o.extent(o.line), step)
    once = o.extent(*o.outer) * (1 + turns) + sum(counts)
    return once + steps * (1 + turns + step * len(counts))


def registers(o: Online, rows: Rows) -> Kernel:
    """Print the kernel."""
    w = Writer(o.group.space, o.target)
    plain_tensors(o, w)
    lines = Registers(o, w, rows).lines()
    tiles = steps_of(o.extent(o.row), rows.size)
    kernel = finish(
        o.group,
        w,
        o.layout,
        lines,
        kernel_name(o.group),
        "online",
        rows.size,
        fold(tiles * o.batches, o.target),
    )
    return with_subgroups(kernel, o.target) if rows.shared else kernel


def with_subgroups(kernel: Kernel, target: Target) -> Kernel:
    """A kernel that knows its place in the subgroup as ``sub``."""
    builtins = f"{BUILTINS}, @builtin(subgroup_invocation_id) sub: u32"
    enable = "enable subgroups;\n" if target.enable_subgroups_directive else ""
    return replace(kernel, wgsl=enable + kernel.wgsl.replace(BUILTINS, builtins))


class Registers:
    """The text of one thread. Blocks of the writer: 0 a row, 1 an outer position, 2 a
    step.
    """

    def __init__(self, o: Online, w: Writer, rows: Rows):
        self.o, self.w, self.rows = o, w, rows
        self.axes = Axes(o, w)
        self.pieces: dict[int, list[int]] = {}
        self.agree = o.score is not None and scores_agree(o)
        self.exact = o.extent(o.line) % rows.step == 0

    def lines(self) -> list[str]:
        """The kernel's text."""
        o, w = self.o, self.w
        self.begin()
        near = [] if self.turning() else self.near()
        self.declare()
        w.open()
        if o.outer:
            self.axes.place({a: a for a in o.outer}, [[a] for a in o.outer], "turn", 1)
        if self.turning():
            near = self.near()
        first, stop = self.masks.bounds(1)
        self.masks.prove()
        n = self.rows.step
        start = f"{first} / {n}u * {n}u" if first != "0u" else first
        w.open()
        self.step(near)
        w.loop(f"for (var l = {start}; l < {stop}; l = l + {n}u)")
        close_turns(o, w)
        self.epilogue()
        return w.blocks[0]

    def turning(self) -> bool:
        """Whether the rows' factors differ from one outer position to the next."""
        mask = sum(1 << a for a in self.o.outer)
        return any(p.near.free & mask for p in self.o.products)

    def begin(self) -> None:
        """Which row this thread works on."""
        o, w, n = self.o, self.w, self.rows.size
        tiles = w.param(("tiles",), steps_of(o.extent(o.row), n), stem="tiles")
        all_ = w.param(
            ("all",), steps_of(o.extent(o.row), n) * o.batches, stem="groups"
        )
        w.line("let tile = group.y * groups.x + group.x;")
        w.line(f"if (tile >= {all_}) {{ return; }}")
        self.row_end = w.extent([o.row])
        self.line_end = w.extent([o.line])
        ends = (self.row_end, self.line_end)
        self.masks = Masks(o, self.axes, n, ends, self.rows.step, self.exact)
        self.axes.place(
            {a: a for q in o.batch for a in q}, o.batch, w.let(f"tile / {tiles}", 0), 0
        )
        # The longest rows first, so that none is left for the end.
        w.line(f"let top = ({tiles} - 1u - tile % {tiles}) * {n}u;")
        w.line("let row = top + lane;")
        w.line(f"let at = min(row, {self.row_end} - 1u);")
        self.own = self.axes.at(o.row, "at", 0)

    def chunks(self, axis: int) -> list[dict[int, int]]:
        """Copies of an axis, a vec4 each; axes of one extent share them.

        What is read along an inner axis and again along a column is then one value.
        """
        n = self.o.extent(axis)
        if n not in self.pieces:
            count = steps_of(n, WIDTH)
            found = [self.axes.at(axis, f"{k}u", 0, True) for k in range(count)]
            self.pieces[n] = [next(iter(c.values())) for c in found]
        return [{axis: q} for q in self.pieces[n]]

    def near(self) -> list[list[str]]:
        """The row's factor of each product, in registers."""
        return [self.factors(p, p.near, self.own) for p in self.o.products]

    def factors(self, p: Product, factor: Expr, at: dict[int, int]) -> list[str]:
        """A product's factor in registers, all along its inner axis."""
        self.fetch(factor, at, p.inner)
        depth = len(self.w.blocks) - 1
        return [self.factor(p, factor, k, at, depth) for k in self.pieces_of(p)]

    def fetch(self, e: Expr, at: dict[int, int], axis: int) -> None:
        """Read a value all along an axis, in a loop if that is long."""
        w, chunks = self.w, self.chunks(axis)
        count, depth = len(chunks), len(w.blocks) - 1
        keys = [self.axes.bring(e, {**at, **c}) for c in chunks]
        known = all(w.find(key) is not None for key in keys)
        if known or not self.rolls(count) or not E.loads(e):
            return
        names = [w.fresh("x") for _ in keys]
        for name in names:
            w.line(f"var {name}: vec4<f32>;")
        w.open()
        for j in range(_AT_ONCE):
            place = f"min(turn * {_AT_ONCE}u + {j}u, {count - 1}u)"
            copy = self.axes.at(axis, w.let(place, depth + 1), depth + 1, True)
            value = self.axes.value(e, {**at, **copy}, axis)
            for k, name in list(enumerate(names))[j::_AT_ONCE]:
                test = f"turn == {k // _AT_ONCE}u"
                w.line(f"{name} = select({name}, {value}, {test});")
        turns = steps_of(count, _AT_ONCE)
        w.loop(f"for (var turn = 0u; turn < {turns}u; turn = turn + 1u)")
        w.memo[depth] |= dict(zip(keys, names, strict=True))

    def pieces_of(self, p: Product) -> range:
        """The vec4s of a product's inner axis."""
        return range(steps_of(self.o.extent(p.inner), WIDTH))

    def factor(
        self, p: Product, factor: Expr, k: int, at: dict[int, int], depth: int
    ) -> str:
        """A vec4 of a product's factor."""
        chunk = self.chunks(p.inner)[k]
        text = self.axes.value(factor, {**at, **chunk}, p.inner)
        last = (k + 1) * WIDTH > self.o.extent(p.inner)
        return self.axes.within(text, p.inner, f"{k}u", depth) if last else text

    def declare(self) -> None:
        """Running values."""
        w = self.w
        if self.o.maximum is not None:
            w.line(f"var most = {LOWEST!r};")
        self.acc: list[list[str]] = []
        for i, s in enumerate(self.o.sums):
            if s.column is None:
                names, kind = [f"s{i}"], "f32"
            else:
                count = steps_of(self.o.extent(s.column), WIDTH)
                names, kind = [f"s{i}x{k}" for k in range(count)], "vec4<f32>"
            w.blocks[-1] += [f"var {n}: {kind};" for n in names]
            self.acc.append(names)

    # -------------------------------------------------------------- a step

    def shared_at(self) -> str:
        """The line that this lane loads."""
        return self.w.let(f"min(l + sub % {self.rows.size}u, {self.line_end} - 1u)", 2)

    def step(self, near: list[list[str]]) -> None:
        """Some lines: their products, then the maximum, then the sums."""
        o, w, rows = self.o, self.w, self.rows
        self.places: list[dict[int, int]] = []
        self.inside: list[str | None] = []
        for e in range(rows.step):
            at = f"l + {e}u"
            if not self.exact:
                self.inside.append(w.let(f"{at} < {self.line_end}", 2, "b"))
                at = f"min({at}, {self.line_end} - 1u)"
            else:
                self.inside.append(None)
            self.places.append(self.axes.at(o.line, w.let(at, 2), 2))
        self.masks.tile()
        mine = self.axes.at(o.line, self.shared_at(), 2) if rows.shared else {}
        self.multiply(near, mine)
        if o.score is not None:
            self.grow(o.score)
        weights = [self.weights(s, mine) for s in o.sums] if rows.shared else []
        rolled = [self.rolls(len(x)) for x in weights] or [False] * len(o.sums)
        for i, s in enumerate(o.sums):
            if rolled[i]:
                self.rolled_sum(self.acc[i], self.values(s), weights[i])
        for e, line in enumerate(self.places):
            for i, s in enumerate(o.sums):
                if not rolled[i]:
                    self.add(i, s, line, e, weights)

    def multiply(self, near: list[list[str]], mine: dict[int, int]) -> None:
        """Products of the row with the lines of a step."""
        o, w, rows = self.o, self.w, self.rows
        self.kept: dict[Expr, list[str]] = {}
        far: list[list[str]] = []
        if rows.shared:
            far = [self.factors(p, p.far, mine) for p in o.products]
            self.hand_around(mine, self.places)
        rolled = [
            self.rolled(x, y) if self.rolls(len(y)) else []
            for x, y in zip(near, far)  # no far ones where lines are not shared
        ]
        for e, line in enumerate(self.places):
            for i, p in enumerate(o.products):
                if rolled and rolled[i]:
                    total = rolled[i][e]
                elif rows.shared:
                    own = [f"subgroupBroadcast({x}, {e}u)" for x in far[i]]
                    total = self.dot(near[i], own, 2)
                else:
                    own = [self.factor(p, p.far, k, line, 2) for k in self.pieces_of(p)]
                    total = self.dot(near[i], own, 2)
                if abs(p.number) != 1.0:
                    number = w.param(("number", i), p.number, "f32", "number")
                    total = w.let(f"{total} * {number}", 2)
                elif p.number == -1.0:
                    total = w.let(f"-{total}", 2)
                self.axes.known(p.results, {**self.own, **line}, total)

    def rolls(self, count: int) -> bool:
        """Whether so many vec4s of a row or a line are taken in loops."""
        return self.rows.rolled and count >= _LONG

    def dot(self, near: list[str], far: list[str], depth: int) -> str:
        """A dot product, vec4 by vec4."""
        total = ""
        for a, b in zip(near, far, strict=True):
            term = f"dot({a}, {b})"
            total = self.w.let(f"{total} + {term}" if total else term, depth)
        return total

    def rolled(self, near: list[str], far: list[str]) -> list[str]:
        """Dot products of a row with the lines of a step, in a loop over these."""
        w = self.w
        totals = [w.fresh("t") for _ in self.places]
        for t in totals:
            w.line(f"var {t}: f32;")
        w.open()
        total = self.dot(near, [f"subgroupShuffle({x}, e)" for x in far], 3)
        for e, t in enumerate(totals):
            w.line(f"{t} = select({t}, {total}, e == {e}u);")
        w.loop(f"for (var e = 0u; e < {len(totals)}u; e = e + 1u)")
        return totals

    def rolled_sum(self, names: list[str], parts: list[str], own: list[str]) -> None:
        """What the lines of a step add to a sum, in a loop over these."""
        w = self.w
        w.open()
        part = parts[0]
        for e, other in enumerate(parts[1:], 1):
            part = f"select({part}, {other}, e == {e}u)"
        part = w.let(part, 3, "p")
        for n, x in zip(names, own, strict=True):
            w.line(f"{n} = {n} + {part} * subgroupShuffle({x}, e);")
        w.loop(f"for (var e = 0u; e < {len(parts)}u; e = e + 1u)")

    def masked(self, body: Expr, nothing: str) -> list[str]:
        """A value at each line, ``nothing`` where none counts."""

        def at(line: dict[int, int], e: Expr) -> str:
            return self.axes.value(e, {**self.own, **line})

        texts = [partial(at, line) for line in self.places]
        return self.masks.masked(body, nothing, texts, self.inside)

    def grow(self, score: Expr) -> None:
        """The row's running maximum, all sums on the new scale, and exp(y - m)."""
        w, sums = self.w, self.o.sums
        low = w.let("bitcast<f32>(sd_bits(0xff800000u))", 0, "inf")
        names = self.masked(score, low)
        most = "most"
        for x in names:
            most = w.let(f"max({most}, {x})", 2, "m")
        w.line(f"let shrink = {exponential(w, f'most - {most}')};")
        w.line(f"most = {most};")
        for s, own in zip(sums, self.acc):
            if s.power is not None:
                w.blocks[-1] += [f"{n} = {n} * shrink;" for n in own]
        powers = [s.power for s in sums if s.power is not None]
        for k, (y, line) in enumerate(zip(names, self.places)):
            if self.agree:
                names[k] = w.let(exponential(w, f"{y} - most"), 2, "p")
            for p in powers:
                power = self.axes.bring(p, {**self.own, **line})
                if self.agree:
                    w.memo[2][power] = names[k]
                elif w.find(power) is None:
                    y = w.value(power.args[0].args[0])
                    w.memo[2][power] = w.let(exponential(w, f"{y} - most"), 2, "p")
        if self.agree:  # exp(y - m) of a masked score is 0 by itself
            self.kept |= dict.fromkeys(powers, names)

    def values(self, s: Sum) -> list[str]:
        """What a sum takes of each line, its weight apart."""
        score = self.o.score
        value = sum_value(s, score) if score is not None and self.agree else s.value
        if value not in self.kept:
            self.kept[value] = self.masked(value, "0.0")
        return self.kept[value]

    def add(
        self, i: int, s: Sum, line: dict[int, int], e: int, weights: list[list[str]]
    ) -> None:
        """What one line adds to a sum."""
        w, names = self.w, self.acc[i]
        part = self.values(s)[e]
        if s.column is None:
            if not is_one(s.weight):
                part = w.let(f"{part} * {self.axes.value(s.weight, line)}", 2, "p")
            w.line(f"{names[0]} = {names[0]} + {part};")
            return
        own = (
            [f"subgroupBroadcast({x}, {e}u)" for x in weights[i]]
            if self.rows.shared
            else self.weights(s, line)
        )
        for n, x in zip(names, own):
            w.line(f"{n} = {n} + {part} * {x};")

    def hand_around(self, mine: dict[int, int], lines: list[dict[int, int]]) -> None:
        """Scalars of a line: each lane reads those of one, for all."""
        o, w = self.o, self.w
        roots = [s.value for s in o.sums] + ([o.score] if o.score is not None else [])
        mask, row = 1 << o.line, 1 << o.row
        results = {n for p in o.products for n in p.results}
        seen: set[Expr] = set()
        stack = list(roots)
        while stack:
            n = stack.pop()
            if n in seen or n in results or not n.free & mask:
                continue
            seen.add(n)
            reads = any(x.kind == "load" for x in E.topo(n))
            if n.free & row or not reads or n.dtype == "bool":
                if n.kind == "apply":
                    stack += n.args
                continue
            own = self.axes.value(n, mine)
            for e, line in enumerate(lines):
                new = self.axes.bring(n, line)
                if w.find(new) is None:
                    text = f"subgroupBroadcast({own}, {e}u)"
                    w.memo[2][new] = w.let(text, 2, "h")

    def weights(self, s: Sum, line: dict[int, int]) -> list[str]:
        """A line's weights."""
        if s.column is None:
            return []
        if self.rows.shared:
            self.fetch(s.weight, line, s.column)
        return [
            self.axes.value(s.weight, {**line, **c}, s.column)
            for c in self.chunks(s.column)
        ]

    # -------------------------------------------------------------- the end

    def epilogue(self) -> None:
        """Everything that is computed from the sums, and the stores."""
        o, w = self.o, self.w
        w.base = 0
        if o.maximum is not None:
            final = w.let(
                f"select(most, bitcast<f32>(sd_bits(0xff800000u)), most <= {LOWEST!r})",
                0,
                "m",
            )
            self.axes.known([o.group.own_load(o.maximum)], self.own, final)
        for s, names in zip(o.sums, self.acc):
            if s.column is None:
                self.axes.known([s.own], self.own, self.finished(s, names[0], self.own))
        w.open()
        columns = {m: column_of(o, m) for m in o.epilogue}
        for m, body in o.epilogue.items():
            if columns[m] is None:
                v = self.axes.value(body, self.own)
                form = self.axes.move(o.store(m), self.own)
                w.store(o.group.target(m)[0], form, v, body.dtype, False)
        for column in dict.fromkeys(columns.values()):
            if column is not None:
                members = [m for m in o.epilogue if columns[m] == column]
                self.columns_end(column, members)
        stores = w.close()
        w.line(f"if (row < {self.row_end}) {{")
        w.blocks[0] += [*indent(stores), "}"]

    def columns_end(self, column: int, members: list[Member]) -> None:
        """What is computed from the sums along a column, and the stores."""
        w = self.w
        sums = {
            s: names for s, names in zip(self.o.sums, self.acc) if s.column == column
        }
        chunks = self.chunks(column)
        if not self.rolls(len(chunks)):
            for k, c in enumerate(chunks):
                parts = {s: names[k] for s, names in sums.items()}
                self.chunk_end(column, members, c, parts)
            return
        w.open()
        parts = {}
        for s, names in sums.items():
            own = names[0]
            for k in range(1, len(names)):
                own = w.let(f"select({own}, {names[k]}, turn == {k}u)", 2, "r")
            parts[s] = own
        c = self.axes.at(column, "turn", 2, True)
        self.chunk_end(column, members, c, parts, 2)
        w.loop(f"for (var turn = 0u; turn < {len(chunks)}u; turn = turn + 1u)")

    def chunk_end(
        self,
        column: int,
        members: list[Member],
        chunk: dict[int, int],
        parts: dict[Sum, str],
        depth: int = 0,
    ) -> None:
        """The same of a vec4."""
        o, w, copies = self.o, self.w, {**self.own, **chunk}
        for s, name in parts.items():
            self.axes.known([s.own], copies, self.finished(s, name, copies, depth))
        bodies = {m: o.epilogue[m] for m in members}
        values = [self.axes.value(b, copies, column) for b in bodies.values()]
        for (m, body), v in zip(bodies.items(), values, strict=True):
            form = self.axes.move(o.store(m), copies)
            self.axes.along(column, chunk)
            w.store(o.group.target(m)[0], form, v, body.dtype, True)
            self.axes.along(None)

    def finished(
        self, s: Sum, name: str, copies: dict[int, int], depth: int = 0
    ) -> str:
        """A sum with what stands before it."""
        if is_one(s.outer):
            return name
        return self.w.let(f"{name} * {self.axes.value(s.outer, copies)}", depth, "r")
