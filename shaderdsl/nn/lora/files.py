"""Adapters on disk, in the layout of peft: ``adapter_config.json`` and weights.

Tensors are called ``base_model.model.NAME.lora_A.weight`` with the base model's own
names. A stored projection that holds several of ours (GPT-2's ``c_attn``) is read as
one adapter for each, with the same A.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from ...array import asarray
from ...errors import CheckpointError
from ..families import family_of
from ..layers import Linear
from ..module import map_modules, named_arrays
from ..names import Entry, entries
from ..safetensors import SafetensorsFile
from ..storage import read_json, write_folder
from ..transformer import Transformer
from .layer import LoRALinear

__all__ = ["load", "save", "state_dict"]

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
#: what an adapter may ask for beyond the plain formula, and what asks for nothing
_PLAIN: dict[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "use_qalora": (None, False),
    "lora_bias": (None, False),
    "bias": (None, "none"),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, []),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
}


def _projections(model: Transformer) -> dict[str, Entry]:
    """Stored name of each linear map, without ``.weight`` → where its parts are."""
    found: list[str] = []

    def visit(path: str, x: Linear) -> Linear:
        found.append(f"{path}.weight")
        return x

    map_modules(model, Linear, visit)
    names = family_of(model.config.family).names
    return {e.name.removesuffix(".weight"): e for e in entries(names, found)}


# ------------------------------------------------------------------ reading


def load(model: Transformer, folder: str | os.PathLike[str]) -> Transformer:
    """The model with the adapters of a folder, ready to train on or to merge.

    Dropout is as the folder says, and acts only in
    :func:`~shaderdsl.nn.lora.with_dropout`.

    Raises:
        CheckpointError: files that are missing or cut off, an adapter of another kind
            or for another model.
    """
    source = Path(folder)
    about = read_json(source / CONFIG)
    _check_kind(about, source)
    file = SafetensorsFile(source / WEIGHTS)
    pairs = _pairs(file, model, source)
    projections = _projections(model)
    new: dict[str, dict[str, Any]] = {}
    for name, (a_name, b_name) in pairs.items():
        a, b = (np.asarray(file.read(n), np.float32) for n in (a_name, b_name))
        start = 0
        for path in projections[name].paths:
            rows = _shape(model, path)[0]
            new[path.removesuffix(".weight")] = {
                "lora_A": asarray(np.array(a)),
                "lora_B": asarray(np.array(b[start : start + rows])),
                "alpha": float(
                    _of_pattern(about, "alpha_pattern", name)
                    or about.get("lora_alpha", 8)
                ),
                "rank_stabilised": bool(about.get("use_rslora", False)),
                "dropout": float(about.get("lora_dropout") or 0.0),
            }
            start += rows

    def visit(path: str, x: Linear) -> Linear:
        if path not in new:
            return x
        if isinstance(x, LoRALinear):
            raise CheckpointError(
                f"{path} has an adapter already", cure="merge or remove it first"
            )
        return LoRALinear(x.weight, x.bias, **new[path])

    adapted: Transformer = map_modules(model, Linear, visit)
    return adapted


def _check_kind(about: dict[str, Any], source: Path) -> None:
    kind = about.get("peft_type", "LORA")
    if kind != "LORA":
        raise CheckpointError(f"{source} holds a {kind} adapter; only LORA is read")
    for name, plain in _PLAIN.items():
        if about.get(name) not in plain:
            raise CheckpointError(
                f"{source} asks for {name} = {about[name]!r}, which is not implemented"
            )


def _shape(model: Transformer, path: str) -> tuple[int, ...]:
    shape: tuple[int, ...] = model.parameters()[path].shape
    return shape


def _pairs(
    file: SafetensorsFile, model: Transformer, source: Path
) -> dict[str, tuple[str, str]]:
    """Stored projection → names of its A and B, all of them the model's."""
    projections = _projections(model)
    prefix = family_of(model.config.family).names.prefix
    found: dict[str, dict[str, str]] = {}
    wrong: list[str] = []
    for tensor in file.tensors:
        match = re.fullmatch(
            re.escape(_PREFIX) + r"(.*)\.lora_([AB])(?:\.default)?\.weight", tensor
        )
        name = match[1] if match else ""
        if name not in projections and prefix + name in projections:
            name = prefix + name  # an adapter of the base model alone
        if match is None or name not in projections:
            wrong.append(f"{tensor}: the model has no such projection")
        else:
            found.setdefault(name, {})[match[2]] = tensor
    pairs = {}
    for name, parts in found.items():
        if len(parts) != 2:
            wrong.append(f"{name}: A or B is missing")
            continue
        shapes = [_shape(model, p) for p in projections[name].paths]
        a, b = file.shape(parts["A"]), file.shape(parts["B"])
        out, size = sum(s[0] for s in shapes), shapes[0][1]
        if len(a) != 2 or len(b) != 2 or (a[1], *b) != (size, out, a[0]):
            wrong.append(
                f"{name}: A {list(a)}, B {list(b)} for weights [{out}, {size}]"
            )
        pairs[name] = (parts["A"], parts["B"])
    if wrong or not pairs:
        raise CheckpointError(
            f"the adapter in {source} is for another model:\n"
            + "\n".join(wrong[:10] or ["it holds no A and B"]),
            cure=f"give the model it was trained on; this one is {_kind(model)}",
        )
    return pairs


def _kind(model: Transformer) -> str:
    c = model.config
    return f"a {c.family} of {c.num_layers} layers, {c.hidden_size} wide"


def _of_pattern(about: dict[str, Any], key: str, name: str) -> Any:
    """What a pattern says of a projection; peft matches ends of names."""
    for pattern, value in (about.get(key) or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", name):
            return value
    return None


# ------------------------------------------------------------------ writing


def state_dict(model: Any) -> dict[str, Any]:
    """A and B of every adapter under peft's names.

    Works on the gradient of :func:`~shaderdsl.nn.lora.split`'s adapters too. Modules
    that are no whole model get their attribute paths.
    """
    arrays = {
        p: x for p, x in named_arrays(model) if p.endswith((".lora_A", ".lora_B"))
    }
    if not isinstance(model, Transformer):
        return arrays
    named = {}
    for name, entry in _projections(model).items():
        paths = [p.removesuffix(".weight") for p in entry.paths]
        have = [f"{p}.lora_A" in arrays for p in paths]
        if not any(have):
            continue
        parts = [
            (arrays[f"{p}.lora_A"], arrays[f"{p}.lora_B"]) if h else None
            for p, h in zip(paths, have)
        ]
        rows = [
            0 if q is not None else _shape(model, p) for p, q in zip(entry.paths, parts)
        ]
        a, b = parts[0] if len(parts) == 1 else _fused(parts, rows)  # type: ignore[misc]
        named[f"{_PREFIX}{name}.lora_A.weight"] = a
        named[f"{_PREFIX}{name}.lora_B.weight"] = b
    return named


def _fused(parts: list[Any], shapes: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """One A and B for projections end to end: shared where all A are equal."""
    have = [tuple(np.asarray(x) for x in p) for p in parts if p is not None]
    if len(have) == len(parts) and all(np.array_equal(a, have[0][0]) for a, _ in have):
        return have[0][0], np.concatenate([b for _, b in have])
    rank = sum(len(a) for a, _ in have)
    b_rows, at = [], 0
    for p, shape in zip(parts, shapes):
        out = shape[0] if p is None else p[1].shape[0]
        block = np.zeros((out, rank), np.float32)
        if p is not None:
            block[:, at : at + len(p[0])] = np.asarray(p[1])
            at += p[0].shape[0]
        b_rows.append(block)
    return np.concatenate([a for a, _ in have]), np.concatenate(b_rows)


def save(
    model: Transformer, folder: str | os.PathLike[str], *, base: str | None = None
) -> Path:
    """Write the adapters as ``adapter_config.json`` and ``adapter_model.safetensors``.

    Args:
        base: the base model's name or folder, which peft looks it up by.

    Raises:
        CheckpointError: the model has no adapters, or they cannot be stored together.
    """
    tensors = {
        n: np.ascontiguousarray(np.asarray(x)) for n, x in state_dict(model).items()
    }
    layers: dict[str, LoRALinear] = {}

    def visit(path: str, x: LoRALinear) -> LoRALinear:
        layers[f"{path}.weight"] = x
        return x

    map_modules(model, LoRALinear, visit)
    if not layers:
        raise CheckpointError("the model has no adapters", cure="attach some")
    stabilised = {x.rank_stabilised for x in layers.values()}
    dropouts = {x.dropout for x in layers.values()}
    if len(stabilised) > 1 or len(dropouts) > 1:
        raise CheckpointError("adapters of different scaling or dropout in one folder")
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    every = _projections(model)
    for name, entry in every.items():
        if f"{_PREFIX}{name}.lora_A.weight" not in tensors:
            continue
        scales = {layers[p].scale for p in entry.paths if p in layers}
        if len(scales) > 1:
            raise CheckpointError(f"the adapters that {name} holds differ in scale")
        rank = ranks[name] = len(tensors[f"{_PREFIX}{name}.lora_A.weight"])
        single = layers[entry.paths[0]] if len(entry.paths) == 1 else None
        root = rank**0.5 if stabilised == {True} else rank
        alphas[name] = single.alpha if single else scales.pop() * root
    rank = Counter(ranks.values()).most_common(1)[0][0]
    alpha = Counter(alphas.values()).most_common(1)[0][0]
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "lora_dropout": dropouts.pop(),
        "use_rslora": stabilised.pop(),
        "target_modules": _targets(ranks, every),
        "rank_pattern": {re.escape(n): r for n, r in ranks.items() if r != rank},
        "alpha_pattern": {re.escape(n): x for n, x in alphas.items() if x != alpha},
        "fan_in_fan_out": any(every[n].transposed for n in ranks),
        "bias": "none",
        "inference_mode": True,
    }
    text = json.dumps(about, indent=2, sort_keys=True) + "\n"
    return write_folder(Path(folder), tensors, WEIGHTS, text, CONFIG)


def _targets(adapted: dict[str, int], every: dict[str, Entry]) -> list[str]:
    """Ends of names where those say which; otherwise whole names."""

    def end(name: str) -> str:
        return name.rpartition(".")[2]

    ends = {end(n) for n in adapted}
    if all(n in adapted for n in every if end(n) in ends):
        return sorted(ends)
    return sorted(adapted)
