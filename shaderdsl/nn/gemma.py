"""``config.json`` of Gemma 2 and of Gemma 3's text models, both ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import CheckpointError
from .config import TransformerConfig
from .rotary import RopeScaling
from .settings import common, scaling, windows, write_common, write_rope, write_windows

__all__ = ["gemma2", "gemma3", "write_gemma2", "write_gemma3"]

# What an entry that is missing means; published files leave some out.
_GEMMA2 = {
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3 = {
    **_GEMMA2,
    "max_position_embeddings": 131072,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}


def _gemma(
    raw: dict[str, Any], sliding: Callable[[int], bool], family: str
) -> dict[str, Any]:
    if raw.get("use_bidirectional_attention"):
        raise CheckpointError(f"{family}: bidirectional attention is not implemented")
    found = common(raw)
    scalar = raw["query_pre_attn_scalar"]
    bias = bool(raw.get("attention_bias", False))
    return {
        **found,
        "qkv_bias": bias,
        "o_bias": bias,
        "norm_shift": True,
        "post_norms": True,
        "embedding_scale": raw["hidden_size"] ** 0.5,
        "attention_scale": None if scalar == found["head_dim"] else scalar**-0.5,
        "soft_cap": raw["attn_logit_softcapping"],
        "final_soft_cap": raw["final_logit_softcapping"],
        "windows": windows(raw, sliding),
    }


def gemma2(raw: dict[str, Any]) -> dict[str, Any]:
    """Windows and full attention in turns, soft caps of scores and logits."""
    return _gemma(_GEMMA2 | raw, lambda i: i % 2 == 0, "Gemma 2")


def gemma3(raw: dict[str, Any]) -> dict[str, Any]:
    """Head norms; layers with a window have a rotary base of their own, unscaled."""
    rope = raw.get("rope_parameters") or {}
    wide: dict[str, Any] = dict(rope.get("full_attention") or {})
    near: dict[str, Any] = dict(rope.get("sliding_attention") or {})
    wide = {"rope_theta": raw.get("rope_theta") or 1e6} | wide
    if not rope and raw.get("rope_scaling"):
        wide |= raw["rope_scaling"]
    near = {"rope_theta": raw.get("rope_local_base_freq") or 1e4} | near
    period = raw.get("sliding_window_pattern") or 6
    about = _GEMMA3 | raw | {"rope_parameters": wide, "rope_scaling": None}
    found = _gemma(about, lambda i: bool((i + 1) % period), "Gemma 3")
    layers = found["windows"] or (None,) * found["num_layers"]
    of: dict[bool, tuple[float, RopeScaling | None]] = {
        w: (float(r["rope_theta"]), scaling({**about, "rope_parameters": r}))
        for w, r in ((False, wide), (True, near))
    }
    each = [of[w is not None] for w in layers]
    stretched = any(s is not None for _, s in each)
    return {
        **found,
        "qk_norm": True,
        "rope_theta": of[False][0],
        "rope_scaling": None,
        "rope_thetas": tuple(theta for theta, _ in each),
        "rope_scalings": tuple(s for _, s in each) if stretched else None,
    }


def write_gemma2(c: TransformerConfig) -> dict[str, Any]:
    about = write_common(c) | write_windows(c)
    scale = c.attention_scale
    return about | {
        "hidden_activation": about["hidden_act"],
        "query_pre_attn_scalar": c.head_dim if scale is None else round(scale**-2),
        "attn_logit_softcapping": c.soft_cap,
        "final_logit_softcapping": c.final_soft_cap,
    }


def write_gemma3(c: TransformerConfig) -> dict[str, Any]:
    about = write_gemma2(c)
    rope = {}
    for kind in ("full_attention", "sliding_attention"):
        layers = [i for i, k in enumerate(about["layer_types"]) if k == kind]
        theta = c.rope_theta if kind == "full_attention" else 1e4
        stretch: RopeScaling | None = None
        if layers:
            theta, stretch = c.theta(layers[0]), c.scaling(layers[0])
        rope[kind] = write_rope(theta, stretch)
    about.pop("rope_scaling", None)
    return about | {
        "rope_parameters": rope,
        "rope_theta": rope["full_attention"]["rope_theta"],
        "rope_local_base_freq": rope["sliding_attention"]["rope_theta"],
    }
