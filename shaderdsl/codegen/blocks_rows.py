"""Rows of a stage: the axes that together count through the rows of a loop over blocks.

A row number is a mixed-radix number of some axes of a stage, most significant first.
Within a block these axes are one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ..ir import expr as E
from ..ir.expr import Expr
from ..ir.indexmap import affine, digits, number, split
from ..ir.stage import Stage

Axes = tuple[int, ...]

#: Blocks of more rows are multiples of these: whole tiles of a contraction.
TILES = (64, 8)


def own_indices(n: Expr, space: Sequence[int]) -> list[Expr]:
    """What a load says for each of the loaded stage's own axes."""
    stage: Stage = n.data
    out: list[Expr] = [E.const(0)] * len(stage.ext)
    for i, group in zip(n.args, stage.groups, strict=True):
        parts = split(i, [stage.ext[a] for a in group], space)
        for a, x in zip(group, parts, strict=True):
            out[a] = x
    return out


def joined(indices: Sequence[Expr], radices: Sequence[int]) -> Expr:
    """Digits put together to one number; quotient and remainder of a number are it."""
    if len(indices) == 1:
        return affine(indices[0]).expr()
    total = E.const(0)
    for x, n in zip(indices, radices, strict=True):
        high, low = _operand(total, "floordiv", n), _operand(x, "mod", n)
        if high is not None and high is low:
            total = high
        else:
            total = E.apply("add", E.apply("mul", total, E.const(n)), x)
    return affine(total).expr()


def same_order(view: Stage) -> bool:
    """Whether a map that only reads elsewhere has all of the same elements in the same
    order.
    """
    n = view.body
    assert n is not None
    at = [E.index(a) if k > 1 else E.const(0) for a, k in enumerate(view.ext)]
    same = joined(n.args, n.data.shape) is joined(at, view.ext)
    return same and view.size == n.data.size


def _operand(e: Expr, name: str, n: int) -> Expr | None:
    """x of ``name(x, n)``."""
    known = e.kind == "apply" and e.data == name and number(e.args[1]) == n
    return e.args[0] if known else None


def row_axes(e: Expr, space: Sequence[int], count: int) -> Axes | None:
    """The axes of a space that a row number runs through, None if it is none."""
    found = digits(e, space)
    if found is None or any(d.sign < 0 or d.const for d in found):
        return None
    if math.prod(d.extent for d in found) != count:
        return None
    return tuple(d.axis for d in found)


def read_rows(n: Expr, own: Axes, space: Sequence[int], count: int) -> Axes | None:
    """The reader's axes that a load walks the rows of a stage with, row by row."""
    indices = own_indices(n, space)
    e = joined([indices[a] for a in own], [n.data.ext[a] for a in own])
    return row_axes(e, space, count)


def loaded_rows(n: Expr, axes: Axes, space: Sequence[int], count: int) -> Axes | None:
    """The loaded stage's own axes that are the reader's rows; () if it has none, None
    if rows and other things mix.
    """
    mask = sum(1 << a for a in axes)
    indices = own_indices(n, space)
    # An index that is an array's element is a value like any other.
    own = tuple(a for a, x in enumerate(indices) if x.free & mask and not E.loads(x))
    if not own:
        return ()
    e = joined([indices[a] for a in own], [n.data.ext[a] for a in own])
    return own if row_axes(e, space, count) == axes else None


def leading(n: Expr, axes: Axes, space: Sequence[int], count: int) -> int:
    """How many dimensions of a loaded array are the reader's rows and nothing else; 0
    if rows do not come first.
    """
    mask = sum(1 << a for a in axes)
    shape = n.data.shape
    for p in range(1, len(shape) + 1):
        if math.prod(shape[:p]) == count:
            if any(E.loads(i) for i in n.args[:p]):
                return 0
            if row_axes(joined(n.args[:p], shape[:p]), space, count) != axes:
                return 0
            # The longest such prefix: what follows may be axes of one element.
            rest = n.args[p:]
            plain = [i for i in rest if not E.loads(i)]
            return 0 if any(i.free & mask for i in plain) else p
    return 0


def several_each(
    n: Expr, axes: Axes, space: Sequence[int], count: int
) -> tuple[int, int, Expr] | None:
    """Where each row is several positions of an array's first dimensions, such as the
    query heads of a key's head: how many dimensions, how many positions a row, and
    which of them a load reads.
    """
    mask = sum(1 << a for a in axes)
    shape = n.data.shape
    for p in range(1, len(shape) + 1):
        each, left = divmod(math.prod(shape[:p]), count)
        if left or each < 2 or E.loads(*n.args[:p]):
            continue
        e = joined(n.args[:p], shape[:p])
        row, within = split(e, [count, each], space)
        plain = [within, *(i for i in n.args[p:] if not E.loads(i))]
        if row_axes(row, space, count) == axes:
            return None if any(i.free & mask for i in plain) else (p, each, within)
    return None


def steps_of(row_bytes: Iterable[int], alignment: int) -> int:
    """How many rows lie between places where all arrays may be bound."""
    return math.lcm(1, *(alignment // math.gcd(alignment, n) for n in row_bytes))


def cut(count: int, rows: int, steps: int) -> list[tuple[int, int]]:
    """Blocks as (first row, rows), about ``rows`` each, that begin at multiples of
    ``steps``.
    """
    whole = next((n for n in (math.lcm(steps, t) for t in TILES) if rows >= n), steps)
    taken = max(steps, rows // whole * whole)
    return [(at, min(taken, count - at)) for at in range(0, count, taken)]
