"""Rotary positions: tables of angles in float64, and the layer that turns with them."""

from __future__ import annotations

import functools
import math
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from .. import ops
from ..array import Array, asarray
from ..errors import IndexRangeError, ShaderError, ShapeError
from ..ir import expr as E
from ..namespace import maximum, minimum
from ..runtime import owner
from . import heads
from .module import Module, static

__all__ = ["RopeScaling", "RotaryEmbedding", "inverse_frequencies"]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How angles are stretched for contexts longer than those of the first training.

    ``linear`` divides every frequency by ``factor``. ``llama3`` divides those whose
    wavelength exceeds ``original_positions / low_freq_factor``, leaves those below
    ``original_positions / high_freq_factor``, and blends in between.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3"):
            raise ShaderError(
                f"rotary scaling {self.kind!r} is not implemented",
                cure="'linear' and 'llama3' are",
            )
        if not self.factor > 0:
            raise ShaderError(f"the factor of rotary scaling is {self.factor}")


def inverse_frequencies(
    dim: int, theta: float, scaling: RopeScaling | None = None
) -> np.ndarray:
    """theta^(-2 i / dim) for i = 0 … dim/2 - 1, scaled; float64."""
    inverse = theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if scaling is None:
        return inverse
    if scaling.kind == "linear":
        return inverse / scaling.factor
    turns = scaling.original_positions * inverse / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return inverse * (blend + (1.0 - blend) / scaling.factor)


class RotaryEmbedding(Module):
    """Turns pairs of a head's first ``dim`` elements by position · theta^(-2 i / dim).

    Halved layout: pairs (i, i + dim/2); interleaved: (2 i, 2 i + 1). What lies beyond
    ``dim`` passes through. It has no parameters: the tables are constants.

    Args:
        dim: how much of each head turns.
        head_dim: size of a head.
    """

    _: KW_ONLY
    dim: int = static()
    head_dim: int = static()
    theta: float = static(default=1e4)
    max_positions: int = static(default=2048)
    layout: str = static(default="halved")
    scaling: RopeScaling | None = static(default=None)

    def tables(
        self, length: int, start: Any = 0, at: Any = None
    ) -> tuple[Array, Array]:
        """cos and sin at ``length`` positions from ``start`` on, each [length, dim/2].

        ``start`` may be an array without dimensions. Positions of its own for each
        row, ``at`` i32 ``[…, length]``, give ``[…, length, dim/2]``.

        Raises:
            IndexRangeError: a position beyond ``max_positions``.
        """
        if at is None:
            check_positions(start, length, self.max_positions)
        key = (self.dim, self.theta, self.scaling)
        if at is None and isinstance(start, int):
            return _rows(owner(), start, length, *key)
        cos, sin = _rows(owner(), 0, self.max_positions, *key)
        if at is None:
            at = positions(length, start, self.max_positions)
        return ops.embedding(cos, at), ops.embedding(sin, at)

    def __call__(self, x: Any, start: Any = 0) -> Array:
        """x ``[…, t, heads · head_dim]`` (or [heads · head_dim]) from ``start`` on.

        Raises:
            IndexRangeError: a position beyond ``max_positions``.
            ShapeError: the last axis holds no whole number of heads.
        """
        x = asarray(x)
        if not x.shape or x.shape[-1] % self.head_dim:
            raise ShapeError(
                f"rotary embedding of shape {x.shape}: the last axis is no multiple of "
                f"head_dim {self.head_dim}",
                where=E.user_location(),
            )
        rows = x if x.ndim > 1 else x.reshape(1, x.shape[0])
        y = self.turn(rows, *self.tables(rows.shape[-2], start))
        return y if x.ndim > 1 else y.reshape(x.shape)

    def turn(self, x: Array, cos: Array, sin: Array, parts: int = 1) -> Array:
        """Turn rows by given tables; of ``parts`` of a head only the first is read."""
        y: Array
        if self.layout == "halved":
            y = heads.turned(x, cos, sin, z=parts, d=self.head_dim)
        else:
            y = heads.turned_interleaved(x, cos, sin, z=parts, i=self.head_dim // 2)
        return y


@functools.lru_cache(maxsize=256)
def _rows(
    device: object,
    start: int,
    length: int,
    dim: int,
    theta: float,
    scaling: RopeScaling | None,
) -> tuple[Array, Array]:
    """The same arrays for the same arguments, so that equal traces are equal graphs.

    Angles are float64: in f32 those of late positions are off by 1e-3 and more.
    """
    at = np.arange(start, start + length, dtype=np.float64)
    angles = np.outer(at, inverse_frequencies(dim, theta, scaling))
    return asarray(np.cos(angles), "f32"), asarray(np.sin(angles), "f32")


@functools.lru_cache(maxsize=256)
def _arange(device: object, start: int, length: int) -> Array:
    return asarray(np.arange(start, start + length, dtype=np.int32))


def positions(length: int, start: Any, limit: int) -> Array:
    """``start + [0 … length-1]``, i32, none beyond ``limit - 1``.

    With a start that only the device knows, callers see to it that no row that counts
    is beyond the limit; rows that pad a chunk may be.
    """
    if isinstance(start, int):
        return _arange(owner(), start, length)
    at = asarray(start, "i32") + _arange(owner(), 0, length)
    bounded: Array = maximum(minimum(at, limit - 1), 0)
    return bounded.inline()  # Less than the kernel that would store it.


def check_positions(start: Any, length: int, limit: int) -> None:
    """Refuse positions beyond a table, where the start is known on the host."""
    first = start if isinstance(start, int) else 0
    if first < 0 or first + length > limit:
        raise IndexRangeError(
            f"positions {first} … {first + length - 1}, but the model has {limit}",
            where=E.user_location(),
            cure="shorten the sequence, or raise max_positions in the configuration",
        )
