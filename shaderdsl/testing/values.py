"""Arrays by recipe: a kind of values, a seed and a layout in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

NUMPY = {
    "f32": np.float32,
    "f16": np.float16,
    "i32": np.int32,
    "u32": np.uint32,
    "bool": np.bool_,
}
KINDS = ("ordinary", "tiny", "huge", "zeros", "ties", "infinite", "nan")
LAYOUTS = ("contiguous", "transposed", "strided", "reversed", "offset")


def make(
    shape: Sequence[int],
    dtype: str = "f32",
    kind: str = "ordinary",
    seed: int = 0,
    layout: str = "contiguous",
    *,
    positive: bool = False,
    below: int | None = None,
    extra: int | None = None,
) -> np.ndarray:
    """An array by recipe; the same arguments give the same array.

    Args:
        shape: its shape.
        dtype: f32, f16, i32, u32 or bool.
        kind: ``ordinary`` is standard normal; ``tiny`` 1e-8 … 1e-3; ``huge`` 10 … 1e4;
            ``zeros`` has zeros of both signs among ordinary values; ``infinite`` has
            infinities among them, ``nan`` NaNs and infinities; ``ties`` has three
            values only.
        seed: which of them.
        layout: how it lies in memory; all but ``contiguous`` are views.
        positive: the absolute value, kept off 0.
        below: integers from 0 up to here.
        extra: a further integer that appears among them.
    """
    r = np.random.default_rng([seed, *shape])
    n = tuple(shape)
    if dtype == "bool":
        x: Any = r.random(n) < 0.6
    elif below is not None or dtype in ("i32", "u32"):
        x = r.integers(0, 10 if below is None else max(below, 1), n)
        if extra is not None:
            x = np.where(r.random(n) < 0.2, extra, x)
    else:
        x = _floats(r, n, kind)
        if positive:
            x = np.abs(x) + 0.1
        # f16 has neither the range nor the digits of the rest.
        if dtype == "f16":
            x = np.where(np.isinf(x), x, np.clip(x, -1e3, 1e3))
    return _lay(np.asarray(x).astype(NUMPY[dtype]), layout)


def _floats(r: np.random.Generator, n: tuple[int, ...], kind: str) -> Any:
    x = r.standard_normal(n)
    sign = np.where(x < 0, -1.0, 1.0)
    if kind == "tiny":
        return sign * 10.0 ** r.uniform(-8, -3, n)
    if kind == "huge":
        return sign * 10.0 ** r.uniform(1, 4, n)
    if kind == "zeros":
        return np.where(r.random(n) < 0.4, sign * 0.0, x)
    if kind == "ties":
        return np.clip(np.round(x), -1, 1)
    if kind == "nan":
        y = np.where(r.random(n) < 0.1, np.nan, x)
        return np.where(r.random(n) < 0.1, sign * np.inf, y)
    if kind == "infinite":
        return np.where(r.random(n) < 0.2, sign * np.inf, x)
    if kind != "ordinary":
        raise ValueError(f"kind is one of {', '.join(KINDS)}, not {kind!r}")
    return x


def _lay(x: np.ndarray, layout: str) -> np.ndarray:
    """The same values as a view of other memory."""
    if layout == "contiguous" or x.ndim == 0:
        return np.ascontiguousarray(x).reshape(x.shape)
    if layout == "transposed":
        return np.ascontiguousarray(x.T).T
    if layout == "strided":
        room = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
        room[..., ::2] = x
        return room[..., ::2]
    if layout == "reversed":
        return np.ascontiguousarray(x[::-1])[::-1]
    if layout == "offset":
        room = np.zeros((x.shape[0] + 3, *x.shape[1:]), x.dtype)
        room[1 : 1 + x.shape[0]] = x
        return room[1 : 1 + x.shape[0]]
    raise ValueError(f"layout is one of {', '.join(LAYOUTS)}, not {layout!r}")
