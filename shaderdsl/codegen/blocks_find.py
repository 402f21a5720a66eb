"""Where a large product need never exist whole: linear and cross entropy, by structure.

A *loop* takes the rows of a product X[r, c] = Σ_k x[r, k] · w[c, k] in blocks and does
all that reads X to one block before the next: row statistics, the derivative of X,
products with it. What is left of a block is one row of a smaller array for each of its
rows, or a share of a sum over all rows, which is added up.

Only products whose exponential is shifted by a number of their row are taken: softmax
and its relatives, whose rows are of no use by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..ir import expr as E
from ..ir.expr import Expr
from ..ir.stage import Stage, map_stage, rebind, topo_stages
from .anchors import Anchored
from .blocks_graph import Body, Loop, Place, Refused, results, rows_first
from .blocks_narrow import narrowed
from .blocks_rows import Axes, cut, read_rows, same_order, steps_of
from .compared import compared
from .member import Inliner, contract_parts
from .target import Target

#: A block takes this share of the product, and this share of `Target.block_from` at
#: least.
SHARE, LEAST = 8, 8


@dataclass
class Found:
    """Loops of a graph, and the graph around them."""

    outs: list[Stage]
    loops: list[Loop] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    inside: set[Stage] = field(default_factory=set)  # products in blocks alone
    # Of a graph without loops: its stages as they are planned, and their anchors.
    known: tuple[list[Stage], Anchored] | None = None


def find_loops(
    outs: Sequence[Stage],
    target: Target,
    hidden: Callable[[], frozenset[Stage] | set[Stage]],
) -> Found:
    """Loops over blocks of rows, with their results as ``given`` stages of the graph
    that is left.

    Args:
        hidden: products that are never stored anyhow; asked for if there is a reason.
    """
    found = Found(list(outs))
    if not target.block_from:
        return found
    order = [s for s in topo_stages(outs) if s.kind != "input" and s.size]
    large = [s for s in order if s.nbytes >= target.block_from and _is_product(s)]
    reads = [frozenset([n.data for n in s.loads]) for s in order] if large else []
    large = [s for s in large if _is_soft(s, order, reads)]
    if large:
        never = hidden()
        large = [s for s in large if s not in never]
        exact = compared(order, outs, large)
        found.log += [
            f"{s.name} {list(s.shape)} is not cut into blocks: it is compared with its "
            "own maximum"
            for s in large
            if s in exact
        ]
        large = [s for s in large if s not in exact]
    if not large:
        return found
    parts = narrowed(outs, large)
    if parts != list(outs):
        again = find_loops(parts, target, hidden)
        again.inside |= set(large)
        found.log = again.log
        return again if again.loops else found
    taken: set[Stage] = set()
    for x in large:
        if x in taken:
            continue
        why, best = "", list[Loop]()
        for axes in _candidates(x):
            try:
                loops = _Search(order, set(outs), x, axes, target).loops()
            except Refused as reason:
                why = why or str(reason)
                continue
            if any(set(loop.places) & taken for loop in loops):
                continue
            if not best or len(loops) < len(best):
                best = loops
        found.loops += best
        taken |= {s for loop in best for s in loop.places}
        found.inside |= {s for loop in best for s in loop.large if s.kind == "reduce"}
        found.log += [_line(x, loop) for loop in best]
        if not best:
            found.log.append(f"{x.name} {list(x.shape)} is not cut into blocks: {why}")
    if found.loops:
        surround(found)
    return found


def _line(x: Stage, loop: Loop) -> str:
    rows = max(n for _, n in loop.blocks)
    inside = ", ".join(dict.fromkeys(s.name for s in loop.places))
    return (
        f"{x.name} {list(x.shape)} is worked through in {len(loop.blocks)} blocks of "
        f"{rows} rows and never exists whole: {inside}"
    )


def _is_product(s: Stage) -> bool:
    if s.kind != "reduce" or s.monoid != "sum" or s.body is None:
        return False
    body = Inliner(set()).body(s.body, s.space)
    return contract_parts(s, body) is not None


def _is_soft(
    x: Stage, order: Sequence[Stage], reads: Sequence[frozenset[Stage]]
) -> bool:
    """Whether a body has the exponential of x less a number of x's row.

    Args:
        reads: what each stage of the order loads.
    """
    views = {x}
    inliner = Inliner(set())
    for s, loaded in zip(order, reads):
        if s.body is None or views.isdisjoint(loaded):
            continue
        if s.kind == "map":
            views.add(s)
        for e in E.values(inliner.body(s.body, s.space)):
            if e.kind == "apply" and e.data == "exp" and _shifted(e.args[0], x):
                return True
    return False


def _shifted(e: Expr, x: Stage) -> bool:
    """Whether something of x has a number of its row subtracted."""
    for n in E.values(e):
        if n.kind != "apply" or n.data != "sub":
            continue
        own = [o for o in E.loads(n.args[0]) if o.data is x]
        row = [o for o in E.loads(n.args[1]) if o.free]
        pairs = [(o.free, r.free) for o in own for r in row]
        if pairs and all(r != o and not r & ~o for o, r in pairs):
            return True
    return False


def _candidates(x: Stage) -> list[Axes]:
    """Axes that may count rows, the most promising first."""
    assert x.body is not None
    parts = contract_parts(x, Inliner(set()).body(x.body, x.space))
    assert parts is not None
    sides = [(*parts.batch, *parts.m), (*parts.batch, *parts.n), parts.batch]
    axes = [tuple(sorted(a)) for a in sides if a]
    return list(dict.fromkeys(a for a in axes if a))


class _Search:
    """Everything that a product's rows reach, for one choice of its row axes."""

    def __init__(
        self,
        order: Sequence[Stage],
        outs: set[Stage],
        x: Stage,
        axes: Axes,
        target: Target,
    ):
        self.order, self.outs, self.target = order, outs, target
        self.x = x
        self.count = math.prod(x.ext[a] for a in axes)
        self.seeds: dict[Stage, Axes] = {x: axes}

    def loops(self) -> list[Loop]:
        """The loops, without their surroundings.

        Raises:
            Refused: there is something in the way.
        """
        while True:
            loops = self._levels()
            bodies = [Body(loop, loop.count) for loop in loops]
            # Another product of the same rows, such as a teacher's logits.
            more = {
                s: axes
                for body in bodies
                for s, axes in body.products.items()
                if s.nbytes >= self.target.block_from
            }
            if not more:
                break
            self.seeds.update(more)
        for loop, body in zip(loops, bodies, strict=True):
            loop.externals = list(body.externals)
            loop.blocks = self._cut(loop, body.row_bytes)
        return loops

    # -------------------------------------------------------------- what is inside

    def _follow(self) -> dict[Stage, Place | None]:
        """Stages that depend on the seeds; None where no rows are left."""
        places: dict[Stage, Place | None] = {}
        for s in self.order:
            if s in self.seeds:
                places[s] = Place(self.seeds[s])
                continue
            reads = [n for n in s.loads if n.data in places]
            if not reads:
                continue
            places[s] = None
            rows = set()
            for n in reads:
                p = places[n.data]
                if p is not None and not p.summed:
                    rows.add(read_rows(n, p.axes, s.space, self.count))
            axes = rows.pop() if len(rows) == 1 else None
            if axes:
                summed = [a >= len(s.ext) for a in axes]
                if all(summed) or not any(summed):
                    places[s] = Place(axes, summed[0])
        return places

    def _large(self, s: Stage, place: Place | None) -> bool:
        if place is None or place.summed:
            return False
        return s in self.seeds or (s.kind == "map" and 4 * s.size >= self.x.size)

    def _levels(self) -> list[Loop]:
        """One loop for what needs no sum over all rows, another for what needs those
        sums, and so on; a large stage that both need is computed in both.
        """
        places = self._follow()
        large = {s for s in self.order if s in places and self._large(s, places[s])}
        must = {s for s in self.order if any(n.data in large for n in s.loads)}
        for s in large & self.outs:
            raise Refused(f"{s.name} is an output")
        for s in self.order:
            if s in must and places[s] is None:
                raise Refused(f"{s.name} reads it across rows")
        needed: set[Stage] = set(must)
        for s in reversed(self.order):
            if s in needed:
                needed |= {n.data for n in s.loads}
        inside: dict[Stage, Place] = {}
        for s, p in places.items():
            if p is None or not (s in must or s in large or s in needed):
                continue
            if s in must or s in large or not p.summed:
                inside[s] = p
        level: dict[Stage, int] = {}
        for s in self.order:
            level[s] = 0
            for n in s.loads:
                y = n.data
                after = y in inside and (inside[y].summed or s not in inside)
                level[s] = max(level[s], level.get(y, 0) + (1 if after else 0))
        loops = []
        for here in sorted({level[s] for s in must}):
            chosen = {s for s in inside if level[s] == here}
            stack = list(chosen)
            while stack:
                for n in stack.pop().loads:
                    if n.data in large and n.data not in chosen:
                        chosen.add(n.data)
                        stack.append(n.data)
            loops.append(
                Loop(
                    self.count,
                    {s: inside[s] for s in self.order if s in chosen},
                    large & chosen,
                )
            )
        return loops

    # -------------------------------------------------------------- blocks

    def _cut(self, loop: Loop, row_bytes: dict[Stage, int]) -> list[tuple[int, int]]:
        limits = self.target.limits
        widest = max(s.nbytes // self.count for s in loop.large)
        budget = max(self.x.nbytes // SHARE, self.target.block_from // LEAST)
        rows = max(1, min(budget, limits.max_binding_bytes) // max(widest, 1))
        # Blocks are bound as parts of whole arrays, which must begin where they may.
        steps = steps_of(row_bytes.values(), limits.storage_alignment)
        blocks = cut(self.count, rows, steps)
        if len(blocks) < 2:
            raise Refused("its rows cannot be cut where arrays may be bound")
        if max(n for _, n in blocks) * widest > limits.max_binding_bytes:
            raise Refused("a block would be more than a kernel may bind")
        return blocks


# ------------------------------------------------------------------ the graph around


def surround(found: Found) -> None:
    """Put given stages in the place of results; raises nothing.

    A result of heads that is only read under another shape is given under that.
    """
    inside: dict[Stage, Loop] = {}
    wanted: set[Stage] = set()
    for loop in found.loops:
        for s in loop.places:
            inside.setdefault(s, loop)
        wanted |= results(loop)
    seen: set[Stage] = set()
    stack = [*found.outs, *(s for loop in found.loops for s in loop.externals)]
    while stack:
        s = stack.pop()
        if s in seen:
            continue
        seen.add(s)
        if s in wanted:
            loop = next(x for x in found.loops if s in results(x))
            given = Stage("given", s.ext, (), None, None, s.groups, s.dtype, s.name)
            given.loc = s.loc
            loop.given[s] = given
            continue
        stack += [n.data for n in s.loads]
    found.loops = [loop for loop in found.loops if loop.given]
    externals = [s for loop in found.loops for s in loop.externals]
    stand_ins = {}
    for loop in found.loops:
        read = {*externals, *found.outs}
        shown = _shown(loop, seen, read) if loop.scores else {}
        for s, g in loop.given.items():
            v = shown.get(s, s)
            if loop.moved and not rows_first(s, loop.places[s].axes):
                stand_ins[s] = _moved(loop, s)
                continue
            if v is not s:
                g = Stage("given", v.ext, (), None, None, v.groups, v.dtype, v.name)
                g.loc = v.loc
                loop.given[s] = g
            stand_ins[v] = g
    new = rebind([*found.outs, *externals], stand_ins)
    found.outs = new[: len(found.outs)]
    place = dict(zip(externals, new[len(found.outs) :], strict=True))
    for loop in found.loops:
        loads = [E.load(place[s], [E.const(0)] * len(s.shape)) for s in loop.externals]
        for g in loop.given.values():
            g.loads = loads


def _moved(loop: Loop, s: Stage) -> Stage:
    """A result as it is read, of one that is given with its rows first."""
    axes = loop.places[s].axes
    order = [*axes, *(a for a in range(len(s.ext)) if a not in axes)]
    ext = [s.ext[a] for a in order]
    g = Stage("given", ext, (), None, None, None, s.dtype, s.name)
    g.loc = s.loc
    loop.given[s] = g
    body = E.load(g, [E.index(a) for a in order])
    return map_stage(s.ext, body, s.name, groups=s.groups, dtype=s.dtype, loc=s.loc)


def _shown(loop: Loop, seen: set[Stage], read: set[Stage]) -> dict[Stage, Stage]:
    """Results that are read by one map alone, which is nothing but another shape, and
    are not among what else is read.
    """
    shown = {}
    for s in loop.given:
        readers = [t for t in seen if any(n.data is s for n in t.loads)]
        if s in read or len(readers) != 1:
            continue
        v = readers[0]
        n = v.body
        if v.kind != "map" or n is None or n.kind != "load" or v.dtype != s.dtype:
            continue
        if same_order(v):
            shown[s] = v
    return shown
