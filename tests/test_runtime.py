"""The runtime with kernels written by hand: values, memory, failures, threads."""

from __future__ import annotations

import gc
import itertools
import json
import math
import multiprocessing
import os
import subprocess
import sys
import threading
from dataclasses import dataclass

import numpy as np
import pytest

import shaderdsl as sd
from shaderdsl import errors
from shaderdsl.codegen.program import Binding, Kernel, Param, Program, Scratch
from shaderdsl.codegen.target import PORTABLE, Limits
from shaderdsl.runtime import buffers, current, devices, plan, profile, use_device
from shaderdsl.runtime.diskcache import DiskCache

ITEM = {"f32": 4, "i32": 4, "u32": 4, "bool": 4, "f16": 2}


@dataclass(frozen=True, eq=False)
class FakeStage:
    """What the runtime needs to know of a stage."""

    name: str
    shape: tuple[int, ...]
    kind: str = "map"
    dtype: str = "f32"

    @property
    def ext(self):
        return self.shape

    @property
    def size(self):
        return math.prod(self.shape)

    @property
    def nbytes(self):
        return self.size * ITEM[self.dtype]


def given(name, *shape, dtype="f32"):
    return FakeStage(name, shape, "input", dtype)


def kernel(body, reads, writes, *, params=(), name="k", rw=(), groups=None):
    """An elementwise kernel; ``body`` may use ``i`` and the tensors' names."""
    count = max([t.size for t in (*writes, *rw)], default=0)
    bindings = [Binding(t, "read") for t in reads]
    bindings += [Binding(t, "read_write") for t in (*writes, *rw)]
    types = {"f32": "f32", "i32": "i32", "u32": "u32", "bool": "u32"}
    text = ""
    for n, b in enumerate(bindings):
        t = b.tensor
        text += (
            f"@group(0) @binding({n}) var<storage, {b.access}> {t.name}: "
            f"array<{types[t.dtype]}>;\n"
        )
    if params:
        words = -(-len(params) // 4)
        text += (
            f"@group(0) @binding({len(bindings)}) var<uniform> p: "
            f"array<vec4<u32>, {words}>;\n"
        )
    text += (
        "@compute @workgroup_size(64)\n"
        "fn main(@builtin(global_invocation_id) id: vec3<u32>) {\n"
        f"  let i = id.x;\n  if (i >= {count}u) {{ return; }}\n  {body}\n}}\n"
    )
    return Kernel(
        name=name,
        archetype="map",
        wgsl=text,
        workgroup_size=(64, 1, 1),
        workgroups=groups or (-(-count // 64), 1, 1),
        bindings=tuple(bindings),
        params=tuple(params),
        members=(),
        writes=tuple(w for w in writes if isinstance(w, FakeStage)),
        flops=count,
        bytes=sum(b.tensor.nbytes for b in bindings),
        reason="by hand",
    )


def program(kernels, inputs, outputs, donated=(), scalars=()):
    return Program(
        tuple(kernels),
        tuple(inputs),
        tuple(outputs),
        frozenset(donated),
        tuple(scalars),
        (),
    )


def doubled(n=1000):
    x, y = given("x", n), FakeStage("y", (n,))
    return program([kernel("y[i] = 2.0 * x[i];", [x], [y])], [x], [y])


@pytest.fixture
def device():
    if not any(d.spec.startswith("wgpu") for d in devices()):
        pytest.skip("no adapter")
    return use_device("wgpu")


@pytest.fixture
def fresh():
    """A device of its own for tests that break it."""
    if not devices()[0].spec.startswith("wgpu"):
        pytest.skip("no adapter")
    from shaderdsl.runtime import adapters, wgpu_device

    adapter, info = adapters.found()[0]
    device = wgpu_device.WgpuDevice(adapter, info, "adapter")
    yield device
    device.destroy()


# Values


def test_values(device):
    run = device.build(doubled())
    x = np.arange(1000, dtype=np.float32)
    (y,) = run([device.upload(x, "f32")])
    np.testing.assert_array_equal(device.download(y, (10, 100), "f32").ravel(), 2 * x)


@pytest.mark.parametrize("dtype", ["f32", "f16", "i32", "u32", "bool"])
@pytest.mark.parametrize("n", [0, 1, 3, 4, 257])
def test_round_trip(device, dtype, n):
    x = np.arange(n).reshape(n, 1) % 2
    buffer = device.upload(x, dtype)
    assert buffer.nbytes == n * ITEM[dtype]
    back = device.download(buffer, (n, 1), dtype)
    np.testing.assert_array_equal(back, x)
    assert back.dtype == {"f32": "f4", "f16": "f2", "i32": "i4", "u32": "u4"}.get(
        dtype, "?"
    )


def test_noncontiguous_and_readonly_upload(device):
    x = np.arange(24, dtype=np.float64).reshape(4, 6)[::2, ::-1]
    x.flags.writeable = False
    back = device.download(device.upload(x, "f32"), x.shape, "f32")
    np.testing.assert_array_equal(back, x)


def test_what_is_fetched_is_as_it_was(device, monkeypatch):
    """Later calls overwrite the memory, and are not waited for."""
    from shaderdsl.runtime import library, wgpu_device

    x = np.arange(5001, dtype=np.float32)
    buffer = device.upload(x, "f32")
    waits = [device.fetch(buffer, x.shape, "f32")]
    monkeypatch.setattr(wgpu_device, "CHUNK_BYTES", 4096)  # more than one
    waits.append(device.fetch(buffer, x.shape, "f32"))
    advance = sd.compile(lambda x: x + 1.0, donate="x")
    sd.use_device(device)
    y = sd.Array.of_buffer(buffer, x.shape, "f32")
    read = y.fetch()
    y = advance(advance(y))
    for wait in waits:
        np.testing.assert_array_equal(wait(), x)
    np.testing.assert_array_equal(y.numpy(), x + 2)
    np.testing.assert_array_equal(read(), x)
    if device.kind == "wgpu":  # what nobody waits for is forgotten
        device.fetch(y.buffer(), x.shape, "f32")
        del y, waits, wait, read
        gc.collect()
        assert not library.chosen()._statuses


def test_chunked_transfers(device, monkeypatch):
    from shaderdsl.runtime import wgpu_device

    monkeypatch.setattr(wgpu_device, "CHUNK_BYTES", 4096)
    x = np.arange(5001, dtype=np.float32)
    back = device.download(device.upload(x, "f32"), x.shape, "f32")
    np.testing.assert_array_equal(back, x)
    half = x[:3001].astype(np.float16)
    back = device.download(device.upload(half, "f16"), half.shape, "f16")
    np.testing.assert_array_equal(back, half)


def test_params_and_scalars(device):
    n = 100
    x, y, z = given("x", n), FakeStage("y", (n,)), FakeStage("z", (n,))
    scale = [Param(("scalar", "s"), "f32"), Param(3, "u32"), Param(-2, "i32")]
    body = (
        "y[i] = x[i] * bitcast<f32>(p[0].x) + f32(p[0].y) + f32(bitcast<i32>(p[0].z));"
    )
    again = [Param(n, "u32")] * 4 + [Param(("scalar", "k"), "i32")]
    run = device.build(
        program(
            [
                kernel(body, [x], [y], params=scale),
                kernel(
                    "z[i] = y[i] + f32(bitcast<i32>(p[1].x));", [y], [z], params=again
                ),
            ],
            [x],
            [z],
            scalars=[("s", "f32"), ("k", "i32")],
        )
    )
    data = np.linspace(-1, 1, n, dtype=np.float32)
    inputs = [device.upload(data, "f32")]
    with profile() as p:
        # Launched back to back: each must see its own numbers.
        outs = [run(inputs, {"s": s, "k": k}) for s, k in [(2.0, -7), (0.5, 9)] * 3]
    for (out,), (s, k) in zip(outs, [(2.0, -7), (0.5, 9)] * 3):
        want = data * np.float32(s) + 1 + k
        np.testing.assert_allclose(device.download(out, (n,), "f32"), want, rtol=1e-6)
    assert (p.dispatches, p.compiled) == (12, 0)
    with pytest.raises(errors.DTypeError, match="'s' was not given"):
        run(inputs, {"k": 1})
    with pytest.raises(errors.DTypeError, match="does not fit i32"):
        run(inputs, {"s": 1.0, "k": 1 << 31})


def test_equal_parameters_are_stored_once():
    x, y = given("x", 4), FakeStage("y", (4,))
    one, other = [Param(1, "u32")], [Param(1.0, "f32")]
    kernels = [kernel("", [x], [y], params=ps) for ps in (one, other, one, ())]
    block = plan.pack_params(tuple(kernels), 256)
    assert block.ranges == ((0, 16), (256, 16), (0, 16), None)


def test_zero_size(device):
    x, y, total = given("x", 0), FakeStage("y", (0, 3)), FakeStage("total", (1,))
    run = device.build(
        program([kernel("total[i] = 0.0;", [x], [total])], [x], [y, total])
    )
    y_out, total_out = run([device.upload(np.zeros(0), "f32")])
    assert device.download(y_out, (0, 3), "f32").shape == (0, 3)
    assert device.download(total_out, (1,), "f32").tolist() == [0.0]


def test_no_kernels(device):
    x = given("x", 3)
    run = device.build(program([], [x], [x, x]))
    source = device.upload(np.arange(3), "f32")
    first, second = run([source])
    assert first.key == second.key == source.key
    np.testing.assert_array_equal(device.download(second, (3,), "f32"), [0, 1, 2])


# Memory


def chain(n, length, donated=(), outputs=1):
    """x -> t1 -> t2 … each one more than the one before."""
    tensors = [given("t0", n)] + [
        FakeStage(f"t{i}", (n,)) for i in range(1, length + 1)
    ]
    kernels = [
        kernel(f"{b.name}[i] = {a.name}[i] + 1.0;", [a], [b])
        for a, b in itertools.pairwise(tensors)
    ]
    return program(kernels, tensors[:1], tensors[-outputs:], donated)


def test_liveness_reuses_memory(device):
    prog = chain(1 << 16, 12)
    kinds = [s.kind for s in plan.plan_memory(prog, frozenset()).slots]
    assert len(kinds) == 3  # The input, the output and one temporary in turn.
    run, source = device.build(prog), device.upload(np.zeros(1 << 16), "f32")
    before = device.pool.live_bytes
    (out,) = run([source])
    assert device.pool.live_bytes - before == 1 << 18
    np.testing.assert_array_equal(device.download(out, (1 << 16,), "f32"), 12)


def test_lifetimes_never_overlap():
    rng = np.random.default_rng(0)
    for _ in range(100):
        tensors = [given(f"a{i}", int(rng.integers(1, 99))) for i in range(3)]
        inputs, kernels = list(tensors), []
        for i in range(20):
            reads = list(rng.choice(len(tensors), 3, replace=False))
            made = FakeStage(f"b{i}", (int(rng.integers(1, 99)),))
            kernels.append(kernel("", [tensors[r] for r in reads], [made]))
            tensors.append(made)
        outputs = [tensors[i] for i in rng.choice(len(tensors), 4, replace=False)]
        prog = program(kernels, inputs, outputs, donated=(0, 2))
        memory = plan.plan_memory(prog, prog.donated)
        for slot in memory.slots:
            spans = sorted(slot.busy)
            assert all(a[1] < b[0] for a, b in itertools.pairwise(spans))
        for number, k in enumerate(kernels):
            assert len(set(memory.bindings[number])) == len(k.bindings)
            for (slot, _), b in zip(memory.bindings[number], k.bindings):
                have = buffers.size_class(memory.slots[slot].nbytes)
                assert have >= b.tensor.nbytes


def test_donated_memory_is_reused(device):
    prog = chain(1 << 16, 3, donated=(0,))
    run, source = device.build(prog), device.upload(np.ones(1 << 16), "f32")
    key = source.key
    (out,) = run([source])
    assert out.key == key
    np.testing.assert_array_equal(device.download(out, (1 << 16,), "f32"), 4)
    with pytest.raises(errors.DonatedError):
        run([source])
    with pytest.raises(errors.DonatedError):
        device.download(source, (1 << 16,), "f32")


def test_shared_memory_is_not_overwritten(device):
    prog = chain(64, 3, donated=(0,))
    run, source = device.build(prog), device.upload(np.ones(64), "f32")
    other = source.alias()
    (out,) = run([source])
    assert out.key != other.key
    np.testing.assert_array_equal(device.download(other, (64,), "f32"), 1)
    np.testing.assert_array_equal(device.download(out, (64,), "f32"), 4)


def test_one_buffer_given_twice(device):
    x, y = given("x", 64), given("y", 64)
    t, out = FakeStage("t", (64,)), FakeStage("o", (64,))
    run = device.build(
        program(
            [
                kernel("t[i] = x[i] + 1.0;", [x], [t]),
                kernel("o[i] = t[i] + y[i];", [t, y], [out]),
            ],
            [x, y],
            [out],
            donated=(0,),
        )
    )
    source = device.upload(np.full(64, 5), "f32")
    (result,) = run([source, source])
    np.testing.assert_array_equal(device.download(result, (64,), "f32"), 11)


def test_donated_identity_is_handed_over(device):
    x = given("x", 8)
    run = device.build(program([], [x], [x], donated=(0,)))
    source = device.upload(np.arange(8), "f32")
    (out,) = run([source])
    assert source.consumed
    assert not out.allocation.shared
    np.testing.assert_array_equal(device.download(out, (8,), "f32"), np.arange(8))


def test_scratch_and_in_place(device):
    x, y = given("x", 64), FakeStage("y", (64,))
    s = Scratch("s", "f32", 64)
    run = device.build(
        program(
            [
                kernel("s[i] = x[i] + 1.0;", [x], [s]),
                kernel("s[i] = s[i] * 2.0;", [], [], rw=[s]),
                kernel("y[i] = s[i];", [s], [y]),
            ],
            [x],
            [y],
        )
    )
    (out,) = run([device.upload(np.arange(64), "f32")])
    want = 2.0 * (np.arange(64) + 1)
    np.testing.assert_array_equal(device.download(out, (64,), "f32"), want)


def test_views(device):
    data = np.arange(256, dtype=np.float32)
    whole = device.upload(data, "f32")
    part = whole.view(256, 400)
    np.testing.assert_array_equal(device.download(part, (100,), "f32"), data[64:164])
    (out,) = device.build(doubled(100))([part])
    np.testing.assert_array_equal(device.download(out, (100,), "f32"), 2 * data[64:164])
    with pytest.raises(errors.DeviceError, match="no multiple"):
        whole.view(4, 4)
    with pytest.raises(errors.DeviceError, match="leave a buffer"):
        whole.view(256, 1024)


def test_freed_buffers_return(device):
    run, source = device.build(doubled(5000)), device.upload(np.ones(5000), "f32")
    gc.collect()
    before = device.pool.live_bytes
    keys = {run([source])[0].key for _ in range(50)}
    assert device.pool.live_bytes == before
    assert len(keys) <= 2


def test_size_classes():
    for n in [0, 1, 16, 17, 1000, 4096, 12345, (1 << 20) + 1, 1 << 27]:
        have = buffers.size_class(n)
        assert have >= max(n, 16) and have % 16 == 0
        assert have <= max(n * 1.125 + 1, n + 16)
        assert buffers.size_class(have) == have


# Limits and failures


def test_out_of_memory(fresh):
    fresh.pool.limit = 1 << 20
    kept = fresh.upload(np.zeros(1 << 17), "f32")
    with pytest.raises(errors.OutOfMemoryError) as caught:
        fresh.upload(np.zeros(1 << 18), "f32")
    text = str(caught.value)
    assert "1,048,576 B were asked for" in text
    assert "524,288 B are in use" in text
    assert "the limit is 1,048,576 B" in text
    assert isinstance(caught.value, MemoryError)
    del kept
    fresh.upload(np.zeros(1 << 18), "f32")  # The device goes on.


def test_free_memory_is_let_go_before_giving_up(fresh):
    fresh.pool.limit = 1 << 20
    for n in (1 << 16, 1 << 17, 3 << 16, 1 << 18):
        fresh.upload(np.zeros(n), "f32")
    assert fresh.pool.free_bytes <= 1 << 20


def test_limits_are_refused_before_launch(device):
    limit = device.target.limits.max_binding_bytes
    with pytest.raises(errors.LimitError, match=f"{limit:,}"):
        device.build(doubled(limit // 4 + 1))
    with pytest.raises(errors.LimitError, match="largest buffer"):
        size = device.target.limits.max_buffer_bytes + 1
        device.upload(np.broadcast_to(np.float32(0), (size // 4 + 1,)), "f32")
    x, y = given("x", 4), FakeStage("y", (4,))
    many = kernel("y[i] = x[i];", [x], [y], groups=(70_000, 1, 1))
    with pytest.raises(errors.LimitError, match=r"70,000 .* allows 65,535"):
        device.build(program([many], [x], [y]))


def test_portable_limits():
    if len(devices()) < 2:
        pytest.skip("no adapter")
    device = use_device("wgpu", limits="portable")
    try:
        assert device.target.limits == Limits() == PORTABLE.limits
        assert not device.target.features.f16
        assert device.gpu.limits["max-storage-buffers-per-shader-stage"] == 8
        ins = [given(f"x{i}", 4) for i in range(8)]
        y = FakeStage("y", (4,))
        body = "y[i] = " + " + ".join(f"{t.name}[i]" for t in ins) + ";"
        prog = program([kernel(body, ins, [y])], ins, [y])
        with pytest.raises(errors.LimitError, match="9 storage buffers"):
            device.build(prog)
        (out,) = device.build(doubled(10))([device.upload(np.ones(10), "f32")])
        np.testing.assert_array_equal(device.download(out, (10,), "f32"), 2)
        run = use_device("wgpu").build(prog)
        again = current()
        (out,) = run([again.upload(np.full(4, i), "f32") for i in range(8)])
        np.testing.assert_array_equal(again.download(out, (4,), "f32"), 28)
    finally:
        use_device("wgpu")


def test_broken_kernels_are_our_fault(device):
    x, y = given("x", 4), FakeStage("y", (4,))
    with pytest.raises(errors.CompilerError) as caught:
        device.build(
            program([kernel("y[i] = nonsense;", [x], [y], name="bad")], [x], [y])
        )
    text = str(caught.value)
    assert "fault of shaderdsl" in text and "kernel bad" in text
    assert "   7 |   y[i] = nonsense;" in text
    with pytest.raises(errors.CompilerError, match="no kernel writes the output y"):
        device.build(program([], [x], [y]))
    z = FakeStage("z", (4,))
    with pytest.raises(errors.CompilerError, match="reads y before"):
        device.build(program([kernel("z[i] = y[i];", [y], [z])], [x], [z]))
    with pytest.raises(errors.CompilerError, match="not donated"):
        device.build(program([kernel("x[i] = 1.0;", [], [x])], [x], [x]))
    run = device.build(doubled(4))
    with pytest.raises(errors.CompilerError):
        run([])
    with pytest.raises(errors.CompilerError):
        run([device.upload(np.zeros(5), "f32")])


def test_lost_device(fresh):
    run, source = fresh.build(doubled(10)), fresh.upload(np.ones(10), "f32")
    (out,) = run([source])
    fresh.destroy()
    fresh.destroy()
    for use in (
        lambda: fresh.upload(np.ones(3), "f32"),
        lambda: fresh.download(out, (10,), "f32"),
        lambda: run([source]),
        lambda: fresh.build(doubled(11)),
        fresh.synchronize,
    ):
        with pytest.raises(errors.DeviceLostError):
            use()
    other = use_device("wgpu")
    with pytest.raises(errors.DeviceLostError):
        other.build(doubled(10))([source])
    (out,) = other.build(doubled(10))([other.upload(np.ones(10), "f32")])
    np.testing.assert_array_equal(other.download(out, (10,), "f32"), 2)


def test_loss_that_nobody_asked_for(fresh):
    run, source = fresh.build(doubled(10)), fresh.upload(np.ones(10), "f32")
    fresh.gpu.destroy()  # Behind the library's back, as a driver reset does.
    for use in (
        lambda: run([source]),
        lambda: fresh.upload(np.ones(3), "f32"),
        lambda: fresh.download(source, (10,), "f32"),
    ):
        with pytest.raises(errors.DeviceLostError):
            use()


def test_devices_and_choice(device, monkeypatch):
    listed = devices()
    assert listed[-1].spec == "cpu" and listed[0].spec == "wgpu:0"
    assert use_device("wgpu:0") is device
    with pytest.raises(errors.NoAdapterError, match=r"wgpu:0 .*cpu"):
        use_device("wgpu:voodoo")
    with pytest.raises(errors.NoAdapterError):
        use_device("abacus")
    with pytest.raises(errors.DeviceError):
        use_device("wgpu", limits="none")
    cpu = use_device("cpu")
    assert cpu.kind == "cpu" and current() is cpu
    with pytest.raises(errors.DeviceError, match="lies on"):
        device.build(doubled(3))([cpu.upload(np.ones(3), "f32")])
    use_device(device)


def run_python(code, **env):
    full = {k: v for k, v in os.environ.items() if not k.startswith("SHADERDSL")}
    full.pop("XDG_RUNTIME_DIR", None)
    return subprocess.run(
        [sys.executable, "-c", code],
        env=full | env,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_without_wgpu():
    hide = "import sys; sys.modules['wgpu'] = None\n"
    code = hide + (
        "from shaderdsl.runtime import current, use_device, devices\n"
        "print(current().kind, use_device(None).kind, len(devices()))"
    )
    done = run_python(code)
    assert done.stdout.split() == ["cpu", "cpu", "1"]
    assert len(done.stderr.splitlines()) == 1 and "NumPy" in done.stderr
    done = run_python(code, SHADERDSL_EXPECT_ADAPTER="1")
    assert "NoAdapterError" in done.stderr
    done = run_python(code, SHADERDSL_DEVICE="wgpu")
    assert "NoAdapterError" in done.stderr


def test_cpu_never_imports_wgpu():
    code = (
        "import sys, numpy as np\n"
        "from shaderdsl.runtime import current\n"
        "current().upload(np.ones(3), 'f32')\n"
        "print('wgpu' in sys.modules)"
    )
    done = run_python(code, SHADERDSL_DEVICE="cpu")
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_quiet_and_lazy(device):
    code = (
        "import sys\n"
        "from shaderdsl.runtime import current\n"
        "assert 'wgpu' not in sys.modules\n"
        "import numpy as np\n"
        "d = current()\n"
        "b = d.upload(np.ones(4), 'f32')\n"
        "print(d.kind, d.download(b, (4,), 'f32').sum())"
    )
    done = run_python(code)
    assert (done.stdout, done.stderr) == ("wgpu 4.0\n", "")


def _in_child(pipe):
    try:
        current().upload(np.ones(3), "f32")
        pipe.send("worked")
    except errors.DeviceError as error:
        pipe.send(str(error))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_fork_is_refused(device):
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=_in_child, args=(there,))
    child.start()
    assert here.poll(30)
    assert "fork" in here.recv()
    child.join(30)


# Threads and endurance


def test_threads(device):
    n = 64
    x, y, t = given("x", n), FakeStage("y", (n,)), FakeStage("t", (n,))
    run = device.build(
        program(
            [
                kernel(
                    "t[i] = x[i] + bitcast<f32>(p[0].x);",
                    [x],
                    [t],
                    params=[Param(("scalar", "s"), "f32")],
                ),
                kernel("y[i] = t[i] * 3.0;", [t], [y]),
            ],
            [x],
            [y],
            scalars=[("s", "f32")],
        )
    )
    wrong, failed = [], []

    def work(number):
        try:
            source = device.upload(np.full(n, number), "f32")
            for i in range(200):
                (out,) = run([source], {"s": float(i)})
                if i % 10 == 0:
                    got = device.download(out, (n,), "f32")
                    if not (got == 3.0 * (number + i)).all():
                        wrong.append((number, i, got[0]))
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and not wrong


def test_destroyed_under_threads(fresh):
    run, stop, wrong = fresh.build(doubled(64)), threading.Event(), []

    def work():
        try:
            while not stop.is_set():
                (out,) = run([fresh.upload(np.ones(64), "f32")])
                fresh.download(out, (64,), "f32")
        except errors.DeviceLostError:
            pass
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    threading.Event().wait(0.3)
    fresh.destroy()
    stop.set()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert not wrong


def test_threads_compile_each_text_once(fresh):
    x, y = given("x", 64), FakeStage("y", (64,))
    programs = [
        program([kernel(f"y[i] = x[i] + {k}.0;", [x], [y])], [x], [y]) for k in range(6)
    ]

    def work():
        for prog in programs:
            fresh.build(prog)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fresh.pipelines.compiled == 6


def resident():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
def test_memory_stays_flat(device):
    run, source = device.build(chain(4096, 3)), device.upload(np.ones(4096), "f32")
    for _ in range(300):
        (out,) = run([source])
    device.synchronize()
    before = resident()
    for _ in range(2000):
        (out,) = run([source])
    np.testing.assert_array_equal(device.download(out, (4096,), "f32"), 4)
    assert resident() - before < 16 << 20


# Profile


def test_profile_counts(device, tmp_path):
    run = device.build(chain(1000, 3))
    with profile() as p:
        source = device.upload(np.ones(1000), "f32")
        run([source])
        (out,) = run([source])
        device.download(out, (1000,), "f32")
        other = kernel("t1[i] = 3.5;", [], [FakeStage("t1", (8,))])
        device.build(program([other], [], [other.bindings[0].tensor]))
    run([source])
    assert (p.dispatches, p.compiled, p.uploads, p.downloads) == (6, 1, 1, 1)
    assert (p.upload_bytes, p.download_bytes) == (4000, 4000)
    assert p.peak_bytes >= 8000
    assert p.table().splitlines()[1].split()[:3] == ["k", "map", "6"]
    p.save(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert len(trace["traceEvents"]) == 6


def test_profile_times(device):
    if not device.target.features.timestamps:
        pytest.skip("no timestamps")
    run, source = (
        device.build(chain(1 << 18, 3)),
        device.upload(np.ones(1 << 18), "f32"),
    )
    with profile(timestamps=True) as p:
        (out,) = run([source])
    np.testing.assert_array_equal(device.download(out, (1 << 18,), "f32"), 4)
    assert len(p.events) == 3
    assert all(e.seconds is not None and 0 < e.seconds < 5 for e in p.events)
    assert p.table().splitlines()[1].split()[3] != "-"


# The device cpu


def by_definition():
    """x -> (a = 2x + s, b = sum of a's rows), with a kernel for each."""
    from shaderdsl.ir import expr as E
    from shaderdsl.ir import stage as S

    x = S.input_stage((3, 4), "f32", "x")
    body = S.whole(x) * 2.0 + E.scalar("s", "f32")
    a = S.map_stage((3, 4), body, "a")
    load = E.load(a, [E.index(0), E.index(1)])
    b = S.make_reduce("sum", load, [0], [1], (3, 4), "b").data
    kernels = [
        Kernel(
            stage.name,
            "map",
            stage.name,
            (1, 1, 1),
            (1, 1, 1),
            (Binding(source, "read"), Binding(stage, "read_write")),
            (),
            (stage,),
            (stage,),
            stage.size,
            stage.nbytes,
            "",
        )
        for source, stage in [(x, a), (a, b)]
    ]
    return x, a, b, kernels


def test_cpu_device(monkeypatch):
    cpu = use_device("cpu")
    try:
        assert current() is cpu and cpu.target.family == "cpu"
        x, a, b, kernels = by_definition()
        data = np.arange(12, dtype=np.float32).reshape(3, 4)
        for outputs in [(b,), (a, b, b), (b, x)]:
            run = cpu.build(
                program(kernels, [x], outputs, donated=(0,), scalars=[("s", "f32")])
            )
            with profile() as p:
                source = cpu.upload(data, "f32")
                results = run([source], {"s": 0.5})
                got = [
                    cpu.download(r, s.shape, "f32") for r, s in zip(results, outputs)
                ]
            want = {x: data, a: 2 * data + 0.5, b: (2 * data + 0.5).sum(1)}
            for g, stage in zip(got, outputs):
                np.testing.assert_array_equal(g, want[stage])
            assert (p.dispatches, p.uploads, p.downloads) == (2, 1, len(outputs))
            with pytest.raises(errors.DonatedError):
                run([source], {"s": 0.5})
        for dtype in ITEM:
            ones = np.ones((2, 2))
            back = cpu.download(cpu.upload(ones, dtype), (4,), dtype)
            np.testing.assert_array_equal(back, 1)
        with pytest.raises(errors.CompilerError, match="no kernel writes"):
            cpu.build(program([], [x], [b]))
        monkeypatch.setattr(cpu.pool, "limit", 100)
        with pytest.raises(errors.OutOfMemoryError, match="4,000 B were asked for"):
            cpu.upload(np.ones(1000), "f32")
        cpu.destroy()
        with pytest.raises(errors.DeviceLostError):
            cpu.upload(np.ones(3), "f32")
        assert use_device("cpu") is not cpu
    finally:
        use_device()


# Disk cache


def test_disk_cache(tmp_path):
    cache = DiskCache("wgsl", tmp_path)
    assert cache.get("a") is None
    cache.put("a", "text\r\nmore\n")
    assert DiskCache("wgsl", tmp_path).get("a") == "text\r\nmore\n"
    (entry,) = (tmp_path / "wgsl").iterdir()
    for damage in (b"", b"xxx", entry.read_bytes()[:-1], b"\xff\xfe"):
        entry.write_bytes(damage)
        assert cache.get("a") is None
    cache.put("a", "mended")
    assert cache.get("a") == "mended"
    blocked = tmp_path / "file"
    blocked.write_text("")
    DiskCache("wgsl", blocked).put("a", "b")  # Not a folder: ignored.
    assert DiskCache("wgsl", blocked).get("a") is None


def test_memory_of_a_cycle_comes_back_alive(device):
    class Node:
        pass

    for _ in range(3):
        node = Node()
        node.itself, node.buffer = node, device.upload(np.ones(999, np.float32), "f32")
        del node
        gc.collect()
        buffer = device.upload(np.full(999, 2, np.float32), "f32")
        assert device.download(buffer, (999,), "f32")[0] == 2
