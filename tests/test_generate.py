"""Decoding: what is drawn, from which tokens, at what cost."""

from __future__ import annotations

import numpy as np
import pytest

import shaderdsl as sd
from shaderdsl import nn
from shaderdsl.errors import DTypeError, IndexRangeError, ShaderError, ShapeError
from shaderdsl.nn.decoding import capacity_for
from shaderdsl.nn.sampling import Sampler
from shaderdsl.runtime.profiling import profile

SMALL = {
    "vocab_size": 19,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "ffn_size": 24,
    "max_positions": 256,
}
VARIANTS = {
    "plain": {},
    "gated": {"gated": True, "qk_norm": True, "norm_shift": True},
    "window": {"windows": (3, None), "soft_cap": 4.0},
    "learned": {"positions": "learned"},
    "alibi": {"positions": "alibi"},
}


def model_of(seed=2, **options):
    """Weights large enough that tokens depend on all of the prompt."""
    model = nn.Transformer.init(nn.TransformerConfig(**{**SMALL, **options}), seed=seed)
    table = np.random.default_rng(seed).standard_normal(
        model.embed_tokens.weight.shape, np.float32
    )
    return model.replace(embed_tokens=nn.Embedding(sd.array(table)))


def ids_of(*shape, seed=1):
    return np.random.default_rng(seed).integers(0, 19, shape).astype(np.int32)


# ------------------------------------------------------------------ what is drawn


def drawn(logits, count, seed=0, seen=(), **options):
    """``count`` draws from one row of logits."""
    batch = np.tile(np.asarray(logits, np.float32), (count, 1))
    prompts = [np.array(seen, np.int64)] * count
    sampler = Sampler(prompts, batch.shape[1], seed, **{"temperature": 1.0, **options})
    first = sd.zeros(count, "i32")
    return np.asarray(sampler(sd.array(batch), sd.array(np.int32(5)), first))


def chances(
    logits, temperature=1.0, top_k=None, top_p=None, min_p=None, penalty=1.0, seen=()
):
    """The reference, with sorting."""
    x = np.asarray(logits, np.float32).astype(np.float64)
    for i in seen:
        x[i] = x[i] * penalty if x[i] < 0 else x[i] / penalty
    keep = np.ones(len(x), bool)
    if top_k is not None and top_k < len(x):
        keep &= x >= np.sort(x)[::-1][top_k - 1]
    p = np.where(keep, np.exp((x - x.max()) / temperature), 0.0)
    if top_p is not None:
        # from the likeliest value on, values that tie together
        for value in sorted(set(x[keep]), reverse=True):
            if p[x >= value].sum() >= top_p * p.sum():
                keep &= x >= value
                break
    if min_p is not None:
        keep &= p >= min_p * p.max()
    p = np.where(keep, p, 0.0)
    return p / p.sum()


LOGITS = np.random.default_rng(3).standard_normal(23) * 1.5
TIES = np.round(np.random.default_rng(4).standard_normal(40) * 2) / 2 + 0.0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7, "top_k": 9},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.3, "top_k": 15, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=str,
)
def test_draws_have_the_distribution(device, options):
    count = 4000
    p = chances(LOGITS, **options)
    found = np.bincount(drawn(LOGITS, count, seed=11, **options), minlength=len(p))
    assert not found[p == 0].any()
    common = p * count >= 5
    expected, have = p[common] * count, found[common]
    statistic = ((have - expected) ** 2 / expected).sum()
    freedom = common.sum() - 1
    # mean and deviation of χ² are f and √(2 f); the seed is fixed
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("logits", [LOGITS, TIES, TIES[:7] * 0, -np.abs(TIES) - 3])
def test_who_can_be_drawn(device, logits):
    """Flat enough that every token that is left is drawn; ties stay together."""
    flat = np.asarray(logits) * 0.2
    some = [{"top_k": k} for k in (1, 2, 5, 7, 40, 1000)]
    some += [{"top_p": p} for p in (1e-9, 0.1, 0.35, 0.77, 1.0)]
    some += [{"min_p": p} for p in (0.0, 0.5, 0.9, 1.0)]
    some += [{"top_k": 7, "top_p": 0.5}, {"top_k": 9, "top_p": 0.9, "min_p": 0.7}]
    for options in some:
        found = set(drawn(flat, 600, seed=4, **options).tolist())
        assert found == set(np.flatnonzero(chances(flat, **options))), options


def test_thresholds_of_a_larger_vocabulary(device):
    logits = np.round(np.random.default_rng(5).standard_normal(3000), 2) * 0.1
    for options in ({"top_k": 14}, {"top_p": 0.005}, {"min_p": 0.95}):
        found = set(drawn(logits, 150, seed=1, **options).tolist())
        assert found == set(np.flatnonzero(chances(logits, **options))), options


def test_the_penalty(device):
    logits = np.array([2.0, 1.9, -1.0, 1.0], np.float32)
    options = {"temperature": 0.0, "repetition_penalty": 1.5}
    assert drawn(logits, 1, temperature=0.0).tolist() == [0]
    assert drawn(logits, 1, seen=(0,), **options).tolist() == [1]
    assert drawn(logits, 1, seen=(0, 1), **options).tolist() == [0]
    p = chances(logits, penalty=1.5, seen=(0, 2))
    found = drawn(logits, 4000, seen=(0, 2), repetition_penalty=1.5)
    np.testing.assert_allclose(np.bincount(found, minlength=4) / 4000, p, atol=0.025)


def test_drawn_tokens_are_seen(device):
    logits = sd.array(np.array([[3.0, 2.9, 2.8, 0.0]], np.float32))
    sampler = Sampler([np.array([3])], 4, repetition_penalty=1.1)
    first, start = sd.zeros(1, "i32"), sd.array(np.int32(0))
    made = [int(np.asarray(sampler(logits, start, first))[0]) for _ in range(4)]
    assert made == [0, 1, 2, 0]  # the first of the three again when all are seen


def test_the_first_of_equals(device):
    logits = np.array([1.0, 4.0, 4.0, 4.0], np.float32)
    assert drawn(logits, 3, temperature=0.0).tolist() == [1, 1, 1]
    assert set(drawn(logits, 200, top_k=1).tolist()) == {1, 2, 3}
    zeros = np.array([-0.0, 0.0, -1.0], np.float32)
    assert set(drawn(zeros, 200, top_k=1).tolist()) == {0, 1}


def test_infinite_logits(device):
    logits = np.array([-np.inf, 0.0, -np.inf, 0.5], np.float32)
    for options in ({}, {"top_k": 3}, {"top_p": 0.99}, {"min_p": 0.0}):
        assert set(drawn(logits, 200, **options).tolist()) == {1, 3}


# ------------------------------------------------------------------ sequences


def test_seeds(cpu):
    model, prompt = model_of(), ids_of(5)
    options = {"max_new_tokens": 20, "temperature": 1.0, "top_k": 12}
    made = {}
    for name in ("cpu", "wgpu"):
        try:
            sd.use_device(name)
        except ShaderError:
            continue
        here = model_of()
        a = here.generate(prompt, seed=5, **options)
        assert a.tolist() == here.generate(prompt, seed=5, **options).tolist()
        assert a.tolist() != here.generate(prompt, seed=6, **options).tolist()
        made[name] = a.tolist()
    sd.use_device("cpu")
    assert len(set(map(tuple, made.values()))) == 1
    two = model.generate(np.stack([prompt, prompt]), seed=5, **options)
    assert two[0].tolist() == made["cpu"]
    assert two[1].tolist() != two[0].tolist()
    alone = model.generate(prompt, seed=5 + (1 << 32), **options)
    assert two[1].tolist() == alone.tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_prompts_of_different_lengths(device, variant):
    model = model_of(**VARIANTS[variant])
    prompts = [ids_of(n, seed=n) for n in (3, 40, 1, 33)]
    for options in (
        {"repetition_penalty": 1.1},
        {"temperature": 0.9, "top_p": 0.9, "seed": [3, 1, 4, 1]},
    ):
        together = model.generate(prompts, max_new_tokens=9, **options)
        seeds = options.pop("seed", [0] * 4)
        for prompt, have, seed in zip(prompts, together, seeds):
            alone = model.generate(prompt, max_new_tokens=9, seed=seed, **options)
            assert have.tolist() == alone.tolist()


def test_each_sequence_stops_by_itself(device):
    model = model_of()
    prompts = [ids_of(4), ids_of(7, seed=2)]
    free = [model.generate(p, max_new_tokens=12) for p in prompts]
    stop = int(free[0][6])
    ends = []
    for p, whole in zip(prompts, free):
        new = whole[len(p) :].tolist()
        ends.append(len(p) + (new.index(stop) + 1 if stop in new else len(new)))
    seen = []
    have = model.generate(prompts, max_new_tokens=12, stop=stop, on_token=seen.append)
    assert [len(h) for h in have] == ends
    for h, whole in zip(have, free):
        assert h.tolist() == whole[: len(h)].tolist()
    # what is told as it comes is what is returned
    for row, (p, h) in enumerate(zip(prompts, have)):
        told = [tokens[row] for tokens in seen if tokens[row] is not None]
        assert told == h[len(p) :].tolist()
    # a rectangle is filled with the last token
    square = np.stack([prompts[0], prompts[1][:4]])
    full = model.generate(square, max_new_tokens=12, stop=[stop, 100])
    assert full.shape[0] == 2
    assert full.dtype == np.int32


def test_streaming(device):
    model, prompt = model_of(), ids_of(6)
    made = model.generate(prompt, max_new_tokens=8)
    steps = nn.stream(model, prompt, max_new_tokens=8)
    assert [next(steps)[0] for _ in range(3)] == made[6:9].tolist()
    assert [t for (t,) in steps] == made[9:].tolist()
    with pytest.raises(ShapeError):
        nn.stream(model, [])  # at once


def test_a_cache_that_goes_on(device):
    model, prompt = model_of(), ids_of(40)
    whole = model.generate(prompt, max_new_tokens=10)
    cache = model.new_cache(capacity=64)
    a = model.generate(prompt[:35], max_new_tokens=0, cache=cache)
    assert a.tolist() == prompt[:35].tolist()
    b = model.generate(prompt[35:], max_new_tokens=4, cache=cache)
    c = model.generate(b[-1:], max_new_tokens=6, cache=cache)
    assert [*a, *b[:-1], *c] == whole.tolist()
    with pytest.raises(IndexRangeError, match="do not fit"):
        model.generate(c[-1:], max_new_tokens=40, cache=cache)
    assert cache.length == 35 + 5 + 3 + 6
    cache.grow(128)
    more = model.generate(c[-1:], max_new_tokens=40, cache=cache)
    longer = model.generate(prompt, max_new_tokens=50)
    assert [*whole[:-1], *more] == longer.tolist()


# ------------------------------------------------------------------ what it costs


@pytest.fixture
def wgpu(device):
    if device.name == "cpu" or sd.runtime.current().target.family == "cpu":
        pytest.skip("counts of the device wgpu")


def test_prompts_of_any_length_compile_nothing(wgpu):
    model = model_of(max_positions=512)
    model.generate(ids_of(7), max_new_tokens=2)
    for n in (1, 2, 21, 63, 64, 65, 190):
        with profile() as p:
            model.generate(ids_of(n), max_new_tokens=3)
        assert p.compiled == 0, n
    for options in (
        {"temperature": 0.7},
        {"temperature": 0.7, "top_k": 3},
        {"temperature": 0.7, "top_p": 0.3},
        {"temperature": 0.7, "top_k": 3, "top_p": 0.3, "min_p": 0.1},
        {"repetition_penalty": 1.2},
    ):
        with profile() as p:
            model.generate(ids_of(7), max_new_tokens=3, **options)
        assert p.compiled == 0, options


def test_one_small_read_a_token(device):
    model, prompts = model_of(), [ids_of(5), ids_of(9)]
    for options in ({}, {"temperature": 1.0, "top_k": 5, "top_p": 0.9}):
        model.generate(prompts, max_new_tokens=2, **options)
        with profile() as p:
            model.generate(prompts, max_new_tokens=12, **options)
        assert p.downloads == 12
        assert p.download_bytes == 12 * 2 * 4


def test_a_token_is_read_while_the_next_step_runs(device, monkeypatch):
    """The copy is queued before the step that follows, and waited for after it."""
    from shaderdsl.nn.cache import KVCache
    from shaderdsl.runtime import current

    order = []

    def told(name, function):
        def call(*args, **keywords):
            order.append(name)
            return function(*args, **keywords)

        return call

    model = model_of()
    model.generate(ids_of(5), max_new_tokens=2)
    fetch = type(current()).fetch
    monkeypatch.setattr(
        type(current()),
        "fetch",
        lambda *given: told("wait", told("fetch", fetch)(*given)),
    )
    for name in ("step", "follow"):
        monkeypatch.setattr(KVCache, name, told(name, getattr(KVCache, name)))
    for options, name in (({}, "follow"), ({"temperature": 1.0}, "step")):
        order.clear()
        model.generate(ids_of(5), max_new_tokens=4, **options)
        assert order == ["fetch", name, "wait"] * 3 + ["fetch", "wait"]


@pytest.mark.parametrize("batch", [1, 3])
def test_steps_that_draw_are_those_that_do_not(device, batch):
    """One plan a token, whose positions stay on the device, and a plan for each."""
    model, prompt = model_of(), ids_of(batch, 5)
    one, two = (model.new_cache(batch, 40) for _ in range(2))
    padding = [0, 2, 1][:batch] if batch > 1 else None
    for cache in (one, two):
        logits = cache.run(model, prompt, last=True, padding=padding)
    tokens = other = sd.argmax(logits.reshape(batch, -1), axis=1)
    for k in range(12):
        tokens = one.follow(model, tokens)
        other = sd.argmax(two.step(model, other), axis=1)
        np.testing.assert_array_equal(tokens.numpy(), other.numpy())
        if k in (4, 7):  # what comes in between is seen
            for cache in (one, two):
                cache.run(model, ids_of(batch, k))
    assert one.length == two.length
    for layer in range(2):
        for read in ("keys", "values"):
            a, b = (getattr(cache, read)(layer).numpy() for cache in (one, two))
            np.testing.assert_array_equal(a, b)
    nan = model.replace(norm=model.norm.replace(weight=model.norm.weight * np.nan))
    assert (one.follow(nan, tokens).numpy() == -1).all()
    full = model.new_cache(batch, 2)
    with pytest.raises(IndexRangeError):
        for _ in range(3):
            full.follow(model, tokens)


def test_a_drawn_token_is_one_plan(wgpu):
    model = model_of(positions="alibi")
    model.generate(ids_of(5), max_new_tokens=3)
    counts = []
    for n in (2, 3, 9):
        with profile() as p:
            model.generate(ids_of(5), max_new_tokens=n)
        counts.append((p.dispatches, p.uploads))
    (two, up), (three, more), (nine, most) = counts
    assert nine - three == 6 * (three - two)
    # nothing of a later token comes from the host
    assert up == more == most


def test_only_the_new_rows_are_written(wgpu):
    # without tables of rotary positions, whose size would count
    model = model_of(max_positions=4096, positions="alibi")
    cache = model.new_cache(capacity=4000)
    cache.run(model, ids_of(9))
    before = [k._buffer.offset for k in cache._keys]
    with profile() as p:
        cache.step(model, sd.array(ids_of(1)))
    writes = [e for e in p.events if "update_slice" in e.name]
    assert len(writes) >= 1
    assert max(e.bytes for e in writes) <= 256
    assert [k._buffer.offset for k in cache._keys] == before
    assert p.dispatches <= 40


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("ids", "options", "error"),
    [
        ([], {}, ShapeError),
        (np.zeros((2, 0), np.int32), {}, ShapeError),
        ([[1, 2], []], {}, ShapeError),
        (np.ones(3, np.float32), {}, DTypeError),
        ([19], {}, IndexRangeError),
        ([-1], {}, IndexRangeError),
        ([1], {"max_new_tokens": 256}, IndexRangeError),
        ([1], {"max_new_tokens": -1}, ShaderError),
        ([1], {"temperature": -0.1}, ShaderError),
        ([1], {"temperature": float("nan")}, ShaderError),
        ([1], {"top_k": 0}, ShaderError),
        ([1], {"top_p": 0.0}, ShaderError),
        ([1], {"top_p": 1.1}, ShaderError),
        ([1], {"min_p": 2.0}, ShaderError),
        ([1], {"repetition_penalty": 0.0}, ShaderError),
        ([1], {"seed": [1, 2]}, ShaderError),
    ],
    ids=str,
)
def test_what_is_refused_before_any_work(cpu, ids, options, error):
    model = model_of()
    with profile() as p, pytest.raises(error):
        model.generate(ids, **options)
    assert p.dispatches == 0


def test_a_full_cache_is_refused_before_any_work(cpu):
    model = model_of()
    cache = model.new_cache(capacity=8)
    model(ids_of(6), cache=cache)
    with profile() as p:
        with pytest.raises(IndexRangeError, match="6 of 8"):
            model(ids_of(3), cache=cache)
        with pytest.raises(IndexRangeError, match="6 of 8"):
            model.generate(ids_of(1), max_new_tokens=3, cache=cache)
        with pytest.raises(ShapeError):
            model.generate([[1, 2], [3]], cache=cache)
    assert p.dispatches == 0
    model.generate(ids_of(1), max_new_tokens=2, cache=cache)
    assert cache.length == 8


def test_logits_that_are_not_numbers(device):
    model = model_of()
    bad = np.asarray(model.norm.weight) * np.nan
    broken = model.replace(norm=nn.RMSNorm(sd.array(bad)))
    for options in ({}, {"temperature": 1.0, "top_k": 4}):
        with pytest.raises(ShaderError, match="not numbers"):
            broken.generate([1, 2], **options)


def test_capacities():
    assert capacity_for(7, 4096) == capacity_for(256, 4096) == 256
    assert capacity_for(257, 4096) == 512
    assert capacity_for(3000, 3500) == 3500
