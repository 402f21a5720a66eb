"""Walks of long rows: loops with several positions under way, and what stays on the
chip from walk to walk.

On GPUs the last positions of a row stay in registers from the first walk on, those
before them in workgroup memory; a row that is short enough has no others, and no loop.
Of longer ones each walk goes the other way than the one before it: what was read last
is still near.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from ..ir.expr import Expr
from .kernel_text import indent
from .spelling import wgsl_type
from .writer import Writer

#: Positions that a lane reads before it uses any of them.
FLIGHT = 4
#: Values of 32 bits of a row that a lane keeps from walk to walk on GPUs, of vec4s and
#: of single elements, whose addresses take registers too.
HELD, SINGLE = 40, 32
#: Bytes of workgroup memory for each lane that reductions of long rows may take.
RESERVED = 12

#: What is known at a position, and the names of its axes.
Known = tuple[dict[Any, str], dict[int, str]]
#: What `ahead` calls: at each position, once in between, at each position again.
Steps = tuple[Callable[[], object], Callable[[], None], Callable[[], None]]

#: Among what is known at a position: whether it is one of the row.
_INSIDE = "inside"


def inside(w: Writer) -> str | None:
    """The condition under which the position at hand is one of the row, if any."""
    return w.memo[-1].get(_INSIDE)


def ahead(
    w: Writer,
    i: str,
    flight: int,
    width: int,
    place: Callable[[str], None],
    steps: Steps,
    known: list[Known] | None = None,
    end: str | None = None,
) -> list[str]:
    """The inside of a loop over a row: so many positions are read before any is used.

    Args:
        i: the loop's variable.
        width: how far apart a lane's positions lie.
        place: names the axes of a position.
        steps: what is read at each position (``use`` finds again what it names), what
            is done once after all were read, and how each is used.
        known: what earlier text knows of these positions; noted if it is empty.
        end: the row's, if the last position may lie beyond it.
    """
    lines: list[str] = []
    memos: list[dict[Any, str]] = []
    names: list[dict[int, str]] = []
    old = list(known or ())
    read, between, use = steps
    for u in range(flight):
        w.open()
        if old:
            memo, axes = old[u]
            w.memo[-1] = dict(memo)
            for a, name in axes.items():
                w.axis(a, name, 2)
        else:
            at = w.let(f"{i} + {u * width}u", 2, "i") if u else i
            if end is not None and u == flight - 1:
                w.memo[-1][_INSIDE] = w.let(f"{at} < {end}", 2, "in")
                at = w.let(f"min({at}, {end} - 1u)", 2, "i")
            place(at)
        read()
        memos.append(w.memo[-1])
        names.append({a: x for a, x in w.names.items() if w.depth[a] == 2})
        if known is not None and not old:
            known.append((dict(memos[-1]), names[-1]))
        lines += w.close()
    w.open()
    between()
    for memo, axes in zip(memos, names, strict=True):
        w.memo[-1] = memo
        for a, name in axes.items():
            w.axis(a, name, 2)
        use()
    return lines + w.close()


@dataclass(frozen=True)
class Kept:
    """What stays on the chip of a row from its first walk on.

    Attributes:
        registers: positions of each lane that it holds.
        memory: positions of each lane, before these, of which workgroup memory keeps
            ``loads``.
        whole: whether these are all positions of the row (the last ones of some lanes
            are none).
    """

    registers: int = 0
    memory: int = 0
    loads: tuple[Expr, ...] = ()
    whole: bool = False


def kept(
    n: int, width: int, loads: Sequence[Expr], each: int, most: int, free: int
) -> Kept:
    """What of a row of ``n`` positions stays on the chip.

    Args:
        loads: what is read again, ``each`` of so many values at a position.
        most: values that a lane may hold.
        free: bytes of workgroup memory.
    """
    if not loads:
        return Kept()
    values = each * len(loads)
    held, memory = max(1, most // values), max(0, free) // (4 * width * values)
    need = -(-n // width)
    if need <= held + memory:
        held = min(need, held)
        return Kept(held, need - held, tuple(loads), whole=True)
    return Kept(held, memory, tuple(loads))


class Walks:
    """The walks of one row, one after another.

    Args:
        n: the row's length in positions, as text.
        position: the lane's place in its row, of ``width``.
        place: names the axes of a position.
        kept: what stays on the chip.
        turns: whether each walk goes the other way than the one before.
    """

    def __init__(
        self,
        w: Writer,
        n: str,
        position: str,
        width: int,
        place: Callable[[str], None],
        kept: Kept = Kept(),
        turns: bool = False,
    ):
        self.w, self.n, self.position, self.width = w, n, position, width
        self.place, self.kept, self.turns, self.back = place, kept, turns, False
        self.held: list[Known] = []  # what registers hold
        self.axes: list[dict[int, str]] = []  # the positions in workgroup memory
        self.seen = False
        inner = kept.memory * width
        outer = inner + kept.registers * width
        if kept.whole:
            self.end, self.middle = "", f"{inner}u" if inner else ""
        else:
            self.end = w.let(f"{n} - {outer}u", 1, "head") if outer else n
            self.middle = f"{self.end} + {inner}u" if inner else self.end
        self.arrays: dict[Expr, str] = {}
        for load in kept.loads if kept.memory else ():
            name = self.arrays[load] = w.fresh("kept")
            kind = wgsl_type(load.dtype, w.is_vector(load))
            w.shared.append(f"var<workgroup> {name}: array<{kind}, {inner}>;")

    def walk(
        self,
        read: Callable[[], object],
        between: Callable[[], None],
        use: Callable[[], None],
        flight: int = FLIGHT,
    ) -> None:
        """Visit every position; see `ahead`."""
        steps = (read, between, use)
        parts = [self._loop, self._in_memory, self._in_registers]
        for part in reversed(parts) if self.seen else parts:
            part(steps, flight)
        self.seen = True
        self.back = self.turns and not self.back

    def _in_registers(self, steps: Steps, flight: int) -> None:
        w, n = self.w, self.kept.registers
        for one in self.held if self.seen else ():
            w.blocks[1] += ahead(w, "", 1, self.width, self.place, steps, [one])
        if n and not self.seen:
            first = self.position
            if self.middle:
                first = w.let(f"{self.middle} + {first}", 1, "i")
            end = self.n if self.kept.whole else None
            w.blocks[1] += ahead(
                w, first, n, self.width, self.place, steps, self.held, end
            )

    def _in_memory(self, steps: Steps, flight: int) -> None:
        w = self.w
        if not self.kept.memory:
            return
        if self.seen:
            for c, axes in enumerate(self.axes):
                memo: dict[Any, str] = {
                    load: w.let(f"{name}[lane + {c * self.width}u]", 1, "k")
                    for load, name in self.arrays.items()
                }
                one = [(memo, axes)]
                w.blocks[1] += ahead(w, "", 1, self.width, self.place, steps, one)
            return
        read, between, use = steps
        turn = count()

        def keep() -> None:  # after all were read, so that none is waited for
            at = next(turn) * self.width
            for load, name in self.arrays.items():
                w.line(f"{name}[lane + {at}u] = {w.value(load)};")
            use()

        first = self.position
        if self.end:
            first = w.let(f"{self.end} + {first}", 1, "i")
        known: list[Known] = []
        steps = (read, between, keep)
        w.blocks[1] += ahead(
            w, first, self.kept.memory, self.width, self.place, steps, known
        )
        self.axes = [axes for _, axes in known]

    def _loop(self, steps: Steps, flight: int) -> None:
        if self.kept.whole:
            return
        w, width = self.w, self.width
        i = w.fresh("walk")
        w.line(f"var {i} = {self.position};", 1)
        for several in (flight, 1):
            lines = ahead(w, i, several, width, self._towards, steps)
            last = f"{i} + {(several - 1) * width}u" if several > 1 else i
            w.line(f"for (; {last} < {self.end}; {i} += {several * width}u) {{", 1)
            w.blocks[1] += [*indent(lines), "}"]

    def _towards(self, at: str) -> None:
        """Name a position of a loop, which may go from the end back."""
        if self.back:
            at = self.w.let(f"{self.end} - 1u - {at}", 2, "i")
        self.place(at)
