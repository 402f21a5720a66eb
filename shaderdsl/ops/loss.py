"""Cross entropy from logits, and from what they are made of."""

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
    return _rows(logits, labels, ignore_index)


@op("... k, v k, ... -> ...")
def linear_cross_entropy_rows(
    x: Any,
    weight: Any,
    labels: Any,
    *,
    ignore_index: int = -100,
    softcap: float | None = None,
) -> Any:
    """Cross entropy of the logits x Wᵀ, and 0 where the label is ``ignore_index``.

    Large logits are worked through in blocks of rows: they never exist whole, neither
    forward nor backward.

    Args:
        x: [..., k].
        weight: [v, k].
        labels: i32 or u32 [...], 0 ≤ label < v or ``ignore_index``.
        ignore_index: the label of rows that do not count; a runtime number.
        softcap: c makes the logits c · tanh(x Wᵀ / c).

    Raises:
        IndexRangeError: labels known on the host that are neither.
    """
    logits = sd.sum(x * weight, over="k")
    if softcap is not None:
        logits = softcap * sd.tanh(logits / softcap)
    return _rows(logits, labels, ignore_index)


def _rows(logits: Any, labels: Any, ignore_index: Any) -> Any:
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
    _check(reduction, "cross_entropy")
    y: Any = asarray(labels)
    rows: Array = cross_entropy_rows(logits, y, ignore_index=ignore_index)
    return _reduced(rows, y, ignore_index, reduction)


def linear_cross_entropy(
    x: Any,
    weight: Any,
    labels: Any,
    ignore_index: int = -100,
    *,
    softcap: float | None = None,
    reduction: str = "mean",
) -> Array:
    """Cross entropy of the logits x Wᵀ, and its sum or mean over the rows that count.

    The same as ``cross_entropy(linear(x, weight), labels)``, which is scheduled alike:
    logits of 32 MiB or more are worked through in blocks of rows and never exist whole.

    Args:
        x: [..., k].
        weight: [v, k].
        labels: i32 or u32 [...].
        ignore_index: the label of rows that do not count.
        softcap: c makes the logits c · tanh(x Wᵀ / c).
        reduction: as of :func:`cross_entropy`.

    Raises:
        IndexRangeError: labels known on the host that are out of range.
        ShapeError: an unknown reduction.
    """
    _check(reduction, "linear_cross_entropy")
    y: Any = asarray(labels)
    rows: Array = linear_cross_entropy_rows(
        x, weight, y, ignore_index=ignore_index, softcap=softcap
    )
    return _reduced(rows, y, ignore_index, reduction)


def _check(reduction: str, what: str) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ShapeError(
            f"{what}: reduction is 'mean', 'sum' or 'none', not {reduction!r}",
            where=user_location(),
        )


def _reduced(rows: Array, labels: Any, ignore_index: int, reduction: str) -> Array:
    if reduction == "none":
        return rows
    total: Array = sd.sum(rows)
    if reduction == "sum":
        return total
    counted = sd.sum(sd.cast(labels != ignore_index, "f32"))
    mean: Array = total / sd.maximum(counted, 1.0)
    return mean
