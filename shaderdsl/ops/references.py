"""The ops once more in plain NumPy, written apart from them: what tests compare with.

Every function computes in the float type that it is given; tests give float64.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

_erf = np.vectorize(math.erf, otypes=[np.float64])


def sigmoid(x: Any) -> Any:
    """1 / (1 + e⁻ˣ)"""
    return np.exp(-np.logaddexp(0, -x))


def silu(x: Any) -> Any:
    """x · sigmoid(x)"""
    return x * sigmoid(x)


def gelu(x: Any, approximate: str = "none") -> Any:
    """x · Φ(x), by erf or by tanh"""
    if approximate == "tanh":
        return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return x / 2 * (1 + _erf(x / np.sqrt(2))) if np.size(x) else x


def softplus(x: Any) -> Any:
    """log(1 + eˣ)"""
    return np.logaddexp(0, x)


def swiglu(gate: Any, up: Any) -> Any:
    """silu(gate) · up"""
    return silu(gate) * up


def geglu(gate: Any, up: Any, approximate: str = "none") -> Any:
    """gelu(gate) · up"""
    return gelu(gate, approximate) * up


def rms_norm(x: Any, weight: Any, eps: float = 1e-6) -> Any:
    """x / √(mean(x²) + eps) · weight"""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rms_norm_shifted(x: Any, weight: Any, eps: float = 1e-6) -> Any:
    """x / √(mean(x²) + eps) · (1 + weight)"""
    return rms_norm(x, 1 + weight, eps)


def layer_norm(x: Any, weight: Any, bias: Any, eps: float = 1e-5) -> Any:
    """(x - mean(x)) / √(var(x) + eps) · weight + bias"""
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt(x.var(-1, keepdims=True) + eps) * weight + bias


def softmax(x: Any) -> Any:
    """eˣ / Σ eˣ; zeros where every entry is -inf"""
    m = x.max(-1, keepdims=True)
    e = np.exp(x - np.where(np.isinf(m), 0, m))
    total = e.sum(-1, keepdims=True)
    return e / np.where(total == 0, 1, total)


def log_softmax(x: Any) -> Any:
    """x - log Σ eˣ"""
    m = x.max(-1, keepdims=True)
    return x - m - np.log(np.exp(x - m).sum(-1, keepdims=True))


def linear(x: Any, weight: Any, bias: Any = 0.0) -> Any:
    """x Wᵀ + b"""
    return x @ weight.T + bias


def rope_halved(x: Any, cos: Any, sin: Any) -> Any:
    """Pairs (i, i + d/2) turned"""
    a, b = np.split(x, 2, axis=-1)
    c, s = cos[..., :, None, :], sin[..., :, None, :]
    return np.concatenate([a * c - b * s, b * c + a * s], -1)


def rope_interleaved(x: Any, cos: Any, sin: Any) -> Any:
    """Pairs (2i, 2i + 1) turned"""
    a, b = x[..., 0::2], x[..., 1::2]
    c, s = cos[..., :, None, :], sin[..., :, None, :]
    return np.stack([a * c - b * s, b * c + a * s], -1).reshape(x.shape)


def embedding(table: Any, ids: Any) -> Any:
    """table[ids]"""
    return table[ids]


def cross_entropy_rows(logits: Any, labels: Any, ignore_index: int = -100) -> Any:
    """-log softmax(x)[label], 0 for ignored labels"""
    counted = labels != ignore_index
    at = np.where(counted, labels, 0)[..., None].astype(np.int64)
    m = logits.max(-1, keepdims=True)
    lse = (np.log(np.exp(logits - m).sum(-1, keepdims=True)) + m)[..., 0]
    return np.where(counted, lse - np.take_along_axis(logits, at, -1)[..., 0], 0.0)


def linear_cross_entropy_rows(
    x: Any,
    weight: Any,
    labels: Any,
    ignore_index: int = -100,
    softcap: float | None = None,
) -> Any:
    """Cross entropy of x Wᵀ, capped"""
    logits = linear(x, weight)
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)
    return cross_entropy_rows(logits, labels, ignore_index)


def attention_lse(
    q: Any,
    k: Any,
    v: Any,
    bias: Any = 0.0,
    mask: Any = True,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    start: int | None = None,
) -> tuple[Any, Any]:
    """Attention one query head at a time, and its log-sum-exp"""
    t, s = q.shape[-2], k.shape[-2]
    group = q.shape[-3] // max(k.shape[-3], 1)
    scores = q @ np.repeat(k, group, -3).swapaxes(-1, -2)
    scores = scores * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    i = np.arange(t)[:, None] + (s - t if start is None else start)
    j = np.arange(s)[None, :]
    seen = np.broadcast_to(mask, scores.shape)
    if causal:
        seen = seen & (j <= i)
    if window is not None:
        seen = seen & (j > i - window)
    scores = np.where(seen, scores + bias, -np.inf)
    y = softmax(scores) @ np.repeat(v, group, -3)
    m = scores.max(-1, keepdims=True)
    m = np.where(np.isinf(m), 0, m)
    with np.errstate(divide="ignore"):
        lse = np.log(np.exp(scores - m).sum(-1)) + m[..., 0]
    return y, lse


def attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """softmax(scale · q kᵀ + mask) v"""
    return attention_lse(q, k, v, **options)[0]


def attention_alibi(q: Any, k: Any, v: Any, slopes: Any, **options: Any) -> Any:
    """-slope · (position - key) added to the scores"""
    t, s = q.shape[-2], k.shape[-2]
    start = options.get("start")
    i = np.arange(t)[:, None] + (s - t if start is None else start)
    bias = -slopes[:, None, None] * (i - np.arange(s)[None, :])
    return attention_lse(q, k, v, bias=bias, **options)[0]


def attention_gated(q: Any, k: Any, v: Any, gate: Any, **options: Any) -> Any:
    """Attention times sigmoid(gate)"""
    return attention_lse(q, k, v, **options)[0] * sigmoid(gate)


def attention_masked(q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
    """Attention to the keys that the mask shows"""
    options.setdefault("causal", False)
    return attention_lse(q, k, v, mask=mask[..., None, :, :], **options)[0]


def adamw_update(
    p: Any,
    g: Any,
    m: Any,
    v: Any,
    lr: Any,
    correction1: Any,
    correction2: Any,
    clip: Any,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> tuple[Any, Any, Any]:
    """One step of AdamW, decay first"""
    g = g * clip
    m = m + (1 - beta1) * (g - m)
    v = v + (1 - beta2) * (g**2 - v)
    p = p * (1 - lr * weight_decay)
    return p - lr * (m / correction1) / (np.sqrt(v / correction2) + eps), m, v


def sgd_update(
    p: Any,
    g: Any,
    m: Any,
    lr: Any,
    clip: Any,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> tuple[Any, Any]:
    """One step of gradient descent with momentum"""
    m = m * momentum + (g * clip + weight_decay * p)
    return p - lr * m, m
