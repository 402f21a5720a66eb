"""Normalisations along the last axis."""

from __future__ import annotations

from typing import Any

from .. import namespace as sd
from ..op import op


@op("... d, d -> ... d")
def rms_norm(x: Any, weight: Any, *, eps: float = 1e-6) -> Any:
    """x · rsqrt(mean(x²) + eps) · weight

    Args:
        x: [..., d].
        weight: [d].
        eps: added to the mean square; a runtime number.

    Source: Zhang and Sennrich, "Root mean square layer normalization" (2019).
    """
    return x * sd.rsqrt(sd.mean(x * x, over="d") + eps) * weight


@op("... d, d -> ... d")
def rms_norm_shifted(x: Any, weight: Any, *, eps: float = 1e-6) -> Any:
    """x · rsqrt(mean(x²) + eps) · (1 + weight)

    Args:
        x: [..., d].
        weight: [d]; zero leaves the normalised value as it is.
        eps: added to the mean square; a runtime number.
    """
    return x * sd.rsqrt(sd.mean(x * x, over="d") + eps) * (1.0 + weight)


@op("... d, d, d -> ... d")
def layer_norm(x: Any, weight: Any, bias: Any, *, eps: float = 1e-5) -> Any:
    """(x - mean(x)) · rsqrt(var(x) + eps) · weight + bias

    The variance is the population's and is taken in a second pass over the centred
    row: E[x²] - E[x]² would cancel where the mean is large.

    Args:
        x: [..., d].
        weight, bias: [d].
        eps: added to the variance; a runtime number.

    Source: Ba, Kiros and Hinton, "Layer normalization" (2016).
    """
    centred = x - sd.mean(x, over="d")
    variance = sd.mean(centred * centred, over="d")
    return centred * sd.rsqrt(variance + eps) * weight + bias


@op("... d -> ... d")
def softmax(x: Any) -> Any:
    """eˣ / Σ eˣ over the last axis, shifted by the maximum.

    Entries of -inf give exactly 0; a row of nothing else gives zeros.

    Args:
        x: [..., d].

    Raises:
        ReductionError: d is 0.
    """
    return sd.softmax(x, over="d")


@op("... d -> ... d")
def log_softmax(x: Any) -> Any:
    """x - log Σ eˣ over the last axis, shifted by the maximum.

    Args:
        x: [..., d].

    Raises:
        ReductionError: d is 0.
    """
    shifted = x - shift(x, "d")
    return shifted - sd.log(sd.sum(sd.exp(shifted), over="d"))


def shift(x: Any, over: str) -> Any:
    """The row's maximum as a constant, 0 where it is infinite.

    Subtracting it first keeps the digits that a difference of two large numbers would
    lose; it carries no derivative, because the result does not depend on it.
    """
    m = sd.max(x, over=over)
    return sd.stop_gradient(sd.where(sd.isinf(m), 0.0, m))
