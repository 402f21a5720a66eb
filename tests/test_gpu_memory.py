"""What schedules for GPUs do to save arithmetic and readings: divisors that many values
share, maxima that do not ask for NaN, second stages that go together.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import shaderdsl as sd
from shaderdsl import ops
from shaderdsl.codegen import row
from shaderdsl.codegen.choice import Choice, Fixed
from shaderdsl.codegen.map import MapSchedule
from shaderdsl.ir import interpret
from shaderdsl.runtime import profile


def texts(f, *args):
    return [k.wgsl for k in sd.lower(f, *args).kernels]


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# ------------------------------------------------------------------ shared divisors


@sd.op("r n, r -> r n")
def by_row(x, d):
    return x / d


@sd.op("r n -> r n")
def by_sum(x):
    return x / sd.sum(x, over="n")


@sd.op("r n, n -> r n")
def by_column(x, d):
    return x / d


def test_a_shared_divisor_is_inverted_once(gpu):
    spec = sd.spec("f32", 64, 256)
    (text,) = texts(by_sum, spec)
    assert text.count("sd_inverse(") == 2  # with the function itself
    assert "sd_div" not in text
    (text,) = texts(by_column, spec, sd.spec("f32", 256))
    assert "sd_div_v4(" in text and "sd_inverse" not in text


SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -3.0,
    np.inf,
    -np.inf,
    np.nan,
    3.4e38,
    -1e38,
    5e37,
    1.2e-38,
    1e-39,
]


@pytest.mark.parametrize("n", [48, 47])
def test_shared_divisors_follow_division(gpu, n):
    d = np.array(SPECIAL, np.float32)
    values = np.resize(np.array([*SPECIAL, 1e30, -1e-30], np.float32), n)
    x = np.tile(values, (len(d), 1))
    got = np.asarray(by_row(sd.asarray(x), sd.asarray(d))).astype(np.float64)
    with np.errstate(all="ignore"):
        want = x.astype(np.float64) / d.astype(np.float64)[:, None]
        want32 = want.astype(np.float32)
    # Below the least normal number a driver may give zero, at the end of the range
    # infinity.
    tiny = np.abs(want) < 2.0**-125
    assert np.array_equal(np.isnan(got), np.isnan(want))
    assert (np.abs(got[tiny]) <= 2.0**-125).all()
    whole = np.isfinite(want32) & ~tiny
    error = np.abs(got[whole] - want[whole])
    assert (error <= 2.5 * np.spacing(np.abs(want32[whole]))).all()
    endless = np.isinf(want32) & (d[:, None] != 0)
    assert np.array_equal(got[endless], want32[endless])
    assert np.isinf(got[np.isinf(want32)]).all()


# ------------------------------------------------------------------ maxima


@pytest.mark.parametrize("n", [96, 1000, 4096])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_in_registers_keep_what_is_no_number(gpu, n, bad):
    x = normal(6, n)
    x[1, n // 3] = bad
    x[2] = bad
    x[3, -1] = bad
    x[4, 1] = np.nan
    x[4, 2] = np.inf
    for f in (ops.softmax, ops.log_softmax, lambda a: sd.logsumexp(a, axis=-1)):
        with np.errstate(all="ignore"):
            want = sd.lower(f, sd.asarray(x)).program
            (want,) = interpret.evaluate(want.outputs, {want.inputs[0]: x})
        got = np.asarray(f(sd.asarray(x))).astype(np.float64)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)
    (text,) = texts(ops.softmax, sd.spec("f32", 6, n))
    assert "sd_max_f32" not in text


def test_a_maximum_that_nothing_tells_of_asks(gpu):
    """What does not go through the sum must be NaN by the maximum itself."""

    @sd.op("r n -> r n, r n, r")
    def several(x):
        m = sd.max(x, over="n")
        e = sd.exp(x - m)
        return e / sd.sum(e, over="n"), x - m, m

    x = normal(3, 64)
    x[1, 5] = np.nan
    results = [np.asarray(y) for y in several(sd.asarray(x))]
    for y in results:
        assert np.isnan(y[1]).all()
        assert np.isfinite(y[[0, 2]]).all()

    @sd.op("r n -> r n, r")
    def stored(x):
        m = sd.max(x, over="n")
        e = sd.exp(x - m)
        return e / sd.sum(e, over="n"), m

    y, m = stored(sd.asarray(x))
    assert np.isnan(np.asarray(m)[1]) and np.isnan(np.asarray(y)[1]).all()
    np.testing.assert_array_equal(np.asarray(m)[[0, 2]], x.max(1)[[0, 2]])


# ------------------------------------------------------------------ kernels


def test_second_stages_go_together(gpu):
    x, w = sd.spec("f32", 512, 64), sd.spec("f32", 64)
    assert len(sd.lower(ops.layer_norm, x, w, w, backward=True).kernels) == 2


def test_a_loss_of_rows_is_computed_where_they_are_read(gpu):
    x = sd.spec("f32", 128, 512)
    labels = (np.arange(128) % 512).astype(np.int32)

    def loss(x):
        return ops.cross_entropy(x, labels)

    last = [k for k in sd.lower(loss, x).kernels if k.archetype == "row"][-1]
    assert all(b.tensor.shape != (128, 512) for b in last.bindings)
    logits = normal(128, 512)
    want = np.log(np.exp(logits.astype(np.float64)).sum(1)) - logits[range(128), labels]
    np.testing.assert_allclose(
        np.asarray(sd.compile(loss)(sd.asarray(logits))), want.mean(), rtol=1e-6
    )


@pytest.mark.parametrize("n", [300, 301])
def test_several_positions_of_a_map(gpu, n):
    schedule = MapSchedule(64, True, 2)
    gpu.target = dataclasses.replace(
        gpu.target, choice=Fixed(Choice.of("map", schedule))
    )
    x, d = normal(7, n), normal(7, seed=1)
    got = np.asarray(by_row(sd.asarray(x), sd.asarray(d)))
    (text,) = texts(by_row, sd.spec("f32", 7, n), sd.spec("f32", 7))
    assert "at / 64u * 128u" in text
    np.testing.assert_allclose(got, x / d[:, None], rtol=3e-7)


def test_calls_are_timed_as_a_whole(gpu):
    if not gpu.target.features.timestamps:
        pytest.skip("no timestamps")
    x, w = sd.asarray(normal(64, 64)), sd.asarray(normal(64))
    _, pullback = sd.vjp(ops.rms_norm, x, w)
    first = [np.asarray(a) for a in pullback(x)]
    with profile(timestamps=True, repeats=3) as p:
        again = pullback(x)
    assert p.dispatches == 2 and p.seconds > 0
    assert all(e.seconds is None for e in p.events)
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, np.asarray(b))


# ------------------------------------------------------------------ long rows


def expected(f, *arrays):
    program = sd.lower(f, *map(sd.asarray, arrays)).program
    given = dict(zip(program.inputs, arrays, strict=True))
    return [
        np.asarray(a, np.float64) for a in interpret.evaluate(program.outputs, given)
    ]


@pytest.fixture(params=["registers", "walks"])
def held(request, gpu, monkeypatch):
    """Rows of softmax stay in registers if they fit, or are walked at any length."""
    if request.param == "walks":
        monkeypatch.setattr(row, "WRITTEN", row.ONLINE)
    return gpu


@pytest.mark.parametrize("n", [20_000, 20_001, 33_001, 40_000])
def test_walks_of_long_rows(held, n):
    """Walks turn, and what the first one read last is not read again."""
    x, w = 3 * normal(2, n), normal(n, seed=1)
    calls = [
        (ops.softmax, (x,)),
        (ops.log_softmax, (x,)),
        (ops.rms_norm, (x, w)),
        (ops.layer_norm, (x, w, w)),
        (lambda a: (sd.max(a, axis=-1), sd.sum(a * a, axis=-1)), (x,)),
    ]
    for f, arrays in calls:
        got = f(*map(sd.asarray, arrays))
        got = got if isinstance(got, tuple) else (got,)
        for a, b in zip(got, expected(f, *arrays), strict=True):
            np.testing.assert_allclose(np.asarray(a), b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("n", [20_000, 36_000])
def test_long_rows_in_place(held, n):
    x = 3 * normal(3, n)
    for f in (ops.softmax, lambda a: a - sd.mean(a, axis=-1, keepdims=True)):
        (want,) = expected(f, x)
        got = sd.compile(f, donate=["x" if f is ops.softmax else "a"])(sd.asarray(x))
        np.testing.assert_allclose(np.asarray(got), want, rtol=2e-5, atol=2e-6)


def test_long_rows_keep_what_is_no_number(held):
    x = normal(4, 20_000)
    x[1, 19_990] = np.nan  # in what lanes keep
    x[2, 5] = np.nan
    x[3, 19_999] = np.inf
    with np.errstate(all="ignore"):
        (want,) = expected(ops.softmax, x)
    got = np.asarray(ops.softmax(sd.asarray(x)))
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-7)
