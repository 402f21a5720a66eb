"""Linear algebra functions of the standard's main namespace."""

from __future__ import annotations

import math
from typing import Any

from ... import namespace as sd
from ...array import Array
from ...array import asarray as _array
from ...errors import AxisError, ShapeError
from ...ir import arrays as A
from ...ir import expr as E
from .dtypes import result_type


def _pair(x1: Any, x2: Any) -> tuple[Array, Array]:
    dtype = result_type(x1, x2)
    return _array(x1, dtype), _array(x2, dtype)


def matmul(x1: Any, x2: Any, /) -> Array:
    """Products of matrices, batched; vectors count as a row or a column."""
    a, b = _pair(x1, x2)
    return a @ b


def matrix_transpose(x: Array, /) -> Array:
    """The last two axes swapped."""
    return x.mT


def vecdot(x1: Any, x2: Any, /, *, axis: int = -1) -> Array:
    """Σ x1·x2 along an axis."""
    a, b = _pair(x1, x2)
    for x in (a, b):
        if not -x.ndim <= axis < x.ndim:
            raise AxisError(
                f"vecdot: axis {axis} of an array with {x.ndim} dimensions",
                where=E.user_location(),
            )
    if a.shape[axis] != b.shape[axis]:
        raise ShapeError(
            f"vecdot: axis {axis} has size {a.shape[axis]} and {b.shape[axis]}",
            where=E.user_location(),
        )
    return (a * b).sum(axis=axis)


def tensordot(x1: Any, x2: Any, /, *, axes: Any = 2) -> Array:
    """Σ over the last axes of x1 and the first of x2, ``axes`` many, or over pairs."""
    a, b = _pair(x1, x2)
    if isinstance(axes, int):
        if not 0 <= axes <= min(a.ndim, b.ndim):
            raise AxisError(
                f"tensordot over {axes} axes of {a.ndim} and {b.ndim}",
                where=E.user_location(),
            )
        left, right = list(range(a.ndim - axes, a.ndim)), list(range(axes))
    else:
        left = [A.normal_axis(k, a.ndim) for k in axes[0]]
        right = [A.normal_axis(k, b.ndim) for k in axes[1]]
    sizes = [a.shape[k] for k in left]
    if len(left) != len(right) or sizes != [b.shape[k] for k in right]:
        raise ShapeError(
            f"tensordot of {a.shape} over {left} with {b.shape} over {right}",
            where=E.user_location(),
        )
    rows = [k for k in range(a.ndim) if k not in left]
    columns = [k for k in range(b.ndim) if k not in right]
    shape = [a.shape[k] for k in rows] + [b.shape[k] for k in columns]
    inner = math.prod(sizes)
    m = math.prod(a.shape[k] for k in rows)
    n = math.prod(b.shape[k] for k in columns)
    if 0 in (m, n, inner):
        return sd.zeros(shape, a.dtype)
    p = _turned(a, rows + left).reshape((m, inner))
    q = _turned(b, right + columns).reshape((inner, n))
    return (p @ q).reshape(shape)


def _turned(x: Array, order: list[int]) -> Array:
    return x.transpose(order) if x.ndim else x
