"""Where every tensor of a program lies in a browser: fixed for the life of a page.

Python plans memory anew at each call, because arrays belong to whoever holds them. A
page runs the same call again and again, so all of it is decided here: one buffer a
slot, every input at a place of its own, and what must be copied before and after the
kernels so that results lie where the next call looks for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..codegen.program import Program
from ..runtime.buffers import bound_bytes
from ..runtime.plan import Place, plan_memory


@dataclass(frozen=True)
class Move:
    """Bytes that are copied: whole words, between two slots that are not the same."""

    source: Place
    target: Place
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """The memory of a program.

    Attributes:
        slots: bytes of each buffer.
        inputs: where each input is written, and stays until a call overwrites it.
        outputs: where each output is read after a call.
        bindings: for each kernel ``(slot, offset, bytes)`` of each storage buffer.
        before: copies before the first kernel, in order.
        after: copies after the last one, in order.
    """

    slots: tuple[int, ...]
    inputs: tuple[Place, ...]
    outputs: tuple[Place, ...]
    bindings: tuple[tuple[tuple[int, int, int], ...], ...]
    before: tuple[Move, ...]
    after: tuple[Move, ...]


def fixed_layout(program: Program, feeds: Mapping[int, int]) -> Layout:
    """Lay a program out.

    Args:
        feeds: output → the input that it is in the next call.
    """
    count = len(program.inputs)
    plan = plan_memory(program, program.donated)
    places: list[Place] = [(i, 0) for i in range(count)]
    before: list[Move] = []
    for arena in plan.arenas:
        ours = all(position in program.donated for position, _, _ in arena.parts)
        for position, offset, nbytes in arena.parts:
            there = (arena.slot, offset)
            # What kernels overwrite although it was not donated is given a copy.
            if ours or not arena.written:
                places[position] = there
            else:
                before.append(Move(places[position], there, _words(nbytes)))
    sizes = [0] * len(plan.slots)

    def need(place: Place, nbytes: int) -> None:
        slot, offset = place
        sizes[slot] = max(sizes[slot], offset + bound_bytes(nbytes))

    for place, stage in zip(places, program.inputs, strict=True):
        need(place, stage.nbytes)
    for arena in plan.arenas:
        need((arena.slot, 0), arena.nbytes)
    for bound, kernel in zip(plan.bindings, program.kernels, strict=True):
        for place, binding in zip(bound, kernel.bindings, strict=True):
            need(place, binding.tensor.nbytes)
    outputs = [
        places[place[0]] if place[0] < count and stage in program.inputs else place
        for place, stage in zip(plan.outputs, program.outputs, strict=True)
    ]
    for place, stage in zip(outputs, program.outputs, strict=True):
        need(place, stage.nbytes)
    after = _returns(program, feeds, places, outputs, sizes)
    used = {place[0] for place in (*places, *outputs)}
    used |= {place[0] for bound in plan.bindings for place in bound}
    used |= {p[0] for m in (*before, *after) for p in (m.source, m.target)}
    number = {slot: k for k, slot in enumerate(sorted(used))}

    def moved(place: Place) -> Place:
        return number[place[0]], place[1]

    return Layout(
        slots=tuple(sizes[slot] for slot in sorted(used)),
        inputs=tuple(map(moved, places)),
        outputs=tuple(map(moved, outputs)),
        bindings=tuple(
            tuple(
                (*moved(place), bound_bytes(binding.tensor.nbytes))
                for place, binding in zip(bound, kernel.bindings, strict=True)
            )
            for bound, kernel in zip(plan.bindings, program.kernels, strict=True)
        ),
        before=tuple(Move(moved(m.source), moved(m.target), m.nbytes) for m in before),
        after=tuple(Move(moved(m.source), moved(m.target), m.nbytes) for m in after),
    )


def _returns(
    program: Program,
    feeds: Mapping[int, int],
    places: list[Place],
    outputs: list[Place],
    sizes: list[int],
) -> list[Move]:
    """Copies that bring results to the inputs that they feed; ``outputs`` and ``sizes``
    are changed to what holds afterwards.
    """
    wanted = {j: places[i] for j, i in feeds.items() if outputs[j] != places[i]}
    written = {place[0] for place in wanted.values()}
    aside: list[Move] = []
    back: list[Move] = []
    for j, stage in enumerate(program.outputs):
        if not stage.nbytes:
            continue
        nbytes = _words(stage.nbytes)
        moves = j in wanted
        # A copy must not overwrite what another one, or the page, has yet to read, and
        # WebGPU copies nothing within one buffer.
        if outputs[j][0] in written and (moves or j not in feeds):
            staging = (len(sizes), 0)
            sizes.append(bound_bytes(stage.nbytes))
            aside.append(Move(outputs[j], staging, nbytes))
            outputs[j] = staging
        if moves:
            back.append(Move(outputs[j], wanted[j], nbytes))
            outputs[j] = wanted[j]
    return aside + back


def _words(nbytes: int) -> int:
    return -(-nbytes // 4) * 4
