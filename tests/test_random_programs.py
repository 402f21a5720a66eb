"""500 random programs, forward and gradient, against float64: each on the device
``cpu``, every fifth in one more way, in turn. `program_checks` says which ways there
are; as a command it runs more programs in all of them.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from conftest import has_adapter
from program_checks import WAYS, Job, check, fault, report, shrink, way
from random_programs import KINDS, Program, Step, draw

import shaderdsl as sd
from shaderdsl.ir.primitives import PRIMITIVES

COUNT, CHUNK = 500, 20
MORE = [name for name in WAYS if name != "cpu"]


@pytest.fixture(autouse=True)
def restored():
    yield
    sd.use_device("cpu")


@pytest.mark.parametrize("first", range(0, COUNT, CHUNK))
def test_on_numpy(first):
    for seed in range(first, first + CHUNK):
        program = draw(seed)
        if check(program, ["cpu"]) is not None:
            pytest.fail(f"seed {seed}: {report(program, ['cpu'])}")


@pytest.mark.parametrize("first", range(0, COUNT, CHUNK))
def test_in_one_more_way(first):
    if not has_adapter():
        pytest.skip("no adapter")
    for seed in range(first, first + CHUNK, 5):
        ways = [MORE[seed // 5 % len(MORE)]]
        program = draw(seed)
        if check(program, ways) is not None:
            pytest.fail(f"seed {seed}: {report(program, ways)}")


# What runs in bulk found, cut down: the way in which it failed, and the program.
FOUND = [
    # a scatter whose values read many arrays: its links are one more
    (
        "portable",
        Program(
            31200,
            ((2, 2),),
            (
                Step("route", (0,), (4812, 33261, 53145, 52951)),
                Step("softmax", (1,), (57787, 36263, 31439, 14091)),
            ),
            (2, 1),
        ),
    ),
    # a product whose masks leave a tile nothing but the last, partial chunk of k
    (
        "gpu two-pass",
        Program(
            31346,
            ((33, 33), (1, 33)),
            (
                Step("route", (1,), (16001, 39124, 9169, 38269)),
                Step("attention", (0, 2), (50953, 55954, 22323, 17552)),
            ),
            (3,),
        ),
    ),
    # a sum of what does not depend on its axis, four elements at a time
    (
        "software",
        Program(
            seed=42680,
            shapes=((1, 1),),
            steps=(
                Step(kind="matmul", args=(0, 0), n=(17009, 30331, 8226, 13707)),
                Step(kind="take", args=(1,), n=(27470, 19596, 14478, 1950)),
                Step(kind="softmax", args=(2,), n=(19012, 7494, 1955, 36218)),
            ),
            outs=(3,),
        ),
    ),
    # the same of a product
    (
        "software",
        Program(
            seed=49927,
            shapes=((1, 1, 4, 1),),
            steps=(
                Step(kind="reduce", args=(0,), n=(64638, 50112, 8754, 8045)),
                Step(kind="route", args=(1,), n=(12781, 27955, 62228, 8610)),
                Step(kind="reduce", args=(2,), n=(5900, 46683, 11406, 43063)),
                Step(kind="outer", args=(1, 3), n=(19786, 40534, 13338, 34240)),
            ),
            outs=(4,),
        ),
    ),
    # pieces of products side by side, some of them in vec4s
    (
        "gpu drawn",
        Program(
            seed=43315,
            shapes=((16, 8, 16), (1, 1)),
            steps=(
                Step(kind="matmul", args=(0, 1), n=(7817, 41561, 47596, 58267)),
                Step(kind="attention", args=(2, 0), n=(64489, 63920, 29840, 40057)),
            ),
            outs=(3,),
        ),
    ),
    # a part of a body that loads too many arrays loads too many itself
    (
        "portable",
        Program(
            seed=44559,
            shapes=((1, 2),),
            steps=(
                Step(kind="binary", args=(0, 0), n=(10328, 20435, 22003, 47524)),
                Step(kind="take", args=(1,), n=(14492, 2072, 61304, 30992)),
                Step(kind="arg", args=(2,), n=(25732, 11816, 50110, 32359)),
                Step(kind="reduce", args=(3,), n=(25610, 2230, 24587, 52361)),
                Step(kind="reduce", args=(4,), n=(12619, 48885, 40066, 38875)),
            ),
            outs=(5, 4),
        ),
    ),
    # the same with attention
    (
        "inlined",
        Program(
            seed=45020,
            shapes=((1, 2),),
            steps=(
                Step(kind="attention", args=(0, 0), n=(61699, 23336, 59833, 24756)),
                Step(kind="slice", args=(1,), n=(55179, 46837, 57086, 58076)),
                Step(kind="route", args=(1,), n=(65254, 22341, 18293, 5302)),
                Step(kind="attention", args=(3, 2), n=(25533, 51971, 40482, 59356)),
                Step(kind="normal", args=(4,), n=(43419, 14766, 7761, 9316)),
            ),
            outs=(5, 4),
        ),
    ),
    # a tile with fewer words than threads
    (
        "gpu drawn",
        Program(
            seed=49040,
            shapes=((16, 16, 16),),
            steps=(Step(kind="matmul", args=(0, 0), n=(5218, 49333, 16331, 47301)),),
            outs=(1,),
        ),
    ),
    # sums that are equal: which one is greater is up to the order of addition
    (
        "gpu",
        Program(
            seed=41698,
            shapes=((33, 2),),
            steps=(
                Step(kind="pad", args=(0,), n=(10659, 14992, 38185, 54965)),
                Step(kind="cumsum", args=(1,), n=(18210, 52059, 4684, 9159)),
                Step(kind="arg", args=(2,), n=(21910, 4693, 20053, 16993)),
            ),
            outs=(3,),
        ),
    ),
    # a sum in one pass whose only reader is a map that is a result
    (
        "portable",
        Program(
            60051,
            ((2, 2), (2, 2, 2), (2, 1, 1)),
            (
                Step("matmul", (1, 0), (60896, 42221, 10582, 19002)),
                Step("softmax", (3,), (14748, 39666, 20617, 9104)),
                Step("view", (2,), (53305, 32582, 4271, 59766)),
                Step("binary", (5, 4), (46252, 30446, 54015, 52312)),
            ),
            (6,),
        ),
    ),
    # divisors that are vec4s of an outer loop
    (
        "gpu",
        Program(
            60010,
            ((12, 12),),
            (Step("softmax", (0,), (12532, 24718, 58414, 13124)),),
            (1,),
        ),
    ),
    # quotients beside their maximum: divided in one kernel, and in another multiplied
    # with the inverse of a divisor that many share
    (
        "gpu",
        Program(
            seed=910017,
            shapes=((2, 2, 3, 1, 3),),
            steps=(
                Step(kind="attention", args=(0, 0), n=(48233, 9121, 9137, 62941)),
                Step(kind="reduce", args=(1,), n=(35737, 2786, 44697, 53780)),
            ),
            outs=(2,),
        ),
    ),
    # f32 cannot hold the product, so its derivative is NaN
    (
        "cpu",
        Program(
            seed=43877,
            shapes=((5, 5, 3, 5, 1, 3),),
            steps=(
                Step(kind="softmax", args=(0,), n=(62446, 1426, 4700, 4047)),
                Step(kind="reduce", args=(1,), n=(12172, 62069, 52412, 23713)),
            ),
            outs=(2,),
        ),
    ),
]


@pytest.mark.parametrize(
    ("name", "program"), FOUND, ids=lambda x: getattr(x, "seed", x)
)
def test_found(name, program):
    if not has_adapter():
        pytest.skip("no adapter")
    assert check(program, [name]) is None


def test_what_f32_cannot_hold_is_infinite(monkeypatch):
    job = Job(Program(0, ((2, 40),), (Step("unary", (0,), (1,) * 4),), (1,)))
    job.expected = [np.full_like(x, -1e68) for x in job.expected]
    got = [np.full(x.shape, -np.inf, np.float32) for x in job.expected]
    monkeypatch.setattr(job, "run", lambda graph: got)
    assert fault(job, "cpu") is None
    job.expected = [-x for x in job.expected]
    assert "off by" in fault(job, "cpu")


def test_every_kind_of_step_and_schedule_is_met():
    kinds, ranks, archetypes, most = set(), set(), set(), 0
    for seed in range(0, COUNT, 5):
        program = draw(seed + seed // 5 % 5)
        kinds |= {s.kind for s in program.steps}
        ranks |= {len(s) for s in program.shapes}
        most = max(most, len(program.shapes))
        low = sd.lower(program, *program.inputs())
        archetypes |= {k.archetype for k in low.kernels}
    assert kinds == set(KINDS)
    assert ranks == set(range(7)) and most == 40
    assert {"map", "row", "column", "contract", "scan", "online"} <= archetypes
    # The adjoint of a gather.
    job = Job(next(p for p in map(draw, range(COUNT)) if p.steps[-1:] and
                   p.steps[-1].kind == "take"))  # fmt: skip
    assert job.wrt


def test_a_program_is_the_same_each_time():
    assert draw(7) == draw(7) and draw(7) != draw(8)
    a, b = draw(11).inputs(), draw(11).inputs()
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)
    assert eval(repr(draw(5))) == draw(5)


def test_what_is_wrong_is_found_and_cut_down(monkeypatch):
    """tanh made wrong on the device alone."""
    row = PRIMITIVES["tanh"]
    wrong = dataclasses.replace(
        row, numpy=lambda x: np.tanh(x) * (1 + 1e-2 * (x.dtype == np.float32))
    )
    monkeypatch.setitem(PRIMITIVES, "tanh", wrong)
    sine, tanh = Step("unary", (0,), (0,) * 4), Step("unary", (2,), (1,) * 4)
    program = Program(0, ((3, 4), (4,)), (sine, tanh, Step("outer", (3, 1), ())), (4,))
    assert "off by" in check(program, ["cpu"])
    small = shrink(program, lambda p: check(p, ["cpu"]))
    assert small == Program(0, ((1, 1),), (Step("unary", (0,), (1,) * 4),), (1,))
    assert repr(small) in report(program, ["cpu"])


def test_cutting_down_keeps_what_matters():
    def wrong(p):
        kinds = [s.kind for s in p.steps]
        return "matmul" in kinds and any(d >= 4 for s in p.shapes for d in s)

    found = [p for p in map(draw, range(200)) if wrong(p)]
    assert len(found) > 10
    for p in found:
        small = shrink(p, wrong)
        assert len(small.steps) == len(small.outs) == 1 and len(small.shapes) <= 3
        sd.lower(small, *small.inputs())  # still a program


def test_a_wrong_derivative_is_found(monkeypatch):
    row = PRIMITIVES["sin"]
    wrong = dataclasses.replace(row, pull=lambda g, a, y: (-g * sd_cos(a[0]),))
    monkeypatch.setitem(PRIMITIVES, "sin", wrong)
    program = next(p for p in map(draw, range(100)) if check(p, ["cpu"]))
    assert "derived slope" in check(program, ["cpu"])


def sd_cos(x):
    from shaderdsl.ir.expr import apply

    return apply("cos", x)


def test_ways_put_the_device_back():
    if not has_adapter():
        pytest.skip("no adapter")
    device = sd.use_device("wgpu", limits="portable")
    before = device.target
    with way("gpu drawn", 1):
        assert device.target.family == "gpu" and device.target.choice.seed == 1
    assert device.target is before
    assert fault(Job(draw(2)), "gpu drawn") is None


#: Programs that failed once in ways other than those that are drawn for them.
FOUND = [(9100034, "cut"), (9100034, "gpu cut"), (910017, "gpu")]


@pytest.mark.parametrize(("seed", "name"), FOUND)
def test_what_was_found(seed, name):
    if not has_adapter():
        pytest.skip("no adapter")
    assert check(draw(seed), [name]) is None
