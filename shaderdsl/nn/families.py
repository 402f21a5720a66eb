"""Hugging Face's names and settings for each family of models, both ways.

A family says how its ``config.json`` reads as a :class:`TransformerConfig`, how one is
written, and under which names our parameters are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError, ShaderError
from .config import TransformerConfig
from .names import GPT2, LLAMA, Names
from .rotary import RopeScaling

__all__ = ["FAMILIES", "Family", "family_of", "read_config"]


@dataclass(frozen=True)
class Family:
    """One kind of ``config.json``."""

    name: str
    architectures: tuple[str, ...]  # the first one is written
    model_type: str
    read: Callable[[dict[str, Any]], dict[str, Any]]
    write: Callable[[TransformerConfig], dict[str, Any]]
    names: Names


# ------------------------------------------------------------------ settings


def _common(raw: dict[str, Any]) -> dict[str, Any]:
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
        "rope_scaling": _scaling(raw),
        "rotary_dim": int(head_dim * partial) if partial else head_dim,
        "tied_head": bool(raw.get("tie_word_embeddings", False)),
        "activation": _activation(
            raw.get("hidden_activation") or raw.get("hidden_act") or "silu"
        ),
    }


def _activation(name: str) -> str:
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


def _scaling(raw: dict[str, Any]) -> RopeScaling | None:
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


def _full_attention_only(raw: dict[str, Any]) -> None:
    """Refuse what is not there, by name."""
    kinds = set(raw.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise CheckpointError(
            f"layers of the kind {', '.join(sorted(kinds))} are not implemented",
            cure="models whose every layer is full or sliding attention can be loaded",
        )
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if raw.get(name):
            raise CheckpointError(f"experts ({name} = {raw[name]}) are not implemented")


def _windows(raw: dict[str, Any], default: Callable[[int], bool]) -> Any:
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


def _llama(raw: dict[str, Any]) -> dict[str, Any]:
    bias = bool(raw.get("attention_bias", False))
    return {
        **_common(raw),
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": bool(raw.get("mlp_bias", False)),
    }


def _mistral(raw: dict[str, Any]) -> dict[str, Any]:
    return {**_common(raw), "windows": _windows(raw, lambda i: True)}


def _qwen_windows(raw: dict[str, Any]) -> Any:
    if not raw.get("use_sliding_window"):
        return None
    first = raw.get("max_window_layers", 0)
    return _windows(raw, lambda i: i >= first)


def _qwen2(raw: dict[str, Any]) -> dict[str, Any]:
    return {**_common(raw), "qkv_bias": True, "windows": _qwen_windows(raw)}


def _qwen3(raw: dict[str, Any]) -> dict[str, Any]:
    bias = bool(raw.get("attention_bias", False))
    return {
        **_common(raw),
        "qkv_bias": bias,
        "o_bias": bias,
        "qk_norm": True,
        "windows": _qwen_windows(raw),
    }


def _qwen3_5(raw: dict[str, Any]) -> dict[str, Any]:
    if not raw.get("layer_types"):
        raise CheckpointError(
            f"a {raw.get('model_type')} without layer_types has linear attention, "
            "which is not implemented"
        )
    found = _common(raw)
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


def _gpt2(raw: dict[str, Any]) -> dict[str, Any]:
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
        "activation": _activation(raw.get("activation_function", "gelu_new")),
        "positions": "learned",
        "tied_head": bool(raw.get("tie_word_embeddings", True)),
        "attention_scale": None if raw.get("scale_attn_weights", True) else 1.0,
    }


# ------------------------------------------------------------------ writing

_HF_ACTIVATION = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}


def _write_common(c: TransformerConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": c.rope_theta, "rope_type": "default"}
    if c.rope_scaling is not None:
        s = c.rope_scaling
        rope |= {"rope_type": s.kind, "factor": s.factor}
        if s.kind == "llama3":
            rope |= {
                "low_freq_factor": s.low_freq_factor,
                "high_freq_factor": s.high_freq_factor,
                "original_max_position_embeddings": s.original_positions,
            }
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


def _write_windows(c: TransformerConfig) -> dict[str, Any]:
    windows = c.windows or (None,) * c.num_layers
    sizes = {w for w in windows if w is not None}
    return {
        "layer_types": [
            "full_attention" if w is None else "sliding_attention" for w in windows
        ],
        "sliding_window": max(sizes) if sizes else None,
    }


def _write_qwen(c: TransformerConfig) -> dict[str, Any]:
    about = _write_common(c) | _write_windows(c)
    sliding = [i for i, k in enumerate(about["layer_types"]) if k.startswith("sliding")]
    about["use_sliding_window"] = bool(sliding)
    about["max_window_layers"] = sliding[0] if sliding else c.num_layers
    return about


def _write_mistral(c: TransformerConfig) -> dict[str, Any]:
    return _write_common(c) | {"sliding_window": c.window(0)}


def _write_gpt2(c: TransformerConfig) -> dict[str, Any]:
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


_ROWS = (
    ("llama", ("LlamaForCausalLM",), "llama", _llama, _write_common),
    ("mistral", ("MistralForCausalLM",), "mistral", _mistral, _write_mistral),
    ("qwen2", ("Qwen2ForCausalLM",), "qwen2", _qwen2, _write_qwen),
    ("qwen3", ("Qwen3ForCausalLM",), "qwen3", _qwen3, _write_qwen),
    (
        "qwen3_5",
        ("Qwen3_5ForCausalLM",),
        "qwen3_5_text",
        _qwen3_5,
        lambda c: _write_common(c) | _write_windows(c),
    ),
)
FAMILIES: dict[str, Family] = {
    name: Family(name, classes, kind, read, write, LLAMA)
    for name, classes, kind, read, write in _ROWS
}
FAMILIES["gpt2"] = Family(
    "gpt2", ("GPT2LMHeadModel",), "gpt2", _gpt2, _write_gpt2, GPT2
)


def family_of(name: str) -> Family:
    """A family by its name.

    Raises:
        CheckpointError: there is none of this name.
    """
    if name not in FAMILIES:
        raise CheckpointError(
            f"there is no family {name!r}", cure=f"one of {', '.join(FAMILIES)}"
        )
    return FAMILIES[name]


def read_config(raw: dict[str, Any], where: str) -> TransformerConfig:
    """A parsed ``config.json``.

    Raises:
        CheckpointError: the architecture, or something it asks for, is not there.
    """
    family = _find(raw, where)
    _full_attention_only(raw)
    try:
        return TransformerConfig(family=family.name, **family.read(raw))
    except KeyError as error:
        raise CheckpointError(f"{where} has no entry {error}") from error
    except (TypeError, ValueError, ShaderError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{where} makes no sense: {error}") from error


def _find(raw: dict[str, Any], where: str) -> Family:
    asked: Sequence[str] = raw.get("architectures") or ()
    for family in FAMILIES.values():
        if any(a in family.architectures for a in asked):
            return family
    if not asked:
        for family in FAMILIES.values():
            if raw.get("model_type") == family.model_type:
                return family
    wanted = ", ".join(asked) or raw.get("model_type") or "no architecture"
    known = ", ".join(a for f in FAMILIES.values() for a in f.architectures)
    raise CheckpointError(
        f"{where}: {wanted} is not implemented", cure=f"these are: {known}"
    )
