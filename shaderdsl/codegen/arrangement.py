"""Which kernels there are, in which order, and where their tensors lie.

Sharing memory adds dependences: a kernel that overwrites a tensor must come after all
who read it, and groups that become one kernel run at one time. Every step asks first
whether an order remains.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable, Sequence

from ..ir.stage import Stage
from .partition import Group, Partition
from .program import Binding, Kernel
from .target import Target

Edge = tuple[Group, Group]


class Arrangement:
    """A partition's groups with their dependences, and places (see `Program`)."""

    def __init__(
        self,
        partition: Partition,
        target: Target,
        inputs: Sequence[Stage],
        outs: Sequence[Stage],
        donated: Iterable[int],
    ):
        self.partition, self.target = partition, target
        self.inputs = set(inputs)
        self.outs = {s: i for i, s in reversed([*enumerate(outs)])}
        # What a program gives back must stay as it came.
        self.donated = {inputs[i] for i in donated} - set(outs)
        self.places: dict[Stage, tuple[Stage, int]] = {}
        self.gone: set[Stage] = (
            set()
        )  # tensors whose memory holds something newer at the end
        self.log: list[str] = []
        self._position = {g: i for i, g in enumerate(partition.groups)}
        self._unit = {
            g: g for g in partition.groups
        }  # the kernel that each group belongs to
        self._instead: dict[Group, list[Group]] = {}
        self._edges: set[Edge] = set()
        for g in partition.groups:
            for m in g.members:
                producers = (partition.group.get(n.data) for n in m.loads)
                self._edges |= {
                    (p, g) for p in producers if p is not None and p is not g
                }

    def before(self, stage: Stage, writer: Group) -> list[Edge]:
        """What a group needs to overwrite a tensor: all other readers come first."""
        readers = {
            self.partition.group[m.stage] for m in self.partition.readers.get(stage, ())
        }
        return [(g, writer) for g in readers if g is not writer]

    def allow(
        self,
        edges: Iterable[Edge],
        one: Sequence[Group] = (),
        in_registers: bool = False,
    ) -> bool:
        """Add dependences and make groups one, if an order remains; else do nothing.

        Args:
            in_registers: what they read of one another, each thread has itself.
        """
        unit = dict(self._unit)
        if one:
            first = min(one, key=lambda g: self._position[g])
            unit.update(dict.fromkeys(one, first))
        every = self._edges | set(edges)
        if not in_registers and any(a in one and b in one for a, b in every):
            return False  # Nothing runs before itself.
        if self._sorted(unit, every) is None:
            return False
        self._unit, self._edges = unit, every
        return True

    def disturbs(self, a: Group, b: Group) -> bool:
        """Whether one of two groups overwrites what the other one reads."""
        for x, y in ((a, b), (b, a)):
            taken = {tensor for tensor, _ in x.targets.values()}
            if any(n.data in taken for m in y.members for n in m.loads):
                return True
        return False

    def replace(self, g: Group, instead: list[Group]) -> None:
        """Print other groups where this one (or its whole kernel) would run."""
        self._instead[self._unit[g]] = instead

    def untouched(self, g: Group) -> bool:
        """Whether a group is still what the partition made of it."""
        return (
            self._unit[g] is g
            and g not in self._instead
            and list(self._unit.values()).count(g) == 1
        )

    def printed(self, g: Group) -> Group | None:
        """What is printed for a group, if that is one group, for it alone."""
        if self._unit[g] is not g or list(self._unit.values()).count(g) != 1:
            return None
        instead = self._instead.get(g, [g])
        return instead[0] if len(instead) == 1 else None

    def groups(self) -> list[Group]:
        """What to print, in order of execution."""
        order = self._sorted(self._unit, self._edges)
        assert order is not None
        return [h for u in order for h in self._instead.get(u, [u])]

    def _sorted(self, unit: dict[Group, Group], edges: set[Edge]) -> list[Group] | None:
        """The kernels with all edges forward, else as given; None for a cycle."""
        after: dict[Group, set[Group]] = {u: set() for u in unit.values()}
        for a, b in edges:
            if unit[a] is not unit[b]:
                after[unit[a]].add(unit[b])
        waits = dict.fromkeys(after, 0)
        for later in after.values():
            for u in later:
                waits[u] += 1
        place = self._position
        heap = [(place[u], u) for u, n in waits.items() if not n]
        heapq.heapify(heap)  # positions differ, so groups are never compared
        out: list[Group] = []
        while heap:
            _, u = heapq.heappop(heap)
            out.append(u)
            for b in after[u]:
                waits[b] -= 1
                if not waits[b]:
                    heapq.heappush(heap, (place[b], b))
        return out if len(out) == len(after) else None

    def place(self, result: Stage, base: Stage) -> None:
        """Give a result the memory of a tensor that is needed no more."""
        self.places[result] = (base, 0)
        self.gone.add(base)

    def home(self, stage: Stage) -> Stage:
        """The tensor in whose memory a stage lies."""
        while stage in self.places:
            stage = self.places[stage][0]
        return stage

    def agreed(self, kernel: Kernel) -> Kernel:
        """The kernel with all ranges of one buffer bound alike, as WebGPU wants."""
        homes = [
            self.home(b.tensor) if isinstance(b.tensor, Stage) else b.tensor
            for b in kernel.bindings
        ]
        written = {
            h
            for h, b in zip(homes, kernel.bindings, strict=True)
            if b.access == "read_write"
        }
        bindings, text = list(kernel.bindings), kernel.wgsl
        for i, (h, b) in enumerate(zip(homes, kernel.bindings, strict=True)):
            if b.access == "read" and h in written:
                bindings[i] = Binding(b.tensor, "read_write")
                text = text.replace(
                    f"@binding({i}) var<storage, read> ",
                    f"@binding({i}) var<storage, read_write> ",
                )
        return dataclasses.replace(kernel, bindings=tuple(bindings), wgsl=text)
