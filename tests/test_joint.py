"""Contractions that share a kernel, against the interpreter in float64."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import shaderdsl as sd
from shaderdsl.codegen.lower import lower
from shaderdsl.codegen.target import Features
from shaderdsl.ir import interpret

rng = np.random.default_rng(3)


pytestmark = pytest.mark.usefixtures("wgpu")


def targets():
    """This driver with and without its abilities, and as if it were a GPU."""
    own = sd.runtime.current().target
    plain = dataclasses.replace(own.portable(), features=Features())
    return {
        "own": own,
        "portable": plain,
        "gpu": dataclasses.replace(plain, family="gpu"),
    }


KINDS = ["own", "portable", "gpu"]


@sd.op("... t d, f d, f d -> ... t f")
def gate_up(x, g, u):
    return sd.silu(sd.sum(x * g, over="d")) * sd.sum(x * u, over="d")


@sd.op("... t d, f d, f, f d, f -> ... t f, ... t f")
def gate_up_bias(x, g, b, u, c):
    gate = sd.sum(x * g, over="d") + b
    return sd.silu(gate) * (sd.sum(x * u, over="d") + c), gate


@sd.op("t d, d f, d f -> t f, t f, t f")
def all_stored(x, g, u):
    gate, up = sd.sum(x * g, over="d"), -0.5 * sd.sum(u * x, over="d")
    return gate, up, gate * sd.exp(0.1 * up)


@sd.op("t q, t k, t k, q d, k d, k d, t d -> t d")
def input_gradient(q, k, v, a, b, c, residual):
    x = sd.sum(q * a, over="q") + residual
    return sd.sum(k * b, over="k") + x + sd.sum(v * c, over="k")


@sd.op("t a, t b, a d, b d, d -> d t")
def sum_turned(x, y, v, w, bias):
    return bias * (sd.sum(x * v, over="a") + sd.sum(y * w, over="b"))


@sd.op("t a, t b, a d, b d -> t d")
def different_numbers(x, y, v, w):
    return sd.sum(3.0 * x * v, over="a") + sd.sum(0.5 * y * w, over="b")


@sd.op("t a, t a, a d, a d -> t d, t d")
def sum_and_part(x, y, v, w):
    """One sum is wanted by itself as well."""
    one = sd.sum(x * v, over="a")
    return one + sd.sum(y * w, over="a"), one


@sd.op("t d, t f, t f -> f d, f d")
def weight_gradients(x, g, u):
    return sd.sum(x * g, over="t"), sd.sum(x * u, over="t")


@sd.op("b h t d, b h s d, b h s d -> b h t s")
def two_scores(q, k, r):
    s = sd.sum(q * k, over="d") * 0.3 + sd.sum(q * r, over="d")
    return sd.where(sd.index("s") <= sd.index("t"), s, 0.0)


@sd.op("t d, f d, f d, f d, f d, f d -> t f")
def five(x, a, b, c, d, e):
    p, q, r, s, t = (sd.sum(x * w, over="d") for w in (a, b, c, d, e))
    return p * q + r * s * t


def arrays(*shapes, dtype="float32"):
    return [rng.standard_normal(s).astype(dtype) for s in shapes]


def cases(t, d, f, h=5):
    yield gate_up, arrays((t, d), (f, d), (f, d))
    yield gate_up, arrays((2, t, d), (f, d), (f, d))
    yield gate_up_bias, arrays((t, d), (f, d), (f,), (f, d), (f,))
    yield all_stored, arrays((t, d), (d, f), (d, f))
    shapes = (t, f), (t, h), (t, h), (f, d), (h, d), (h, d), (t, d)
    yield input_gradient, arrays(*shapes)
    yield sum_turned, arrays((t, f), (t, h), (f, d), (h, d), (d,))
    yield different_numbers, arrays((t, f), (t, h), (f, d), (h, d))
    yield sum_and_part, arrays((t, f), (t, f), (f, d), (f, d))
    yield weight_gradients, arrays((t, d), (t, f), (t, f))
    yield two_scores, arrays((2, 2, t, d), (2, 2, f, d), (2, 2, f, d))
    yield five, arrays((t, d), *[(f, d)] * 5)


def run(op, operands, target):
    """The kernels of an op; compares its results with float64."""
    device = sd.runtime.current()
    traced = sd.lower(op, *operands).program
    for _ in range(2):  # printed, then taken over
        program = lower(traced.outputs, target, inputs=traced.inputs)
        for kernel in program.kernels:
            assert len(kernel.bindings) <= target.limits.max_storage_buffers
        kinds = {"float32": "f32", "float16": "f16", "int32": "i32"}
        given = [device.upload(x, kinds[x.dtype.name]) for x in operands]
        results = device.build(program)(given, {})
        expected = interpret.evaluate(
            traced.outputs, dict(zip(traced.inputs, operands))
        )
        for buffer, stage, want in zip(results, traced.outputs, expected):
            got = device.download(buffer, want.shape, stage.dtype)
            bound = 1e-3 if stage.dtype == "f16" else 1e-5
            error = np.abs(got.astype(np.float64) - want).max()
            assert error < bound * np.abs(want).max(), (op.name, error)
    return program.kernels


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(3, 5, 7), (33, 36, 40), (65, 8, 31)], ids=str)
def test_results(kind, sizes):
    for op, operands in cases(*sizes):
        run(op, operands, targets()[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision(kind):
    for t, d, f in ((9, 12, 8), (5, 7, 3)):
        shapes = (t, d), (f, d), (f, d)
        run(gate_up, arrays(*shapes, dtype="float16"), targets()[kind])
        mixed = arrays((t, d)) + arrays((f, d), (f, d), dtype="float16")
        run(gate_up, mixed, targets()[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_long_sums(kind):
    """Second stages know every accumulator."""
    target = dataclasses.replace(targets()[kind], loop_budget=64)
    for op, operands in (
        (gate_up, arrays((5, 999), (6, 999), (6, 999))),
        (all_stored, arrays((8, 700), (700, 8), (700, 8))),
        (sum_turned, arrays((6, 999), (6, 700), (999, 5), (700, 5), (5,))),
        (weight_gradients, arrays((600, 5), (600, 6), (600, 6))),
    ):
        kernels = run(op, operands, target)
        assert [k.archetype for k in kernels] == ["contract", "contract"], op.name
        assert kernels[1].name.endswith("_sum")


@pytest.mark.parametrize("kind", KINDS)
def test_what_becomes_one_kernel(kind):
    t, d, f = 65, 40, 36
    for op, operands in cases(t, d, f, 12):
        count = len(run(op, operands, targets()[kind]))
        # Sums that are kept apart and share no operand gain nothing; five are too many.
        two = op in (different_numbers, sum_and_part, five)
        assert count == (2 if two else 1), op.name


@sd.op("t (h r p), t (k r p), t p, t p -> t (h r p), t (k r p)", r=2)
def both_turned(q, k, cos, sin):
    sign = sd.where(sd.index("r") == 0, -1.0, 1.0)
    return tuple(x * cos + sign * x.at(r=1 - sd.index("r")) * sin for x in (q, k))


@pytest.mark.parametrize("p", [4, 3])
def test_maps_of_different_sizes_share_a_kernel_on_gpus(p):
    operands = arrays((7, 6 * p), (7, 2 * p), (7, p), (7, p))
    assert len(run(both_turned, operands, targets()["gpu"])) == 1
    # A driver on the CPU would walk both sides of the branch.
    assert len(run(both_turned, operands, targets()["portable"])) == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("random", [True, False])
def test_gradients(kind, random):
    """Products that share kernels forward and backward, under any cotangent."""
    x, g, b, u, c = arrays((2, 5, 12), (7, 12), (7,), (7, 12), (7,))
    v = rng.standard_normal((2, 5, 7)) if random else np.ones((2, 5, 7))
    device = sd.runtime.current()
    before, device.target = device.target, targets()[kind]
    try:
        y, pullback = sd.vjp(lambda *a: gate_up_bias(*a)[0], x, g, b, u, c)
        found = [np.asarray(d, np.float64) for d in pullback(v.astype(np.float32))]
    finally:
        device.target = before
    x, g, b, u, c = (a.astype(np.float64) for a in (x, g, b, u, c))
    gate, up = x @ g.T + b, x @ u.T + c
    s = 1 / (1 + np.exp(-gate))
    dgate, dup = v * up * s * (1 + gate * (1 - s)), v * gate * s
    want = [
        dgate @ g + dup @ u,
        np.einsum("btf,btd->fd", dgate, x),
        dgate.sum((0, 1)),
        np.einsum("btf,btd->fd", dup, x),
        dup.sum((0, 1)),
    ]
    np.testing.assert_allclose(np.asarray(y), gate * s * up, rtol=1e-4, atol=1e-5)
    for one, other in zip(found, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5)


@sd.op("t d, f d, f d -> t f")
def gate_up_with_a_stored_gate(x, g, u):
    gate = sd.sum(x * g, over="d").store()
    return sd.silu(gate) * sd.sum(x * u, over="d")


@sd.op("t d, f d, f d -> t f, t f")
def a_stored_map_of_two_sums(x, g, u):
    gate, up = sd.sum(x * g, over="d"), sd.sum(x * u, over="d")
    both = (sd.silu(gate) * up).store()
    return sd.exp(-0.01 * both * both), gate


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_to_be_stored_is_stored(kind):
    """By the kernel that computes it and all that reads it, too."""
    for op, results in (
        (gate_up_with_a_stored_gate, 1),
        (a_stored_map_of_two_sums, 2),
    ):
        (kernel,) = run(op, arrays((65, 40), (36, 40), (36, 40)), targets()[kind])
        assert len(kernel.writes) == results + 1
