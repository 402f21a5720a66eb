"""Sums over rows, their second stages and scatters, in either family's schedules."""

from __future__ import annotations

import numpy as np
import pytest

import shaderdsl as sd
from shaderdsl import ops


@pytest.fixture(params=["software", "gpu", "portable"])
def family(request, schedules):
    """The schedules of either family, and of a GPU with the least limits."""
    return schedules(request.param)


@sd.op("r n, r n -> n, n, n")
def three(x, y):
    return (
        sd.sum(x * y, over="r"),
        sd.max(x, over="r"),
        sd.sum(sd.cast(y, "i32"), over="r"),
    )


@sd.op("k, k n -> n")
def row_times_matrix(a, b):
    return sd.sum(a * b, over="k")


# Full turns of the loop, parts of one, fewer rows than lanes, single vec4s, odd widths.
@pytest.mark.parametrize(
    "shape", [(1024, 40), (700, 33), (4097, 8), (20, 64), (3, 300), (300, 1), (513, 4)]
)
def test_columns(family, shape):
    r = np.random.default_rng(5)
    x, y = r.standard_normal((2, *shape)).astype(np.float32) * 4
    total, most, whole = three(x, y)
    wide = (x.astype(np.float64) * y).sum(0)
    close = 1e-6 * np.abs(x.astype(np.float64) * y).sum(0).max()
    np.testing.assert_allclose(total.numpy(), wide, rtol=0, atol=close)
    np.testing.assert_array_equal(most.numpy(), x.max(0))
    np.testing.assert_array_equal(whole.numpy(), y.astype(np.int32).sum(0))
    got = row_times_matrix(x[:, 0], y).numpy()
    want = x[:, 0].astype(np.float64) @ y
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * 16 * shape[0])


def test_strips_read_each_number_once(schedules):
    """What a GPU moves is the matrix, and shares that are few beside it."""
    schedules("portable")
    f = sd.op("r n, r n -> n")(lambda x, y: sd.sum(x * y, over="r"))
    low = sd.lower(f, sd.spec("f32", 4096, 512), sd.spec("f32", 4096, 512))
    first, second = low.kernels
    assert first.archetype == second.archetype == "column"
    assert first.workgroup_size == (256, 1, 1)
    assert low.bytes < 1.1 * 2 * 4 * 4096 * 512


@pytest.mark.parametrize(("v", "d", "t"), [(50, 12, 600), (700, 7, 33), (64, 4, 1)])
def test_scatter(family, v, d, t):
    """Long chains, destinations of one, and ones that nothing goes to."""
    r = np.random.default_rng(6)
    table = r.standard_normal((v, d)).astype(np.float32)
    ids = r.integers(0, v, t).astype(np.int32)
    ids[: t // 3] = v - 1
    dy = r.standard_normal((t, d)).astype(np.float32)
    _, pullback = sd.vjp(lambda table: ops.embedding(table, ids), table)
    want = np.zeros((v, d))
    np.add.at(want, ids, dy.astype(np.float64))
    got = pullback(dy).numpy()
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * max(t, 4))
    np.testing.assert_array_equal(got[np.bincount(ids, minlength=v) == 0], 0.0)


def test_a_pullback_makes_no_zeros(family, monkeypatch):
    """Zeros are made for what the result does not depend on, and for nothing else."""
    made = []
    from shaderdsl import function

    plain = function._zeros
    monkeypatch.setattr(function, "_zeros", lambda s: made.append(s) or plain(s))
    x = np.ones((4, 8), np.float32)
    _, pullback = sd.vjp(lambda a, b: a * a, x, x)
    da, db = pullback(x)
    assert len(made) == 1
    np.testing.assert_array_equal(da.numpy(), 2 * x)
    np.testing.assert_array_equal(db.numpy(), 0 * x)
