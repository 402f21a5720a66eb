"""Attention of any shape, hook, mask, ratio and start, against float64."""

from __future__ import annotations

import os

import numpy as np
import pytest
from conftest import has_adapter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_attention import ATOL, RTOL, check, exact, heads, make

import shaderdsl as sd
from shaderdsl import ops

SCORES = {
    "none": None,
    "distances": lambda x, b, h, i, j: x - 0.1 * sd.cast(h, "f32") * between(i, j),
    "bias": lambda x, b, h, i, j, bias: x + bias[h, sd.clip(i - j, -9, 9) + 9],
    "factor": lambda x, b, h, i, j, bias: x * (1.0 + sd.tanh(bias[h, j % 19])),
}
MASKS = {
    "none": None,
    "stripes": lambda b, h, i, j: (i + 2 * j) % 3 != h % 3,
    "documents": lambda b, h, i, j, documents: documents[b, i] == documents[b, j],
    "later": lambda b, h, i, j: j >= i,
}


def between(i, j):
    return sd.cast(i - j, "f32")


@st.composite
def cases(draw):
    """Shapes and options of one call."""
    t, extra = draw(st.integers(1, 20)), draw(st.integers(0, 12))
    keys = t + extra
    return {
        "ratio": draw(st.sampled_from([1, 2, 3, 4])),
        "batch": draw(st.integers(1, 2)),
        "t": t,
        "keys": keys,
        "d": draw(st.sampled_from([4, 6, 8])),
        "score": draw(st.sampled_from(list(SCORES))),
        "mask": draw(st.sampled_from(list(MASKS))),
        "options": {
            "causal": draw(st.booleans()),
            "window": draw(st.sampled_from([None, 1, 5])),
            "softcap": draw(st.sampled_from([None, 2.0])),
            "start": draw(st.one_of(st.none(), st.integers(0, extra))),
            "lengths": draw(st.one_of(st.none(), st.integers(0, keys))),
        },
    }


@pytest.mark.skipif(not has_adapter(), reason="no adapter")
@settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(case=cases())
def test_any_attention(wgpu, case):
    """Output, log-sum-exp and all gradients; a masked row is zero and -∞."""
    h, keys = 2 * case["ratio"], case["keys"]
    documents = np.arange(2 * keys, dtype=np.int32).reshape(2, keys) // 5

    def f(q, k, v, *bias):
        y, lse = ops.attention(
            q,
            k,
            v,
            score=SCORES[case["score"]],
            mask=MASKS[case["mask"]],
            captured={
                "documents": documents[: case["batch"]],
                **dict(zip(["bias"], bias)),
            },
            return_lse=True,
            **case["options"],
        )
        # The sum of exponentials, as -∞ has no difference from itself.
        return y, sd.exp(lse)

    args = heads(h, 2, case["t"], keys, case["d"], b=case["batch"])
    if case["score"] in ("bias", "factor"):
        args = (*args, make(h, 19, seed=3) * 0.3)
    check(f, *args, rtol=2e-4, atol=5e-5)


def hooked(q, k, v, bias):
    """A learned bias of distances, a cap, a window and a mask at once."""
    return ops.attention(
        q,
        k,
        v,
        score=lambda x, b, h, i, j, bias: sd.tanh(x) + bias[h, i - j + 5],
        mask=lambda b, h, i, j: (i + j) % 4 != 0,
        captured={"bias": bias},
        softcap=3.0,
        window=6,
    )


WEIGHTS = make(1, 2, 7, 8, seed=6)


def loss(*xs):
    return sd.sum(hooked(*xs) * WEIGHTS)


def gradient64(args, at):
    """The gradient of :func:`loss` in float64."""
    return exact(loss, args, [np.ones(())], at)[1]


@pytest.fixture
def point():
    return [*heads(2, 1, 7, 7, 8), make(2, 12, seed=3)]


def moved(args, tangents, by):
    return [
        np.asarray(a, np.float64) + by * np.asarray(t, np.float64)
        for a, t in zip(args, tangents, strict=True)
    ]


def test_tangents(wgpu, point):
    tangents = [make(*x.shape, seed=5) for x in point]
    _, ty = sd.jvp(hooked, point, tangents)
    up, down = (
        exact(hooked, point, [WEIGHTS], moved(point, tangents, s))[0][0] for s in STEP
    )
    np.testing.assert_allclose(ty.numpy(), (up - down) / (2 * STEP[0]), 1e-3, 1e-4)


STEP = (1e-5, -1e-5)


def test_second_derivatives(wgpu, point):
    """The gradient along a direction, against differences of the float64 gradient."""
    tangents = [make(*x.shape, seed=5) for x in point]
    every = tuple(range(len(point)))

    def along(*xs):
        grads = sd.grad(loss, every)(*xs)
        return sum(sd.sum(g * t) for g, t in zip(grads, tangents, strict=True))

    found = sd.grad(along, every)(*point)
    up, down = (gradient64(point, moved(point, tangents, s)) for s in STEP)
    for g, a, b in zip(found, up, down, strict=True):
        want = (a - b) / (2 * STEP[0])
        scale = np.abs(want).max()
        np.testing.assert_allclose(g.numpy() / scale, want / scale, 1e-3, 1e-4)


def test_documents_packed_in_one_row(wgpu):
    """Each document comes out as if it stood alone, and so do its gradients."""
    sizes = [1, 9, 4, 17, 2]
    documents = np.repeat(np.arange(len(sizes)), sizes).astype(np.int32)[None]
    q, k, v = heads(4, 2, sum(sizes), sum(sizes), 8)
    same = lambda b, h, i, j, documents: documents[b, i] == documents[b, j]  # noqa: E731
    f = lambda *xs: ops.attention(*xs, mask=same, captured={"documents": documents})  # noqa: E731
    y, pullback = sd.vjp(f, q, k, v)
    dy = make(*y.shape, seed=9)
    found = [x.numpy() for x in (y, *pullback(dy))]
    start = 0
    for n in sizes:
        part = slice(start, start + n)
        values, grads = exact(
            ops.attention, [x[:, :, part] for x in (q, k, v)], [dy[:, :, part]]
        )
        for a, b in zip(found, [*values, *grads], strict=True):
            np.testing.assert_allclose(a[:, :, part], b, RTOL, ATOL)
        start += n


# LONG_HEADS=64 takes such heads as well: two minutes of two cores.
@pytest.mark.parametrize("d", [16, *map(int, os.environ.get("LONG_HEADS", "").split())])
def test_long_rows_in_little_memory(wgpu, d):
    """16,384 positions, whose scores would take 1 GiB: what the last ones give, and a
    few queries on the way.
    """
    s, n = 16_384, 8
    q, k, v = heads(1, 1, s, s, d)
    dy = make(1, 1, s, d, seed=9)
    with sd.profile() as p:
        y, pullback = sd.vjp(ops.attention, q, k, v)
        found = [y.numpy(), *(g.numpy() for g in pullback(dy))]
    # Inputs, results and their cotangents, and a little; the scores are nowhere.
    assert p.peak_bytes <= 9.5 * q.nbytes <= 64 << 20
    q, k, v, dy = (x[0, 0].astype(np.float64) for x in (q, k, v, dy))
    last = np.arange(s - n, s)
    rows = np.array([0, 5, 777, s // 2, *last])
    x = q[rows] @ k.T / np.sqrt(d)
    x[np.arange(s) > rows[:, None]] = -np.inf
    e = np.exp(x - x.max(-1, keepdims=True))
    e /= e.sum(-1, keepdims=True)
    dp = dy[rows] @ v.T
    ds = e * (dp - (dp * e).sum(-1, keepdims=True)) / np.sqrt(d)
    # Only the last queries see the last keys.
    want = [e @ v, ds @ k, ds[-n:, last].T @ q[last], e[-n:, last].T @ dy[last]]
    for a, b in zip(found, want, strict=True):
        scale = np.abs(b).max()
        a = a[0, 0, rows if len(b) > n else last]
        np.testing.assert_allclose(a / scale, b / scale, RTOL, ATOL)
