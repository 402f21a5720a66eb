"""Rotary position embedding, with the tables of cosines and sines as operands.

Source: Su et al., "RoFormer" (2021). The two layouts differ in which elements make a
pair; a model trained with one is wrong with the other, so the layout is always named.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import namespace as sd
from ..array import Array, asarray
from ..errors import ShapeError
from ..ir.expr import user_location
from ..op import Op, op


@op("... t h (r p), ... t p, ... t p -> ... t h (r p)", r=2)
def rope_halved(x: Any, cos: Any, sin: Any) -> Any:
    """Turn the pairs (i, i + d/2): x₀ cos - x₁ sin, x₁ cos + x₀ sin.

    Args:
        x: [..., t, heads, d], d even.
        cos, sin: [..., t, d/2]; leading axes may be left out.
    """
    sign = sd.where(sd.index("r") == 0, -1.0, 1.0)
    return x * cos + sign * x.at(r=1 - sd.index("r")) * sin


@op("... t h (p r), ... t p, ... t p -> ... t h (p r)", r=2)
def rope_interleaved(x: Any, cos: Any, sin: Any) -> Any:
    """Turn the pairs (2i, 2i + 1): x₀ cos - x₁ sin, x₁ cos + x₀ sin.

    Args:
        x: [..., t, heads, d], d even.
        cos, sin: [..., t, d/2]; leading axes may be left out.
    """
    sign = sd.where(sd.index("r") == 0, -1.0, 1.0)
    return x * cos + sign * x.at(r=1 - sd.index("r")) * sin


def rope(x: Any, cos: Any, sin: Any, *, layout: str) -> Array:
    """Turn the first ``rotary_dim`` elements of each head; the rest passes through.

    Args:
        x: [..., t, heads, d].
        cos, sin: [..., t, rotary_dim / 2] with rotary_dim ≤ d.
        layout: ``"halved"`` or ``"interleaved"``.

    Raises:
        ShapeError: the tables turn more than a head holds, or an unknown layout.
    """
    layouts: dict[str, Op] = {"halved": rope_halved, "interleaved": rope_interleaved}
    if layout not in layouts:
        raise ShapeError(
            f"rope: layout is 'halved' or 'interleaved', not {layout!r}",
            where=user_location(),
        )
    x, cos = asarray(x), asarray(cos)
    rotary, d = 2 * cos.shape[-1], x.shape[-1]
    if rotary > d:
        raise ShapeError(
            f"rope: the tables turn {rotary} elements, a head of 'x' has {d}",
            where=user_location(),
        )
    turn = layouts[layout]
    if rotary == d:
        turned: Array = turn(x, cos, sin)
        return turned
    return sd.concatenate([turn(x[..., :rotary], cos, sin), x[..., rotary:]], axis=-1)


def rope_tables(
    positions: Any, rotary_dim: int, *, base: float = 10000.0
) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of position / base^(2i / rotary_dim), computed in float64.

    Args:
        positions: integers of any shape, known on the host.
        rotary_dim: elements of a head that turn, even.
        base: the slowest wave's scale.

    Returns:
        Two float32 arrays of the positions' shape with rotary_dim / 2 columns more.

    Raises:
        ShapeError: rotary_dim is odd.
    """
    if rotary_dim % 2:
        raise ShapeError(f"rotary_dim is {rotary_dim}; pairs need an even number")
    powers = np.arange(0, rotary_dim, 2, dtype=np.float64) / max(rotary_dim, 1)
    angle = np.asarray(positions, np.float64)[..., None] * float(base) ** -powers
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
