"""Loops stay within a target's budget, counted by the kernels themselves; really long
ones give right values on a driver that ends them silently after 65,535 iterations.
"""

import dataclasses
import math

import numpy as np
import pytest
from loop_count import run_counted

import shaderdsl as sd
from shaderdsl import ops
from shaderdsl.codegen.lower import lower
from shaderdsl.ir import interpret
from shaderdsl.runtime import current
from shaderdsl.tracing import Traced

rng = np.random.default_rng(5)


@sd.op("r n -> r, r, r")
def statistics(x):
    """Phases of a row: each needs the one before."""
    m = sd.mean(x, over="n")
    v = sd.mean((x - m) * (x - m), over="n")
    return m, v, sd.sum(sd.tanh((x - m) / (v + 1.0)), over="n")


@sd.op("r n -> r")
def many_phases(x):
    for _ in range(10):
        x = x - sd.tanh(sd.mean(x * x, over="n"))
    return sd.mean(x, over="n")


@sd.op("r, n -> r")
def products_of_lines(x, y):
    """Rows that no array holds."""
    return sd.max(sd.sin(x * y) - sd.abs(x - y), over="n")


@sd.op("r n -> r n")
def softmax(x):
    return sd.softmax(x, over="n")


@sd.op("r n -> n")
def column(x):
    return sd.sum(x * x, over="r")


@sd.op("r n -> n")
def greatest_of_columns(x):
    return sd.max(x, over="r")


@sd.op("r n, n -> r n, n")
def rows_with_columns(x, g):
    y = (x - sd.mean(x, over="n")) * g
    return y, sd.sum(y * y, over="r")


@sd.op("m k, k n -> m n")
def matmul(a, b):
    return sd.sum(a * b, over="k")


@sd.op("m k, k n, k n -> m n")
def gate_up(a, b, c):
    return sd.silu(sd.sum(a * b, over="k")) * sd.sum(a * c, over="k")


@sd.op("k, n k -> n")
def product_of_a_row(x, w):
    return sd.sum(x * w, over="k")


def scatter(table, ids, dy):
    return sd.vjp(ops.embedding, table, ids)[1](dy)[0]


@sd.op("a n -> a n")
def running(x):
    return sd.cumsum(x, over="n")


@sd.op("n a -> n a")
def running_down(x):
    return sd.cumsum(x, over="n")


def running_back(x, dy):
    return sd.vjp(running, x)[1](dy)


def attention(q, k, v, dy):
    y, pullback = sd.vjp(ops.attention, q, k, v)
    return y, *pullback(dy)


@sd.op("h t c, h s c, h s c, b -> h t c")
def with_buckets(q, k, v, bias):
    """Learned biases of distances: their gradient is a sum of points."""
    near = sd.clip(sd.index("t") - sd.index("s"), 0, sd.extent("b") - 1)
    p = sd.softmax(sd.sum(q * k, over="c") + bias.at(b=near), over="s")
    return sd.sum(p * v, over="s")


def buckets(q, k, v, bias, dy):
    return sd.vjp(with_buckets, q, k, v, bias)[1](dy)


@sd.op("h t c, h s c, t -> h t c")
def with_slopes(q, k, slope):
    far = sd.index("s") - sd.index("t")
    x = sd.sum(q * k, over="c") + 0.01 * slope * far
    return sd.sum(sd.softmax(x, over="s") * k, over="s")


def slopes(q, k, slope, dy):
    return sd.vjp(with_slopes, q, k, slope)[1](dy)


@sd.op("h t c, h s c, t s -> h t c")
def with_affine_bias(q, k, bias):
    p = sd.softmax(sd.sum(q * k, over="c") + bias, over="s")
    return sd.sum(p * k, over="s")


@sd.op("t d, v d, t -> t")
def losses(x, w, labels):
    logits = sd.sum(x * w, over="d")
    return sd.logsumexp(logits, over="v") - logits.at(v=labels)


def loss_gradients(x, w, labels, dy):
    return sd.vjp(losses, x, w, labels)[1](dy)[:2]


def heads(t, s, c, *more):
    return [(2, t, c), (2, s, c), (2, s, c), *more, (2, t, c)]


# name: function, shapes ("i" marks ids below the number), archetypes that must be there
WORKS = {
    "row": (statistics, [(5, 9001)], {"row"}),
    "many phases": (many_phases, [(66, 701)], {"row"}),
    "many phases of longer rows": (many_phases, [(66, 3000)], {"row"}),
    "rows of no array": (products_of_lines, [(70,), (8009,)], {"row"}),
    "many long rows": (statistics, [(66, 5003)], {"row"}),
    "softmax": (softmax, [(3, 9002)], {"row"}),
    "column": (column, [(4000, 5)], {"column"}),
    "maximum of columns": (greatest_of_columns, [(4000, 5)], {"column"}),
    "rows with columns": (rows_with_columns, [(14_000, 3), (3,)], {"row"}),
    "long rows with columns": (rows_with_columns, [(130, 3000), (3000,)], {"row"}),
    "contract": (matmul, [(5, 2001), (2001, 6)], {"contract"}),
    "joint": (gate_up, [(5, 2001), (2001, 6), (2001, 6)], {"contract"}),
    "one row": (product_of_a_row, [(9001,), (33, 9001)], set()),
    "scatter": (scatter, [(7, 8), (50, 7, "i"), (50, 8)], {"scatter"}),
    "many of one place": (scatter, [(3, 8), (3000, 3, "i"), (3000, 8)], set()),
    "scan": (running, [(3, 9001)], {"scan"}),
    "scan down": (running_down, [(9001, 3)], {"scan"}),
    "scan back": (running_back, [(3, 9001), (3, 9001)], {"scan"}),
    "online": (attention, heads(20, 1500, 8), {"online"}),
    "online of columns": (attention, heads(1500, 20, 8), {"online"}),
    "online of many rows": (attention, heads(70, 1200, 8), {"online"}),
    "online split": (
        lambda q, k, v: ops.attention(q, k, v),
        [(2, 1, 8), (2, 20_001, 8), (2, 20_001, 8)],
        {"online"},
    ),
    "points": (buckets, heads(100, 300, 8, (6,)), {"points"}),
    "slopes": (slopes, [(2, 70, 8), (2, 600, 8), (70,), (2, 70, 8)], {"online"}),
    "gather": (
        loss_gradients,
        [(40, 8), (3000, 8), (40, 3000, "i"), (40,)],
        {"online"},
    ),
    "long rows in loops": (
        loss_gradients,
        [(20, 130), (300, 130), (20, 300, "i"), (20,)],
        {"online"},
    ),
    "shorter sums of long rows": (
        loss_gradients,
        [(20, 130), (70, 130), (20, 70, "i"), (20,)],
        {"online"},
    ),
}


def data(shapes):
    out = []
    for shape in shapes:
        if shape[-1] == "i":
            out.append(rng.integers(0, shape[1], shape[:1]).astype(np.int32))
        else:
            out.append(rng.standard_normal(shape).astype(np.float32))
    return out


@pytest.fixture(params=["software", "gpu"])
def target(request, wgpu):
    """The adapter's target for one family, with what it is changed to put back."""
    before = wgpu.target

    def changed(**changes):
        features = before.features
        if request.param == "gpu":
            features = dataclasses.replace(features, wide_words=False)
        wgpu.target = dataclasses.replace(
            before, family=request.param, features=features, **changes
        )
        return wgpu.target

    changed.family = request.param
    yield changed
    wgpu.target = before


def counted(function, xs, target):
    """Worst error against float64, archetypes, and what each kernel spent."""
    traced = Traced(function, tuple(xs), "lower")
    program = lower(traced.outs, target, inputs=traced.inputs)
    device = current()
    buffers = [
        device.upload(x, s.dtype) for x, s in zip(xs, traced.inputs, strict=True)
    ]
    results, spent = run_counted(device, program, buffers)
    want = interpret.evaluate(traced.outs, dict(zip(traced.inputs, xs, strict=True)))
    worst = 0.0
    for b, s, w in zip(results, traced.outs, want, strict=True):
        got = np.asarray(device.download(b, s.shape, s.dtype), np.float64)
        scale = max(1.0, float(np.abs(w).max()))
        worst = max(worst, float(np.abs(got - w).max()) / scale)
    return worst, {k.archetype for k in program.kernels}, spent


#: Iterations for each family; more for what takes some for each row.
BUDGET = {"software": 100, "gpu": 64}
MORE = {
    "rows with columns": 400,
    "long rows in loops": 500,
    "shorter sums of long rows": 500,
}

#: What takes more than that if nobody counts.
BEYOND = {
    "software": (
        "row", "many phases", "many phases of longer rows", "rows of no array",
        "many long rows",
        "column", "rows with columns", "long rows with columns", "contract", "joint",
        "one row", "many of one place", "scan", "scan down", "online",
        "online of many rows", "online split", "gather", "long rows in loops",
    ),
    "gpu": ("many of one place", "scan", "scan down", "gather"),
}  # fmt: skip


@pytest.mark.parametrize("work", WORKS)
def test_loops_are_within_a_small_budget(work, target):
    function, shapes, archetypes = WORKS[work]
    budget = MORE.get(work, BUDGET[target.family])
    worst, found, spent = counted(function, data(shapes), target(loop_budget=budget))
    assert archetypes <= found
    assert worst < 2e-5
    assert not [x for x in spent if x[2] > budget]


@pytest.mark.parametrize("work", sorted(set(BEYOND["software"] + BEYOND["gpu"])))
def test_the_count_sees_what_is_beyond(work, target):
    """The same programs without a budget: what the tests above would meet."""
    if work not in BEYOND[target.family]:
        pytest.skip("short on this family in any case")
    function, shapes, _ = WORKS[work]
    _, _, spent = counted(function, data(shapes), target(loop_budget=1 << 30))
    assert max(x[2] for x in spent) > MORE.get(work, BUDGET[target.family])


def test_long_products_of_gpus_are_cut(target):
    """Whoever walks tiles adds up no more positions of k than the budget allows."""
    if target.family != "gpu":
        pytest.skip("of one family")
    target(loop_budget=500)
    n, k = 256, 1 << 16
    low = sd.lower(matmul, sd.spec("f32", n, k), sd.spec("f32", k, n))
    scratch = low.kernels[0].bindings[-1].tensor
    pieces = scratch.size // (n * n)
    assert -(-k // pieces) <= 500
    assert pieces <= 500


def ones(*shape):
    return np.ones(shape, np.float32)


@sd.op("r, n -> r")
def sum_of_lines(x, y):
    return sd.sum(sd.where(x > y, x * y, y), over="n")


@sd.op("r, n -> r, r")
def logsumexp_of_lines(x, y):
    m = sd.max(x * y, over="n")
    return m, m + sd.log(sd.sum(sd.exp(x * y - m), over="n"))


@sd.op("n, m -> ")
def sum_of_all(x, y):
    return sd.sum(sd.maximum(x, y), over="n m")


def last_counts(n):
    """Zeros with a one at the end, which a loop that ends early never sees."""
    x = np.zeros(n, np.float32)
    x[-1] = 1.0
    return x


N = 4_300_801  # 64 lanes spend more than 65,535 iterations on it
LONG = {
    "row": (sum_of_lines, [2 * ones(64), ones(N)], [2.0 * N * ones(64)]),
    "rows of maxima": (
        logsumexp_of_lines,
        [ones(2), last_counts(N)],
        [ones(2), np.log(N - 1 + math.e) * ones(2)],
    ),
    "one row": (sum_of_all, [last_counts(70_000), ones(1000)], [7e7]),
    "scan": (running, [ones(1, N)], [np.arange(1.0, N + 1)[None]]),
    "scan back": (
        running_back,
        [ones(1, N), ones(1, N)],
        [np.arange(N, 0, -1.0)[None]],
    ),
    "scan of integers": (
        running,
        [np.ones((1, N), np.int32)],
        [np.arange(1, N + 1)[None]],
    ),
    "column": (column, [ones(N, 1)], [np.full(1, float(N))]),
    "rows with columns": (
        rows_with_columns,
        [np.tile(np.float32([1, -1, 0]), (N, 1)), ones(3)],
        [np.tile([1.0, -1, 0], (N, 1)), np.array([N, N, 0.0])],
    ),
    "contract": (matmul, [ones(1, 1 << 20), ones(1 << 20, 2)], [2.0**20 * ones(1, 2)]),
    "many of one place": (
        scatter,
        [ones(3, 1), np.zeros(200_000, np.int32), ones(200_000, 1)],
        [np.array([[200_000.0], [0], [0]])],
    ),
}


@pytest.mark.parametrize("work", LONG)
def test_long_loops(work, wgpu):
    function, xs, want = LONG[work]
    got = function(*xs)
    got = got if isinstance(got, tuple) else (got,)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(g, np.float64), w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("n", [1, 2, 255, 256, 257, 2049])
def test_running_sums_in_pieces(axis, n, target):
    """Pieces of any length, along any axis, forward and backward."""
    target(loop_budget=4)
    shape = [3, 2, 2]
    shape[axis] = n
    x, dy = data([tuple(shape)] * 2)
    y, pullback = sd.vjp(lambda a: sd.cumsum(a, axis=axis), x)
    np.testing.assert_allclose(
        np.asarray(y), np.cumsum(x.astype(np.float64), axis), atol=1e-4
    )
    back = np.flip(np.cumsum(np.flip(dy.astype(np.float64), axis), axis), axis)
    np.testing.assert_allclose(np.asarray(pullback(dy)), back, atol=1e-4)
