"""Manipulation and indexing functions of the standard."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any

import numpy as np

from ... import namespace as sd
from ...array import Array, call, check_ids
from ...array import asarray as _array
from ...array import take as _take
from ...errors import AxisError, ShapeError
from ...ir import arrays as A
from ...ir import expr as E
from .dtypes import result_type


def _axes(axis: Any, rank: int) -> tuple[int, ...]:
    many = axis if isinstance(axis, (tuple, list)) else (axis,)
    return tuple(A.normal_axis(a, rank) for a in many)


def broadcast_to(x: Array, /, shape: Any) -> Array:
    """The array stretched to a shape."""
    return sd.broadcast_to(x, shape)


def broadcast_shapes(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape that shapes broadcast to."""
    return A.broadcast_shape(*shapes)


def broadcast_arrays(*arrays: Array) -> list[Array]:
    """Arrays stretched to their common shape."""
    shape = A.broadcast_shape(*(x.shape for x in arrays))
    return [sd.broadcast_to(x, shape) for x in arrays]


def concat(
    arrays: tuple[Array, ...] | list[Array], /, *, axis: int | None = 0
) -> Array:
    """Arrays end to end along an axis; flattened first if the axis is None."""
    dtype = result_type(*arrays)
    xs = [_array(x, dtype) for x in arrays]
    if axis is None:
        return sd.concatenate([x.reshape(x.size) for x in xs])
    return sd.concatenate(xs, axis)


def stack(arrays: tuple[Array, ...] | list[Array], /, *, axis: int = 0) -> Array:
    """Arrays along a new axis."""
    dtype = result_type(*arrays)
    return sd.stack([_array(x, dtype) for x in arrays], axis)


def unstack(x: Array, /, *, axis: int = 0) -> tuple[Array, ...]:
    """The parts along an axis."""
    a = A.normal_axis(axis, x.ndim)
    before = (slice(None),) * a
    return tuple(x[(*before, i)] for i in range(x.shape[a]))


def expand_dims(x: Array, /, *, axis: int = 0) -> Array:
    """A new axis of size 1 at a position of the result."""
    rank = x.ndim + 1
    if not -rank <= axis < rank:
        raise AxisError(
            f"expand_dims: axis {axis} of a result with {rank} dimensions",
            where=E.user_location(),
        )
    a = axis % rank
    return x.reshape((*x.shape[:a], 1, *x.shape[a:]))


def squeeze(x: Array, /, axis: Any) -> Array:
    """Without axes of size 1."""
    gone = _axes(axis, x.ndim)
    if builtins.any(x.shape[a] != 1 for a in gone):
        raise ShapeError(
            f"squeeze of axes {gone} of shape {x.shape}: not all have size 1",
            where=E.user_location(),
        )
    return x.reshape(tuple(n for a, n in enumerate(x.shape) if a not in gone))


def flip(x: Array, /, *, axis: Any = None) -> Array:
    """Elements in reverse order along axes, all by default."""
    turned = range(x.ndim) if axis is None else _axes(axis, x.ndim)
    return x[tuple(slice(None, None, -1 if a in turned else 1) for a in range(x.ndim))]


def moveaxis(x: Array, source: Any, destination: Any, /) -> Array:
    """Axes moved to other positions; the rest keep their order."""
    old, new = _axes(source, x.ndim), _axes(destination, x.ndim)
    if len(old) != len(new) or len(set(old)) != len(old) or len(set(new)) != len(new):
        raise AxisError(
            f"moveaxis from {source} to {destination}", where=E.user_location()
        )
    order = [a for a in range(x.ndim) if a not in old]
    for to, a in sorted(zip(new, old, strict=True)):
        order.insert(to, a)
    return permute_dims(x, tuple(order))


def permute_dims(x: Array, /, axes: tuple[int, ...]) -> Array:
    """Axes in another order."""
    if len(axes) != x.ndim:
        raise AxisError(
            f"{axes} is no permutation of {x.ndim} axes", where=E.user_location()
        )
    return x.transpose(axes) if axes else x


def reshape(x: Array, /, shape: Any, *, copy: builtins.bool | None = None) -> Array:
    """The same elements under another shape."""
    return x.reshape(shape)


def roll(x: Array, /, shift: Any, *, axis: Any = None) -> Array:
    """Elements moved along axes; what leaves one end enters at the other."""
    if axis is None:
        return roll(x.reshape(x.size), shift, axis=0).reshape(x.shape)
    axes = _axes(axis, x.ndim)
    shifts = shift if isinstance(shift, (tuple, list)) else (shift,) * len(axes)
    if len(shifts) != len(axes):
        raise ShapeError(
            f"roll: {len(shifts)} shifts for {len(axes)} axes",
            where=E.user_location(),
        )
    for by, a in zip(shifts, axes, strict=True):
        n = x.shape[a]
        if n and by % n:
            before = (slice(None),) * a
            cut = n - by % n
            x = sd.concatenate(
                [x[(*before, slice(cut, None))], x[(*before, slice(None, cut))]], a
            )
    return x


def repeat(x: Array, repeats: Any, /, *, axis: int | None = None) -> Array:
    """Each element several times; ``repeats`` is a number or one an element."""
    if axis is None:
        x, axis = x.reshape(x.size), 0
    a = A.normal_axis(axis, x.ndim)
    counts = np.asarray(repeats)
    if counts.dtype.kind not in "iu" or counts.min(initial=0) < 0:
        raise ShapeError("repeat: repeats are not negative", where=E.user_location())
    if counts.ndim and counts.size not in (1, x.shape[a]):
        raise ShapeError(
            f"repeat: {counts.size} repeats for {x.shape[a]} elements",
            where=E.user_location(),
        )
    ids = np.repeat(np.arange(x.shape[a], dtype=np.int32), counts)
    if not ids.size:
        return sd.zeros((*x.shape[:a], 0, *x.shape[a + 1 :]), x.dtype)
    return _take(x, _array(ids), a)


def tile(x: Array, repetitions: tuple[int, ...], /) -> Array:
    """The array laid side by side, ``repetitions`` times along each axis."""
    rank = max(x.ndim, len(repetitions))
    shape = (1,) * (rank - x.ndim) + x.shape
    times = (1,) * (rank - len(repetitions)) + tuple(repetitions)
    wide: list[int] = []
    for n, t in zip(shape, times, strict=True):
        wide += [t, n]
    spread = x.reshape(tuple(k for n in shape for k in (1, n)))
    result = tuple(n * t for n, t in zip(shape, times, strict=True))
    return sd.broadcast_to(spread, tuple(wide)).reshape(result)


def take(x: Array, indices: Any, /, *, axis: int | None = None) -> Array:
    """Elements at indices along an axis; an index below 0 counts from the end.

    Raises:
        IndexRangeError: an index known on the host is outside of the axis.
    """
    if axis is None:
        if x.ndim != 1:
            raise AxisError(
                f"take from an array with {x.ndim} dimensions needs an axis",
                where=E.user_location(),
            )
        axis = 0
    n = x.shape[A.normal_axis(axis, x.ndim)]
    return _take(x, _wrapped(indices, n), axis)


def take_along_axis(x: Array, indices: Any, /, *, axis: int = -1) -> Array:
    """``y[…, i, …] = x[…, indices[…, i, …], …]``; an index below 0 counts from the
    end.
    """
    ids = _wrapped(indices, x.shape[A.normal_axis(axis, x.ndim)])
    check_ids(x, ids, axis)
    return call(lambda s, i: A.take_along_axis(s, i, axis), x, ids)


def _wrapped(indices: Any, n: int) -> Array:
    """Indices from 0 on; of ids known on the host without a kernel."""
    ids = _array(indices)
    host = ids._host
    if host is not None:
        return _array(np.where(host < 0, host + n, host), "i32") if host.size else ids
    result: Array = sd.where(ids < 0, ids + n, ids)
    return result
