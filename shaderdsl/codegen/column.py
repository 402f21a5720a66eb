"""Column: sums over leading axes. Each thread owns outputs and walks a share of the
rows; a second stage adds the shares in order.

On GPUs a workgroup takes a strip of 128 bytes of each row and several rows at once: its
lanes walk the share side by side, with several loads under way, and join what they have
in workgroup memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..ir.expr import Expr
from .choice import pick
from .group import Group
from .kernel_text import indent
from .member import Member
from .program import Kernel, Scratch
from .reduction import combine, identity
from .schedule import (
    BUILTINS,
    IN_RANGE,
    Layout,
    decode,
    finish,
    fold,
    kernel_bodies,
    kernel_name,
    lay_out,
    make_writer,
    vector_axis,
)
from .spelling import WIDTH, wgsl_type
from .target import Target
from .writer import Writer

#: Invocations of a workgroup on GPUs, workgroups that fill one, and loads under way in
#: each thread.
_THREADS, _WORKGROUPS, _FLIGHT = 256, 2048, 8


@dataclass(frozen=True)
class ColumnSchedule:
    """How sums of columns run.

    Args:
        shares: parts into which the rows are cut.
        size: invocations of a workgroup.
        lanes: rows that a workgroup walks side by side, a power of two that divides
            ``size``; with 1 its threads are neighbouring outputs of any shares.
        flight: rows that a thread reads before it waits for the first.
    """

    shares: int
    size: int = 64
    lanes: int = 1
    flight: int = 1


def column_kernels(g: Group, target: Target) -> list[Kernel]:
    """Print a group whose members are all column reductions over the same rows."""
    bodies = kernel_bodies(g)
    rows = range(len(g.rows))
    lanes = range(len(g.rows), len(g.space))
    layout = lay_out(g, bodies, [rows, lanes])
    vector = vector_axis(layout, layout.loops[1])
    count, n = math.prod(g.rows), math.prod(g.lanes)
    threads = n // (WIDTH if vector is not None else 1)
    wide = sum(1 for x in layout.addresses if any(x.free >> a & 1 for a in lanes))
    # 128 bytes of a row side by side.
    lanes_first = 32 if vector is not None else 8
    s = _choose(count, threads, wide, lanes_first, target)
    per = -(-count // s.shares)
    shares = -(-count // per)
    columns = s.size // s.lanes
    w = make_writer(g, layout, target, vector)
    width = w.extent(lanes, WIDTH if vector is not None else 1)
    w.line("let flat = group.y * groups.x + group.x;")
    if s.lanes == 1:
        w.line(f"let at = flat * {s.size}u + lane;")
        first = "share * {}"
    else:
        strips = -(-threads // columns)
        across = w.param(("strips",), strips, stem="strips")
        w.line(f"let column = flat % {across} * {columns}u + lane % {columns}u;")
        w.line(f"let part = lane / {columns}u;")
        w.line(f"let share = flat / {across};")
        first = "share * {} + part"
    w.open()
    w.base = 1
    if s.lanes == 1:
        w.line(f"let i = at % {width};", 1)
        w.line(f"let share = at / {width};", 1)
    else:
        w.line(f"let i = min(column, {width} - 1u);", 1)
    decode(w, "i", layout.loops[1], 1, vector)
    accs = {}
    for k, m in enumerate(g.members):
        dtype = m.body.dtype
        accs[m] = f"acc{k}_"
        w.line(
            f"var acc{k}_: {wgsl_type(dtype, vector is not None)} = "
            f"{identity(w, m.stage.monoid or 'sum', dtype, vector is not None)};",
            1,
        )
    rows_param = w.param(("rows",), count, stem="rows")
    per_param = w.param(("per",), per, stem="per")
    w.line(f"let end = min((share + 1u) * {per_param}, {rows_param});", 1)
    w.line(f"var row = {first.format(per_param)};", 1)
    for flight in dict.fromkeys((s.flight, 1)):
        steps = [
            _step(w, layout, bodies, accs, k * s.lanes, vector) for k in range(flight)
        ]
        reach = (flight - 1) * s.lanes
        last = f"row + {reach}u" if reach else "row"
        w.line(f"for (; {last} < end; row += {flight * s.lanes}u) {{", 1)
        w.blocks[1] += [*(x for lines in steps for x in indent(lines)), "}"]
    partials = {
        m: Scratch(f"{m.stage.name}_partial", m.body.dtype, shares * n)
        for m in g.members
    }
    if s.lanes > 1:
        for m in g.members:
            kind = wgsl_type(m.body.dtype, vector is not None)
            _join(w, m, accs[m], kind, s.size, s.lanes, 1)
        w.line(f"let at = share * {width} + column;", 1)
    stores = [w.write(partials[m], "at", accs[m], vector is not None) for m in accs]
    if s.lanes > 1:
        w.line(f"if (part == 0u && column < {width}) {{", 1)
        w.blocks[1] += [*indent(stores), "}"]
    else:
        w.blocks[1] += stores
    body_lines = w.close()
    if s.lanes == 1:
        total = w.param(("threads",), shares * threads, stem="threads")
        body_lines = [f"if (at >= {total}) {{ return; }}", *body_lines]
        grid = fold(-(-shares * threads // s.size), target)
    else:
        # A grid that was folded may have workgroups too many: theirs are no shares.
        count_param = w.param(("shares",), shares, stem="shares")
        body_lines = [f"if (share >= {count_param}) {{ return; }}", *body_lines]
        grid = fold(strips * shares, target)
    lines = [*w.blocks[0], *body_lines]
    kernel = finish(g, w, layout, lines, kernel_name(g), "column", s.size, grid)
    return [kernel, *finish_kernels(partials, shares, target)]


def _step(
    w: Writer,
    layout: Layout,
    bodies: dict[Member, Expr],
    accs: dict[Member, str],
    ahead: int,
    vector: int | None,
) -> list[str]:
    """One row of the walk, so many rows ahead."""
    w.open()
    decode(w, f"(row + {ahead}u)" if ahead else "row", layout.loops[0], 2)
    for m, acc in accs.items():
        body = bodies[m]
        v = w.splat(body) if vector is not None else w.value(body)
        monoid = m.stage.monoid or "sum"
        step = combine(monoid, acc, v, body.dtype, vector is not None)
        w.line(f"{acc} = {step};")
    return w.close()


def _join(
    w: Writer, m: Member, acc: str, kind: str, size: int, lanes: int, depth: int
) -> None:
    """Combine what the lanes of a workgroup have of each output; the first part gets
    it.
    """
    columns = size // lanes
    name = "joined_" + kind.replace("<", "_").replace(">", "")
    array = f"var<workgroup> {name}: array<{kind}, {size}>;"
    if array in w.shared:
        w.line("workgroupBarrier();", depth)  # what was joined before has been read
    else:
        w.shared.append(array)
    w.line(f"{name}[lane] = {acc};", depth)
    w.line("workgroupBarrier();", depth)
    half = lanes // 2
    while half:
        a, b = f"{name}[lane]", f"{name}[lane + {half * columns}u]"
        both = combine(m.stage.monoid or "sum", a, b, m.body.dtype, "vec4" in kind)
        w.line(f"if (part < {half}u) {{ {a} = {both}; }}", depth)
        w.line("workgroupBarrier();", depth)
        half //= 2
    w.line(f"{acc} = {name}[lane];", depth)


def _choose(
    rows: int, threads: int, loads: int, lanes: int, target: Target
) -> ColumnSchedule:
    """The default, or what was tuned."""
    limits = target.limits
    most = min(limits.max_invocations, limits.max_workgroup_size_x)

    def fits(s: ColumnSchedule) -> bool:
        if min(s.shares, s.size, s.lanes, s.flight) < 1 or s.shares > rows:
            return False
        if s.lanes & (s.lanes - 1) or s.size % s.lanes or s.size > most:
            return False
        if s.lanes > 1 and 2 * 16 * s.size > limits.max_workgroup_storage:
            return False  # vec4s of two types at most
        steps = -(-rows // s.shares)
        return s.flight <= 32 and max(steps, s.shares) <= target.loop_budget // 2

    return pick(
        target,
        "column",
        _default(rows, threads, loads, lanes, target),
        lambda: _candidates(rows, threads, loads, target),
        fits,
    )


def _candidates(
    rows: int, threads: int, loads: int, target: Target
) -> Iterator[ColumnSchedule]:
    """Schedules worth measuring."""
    shares = _shares(rows, threads, target)
    flat = [
        ColumnSchedule(min(rows, max(1, int(shares * times))), size)
        for times in (1, 2, 0.5, 4, 0.25)
        for size in (64, 128, 32, 256)
    ]
    if target.family == "software":
        yield from flat
        return
    for lanes in (32, 16, 8, 64, 4):
        for times in (1, 2, 0.5):
            yield _strips(rows, threads, loads, lanes, times)
    yield from flat


def _default(
    rows: int, threads: int, loads: int, lanes: int, target: Target
) -> ColumnSchedule:
    if target.family == "software" or rows < 2 * _FLIGHT:
        return ColumnSchedule(_shares(rows, threads, target))
    return _strips(rows, threads, loads, lanes, 1)


def _strips(
    rows: int, threads: int, loads: int, lanes: int, times: float
) -> ColumnSchedule:
    """Strips of columns, with so many lanes of rows where there are rows enough."""
    while lanes > 2 and rows < lanes * _FLIGHT:
        lanes //= 2
    # Few rows of many columns: joining the lanes counts, so that strips are wider and a
    # workgroup takes at least eight turns, if there are workgroups enough.
    least = 1
    half = lanes // 2
    if half > 8 and rows < 32 * lanes * _FLIGHT:
        turns = rows // (half * _FLIGHT)
        if -(-threads // (_THREADS // half)) * (turns // 8) >= _WORKGROUPS // 4:
            lanes, least = half, 8
    columns = 1
    while columns < min(threads, _THREADS // lanes):
        columns *= 2
    while columns * lanes < _THREADS and rows >= 2 * lanes * _FLIGHT:
        lanes *= 2
    flight = 1
    while flight < _FLIGHT // max(1, loads) and flight * lanes < rows:
        flight *= 2
    # Shares in whole turns of the loop, and equal if there is a way.
    turns = -(-rows // (lanes * flight))
    wanted = int(times * _WORKGROUPS / -(-threads // columns))
    wanted = max(1, min(turns // least, wanted))
    even = [d for d in range(wanted, wanted // 2, -1) if turns % d == 0]
    shares = even[0] if even else wanted
    per = -(-turns // shares) * lanes * flight
    return ColumnSchedule(-(-rows // per), columns * lanes, lanes, flight)


def _shares(rows: int, threads: int, target: Target) -> int:
    """Into how many parts the rows are cut: enough threads to fill the device, and no
    loop beyond its budget.
    """
    wanted = 512 if target.family == "software" else 1 << 18
    budget = max(1, target.loop_budget // 2)
    shares = max(1, min(rows, -(-wanted // max(threads, 1)), 256, budget))
    while -(-rows // shares) > budget:
        shares *= 2
    return shares


def finish_kernels(
    partials: Mapping[Member, Scratch], shares: int, target: Target
) -> list[Kernel]:
    """Second stages: combine the shares of each output, in a fixed order; sums of one
    shape go together.
    """
    alike: dict[tuple[int, str], list[Member]] = {}
    for m in partials:
        alike.setdefault((m.stage.size, m.body.dtype), []).append(m)
    most = max(1, target.limits.max_storage_buffers // 2)
    return [
        _finish(members[k : k + most], partials, shares, target)
        for members in alike.values()
        for k in range(0, len(members), most)
    ]


def _finish(
    members: Sequence[Member],
    partials: Mapping[Member, Scratch],
    shares: int,
    target: Target,
) -> Kernel:
    """One second stage: lanes take every ``parts``-th share of an output, a tree in
    workgroup memory joins them.
    """
    stage = members[0].stage
    dtype = members[0].body.dtype
    gpu = target.family != "software"
    vector = gpu and stage.size % WIDTH == 0
    n = stage.size // (WIDTH if vector else 1)
    kind = wgsl_type(dtype, vector)
    w = Writer([], target)
    parts = 1
    while gpu and parts < 32 and parts * 2 <= shares:
        parts *= 2
    size = 64 if parts == 1 else 256
    # A small kernel: what counts is how many processors have a part of it.
    while size > 64 and size > 4 * parts and n * parts < 256 * size:
        size //= 2
    outputs = size // parts
    for m in members:
        w.binding(partials[m], vector, False)
        w.binding(m.stage, vector, True)
    count = w.param(("n",), n, stem="n")
    total = w.param(("shares",), shares, stem="shares")
    w.line(f"let i = (group.y * groups.x + group.x) * {outputs}u + lane % {outputs}u;")
    w.line(f"let part = lane / {outputs}u;")
    w.line(f"let at = min(i, {count} - 1u);")
    monoids = [m.stage.monoid or "sum" for m in members]
    accs = [f"acc{k or ''}" for k in range(len(members))]
    for acc, monoid in zip(accs, monoids, strict=True):
        w.line(f"var {acc}: {kind} = {identity(w, monoid, dtype, vector)};")
    w.line("var k = part;")
    for flight in (4, 1) if gpu else (1,):
        reach = (flight - 1) * parts
        last = f"k + {reach}u" if reach else "k"
        w.line(f"for (; {last} < {total}; k += {flight * parts}u) {{")
        for f in range(flight):
            place = f"(k + {f * parts}u)" if f else "k"
            for m, acc, monoid in zip(members, accs, monoids, strict=True):
                v = w.read(partials[m], f"{place} * {count} + at", vector)
                w.line(f"  {acc} = {combine(monoid, acc, v, dtype, vector)};")
        w.line("}")
    if parts > 1:
        for m, acc in zip(members, accs, strict=True):
            _join(w, m, acc, kind, size, parts, 0)
    w.open()
    for m, acc in zip(members, accs, strict=True):
        if vector:
            w.line(w.write(m.stage, "i", acc, True))
        else:
            w._store_one(m.stage, w.bound[m.stage].name, "i", acc)
    w.blocks[0] += [f"if (part == 0u && i < {count}) {{", *indent(w.close()), "}"]
    names = [m.stage.name for m in members]
    return Kernel(
        name=f"finish_{'_'.join(names[:3])}",
        archetype="column",
        wgsl=w.text(
            [f"second stage of {', '.join(names)}"],
            (size, 1, 1),
            BUILTINS,
            w.blocks[0],
        ),
        workgroup_size=(size, 1, 1),
        workgroups=fold(-(-n // outputs), target),
        bindings=w.bindings(),
        params=w.param_block(),
        members=(),
        writes=(),  # the kernel before counts as the writer
        flops=len(members) * shares * n,
        bytes=(shares + 1) * sum(m.stage.nbytes for m in members),
        reason="adds the partial results of the kernel before, in a fixed order",
        in_range="column" in IN_RANGE,
    )
