"""Cross entropy from logits."""

from __future__ import annotations

from typing import Any

from .. import namespace as sd
from ..array import Array, asarray
from ..errors import ShapeError
from ..ir.expr import user_location
from ..op import op
from .norm import shift


@op("... v, ... -> ...")
def cross_entropy_rows(logits: Any, labels: Any, *, ignore_index: int = -100) -> Any:
    """log Σ eˣ - x[label], and 0 where the label is ``ignore_index``.

    The shift by the maximum carries no derivative, so the gradient to the logits is
    softmax(x) - onehot(label) at once.

    Args:
        logits: [..., v].
        labels: i32 or u32 [...], 0 ≤ label < v or ``ignore_index``.
        ignore_index: the label of rows that do not count; a runtime number.

    Raises:
        IndexRangeError: labels known on the host that are neither.
    """
    counted = labels != ignore_index
    shifted = logits - shift(logits, "v")
    chosen = sd.where(counted, shifted.at(v=labels), 0.0)
    total = sd.sum(sd.exp(shifted), over="v")
    return sd.where(counted, sd.log(total) - chosen, 0.0)


def cross_entropy(
    logits: Any, labels: Any, *, ignore_index: int = -100, reduction: str = "mean"
) -> Array:
    """Cross entropy of rows, and its sum or mean over the rows that count.

    Args:
        logits: [..., v].
        labels: i32 or u32 [...].
        ignore_index: the label of rows that do not count.
        reduction: ``"mean"`` divides by the number of counted rows (0 where there are
            none), ``"sum"``, or ``"none"``, which gives one loss a row.

    Raises:
        IndexRangeError: labels known on the host that are out of range.
        ShapeError: an unknown reduction.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ShapeError(
            f"cross_entropy: reduction is 'mean', 'sum' or 'none', not {reduction!r}",
            where=user_location(),
        )
    y: Any = asarray(labels)
    rows: Array = cross_entropy_rows(logits, y, ignore_index=ignore_index)
    if reduction == "none":
        return rows
    total: Array = sd.sum(rows)
    if reduction == "sum":
        return total
    counted = sd.sum(sd.cast(y != ignore_index, "f32"))
    mean: Array = total / sd.maximum(counted, 1.0)
    return mean
