"""``.store()`` and ``.inline()``: what the partition does changes, values do not."""

from __future__ import annotations

import numpy as np
import pytest

import shaderdsl as sd

HOW = (None, "store", "inline")
R = np.random.default_rng(0)
A, B, C = (R.standard_normal((33, 20)).astype(np.float32) for _ in range(3))
X = R.standard_normal((33, 20)).astype(np.float32)


def marked(h, how):
    return getattr(h, how)() if how else h


def written(low):
    return [s for k in low.kernels for s in k.writes]


def product_and_sum(how):
    def f(a, b, c):
        h = marked(sd.exp(a * b) + c, how)
        return sd.sum(h, axis=0), h.T @ h

    return f


def rows_and_columns(how):
    def f(x):
        h = marked(sd.sin(x), how)
        return sd.sum(h * h, axis=1), sd.sum(h, axis=0)

    return f


def test_what_was_stored_is_computed_again(device):
    """By default the sum stays: two readers would each load three arrays."""
    count = {h: len(sd.lower(product_and_sum(h), A, B, C).kernels) for h in HOW}
    assert count == {None: 4, "store": 4, "inline": 3}
    h = np.exp(A.astype(np.float64) * B) + C
    for how in HOW:
        total, product = sd.compile(product_and_sum(how))(A, B, C)
        np.testing.assert_allclose(total, h.sum(0), 1e-5)
        np.testing.assert_allclose(product, h.T @ h, 1e-5)


def test_what_was_computed_again_is_stored(device):
    low = {h: sd.lower(rows_and_columns(h), X) for h in HOW}
    stored = {h: [s.shape for s in written(x)].count((33, 20)) for h, x in low.items()}
    assert stored == {None: 0, "store": 1, "inline": 0}
    assert "sin [33, 20] is stored: asked for by store()" in low["store"].explain()
    for how in HOW:
        rows, columns = sd.compile(rows_and_columns(how))(X)
        h = np.sin(X.astype(np.float64))
        np.testing.assert_allclose(rows, (h * h).sum(1), 1e-5)
        np.testing.assert_allclose(columns, h.sum(0), 1e-5, 1e-5)


@pytest.mark.parametrize("how", HOW)
def test_what_is_stored_is_kept_for_backward(device, how):
    back = sd.lower(rows_and_columns(how), X, backward=True)
    assert len(back.residuals) == (how == "store")
    _, pullback = sd.vjp(rows_and_columns(how), X)
    dr, dc = R.standard_normal(33), R.standard_normal(20)
    got = pullback((dr.astype(np.float32), dc.astype(np.float32)))
    x = X.astype(np.float64)
    want = (2 * np.sin(x) * dr[:, None] + dc) * np.cos(x)
    np.testing.assert_allclose(got, want, 1e-4, 1e-5)
    tangent = sd.jvp(rows_and_columns(how), (X,), (X,))[1]
    np.testing.assert_allclose(tangent[1], (np.cos(x) * x).sum(0), 1e-4, 1e-5)


def attention(how):
    @sd.op("t d, s d, s d -> t d")
    def attend(q, k, v):
        scores = marked(sd.sum(q * k, over="d") * 0.3, how)
        return sd.sum(sd.softmax(scores, over="s") * v, over="s")

    return attend


def softmax_times(scores, v):
    p = np.exp(scores - scores.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True) @ v


def test_scores_of_attention(device):
    q, k, v = (R.standard_normal((512, 16)).astype(np.float32) for _ in range(3))
    want = softmax_times(q.astype(np.float64) @ k.T * 0.3, v)
    for how in HOW:
        op = attention(how)
        stored = any(s.size == 512 * 512 for s in written(sd.lower(op, q, k, v)))
        if device.target.online:
            assert stored == (how == "store")
        np.testing.assert_allclose(op(q, k, v), want, 1e-4, 1e-5)


def test_scores_that_are_a_result_too(device):
    @sd.op("t d, s d, s d -> t d, t s")
    def attend(q, k, v):
        scores = sd.sum(q * k, over="d") * 0.3
        return sd.sum(sd.softmax(scores, over="s") * v, over="s"), scores

    q, k, v = (R.standard_normal((512, 16)).astype(np.float32) for _ in range(3))
    want = q.astype(np.float64) @ k.T * 0.3
    out, scores = attend(q, k, v)
    np.testing.assert_allclose(scores, want, 1e-4, 1e-5)
    np.testing.assert_allclose(out, softmax_times(want, v), 1e-4, 1e-5)


def test_inside_an_op_over_axes_of_one(device):
    @sd.op("a b c -> a")
    def f(x):
        return sd.sum((x * x).store() + sd.index("b"), over="b c").inline() * 2.0

    x = X.reshape(33, 1, 20)
    np.testing.assert_allclose(f(x), 2 * (x.astype(np.float64) ** 2).sum((1, 2)), 1e-5)
    assert len(written(sd.lower(f, x))) == 2


def test_inputs_results_and_numbers_stay_what_they_are(device):
    a = sd.array(X)
    assert a.store() is a and a.inline() is a
    np.testing.assert_array_equal(
        sd.compile(lambda x: (x.store() + 1.0).inline())(X), X + 1
    )
    low = sd.lower(lambda x: (x + 1.0).inline(), X)
    assert "is stored: it is a result" in low.explain()
    np.testing.assert_allclose(
        sd.compile(lambda x: sd.sum(x).store() * 2.0)(X), 2 * X.sum(), 1e-4, 1e-4
    )


def test_what_is_stored_counts_as_bound(device):
    """Each of the values that a kernel stores takes one of its eight bindings."""

    def f(*xs):
        total = 0.0
        for k, x in enumerate(xs):
            total = sd.sin(x * (k + 1.0) + total).store()
        return total

    xs = [X * np.float32(k + 1) for k in range(6)]
    want = 0.0
    for k, x in enumerate(xs):
        want = np.sin(x.astype(np.float64) * (k + 1.0) + want)
    low = sd.lower(f, *xs)
    assert len(written(low)) == 6
    np.testing.assert_allclose(sd.compile(f)(*xs), want, 1e-3, 1e-5)
    if device.kind == "cpu":
        assert all(len(k.bindings) <= 8 for k in low.kernels)
