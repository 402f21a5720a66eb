"""Gradients of arrays that hooks capture: sums over both sides of the scores.

Each against float64; none may hold an array of queries by keys.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from test_attention import check, heads, make

import shaderdsl as sd
from shaderdsl import ops
from shaderdsl.codegen import online_shape
from shaderdsl.codegen.contract_registers import sharing_lanes
from shaderdsl.codegen.target import Features
from shaderdsl.ir.stage import Stage
from shaderdsl.runtime import current

T, S = 37, 40
DOCUMENTS = np.sort(np.random.default_rng(0).integers(0, 3, (2, S)), axis=1)
DOCUMENTS = DOCUMENTS.astype(np.int32)


def between(i, j):
    return sd.cast(i - j, "f32")


# hook, shape of the array, keywords
HOOKS = {
    "relative": (lambda x, b, h, i, j, bias: x + bias[h, i - j + 16], (4, 33), 16),
    "every distance": (lambda x, b, h, i, j, bias: x + bias[h, i - j + S], (4, 81), 0),
    "distances the other way": (
        lambda x, b, h, i, j, bias: x + bias[h, j - i + S],
        (4, 81),
        0,
    ),
    "sums of positions": (lambda x, b, h, i, j, bias: x + bias[h, i + j], (4, 90), 0),
    "uneven": (lambda x, b, h, i, j, bias: x + bias[h, i + 2 * j], (4, 160), 0),
    "factor": (lambda x, b, h, i, j, bias: x * bias[h, i - j + 16], (4, 33), 16),
    "clipped": (
        lambda x, b, h, i, j, bias: x + bias[h, sd.clip(i - j, -2, 2) + 2],
        (4, 5),
        0,
    ),
    "guarded": (
        lambda x, b, h, i, j, bias: (
            x + sd.where((i - j < 3) & (i >= j), bias[h, i - j], 0.0)
        ),
        (4, 3),
        0,
    ),
    "slopes": (lambda x, b, h, i, j, bias: x - bias[h] * between(i, j), (4,), 0),
    "caps": (lambda x, b, h, i, j, bias: bias[h] * sd.tanh(x / bias[h]), (4,), 0),
    "temperatures": (lambda x, b, h, i, j, bias: x * bias[h, i], (4, S), 0),
    "pairs of documents": (
        lambda x, b, h, i, j, bias, documents: (
            x + bias[documents[b, i], documents[b, j]]
        ),
        (3, 3),
        0,
    ),
    "documents": (
        lambda x, b, h, i, j, bias, documents: x + bias[documents[b, j]],
        (3,),
        0,
    ),
    "blocks": (lambda x, b, h, i, j, bias: x + bias[h, i // 8, j // 8], (4, 5, 5), 0),
    "windows of an image": (
        lambda x, b, h, i, j, bias: x + bias[h, i // 8 - j // 8 + 4, i % 8 - j % 8 + 7],
        (4, 9, 15),
        0,
    ),
    "twice": (
        lambda x, b, h, i, j, bias: (
            x + bias[h, i - j + 39] * bias[h, sd.clip(j - i, 0, 2)]
        ),
        (4, 80),
        0,
    ),
}


def attention(hook, window):
    def f(q, k, v, bias):
        captured = {"bias": bias, "documents": DOCUMENTS}
        options = {"window": window} if window else {}
        return ops.attention(q, k, v, score=hook, captured=captured, **options)

    return f


@pytest.mark.parametrize("name", HOOKS)
def test_gradients_of_captured_arrays(wgpu, name):
    hook, shape, window = HOOKS[name]
    bias = np.abs(make(*shape, seed=3)) + 0.5
    check(attention(hook, window), *heads(4, 2, T, S, 16, b=2), bias)


def test_bands_of_diagonals(wgpu):
    """Distances are summed a band at a time where values go around in subgroups;
    numbers of rows, lines, distances and of a head's elements that are no multiples.
    """
    if not sharing_lanes(current().target):
        pytest.skip("values do not go around on this adapter")
    hook = lambda x, b, h, i, j, bias: x * bias[h, i - j + 20]  # noqa: E731
    for t, s, window, distances in ((21, 33, 13, 33), (9, 30, 11, 41), (40, 40, 9, 30)):
        f = attention(hook, window)
        args = (*heads(4, 2, t, s, 6), make(4, distances, seed=3))
        low = sd.lower(f, *args, backward=True)
        assert "a band of distances at a time" in low.explain()
        check(f, *args)


@pytest.fixture
def limits(cpu):
    """Plan for a device that binds so many arrays."""
    before = cpu.target

    def change(buffers):
        limits = dataclasses.replace(before.limits, max_storage_buffers=buffers)
        cpu.target = dataclasses.replace(before, limits=limits)

    yield change
    cpu.target = before


def lowered(name):
    hook, shape, window = HOOKS[name]
    args = [sd.spec("f32", 2, h, n, 16) for h, n in ((4, T), (2, S), (2, S))]
    args.append(sd.spec("f32", *shape))
    f = attention(hook, window)
    assert len(apart_from_ids(sd.lower(f, *args))) == 1
    return sd.lower(f, *args, backward=True)


def apart_from_ids(low):
    """Kernels but for those that look whether ids are in range."""
    return [k for k in low.kernels if not k.name.endswith("_ids")]


@pytest.mark.parametrize("name", HOOKS)
def test_nothing_of_queries_by_keys(name, limits):
    limits(12)
    low = lowered(name)
    kernels = apart_from_ids(low)
    for k in kernels:
        assert all(b.tensor.size < 4 * T * S for b in k.bindings), k.name
        assert len(k.bindings) <= 12
    # delta, queries, keys; one for the array, and one more where it goes by distance
    # first or by destination.
    assert len(kernels) <= (6 if name == "twice" else 5), low.explain()


@pytest.mark.parametrize(
    "name", ["relative", "clipped", "slopes", "windows of an image"]
)
def test_eight_arrays_suffice(name, limits):
    """What is computed from several arrays is stored where kernels bind few."""
    limits(8)
    low = lowered(name)
    assert "bind more than 8 arrays" in low.explain()
    for k in low.kernels:
        assert all(b.tensor.size < 4 * T * S for b in k.bindings), k.name
        assert len(k.bindings) <= 8


def test_eight_arrays_suffice_for_a_bias_and_documents(wgpu):
    """Maximum and delta of each row lie side by side; values follow float64."""
    device = current()
    before = device.target
    limits = dataclasses.replace(before.limits, max_storage_buffers=8)
    documents = {"documents": DOCUMENTS}

    def f(q, k, v, bias):
        mask = lambda b, h, i, j, documents: documents[b, i] == documents[b, j]  # noqa: E731
        score = HOOKS["relative"][0]
        captured = {"bias": bias, **documents}
        return ops.attention(
            q, k, v, score=score, mask=mask, captured=captured, window=16
        )

    args = (*heads(4, 2, T, S, 16, b=2), make(4, 33, seed=3))
    try:
        device.target = dataclasses.replace(before, limits=limits)
        low = sd.lower(f, *args, backward=True)
        for k in low.kernels:
            arrays = [b.tensor for b in k.bindings if isinstance(b.tensor, Stage)]
            assert all(x.size < 4 * T * S for x in arrays), k.name
            assert len(k.bindings) <= 8
        check(f, *args)
    finally:
        device.target = before


def test_a_gradient_of_every_pair(wgpu):
    """Where the array is as large as the scores, so is its gradient; nothing else."""

    def f(q, k, v, bias):
        score = lambda x, b, h, i, j, bias: x + bias[i, j]  # noqa: E731
        return ops.attention(q, k, v, score=score, captured={"bias": bias})

    args = (*heads(4, 2, 19, 19, 8, b=2), make(19, 19, seed=3))
    check(f, *args)
    low = sd.lower(f, *args, backward=True)
    assert all(b.tensor.size < 8 * 19 * 19 for k in low.kernels for b in k.bindings)


def test_the_same_from_run_to_run(wgpu):
    hook, shape, window = HOOKS["relative"]
    args = (*heads(4, 2, T, S, 16, b=2), make(*shape, seed=3))
    runs = []
    for _ in range(3):
        y, pullback = sd.vjp(attention(hook, window), *args)
        runs.append(pullback(make(*y.shape, seed=9))[3].numpy())
    assert (runs[0] == runs[1]).all() and (runs[0] == runs[2]).all()


def test_on_gpus(retarget, monkeypatch):
    """Sums of 128 lanes and the tiled schedules beside them."""
    monkeypatch.setattr(online_shape, "SHAPES", ((16, 16, 4, 4),))
    retarget(family="gpu", features=Features())
    hook, _, window = HOOKS["relative"]
    args = (*heads(2, 1, 19, 21, 8, b=2), make(2, 33, seed=3))
    check(attention(hook, window), *args)
