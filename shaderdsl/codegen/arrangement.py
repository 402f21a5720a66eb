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
from .group import Group
from .partition import Partition
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
        # The kernel that each group belongs to, and the groups of each kernel.
        self._unit = {g: g for g in partition.groups}
        self._mates = {g: [g] for g in partition.groups}
        self._instead: dict[Group, list[Group]] = {}
        self._after: dict[Group, set[Group]] = {g: set() for g in partition.groups}
        for g in partition.groups:
            for m in g.members:
                for n in m.loads:
                    p = partition.group.get(n.data)
                    if p is not None and p is not g:
                        self._after[p].add(g)

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
        new = [(x, y) for x, y in edges if y not in self._after[x]]
        for x, y in new:
            self._after[x].add(y)
        before = {g: self._unit[g] for g in one}
        if one:
            self._move(one, min(one, key=lambda g: self._position[g]))
        # Nothing runs before itself.
        inside = set(() if in_registers else one)
        if any(self._after[x] & inside for x in inside) or self._circular(new, one):
            for x, y in new:
                self._after[x].discard(y)
            for g, unit in before.items():
                self._move([g], unit)
            return False
        return True

    def _move(self, groups: Iterable[Group], unit: Group) -> None:
        """Make groups a part of a kernel."""
        for g in groups:
            self._mates[self._unit[g]].remove(g)
            self._mates.setdefault(unit, []).append(g)
            self._unit[g] = unit

    def _circular(self, new: Sequence[Edge], one: Sequence[Group]) -> bool:
        """Whether a kernel waits for itself, which only what is new can have done."""
        unit = self._unit
        ends: dict[Group, set[Group]] = {}
        for x, y in new:
            if unit[x] is not unit[y]:
                ends.setdefault(unit[y], set()).add(unit[x])
        if one:
            ends.setdefault(unit[one[0]], set()).add(unit[one[0]])
        for start, wrong in ends.items():
            seen: set[Group] = set()
            stack = [start]
            while stack:
                u = stack.pop()
                later = {unit[y] for x in self._mates[u] for y in self._after[x]}
                later.discard(u)
                if later & wrong:
                    return True
                later -= seen
                seen |= later
                stack += later
        return False

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
        return g not in self._instead and self._mates[g] == [g]

    def printed(self, g: Group) -> Group | None:
        """What is printed for a group, if that is one group, for it alone."""
        if self._mates[g] != [g]:
            return None
        instead = self._instead.get(g, [g])
        return instead[0] if len(instead) == 1 else None

    def groups(self) -> list[Group]:
        """What to print, in order of execution."""
        return [h for u in self._sorted() for h in self._instead.get(u, [u])]

    def _sorted(self) -> list[Group]:
        """The kernels with all dependences forward, else as the partition has them."""
        unit, place = self._unit, self._position
        after: dict[Group, set[Group]] = {u: set() for u in unit.values()}
        for x, later in self._after.items():
            after[unit[x]] |= {unit[y] for y in later}
        waits = dict.fromkeys(after, 0)
        for u, later in after.items():
            later.discard(u)
            for v in later:
                waits[v] += 1
        heap = [(place[u], u) for u, n in waits.items() if not n]
        heapq.heapify(heap)  # positions differ, so groups are never compared
        out: list[Group] = []
        while heap:
            _, u = heapq.heappop(heap)
            out.append(u)
            for v in after[u]:
                waits[v] -= 1
                if not waits[v]:
                    heapq.heappush(heap, (place[v], v))
        return out

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
