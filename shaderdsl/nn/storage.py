"""Models on disk, in Hugging Face's layout: ``config.json`` and ``*.safetensors``."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ..array import Array, asarray
from ..dtypes import NUMPY, dtype_name
from ..errors import CheckpointError, ShaderError
from ..ir import expr as E
from ..namespace import concatenate
from .families import family_of, read_config
from .module import map_modules, named_arrays
from .names import Entry, Names, entries
from .safetensors import SafetensorsFile
from .transformer import Transformer, build

__all__ = ["load", "save", "state_dict"]

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
#: rows of a table of wrong names before it is cut
_SHOWN = 20


def state_dict(model: Any) -> dict[str, Any]:
    """Every parameter under its name in Hugging Face's files.

    Works on gradients and on anything else of a model's structure. Modules that are no
    whole model get their attribute paths. Tensors that are stored transposed or fused
    (GPT-2) come that way.
    """
    arrays = dict(named_arrays(model))
    if not isinstance(model, Transformer):
        return arrays
    adapters = (".lora_A", ".lora_B", ".key")  # of sd.nn.lora, which has its own names
    arrays = {p: x for p, x in arrays.items() if not p.endswith(adapters)}
    named = {}
    for entry in entries(family_of(model.config.family).names, arrays):
        parts = [arrays[p] for p in entry.paths]
        if all(p is None for p in parts):
            continue  # no gradient
        x = parts[0] if len(parts) == 1 else concatenate(parts, axis=0)
        named[entry.name] = x.T if entry.transposed else x
    return named


# ------------------------------------------------------------------ saving


def save(model: Transformer, folder: str | os.PathLike[str]) -> Path:
    """Write a model as ``folder/config.json`` and ``folder/model.safetensors``.

    A new folder appears whole or not at all. In one that exists each file is replaced
    in one step, the weights first.

    Raises:
        CheckpointError: no ``Transformer``, or one whose family cannot store what its
            configuration says.
    """
    from .lora.layer import LoRALinear

    if not isinstance(model, Transformer):
        raise CheckpointError(
            f"sd.nn.save writes a Transformer, not a {type(model).__name__}",
            where=E.user_location(),
            cure="parameters of other modules: np.savez(file, **model.parameters()), "
            "then model.with_parameters(np.load(file))",
        )

    def visit(path: str, x: LoRALinear) -> LoRALinear:
        if not x.merged:
            raise CheckpointError(
                f"{path} has an adapter that is not merged",
                cure="sd.nn.lora.merge the model first, or save with sd.nn.lora.save",
            )
        return x

    map_modules(model, LoRALinear, visit)
    target = Path(folder)
    text = json.dumps(_config_json(model), indent=2, sort_keys=True) + "\n"
    tensors = {
        name: np.ascontiguousarray(np.asarray(x))
        for name, x in state_dict(model).items()
    }
    write_folder(target, tensors, WEIGHTS, text, CONFIG)
    (target / INDEX).unlink(missing_ok=True)  # of shards that were there
    return target


def write_folder(
    target: Path, tensors: dict[str, np.ndarray], weights: str, text: str, config: str
) -> Path:
    """A folder of tensors and settings, which appears whole or not at all."""
    try:
        from safetensors import SafetensorError
        from safetensors.numpy import save_file
    except ImportError as error:
        raise ShaderError(
            "saving needs the package safetensors, which is not installed",
            cure="pip install 'shaderdsl[nn]'",
        ) from error
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.parent / f".{target.name}.{os.getpid()}.tmp"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir()
        save_file(tensors, aside / weights, metadata={"format": "pt"})
        (aside / config).write_text(text)
        for name in (weights, config):
            sync(aside / name)
        sync(aside)
        if target.is_dir():
            for name in (weights, config):
                os.replace(aside / name, target / name)
            aside.rmdir()
        else:
            os.rename(aside, target)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot write {target}: {error}",
            cure="see to the room on the disk; what was there is as it was",
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    sync(target)
    sync(target.parent)
    return target


def _config_json(model: Transformer) -> dict[str, Any]:
    config = model.config
    family = family_of(config.family)
    dtypes = {x.dtype for x in model.parameters().values()}
    about = {
        "architectures": [family.architectures[0]],
        "model_type": family.model_type,
        **family.write(config),
        "dtype": "float16" if dtypes == {"f16"} else "float32",
    }
    again = read_config(about, "the configuration")
    for f in dataclasses.fields(config):
        mine, read = getattr(config, f.name), getattr(again, f.name)
        if mine != read:
            raise CheckpointError(
                f"the family {family.name!r} cannot store {f.name} = {mine!r}; it "
                f"would be read as {read!r}",
                cure="give the configuration another family",
            )
    return about


def sync(path: Path) -> None:
    """Wait until a file, or what a folder names, lies on the disk."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:  # not every system opens folders
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


# ------------------------------------------------------------------ loading


def load(folder: str | os.PathLike[str], *, dtype: str = "f32") -> Transformer:
    """Read a model from a Hugging Face folder.

    Weights in f32, f16 or bf16 become ``dtype``, a parameter at a time; files are
    mapped and not read whole. Several shards are found by their index.

    Raises:
        CheckpointError: no such folder, files that are cut off or no checkpoints, an
            architecture that is not there (said before any weight is read), or names
            that are missing, unexpected or of another shape, in one table.
    """
    source = Path(folder)
    config = read_config(read_json(source / CONFIG), str(source / CONFIG))
    names = family_of(config.family).names
    shapes: dict[str, tuple[int, ...]] = {}

    def note(path: str, shape: tuple[int, ...], role: str) -> Any:
        shapes[path] = shape
        return _Shaped(shape)

    build(config, note)
    wanted = entries(names, shapes)
    stored = _stored(source, names)
    _compare(source, wanted, shapes, stored, names, tied=config.tied_head)
    kind = NUMPY[dtype_name(dtype)]
    place = {p: (e, k) for e in wanted for k, p in enumerate(e.paths)}

    def make(path: str, shape: tuple[int, ...], role: str) -> Array:
        entry, part = place[path]
        file, name = stored[entry.name]
        x = file.read(name)
        if entry.transposed:
            x = x.T
        if len(entry.paths) > 1:
            start = sum(shapes[p][0] for p in entry.paths[:part])
            x = x[start : start + shape[0]]
        return asarray(np.ascontiguousarray(x, kind))

    return build(config, make)


class _Shaped:
    """Stands for an array while a model is only measured."""

    def __init__(self, shape: tuple[int, ...]):
        self.shape = shape


def read_json(path: Path) -> dict[str, Any]:
    """The settings in a JSON file."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path}: {error}", cure="give a folder that holds a model"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no settings")
    return value


def _files(folder: Path) -> list[SafetensorsFile]:
    index = folder / INDEX
    if (folder / WEIGHTS).is_file():
        return [SafetensorsFile(folder / WEIGHTS)]
    if not index.is_file():
        raise CheckpointError(
            f"{folder} holds neither {WEIGHTS} nor {INDEX}",
            cure="weights are read from safetensors files only",
        )
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not all(
        isinstance(v, str) for v in table.values()
    ):
        raise CheckpointError(f"{index} has no weight_map")
    shards = sorted(set(table.values()))
    gone = [s for s in shards if Path(s).name != s or not (folder / s).is_file()]
    if gone:
        raise CheckpointError(
            f"{folder} lacks {gone[0]} ({len(gone)} of {len(shards)} shards are gone)",
            cure="fetch the missing files",
        )
    files = {s: SafetensorsFile(folder / s) for s in shards}
    for name, shard in table.items():
        if name not in files[shard].tensors:
            raise CheckpointError(
                f"{folder / shard} lacks {name}, which {INDEX} promises"
            )
    return list(files.values())


def _stored(folder: Path, names: Names) -> dict[str, tuple[SafetensorsFile, str]]:
    """Full name → its file and its name there."""
    found = {}
    files = _files(folder)
    everything = [n for f in files for n in f.tensors]
    # Base models are saved without the first part of their names.
    bare = bool(everything) and not any(n.startswith(names.prefix) for n in everything)
    for file in files:
        for name in file.tensors:
            full = name
            if bare and not name.startswith("lm_head."):
                full = names.prefix + name
            found[full] = (file, name)
    return found


def _compare(
    folder: Path,
    wanted: Iterable[Entry],
    shapes: dict[str, tuple[int, ...]],
    stored: dict[str, tuple[SafetensorsFile, str]],
    names: Names,
    tied: bool,
) -> None:
    """Refuse files that do not hold this model, with one table of what is wrong."""
    rows: list[tuple[str, str, str, str]] = []
    expected = {}
    for e in wanted:
        parts = [shapes[p] for p in e.paths]
        shape = (sum(p[0] for p in parts), *parts[0][1:])
        expected[e.name] = shape[::-1] if e.transposed else shape
    for name, shape in expected.items():
        if name not in stored:
            rows.append(("missing", name, str(list(shape)), "-"))
            continue
        file, own = stored[name]
        if file.shape(own) != shape:
            rows.append(("shape", name, str(list(shape)), str(list(file.shape(own)))))
        elif file.tensors[own]["dtype"] not in ("F64", "F32", "F16", "BF16"):
            rows.append(("dtype", name, "f32, f16, bf16", file.tensors[own]["dtype"]))
    for name, (file, own) in stored.items():
        if name in expected or re.fullmatch(names.ignored, name):
            continue
        if tied and name == "lm_head.weight":
            continue  # a copy of the embedding
        rows.append(("unexpected", name, "-", str(list(file.shape(own)))))
    if not rows:
        return
    head = ("", "tensor", "the model", "the file")
    shown = [head, *sorted(rows)[:_SHOWN]]
    widths = [max(len(r[k]) for r in shown) for k in range(4)]
    lines = [
        "  ".join(cell.ljust(w) for cell, w in zip(r, widths)).rstrip() for r in shown
    ]
    if len(rows) > _SHOWN:
        lines.append(f"… and {len(rows) - _SHOWN} more")
    raise CheckpointError(
        f"the weights in {folder} are not those of its {CONFIG}:\n" + "\n".join(lines)
    )
