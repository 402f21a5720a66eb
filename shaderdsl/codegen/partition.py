"""Where a kernel ends: by structure and cost, never by a list of op names.

Anchors (outputs, reductions, stored maps) are placed in topological order into groups.
A group has row axes R and lane axes L: a reduction L → R is a phase of a row, R → L is
a column partial that a second stage finishes, everything else is a map. A consumer
joins the kernel of its producer when it reads the producer's result where that kernel
has it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ..ir.stage import Stage
from .anchors import Anchored
from .blocks_graph import Loop
from .budget import row_fits
from .group import Group
from .member import Member, anchor_axes, digit_axes
from .members import Members
from .online_chain import Chain
from .online_readers import Points
from .scan_form import scan_parts
from .slices import find_slices
from .target import Target

# Rows from which a kernel of a workgroup a row keeps a device busy.
_MANY_ROWS = 16

#: Why a row stays apart.
LONG = "its rows would be beyond the loop budget"

# What a stage may be computed beside, when both read the same arrays.
_BESIDE = {"map": ("map", "row"), "row": ("row", "map"), "column": ("row",)}


class Partition:
    """Groups of a graph, in an order of execution.

    Args:
        anchored: the anchors of the same graph, if they are known.
    """

    def __init__(
        self,
        outs: Sequence[Stage],
        target: Target,
        loops: Sequence[Loop] = (),
        anchored: Anchored | None = None,
    ):
        anchored = anchored or Anchored(outs, target, loops)
        self.target, self.outs = target, anchored.outs
        self.loop_of, self.limit = anchored.loop_of, target.limits.max_storage_buffers
        self.online = anchored.online
        made = Members(anchored, self.limit)
        self.members = self.online.together(made.make(anchored.order))
        self.log, self.anchors = made.log, made.anchors
        self.by_stage = {m.stage: m for m in self.members}
        self.group: dict[Stage, Group] = {}
        self.groups: list[Group] = []
        self.position = {m: i for i, m in enumerate(self.members)}
        self.readers: dict[Stage, list[Member]] = {}
        for m in self.members:
            for s in {n.data for n in (*m.loads, *self.online.product_loads(m))}:
                self.readers.setdefault(s, []).append(m)
        for m in self.members:
            self._place(m)
        self.groups = self._ordered()
        for g in self.groups:
            g.members.sort(key=lambda m: self.position.get(m, -1))
            inside = set(g.members)
            g.stored = [
                m
                for m in g.members
                if self.by_stage.get(m.stage) is m
                and (
                    m.stage in self.outs
                    or m.stage.keep == "store"
                    or any(r not in inside for r in self.readers.get(m.stage, ()))
                )
            ]

    # -------------------------------------------------------------- placing

    def _place(self, m: Member) -> None:
        if m.stage in self.online.runs:
            if m.stage not in self.group:
                self._open_chain(self.online.chain_of[m.stage])
            return
        if m.role == "given":
            self._open_loop(m)
            return
        producers = list(
            dict.fromkeys(self.group[n.data] for n in m.loads if n.data in self.group)
        )
        for g in reversed(producers):
            axes = self._joins(m, g, producers)
            if axes is None:
                continue
            self._add(g, m, axes)
            g.why.append(f"{m.stage.name} reads what this kernel has in registers")
            if g.kind == "row":
                for h in producers:
                    if h is not g and h.kind == "row" and h in self.groups:
                        self._unite(g, h, m)
            return
        if any(self._along_rows(m, g, producers) for g in reversed(producers)):
            return
        if self._sideways(m, producers):
            return
        self._open(m)

    def _open_loop(self, m: Member) -> None:
        """One group for all results of a loop over blocks."""
        loop = self.loop_of[m.stage]
        g = next((g for g in self.groups if g.loop is loop), None)
        if g is None:
            g = Group("given", (), (), anchors=self.anchors, loop=loop)
            g.bit = 1 << self.position[m]
            self.groups.append(g)
        self._add(g, m, [])

    def _open_chain(self, c: Chain | Points) -> None:
        """One group for all runs of a chain, or for all sums over the same places."""
        plan = self.online.layout(c)
        kind = "points" if isinstance(c, Points) else c.kind
        g = Group(kind, plan.rows, plan.lanes)
        g.anchors = self.online.inner
        g.why.append(plan.why)
        g.bit = 1 << self.position[c.runs[0].member]
        self.groups.append(g)
        for m, axes in plan.products:
            g.members.append(m)
            g.axes[m] = axes
        for m, axes in plan.runs:
            self._add(g, m, axes)

    def _open(self, m: Member) -> None:
        """A group of its own."""
        n_out = len(m.out)
        ext = [m.space[a] for a in m.axes]
        if m.role == "map":
            g = Group("map", (), tuple(ext))
            axes = list(range(len(ext)))
        elif m.role == "column":
            g = Group("row", tuple(ext[n_out:]), tuple(ext[:n_out]))
            axes = [len(ext) - n_out + i for i in range(n_out)] + list(
                range(len(ext) - n_out)
            )
        elif m.role == "scan":
            # Output axis and reduced axis are one line of the kernel, its last axis.
            parts = scan_parts(m.stage, m.body)
            assert parts is not None
            others = [a for a in m.out if a != parts.axis]
            g = Group("scan", tuple(m.space[a] for a in others), (m.space[parts.red],))
            axes = [others.index(a) if a in others else len(others) for a in m.axes]
        else:
            g = Group(m.role, tuple(ext[:n_out]), tuple(ext[n_out:]))
            axes = list(range(len(ext)))
        g.anchors = self.anchors
        g.bit = 1 << self.position[m]
        self.groups.append(g)
        self._add(g, m, axes)

    def _reaches(self, a: Group, b: Group) -> bool:
        """Whether b needs a."""
        return bool(b.before & a.bit)

    def _joins(
        self, m: Member, g: Group, producers: Sequence[Group]
    ) -> list[int] | None:
        """The kernel axes that m would have in its producer's group, or None."""
        kinds = ("row", "contract", "map", "online", "pieces", "points")
        if g.kind not in kinds:
            return None
        where = self._read_axes(m, g)
        if where is None:
            return None
        if any(p is not g and self._reaches(g, p) for p in producers):
            return None
        rows = len(g.rows)
        if g.kind == "contract":
            if (
                m.role != "map"
                or set(m.axes) != set(where)
                or set(where.values()) != set(range(rows))
            ):
                return None
        elif g.kind == "map":
            if (
                m.role != "map"
                or set(m.axes) != set(where)
                or len(where) != len(g.space)
            ):
                return None
        elif g.kind == "points":
            plain = set(where.values()) == set(range(rows))
            if m.role != "map" or set(m.axes) != set(where) or not plain:
                return None
        elif g.kind in ("online", "pieces"):
            beyond = set(where.values()) - set(range(rows))
            live = sum(n != 1 for n in g.rows)
            if (
                m.role != "map"
                or set(m.axes) != set(where)
                or len(where) != live + len(beyond)
                or len(beyond) > 1
            ):
                return None
        else:
            if not set(range(rows)) <= set(where.values()):
                return None
            left = [a for a in m.axes if a not in where]
            free = [q for q in range(rows, len(g.space)) if q not in where.values()]
            if left and [m.space[a] for a in left] != [g.space[q] for q in free]:
                return None
            if left and not self._worth_a_row(m, g):
                return None
            if left:
                where.update(zip(left, free, strict=True))
            if not self._walks_fit([*g.members, m], g.lanes):
                self.log.append(f"{m.stage.name} stays apart from its producer: {LONG}")
                return None
            if not self._role_fits(m, where, g):
                return None
        if not self._fits([*g.members, m]):
            self.log.append(
                f"{m.stage.name} stays apart from its producer: more than {self.limit} "
                "bindings"
            )
            return None
        return [where[a] for a in m.axes]

    def _along_rows(self, m: Member, g: Group, producers: Sequence[Group]) -> bool:
        """Turn a map kernel into one of rows, for a reduction along the last axes of
        what it stores.
        """
        if g.kind != "map" or m.role != "row":
            return False
        where = self._read_axes(m, g)
        if (
            where is None
            or set(where) != set(m.axes)
            or any(p is not g and self._reaches(g, p) for p in producers)
            or not self._fits([*g.members, m])
            or not _turn_to_rows(m, where, g)
        ):
            return False
        self._add(g, m, [where[a] for a in m.axes])
        g.why.append(f"{m.stage.name} reads what this kernel has in registers")
        return True

    def _read_axes(self, m: Member, g: Group) -> dict[int, int] | None:
        """Where m's axes lie in the kernel of a group that it reads; None where its
        loads disagree.
        """
        where: dict[int, int] = {}
        for n in m.loads:
            if self.group.get(n.data) is not g:
                continue
            producer = self.by_stage[n.data]
            axes = None if producer.role == "column" else anchor_axes(n, m.space)
            if axes is None:
                return None
            for a, own in zip(axes, g.axes[producer], strict=False):
                if where.setdefault(a, own) != own:
                    return None
        return where if len(set(where.values())) == len(where) else None

    def _worth_a_row(self, m: Member, g: Group) -> bool:
        """Whether a reader should be computed by the kernel of the row that it reads.

        A single row is one workgroup: only what reads that row itself belongs there.
        """
        if math.prod(g.rows) >= _MANY_ROWS:
            return True
        inside = {n.data for x in g.members for n in x.loads}
        return any(n.data in inside and n.free for n in m.loads)

    def _role_fits(self, m: Member, where: dict[int, int], g: Group) -> bool:
        rows = len(g.rows)
        if m.role == "map":
            return True
        lanes = set(range(rows, len(g.space)))
        out, red = {where[a] for a in m.out}, {where[a] for a in m.red}
        if red == lanes and out == set(range(rows)) and m.role in ("row", "column"):
            m.role = "row"
            return True
        # The partial sums lie as the lanes do, so the lanes must be in the order of the
        # result.
        in_order = [where[a] for a in m.out] == sorted(lanes)
        return (
            m.role == "column"
            and m.stage.monoid == "sum"
            and red == set(range(rows))
            and in_order
        )

    def _fits(self, members: Iterable[Member]) -> bool:
        inside = list(members)
        stages = {m.stage for m in inside}
        loaded = {n.data for m in inside for n in m.loads if n.data not in stages}
        written = sum(
            1
            for m in inside
            if self.by_stage.get(m.stage) is m
            and (
                m.stage in self.outs
                or m.stage.keep == "store"
                or any(r not in inside for r in self.readers.get(m.stage, ()))
            )
        )
        return len(loaded) + written <= self.limit

    def _walks_fit(self, members: Iterable[Member], lanes: Sequence[int]) -> bool:
        """Whether one kernel may walk its rows for all of these: each reduction may
        be a phase of its own, and what is stored is the last.
        """
        walks = 1 + sum(m.role not in ("map", "column") for m in members)
        return row_fits(math.prod(lanes), walks, self.target)

    def _sideways(self, m: Member, producers: Sequence[Group]) -> bool:
        """Join a kernel that reads the same arrays over the same axes."""
        if m.role not in _BESIDE:
            return False
        for g in self.groups:
            if g.kind not in _BESIDE[m.role] or len(g.space) != len(m.axes):
                continue
            if any(p is g or self._reaches(g, p) for p in producers):
                continue
            if m.role != "column" and not all(map(_beside_rows, g.members)):
                continue
            axes = self._shared_axes(m, g)
            if axes is None or not self._fits([*g.members, m]):
                continue
            if g.kind == "map":
                if m.role == "row" and not _turn_to_rows(m, axes, g):
                    continue
            elif m.role == "map":
                if math.prod(g.rows) < _MANY_ROWS or _writes_slice(m):
                    continue
            elif not self._role_fits(m, axes, g):
                continue
            if g.kind == "row" and not self._walks_fit([*g.members, m], g.lanes):
                continue
            self._add(g, m, [axes[a] for a in m.axes])
            g.why.append(f"{m.stage.name} reads the same arrays")
            return True
        return False

    def _shared_axes(self, m: Member, g: Group) -> dict[int, int] | None:
        for n in m.loads:
            own = digit_axes(n, m.space)
            if own is None or len(own) != len(g.space):
                continue
            for other in g.members:
                for n2 in other.loads:
                    if n2.data is not n.data:
                        continue
                    theirs = digit_axes(n2, other.space)
                    if theirs is None or len(theirs) != len(own):
                        continue
                    place = dict(zip(other.axes, g.axes[other], strict=True))
                    axes = {a: place[b] for a, b in zip(own, theirs, strict=True)}
                    if set(axes) == set(m.axes) and all(
                        m.space[a] == g.space[q] for a, q in axes.items()
                    ):
                        return axes
        return None

    def _add(self, g: Group, m: Member, axes: list[int]) -> None:
        g.members.append(m)
        g.axes[m] = axes
        self.group[m.stage] = g
        new = 0
        for n in (*m.loads, *self.online.product_loads(m)):
            p = self.group.get(n.data)
            if p is not None and p is not g:
                new |= p.bit | p.before
        if new & ~g.before:
            g.before |= new
            for h in self.groups:
                if h.before & g.bit:
                    h.before |= g.before

    def _unite(self, g: Group, h: Group, m: Member) -> None:
        """Two row kernels that one consumer reads become one, if they walk the same
        rows and lanes.
        """
        if (g.rows, g.lanes) != (h.rows, h.lanes):
            return
        for a, b in ((g, h), (h, g)):
            inside = {x.stage for x in b.members if x.role == "column"}
            if any(n.data in inside for x in a.members for n in x.loads):
                return
        if any(
            q is not g
            and q is not h
            and (
                (self._reaches(g, q) and self._reaches(q, h))
                or (self._reaches(h, q) and self._reaches(q, g))
            )
            for q in self.groups
        ):
            return
        members = [*g.members, *h.members]
        if not self._fits(members) or not self._walks_fit(members, g.lanes):
            return
        for x in (*g.members, *h.members):
            for n in x.loads:
                other = self.by_stage.get(n.data)
                if (
                    other is None
                    or (other not in g.axes and other not in h.axes)
                    or (x in g.axes) == (other in g.axes)
                ):
                    continue
                axes = anchor_axes(n, x.space)
                own = dict(zip(x.axes, (g if x in g.axes else h).axes[x], strict=True))
                there = (g if other in g.axes else h).axes[other]
                if axes is None or any(
                    own[a] != q for a, q in zip(axes, there, strict=False)
                ):
                    return
        for x in h.members:
            g.axes[x] = h.axes[x]
            self.group[x.stage] = g
        g.members += h.members
        g.why += [*h.why, f"{m.stage.name} reads both"]
        self.groups.remove(h)
        old = h.bit
        g.bit |= old
        g.before = (g.before | h.before) & ~g.bit
        for q in self.groups:
            if q is not g and q.before & g.bit:
                q.before |= g.before | g.bit

    def _ordered(self) -> list[Group]:
        done: set[Group] = set()
        out: list[Group] = []
        for start in self.groups:
            stack = [(start, False)]
            while stack:
                g, ready = stack.pop()
                if ready:
                    out.append(g)
                    continue
                if g in done:
                    continue
                done.add(g)
                stack.append((g, True))
                for x in reversed(g.members):
                    for n in x.loads:
                        p = self.group.get(n.data)
                        if p is not None and p is not g and p not in done:
                            stack.append((p, False))
        return out


def _turn_to_rows(m: Member, axes: dict[int, int], g: Group) -> bool:
    """Make a map kernel one of rows with m's result along them and what m reduces as
    lanes, if these are its last axes and there are rows enough.
    """
    rows = len(m.out)
    many = math.prod(g.space[:rows]) >= _MANY_ROWS
    if (
        not many
        or any(map(_writes_slice, g.members))
        or [axes[a] for a in m.axes] != list(range(len(g.space)))
    ):
        return False
    g.kind, g.rows, g.lanes = "row", g.space[:rows], g.space[rows:]
    return True


def _writes_slice(m: Member) -> bool:
    """Whether a map is an update of a slice: alone it may write no more than that."""
    return bool(find_slices(m.body, m.space)[0])


def _beside_rows(m: Member) -> bool:
    """Whether a kernel of rows can compute this: of reductions over rows only sums."""
    return m.role != "column" or m.stage.monoid == "sum"
