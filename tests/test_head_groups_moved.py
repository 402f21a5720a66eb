"""Groups of heads where heads do not come first in memory: arrays of [s, h, d].

Each against float64, as the GPU's schedules do it.
"""

from __future__ import annotations

import numpy as np
import pytest
from test_attention import check, exact, heads, make, only_stream

import shaderdsl as sd
from shaderdsl import nn, ops
from shaderdsl.codegen import blocks_heads
from shaderdsl.codegen.online_stream_shape import Stream
from shaderdsl.codegen.target import Features, Limits
from shaderdsl.runtime.plan import plan_memory

N, D = 128, 16
ONE = N * N * 4  # bytes of one query head's scores
DOCUMENTS = np.sort(np.random.default_rng(0).integers(0, 3, (2, N)), axis=1)
DOCUMENTS = DOCUMENTS.astype(np.int32)


@pytest.fixture
def budget(retarget, monkeypatch):
    """Plan for a GPU that may take so many bytes for the gradient of scores."""
    only_stream(monkeypatch, Stream(16, 32, 8, 4, 8, 8, 4, 0))
    monkeypatch.setattr(blocks_heads, "_ROWS", 1)

    def change(scores, **limits):
        limits = Limits(**{"max_storage_buffers": 12, **limits})
        retarget(family="gpu", features=Features(), limits=limits, scores=scores)

    return change


def later(f=ops.attention, **options):
    """Attention of arrays [..., position, head, channel]."""

    def swapped(x):
        last = x.ndim - 1
        return x.transpose(*range(last - 2), last - 1, last - 2, last)

    return lambda *xs: swapped(f(*map(swapped, xs), **options))


def arrays(h, hk, t, s, b):
    """q, k, v as ``later`` takes them; without batches if b is None."""
    made = [
        np.ascontiguousarray(x.swapaxes(1, 2)) for x in heads(h, hk, t, s, D, b or 1)
    ]
    return made if b else [x[0] for x in made]


def groups(low):
    """How many groups the log says there are."""
    words = low.explain().split(" groups: two kernels need it")
    return int(words[0].split()[-1]) if len(words) > 1 else 0


@pytest.mark.parametrize(
    ("h", "hk", "t", "s", "b", "most", "count"),
    [
        (4, 4, N, N, None, 2, 2),
        (6, 2, N, N, 1, 3, 2),  # a head of keys at a time, with three of queries
        (5, 5, N, N, 1, 3, 2),  # three heads, then two
        (4, 2, N, N, 2, 2, 4),  # neither a batch fits nor two heads of keys
        (4, 4, 148, 148, None, 2, 2),  # parts begin where no array may be bound
        (4, 2, 98, N, 1, 2, 2),
    ],
)
def test_values_and_gradients(budget, h, hk, t, s, b, most, count):
    budget(most * t * s * 4)
    args = arrays(h, hk, t, s, b)
    low = sd.lower(later(), *args, backward=True)
    assert groups(low) == count, low.explain()
    check(later(), *args)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 40, "softcap": 3.0},
        {"score": lambda x, b, h, i, j: x - 0.1 * sd.cast((h + 1) * (i - j), "f32")},
        {
            "mask": lambda b, h, i, j, documents: documents[b, i] == documents[b, j],
            "captured": {"documents": DOCUMENTS},
            "causal": False,
        },
    ],
)
def test_masks_and_hooks(budget, options):
    budget(2 * ONE)
    args = arrays(4, 2, N, N, 2)
    f = later(**options)
    low = sd.lower(f, *args, backward=True)
    assert groups(low) == 4, low.explain()
    check(f, *args)


def test_rows_of_heads_that_are_turned(budget):
    """As a model has them: [s, heads · d], keys and queries turned before."""
    budget(2 * ONE)
    angle, weight = make(N, D // 2, seed=4), make(N, 6 * D, seed=5)
    cos, sin = np.cos(angle), np.sin(angle)

    def f(q, k, v):
        q, k = (nn.heads.turned(x, cos, sin, d=D).store() for x in (q, k))
        return sd.sum(nn.heads.attention(q, k, v, scale=0.25, d=D) * weight)

    args = [make(N, h * D, seed=h) for h in (6, 3, 3)]
    both = sd.value_and_grad(f, (0, 1, 2))
    assert groups(sd.lower(both, *args)) == 3
    value, grads = both(*args)
    values, wanted = exact(f, args, [np.ones(())])
    np.testing.assert_allclose(value.numpy(), values[0], 1e-4, 1e-3)
    for a, b in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(a.numpy(), b, 1e-4, 1e-5 * np.abs(b).max())


def test_copies_that_would_not_pay(budget):
    """Of short lines, arrays are as large as what is stored."""
    budget(2 * 64 * 64 * 4)
    shapes = [sd.spec("f32", 64, h, D) for h in (4, 2, 2)]
    low = sd.lower(later(), *shapes, backward=True)
    assert not any(k.windows for k in low.kernels)
    assert "bytes would be copied to put heads first" in low.explain()


def test_memory_stays_within_the_budget(budget):
    """What the plan of memory takes beside arguments and results."""
    shapes = [sd.spec("f32", N, 4, D)] * 3
    taken = []
    for scores in (0, 2 * ONE):
        budget(scores)
        program = sd.lower(later(), *shapes, backward=True).program
        slots = plan_memory(program, frozenset()).slots
        taken.append(sum(s.nbytes for s in slots if s.kind == "temp"))
    copies = 7 * 4 * N * D * 4  # q, k, v, dy and the gradients of the first three
    assert 2 * ONE <= taken[1] - taken[0] <= 2 * ONE + copies + 3 * 4 * N * 4


def test_a_model_on_one_sequence(budget):
    """Two layers; the gradients of all weights."""
    config = nn.TransformerConfig(
        vocab_size=40,
        hidden_size=288,  # longer than an inner axis of scores
        num_layers=2,
        num_heads=6,
        num_kv_heads=3,
        head_dim=D,
        ffn_size=64,
        max_positions=N,
    )
    model = nn.Transformer.init(config, seed=0)
    ids = np.random.default_rng(0).integers(0, 40, N).astype(np.int32)

    def step(ids):
        return sd.value_and_grad(lambda m: nn.cross_entropy(m(ids), ids))

    budget(2 * ONE)
    for given in (ids, ids[None]):
        text = sd.lower(step(given), model).explain()
        assert text.count("bytes in 3 groups") == 2, text
    value, grads = step(ids)(model)
    sd.use_device("cpu")
    wanted, same = step(ids)(model)
    np.testing.assert_allclose(value.numpy(), wanted.numpy(), 1e-5)
    for a, b in zip(sd.tree.leaves(grads), sd.tree.leaves(same), strict=True):
        np.testing.assert_allclose(
            a.numpy(), b.numpy(), 1e-4, 2e-5 * np.abs(b.numpy()).max()
        )
