"""From a graph to a program."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.stage import Stage, topo_stages
from .program import Binding, Kernel, Program
from .target import Target


def lower(
    outs: Sequence[Stage],
    target: Target,
    *,
    inputs: Sequence[Stage],
    donated: frozenset[int] = frozenset(),
) -> Program:
    """Plan a graph for a target."""
    kernels = []
    scalars: dict[str, str] = {}
    from ..ir.expr import topo

    for s in topo_stages(outs):
        if s.kind == "input":
            continue
        assert s.body is not None
        for n in topo(s.body):
            if n.kind == "scalar":
                scalars[n.data] = n.dtype
        reads = dict.fromkeys(n.data for n in s.loads)
        kernels.append(
            Kernel(
                name=s.name,
                archetype="map",
                wgsl="",
                workgroup_size=(1, 1, 1),
                workgroups=(1, 1, 1),
                bindings=(*(Binding(r, "read") for r in reads), Binding(s, "read_write")),
                params=(),
                members=(s,),
                writes=(s,),
                flops=0,
                bytes=0,
                reason="",
            )
        )
    return Program(tuple(kernels), tuple(inputs), tuple(outs), donated, tuple(scalars.items()), ())
