"""Slices that a map writes into an array: ``where(start ≤ i < end, new, old)``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..ir.expr import Expr
from ..ir.indexmap import interval, number


@dataclass(frozen=True)
class Slice:
    """``where(start ≤ axis < start + length, new, …)``"""

    axis: int
    start: Expr
    length: int
    new: Expr


def find_slices(body: Expr, space: Sequence[int]) -> tuple[list[Slice], Expr]:
    """A chain of updates, the first first, and what they start from."""
    found: list[Slice] = []
    while body.kind == "apply" and body.data == "where":
        condition, new, rest = body.args
        s = _slice(condition, new, space)
        if s is None:
            break
        found.insert(0, s)
        body = rest
    return found, body


def _slice(condition: Expr, new: Expr, space: Sequence[int]) -> Slice | None:
    """An update whose slice surely lies inside of its axis."""
    if condition.kind != "apply" or condition.data != "and":
        return None
    low, high = condition.args
    if not all(
        c.kind == "apply" and c.data == op for c, op in ((low, "le"), (high, "lt"))
    ):
        return None
    (start, here), (also_here, end) = low.args, high.args
    if here is not also_here or here.kind != "index" or start.free:
        return None
    if end.kind != "apply" or end.data != "add" or end.args[0] is not start:
        return None
    length = number(end.args[1])
    first, last = interval(start, space)
    if length is None or first < 0 or last + length > space[here.data]:
        return None
    return Slice(here.data, start, length, new)
