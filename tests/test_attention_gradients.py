"""Gradients of grouped attention against float64: ratios of heads, lengths, both sides.

dk and dv add up over every query that sees the key and every head of the group.
"""

from __future__ import annotations

import numpy as np
import pytest

import shaderdsl as sd
from shaderdsl import ops
from shaderdsl.nn import heads

D = 4
LENGTHS = (1, 3, 5, 63, 64, 65)


def reference(q, k, v, dy, scale, window=None):
    """Output and the three gradients of [heads, t, d] and [kv heads, s, d], float64."""
    q, k, v, dy = (x.astype(np.float64) for x in (q, k, v, dy))
    t, s = q.shape[1], k.shape[1]
    place = np.arange(t)[:, None] + s - t
    seen = np.arange(s) <= place
    if window is not None:
        seen &= np.arange(s) > place - window
    y, dq, dk, dv = (np.zeros_like(x) for x in (dy, q, k, v))
    for h in range(len(q)):
        j = h // (len(q) // len(k))
        x = np.where(seen, q[h] @ k[j].T * scale, -np.inf)
        p = np.exp(x - x.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        y[h] = p @ v[j]
        dp = dy[h] @ v[j].T
        dx = p * (dp - (dp * p).sum(-1, keepdims=True)) * scale
        dq[h] = dx @ k[j]
        dk[j] += dx.T @ q[h]
        dv[j] += p.T @ dy[h]
    return y, dq, dk, dv


def inputs(ratio, t, s, kv_heads=2):
    generator = np.random.default_rng([ratio, t, s])
    shapes = [
        (kv_heads * ratio, t),
        (kv_heads, s),
        (kv_heads, s),
        (kv_heads * ratio, t),
    ]
    return [generator.standard_normal((*n, D)).astype(np.float32) for n in shapes]


def check(have, want):
    for name, a, b in zip(("y", "dq", "dk", "dv"), have, want):
        error = np.abs(np.asarray(a) - b).max()
        assert error <= 5e-6 * max(1.0, np.abs(b).max()), name


def rows(x):
    """[heads, t, d] as [t, heads · d]."""
    return x.transpose(1, 0, 2).reshape(x.shape[1], -1)


def of_rows(x):
    x = np.asarray(x)
    return x.reshape(len(x), -1, D).transpose(1, 0, 2)


@pytest.mark.parametrize("length", LENGTHS)
def test_ratios_and_lengths(device, length):
    """As layers call it, on rows of heads."""
    for ratio in (1, 2, 3, 4, 8):
        q, k, v, dy = inputs(ratio, length, length)

        def f(q, k, v, ratio=ratio):
            return heads.attention(q, k, v, h=2, g=ratio, scale=D**-0.5)

        y, pullback = sd.vjp(f, rows(q), rows(k), rows(v))
        have = [of_rows(x) for x in (y, *pullback(rows(dy)))]
        check(have, reference(q, k, v, dy, D**-0.5))


@pytest.mark.parametrize(("t", "s"), [(1, 64), (3, 65), (5, 63), (63, 65), (2, 3)])
def test_queries_that_are_fewer_than_keys(device, t, s):
    for ratio, window in ((1, None), (3, None), (4, 7)):
        q, k, v, dy = inputs(ratio, t, s)
        y, pullback = sd.vjp(lambda *x, w=window: ops.attention(*x, window=w), q, k, v)
        check((y, *pullback(dy)), reference(q, k, v, dy, D**-0.5, window))
