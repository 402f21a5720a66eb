"""Ids that kernels made: clamped where they are used, told at the next read."""

from __future__ import annotations

import numpy as np
import pytest

import shaderdsl as sd
from shaderdsl import ids as flags
from shaderdsl import nn, ops
from shaderdsl.errors import IndexRangeError

TABLE = np.arange(12, dtype=np.float32).reshape(4, 3)


def made(*values):
    """Ids that only the device knows."""
    return sd.array(np.array(values, np.int32)) + 0


@pytest.fixture(autouse=True)
def nothing_left():
    flags._pending.clear()
    yield
    assert not flags._pending


def test_the_next_read_tells(device):
    y = ops.embedding(TABLE, made(1, 9, 2))
    other = sd.array(TABLE) + 1.0
    with pytest.raises(IndexRangeError) as error:
        other.numpy()
    text = str(error.value)
    assert "ran from 1 to 9" in text and "axis 0 of 'table' has size 4" in text
    assert "embedding (" in text and __file__ in text and "sd.clip" in text
    # once, and what was computed is there, from clamped ids
    np.testing.assert_array_equal(y.numpy(), TABLE[[1, 3, 2]])


@pytest.mark.parametrize("read", [float, int, bool, lambda x: x.item(), np.asarray])
def test_every_kind_of_read(device, read):
    y = ops.embedding(TABLE, made(-1)).sum()
    with pytest.raises(IndexRangeError, match="ran from -1 to -1"):
        read(y)


def test_ids_in_range_are_no_news(device):
    x, at = sd.array(TABLE), made(0, 3, 3)
    np.testing.assert_array_equal(ops.embedding(x, at).numpy(), TABLE[[0, 3, 3]])
    np.testing.assert_array_equal(x[at].numpy(), TABLE[[0, 3, 3]])


def test_integer_arrays_as_indices(device):
    x = sd.array(TABLE)
    y = x[made(4)]
    with pytest.raises(IndexRangeError, match=r"take \(.*test_ids"):
        y.numpy()


def test_wherever_the_ids_come_from(device):
    """Drawn by argmax; computed inside of a compiled function, or before it."""
    scores = sd.array(np.array([[0, 1, 0, 0, 5], [3, 0, 0, 0, 0]], np.float32))
    y = ops.embedding(TABLE, sd.argmax(scores, axis=1))
    with pytest.raises(IndexRangeError, match="ran from 0 to 4"):
        y.numpy()

    @sd.compile
    def inside(table, scores):
        return ops.embedding(table, sd.argmax(scores, axis=1))

    @sd.compile
    def before(table, ids):
        return table[ids.reshape(2)] * 2.0

    for y in (
        inside(TABLE, scores),
        before(TABLE, sd.argmax(scores, axis=1)),
        inside(TABLE, np.array([[0, 1, 0, 0, 5], [3, 0, 0, 0, 0]], np.float32)),
    ):
        with pytest.raises(IndexRangeError, match="ran from 0 to 4"):
            y.numpy()
    good = scores[:, :4]
    np.testing.assert_array_equal(inside(TABLE, good).numpy(), TABLE[[1, 0]])
    with pytest.raises(IndexRangeError, match="ids run from"):
        before(TABLE, np.array([0, 7], np.int32))  # at once, before a launch


def test_derivatives(device):
    at = made(0, 5)
    y, pullback = sd.vjp(ops.embedding, TABLE, at)
    with pytest.raises(IndexRangeError, match="ran from 0 to 5"):
        y.numpy()
    grads = pullback(np.ones((2, 3), np.float32))
    # what is out of range gets no gradient
    np.testing.assert_array_equal(grads[0].numpy()[:, 0], [1, 0, 0, 0])
    loss = lambda table, ids: sd.sum(ops.embedding(table, ids) ** 2)  # noqa: E731
    value, _ = sd.value_and_grad(loss)(sd.array(TABLE), at)
    with pytest.raises(IndexRangeError):
        float(value)
    tangents = (np.ones_like(TABLE), None)
    value, _ = sd.jvp(loss, (sd.array(TABLE), at), tangents)
    with pytest.raises(IndexRangeError):
        float(value)


def test_guarded_reads_may_have_any_ids(device):
    @sd.op("v, t -> t")
    def guarded(table, ids):
        inside = (ids >= 0) & (ids < sd.extent("v"))
        return sd.where(inside, table.at(v=sd.clip(ids, 0, 3)), -1.0)

    @sd.op("v, t -> t")
    def half(table, ids):
        return sd.where(ids >= 0, table.at(v=ids), -1.0)

    row = TABLE[:, 0].copy()
    np.testing.assert_array_equal(guarded(row, made(-5, 2, 9)).numpy(), [-1, 6, -1])
    np.testing.assert_array_equal(half(row, made(-5, 2)).numpy(), [-1, 6])
    y = half(row, made(-5, 4))
    with pytest.raises(IndexRangeError, match="ran from 4 to 4"):
        y.numpy()


def test_unread_flags_do_not_pile_up(device):
    with pytest.raises(IndexRangeError):
        for _ in range(1000):
            ops.embedding(TABLE, made(8))
    flags._pending.clear()
    for _ in range(200):
        ops.embedding(TABLE, made(1))
    assert len(flags._pending) <= 64
    ops.embedding(TABLE, made(1)).numpy()


def small_model():
    config = nn.TransformerConfig(
        vocab_size=8,
        hidden_size=8,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        ffn_size=8,
        max_positions=64,
    )
    return nn.Transformer.init(config, seed=0)


def test_a_step_outside_of_generate(device):
    model = small_model()
    cache = model.new_cache(capacity=16)
    cache.run(model, [1, 2])
    logits = cache.step(model, made(8))
    with pytest.raises(IndexRangeError, match="ran from 8 to 8"):
        logits.numpy()
    y = model(made(3, -2))
    with pytest.raises(IndexRangeError, match="ran from -2 to 3"):
        y.numpy()
    y = model(sd.array(np.array([1, 2], np.int32)), positions=made(0, 64))
    with pytest.raises(IndexRangeError, match="ran from 0 to 64"):
        y.numpy()


# ------------------------------------------------------------------ what it costs


def test_host_ids_cost_nothing_and_device_ids_one_kernel(device):
    host = np.array([1, 2, 3], np.int32)
    table, given = sd.array(TABLE), sd.array(host)
    kernels = len(sd.lower(ops.embedding, TABLE, host).kernels)
    for at, more in ((host, 0), (given, 0), (given + 0, 1)):
        ops.embedding(table, at).numpy()
        with sd.profile() as p:
            y = ops.embedding(table, at)
        assert p.dispatches == kernels + more
        assert p.downloads == 0
        with sd.profile() as p:
            y.numpy()
            y.numpy()
        assert p.downloads == 2 + more


def test_generation_is_not_looked_at_twice(device):
    model = small_model()
    model.generate([1, 2], max_new_tokens=3)
    with sd.profile() as p:
        model.generate([1, 2], max_new_tokens=3)
    assert p.downloads == 3
