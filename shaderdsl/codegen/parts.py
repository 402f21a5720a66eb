"""Several texts in one kernel, side by side: by a workgroup's number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .address import Key
from .group import Group
from .kernel_text import indent
from .program import Kernel
from .schedule import Layout, finish, fold
from .target import Target
from .writer import Writer

#: A workgroup's number in a grid that may be folded.
FLAT = "group.y * groups.x + group.x"


class Part(Protocol):
    """The text of threads that are counted from 0: ``lines`` gives it from the thread's
    number ``at`` on, and ``writer`` a writer that knows its addresses.
    """

    group: Group
    layout: Layout
    vector: int | None
    threads: int

    def writer(self) -> Writer:
        """A writer for this text alone."""
        ...

    def lines(self, w: Writer) -> list[str]:
        """The text; a thread that is not needed returns."""
        ...


class Parts(Writer):
    """A writer of several texts with axes of their own, over the same bindings."""

    part = 0

    def param(
        self,
        key: Key,
        value: int | float | tuple[str, str],
        dtype: str = "u32",
        stem: str = "n",
    ) -> str:
        # Axes are numbered anew in each part.
        return super().param((self.part, *key), value, dtype, stem)

    def bind_as(self, own: Sequence[Writer]) -> None:
        """Bind each array in a way that suits the writers of all parts."""
        for one in own:
            self.plain |= one.plain
            self.parts |= one.parts
        self.parts -= self.plain

    def begin(self, part: int, group: Group) -> None:
        """Forget one part's values."""
        self.part, self.space = part, list(group.space)
        self.names, self.depth, self.local, self.addresses = {}, {}, {}, {}
        self.blocks, self.memo, self.vector, self.base = [[]], [{}], None, 0

    def first(self, total: int) -> str:
        """The workgroup's number in a part after so many of other parts."""
        if not self.part:
            return "every"
        return f"(every - {self.param(('first',), total, stem='first')})"

    def branch(self, total: int, text: Sequence[str]) -> list[str]:
        """A part's text, for workgroups below a number; ``}`` ends the last one."""
        end = self.param(("end",), total, stem="end")
        again = "} else " if self.part else ""
        return [f"{again}if (every < {end}) {{", *indent(text)]


def only(part: Part, size: int, name: str, archetype: str, target: Target) -> Kernel:
    """A kernel of one text."""
    w = part.writer()
    w.line(f"let at = ({FLAT}) * {size}u + lane;")
    lines = part.lines(w)
    grid = fold(-(-part.threads // size), target)
    return finish(part.group, w, part.layout, lines, name, archetype, size, grid)


def side_by_side(
    group: Group,
    parts: Sequence[Part],
    size: int,
    name: str,
    archetype: str,
    target: Target,
) -> Kernel:
    """A kernel of several texts, for a group that stands for theirs."""
    w = Parts([], target)
    own = [p.writer() for p in parts]
    w.bind_as(own)
    lines = [f"let every = {FLAT};"]
    total = 0
    for number, (p, one) in enumerate(zip(parts, own, strict=True)):
        w.begin(number, p.group)
        w.vector, w.addresses = p.vector, one.addresses
        w.line(f"let at = {w.first(total)} * {size}u + lane;")
        text = p.lines(w)
        total += -(-p.threads // size)
        lines += w.branch(total, text)
    lines.append("}")
    grid = fold(total, target)
    layout = together([p.layout for p in parts])
    return finish(group, w, layout, lines, name, archetype, size, grid)


def together(layouts: Sequence[Layout]) -> Layout:
    """What a kernel reads and writes, for its figures."""
    return Layout(
        {m: b for x in layouts for m, b in x.bodies.items()},
        {n: a for x in layouts for n, a in x.addresses.items()},
        {m: a for x in layouts for m, a in x.stores.items()},
        [],
        {},
    )
