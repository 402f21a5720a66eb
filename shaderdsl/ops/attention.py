"""Scaled dot-product attention as the plain expression; the compiler chooses what runs.

Query head ``h·group + g`` reads key and value head ``h``. Query i stands at position
``start + i``; without ``start`` the last query stands at the last key, so that a causal
mask is aligned at the bottom right. A row whose every key is masked gives zeros, and
zero gradients.

Source: Vaswani et al., "Attention is all you need" (2017); Ainslie et al., "GQA"
(2023).
"""

from __future__ import annotations

import inspect
from typing import Any

from .. import namespace as sd
from ..array import Array, asarray
from ..op import Op, op
from .hooks import check_heads, check_hooks, check_numbers, hooked

_HEADS = "... (h g) t d, ... h s d, ... h s c"


def _positions(start: Any) -> Any:
    """The position of each query among the keys."""
    if start is None:
        start = sd.extent("s") - sd.extent("t")
    return sd.index("t") + start


def _scores(q: Any, k: Any, scale: Any, softcap: Any) -> Any:
    """scale · q kᵀ, and cap · tanh(score / cap) where there is a cap."""
    if scale is None:
        scale = sd.rsqrt(sd.cast(sd.extent("d"), "f32"))
    s = sd.sum(q * k, over="d") * scale
    return s if softcap is None else softcap * sd.tanh(s / softcap)


def _seen(causal: bool, window: Any, start: Any, mask: Any = None) -> Any:
    """Which keys a query sees, or None for all."""
    position, key = _positions(start), sd.index("s")
    if causal:
        mask = key <= position if mask is None else mask & (key <= position)
    if window is not None:
        near = key > position - window
        mask = near if mask is None else mask & near
    return mask


def _weigh(s: Any, v: Any, seen: Any) -> Any:
    return sd.sum(sd.softmax(s, over="s", where=seen) * v, over="s")


class Attention(Op):
    """The plain op, and variants of it with hooks, captured arrays, starts, lengths."""

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        causal: bool = True,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        start: Any = None,
        lengths: Any = None,
        score: Any = None,
        mask: Any = None,
        captured: Any = None,
        return_lse: bool = False,
        **sizes: int,
    ) -> Any:
        q, k, v = asarray(q), asarray(k), asarray(v)
        check_heads(q, k, v)
        check_numbers(window, softcap, start, lengths, k)
        check_hooks(score, mask, captured)
        options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
        arrays = [x for x in (start, lengths) if isinstance(x, Array) or _many(x)]
        if not (arrays or score or mask or captured) and lengths is None:
            options |= {"causal": causal, "start": start}
            if return_lse:
                return attention_lse(q, k, v, **options, **sizes)
            return super().__call__(q, k, v, **options, **sizes)
        given, variant = hooked(
            causal, start, lengths, score, mask, dict(captured or {}), return_lse, q
        )
        return variant(q, k, v, *given, **options, **sizes)


def _many(x: Any) -> bool:
    return getattr(x, "ndim", 0) > 0 or isinstance(x, (list, tuple))


def _attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    start: int | None = None,
) -> Any:
    """softmax(scale · q kᵀ + mask) v

    ``i`` and ``j`` are positions of a query (``start`` counted in) and of a key, ``b``
    and ``h`` count batches and query heads.

    Args:
        q: [..., query heads, t, d].
        k: [..., kv heads, s, d]; kv heads divide query heads.
        v: [..., kv heads, s, c].
        scale: 1/√d by default.
        causal: query at position i sees keys j ≤ i; True by default.
        window: and j > i - window: ``window`` keys, its own among them.
        softcap: scores become cap · tanh(score / cap) before the mask.
        start: position of the first query, a number or one a batch; s - t by default,
            so that the last query stands at the last key.
        lengths: so many keys are there, a number or one a batch.
        score: ``score(x, b, h, i, j, **captured)`` gives a new score.
        mask: ``mask(b, h, i, j, **captured)`` says who sees whom.
        captured: arrays that the hooks index with brackets, ``bias[h, i - j + 16]``;
            each hook gets those that its signature names.
        return_lse: also log Σ exp of each row's scores.

    Raises:
        ShapeError: heads do not divide, shapes disagree, a window below 1, a start
            that is no position of a key, a cap that is not above 0.
        IndexRangeError: a hook's index can leave a captured array.
        DTypeError: a hook gives no score, or no truth value; positions that are no
            integers.
        TraceError: a hook that is no function of these arguments.
    """
    return _weigh(_scores(q, k, scale, softcap), v, _seen(causal, window, start))


_attention.__name__ = "attention"
attention = Attention(_attention, _HEADS + " -> ... (h g) t c", {}, ("causal",))
# What help and editors show: the hooks too, which the expression does not take.
vars(attention)["__signature__"] = inspect.signature(attention.__call__)


@op(_HEADS + " -> ... (h g) t c, ... (h g) t", static=("causal",))
def attention_lse(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    start: int | None = None,
) -> tuple[Any, Any]:
    """:func:`attention`, and log Σ exp of each row's scores (-inf for a masked row)."""
    s, seen = _scores(q, k, scale, softcap), _seen(causal, window, start)
    return _weigh(s, v, seen), sd.logsumexp(s, over="s", where=seen)


@op(_HEADS + ", (h g) -> ... (h g) t c", static=("causal",))
def attention_alibi(
    q: Any,
    k: Any,
    v: Any,
    slopes: Any,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    start: int | None = None,
) -> Any:
    """:func:`attention` with -slope · (position - key) added to the scaled scores.

    Args:
        slopes: [query heads].

    Source: Press, Smith and Lewis, "Train short, test long" (2021).
    """
    behind = sd.cast(_positions(start) - sd.index("s"), "f32")
    s = _scores(q, k, scale, None) - slopes * behind
    return _weigh(s, v, _seen(causal, window, start))


@op(_HEADS + ", ... (h g) t c -> ... (h g) t c", static=("causal",))
def attention_gated(
    q: Any,
    k: Any,
    v: Any,
    gate: Any,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    start: int | None = None,
) -> Any:
    """:func:`attention` times sigmoid(gate).

    Args:
        gate: [..., query heads, t, c].
    """
    seen = _seen(causal, window, start)
    return _weigh(_scores(q, k, scale, None), v, seen) * sd.sigmoid(gate)


@op(_HEADS + ", ... t s -> ... (h g) t c", static=("causal",))
def attention_masked(
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    start: int | None = None,
) -> Any:
    """:func:`attention` to the keys that a mask shows: padding, documents.

    Args:
        mask: bool [..., t, s], true where the query sees the key.
    """
    seen = _seen(causal, window, start, mask)
    return _weigh(_scores(q, k, scale, softcap), v, seen)


def alibi_slopes(heads: int) -> list[float]:
    """The published slopes: 2^(-8i/n) for a power of two n, interleaved otherwise."""

    def powers(n: int) -> list[float]:
        return [2.0 ** (-8.0 * i / n) for i in range(1, n + 1)]

    n = 1 << (heads.bit_length() - 1)
    return powers(n) + powers(2 * n)[0::2][: heads - n]
