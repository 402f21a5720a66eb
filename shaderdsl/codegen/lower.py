"""From a graph to a program: partition, then a schedule for each group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import CompilerError
from ..ir import expr as E
from ..ir.stage import Stage, topo_stages
from .arena import merge_updates
from .arrangement import Arrangement
from .contract import contract_kernels
from .contract_siblings import sibling_kernels
from .inplace import write_in_place
from .map import map_kernels
from .online import online_kernels
from .online_points import points_kernels
from .online_steps import sums_in_steps
from .partition import Group, Partition
from .program import Kernel, Program
from .row import row_kernels
from .scan import scan_kernels
from .scatter import scatter_kernels
from .siblings import merge_siblings
from .split import split_long
from .target import Target
from .templates import kernels_of
from .tuning import Trial, trial

SCHEDULES: dict[str, Callable[[Group, Target], list[Kernel]]] = {
    "map": map_kernels,
    "row": row_kernels,
    "contract": contract_kernels,
    "siblings": sibling_kernels,
    "scatter": scatter_kernels,
    "scan": scan_kernels,
    "online": online_kernels,
    "points": points_kernels,
}


def in_stages(outs: Sequence[Stage], target: Target) -> list[Stage]:
    """The same outputs, with what one kernel could not do well in several stages."""
    return split_long(sums_in_steps(outs, target), target)


def lower(
    outs: Sequence[Stage],
    target: Target,
    *,
    inputs: Sequence[Stage],
    donated: frozenset[int] = frozenset(),
) -> Program:
    """Plan a graph for a target.

    Args:
        outs: what is wanted; may repeat, may be inputs.
        inputs: the graph's inputs, in the order in which their buffers will be given.
        donated: positions of inputs whose memory may be reused.
    """
    outs = in_stages(outs, target)
    arrangement = arrange(outs, target, inputs, donated)
    partition = arrangement.partition
    note = target.tuned.note
    kernels: list[Kernel] = []
    for g in arrangement.groups():
        if g.kind not in SCHEDULES:
            raise CompilerError(f"no schedule for {g.kind}")
        kernels += kernels_of(g, target, SCHEDULES[g.kind])
    return Program(
        tuple(arrangement.agreed(k) for k in kernels),
        tuple(inputs),
        tuple(outs),
        donated,
        _scalars(outs),
        (*partition.log, *arrangement.log, *([note] if note else [])),
        arrangement.places,
        frozenset(partition.online.virtual),
    )


def arrange(
    outs: Sequence[Stage],
    target: Target,
    inputs: Sequence[Stage],
    donated: frozenset[int],
) -> Arrangement:
    """Which groups there are, in which order and memory."""
    arrangement = Arrangement(Partition(outs, target), target, inputs, outs, donated)
    merge_updates(arrangement)
    write_in_place(arrangement)
    merge_siblings(arrangement, target)
    return arrangement


def trials(
    outs: Sequence[Stage],
    target: Target,
    *,
    inputs: Sequence[Stage],
    donated: frozenset[int] = frozenset(),
) -> list[Trial]:
    """The kernels of a graph whose schedules have something to choose, each once."""
    groups = arrange(in_stages(outs, target), target, inputs, donated).groups()
    found: dict[str, Trial] = {}
    for g in groups:
        one = trial(g, target, SCHEDULES[g.kind])
        if one is not None:
            found.setdefault(one.key, one)
    return list(found.values())


def _scalars(outs: Sequence[Stage]) -> tuple[tuple[str, str], ...]:
    """Runtime numbers of a graph, with their dtypes."""
    found: dict[str, str] = {}
    for s in topo_stages(outs):
        if s.body is not None:
            for n in E.topo(s.body):
                if n.kind == "scalar":
                    found[n.data] = n.dtype
    return tuple(found.items())
