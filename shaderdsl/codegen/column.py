"""Column: sums over leading axes. Each thread owns outputs and walks a share of the
rows; a second stage adds the shares in order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .choice import pick
from .member import Member
from .partition import Group
from .program import Kernel, Scratch
from .reduction import combine, identity
from .schedule import (
    BUILTINS,
    decode,
    finish,
    fold,
    kernel_bodies,
    kernel_name,
    lay_out,
    make_writer,
    vector_axis,
)
from .target import Target
from .writer import WIDTH, Writer, indent, wgsl_type


@dataclass(frozen=True)
class ColumnSchedule:
    """Parts into which the rows are cut, and invocations of a workgroup."""

    shares: int
    size: int = 64


def column_kernels(g: Group, target: Target) -> list[Kernel]:
    """Print a group whose members are all column reductions over the same rows."""
    bodies = kernel_bodies(g)
    rows = range(len(g.rows))
    lanes = range(len(g.rows), len(g.space))
    layout = lay_out(g, bodies, [rows, lanes])
    vector = vector_axis(layout, layout.loops[1])
    count, n = math.prod(g.rows), math.prod(g.lanes)
    threads = n // (WIDTH if vector is not None else 1)
    schedule = _choose(count, threads, target)
    size = schedule.size
    per = -(-count // schedule.shares)
    shares = -(-count // per)
    w = make_writer(g, layout, target, vector)
    width = w.extent(lanes, WIDTH if vector is not None else 1)
    w.line(f"let at = (group.y * groups.x + group.x) * {size}u + lane;")
    w.open()
    w.base = 1
    w.line(f"let i = at % {width};", 1)
    w.line(f"let share = at / {width};", 1)
    decode(w, "i", layout.loops[1], 1, vector)
    accs = {}
    for k, m in enumerate(g.members):
        dtype = m.body.dtype
        wide = vector is not None
        accs[m] = f"acc{k}_"
        w.line(
            f"var acc{k}_: {wgsl_type(dtype, wide)} = "
            f"{identity(w, m.stage.monoid or 'sum', dtype, wide)};",
            1,
        )
    w.open()
    decode(w, "row", layout.loops[0], 2)
    for m in g.members:
        body = bodies[m]
        v = w.splat(body) if vector is not None else w.value(body)
        monoid = m.stage.monoid or "sum"
        step = combine(monoid, accs[m], v, body.dtype, vector is not None)
        w.line(f"{accs[m]} = {step};")
    inner = w.close()
    rows_param = w.param(("rows",), count, stem="rows")
    per_param = w.param(("per",), per, stem="per")
    w.line(
        f"for (var row = share * {per_param}; row < min((share + 1u) * {per_param}, "
        f"{rows_param}); row++) {{",
        1,
    )
    w.blocks[1] += [*indent(inner), "}"]
    partials = {
        m: Scratch(f"{m.stage.name}_partial", m.body.dtype, shares * n)
        for m in g.members
    }
    for m in g.members:
        w.line(w.write(partials[m], "at", accs[m], vector is not None), 1)
    body_lines = w.close()
    total = w.param(("threads",), shares * threads, stem="threads")
    lines = [*w.blocks[0], f"if (at >= {total}) {{ return; }}", *body_lines]
    grid = fold(-(-shares * threads // size), target)
    kernel = finish(g, w, layout, lines, kernel_name(g), "column", size, grid)
    return [kernel] + [finish_kernel(m, partials[m], shares, target) for m in g.members]


def _choose(rows: int, threads: int, target: Target) -> ColumnSchedule:
    """The default, or what was tuned."""
    shares = _shares(rows, threads, target)
    limits = target.limits
    most = min(limits.max_invocations, limits.max_workgroup_size_x)

    def fits(s: ColumnSchedule) -> bool:
        steps = -(-rows // s.shares) if 1 <= s.shares <= rows else target.loop_budget
        return 1 <= s.size <= most and max(steps, s.shares) <= target.loop_budget // 2

    return pick(
        target,
        "column",
        ColumnSchedule(shares),
        lambda: [
            ColumnSchedule(min(rows, max(1, int(shares * times))), size)
            for times in (1, 2, 0.5, 4, 0.25)
            for size in (64, 128, 32, 256)
        ],
        fits,
    )


def _shares(rows: int, threads: int, target: Target) -> int:
    """Into how many parts the rows are cut: enough threads to fill the device, and no
    loop beyond its budget.
    """
    wanted = 512 if target.family == "software" else 1 << 18
    shares = max(1, min(rows, -(-wanted // max(threads, 1)), 256))
    while -(-rows // shares) > target.loop_budget // 2:
        shares *= 2
    return shares


def finish_kernel(m: Member, partial: Scratch, shares: int, target: Target) -> Kernel:
    """Second stage: combine the shares of each output, in a fixed order.

    Lanes take every ``parts``-th share of an output; a tree in workgroup memory joins
    them.
    """
    stage = m.stage
    monoid, dtype = stage.monoid or "sum", m.body.dtype
    n = stage.size
    w = Writer([], target)
    parts = 1
    while parts < (1 if target.family == "software" else 16) and parts * 8 <= shares:
        parts *= 2
    size = 64 if parts == 1 else 256
    outputs = size // parts
    w.binding(partial, False, False)
    w.binding(stage, False, True)
    count = w.param(("n",), n, stem="n")
    total = w.param(("shares",), shares, stem="shares")
    w.line(f"let i = (group.y * groups.x + group.x) * {outputs}u + lane % {outputs}u;")
    w.line(f"let part = lane / {outputs}u;")
    w.line(f"let at = min(i, {count} - 1u);")
    w.line(f"var acc: {wgsl_type(dtype)} = {identity(w, monoid, dtype)};")
    step = combine(monoid, "acc", w.read(partial, f"k * {count} + at", False), dtype)
    w.line(f"for (var k = part; k < {total}; k += {parts}u) {{ acc = {step}; }}")
    if parts > 1:
        w.shared.append(f"var<workgroup> joined: array<{wgsl_type(dtype)}, {size}>;")
        w.line("joined[lane] = acc;")
        w.line("workgroupBarrier();")
        half = parts // 2
        while half:
            other = f"joined[lane + {half * outputs}u]"
            w.line(
                f"if (part < {half}u) "
                f"{{ joined[lane] = {combine(monoid, 'joined[lane]', other, dtype)}; }}"
            )
            w.line("workgroupBarrier();")
            half //= 2
        w.line("acc = joined[lane];")
    w.open()
    w._store_one(stage, w.bound[stage].name, "i", "acc")
    w.blocks[0] += [f"if (part == 0u && i < {count}) {{", *indent(w.close()), "}"]
    return Kernel(
        name=f"finish_{stage.name}",
        archetype="column",
        wgsl=w.text(
            [f"second stage of {stage.name}"], (size, 1, 1), BUILTINS, w.blocks[0]
        ),
        workgroup_size=(size, 1, 1),
        workgroups=fold(-(-n // outputs), target),
        bindings=w.bindings(),
        params=w.param_block(),
        members=(),
        writes=(),  # the kernel before counts as the writer
        flops=shares * n,
        bytes=(shares + 1) * stage.nbytes,
        reason="adds the partial results of the kernel before, in a fixed order",
    )
