"""Kernels that a software driver compiles before their launch, on other devices."""

import os
import subprocess
import sys

import pytest

from shaderdsl.runtime.ahead import drivers_cache

SCRIPT = """
import numpy as np
import shaderdsl as sd
from shaderdsl.runtime import ahead

asked = []
dispatch = ahead.Ahead._dispatch

def noted(self, kernel):
    dispatch(self, kernel)
    asked.append(kernel.name)

ahead.Ahead._dispatch = noted
sd.use_device("wgpu")

@sd.op("t d, v d, t -> t")
def losses(x, w, labels):
    logits = sd.sum(x * w, over="d")
    return sd.logsumexp(logits, over="v") - logits.at(v=labels)

rng = np.random.default_rng(3)
x, w = (rng.standard_normal(s).astype(np.float32) for s in [(33, 20), (44, 20)])
labels = np.arange(33, dtype=np.int32)

def total(x, w, scale):
    return scale * sd.sum(losses(sd.tanh(x) * x, w, labels))

def step(x, w, scale):
    y, (dx, dw) = sd.value_and_grad(total, argnums=(0, 1))(x, w, scale)
    return y, x - dx / sd.sqrt(sd.sum(dx * dx)), sd.cumsum(dw, axis=0)

y, new_x, new_w = sd.compile(step)(sd.asarray(x), sd.asarray(w), 0.5)
x64 = x.astype(np.float64)
logits = np.tanh(x64) * x64 @ w.astype(np.float64).T
want = np.log(np.exp(logits).sum(1)) - logits[np.arange(33), labels]
assert abs(float(y) - 0.5 * want.sum()) < 1e-4 * abs(want.sum())
assert np.isfinite(new_x.numpy()).all() and np.isfinite(new_w.numpy()).all()
print(len(asked), "llvmpipe" in sd.runtime.current().name)
"""


def asked(folder, **more):
    """Kernels that a fresh process has the driver compile ahead."""
    env = os.environ | {
        "SHADERDSL_CACHE": str(folder / "ours"),
        "MESA_SHADER_CACHE_DIR": str(folder / "drivers"),
        "MESA_SHADER_CACHE_DISABLE": "false",
        **more,
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    number, software = done.stdout.split()
    if software != "True" or (os.cpu_count() or 1) == 1:
        pytest.skip("a matter of one driver, and of several processors")
    return int(number)


def test_once_for_each_kernel(wgpu, tmp_path):
    """Not at all by a process that comes later, or where the driver keeps nothing."""
    assert asked(tmp_path) > 2
    assert any((tmp_path / "drivers").rglob("*"))
    assert asked(tmp_path) == 0
    other = tmp_path / "other"
    assert asked(tmp_path, MESA_SHADER_CACHE_DIR=str(other)) > 2
    assert asked(tmp_path / "none", MESA_SHADER_CACHE_DISABLE="true") == 0


def test_where_the_driver_keeps_code(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith(("MESA_", "XDG_CACHE")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert drivers_cache() == tmp_path / ".cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert drivers_cache() == tmp_path / "xdg"
    monkeypatch.setenv("MESA_SHADER_CACHE_DIR", str(tmp_path / "a" / "b"))
    assert drivers_cache() == tmp_path / "a" / "b"
    monkeypatch.setenv("MESA_SHADER_CACHE_DISABLE", "1")
    assert drivers_cache() is None
