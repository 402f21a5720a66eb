"""Shares of a reduction: its longest axis cut into pieces of equal length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..ir import expr as E
from ..ir.expr import Expr
from ..ir.indexmap import Affine
from ..ir.stage import MONOIDS, Stage, reduce_stage


@dataclass(eq=False)
class Shares:
    """How a reduction is walked in shares.

    Args:
        stage: the reduction.
        wanted: shares; less where some would be empty.

    Attributes:
        moved: its axes as axes of the first stage: outputs, the share, then the reduced
            ones.
        first: the first stage with the reduction's own body.
    """

    stage: Stage
    wanted: int
    count: int = field(init=False)
    moved: dict[int, Expr] = field(init=False)
    first: Stage = field(init=False)

    def __post_init__(self) -> None:
        s, no = self.stage, len(self.stage.ext)
        self._axis = max(range(len(s.rext)), key=lambda q: s.rext[q])
        n = s.rext[self._axis]
        self._per = -(-n // self.wanted)
        self.count = -(-n // self._per)
        # An axis of one element is no axis of a body.
        self.moved = {no + q: _place(no + 1 + q, e) for q, e in enumerate(s.rext)}
        place = {}
        if self.count > 1:
            place[no] = self._per
        if self._per > 1:
            place[no + 1 + self._axis] = 1
        self.moved[no + self._axis] = Affine(place, 0, ()).expr()
        assert s.body is not None
        self.first = self.stage_of(s, E.substitute(s.body, self.moved))

    def stage_of(self, s: Stage, body: Expr) -> Stage:
        """The first stage of a reduction over the same axes; the body is over its own
        axes already.
        """
        assert s.monoid is not None
        no, n = len(s.ext), s.rext[self._axis]
        if self._per * self.count != n:
            identity = E.const(MONOIDS[s.monoid].identity[body.dtype], body.dtype)
            position = self.moved[no + self._axis]
            body = E.where(E.apply("lt", position, E.size(n)), body, identity)
        rext = list(s.rext)
        rext[self._axis] = self._per
        ext = [*s.ext, self.count]
        return reduce_stage(ext, rext, s.monoid, body, f"{s.name}_shares", s.loc)


def _place(axis: int, extent: int) -> Expr:
    return E.index(axis) if extent != 1 else E.const(0)


def own_axes(ext: Sequence[int]) -> list[Expr]:
    """Where a stage with these axes first is read at the reader's own."""
    return [_place(a, e) for a, e in enumerate(ext)]


def combined(shares: Shares) -> Stage:
    """The second stage: the reduction of what the shares give."""
    s = shares.stage
    assert s.monoid is not None
    again = E.load(shares.first, own_axes(shares.first.ext))
    return reduce_stage(s.ext, [shares.count], s.monoid, again, s.name, s.loc)
