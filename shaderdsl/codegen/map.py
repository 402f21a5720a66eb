"""Map: an elementwise kernel of any number of outputs. A thread computes one vec4 (or
one element) of each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .address import contiguous
from .choice import pick
from .group import Group
from .kernel_text import indent
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
from .spelling import WIDTH
from .target import Target
from .writer import Writer


@dataclass(frozen=True)
class MapSchedule:
    """Invocations of a workgroup, whether each takes vec4s where they fit, and how
    many of them.
    """

    size: int
    wide: bool = True
    count: int = 1


def choose(target: Target, axes: int) -> MapSchedule:
    """The default, or what was tuned.

    Args:
        axes: into how many a position is taken apart. Where that is a division, two
            positions a thread hide it, and what numbers of rows cost.
    """
    limits = target.limits
    most = min(limits.max_invocations, limits.max_workgroup_size_x)
    default = MapSchedule(256, True, 2 if axes > 1 else 1)
    if target.family == "software":
        default = MapSchedule(64)
    sizes = (128, 64, 32, 256, 512)
    kinds = ((True, 1), (False, 1), (True, 2))
    return pick(
        target,
        "map",
        default,
        lambda: [MapSchedule(n, wide, k) for wide, k in kinds for n in sizes],
        lambda s: 1 <= s.size <= most and 1 <= s.count <= 4,
    )


class MapText:
    """The text of a thread that computes an element, or a vec4, of each map."""

    def __init__(self, g: Group, target: Target, schedule: MapSchedule):
        self.group, self.target, self.schedule = g, target, schedule
        wide = schedule.wide
        self.bodies = {m: b for m, b in kernel_bodies(g).items() if m in g.stored}
        self.layout = lay_out(g, self.bodies, [range(len(g.space))])
        self.loop = self.layout.loops[0]
        self.vector = vector_axis(self.layout, self.loop) if wide else None
        self.positions = math.prod(g.space) // (1 if self.vector is None else WIDTH)
        # Positions of a workgroup lie together, those of a thread as far apart as it
        # has invocations.
        size, count = schedule.size, schedule.count
        self.threads = -(-self.positions // (size * count)) * size

    @property
    def axes(self) -> int:
        """Into how many a position is taken apart."""
        return len(self.loop)

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
        if self.target.family == "gpu":
            # Measured: faster than floor here, but not between reductions of a row.
            w.spellings["exp"] = "sd_exp_masked{V}({0})"
        if self.schedule.count > 1:
            return self._several(w)
        w.open()
        w.base = 1
        decode(w, "at", self.loop, 1, self.vector)
        self._store(w, self._values(w))
        inner = w.close()
        count = w.param(("threads",), self.positions, stem="threads")
        return [*w.blocks[0], f"if (at >= {count}) {{ return; }}", *inner]

    def _values(self, w: Writer) -> list[str]:
        """All before the first store, which may overwrite what another one reads."""
        bodies, vector = self.bodies, self.vector is not None
        return [w.splat(bodies[m]) if vector else w.value(bodies[m]) for m in bodies]

    def _store(self, w: Writer, values: Sequence[str]) -> None:
        for m, value in zip(self.bodies, values, strict=True):
            form = visible(self.layout, self.layout.stores[m])
            tensor = self.group.target(m)[0]
            w.store(tensor, form, value, m.body.dtype, self.vector is not None)

    def _several(self, w: Writer) -> list[str]:
        """Several positions of a thread: all are read before the first is stored; those
        beyond the end repeat the last one.
        """
        size, count = self.schedule.size, self.schedule.count
        total = w.param(("threads",), self.positions, stem="threads")
        w.open()
        w.base = 1
        w.line(f"let start = at / {size}u * {size * count}u + at % {size}u;", 1)
        stores: list[str] = []
        for k in range(count):
            place = f"start + {k * size}u" if k else "start"
            here = w.let(place, 1, "i")
            w.open()
            inside = w.let(f"min({here}, {total} - 1u)", 2, "i")
            decode(w, inside, self.loop, 2, self.vector)
            values = self._values(w)
            w.open()
            self._store(w, values)
            own = w.close()
            w.blocks[1] += w.close()
            stores += [f"if ({here} < {total}) {{", *indent(own), "}"]
        inner = w.close()
        return [*w.blocks[0], *inner, *stores]


def map_kernels(g: Group, target: Target) -> list[Kernel]:
    """Print a group of maps."""
    schedule = choose(target, MapText(g, target, MapSchedule(1)).axes)
    text = MapText(g, target, schedule)
    return [only(text, schedule.size, kernel_name(g), "map", target)]


def map_sibling_kernels(g: Group, target: Target) -> list[Kernel]:
    """Print a group that stands for several groups of maps."""
    assert g.stands_for
    schedule = choose(target, 1)
    parts = [MapText(h, target, schedule) for h in g.stands_for]
    return [side_by_side(g, parts, schedule.size, kernel_name(g), "map", target)]
