"""The plain form of a running sum: ``y[i] = Σ_j where(j ≤ i, x[j], 0)``, or ``i ≤ j``
for its adjoint.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ir import expr as E
from ..ir.expr import Expr
from ..ir.stage import Stage, factors, product


@dataclass(frozen=True)
class ScanParts:
    """``Σ_j where(j ≤ i, value(j), 0)``: ``axis`` is i, ``red`` is j; ``reverse`` for
    ``i ≤ j``.
    """

    axis: int
    red: int
    value: Expr
    reverse: bool


def scan_parts(stage: Stage, body: Expr) -> ScanParts | None:
    """A sum over one axis, up to (or from) the position along an output axis of the
    same extent.
    """
    no = len(stage.ext)
    red = [a for a in range(no, len(stage.space)) if stage.space[a] != 1]
    if (
        stage.monoid != "sum"
        or len(red) != 1
        or not (body.kind == "apply" and body.data in ("where", "mul", "neg"))
    ):
        return None
    j = red[0]
    number, fs, guards = factors(body)
    for c in guards:
        if c.data != "le" or any(x.kind != "index" for x in c.args):
            continue
        a, b = (x.data for x in c.args)
        axis = b if a == j else a if b == j else -1
        if not 0 <= axis < no or stage.space[axis] != stage.space[j]:
            continue
        rest = [g for g in guards if g is not c]
        if any(x.free >> axis & 1 for x in (*rest, *fs)):
            continue
        if number != 1.0:
            fs = [*fs, E.const(number)]
        value = product(fs) if body.dtype == "f32" or len(fs) != 1 else fs[0]
        return ScanParts(
            axis, j, E.cast(E.guard(rest, value), body.dtype), reverse=b == j
        )
    return None
