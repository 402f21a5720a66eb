"""Readers of products that are no runs: sums that compute a product at each place."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..ir import expr as E
from ..ir.stage import Stage, factors
from .member import Member
from .online_runs import Run
from .spelling import WIDTH
from .target import Target

#: Places of such a sum, in elements of its product, beyond which storing the product
#: is better than to compute it anew at each place.
_PLACES = 4
#: The same where guards decide which places count: the others cost next to nothing.
_TESTED = 1 << 12
#: Steps of a dot product that are written out; longer ones loop.
UNROLLED = 16
NO_SUM = "it is no sum"
#: Why a kernel cannot be: the target binds fewer arrays.
CROWDED = "it would bind too many arrays"
#: Operations of one body, beyond which drivers compile too long.
_NODES = 400


@dataclass(eq=False)
class Points:
    """Sums of one kernel: over the same axes, of the same products."""

    runs: list[Run]
    products: tuple[Stage, ...]


def lanes_of(n: int, target: Target) -> tuple[int, int]:
    """Lanes of a sum of ``n`` places, and sums of a workgroup."""
    size = 64 if target.family == "software" else 128
    size = min(size, target.limits.max_invocations)
    width = 1
    while width < size and width < n:
        width *= 2
    return width, size // width


def steps_of(n: int, inner: Sequence[int], target: Target) -> int:
    """Iterations that a lane spends on a sum of ``n`` places."""
    width, _ = lanes_of(n, target)
    loops = sum(-(-d // WIDTH) for d in inner if -(-d // WIDTH) > UNROLLED)
    return -(-n // width) * (1 + loops)


def as_points(
    member: Member, products: Mapping[Stage, Member], target: Target
) -> Run | str:
    """A reader as such a sum, or why it is none."""
    s = member.stage
    if s.kind != "reduce" or s.monoid != "sum" or s.dtype != "f32":
        return NO_SUM
    read = [n.data for n in member.loads if n.data in products]
    read = list(dict.fromkeys(read))
    if any(n.data in products for x in member.loads for n in E.loads(*x.args)):
        return "an index of it is a product"
    places = math.prod(member.space)
    tested = bool(factors(member.body)[2])
    most = (_TESTED if tested else _PLACES) * min(x.size for x in read)
    if places > most:
        return f"its {places} places are many more than its product's"
    inner = [products[x].space[products[x].red[0]] for x in read]
    if steps_of(math.prod(s.rext), inner, target) > target.loop_budget * 0.9:
        return "its places are beyond the loop budget"
    if sum(1 for n in E.values(member.body)) > _NODES:
        return "its body is too long"
    run = Run(member, {x: {} for x in read}, None)
    if bindings([run], products) > target.limits.max_storage_buffers:
        return CROWDED
    return run


def group_points(
    runs: Sequence[Run],
    products: Mapping[Stage, Member],
    reach: Mapping[Stage, int],
    target: Target,
) -> list[Points]:
    """Sums that walk the same places share a kernel."""
    out: list[Points] = []
    for run in runs:
        if not any(_joins(p, run, products, reach, target) for p in out):
            out.append(Points([run], tuple(run.places)))
    return out


def _joins(
    p: Points,
    run: Run,
    products: Mapping[Stage, Member],
    reach: Mapping[Stage, int],
    target: Target,
) -> bool:
    a, b = p.runs[0].member, run.member
    if (a.stage.ext, a.stage.rext) != (b.stage.ext, b.stage.rext):
        return False
    mine = {n for r in p.runs for n in r.member.loads if n.data in products}
    if not mine & {n for n in b.loads if n.data in products}:
        return False
    trial = [*p.runs, run]
    own = 0
    for r in trial:
        own |= reach[r.stage] & ~_below(r, reach)
    for r in trial:
        read = [*r.member.loads, *(n for x in r.places for n in products[x].loads)]
        if any(reach.get(n.data, 0) & own for n in read):
            return False
    if bindings(trial, products) > target.limits.max_storage_buffers:
        return False
    p.runs.append(run)
    p.products = tuple(dict.fromkeys([*p.products, *run.places]))
    return True


def _below(r: Run, reach: Mapping[Stage, int]) -> int:
    mask = 0
    for n in r.stage.loads:
        mask |= reach.get(n.data, 0)
    return mask


def bindings(runs: Sequence[Run], products: Mapping[Stage, Member]) -> int:
    """Arrays that a kernel of these sums binds."""
    loaded = {n.data for r in runs for n in r.member.loads}
    loaded |= {n.data for r in runs for x in r.places for n in products[x].loads}
    inside = {x for r in runs for x in r.places}
    return len(loaded - inside) + len(runs)
