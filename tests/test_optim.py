"""Optimisers against NumPy in float64, schedules, clipping, frozen parts."""

from __future__ import annotations

import math

import numpy as np
import pytest

import shaderdsl as sd
from shaderdsl import nn, optim
from shaderdsl.errors import DTypeError, ShaderError, ShapeError

RNG = np.random.default_rng(0)


def tree(seed=0):
    generator = np.random.default_rng(seed)
    draw = generator.standard_normal
    return {
        "weight": sd.array(draw((3, 5)).astype(np.float32)),
        "norm": sd.array(draw(5).astype(np.float32)),
        "scale": sd.array(np.float32(draw())),
    }


def arrays(x):
    return {k: np.asarray(v, np.float64) for k, v in x.items()}


def near(have, want, limit=2e-6):
    for k in want:
        np.testing.assert_allclose(np.asarray(have[k]), want[k], rtol=limit, atol=limit)


def reference_adamw(p, grads, lr, betas, eps, decay, limit=None, decays=lambda k: True):
    p = dict(p)
    m, v = (dict.fromkeys(p, 0.0) for _ in range(2))
    for t, g in enumerate(grads, 1):
        clip = 1.0
        if limit is not None:
            norm = math.sqrt(sum((x**2).sum() for x in g.values()))
            clip = min(1.0, limit / norm)
        rate = lr(t - 1) if callable(lr) else lr
        for k in p:
            d = g[k] * clip
            m[k] = betas[0] * m[k] + (1 - betas[0]) * d
            v[k] = betas[1] * v[k] + (1 - betas[1]) * d * d
            step = m[k] / (1 - betas[0] ** t)
            step = step / (np.sqrt(v[k] / (1 - betas[1] ** t)) + eps)
            p[k] = p[k] - rate * (step + (decay if decays(k) else 0.0) * p[k])
    return p


@pytest.mark.parametrize("limit", [None, 0.5, 1e3])
@pytest.mark.parametrize("compiled", [False, True])
def test_adamw(device, limit, compiled):
    model, grads = tree(), [tree(s) for s in range(1, 5)]
    schedule = optim.cosine(1e-2, 10, 2)
    options = {"betas": (0.9, 0.95), "eps": 1e-6}
    opt = optim.AdamW(lr=schedule, weight_decay=0.1, max_grad_norm=limit, **options)
    want = reference_adamw(
        arrays(model), [arrays(g) for g in grads], schedule, **options, decay=0.1,
        limit=limit,
    )  # fmt: skip
    update = sd.compile(opt.update) if compiled else opt.update
    state = opt.init(model)
    for g in grads:
        model, state = update(model, g, state)
    near(model, want)
    assert int(state.step) == 4
    assert state.step.dtype == "i32" and state.step.shape == ()


def test_the_first_correction_keeps_its_digits(cpu):
    t = sd.array(np.int32(1))
    for beta in (0.9, 0.999, 0.99999):
        have = float(optim._correction(beta, t))
        assert have == pytest.approx(1 - float(np.float32(beta)), rel=1e-6)
    assert float(optim._correction(0.0, t)) == 1.0


def test_weight_decay_by_group(device):
    model, g = tree(), tree(1)
    opt = optim.AdamW(lr=1e-2, weight_decay=0.5, decay=optim.matrices)
    moved, _ = opt.update(model, g, opt.init(model))
    want = reference_adamw(
        arrays(model), [arrays(g)], 1e-2, (0.9, 0.999), 1e-8, 0.5,
        decays=lambda k: k == "weight",
    )  # fmt: skip
    near(moved, want)


def test_a_number_is_no_parameter(cpu):
    """A setting that was not declared as one is refused, not trained."""
    for optimiser in (sd.optim.AdamW(), sd.optim.SGD(lr=0.1, momentum=0.9)):
        with pytest.raises(DTypeError, match=r"^s is the number 2.0") as caught:
            optimiser.init({"w": sd.ones(3), "s": 2.0})
        assert "sd.nn.static" in caught.value.cure
        assert "test_optim.py" in caught.value.where


def test_parameters_without_a_gradient_stay(device):
    model = {**tree(), "ids": sd.array(np.arange(3, dtype=np.int32))}

    def loss(m):
        return (m["weight"] ** 2).sum() + m["norm"].sum() * m["scale"]

    gradient = sd.grad(loss)(model)
    assert gradient["ids"] is None
    frozen = {**gradient, "norm": None}
    for opt in (optim.AdamW(lr=0.1), optim.SGD(lr=0.1)):
        moved, state = opt.update(model, frozen, opt.init(model))
        np.testing.assert_array_equal(moved["ids"], model["ids"])
        np.testing.assert_array_equal(moved["norm"], model["norm"])
        assert not np.array_equal(moved["weight"], model["weight"])
        again, _ = opt.update(moved, frozen, state)
        assert not np.array_equal(again["weight"], moved["weight"])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd(device, momentum):
    model, grads = tree(), [tree(s) for s in range(1, 4)]
    opt = optim.SGD(lr=0.1, momentum=momentum, weight_decay=0.01, max_grad_norm=2.0)
    want = arrays(model)
    velocity = dict.fromkeys(want, 0.0)
    state = opt.init(model)
    for g in grads:
        model, state = opt.update(model, g, state)
        d = arrays(g)
        clip = min(1.0, 2.0 / math.sqrt(sum((x**2).sum() for x in d.values())))
        for k in want:
            velocity[k] = momentum * velocity[k] + clip * d[k] + 0.01 * want[k]
            want[k] = want[k] - 0.1 * velocity[k]
    near(model, want)
    assert int(state.step) == 3


def test_another_rate_compiles_nothing(device):
    model, g = tree(), tree(1)
    step = sd.compile(lambda opt, model, g, state: opt.update(model, g, state))
    opt = optim.AdamW(lr=1e-2)
    state = opt.init(model)
    step(opt, model, g, state)
    with sd.profile() as p:
        moved, _ = step(opt.replace(lr=3e-2, weight_decay=0.0), model, g, state)
    assert p.compiled == 0
    want = reference_adamw(
        arrays(model), [arrays(g)], 3e-2, (0.9, 0.999), 1e-8, 0.0
    )  # fmt: skip
    near(moved, want)


def test_schedules(device):
    schedule = optim.cosine(2.0, 100, 10, final=0.5)
    assert schedule(0) == pytest.approx(0.2)
    assert schedule(9) == pytest.approx(2.0)
    assert schedule(10) == pytest.approx(2.0)
    assert schedule(55) == pytest.approx(1.25)
    assert schedule(100) == schedule(1000) == pytest.approx(0.5)
    on_device = sd.compile(lambda s: schedule(s))
    for step in (0, 9, 10, 33, 100, 200):
        have = float(on_device(sd.array(np.int32(step))))
        assert have == pytest.approx(schedule(step), rel=1e-6)
    straight = optim.linear(1.0, 10)
    assert [straight(s) for s in (0, 5, 10)] == pytest.approx([1.0, 0.5, 0.0], abs=1e-6)
    for bad in ((0, 0), (10, 11), (10, -1)):
        with pytest.raises(ShaderError):
            optim.cosine(1.0, *bad)


def test_global_norm_and_clipping(device):
    g = {"a": sd.array([3.0, 0.0]), "b": (sd.array([[4.0]]), None)}
    assert float(optim.global_norm(g)) == pytest.approx(5.0)
    clipped = optim.clip_by_global_norm(g, 1.0)
    np.testing.assert_allclose(np.asarray(clipped["a"]), [0.6, 0.0], rtol=1e-6)
    same = optim.clip_by_global_norm(g, 10.0)
    np.testing.assert_array_equal(np.asarray(same["a"]), [3.0, 0.0])
    zero = {"a": sd.zeros(3)}
    assert not np.asarray(optim.clip_by_global_norm(zero, 1.0)["a"]).any()
    bad = {"a": sd.array([math.nan, 1.0])}
    assert np.isnan(np.asarray(optim.clip_by_global_norm(bad, 1.0)["a"])).all()
    assert float(optim.global_norm({})) == 0.0


def test_a_step_reads_nothing_back(device):
    config = nn.TransformerConfig(
        vocab_size=7, hidden_size=8, num_layers=1, num_heads=2, ffn_size=8
    )
    model = nn.Transformer.init(config)
    opt = optim.AdamW(lr=optim.cosine(1e-2, 9, 3), max_grad_norm=1.0)
    ids = np.array([[1, 2, 3, 4, 5]], np.int32)

    @sd.compile(donate=("model", "state"))
    def step(model, state, x, y):
        loss, g = sd.value_and_grad(lambda m: nn.cross_entropy(m(x), y))(model)
        return *opt.update(model, g, state), loss

    state = opt.init(model)
    model, state, _ = step(model, state, ids[:, :-1], ids[:, 1:])
    with sd.profile() as p:
        model, state, loss = step(model, state, ids[:, :-1], ids[:, 1:])
    assert p.downloads == 0 and p.compiled == 0
    assert math.isfinite(float(loss))


def test_gradients_of_another_model_are_refused(cpu):
    model, opt = tree(), optim.AdamW()
    state = opt.init(model)
    with pytest.raises(ShapeError, match="norm"):
        opt.update(model, {**tree(1), "norm": sd.zeros(4)}, state)
    with pytest.raises(ShapeError, match="extra"):
        opt.update(model, {**tree(1), "extra": sd.zeros(4)}, state)


@pytest.mark.parametrize(
    "options", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": -1e-8}], ids=str
)
def test_options_out_of_range(options):
    with pytest.raises(ShaderError):
        optim.AdamW(**options)


def test_accumulation_is_the_whole_batch(device):
    """Parts with different numbers of counted labels, in one donated total."""
    config = nn.TransformerConfig(
        vocab_size=11,
        hidden_size=12,
        num_layers=1,
        num_heads=2,
        ffn_size=16,
        max_positions=8,
    )
    model = nn.Transformer.init(config)
    generator = np.random.default_rng(5)
    ids = generator.integers(0, 11, (4, 8)).astype(np.int32)
    labels = generator.integers(0, 11, (4, 8)).astype(np.int32)
    labels[0, :5] = labels[3, 2:] = -100
    counted = (labels != -100).sum()

    def loss(model, ids, labels):
        return nn.cross_entropy(model(ids), labels)

    want = sd.grad(loss)(model, ids, labels)

    @sd.compile(donate=("total",))
    def part(model, total, ids, labels, weight):
        return sd.optim.accumulate(total, sd.grad(loss)(model, ids, labels), weight)

    total = None
    for rows in (slice(0, 2), slice(2, 4)):
        weight = float((labels[rows] != -100).sum() / counted)
        total = part(model, total, ids[rows], labels[rows], weight)
    for a, b in zip(sd.tree.leaves(total), sd.tree.leaves(want)):
        b = np.asarray(b)
        assert np.abs(np.asarray(a) - b).max() <= 2e-6 * max(1.0, np.abs(b).max())
    part_of = sd.optim.accumulate(None, {"a": None, "b": np.ones(2, np.float16)}, 0.5)
    assert part_of["a"] is None and part_of["b"].dtype == "f32"
