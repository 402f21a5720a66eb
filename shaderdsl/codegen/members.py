"""What each anchor computes: its body with all that is inlined, no larger than one
kernel can bind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..ir import expr as E
from ..ir.expr import Expr
from ..ir.stage import Stage, map_stage
from .anchors import Anchored
from .member import Inliner, Member, make_member, scatter_parts
from .online_scores import guarded


class Members:
    """Makes the members of a graph.

    Args:
        limit: arrays that a kernel can bind.

    Attributes:
        anchors: those of the graph, and parts that had to become some.
        log: what became of the graph, and why.
    """

    def __init__(self, anchored: Anchored, limit: int):
        self.anchors, self.log = set(anchored.anchors), list(anchored.log)
        self.online, self.limit = anchored.online, limit

    def make(self, order: Sequence[Stage]) -> list[Member]:
        """The members, in the order of the stages."""
        inliner = Inliner(self.anchors)
        members: list[Member] = []
        for s in order:
            if s not in self.anchors or s in self.online.virtual:
                continue
            if s in self.online.runs:
                members.append(self.online.runs[s].member)
                continue
            if s.kind == "given":
                members.append(Member(s, E.const(0), s.kind, (), (), tuple(s.loads)))
                continue
            assert s.body is not None
            body = guarded(inliner.body(s.body, s.space), self.online.scores)
            # Beside what is loaded: the result, and the links of a scatter.
            links = s.kind == "reduce" and scatter_parts(s, body) is not None
            most = self.limit - 1 - links
            if len({n.data for n in E.loads(body)}) > most:
                body = self._shorten(s, body, members, most)
            members.append(make_member(s, body))
        return members

    def _shorten(self, s: Stage, body: Expr, members: list[Member], most: int) -> Expr:
        """A body that loads more arrays than ``most``, which a kernel can bind beside
        its results: parts of it become stages of their own.
        """
        live = [a for a in range(len(s.space)) if s.space[a] != 1]
        while True:
            count: dict[Expr, frozenset[Stage]] = {}
            best: Expr | None = None
            for n in E.topo(body):
                found: set[Stage] = {n.data} if n.kind == "load" else set()
                for x in n.args:
                    found |= count[x]
                count[n] = frozenset(found)
                small = 2 <= len(found) < most
                if (
                    n.kind == "apply"
                    and small
                    and (best is None or len(found) > len(count[best]))
                ):
                    best = n
            if len(count[body]) <= most or best is None:
                return body
            best = self._narrow_part(s, body, count) or best
            axes = [a for a in live if best.free >> a & 1]
            part = map_stage(
                [s.space[a] for a in axes],
                E.substitute(best, {a: E.index(i) for i, a in enumerate(axes)}),
                f"{s.name}_part",
                loc=s.loc,
            )
            self.log.append(
                f"part of {s.name} is stored: the whole binds {len(count[body])} arrays"
            )
            self.anchors.add(part)
            if not any(m.stage is part for m in members):
                assert part.body is not None
                whole = part.body
                if len(count[best]) > self.limit - 1:
                    whole = self._shorten(part, whole, members, self.limit - 1)
                members.append(make_member(part, whole))
            replacement = E.load(part, [E.index(a) for a in axes])
            body = E.replace(body, best, replacement)

    def _narrow_part(
        self, s: Stage, body: Expr, count: dict[Expr, frozenset[Stage]]
    ) -> Expr | None:
        """The part with fewer elements than the whole (a number a row, which costs
        next to nothing) that saves most arrays, if one does.
        """
        whole = math.prod(s.space)
        best, least = None, len(count[body])
        for n, found in count.items():
            size = math.prod(s.space[a] for a in E.bits(n.free))
            if n.kind != "apply" or len(found) < 2 or size >= whole:
                continue
            left = set()
            for x in E.loads(E.replace(body, n, E.const(0, n.dtype))):
                left.add(x.data)
            if len(left) + 1 < least:
                best, least = n, len(left) + 1
        return best
