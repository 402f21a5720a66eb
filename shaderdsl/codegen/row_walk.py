"""Walks of rows that do not fit into registers: loops with several positions under way.

On GPUs the last positions of a row stay in registers from the first walk on, and each
walk goes the other way than the one before it: what was read last is still near.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .kernel_text import indent
from .writer import Writer

#: Positions that a lane reads before it uses any of them.
FLIGHT = 4
#: Values of 32 bits of a row that a lane keeps from walk to walk on GPUs.
HELD = 32

#: What is known at a position, and the names of its axes.
Known = tuple[dict[Any, str], dict[int, str]]


def ahead(
    w: Writer,
    i: str,
    flight: int,
    width: int,
    place: Callable[[str], None],
    read: Callable[[], object],
    between: Callable[[], None],
    use: Callable[[], None],
    known: list[Known] | None = None,
) -> list[str]:
    """The inside of a loop over a row: so many positions are read before any is used.

    Args:
        i: the loop's variable.
        width: how far apart a lane's positions lie.
        place: names the axes of a position.
        read: at each position; what it names ``use`` finds again.
        between: once, after all were read.
        known: what earlier text knows of these positions; noted if it is empty.
    """
    lines: list[str] = []
    memos: list[dict[Any, str]] = []
    names: list[dict[int, str]] = []
    old = list(known or ())
    for u in range(flight):
        w.open()
        if old:
            memo, axes = old[u]
            w.memo[-1] = dict(memo)
            for a, name in axes.items():
                w.axis(a, name, 2)
        else:
            place(w.let(f"{i} + {u * width}u", 2, "i") if u else i)
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


class Walks:
    """The walks of one row, one after another.

    Args:
        n: the row's length in positions, as text.
        position: the lane's place in its row, of ``width``.
        place: names the axes of a position.
        held: positions that a lane keeps; the row has so many for each lane.
        turns: whether each walk goes the other way than the one before.
    """

    def __init__(
        self,
        w: Writer,
        n: str,
        position: str,
        width: int,
        place: Callable[[str], None],
        held: int = 0,
        turns: bool = False,
    ):
        self.w, self.position, self.width, self.place = w, position, width, place
        self.held, self.turns, self.back = held, turns, False
        self.known: list[Known] = []
        self.end = w.let(f"{n} - {held * width}u", 1, "head") if held else n

    def walk(
        self,
        read: Callable[[], object],
        between: Callable[[], None],
        use: Callable[[], None],
        flight: int = FLIGHT,
    ) -> None:
        """Visit every position; see `ahead`."""
        if self.known:
            self._visit_held(read, between, use)
            self._loop(read, between, use, flight)
        else:
            self._loop(read, between, use, flight)
            if self.held:
                self._visit_held(read, between, use)
        self.back = self.turns and not self.back

    def _visit_held(
        self,
        read: Callable[[], object],
        between: Callable[[], None],
        use: Callable[[], None],
    ) -> None:
        w = self.w
        steps = (self.width, self.place, read, between, use)
        if self.known:
            for one in self.known:
                w.blocks[1] += ahead(w, "", 1, *steps, [one])
        else:
            first = w.let(f"{self.end} + {self.position}", 1, "i")
            w.blocks[1] += ahead(w, first, self.held, *steps, self.known)

    def _loop(
        self,
        read: Callable[[], object],
        between: Callable[[], None],
        use: Callable[[], None],
        flight: int,
    ) -> None:
        w, width = self.w, self.width
        i = w.fresh("walk")
        w.line(f"var {i} = {self.position};", 1)
        for several in (flight, 1):
            lines = ahead(w, i, several, width, self._towards, read, between, use)
            last = f"{i} + {(several - 1) * width}u" if several > 1 else i
            w.line(f"for (; {last} < {self.end}; {i} += {several * width}u) {{", 1)
            w.blocks[1] += [*indent(lines), "}"]

    def _towards(self, at: str) -> None:
        """Name a position of a loop, which may go from the end back."""
        if self.back:
            at = self.w.let(f"{self.end} - 1u - {at}", 2, "i")
        self.place(at)
