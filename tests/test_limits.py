"""What is beyond a limit is right or refused before it is launched, with both numbers,
under the adapter's own limits and under those that every implementation guarantees.
"""

import dataclasses
import math

import numpy as np
import pytest
from conftest import has_adapter

import shaderdsl as sd
from shaderdsl.codegen.target import UNBOUNDED_LOOP_BUDGET
from shaderdsl.errors import LimitError
from shaderdsl.runtime.plan import check_limits


@pytest.fixture(params=["adapter", "portable"])
def limited(request):
    """The adapter under either profile."""
    if not has_adapter():
        pytest.skip("no adapter")
    device = sd.use_device("wgpu", limits=request.param)
    before = device.target
    yield device
    device.target = before
    sd.use_device("cpu")


@sd.op("n, m -> n m")
def outer(x, y):
    return x * y


@sd.op("n, m -> n")
def largest(x, y):
    return sd.max(x * y - sd.abs(x - y), over="m")


@sd.op("n, m -> ")
def total(x, y):
    return sd.sum(sd.maximum(x, y), over="n m")


@sd.op("n, m, k -> n")
def totals(x, y, z):
    return sd.sum(sd.maximum(x, y) * sd.abs(z - x), over="m k")


@sd.op("n, m -> m")
def columns(x, y):
    return sd.sum(sd.maximum(x, y), over="n")


def test_too_large_a_binding(limited):
    n = 70_000
    x = np.ones(n, np.float32)
    most = limited.target.limits.max_binding_bytes
    with pytest.raises(LimitError) as error:
        outer(x, x)
    assert f"{4 * n * n:,} B" in str(error.value)
    assert f"{most:,} B at most" in str(error.value)
    np.testing.assert_array_equal((sd.array(x[:4]) + 1).numpy(), 2 * x[:4])


def test_more_workgroups_than_one_dimension_has(limited):
    """A workgroup a row, and more rows than that."""
    n, m = 66_001, 261
    most = limited.target.limits.max_workgroups
    r = np.random.default_rng(0)
    x, y = (r.standard_normal(k).astype(np.float32) for k in (n, m))
    (kernel,) = sd.lower(largest, x, y).kernels
    assert math.prod(kernel.workgroups) > most >= max(kernel.workgroups)
    got = largest(x, y).numpy()
    for a in (slice(0, 100), slice(most - 50, most + 50), slice(n - 100, n)):
        wide = x[a, None].astype(np.float64)
        want = (wide * y - np.abs(wide - y)).max(1)
        np.testing.assert_allclose(got[a], want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", ["software", "gpu"])
@pytest.mark.parametrize("budget", [60_000, UNBOUNDED_LOOP_BUDGET])
def test_index_arithmetic_beyond_32_bits(limited, family, budget):
    """Sums over more positions than 32 bits count: every number of the kernels fits."""
    limited.target = dataclasses.replace(
        limited.target, family=family, loop_budget=budget
    )
    for op, sizes in (
        (total, (1 << 16, 1 << 16)),
        (total, (1 << 18, 1 << 18)),
        (totals, (70, 70_000, 70_000)),
        (columns, (1 << 25, 1 << 8)),
    ):
        low = sd.lower(op, *(sd.spec("f32", n) for n in sizes))
        for k in low.kernels:
            assert max(k.workgroups) <= limited.target.limits.max_workgroups
            for p in k.params:
                if not isinstance(p.value, tuple) and p.dtype != "f32":
                    assert 0 <= p.value < 1 << 31
        check_limits(low.program, limited.target.limits)


@sd.op("n -> n")
def long_chain(x):
    for k in range(3000):
        x = x * 0.9995 + (0.001 if k % 2 else -0.001) * sd.abs(x)
    return x


@sd.op("n -> n")
def deeply_nested(x):
    """Conditions inside of conditions, as deep as no parser takes parentheses."""
    y = x
    for _ in range(300):
        y = sd.where(y > x + 0.5, x, y + 0.003)
    return y


def array_chain(x):
    for k in range(1500):
        x = x * 0.999 + (0.001 if k % 2 else -0.001) * abs(x)
    return x


@pytest.mark.parametrize("f", [long_chain, deeply_nested, array_chain])
def test_nesting_and_chains(limited, f):
    x = np.linspace(-2, 2, 9, dtype=np.float32)
    if f is array_chain:
        want, got = array_chain(x.astype(np.float64)), sd.compile(f)(x)
    else:
        want, got = f.reference(x.astype(np.float64)), f(x)
    np.testing.assert_allclose(np.asarray(got), want, rtol=2e-4, atol=2e-4)


def test_many_operands(limited):
    """More arrays than one kernel may bind, forward and backward."""
    count = 40
    xs = [np.full(5, k + 1, np.float32) for k in range(count)]

    def f(*xs):
        y = xs[0]
        for x in xs[1:]:
            y = sd.tanh(y * 0.5 + x * 0.01)
        return y

    low = sd.lower(f, *xs)
    most = limited.target.limits.max_storage_buffers
    assert all(len(k.bindings) <= most for k in low.kernels)
    y, pullback = sd.vjp(f, *xs)
    want = xs[0].astype(np.float64)
    slope = np.ones(5)
    slopes = []
    for x in xs[1:]:
        want = np.tanh(want * 0.5 + x * 0.01)
        slopes.append(1 - want**2)
    np.testing.assert_allclose(y.numpy(), want, rtol=1e-5)
    grads = pullback(np.ones(5, np.float32))
    for k in reversed(range(1, count)):
        slope = slope * slopes[k - 1]
        np.testing.assert_allclose(grads[k].numpy(), 0.01 * slope, rtol=1e-4)
        slope = slope * 0.5
    np.testing.assert_allclose(grads[0].numpy(), slope, rtol=1e-4)
