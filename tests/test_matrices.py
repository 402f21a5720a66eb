"""Contractions whose subgroups multiply matrices: tiles and indices on any driver.

The kernels run with matrices emulated (`emulated.py`), against the interpreter in
float64. Tint judges the texts themselves; what a device with matrices makes of them
`tests/test_dawn.py` asks where there is one.
"""

from __future__ import annotations

import dataclasses
import itertools

import judges
import numpy as np
import pytest
from conftest import has_adapter
from emulated import emulated
from test_contract import arrays, half_cases, nn, nt, run, scores, tn, tt, turned
from test_index_audit import watched

import shaderdsl as sd
from shaderdsl.codegen import lower as lowering
from shaderdsl.codegen import online_matrices, texts
from shaderdsl.codegen.choice import Survey
from shaderdsl.codegen.contract import tiled_kernels
from shaderdsl.codegen.contract_matrices import MatrixShape, has_matrices, is_half
from shaderdsl.codegen.contract_matrix_shapes import MATRIX_SHAPES, choose_matrices
from shaderdsl.codegen.contract_plan import analyse
from shaderdsl.codegen.lower import lower
from shaderdsl.codegen.partition import Partition
from shaderdsl.codegen.program import Program
from shaderdsl.codegen.target import PORTABLE, Target
from shaderdsl.ir import expr as E
from shaderdsl.ir.stage import input_stage

SMALL = MatrixShape(32, 64, 16, 1, 2)
number = itertools.count()
HALF = {"dtype": "float16"}


def with_matrices(target: Target) -> Target:
    """A target as if it had a GPU's workgroups and matrices."""
    features = dataclasses.replace(
        target.features,
        matrix=(16, 16, 16, 32),
        f16=True,
        subgroups=True,
        wide_words=False,
    )
    limits = dataclasses.replace(
        target.limits, max_workgroup_storage=49_152, max_invocations=1024
    )
    return dataclasses.replace(target, family="gpu", features=features, limits=limits)


TARGET = dataclasses.replace(
    with_matrices(PORTABLE), name="matrices", enable_subgroups_directive=True
)


@pytest.fixture
def wgpu(monkeypatch):
    """The driver that is there, with emulated matrices; gives the texts with any."""
    if not has_adapter():
        pytest.skip("no adapter")
    device = sd.use_device("wgpu")
    before = device.target
    if not before.features.f16:
        pytest.skip("no f16")
    seen: list[str] = []
    monkeypatch.setattr(texts, "store", None)
    # Shapes of the same text that compile quickly here.
    short = (
        online_matrices.MatrixStream(32, 32, 8, 8, 32, 32, down=1),
        online_matrices.MatrixStream(32, 32, 8, 8, 16, 16, down=1),
    )
    monkeypatch.setattr(online_matrices, "STREAMS", short)

    def instead(schedule):
        return lambda group, target: [
            emulated(k, seen) for k in schedule(group, target)
        ]

    for kind in ("contract", "siblings", "online", "pieces"):
        schedule = lowering.SCHEDULES[kind]
        monkeypatch.setitem(lowering.SCHEDULES, kind, instead(schedule))
    # Nothing is taken from other tests or runs: texts are remembered by target.
    device.target = dataclasses.replace(
        with_matrices(before), name=f"emulated {next(number)}"
    )
    yield seen
    device.target = before
    sd.use_device("cpu")


def matrices_of(shape, splits=1):
    def schedule(group, target):
        c = analyse(group, target)
        assert has_matrices(c)
        return [emulated(k) for k in tiled_kernels(c, shape, splits)]

    return schedule


@pytest.mark.parametrize("op", [nn, nt, tn, tt, turned], ids=lambda o: o.name)
def test_edges(wgpu, op):
    """One position more or less than a tile, and a single one."""
    for m, n, k in ((33, 300, 20), (64, 32, 52), (65, 3, 1), (1, 64, 15)):
        x = (k, m) if op in (tn, tt) else (m, k)
        w = (n, k) if op in (nt, tt) else (k, n)
        _, worst = run(op, arrays(x, w, **HALF), {}, matrices_of(SMALL))
        assert worst < 1, (m, n, k)


@pytest.mark.parametrize("splits", [1, 3])
def test_what_follows_the_sum(wgpu, splits):
    """Batches, biases, activations, residuals, several results, masks."""
    masked = (scores, arrays((1, 4, 33, 20), (1, 2, 36, 20), **HALF), {})
    for op, operands, options in (*half_cases(35, 36, 24), masked):
        if all(a.dtype == np.float16 for a in operands[:2]):
            schedule = matrices_of(SMALL, splits)
            _, worst = run(op, operands, options, schedule)
            assert worst < 1, op.name


# Larger ones are the same text with more matrices, and take long to compile here.
@pytest.mark.parametrize(
    "shape", [s for s, _ in MATRIX_SHAPES if s.bm * s.bn <= 64 * 64], ids=str
)
def test_shapes(wgpu, shape):
    _, worst = run(nn, arrays((40, 68), (68, 72), **HALF), {}, matrices_of(shape))
    assert worst < 1


def product(x, w):
    return sd.sum(x * w, over="k")


@sd.op("m k, k n, k n -> m n")
def gate_and_up(x, g, u):
    return sd.silu(product(x, g)) * product(x, u)


@sd.op("m k, k a, k b, k b -> m a, m b, m b")
def query_key_value(x, q, k, v):
    return product(x, q), product(x, k), sd.exp(0.1 * product(x, v))


def gate_and_up_64(x, g, u, dy):
    a, b = x @ g, x @ u
    s = 1 / (1 + np.exp(-a))
    da, db = dy * b * s * (1 + a * (1 - s)), dy * a * s
    return a * s * b, da @ g.T + db @ u.T, x.T @ da, x.T @ db


def query_key_value_64(x, q, k, v, dq, dk, dv):
    e = np.exp(0.1 * (x @ v))
    d = 0.1 * dv * e
    back = dq @ q.T + dk @ k.T + d @ v.T, x.T @ dq, x.T @ dk, x.T @ d
    return x @ q, x @ k, e, *back


@pytest.mark.parametrize(
    ("op", "formula", "shapes", "results"),
    [
        (gate_and_up, gate_and_up_64, [(40, 36), (36, 44), (36, 44)], [(40, 44)]),
        (
            query_key_value,
            query_key_value_64,
            [(40, 36), (36, 44), (36, 20), (36, 20)],
            [(40, 44), (40, 20), (40, 20)],
        ),
    ],
    ids=["joint", "siblings"],
)
def test_products_together(wgpu, op, formula, shapes, results):
    """Two sums of one kernel, several products of one kernel, and their derivatives."""
    xs, gs = arrays(*shapes, **HALF), arrays(*results, **HALF)
    out, pull = sd.vjp(op, *map(sd.array, xs))
    back = tuple(map(sd.array, gs))
    got = [*(out if isinstance(out, tuple) else (out,))]
    got += pull(back if len(back) > 1 else back[0])
    want = formula(*(a.astype(np.float64) for a in (*xs, *gs)))
    for y, z in zip(got, want, strict=True):
        error = np.abs(y.numpy().astype(np.float64) - z).max()
        assert error < 4e-3 * np.abs(z).max()
    wanted = "c1x0x0" if op is gate_and_up else "every"
    assert any(wanted in text for text in wgpu)


def test_which_values_are_halves():
    x = E.apply("round_f16", E.scalar("x", "f32"))
    assert is_half(x) and is_half(E.apply("neg", x)) and is_half(E.const(0.5))
    assert not is_half(E.const(0.1)) and not is_half(E.const(70_000.0))
    assert not is_half(E.apply("add", x, x))


def attention(q, k, v):
    return sd.ops.attention(q, k, v, causal=True)


@pytest.mark.parametrize(
    ("op", "shapes"),
    [
        (nn, [(33, 20), (20, 300)]),
        (tt, [(15, 65), (7, 15)]),
        (attention, [(1, 2, 70, 32), (1, 2, 90, 32), (1, 2, 90, 32)]),
    ],
    ids=["nn", "tt", "attention"],
)
def test_every_index_is_in_range(wgpu, op, shapes):
    """Those of workgroup memory too, of which matrices are loaded."""
    device = sd.runtime.current()
    operands = arrays(*shapes, **HALF)
    traced = sd.lower(op, *operands).program
    flag = input_stage((4,), "u32", "flag")
    kernels = [watched(k, flag) for k in traced.kernels]
    assert all("in_range" in k.wgsl for k in kernels)
    program = Program(
        tuple(kernels),
        (*traced.inputs, flag),
        (*traced.outputs, flag),
        frozenset({len(traced.inputs)}),
        (),
        (),
    )
    given = [device.upload(a, "f16") for a in operands]
    given.append(device.upload(np.zeros(4, np.uint32), "u32"))
    *_, found = device.build(program)(given, {})
    assert wgpu and not device.download(found, (4,), "u32").any()


def printed(op, operands):
    traced = sd.lower(op, *operands).program
    return lower(traced.outputs, TARGET, inputs=traced.inputs).kernels


@pytest.mark.skipif(not judges.available(), reason="no wgpudawn")
def test_tint_accepts_the_texts(cpu):
    every = []
    for x, w in (((130, 70), (70, 64)), ((64, 8192), (8192, 64))):
        every += [k.wgsl for k in printed(nn, arrays(x, w, **HALF))]
    for op, *shapes in (
        (nt, (128, 72), (100, 72)),
        (tt, (63, 130), (64, 63)),
        (gate_and_up, (40, 36), (36, 44), (36, 44)),
        (query_key_value, (40, 36), (36, 44), (36, 20), (36, 20)),
        (scores, (1, 4, 33, 20), (1, 2, 36, 20)),
    ):
        every += [k.wgsl for k in printed(op, arrays(*shapes, **HALF))]
    qkv = arrays(*[(1, 2, 100, 64)] * 3, **HALF)
    every += [k.wgsl for k in printed(attention, qkv)]
    assert sum("subgroupMatrixLoad" in t for t in every) >= 8
    wrong = judges.refused(every, portable=False)
    assert not wrong, wrong[0]


def test_others_are_as_before(cpu):
    """Factors of f32, and devices without matrices."""
    for operands, target in (
        (arrays((64, 64), (64, 64)), TARGET),
        (arrays((64, 64), **HALF) + arrays((64, 64)), TARGET),
        (arrays((64, 64), (64, 64), **HALF), TARGET.portable()),
    ):
        traced = sd.lower(nn, *operands).program
        kernels = lower(traced.outputs, target, inputs=traced.inputs).kernels
        assert not any("subgroupMatrix" in k.wgsl for k in kernels)


def test_choice(cpu):
    """Large tiles for large products, pieces for long sums, and others to try."""

    def chosen(m, k, n):
        traced = sd.lower(nn, *arrays((m, k), (k, n), **HALF)).program
        survey = Survey()
        target = dataclasses.replace(TARGET, choice=survey)
        (group,) = Partition(traced.outputs, target).groups
        shape, splits = choose_matrices([analyse(group, target)], 16_384)
        assert len(survey.choices) > 1
        return shape, splits

    large, splits = chosen(2048, 64, 2048)
    assert (large.bm, large.bn, splits) == (128, 128, 1)
    small, splits = chosen(64, 40_000, 64)
    assert small.bm <= 64 and splits > 2


def attention_64(q, k, v, causal):
    s = np.einsum("bhqd,bhkd->bhqk", q, k) / np.sqrt(q.shape[-1])
    if causal:
        lq, lk = s.shape[-2:]
        s = np.where(np.tri(lq, lk, lk - lq, dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return (p / p.sum(-1, keepdims=True)) @ v


@pytest.mark.parametrize(
    ("rows", "lines", "d", "causal"),
    [(64, 64, 32, False), (50, 70, 32, True), (40, 40, 64, True), (33, 40, 128, True)],
)
def test_attention(wgpu, rows, lines, d, causal):
    """Within what rounding of weights to f16 allows."""
    q, k, v = arrays((1, 2, rows, d), (1, 2, lines, d), (1, 2, lines, d), **HALF)
    got = sd.ops.attention(*map(sd.array, (q, k, v)), causal=causal).numpy()
    assert any("powers" in text for text in wgpu)
    want = attention_64(*(a.astype(np.float64) for a in (q, k, v)), causal)
    assert np.abs(got.astype(np.float64) - want).max() < 1e-3 * np.abs(want).max()
