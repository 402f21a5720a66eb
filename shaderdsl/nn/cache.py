"""Keys and values of the tokens that a model has seen, kept on the device."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..array import Array, asarray
from ..errors import IndexRangeError, ShapeError
from ..function import compile
from ..ir import expr as E
from ..namespace import concatenate, update_slice, zeros

__all__ = ["CHUNK", "KVCache"]

#: A prompt is taken in pieces of this many tokens, so that a prompt of any length runs
#: what the first one compiled. The last piece is padded; rows beyond the length are
#: never seen and are overwritten by the tokens that come there.
CHUNK = 32


class KVCache:
    """Keys and values ``[batch, kv_heads, capacity, head_dim]`` of each layer.

    Keys are stored as attention reads them, normed and turned. All sequences of the
    batch have the same length. A model appends to it: ``model(ids, cache=cache)``.

    Raises:
        IndexRangeError: more positions than ``capacity``.
    """

    def __init__(
        self,
        *,
        layers: int = 1,
        batch: int = 1,
        heads: int,
        capacity: int,
        head_dim: int,
    ):
        self.batch, self.heads = batch, heads
        self.capacity, self.head_dim = capacity, head_dim
        # The last chunk's padding needs room too.
        self._shape = (batch, capacity + CHUNK, heads * head_dim)
        self._keys: tuple[Array, ...] = tuple(zeros(self._shape) for _ in range(layers))
        self._values: tuple[Array, ...] = tuple(
            zeros(self._shape) for _ in range(layers)
        )
        self._lengths = [0] * layers

    @property
    def length(self) -> int:
        """How many positions are held."""
        return min(self._lengths)

    def keys(self, layer: int = 0) -> Array:
        """Keys of a layer, ``[batch, kv_heads, length, head_dim]``."""
        return self._read(self._keys, layer)

    def values(self, layer: int = 0) -> Array:
        """Values of a layer, ``[batch, kv_heads, length, head_dim]``."""
        return self._read(self._values, layer)

    def clear(self) -> None:
        """Forget everything; the memory stays."""
        self._lengths = [0] * len(self._lengths)

    def append(self, keys: Any, values: Any, layer: int = 0) -> None:
        """Add positions to one layer, each ``[batch, kv_heads, n, head_dim]``."""
        rows = []
        for name, x in (("keys", keys), ("values", values)):
            a = asarray(x)
            wanted = (self.batch, self.heads, a.shape[-2] if a.ndim == 4 else "n")
            if a.ndim != 4 or a.shape != (*wanted, self.head_dim):
                raise ShapeError(
                    f"{name} have shape {a.shape}, the cache takes "
                    f"({self.batch}, {self.heads}, n, {self.head_dim})",
                    where=E.user_location(),
                )
            n = a.shape[2]
            rows.append(a.transpose(0, 2, 1, 3).reshape(self.batch, n, -1))
        if rows[0].shape != rows[1].shape:
            raise ShapeError("keys and values of different lengths")
        self._room(self._lengths[layer], rows[0].shape[1])
        start = self._lengths[layer]
        for name, new in zip(("_keys", "_values"), rows):
            kept = list(getattr(self, name))
            kept[layer] = update_slice(kept[layer], new, axis=1, start=start)
            setattr(self, name, tuple(kept))
        self._lengths[layer] += rows[0].shape[1]

    def run(self, model: Any, ids: Array, *, last: bool = False) -> Array:
        """Take in ids ``[t]`` or ``[batch, t]``; logits of all of them, or of the last.

        One piece after another; each writes its keys and values in place.
        """
        single = ids.ndim == 1
        batch = 1 if single else ids.shape[0]
        if batch != self.batch:
            raise ShapeError(
                f"ids of {batch} sequences, but the cache is for {self.batch}",
                where=E.user_location(),
            )
        count = ids.shape[-1]
        self._room(self.length, count)
        limit = model.config.max_positions
        if self.length + count > limit:
            raise IndexRangeError(
                f"{self.length + count} positions, but the model has {limit}",
                where=E.user_location(),
            )
        host = np.asarray(ids).reshape(batch, count)
        pieces: list[Array] = []
        for at in range(0, count, CHUNK):
            piece = host[:, at : at + CHUNK]
            n = piece.shape[1]
            full = min(CHUNK, limit - self.length)  # padding has positions too
            if 1 < n < full:
                piece = np.pad(piece, ((0, 0), (0, full - n)), mode="edge")
            logits, self._keys, self._values = _advance(
                model, self._keys, self._values, piece, self.length, n - 1, last
            )
            self._lengths = [k + n for k in self._lengths]
            if last:
                pieces = [logits]
            else:
                pieces.append(logits[:, :n] if n < piece.shape[1] else logits)
        y = pieces[0] if len(pieces) == 1 else concatenate(pieces, axis=1)
        return y.reshape(y.shape[1:]) if single else y

    def _read(self, arrays: tuple[Array, ...], layer: int) -> Array:
        n = self._lengths[layer]
        x = arrays[layer][:, :n]
        return x.reshape(self.batch, n, self.heads, self.head_dim).transpose(0, 2, 1, 3)

    def _room(self, length: int, more: int) -> None:
        if length + more > self.capacity:
            raise IndexRangeError(
                f"the cache holds {length} of {self.capacity} positions; {more} more "
                "do not fit",
                where=E.user_location(),
                cure="make it with a larger capacity, or clear it",
            )


def _forward(
    model: Any,
    keys: tuple[Array, ...],
    values: tuple[Array, ...],
    ids: Array,
    start: Array,
    wanted: Array,
    last: bool,
) -> tuple[Array, tuple[Array, ...], tuple[Array, ...]]:
    x = model.embed(ids, start)
    new_keys, new_values = [], []
    for block, k, v in zip(model.layers, keys, values, strict=True):
        x, k, v = block(x, start=start, cached=(k, v))
        new_keys.append(k)
        new_values.append(v)
    if last and x.shape[1] > 1:
        # Only the row that the next token is drawn from goes through the head.
        x = _row(x, wanted)
    return model.head(model.norm(x)), tuple(new_keys), tuple(new_values)


def _row(x: Array, at: Array) -> Array:
    from . import heads

    y: Array = heads.row(x, at, n=1)
    return y


_advance = compile(_forward, donate=("keys", "values"))
