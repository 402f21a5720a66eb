"""What a transformer is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import ShaderError
from .rotary import RopeScaling

__all__ = ["ACTIVATIONS", "TransformerConfig"]

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Sizes and variants of a decoder-only transformer; the defaults are Llama's.

    Raises:
        ShaderError: a size that is not positive, heads that do not divide, an odd
            rotary part, an unknown variant.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None  # by default as many as heads
    head_dim: int | None = None  # by default hidden_size / num_heads
    ffn_size: int
    max_positions: int = 2048
    #: which Hugging Face layout the weights are saved in
    family: str = "llama"
    norm: str = "rms"  # or "layer"
    norm_eps: float = 1e-6
    norm_shift: bool = False  # the weight is 1 + w
    post_norms: bool = False  # norms after attention and after the feed-forward part
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    gated: bool = False  # context · sigmoid(gate) before the output projection
    attention_scale: float | None = None  # by default head_dim^-½
    windows: tuple[int | None, ...] | None = None  # of each layer
    soft_cap: float | None = None  # of the attention scores
    activation: str = "silu"
    mlp: str = "gated"  # or "plain"
    positions: str = "rotary"  # or "learned", or "alibi" (falling scores)
    rope_theta: float = 1e4
    #: of each layer, where layers differ
    rope_thetas: tuple[float, ...] | None = None
    rotary_dim: int | None = None  # by default head_dim
    rope_layout: str = "halved"  # or "interleaved"
    rope_scaling: RopeScaling | None = None
    #: of each layer, where layers differ
    rope_scalings: tuple[RopeScaling | None, ...] | None = None
    tied_head: bool = False
    embedding_scale: float | None = None
    final_soft_cap: float | None = None

    def __post_init__(self) -> None:
        def fill(name: str, value: Any) -> None:
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

        for name in (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "ffn_size",
        ):
            _positive(name, getattr(self, name))
        _positive("max_positions", self.max_positions)
        for name in ("norm_eps", "rope_theta", "soft_cap", "final_soft_cap"):
            _number(name, getattr(self, name))
        for theta in self.rope_thetas or ():
            _number("a rope_theta", theta)
        fill("num_kv_heads", self.num_heads)
        _positive("num_kv_heads", self.num_kv_heads)
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise ShaderError(
                f"hidden_size {self.hidden_size} is no multiple of num_heads "
                f"{self.num_heads}",
                cure="give head_dim",
            )
        fill("head_dim", self.hidden_size // self.num_heads)
        fill("rotary_dim", self.head_dim)
        if self.num_heads % self.num_kv_heads:  # type: ignore[operator]
            raise ShaderError(
                f"num_heads {self.num_heads} is no multiple of num_kv_heads "
                f"{self.num_kv_heads}",
                cure="every key/value head serves the same number of query heads",
            )
        if self.positions == "rotary" and (
            self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim  # type: ignore[operator]
        ):
            raise ShaderError(
                f"rotary_dim {self.rotary_dim} is not an even number up to head_dim "
                f"{self.head_dim}"
            )
        for name, known in (
            ("norm", ("rms", "layer")),
            ("activation", ACTIVATIONS),
            ("mlp", ("gated", "plain")),
            ("positions", ("rotary", "learned", "alibi")),
            ("rope_layout", ("halved", "interleaved")),
        ):
            if getattr(self, name) not in known:
                raise ShaderError(
                    f"{name} is {getattr(self, name)!r}",
                    cure=f"one of {', '.join(known)}",
                )
        if self.qk_norm and self.norm != "rms":
            raise ShaderError("qk_norm is an RMSNorm: it needs norm='rms'")
        for name in ("windows", "rope_thetas", "rope_scalings"):
            value = getattr(self, name)
            if value is not None and len(value) != self.num_layers:
                raise ShaderError(
                    f"{name} has {len(value)} entries for {self.num_layers} layers"
                )

    def window(self, layer: int) -> int | None:
        """How many keys a query of this layer sees, itself included; None: all."""
        return self.windows[layer] if self.windows else None

    def theta(self, layer: int) -> float:
        """The rotary base of a layer."""
        return self.rope_thetas[layer] if self.rope_thetas else self.rope_theta

    def scaling(self, layer: int) -> RopeScaling | None:
        """How a layer's rotary angles are stretched."""
        return self.rope_scalings[layer] if self.rope_scalings else self.rope_scaling


def _number(name: str, value: Any) -> None:
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    least = 0 if name == "norm_eps" else 1e-30
    if value is not None and not (known and least <= value < 1e30):
        raise ShaderError(f"{name} is {value!r}; it must be a number greater than 0")


def _positive(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ShaderError(f"{name} is {value!r}; it must be a whole number ≥ 1")
