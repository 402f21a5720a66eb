"""``config.json`` of each family as our configuration, and back.

Both spellings are read: ``rope_parameters`` of transformers 5.x, and ``rope_theta``,
``rope_scaling`` and ``partial_rotary_factor`` at the top level.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import CheckpointError
from .config import TransformerConfig
from .rotary import RopeScaling

# ------------------------------------------------------------------ reading


def common(raw: dict[str, Any]) -> dict[str, Any]:
    """What all families but GPT-2 share."""
    rope = {**raw, **(raw.get("rope_parameters") or {})}
    heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
    head_dim = raw.get("head_dim") or hidden // heads
    partial = rope.get("partial_rotary_factor")
    return {
        "vocab_size": raw["vocab_size"],
        "hidden_size": hidden,
        "num_layers": raw["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "ffn_size": raw["intermediate_size"],
        "max_positions": raw.get("max_position_embeddings", 2048),
        "norm_eps": raw.get("rms_norm_eps", 1e-6),
        "rope_theta": float(rope.get("rope_theta") or 1e4),
        "rope_scaling": scaling(raw),
        "rotary_dim": int(head_dim * partial) if partial else head_dim,
        "tied_head": bool(raw.get("tie_word_embeddings", False)),
        "activation": activation(
            raw.get("hidden_activation") or raw.get("hidden_act") or "silu"
        ),
    }


def activation(name: str) -> str:
    known = {
        "silu": "silu",
        "swish": "silu",
        "gelu": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
    }
    if name not in known:
        raise CheckpointError(
            f"the activation {name!r} is not implemented",
            cure=f"known: {', '.join(known)}",
        )
    return known[name]


def scaling(raw: dict[str, Any]) -> RopeScaling | None:
    """Rotary scaling from 5.x ``rope_parameters`` or 4.x ``rope_scaling``."""
    about = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = about.get("rope_type") or about.get("type") or "default"
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise CheckpointError(
            f"rotary scaling {kind!r} is not implemented", cure="linear and llama3 are"
        )
    if kind == "linear":
        return RopeScaling(kind=kind, factor=float(about["factor"]))
    first = about.get("original_max_position_embeddings")
    return RopeScaling(
        kind=kind,
        factor=float(about["factor"]),
        low_freq_factor=float(about.get("low_freq_factor", 1.0)),
        high_freq_factor=float(about.get("high_freq_factor", 4.0)),
        original_positions=int(first or raw.get("max_position_embeddings", 8192)),
    )


def windows(raw: dict[str, Any], default: Callable[[int], bool]) -> Any:
    """The window of each layer, from ``layer_types`` or the family's rule."""
    window = raw.get("sliding_window")
    if not window:
        return None
    kinds = raw.get("layer_types")
    sliding = [
        kinds[i] == "sliding_attention" if kinds else default(i)
        for i in range(raw["num_hidden_layers"])
    ]
    return tuple(window if s else None for s in sliding) if any(sliding) else None


def llama(raw: dict[str, Any]) -> dict[str, Any]:
    bias = bool(raw.get("attention_bias", False))
    return {
        **common(raw),
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": bool(raw.get("mlp_bias", False)),
    }


def mistral(raw: dict[str, Any]) -> dict[str, Any]:
    about = {"sliding_window": 4096, **raw}  # what a missing entry means
    return {**common(raw), "windows": windows(about, lambda i: True)}


def qwen_windows(raw: dict[str, Any]) -> Any:
    if not raw.get("use_sliding_window"):
        return None
    first = raw.get("max_window_layers", 0)
    return windows(raw, lambda i: i >= first)


def qwen2(raw: dict[str, Any]) -> dict[str, Any]:
    return {**common(raw), "qkv_bias": True, "windows": qwen_windows(raw)}


def qwen3(raw: dict[str, Any]) -> dict[str, Any]:
    bias = bool(raw.get("attention_bias", False))
    return {
        **common(raw),
        "qkv_bias": bias,
        "o_bias": bias,
        "qk_norm": True,
        "windows": qwen_windows(raw),
    }


def qwen3_5(raw: dict[str, Any]) -> dict[str, Any]:
    if not raw.get("layer_types"):
        raise CheckpointError(
            f"a {raw.get('model_type')} without layer_types has linear attention, "
            "which is not implemented"
        )
    found = common(raw)
    if "partial_rotary_factor" not in {**raw, **(raw.get("rope_parameters") or {})}:
        found["rotary_dim"] = found["head_dim"] // 4
    bias = bool(raw.get("attention_bias", False))
    return {
        **found,
        "qkv_bias": bias,
        "o_bias": bias,
        "qk_norm": True,
        "norm_shift": True,
        "gated": True,
    }


def gpt2(raw: dict[str, Any]) -> dict[str, Any]:
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if raw.get(name):
            raise CheckpointError(f"{name} is not implemented")
    width = raw["n_embd"]
    return {
        "vocab_size": raw["vocab_size"],
        "hidden_size": width,
        "num_layers": raw["n_layer"],
        "num_heads": raw["n_head"],
        "ffn_size": raw.get("n_inner") or 4 * width,
        "max_positions": raw.get("n_positions", 1024),
        "norm": "layer",
        "norm_eps": raw.get("layer_norm_epsilon", 1e-5),
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "mlp": "plain",
        "activation": activation(raw.get("activation_function", "gelu_new")),
        "positions": "learned",
        "tied_head": bool(raw.get("tie_word_embeddings", True)),
        "attention_scale": None if raw.get("scale_attn_weights", True) else 1.0,
    }


# ------------------------------------------------------------------ writing

_HF_ACTIVATION = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}


def write_rope(theta: float, stretch: RopeScaling | None) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
    if stretch is not None:
        rope |= {"rope_type": stretch.kind, "factor": stretch.factor}
        if stretch.kind == "llama3":
            rope |= {
                "low_freq_factor": stretch.low_freq_factor,
                "high_freq_factor": stretch.high_freq_factor,
                "original_max_position_embeddings": stretch.original_positions,
            }
    return rope


def write_common(c: TransformerConfig) -> dict[str, Any]:
    rope = write_rope(c.rope_theta, c.rope_scaling)
    if c.rotary_dim != c.head_dim:
        rope["partial_rotary_factor"] = c.rotary_dim / c.head_dim  # type: ignore[operator]
    about = {
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.ffn_size,
        "max_position_embeddings": c.max_positions,
        "rms_norm_eps": c.norm_eps,
        "rope_parameters": rope,
        "rope_theta": c.rope_theta,  # where transformers 4.x looks
        "tie_word_embeddings": c.tied_head,
        "hidden_act": _HF_ACTIVATION[c.activation],
        "attention_bias": c.qkv_bias,
        "mlp_bias": c.mlp_bias,
        "attention_dropout": 0.0,
    }
    if "partial_rotary_factor" in rope:
        about["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if c.rope_scaling is not None:
        about["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    return about


def write_windows(c: TransformerConfig) -> dict[str, Any]:
    windows = c.windows or (None,) * c.num_layers
    sizes = {w for w in windows if w is not None}
    return {
        "layer_types": [
            "full_attention" if w is None else "sliding_attention" for w in windows
        ],
        "sliding_window": max(sizes) if sizes else None,
    }


def write_qwen(c: TransformerConfig) -> dict[str, Any]:
    about = write_common(c) | write_windows(c)
    sliding = [i for i, k in enumerate(about["layer_types"]) if k.startswith("sliding")]
    about["use_sliding_window"] = bool(sliding)
    about["max_window_layers"] = sliding[0] if sliding else c.num_layers
    return about


write_llama = write_common


def write_qwen3_5(c: TransformerConfig) -> dict[str, Any]:
    return write_common(c) | write_windows(c)


def write_qwen3_next(c: TransformerConfig) -> dict[str, Any]:
    dense = {"num_experts": 0, "mlp_only_layers": list(range(c.num_layers))}
    return write_common(c) | write_windows(c) | dense


def write_mistral(c: TransformerConfig) -> dict[str, Any]:
    return write_common(c) | {"sliding_window": c.window(0)}


def write_gpt2(c: TransformerConfig) -> dict[str, Any]:
    return {
        "vocab_size": c.vocab_size,
        "n_embd": c.hidden_size,
        "n_layer": c.num_layers,
        "n_head": c.num_heads,
        "n_inner": c.ffn_size,
        "n_positions": c.max_positions,
        "layer_norm_epsilon": c.norm_eps,
        "activation_function": "gelu_new"
        if c.activation == "gelu_tanh"
        else c.activation,
        "scale_attn_weights": c.attention_scale is None,
        "tie_word_embeddings": c.tied_head,
    }
