"""Masks are asked where they may fail: tiles that bounds prove to be seen whole, or not
at all, ask nothing.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from test_attention import check, heads, only_stream

import shaderdsl as sd
from shaderdsl import ops
from shaderdsl.codegen import online_shape
from shaderdsl.codegen.online_stream_shape import Stream
from shaderdsl.codegen.target import Features, Limits

DOCUMENTS = np.repeat(np.arange(5, dtype=np.int32), 20)[None]


def same_document(b, h, i, j, documents):
    return documents[b, i] == documents[b, j]


# options, and whether something of the mask is asked in every tile
MASKS = {
    "causal": ({}, False),
    "window": ({"window": 30}, False),
    "lengths": ({"causal": False, "lengths": np.array([70], np.int32)}, False),
    "start": ({"start": 3}, False),
    "hook": ({"causal": False, "mask": lambda b, h, i, j: j < i + 20}, False),
    "documents": (
        {"mask": same_document, "captured": {"documents": DOCUMENTS}},
        True,
    ),
}


@pytest.fixture(params=["streams", "tiles", "rows", "lanes"])
def schedule(request, monkeypatch, retarget):
    """Tiles of 32 lines or less, so that a row has all kinds of them."""
    kind = request.param
    monkeypatch.setattr(online_shape, "SHAPES", ((16, 16, 4, 4),))
    only_stream(monkeypatch, Stream(16, 32, 8, 4, 8, 8, 4))
    if kind in ("streams", "tiles"):
        retarget(family="gpu", features=Features(), limits=Limits(), scores=0)
    elif kind == "rows":
        retarget(features=Features())
    return kind


def function(name):
    options, _ = MASKS[name]
    return lambda *xs: ops.attention(*xs, **options)


def loop_over_tiles(text):
    """What a kernel does for a tile: lines of its loop."""
    lines = text.split("\n")
    start = next(k for k, x in enumerate(lines) if re.match(r" *for \(var l = ", x))
    depth = len(lines[start]) - len(lines[start].lstrip())
    end = next(k for k in range(start, len(lines)) if lines[k] == " " * depth + "}")
    return lines[start + 1 : end]


def sides(lines):
    """Lines of a tile that is seen whole, and those of all other tiles."""
    whole, other, where, depth = [], [], None, 0
    for x in lines:
        indent = len(x) - len(x.lstrip())
        if where is None and re.match(r" *if \(!?b\d+\) {", x):
            where, depth = (other if "!" in x else whole), indent
        elif where is not None and indent == depth:
            where = other if "else" in x else None
        else:
            (whole if where is None else where).append(x)
    return whole, other


def asked(lines):
    """Comparisons of a line with a row, or with what is known of all lines."""
    return [x for x in lines if re.match(r" *let b\d+ = \w+ (<=|<|==) [a-zP]", x)]


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("backward", [False, True])
def test_whole_tiles_ask_nothing(schedule, name, backward):
    d = 20 if schedule == "tiles" else 16
    shapes = [sd.spec("f32", 1, h, 96, d) for h in (2, 1, 1)]
    low = sd.lower(function(name), *shapes, backward=backward)
    kernels = [k for k in low.kernels if k.archetype == "online"]
    assert len(kernels) >= 1 + backward
    for k in kernels:
        whole, other = sides(loop_over_tiles(k.wgsl))
        # Of a length, the sums of keys ask once for all queries.
        assert asked(other) or (backward and name == "lengths"), k.wgsl
        assert bool(asked(whole)) == MASKS[name][1], "\n".join(asked(whole))


def test_values_where_tiles_are_of_all_kinds(schedule):
    """Empty, cut through on either side, whole, and beyond the end."""
    d = 4 if schedule == "tiles" else 8
    check(function("window"), *heads(2, 1, 57, 70, d))


@sd.op("h t d, h s d, h s c -> h t c")
def own(q, k, v):
    x = sd.sum(q * k, over="d")
    x = sd.where(sd.index("s") + 3 <= sd.index("t"), x, -np.inf)
    e = sd.exp(x - sd.max(x, over="s"))
    return sd.sum(e * v, over="s") / sd.sum(e, over="s")


def test_a_mask_within_the_scores(schedule):
    """-∞ where a key is hidden bounds the lines, too; rows without a key stay NaN."""
    d = 4 if schedule == "tiles" else 8
    args = [x[0] for x in heads(2, 2, 57, 57, d)]
    (kernel,) = sd.lower(own, *[sd.spec("f32", 2, 64, d)] * 3).kernels
    (stop,) = re.findall(r"for \(var l = .*; l < (.*?);", kernel.wgsl)
    assert "." not in stop
    assert not asked(sides(loop_over_tiles(kernel.wgsl))[0])
    q, k, v = (x.astype(np.float64) for x in args)
    x = q @ k.swapaxes(1, 2)
    x[:, np.arange(57)[None] + 3 > np.arange(57)[:, None]] = -np.inf
    with np.errstate(invalid="ignore"):
        e = np.exp(x - x.max(-1, keepdims=True))
        want = e @ v / e.sum(-1, keepdims=True)
    assert np.isnan(want[:, :3]).all()
    np.testing.assert_allclose(own(*args).numpy(), want, 1e-4, 2e-5)
