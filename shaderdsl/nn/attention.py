"""Attention with all that the families ask of it, from seven ops."""

from __future__ import annotations

import functools
from dataclasses import KW_ONLY
from typing import Any

from .. import ops
from ..array import Array, asarray
from ..errors import DTypeError, ShapeError
from ..ir import expr as E
from ..runtime import owner
from . import heads
from .layers import Linear, RMSNorm, check_last
from .module import Module, static
from .rotary import RotaryEmbedding

__all__ = ["Attention"]


class Attention(Module):
    """o_proj(softmax(scale · q kᵀ + mask) v); a group of query heads reads one kv head.

    ``q_norm`` and ``k_norm`` act on each head before the rotary positions. With
    ``gated``, q_proj gives for each head its query and then its gate, and the context
    is multiplied by sigmoid(gate). Cached keys are normed and turned.

    Args:
        num_heads, num_kv_heads, head_dim: kv heads divide heads.
        rotary: None for models with other positions.
        scale: head_dim^-½ by default.
        window: a query sees so many keys, its own included.
        soft_cap: scores become cap · tanh(score / cap).
        alibi: each head's scores fall by its slope times the distance of the key.

    Raises:
        ShapeError: heads do not divide, or a projection is of another size.
    """

    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    o_proj: Linear
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None
    rotary: RotaryEmbedding | None = None
    _: KW_ONLY
    num_heads: int = static()
    num_kv_heads: int = static()
    head_dim: int = static()
    gated: bool = static(default=False)
    causal: bool = static(default=True)
    scale: float | None = static(default=None)
    window: int | None = static(default=None)
    soft_cap: float | None = static(default=None)
    alibi: bool = static(default=False)

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ShapeError(
                f"{self.num_heads} query heads do not share {self.num_kv_heads} "
                "key/value heads evenly"
            )
        parts = 2 if self.gated else 1
        for name, rows in (
            ("q_proj", self.num_heads * self.head_dim * parts),
            ("k_proj", self.num_kv_heads * self.head_dim),
            ("v_proj", self.num_kv_heads * self.head_dim),
        ):
            have = getattr(self, name).weight.shape[0]
            if have != rows:
                raise ShapeError(f"{name} has {have} rows, the heads need {rows}")

    def __call__(
        self,
        x: Any,
        *,
        start: Any = 0,
        cached: tuple[Array, Array] | None = None,
        documents: Any = None,
        others: Any = None,
        positions: Any = None,
        first: Any = None,
    ) -> Any:
        """x ``[t, dim]``, ``[b, t, dim]``, or ``[dim]`` (one position).

        Args:
            start: position of the first row; a number or an array without dimensions.
            documents: i32 ``[t]`` or ``[b, t]``: a row sees those of its own document
                only. Below 0 stands padding, which sees nothing and gives zeros.
            others: i32 ``[…, capacity]``: the documents of a cache's rows, the new ones
                among them.
            positions: i32 ``[t]`` or ``[b, t]``, of each row; only the rotary part
                asks for them, what a row sees goes by its place.
            first: i32 ``[b]``: rows of the cache before it are padding, seen by none.
            cached: keys and values ``[…, capacity, kv_heads · head_dim]`` of the
                positions before ``start``; then the result is
                ``(y, keys, values)`` with the new rows written into them.
        """
        x = check_last(x, self.q_proj.weight.shape[1], "Attention")
        if x.ndim == 1:
            y = self(x.reshape(1, x.shape[0]), start=start)
            return y.reshape(y.shape[-1])
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        cos = sin = None
        if self.rotary is not None:
            cos, sin = self.rotary.tables(x.shape[-2], start, positions)
        turned = self._place(q, self.q_norm, cos, sin, 2 if self.gated else 1)
        k = self._place(k, self.k_norm, cos, sin, 1)
        if documents is not None:
            documents = _row_ids(documents, x, "documents")
            if (cached is None) is not (others is None):
                raise ShapeError(
                    "documents of a cache's rows are needed with a cache, and only "
                    "there",
                    where=E.user_location(),
                    cure="give them as others=",
                )
        if cached is None:
            return self._attend(turned, k, v, q, None, documents)
        k, v = _append(cached[0], k, start), _append(cached[1], v, start)
        if others is not None:
            others = _row_ids(others, k, "documents of the cache")
        y = self._attend(turned, k, v, q, start, documents, others, first)
        return y, k, v

    def _place(
        self, x: Array, norm: RMSNorm | None, cos: Any, sin: Any, parts: int
    ) -> Array:
        """Norm of the heads and rotary positions, in one op where there are both."""
        y: Array
        rotary = self.rotary
        if norm is None:
            if rotary is not None:
                return rotary.turn(x, cos, sin, parts)
            return x if parts == 1 else heads.first_part(x, z=parts, d=self.head_dim)
        options = {"eps": norm.eps, "shift": norm.shift, "z": parts}
        weight = norm.weight
        if rotary is not None and rotary.layout == "halved":
            y = heads.normed_turned(x, weight, cos, sin, d=self.head_dim, **options)
            return y
        y = heads.normed(x, weight, **options)
        return y if rotary is None else rotary.turn(y, cos, sin)

    def _attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        gate: Array,
        start: Any,
        documents: Array | None = None,
        others: Array | None = None,
        first: Array | None = None,
    ) -> Array:
        options = {
            "h": self.num_kv_heads,
            "g": self.num_heads // self.num_kv_heads,
            "scale": self.head_dim**-0.5 if self.scale is None else self.scale,
            "causal": self.causal,
            "window": self.window,
            "soft_cap": self.soft_cap,
            "start": start,
        }
        if documents is not None or first is not None or self.alibi:
            slopes = _slopes(owner(), self.num_heads) if self.alibi else None
            options |= {"gate": gate if self.gated else None, "slopes": slopes}
            return self.o_proj(
                heads.masked_attention(
                    q,
                    k,
                    v,
                    documents=documents,
                    others=others,
                    first=first,
                    **options,
                )
            )
        if self.gated:
            return self.o_proj(heads.gated_attention(q, k, v, gate, **options))
        return self.o_proj(heads.attention(q, k, v, **options))


def _append(cache: Array, new: Array, start: Any) -> Array:
    from ..namespace import update_slice

    if cache.ndim != new.ndim or cache.shape[-1] != new.shape[-1]:
        raise ShapeError(
            f"a cache of shape {cache.shape} does not take rows of {new.shape}",
            where=E.user_location(),
        )
    return update_slice(cache, new, axis=-2, start=start)


@functools.lru_cache(maxsize=64)
def _slopes(device: object, heads: int) -> Array:
    return asarray(ops.alibi_slopes(heads), "f32")


def _row_ids(ids: Any, x: Array, what: str) -> Array:
    """Integers for each row of x ``[…, t, dim]``.

    Raises:
        DTypeError, ShapeError: other numbers, or other rows.
    """
    a = asarray(ids)
    if a.dtype not in E.INTS:
        raise DTypeError(f"{what} are integers, not {a.dtype}", where=E.user_location())
    if a.shape not in (x.shape[:-1], x.shape[-2:-1]):
        raise ShapeError(
            f"{what} of shape {list(a.shape)} for rows of {list(x.shape)}",
            where=E.user_location(),
        )
    return a
