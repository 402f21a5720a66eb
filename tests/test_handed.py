"""Results that go from call to call as memory: nobody can tell."""

import copy
import dataclasses
import gc
import pickle
import threading

import numpy as np
import pytest

import shaderdsl as sd
from shaderdsl import errors, function, handed, tree
from shaderdsl.runtime.adapters import library
from shaderdsl.runtime.executable import WgpuExecutable


class Net(sd.nn.Module):
    first: sd.Array
    second: sd.Array
    bias: sd.Array | None = None

    def __call__(self, x):
        return sd.tanh(x @ self.first) @ self.second


class Frozen(sd.nn.Module):
    table: sd.Array


@pytest.fixture
def repeats(device, monkeypatch):
    """How many calls were known by their key."""
    if device.kind != "wgpu":
        pytest.skip("replays of the device wgpu")
    found = []
    repeat = function.Compiled._repeat

    def counted(self, g, link):
        done, result = repeat(self, g, link)
        found.append(done)
        return done, result

    monkeypatch.setattr(function.Compiled, "_repeat", counted)
    return found


@pytest.fixture
def device():
    if not any(d.spec.startswith("wgpu") for d in sd.devices()):
        pytest.skip("no adapter")
    yield sd.use_device("wgpu")
    sd.use_device("cpu")


def net(seed=0):
    rng = np.random.default_rng(seed)
    return Net(*(sd.asarray(rng.standard_normal((6, 6), np.float32)) for _ in "ab"))


def train(net, speed, base, x):
    """A step; ``base`` stays."""

    def loss(net):
        return sd.mean((net(x) + base.table) ** 2)

    value, grads = sd.value_and_grad(loss)(net)
    speed = tree.map(lambda s, g: s * 0.5 + g, speed, grads)
    return tree.map(lambda w, s: w - 0.1 * s, net, speed), speed, value


def loop(count, between=lambda k, net, speed: (net, speed)):
    step = sd.compile(train, donate=("net", "speed"))
    model, speed = net(), tree.map(lambda x: x * 0.0, net())
    base = Frozen(sd.asarray(np.ones((4, 6), np.float32)))
    x = sd.asarray(np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6))
    losses = []
    for k in range(count):
        model, speed, value = step(model, speed, base, x)
        losses.append(float(value))
        model, speed = between(k, model, speed)
    return losses, [a.numpy().tobytes() for a in tree.leaves((model, speed))]


@pytest.fixture
def plain(device, monkeypatch):
    """The loop without any of it."""
    with monkeypatch.context() as m:
        m.setattr(handed, "given", lambda args, device: None)
        return loop(16)


def test_a_loop_is_known_by_a_short_key(repeats, plain):
    assert loop(16) == plain
    assert sum(repeats) >= 8 and all(repeats)


def test_looking_in_between_changes_nothing(repeats, plain):
    looked = []

    def look(k, model, speed):
        if k in (7, 9, 10):
            looked.append((model.first, model.first.numpy()))
            assert model.bias is None
        if k == 9:
            looked.append((speed.second, speed.second.numpy()))
        return model, speed

    assert loop(16, look) == plain
    assert any(repeats)
    for a, _ in looked:
        with pytest.raises(errors.DonatedError):
            a.numpy()


def test_what_was_given_away_is_gone(repeats):
    kept = []

    def keep(k, model, speed):
        kept.append((model, speed))
        return model, speed

    loop(12, keep)
    assert any(repeats)
    step = sd.compile(train, donate=("net", "speed"))
    for model, speed in kept[:-1]:
        with pytest.raises(errors.DonatedError):
            model.first.numpy()
        with pytest.raises(errors.DonatedError):
            step(model, speed, Frozen(model.first), model.first)
        assert copy.copy(speed).second.donated
    model, speed = kept[-1]
    assert np.isfinite(copy.copy(model).first.numpy()).all()
    assert repr(speed.first.shape) == "(6, 6)"


def test_shared_and_kept_memory_is_left_alone(repeats, plain):
    share = sd.compile(lambda net: (net, net.first * 1.0))
    held = []

    def between(k, model, speed):
        if k in (6, 11):
            same, other = share(model)  # the same memory under a second name
            held.append((same.second, same.second.numpy(), other, other.numpy()))
        return model, speed

    assert loop(16, between) == plain
    assert any(repeats)
    for a, x, b, y in held:
        np.testing.assert_array_equal(a.numpy(), x)
        np.testing.assert_array_equal(b.numpy(), y)


def test_a_module_that_stays_may_be_given_away_elsewhere(repeats):
    """A link holds for modules that stay only until their arrays are given away."""
    step = sd.compile(train, donate=("net", "speed"))
    spend = sd.compile(lambda base: Frozen(base.table * 2.0), donate="base")
    base = Frozen(sd.asarray(np.ones((4, 6), np.float32)))
    x = sd.asarray(np.ones((4, 6), np.float32))
    model, speed = net(), tree.map(lambda x: x * 0.0, net())
    for _ in range(9):
        model, speed, _ = step(model, speed, base, x)
    assert any(repeats)
    spend(base)
    with pytest.raises(errors.DonatedError):
        step(model, speed, base, x)
    # nothing was taken by the call that failed
    assert np.isfinite(model.first.numpy()).all()


def test_an_argument_twice(repeats):
    both = sd.compile(
        lambda a, b: (tree.map(lambda x, y: x + y, a, b), b), donate=("a", "b")
    )
    one, two = net(0), net(1)
    for _ in range(8):
        one, two = both(one, two)
    want = one.first.numpy() * 2
    summed, same = both(one, one)
    np.testing.assert_array_equal(summed.first.numpy(), want)
    np.testing.assert_array_equal(same.first.numpy(), want / 2)


def test_a_failed_call_takes_nothing(repeats, monkeypatch):
    def broken(self, *given):
        raise errors.CompilerError("on purpose")

    losses = []
    for failing in (False, True):
        step = sd.compile(train, donate=("net", "speed"))
        model, speed = net(), tree.map(lambda x: x * 0.0, net())
        base = Frozen(sd.asarray(np.ones((4, 6), np.float32)))
        x = sd.asarray(np.ones((4, 6), np.float32))
        for k in range(12):
            if failing and k == 9:
                assert repeats[-1]
                with monkeypatch.context() as m:
                    m.setattr(WgpuExecutable, "_outcome", broken)
                    for _ in range(2):
                        with pytest.raises(errors.CompilerError, match="on purpose"):
                            step(model, speed, base, x)
            model, speed, value = step(model, speed, base, x)
        assert repeats[-1]
        losses.append(float(value))
    assert losses[0] == losses[1]


def test_batches_and_numbers_of_the_host(repeats, monkeypatch):
    """What is new at each step comes from the host as it is."""

    def descend(net, x, rate, flag=True):
        value, grads = sd.value_and_grad(lambda n: sd.mean(n(x) ** 2))(net)
        return tree.map(lambda w, g: w - rate * g, net, grads), value

    batches = np.random.default_rng(3).standard_normal((14, 4, 6)).astype(np.float32)

    def run():
        step = sd.compile(descend, donate="net")
        model, losses = net(), []
        for k, x in enumerate(batches):
            model, value = step(model, x, 0.1 / (1 + k), True)
            losses.append(float(value))
        return losses, model.first.numpy().tobytes()

    def named():
        step = sd.compile(lambda net, x, rate: descend(net, x, rate), donate="net")
        model, losses = net(), []
        for k, x in enumerate(batches):
            model, value = step(model, x, 0.1 / (1 + k))
            losses.append(float(value))
        return losses, model.first.numpy().tobytes()

    static, found = run(), named()
    assert any(repeats)
    with monkeypatch.context() as m:
        m.setattr(handed, "given", lambda args, device: None)
        assert static == found == named()


def test_memory_goes_back(repeats, device):
    gc.collect()
    before = device.pool.live_bytes
    step = sd.compile(train, donate=("net", "speed"))
    model, speed = net(), tree.map(lambda x: x * 0.0, net())
    base = Frozen(sd.asarray(np.ones((4, 6), np.float32)))
    x = sd.asarray(np.ones((4, 6), np.float32))
    seen = set()
    for k in range(14):
        model, speed, value = step(model, speed, base, x)
        if k == 9:
            del value
            device.pool.trim()  # bind groups and replays are forgotten
            value = None
        gc.collect()
        if k > 4:
            seen.add(device.pool.live_bytes)
    assert any(repeats)
    assert max(seen) - min(seen) <= 16  # the loss
    del model, speed, value, base, x
    gc.collect()
    device.synchronize()
    # Captured constants of the plan alone.
    assert device.pool.live_bytes - before <= 256


def test_threads_do_not_share_what_is_given_away(repeats):
    step = sd.compile(train, donate=("net", "speed"))
    base = Frozen(sd.asarray(np.ones((4, 6), np.float32)))
    x = sd.asarray(np.ones((4, 6), np.float32))
    model, speed = net(), tree.map(lambda x: x * 0.0, net())
    for _ in range(8):
        model, speed, _ = step(model, speed, base, x)
    for _ in range(20):
        got, failed = [], []
        start = threading.Barrier(2)

        def one(model=model, speed=speed, got=got, failed=failed, start=start):
            start.wait()
            try:
                got.append(step(model, speed, base, x))
            except errors.DonatedError:
                failed.append(1)

        threads = [threading.Thread(target=one) for _ in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert len(got) == len(failed) == 1
        model, speed, value = got[0]
        assert np.isfinite(float(value))


def again(x):
    return pickle.loads(pickle.dumps(x))


@pytest.mark.parametrize("copied", [copy.deepcopy, again])
def test_copies_are_memory_of_their_own(repeats, plain, copied):
    held = []

    def between(k, model, speed):
        if k in (7, 11):
            new = copied((model, speed))
            held.append((new, [a.numpy() for a in tree.leaves((model, speed))]))
        if k == 9:
            return copied(model), copied(speed)  # and the loop goes on with them
        return model, speed

    assert loop(16, between) == plain
    assert any(repeats)
    for new, values in held:  # the loop was given what they are copies of
        for a, x in zip(tree.leaves(new), values, strict=True):
            np.testing.assert_array_equal(a.numpy(), x)


def test_a_copy_is_not_known_by_the_number_of_its_original(repeats):
    """Else another process's module could be taken for one that stays here."""
    step = sd.compile(train, donate=("net", "speed"))
    x = sd.asarray(np.ones((4, 6), np.float32))
    model, speed = net(), tree.map(lambda x: x * 0.0, net())
    base = Frozen(sd.asarray(np.ones((4, 6), np.float32)))
    for _ in range(6):
        model, speed, _ = step(model, speed, base, x)
    assert any(repeats)
    for new in (copy.copy(base), copy.deepcopy(base), again(base)):
        assert tree.kept(new) is None
        assert tree.kept(tree.map(lambda a: a, new))[2] != tree.kept(base)[2]
    assert dataclasses.asdict(speed)["first"].shape == (6, 6)


class Rates:
    """What it flattens to is made anew each time."""

    def __init__(self, first, second):
        self.first, self.second = first, second


tree.register(
    Rates,
    lambda r: ([r.first * 1.5, r.second * 1.5], None),
    lambda key, parts: Rates(*parts),
)


def test_looking_for_infinities_may_begin_at_any_time(repeats, monkeypatch):
    def grow(base, by):
        return Frozen(base.table * by), sd.max(base.table)

    step, by = sd.compile(grow, donate="base"), sd.asarray(np.float32(100))
    base = Frozen(sd.asarray(np.ones((2, 2), np.float32)))
    for _ in range(8):
        base, _ = step(base, by)
    assert any(repeats)
    monkeypatch.setenv("SHADERDSL_DEBUG", "nan")
    with pytest.raises(errors.NotFiniteError, match="mul"):
        for _ in range(16):  # 100 to the 20th is more than f32 has
            base, _ = step(base, by)
    assert np.isfinite(base.table.numpy()).all()  # it was not overwritten
    monkeypatch.delenv("SHADERDSL_DEBUG")
    assert not np.isfinite(step(base, by)[0].table.numpy()).any()


def test_numbers_that_exist_for_a_moment(repeats):
    f = sd.compile(
        lambda base, s, t, last: (
            base.table * 1000
            + s.first * 100
            + s.second * 10
            + t.first
            + t.second
            + last
        )
    )
    base = Frozen(sd.asarray(np.ones((2, 2), np.float32)))
    for k in range(6):
        got = f(base, Rates(1.0 + k, 2.0), Rates(3.0, 4.0 + k), 7.0)
        want = 1000 + 1.5 * (100 * (1 + k) + 20 + 3 + 4 + k) + 7
        np.testing.assert_array_equal(got.numpy(), np.full((2, 2), want))


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("warm", [0, 9])
def test_an_interrupted_call_gives_nothing_back_that_it_overwrites(
    repeats, device, monkeypatch, warm
):
    """Arrays never change: what may be overwritten is gone, else nothing is taken."""
    step = sd.compile(train, donate=("net", "speed"))
    base = Frozen(sd.asarray(np.ones((4, 6), np.float32)))
    x = sd.asarray(np.ones((4, 6), np.float32))

    def begun():
        model, speed = net(), tree.map(lambda x: x * 0.0, net())
        for _ in range(warm):
            model, speed, _ = step(model, speed, base, x)
        return model, speed

    def values(*trees):
        return [a.numpy().tobytes() for a in tree.leaves(trees)]

    want, following = values(*begun()), values(*step(*begun(), base, x))

    def waited(gpu, index):
        raise Interrupted

    model, speed = begun()
    with monkeypatch.context() as m:  # while earlier calls are waited for
        m.setattr(library, "wait", waited)
        m.setattr("shaderdsl.runtime.wgpu_device.MAX_IN_FLIGHT", 0)
        device._in_flight.append(0)
        for _ in range(2):
            with pytest.raises(Interrupted):
                step(model, speed, base, x)
            device._in_flight.append(0)
    device._in_flight.clear()
    if not warm:
        assert values(model, speed) == want
    assert values(*step(model, speed, base, x)) == following

    def launched(queue, commands, submit=library.submit):
        submit(queue, commands)
        raise Interrupted

    model, speed = begun()
    with monkeypatch.context() as m:  # just after the launch
        m.setattr(library, "submit", launched)
        with pytest.raises(Interrupted):
            step(model, speed, base, x)
    assert bool(warm) == any(repeats)
    for a in (model.first, speed.second):
        with pytest.raises(errors.DonatedError):
            a.numpy()
    assert values(*step(*begun(), base, x)) == following


def test_a_cache_is_as_it_was_after_a_refused_call():
    sd.use_device("cpu")
    config = sd.nn.TransformerConfig(
        vocab_size=11, hidden_size=8, num_layers=1, num_heads=2, ffn_size=8
    )
    model = sd.nn.Transformer.init(config, seed=0)
    good, bad = np.arange(8, dtype=np.int32).reshape(2, 4), np.full((2, 3), 99)

    def run(refused, begun):
        cache = model.new_cache(2, 64)
        zeros = np.zeros((2, 4), np.int32)
        if begun:
            cache.run(model, good, documents=zeros)
        if refused:
            more = {"documents": np.ones((2, 3), np.int32)} if begun else {}
            padding = None if begun else [2, 0]
            with pytest.raises(errors.IndexRangeError):
                cache.run(model, bad, padding=padding, **more)
        return cache.run(model, good, documents=zeros if begun else None).numpy()

    for begun in (False, True):
        np.testing.assert_array_equal(run(True, begun), run(False, begun))
