"""Map: an elementwise kernel of any number of outputs. A thread computes one vec4 (or
one element) of each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .choice import pick
from .partition import Group
from .program import Kernel
from .schedule import (
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
from .target import Target
from .writer import WIDTH, contiguous


@dataclass(frozen=True)
class MapSchedule:
    """Invocations of a workgroup, and whether each takes a vec4 where one fits."""

    size: int
    wide: bool = True


def choose(target: Target) -> MapSchedule:
    """The default, or what was tuned."""
    limits = target.limits
    most = min(limits.max_invocations, limits.max_workgroup_size_x)
    default = MapSchedule(64 if target.family == "software" else 256)
    sizes = (128, 64, 32, 256, 512)
    return pick(
        target,
        "map",
        default,
        lambda: [MapSchedule(n, wide) for wide in (True, False) for n in sizes],
        lambda s: 1 <= s.size <= most,
    )


def map_kernels(g: Group, target: Target) -> list[Kernel]:
    """Print a group of maps."""
    bodies = {m: b for m, b in kernel_bodies(g).items() if m in g.stored}
    layout = lay_out(g, bodies, [range(len(g.space))])
    loop = layout.loops[0]
    schedule = choose(target)
    vector = vector_axis(layout, loop) if schedule.wide else None
    threads = math.prod(g.space) // (WIDTH if vector is not None else 1)
    size = schedule.size
    w = make_writer(g, layout, target, vector)
    for m in g.stored:
        if vector is not None and not contiguous(
            visible(layout, layout.stores[m]), vector
        ):
            w.plain.add(g.target(m)[0])
    w.line(f"let at = (group.y * groups.x + group.x) * {size}u + lane;")
    w.open()
    w.base = 1
    decode(w, "at", loop, 1, vector)
    # All of them before the first store, which may overwrite what another one reads.
    values = [
        w.splat(bodies[m]) if vector is not None else w.value(bodies[m])
        for m in g.stored
    ]
    for m, value in zip(g.stored, values, strict=True):
        w.store(
            g.target(m)[0],
            visible(layout, layout.stores[m]),
            value,
            bodies[m].dtype,
            vector is not None,
        )
    inner = w.close()
    count = w.param(("threads",), threads, stem="threads")
    lines = [*w.blocks[0], f"if (at >= {count}) {{ return; }}", *inner]
    return [
        finish(
            g,
            w,
            layout,
            lines,
            kernel_name(g),
            "map",
            size,
            fold(-(-threads // size), target),
        )
    ]
