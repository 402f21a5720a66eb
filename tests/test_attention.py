"""Attention in one pass: against the plain expression in float64, and what it costs."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import OrderedDict

import numpy as np
import pytest
from ops_ref import load

import shaderdsl as sd
from shaderdsl import engine, errors, ops
from shaderdsl.codegen import (
    online,
    online_shape,
    online_stream_shape,
    templates,
    texts,
)
from shaderdsl.codegen.online_stream_shape import Stream
from shaderdsl.codegen.target import Features, Limits
from shaderdsl.ir import differentiate, interpret
from shaderdsl.tracing import Traced

RTOL, ATOL = 1e-4, 1e-5


@pytest.fixture(autouse=True)
def one_pass_at_any_size(request):
    """GPUs store small scores; here they take one pass too."""
    if "device" not in request.fixturenames:
        yield
        return
    device = request.getfixturevalue("device")
    before = device.target
    device.target = dataclasses.replace(before, online_from=0)
    yield
    device.target = before


def make(*shape, seed=0):
    rng = np.random.default_rng([seed, *shape])
    return rng.standard_normal(shape).astype(np.float32)


def heads(h, hk, t, s, d, b=1):
    return make(b, h, t, d), make(b, hk, s, d, seed=1), make(b, hk, s, d, seed=2)


def exact(f, args, seeds, at=None):
    """Results and gradients of the plain expression in float64, at the arguments or
    at values of more digits.
    """
    traced = Traced(f, tuple(args), "exact")
    cots = [
        engine.placeholder(("dy", k), s.shape, "f32", "dy")
        for k, s in enumerate(traced.outs)
    ]
    grads = differentiate.vjp(traced.outs, cots, traced.inputs)
    at = args if at is None else at
    given = dict(zip(traced.inputs, (np.asarray(a, np.float64) for a in at)))
    given |= dict(zip(cots, (np.asarray(g, np.float64) for g in seeds)))
    for s in engine.captured_inputs(traced.outs, traced.inputs):
        given[s] = s.source.numpy()
    found = interpret.evaluate(
        [*traced.outs, *(g for g in grads if g is not None)], given
    )
    return found[: len(traced.outs)], found[len(traced.outs) :]


def check(f, *args, rtol=RTOL, atol=2e-5):
    """The device's results and all gradients against :func:`exact`."""
    y, pullback = sd.vjp(f, *args)
    ys = y if isinstance(y, tuple) else (y,)
    seeds = [make(*x.shape, seed=9 + k) for k, x in enumerate(ys)]
    values, grads = exact(f, args, seeds)
    for a, b in zip(ys, values, strict=True):
        np.testing.assert_allclose(a.numpy(), b, rtol, atol)
    got = pullback(tuple(seeds) if isinstance(y, tuple) else seeds[0])
    got = got if isinstance(got, tuple) else (got,)
    for k, (a, b) in enumerate(zip(got, grads, strict=True)):
        scale = max(1.0, np.abs(b).max(initial=0))
        np.testing.assert_allclose(
            a.numpy() / scale, b / scale, rtol, atol, err_msg=str(k)
        )
        assert np.isfinite(a.numpy()).all()


def archetypes(f, *args, **options):
    return [k.archetype for k in sd.lower(f, *args, **options).kernels]


# ------------------------------------------------------------------ values of torch


CASES = load("attention_*")


def alibi(x, b, h, i, j, slopes):
    return x - slopes[h] * sd.cast(i - j, "f32")


def function_of(file, c, t):
    options = {"scale": c["scale"], "causal": c["causal"], "return_lse": True}
    options |= {"window": c.get("window"), "softcap": c.get("cap")}
    if file == "attention_kv_cache":
        options["start"] = t["k"].shape[2] - t["q"].shape[2]

    def f(q, k, v, *more):
        o = dict(options)
        if file == "attention_alibi":
            o |= {"score": alibi, "captured": {"slopes": more[0]}}
        y, lse = ops.attention(q, k, v, **o)
        return (y * sd.sigmoid(more[0]) if file == "attention_gated" else y), lse

    names = ["q", "k", "v"]
    names += {"attention_alibi": ["slopes"], "attention_gated": ["gate"]}.get(file, [])
    return f, names


@pytest.mark.parametrize(("file", "case"), CASES, ids=map("-".join, CASES))
def test_files(device, file, case):
    c, t = CASES[file, case]
    f, names = function_of(file, c, t)
    args = [t[n] for n in names]
    (y, lse), pullback = sd.vjp(f, *args)
    np.testing.assert_allclose(y.numpy(), t["y"], RTOL, ATOL)
    np.testing.assert_allclose(lse.numpy(), t["lse"], RTOL, ATOL)
    gradients = pullback((t["dy"], np.zeros_like(t["lse"])))
    for name, g in zip(names, gradients, strict=True):
        np.testing.assert_allclose(g.numpy(), t["d" + name], RTOL, ATOL, err_msg=name)


# ------------------------------------------------------------------ shapes


@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("t", [1, 3, 5, 63, 64, 65])
def test_ratios_and_lengths(wgpu, ratio, t):
    check(ops.attention, *heads(2 * ratio, 2, t, t, 8))


@pytest.mark.parametrize(("t", "s"), [(1, 9), (3, 64), (5, 65), (40, 70), (9, 5)])
@pytest.mark.parametrize("causal", [True, False])
def test_other_numbers_of_keys(wgpu, t, s, causal):
    f = lambda *xs: ops.attention(*xs, causal=causal)  # noqa: E731
    check(f, *heads(4, 2, t, s, 8, b=2))


@pytest.mark.parametrize("d", [16, 32, 64, 128])
def test_head_sizes(wgpu, d):
    check(ops.attention, *heads(2, 1, 33, 33, d))


@pytest.mark.parametrize(("d", "c"), [(1, 3), (3, 2), (6, 18), (18, 5)])
def test_head_sizes_that_are_no_vec4s(wgpu, d, c):
    q, k, _ = heads(4, 2, 9, 13, d)
    v = make(1, 2, 13, c, seed=2)
    check(ops.attention, q, k, v)
    assert d == 1 or archetypes(ops.attention, q, k, v) == ["online"]


@pytest.mark.parametrize(("d", "c"), [(6, 10), (18, 3)])
def test_pieces_that_are_no_vec4s(wgpu, d, c):
    q, k, _ = heads(4, 2, 2, 70, d)
    v = make(1, 2, 70, c, seed=2)
    check(ops.attention, q, k, v)


@pytest.mark.parametrize(
    ("window", "cap"), [(1, None), (4, 2.0), (16, None), (None, 5.0)]
)
def test_windows_and_caps(wgpu, window, cap):
    f = lambda *xs: ops.attention(*xs, window=window, softcap=cap)  # noqa: E731
    check(f, *heads(4, 2, 37, 37, 8))


@pytest.mark.parametrize("start", [0, 3, 20])
def test_start(wgpu, start):
    f = lambda *xs: ops.attention(*xs, start=start, return_lse=True)  # noqa: E731
    check(f, *heads(2, 1, 5, 24, 8))


def test_every_axis_in_its_place(wgpu):
    """Rows of heads side by side, as projections give them."""

    @sd.op("... t (h g d), ... s (h d), ... s (h c) -> ... t (h g c)", h=2, g=3)
    def rows(q, k, v):
        x = sd.sum(q * k, over="d") * 0.3
        p = sd.softmax(x, over="s", where=sd.index("s") <= sd.index("t"))
        return sd.sum(p * v, over="s")

    args = make(2, 21, 48), make(2, 21, 16, seed=1), make(2, 21, 24, seed=2)
    assert archetypes(rows, *args) == ["online"]
    check(rows, *args)


# ------------------------------------------------------------------ schedules


@pytest.mark.parametrize(
    ("t", "s", "d", "options"),
    [
        (7, 7, 8, {}),
        (33, 33, 16, {"window": 9, "softcap": 3.0}),
        (20, 50, 20, {"causal": False}),
        (9, 5, 8, {}),
        (32, 32, 8, {}),
        (9, 11, 6, {}),
    ],
)
@pytest.mark.parametrize("kind", ["tiles", "rows"])
def test_schedules_of_other_devices(retarget, monkeypatch, kind, t, s, d, options):
    """Tiles of GPUs, rows where no lanes are shared; within portable limits."""
    monkeypatch.setattr(online_shape, "SHAPES", ((16, 16, 4, 4),))
    family = "gpu" if kind == "tiles" else "software"
    retarget(family=family, features=Features(), limits=Limits())
    f = lambda *xs: ops.attention(*xs, **options)  # noqa: E731
    check(f, *heads(4, 2, t, s, d))


@pytest.mark.parametrize(
    ("shape", "options", "rows", "lines"),
    [
        # Workgroups of 128 rows fill a large GPU, nearly do, and do not.
        ((4096, 16, 64), {}, 128, 64),
        ((2048, 16, 64), {}, 128, 128),
        ((4096, 8, 64), {}, 128, 128),
        ((2048, 12, 64), {}, 32, 64),
        ((1536, 12, 64), {}, 32, 64),
        ((2048, 12, 128), {}, 32, 64),
        # Without a mask all workgroups are as long.
        ((2048, 12, 64), {"causal": False}, 64, 64),
    ],
)
def test_tiles_of_gpus_by_workgroups(
    retarget, monkeypatch, shape, options, rows, lines
):
    """What was the fastest of all on an NVIDIA H200."""
    n, count, d = shape
    limits = Limits(
        max_storage_buffers=64, max_workgroup_storage=49_152, max_invocations=1024
    )
    features = Features(f16=True, subgroups=True, timestamps=True)
    retarget(family="gpu", features=features, limits=limits)
    chosen = []
    real = online.choose_stream
    monkeypatch.setattr(
        online, "choose_stream", lambda o: chosen.append(real(o)) or chosen[-1]
    )
    f = sd.compile(lambda *xs: ops.attention(*xs, **{"causal": True, **options}))
    sd.lower(f, *[sd.spec("f32", count, n, d)] * 3)
    assert {(t.rows, t.lines) for t in chosen} == {(rows, lines)}


def only_stream(monkeypatch, shape):
    """One shape of streams, and no texts of other ones."""
    monkeypatch.setattr(online_stream_shape, "STREAMS", (shape,))
    monkeypatch.setattr(templates, "_memory", OrderedDict())
    monkeypatch.setattr(texts, "store", None)


@pytest.mark.parametrize(
    ("t", "s", "d", "options"),
    [
        (48, 64, 8, {"causal": False}),
        (40, 70, 16, {"window": 20, "softcap": 3.0}),
        (50, 50, 16, {"return_lse": True}),
        (33, 40, 24, {"score": lambda x, b, h, i, j: x - 0.1 * sd.cast(i - j, "f32")}),
        (40, 40, 8, {"mask": lambda b, h, i, j: (i + j) % 3 != 1, "causal": False}),
    ],
)
def test_streams_of_gpus(retarget, monkeypatch, t, s, d, options):
    """All phases and tiles in one stream; the last row of tiles is cut off."""
    only_stream(monkeypatch, Stream(16, 32, 8, 4, 8, 8, 4))
    used = []
    real = online.streamed
    monkeypatch.setattr(online, "streamed", lambda o, x: used.append(x) or real(o, x))
    retarget(family="gpu", features=Features(), limits=Limits())
    f = lambda *xs: ops.attention(*xs, **options)  # noqa: E731
    check(f, *heads(4, 2, t, s, d))
    assert len(used) >= 3  # forward, dq, dk with dv


@pytest.mark.parametrize("options", [{}, {"window": 30, "softcap": 4.0}])
@pytest.mark.parametrize("whole", [0, 1])
def test_gradients_of_scores_are_stored_where_memory_allows(
    retarget, monkeypatch, whole, options
):
    """Heads of a group apart, dq from what the kernel of dk and dv wrote."""
    only_stream(monkeypatch, Stream(16, 32, 8, 4, 8, 8, 4, whole))
    limits = Limits(max_storage_buffers=10)
    retarget(family="gpu", features=Features(), limits=limits, scores=1 << 20)
    f = lambda *xs: ops.attention(*xs, **options)  # noqa: E731
    args = heads(4, 2, 72, 72, 16)
    low = sd.lower(f, *args, backward=True)
    kinds = [k.archetype for k in low.kernels]
    assert kinds == ["row", "online", "contract", "map", "map"]
    assert "is stored: two kernels need it" in low.explain()
    check(f, *args)


def test_scores_within_a_budget(retarget):
    """By default a quarter of what a graph takes and gives; less in groups of heads,
    nothing below one head, none at 0.
    """
    shapes = [sd.spec("f32", 1, 2, n, 64) for n in (64, 64, 64)]
    limits = Limits(max_storage_buffers=10)

    def kinds(**more):
        retarget(family="gpu", features=Features(), limits=limits, **more)
        low = sd.lower(ops.attention, *shapes, backward=True)
        return [k.archetype for k in low.kernels]

    assert "contract" in kinds()
    assert "contract" not in kinds(scores=0)
    assert "contract" in kinds(scores=2 * 64 * 64 * 4 - 1)
    assert "contract" not in kinds(scores=64 * 64 * 4 - 1)


def test_a_compiled_function_has_a_budget_of_its_own(retarget):
    """Of one pullback in two plans, by what its scores may take; both are right."""
    limits = Limits(max_storage_buffers=10)
    retarget(family="gpu", features=Features(), limits=limits)
    args = heads(4, 2, 72, 72, 16)
    y, pullback = sd.vjp(ops.attention, *args)
    dy = make(*y.shape, seed=9)
    _, want = exact(ops.attention, args, [dy])
    kinds = {}
    for scores in (None, 0, 1 << 20):
        run = sd.compile(pullback, scores=scores)
        for _ in range(2):  # planned, then replayed
            with sd.profile() as p:
                got = run(dy)
            for g, w in zip(got, want, strict=True):
                np.testing.assert_allclose(g.numpy(), w, RTOL, 2e-5)
        low = sd.lower(sd.compile(ops.attention, scores=scores), *args, backward=True)
        kinds[scores] = [k.archetype for k in low.kernels]
        assert len(kinds[scores]) == p.dispatches
    assert kinds[1 << 20] == ["row", "online", "contract", "map", "map"]
    assert kinds[0] == ["row", "online", "online", "map", "map"]


@pytest.mark.parametrize("scores", [-1, 2.0, True, "1 GiB"])
def test_a_budget_is_a_number_of_bytes(scores):
    with pytest.raises(errors.ShaderError, match="no number of bytes") as info:
        sd.compile(ops.attention, scores=scores)
    assert "test_attention.py" in str(info.value) and "2 << 30" in str(info.value)


@pytest.mark.parametrize(("heads", "rows"), [(12, 32), (32, 64)])
def test_few_heads_take_small_tiles(retarget, heads, rows):
    """Of few workgroups the longest decide; the product for dq takes small ones
    wherever its rows need ever more of k.
    """
    limits = Limits(
        max_storage_buffers=10, max_workgroup_storage=49_152, max_invocations=1024
    )
    binding = 1 << 31
    limits = dataclasses.replace(limits, max_binding_bytes=binding)
    retarget(family="gpu", features=Features(), limits=limits, scores=binding)
    shapes = [sd.spec("f32", 1, h, 2048, 64) for h in (heads, 4, 4)]
    low = sd.lower(ops.attention, *shapes, backward=True)
    online, product = (
        next(k for k in low.kernels if k.archetype == a) for a in ("online", "contract")
    )
    assert online.workgroups[0] == heads * 2048 // rows
    assert product.workgroups[0] * 32 == heads * 2048


@pytest.mark.parametrize("d", [16, 64, 128, 256])
def test_tiles_fit_portable_limits(cpu, d):
    shapes = [sd.spec("f32", 1, h, 300, d) for h in (4, 2, 2)]
    lows = [sd.lower(ops.attention, *shapes, backward=b) for b in (False, True)]
    kernels = [k for low in lows for k in low.kernels if k.archetype == "online"]
    assert len(kernels) == 4
    for k in kernels:
        (vectors,) = re.findall(r"var<workgroup> sm: array<vec4<f32>, (\d+)>", k.wgsl)
        assert int(vectors) * 16 <= 16_384
        assert k.workgroup_size[0] <= 256 and len(k.bindings) <= 8


def test_too_little_workgroup_memory(retarget):
    """Rows in registers need none."""
    small = dataclasses.replace(Limits(), max_workgroup_storage=1024)
    retarget(family="gpu", features=Features(), limits=small)
    args = heads(2, 1, 9, 9, 8)
    (kernel,) = sd.lower(ops.attention, *args).kernels
    assert kernel.archetype == "online" and "workgroup>" not in kernel.wgsl
    check(ops.attention, *args)


@pytest.mark.parametrize("family", ["gpu", "software"])
def test_too_little_workgroup_memory_for_pieces(retarget, family):
    """Fewer rows, then fewer lanes: a token against a cache fits whatever there is."""
    small = dataclasses.replace(Limits(), max_workgroup_storage=1024)
    retarget(family=family, features=Features(), limits=small)
    args = heads(4, 2, 3, 300, 8)
    low = sd.lower(ops.attention, *args)
    assert "lines in pieces" in low.explain()
    for k in low.kernels:
        found = re.findall(r"var<workgroup> \w+: array<(.*?), (\d+)>", k.wgsl)
        assert sum(int(n) * (16 if "vec4" in t else 4) for t, n in found) <= 1024
    check(ops.attention, *args)


def test_a_budget_of_loops(retarget):
    """Lines that are too long for one thread are cut into pieces."""
    retarget(loop_budget=40)
    long = [sd.spec("f32", 1, h, 4096, 16) for h in (2, 1, 1)]
    assert archetypes(ops.attention, *long) == ["online"] * 2
    check(ops.attention, *heads(1, 1, 280, 280, 16))


# ------------------------------------------------------------------ what is found


def naive(q, k, v):
    """A user's own, of separate operations."""
    x = q @ k.transpose(0, 1, 3, 2) * 0.25
    e = sd.exp(x - sd.max(x, axis=-1, keepdims=True))
    return (e / sd.sum(e, axis=-1, keepdims=True)) @ v


def test_own_expressions_are_found(device):
    args = heads(2, 2, 19, 23, 16)
    assert archetypes(naive, *args).count("online") == 1
    y = naive(*(sd.array(a) for a in args))
    np.testing.assert_allclose(sd.compile(naive)(*args).numpy(), y.numpy(), RTOL, ATOL)


def test_numbers_of_kernels(device):
    shapes = [sd.spec("f32", 1, h, 512, 64) for h in (8, 2, 2)]
    low = sd.lower(ops.attention, *shapes)
    assert len(low.kernels) == 1
    assert "one pass" in low.explain()
    low = sd.lower(ops.attention, *shapes, backward=True)
    assert len(low.kernels) <= 5
    assert all(s.size <= 8 * 512 * 64 for s in low.residuals)
    for k in low.kernels:
        assert all(b.tensor.size <= 8 * 512 * 64 for b in k.bindings)


def test_nothing_of_keys_by_queries(wgpu):
    """One head of 4,096 positions, whose scores alone would take 64 MiB."""
    q, k, v = (sd.array(x) for x in heads(1, 1, 4096, 4096, 16))
    with sd.profile() as p:
        y, pullback = sd.vjp(lambda *xs: ops.attention(*xs, window=64), q, k, v)
        g = pullback(y)
        g[0].numpy()
    assert p.peak_bytes < 16 << 20
    assert p.downloads == 1


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_attention_feeds_another(retarget, place):
    """As its queries, keys or values: nothing of queries by keys, at lines that are
    shorter than an inner axis may be, too.
    """

    def f(q, k, v, *more):
        made = ops.attention(q, k, v)
        return ops.attention(*more[:place], made, *more[place:])

    args = [*heads(2, 2, 24, 24, 8), *heads(2, 2, 24, 24, 8, b=1)[1:]]
    for family in ("software", "gpu"):
        retarget(family=family, features=Features(), scores=0, online_from=0)
        for backward in (False, True):
            low = sd.lower(f, *args, backward=backward)
            assert not any(
                b.tensor.size >= 2 * 24 * 24 for k in low.kernels for b in k.bindings
            )
    retarget(family="software")
    check(f, *args)


def test_it_can_be_turned_off(retarget):
    args = heads(4, 2, 33, 33, 16)
    found = {}
    for one_pass in (True, False):
        retarget(online=one_pass)
        assert ("online" in archetypes(ops.attention, *args)) is one_pass
        y, pullback = sd.vjp(ops.attention, *args)
        found[one_pass] = [y, *pullback(make(*y.shape, seed=4))]
    for a, b in zip(found[True], found[False], strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), RTOL, ATOL)


def test_scores_that_someone_wants_are_stored(device):
    @sd.op("h t d, h s d, h s c -> h t c, h t s")
    def both(q, k, v):
        x = sd.sum(q * k, over="d")
        return sd.sum(sd.softmax(x, over="s") * v, over="s"), x

    args = make(2, 9, 8), make(2, 11, 8, seed=1), make(2, 11, 8, seed=2)
    assert "online" not in archetypes(both, *args)
    check(both, *args)


def test_products_without_an_exponential_are_none_of_it(device):
    f = lambda x, a, b: sd.silu(x @ a) @ b  # noqa: E731
    args = make(9, 16), make(16, 32, seed=1), make(32, 16, seed=2)
    assert "online" not in archetypes(f, *args)


@pytest.mark.parametrize("axes", ["values", "second"])
def test_derivatives_of_derivatives(device, axes):
    q, k, v = heads(2, 1, 7, 7, 8)
    tangents = [make(*x.shape, seed=5) for x in (q, k, v)]

    def dot(*xs):
        return sd.sum(ops.attention(*xs) * make(1, 2, 7, 8, seed=6))

    if axes == "values":
        _, ty = sd.jvp(dot, (q, k, v), tangents)
        grads = sd.grad(dot, (0, 1, 2))(q, k, v)
        want = sum(float((g.numpy() * t).sum()) for g, t in zip(grads, tangents))
        np.testing.assert_allclose(float(ty), want, 1e-4)
        return

    def along(*xs):
        return sum(
            sd.sum(g * t) for g, t in zip(sd.grad(dot, (0, 1, 2))(*xs), tangents)
        )

    value, again = sd.value_and_grad(along)(q, k, v)
    moved = 1e-2
    up, down = (
        along(q + moved * tangents[0], k, v),
        along(q - moved * tangents[0], k, v),
    )
    slope = (float(up) - float(down)) / (2 * moved)
    np.testing.assert_allclose(float((again.numpy() * tangents[0]).sum()), slope, 2e-2)
    assert np.isfinite(float(value))


# ------------------------------------------------------------------ masks and hooks


def test_rows_that_see_nothing(device):
    q, k, v = heads(2, 1, 6, 9, 8)
    hidden = lambda b, h, i, j: (j < 4) & (i > 5)  # noqa: E731
    f = lambda *xs: ops.attention(*xs, mask=hidden, causal=False)  # noqa: E731
    y, pullback = sd.vjp(f, q, k, v)
    assert not y.numpy()[:, :, :3].any() and y.numpy()[:, :, 3:].any()
    dq, dk, dv = (g.numpy() for g in pullback(np.ones_like(y.numpy())))
    assert not dq[:, :, :3].any() and not dk[:, :, 4:].any() and not dv[:, :, 4:].any()
    assert all(np.isfinite(g).all() for g in (dq, dk, dv))
    nobody = ops.attention(q, k, v, mask=lambda b, h, i, j: False, return_lse=True)
    assert not nobody[0].numpy().any() and (nobody[1].numpy() == -np.inf).all()


def test_scores_of_minus_infinity(device):
    """A score hook that hides keys is as good as a mask."""
    q, k, v = heads(2, 1, 6, 9, 8)
    hide = lambda x, b, h, i, j: sd.where(i + j > 7, x, -np.inf)  # noqa: E731
    seen = lambda b, h, i, j: i + j > 7  # noqa: E731
    runs = []
    for o in ({"score": hide}, {"mask": seen}):
        f = lambda *xs, o=o: ops.attention(*xs, causal=False, start=0, **o)  # noqa: E731
        y, pullback = sd.vjp(f, q, k, v)
        runs.append([y, *pullback(make(*y.shape, seed=9))])
    for a, b in zip(*runs, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), RTOL, ATOL)
    assert (runs[0][0].numpy()[:, :, 0] != 0).any()


def test_lengths_of_zero(device):
    """A batch without keys gives zeros, and -∞ for the sum of its exponentials."""
    q, k, v = heads(2, 1, 3, 9, 8, b=2)
    f = lambda *xs: ops.attention(  # noqa: E731
        *xs, causal=False, lengths=[0, 9], return_lse=True
    )
    (y, lse), pullback = sd.vjp(f, q, k, v)
    assert not y.numpy()[0].any() and (lse.numpy()[0] == -np.inf).all()
    grads = pullback((np.ones_like(y.numpy()), np.zeros_like(lse.numpy())))
    for g in grads:
        assert np.isfinite(g.numpy()).all() and not g.numpy()[0].any()


def test_huge_scores(device):
    q, k, v = heads(2, 1, 17, 17, 8)
    y = ops.attention(q * 1e4, k * 1e4, v).numpy()
    values, _ = exact(ops.attention, [q * 1e4, k * 1e4, v], [np.zeros_like(y)])
    np.testing.assert_allclose(y, values[0], 1e-3, 1e-4)


def test_learned_bias_slopes_and_documents(device):
    q, k, v = heads(4, 2, 15, 15, 8, b=2)
    documents = np.sort(make(2, 15) > 0, axis=1).astype(np.int32)

    def score(x, b, h, i, j, bias, slopes):
        return x + bias[h, i - j + 16] - slopes[h] * sd.cast(i - j, "f32")

    def mask(b, h, i, j, documents):
        return documents[b, i] == documents[b, j]

    def f(q, k, v, bias, slopes):
        captured = {"bias": bias, "slopes": slopes, "documents": documents}
        return ops.attention(
            q, k, v, score=score, mask=mask, captured=captured, window=9
        )

    check(f, q, k, v, make(4, 33, seed=3), make(4, seed=4))


def test_lengths_and_starts_of_a_batch(device):
    q, k, v = heads(4, 2, 3, 20, 8, b=3)
    lengths, start = np.array([5, 20, 11], np.int32), np.array([2, 17, 8], np.int32)
    y = ops.attention(q, k, v, lengths=lengths, start=start).numpy()
    for b, (n, s) in enumerate(zip(lengths, start)):
        one = [x[b : b + 1] for x in (q, k[:, :, :n], v[:, :, :n])]
        want = ops.attention(*one, start=int(s)).numpy()
        np.testing.assert_allclose(y[b], want[0], RTOL, ATOL)
    same = ops.attention(q, k, v, lengths=7, causal=False).numpy()
    want = ops.attention(q, k[:, :, :7], v[:, :, :7], causal=False).numpy()
    np.testing.assert_allclose(same, want, RTOL, ATOL)


BAD = [
    (errors.ShapeError, {"window": 0}),
    (errors.ShapeError, {"start": 7}),
    (errors.ShapeError, {"start": -1}),
    (errors.ShapeError, {"lengths": 8}),
    (errors.ShapeError, {"lengths": np.ones((2, 2), np.int32)}),
    (errors.ShapeError, {"lengths": [1, 2, 3]}),
    (errors.ShapeError, {"lengths": np.array([8])}),
    (errors.ShapeError, {"start": [-1]}),
    (errors.ShapeError, {"start": np.int64(9)}),
    (errors.DTypeError, {"start": 0.5}),
    (errors.DTypeError, {"start": True}),
    (errors.DTypeError, {"lengths": np.array([1.5])}),
    (errors.DTypeError, {"window": 1.5}),
    (errors.ShapeError, {"softcap": 0.0}),
    (errors.TraceError, {"score": 3}),
    (errors.TraceError, {"score": lambda x: x}),
    (errors.TraceError, {"score": lambda x, b, h, i, j: x, "captured": [1]}),
    (errors.DTypeError, {"mask": lambda b, h, i, j: 1.0}),
    (errors.DTypeError, {"score": lambda x, b, h, i, j: x > 0}),
    (errors.DTypeError, {"score": lambda x, b, h, i, j: None}),
    (errors.DTypeError, {"mask": lambda b, h, i, j: i - j}),
    (errors.TraceError, {"mask": lambda b, h, i, j, missing: i > j}),
    (errors.ShapeError, {"score": lambda x, b, h, i, j, bias: x + bias[h]}),
    (errors.ShapeError, {"score": lambda x, b, h, i, j, bias: x + bias[0, 99]}),
    (errors.IndexRangeError, {"score": lambda x, b, h, i, j, bias: x + bias[h, i - j]}),
]


@pytest.mark.parametrize(("error", "options"), BAD)
def test_bad_input(cpu, error, options):
    q, k, v = heads(4, 2, 7, 7, 8)
    bias = np.zeros((4, 13), np.float32)
    with pytest.raises(error) as e:
        options = {"captured": {"bias": bias}, **options}
        ops.attention(q, k, v, causal=False, **options)
    assert e.value.cure and e.value.where


@pytest.mark.parametrize(
    ("q", "k", "v", "said"),
    [
        ((2, 4, 5, 8), (2, 2, 5, 8), (2, 2, 6, 8), "'v': axis 's' is 6"),
        ((2, 4, 5, 8), (2, 2, 5, 9), (2, 2, 5, 8), "'k': axis 'd' is 9"),
        ((3, 4, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8), "is 2, but argument 'q' makes it 3"),
        ((2, 4, 5, 8), (2, 2, 5, 8), (2, 1, 5, 8), "'v': axis 'h' is 1"),
        ((4, 5), (4, 5), (4, 5), "'q' has shape"),
    ],
)
def test_shapes_that_disagree(cpu, q, k, v, said):
    with pytest.raises(errors.ShapeError, match=said) as e:
        ops.attention(make(*q), make(*k), make(*v))
    assert e.value.cure and "test_attention.py" in e.value.where


def test_an_id_beyond_a_captured_array(device):
    """What only the values tell is told when a result is read."""
    q, k, v = heads(2, 1, 6, 6, 8)
    score = lambda x, b, h, i, j, kinds, bias: x + bias[kinds[b, j]]  # noqa: E731
    captured = {"kinds": np.array([[0, 1, 2, 3, 1, 0]], np.int32), "bias": make(3)}
    with pytest.raises(errors.IndexRangeError, match="bias") as e:
        ops.attention(q, k, v, score=score, captured=captured).numpy()
    assert e.value.cure


def test_heads_that_do_not_divide(cpu):
    with pytest.raises(errors.ShapeError, match="3 query heads") as e:
        ops.attention(*heads(3, 2, 5, 5, 8))
    assert e.value.cure


def test_a_hook_error_names_the_array(cpu):
    q, k, v = heads(4, 2, 7, 7, 8)
    bias = np.zeros((4, 13), np.float32)
    score = lambda x, b, h, i, j, bias: x + bias[h, i + j]  # noqa: E731
    with pytest.raises(errors.IndexRangeError, match="'bias'") as e:
        ops.attention(q, k, v, score=score, captured={"bias": bias[:, :9]})
    assert "test_attention.py" in str(e.value)


def test_another_length_compiles_nothing(wgpu):
    f = sd.compile(lambda q, k, v, n: ops.attention(q, k, v, start=n))
    for s, n in itertools.product((64, 72), (3, 40)):
        args = heads(4, 2, 1, s, 16)
        f(*args, np.int32(n)).numpy()
        with sd.profile() as p:
            f(*args, np.int32(n + 1)).numpy()
        assert p.compiled == 0


@pytest.mark.parametrize(("text", "bytes_"), [("0", 0), ("4096", 4096), ("", None)])
def test_what_scores_are_stored_is_a_setting(monkeypatch, wgpu, text, bytes_):
    adapters = pytest.importorskip("shaderdsl.runtime.adapters")
    monkeypatch.setenv("SHADERDSL_SCORES", text)
    assert adapters._scores() == bytes_
    monkeypatch.setenv("SHADERDSL_SCORES", "much")
    with pytest.raises(errors.DeviceError, match="SHADERDSL_SCORES"):
        adapters._scores()


def test_scores_below_the_setting_are_stored(retarget):
    args = heads(4, 2, 33, 33, 16)
    retarget(online_from=4 * 4 * 33 * 33 + 1)
    assert "online" not in archetypes(ops.attention, *args)
    retarget(online_from=4 * 4 * 33 * 33)
    assert archetypes(ops.attention, *args) == ["online"]
