"""Texts that a software driver compiles quickly: loops where straight-line text would
be long. Their values, and how long the texts of a training step are.
"""

import re

import numpy as np
import pytest

import shaderdsl as sd
from shaderdsl import ops
from shaderdsl.codegen.contract_registers import sharing_lanes
from shaderdsl.codegen.lower import lower
from shaderdsl.ir import interpret
from shaderdsl.runtime import current
from shaderdsl.tracing import Traced

rng = np.random.default_rng(11)


@sd.op("t d, v d, t -> t")
def losses(x, w, labels):
    logits = sd.sum(x * w, over="d")
    return sd.logsumexp(logits, over="v") - logits.at(v=labels)


@sd.op("h t d, h s d, h s e -> h t e")
def causal(q, k, v):
    x = sd.sum(q * k, over="d") / 8.0
    seen = sd.index("s") <= sd.index("t")
    p = sd.softmax(sd.where(seen, x, -float("inf")), over="s")
    return sd.sum(p * v, over="s")


def normals(*shape):
    return rng.standard_normal(shape).astype(np.float32)


def differences(function, xs):
    """Kernels, and each result's error against float64."""
    device = current()
    traced = Traced(function, tuple(xs), "lower")
    program = lower(traced.outs, device.target, inputs=traced.inputs)
    buffers = [
        device.upload(x, s.dtype) for x, s in zip(xs, traced.inputs, strict=True)
    ]
    results = device.build(program)(buffers, {})
    want = interpret.evaluate(traced.outs, dict(zip(traced.inputs, xs, strict=True)))
    errors = []
    for b, s, w in zip(results, traced.outs, want, strict=True):
        got = np.asarray(device.download(b, s.shape, s.dtype), np.float64)
        errors.append(float(np.abs(got - w).max() / max(1.0, np.abs(w).max())))
    return program.kernels, errors


def rolled(kernels, archetype):
    """Whether each kernel of an archetype hands values around in a loop."""
    found = [k.wgsl for k in kernels if k.archetype == archetype]
    return bool(found) and all("subgroupShuffle" in text for text in found)


@pytest.fixture
def software(wgpu):
    if wgpu.target.family != "software":
        pytest.skip("a schedule of software drivers")
    return wgpu


@pytest.mark.parametrize("width", [128, 131, 256])
@pytest.mark.parametrize("words", [3, 21])
def test_losses_of_long_rows(width, words, software):
    """The loss, and its gradients with what follows them in one kernel."""

    def both(x, w, labels, dy, old):
        y, pullback = sd.vjp(losses, x, w, labels)
        dx, dw, _ = pullback(dy)
        return y, dx, old - 0.1 * sd.tanh(dw * dw + old)

    labels = rng.integers(0, words, 19).astype(np.int32)
    x, w, old = normals(19, width), normals(words, width), normals(words, width)
    kernels, errors = differences(both, [x / 8, w, labels, normals(19), old])
    assert max(errors) < 5e-6, errors
    if sharing_lanes(software.target) == 8:
        assert rolled(kernels, "online")


@pytest.mark.parametrize(("d", "e"), [(128, 128), (160, 12), (12, 133)])
@pytest.mark.parametrize("t", [1, 41])
def test_attention_of_long_heads(d, e, t, software):
    def both(q, k, v, dy):
        y, pullback = sd.vjp(causal, q, k, v)
        return y, *pullback(dy)

    xs = [normals(2, t, d), normals(2, t, d), normals(2, t, e), normals(2, t, e)]
    _, errors = differences(both, xs)
    assert max(errors) < 5e-6, errors


@sd.op("m k, k n, m, m n -> m n, m")
def followed(x, w, row, old):
    """Much follows the sum, for each row and for each element."""
    y = sd.sum(x * w, over="k")
    return sd.silu(y + row) * old + sd.sqrt(sd.abs(y * old)), row * 2.0


@pytest.mark.parametrize("sizes", [(1, 8, 8), (33, 12, 40), (70, 7, 33), (64, 64, 64)])
def test_what_follows_a_product(sizes):
    m, k, n = sizes
    xs = [normals(m, k), normals(k, n), normals(m), normals(m, n)]
    _, errors = differences(followed, xs)
    assert max(errors) < 5e-6, errors


def test_a_training_step_has_no_long_text(software):
    """Statements of each kernel, of a model whose rows are 256 long."""
    config = sd.nn.TransformerConfig(
        vocab_size=512, hidden_size=256, num_layers=1, num_heads=8, num_kv_heads=2,
        head_dim=32, ffn_size=704, max_positions=64,
    )  # fmt: skip
    model = sd.nn.Transformer.init(config)
    optimiser = sd.optim.AdamW(lr=1e-3)
    ids = sd.asarray(np.arange(64, dtype=np.int32))

    def step(model, state, ids):
        def loss_of(model):
            return ops.cross_entropy(model(ids), ids)

        loss, gradients = sd.value_and_grad(loss_of)(model)
        return loss, optimiser.update(model, gradients, state)

    kernels = sd.lower(step, model, optimiser.init(model), ids).kernels
    longest = max(len(re.findall(r";$", k.wgsl, re.M)) for k in kernels)
    assert longest < 1000
