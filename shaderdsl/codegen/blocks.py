"""Blocks: a loop over blocks of rows, as the kernels of one block again and again.

The kernels of a block are planned once; each turn binds the same memory for what lives
within a block, and the next part of what has a row for each of them. Sums over all rows
begin at the identity, and every block adds its share in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..errors import CompilerError
from ..ir import expr as E
from ..ir.stage import MONOIDS, Stage, map_stage, topo_stages
from .blocks_graph import Body, Loop
from .program import Kernel, Program
from .target import Target

#: (outputs, target, inputs, positions of inputs that are overwritten) → program
Planner = Callable[[Sequence[Stage], Target, Sequence[Stage], frozenset[int]], Program]


@dataclass(frozen=True)
class Block:
    """The graph of a block of so many rows, as it is planned.

    Attributes:
        body: its stages.
        outs: what the loop's results become.
        inputs: what stands for arrays outside, then the sums so far.
        donated: positions of the sums, which are overwritten.
    """

    body: Body
    outs: tuple[Stage, ...]
    inputs: tuple[Stage, ...]
    donated: frozenset[int]


def inside(target: Target, loop: Loop) -> Target:
    """The target of what is within a block."""
    if loop.scores:  # cut so that they fit
        return replace(target, block_from=0, scores=target.limits.max_binding_bytes)
    return replace(target, online=False, block_from=0)


def blocks_of(loop: Loop) -> dict[int, Block]:
    """The blocks of a loop that differ, by their number of rows."""
    found = {}
    for rows in dict.fromkeys(n for _, n in loop.blocks):
        body = Body(loop, rows)
        outs = [body.stages[s] for s in loop.given]
        used = set(topo_stages(outs))
        inputs = [s for s in body.inputs if s in used]
        sums = [body.sums[s] for s in loop.given if s in body.sums]
        donated = range(len(inputs), len(inputs) + len(sums))
        found[rows] = Block(body, tuple(outs), (*inputs, *sums), frozenset(donated))
    return found


def block_kernels(loop: Loop, target: Target, plan: Planner) -> list[Kernel]:
    """All kernels of a loop, in order."""
    target = inside(target, loop)
    kernels = _identities(loop, target, plan)
    outside = dict(zip(loop.externals, loop.now, strict=True))
    planned = {}
    for rows, block in blocks_of(loop).items():
        program = plan(block.outs, target, block.inputs, block.donated)
        # Stages that the planner put in the place of what it was given.
        made = dict(zip(block.outs, program.outputs, strict=True))
        for s, before in block.body.sums.items():
            if s not in loop.given:
                continue
            if program.places.get(made[block.body.stages[s]]) != (before, 0):
                raise CompilerError(f"the sum {s.name} is not added up in place")
        planned[rows] = block.body, program, made
    for number, (first, rows) in enumerate(loop.blocks):
        body, program, made = planned[rows]
        windows: dict[Stage, tuple[Stage, int]] = {}
        for new, (whole, part) in body.inputs.items():
            start = first * (whole.size // loop.count) if part else 0
            windows[new] = outside[whole], start
        for s, given in loop.given.items():
            summed = loop.places[s].summed
            if summed:
                windows[body.sums[s]] = given, 0
            start = 0 if summed else first * (s.size // loop.count)
            windows[made[body.stages[s]]] = given, start
        for t, (home, at) in program.places.items():  # rows that overwrite others
            if t not in windows:
                whole, start = windows.get(home, (home, 0))
                windows[t] = whole, start + at
        for k in program.kernels:
            seen = {*(b.tensor for b in k.bindings), *k.members, *k.writes}
            seen |= {n.data for s in k.members for n in s.loads}
            what = ("group", "parts") if loop.scores else ("block", "rows")
            why = f"{what[0]} {number + 1} of {len(loop.blocks)}, {rows} {what[1]}"
            kernels.append(
                replace(
                    k,
                    reason="; ".join(x for x in (why, k.reason) if x),
                    windows={t: w for t, w in windows.items() if t in seen},
                )
            )
    return kernels


def _identities(loop: Loop, target: Target, plan: Planner) -> list[Kernel]:
    """What sums over all rows begin with."""
    kernels: list[Kernel] = []
    for s, given in loop.given.items():
        if not loop.places[s].summed:
            continue
        value = MONOIDS[s.monoid or "sum"].identity[s.dtype]
        begin = map_stage(s.ext, E.const(value, s.dtype), s.name, dtype=s.dtype)
        program = plan([begin], target, [], frozenset())
        kernels += [
            replace(k, windows={begin: (given, 0)}, reason="a sum over blocks begins")
            for k in program.kernels
        ]
    return kernels
