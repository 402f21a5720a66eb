"""Rows of a stage: the axes that together count through the rows of a loop over blocks.

A row number is a mixed-radix number of some axes of a stage, most significant first. A
block of rows shortens the extents of these axes and nothing else: indices that count
rows stay as they are, because a block never crosses a digit's border halfway.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence

from ..ir import expr as E
from ..ir.expr import Expr
from ..ir.indexmap import affine, digits, number, split
from ..ir.stage import Stage

Axes = tuple[int, ...]


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
    total = E.const(0)
    for x, n in zip(indices, radices, strict=True):
        high, low = _operand(total, "floordiv", n), _operand(x, "mod", n)
        if high is not None and high is low:
            total = high
        else:
            total = E.apply("add", E.apply("mul", total, E.const(n)), x)
    return affine(total).expr()


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


def block_extents(extents: Sequence[int], rows: int) -> list[int]:
    """Extents of the digits within a block of rows."""
    out = []
    for n in reversed(extents):
        out.append(min(n, rows))
        rows = max(1, rows // n)
    return out[::-1]


def borders(extents: Sequence[int]) -> Iterator[int]:
    """Rows after which a higher digit changes."""
    step = 1
    for n in reversed(extents[1:]):
        step *= n
        yield step


def cut(
    count: int, rows: int, steps: int, edges: Collection[int]
) -> list[tuple[int, int]] | None:
    """Blocks as (first row, rows), about ``rows`` each.

    Args:
        steps: blocks begin at multiples of so many rows.
        edges: borders that a block keeps to, or covers whole.

    Returns:
        None if there is no such way.
    """
    ordered = sorted({1, *edges, count})
    if any(b % a for a, b in itertools.pairwise(ordered)):
        return None
    for inner, outer in itertools.pairwise(ordered):
        unit = math.lcm(inner, steps)
        taken = max(unit, rows // unit * unit)
        aligned = outer == count or outer % steps == 0
        if rows < outer and taken < outer and aligned:
            return [
                (start + at, min(taken, outer - at))
                for start in range(0, count, outer)
                for at in range(0, outer, taken)
            ]
    return None
