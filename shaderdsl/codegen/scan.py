"""Scan: running sums, recognised from their plain form ``y[i] = Σ_j where(j ≤ i, x[j],
0)`` (or ``i ≤ j``, its adjoint).

A workgroup walks a line: each lane adds up a segment, the segments' sums are scanned in
workgroup memory, then each lane walks its segment again and writes.
"""

from __future__ import annotations

import math

from ..errors import CompilerError
from ..ir import expr as E
from ..ir.stage import MONOIDS
from .group import Group
from .kernel_text import indent
from .program import Kernel
from .scan_form import scan_parts
from .schedule import decode, finish, fold, kernel_name, lay_out, make_writer, visible
from .spelling import wgsl_type
from .target import Target


def scan_kernels(g: Group, target: Target) -> list[Kernel]:
    """Print a group of one running sum; its last kernel axis is the line that is
    walked.
    """
    m = g.members[0]
    parts = scan_parts(m.stage, m.body)
    if parts is None or len(g.members) != 1:
        raise CompilerError(f"{m.stage.name} is no scan")
    value = E.substitute(parts.value, g.renaming(m))
    line = len(g.rows)
    layout = lay_out(g, {m: value}, [range(line), [line]])
    w = make_writer(g, layout, target, None)
    dtype = m.body.dtype
    t = wgsl_type(dtype)
    zero = f"{t}({MONOIDS['sum'].identity[dtype]})"
    n = w.extent([line])
    size = min(
        64 if target.family == "software" else 256, target.limits.max_invocations
    )
    w.shared.append(f"var<workgroup> segment: array<{t}, {size}>;")
    w.line("let row = group.y * groups.x + group.x;")
    w.line(
        f"if (row >= {w.param(('rows',), math.prod(g.rows), stem='rows')}) "
        f"{{ return; }}"
    )
    decode(w, "row", layout.loops[0], 0)
    w.line(f"let per = ({n} + {size - 1}u) / {size}u;")
    w.line(f"let begin = min(lane * per, {n});")
    w.line(f"let end = min(begin + per, {n});")
    w.line(f"var sum = {zero};")
    w.open()
    w.axis(line, f"({n} - 1u - k)" if parts.reverse else "k", 1)
    w.line(f"sum = sum + {w.value(value)};")
    first = w.close()
    w.blocks[0] += [
        "for (var k = begin; k < end; k++) {",
        *indent(first),
        "}",
        "segment[lane] = sum;",
        "workgroupBarrier();",
    ]
    step = 1
    while step < size:
        w.blocks[0] += [
            f"let before{step} = segment[max(lane, {step}u) - {step}u];",
            "workgroupBarrier();",
            f"if (lane >= {step}u) {{ segment[lane] = segment[lane] + before{step}; }}",
            "workgroupBarrier();",
        ]
        step *= 2
    w.line(f"var running = select(segment[max(lane, 1u) - 1u], {zero}, lane == 0u);")
    w.open()
    w.axis(line, f"({n} - 1u - k)" if parts.reverse else "k", 1)
    w.line(f"running = running + {w.value(value)};")
    w.store(m.stage, visible(layout, layout.stores[m]), "running", dtype, False)
    second = w.close()
    w.blocks[0] += ["for (var k = begin; k < end; k++) {", *indent(second), "}"]
    grid = fold(math.prod(g.rows), target)
    return [finish(g, w, layout, w.blocks[0], kernel_name(g), "scan", size, grid)]
