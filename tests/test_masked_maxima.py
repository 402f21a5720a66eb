"""A maximum of some elements, and sums of exponentials of others: whatever runs along
with its own running maximum, the values are those of the plain expressions.
"""

import math

import numpy as np
import pytest

import shaderdsl as sd
from shaderdsl.codegen import row

NONE = -math.inf


@pytest.fixture(params=["software", "gpu"])
def family(request, schedules, monkeypatch):
    """The schedules of either family, in which rows of 600 and more are walked."""
    monkeypatch.setattr(row, "ONLINE", 16)
    return schedules(request.param)


# y, whether an element counts for the maximum, the same for the sum, a plain shift or
# one that is 0 below no maximum.
def largest(y, seen):
    return sd.max(y if seen is None else sd.where(seen, y, NONE), over="n")


def total(y, m, asked, weight=1.0):
    e = sd.exp(y - m) * weight
    return sd.sum(e if asked is None else sd.where(asked, e, 0.0), over="n")


def guarded(m):
    return sd.where(sd.isinf(m), 0.0, m)


def sums(x, keep):
    """All ways in which masks may differ."""
    m, k = largest(x, None), largest(x, keep > 0)
    inside = sd.where(keep > 0, x, NONE)
    return (
        total(x, k, None),
        total(x, k, keep > 0),
        total(x, m, keep > 0),
        total(x, k, keep > 1),
        total(x, guarded(k), keep > 0, x),
        total(x, guarded(k), keep > 1),
        total(inside, largest(inside, None), None),
        total(inside, guarded(largest(inside, None)), None),
        total(x, sd.stop_gradient(m), None),
    )


SEVERAL = ", ".join(["r"] * 9)


@sd.op(f"r n, r n -> {SEVERAL}")
def of_rows(x, keep):
    return sums(x, keep)


def data(shape, kind, seed=0):
    r = np.random.default_rng(seed)
    keep = r.integers(0, 3, shape).astype(np.float32)
    x = (3 * r.standard_normal(shape)).astype(np.float32)
    n = shape[1]
    if kind == "grows":
        # What only the sum sees is far above what the maximum has seen by then.
        low = np.where(keep > 0, -50, 10)
        x = np.where(np.arange(n) < n // 2, low, 60.0).astype(np.float32)
    if kind == "infinite":
        keep[0], keep[1, : n // 2] = 0, 0
        x[2], x[3, ::3], x[4, 5] = NONE, NONE, math.inf
    return x, keep


@pytest.mark.parametrize("kind", ["ordinary", "grows", "infinite"])
@pytest.mark.parametrize("n", [2100, 4099, 9001])
def test_rows(family, n, kind):
    x, keep = data((5, n), kind)
    with np.errstate(all="ignore"):
        want = of_rows.reference(x.astype(np.float64), keep.astype(np.float64))
    for k, (g, w) in enumerate(zip(of_rows(x, keep), want, strict=True)):
        np.testing.assert_allclose(
            np.asarray(g), w, rtol=1e-4, atol=1e-4, err_msg=str(k)
        )


def test_what_goes_along_in_one_walk(family):
    """Masks that are alike still do."""

    @sd.op("r n, r n -> r, r")
    def alike(x, keep):
        k = largest(x, keep > 0)
        return k, total(x, guarded(k), keep > 0)

    @sd.op("r n, r n -> r, r")
    def unlike(x, keep):
        k = largest(x, keep > 0)
        return k, total(x, guarded(k), None)

    spec = sd.spec("f32", 3, 9001)
    for op, together in ((alike, True), (unlike, False)):
        texts = "".join(k.wgsl for k in sd.lower(op, spec, spec).kernels)
        assert ("base0_" in texts) is together


@sd.op("t c, n c, t n, n e -> t, t, t, t e")
def of_products(q, k, keep, v):
    x = sd.sum(q * k, over="c")
    m = sd.max(sd.where(keep > 0, x, NONE), over="n")
    e = sd.where(keep > 0, sd.exp(x - guarded(m)), 0.0)
    return m, total(x, m, None), sd.sum(e, over="n"), sd.sum(e * v, over="n")


@sd.op("t c, n c, n e -> t, t, t, t e")
def of_products_in_order(q, k, v):
    x = sd.sum(q * k, over="c")
    seen = sd.index("n") <= sd.index("t")
    y = sd.where(seen, x, NONE)
    m = sd.max(y, over="n")
    wider = sd.where(sd.index("n") <= sd.index("t") + 3, sd.exp(x - m), 0.0)
    return (
        total(x, m, None),
        sd.sum(wider, over="n"),
        total(y, m, None),
        sd.sum(sd.exp(y - m) * v, over="n"),
    )


@pytest.mark.parametrize("shape", [(40, 70), (1, 300), (3, 200), (64, 64)])
def test_products(family, shape):
    """Attention's own schedules, with lines in pieces and without."""
    t, n = shape
    r = np.random.default_rng(1)
    q, k, v = (
        r.standard_normal(s).astype(np.float32) for s in ((t, 8), (n, 8), (n, 4))
    )
    keep = r.integers(0, 3, shape).astype(np.float32)
    for op, xs in ((of_products, (q, k, keep, v)), (of_products_in_order, (q, k, v))):
        want = op.reference(*(x.astype(np.float64) for x in xs))
        for g, w in zip(op(*xs), want, strict=True):
            scale = np.abs(w).max()
            np.testing.assert_allclose(np.asarray(g) / scale, w / scale, atol=2e-6)
    # The first half sees nothing of what the sums add up.
    q[:, 0], k[:, 0], keep[:, : n // 2] = (
        1,
        np.where(np.arange(n) < n // 2, 150, 160),
        0,
    )
    want = of_products.reference(*(x.astype(np.float64) for x in (q, k, keep, v)))
    for g, w in zip(of_products(q, k, keep, v), want, strict=True):
        scale = np.abs(w).max()
        np.testing.assert_allclose(np.asarray(g) / scale, w / scale, atol=2e-4)
