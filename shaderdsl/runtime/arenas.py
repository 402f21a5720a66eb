"""Arenas at a call: inputs that must lie side by side in one piece of memory.

Results of one call lie where the next call wants them, so that only the first step of a
loop copies.  Whatever the caller did with the arrays in between is seen here: memory is
written in place only if nobody else can look at it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .buffers import Allocation, Buffer
from .plan import Arena

if TYPE_CHECKING:
    from .buffers import Pool

#: Memory and an offset in it in bytes.
Memory = tuple[Allocation, int]


@dataclass(frozen=True)
class Copy:
    """Bytes to copy before the first kernel."""

    source: Memory
    target: Memory
    nbytes: int


def gather(
    arena: Arena,
    inputs: Sequence[Buffer],
    donated: frozenset[int],
    seen: Counter[int],
    pool: Pool,
) -> tuple[Memory, list[Copy]]:
    """Memory in which the inputs lie as the arena says, and what to copy to get there.

    Args:
        donated: positions of the inputs that the caller gives up.
        seen: how many inputs lie in each allocation, by its serial.
    """
    found = _as_they_lie(arena, inputs)
    if found is not None and (
        not arena.written or _is_ours(arena, found, donated, seen)
    ):
        return found, []
    memory = (pool.acquire(arena.nbytes), 0)
    copies = [
        Copy(
            (inputs[position].allocation, inputs[position].offset),
            (memory[0], offset),
            -(-nbytes // 4) * 4,  # Copies move whole words.
        )
        for position, offset, nbytes in arena.parts
    ]
    return memory, copies


def _as_they_lie(arena: Arena, inputs: Sequence[Buffer]) -> Memory | None:
    """The inputs' own memory, if it is one piece with every part in its place."""
    position, offset, _ = arena.parts[0]
    allocation = inputs[position].allocation
    base = inputs[position].offset - offset
    if base < 0 or base + arena.nbytes > allocation.capacity:
        return None
    for position, offset, _ in arena.parts:
        buffer = inputs[position]
        if buffer.allocation is not allocation or buffer.offset != base + offset:
            return None
    return allocation, base


def _is_ours(
    arena: Arena, memory: Memory, donated: frozenset[int], seen: Counter[int]
) -> bool:
    """Whether nobody else sees what kernels would write."""
    allocation, base = memory
    if allocation.shared or any(part[0] not in donated for part in arena.parts):
        return False
    # A kernel must not bind one buffer for reading and for writing, so no other input
    # may lie in the same memory either.
    if seen[allocation.serial] != len(arena.parts):
        return False
    if len(arena.parts) == 1:
        return True
    # Between the parts anything may be written, so there must be nothing.
    layout = tuple((offset, nbytes) for _, offset, nbytes in arena.parts)
    return base == 0 and allocation.parts == layout
