"""Contractions: every schedule against the interpreter in float64."""

from __future__ import annotations

import dataclasses
import itertools
import re

import numpy as np
import pytest

import shaderdsl as sd
from shaderdsl.codegen.contract import register_kernels, tiled_kernels
from shaderdsl.codegen.contract_plan import analyse
from shaderdsl.codegen.contract_registers import Block
from shaderdsl.codegen.contract_shapes import SHAPES, Shape, choose_shape
from shaderdsl.codegen.lower import SCHEDULES, lower
from shaderdsl.codegen.partition import Partition
from shaderdsl.codegen.program import Program
from shaderdsl.codegen.target import PORTABLE, Features
from shaderdsl.ir import interpret


@sd.op("m k, n k -> m n")
def nt(x, w):
    return sd.sum(x * w, over="k")


@sd.op("m k, k n -> m n")
def nn(x, w):
    return sd.sum(x * w, over="k")


@sd.op("k m, k n -> m n")
def tn(x, w):
    return sd.sum(x * w, over="k")


@sd.op("k m, n k -> m n")
def tt(x, w):
    return sd.sum(x * w, over="k")


@sd.op("m k, k n -> n m")
def turned(x, w):
    return sd.sum(x * w, over="k")


@sd.op("b (g r) q d, b g k d -> b (g r) q k")
def scores(q, k):
    s = sd.sum(q * k, over="d") * 0.3
    return sd.where(sd.index("k") <= sd.index("q"), s, 0.0)


@sd.op("b q (g r d), b k (g d) -> b (g r) q k")
def merged_scores(q, k):
    return sd.sum(q * k, over="d")


@sd.op("h q k, h k d -> q (h d)")
def weighted(p, v):
    seen = sd.index("k") <= sd.index("q")
    return sd.sum(sd.where(seen, sd.exp(p), 0.0) * v, over="k")


@sd.op("b s d, b s e -> d e")
def weight_gradient(x, g):
    return sd.sum(x * g, over="b s")


@sd.op("s b d, b s e -> d e")
def weight_gradient_turned(x, g):
    return sd.sum(x * g, over="b s")


@sd.op("m (a b), (b a) n -> m n")
def digits(x, w):
    return sd.sum(x * w, over="a b")


@sd.op("a b k, n k, n, a b n -> a b n")
def silu_residual(x, w, bias, residual):
    y = sd.sum(x * w, over="k") + bias
    return y * sd.sigmoid(y) + residual


@sd.op("m k, k n, n -> m n, m n")
def two_results(x, w, bias):
    y = sd.sum(x * w, over="k")
    return y, sd.exp(y * 0.1) + bias


@sd.op("t, v k, n k -> t n")
def gathered(ids, table, w):
    return sd.sum(table.at(v=ids) * w, over="k")


@sd.op("m k, n k, n -> m n")
def quantised(x, w, s):
    return sd.sum(x * sd.cast(w, "f32"), over="k") * s


@sd.op("m k, n k, m k -> m n")
def three_factors(x, w, u):
    return -sd.sum(x * w * sd.exp(u), over="k") / 3


pytestmark = pytest.mark.usefixtures("wgpu")
DTYPES = {"float32": "f32", "float16": "f16", "int32": "i32"}
rng = np.random.default_rng(7)


def arrays(*shapes, dtype="float32"):
    """Random operands; ("ids", stop, …) are integers below a stop."""
    out = []
    for s in shapes:
        if s[0] == "ids":
            out.append(rng.integers(0, s[1], s[2:]).astype(np.int32))
        else:
            out.append(rng.standard_normal(s).astype(dtype))
    return out


def cases(q, k, d, b=2, g=2, r=3):
    """Each op with operands of about these sizes."""
    yield nn, arrays((q, k), (k, d)), {}
    yield nt, arrays((q, k), (d, k)), {}
    yield tn, arrays((k, q), (k, d)), {}
    yield tt, arrays((k, q), (d, k)), {}
    yield turned, arrays((q, k), (k, d)), {}
    yield scores, arrays((b, g * r, q, d), (b, g, k, d)), {}
    yield merged_scores, arrays((b, q, g * r * d), (b, k, g * d)), {"g": g, "r": r}
    yield weighted, arrays((b, q, k), (b, k, d)), {}
    yield weight_gradient, arrays((b, q, k), (b, q, d)), {}
    yield weight_gradient_turned, arrays((q, b, k), (b, q, d)), {}
    yield digits, arrays((q, g * k), (g * k, d)), {"a": g}
    yield silu_residual, arrays((b, q, k), (d, k), (d,), (b, q, d)), {}
    yield two_results, arrays((q, k), (k, d), (d,)), {}
    yield gathered, arrays(("ids", 50, q), (50, k), (d, k)), {}
    yield quantised, arrays((q, k), ("ids", 9, d, k), (d,)), {}
    yield three_factors, arrays((q, k), (d, k), (q, k)), {}


def half_cases(q, k, d):
    """Operands, results or both in f16."""
    half = {"dtype": "float16"}
    yield two_results, arrays((q, k), (k, d), (d,), **half), {}
    yield silu_residual, arrays((2, q, k), (d, k), (d,), (2, q, d), **half), {}
    yield turned, arrays((q, k), (k, d), **half), {}
    yield nn, arrays((q, k), **half) + arrays((k, d)), {}


def run(op, operands, options, schedule=None, target=None):
    """Run an op's graph, contractions by ``schedule``.

    Gives the kernels and the worst relative error.
    """
    device = sd.runtime.current()
    target = target or device.target
    traced = sd.lower(lambda *xs: op(*xs, **options), *operands).program
    outs, inputs = traced.outputs, traced.inputs
    kernels = []
    for group in Partition(outs, target).groups:
        use = (
            schedule if schedule and group.kind == "contract" else SCHEDULES[group.kind]
        )
        kernels += use(group, target)
    program = Program(tuple(kernels), inputs, outs, frozenset(), (), ())
    given = [device.upload(a, s.dtype) for a, s in zip(operands, inputs)]
    results = device.build(program)(given, {})
    expected = interpret.evaluate(outs, dict(zip(inputs, operands)))
    worst = 0.0
    for buffer, stage, want in zip(results, outs, expected):
        got = device.download(buffer, stage.shape, stage.dtype).astype(np.float64)
        error = np.abs(got - want).max() / (np.abs(want).max() + 1e-30)
        worst = max(worst, error / (1e-3 if stage.dtype == "f16" else 1e-5))
    return kernels, worst


def plain_target():
    """This driver without optional abilities, at the guaranteed limits."""
    target = sd.runtime.current().target
    return dataclasses.replace(target.portable(), features=Features())


def registers_of(block, splits=0):
    return lambda group, target: register_kernels(analyse(group, target), block, splits)


def tiles_of(shape, splits=1):
    return lambda group, target: tiled_kernels(analyse(group, target), shape, splits)


SMALL = Shape(32, 32, 16, 4, 4)
SCHEDULED = {
    "chosen": (None, False),
    "chosen, plain": (None, True),
    "shared rows": (registers_of(Block(16, 4, 8, 1, 4)), False),
    "two rows of threads": (registers_of(Block(4, 8, 8, 2, 0)), True),
    "registers in pieces": (registers_of(Block(8, 4, 8, 1, 4), 3), False),
    "tiles": (tiles_of(SMALL), False),
    "tiles in pieces": (tiles_of(SMALL, 2), True),
}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *itertools.product(SCHEDULED, [(3, 5, 7), (8, 4, 16)]),
        *itertools.product(["chosen", "registers in pieces", "tiles"], [(35, 36, 33)]),
    ],
    ids=str,
)
def test_schedules(name, sizes):
    schedule, plain = SCHEDULED[name]
    target = plain_target() if plain else None
    for op, operands, options in cases(*sizes):
        _, worst = run(op, operands, options, schedule, target)
        assert worst < 1, (op.name, [a.shape for a in operands])


@pytest.mark.parametrize("name", ["chosen", "chosen, plain", "tiles"])
def test_half(name):
    schedule, plain = SCHEDULED[name]
    for op, operands, options in itertools.chain(
        half_cases(9, 12, 8), half_cases(5, 7, 3)
    ):
        _, worst = run(
            op, operands, options, schedule, plain_target() if plain else None
        )
        assert worst < 1, (op.name, [a.shape for a in operands])


@pytest.mark.parametrize("op", [nn, nt, tn, tt], ids=lambda o: o.name)
def test_edges(op):
    """One position more or less than a tile, and a single one."""
    for m, n, k in itertools.product(
        (1, 3, 63, 64, 65, 130), (1, 65, 64), (1, 3, 64, 130)
    ):
        x = (k, m) if op in (tn, tt) else (m, k)
        w = (n, k) if op in (nt, tt) else (k, n)
        _, worst = run(op, arrays(x, w), {})
        assert worst < 1, (m, n, k)


@pytest.mark.parametrize("shape", [s for s, _ in SHAPES], ids=str)
def test_tile_shapes(shape):
    limits = PORTABLE.limits
    assert shape.memory <= limits.max_workgroup_storage
    assert shape.size <= limits.max_invocations
    for op, x, w in ((nn, (130, 64), (64, 140)), (nt, (130, 63), (140, 63))):
        _, worst = run(op, arrays(x, w), {}, tiles_of(shape))
        assert worst < 1


def test_a_new_size_is_the_same_text():
    def texts(m, k, n):
        kernels, worst = run(
            nt, arrays((m, k), (n, k)), {}, registers_of(Block(8, 4, 8, 1, 0))
        )
        assert worst < 1
        return [kernel.wgsl for kernel in kernels]

    assert texts(64, 32, 48) == texts(60, 80, 120) == texts(7, 8, 12)

    def tiles(m, k, n):
        kernels, worst = run(nt, arrays((m, k), (n, k)), {}, tiles_of(SMALL))
        assert worst < 1
        return [kernel.wgsl for kernel in kernels]

    assert tiles(64, 32, 48) == tiles(61, 80, 120)


def test_epilogue_is_one_kernel():
    kernels, _ = run(silu_residual, arrays((2, 8, 16), (8, 16), (8,), (2, 8, 8)), {})
    assert [k.archetype for k in kernels] == ["contract"]
    kernels, _ = run(two_results, arrays((8, 16), (16, 8), (8,)), {})
    assert len(kernels) == 1 and len(kernels[0].writes) == 2


def test_long_sums_stay_within_the_loop_budget():
    """A sum of ones is exact, so every term is there."""
    k = 70_001
    ones = [np.ones((2, k), np.float32), np.ones((2, k), np.float32)]
    kernels, worst = run(nt, ones, {})
    assert len(kernels) == 2 and worst == 0
    budget = dataclasses.replace(sd.runtime.current().target, loop_budget=64)
    kernels, worst = run(nt, arrays((5, 999), (6, 999)), {}, None, budget)
    assert len(kernels) == 2 and worst < 1


def test_gpu_choices():
    """Large products take large tiles; few results are summed in pieces."""
    gpu = dataclasses.replace(PORTABLE, loop_budget=1 << 30)

    def choice(m, n, k):
        traced = sd.lower(nt, sd.spec("f32", m, k), sd.spec("f32", n, k)).program
        (group,) = Partition(traced.outputs, gpu).groups
        return choose_shape([analyse(group, gpu)], 16_384)

    shape, splits = choice(4096, 4096, 4096)
    assert (shape.bm, shape.bn, splits) == (128, 128, 1)
    shape, splits = choice(256, 4096, 4096)
    assert splits > 1
    shape, splits = choice(4, 4096, 4096)
    assert shape.bm <= 32


@sd.op("h t s, s c -> h t c")
def past(p, v):
    return sd.sum(sd.where(sd.index("s") <= sd.index("t"), p, 0.0) * v, over="s")


@sd.op("h t s, h s c -> h t c")
def near(p, v):
    ahead = sd.index("s") - sd.index("t")
    return sd.sum(sd.where((ahead <= 3) & (ahead > -9), p, 0.0) * v, over="s")


@sd.op("h t s, h t c -> h s c")
def future(p, v):
    return sd.sum(sd.where(sd.index("t") >= sd.index("s"), p, 0.0) * v, over="t")


@sd.op("t s, s c -> t c")
def columns(p, v):
    return sd.sum(p * sd.where(sd.index("s") <= sd.index("c") + 20, v, 0.0), over="s")


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("n", [96, 50, 33])
def test_what_masks_empty_is_left_out(n, pieces):
    """Nothing outside of a mask counts, not even NaN; later tiles come first."""
    i, j = np.indices((n, n))
    p, v = arrays((2, n, n), (n, 40))
    both = np.stack([v, v[::-1]])
    for op, hidden, operands in (
        (past, j > i, [p, v]),
        (near, (j > i + 3) | (j <= i - 9), [p, both]),
        (future, i < j, [p, both]),
        (columns, np.indices((n, 40))[0] > np.arange(40) + 20, [v, p[0]]),
    ):
        operands = [x.copy() for x in operands]
        operands[0][..., hidden] = np.nan
        if op is columns:
            operands.reverse()
        kernels, worst = run(op, operands, {}, tiles_of(SMALL, pieces))
        assert worst < 1, op.name
        if op is past and n % SMALL.bm:  # a tile may begin a head and end another
            continue
        loops = re.findall(r"for \(var chunk = (\w+); chunk < (\w+)", kernels[0].wgsl)
        assert any(x.startswith("s") for x in loops[0])  # bounded by the mask


@sd.op("t d, n d, k d, k d, n -> t n, t k, t k")
def query_key_value(x, wq, wk, wv, bias):
    q = sd.sum(x * wq, over="d") + bias
    return q, sd.sum(x * wk, over="d"), sd.exp(0.1 * sd.sum(x * wv, over="d"))


@sd.op("t d, t n, t k, t k -> n d, k d, k d")
def their_gradients(x, q, k, v):
    return tuple(sd.sum(x * g, over="t") for g in (q, k, v))


@pytest.mark.parametrize(
    "sizes", [(33, 40, 36, 12), (65, 31, 70, 9), (8, 1024, 32, 16)]
)
def test_siblings_share_a_kernel(sizes):
    """On a GPU; the driver at hand only runs the text."""
    device = sd.runtime.current()
    gpu = dataclasses.replace(plain_target(), family="gpu")
    t, d, n, k = sizes
    for op, operands in (
        (query_key_value, arrays((t, d), (n, d), (k, d), (k, d), (n,))),
        (their_gradients, arrays((t, d), (t, n), (t, k), (t, k))),
    ):
        traced = sd.lower(op, *operands).program
        for _ in range(2):  # printed, then taken over
            program = lower(traced.outputs, gpu, inputs=traced.inputs)
            assert sum(
                kernel.archetype == "contract" for kernel in program.kernels
            ) in (1, 2)
            assert program.kernels[0].name.startswith("siblings")
            given = [device.upload(a, "f32") for a in operands]
            results = device.build(program)(given, {})
            expected = interpret.evaluate(
                traced.outputs, dict(zip(traced.inputs, operands))
            )
            for buffer, want in zip(results, expected):
                got = device.download(buffer, want.shape, "f32")
                assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()


def test_siblings_that_need_each_other_stay_apart():
    gpu = dataclasses.replace(plain_target(), family="gpu")
    traced = sd.lower(lambda x, w: nt(nt(x, w), w), *arrays((32, 32), (32, 32))).program
    program = lower(traced.outputs, gpu, inputs=traced.inputs)
    assert [kernel.archetype for kernel in program.kernels] == ["contract", "contract"]


def test_random_products():
    """Axes of either factor in any order, some merged, with and without a mask."""
    random = np.random.default_rng(11)
    for _ in range(12):
        left = list("abkl")
        right = list("bnkl")
        out = list("abn")
        for axes in (left, right, out):
            random.shuffle(axes)
        size = {a: int(random.choice([2, 3, 4, 8])) for a in "abnkl"}

        @sd.op(f"{' '.join(left)}, {' '.join(right)} -> {' '.join(out)}")
        def product(x, y):
            seen = sd.index("k") + sd.index("l") <= sd.index("a")
            return sd.sum(sd.where(seen, x, 0.0) * y, over="k l") * 2.0

        operands = arrays([size[a] for a in left], [size[a] for a in right])
        for schedule in (None, tiles_of(SMALL)):
            _, worst = run(product, operands, {}, schedule)
            assert worst < 1, (left, right, out, size)
