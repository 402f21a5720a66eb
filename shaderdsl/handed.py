"""Results that a call hands to the next one without anybody looking at them.

In a loop ``model, state, loss = step(model, state, batch)`` nobody looks into the
model or the state. Such results are modules without attributes, whose leaves are a
`Handed`: memory, and no arrays. A call that is given these, and modules and arrays
that lie where they lay before, is known by a short key, and nothing is done leaf by
leaf. Looking at a module makes its arrays, and the next call treats it like any other.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from . import tree
from .array import Array, is_number
from .dtypes import DType
from .runtime.buffers import Allocation, Buffer, changes, handed_out
from .runtime.replay import Outcome, Replay
from .tracing import as_leaf

#: Calls that a function remembers.
KEEP = 16

Kinds = Sequence[tuple[tuple[int, ...], DType]]

_making = threading.RLock()
_ARRAYS = {Array}


class Handed:
    """Some of a call's results: their memory, until their arrays are asked for.

    Attributes:
        key: equal keys are the same memory.
        piece: which of it each result has.
        memory: each once; None after it was given away or arrays were made.
    """

    __slots__ = ("_arrays", "_device", "_kinds", "key", "memory", "piece")

    def __init__(self, outcome: Outcome, kinds: Kinds, start: int, stop: int):
        self.key = (outcome.name, start, stop)
        self.piece = outcome.replay.piece(start, stop)
        every = outcome.memory
        self.memory: list[Allocation] | None = [every[k] for k in self.piece.numbers]
        self._device, self._kinds = outcome.device, kinds  # of all results
        self._arrays: list[Array] | None = None

    def __len__(self) -> int:
        return len(self.piece.places)

    def __iter__(self) -> Iterator[Array]:
        return iter(self.arrays())

    def take(self) -> list[Allocation] | None:
        """Give the memory away; None where somebody has looked."""
        with _making:
            memory, self.memory = self.memory, None
        return memory

    def arrays(self) -> list[Array]:
        """The results as arrays; donated ones if the memory was given away."""
        with _making:
            if self._arrays is None:
                memory = self.take()
                kinds = self._kinds[self.key[1] : self.key[2]]
                if memory is None:
                    self._arrays = Array.of_buffers([None] * len(self), kinds)
                    for a in self._arrays:
                        a.donate()
                else:
                    buffers = handed_out(self._device, memory, self.piece.places)
                    self._arrays = Array.of_buffers(buffers, kinds)
            return self._arrays


class Results(Sequence[Array]):
    """A call's results; a slice of them is a `Handed`."""

    def __init__(self, outcome: Outcome, kinds: Kinds):
        self._outcome, self._kinds = outcome, kinds

    def __len__(self) -> int:
        return len(self._kinds)

    def __getitem__(self, k: Any) -> Any:
        if isinstance(k, slice):
            return Handed(self._outcome, self._kinds, k.start, k.stop)
        return Array.of_buffers([self._outcome.buffer(k)], [self._kinds[k]])[0]


@dataclass
class Link:
    """What a call does that is given the same as one before.

    Attributes:
        known: what its signature gave.
        replay: how its memory lies.
        sources: where each memory that the replay keeps comes from: an argument, and
            its position among the argument's (of all other leaves where it is no
            `Handed`).
        donated: whether each argument is.
        given: which of the other leaves are.
        looked: which of them decide about ids.
        changes: the count of `changes` until which all this holds.
    """

    known: Any
    replay: Replay
    sources: list[tuple[int, int]]
    donated: list[bool]
    given: list[int]
    looked: list[int]
    changes: int


@dataclass
class Given:
    """Arguments by what has to be looked at.

    Attributes:
        key: names the arguments' structure and memory.
        items: for each argument a `Handed`, the list of leaves of a module that never
            changes, or the number of its leaves among the others.
        others, buffers, memory: leaves of all other arguments.
        made: arrays that were made of leaves that were none, with the leaf, by its id.
    """

    key: Any
    items: list[Any]
    others: list[Array]
    buffers: list[Buffer]
    memory: list[Allocation]
    made: dict[int, tuple[Array, Any]]


def given(args: Sequence[Any], device: Any) -> Given | None:
    """How arguments are given; None where that needs a look at each leaf."""
    every = [None if type(x) is Array else tree.kept(x) for x in args]
    if not any(every):
        return None
    parts: list[Any] = []
    items: list[Any] = []
    others: list[Any] = []
    seen = set()
    for x, kept in zip(args, every):
        if type(x) is Array:  # The plain case of the next one.
            parts.append(None)
            items.append(1)
            others.append(x)
            continue
        if kept is None:
            found, structure = tree.flatten(x)
            others += found
            parts.append(structure)
            items.append(len(found))
            continue
        leaves, structure, serial = kept
        if type(leaves) is Handed:
            if leaves.memory is None or leaves.key in seen:
                return None
            seen.add(leaves.key)
            parts += (leaves.key, structure.number)
        else:
            parts.append(serial)
        items.append(leaves)
    made: dict[int, tuple[Array, Any]] = {}
    buffers: list[Buffer] = []
    memory: list[Allocation] = []
    for k, x in enumerate(others):
        a, number = x, False
        if type(x) is not Array:
            a, number = as_leaf(x), is_number(x)
            if a is None:  # known while tracing, and not looked at here
                return None
            others[k] = a
            made[id(x)] = a, x  # an id lasts as long as its object
        b = a._buffer
        if b is None or b.device is not device:
            if a.symbolic:
                return None
            b = a.buffer()
        try:
            m = b.allocation
        except AttributeError:  # given away by another thread
            return None
        buffers.append(b)
        memory.append(m)
        parts += (number, a.shape, a.dtype.name, b.key, m.shared, m.parts)
    key = (id(device), tuple(parts))
    return Given(key, items, others, buffers, memory, made)


class Links:
    """The calls that a function knows by their key, the latest last."""

    def __init__(self) -> None:
        self._known: OrderedDict[Any, Link] = OrderedDict()

    def find(self, g: Given, device: Any) -> Link | None:
        """What is known of a call, if it still holds."""
        link = self._known.get(g.key)
        if link is None or not link.replay.alive or link.changes != changes[0]:
            return None
        return link if link.known.plan.device is device else None

    def add(
        self, g: Given, known: Any, replay: Replay, donated: Sequence[bool], count: int
    ) -> None:
        """Remember a call that was launched otherwise.

        Args:
            donated: whether each argument is.
            count: leaves in all.
        """
        fixed = [x for x in g.items if type(x) is list]
        given: list[int] = []
        number: list[int | None] = []  # among the others, of each leaf
        source: list[tuple[int, int] | None] = []
        others = 0
        for argument, (item, gone) in enumerate(zip(g.items, donated)):
            if isinstance(item, int):
                own = range(others, others + item)
                others += item
                number += own
                source += [(argument, k) for k in own]
                if gone:
                    given += own
            elif type(item) is Handed:
                number += [None] * len(item)
                source += [(argument, k) for k, _, _ in item.piece.places]
            elif gone:
                return
            else:
                number += [None] * len(item)
                source += [None] * len(item)
        if replay.results is None or len(number) != count:
            return
        source += [None] * len(known.plan.captured)
        sources = [source[k] for k in replay.kept]
        looked = [number[k] for k in known.looked]
        # Ids, or memory that results lie in, inside of what nobody looks at.
        if None in looked or None in sources:
            return
        every = [a for part in (*fixed, known.plan.captured) for a in part]
        if not all(type(a) is Array for a in every):
            return
        before = changes[0]
        for a in every:
            a.hold()
        self._known[g.key] = Link(
            known,
            replay,
            [s for s in sources if s is not None],
            list(donated),
            given,
            [k for k in looked if k is not None],
            before,
        )
        while len(self._known) > KEEP:
            self._known.popitem(last=False)
