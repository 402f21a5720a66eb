"""Row: reductions along rows in one or more phases, then maps of the row; column sums
of it on the way.

A workgroup has ``width`` lanes a row and as many rows as fit. Each phase walks the row
once. Rows that fit into registers are unrolled: what one phase loads or computes the
next still has, because a common subexpression keeps its name. Longer rows loop and read
again. Column sums (the gradient of a norm's gain) stay in the lanes' registers while a
workgroup walks its rows; their partial results are finished by a second kernel in a
fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..ir import expr as E
from .address import contiguous
from .choice import pick
from .column import column_kernels, finish_kernels
from .group import Group
from .kernel_text import indent
from .member import Member
from .parts import FLAT, Parts, together
from .program import Kernel, Scratch
from .reduction import NUMBERS_MAX, Tree, combine, horizontal, identity
from .row_online import (
    ONLINE,
    WRITTEN,
    Online,
    find_pairs,
    follows,
    lowered_plainly,
    told_by_sum,
)
from .row_shared import shared_rows
from .row_walk import HELD, RESERVED, SINGLE, Kept, Walks, inside, kept
from .schedule import (
    Layout,
    decode,
    finish,
    fold,
    kernel_bodies,
    kernel_name,
    lay_out,
    make_writer,
    vector_axis,
    visible,
)
from .spelling import WIDTH, wgsl_type
from .target import Target

#: Elements of a lane, unrolled, that are few.
FEW = 4


@dataclass(frozen=True)
class RowSchedule:
    """How a row kernel runs.

    Args:
        width: lanes a row, a power of two.
        rows: rows a workgroup handles side by side.
        chunks: elements (or vec4s) a lane holds when the row is unrolled; 0 loops.
        groups: workgroups, when each walks several rows in turn; 0 gives each its own
            rows.
    """

    width: int
    rows: int
    chunks: int
    groups: int = 0


def choose(
    rows: int, n: int, columns: bool, phases: int, target: Target, values: int = WIDTH
) -> RowSchedule:
    """The default schedule for rows of ``n`` positions of so many values each."""
    most = target.limits.max_invocations
    if target.family == "software":
        # Loads cost most and barriers little: a lane takes several elements and keeps
        # them.
        width = 1
        # Beside sums of columns a lane's elements make twice the text to compile.
        most_held = 4 if columns else 8
        while width < 64 and n > width * most_held:
            width *= 2
        chunks = _power(-(-n // width)) if n <= width * 8 else 0
        size = max(1, 64 // width) if not columns else 1
        groups = min(rows, 32) if columns else 0
        if chunks == 0:
            width = min(64, most)
            size = 1
        return _enough_groups(
            RowSchedule(width, size, chunks, groups), rows, n, phases, target
        )
    # Two vec4s a lane fill the memory's pipe. With more phases, 1,024 lanes wait too
    # long for each other, and lanes that have nothing are too many.
    per = 2
    if phases > 2 and not columns:
        most = most if n > 2048 else min(most, 512)
        per = 2 if n == _power(n) else 4
    width = min(4, _power(n))
    while width < most and n > width * per:
        width *= 2
    chunks = _chunks(-(-n // width)) if n <= width * 8 else 0
    if not chunks and not columns:
        width = walking(n * values, values, target)
    size = max(1, 128 // width) if rows > 1 else 1
    groups = min(-(-rows // size), 256) if columns else 0
    return _enough_groups(
        RowSchedule(width, size, chunks, groups), rows, n, phases, target
    )


def _enough_groups(
    s: RowSchedule, rows: int, n: int, phases: int, target: Target
) -> RowSchedule:
    """The schedule with workgroups enough for their turns to be within the budget."""
    if not s.groups:
        return s
    turns = max(1, target.loop_budget // (2 * _spent(s, 1, n, phases)))
    return replace(s, groups=max(s.groups, -(-rows // (turns * s.rows))))


def _spent(s: RowSchedule, turns: int, n: int, phases: int) -> int:
    """Loop iterations of an invocation."""
    steps = 0 if s.chunks else -(-n // s.width)
    # A turn's own iteration, and for each phase its steps and one of the tree.
    return turns * (1 + phases * (steps + 1))


def candidates(
    rows: int, n: int, columns: bool, phases: int, target: Target, values: int = WIDTH
) -> Iterator[RowSchedule]:
    """Schedules worth measuring: few to many elements a lane, and how rows share
    workgroups.
    """
    for chunks in (2, 1, 4, 8, 16, 0):
        widths = [1 << q for q in range(11)]
        if chunks:
            widths = [w for w in widths if w * chunks == _power(n)]
        else:
            widths = [w for w in widths if w >= 32 and w * 16 <= n]
        for width in widths:
            sizes = dict.fromkeys(max(1, size // width) for size in (128, 64, 256))
            for size in sizes if rows > 1 else (1,):
                every = (256, 128, 512, 1024, 32) if columns else (0,)
                for groups in every:
                    yield RowSchedule(
                        width, size, chunks, min(groups, -(-rows // size))
                    )


def fits(
    s: RowSchedule,
    rows: int,
    n: int,
    columns: bool,
    phases: int,
    target: Target,
    values: int = WIDTH,
) -> bool:
    """Whether a schedule covers the rows within the target's limits."""
    limits = target.limits
    most = min(limits.max_invocations, limits.max_workgroup_size_x)
    if min(s.width, s.rows, s.chunks + 1, s.groups + 1) < 1 or s.width != _power(
        s.width
    ):
        return False
    if s.width * s.rows > most or (s.chunks and s.width * s.chunks < n):
        return False
    if bool(s.groups) != columns or s.groups > limits.max_workgroups or s.chunks > 32:
        return False
    turns = -(-rows // (s.groups * s.rows)) if s.groups else 1
    return _spent(s, turns, n, phases) <= target.loop_budget // 2


def walking(elements: int, values: int, target: Target) -> int:
    """Lanes that walk a long row: 512, two workgroups of which fit on a processor, as
    long as they hold it, with 8 values of each lane in workgroup memory if need be.
    """
    lanes = 512 if elements <= 512 * (HELD + 8 if values > 1 else SINGLE) else 1024
    return min(lanes, target.limits.max_invocations)


def _chunks(needed: int) -> int:
    """Elements of a lane: few classes of them while they are few, else no more than are
    needed.
    """
    return _power(needed) if needed <= FEW else needed


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def row_kernels(g: Group, target: Target) -> list[Kernel]:
    """Print a group of row phases, maps and column sums."""
    if all(m.role == "column" for m in g.members):
        return column_kernels(g, target)
    shared = shared_rows(g, target)
    if shared is not None:
        return [shared]
    return RowText(g, target).kernels()


def row_shape(g: Group, target: Target) -> tuple[int, int, bool, int, Target, int]:
    """What a schedule is chosen by: rows, positions of a row, whether there are column
    sums, phases, the target, values of a position.
    """
    return RowText(g, target, RowSchedule(1, 1, 0)).shape


def row_sibling_kernels(group: Group, target: Target) -> list[Kernel]:
    """Print a group that stands for several groups of rows of one length."""
    assert group.stands_for
    shapes = [row_shape(g, target) for g in group.stands_for]
    schedule = pick(
        target,
        "row",
        choose(*shapes[0]),
        lambda: candidates(*shapes[0]),
        lambda s: all(fits(s, *shape) for shape in shapes),
    )
    texts = [RowText(g, target, schedule) for g in group.stands_for]
    w = Parts([], target)
    w.bind_as([t.w for t in texts])
    lines = [f"let every = {FLAT};"]
    total = 0
    for number, t in enumerate(texts):
        w.begin(number, t.g)
        w.vector, w.addresses = t.vector, t.w.addresses
        t.w = w
        text = t.lines(w.first(total))
        total += t.workgroups
        lines += w.branch(total, text)
    lines.append("}")
    grid = fold(total, target)
    layout = together([t.layout for t in texts])
    name = kernel_name(group)
    return [finish(group, w, layout, lines, name, "row", texts[0].threads, grid)]


class RowText:
    """The text of a workgroup that computes some rows of a group.

    Args:
        schedule: how, if that is not to be picked for this group alone.
    """

    def __init__(self, g: Group, target: Target, schedule: RowSchedule | None = None):
        self.g, self.target = g, target
        self.bodies = kernel_bodies(g)
        rows = range(len(g.rows))
        lanes = range(len(g.rows), len(g.space))
        self.layout: Layout = lay_out(g, self.bodies, [rows, lanes])
        self.vector = vector_axis(self.layout, self.layout.loops[1])
        self.pairs: dict[Member, list[Member]] = {}
        self.row_count = math.prod(g.rows)
        self.n = math.prod(g.lanes) // (WIDTH if self.vector is not None else 1)
        self.columns = [m for m in g.members if m.role == "column"]
        self.reductions = [m for m in g.members if m.role not in ("column", "map")]
        self.maps = [m for m in g.members if m.role == "map" and m in g.stored]
        self.levels = self._levels()
        self.pairs = find_pairs(self.reductions, self.bodies, self.levels)
        self.shape = (
            self.row_count,
            self.n,
            bool(self.columns),
            1 + max(self.levels.values(), default=0),
            target,
            WIDTH if self.vector is not None else 1,
        )
        default = choose(*self.shape)
        told = self._told() if target.family != "software" else {}
        if self.pairs and target.family != "software":
            default = self._in_one_walk(default)
        self.schedule = schedule or pick(
            target,
            "row",
            default,
            lambda: candidates(*self.shape),
            lambda s: fits(s, *self.shape),
        )
        self.walks: Walks | None = None
        self.told: dict[Member, Member] = {}  # the sum that tells of NaN → maximum
        if self.schedule.chunks:
            self.told = told
            self.pairs = {}  # the row is in registers
        self.levels = self._levels()
        self.partials: dict[Member, Scratch] = {}
        self.w = make_writer(g, self.layout, target, self.vector)
        for m in g.stored:
            if self.vector is not None and not contiguous(
                visible(self.layout, self.layout.stores[m]), self.vector
            ):
                self.w.plain.add(g.target(m)[0])

    def _in_one_walk(self, default: RowSchedule) -> RowSchedule:
        """How a row runs whose maximum and sums go along with each other."""
        values = WIDTH if self.vector is not None else 1
        if self._walked_again():
            width = walking(self.n * values, values, self.target)
            longest = WRITTEN // values
        else:
            width, longest = 512 if values > 1 else 1024, ONLINE
            width = min(width, self.target.limits.max_invocations)
        if self.n <= longest:
            return default
        return replace(default, width=width, rows=1, chunks=0)

    def _walked_again(self) -> bool:
        """Whether something wants the row after its first walk."""
        later = any(level > 1 for level in self._levels().values())
        return later or any(map(self._wide, self.maps))

    def _levels(self) -> dict[Member, int]:
        """The phase of each reduction: one after the last that it reads, or that of
        the maximum which it goes along with.
        """
        by_stage = {m.stage: m for m in self.reductions}
        most = {s: m for m, sums in self.pairs.items() for s in sums}
        level: dict[Member, int] = {}
        for m in self.reductions:
            if m in most:
                level[m] = level[most[m]]
                continue
            inner = [
                level[by_stage[n.data]]
                for n in E.loads(self.bodies[m])
                if n.data in by_stage
            ]
            level[m] = 1 + max(inner, default=0)
        return level

    def _told(self) -> dict[Member, Member]:
        """Maxima that need not ask each element for NaN: a sum of exponentials below it
        is NaN then, and so is all that reads the maximum after it.
        """
        found = {}
        for m, sums in self.pairs.items():
            s = told_by_sum(m, sums, self.bodies)
            if s is None:
                continue
            if m in self.g.stored and lowered_plainly(self.bodies[s]):
                continue  # such a sum is NaN below an infinite maximum, too
            most, total = self.g.own_load(m), self.g.own_load(s)
            readers = [
                x
                for x in self.g.members
                if x is not m and most in E.loads(self.bodies[x])
            ]
            before = self.levels[s]
            early = [x for x in readers if self.levels.get(x, before + 1) <= before]
            if early == [s] and all(
                follows(self.bodies[x], total) for x in readers if x is not s
            ):
                found[s] = m
        return found

    # -------------------------------------------------------------- the kernel

    def kernels(self) -> list[Kernel]:
        """The row kernel, and a second stage for each column sum."""
        s, w = self.schedule, self.w
        lines = self.lines("group.x" if s.groups else FLAT)
        name = kernel_name(self.g)
        grid = (s.groups, 1, 1) if s.groups else fold(self.workgroups, self.target)
        out = [finish(self.g, w, self.layout, lines, name, "row", self.threads, grid)]
        if self.columns:
            out += finish_kernels(self.partials, s.groups * s.rows, self.target)
        return out

    @property
    def threads(self) -> int:
        """Invocations of a workgroup."""
        return self.schedule.width * self.schedule.rows

    @property
    def workgroups(self) -> int:
        """How many there are, where none walks several rows in turn."""
        return -(-self.row_count // self.schedule.rows)

    def lines(self, flat: str) -> list[str]:
        """The text of the workgroup of this number."""
        s, w = self.schedule, self.w
        threads = self.threads
        self.position = "lane" if s.rows == 1 else "l"
        if s.rows > 1:
            w.line(f"let l = lane % {s.width}u;")
        # Measured: while sums of columns fill the registers, the tree is faster.
        self.tree = Tree(w, threads, s.width, self.position, not self.columns)
        turns = -(-self.row_count // (s.groups * s.rows)) if s.groups else 1
        w.line(
            f"let first = ({flat})"
            + (f" * {s.rows}u + lane / {s.width}u;" if s.rows > 1 else ";")
        )
        self.names: dict[int, dict[int, str]] = {}
        self.saved: dict[int, dict[Any, str]] = {}
        for m in self.columns:
            self._open_column(m)
        w.invert_sizes(*self.bodies.values())
        w.open()
        w.base = 1
        # With a workgroup for each row there is no row too many; else the last ones
        # repeat the last row unseen.
        exact = (
            s.rows == 1
            and not s.groups
            and self.row_count <= self.target.limits.max_workgroups
        )
        self.live = None if exact else "live"
        at = "first" if exact else "at"
        self._phases(at)
        inner = w.close()
        lines = list(w.blocks[0])
        rows = "" if exact else w.param(("rows",), self.row_count, stem="rows")
        if exact:
            lines += inner
        elif s.groups:
            step = w.param(("step",), s.groups * s.rows, stem="step")
            count = w.param(("turns",), turns, stem="turns")
            lines += [
                f"for (var turn = 0u; turn < {count}; turn++) {{",
                f"  let row = first + turn * {step};",
                f"  let live = row < {rows};",
                f"  let at = min(row, {rows} - 1u);",
                *indent(inner),
                *(["  workgroupBarrier();"] if self.tree.dirty else []),
                "}",
            ]
        else:
            lines += [
                f"let live = first < {rows};",
                f"let at = min(first, {rows} - 1u);",
                *inner,
            ]
        w.blocks[0] = lines
        for m in self.columns:
            self._close_column(m)
        return w.blocks[0]

    def _phases(self, at: str) -> None:
        w = self.w
        decode(w, at, self.layout.loops[0], 1)
        if self.target.family != "software":
            self._numbers_first()
        last = max(self.levels.values(), default=0)
        for phase in range(1, last + 2):
            reds = [m for m in self.reductions if self.levels[m] == phase]
            tail = phase == last + 1
            wide = [m for m in self.maps if self._wide(m)] if tail else []
            narrow = [m for m in self.maps if m not in wide] if tail else []
            read = {n.data for n in self.layout.addresses}
            values = []
            if any(self.g.target(m)[0] in read for m in wide):
                # The row is overwritten once all have read what they want of it.
                values = [w.value(self.bodies[m]) for m in narrow]
                w.line("storageBarrier();", 1)
            if reds or wide or (tail and self.columns):
                self._walk(reds, wide, self.columns if tail else [])
            values = values or [w.value(self.bodies[m]) for m in narrow]
            for m, value in zip(narrow, values, strict=True):
                self._store_narrow(m, value)

    def _numbers_first(self) -> None:
        """Compute what a whole row shares from memory that its first walk does not read
        (the inverse root of its variance, its label) before that walk: after it, every
        lane would wait. Drivers put a load where its value is used, so asking early is
        not enough. Of kernels that walk row after row only those do so whose walk waits
        for a number of its row anyway: else each row would begin by waiting.
        """
        computed = {m.stage for m in self.g.members}
        lanes = sum(1 << a for a in range(len(self.g.rows), len(self.g.space)))
        first = [self.bodies[m] for m in self.reductions if self.levels[m] == 1]
        soon = set(E.loads(*first))
        if self.columns and all(n.free & lanes for n in soon):
            return
        for m in self.g.members:
            for n in E.values(self.bodies[m]):
                loads = E.loads(n)
                given = all(E.loads(x) == [x] and x.data not in computed for x in loads)
                if given and not n.free & lanes and not soon.issuperset(loads):
                    self.w.value(n)

    def _wide(self, m: Member) -> bool:
        """Whether a map has an element for each lane, and not one a row."""
        return any(q >= len(self.g.rows) for q in self.g.axes[m])

    def _walk(
        self, reds: Sequence[Member], maps: Sequence[Member], columns: Sequence[Member]
    ) -> None:
        """One pass over the row."""
        w, s = self.w, self.schedule
        accs = []
        paired = {m: sums for m, sums in self.pairs.items() if m in reds}
        along = {x for m, sums in paired.items() for x in (m, *sums)}
        for m in reds:
            if m in along:
                continue
            vector = self._vector_value(m)
            name = w.fresh("acc")
            dtype = m.body.dtype
            w.line(
                f"var {name}: {wgsl_type(dtype, vector)} = "
                f"{identity(w, self._monoid(m), dtype, vector)};",
                1,
            )
            accs.append((m, name, vector))
        n = w.extent(
            range(len(self.g.rows), len(self.g.space)),
            WIDTH if self.vector is not None else 1,
        )
        if s.chunks:
            for c in range(s.chunks):
                self._chunk(c, n, accs, maps, columns)
        elif paired:
            walk = Online(w, self.bodies, paired, self.vector)
            walk.row(
                self._walks(n), lambda: self._elements(accs, [], [], inside(w), "i")
            )
            for m, r in walk.results(self.tree):
                self._reduced(m, r)
        elif not columns and self.target.family != "software":
            # A driver may not read what comes after a store before it.
            self._walks(n).walk(
                lambda: self._read_ahead([*reds, *maps]),
                lambda: None,
                lambda: self._elements(accs, maps, [], inside(w), "i"),
            )
        else:
            w.open()
            decode(w, "i", self.layout.loops[1], 2, self.vector)
            self._elements(accs, maps, columns, None, "i")
            inner = w.close()
            w.line(f"for (var i = {self.position}; i < {n}; i += {s.width}u) {{", 1)
            w.blocks[1] += [*indent(inner), "}"]
        if not accs:
            return
        values = []
        for m, name, vector in accs:
            dtype, monoid = m.body.dtype, self._monoid(m)
            v = w.let(horizontal(monoid, name, dtype), 1) if vector else name
            values.append((monoid, dtype, v))
        results = self.tree.reduce(values, 1, self._alone(reds))
        for (m, _, _), r in zip(accs, results, strict=True):
            self._reduced(m, r if r.startswith("r") else w.let(r, 1, "r"))

    def _alone(self, reds: Sequence[Member]) -> bool:
        """Whether only what is stored once a row reads the results."""
        last = max(self.levels.values(), default=0)
        wide = self.columns or any(self._wide(m) for m in self.maps)
        return not wide and all(self.levels[m] == last for m in reds)

    def _monoid(self, m: Member) -> str:
        if m in self.told.values():
            return NUMBERS_MAX
        return m.stage.monoid or "sum"

    def _walks(self, n: str) -> Walks:
        """The walks of the row that this text is about."""
        if self.walks is None:
            gpu = self.target.family != "software"
            self.walks = Walks(
                self.w,
                n,
                self.position,
                self.schedule.width,
                lambda at: decode(self.w, at, self.layout.loops[1], 2, self.vector),
                self._kept() if gpu else Kept(),
                gpu and not self.columns,
            )
        return self.walks

    def _kept(self) -> Kept:
        """What stays on the chip from the first walk on, as it is wanted again."""
        if self.columns or self.schedule.rows > 1:
            return Kept()
        later = [m for m in self.reductions if self.levels[m] > 1]
        bodies = [self.bodies[m] for m in (*later, *filter(self._wide, self.maps))]
        again = set(E.loads(*bodies))
        own = sum(1 << a for a in range(len(self.g.rows)))
        first = [self.bodies[m] for m in self.reductions if self.levels[m] == 1]
        loads = [
            x
            for x in dict.fromkeys(E.loads(*first))
            if x in again and x.free & own and x.free & ~own and x.dtype != "bool"
        ]
        # No larger part of the memory than of the lanes, so that others fit beside.
        limits, lanes = self.target.limits, self.threads
        share = limits.max_workgroup_storage * lanes // limits.max_invocations
        free = share - RESERVED * lanes
        if self.vector is not None:
            return kept(self.n, lanes, loads, WIDTH, HELD, free)
        # Measured: of single elements the addresses take registers, too.
        few = lanes == 1024 and self.n <= 24 * lanes
        if (self.pairs and few) or any(
            x.kind == "index" and x.free & ~own for x in E.values(*bodies)
        ):
            return Kept()
        if max(self.levels.values()) > 1:
            return kept(self.n, lanes, loads, 1, SINGLE, 0)
        most = SINGLE if self.pairs or len(loads) > 1 else SINGLE - 8
        return kept(self.n, lanes, loads, 1, most, free)

    def _read_ahead(self, members: Sequence[Member]) -> None:
        """Ask memory for what a position's values are made of, and wait for none."""
        lanes = sum(1 << a for a in range(len(self.g.rows), len(self.g.space)))
        made = {m.stage for m in self.g.members}
        for m in members:
            for n in E.loads(self.bodies[m]):
                if n.free & lanes and n.data not in made:
                    self.w.value(n)

    def _map_values(self, maps: Sequence[Member]) -> list[str]:
        w, vector = self.w, self.vector is not None
        bodies = [self.bodies[m] for m in maps]
        return [w.splat(b) if vector else w.value(b) for b in bodies]

    def _reduced(self, m: Member, result: str) -> None:
        """A reduction's result: what reads it finds it, and it is stored if wanted."""
        w = self.w
        w.memo[1][self.g.own_load(m)] = result
        if m in self.told:
            most = self.told[m]
            number = w.memo[1][self.g.own_load(most)]
            if most in self.g.stored:
                nan = f"select({number}, sd_nan(), sd_isnan({result}))"
                self._store_narrow(most, w.let(nan, 1, "r"))
        if m in self.g.stored and m not in self.told.values():
            self._store_narrow(m, result)

    def _place(self, c: int, n: str) -> tuple[str | None, str]:
        """Names the position of a lane's c-th element: its guard, if any, and it."""
        w, s = self.w, self.schedule
        offset = f"{self.position} + {c * s.width}u" if c else self.position
        new = c not in self.saved
        if self._full(c):
            inside, at = None, f"i{c}_" if c else self.position
            if new and c:
                w.line(f"let {at} = {offset};")
        else:
            inside, at = f"in{c}_", f"i{c}_"
            if new:
                w.line(f"let {inside} = {offset} < {n};")
                w.line(f"let {at} = min({offset}, {n} - 1u);")
        if new:
            decode(w, at, self.layout.loops[1], 2, self.vector)
            self.names[c] = {
                a: w.names[a]
                for group in self.layout.loops[1]
                for a in group
                if a in w.names
            }
        else:
            for a, name in self.names[c].items():
                w.axis(a, name, 2)
        return inside, at

    def _full(self, c: int) -> bool:
        """Whether every lane's c-th element is known to be one of the row: of few
        elements all or none, so that rows of many lengths have one text.
        """
        s = self.schedule
        known = (
            c + 1 if s.chunks > FEW and self.target.family != "software" else s.chunks
        )
        return self.n >= known * s.width

    def _vector_value(self, m: Member) -> bool:
        """Whether a reduction's value is a vec4. That of a sum or product always is:
        what does not depend on the axis counts for each of the four elements.
        """
        if self.vector is None:
            return False
        counts = m.stage.monoid in ("sum", "prod")
        return counts or bool(self.bodies[m].free >> self.vector & 1)

    def _chunk(
        self,
        c: int,
        n: str,
        accs: Sequence[tuple[Member, str, bool]],
        maps: Sequence[Member],
        columns: Sequence[Member],
    ) -> None:
        """One element (or vec4) of each lane, unrolled; values keep their names from
        phase to phase.
        """
        w = self.w
        w.open()
        if c in self.saved:
            w.memo[-1] = self.saved[c]
        inside, at = self._place(c, n)
        self._elements(accs, maps, columns, inside, at, c)
        self.saved[c] = w.memo[-1]
        w.blocks[1] += w.close()

    def _elements(
        self,
        accs: Sequence[tuple[Member, str, bool]],
        maps: Sequence[Member],
        columns: Sequence[Member],
        inside: str | None,
        at: str,
        chunk: int = 0,
    ) -> None:
        """What one lane does at one position of its row."""
        w = self.w
        for m, name, vector in accs:
            body = self.bodies[m]
            monoid, dtype = self._monoid(m), body.dtype
            v = w.splat(body) if vector else w.value(body)
            if inside:
                v = f"select({identity(w, monoid, dtype, vector)}, {v}, {inside})"
            w.line(f"{name} = {combine(monoid, name, v, dtype, vector)};")
        for m in columns:
            self._add_column(m, inside, at, chunk)
        guard = " && ".join(x for x in (inside, self.live) if x)
        if not maps:
            return
        values = zip(maps, self._map_values(maps), strict=True)
        mark = len(w.blocks[-1])
        for m, v in values:
            w.store(
                self.g.target(m)[0],
                visible(self.layout, self.layout.stores[m]),
                v,
                self.bodies[m].dtype,
                self.vector is not None,
            )
        if guard:
            stores = [x for x in w.blocks[-1][mark:] if _is_store(x)]
            lets = [x for x in w.blocks[-1][mark:] if x not in stores]
            w.blocks[-1][mark:] = [*lets, f"if ({guard}) {{", *indent(stores), "}"]

    def _store_narrow(self, m: Member, value: str) -> None:
        """Store one value a row."""
        w = self.w
        mark = len(w.blocks[1])
        form = visible(self.layout, self.layout.stores[m])
        tensor = self.g.target(m)[0]
        w.plain.add(tensor)
        w.store(tensor, form, value, m.body.dtype, False)
        condition = " && ".join(
            x
            for x in (
                f"{self.position} == 0u" if self.schedule.width > 1 else None,
                self.live,
            )
            if x
        )
        stores = w.blocks[1][mark:]
        if condition:
            keep = [x for x in stores if not _is_store(x)]
            body = [x for x in stores if x not in keep]
            w.blocks[1][mark:] = [*keep, f"if ({condition}) {{", *indent(body), "}"]

    # -------------------------------------------------------------- column sums

    def _open_column(self, m: Member) -> None:
        s = self.schedule
        self.partials[m] = Scratch(
            f"{m.stage.name}_partial",
            "f32",
            s.groups * s.rows * math.prod(self.g.lanes),
        )
        if m.body.dtype != "f32":
            self.partials[m] = Scratch(
                self.partials[m].name, m.body.dtype, self.partials[m].size
            )
        if s.chunks:
            t = wgsl_type(m.body.dtype, self.vector is not None)
            for c in range(s.chunks):
                zero = (
                    f"{t}(0)"
                    if self.vector is not None or m.body.dtype != "f32"
                    else "0.0"
                )
                self.w.line(f"var col{self.columns.index(m)}_{c}: {t} = {zero};", 0)

    def _add_column(self, m: Member, inside: str | None, at: str, chunk: int) -> None:
        w, s = self.w, self.schedule
        body = self.bodies[m]
        v = w.splat(body) if self.vector is not None else w.value(body)
        vector = self.vector is not None
        zero = f"{wgsl_type(body.dtype, vector)}(0)"
        if self.live:
            v = f"select({zero}, {v}, {self.live})"
        if s.chunks:
            name = f"col{self.columns.index(m)}_{chunk}"
            w.line(f"{name} = {name} + {v};")
            return
        partial, where = self.partials[m], self._partial_address(at)
        before = w.read(partial, where, vector)
        w.line(
            w.write(
                partial, where, f"select({before}, {zero}, turn == 0u) + {v}", vector
            )
        )

    def _partial_address(self, at: str) -> str:
        lanes = range(len(self.g.rows), len(self.g.space))
        n = self.w.extent(lanes, WIDTH if self.vector is not None else 1)
        return f"first * {n} + {at}"

    def _close_column(self, m: Member) -> None:
        w, s = self.w, self.schedule
        if not s.chunks:
            return
        n = w.extent(
            range(len(self.g.rows), len(self.g.space)),
            WIDTH if self.vector is not None else 1,
        )
        for c in range(s.chunks):
            offset = f"{self.position} + {c * s.width}u" if c else self.position
            where = self._partial_address(f"({offset})")
            column = f"col{self.columns.index(m)}_{c}"
            store = w.write(self.partials[m], where, column, self.vector is not None)
            guarded = f"if ({offset} < {n}) {{ {store} }}"
            w.line(store if self._full(c) else guarded, 0)


def _is_store(line: str) -> bool:
    """Whether a line writes memory (and must stand under the guard)."""
    return "] = " in line or line.startswith("atomic")
