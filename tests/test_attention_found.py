"""Attention that users wrote themselves: what is one pass, and why something is not."""

from __future__ import annotations

import numpy as np
import pytest
from test_attention import check, heads, make

import shaderdsl as sd
from shaderdsl.codegen import online_shape
from shaderdsl.codegen.target import Features, Limits

SCALE = 8**-0.5


def scores(q, k):
    return q @ k.transpose(0, 1, 3, 2) * SCALE


def by_hand(q, k, v):
    x = scores(q, k)
    e = sd.exp(x - sd.max(x, axis=-1, keepdims=True))
    return (e / sd.sum(e, axis=-1, keepdims=True)) @ v


def divided_last(q, k, v):
    x = scores(q, k)
    e = sd.exp(x - sd.max(x, axis=-1, keepdims=True))
    return (e @ v) / sd.sum(e, axis=-1, keepdims=True)


def without_maximum(q, k, v):
    e = sd.exp(scores(q, k))
    return (e / sd.sum(e, axis=-1, keepdims=True)) @ v


def softmax(q, k, v):
    return sd.softmax(scores(q, k), axis=-1) @ v


def scaled_queries(q, k, v):
    return sd.softmax((q * SCALE) @ k.transpose(0, 1, 3, 2), axis=-1) @ v


def by_logsumexp(q, k, v):
    x = scores(q, k)
    return sd.exp(x - sd.logsumexp(x, axis=-1, keepdims=True)) @ v


def keys_first(q, k, v):
    x = k @ q.transpose(0, 1, 3, 2) * SCALE
    return sd.softmax(x, axis=-2).transpose(0, 1, 3, 2) @ v


def masked(q, k, v):
    x = scores(q, k)
    rows, lines = (sd.arange(n) for n in x.shape[-2:])
    seen = rows.reshape(-1, 1) + 4 >= lines.reshape(1, -1)
    return sd.softmax(sd.where(seen, x, -np.inf), axis=-1) @ v


@sd.op("b h t d, b h s d, b h s c -> b h t c")
def one_op(q, k, v):
    x = sd.sum(q * k, over="d") * SCALE
    e = sd.exp(x - sd.max(x, over="s"))
    return sd.sum(e * v, over="s") / sd.sum(e, over="s")


FOUND = [
    by_hand,
    divided_last,
    without_maximum,
    softmax,
    scaled_queries,
    by_logsumexp,
    keys_first,
    masked,
    one_op,
]


@pytest.mark.parametrize("f", FOUND, ids=lambda f: f.__name__)
def test_one_pass(wgpu, f):
    """Whatever the spelling: nothing of queries by keys, forward or backward."""
    args = heads(2, 2, 19, 23, 8)
    for backward in (False, True):
        low = sd.lower(f, *args, backward=backward)
        assert {k.archetype for k in low.kernels} <= {"online", "row"}, low.explain()
        assert len(low.kernels) <= (4 if backward else 2)
        for k in low.kernels:
            assert all(b.tensor.size < 2 * 19 * 23 for b in k.bindings)
    check(f, *args)


@pytest.mark.parametrize(
    "axes", ["t h d, s h d, s h c -> t h c", "d h t, d h s, c h s -> c h t"]
)
def test_any_order_of_axes(wgpu, axes):
    @sd.op(axes)
    def f(q, k, v):
        x = sd.sum(q * k, over="d") * SCALE
        return sd.sum(sd.softmax(x, over="s") * v, over="s")

    shape = {"t": 19, "s": 23, "h": 2, "d": 8, "c": 12}
    operands = axes.split("->")[0].split(",")
    args = [
        make(*(shape[a] for a in o.split()), seed=k) for k, o in enumerate(operands)
    ]
    assert [k.archetype for k in sd.lower(f, *args).kernels] == ["online"]
    check(f, *args)


def test_who_prevents_it(cpu):
    """The log names the reader that needs the scores whole."""

    def shown(q, k, v):
        weights = sd.softmax(scores(q, k), axis=-1)
        return weights @ v, weights

    low = sd.lower(shown, *heads(2, 2, 19, 23, 8))
    assert "online" not in [k.archetype for k in low.kernels]
    text = low.explain()
    assert "div [1, 2, 19, 23] is not part of one pass: it is no sum or maximum" in text
    assert "matmul [2, 19, 23] is stored: div need it" in text


def test_inner_axes_that_are_too_long(cpu):
    """A row of a product must fit a thread's registers."""
    low = sd.lower(softmax, *heads(1, 1, 19, 23, 257))
    assert "online" not in [k.archetype for k in low.kernels]


@pytest.mark.parametrize("kind", ["tiles", "rows"])
def test_sums_alone_on_other_devices(retarget, monkeypatch, kind):
    """A chain that is a maximum and a sum, and one that is a sum."""
    monkeypatch.setattr(online_shape, "SHAPES", ((16, 16, 4, 4),))
    family = "gpu" if kind == "tiles" else "software"
    retarget(family=family, features=Features(), limits=Limits(max_storage_buffers=12))
    args = heads(2, 2, 19, 23, 8)
    low = sd.lower(by_logsumexp, *args)
    assert [k.archetype for k in low.kernels] == ["online", "online"]
    check(by_logsumexp, *args)
