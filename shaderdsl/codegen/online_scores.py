"""Values of single scores that one chain stores for another kernel.

The gradients of queries and of keys both need ``dS = f(S, dP)``: one kernel sums it
over queries, the other over keys. Computing it in both takes seven products; where
memory allows, the kernel of the keys writes dS down and the gradient of the queries
is a plain product of five. Tiles that the masks prove empty are neither written nor
read: a reader asks the same conditions again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..ir import expr as E
from ..ir.expr import Expr
from ..ir.stage import Stage
from .member import Inliner, Member, anchor_axes, make_member
from .online_runs import Run, zero_guards
from .spelling import WIDTH
from .target import Target

if TYPE_CHECKING:
    from .online_chain import Chain


@dataclass(frozen=True)
class Scores:
    """A stored map of scores.

    Args:
        conditions: outside of them it is 0, and not written.
        hosts, readers: the sums of the kernel that stores it, and of the one that reads
            it.
    """

    conditions: list[Expr]
    hosts: tuple[Stage, ...]
    readers: tuple[Stage, ...]

    @property
    def sums(self) -> tuple[Stage, ...]:
        """Of both kernels."""
        return (*self.hosts, *self.readers)


#: What the schedule of streams takes, whatever the limits of a device.
_ROWS, _DEPTH, _WIDEST = 64, 16, 128


def store_scores(
    chains: list[Chain],
    order: Sequence[Stage],
    soft: set[Stage],
    inner: set[Stage],
    products: dict[Stage, Member],
    outs: set[Stage],
    reach: Mapping[Stage, int],
    target: Target,
    budget: int,
) -> tuple[dict[Stage, Scores], set[Stage]]:
    """Let chains store maps that other chains would compute again.

    Args:
        reach: the runs that each stage needs or is (`reach_of`).
        budget: bytes of such maps that may exist at one time.

    Returns:
        the maps, and the sums that are no runs any more, whose chains are gone.
    """
    stored: dict[Stage, Scores] = {}
    freed: set[Stage] = set()
    if target.family != "gpu" or len(chains) < 2:
        return stored, freed
    readers: dict[Stage, list[Stage]] = {}
    for t in order:
        for read in {n.data for n in t.loads}:
            readers.setdefault(read, []).append(t)
    for s in order:
        if s not in soft or s in outs or s.kind != "map" or s.dtype != "f32":
            continue
        beside = sum(t.nbytes for t in stored if _lives(stored[t].readers, s, reach))
        most = min(budget - beside, target.limits.max_binding_bytes)
        if s.nbytes > most or any(len(g) != 1 for g in s.groups):
            continue
        users = readers.get(s, [])
        using = [c for c in chains if any(r.stage in users for r in c.runs)]
        hosted = {r.stage for c in using for r in c.runs}
        if len(using) != 2 or not set(users) <= hosted:
            continue
        run = _as_map(s, inner, products)
        if run is None:
            continue
        for host, other in (using, using[::-1]):
            if _reads_nothing_else(other, s, inner, products) and _takes(
                host, run, products, target
            ):
                sums = [tuple(r.stage for r in c.runs) for c in (host, other)]
                host.runs.append(run)
                chains.remove(other)
                freed |= {r.stage for r in other.runs}
                stored[s] = Scores(_conditions(run.member), *sums)
                break
    return stored, freed


def reach_of(order: Sequence[Stage], marked: Iterable[Stage]) -> dict[Stage, int]:
    """The marked stages that each stage needs or is, as bits."""
    bit = {s: 1 << i for i, s in enumerate(marked)}
    out: dict[Stage, int] = {}
    for s in order:
        mask = bit.get(s, 0)
        for n in s.loads:
            mask |= out.get(n.data, 0)
        out[s] = mask
    return out


def _lives(sums: Iterable[Stage], s: Stage, reach: Mapping[Stage, int]) -> bool:
    """Whether scores may exist beside others: one of the sums that read them is not
    needed by these, so it may come later.
    """
    return any(reach[t] & ~reach[s] for t in sums)


def most_at_once(
    order: Sequence[Stage], scores: Mapping[Stage, Iterable[Stage]]
) -> int:
    """Bytes of scores that exist at one time, each until what reads it is done.

    The layers of a model come one after another: the next one needs what that gives.
    """
    reach = reach_of(order, dict.fromkeys(t for sums in scores.values() for t in sums))
    most = 0
    done: list[Stage] = []
    for s in [s for s in order if s in scores]:
        beside = sum(t.nbytes for t in done if _lives(scores[t], s, reach))
        most = max(most, s.nbytes + beside)
        done.append(s)
    return most


def scores_budget(order: Sequence[Stage], target: Target) -> int:
    """Bytes of scores that may be stored at one time: a quarter of the graph, or as
    set.
    """
    if target.scores is not None:
        return target.scores
    made = set(order)
    inputs = {n.data for s in order for n in s.loads} - made
    read = {n.data for s in order for n in s.loads}
    return sum(s.nbytes for s in inputs | (made - read)) // 4


def _as_map(s: Stage, inner: set[Stage], products: dict[Stage, Member]) -> Run | None:
    assert s.body is not None
    member = make_member(s, Inliner(inner).body(s.body, s.space))
    places: dict[Stage, dict[int, int]] = {}
    for n in member.loads:
        if n.data in products:
            axes = anchor_axes(n, member.space)
            if axes is None or set(axes) != set(member.out):
                return None
            place = dict(zip(products[n.data].out, axes, strict=True))
            if places.setdefault(n.data, place) != place:
                return None
    return Run(member, places, None) if places else None


def _reads_nothing_else(
    c: Chain, s: Stage, inner: set[Stage], products: dict[Stage, Member]
) -> bool:
    """Whether a chain needs its products for a map alone."""
    inliner = Inliner(inner | {s})
    for r in c.runs:
        assert r.stage.body is not None
        body = inliner.body(r.stage.body, r.stage.space)
        if any(n.data in products for n in E.loads(body)):
            return False
    return c.maximum is None


def _takes(c: Chain, run: Run, products: dict[Stage, Member], target: Target) -> bool:
    """Whether a chain can store a map: four neighbours of its rows at a time."""
    symbols = c.symbols(run)
    if c.maximum is not None or symbols is None or not set(run.places) <= set(c.places):
        return False
    last = run.member.out[-1]
    if symbols[last] != c.row or run.member.space[last] % WIDTH:
        return False
    inside = {r.stage for r in c.runs} | set(c.places)
    loads = {n.data for r in (*c.runs, run) for n in r.member.loads}
    loads |= {n.data for x in c.places for n in products[x].loads}
    sums = sum(1 for r in c.runs if r.column is not None)
    if len(loads - inside) + sums + 1 > target.limits.max_storage_buffers:
        return False
    inner = [products[x].space[products[x].red[0]] for x in c.places]
    wide = [r.member.space[r.column] for r in c.runs if r.column is not None]
    return (
        min(c.extents[c.row], c.extents[c.line]) >= _ROWS
        and not any(n % _DEPTH or n > _WIDEST for n in inner)
        and all(n <= _WIDEST for n in wide)
    )


def _conditions(m: Member) -> list[Expr]:
    return [c for c in zero_guards(m.body) if c.data in ("lt", "le", "eq")]


def guarded(body: Expr, stored: dict[Stage, Scores]) -> Expr:
    """A body that does not look at what was never written."""
    if not any(n.data in stored for n in E.loads(body)):
        return body

    def leaf(n: Expr, args: tuple[Expr, ...]) -> Expr:
        n = E.rebuild(n, args) if n.args else n
        if n.kind == "load" and n.data in stored:
            place = {g[0]: i for g, i in zip(n.data.groups, n.args, strict=True)}
            return E.guard(
                [E.substitute(c, place) for c in stored[n.data].conditions], n
            )
        return n

    return E.rewrite(body, leaf)
