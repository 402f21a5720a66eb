"""An element equals its own extreme however kernels round: the gradient of a maximum
and its position are those of float64 where every kernel, or every place in a text,
rounds in a way of its own.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections import OrderedDict

import numpy as np
import pytest
from conftest import has_adapter

import shaderdsl as sd
from shaderdsl import engine
from shaderdsl.codegen import templates, texts
from shaderdsl.codegen.writer import Writer
from shaderdsl.reference import Graph

R = np.random.default_rng(0)
A = R.standard_normal((33, 70)).astype(np.float32)
ROW = (np.abs(R.standard_normal(33)) + 1).astype(np.float32)
COLUMN = R.standard_normal(70).astype(np.float32)
LONG = R.standard_normal((1, 70_000)).astype(np.float32)
MASK = R.standard_normal((33, 70)) > 0


@sd.op("n d, n -> n")
def of_quotients(a, s):
    return sd.max(a / s, over="d")


@sd.op("n d, n -> d")
def of_quotients_by_column(a, s):
    return sd.max(a / s, over="n")


@sd.op("n d, d -> n")
def of_sums(a, s):
    return sd.min(a * s + a, over="d")


@sd.op("n d, d -> n")
def position(a, s):
    return sd.argmax(sd.sin(a) * s, over="d")


def over(a, s):
    return a / s.reshape(-1, 1)


GRADIENTS = {
    "rows": (lambda a, s: sd.max(over(a, s), axis=1), A, ROW),
    "columns": (lambda a, s: sd.max(over(a, s), axis=0), A, ROW),
    "whole": (lambda a, s: sd.max(over(a, s)), A, ROW),
    "seen otherwise": (
        lambda a, s: sd.max(over(a, s).reshape(11, 3, 70), axis=1),
        A,
        ROW,
    ),
    "op": (of_quotients, A, ROW),
    "op by column": (of_quotients_by_column, A, ROW),
    "op of sums": (of_sums, A, COLUMN),
    "masked": (lambda a, s: sd.max(sd.sin(a) * s, axis=1, where=MASK), A, COLUMN),
    "long": (lambda a, s: sd.max(over(a, s), axis=1), LONG, ROW[:1]),
    "beside a sum": (
        lambda a, s: sd.max(over(a, s), axis=1) * sd.sum(over(a, s), axis=1),
        A,
        ROW,
    ),
    "softmax": (lambda a, s: sd.max(sd.softmax(a * s), axis=1), A, COLUMN),
}  # fmt: skip
POSITIONS = {
    "rows": (lambda a, s: sd.argmax(sd.sin(a) * s, axis=1), A, COLUMN),
    "columns": (lambda a, s: sd.argmin(over(a, s), axis=0), A, ROW),
    "masked": (lambda a, s: sd.argmax(sd.sin(a) * s, axis=1, where=MASK), A, COLUMN),
    "op": (position, A, COLUMN),
}


@pytest.fixture(params=["gpu", "software"])
def family(request):
    if not has_adapter():
        pytest.skip("no adapter")
    device = sd.use_device("wgpu", limits="portable")
    before = device.target
    features = dataclasses.replace(before.features, wide_words=False)
    device.target = dataclasses.replace(
        before, family=request.param, features=features
    )  # fmt: skip
    yield request.param
    device.target = before
    sd.use_device("cpu")


@pytest.fixture(params=["kernel", "place"])
def rounding(request, family, monkeypatch):
    """Results of what may round otherwise in another kernel are some last places off,
    by another number in each kernel, or in each place of a text.
    """
    kernels = places = 0
    begin, apply = Writer.__init__, Writer._apply

    def begun(self, *args, **kwargs):
        nonlocal kernels
        kernels += 1
        begin(self, *args, **kwargs)

    def applied(self, n, level):
        nonlocal places
        value = apply(self, n, level)
        products = n.data in ("add", "sub") and any(
            x.kind == "apply" and x.data in ("mul", "mulz") for x in n.args
        )
        if n.dtype != "f32" or not (products or n.data in ("div", "exp", "sin")):
            return value
        places += 1
        number = kernels if request.param == "kernel" else places
        off = zlib.crc32(f"{number}".encode()) % 7 - 3
        return self.let(f"{value} * {1 + off * 2.0**-22!r}f", level)

    monkeypatch.setattr(Writer, "__init__", begun)
    monkeypatch.setattr(Writer, "_apply", applied)
    # Such texts are for this test alone.
    monkeypatch.setattr(engine, "_plans", OrderedDict())
    monkeypatch.setattr(templates, "_memory", OrderedDict())
    monkeypatch.setattr(texts, "store", None)
    yield
    assert places


def gradients(f, a, s):
    """What a pullback gives, what one call gives, and what float64 says."""
    graph = Graph(f, [a, s])
    (y,) = graph.outs
    dy = np.random.default_rng(1).standard_normal(y.shape).astype(np.float32)
    wide = [x.astype(np.float64) for x in (a, s, dy)]
    want = graph.gradient(wide[:2], wide[2:])
    _, pullback = sd.vjp(f, a, s)
    both = sd.compile(lambda a, s, dy: sd.vjp(f, a, s)[1](dy))
    return pullback(dy), both(a, s, dy), want


@pytest.mark.parametrize("name", GRADIENTS)
def test_the_gradient_of_an_extreme(rounding, name):
    *got, want = gradients(*GRADIENTS[name])
    for some in got:
        for g, w in zip(some, want, strict=True):
            np.testing.assert_allclose(np.asarray(g), w, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("name", POSITIONS)
def test_the_position_of_an_extreme(rounding, name):
    f, a, s = POSITIONS[name]
    (want,) = Graph(f, [a, s]).value([a.astype(np.float64), s.astype(np.float64)])
    np.testing.assert_array_equal(np.asarray(sd.compile(f)(a, s)), want)


@pytest.mark.parametrize("name", ["columns", "seen otherwise", "op by column"])
def test_quotients_by_a_divisor_that_many_share(family, name):
    """Inverted once in one kernel, divided by in another; the driver's own rounding."""
    *got, want = gradients(*GRADIENTS[name])
    for some in got:
        for g, w in zip(some, want, strict=True):
            np.testing.assert_allclose(np.asarray(g), w, rtol=1e-5, atol=1e-5)


def test_a_maximum_that_is_only_subtracted_stores_nothing(family):
    def soft(a, s):
        y = a * s / 3.0 + s
        e = sd.exp(y - sd.max(y, axis=-1, keepdims=True))
        return e / sd.sum(e, axis=-1, keepdims=True)

    def hardest(a, s):
        return sd.max(a * s / 3.0 + s, axis=-1)

    for f, stored in ((soft, False), (hardest, True)):
        dy = np.ones(Graph(f, [A, COLUMN]).outs[0].shape, np.float32)
        low = sd.lower(lambda a, s, f=f, dy=dy: sd.vjp(f, a, s)[1](dy), A, COLUMN)
        assert ("compared with its own maximum" in low.explain()) is stored
