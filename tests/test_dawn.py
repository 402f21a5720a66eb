"""The device ``dawn``: the same plans on wgpudawn, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import judges
import pytest

pytestmark = pytest.mark.skipif(not judges.available(), reason="no wgpudawn")

#: A Vulkan driver that Dawn takes and that browsers bring along.
BROWSERS = ("/usr/lib/chromium", "/usr/lib/chromium-browser")


def run(text, *, env=None):
    """A process on Dawn; its last line of output."""
    done = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        env=os.environ | drivers() | (env or {}),
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().rpartition("\n")[2]


@cache
def drivers() -> dict[str, str]:
    """The environment in which Dawn finds an adapter; asked for once."""
    found = "import wgpudawn; print(len(wgpudawn.gpu.enumerate_adapters_sync()))"
    options: list[dict[str, str]] = [{}]
    for folder in BROWSERS:
        icd = Path(folder) / "vk_swiftshader_icd.json"
        if icd.exists():
            options.append({"VK_DRIVER_FILES": str(icd), "VK_ICD_FILENAMES": str(icd)})
    for env in options:
        done = subprocess.run(
            [sys.executable, "-c", found],
            capture_output=True,
            text=True,
            env=os.environ | env,
        )
        if done.stdout.strip().rpartition("\n")[2].isdigit() and not (
            done.stdout.strip().endswith("0")
        ):
            return env
    pytest.skip("Dawn finds no adapter")


WORK = """
import json, sys
import numpy as np
import shaderdsl as sd
from shaderdsl import ops
if {gpu}:  # with a GPU's schedules, and without the library's checks
    from shaderdsl.runtime import library
    library.choose("dawn")
    from shaderdsl.runtime import adapters
    adapters._KINDS["CPU"] = "discrete"
device = sd.use_device("dawn")
assert device.unchecked == (device.target.family == "gpu")
rng = np.random.default_rng(0)
def draw(*shape, dtype="float32"):
    return rng.standard_normal(shape).astype(dtype)
worst = {{}}
def compare(name, got, want, tolerance):
    got = np.asarray(got.numpy(), np.float64)
    error = np.abs(got - want).max() / np.abs(want).max()
    worst[name] = float(error / tolerance)
product = sd.op("m k, k n -> m n")(lambda x, w: sd.sum(x * w, over="k"))
for m, k, n, dtype in ((33, 65, 40, "float32"), (64, 64, 48, "float16"),
                       (130, 20, 36, "float16"), (1, 64, 70, "float16")):
    x, w, g = draw(m, k, dtype=dtype), draw(k, n, dtype=dtype), draw(m, n, dtype=dtype)
    y, pull = sd.vjp(product, sd.array(x), sd.array(w))
    dx, dw = pull(sd.array(g))
    x, w, g = (a.astype(np.float64) for a in (x, w, g))
    loose = 1e-5 if dtype == "float32" else 1e-3
    compare(f"product {{m}} {{k}} {{n}} {{dtype}}", y, x @ w, loose)
    compare(f"dx {{m}} {{k}} {{n}} {{dtype}}", dx, g @ w.T, loose)
    compare(f"dw {{m}} {{k}} {{n}} {{dtype}}", dw, x.T @ g, loose)
x = draw(9, 700)
e = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
compare("softmax", ops.softmax(sd.array(x)), e / e.sum(1, keepdims=True), 1e-5)
q, k, v = (draw(1, 2, 33, 16) for _ in range(3))
s = np.einsum("bhqd,bhkd->bhqk", q.astype(np.float64), k) / 4
s = np.where(np.tri(33, dtype=bool), s, -np.inf)
p = np.exp(s - s.max(-1, keepdims=True))
want = p / p.sum(-1, keepdims=True) @ v
compare("attention", ops.attention(*map(sd.array, (q, k, v)), causal=True), want, 1e-5)
x = draw(7, 300)
compare("running sum", sd.cumsum(sd.array(x), axis=1), np.cumsum(x, 1, float), 1e-5)
table, ids = draw(40, 12), rng.integers(0, 40, 90).astype(np.int32)
y, pull = sd.vjp(lambda t: ops.embedding(t, sd.array(ids)), sd.array(table))
want = np.zeros((40, 12))
np.add.at(want, ids, 1.0)
dt = pull(sd.array(np.ones((90, 12), np.float32)))
compare("embedding", dt, want, 1e-5)
x = sd.array(draw(1 << 12))
for _ in range(200):  # more calls than are in flight
    x = x * 1.0
with sd.profile(timestamps=True) as profile:
    x = x + 1.0
    x.numpy()
seconds = [e.seconds for e in profile.events]
print(json.dumps([worst, device.info.spec, [s is None or 0 <= s < 1 for s in seconds]]))
"""


@pytest.mark.parametrize("gpu", [False, True])
def test_plans_run(gpu):
    """With the schedules of the adapter's own family, and with those of GPUs."""
    worst, spec, times = json.loads(run(WORK.format(gpu=gpu)))
    assert spec == "dawn:0"
    assert len(worst) == 16
    wrong = {name: error for name, error in worst.items() if not error < 1}
    assert not wrong
    assert times and all(times)


def test_named_by_the_environment():
    text = (
        "import shaderdsl as sd; sd.array([1.0]); d = sd.runtime.current();"
        "print(d.info.spec, [x.spec for x in sd.devices()][0], 'wgpudawn' in d.driver)"
    )
    line = run(text, env={"SHADERDSL_DEVICE": "dawn"})
    assert line == "dawn:0 dawn:0 True"


def test_a_device_again():
    """An adapter of Dawn's gives one device; with other limits it is asked anew."""
    text = """
import numpy as np, shaderdsl as sd
a = sd.use_device("dawn")
assert sd.use_device("dawn") is a
b = sd.use_device("dawn:0", limits="portable")
assert b is not a and not b.target.features.matrix
assert (sd.array([1.0, 2.0]) + 1.0).numpy().tolist() == [2.0, 3.0]
a.destroy()
c = sd.use_device("dawn")
assert c is not a
print((sd.array([1.0]) * 3.0).numpy().tolist())
"""
    assert run(text) == "[3.0]"


@pytest.mark.parametrize(("first", "then"), [("wgpu", "dawn"), ("dawn", "wgpu")])
def test_one_library_a_process(first, then):
    text = f"""
import shaderdsl as sd
try:
    sd.use_device({first!r})
except sd.errors.NoAdapterError:
    pass
try:
    sd.use_device({then!r})
except sd.errors.DeviceError as error:
    print(type(error).__name__, "|", error.message, "|", error.cure)
"""
    kind, message, cure = run(text).split(" | ")
    assert kind == "DeviceError"
    assert "runs on" in message and "already" in message
    assert f"SHADERDSL_DEVICE={then}" in cure


def test_not_installed():
    text = """
import sys
sys.modules["wgpudawn"] = None
import shaderdsl as sd
try:
    sd.use_device("dawn")
except sd.errors.NoAdapterError as error:
    print(error.message, "|", error.cure)
"""
    message, cure = run(text).split(" | ")
    assert "wgpudawn cannot be imported" in message
    assert cure == "pip install 'shaderdsl[dawn]'"


def test_no_adapter():
    text = """
import shaderdsl as sd
try:
    sd.use_device("dawn")
except sd.errors.NoAdapterError as error:
    print(error.message)
"""
    nothing = {"VK_DRIVER_FILES": "/nowhere.json", "VK_ICD_FILENAMES": "/nowhere.json"}
    assert "no WebGPU adapter" in run(text, env=nothing)


MATRICES = """
import json
import numpy as np
import shaderdsl as sd
device = sd.use_device("dawn")
worst = {}
rng = np.random.default_rng(0)
if device.target.features.matrix:
    nn = sd.op("m k, k n -> m n")(lambda x, w: sd.sum(x * w, over="k"))
    nt = sd.op("m k, n k -> m n")(lambda x, w: sd.sum(x * w, over="k"))
    tn = sd.op("k m, k n -> m n")(lambda x, w: sd.sum(x * w, over="k"))
    tt = sd.op("k m, n k -> m n")(lambda x, w: sd.sum(x * w, over="k"))
    for m, k, n in ((64, 64, 64), (130, 70, 52), (33, 129, 31), (256, 4096, 384)):
        x = rng.standard_normal((m, k)).astype(np.float16)
        w = rng.standard_normal((k, n)).astype(np.float16)
        want = x.astype(np.float64) @ w.astype(np.float64)
        for op, a, b in ((nn, x, w), (nt, x, w.T), (tn, x.T, w), (tt, x.T, w.T)):
            given = [sd.array(np.ascontiguousarray(v)) for v in (a, b)]
            texts = [k.wgsl for k in sd.lower(op, *given).program.kernels]
            assert any("subgroupMatrixMultiplyAccumulate" in t for t in texts)
            error = np.abs(op(*given).numpy() - want).max() / np.abs(want).max()
            worst[f"{m} {k} {n} {b.shape}"] = float(error)
print(json.dumps(worst))
"""


def test_matrices():
    """Where the adapter has them, in all transpositions."""
    worst = json.loads(run(MATRICES))
    if not worst:
        pytest.skip("no subgroup matrices here")
    assert max(worst.values()) < 1e-3
