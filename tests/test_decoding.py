"""Few queries against many keys: pieces of the keys, then combined."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
from test_attention import archetypes, check, exact, heads, make

import shaderdsl as sd
from shaderdsl import nn, ops
from shaderdsl.codegen.target import Features, Limits

PIECES = ["online", "online"]


def compare(f, *args):
    """Results alone."""
    ys = f(*args)
    ys = ys if isinstance(ys, tuple) else (ys,)
    expected, _ = exact(f, args, [np.zeros(y.shape) for y in ys])
    for a, b in zip(ys, expected, strict=True):
        np.testing.assert_allclose(a.numpy(), b, 1e-4, 2e-5)


def decode(h, hk, t, s, d, **options):
    f = lambda *xs: ops.attention(*xs, **options)  # noqa: E731
    return f, heads(h, hk, t, s, d, b=options.pop("b", 1))


@pytest.mark.parametrize(
    ("h", "hk", "t", "options"),
    [
        (4, 4, 1, {}),
        (1, 1, 1, {"start": 120, "return_lse": True}),
        (3, 1, 2, {"window": 70, "softcap": 3.0}),
    ],
)
def test_values_and_gradients(wgpu, h, hk, t, options):
    f, args = decode(h, hk, t, 301, 20, **options)
    assert archetypes(f, *args) == PIECES
    check(f, *args)


@pytest.mark.parametrize(
    ("h", "hk", "t", "options"),
    [
        (6, 2, 1, {"window": 40, "return_lse": True}),
        (8, 1, 1, {"start": 0}),
        (12, 1, 1, {"softcap": 2.0}),
        (2, 1, 7, {"start": 44, "return_lse": True}),
        (2, 2, 13, {"causal": False}),
    ],
)
def test_values(wgpu, h, hk, t, options):
    f, args = decode(h, hk, t, 301, 20, **options)
    assert archetypes(f, *args) == PIECES
    compare(f, *args)


@pytest.mark.parametrize("t", [1, 29])
def test_on_gpus(retarget, t):
    """Within portable limits, at any size of the scores."""
    retarget(family="gpu", features=Features(), limits=Limits(), online_from=1 << 28)
    f, args = decode(6, 2, t, 290, 16, window=200, return_lse=True)
    assert archetypes(f, *args) == PIECES
    check(f, *args)


def test_more_rows_than_a_workgroup_and_batches(retarget):
    retarget(family="gpu", features=Features(), limits=Limits())
    lengths, starts = np.array([300, 1, 77], np.int32), np.array([280, 0, 60], np.int32)

    def f(q, k, v):
        return ops.attention(q, k, v, lengths=lengths, start=starts)

    args = heads(4, 2, 20, 300, 8, b=3)
    assert archetypes(f, *args) == PIECES
    compare(f, *args)


@pytest.mark.parametrize("d", [4, 36, 64, 256])
def test_head_sizes(wgpu, d):
    f, args = decode(2, 1, 1, 130, d)
    assert archetypes(f, *args) == PIECES
    compare(f, *args)


def test_hooks_and_captured_arrays(wgpu):
    bias, documents = make(4, 200), np.repeat([0, 1, 2], 70).astype(np.int32)

    def score(x, b, h, i, j, bias):
        return x + bias[h, sd.clip(i - j, 0, 199)]

    def mask(b, h, i, j, documents):
        return documents[i] == documents[j]

    def f(q, k, v, bias):
        captured = {"bias": bias, "documents": documents}
        return ops.attention(q, k, v, score=score, mask=mask, captured=captured)

    args = *heads(4, 2, 2, 210, 16), bias
    assert archetypes(f, *args) == PIECES
    compare(f, *args)


def test_rows_that_see_nothing(wgpu):
    """Zeros, whether some pieces are left or none."""
    q, k, v = heads(4, 2, 2, 150, 8)
    none = np.zeros(1, np.int32)
    y = ops.attention(q, k, v, causal=False, lengths=none)
    assert not np.asarray(y).any()
    # of two rows the first sees nothing
    mask = lambda b, h, i, j: (i > 0) & (j < 9)  # noqa: E731
    options = {"start": 0, "causal": False, "mask": mask, "return_lse": True}
    y, lse = (np.asarray(x) for x in ops.attention(q, k, v, **options))
    assert not y[:, :, 0].any() and y[:, :, 1].any()
    assert np.isneginf(lse[:, :, 0]).all() and np.isfinite(lse[:, :, 1]).all()


def test_a_users_own_softmax(wgpu):
    """A row of values that another row weighs; no heads, no batch."""

    @sd.op("d, s d, s c -> c")
    def pooled(q, k, v):
        return sd.sum(sd.softmax(sd.sum(q * k, over="d"), over="s") * v, over="s")

    args = make(16), make(400, 16, seed=1), make(400, 8, seed=2)
    assert archetypes(pooled, *args) == PIECES
    compare(pooled, *args)


def test_huge_scores(wgpu):
    """Maxima of pieces that lie far apart."""
    q, k, v = heads(2, 1, 1, 400, 8)
    k[:, :, 333] *= 40
    k[:, :, 7] *= -20
    f = lambda *xs: ops.attention(*xs, scale=6.0)  # noqa: E731
    exact = q.astype(np.float64) @ k.astype(np.float64).transpose(0, 1, 3, 2) * 6
    p = np.exp(exact - exact.max(-1, keepdims=True))
    expected = p / p.sum(-1, keepdims=True) @ v.astype(np.float64)
    np.testing.assert_allclose(np.asarray(f(q, k, v)), expected, 1e-4, 1e-5)


# ------------------------------------------------------------------ what it costs


def test_two_kernels_at_any_length(device):
    for h, hk, t in ((8, 2, 1), (4, 4, 1), (4, 1, 3)):
        texts = set()
        for s in (64, 4096, 100_000, 300_000):
            q, cache = sd.spec("f32", 1, h, t, 16), sd.spec("f32", 1, hk, s, 16)
            low = sd.lower(ops.attention, q, cache, cache)
            assert len(low.kernels) == 2
            texts.add("".join(k.wgsl for k in low.kernels))
            for k in low.kernels:
                assert all(b.tensor.size <= hk * s * 16 for b in k.bindings)
        assert len(texts) == 1


def test_a_cache_of_more_keys_than_a_loop_may_have_turns(wgpu):
    """Equal scores: the mean of all values, of which no piece may be left out."""
    s = 200_000
    q, k = np.zeros((1, 1, 1, 4), np.float32), np.zeros((1, 1, s, 4), np.float32)
    v = make(1, 1, s, 4)
    y, lse = ops.attention(q, k, v, return_lse=True)
    mean = v.astype(np.float64).mean(axis=2)
    np.testing.assert_allclose(np.asarray(y)[:, :, 0], mean, atol=2e-6)
    np.testing.assert_allclose(np.asarray(lse), np.log(s), rtol=1e-6)


def test_pieces_keep_the_budget_of_loops(cpu):
    """Counted from the text: steps of a piece times what a step holds."""
    budget = 3000
    before = cpu.target
    cpu.target = dataclasses.replace(
        before, family="software", loop_budget=budget, features=Features()
    )
    try:
        for d, s in ((256, 65_536), (64, 1 << 18), (4, 1 << 20)):
            shapes = [sd.spec("f32", 1, 64, n, d) for n in (1, s, s)]
            first, _ = sd.lower(ops.attention, *shapes).kernels
            count = next(
                p.value
                for n, p in zip(re.findall(r"(\w+): \w\d\d", first.wgsl), first.params)
                if n.startswith("pieces")
            )
            size = first.workgroup_size[0]
            inner = sum(
                -(-(int(end) if end.isdigit() else size) // int(step))
                for end, step in re.findall(
                    r"for \(var [dk] = .*; [dk] < (\w+?)u?; [dk] = [dk] \+ (\d+)u\)",
                    first.wgsl,
                )
            )
            assert -(-s // (count * size)) * (1 + inner) <= budget, (d, s, count)
    finally:
        cpu.target = before


SMALL = {
    "vocab_size": 20,
    "hidden_size": 16,
    "num_layers": 1,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "ffn_size": 24,
    "max_positions": 8192,
}


def ids(n):
    return np.random.default_rng(n).integers(0, 19, n).astype(np.int32)


@pytest.mark.parametrize("variant", [{}, {"num_kv_heads": 4, "windows": (20,)}])
@pytest.mark.parametrize("family", ["own", "gpu"])
def test_prompts_and_caches_of_any_length_compile_nothing(device, family, variant):
    before = device.target
    if family == "gpu":
        if before.family == "cpu":
            pytest.skip("the device has no drivers")
        features = dataclasses.replace(before.features, wide_words=False)
        options = {"family": "gpu", "features": features, "online_from": 1 << 28}
        device.target = dataclasses.replace(before, **options)
    try:
        config = nn.TransformerConfig(**{**SMALL, **variant})
        model = nn.Transformer.init(config, seed=1)
        model.generate(ids(7), max_new_tokens=2)
        cache = model.new_cache(capacity=40)
        cache.run(model, ids(9))
        cache.grow(100)
        cache.run(model, ids(40))
        with sd.profile() as p:
            for n in (300, 700, 1500, 5000)[: 1 if before.family == "cpu" else 4]:
                model.generate(ids(n), max_new_tokens=3)
            for n in (333, 1111)[: 1 if before.family == "cpu" else 2]:
                cache.grow(n + 40)
                cache.run(model, ids(n - cache.length))
                cache.step(model, sd.array(ids(1)))
        assert p.compiled == 0
    finally:
        device.target = before


def test_a_longer_cache_gives_the_same_token(device):
    """What lies behind the length changes nothing."""
    model = nn.Transformer.init(nn.TransformerConfig(**SMALL), seed=1)
    found = []
    for capacity in (90, 700, 4000):
        cache = model.new_cache(capacity=capacity)
        cache.run(model, ids(80))
        found.append(np.asarray(cache.step(model, sd.array(ids(1)))))
    for y in found[1:]:
        np.testing.assert_allclose(y, found[0], 1e-5, 1e-6)
