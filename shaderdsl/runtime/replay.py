"""Calls whose memory lies just as an earlier call's did: all that was found out then.

A loop that donates its state gives a plan the same memory again, or the same few in
turn.  Where it does, nothing is looked up, and no bind group is made.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from .arenas import Memory
from .buffers import Allocation, Buffer, Bundle, handed_out, new_serial
from .plan import MemoryPlan

if TYPE_CHECKING:
    from .device import Device
    from .launch import Step

#: Arrangements of inputs that a program remembers, and those of the memory that is
#: acquired for each.
KEEP = 16

Parts = tuple[tuple[int, int], ...] | None


@dataclass
class Encoded:
    """The steps of a pass over certain memory; ``groups`` keeps the handles alive, and
    ``name`` is a number that is no other's.
    """

    steps: list[Step]
    groups: list[Any]
    name: int = field(default_factory=new_serial)


class Piece(NamedTuple):
    """Results that belong together.

    Attributes:
        numbers: of their memory, each once.
        places: of each result ``(position in numbers, offset, nbytes)``.
    """

    numbers: list[int]
    places: list[tuple[int, int, int]]


@dataclass
class Replay:
    """One arrangement of a program's inputs.

    Memory is numbered here: that of the inputs in ``kept``, then what is acquired for
    outputs.

    Attributes:
        kept: inputs in whose memory results lie.
        donated: inputs whose memory nobody else sees.
        shared, divided: for each input whether its memory is shared, and its parts.
        arenas: for each arena the input that begins it, and how far before it.
        temps: slots of temporaries, and their sizes.
        outputs: slots of outputs that lie in no input, and their sizes.
        results: for each output ``(memory, offset, nbytes)``; None where two of them
            show the same bytes, or one shows those of an input that stays.
        parts: what memory is divided into afterwards, where that is new.
        encoded: by the memory that was acquired.
        pieces: by the first result and the one after the last.
        alive: False once it is forgotten.
    """

    plan: MemoryPlan
    kept: list[int]
    donated: frozenset[int]
    shared: list[bool]
    divided: list[Parts]
    arenas: list[tuple[int, int, int]]
    temps: tuple[list[int], list[int]]
    outputs: tuple[list[int], list[int]]
    results: list[tuple[int, int, int]] | None
    parts: list[tuple[int, Parts]]
    encoded: OrderedDict[tuple[int, ...], Encoded] = field(default_factory=OrderedDict)
    pieces: dict[tuple[int, int], Piece] = field(default_factory=dict)
    alive: bool = True

    def piece(self, start: int, stop: int) -> Piece:
        """Where some of the results lie."""
        found = self.pieces.get((start, stop))
        if found is None:
            assert self.results is not None
            places = self.results[start:stop]
            numbers = list(dict.fromkeys(number for number, _, _ in places))
            at = {number: k for k, number in enumerate(numbers)}
            inside = [(at[n], offset, nbytes) for n, offset, nbytes in places]
            found = Piece(numbers, inside)
            self.pieces[start, stop] = found
        return found

    def forget(self) -> None:
        """Let go of what keeps memory alive."""
        self.alive = False
        self.encoded.clear()

    def memory(
        self,
        inputs: Sequence[Buffer],
        bundle: Bundle,
        outputs: Sequence[Allocation],
    ) -> list[Memory]:
        """``(allocation, offset)`` of every slot."""
        memory: list[Any] = [(b.allocation, b.offset) for b in inputs]
        memory += [None] * (len(self.plan.slots) - len(inputs))
        for slot, position, before in self.arenas:
            first = inputs[position]
            memory[slot] = (first.allocation, first.offset - before)
        for slot, allocation in zip(self.temps[0], bundle.allocations):
            memory[slot] = (allocation, 0)
        for slot, allocation in zip(self.outputs[0], outputs):
            memory[slot] = (allocation, 0)
        return memory


class Replays:
    """The arrangements of one program, the latest last."""

    def __init__(self) -> None:
        self._known: OrderedDict[Any, Replay] = OrderedDict()

    def find(
        self, inputs: Sequence[Buffer]
    ) -> tuple[Replay, list[Allocation]] | tuple[None, None]:
        """What is known of inputs that lie like these, and their memory."""
        found = self._known.get(tuple([b.key for b in inputs]))
        if found is None:
            return None, None
        try:
            memory = [b.allocation for b in inputs]
        except AttributeError:  # Consumed by another thread just now.
            return None, None
        # Nobody else may see more or less of the memory than before.
        if [a.shared for a in memory] != found.shared:
            return None, None
        if [a.parts for a in memory] != found.divided:
            return None, None
        return found, memory

    def add(self, key: Any, replay: Replay) -> None:
        """Remember one."""
        self._known[key] = replay
        while len(self._known) > KEEP:
            old = self._known.pop(next(iter(self._known)), None)
            if old is not None:
                old.forget()

    def clear(self) -> None:
        """Forget all, and the bind groups with them."""
        for replay in self._known.values():
            replay.forget()
        self._known.clear()


class Outcome:
    """A call's results as memory.

    Attributes:
        memory: as the replay numbers it.
        replay: how the call's memory lay.
        name: outcomes of one name lie in the same memory.
    """

    __slots__ = ("device", "memory", "name", "replay")

    def __init__(
        self,
        device: Device,
        memory: list[Allocation],
        replay: Replay,
        encoded: Encoded,
    ):
        self.device, self.memory = device, memory
        self.replay, self.name = replay, encoded.name

    @property
    def places(self) -> list[tuple[int, int, int]]:
        """Of each result ``(number of its memory, offset, nbytes)``."""
        assert self.replay.results is not None
        return self.replay.results

    def buffer(self, k: int) -> Buffer:
        """Result ``k``."""
        return handed_out(self.device, self.memory, [self.places[k]])[0]

    def buffers(self) -> list[Buffer]:
        """All of them."""
        return handed_out(self.device, self.memory, self.places)
