"""Linear maps, embeddings, norms and feed-forward parts; each is one or two ops."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Any

from .. import ops
from ..array import Array, asarray
from ..errors import ShaderError, ShapeError
from ..ir import expr as E
from .config import ACTIVATIONS
from .module import Module, static

__all__ = [
    "MLP",
    "Embedding",
    "GatedMLP",
    "GeGLU",
    "LayerNorm",
    "Linear",
    "RMSNorm",
    "SwiGLU",
]


def check_last(x: Any, size: int, what: str) -> Array:
    """x as an array whose last axis has this size.

    Raises:
        ShapeError: it has another, or x has no axis.
    """
    a = asarray(x)
    if not a.shape or a.shape[-1] != size:
        raise ShapeError(
            f"{what} takes [..., {size}], got {list(a.shape)}", where=E.user_location()
        )
    return a


class Linear(Module):
    """``y = x Wᵀ + b``; weight ``[out, in]``, bias ``[out]`` or None.

    x ``[…, in]`` gives ``[…, out]``.
    """

    weight: Array
    bias: Array | None = None

    def __call__(self, x: Any) -> Array:
        a = check_last(x, self.weight.shape[1], "Linear")
        y: Array
        if self.bias is None:
            y = ops.linear(a, self.weight)
        else:
            y = ops.linear_bias(a, self.weight, self.bias)
        return y


class Embedding(Module):
    """``y[…] = table[ids[…]]``; weight ``[vocab, dim]``, ids i32 or u32.

    Raises:
        IndexRangeError: ids that the host knows and that are out of range.
        DTypeError: ids that are no integers.
    """

    weight: Array

    def __call__(self, ids: Any) -> Array:
        y: Array = ops.embedding(self.weight, asarray(ids))
        return y


class RMSNorm(Module):
    """``x · rsqrt(mean(x²) + eps) · w`` over the last axis; shifted: ``· (1 + w)``."""

    weight: Array
    _: KW_ONLY
    eps: float = static(default=1e-6)
    shift: bool = static(default=False)

    def __call__(self, x: Any) -> Array:
        a = check_last(x, self.weight.shape[0], "RMSNorm")
        norm = ops.rms_norm_shifted if self.shift else ops.rms_norm
        y: Array = norm(a, self.weight, eps=self.eps)
        return y


class LayerNorm(Module):
    """``(x - mean) / sqrt(var + eps) · w + b`` over the last axis; population var."""

    weight: Array
    bias: Array
    _: KW_ONLY
    eps: float = static(default=1e-5)

    def __call__(self, x: Any) -> Array:
        a = check_last(x, self.weight.shape[0], "LayerNorm")
        y: Array = ops.layer_norm(a, self.weight, self.bias, eps=self.eps)
        return y


def _known(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ShaderError(
            f"activation {activation!r} is unknown",
            cure=f"one of {', '.join(ACTIVATIONS)}",
        )


class GatedMLP(Module):
    """``down(act(gate(x)) · up(x))``; gate, up ``[ffn, dim]``, down ``[dim, ffn]``."""

    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear
    _: KW_ONLY
    activation: str = static(default="silu")

    def __post_init__(self) -> None:
        _known(self.activation)

    def __call__(self, x: Any) -> Array:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.activation == "silu":
            return self.down_proj(ops.swiglu(gate, up))
        form = "tanh" if self.activation == "gelu_tanh" else "none"
        return self.down_proj(ops.geglu(gate, up, approximate=form))


class SwiGLU(GatedMLP):
    """``down(silu(gate(x)) · up(x))``"""

    _: KW_ONLY
    activation: str = static(default="silu")


class GeGLU(GatedMLP):
    """``down(gelu(gate(x)) · up(x))``, by default with the tanh form of GELU."""

    _: KW_ONLY
    activation: str = static(default="gelu_tanh")


class MLP(Module):
    """``down(act(up(x)))``, as in GPT-2."""

    up_proj: Linear
    down_proj: Linear
    _: KW_ONLY
    activation: str = static(default="gelu_tanh")

    def __post_init__(self) -> None:
        _known(self.activation)

    def __call__(self, x: Any) -> Array:
        up = self.up_proj(x)
        if self.activation == "silu":
            return self.down_proj(ops.silu(up))
        form = "tanh" if self.activation == "gelu_tanh" else "none"
        return self.down_proj(ops.gelu(up, approximate=form))
