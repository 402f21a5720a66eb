"""Anchors: which stages are stored or summed, and what is computed in one pass.

Every other stage is a map that is written into its readers. Kernels are made from this
(`partition`); what only asks which products are never stored needs no more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..ir import expr as E
from ..ir.stage import Stage, topo_stages
from .blocks_graph import Loop
from .blocks_rows import same_order
from .compared import recomputed
from .member import contract_parts
from .online_find import find_chains
from .target import Target

# Nodes in one inlined body; beyond, a map in the middle is stored, so that drivers
# compile in reasonable time.
_MAX_NODES = 600

# Operations of a single number that are computed again in every thread that reads it.
_NUMBER_NODES = 8


class Anchored:
    """A graph with its anchors.

    Attributes:
        outs: what is stored as a result, or because a loop reads it.
        order: stages that are computed, operands first.
        anchors: outputs, reductions, and maps that are cheaper to store than to compute
            again, less what is computed in one pass.
        online: what is computed in one pass.
        log: what was stored, and why.
    """

    def __init__(
        self, outs: Sequence[Stage], target: Target, loops: Sequence[Loop] = ()
    ):
        self.target = target
        self.loop_of = {g: loop for loop in loops for g in loop.given.values()}
        self.limit = target.limits.max_storage_buffers
        self.outs = {o for o in outs if o.kind != "input" and o.size > 0}
        # What loops read is stored like an output.
        read = [n.data for s in self.loop_of for n in s.loads]
        self.outs |= {s for s in read if s.kind != "input" and s.size > 0}
        self.log: list[str] = []
        # In the order of the outputs, so that equal graphs give equal kernels in every
        # run.
        self.order = [
            s
            for s in topo_stages(o for o in outs if o in self.outs)
            if s.kind != "input" and s.size > 0
        ]
        anchors = self._choose(self.order)
        asked = {s for s in self.order if s.keep == "store"}
        self.online = find_chains(self.order, anchors, self.outs | asked, target)
        again = {f"{s.name} {list(s.shape)} is" for s in anchors - self.online.anchors}
        self.log = [x for x in self.log if not x.startswith(tuple(again))]
        self.log += self.online.log
        self.anchors = self.online.anchors

    def _choose(self, order: Sequence[Stage]) -> set[Stage]:
        """Anchors before anything is computed in one pass."""
        anchors = self.outs | {s for s in order if s.kind in ("reduce", "given")}
        for s in order:
            if s.keep == "store" and s not in anchors:
                # What has no line of the user's is the compiler's own.
                why = "asked for by store()" if s.loc else "to be bound as one array"
                self._store(anchors, s, why)
            elif s.keep == "inline" and s in self.outs:
                self.log.append(f"{s.name} {list(s.shape)} is stored: it is a result")
        users: dict[Stage, set[Stage]] = {}
        for s in order:
            for t in {n.data for n in s.loads}:
                users.setdefault(t, set()).add(s)
        real_users: dict[Stage, frozenset[Stage]] = {}
        for s in reversed(order):
            found: set[Stage] = set()
            for u in users.get(s, ()):
                found |= real_users[u] if _is_view(u) and u not in anchors else {u}
            real_users[s] = frozenset(found)
        sources: dict[Stage, frozenset[Stage]] = {}  # what an inlined map would load
        nodes: dict[Stage, int] = {}
        for s in order:
            loaded: set[Stage] = set()
            count = (
                sum(1 for n in E.values(s.body) if n.kind == "apply")
                if s.body is not None
                else 0
            )
            for t in {n.data for n in s.loads}:
                inline = t.kind == "map" and t not in anchors
                loaded |= sources[t] if inline else {t}
                count += nodes[t] if inline else 0
            if s.kind == "map" and s not in anchors and not _is_view(s):
                n = sum(1 for t in loaded if t.size >= s.size)
                k = len(real_users[s])
                again = n >= 2 and k >= 2 and 1 + k < k * n and s.keep is None
                if again and not self._is_cheap_number(s, count):
                    self._store(
                        anchors, s, f"{k} readers would each load {n} arrays again"
                    )
                elif len(loaded) > self.limit - 2:
                    self._store(
                        anchors, s, f"inlined it would bind {len(loaded)} arrays"
                    )
                elif count > _MAX_NODES:
                    self._store(anchors, s, f"inlined it would take {count} operations")
            if s in anchors:
                loaded, count = {s}, 0
            sources[s], nodes[s] = frozenset(loaded), count
        self._store_prologues(order, anchors, sources)
        if self.target.family == "gpu":
            self._store_numbers(order, anchors, sources)
        twice = recomputed(order, self.outs, anchors)
        for s in (s for s in order if s in twice):
            self._store(anchors, s, "it is compared with its own maximum")
        return anchors

    def _is_cheap_number(self, s: Stage, count: int) -> bool:
        """Whether a map is one number that its readers had better compute each: on GPUs
        a kernel costs more than a few operations of a thread that waits for memory.
        """
        return self.target.family == "gpu" and s.size == 1 and count <= _NUMBER_NODES

    def _store(self, anchors: set[Stage], s: Stage, why: str) -> None:
        anchors.add(s)
        self.log.append(f"{s.name} {list(s.shape)} is stored: {why}")

    def _store_prologues(
        self,
        order: Sequence[Stage],
        anchors: set[Stage],
        sources: dict[Stage, frozenset[Stage]],
    ) -> None:
        """What a contraction reads many times over is stored, if computing it takes
        more than one array, or what a loop gives in another order or several times.
        """
        for s in order:
            if (
                s.kind != "reduce"
                or s.body is None
                or contract_parts(s, s.body) is None
            ):
                continue
            for n in s.loads:
                v, view = _viewed(n.data, anchors)
                if v.kind == "given" and view is not None and not same_order(view):
                    why = f"the contraction {s.name} reads it in this order"
                    self._store(anchors, view, why)
                if v.kind != "map" or v in anchors or v.keep == "inline":
                    continue
                large = {t for t in sources[v] if t.size * 4 >= v.size}
                hosted = any(
                    t.kind == "reduce"
                    and (t.size >= v.size or sorted(t.space) == sorted(v.ext))
                    for t in sources[v]
                )
                given = [t for t, _ in (_viewed(n.data, anchors) for n in v.loads)]
                again = any(given.count(t) > 1 for t in given if t.kind == "given")
                if len(large) > 1 or hosted or again:
                    self._store(
                        anchors, v, f"the contraction {s.name} reads it many times"
                    )

    def _store_numbers(
        self,
        order: Sequence[Stage],
        anchors: set[Stage],
        sources: dict[Stage, frozenset[Stage]],
    ) -> None:
        """A number of each row that only a sum over all rows reads is computed where
        the row is read: the one workgroup of that sum would wait for what it gathers.
        """
        for s in order:
            if s.kind != "reduce" or s.size != 1:
                continue
            for n in s.loads:
                v: Stage = n.data
                if v.kind != "map" or v in anchors or v.keep == "inline":
                    continue
                rows = [
                    t
                    for t in sources[v]
                    if t.kind == "reduce" and t.ext == v.ext and math.prod(t.rext) > 64
                ]
                if rows and any(t.size > v.size for t in sources[v]):
                    self._store(anchors, v, f"{s.name} reads it of all rows")


def _viewed(s: Stage, anchors: set[Stage]) -> tuple[Stage, Stage | None]:
    """What a stage is a view of, and the last of the views."""
    view = None
    while s.kind == "map" and s not in anchors and _is_view(s):
        assert s.body is not None
        view, s = s, s.body.data
    return s, view


def _is_view(s: Stage) -> bool:
    """A map that only reads elsewhere."""
    return s.kind == "map" and s.body is not None and s.body.kind == "load"
