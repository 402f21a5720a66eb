"""Continuing a prompt, one token at a time, with the keys and values kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..array import asarray
from ..errors import IndexRangeError, ShaderError

__all__ = ["generate"]


def generate(
    model: Any,
    ids: Any,
    *,
    max_new_tokens: int = 32,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop: int | Sequence[int] = (),
) -> np.ndarray:
    """The prompt and up to ``max_new_tokens`` tokens that follow it, int32.

    Args:
        ids: ``[t]`` or ``[b, t]``, not empty; the result has the same rank.
        temperature: 0 takes the likeliest token each time, the first of equals.
        top_k: draw from the k likeliest.
        top_p: draw from the likeliest that together make up p; always at least one.
        seed: the same seed draws the same tokens.
        stop: tokens after which a sequence ends; the rest of its row repeats the token.

    Raises:
        ShaderError: an option out of range, an empty prompt.
        IndexRangeError: prompt and new tokens exceed the model's positions.
    """
    from .transformer import check_ids

    if max_new_tokens < 0 or not temperature >= 0:
        raise ShaderError("max_new_tokens and temperature must not be negative")
    if top_k is not None and top_k < 1:
        raise ShaderError(f"top_k is {top_k}; it must be at least 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise ShaderError(f"top_p is {top_p}; it must be in (0, 1]")
    prompt = np.asarray(check_ids(ids))
    rows = prompt.reshape(-1, prompt.shape[-1]).astype(np.int32)
    total = rows.shape[1] + max_new_tokens
    limit = model.config.max_positions
    if total > limit:
        raise IndexRangeError(
            f"{rows.shape[1]} tokens and {max_new_tokens} new ones exceed the model's "
            f"{limit} positions",
            cure="shorten the prompt or ask for fewer tokens",
        )
    generator = np.random.default_rng(seed)
    stops = {stop} if isinstance(stop, int) else set(stop)
    # Capacities come in steps, so that prompts of similar lengths share one plan.
    cache = model.new_cache(
        batch=len(rows), capacity=min(limit, -(-total // 256) * 256)
    )
    new = rows
    ended = np.zeros(len(rows), bool)
    for _ in range(max_new_tokens):
        logits = np.asarray(cache.run(model, asarray(new), last=True))[:, -1]
        drawn = _draw(logits, temperature, top_k, top_p, generator)
        new = np.where(ended, rows[:, -1], drawn).astype(np.int32)[:, None]
        rows = np.concatenate([rows, new], axis=1)
        ended |= np.isin(new[:, 0], list(stops))
        if stops and ended.all():
            break
    return rows if prompt.ndim == 2 else rows[0]


def _draw(
    logits: np.ndarray,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: np.random.Generator,
) -> np.ndarray:
    """A token for each row of logits ``[b, vocab]``."""
    best: np.ndarray = logits.argmax(-1)
    if temperature == 0:
        return best
    order = np.argsort(-logits, axis=-1, kind="stable")
    ranked = np.take_along_axis(logits, order, -1).astype(np.float64) / temperature
    p = np.exp(ranked - ranked[:, :1])
    if top_k is not None:
        p[:, top_k:] = 0
    p /= p.sum(-1, keepdims=True)
    if top_p is not None:
        p[np.cumsum(p, -1) - p >= top_p] = 0
        p /= p.sum(-1, keepdims=True)
    u = generator.random((len(p), 1))
    at = np.minimum((np.cumsum(p, -1) <= u).sum(-1), (p > 0).sum(-1) - 1)
    chosen: np.ndarray = np.take_along_axis(order, at[:, None], -1)[:, 0]
    return chosen
