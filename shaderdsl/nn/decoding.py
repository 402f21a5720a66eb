"""Continuing prompts, one token at a time, with the keys and values kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ..array import Array, asarray
from ..errors import IndexRangeError, ShaderError, ShapeError
from ..ids import trusted
from ..ir import expr as E
from .cache import KVCache
from .sampling import Sampler

__all__ = ["generate", "stream"]

#: Capacities are powers of two from this one on, so that most prompts share a plan.
_LEAST = 256


def generate(
    model: Any,
    ids: Any,
    *,
    max_new_tokens: int = 32,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int | Sequence[int] = 0,
    stop: int | Sequence[int] = (),
    on_token: Callable[[list[int | None]], None] | None = None,
    cache: KVCache | None = None,
) -> Any:
    """The prompt and up to ``max_new_tokens`` tokens that follow it, int32.

    Tokens are drawn on the device, and read once a step. Ids ``[t]`` give ``[t + n]``.
    Ids ``[b, t]`` give ``[b, t + n]``; the row of a sequence that ended before others
    repeats its last token. A list of sequences of any lengths gives a list of arrays,
    each up to its end, and each what its prompt gives alone.

    Where logits tie, temperature 0 takes the lowest id. Tokens whose logits tie at the
    border of top-k or top-p are kept or dropped together: they are kept, so that more
    than k may be left, or more than p needs.

    Args:
        temperature: 0 takes the likeliest token each time; else logits are divided by
            it and a token is drawn from what the next three leave.
        top_k: tokens whose logit is at least the k-th greatest.
        top_p: of these, the likeliest whose probabilities together reach p.
        min_p: tokens with at least min_p times the greatest probability.
        repetition_penalty: divides the logits, or multiplies those below 0, of tokens
            that occur in the prompt or were drawn; first of all.
        seed: the same seed draws the same tokens on every device. Row r of a batch
            draws as a single prompt does with seed + r · 2³²; or one seed a sequence.
        stop: tokens after which a sequence ends.
        on_token: is told the new token of each sequence at once, None for those that
            have ended.
        cache: holds what came before these ids, and afterwards all but the last
            token; one without room is refused. By default a new one that is large
            enough. A cache that was begun takes sequences of one length.

    Raises:
        ShaderError: an option out of range, logits that are not numbers.
        ShapeError: an empty prompt.
        IndexRangeError: prompt and new tokens exceed the model's positions, or the
            cache; before anything is computed.
    """
    rows, kind = _rows(ids)
    made: list[list[int]] = [[] for _ in rows]
    for tokens in stream(
        model,
        ids,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop,
        cache=cache,
    ):
        for row, token in zip(made, tokens, strict=True):
            if token is not None:
                row.append(token)
        if on_token is not None:
            on_token(tokens)
    if kind == 2:
        longest = max(map(len, made))
        made = [row + row[-1:] * (longest - len(row)) for row in made]
    whole = [np.concatenate([a, b]).astype(np.int32) for a, b in zip(rows, made)]
    if kind == 1:
        return whole[0]
    return np.stack(whole) if kind == 2 else whole


def stream(
    model: Any,
    ids: Any,
    *,
    max_new_tokens: int = 32,
    seed: int | Sequence[int] = 0,
    stop: int | Sequence[int] = (),
    cache: KVCache | None = None,
    **options: Any,
) -> Iterator[list[int | None]]:
    """The tokens of :func:`generate` as they come: each time one for each sequence.

    None stands for sequences that have ended. Options and errors as there; errors are
    raised at once, not at the first token.
    """
    rows, _ = _rows(ids)
    stops = _stops(stop)
    if max_new_tokens < 0:
        raise ShaderError(f"max_new_tokens is {max_new_tokens}")
    length = max(map(len, rows))
    padding = [length - len(r) for r in rows]
    total = length + max_new_tokens
    limit = model.config.max_positions
    if total + (cache.length if cache is not None else 0) > limit:
        raise IndexRangeError(
            f"{length} tokens and {max_new_tokens} new ones exceed the model's "
            f"{limit} positions",
            where=E.user_location(),
            cure="shorten the prompt or ask for fewer tokens",
        )
    vocabulary = model.config.vocab_size
    for r in rows:
        if r.min() < 0 or r.max() >= vocabulary:
            raise IndexRangeError(
                f"ids run from {r.min()} to {r.max()}, the model has {vocabulary}",
                where=E.user_location(),
            )
    if cache is None:
        cache = model.new_cache(len(rows), capacity_for(total, limit))
    elif cache.batch != len(rows):
        raise ShapeError(f"a cache for {cache.batch} sequences, {len(rows)} prompts")
    cache.check_room(model, total - 1 if max_new_tokens else length)
    sampler = Sampler(rows, vocabulary, seed, **options)
    prompt = np.stack([np.pad(r, (n, 0), mode="edge") for r, n in zip(rows, padding)])
    return _steps(model, cache, prompt, padding, sampler, stops, max_new_tokens)


def _steps(
    model: Any,
    cache: KVCache,
    prompt: np.ndarray,
    padding: list[int],
    sampler: Sampler,
    stops: set[int],
    count: int,
) -> Iterator[list[int | None]]:
    batch = len(prompt)
    ended = np.zeros(batch, bool)
    logits = cache.run(
        model, prompt, last=True, padding=padding if any(padding) else None
    )

    def draw(logits: Array) -> Array:
        tokens: Array = sampler(logits, asarray(np.int32(cache.length)), cache.first)
        return tokens

    tokens = draw(logits.reshape(batch, logits.shape[-1])) if count else None
    for left in reversed(range(count)):
        assert tokens is not None
        # Read before the next one is launched, so that only this one is waited for.
        read = tokens.fetch()
        if left:
            with trusted():  # those out of range are told of below
                if sampler.plain:
                    tokens = cache.follow(model, tokens)
                else:
                    tokens = draw(cache.step(model, tokens))
        host = read()
        if (host[~ended] < 0).any():
            raise ShaderError(
                "the model's logits are not numbers",
                cure="look at its weights: a NaN or an infinity is among them",
            )
        yield [None if e else int(t) for e, t in zip(ended, host, strict=True)]
        ended |= np.isin(host, list(stops))
        if stops and ended.all():
            return


def capacity_for(total: int, limit: int) -> int:
    """The capacity of a cache for so many positions: a power of two, or the limit."""
    return min(limit, max(_LEAST, 1 << (total - 1).bit_length()))


def _rows(ids: Any) -> tuple[list[np.ndarray], int]:
    """Each sequence, and the rank of the result; 0 for a list."""
    from .inputs import check_ids

    several = isinstance(ids, (list, tuple)) and any(np.ndim(x) for x in ids)
    if any(np.size(x) == 0 for x in (ids if several else [ids])):
        raise ShapeError(
            "an empty prompt",
            where=E.user_location(),
            cure="begin with at least one token",
        )
    if several:
        rows = [np.asarray(check_ids(x)) for x in ids]
        if any(r.ndim != 1 for r in rows):
            raise ShapeError("sequences in a list have one axis each")
        return [r.astype(np.int32) for r in rows], 0
    a = np.asarray(check_ids(ids)).astype(np.int32)
    return list(a.reshape(-1, a.shape[-1])), a.ndim


def _stops(stop: Any) -> set[int]:
    return {int(stop)} if np.ndim(stop) == 0 else {int(s) for s in stop}
