"""Gradients of scores within a budget: stored for some heads at a time.

Each against float64, as the GPU's schedules do it.
"""

from __future__ import annotations

import numpy as np
import pytest
from test_attention import check, exact, heads, make, only_stream

import shaderdsl as sd
from shaderdsl import ops
from shaderdsl.codegen.online_stream_shape import Stream
from shaderdsl.codegen.target import Features, Limits
from shaderdsl.runtime.plan import plan_memory

N, D = 64, 16
ONE = N * N * 4  # bytes of one query head's scores
DOCUMENTS = np.sort(np.random.default_rng(0).integers(0, 3, (2, N)), axis=1)
DOCUMENTS = DOCUMENTS.astype(np.int32)


@pytest.fixture
def budget(retarget, monkeypatch):
    """Plan for a GPU that may take so many bytes for the gradient of scores."""
    only_stream(monkeypatch, Stream(16, 32, 8, 4, 8, 8, 4, 0))

    def change(scores, **limits):
        limits = Limits(**{"max_storage_buffers": 12, **limits})
        retarget(family="gpu", features=Features(), limits=limits, scores=scores)

    return change


def turns(low):
    """How often each text is dispatched, by name."""
    count: dict[str, int] = {}
    for k in low.kernels:
        if k.windows:
            count[k.name] = count.get(k.name, 0) + 1
    return count


@pytest.mark.parametrize(
    ("h", "hk", "b", "most", "groups"),
    [
        (4, 2, 2, 2, 4),  # a head of keys at a time, with two of queries
        (5, 5, 1, 3, 2),  # three heads, then two
        (6, 3, 2, 8, 2),  # a group begins in the middle of a batch
    ],
)
def test_heads_in_groups(budget, h, hk, b, most, groups):
    budget(most * ONE)
    args = heads(h, hk, N, N, D, b)
    low = sd.lower(ops.attention, *args, backward=True)
    assert turns(low)["contract_d_q"] == groups
    assert f" bytes in {groups} groups" in low.explain()
    check(ops.attention, *args)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 20, "softcap": 3.0, "return_lse": True},
        {"score": lambda x, b, h, i, j: x - 0.1 * sd.cast((h + 1) * (i - j), "f32")},
        {
            "mask": lambda b, h, i, j, documents: documents[b, i] == documents[b, j],
            "captured": {"documents": DOCUMENTS},
            "causal": False,
        },
        {"start": np.array([0, 5], np.int32)},
    ],
)
def test_masks_and_hooks_in_groups(budget, options):
    budget(4 * ONE)
    args = heads(4, 2, N, N, D, 2)
    f = lambda *xs: ops.attention(*xs, **options)  # noqa: E731
    low = sd.lower(f, *args, backward=True)
    assert turns(low).get("contract_d_x") == 2, low.explain()
    check(f, *args)


def test_batches_in_groups_where_heads_come_later(budget):
    """Of arrays as (batch, position, head, channel) only a batch is one part."""
    budget(4 * ONE)

    def f(q, k, v):
        turned = [x.transpose(0, 2, 1, 3) for x in (q, k, v)]
        return ops.attention(*turned).transpose(0, 2, 1, 3)

    args = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in heads(4, 2, N, N, D, 2)]
    low = sd.lower(f, *args, backward=True)
    assert turns(low) and "is stored for 1 of 2 parts" in low.explain()
    check(f, *args)


def test_gradients_of_slopes_in_groups(budget):
    budget(4 * ONE)
    slopes = make(4, seed=5)

    def f(q, k, v, slopes):
        def hook(x, b, h, i, j, slopes):
            return x - slopes[h] * sd.cast(i - j, "f32")

        return ops.attention(q, k, v, score=hook, captured={"slopes": slopes})

    check(f, *heads(4, 2, N, N, D, 2), slopes, atol=1e-4)


def test_few_kernels_whatever_the_number_of_groups(budget):
    """At most five, of texts that know neither heads nor groups."""
    found = []
    for b, hk, most in ((1, 4, 4), (2, 4, 4), (1, 6, 8), (2, 5, 4)):
        budget(most * ONE)
        shapes = [sd.spec("f32", b, h, N, D) for h in (2 * hk, hk, hk)]
        low = sd.lower(ops.attention, *shapes, backward=True)
        assert turns(low)["contract_d_q"] > 1
        found.append({k.code for k in low.kernels if k.windows})
        assert len({k.code for k in low.kernels}) <= 5
    assert found[1:] == found[:-1]


def test_what_a_kernel_may_not_bind_is_done_in_groups(budget):
    """All heads are within the budget, but more than one binding."""
    budget(1 << 30, max_binding_bytes=8 * ONE - 4)
    shapes = [sd.spec("f32", 1, h, N, D) for h in (8, 4, 4)]
    low = sd.lower(ops.attention, *shapes, backward=True)
    assert turns(low)["contract_d_q"] == 2


def test_nothing_of_queries_by_keys_at_0(budget):
    budget(0)
    shapes = [sd.spec("f32", 1, h, N, D) for h in (8, 4, 4)]
    low = sd.lower(ops.attention, *shapes, backward=True)
    stored = [b.tensor for k in low.kernels for b in k.bindings]
    assert not any(list(getattr(t, "shape", ()))[-2:] == [N, N] for t in stored)
    assert not any(k.windows for k in low.kernels)


def test_less_than_a_head_says_why(budget):
    budget(ONE)
    shapes = [sd.spec("f32", 1, h, N, D) for h in (8, 4, 4)]
    text = sd.lower(ops.attention, *shapes, backward=True).explain()
    assert "not stored by groups: a group takes 32,768 bytes, more than 16,384" in text


def test_memory_stays_within_the_budget(budget):
    """What the plan of memory takes beside arguments and results."""
    shapes = [sd.spec("f32", 1, 6, N, D)] * 3
    taken = []
    for scores in (0, 2 * ONE, 6 * ONE):
        budget(scores)
        program = sd.lower(ops.attention, *shapes, backward=True).program
        slots = plan_memory(program, frozenset()).slots
        taken.append(sum(s.nbytes for s in slots if s.kind == "temp"))
    assert taken[1] - taken[0] == 2 * ONE
    assert taken[0] < ONE and taken[2] >= 6 * ONE


def test_a_step_of_two_layers(budget):
    """Both layers in groups in one graph, one after another in the same memory."""
    budget(2 * ONE)
    w = make(D, D, seed=7) / 4

    def f(q, k, v, w):
        y = sd.matmul(ops.attention(q, k, v), w)
        return sd.sum(sd.tanh(ops.attention(y, k, v)))

    args = (*heads(4, 4, N, N, D), w)
    both = sd.value_and_grad(f, (0, 1, 2, 3))
    low = sd.lower(both, *args)
    assert sum(turns(low).values()) >= 8
    assert low.explain().count("bytes in 2 groups") == 2
    value, grads = both(*args)
    values, wanted = exact(f, args, [np.ones(())])
    np.testing.assert_allclose(value.numpy(), values[0], 1e-4)
    for a, b in zip(grads, wanted, strict=True):
        scale = max(1.0, np.abs(b).max())
        np.testing.assert_allclose(a.numpy() / scale, b / scale, 1e-4, 2e-5)


def test_layers_whole_within_a_budget_of_one(budget):
    """Each layer's are stored whole: the next one's take the same memory. What two
    attentions of one input give exists at one time, and does not fit.
    """
    shapes = [sd.spec("f32", 1, 4, N, D)] * 3

    def layers(q, k, v):
        y = ops.attention(q, k, v)
        return ops.attention(ops.attention(y, k, v), k, v)

    def beside(q, k, v):
        return ops.attention(q, k, v) + ops.attention(k, q, v)

    def planned(f, scores):
        budget(scores)
        low = sd.lower(f, *shapes, backward=True)
        slots = plan_memory(low.program, frozenset()).slots
        return low, sum(s.nbytes for s in slots if s.kind == "temp")

    (whole, taken), (never, least) = planned(layers, 4 * ONE), planned(layers, 0)
    assert whole.explain().count("is stored: two kernels need it") == 3
    assert not any(k.windows for k in whole.kernels)
    assert "two kernels need it" not in never.explain()
    assert taken <= least + 4 * ONE
    assert "is stored: two kernels" not in planned(beside, 4 * ONE)[0].explain()
    assert "is stored: two kernels" in planned(beside, 8 * ONE)[0].explain()
    budget(4 * ONE)
    check(layers, *heads(4, 4, N, N, D))
