"""The files of an export: weights in the safetensors format, texts, the module."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import ShaderError
from ..ir.stage import Stage

__all__ = ["Tensor", "initial", "shards", "static", "write"]

#: What `plan.json` says that it is.
FORMAT = "shaderdsl-web"

#: Bytes of one file of weights: a browser keeps each as a whole while it copies it.
SHARD_BYTES = 256 << 20

#: Names of our dtypes in the safetensors format. A bool is a u32 of 0 or 1 on a device.
_SAFETENSORS = {"f32": "F32", "f16": "F16", "i32": "I32", "u32": "U32", "bool": "U32"}


class Tensor(NamedTuple):
    """One entry of a file of weights."""

    name: str
    stage: Stage
    value: np.ndarray


def initial(value: np.ndarray | None) -> str | None:
    """Where a page has an input's first value from: "weights", "zeros" or nowhere."""
    if value is None:
        return None
    # Not -0.0: bytes of zeros are what a new buffer holds.
    return "weights" if value.view(np.uint8).any() else "zeros"


def shards(
    stages: Sequence[Stage], names: Sequence[str], values: Sequence[np.ndarray | None]
) -> dict[str, list[Tensor]]:
    """Files of weights, and what each holds."""
    groups: list[list[Tensor]] = []
    filled = 0
    for stage, name, value in zip(stages, names, values, strict=True):
        if value is None or initial(value) == "zeros":
            continue
        if not groups or filled + value.nbytes > SHARD_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(Tensor(name, stage, value))
        filled += value.nbytes
    if len(groups) == 1:
        return {"weights.safetensors": groups[0]}
    return {f"weights-{k:03}.safetensors": g for k, g in enumerate(groups, 1)}


def _safetensors(tensors: Sequence[Tensor]) -> bytes:
    """The header of a safetensors file; what follows are the tensors' bytes."""
    header: dict[str, Any] = {}
    at = 0
    for name, stage, value in tensors:
        header[name] = {
            "dtype": _SAFETENSORS[stage.dtype],
            "shape": list(stage.shape),
            "data_offsets": [at, at + value.nbytes],
        }
        at += value.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write(
    folder: Path,
    plan: Mapping[str, Any],
    texts: Mapping[str, str],
    weights: Mapping[str, Sequence[Tensor]],
    page: bool,
) -> None:
    """All files; those of an earlier export are replaced, others are left alone."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_older(folder)
        (folder / "kernels").mkdir(exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        for name, tensors in weights.items():
            with open(folder / name, "wb") as file:
                file.write(_safetensors(tensors))
                for _, _, value in tensors:
                    file.write(value.tobytes())
        for name in ("shaderdsl.js", *(("index.html", "style.css") if page else ())):
            (folder / name).write_text(static(name), encoding="utf-8")
        # Last: a folder with a plan is whole.
        (folder / "plan.json").write_text(json.dumps(plan, indent=1))
    except OSError as error:
        raise ShaderError(f"cannot write {folder}: {error}") from error


def _remove_older(folder: Path) -> None:
    """Delete what an earlier export wrote here, and nothing else."""
    path = folder / "plan.json"
    try:
        old = json.loads(path.read_text())
        if old["format"] != FORMAT:
            return
        names = [*old["weights"], *(kernel["file"] for kernel in old["kernels"])]
    except (OSError, ValueError, KeyError, TypeError):
        return
    path.unlink()
    for name in names:
        if re.fullmatch(r"kernels/\w+\.wgsl|weights[-\d]*\.safetensors", name):
            (folder / name).unlink(missing_ok=True)


def static(name: str) -> str:
    """The text of a file that ships with this package."""
    return (files(__package__) / "static" / name).read_text(encoding="utf-8")
