"""Map: an elementwise kernel of any number of outputs. A thread computes one vec4 (or
one element) of each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .choice import pick
from .partition import Group
from .parts import only, side_by_side
from .program import Kernel
from .schedule import (
    decode,
    kernel_bodies,
    kernel_name,
    lay_out,
    make_writer,
    vector_axis,
    visible,
)
from .target import Target
from .writer import WIDTH, Writer, contiguous


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


class MapText:
    """The text of a thread that computes an element, or a vec4, of each map."""

    def __init__(self, g: Group, target: Target, wide: bool):
        self.group, self.target = g, target
        self.bodies = {m: b for m, b in kernel_bodies(g).items() if m in g.stored}
        self.layout = lay_out(g, self.bodies, [range(len(g.space))])
        self.loop = self.layout.loops[0]
        self.vector = vector_axis(self.layout, self.loop) if wide else None
        self.threads = math.prod(g.space) // (1 if self.vector is None else WIDTH)

    def writer(self) -> Writer:
        """A writer that knows what cannot be bound as vec4."""
        g, layout, vector = self.group, self.layout, self.vector
        w = make_writer(g, layout, self.target, vector)
        for m in g.stored:
            form = visible(layout, layout.stores[m])
            if vector is not None and not contiguous(form, vector):
                w.plain.add(g.target(m)[0])
        return w

    def lines(self, w: Writer) -> list[str]:
        """The text, from the thread's number ``at`` on."""
        g, bodies, vector = self.group, self.bodies, self.vector is not None
        w.open()
        w.base = 1
        decode(w, "at", self.loop, 1, self.vector)
        # All before the first store, which may overwrite what another one reads.
        values = [w.splat(bodies[m]) if vector else w.value(bodies[m]) for m in bodies]
        for m, value in zip(bodies, values, strict=True):
            form = visible(self.layout, self.layout.stores[m])
            w.store(g.target(m)[0], form, value, bodies[m].dtype, vector)
        inner = w.close()
        count = w.param(("threads",), self.threads, stem="threads")
        return [*w.blocks[0], f"if (at >= {count}) {{ return; }}", *inner]


def map_kernels(g: Group, target: Target) -> list[Kernel]:
    """Print a group of maps."""
    schedule = choose(target)
    text = MapText(g, target, schedule.wide)
    return [only(text, schedule.size, kernel_name(g), "map", target)]


def map_sibling_kernels(g: Group, target: Target) -> list[Kernel]:
    """Print a group that stands for several groups of maps."""
    assert g.stands_for
    schedule = choose(target)
    parts = [MapText(h, target, schedule.wide) for h in g.stands_for]
    return [side_by_side(g, parts, schedule.size, kernel_name(g), "map", target)]
