"""Hugging Face's names and settings for each family of models, both ways.

A family says how its ``config.json`` reads as a :class:`TransformerConfig`, how one is
written, and under which names our parameters are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError, ShaderError
from . import gemma, settings
from .config import TransformerConfig
from .names import GEMMA, GPT2, LLAMA, Names

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


def _refuse(raw: dict[str, Any]) -> None:
    """Refuse what is not there, by name."""
    kinds = set(raw.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise CheckpointError(
            f"layers of the kind {', '.join(sorted(kinds))} are not implemented",
            cure="models whose every layer is full or sliding attention can be loaded",
        )
    default = 512 if raw.get("model_type") == "qwen3_next" else 0
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        count = raw.get(name, default if name == "num_experts" else 0)
        if count and _sparse(raw):
            raise CheckpointError(f"experts ({name} = {count}) are not implemented")


def _sparse(raw: dict[str, Any]) -> bool:
    """Whether any layer has experts."""
    dense, step = raw.get("mlp_only_layers") or (), raw.get("decoder_sparse_step", 1)
    layers = range(raw.get("num_hidden_layers", 1))
    return any(i not in dense and (i + 1) % step == 0 for i in layers)


_ROWS: tuple[tuple[Any, ...], ...] = (
    ("llama", "LlamaForCausalLM", "llama", settings.llama, settings.write_llama),
    (
        "mistral",
        "MistralForCausalLM",
        "mistral",
        settings.mistral,
        settings.write_mistral,
    ),
    ("qwen2", "Qwen2ForCausalLM", "qwen2", settings.qwen2, settings.write_qwen),
    ("qwen3", "Qwen3ForCausalLM", "qwen3", settings.qwen3, settings.write_qwen),
    (
        "qwen3_5",
        "Qwen3_5ForCausalLM",
        "qwen3_5_text",
        settings.qwen3_5,
        settings.write_qwen3_5,
    ),
    (
        "qwen3_next",
        "Qwen3NextForCausalLM",
        "qwen3_next",
        settings.qwen3_5,
        settings.write_qwen3_next,
    ),
    ("gemma2", "Gemma2ForCausalLM", "gemma2", gemma.gemma2, gemma.write_gemma2),
    ("gemma3", "Gemma3ForCausalLM", "gemma3_text", gemma.gemma3, gemma.write_gemma3),
    ("gpt2", "GPT2LMHeadModel", "gpt2", settings.gpt2, settings.write_gpt2),
)
_NAMES = {"gpt2": GPT2, "gemma2": GEMMA, "gemma3": GEMMA}
FAMILIES: dict[str, Family] = {
    name: Family(name, (asked,), kind, read, write, _NAMES.get(name, LLAMA))
    for name, asked, kind, read, write in _ROWS
}


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


#: More than any model has; beyond, a file was made to fill the memory.
MOST_LAYERS = 10_000


def read_config(raw: dict[str, Any], where: str) -> TransformerConfig:
    """A parsed ``config.json``.

    Raises:
        CheckpointError: the architecture, or something it asks for, is not there.
    """
    family = _find(raw, where)
    _refuse(raw)
    for name in ("num_hidden_layers", "n_layer"):
        layers = raw.get(name)
        if isinstance(layers, int) and layers > MOST_LAYERS:
            raise CheckpointError(
                f"{where} makes no sense: {name} is {layers}, more than {MOST_LAYERS}"
            )
    try:
        return TransformerConfig(family=family.name, **family.read(raw))
    except KeyError as error:
        raise CheckpointError(f"{where} has no entry {error}") from error
    except (ArithmeticError, AttributeError, IndexError, TypeError, ValueError,
            ShaderError) as error:  # fmt: skip
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
