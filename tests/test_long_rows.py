"""Softmax and its relatives over rows that several workgroups share: one reading gives
the maximum and the sum.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import shaderdsl as sd
from shaderdsl import ops
from shaderdsl.codegen import row, row_walk, split
from shaderdsl.testing.gradients import Graph


@pytest.fixture(params=["software", "gpu"])
def family(request, schedules):
    """The schedules of either family, on whatever adapter there is."""
    return schedules(request.param)


def log_sum(x):
    return sd.logsumexp(x, axis=-1)


def loss(x):
    labels = np.arange(x.shape[0], dtype=np.int32) * 17
    return ops.cross_entropy(x, labels, reduction="none")


def of_some(x):
    return sd.logsumexp(x, axis=-1, where=sd.cast(x * 8.0, "i32") % 3 != 0)


def rows(shape: tuple[int, ...], scale: float = 4.0) -> np.ndarray:
    r = np.random.default_rng(7)
    return (scale * r.standard_normal(shape)).astype(np.float32)


def follows_float64(f, x):
    """Its value, and its gradient under a random cotangent."""
    graph, wide = Graph(f, [x]), x.astype(np.float64)
    (want,) = graph.value([wide])
    y, pullback = sd.vjp(f, x)
    close = 2e-6 * np.abs(want).max()
    np.testing.assert_allclose(y.numpy(), want, rtol=2e-5, atol=close)
    dy = rows(np.shape(want), 1.0)
    (slope,) = graph.gradient([wide], [dy.astype(np.float64)])
    close = 2e-5 * np.abs(slope).max()
    np.testing.assert_allclose(pullback(dy).numpy(), slope, rtol=0, atol=close)


@pytest.mark.parametrize("shape", [(2, 200_000), (1, 262_144), (3, 99_991)])
def test_one_reading(family, shape):
    """logsumexp is two kernels that read x once; softmax reads it again to write."""
    x = sd.spec("f32", *shape)
    nbytes = 4 * shape[0] * shape[1]
    low = sd.lower(log_sum, x)
    assert len(low.kernels) == 2 and low.bytes < 1.05 * nbytes
    low = sd.lower(ops.softmax, x)
    assert len(low.kernels) == 3 and low.bytes < 3.05 * nbytes
    assert len(sd.lower(loss, x).kernels) <= 3


@pytest.mark.parametrize("f", [log_sum, ops.softmax, ops.log_softmax, loss, of_some])
@pytest.mark.parametrize("shape", [(2, 80_000), (1, 66_001)])
def test_values_and_gradients(family, f, shape):
    x = rows(shape)
    graph = Graph(f, [x])
    wide = x.astype(np.float64)
    (want,) = graph.value([wide])
    y, pullback = sd.vjp(f, x)
    np.testing.assert_allclose(y.numpy(), want, rtol=2e-5, atol=1e-8)
    dy = rows(np.shape(want), 1.0)
    (slope,) = graph.gradient([wide], [dy.astype(np.float64)])
    close = 2e-5 * np.abs(slope).max()
    np.testing.assert_allclose(pullback(dy).numpy(), slope, rtol=0, atol=close)


def test_many_long_rows(family):
    x = rows((70, 70_000))
    m = x.max(-1, keepdims=True).astype(np.float64)
    want = np.log(np.exp(x - m).sum(-1)) + m[:, 0]
    np.testing.assert_allclose(log_sum(x).numpy(), want, rtol=1e-6)


def test_rows_enough_for_a_workgroup_each(gpu, monkeypatch):
    """Then nothing is shared out, up to rows of which too little would stay."""
    monkeypatch.setattr(split, "ENOUGH_ROWS", 3)
    monkeypatch.setattr(split, "BUSY_ROWS", 3)
    kernels = [
        len(sd.lower(ops.softmax, sd.spec("f32", *shape)).kernels)
        for shape in [(3, 70_004), (2, 70_004), (3, 140_000)]
    ]
    assert kernels == [1, 3, 3]
    x = rows((3, 70_004))
    p = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    np.testing.assert_allclose(ops.softmax(x).numpy(), p, rtol=2e-5, atol=1e-9)


def test_infinities(family):
    """Shares of nothing, rows of nothing, rows that nothing compares with."""
    x = rows((5, 80_000))
    x[0, :70_000] = -np.inf
    x[1] = -np.inf
    x[2, 79_999] = 1e30
    x[3, 3] = np.inf
    x[4, 5] = np.nan
    got = log_sum(x).numpy()
    shifted = np.exp(x[0, 70_000:].astype(np.float64))
    assert abs(got[0] - np.log(shifted.sum())) < 1e-5
    assert got[1] == -np.inf
    assert got[2] == np.float32(1e30)
    assert got[3] == np.inf
    assert np.isnan(got[4])
    p = ops.softmax(x).numpy()
    assert abs(p[0].sum() - 1) < 1e-5 and not p[0, :70_000].any()
    assert not p[1].any()
    assert p[2, 79_999] == 1.0 and p[2].sum() == 1.0


def test_huge_differences_between_shares(family):
    """A share far above all others leaves them at exactly 0, not at 0 · inf."""
    x = np.full((1, 80_000), -1e4, np.float32)
    x[0, 40_000:] = 1e4
    assert float(log_sum(x)[0]) == pytest.approx(1e4 + np.log(40_000), rel=1e-7)


def test_a_sum_over_another_maximum_is_left_alone(family):
    """The maximum of something else may be far below."""

    def f(x):
        m = sd.max(-x, axis=-1, keepdims=True)
        return sd.sum(sd.exp(x - m), axis=-1)

    x = np.abs(rows((2, 80_000), 1.0))
    m = (-x.astype(np.float64)).max(-1, keepdims=True)
    want = np.exp(x - m).sum(-1)
    np.testing.assert_allclose(f(x).numpy(), want, rtol=1e-5)


# ------------------------------------------------------------------ rows of one kernel


@pytest.fixture(params=["software", "gpu", "portable"])
def looping(request, schedules, monkeypatch):
    """Rows that a kernel walks in a loop, shorter than they would be."""
    monkeypatch.setattr(row, "ONLINE", 128)
    monkeypatch.setattr(row, "WRITTEN", 128)
    monkeypatch.setattr(row, "HELD", 8)
    monkeypatch.setattr(row, "SINGLE", 8)
    monkeypatch.setattr(row, "RESERVED", 1 << 20)
    return schedules(request.param)


def weighted(x):
    """Two sums below one maximum, one of them with weights of either sign."""
    e = sd.exp(x - sd.max(x, axis=-1, keepdims=True))
    return sd.sum(e * x, axis=-1) / sd.sum(e, axis=-1)


@pytest.mark.parametrize(
    "f", [log_sum, ops.softmax, ops.log_softmax, loss, of_some, weighted]
)
@pytest.mark.parametrize("shape", [(3, 10_000), (2, 6_001)])
def test_maximum_and_sum_from_one_walk(looping, f, shape):
    """Vec4s and single elements, whole turns of four and what is left of them."""
    low = sd.lower(f, sd.spec("f32", *shape))
    text = low.kernels[0].wgsl
    assert "most0_" in text and text.count("subgroup") * (looping == "portable") == 0
    follows_float64(f, rows(shape))


def test_infinities_in_one_walk(looping):
    """As the plain expressions have it: a plain y - m is NaN below infinity."""
    x = rows((6, 10_000))
    x[0, :9_000] = -np.inf
    x[1] = -np.inf
    x[2, 9_999] = 1e30
    x[3, 3] = np.inf
    x[4, 5] = np.nan
    x[5, 5_000:] = 1e4
    got = log_sum(x).numpy()
    part = np.log(np.exp(x[0, 9_000:].astype(np.float64)).sum())
    np.testing.assert_allclose(got[0], part, rtol=1e-5)
    assert got[1] == -np.inf and got[2] == np.float32(1e30) and got[3] == np.inf
    assert np.isnan(got[4])
    assert got[5] == pytest.approx(1e4 + np.log(5_000), rel=1e-7)
    most = sd.compile(lambda x: (sd.max(x, axis=-1), weighted(x)))
    m, w = (y.numpy() for y in most(x))
    np.testing.assert_array_equal(m, x.max(-1))
    assert np.isnan(w[[0, 1, 3, 4]]).all() and np.isfinite(w[[2, 5]]).all()


# ------------------------------------------------------- what stays on the chip of rows


@pytest.fixture
def small(schedules, retarget, wgpu, monkeypatch):
    """A GPU whose workgroups hold 8,192 elements of a row in registers, and 1,024 in
    workgroup memory.
    """
    monkeypatch.setattr(row, "WRITTEN", 128)
    monkeypatch.setattr(row, "HELD", 32)
    schedules("gpu")
    limits = dataclasses.replace(
        wgpu.target.limits,
        max_invocations=256,
        max_workgroup_size_x=256,
        max_workgroup_storage=256 * row_walk.RESERVED + 4096,
    )
    retarget(limits=limits)


def norm(x):
    gain = np.linspace(0.5, 1.5, x.shape[-1]).astype(np.float32)
    return ops.layer_norm(x, gain, gain[::-1].copy())


#: Elements of a row, and what it takes: registers alone, workgroup memory, a loop.
LENGTHS = [
    (8000, "registers"),
    (8192, "registers"),
    (8196, "memory"),
    (9216, "memory"),
    (9220, "loop"),
    (16_008, "loop"),
    (5001, "registers"),
    (8191, "registers"),
    (8193, "memory"),
    (9217, "loop"),
    (12_345, "loop"),
]


@pytest.mark.parametrize("f", [ops.softmax, norm])
@pytest.mark.parametrize(("n", "what"), LENGTHS)
def test_what_stays_of_a_row(small, f, n, what):
    low = sd.lower(f, sd.spec("f32", 3, n))
    (kernel,) = low.kernels
    text = kernel.wgsl
    loop, memory = what == "loop", what != "registers"
    if n % 4 and f is norm:  # single elements of two statistics: registers or a loop
        loop, memory = memory, False
    assert ("kept" in text, "walk" in text) == (memory, loop)
    follows_float64(f, rows((3, n)))


@pytest.mark.parametrize(("n", "what"), LENGTHS)
def test_loss_and_gradient_of_rows_that_stay(small, n, what):
    """Cross entropy and what it gives back, from one kernel of the rows."""
    labels = sd.asarray(np.array([5, n - 1, 1700], np.int32))

    def loss(x):
        return sd.nn.cross_entropy(x, labels)

    both = sd.value_and_grad(loss)
    low = sd.lower(both, sd.spec("f32", 3, n))
    text = low.kernels[0].wgsl
    assert len(low.kernels) == 2
    loop, memory = what == "loop", what != "registers"
    if n % 4:  # each position would be held beside its element, to be compared
        loop, memory = True, False
    assert ("kept" in text, "walk" in text) == (memory, loop)
    x = rows((3, n))
    wide = x.astype(np.float64)
    value, dx = sd.compile(both)(x)
    p = np.exp(wide - wide.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    at = np.arange(3), np.asarray(labels)
    assert float(value) == pytest.approx(-np.log(p[at]).mean(), rel=1e-6)
    p[at] -= 1
    np.testing.assert_allclose(dx.numpy(), p / 3, rtol=2e-5, atol=1e-8)


@pytest.mark.parametrize("n", [8000, 9212, 9220, 9217])
def test_infinities_in_rows_that_stay(small, n):
    x = rows((6, n))
    x[0, : n - 10] = -np.inf
    x[1] = -np.inf
    x[2, n - 1] = 1e30
    x[3, 3] = np.inf
    x[4, n - 2] = np.nan
    x[5, n // 2 :] = 1e4
    p = ops.softmax(x).numpy()
    last = np.exp(x[0, n - 10 :].astype(np.float64))
    np.testing.assert_allclose(p[0, n - 10 :], last / last.sum(), rtol=1e-5)
    assert not p[0, : n - 10].any() and not p[1].any()
    assert p[2, n - 1] == 1.0 and p[2].sum() == 1.0
    assert np.isnan(p[4]).all()
    np.testing.assert_allclose(p[5, n // 2 :], 1 / (n - n // 2), rtol=1e-5)
    plain = sd.compile(plain_softmax)(x).numpy()
    assert np.isnan(plain[[1, 3, 4]]).all() and np.isfinite(plain[[0, 2, 5]]).all()


def plain_softmax(x):
    """Without a word on infinities: below an infinite maximum all is NaN."""
    e = sd.exp(x - sd.max(x, axis=-1, keepdims=True))
    return e / sd.sum(e, axis=-1, keepdims=True)


def plain_sum(x):
    """Without a word on infinities: a row of -inf alone is NaN."""
    m = sd.max(x, axis=-1, keepdims=True)
    return sd.sum(sd.exp(x - m), axis=-1)


def test_rows_that_hold_infinities(family):
    x = rows((4, 70_000))
    x[0, :60_000] = x[1] = -np.inf
    x[2, 5], x[3, 7] = np.inf, np.nan
    with np.errstate(invalid="ignore"):
        expected = np.exp(x - x.max(-1, keepdims=True)).sum(-1, dtype=np.float64)
    np.testing.assert_allclose(sd.compile(plain_sum)(x), expected, 1e-5)
    assert np.isnan(expected[1:]).all() and np.isfinite(expected[0])
    assert np.array_equal(sd.compile(log_sum)(x[1:3]), [-np.inf, np.inf])


def test_a_maximum_of_some_and_a_sum_of_all(family):
    """Shares that the mask empties have no maximum, but terms."""
    x, m = np.full((2, 70_000), 150, np.float32), np.zeros((2, 70_000), bool)
    m[:, :9] = True

    def f(x):
        largest = sd.max(sd.where(m, x, -np.inf), axis=-1, keepdims=True)
        return sd.sum(sd.exp(x - largest), axis=-1)

    np.testing.assert_allclose(sd.compile(f)(x), [70_000] * 2, 1e-5)


def test_shares_of_one_element_along_their_axis(family, monkeypatch):
    """The other reduced axis alone is more than a workgroup holds."""
    from shaderdsl.codegen import split, split_online

    monkeypatch.setattr(split, "LONG_ROW", 512)
    monkeypatch.setattr(split, "SHARE", 8)
    monkeypatch.setattr(split_online, "HELD", {"software": 8, "gpu": 8})
    x = rows((1, 33, 17))

    def f(x):
        return sd.logsumexp(x, axis=(1, 2)), sd.sum(x, axis=(1, 2)), sd.max(x)

    wide = x.astype(np.float64)
    expected = np.log(np.exp(wide).sum()), wide.sum(), wide.max()
    for got, value in zip(sd.compile(f)(x), expected, strict=True):
        np.testing.assert_allclose(got, np.broadcast_to(value, got.shape), 1e-5)
