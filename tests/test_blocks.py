"""Products that are worked through in blocks of rows: linear and cross entropy of any
spelling, against float64, with the memory that they take.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shaderdsl as sd
from shaderdsl import ops
from shaderdsl.codegen import split
from shaderdsl.ops import references as R
from shaderdsl.testing.gradients import Graph

#: Bytes of a product from which tests of small shapes cut it.
SMALL = 1 << 11


@pytest.fixture
def small(device):
    """A device that cuts small products too, and holds none of them in registers."""
    before = device.target
    device.target = dataclasses.replace(before, block_from=SMALL, online=False)
    yield device
    device.target = before


@pytest.fixture
def as_gpu():
    """The schedules of a GPU, on whatever adapter there is."""
    device = sd.use_device("wgpu")
    before = device.target
    features = dataclasses.replace(before.features, wide_words=False)
    device.target = dataclasses.replace(
        before, family="gpu", features=features, block_from=SMALL, online=False
    )
    yield device
    device.target = before
    sd.use_device("cpu")


def data(rows: Any, vocab: int, dim: int, seed: int = 0) -> tuple[Any, Any, Any]:
    """x, weights and labels of which some do not count."""
    r = np.random.default_rng(seed)
    lead = rows if isinstance(rows, tuple) else (rows,)
    x = r.standard_normal((*lead, dim), np.float32)
    w = (r.standard_normal((vocab, dim)) * 2 / dim**0.5).astype(np.float32)
    labels = r.integers(0, vocab, lead).astype(np.int32)
    labels.reshape(-1)[::5] = -100
    return x, w, labels


def close(got: Any, want: Any, rtol: float = 2e-5) -> None:
    """Compared at the scale of the whole array: sums of a row cancel."""
    want = np.asarray(want, np.float64)
    got = got.numpy() if isinstance(got, sd.Array) else np.asarray(got)
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    scale = np.abs(want).max(initial=0.0) + 1e-9
    np.testing.assert_allclose(got, want, rtol=0, atol=rtol * scale)


def in_blocks(low: Any) -> bool:
    return any("never exists whole" in line for line in low.program.log)


def check(f: Callable[..., Any], *args: Any, blocks: bool = True) -> None:
    """Value and gradients of f, mid-graph and under a scalar loss, against its own
    graph in float64.
    """
    assert in_blocks(sd.lower(f, *args)) == blocks
    assert in_blocks(sd.lower(f, *args, backward=True)) == blocks
    graph = Graph(f, args)
    wide = [a.astype(np.float64) if a.dtype.kind == "f" else a for a in args]
    (want,) = graph.value(wide)
    r = np.random.default_rng(1)
    dy = r.standard_normal(np.shape(want)).astype(np.float32)
    y, pullback = sd.vjp(f, *args)
    close(y, want)
    for got, g in zip(pullback(dy), graph.gradient(wide, [dy.astype(np.float64)])):
        close(got, g)
    floats = [k for k, a in enumerate(args) if a.dtype.kind == "f"]

    def loss(*xs: Any) -> Any:
        return sd.sum(f(*xs) * dy)

    value, grads = sd.value_and_grad(loss, floats)(*args)
    close(value, np.sum(want * dy))
    for got, g in zip(grads, graph.gradient(wide, [dy.astype(np.float64)])):
        close(got, g)


def rows_of(x: Any, w: Any, labels: Any) -> Any:
    return ops.linear_cross_entropy(x, w, labels, reduction="none")


# ------------------------------------------------------------------ the op itself


def exact(x: Any, w: Any, labels: Any, dy: Any) -> tuple[Any, Any, Any]:
    """Losses of rows, and Σ dy · loss by x and w, in float64."""
    x, w = x.astype(np.float64), w.astype(np.float64)
    logits = x @ w.T
    rows = R.cross_entropy_rows(logits, labels)
    e = np.exp(logits - logits.max(-1, keepdims=True))
    d = e / e.sum(-1, keepdims=True)
    counted = labels != -100
    d[np.arange(len(x)), np.where(counted, labels, 0)] -= 1.0
    d *= (counted * dy)[:, None]
    return rows, d @ w, d.T @ x


@pytest.mark.parametrize(
    ("rows", "vocab", "dim"), [(77, 1003, 12), (64, 512, 8), (33, 257, 300)]
)
def test_values_and_gradients(small, rows, vocab, dim):
    x, w, labels = data(rows, vocab, dim)
    assert in_blocks(sd.lower(rows_of, x, w, labels))
    dy = np.random.default_rng(3).standard_normal(rows).astype(np.float32)
    want, dx, dw = exact(x, w, labels, dy.astype(np.float64))
    y, pullback = sd.vjp(rows_of, x, w, labels)
    close(y, want)
    got = pullback(dy)
    close(got[0], dx)
    close(got[1], dw)
    assert got[2] is None


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_scalar_losses(small, reduction):
    x, w, labels = data(77, 300, 12)

    def loss(x, w):
        return ops.linear_cross_entropy(x, w, labels, reduction=reduction)

    n = (labels != -100).sum() if reduction == "mean" else 1
    want, dx, dw = exact(x, w, labels, np.full(77, 1 / n))
    value, (gx, gw) = sd.value_and_grad(loss, (0, 1))(x, w)
    close(value, want.sum() / n)
    close(gx, dx)
    close(gw, dw)


def test_the_schedules_of_a_gpu(as_gpu):
    check(rows_of, *data(150, 1003, 24))
    check(rows_of, *data((3, 32), 260, 300))


def test_rows_that_are_cut_as_well(as_gpu, monkeypatch):
    """Words enough for several workgroups a row; the last block is a single row."""
    monkeypatch.setattr(split, "LONG_ROW", 64)
    monkeypatch.setattr(split, "SHARE", 32)
    for rows in (16, 17, 33):
        check(rows_of, *data(rows, 1003, 24))


@pytest.mark.parametrize("rows", [64, 65, 513])
def test_a_vocabulary_of_today(as_gpu, rows):
    """Sizes at which a row's statistics are shared out within a block."""
    as_gpu.target = dataclasses.replace(as_gpu.target, block_from=32 << 20)

    def step(x, w, labels):
        return sd.value_and_grad(
            lambda x, w: ops.linear_cross_entropy(x, w, labels), (0, 1)
        )(x, w)

    v, d = 151_936, 64
    low = sd.lower(
        step, sd.spec("f32", rows, d), sd.spec("f32", v, d), sd.spec("i32", rows)
    )
    assert in_blocks(low)
    assert any("shares" in k.name for k in low.kernels)


def test_all_rows_ignored(small):
    x, w, labels = data(77, 300, 12)
    labels[:] = -100
    value, grads = sd.value_and_grad(
        lambda x, w: ops.linear_cross_entropy(x, w, labels), (0, 1)
    )(x, w)
    assert float(value) == 0.0
    for g in grads:
        assert not g.numpy().any()


def test_another_label_that_does_not_count(small):
    x, w, labels = data(77, 300, 12)
    other = np.where(labels == -100, 7, labels).astype(np.int32)
    got = ops.linear_cross_entropy(x, w, other, 7, reduction="none")
    close(got, R.cross_entropy_rows(x.astype(np.float64) @ w.T, other, 7))


def test_ties_and_huge_logits(small):
    x, w, labels = data(77, 300, 12)
    w[100:200] = w[:100]  # every maximum twice or more
    check(rows_of, x, w, labels)
    check(rows_of, 100 * x, 100 * w, labels)
    check(rows_of, 0 * x, w, labels)


def test_half_precision_weights(small):
    x, w, labels = data(77, 300, 12)
    half = w.astype(np.float16)
    want, dx, dw = exact(x, half, labels, np.ones(77))
    y, pullback = sd.vjp(rows_of, x, half, labels)
    close(y, want)
    got = pullback(np.ones(77, np.float32))
    close(got[0], dx)
    assert got[1].dtype == "f16"
    close(got[1].numpy().astype(np.float32), dw, 1e-3)


@pytest.mark.parametrize("batch", [(3, 40), (2, 3, 16), (40, 3), (1, 77), (5, 7)])
def test_batches(small, batch):
    check(rows_of, *data(batch, 300, 12))


def test_options_compile_nothing(small):
    x, w, labels = data(77, 300, 12)
    labels = abs(labels)
    ops.linear_cross_entropy(x, w, labels, -100).numpy()
    with sd.profile() as p:
        ops.linear_cross_entropy(x, w, labels, 3).numpy()
    assert p.compiled == 0


def test_errors(small):
    x, w, labels = data(77, 300, 12)
    with pytest.raises(sd.errors.ShapeError):
        ops.linear_cross_entropy(x, w, labels, reduction="most")
    labels[3] = 300
    with pytest.raises(sd.errors.IndexRangeError):
        ops.linear_cross_entropy(x, w, labels)


# ------------------------------------------------------------------ other spellings


def logits_of(x: Any, w: Any) -> Any:
    return x @ w.T


def capped(x, w, y):
    z = logits_of(x, w)
    return ops.cross_entropy(5.0 * sd.tanh(z / 5.0), y, reduction="none")


def z_loss(x, w, y):
    z = logits_of(x, w)
    return ops.cross_entropy(z, y) + 1e-2 * sd.mean(sd.logsumexp(z, axis=-1) ** 2)


def smoothed(x, w, y):
    z = logits_of(x, w)
    log_p = ops.log_softmax(z)
    return ops.cross_entropy(z, y) * 0.9 - 0.1 * sd.mean(log_p)


def warm(x, w, y):
    return ops.cross_entropy(logits_of(x, w) / 0.7, y)


def reshaped(x, w, y):
    z = ops.linear(x, w)
    return ops.cross_entropy(z.reshape((-1, z.shape[-1])), y.reshape((-1,)))


def shifted(x, w, y):
    """Logits without their last position: a part of the product is all of it."""
    return ops.cross_entropy(ops.linear(x, w)[:, :-1], y[:, 1:])


def later(x, w, y):
    return ops.cross_entropy(ops.linear(x, w)[:, 3:], y[:, :-3], reduction="none")


def perplexity(x, w, y):
    """The cotangent needs the loss of all rows: logits are made again."""
    return sd.exp(ops.cross_entropy(logits_of(x, w), y) * 0.5)


def focal(x, w, y):
    rows = ops.cross_entropy(logits_of(x, w), y, reduction="none")
    return sd.sum(rows * (1.0 - sd.exp(-rows)) ** 2)


def transposed(x, w, y):
    return ops.cross_entropy((w @ x.T).T, y)


def log_sum(x, w, y):
    return sd.logsumexp(logits_of(x, w), axis=-1)


@pytest.mark.parametrize(
    "f",
    [capped, z_loss, smoothed, warm, perplexity, focal, transposed, log_sum],
)
def test_spellings(small, f):
    check(f, *data(77, 300, 12))


@pytest.mark.parametrize("batch", [(3, 40), (77,)])
def test_reshaped_logits(small, batch):
    check(reshaped, *data(batch, 300, 12))


@pytest.mark.parametrize("f", [shifted, later])
@pytest.mark.parametrize("batch", [(3, 40), (1, 78)])
def test_parts_of_logits(small, f, batch):
    check(f, *data(batch, 300, 12))


def test_bias(small):
    x, w, labels = data(77, 300, 12)
    bias = np.random.default_rng(5).standard_normal(300).astype(np.float32)

    def f(x, w, bias, y):
        return ops.cross_entropy(ops.linear_bias(x, w, bias), y)

    check(f, x, w, bias, labels)


def test_a_teacher(small):
    """Two products of the same rows in one loop."""
    x, w, _ = data(77, 300, 12)
    v = data(77, 300, 12, seed=9)[1]

    def f(x, w, v):
        p = ops.softmax(x @ v.T)
        return -sd.sum(p * ops.log_softmax(x @ w.T)) / 77.0

    check(f, x, w, v)


def test_weights_of_positions(small):
    """A row's number as a value."""

    @sd.op("t v, t -> t")
    def weighted(z, y):
        m = sd.stop_gradient(sd.max(z, over="v"))
        lse = sd.log(sd.sum(sd.exp(z - m) * (1 + sd.index("t") % 3), over="v")) + m
        return lse - z.at(v=y)

    x, w, labels = data(77, 300, 12)
    check(lambda x, w, y: weighted(x @ w.T, abs(y) % 300), x, w, labels)


def test_jvp(small):
    x, w, labels = data(77, 300, 12)
    r = np.random.default_rng(2)
    tx, tw = (r.standard_normal(a.shape).astype(np.float32) for a in (x, w))

    def f(x, w):
        return ops.linear_cross_entropy(x, w, labels)

    _, dy = sd.jvp(f, (x, w), (tx, tw))
    n = (labels != -100).sum()
    _, dx, dw = exact(x, w, labels, np.full(77, 1 / n))
    want = np.sum(dx * tx) + np.sum(dw * tw)
    assert abs(float(dy) - want) < 1e-4 * abs(want) + 1e-5


def test_a_product_that_somebody_wants_is_stored(small):
    def f(x, w, y):
        z = x @ w.T
        return ops.cross_entropy(z, y), z

    low = sd.lower(f, *data(77, 300, 12))
    assert not in_blocks(low)
    assert "is not cut into blocks: " in low.explain()


def test_a_feed_forward_layer_is_left_alone(small):
    x, w, _ = data(77, 300, 12)

    def f(x, w):
        h = x @ w.T
        return (h / (1.0 + sd.exp(-h))) @ w

    assert not in_blocks(sd.lower(f, x, w))


# ------------------------------------------------------------------ what it takes


@pytest.mark.parametrize("online", [True, False])
def test_memory(device, online):
    """Below a quarter of the logits, everything counted, in one pass (so few inner
    elements) and in blocks.
    """
    before = device.target
    device.target = dataclasses.replace(before, online=online)
    try:
        _check_memory(online)
    finally:
        device.target = before


def _check_memory(online: bool) -> None:
    rows, vocab = 512, 32_000
    logits = 4 * rows * vocab
    x, w, labels = (sd.array(a) for a in data(rows, vocab, 16))

    def loss(x, w):
        return ops.linear_cross_entropy(x, w, labels)

    both = sd.value_and_grad(loss, (0, 1))
    assert online or in_blocks(sd.lower(both, x, w))
    with sd.profile() as p:
        value, grads = both(x, w)
        sd.synchronize()
    assert p.peak_bytes < logits / 4
    want, dx, dw = exact(x.numpy(), w.numpy(), labels.numpy(), np.ones(rows))
    n = (labels.numpy() != -100).sum()
    close(value, want.sum() / n)
    close(grads[0], dx / n, 5e-5)
    close(grads[1], dw / n)
    with sd.profile() as p:
        value, pullback = sd.vjp(loss, x, w)
        pullback(np.float32(1.0))
        sd.synchronize()
    assert p.peak_bytes < logits / 4


def test_texts_do_not_depend_on_sizes(device):
    """Other rows and vocabularies are the same texts, whatever the number of blocks."""
    texts, counts = set(), set()
    for rows, vocab in [(512, 32_000), (576, 32_000), (640, 32_400)]:
        args = (
            sd.spec("f32", rows, 320),
            sd.spec("f32", vocab, 320),
            sd.spec("i32", rows),
        )
        low = sd.lower(sd.value_and_grad(ops.linear_cross_entropy, (0, 1)), *args)
        assert in_blocks(low)
        inside = [k for k in low.kernels if k.windows]
        texts.add(frozenset(k.wgsl for k in inside))
        counts.add(len(inside))
    assert len(texts) == 1 and len(counts) == 3


def test_a_training_step(small):
    """The loss of a whole model, with the optimiser's arenas and donated arrays, step
    by step as without blocks.
    """
    config = sd.nn.TransformerConfig(
        vocab_size=300,
        hidden_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        ffn_size=48,
        tied_head=True,
    )
    optimiser = sd.optim.AdamW(lr=1e-2, max_grad_norm=1.0)
    ids = np.random.default_rng(0).integers(0, 300, (2, 40)).astype(np.int32)

    def run() -> tuple[list[float], Any]:
        model = sd.nn.Transformer.init(config, seed=0)
        state = optimiser.init(model)

        def train_step(model, state, ids):
            def loss(m):
                return sd.nn.cross_entropy(m(ids), ids)

            value, gradients = sd.value_and_grad(loss)(model)
            model, state = optimiser.update(model, gradients, state)
            return model, state, value

        step = sd.compile(train_step, donate=("model", "state"))
        losses = []
        for _ in range(3):
            model, state, value = step(model, state, ids)
            losses.append(float(value))
        with sd.profile() as p:
            step(model, state, ids)
        assert p.compiled == 0
        return losses, p

    losses, cut = run()
    small.target = dataclasses.replace(small.target, block_from=0)
    whole, plain = run()
    assert cut.dispatches > plain.dispatches
    np.testing.assert_allclose(losses, whole, rtol=2e-5)
