"""Matrix products with weights stored [out, in]."""

from __future__ import annotations

from typing import Any

from .. import namespace as sd
from ..op import op


@op("... k, n k -> ... n")
def linear(x: Any, weight: Any) -> Any:
    """y = x Wᵀ

    Args:
        x: [..., k].
        weight: [n, k].
    """
    return sd.sum(x * weight, over="k")


@op("... k, n k, n -> ... n")
def linear_bias(x: Any, weight: Any, bias: Any) -> Any:
    """y = x Wᵀ + b

    Args:
        x: [..., k].
        weight: [n, k].
        bias: [n].
    """
    return sd.sum(x * weight, over="k") + bias
