"""Attention with all that the families ask of it, from seven ops."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Any

from ..array import Array
from ..errors import ShapeError
from ..ir import expr as E
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
        self, x: Any, *, start: Any = 0, cached: tuple[Array, Array] | None = None
    ) -> Any:
        """x ``[t, dim]``, ``[b, t, dim]``, or ``[dim]`` (one position).

        Args:
            start: position of the first row; a number or an array without dimensions.
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
            cos, sin = self.rotary.tables(x.shape[-2], start)
        turned = self._place(q, self.q_norm, cos, sin, 2 if self.gated else 1)
        k = self._place(k, self.k_norm, cos, sin, 1)
        if cached is None:
            return self._attend(turned, k, v, q, None)
        k, v = _append(cached[0], k, start), _append(cached[1], v, start)
        return self._attend(turned, k, v, q, start), k, v

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

    def _attend(self, q: Array, k: Array, v: Array, gate: Array, start: Any) -> Array:
        options = {
            "h": self.num_kv_heads,
            "g": self.num_heads // self.num_kv_heads,
            "scale": self.head_dim**-0.5 if self.scale is None else self.scale,
            "causal": self.causal,
            "window": self.window,
            "soft_cap": self.soft_cap,
            "start": start,
        }
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
