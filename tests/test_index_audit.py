"""Kernels that go without a driver's checks: every index that they ever form is looked
at, those of values that are thrown away afterwards included.
"""

import dataclasses
import re

import numpy as np
import pytest
from test_tuning import WORKS, as_gpu, trials_of

import shaderdsl as sd
from shaderdsl import engine, ops, tuner
from shaderdsl.codegen.choice import Tuned
from shaderdsl.codegen.program import Binding, Program
from shaderdsl.codegen.schedule import IN_RANGE
from shaderdsl.ir.stage import input_stage
from shaderdsl.runtime import launch
from shaderdsl.runtime.indices import checked, rewritten


@pytest.fixture
def gpu():
    if not any(d.spec.startswith("wgpu") for d in sd.devices()):
        pytest.skip("no adapter")
    device = sd.use_device("wgpu")
    before = device.target
    device.target = dataclasses.replace(before, tuned=Tuned())
    yield device
    device.target = before
    sd.use_device("cpu")


def watched(kernel, flag):
    """The kernel with each index of an array compared with the array's length.

    ``flag`` becomes a binding after the others: how many were out of range.
    """
    n = len(kernel.bindings)
    text = kernel.wgsl.replace(
        f"@binding({n}) var<uniform>", f"@binding({n + 1}) var<uniform>"
    )
    text = rewritten(text, lambda i, n: f"in_range(u32({i}), {n})")
    head, main, body = text.partition("@compute")
    assert "in_range" in body
    helper = (
        f"@group(0) @binding({n}) var<storage, read_write> outside: "
        "array<atomic<u32>>;\n"
        "fn in_range(i: u32, n: u32) -> u32 {\n"
        "  if (i >= n) { atomicAdd(&outside[0], 1u); }\n"
        "  return min(i, n - 1u);\n}\n"
    )
    return dataclasses.replace(
        kernel,
        wgsl=head + helper + main + body,
        bindings=(*kernel.bindings, Binding(flag, "read_write")),
    )


def count_outside(device, trial, choice, spoil=lambda text: text):
    """Indices out of range in all kernels of a choice."""
    data = tuner.Data.draw(trial)
    program = trial.program(choice)
    kernels, flags = [], []
    for kernel in program.kernels:
        if kernel.in_range:
            flags.append(input_stage((4,), "u32", f"flag{len(flags)}"))
            kernel = watched(
                dataclasses.replace(kernel, wgsl=spoil(kernel.wgsl)), flags[-1]
            )
        kernels.append(kernel)
    program = Program(
        tuple(kernels),
        (*program.inputs, *flags),
        (*program.outputs, *flags),
        frozenset(range(len(program.inputs), len(program.inputs) + len(flags))),
        program.scalars,
        (),
    )
    zeros = [device.upload(np.zeros(4, np.uint32), "u32") for _ in flags]
    results = device.build(program)([*data.upload(device), *zeros], data.scalars)
    found = results[len(trial.outputs) :]
    return len(flags), sum(int(device.download(b, (4,), "u32")[0]) for b in found)


@pytest.mark.parametrize("family", ["software", "gpu"])
@pytest.mark.parametrize("work", [w for w in WORKS if w != "online"])
def test_every_index_is_in_range(work, family, gpu):
    if family == "gpu":
        as_gpu(gpu)
    function, shapes = WORKS[work]
    watched_kernels = 0
    for trial in trials_of(function, shapes):
        for choice in trial.choices[:: -max(1, len(trial.choices) // 2)]:
            kernels, outside = count_outside(gpu, trial, choice)
            watched_kernels += kernels
            assert outside == 0, choice
    assert watched_kernels


@sd.op("b (m h) k, b k n, n -> b n (m h)")
def transposed(a, b, c):
    return sd.silu(sd.sum(a * b, over="k") + c)


MORE = {
    "batched, transposed": (transposed, [(2, 21, 13), (2, 13, 37), (37,)], {"h": 3}),
    "gather": (lambda t, i: ops.embedding(t, i), [(40, 12), (9,)], {}),
    "norm": (ops.layer_norm, [(7, 90), (90,), (90,)], {}),
}


@pytest.mark.parametrize("family", ["software", "gpu"])
@pytest.mark.parametrize("work", MORE)
def test_every_index_of_other_forms_is_in_range(work, family, gpu):
    from shaderdsl.codegen.lower import trials
    from shaderdsl.tracing import Traced

    if family == "gpu":
        as_gpu(gpu)
    function, shapes, keywords = MORE[work]
    specs = [sd.spec("f32", *s) for s in shapes]
    if work == "gather":
        specs[1] = sd.spec("i32", *shapes[1])
    traced = Traced(lambda *xs: function(*xs, **keywords), specs, "lower")
    found = trials(traced.outs, gpu.target, inputs=traced.inputs)
    assert found
    for trial in found:
        kernels, outside = count_outside(gpu, trial, trial.choices[0])
        assert kernels and outside == 0


@pytest.mark.parametrize("family", ["software", "gpu"])
@pytest.mark.parametrize("d", [12, 7])
def test_every_index_of_a_scatter_is_in_range(family, gpu, d):
    """The ids are any numbers, those that are no places included."""
    from shaderdsl.codegen.lower import lower
    from shaderdsl.tracing import Traced

    if family == "gpu":
        as_gpu(gpu)

    def gradient(table, ids, dy):
        return sd.vjp(lambda x: ops.embedding(x, ids), table)[1](dy)

    specs = [sd.spec("f32", 40, d), sd.spec("i32", 9), sd.spec("f32", 9, d)]
    traced = Traced(gradient, specs, "lower")
    program = lower(traced.outs, gpu.target, inputs=traced.inputs)
    assert all(k.in_range for k in program.kernels)
    flags = [input_stage((4,), "u32", f"flag{i}") for i in range(2)]
    kernels = [watched(k, f) for k, f in zip(program.kernels, flags, strict=True)]
    program = Program(
        tuple(kernels),
        (*program.inputs, *flags),
        (*program.outputs, *flags),
        frozenset(range(len(program.inputs), len(program.inputs) + 2)),
        program.scalars,
        (),
    )
    places = np.array([3, 3, -1, 40, 2**31 - 1, -(2**31), 39, 0, 3], np.int32)
    drawn = np.random.default_rng(1).standard_normal((9, d)).astype(np.float32)
    by_name = {2: drawn, 1: places, 0: np.zeros((40, d), np.float32)}
    given = [
        gpu.upload(by_name[traced.inputs.index(s)], s.dtype)
        for s in program.inputs[: -len(flags)]
    ]
    zeros = [gpu.upload(np.zeros(4, np.uint32), "u32") for _ in flags]
    got, *found = gpu.build(program)([*given, *zeros], {})
    assert [int(gpu.download(b, (4,), "u32")[0]) for b in found] == [0, 0]
    want = np.zeros((40, d))
    whole = (places >= 0) & (places < 40)
    np.add.at(want, places[whole], drawn[whole].astype(np.float64))
    np.testing.assert_allclose(
        gpu.download(got, (40, d), "f32"), want, rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize(("t", "s", "whole"), [(40, 70, 0), (32, 64, 1)])
def test_every_index_of_a_stream_is_in_range(gpu, monkeypatch, t, s, whole):
    """Forward and all gradients, with and without the gradient of scores stored."""
    from shaderdsl.codegen import online_scores, online_stream_shape
    from shaderdsl.codegen.lower import trials
    from shaderdsl.tracing import Traced

    shapes = [online_stream_shape.Stream(16, 32, 8, 4, 8, 8, u, whole) for u in (4, 8)]
    monkeypatch.setattr(online_stream_shape, "STREAMS", tuple(shapes))
    monkeypatch.setattr(online_scores, "_ROWS", 16)
    as_gpu(gpu)
    limits = dataclasses.replace(gpu.target.limits, max_storage_buffers=11)
    gpu.target = dataclasses.replace(gpu.target, limits=limits, scores=whole << 20)

    def both(q, k, v, dy):
        y, pullback = sd.vjp(ops.attention, q, k, v)
        return y, *pullback(dy)

    specs = [sd.spec("f32", 1, h, n, 16) for h, n in ((2, t), (1, s), (1, s), (2, t))]
    traced = Traced(both, specs, "lower")
    watched_kernels = 0
    for trial in trials(traced.outs, gpu.target, inputs=traced.inputs):
        if trial.choices[0].schedule == "online_stream":
            kernels, outside = count_outside(gpu, trial, trial.choices[0])
            watched_kernels += kernels
            assert outside == 0
    assert watched_kernels


def test_the_watch_sees_what_is_out_of_range(gpu):
    function, shapes = WORKS["map"]
    (trial,) = trials_of(function, shapes)

    def spoil(text):
        return re.sub(r"if \(at >= .*?\) \{ return; \}", "", text)

    assert count_outside(gpu, trial, trial.choices[0], spoil)[1] > 0


def test_a_text_may_check_its_own_indices(gpu):
    """What runs where a library leaves all checks away."""
    function, shapes = WORKS["map"]
    (trial,) = trials_of(function, shapes)

    def spoil(text):
        return checked(re.sub(r"if \(at >= .*?\) \{ return; \}", "", text))

    assert count_outside(gpu, trial, trial.choices[0], spoil)[1] == 0


def test_unchecked_modules_give_the_same_and_can_be_turned_off(gpu, monkeypatch):
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((2, 33, 33), np.float32)
    made = []
    create = launch.unchecked_module

    def counted(*args):
        made.append(args[1])
        return create(*args)

    from shaderdsl.runtime import pipelines

    monkeypatch.setattr(pipelines, "unchecked_module", counted)

    def run():
        engine._plans.clear()
        gpu.pipelines._made.clear()
        return (sd.matmul(x, w) * 2.0).numpy()

    assert not gpu.pipelines.unchecked or gpu.target.family == "gpu"
    monkeypatch.setattr(gpu.pipelines, "unchecked", False)
    plain = run()
    assert not made
    monkeypatch.setattr(gpu.pipelines, "unchecked", launch.UNCHECKED)
    assert run().tobytes() == plain.tobytes()
    assert bool(made) == launch.UNCHECKED


def test_the_switch_is_read_when_a_device_is_opened(gpu, monkeypatch):
    from shaderdsl.runtime.pipelines import Pipelines

    as_gpu(gpu)
    monkeypatch.delenv("SHADERDSL_CHECKED", raising=False)
    assert Pipelines(gpu).unchecked == launch.UNCHECKED
    monkeypatch.setenv("SHADERDSL_CHECKED", "1")
    assert not Pipelines(gpu).unchecked


def test_kernels_of_other_archetypes_stay_checked(cpu):
    low = sd.lower(lambda x: sd.cumsum(x, axis=0), sd.spec("f32", 64))
    assert low.kernels
    for kernel in low.kernels:
        assert kernel.in_range == (kernel.archetype in IN_RANGE)
