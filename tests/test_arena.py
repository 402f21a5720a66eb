"""Arenas, and results that overwrite what they come from: values, kernels, memory."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import shaderdsl as sd
from shaderdsl import errors
from shaderdsl.nn.module import Module

SHAPES = [(3, 5), (7,), (2, 3, 4), (33,), (64, 64), (1,), (130,), (5, 1, 9)]
TWENTY = [(3 + i, 1 + (i * 7) % 11) for i in range(20)]


class Model(Module):
    parameters: tuple


@pytest.fixture(params=["cpu", "wgpu", "portable"])
def device(request):
    if request.param == "cpu":
        yield sd.use_device("cpu")
        return
    if not any(d.spec.startswith("wgpu") for d in sd.devices()):
        pytest.skip("no adapter")
    limits = "portable" if request.param == "portable" else "adapter"
    yield sd.use_device("wgpu", limits=limits)
    sd.use_device("cpu")


def arrays(shapes, seed, dtype="f4"):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(s).astype(dtype) for s in shapes]


def model_of(xs):
    return Model(tuple(sd.asarray(x) for x in xs))


def values(model):
    return [np.asarray(x) for x in model.parameters]


def program(compiled):
    return next(iter(compiled._plans.values())).plan.program


def adamw(ps, gs, ms, vs, t, lr=0.01, wd=0.01, clip=1.0):
    for p, g, m, v in zip(ps, gs, ms, vs):
        g = clip * g.astype("f8")
        m[...] = 0.9 * m + 0.1 * g
        v[...] = 0.999 * v + 0.001 * g * g
        step = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        p[...] = p - lr * (step + wd * p)


def stepper(opt, donate):
    return sd.compile(
        lambda model, grads, state: opt.update(model, grads, state), donate=donate
    )


def check_steps(shapes, donate, *, steps=3, count=None, opt=None):
    """A few steps against NumPy; gives the compiled step and the last profile."""
    opt = opt or sd.optim.AdamW(lr=0.01)
    start = arrays(shapes, 0)
    model, step = model_of(start), stepper(opt, donate)
    state = opt.init(model)
    ps = [x.astype("f8") for x in start]
    ms, vs = [np.zeros_like(p) for p in ps], [np.zeros_like(p) for p in ps]
    for t in range(1, steps + 1):
        gs = arrays(shapes, t)
        grads = model_of(gs)
        for g in grads.parameters:
            g.buffer()
        with sd.profile() as p:
            model, state = step(model, grads, state)
        adamw(ps, gs, ms, vs, t)
        for have, want in zip(values(model), ps):
            np.testing.assert_allclose(have, want, rtol=2e-5, atol=2e-6)
        for have, want in zip(state.second.parameters, vs):
            np.testing.assert_allclose(np.asarray(have), want, rtol=2e-5, atol=1e-7)
        assert int(state.step) == t
        if t > 1:
            assert p.uploads == p.downloads == p.compiled == 0
            assert count is None or p.dispatches <= count
    return step, p


@pytest.mark.parametrize("donate", [(), ("model", "state"), ("model",), ("state",)])
def test_adamw_is_few_kernels(device, donate):
    step, _ = check_steps(TWENTY, donate, count=4)
    assert any("20 × adamw_update" in line for line in program(step).log)


@pytest.mark.parametrize("donate", [(), ("model", "state")])
def test_what_was_compiled_is_lowered_as_it_runs(device, donate):
    step, _ = check_steps(SHAPES, donate)
    opt, start = sd.optim.AdamW(lr=0.01), arrays(SHAPES, 0)
    low = sd.lower(step, *fresh(start, model_of(arrays(SHAPES, 1)), opt))
    assert [k.wgsl for k in low.kernels] == [k.wgsl for k in program(step).kernels]
    assert (" overwrites " in low.explain()) == bool(donate)


def test_sizes_of_all_kinds(device):
    check_steps(SHAPES, ("model", "state"))
    check_steps([(4, 0), (3,), (1, 1), (5,), (0,)], ("model", "state"))


def test_decay_for_some(device):
    opt = sd.optim.AdamW(lr=0.01, decay=sd.optim.matrices, weight_decay=0.5)
    shapes = [(8, 8), (8,)] * 6
    model = model_of(arrays(shapes, 0))
    step = stepper(opt, ("model", "state"))
    state = opt.init(model)
    zeros = model_of([np.zeros(s, "f4") for s in shapes])
    before = values(model)
    model, state = step(model, zeros, state)
    with sd.profile() as p:
        step(model, zeros, state)
    assert p.dispatches <= 6  # two updates, each in two kernels under portable limits
    for a, b, s in zip(values(step(*fresh(before, zeros, opt))[0]), before, shapes):
        np.testing.assert_allclose(a, b * (0.995 if len(s) > 1 else 1.0), rtol=1e-6)


def fresh(before, grads, opt):
    model = model_of(before)
    return model, grads, opt.init(model)


def test_clipping(device):
    opt = sd.optim.AdamW(lr=0.01, max_grad_norm=0.5)
    start, gs = arrays(SHAPES, 0), arrays(SHAPES, 1)
    model = model_of(start)
    step = stepper(opt, ("model", "state"))
    got, _ = step(model, model_of(gs), opt.init(model))
    ps = [x.astype("f8") for x in start]
    ms, vs = [np.zeros_like(p) for p in ps], [np.zeros_like(p) for p in ps]
    norm = np.sqrt(sum((g.astype("f8") ** 2).sum() for g in gs))
    adamw(ps, gs, ms, vs, 1, clip=min(1, 0.5 / norm))
    for have, want in zip(values(got), ps):
        np.testing.assert_allclose(have, want, rtol=2e-5, atol=2e-6)


def test_gradients_computed_in_the_step(device):
    """Gradients lie in an arena from the start; old weights are read in time."""
    opt = sd.optim.AdamW(lr=0.05, max_grad_norm=1.0)
    shapes = [(6, 5), (5,), (5, 4), (4,), (4, 3), (3,)]
    x = arrays([(10, 6)], 9)[0]

    def loss(model, x):
        w1, b1, w2, b2, w3, b3 = model.parameters
        h = sd.tanh(x @ w1 + b1)
        h = sd.tanh(h @ w2 + b2)
        y = h @ w3 + b3
        return sd.mean(y * y)

    def step(model, state, x):
        value, grads = sd.value_and_grad(loss)(model, x)
        before = sd.sum(model.parameters[0] * model.parameters[0])
        model, state = opt.update(model, grads, state)
        return value, before, model, state

    runs = {}
    for name, donate in (("donated", ("model", "state")), ("kept", ())):
        run = sd.compile(step, donate=donate)
        model = model_of(arrays(shapes, 0))
        state = opt.init(model)
        seen = []
        for _ in range(4):
            before = float((values(model)[0].astype("f8") ** 2).sum())
            value, total, model, state = run(model, state, x)
            seen.append(float(value))
            np.testing.assert_allclose(float(total), before, rtol=1e-5)
        runs[name] = [*values(model), np.float32(seen)]
        assert seen[-1] < seen[0]
    for a, b in zip(runs["donated"], runs["kept"]):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_donated_arrays_are_gone_and_others_intact(device):
    opt = sd.optim.AdamW(lr=0.01)
    start, gs = arrays(TWENTY, 0), arrays(TWENTY, 1)
    model, grads = model_of(start), model_of(gs)
    step = stepper(opt, ("model", "state"))
    state = opt.init(model)
    after, _ = step(model, grads, state)
    with pytest.raises(errors.DonatedError):
        np.asarray(model.parameters[3])
    with pytest.raises(errors.DonatedError):
        step(model, grads, state)
    for a, b in zip(values(grads), gs):
        np.testing.assert_array_equal(a, b)
    keep = stepper(opt, ())
    state = opt.init(after)
    before = values(after)
    once, _ = keep(after, grads, state)
    twice, _ = keep(after, grads, state)
    for a, b, c, d in zip(values(after), before, values(once), values(twice)):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(c, d)


def test_memory_stays(device):
    """Steps in place take no memory beyond the model's, and stay where they are."""
    if device.kind == "cpu":
        pytest.skip("NumPy's device does not share memory")
    opt = sd.optim.AdamW(lr=0.01)
    shapes = [(64, 64)] * 10
    model = model_of(arrays(shapes, 0))
    step = stepper(opt, ("model", "state"))
    state, grads = opt.init(model), model_of(arrays(shapes, 1))
    model, state = step(model, grads, state)
    gc.collect()
    places = [x.buffer().key for x in (*model.parameters, *state.first.parameters)]
    live = device.pool.live_bytes
    for _ in range(3):
        with sd.profile() as p:
            model, state = step(model, grads, state)
        gc.collect()
        assert device.pool.live_bytes == live
        # The arena of the gradients, which the caller keeps elsewhere.
        assert p.peak_bytes <= live + 10 * 64 * 64 * 4 + 4096
    again = [x.buffer().key for x in (*model.parameters, *state.first.parameters)]
    assert again == places
    assert len({serial for serial, *_ in places}) == 2


def test_views_of_an_arena_elsewhere(device):
    """Parts of an arena are ordinary arrays: kept, mixed up, donated one by one."""
    opt = sd.optim.AdamW(lr=0.01)
    start = arrays(TWENTY, 0)
    grads = model_of(arrays(TWENTY, 1))
    step = stepper(opt, ("model", "state"))
    model = model_of(start)
    model, _ = step(model, grads, opt.init(model))
    want = values(model)
    first = sd.compile(lambda x, y: (x + 1.0, sd.sum(y)), donate=("x",))
    # One part is overwritten, its neighbours are not.
    changed, total = first(model.parameters[2], model.parameters[3])
    np.testing.assert_allclose(np.asarray(changed), want[2] + 1, rtol=1e-6)
    np.testing.assert_allclose(float(total), want[3].sum(), rtol=1e-4, atol=1e-5)
    for k in (0, 1, 3, 4, 19):
        np.testing.assert_array_equal(np.asarray(model.parameters[k]), want[k])
    # A model with a part that lies elsewhere, and with two parts exchanged.
    parts = list(model.parameters)
    parts[2] = changed
    mixed = Model(tuple(parts))
    result, _ = step(mixed, grads, opt.init(mixed))
    parts = [np.array(w) for w in want]
    parts[2] = want[2] + 1
    again = model_of(parts)
    expected, _ = step(again, grads, opt.init(again))
    for a, b in zip(values(result), values(expected)):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_a_buffer_given_twice(device):
    """Parameters that are one array get a place each; shared results stay intact."""
    opt = sd.optim.SGD(lr=0.5)
    x = sd.asarray(np.arange(50, dtype="f4"))
    grads = model_of([np.full(50, k, "f4") for k in range(3)])
    step = stepper(opt, ("model", "state"))
    model = Model((x, x, x))
    model, state = step(model, grads, opt.init(model))
    for k, y in enumerate(values(model)):
        np.testing.assert_allclose(y, np.arange(50) - 0.5 * k, rtol=1e-6)

    @sd.compile
    def both(model):
        return model, model

    one, two = both(model)
    moved, _ = step(one, grads, state)
    for k, (y, z) in enumerate(zip(values(two), values(moved))):
        np.testing.assert_allclose(y, np.arange(50) - 0.5 * k, rtol=1e-6)
        np.testing.assert_allclose(z, y - 0.5 * k, rtol=1e-6)


def test_half_precision(device):
    """f16 parameters with f32 moments: arenas of each dtype, odd sizes."""
    opt = sd.optim.AdamW(lr=0.125, weight_decay=0.0)
    shapes = [(7,), (3, 3), (129,), (2,)]
    model = model_of(arrays(shapes, 0, "f2"))
    start = values(model)
    step = stepper(opt, ("model", "state"))
    state = opt.init(model)
    for _ in range(2):
        model, state = step(model, model_of(arrays(shapes, 5, "f2")), state)
    signs = [np.sign(g) for g in arrays(shapes, 5, "f2")]
    for p, s, sign in zip(values(model), start, signs):
        assert p.dtype == np.float16
        np.testing.assert_allclose(p, s - 0.25 * sign, atol=4e-3)


def test_arenas_are_split_where_a_binding_is_full(device):
    from shaderdsl.codegen.lower import lower
    from shaderdsl.codegen.target import Limits, Target
    from shaderdsl.ir.arrays import elementwise
    from shaderdsl.ir.stage import input_stage

    target = Target("small", "gpu", Limits(max_binding_bytes=4096))
    xs = [input_stage((500,), "f32", "x") for _ in range(5)]
    outs = [elementwise("exp", x) for x in xs]
    donated = frozenset(range(5))
    p = lower(outs, target, inputs=xs, donated=donated)
    assert len(p.kernels) == 3
    assert all(b.tensor.nbytes <= 4096 for k in p.kernels for b in k.bindings)
    assert len(lower(outs, target, inputs=xs).kernels) == 3
    one = lower(outs[:1], target, inputs=xs[:1], donated=frozenset({0}))
    assert [b.access for b in one.kernels[0].bindings] == ["read_write"]


def test_updates_that_need_one_another_stay_apart(device):
    def chain(x, y, z):
        x = x * 2.0 + 1.0
        y = y * 2.0 + sd.cumsum(x, axis=0)
        return (
            x,
            y,
            z * 2.0 + sd.flip(y, 0) if hasattr(sd, "flip") else z * 2.0 + y[::-1],
        )

    a = arrays([(9,), (9,), (9,)], 0)
    got = sd.compile(chain, donate=("x", "y", "z"))(*a)
    x = a[0] * 2 + 1
    y = a[1] * 2 + np.cumsum(x)
    for have, want in zip(got, (x, y, a[2] * 2 + y[::-1])):
        np.testing.assert_allclose(np.asarray(have), want, rtol=1e-5)


# Slices


def cache_step(k, v, new, start):
    k = sd.update_slice(k, new * 2.0, axis=1, start=start)
    v = sd.update_slice(v, new, axis=1, start=start)
    v = sd.update_slice(v, new + 1.0, axis=1, start=0)
    return sd.sum(k * k, axis=(0, 2)), k, v


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("dtype", ["f4", "f2"])
def test_slices_in_place(device, n, dtype):
    k, v = arrays([(2, 20, 6), (2, 20, 6)], 0, dtype)
    donated = sd.compile(cache_step, donate=("k", "v"))
    plain = sd.compile(cache_step)
    one, two = (sd.asarray(k), sd.asarray(v)), (sd.asarray(k), sd.asarray(v))
    for i in range(5):
        new = arrays([(2, n, 6)], i, dtype)[0]
        before = one[0]
        with sd.profile() as p:
            a = donated(*one, new, 3 * i + 2)
        b = plain(*two, new, 3 * i + 2)
        assert p.compiled == 0 or i == 0
        for x, y in zip(a, b):
            np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=2e-3)
        k[:, 3 * i + 2 : 3 * i + 2 + n] = new * np.dtype(dtype).type(2)
        v[:, 3 * i + 2 : 3 * i + 2 + n] = new
        v[:, :n] = new + np.dtype(dtype).type(1)
        np.testing.assert_allclose(np.asarray(a[1]), k, rtol=1e-3)
        np.testing.assert_allclose(np.asarray(a[2]), v, rtol=1e-3)
        with pytest.raises(errors.DonatedError):
            before.numpy()
        one, two = a[1:], b[1:]
    slices = [q for q in program(donated).kernels if q.archetype == "map"]
    assert len(slices) == 3
    assert all(q.bytes < 1000 for q in slices)


def test_slices_stay_where_they_are(device):
    if device.kind == "cpu":
        pytest.skip("NumPy's device does not share memory")
    step = sd.compile(cache_step, donate=("k", "v"))
    k, v = (sd.asarray(x) for x in arrays([(1, 64, 8), (1, 64, 8)], 0))
    keys = k.buffer().key, v.buffer().key
    new = arrays([(1, 1, 8)], 1)[0]
    for i in range(4):
        _, k, v = step(k, v, new, i)
        assert (k.buffer().key, v.buffer().key) == keys


def test_slices_of_what_is_still_needed(device):
    """The old array is read later, returned, or is where the new elements come from."""

    def late(x, new, start):
        y = sd.update_slice(x, new, axis=0, start=start)
        return y, sd.sum(x), sd.sum(x * y)

    def returned(x, new, start):
        return sd.update_slice(x, new, axis=0, start=start), x

    def shifted(x, new, start):
        return sd.update_slice(x, x[2:5] + new, axis=0, start=start)

    x, new = arrays([(9, 4), (3, 4)], 0)
    want = x.copy()
    want[4:7] = new
    y, total, product = sd.compile(late, donate=("x",))(x, new, 4)
    np.testing.assert_array_equal(np.asarray(y), want)
    np.testing.assert_allclose(float(total), x.sum(), rtol=1e-4)
    np.testing.assert_allclose(float(product), (x * want).sum(), rtol=1e-4)
    y, old = sd.compile(returned, donate=("x",))(x, new, 4)
    np.testing.assert_array_equal(np.asarray(y), want)
    np.testing.assert_array_equal(np.asarray(old), x)
    want[4:7] = x[2:5] + new
    y = sd.compile(shifted, donate=("x",))(x, new, 4)
    np.testing.assert_array_equal(np.asarray(y), want)


def test_shared_memory_is_copied_first(device):
    step = sd.compile(
        lambda x, new: sd.update_slice(x, new, axis=0, start=1), donate=("x",)
    )
    x, new = arrays([(9, 4), (3, 4)], 0)
    a = sd.asarray(x)
    one, two = sd.compile(lambda x: (x, x))(a)
    y = step(one, new)
    np.testing.assert_array_equal(np.asarray(two), x)
    np.testing.assert_array_equal(np.asarray(a), x)
    np.testing.assert_array_equal(np.asarray(y)[1:4], new)
    np.testing.assert_array_equal(np.asarray(y)[4:], x[4:])


# Elementwise


def test_results_exchange_their_memory(device):
    """x' comes from y and y' from x: both see the old values."""
    swap = sd.compile(lambda x, y: (y * 2.0 + x, x - y), donate=("x", "y"))
    a, b = arrays([(70, 3), (70, 3)], 0)
    x, y = sd.asarray(a), sd.asarray(b)
    for _ in range(3):
        x, y = swap(x, y)
        a, b = b * 2 + a, a - b
        np.testing.assert_allclose(np.asarray(x), a, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(np.asarray(y), b, rtol=1e-5, atol=1e-5)


def test_not_over_what_is_read_elsewhere(device):
    """The same array is read at other elements in the same kernel."""
    f = sd.compile(lambda x: x + x[::-1], donate=("x",))
    x = arrays([(257,)], 0)[0]
    np.testing.assert_allclose(np.asarray(f(x)), x + x[::-1], rtol=1e-6)
    g = sd.compile(lambda x: x + x.transpose(), donate=("x",))
    x = arrays([(40, 40)], 0)[0]
    np.testing.assert_allclose(np.asarray(g(x)), x + x.T, rtol=1e-6)


def test_memory_does_not_grow(device):
    """No buffer goes to an output that needs less: that would add up over steps."""
    sizes = [1900, 1200, 700, 400, 250, 150]
    xs = [sd.asarray(x) for x in arrays([(n,) for n in sizes], 0)]
    # Nothing is elementwise, so that no result overwrites its own operand.
    step = sd.compile(lambda xs: [x[::-1] * 0.5 for x in xs], donate=("xs",))
    live = None
    for _ in range(6):
        xs = step(xs)
        gc.collect()
        live = live or device.pool.live_bytes
        assert device.pool.live_bytes == live
