"""Ops on rows that hold several heads side by side, ``[…, t, heads · d]``.

They read what a projection gives and write what the next one takes, so that no array is
ever reshaped or transposed between them.
"""

from __future__ import annotations

import functools
from typing import Any

from .. import namespace as sd
from ..op import Op, op
from ..ops.attention import _positions, _scores, _seen, _weigh

__all__ = [
    "attention",
    "gated_attention",
    "masked_attention",
    "normed",
    "normed_turned",
    "places",
    "turned",
]


def _rms(x: Any, weight: Any, eps: Any, shift: bool) -> Any:
    y = x * sd.rsqrt(sd.mean(x * x, over="d") + eps)
    return y * (1.0 + weight if shift else weight)


def _halved(x: Any, cos: Any, sin: Any) -> Any:
    """Pairs (i, i + p) for i < p; every read is an affine index under a guard."""
    d, p = sd.index("d"), sd.extent("p")
    first, inside = d < p, d < 2 * p
    low = x * cos.at(p=d) - x.at(d=d + p) * sin.at(p=d)
    high = x * cos.at(p=d - p) + x.at(d=d - p) * sin.at(p=d - p)
    return sd.where(first, low, sd.where(inside, high, x))


@op("... t (h z d), ... t p, ... t p -> ... t (h d)", z=1)
def turned(x: Any, cos: Any, sin: Any) -> Any:
    """Rotary positions in the halved layout for the first 2 p elements of each head.

    Args:
        x: [..., t, h · z · d]; of z parts of a head the first one is read.
        cos, sin: [..., t, p]; leading axes may be left out.
    """
    return _halved(x.at(z=0), cos, sin)


@op("... t (h z d), d, ... t p, ... t p -> ... t (h d)", z=1, static=("shift",))
def normed_turned(
    x: Any, weight: Any, cos: Any, sin: Any, *, eps: float = 1e-6, shift: bool = False
) -> Any:
    """RMSNorm of each head, with one weight [d] for all, then :func:`turned`."""
    return _halved(_rms(x.at(z=0), weight, eps, shift), cos, sin)


@op("... (h z d), d -> ... (h d)", z=1, static=("shift",))
def normed(x: Any, weight: Any, *, eps: float = 1e-6, shift: bool = False) -> Any:
    """RMSNorm of each head, with one weight [d] for all."""
    return _rms(x.at(z=0), weight, eps, shift)


@op("... (h z d) -> ... (h d)")
def first_part(x: Any) -> Any:
    """The first of the z parts of each head."""
    return x.at(z=0)


@op("... t (h z i r), ... t p, ... t p -> ... t (h i r)", z=1, r=2)
def turned_interleaved(x: Any, cos: Any, sin: Any) -> Any:
    """:func:`turned` for pairs (2 i, 2 i + 1)."""
    x, i, r = x.at(z=0), sd.index("i"), sd.index("r")
    sign = sd.where(r == 0, -1.0, 1.0)
    y = x * cos.at(p=i) + sign * x.at(r=1 - r) * sin.at(p=i)
    return sd.where(i < sd.extent("p"), y, x)


_ROWS = "... t (h g d), ... s (h d), ... s (h c)"


@op(_ROWS + " -> ... t (h g c)", static=("causal",))
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    start: Any = None,
) -> Any:
    """softmax(scale · q kᵀ + mask) v, as ``shaderdsl.ops.attention``, on rows of heads.

    Args:
        q: [..., t, h · g · d]; query head h · g + i reads key and value head h.
        k, v: [..., s, h · d] and [..., s, h · c].
        start: position of the first query among the keys; s - t by default.
    """
    seen = _seen(causal, window, start)
    return _weigh(_scores(q, k, scale, soft_cap), v, seen)


@op(_ROWS + ", ... t (h g z c) -> ... t (h g c)", static=("causal",), z=2)
def gated_attention(
    q: Any,
    k: Any,
    v: Any,
    gate: Any,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    start: Any = None,
) -> Any:
    """:func:`attention` times sigmoid of the last of a head's z parts."""
    seen = _seen(causal, window, start)
    context = _weigh(_scores(q, k, scale, soft_cap), v, seen)
    return context * sd.sigmoid(gate.at(z=1))


def masked_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    gate: Any = None,
    documents: Any = None,
    others: Any = None,
    first: Any = None,
    slopes: Any = None,
    **options: Any,
) -> Any:
    """:func:`attention`, or the gated one, inside documents and with slopes.

    Args:
        gate: [..., t, h · g · 2 · c], as of :func:`gated_attention`.
        documents: i32 [..., t] of queries, and of keys if there are no ``others``; a
            query sees the keys of its own, and below 0 sees none. A row that sees
            nothing gives zeros, and zero gradients.
        others: i32 [..., s] of keys.
        first: i32 [...]; the keys before it are seen by none.
        slopes: [h · g]: slope · (position - key) is taken off the scaled scores.
    """
    given = [q, k, v]
    if gate is not None:
        given.append(gate)
    if documents is not None:
        given += [documents, documents if others is None else others]
    if first is not None:
        given.append(first)
    if slopes is not None:
        given.append(slopes)
    parts = (x is not None for x in (gate, documents, first, slopes))
    return _masked(*parts)(*given, **options)


@functools.cache
def _masked(gated: bool, documents: bool, padded: bool, alibi: bool) -> Op:
    text = _ROWS + (", ... t (h g z c)" if gated else "")
    text += (", ... t, ... s" if documents else "") + (", ..." if padded else "")
    text += ", (h g)" if alibi else ""

    def masked_attention(
        q: Any,
        k: Any,
        v: Any,
        *more: Any,
        scale: float,
        causal: bool = True,
        window: int | None = None,
        soft_cap: float | None = None,
        start: Any = None,
    ) -> Any:
        rest = list(more)
        gate = rest.pop(0) if gated else None
        mask = None
        if documents:
            own, other = rest.pop(0), rest.pop(0)
            mask = (own == other) & (own >= 0)
        if padded:
            after = sd.index("s") >= rest.pop(0)
            mask = after if mask is None else mask & after
        s = _scores(q, k, scale, soft_cap)
        if alibi:
            s = s - rest.pop(0) * sd.cast(_positions(start) - sd.index("s"), "f32")
        context = _weigh(s, v, _seen(causal, window, start, mask))
        return context if gate is None else context * sd.sigmoid(gate.at(z=1))

    sizes = {"z": 2} if gated else {}
    return Op(masked_attention, text + " -> ... t (h g c)", sizes, ("causal",))


@op("... t, ... s -> ... t")
def places(documents: Any, again: Any) -> Any:
    """How many of its own document stand before each row; give the ids twice."""
    before = (documents == again) & (sd.index("s") < sd.index("t"))
    return sd.sum(sd.cast(before, "i32"), over="s")


@op("b t d, -> b n d")
def row(x: Any, at: Any) -> Any:
    """Row ``at`` of each sequence, as [b, 1, d]."""
    return x.at(t=at + sd.index("n"))
