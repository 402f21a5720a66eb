"""Activations: functions of one element, and gated products of two."""

from __future__ import annotations

from typing import Any

from .. import namespace as sd
from ..op import op


@op("... -> ...")
def silu(x: Any) -> Any:
    """x · sigmoid(x)

    Args:
        x: floats of any shape.
    """
    return sd.silu(x)


@op("... -> ...", static=("approximate",))
def gelu(x: Any, *, approximate: str = "none") -> Any:
    """x · Φ(x), with Φ the normal distribution function.

    Args:
        x: floats of any shape.
        approximate: ``"none"`` computes Φ by erf; ``"tanh"`` gives
            0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³))).

    Source: Hendrycks and Gimpel, "Gaussian error linear units" (2016).
    """
    return sd.gelu(x, approximate)


@op("... -> ...")
def softplus(x: Any) -> Any:
    """log(1 + eˣ), without overflow and without a threshold.

    Args:
        x: floats of any shape.
    """
    return sd.softplus(x)


@op("..., ... -> ...")
def swiglu(gate: Any, up: Any) -> Any:
    """silu(gate) · up

    Args:
        gate, up: floats of one shape.

    Source: Shazeer, "GLU variants improve transformer" (2020).
    """
    return sd.silu(gate) * up


@op("..., ... -> ...", static=("approximate",))
def geglu(gate: Any, up: Any, *, approximate: str = "none") -> Any:
    """gelu(gate) · up

    Args:
        gate, up: floats of one shape.
        approximate: ``"none"`` or ``"tanh"``, as in :func:`gelu`.

    Source: Shazeer, "GLU variants improve transformer" (2020).
    """
    return sd.gelu(gate, approximate) * up
