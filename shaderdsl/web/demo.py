"""A page that trains a small byte-level model and writes text with it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import data, tree
from ..array import asarray
from ..errors import ShaderError
from ..nn.cache import CHUNK, step_function
from ..tracing import spec
from ..trainer import TrainConfig, Trainer
from .export import Exported, export_web
from .files import static

__all__ = ["DemoSite", "export_decode", "export_demo"]

#: What the page trains unless it is told otherwise; seconds a hundred steps on a GPU.
CONFIG = TrainConfig(steps=600, batch=8, length=128, warmup=30)


@dataclass(frozen=True)
class DemoSite:
    """What `export_demo` wrote: two programs that share the model's memory."""

    folder: Path
    train: Exported
    decode: Exported


def export_demo(
    folder: str | os.PathLike[str],
    *,
    config: TrainConfig = CONFIG,
    text: bytes | None = None,
    trainer: Trainer | None = None,
) -> DemoSite:
    """Write a site that trains a model and generates text from it as it learns.

    ``train/`` is one whole training step (forward, backward, clipping, AdamW) with its
    state, ``decode/`` the step of one token against a cache of keys and values. The
    page reads the model where the training writes it.

    Args:
        config: sizes and rates, unless a trainer is given.
        text: what is trained on; by default the documentation that ships inside Python.
        trainer: one that was begun: the page goes on from there.

    Raises:
        LimitError: the model is too large for a browser.
    """
    target = Path(folder)
    if trainer is None:
        trainer = Trainer(config, data.encode(text or data.default_text()))
    config = trainer.config
    rows = spec("i32", config.batch, config.length)
    train = export_web(
        trainer.train_step,
        target / "train",
        trainer.model,
        trainer.state,
        asarray(np.float32(0)),
        rows,
        rows,
        page=False,
    )
    decode = export_decode(trainer.model, target / "decode", weights=False, page=False)
    about = {
        "steps": config.steps,
        "step": trainer.step,
        "batch": config.batch,
        "length": config.length,
        "positions": trainer.model.config.max_positions,
        "parameters": trainer.parameters,
        "model": [name for name in decode.inputs if name.startswith("model.")],
    }
    try:
        (target / "demo.json").write_text(json.dumps(about))
        (target / "text.txt").write_bytes(trainer.train_text.tobytes())
        (target / "index.html").write_text(static("demo.html"), encoding="utf-8")
        for name in ("demo.js", "shaderdsl.js", "style.css"):
            (target / name).write_text(static(name), encoding="utf-8")
    except OSError as error:
        raise ShaderError(f"cannot write {target}: {error}") from error
    return DemoSite(target, train, decode)


def export_decode(
    model: Any,
    folder: str | os.PathLike[str],
    *,
    positions: int | None = None,
    weights: bool = True,
    page: bool = True,
) -> Exported:
    """Write the step that generates text: one token against a cache of those before.

    The page gives ``ids`` (one token) and ``start`` (its position), and reads the
    logits of the next one, ``"0"``; the cache is state.

    Args:
        positions: room in the cache; by default all that the model has.
        weights: whether the folder gets them; without, the page shares those of
            another program.
        page: whether to write ``index.html``.

    Raises:
        LimitError: the model, or its cache, is too large for a browser.
    """
    config = model.config
    rows = (positions or config.max_positions) + CHUNK
    width = config.num_kv_heads * config.head_dim
    empty = tuple(
        asarray(np.zeros((1, rows, width), np.float32))
        for _ in range(config.num_layers)
    )
    shapes = tree.map(lambda x: spec(x.dtype, *x.shape), model)
    return export_web(
        step_function,
        folder,
        model if weights else shapes,
        empty,
        empty,
        spec("i32", 1),
        spec("i32"),
        None,
        page=page,
    )
