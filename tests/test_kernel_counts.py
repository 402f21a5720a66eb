"""How many kernels an op takes, forward with residuals and pullback, and that new sizes
and options compile nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shaderdsl as sd
from shaderdsl import ops


def shape(*n: int) -> Any:
    return sd.spec("f32", *n)


def counts(f: Callable[..., Any], *args: Any) -> tuple[int, int]:
    return len(sd.lower(f, *args).kernels), len(
        sd.lower(f, *args, backward=True).kernels
    )


@sd.op("... d, ... d -> ... d")
def swiglu(gate, up):
    return sd.silu(gate) * up


@sd.op("t d -> t d")
def softmax(x):
    return sd.softmax(x, over="d")


@sd.op("t k, n k, n, t n -> t n")
def linear_silu_residual(x, w, bias, residual):
    return residual + sd.silu(sd.sum(x * w, over="k") + bias)


@pytest.mark.parametrize("n", [48, 64, 1024, 1000])
def test_elementwise_and_rows(device, n):
    assert counts(swiglu, shape(128, n), shape(128, n)) == (1, 1)
    assert counts(softmax, shape(128, n)) == (1, 1)


@pytest.mark.parametrize("n", [48, 64, 1024, 1000])
def test_norms(device, n):
    """RMSNorm: dx with the first stage of dgain, then its second. LayerNorm has two
    such sums.
    """
    assert counts(ops.rms_norm, shape(128, n), shape(n)) == (1, 2)
    forward, backward = counts(ops.layer_norm, shape(128, n), shape(n), shape(n))
    assert forward == 1 and backward <= 3


@sd.op("... d, ... d, d -> ... d, ... d")
def add_norm(x, residual, gain):
    h = x + residual
    return h, h * sd.rsqrt(sd.mean(h * h, over="d") + 1e-6) * gain


@sd.op("t d, d -> t, t d")
def total_and_shifted(x, bias):
    return sd.sum(x + bias, over="d"), x + bias


def test_a_map_and_rows_of_it_are_one_kernel(device):
    rows = shape(64, 96), shape(64, 96), shape(96)
    assert counts(add_norm, *rows) == (1, 2)
    assert counts(total_and_shifted, shape(64, 96), shape(96))[0] == 1
    x, r = (np.random.default_rng(k).normal(size=(64, 96)) for k in range(2))
    gain = np.linspace(0.5, 2, 96)
    h, y = add_norm(*(a.astype(np.float32) for a in (x, r, gain)))
    np.testing.assert_allclose(h.numpy(), x + r, rtol=1e-5, atol=1e-6)
    expected = add_norm.reference(x, r, gain)[1]
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_what_is_beside_an_extreme_of_columns(device):
    """A kernel of rows adds up what it sums over rows; a maximum is no such sum."""

    def both(x):
        return sd.argmax(x, axis=0), sd.max(x, axis=0), x * 2.0, sd.sum(x, axis=1)

    x = np.random.default_rng(3).normal(size=(33, 5)).astype(np.float32)
    got = sd.compile(both)(x)
    want = (x.argmax(0), x.max(0), x * 2, x.sum(1))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a.numpy(), b, rtol=1e-5, atol=1e-6)


def test_loss(device):
    labels = sd.spec("i32", 128)
    assert counts(
        lambda x, y: ops.cross_entropy_rows(x, y), shape(128, 1000), labels
    ) == (1, 1)


def test_product_with_an_epilogue(device):
    args = shape(64, 96), shape(80, 96), shape(80), shape(64, 80)
    assert len(sd.lower(linear_silu_residual, *args).kernels) == 1


def test_optimiser_of_a_whole_model(device):
    """AdamW of every parameter: arenas, one kernel for each kind of update."""
    config = sd.nn.TransformerConfig(
        vocab_size=64,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        ffn_size=48,
    )
    model = sd.nn.Transformer.init(config, seed=0)
    optimiser = sd.optim.AdamW(lr=1e-3)
    state = optimiser.init(model)
    gradients = sd.tree.map(lambda p: sd.ones(p.shape), model)
    step = sd.compile(lambda m, g, s: optimiser.update(m, g, s), donate=("m", "s"))
    model, state = step(model, gradients, state)
    with sd.profile() as p:
        model, state = step(model, gradients, state)
    assert p.dispatches <= 4
    assert p.compiled == p.uploads == p.downloads == 0


def test_a_block_of_a_transformer(device):
    """q, k, v and gate, up share kernels, and so do the gradients that they give."""
    config = sd.nn.TransformerConfig(
        vocab_size=64,
        hidden_size=768,
        num_layers=1,
        num_heads=12,
        num_kv_heads=4,
        ffn_size=2048,
    )
    model = sd.nn.Transformer.init(config, seed=0)
    forward, backward = counts(lambda m, x: m.layers[0](x), model, shape(1, 2048, 768))
    assert forward <= 10 and backward <= 20


def test_a_training_step_repeats_at_no_cost(device):
    config = sd.nn.TransformerConfig(
        vocab_size=64,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        ffn_size=48,
    )
    model = sd.nn.Transformer.init(config, seed=0)
    optimiser = sd.optim.AdamW(lr=1e-3, max_grad_norm=1.0)
    state = optimiser.init(model)

    def train_step(model, state, ids, labels):
        def loss(m):
            return sd.nn.cross_entropy(m(ids), labels)

        value, gradients = sd.value_and_grad(loss)(model)
        model, state = optimiser.update(model, gradients, state)
        return model, state, value

    step = sd.compile(train_step, donate=("model", "state"))
    ids = sd.array(np.random.default_rng(0).integers(0, 64, (2, 16)).astype(np.int32))
    model, state, first = step(model, state, ids, ids)
    with sd.profile() as p:
        model, state, second = step(model, state, ids, ids)
    assert p.compiled == p.uploads == p.downloads == 0
    assert float(second) < float(first)


def test_another_option_compiles_nothing(device):
    x, gain = np.ones((6, 40), np.float32), np.ones(40, np.float32)
    ops.rms_norm(x, gain, eps=1e-5)
    with sd.profile() as p:
        ops.rms_norm(x, gain, eps=1e-3).numpy()
    assert p.compiled == 0


def test_sizes_of_one_class_are_one_text(device):
    texts = set()
    for rows, n in [(5, 40), (17, 44), (300, 52), (3, 60)]:
        low = sd.lower(ops.rms_norm, shape(rows, n), shape(n))
        texts.add("".join(k.wgsl for k in low.kernels))
    assert len(texts) == 1


def test_explain_says_why(device):
    text = sd.lower(ops.rms_norm, shape(128, 64), shape(64), backward=True).explain()
    assert "forward keeps for this" in text and "FLOPs" in text and "reads" in text
