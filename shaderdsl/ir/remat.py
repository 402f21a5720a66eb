"""Regions of a graph that the backward pass computes again instead of reading.

A region is what lies between some stages and others that follow from them. After the
derivative is made, its stages that read the inside of a region are pointed at a copy.
The copy is made from ``after(x, g)`` in place of each stage x that the region begins
with: x itself, but only once g is there, a part of the cotangent that the copy is
needed for. So the copy is another graph than the original, is not merged with it, and
cannot run before the backward pass has come that far.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from . import expr as E
from .stage import Stage, map_stage, rebind, topo_stages, whole

__all__ = ["Region", "recomputed", "region"]


@dataclass(frozen=True, eq=False)
class Region:
    """Where it begins, what lies inside, and what it gives."""

    starts: frozenset[Stage]
    inside: frozenset[Stage]
    outs: frozenset[Stage]


def region(outs: Iterable[Stage], starts: Iterable[Stage]) -> Region:
    """All between ``starts`` and ``outs``; given inputs are beginnings too."""
    begin, results = frozenset(starts), frozenset(outs)
    stages = topo_stages(results - begin, stop=begin)
    starting = {s for s in stages if s in begin or s.kind == "input"}
    inside = frozenset(stages) - starting - results
    return Region(frozenset(starting), inside, results - begin)


def recomputed(
    regions: Sequence[Region],
    order: Sequence[Stage],
    adjoints: dict[Stage, Stage],
    grads: Sequence[Stage | None],
) -> list[Stage | None]:
    """Gradients that read copies of what lies inside of the regions.

    Args:
        order: the forward graph, producers first.
        adjoints: of its stages.
        grads: some of them.
    """
    results = list(grads)
    place = {s: k for k, s in enumerate(order)}
    ordered = sorted(
        (r for r in regions if r.outs and all(s in place for s in r.outs)),
        key=lambda r: -max(place[s] for s in r.outs),
    )
    ends = []
    for r in ordered:
        last = max(r.outs, key=lambda s: (s in adjoints, place[s]))
        ends.append(_token(adjoints.get(last), place))
    keep = {s: s for s in order}
    for k, r in enumerate(ordered):
        token = ends[k]
        if token is None or token.size == 0:
            continue
        copies = _copies(order, r, token)
        # What the token itself follows from stays: it comes before the copy.
        given = {**keep, **{s: s for s in topo_stages([token])}, **copies}
        places = [i for i, g in enumerate(results) if g is not None]
        later = [i for i in range(k + 1, len(ends)) if ends[i] is not None]
        old = [results[i] for i in places] + [ends[i] for i in later]
        new = rebind([s for s in old if s is not None], given)
        for i, s in zip(places, new):
            results[i] = s
        for i, s in zip(later, new[len(places) :]):
            ends[i] = s
    return results


def _token(adjoint: Stage | None, forward: dict[Stage, int]) -> Stage | None:
    """A stage that is stored and that the adjoint needs, not of the forward graph."""
    s = adjoint
    while s is not None and s.kind == "map":
        back = [n.data for n in s.loads if n.data not in forward]
        reduced = [t for t in back if t.kind == "reduce"]
        # The newest: sums along a residual stream hold those of later layers too.
        s = max(reduced or back, key=lambda t: t.id, default=None)
    return s


def _copies(order: Sequence[Stage], region: Region, token: Stage) -> dict[Stage, Stage]:
    starts = [s for s in order if s in region.starts]
    # Weights are read where they are, if there is anything else to wait at.
    begun = [s for s in starts if s.kind != "input"] or starts
    first = E.load(token, [E.const(0)] * len(token.shape))
    given = {
        s: map_stage(
            s.ext,
            E.apply("after", whole(s), first),
            s.name,
            groups=s.groups,
            dtype=s.dtype,
        )
        for s in begun
        if s.size
    }
    inside = [s for s in order if s in region.inside]
    stop = {**{s: s for s in order if s not in region.inside}, **given}
    copies = rebind(inside, stop)
    return {s: c for s, c in zip(inside, copies) if c is not s}
