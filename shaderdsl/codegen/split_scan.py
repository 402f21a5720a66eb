"""Long running sums: pieces are summed each for itself, then what lies before a piece
is added to it.

Before: ``y[i] = Σ_{j ≤ i} x[j]``. After: ``p[c, i] = Σ_{j ≤ i} x[c·n + j]``, ``q[c] =
Σ_{b ≤ c} p[b, n - 1]``, ``y[i] = p[i / n, i % n] + q[i / n - 1]``. Running sums from
the other end look at the first element of a piece, and at the piece after.
"""

from __future__ import annotations

from ..ir import expr as E
from ..ir.expr import Expr
from ..ir.indexmap import Affine, divmod_index
from ..ir.stage import Stage, map_stage, reduce_stage
from .budget import longest_scan
from .member import Inliner
from .scan_form import ScanParts, scan_parts
from .shares import own_axes
from .target import Target


def long_scan(s: Stage, target: Target) -> ScanParts | None:
    """A running sum that is too long for one workgroup."""
    if (
        s.kind != "reduce"
        or s.body is None
        or max(s.rext, default=0) <= longest_scan(target)
    ):
        return None
    return scan_parts(s, Inliner(set()).body(s.body, s.space))


def scan_in_pieces(s: Stage, parts: ScanParts, target: Target) -> Stage:
    """The same running sums, from pieces that are short enough."""
    n, rank, axis = s.space[parts.red], len(s.ext), parts.axis
    count = -(-n // longest_scan(target))
    per = -(-n // count)
    count = -(-n // per)
    # Axes of the first stage: those of s with the piece in place of the line, the
    # position in the piece, the one that is summed.
    place, summed = E.index(rank), E.index(rank + 1)
    position = Affine({axis: per, rank + 1: 1}, 0, ()).expr()
    value = E.substitute(parts.value, {parts.red: position})
    if per * count != n:
        zero = E.const(0, value.dtype)
        value = E.where(E.apply("lt", position, E.size(n)), value, zero)
    ext = [count if a == axis else e for a, e in enumerate(s.ext)]
    within = reduce_stage(
        [*ext, per], [per], "sum", _up_to(summed, place, value, parts),
        f"{s.name}_pieces", s.loc,
    )  # fmt: skip
    others = own_axes(ext)
    end = E.const(0 if parts.reverse else per - 1)
    whole = [E.index(rank) if a == axis else e for a, e in enumerate(others)]
    total = E.load(within, [*whole, end])
    before = reduce_stage(
        ext, [count], "sum", _up_to(E.index(rank), others[axis], total, parts),
        f"{s.name}_before", s.loc,
    )  # fmt: skip
    piece, inside = divmod_index(E.index(axis), per, s.ext)
    own = E.load(within, [*_at(others, axis, piece), inside])
    step = E.const(1 if parts.reverse else -1)
    beside = E.load(before, _at(others, axis, E.apply("add", piece, step)))
    edge = E.const(count - 1 if parts.reverse else 0)
    zero = E.const(0, own.dtype)
    add = E.where(E.apply("eq", piece, edge), zero, beside)
    body = E.apply("add", own, add)
    return map_stage(s.ext, body, s.name, dtype=s.dtype, loc=s.loc)


def _up_to(j: Expr, i: Expr, value: Expr, parts: ScanParts) -> Expr:
    """A term of a running sum: the value where j does not lie beyond i."""
    ends = (i, j) if parts.reverse else (j, i)
    return E.where(E.apply("le", *ends), value, E.const(0, value.dtype))


def _at(indices: list[Expr], axis: int, place: Expr) -> list[Expr]:
    return [place if a == axis else e for a, e in enumerate(indices)]
