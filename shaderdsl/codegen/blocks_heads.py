"""Gradients of scores that are too large to be stored whole: groups of heads in turn.

dS = f(S, dP) is stored by the kernel of dk and dv and read by the product that gives dq
(`online_scores`). Where memory does not allow that for all heads, a loop does it for as
many of them as fit, and the next ones take the same memory. Every array has its rows,
the batches and heads of keys, first, or is copied so: a group is a part of each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from ..ir.stage import Stage, topo_stages
from .anchors import Anchored
from .blocks import inside
from .blocks_find import Found, surround
from .blocks_graph import Body, Loop, Place, Refused, results
from .blocks_rows import Axes, loaded_rows, read_rows, steps_of
from .member import contract_parts
from .online_groups import sums_by_group
from .online_runs import find_products, soft_maps
from .online_scores import most_at_once, scores_budget
from .online_steps import sums_in_steps
from .target import Target

_ANY = 1 << 62

#: Rows of scores with which a group of heads that are copied keeps a large GPU busy:
#: at 8192 positions three heads of queries gained on an H200, two lost.
_ROWS = 24_576


def add_head_loops(found: Found, target: Target) -> None:
    """Loops over groups of heads, where not all gradients of scores may be stored."""
    if target.family != "gpu" or not target.online or target.scores == 0:
        return
    order = _order(found.outs)
    wide = _wide(order, set(found.outs))
    budget = scores_budget(order, target)
    most = min(budget, target.limits.max_binding_bytes)
    if most_at_once(order, wide) <= budget and all(s.nbytes <= most for s in wide):
        return
    found.outs = sums_in_steps(found.outs, target)
    whole = Anchored(found.outs, _unbounded(target), found.loops)
    maps = {s: x.readers for s, x in whole.online.scores.items()}
    if most_at_once(whole.order, maps) <= budget and all(
        s.nbytes <= most for s in maps
    ):
        return
    mine, order = Found(found.outs), _order(found.outs)
    for s in maps:
        try:
            loop = _Search(whole, order, s).loop(target, most)
        except Refused as why:
            mine.log.append(f"{s.name} {list(s.shape)} is not stored by groups: {why}")
            continue
        taken = {t for one in mine.loops for t in results(one)}
        if taken.isdisjoint(results(loop)):
            mine.loops.append(loop)
            heads = max(n for _, n in loop.blocks)
            mine.log.append(
                f"{s.name} {list(s.shape)} is stored for {heads} of {loop.count} parts "
                f"(heads of keys or batches) at a time, "
                f"{heads * s.nbytes // loop.count:,} bytes in {len(loop.blocks)} "
                f"groups: two kernels need it"
            )
    if _circular(mine.loops, order):
        mine.loops, mine.log = [], ["groups of heads would need each other's results"]
    if mine.loops:
        surround(mine)
    found.outs = mine.outs
    found.loops += mine.loops
    found.log += mine.log
    found.inside |= {s for x in mine.loops for s in x.large if s.kind == "reduce"}


def _unbounded(target: Target) -> Target:
    return replace(
        target,
        scores=_ANY,
        limits=replace(target.limits, max_binding_bytes=_ANY),
    )


def _order(outs: Sequence[Stage]) -> list[Stage]:
    return [s for s in topo_stages(outs) if s.kind != "input" and s.size]


def _wide(order: Sequence[Stage], outs: set[Stage]) -> dict[Stage, list[Stage]]:
    """Maps of products that two reductions read, with these."""
    anchors = {s for s in order if s.kind == "reduce"} | outs
    soft = soft_maps(order, find_products(order, anchors, outs))
    users: dict[Stage, list[Stage]] = {}
    for s in order:
        if s.kind == "reduce":
            for t in {n.data for n in s.loads} & soft:
                users.setdefault(t, []).append(s)
    return {s: u for s, u in users.items() if len(u) > 1 and s.dtype == "f32"}


def _circular(loops: Sequence[Loop], order: Sequence[Stage]) -> bool:
    """Whether there is no order in which each loop is done after what it reads."""
    feeds: list[set[int]] = []
    reads = [{n.data for s in x.places for n in s.loads} - set(x.places) for x in loops]
    for loop in loops:
        after = results(loop)
        for s in order:
            if any(n.data in after for n in s.loads):
                after.add(s)
        feeds.append(
            {i for i, x in enumerate(loops) if x is not loop and reads[i] & after}
        )
    left = set(range(len(loops)))
    while left:
        first = {i for i in left if not any(i in feeds[k] for k in left)}
        if not first:
            return True
        left -= first
    return False


class _Search:
    """What the two kernels of one map compute, and along which axes it is cut."""

    def __init__(self, whole: Anchored, order: Sequence[Stage], scores: Stage):
        self.whole, self.order, self.scores = whole, order, scores
        products = whole.online.products
        soft = soft_maps(self.order, products)
        self.sums = set(whole.online.scores[scores].sums)
        self.large: set[Stage] = set()
        asked = whole.outs | {s for s in self.order if s.keep == "store"}
        stack = list(self.sums)
        while stack:
            for t in {n.data for n in stack.pop().loads} - self.large:
                if t in products or (t in soft and t not in asked):
                    self.large.add(t)
                    stack.append(t)

    def loop(self, target: Target, most: int) -> Loop:
        """The loop, without its surroundings.

        Raises:
            Refused: there is something in the way.
        """
        self._alone()
        product = next(s for s in self.order if s in self.large and s.kind == "reduce")
        assert product.body is not None
        parts = contract_parts(product, product.body)
        axes = tuple(a for a in parts.batch if product.ext[a] > 1) if parts else ()
        if not axes:
            raise Refused("there is one head of keys")
        # Where heads do not come first in memory batches may, else they are put first.
        for part in dict.fromkeys((axes, axes[:1])):
            with suppress(Refused):
                return self._along(product, part, target, most)
        return self._along(product, axes, target, most, moved=True)

    def _along(
        self,
        product: Stage,
        axes: Axes,
        target: Target,
        most: int,
        moved: bool = False,
    ) -> Loop:
        count = math.prod(product.ext[a] for a in axes)
        places = self._places(product, axes, count)
        stored = frozenset(self.whole.anchors)
        loop = Loop(count, places, self.large, scores=True, stored=stored, moved=moved)
        body = Body(loop, count)
        loop.externals = list(body.externals)
        alignment = target.limits.storage_alignment
        steps = steps_of(body.row_bytes.values(), alignment)
        loop.blocks = _groups(count, steps, most * count // self.scores.nbytes)
        if not loop.blocks:
            least = self.scores.nbytes * min(steps, count) // count
            raise Refused(f"a group takes {least:,} bytes, more than {most:,}")
        if moved:
            self._pays(loop, body)
        self._check(loop, target)
        return loop

    def _pays(self, loop: Loop, body: Body) -> None:
        """Copies must be few bytes, and groups must keep a GPU busy."""
        copied = sum(s.nbytes for s in {*body.copied, *results(loop)})
        if copied > self.scores.nbytes:
            raise Refused(f"{copied:,} bytes would be copied to put heads first")
        rows = max(n for _, n in loop.blocks) * self.scores.size // loop.count
        rows //= max(self.scores.ext)
        if rows < _ROWS:
            raise Refused(f"a group has {rows:,} rows, too few to keep a GPU busy")

    def _alone(self) -> None:
        """What the loop reads must not depend on what it gives."""
        after: set[Stage] = set()
        for s in self.order:
            if any(n.data in after or n.data in self.sums for n in s.loads):
                if s in self.sums or s in self.large:
                    raise Refused(f"{s.name} needs what the loop gives")
                after.add(s)

    def _places(self, product: Stage, axes: Axes, count: int) -> dict[Stage, Place]:
        """The axes of each stage that count heads, from those of one product."""
        inside = [s for s in self.order if s in self.large or s in self.sums]
        found: dict[Stage, Axes] = {product: axes}
        while True:
            before = len(found)
            for s in inside:
                for n in s.loads:
                    if n.data in found and s not in found:
                        a = read_rows(n, found[n.data], s.space, count)
                        if a and all(x < len(s.ext) for x in a):
                            found[s] = a
            for s in inside:
                for n in s.loads if s in found else ():
                    if n.data in self.large and n.data not in found:
                        a = loaded_rows(n, found[s], s.space, count)
                        if a:
                            found[n.data] = a
            if len(found) == before:
                break
        for s in inside:
            if s not in found:
                raise Refused(f"{s.name} has no heads of its own")
            for n in s.loads:
                a = found.get(n.data)
                if a and read_rows(n, a, s.space, count) != found[s]:
                    raise Refused(f"{s.name} reads {n.data.name} across heads")
        return {s: Place(found[s]) for s in inside}

    def _check(self, loop: Loop, target: Target) -> None:
        """Every group must store its part."""
        target = inside(target, loop)
        for rows in dict.fromkeys(n for _, n in loop.blocks):
            body = Body(loop, rows)
            outs = [s for t, s in body.stages.items() if t in self.sums]
            in_steps = sums_by_group(sums_in_steps(outs, target), target)
            online = Anchored(in_steps, target).online
            if not online.scores:
                raise Refused(f"{rows} heads at a time do not fill the kernels")


def _groups(count: int, steps: int, most: int) -> list[tuple[int, int]]:
    """Groups as (first, heads): few, of much the same size, none of one head alone
    beside larger ones, since that would be other kernels.
    """
    most = min(count, most // steps * steps)
    if most < 1:
        return []
    even = math.ceil(count / math.ceil(count / most))
    start = min(most, math.ceil(even / steps) * steps)
    for rows in range(start, 0, -steps):
        if rows == 1 or count % rows != 1:
            return [(at, min(rows, count - at)) for at in range(0, count, rows)]
    return [(at, min(most, count - at)) for at in range(0, count, most)]
