"""The stages of one kernel and their axes, as the partition finds them and a schedule
prints them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..ir import expr as E
from ..ir.expr import Expr
from ..ir.indexmap import Affine
from ..ir.stage import Stage
from .blocks_graph import Loop
from .member import Member


@dataclass(eq=False)
class Group:
    """A kernel under construction.

    ``axes[m]`` gives the kernel axis for each of m's own axes (in the order of
    ``m.axes``); kernel axes are numbered rows first, then lanes.
    """

    kind: str
    rows: tuple[int, ...]
    lanes: tuple[int, ...]
    members: list[Member] = field(default_factory=list)
    axes: dict[Member, list[int]] = field(default_factory=dict)
    stored: list[Member] = field(default_factory=list)
    why: list[str] = field(default_factory=list)
    anchors: frozenset[Stage] | set[Stage] = frozenset()
    bit: int = 0
    before: int = 0  # bits of the groups that must run earlier
    # Where members are stored that have no memory of their own: the tensor and the
    # indices there.
    targets: dict[Stage, tuple[Stage, Sequence[Expr]]] = field(default_factory=dict)
    # Groups of the graph that this one computes in their place.
    stands_for: list[Group] | None = None
    loop: Loop | None = None  # a loop over blocks of rows that gives the members

    @property
    def space(self) -> tuple[int, ...]:
        """Extents of the kernel's axes."""
        return self.rows + self.lanes

    def renaming(self, m: Member) -> dict[int, Expr]:
        """A member's own axes as kernel axes."""
        return {a: E.index(q) for a, q in zip(m.axes, self.axes[m], strict=True)}

    def own_load(self, m: Member) -> Expr:
        """The load of a member at the kernel's axes: what readers inside the kernel
        say.
        """
        where = dict(zip(m.axes, self.axes[m], strict=True))
        idx = []
        for g in m.stage.groups:
            form: dict[int, int] = {}
            stride = 1
            for a in reversed(g):
                if m.stage.ext[a] != 1:
                    form[where[a]] = stride
                stride *= m.stage.ext[a]
            idx.append(Affine(form, 0, ()).expr())
        return E.load(m.stage, idx)

    def target(self, m: Member) -> tuple[Stage, Sequence[Expr]]:
        """Where a member is stored: a tensor, and the indices in it over the kernel's
        axes.
        """
        return self.targets.get(m.stage) or (m.stage, self.own_load(m).args)

    def __repr__(self) -> str:
        rows, lanes = (",".join(map(str, n)) for n in (self.rows, self.lanes))
        return f"{self.kind}[{rows}|{lanes}]{self.members}"
