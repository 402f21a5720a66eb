"""Replays of a plan: memory stays where it is, and nothing is made anew."""

import dataclasses
import functools
import threading
from concurrent.futures import wait

import numpy as np
import pytest

import shaderdsl as sd
from shaderdsl import engine, errors, ops
from shaderdsl.codegen.target import Features, Limits
from shaderdsl.runtime import executable


@pytest.fixture
def gpu():
    if not any(d.spec.startswith("wgpu") for d in sd.devices()):
        pytest.skip("no adapter")
    yield sd.use_device("wgpu")
    sd.use_device("cpu")


@sd.op("b k, k n -> b n")
def product(x, w):
    return sd.sum(x * w, over="k")


def make_step(layers=3, momentum=0.5):
    """Plain descent with momentum, which a contraction's epilogue takes in."""

    def loss(weights, x):
        for w in weights:
            x = product(x, w)
        return sd.mean(x * x)

    def step(weights, speeds, x):
        value, grads = sd.value_and_grad(loss)(weights, x)
        speeds = [v * momentum + g for v, g in zip(speeds, grads)]
        weights = [w - 0.1 * v for w, v in zip(weights, speeds)]
        return weights, speeds, value

    return step


def arrays(layers=3, n=12):
    rng = np.random.default_rng(0)
    ws = [rng.standard_normal((n, n), np.float32) / 3 for _ in range(layers)]
    return (
        ws,
        [np.zeros((n, n), np.float32) for _ in ws],
        rng.standard_normal((5, n), np.float32),
    )


def run(step, count, donate, between=lambda k, state: None):
    ws, vs, x = arrays()
    compiled = sd.compile(step, donate=("weights", "speeds") if donate else ())
    state = [sd.asarray(w) for w in ws], [sd.asarray(v) for v in vs]
    x = sd.asarray(x)
    losses = []
    for k in range(count):
        *state, value = compiled(*state, x)
        losses.append(float(value))
        between(k, state)
    return [a.numpy() for part in state for a in part], losses


@pytest.mark.parametrize("family", ["software", "gpu"])
def test_updates_in_a_contraction_are_those_without_donation(family, gpu):
    before = gpu.target
    if family == "gpu":
        features = dataclasses.replace(before.features, wide_words=False)
        gpu.target = dataclasses.replace(before, family=family, features=features)
    try:
        plain, losses = run(make_step(), 6, donate=False)
        in_place, same = run(make_step(), 6, donate=True)
    finally:
        gpu.target = before
    assert losses == same
    assert losses[-1] < losses[0]
    for a, b in zip(plain, in_place):
        assert a.tobytes() == b.tobytes()


def test_a_loop_makes_no_bind_group_after_its_first_steps(gpu, monkeypatch):
    made = []
    group = executable.WgpuExecutable._group

    def counted(self, *args):
        made.append(1)
        return group(self, *args)

    monkeypatch.setattr(executable.WgpuExecutable, "_group", counted)
    counts = []
    engine._plans.clear()
    run(make_step(), 12, True, lambda k, state: counts.append(len(made)))
    assert counts[0] > 0
    assert counts[-1] == counts[5], counts


def test_memory_that_somebody_else_holds_is_not_overwritten(gpu):
    engine._plans.clear()
    held = []

    def hold(k, state):
        if k in (3, 6):  # a view of a weight, kept over the next step
            held.append((state[0][1] + 0.0, state[0][1].numpy()))

    plain, losses = run(make_step(), 9, False)
    in_place, same = run(make_step(), 9, True, hold)
    assert losses == same
    for a, b in zip(plain, in_place):
        assert a.tobytes() == b.tobytes()
    for kept, want in held:
        assert kept.numpy().tobytes() == want.tobytes()


def test_an_array_given_twice_or_kept_makes_the_call_a_new_one(gpu):
    engine._plans.clear()

    @sd.compile
    def keep(x):
        return x, x * 2.0

    def advance(x, y):
        return x + y, y * 2.0

    step = sd.compile(advance, donate=("x", "y"))
    x, y = sd.asarray(np.ones(300, np.float32)), sd.asarray(np.ones(300, np.float32))
    want_x, want_y = np.ones(300, np.float32), np.ones(300, np.float32)
    for k in range(8):
        if k == 4:  # x shares its memory from now on
            x, _ = keep(x)
            other, _ = keep(x)
        x, y = step(x, y)
        want_x, want_y = want_x + want_y, want_y * 2
        np.testing.assert_array_equal(x.numpy(), want_x)
        np.testing.assert_array_equal(y.numpy(), want_y)
        if k == 4:
            before = other.numpy()
    np.testing.assert_array_equal(other.numpy(), before)


def test_donated_arrays_are_gone_in_a_replay_too(gpu):
    step = sd.compile(lambda x: x + 1.0, donate="x")
    first = sd.asarray(np.zeros(64, np.float32))
    x = first
    for _ in range(5):
        last, x = x, step(x)
    with pytest.raises(sd.errors.DonatedError):
        last.numpy()
    with pytest.raises(sd.errors.DonatedError):
        step(last)
    assert x.numpy()[0] == 5


def test_two_plans_share_temporary_memory(gpu):
    """What one plan keeps for its next call is there for another one that needs it."""
    gpu.pool.trim()

    def chain(n):
        def f(x):
            for _ in range(3):
                x = sd.matmul(x, x) * (1.0 / n)
            return sd.sum(x)

        return sd.compile(f)

    a, b = chain(192), chain(193)
    x = sd.asarray(np.ones((192, 192), np.float32) / 192)
    a(x)
    peak = gpu.pool.peak_bytes
    for _ in range(3):
        a(x), b(x)
    sd.synchronize()
    live = gpu.pool.live_bytes
    for _ in range(4):
        a(x), b(x)
    assert gpu.pool.live_bytes == live
    assert gpu.pool.peak_bytes <= peak + 3 * 192 * 192 * 4


def test_without_the_drivers_functions_calls_go_through_wgpu(gpu, monkeypatch):
    from shaderdsl.runtime import launch

    monkeypatch.setattr(launch, "DIRECT", False)
    engine._plans.clear()
    plain, losses = run(make_step(), 3, True)
    monkeypatch.setattr(launch, "DIRECT", True)
    engine._plans.clear()
    direct, same = run(make_step(), 3, True)
    assert losses == same
    for a, b in zip(plain, direct):
        assert a.tobytes() == b.tobytes()


def test_a_module_is_taken_apart_once_and_put_together_alike():
    from shaderdsl import tree

    class Pair(sd.nn.Module):
        a: sd.Array
        b: tuple
        scale: float = sd.nn.module.static(default=2.0)

    one, two, three = (sd.asarray(np.full(3, k, np.float32)) for k in range(3))
    made = Pair(one, (two, None), scale=3.0)
    state = {"m": made, "k": [three]}
    leaves, structure = tree.flatten(state)
    assert tree.flatten(state) == (leaves, structure)  # remembered
    assert tree.flatten(made)[0] == leaves[:2]
    # What holds a list may change; its parts that cannot are remembered all the same.
    loose = Pair(one, (made, [two]))
    assert tree.flatten(loose)[0] == [one, one, two, two]
    loose.b[1].append(three)
    assert tree.flatten(loose)[0] == [one, one, two, two, three]
    for build in (lambda x: tree.unflatten(structure, x), tree.builder(structure)):
        again = build(list(leaves))
        assert type(again["m"]) is Pair and again["m"].scale == 3.0
        assert again["m"].a is one and again["m"].b == (two, None)
        assert again["k"] == [three]
        assert tree.flatten(again) == (leaves, structure)
        assert hash(tree.flatten(again)[1]) == hash(structure)
        # A list may be changed; what it flattens to then is what it holds.
        again["k"].append(one)
        assert tree.flatten(again)[0] == [*leaves, one]
        # Other leaves in a rebuilt tree, and one that is no leaf.
        other = build([two, one, three])
        assert tree.flatten(other)[0][:2] == [two, one]
        none = build([None, one, three])
        assert tree.flatten(none)[0] == [one, three]
        assert tree.flatten(none)[1] != structure
        replaced = again["m"].replace(a=two)
        assert tree.flatten(replaced)[0] == [two, two]


def test_numbers_left_at_their_defaults_are_known_while_tracing(device):
    half = np.float32(1.5)

    def doubled(x, /, gain=half, n=2, *rest, shift=0.5, often=1):
        for _ in range(n):
            x = x * 2
        for _ in range(often):
            x = x + shift
        return x * gain + sum(rest)

    x = np.arange(3, dtype=np.float32)
    f = sd.compile(doubled)
    np.testing.assert_array_equal(f(x).numpy(), doubled(x))
    np.testing.assert_array_equal(f(x, shift=1.5).numpy(), doubled(x, shift=1.5))
    np.testing.assert_array_equal(f(x, 2.0).numpy(), doubled(x, 2.0))
    with sd.profile() as p:  # a given number is a runtime value
        np.testing.assert_array_equal(f(x, shift=2.5).numpy(), doubled(x, shift=2.5))
    assert p.compiled == 0
    with pytest.raises(errors.TraceError, match="cannot be read"):
        f(x, 1.0, 3)
    for more in ({"n": 3}, {"often": 4, "n": 0}):
        g = sd.compile(functools.partial(doubled, **more))
        np.testing.assert_array_equal(g(x).numpy(), doubled(x, **more))


def test_another_target_has_another_plan(wgpu, retarget):
    x = np.linspace(-3, 3, 64 * 48, dtype=np.float32).reshape(64, 48)
    array = sd.asarray(x)
    first = ops.softmax(array).numpy()
    plans = list(engine._plans.values())
    assert ops.softmax(array).numpy().tobytes() == first.tobytes()
    assert list(engine._plans.values()) == plans
    retarget(family="gpu", features=Features(), limits=Limits())
    np.testing.assert_allclose(ops.softmax(array).numpy(), first, rtol=2e-6)
    assert list(engine._plans.values()) != plans
    (plan,) = set(engine._plans.values()) - set(plans)
    assert plan.target.limits == Limits()


def test_kernels_count_for_whoever_asked_for_them(gpu):
    """Not for a block that happens to be open when another thread is done."""
    shown = sd.op("n -> n")(lambda x: sd.tanh(x * 0.173) + 0.0291)
    x = sd.asarray(np.ones(77, np.float32))
    engine._plans.clear()
    with sd.profile() as before:
        stages = sd.compile(shown)
        stages(x)
    assert before.compiled == 1
    made = threading.Event()
    real = gpu.pipelines._module

    def slow(kernel):
        made.wait(20)
        return real(kernel)

    gpu.pipelines._module = slow
    try:
        other = sd.op("n -> n")(lambda x: sd.tanh(x * 0.271) + 0.0913)
        with sd.profile() as asking:
            plan = sd.lower(other, sd.spec("f32", 77))
            futures = gpu.pipelines.begin(plan.kernels)
        with sd.profile() as later:
            made.set()
            wait(futures)
    finally:
        made.set()
        del gpu.pipelines._module
    assert (asking.compiled, later.compiled) == (1, 0)
