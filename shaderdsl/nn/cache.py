"""Keys and values of the tokens that a model has seen, kept on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..array import Array, asarray
from ..errors import IndexRangeError, ShapeError
from ..function import compile
from ..ir import expr as E
from ..namespace import maximum, minimum, update_slice, zeros
from .module import Module
from .rotary import positions
from .sampling import advanced, likeliest

__all__ = ["CHUNK", "KVCache"]

#: A prompt is taken in pieces of this many tokens, so that a prompt of any length runs
#: what the first one compiled. The last piece is padded; rows beyond the length are
#: never seen and are overwritten by the tokens that come there.
CHUNK = 32
_TILE = 64

#: Documents of new tokens and of all rows, and positions of the new tokens.
Marks = tuple[Array, Array, Array]


class _Rows(Module):
    """Keys and values of every layer: what a call takes and gives back as one."""

    keys: tuple[Array, ...]
    values: tuple[Array, ...]


class KVCache:
    """Keys and values ``[batch, kv_heads, capacity, head_dim]`` of each layer.

    Keys are stored as attention reads them, normed and turned. All sequences of the
    batch end at the same row; shorter ones begin later (see :meth:`run`). A model
    appends to it: ``model(ids, cache=cache)``. Each write goes to the new rows alone.

    Raises:
        IndexRangeError: more positions than ``capacity``, before anything is computed.
            It never grows by itself, see :meth:`grow`.
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
        keys, values = (
            tuple(zeros(self._shape) for _ in range(layers)) for _ in range(2)
        )
        self._rows = _Rows(keys, values)
        self._lengths = [0] * layers
        #: a length, and an array that holds it
        self._start = 0, asarray(np.int32(0))
        #: of each row that is held, i32 [batch, length]; None while all are of one
        self._documents: np.ndarray | None = None
        self._place(np.zeros(batch, np.int32))

    @property
    def _shape(self) -> tuple[int, int, int]:
        # The last chunk's padding needs room too. Whole tiles of a schedule, so that
        # any capacity takes the same texts.
        rows = -(-(self.capacity + CHUNK) // _TILE) * _TILE
        return self.batch, rows, self.heads * self.head_dim

    @property
    def _keys(self) -> tuple[Array, ...]:
        return self._rows.keys

    @property
    def _values(self) -> tuple[Array, ...]:
        return self._rows.values

    @property
    def length(self) -> int:
        """How many positions are held, padding of shorter sequences included."""
        return min(self._lengths)

    @property
    def first(self) -> Array:
        """Where each sequence begins, i32 ``[batch]``."""
        return self._first

    def keys(self, layer: int = 0) -> Array:
        """Keys of a layer, ``[batch, kv_heads, length, head_dim]``."""
        return self._read(self._keys, layer)

    def values(self, layer: int = 0) -> Array:
        """Values of a layer, ``[batch, kv_heads, length, head_dim]``."""
        return self._read(self._values, layer)

    def clear(self) -> None:
        """Forget everything; the memory stays."""
        self._lengths = [0] * len(self._lengths)
        self._documents = None
        self._place(np.zeros(self.batch, np.int32))

    def grow(self, capacity: int) -> None:
        """Make room for ``capacity`` positions; what is held stays."""
        if capacity <= self.capacity:
            return
        before = self._shape
        self.capacity = capacity
        if self._shape == before:
            return
        keys, values = (
            tuple(update_slice(zeros(self._shape), x, axis=1, start=0) for x in old)
            for old in (self._keys, self._values)
        )
        self._rows = _Rows(keys, values)

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
        start = self._lengths[layer]
        self._room(start, rows[0].shape[1])
        parts = []
        for old, new in zip((self._keys, self._values), rows):
            kept = list(old)
            kept[layer] = update_slice(kept[layer], new, axis=1, start=start)
            parts.append(tuple(kept))
        self._rows = _Rows(*parts)
        self._lengths[layer] += rows[0].shape[1]

    def run(
        self,
        model: Any,
        ids: Any,
        *,
        last: bool = False,
        padding: Sequence[int] | None = None,
        documents: Any = None,
    ) -> Array:
        """Take in ids ``[t]`` or ``[batch, t]``; logits of all of them, or of the last.

        One piece after another; each writes its keys and values in place.

        Args:
            padding: how many ids at the beginning of each sequence stand for nothing;
                only the first ids of a cache can be padded. Their logits are
                meaningless.
            documents: i32 of the ids' shape or ``[t]``: a token sees its own, and
                below 0 is seen by none. Without them, tokens go on with the last one
                of their row.
        """
        a = asarray(ids)
        single = a.ndim == 1
        batch, count = 1 if single else a.shape[0], a.shape[-1]
        if batch != self.batch:
            raise ShapeError(
                f"ids of {batch} sequences, but the cache is for {self.batch}",
                where=E.user_location(),
            )
        self.check_room(model, count)
        if padding is not None:
            self._pad(padding, count)
        elif not self.length and self._padding.any():  # a call that failed left it
            self._place(np.zeros(self.batch, np.int32))
        host = np.asarray(a).reshape(batch, count)
        marks = self._mark(count, documents)
        # Pieces are written into one array, which takes the same texts for any number.
        whole: Array | None = None
        for at in range(0, count, CHUNK):
            piece = host[:, at : at + CHUNK]
            n = piece.shape[1]
            if n == 1:
                tokens = asarray(piece[:, 0])
                logits = self._advance(
                    step_function, model, tokens, 1, marks=marks(at, 1)
                )
                logits = logits.reshape(batch, 1, -1)
            else:
                if n < CHUNK:
                    piece = np.pad(piece, ((0, 0), (0, CHUNK - n)), mode="edge")
                wanted = np.int32(n - 1) if last else None
                logits = self._advance(
                    _chunk, model, piece, n, wanted=wanted, marks=marks(at, CHUNK)
                )
            if not last and count > CHUNK:
                if whole is None:
                    room = -(-count // CHUNK) * CHUNK
                    whole = zeros((batch, room, logits.shape[2]))
                whole = _put(whole, logits, asarray(np.int32(at)))
        y = logits if whole is None else whole
        if not last and y.shape[1] > count:
            y = y[:, :count]
        return y.reshape(y.shape[1:]) if single else y

    def step(self, model: Any, tokens: Array, start: Array | None = None) -> Array:
        """Take in one token a sequence, i32 ``[batch]``; logits ``[batch, vocab]``.

        The tokens may be on the device only; those out of range are clamped, and the
        next read raises `IndexRangeError`. ``start`` is the length as an array, for
        those who have it there already.
        """
        if start is None:
            self.check_room(model, 1)
        marks = self._mark(1, None)
        return self._advance(step_function, model, tokens, 1, start, marks=marks(0, 1))

    def follow(self, model: Any, tokens: Array) -> Array:
        """Take in one token a sequence, and draw the likeliest that follows, i32
        ``[batch]``; -1 where logits are no numbers. As :meth:`step` otherwise.

        One plan, which needs nothing of the host but to be launched.
        """
        self.check_room(model, 1)
        if self._documents is not None:
            return _likeliest(self.step(model, tokens))
        length, start = self._start
        if length != self.length:
            start = asarray(np.int32(self.length))
        first = self._first if self.batch > 1 else None
        token: Array
        token, start, self._rows = _follow(model, self._rows, tokens, start, first)
        self._lengths = [k + 1 for k in self._lengths]
        self._start = self.length, start
        return token

    def check_room(self, model: Any, count: int) -> None:
        """Refuse ``count`` more positions that do not fit.

        Raises:
            IndexRangeError: into the cache, or into the model.
        """
        self._room(self.length, count)
        total = self.length - int(self._padding.min()) + count
        limit = model.config.max_positions
        if total > limit:
            raise IndexRangeError(
                f"{total} positions, but the model has {limit}",
                where=E.user_location(),
            )

    def _advance(
        self,
        function: Any,
        model: Any,
        ids: Any,
        count: int,
        start: Array | None = None,
        **more: Any,
    ) -> Array:
        if start is None:
            start = asarray(np.int32(self.length))
        # A single sequence needs no mask: it begins at row 0.
        first = self._first if self.batch > 1 else None
        logits: Array
        logits, keys, values = function(
            model, self._keys, self._values, ids, start, first, **more
        )
        self._rows = _Rows(keys, values)
        self._lengths = [k + count for k in self._lengths]
        return logits

    def _mark(self, count: int, documents: Any) -> Callable[[int, int], Marks | None]:
        """Note the documents of ``count`` new tokens.

        Gives what a piece of them (its begin, its length) is told: the documents of its
        tokens, of all rows, and the positions of its tokens in their documents.
        """
        known, length = self._documents, self.length
        if documents is None and known is None:
            return lambda at, n: None
        if known is not None:
            known = known[:, :length]  # a call that failed left more
        if known is None:
            row = np.arange(length)
            known = np.where(row < self._padding[:, None], -1, 0).astype(np.int32)
        if documents is None:
            last = known[:, -1:] if length else np.zeros((self.batch, 1), np.int32)
            new = np.repeat(last, count, axis=1)
        else:
            new = np.asarray(documents).astype(np.int32)
            new = np.broadcast_to(new, (self.batch, count))
        every = self._documents = np.concatenate([known, new], axis=1)
        rows = np.full(self._shape[:2], -1, np.int32)
        rows[:, : every.shape[1]] = every
        others = asarray(rows)
        places = [
            (every[:, : length + i] == new[:, i : i + 1]).sum(axis=1)
            for i in range(count)
        ]
        at_all = np.stack(places, axis=1).astype(np.int32)

        def marks(at: int, n: int) -> Marks:
            pad = ((0, 0), (0, max(0, at + n - count)))
            own = np.pad(new[:, at : at + n], pad, constant_values=-1)
            return asarray(own), others, asarray(np.pad(at_all[:, at : at + n], pad))

        return marks

    def _pad(self, padding: Sequence[int], count: int) -> None:
        at = np.asarray(padding, np.int32)
        if at.shape != (self.batch,) or at.min() < 0 or at.max() >= count:
            raise ShapeError(
                f"padding {at.tolist()} for {self.batch} sequences of {count} ids",
                where=E.user_location(),
            )
        if at.any() and (self.length or self.batch == 1):
            raise ShapeError(
                "only the first ids of a cache for several sequences can be padded",
                where=E.user_location(),
            )
        if not self.length:
            self._place(at)

    def _place(self, padding: np.ndarray) -> None:
        self._padding, self._first = padding, asarray(padding)

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
                cure="make it with a larger capacity, grow it, or clear it",
            )


# ------------------------------------------------------------------ as plans


def _blocks(
    model: Any,
    keys: tuple[Array, ...],
    values: tuple[Array, ...],
    ids: Array,
    start: Array,
    first: Array | None,
    marks: Marks | None,
) -> tuple[Array, tuple[Array, ...], tuple[Array, ...]]:
    """Rows of the last block, and the cache with those of ids ``[b, t]``."""
    length, limit = ids.shape[1], model.config.max_positions
    own = others = None
    if marks is not None:
        own, others, at = marks
    elif first is None:
        at = positions(length, start, limit)
    else:
        row = positions(length, start, keys[0].shape[1])
        behind = row.reshape(1, length) - first.reshape(ids.shape[0], 1)
        at = maximum(minimum(behind, limit - 1), 0)
    x = model.embed(ids, at=at)
    new_keys, new_values = [], []
    for block, k, v in zip(model.layers, keys, values, strict=True):
        x, k, v = block(
            x,
            start=start,
            cached=(k, v),
            documents=own,
            others=others,
            positions=at,
            first=first,
        )
        new_keys.append(k)
        new_values.append(v)
    return x, tuple(new_keys), tuple(new_values)


def _chunk_of(
    model: Any,
    keys: tuple[Array, ...],
    values: tuple[Array, ...],
    ids: Array,
    start: Array,
    first: Array | None,
    wanted: Array | None,
    marks: Marks | None = None,
) -> tuple[Array, tuple[Array, ...], tuple[Array, ...]]:
    from . import heads

    x, keys, values = _blocks(model, keys, values, ids, start, first, marks)
    if wanted is not None:
        # Only the row that the next token is drawn from goes through the head.
        x = heads.row(x, wanted, n=1)
    return model.head(model.norm(x)), keys, values


def _step_of(
    model: Any,
    keys: tuple[Array, ...],
    values: tuple[Array, ...],
    ids: Array,
    start: Array,
    first: Array | None,
    marks: Marks | None = None,
) -> tuple[Array, tuple[Array, ...], tuple[Array, ...]]:
    ids = ids.reshape(ids.shape[0], 1)
    x, keys, values = _blocks(model, keys, values, ids, start, first, marks)
    logits = model.head(model.norm(x))
    return logits.reshape(logits.shape[0], logits.shape[2]), keys, values


def _follow_of(
    model: Any, rows: _Rows, ids: Array, start: Array, first: Array | None
) -> tuple[Array, Array, _Rows]:
    logits, keys, values = _step_of(model, rows.keys, rows.values, ids, start, first)
    return likeliest(logits.store()), advanced(start), _Rows(keys, values)


def _put_of(whole: Array, piece: Array, start: Array) -> Array:
    return update_slice(whole, piece, axis=1, start=start)


_put = compile(_put_of, donate=("whole",))
_chunk = compile(_chunk_of, donate=("keys", "values"))
#: One token a sequence: ``(model, keys, values, ids, start, first)`` to logits, cache.
step_function = compile(_step_of, donate=("keys", "values"))
_follow = compile(_follow_of, donate=("rows",))
_likeliest = compile(lambda logits: likeliest(logits))
