"""Creation functions of the standard."""

from __future__ import annotations

import builtins
from typing import Any

import numpy as np

from ... import namespace as sd
from ...array import Array
from ...array import asarray as as_array
from ...dtypes import dtype_name, host_array
from ...errors import DTypeError, ShapeError
from ...ir import expr as E
from ...runtime import Device, current


def _place(x: Array, device: Any) -> Array:
    return x if device is None else x.to_device(device)


def asarray(
    obj: Any,
    /,
    *,
    dtype: Any = None,
    device: Any = None,
    copy: builtins.bool | None = None,
) -> Array:
    """Anything array-like as an array; Python numbers become int32, float32 or bool.

    Arrays do not change, so that a copy is never needed; ``copy=False`` fails where the
    data has to be copied to the device.
    """
    if isinstance(obj, complex):
        raise DTypeError(
            "complex numbers are not computed with", where=E.user_location()
        )
    if copy is False and not isinstance(obj, Array):
        raise ValueError("data of the host is always copied to the device")
    return _place(as_array(obj, dtype), device)


def from_dlpack(
    x: Any, /, *, device: Any = None, copy: builtins.bool | None = None
) -> Array:
    """An array of another library, through DLPack, on the host."""
    if copy is False:
        raise ValueError("data of the host is always copied to the device")
    if isinstance(x, Array):
        return _place(x, device)
    host, name = host_array(np.from_dlpack(x))
    return _place(Array.of_host(host, name), device)


def arange(
    start: Any,
    /,
    stop: Any = None,
    step: Any = 1,
    *,
    dtype: Any = None,
    device: Any = None,
) -> Array:
    """start, start + step, … below stop; of one argument, 0, 1, … below it."""
    if stop is None:
        start, stop = 0, start
    return _place(sd.arange(start, stop, step, dtype), device)


def linspace(
    start: Any,
    stop: Any,
    /,
    num: int,
    *,
    dtype: Any = None,
    device: Any = None,
    endpoint: builtins.bool = True,
) -> Array:
    """``num`` evenly spaced numbers from start to stop, computed in float64."""
    values = np.linspace(float(start), float(stop), num, endpoint=endpoint)
    return _place(as_array(values, dtype or "f32"), device)


def empty(shape: Any, *, dtype: Any = None, device: Any = None) -> Array:
    """An array whose values nobody should use; they are zeros."""
    return zeros(shape, dtype=dtype, device=device)


def empty_like(x: Array, /, *, dtype: Any = None, device: Any = None) -> Array:
    """As :func:`empty`, of an array's shape and dtype."""
    return zeros_like(x, dtype=dtype, device=device)


def zeros(shape: Any, *, dtype: Any = None, device: Any = None) -> Array:
    """An array of zeros, float32 unless said otherwise."""
    return full(shape, 0, dtype=dtype or "f32", device=device)


def zeros_like(x: Array, /, *, dtype: Any = None, device: Any = None) -> Array:
    """Zeros of an array's shape and dtype."""
    return full(x.shape, 0, dtype=dtype or x.dtype, device=device)


def ones(shape: Any, *, dtype: Any = None, device: Any = None) -> Array:
    """An array of ones, float32 unless said otherwise."""
    return full(shape, 1, dtype=dtype or "f32", device=device)


def ones_like(x: Array, /, *, dtype: Any = None, device: Any = None) -> Array:
    """Ones of an array's shape and dtype."""
    return full(x.shape, 1, dtype=dtype or x.dtype, device=device)


def full(
    shape: Any, fill_value: Any, *, dtype: Any = None, device: Any = None
) -> Array:
    """An array of one value."""
    return _place(sd.full(shape, fill_value, dtype), device)


def full_like(
    x: Array, /, fill_value: Any, *, dtype: Any = None, device: Any = None
) -> Array:
    """One value, of an array's shape and dtype."""
    return full(x.shape, fill_value, dtype=dtype or x.dtype, device=device)


def eye(
    n_rows: int,
    n_cols: int | None = None,
    /,
    *,
    k: int = 0,
    dtype: Any = None,
    device: Any = None,
) -> Array:
    """Ones where column - row = k, zeros elsewhere."""
    name = dtype_name(dtype or "f32")
    return _place(as_array(np.eye(n_rows, n_cols, k), name), device)


def _band(x: Array, keep: Any, what: str) -> Array:
    if x.ndim < 2:
        raise ShapeError(
            f"{what} of an array with {x.ndim} dimensions", where=E.user_location()
        )
    rows, columns = x.shape[-2:]
    i = np.arange(rows)[:, None]
    j = np.arange(columns)[None, :]
    zero: Any = False if x.dtype == "bool" else 0
    chosen: Array = sd.where(as_array(keep(i, j)), x, full((), zero, dtype=x.dtype))
    return chosen


def tril(x: Array, /, *, k: int = 0) -> Array:
    """What is on and below the diagonal column - row = k; zeros elsewhere."""
    return _band(x, lambda i, j: j - i <= k, "tril")


def triu(x: Array, /, *, k: int = 0) -> Array:
    """What is on and above the diagonal column - row = k; zeros elsewhere."""
    return _band(x, lambda i, j: j - i >= k, "triu")


def meshgrid(*arrays: Array, indexing: str = "xy") -> tuple[Array, ...]:
    """Coordinate arrays of a grid; ``"xy"`` swaps the first two axes."""
    if indexing not in ("xy", "ij"):
        raise ShapeError(
            f"meshgrid: indexing is 'xy' or 'ij', not {indexing!r}",
            where=E.user_location(),
        )
    n = len(arrays)
    order = list(range(n))
    if indexing == "xy" and n > 1:
        order[0], order[1] = 1, 0
    shape = [0] * n
    for k, x in enumerate(arrays):
        shape[order[k]] = x.size
    out = []
    for k, x in enumerate(arrays):
        sizes = [1] * n
        sizes[order[k]] = x.size
        out.append(sd.broadcast_to(x.reshape(sizes), shape))
    return tuple(out)


def default_device() -> Device:
    """Where arrays are made."""
    return current()
