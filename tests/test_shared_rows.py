"""Rows that all read one array, several of them a thread, on software drivers."""

import dataclasses

import numpy as np
import pytest

import shaderdsl as sd
from shaderdsl.codegen import row_shared
from shaderdsl.codegen.lower import lower
from shaderdsl.ir import interpret
from shaderdsl.tracing import Traced

rng = np.random.default_rng(17)


@sd.op("k, n k, n -> n")
def product(x, w, b):
    return sd.silu(sd.sum(x * w, over="k") + b) * b


@sd.op("k, n k, n k -> n")
def gate_and_up(x, gate, up):
    return sd.silu(sd.sum(x * gate, over="k")) * sd.sum(sd.tanh(x) * up, over="k")


@sd.op("k, n k -> n, n")
def extremes(x, w):
    """The value is no sum, and both are stored."""
    return sd.max(x - w, over="k"), sd.min(sd.abs(x * w), over="k")


@sd.op("h k, n h k -> n")
def several_axes(x, w):
    return sd.sum(x * w, over="h k")


@sd.op("k, a n k -> n a")
def turned(x, w):
    return sd.sum(x * w, over="k") * 0.5


@sd.op("k, n k, i -> i")
def gathered(x, w, ids):
    return sd.sum(x * w.at(n=ids), over="k")


def normals(*shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


def cases(n, k):
    yield product, [normals(k), normals(n, k), normals(n)]
    yield product, [normals(k), normals(n, k, dtype=np.float16), normals(n)]
    yield gate_and_up, [normals(k), normals(n, k), normals(n, k)]
    yield extremes, [normals(k), normals(n, k)]
    yield several_axes, [normals(3, k), normals(n, 3, k)]
    yield turned, [normals(k), normals(3, n, k)]
    ids = rng.integers(0, n, 2 * n).astype(np.int32)
    yield gathered, [normals(k), normals(n, k), ids]


@pytest.fixture
def software(wgpu):
    """The adapter's target as a software driver's."""
    before = wgpu.target
    wgpu.target = dataclasses.replace(before, family="software")
    yield wgpu
    wgpu.target = before


def check(function, xs, device):
    """Compare with float64; gives the kernels."""
    traced = Traced(function, tuple(xs), "lower")
    program = lower(traced.outs, device.target, inputs=traced.inputs)
    given = [device.upload(x, s.dtype) for x, s in zip(xs, traced.inputs, strict=True)]
    results = device.build(program)(given, {})
    want = interpret.evaluate(traced.outs, dict(zip(traced.inputs, xs, strict=True)))
    for b, s, w in zip(results, traced.outs, want, strict=True):
        got = np.asarray(device.download(b, s.shape, s.dtype), np.float64)
        error = np.abs(got - w).max() / max(1.0, np.abs(w).max())
        assert error < 5e-6, (function, error)
    return program.kernels


@pytest.mark.parametrize("k", [1, 5, 64, 172])
@pytest.mark.parametrize("n", [32, 35, 129, 513])
def test_values(n, k, software):
    for function, xs in cases(n, k):
        kernels = check(function, xs, software)
        if k > 1:
            assert [x.workgroup_size for x in kernels] == [(8, 1, 1)]


@pytest.mark.parametrize("many", [1, 2, 8])
def test_any_number_of_rows_is_right(many, software, monkeypatch):
    monkeypatch.setattr(row_shared, "pick", lambda *_: row_shared.Several(many))
    for function, xs in cases(67, 12):
        check(function, xs, software)


def test_long_rows_are_shared_out_over_lanes(software):
    """What they share is no reason for a long sum in one thread."""
    xs = [normals(16_388), normals(32, 16_388), normals(32)]
    (kernel,) = check(product, xs, software)
    assert kernel.workgroup_size != (8, 1, 1)
