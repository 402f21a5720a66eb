"""Statistical, searching and utility functions of the standard."""

from __future__ import annotations

import builtins
from typing import Any

import numpy as np

from ... import namespace as sd
from ...array import Array, call
from ...array import asarray as _array
from ...errors import DTypeError, ShapeError
from ...ir import arrays as A
from ...ir import expr as E
from .dtypes import NAMES, result_type
from .manipulation import concat

_FLOATS = E.FLOATS


def _need(name: str, x: Any, kinds: Any) -> Array:
    a = _array(x)
    if a.dtype not in kinds:
        raise DTypeError(
            f"{name} of {NAMES[a.dtype.name]}",
            where=E.user_location(),
            cure="convert it with astype",
        )
    return a


_NUMBER = ("i32", "u32", "f32", "f16")


def _total(kind: str, x: Any, axis: Any, dtype: Any, keepdims: bool) -> Array:
    a = _need(kind, x, _NUMBER)
    a = a if dtype is None else a.astype(dtype)
    result: Array = getattr(sd, kind)(a, axis=axis, keepdims=keepdims)
    return result


def sum(
    x: Any, /, *, axis: Any = None, dtype: Any = None, keepdims: builtins.bool = False
) -> Array:
    """Σ over axes; 0 over none. Integers wrap at 32 bits."""
    return _total("sum", x, axis, dtype, keepdims)


def prod(
    x: Any, /, *, axis: Any = None, dtype: Any = None, keepdims: builtins.bool = False
) -> Array:
    """∏ over axes; 1 over none. Integers wrap at 32 bits."""
    return _total("prod", x, axis, dtype, keepdims)


def max(x: Any, /, *, axis: Any = None, keepdims: builtins.bool = False) -> Array:
    """Greatest element over axes; NaN where there is one."""
    a = _need("max", x, _NUMBER)
    return a.max(axis, keepdims)


def min(x: Any, /, *, axis: Any = None, keepdims: builtins.bool = False) -> Array:
    """Least element over axes; NaN where there is one."""
    a = _need("min", x, _NUMBER)
    return a.min(axis, keepdims)


def mean(x: Any, /, *, axis: Any = None, keepdims: builtins.bool = False) -> Array:
    """Mean over axes; NaN over none."""
    a = _need("mean", x, _FLOATS)
    if A.count(a.shape, axis) == 0:
        return a.sum(axis, keepdims) * float("nan")
    return a.mean(axis, keepdims)


def var(
    x: Any,
    /,
    *,
    axis: Any = None,
    correction: float = 0.0,
    keepdims: builtins.bool = False,
) -> Array:
    """Σ (x - mean)² / (n - correction) over axes."""
    a = _need("var", x, _FLOATS)
    n = A.count(a.shape, axis)
    room = n - correction
    if n == 0 or room <= 0:
        return a.sum(axis, keepdims) * float("nan")
    result: Array = sd.var(a, axis=axis, keepdims=keepdims) * (n / room)
    return result


def std(
    x: Any,
    /,
    *,
    axis: Any = None,
    correction: float = 0.0,
    keepdims: builtins.bool = False,
) -> Array:
    """The square root of :func:`var`."""
    result: Array = sd.sqrt(var(x, axis=axis, correction=correction, keepdims=keepdims))
    return result


def _cumulative(
    name: str, x: Any, axis: int | None, dtype: Any, include_initial: builtins.bool
) -> Array:
    a = _need(name, x, _NUMBER)
    if axis is None:
        if a.ndim > 1:
            raise ShapeError(
                f"{name} of an array with {a.ndim} dimensions needs an axis",
                where=E.user_location(),
            )
        axis = 0
        a = a.reshape(a.size)
    a = a if dtype is None else a.astype(dtype)
    at = axis
    sums = name == "cumulative_sum"
    result = call(lambda s: (A.cumsum if sums else A.cumprod)(s, at), a)
    if include_initial:
        k = A.normal_axis(axis, a.ndim)
        first = sd.full((*a.shape[:k], 1, *a.shape[k + 1 :]), 0 if sums else 1, a.dtype)
        result = concat((first, result), axis=k)
    return result


def cumulative_sum(
    x: Any,
    /,
    *,
    axis: int | None = None,
    dtype: Any = None,
    include_initial: builtins.bool = False,
) -> Array:
    """Running sum along an axis."""
    return _cumulative("cumulative_sum", x, axis, dtype, include_initial)


def cumulative_prod(
    x: Any,
    /,
    *,
    axis: int | None = None,
    dtype: Any = None,
    include_initial: builtins.bool = False,
) -> Array:
    """Running product along an axis; each result is a product of its own."""
    return _cumulative("cumulative_prod", x, axis, dtype, include_initial)


# ------------------------------------------------------------- searching


def argmax(
    x: Any, /, *, axis: int | None = None, keepdims: builtins.bool = False
) -> Array:
    """Index of the first greatest element, int32."""
    return _arg("argmax", x, axis, keepdims)


def argmin(
    x: Any, /, *, axis: int | None = None, keepdims: builtins.bool = False
) -> Array:
    """Index of the first least element, int32."""
    return _arg("argmin", x, axis, keepdims)


def _arg(name: str, x: Any, axis: int | None, keepdims: builtins.bool) -> Array:
    a = _need(name, x, _NUMBER)
    kept = keepdims and axis is not None
    result: Array = getattr(sd, name)(a, axis=axis, keepdims=kept)
    return result.reshape((1,) * a.ndim) if axis is None and keepdims else result


def count_nonzero(
    x: Any, /, *, axis: Any = None, keepdims: builtins.bool = False
) -> Array:
    """How many elements are not zero, int32."""
    a = _array(x)
    taking = a if a.dtype == "bool" else _array(a != 0)
    return taking.astype("i32").sum(axis, keepdims)


def nonzero(x: Any, /) -> tuple[Array, ...]:
    """Indices of the elements that are not zero, one array a dimension; waits for x."""
    a = _array(x)
    if not a.ndim:
        raise ShapeError("nonzero of an array without dimensions")
    return tuple(_array(i, "i32") for i in np.nonzero(a.numpy()))


def searchsorted(
    x1: Any, x2: Any, /, *, side: str = "left", sorter: Any = None
) -> Array:
    """Where elements of x2 go into the sorted x1: how many of x1 are below (``"left"``)
    or not above (``"right"``).
    """
    if side not in ("left", "right"):
        raise ShapeError(f"searchsorted: side is 'left' or 'right', not {side!r}")
    a, b = _array(x1), _array(x2)
    if a.ndim != 1:
        raise ShapeError("searchsorted: x1 has one dimension")
    dtype = result_type(a, b)
    a, b = a.astype(dtype), b.astype(dtype)
    if sorter is not None:
        a = a[_array(sorter)]
    each = b.reshape((*b.shape, 1))
    before: Any = a < each if side == "left" else a <= each
    return _array(before).astype("i32").sum(axis=-1)


def where(condition: Any, x1: Any, x2: Any, /) -> Array:
    """x1 where the condition holds, else x2."""
    c = _need("the condition of where", condition, ("bool",))
    numbers = isinstance(x1, (int, float)) and isinstance(x2, (int, float))
    dtype = None if numbers else result_type(x1, x2)
    result: Array = sd.where(c, _array(x1, dtype), _array(x2, dtype))
    return result


# ------------------------------------------------------------- utility


def all(x: Any, /, *, axis: Any = None, keepdims: builtins.bool = False) -> Array:
    """Whether all elements are nonzero; True over none."""
    return _array(x).all(axis, keepdims)


def any(x: Any, /, *, axis: Any = None, keepdims: builtins.bool = False) -> Array:
    """Whether any element is nonzero; False over none."""
    return _array(x).any(axis, keepdims)


def diff(
    x: Any,
    /,
    *,
    axis: int = -1,
    n: int = 1,
    prepend: Any = None,
    append: Any = None,
) -> Array:
    """Differences of neighbours along an axis, n times."""
    a = _need("diff", x, _NUMBER)
    k = A.normal_axis(axis, a.ndim)
    parts = [_array(p) for p in (prepend, a, append) if p is not None]
    a = concat(parts, axis=k) if len(parts) > 1 else a
    if n < 0:
        raise ShapeError(f"diff, {n} times")
    before = (slice(None),) * k
    for _ in range(n):
        a = a[(*before, slice(1, None))] - a[(*before, slice(None, -1))]
    return a
