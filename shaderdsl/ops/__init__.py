"""Ready-made ops, each the plain expression of its formula."""

from __future__ import annotations

from .attention import (
    alibi_slopes,
    attention,
    attention_alibi,
    attention_gated,
    attention_lse,
    attention_masked,
)
from .contract import linear, linear_bias
from .elementwise import geglu, gelu, silu, softplus, swiglu
from .embedding import embedding
from .loss import (
    cross_entropy,
    cross_entropy_rows,
    linear_cross_entropy,
    linear_cross_entropy_rows,
)
from .norm import layer_norm, log_softmax, rms_norm, rms_norm_shifted, softmax
from .rope import rope, rope_halved, rope_interleaved, rope_tables
from .update import adamw_update, sgd_update

__all__ = [
    "adamw_update",
    "alibi_slopes",
    "attention",
    "attention_alibi",
    "attention_gated",
    "attention_lse",
    "attention_masked",
    "cross_entropy",
    "cross_entropy_rows",
    "embedding",
    "geglu",
    "gelu",
    "layer_norm",
    "linear",
    "linear_bias",
    "linear_cross_entropy",
    "linear_cross_entropy_rows",
    "log_softmax",
    "rms_norm",
    "rms_norm_shifted",
    "rope",
    "rope_halved",
    "rope_interleaved",
    "rope_tables",
    "sgd_update",
    "silu",
    "softmax",
    "softplus",
    "swiglu",
]
