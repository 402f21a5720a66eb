"""Computing again in the backward pass: the same numbers, less kept."""

from __future__ import annotations

import functools
import gc

import numpy as np
import pytest

import shaderdsl as sd
from shaderdsl import nn

RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def layer(x, w, v):
    h = x @ w
    return x + sd.tanh(h * sd.rsqrt(sd.mean(h * h, axis=-1, keepdims=True) + 1.0)) @ v


def deep(f, x, ws):
    for w, v in ws:
        x = f(x, w, v)
    return sd.sum(x * x)


def peak(run):
    """Bytes that a call needs beyond what is there already, and what it gives."""
    run()
    gc.collect()
    with sd.profile() as before:
        sd.array(np.ones(1, np.float32)) + 1.0
    with sd.profile() as p:
        found = run()
    return p.peak_bytes - before.peak_bytes, found


def weights(layers, n):
    return [(normal(n, n) / n**0.5, normal(n, n) / n**0.5) for _ in range(layers)]


@pytest.mark.parametrize("compiled", [False, True])
def test_the_same_gradients(device, compiled):
    x, ws = normal(7, 12), weights(3, 12)
    results = []
    for f in (layer, sd.remat(layer)):
        run = functools.partial(sd.value_and_grad(deep, argnums=(1, 2)), f)
        run = sd.compile(run) if compiled else run
        run(x, ws)
        with sd.profile() as p:
            found = sd.tree.leaves(run(x, ws))
        assert p.compiled == 0
        results.append([np.asarray(a) for a in found])
    for a, b in zip(*results):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(a).max())


def test_less_is_kept(device):
    def long(x, w, v):
        h = x
        for _ in range(3):
            h = sd.tanh(sd.tanh(h @ w) @ v)
        return x + h

    x, ws = normal(600, 24), weights(4, 24)
    peaks = []
    for f in (long, sd.remat(long)):
        run = sd.grad(lambda x, f=f: deep(f, x, ws))
        peaks.append(peak(lambda run=run: run(x))[0])
    # Six arrays a layer as large as x, or one a layer and six for a time.
    assert peaks[1] < 0.7 * peaks[0]


def test_what_forward_keeps(cpu):
    specs = [sd.spec("f32", 64, 48), sd.spec("f32", 48, 48), sd.spec("f32", 48, 48)]

    def two(f):
        return lambda x, w, v: f(f(x, w, v), w, v)

    plain = sd.lower(two(layer), *specs, backward=True).residuals
    less = sd.lower(two(sd.remat(layer)), *specs, backward=True).residuals
    large = [sum(len(s.shape) == 2 for s in r) for r in (plain, less)]
    assert large[1] < large[0] and large[1] <= 2
    forward = [len(sd.lower(two(f), *specs).kernels) for f in (layer, sd.remat(layer))]
    assert forward[0] == forward[1]


def test_pullbacks(device):
    x, (w, v) = normal(5, 6), weights(1, 6)[0]
    dy = normal(5, 6)
    y, pullback = sd.vjp(layer, x, w, v)
    again, other = sd.vjp(sd.remat(layer), x, w, v)
    np.testing.assert_allclose(y, again, rtol=1e-6)
    for a, b in zip(pullback(dy), other(dy)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_regions_in_regions_and_derivatives_of_derivatives(device):
    x, ws = normal(4, 6), weights(3, 6)

    def inner(x, w, v):
        return sd.remat(layer)(sd.remat(sd.tanh)(x), w, v)

    def plain(x, w, v):
        return layer(sd.tanh(x), w, v)

    for f, g in ((plain, sd.remat(inner)), (layer, sd.remat(layer))):
        want = sd.grad(lambda x, f=f: deep(f, x, ws))(x)
        have = sd.grad(lambda x, g=g: deep(g, x, ws))(x)
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-4)

    def slope(f):
        def of(x):
            return sd.sum(sd.grad(lambda x: deep(f, x, ws[:1]))(x) ** 2)

        return sd.grad(of)(x)

    want, have = slope(layer), slope(sd.remat(layer))
    np.testing.assert_allclose(have, want, rtol=1e-3, atol=1e-3)


def test_results_that_are_arguments(cpu):
    same = sd.remat(lambda x: (x, x * 2.0))
    gradient = sd.grad(lambda x: sd.sum(same(x)[0] * same(x)[1]))(normal(3))
    assert gradient.shape == (3,)
    assert np.array_equal(sd.remat(lambda x: x + 1.0)(np.zeros(2)), [1, 1])


def test_a_transformer(device):
    config = nn.TransformerConfig(
        vocab_size=32,
        hidden_size=24,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        ffn_size=64,
        max_positions=64,
    )
    model = nn.Transformer.init(config)
    ids = RNG.integers(0, 32, (4, 64)).astype(np.int32)
    documents = np.repeat(np.arange(4, dtype=np.int32), 16)
    results, peaks = [], []

    def loss(model, ids, again):
        y = model(ids, documents=documents, remat=again)
        return nn.cross_entropy(y, ids)

    for again in (False, True):
        step = sd.compile(functools.partial(sd.value_and_grad(loss), again=again))
        needed, found = peak(lambda step=step: step(model, ids))
        results.append([np.asarray(a) for a in sd.tree.leaves(found)])
        peaks.append(needed)
    for a, b in zip(*results):
        assert np.abs(a - b).max() <= 2e-6 * max(1.0, np.abs(a).max())
    assert peaks[1] < 0.9 * peaks[0]
