"""Products of a single row, and the step of decoding that is made of them, as planned
for GPUs.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import shaderdsl as sd
from shaderdsl import nn, ops
from shaderdsl.codegen.lower import lower
from shaderdsl.ir import interpret
from shaderdsl.runtime.profiling import profile


def arrays(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(s).astype(np.float32) for s in shapes]


def check(device, f, *operands, limit=None):
    """The program of an op for a GPU, whose results are those of float64."""
    traced = sd.lower(f, *operands).program
    target = device.target
    if limit is not None:
        limits = dataclasses.replace(target.limits, max_storage_buffers=limit)
        target = dataclasses.replace(target, limits=limits)
    for _ in range(2):  # printed, then taken over
        program = lower(traced.outputs, target, inputs=traced.inputs)
        given = [device.upload(a, "f32") for a in operands]
        results = device.build(program)(given, {})
        expected = interpret.evaluate(
            traced.outputs, dict(zip(traced.inputs, operands, strict=True))
        )
        for buffer, want in zip(results, expected, strict=True):
            got = device.download(buffer, want.shape, "f32")
            assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()
    return program


@sd.op("d, n d -> n")
def times(x, w):
    return sd.sum(x * w, over="d")


@pytest.mark.parametrize(
    "sizes", [(33, 40, 36, 17), (768, 64, 16, 31), (2052, 9, 5, 3)]
)
def test_products_of_one_row_are_one_kernel(gpu, sizes):
    d, *outs = sizes

    def f(x, a, b, c):
        return times(x, a), sd.exp(0.1 * times(x, b)), times(x, c)

    operands = arrays((d,), *((n, d) for n in outs))
    assert len(check(gpu, f, *operands).kernels) == 1
    # seven arrays where six may be bound
    assert len(check(gpu, f, *operands, limit=6).kernels) == 2


def test_products_that_need_each_other_stay_apart(gpu):
    def f(x, w, v):
        y = times(x, w)
        return y, times(x + y, v)

    assert len(check(gpu, f, *arrays((48,), (48, 48), (30, 48))).kernels) == 2


NORMS = {
    "rms": lambda x, g, b: ops.rms_norm(x, g),
    "layer": lambda x, g, b: ops.layer_norm(x, g, b),
    "max": lambda x, g, b: sd.exp(x - sd.max(x)),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("sizes", [(37, 21, 16), (768, 40, 100)])
def test_a_normed_row_is_normed_by_its_products(gpu, norm, sizes):
    d, m, n = sizes

    def f(x, g, b, v, w, u):
        y = NORMS[norm](x, g, b)
        return times(y, v), times(y, w), times(y, u)

    x, *others = arrays((d,), (d,), (d,), (m, d), (n, d), (n, d))
    assert len(check(gpu, f, x + 0.7, *others).kernels) == 1


def test_maps_beside_each_other_bind_an_array_in_one_way(gpu):
    """Vec4s of an array in one map, single elements of it in another."""

    def f(x, y, z):
        return x * y, sd.exp(x[1:3] * z), x[2] + z

    assert len(check(gpu, f, *arrays((16,), (16,), (2,))).kernels) <= 2


def test_a_normed_row_that_others_read_is_stored(gpu):
    def f(x, g, w):
        y = ops.rms_norm(x, g)
        return y, times(y, w)

    program = check(gpu, f, *arrays((64,), (64,), (32, 64)))
    assert len(program.kernels) == 2


CONFIG = {
    "vocab_size": 50,
    "hidden_size": 48,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 12,
    "ffn_size": 72,
    "max_positions": 256,
}
VARIANTS = {
    "plain": ({}, 7),
    "layer": ({"norm": "layer", "positions": "learned"}, 7),
    "alibi": ({"positions": "alibi"}, 7),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_kernels_of_a_step(gpu, variant):
    """Products of the normed row; q turned, and k and v into the cache; attention in
    pieces and their combination; its product; gate and up; down.
    """
    options, layer = VARIANTS[variant]
    ids = np.random.default_rng(0).integers(0, 50, 20).astype(np.int32)
    counts = []
    for layers in (1, 2):
        config = nn.TransformerConfig(**CONFIG, num_layers=layers, **options)
        model = nn.Transformer.init(config, seed=1)
        cache = model.new_cache(capacity=64)
        cache.run(model, ids[:12])
        logits = []
        for at in range(12, 20):
            with profile() as p:
                logits.append(np.asarray(cache.step(model, sd.array(ids[at : at + 1]))))
        counts.append(p.dispatches)
        with profile() as p:  # The same, and what draws a token and counts on.
            cache.follow(model, sd.array(ids[:1]))
        assert p.dispatches == counts[-1] + 2
    assert counts[1] - counts[0] == layer
    assert counts[0] <= layer + (2 if options else 1)
    sd.use_device("cpu")
    whole = np.asarray(nn.Transformer.init(config, seed=1)(ids[None]))[0, 12:]
    assert np.abs(np.concatenate(logits) - whole).max() < 1e-5 * np.abs(whole).max()
