"""From a graph to a program: partition, then a schedule for each group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import CompilerError
from ..ir import expr as E
from ..ir.stage import Stage, topo_stages
from .anchors import Anchored
from .arena import merge_updates
from .arrangement import Arrangement
from .blocks import block_kernels, blocks_of, inside
from .blocks_find import Found, find_loops
from .blocks_graph import Loop
from .blocks_heads import add_head_loops
from .contract import contract_kernels
from .contract_siblings import sibling_kernels
from .group import Group
from .inplace import write_in_place
from .joint import join_contractions
from .map import map_kernels, map_sibling_kernels
from .one_row import norm_again
from .online import online_kernels
from .online_groups import sums_by_group
from .online_packed import numbers_of_rows
from .online_points import points_kernels
from .online_steps import sums_in_steps
from .partition import Partition
from .program import Kernel, Program
from .row import row_kernels, row_sibling_kernels
from .scan import scan_kernels
from .scatter import scatter_kernels
from .siblings import merge_maps, merge_rows, merge_siblings
from .split import split_long
from .target import Target
from .templates import kernels_of
from .tuning import Trial, trial

SCHEDULES: dict[str, Callable[[Group, Target], list[Kernel]]] = {
    "map": map_kernels,
    "row": row_kernels,
    "contract": contract_kernels,
    "siblings": sibling_kernels,
    "map siblings": map_sibling_kernels,
    "row siblings": row_sibling_kernels,
    "scatter": scatter_kernels,
    "scan": scan_kernels,
    "online": online_kernels,
    "points": points_kernels,
    "pieces": online_kernels,
}


def in_stages(outs: Sequence[Stage], target: Target) -> list[Stage]:
    """The same outputs, with what one kernel could not do well in several stages."""
    outs = sums_by_group(sums_in_steps(outs, target), target)
    outs = numbers_of_rows(outs, target)
    return norm_again(split_long(outs, target), target)


def lower(
    outs: Sequence[Stage],
    target: Target,
    *,
    inputs: Sequence[Stage],
    donated: frozenset[int] = frozenset(),
    ready: Callable[[Sequence[Kernel]], None] = lambda kernels: None,
) -> Program:
    """Plan a graph for a target.

    Args:
        outs: what is wanted; may repeat, may be inputs.
        inputs: the graph's inputs, in the order in which their buffers will be given.
        donated: positions of inputs whose memory may be reused.
        ready: called with kernels as soon as their texts are known.
    """
    return _planned(_loops(outs, target), target, inputs, donated, ready=ready)


def _loops(outs: Sequence[Stage], target: Target) -> Found:
    """Loops over blocks, and the graph around them."""

    known: list[tuple[list[Stage], Anchored]] = []

    def online() -> frozenset[Stage]:
        stages = in_stages(outs, target)
        known[:] = [(stages, Anchored(stages, target))]
        return frozenset(known[0][1].online.virtual)

    found = find_loops(outs, target, online)
    add_head_loops(found, target)
    if known and not found.loops and found.outs == list(outs):
        found.known = known[0]
    return found


def _block(
    outs: Sequence[Stage],
    target: Target,
    inputs: Sequence[Stage],
    donated: frozenset[int],
) -> Program:
    """The kernels of one block: arrays keep their places, sums are added in place."""
    return _planned(Found(list(outs)), target, inputs, donated, block=True)


def _planned(
    found: Found,
    target: Target,
    inputs: Sequence[Stage],
    donated: frozenset[int],
    block: bool = False,
    ready: Callable[[Sequence[Kernel]], None] = lambda kernels: None,
) -> Program:
    outs, known = found.known or (in_stages(found.outs, target), None)
    arrangement = arrange(outs, target, inputs, donated, found.loops, block, known)
    partition = arrangement.partition
    note = target.tuned.note
    kernels: list[Kernel] = []
    for g in arrangement.groups():
        if g.loop is not None:
            new = block_kernels(g.loop, target, _block)
        elif g.kind in SCHEDULES:
            new = kernels_of(g, target, SCHEDULES[g.kind])
        else:
            raise CompilerError(f"no schedule for {g.kind}")
        new = [arrangement.agreed(k) for k in new]
        ready(new)
        kernels += new
    return Program(
        tuple(kernels),
        tuple(inputs),
        tuple(outs),
        donated,
        _scalars([*outs, *(s for loop in found.loops for s in loop.places)]),
        (*found.log, *partition.log, *arrangement.log, *([note] if note else [])),
        arrangement.places,
        frozenset(partition.online.virtual | found.inside),
    )


def arrange(
    outs: Sequence[Stage],
    target: Target,
    inputs: Sequence[Stage],
    donated: frozenset[int],
    loops: Sequence[Loop] = (),
    block: bool = False,
    known: Anchored | None = None,
) -> Arrangement:
    """Which groups there are, in which order and memory.

    Args:
        loops: those whose results are ``given`` in the graph.
        block: the graph is a block's: arrays keep their places, sums are in place.
        known: the graph's anchors, if they are known.
    """
    partition = Partition(outs, target, loops, known)
    arrangement = Arrangement(partition, target, inputs, outs, donated)
    if not block:
        merge_updates(arrangement)
    write_in_place(arrangement, block)
    join_contractions(arrangement, target)
    merge_siblings(arrangement, target)
    merge_rows(arrangement, target)
    merge_maps(arrangement, target)
    return arrangement


def trials(
    outs: Sequence[Stage],
    target: Target,
    *,
    inputs: Sequence[Stage],
    donated: frozenset[int] = frozenset(),
) -> list[Trial]:
    """The kernels of a graph whose schedules have something to choose, each once."""
    found = _loops(outs, target)
    around, known = found.known or (in_stages(found.outs, target), None)
    groups = arrange(around, target, inputs, donated, found.loops, known=known).groups()
    tried: dict[str, Trial] = {}
    while groups:
        g = groups.pop(0)
        if g.loop is not None:
            small = inside(target, g.loop)
            for b in blocks_of(g.loop).values():
                stages = in_stages(b.outs, small)
                inner = arrange(stages, small, b.inputs, b.donated, block=True)
                groups += inner.groups()
            continue
        one = trial(g, target, SCHEDULES[g.kind])
        if one is not None:
            tried.setdefault(one.key, one)
    return list(tried.values())


def _scalars(outs: Sequence[Stage]) -> tuple[tuple[str, str], ...]:
    """Runtime numbers of a graph, with their dtypes."""
    found: dict[str, str] = {}
    for s in topo_stages(outs):
        if s.body is not None:
            for n in E.topo(s.body):
                if n.kind == "scalar":
                    found[n.data] = n.dtype
    return tuple(found.items())
