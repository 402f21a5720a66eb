"""``SHADERDSL_DEBUG=nan``: the first stage and the user's line that made a NaN."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import shaderdsl as sd
from shaderdsl.errors import CompilerError, NotFiniteError

X = np.array([[1, 2, 3], [4, 0, 6]], np.float32)


@pytest.fixture(autouse=True)
def looking(monkeypatch):
    monkeypatch.setenv("SHADERDSL_DEBUG", "verify,nan")


def line_of(text):
    """``file:line`` of the line of this file that ends with ``# text``."""
    lines = inspect.getsource(inspect.getmodule(line_of)).splitlines()
    (found,) = [k for k, s in enumerate(lines, 1) if s.endswith(f"# {text}")]
    return f"test_finite.py:{found}"


def refused(call, *words):
    with pytest.raises(NotFiniteError) as caught:
        call()
    for word in words:
        assert word in str(caught.value), str(caught.value)
    return caught.value


@sd.op("t d -> t d")
def entropy_terms(x):
    y = sd.log(x)  # log of zero
    return sd.softmax(y, over="d") * y


def test_a_line_inside_an_op(device):
    error = refused(
        lambda: entropy_terms(X), "mul(0, -inf) is nan, because log(0) is -inf"
    )
    assert error.where.endswith(line_of("log of zero"))


@sd.op("t d -> t")
def greatest(x):
    return sd.max(sd.exp(x), over="d")  # exponential of a thousand


@sd.op("t d -> t")
def greatest_seen(x):
    return sd.max(x * 2.0 + 1.0, over="d", where=x > 1e9)


def test_the_body_of_an_extreme_of_an_op(device):
    x = np.array([[1000, 1]], np.float32)
    error = refused(lambda: greatest(x), "infinity", "exp(1000) is inf")
    assert error.where.endswith(line_of("exponential of a thousand"))
    # Nothing took part: the infinity is the reduction's own.
    assert np.isneginf(np.asarray(greatest_seen(x)))


def root_of_difference(x):
    a = x - 4.0
    b = sd.sqrt(a)  # root of what is negative
    return b * 2.0 + 1.0


def test_a_line_of_arrays(device):
    for f in (root_of_difference, sd.compile(root_of_difference)):
        error = refused(
            lambda f=f: f(sd.array(X)), "sqrt(-3) is nan", "4 of 6", "[0, 0]"
        )
        assert error.where.endswith(line_of("root of what is negative"))


def sum_of_roots(x):
    return sd.sum(sd.sqrt(x))  # slope at zero


def test_a_derivative_names_the_line_it_is_of(device):
    error = refused(lambda: sd.grad(sum_of_roots)(X), "div(0.5, 0) is inf")
    assert error.where.endswith(line_of("slope at zero"))


def test_a_sum_that_overflows(device):
    x = np.full(100, 1e38, np.float32)
    error = refused(lambda: sd.sum(sd.array(x)), "its sum over 100 elements does")
    assert "test_finite.py" in error.where


def test_what_is_lost_in_a_fused_kernel_is_found_by_its_stage(device):
    """The infinity in the middle is where it began, not the NaN that it became."""

    def f(x):
        big = sd.exp(x * 100.0)  # too large
        share = big / sd.sum(big, axis=1, keepdims=True)
        return sd.sum(share * x)

    error = refused(lambda: sd.compile(f)(X), "exp(100) is inf")
    assert error.where.endswith(line_of("too large"))


def test_what_is_meant_passes(device):
    def masked(x):
        return sd.softmax(sd.where(x > 2, x, -np.inf), axis=1)

    for f in (masked, lambda x: sd.where(x > 2, x, -np.inf)):
        assert sd.compile(f)(X).shape == (2, 3)
    given = np.array([np.nan, 1, np.inf], np.float32)
    np.testing.assert_array_equal(sd.compile(lambda x: x + 1)(given), given + 1)
    guarded = sd.compile(lambda x: sd.where(x > 0, sd.log(x), 0.0))
    np.testing.assert_allclose(guarded(X), np.log(np.where(X > 0, X, 1)), 1e-5, 1e-6)


def test_what_was_donated_is_still_there(device):
    a = sd.array(X) * 1e20
    f = sd.compile(lambda model: model * 1e30, donate=("model",))
    refused(lambda: f(a), "is inf")
    np.testing.assert_allclose(a, X * np.float32(1e20))


def test_a_kernel_that_alone_makes_it_is_our_fault(device, monkeypatch):
    from shaderdsl import finite

    broken = np.full((2, 3), np.nan, np.float32)

    def read(p, buffer, s):
        return broken if s in seen and p is made else real(p, buffer, s)

    real, seen = finite._read, ()
    f = sd.compile(lambda x: sd.sin(x) + 1.0)
    f(X)
    (known,) = f._plans.values()
    made = known.plan
    seen = made.outs
    monkeypatch.setattr(finite, "_read", read)
    with pytest.raises(CompilerError, match="fault of shaderdsl"):
        f(X)


def test_without_it_nothing_is_looked_at(device, monkeypatch):
    monkeypatch.delenv("SHADERDSL_DEBUG")
    assert np.isnan(sd.sqrt(sd.array(-X)).numpy()).any()
