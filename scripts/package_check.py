"""Run by package.sh with the Python of a bare environment: is the package whole?

Arguments: the built distributions.
"""

import importlib.metadata
import importlib.util
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import numpy as np

import shaderdsl as sd
from shaderdsl.web import export_web

ROOT = Path(sd.__file__).parent
assert "site-packages" in str(ROOT), ROOT

# What is in the distributions.
wheel = next(p for p in sys.argv[1:] if p.endswith(".whl"))
source = next(p for p in sys.argv[1:] if p.endswith(".tar.gz"))
names = set(zipfile.ZipFile(wheel).namelist())
for name in ("py.typed", "web/static/shaderdsl.js", "web/static/index.html"):
    assert f"shaderdsl/{name}" in names, name
assert all(n.startswith(("shaderdsl/", "shaderdsl-")) for n in names), names
with tarfile.open(source) as tar:
    parts = {name.partition("/")[2] for name in tar.getnames()}
assert {"pyproject.toml", "README.md", "LICENSE", "shaderdsl/py.typed"} <= parts

# Only the core is here, and extras say what they add.
about = importlib.metadata.metadata("shaderdsl")
extras = set(about.get_all("Provides-Extra") or ())
assert {"testing", "nn", "plot", "torch", "jax", "docs", "dev"} <= extras, extras
assert importlib.util.find_spec("torch") is None
assert importlib.util.find_spec("pytest") is None


# An op, its derivative, its picture and an export for browsers.
@sd.op("... d, d -> ... d")
def rms_norm(x, gain, *, eps=1e-6):
    return x * sd.rsqrt(sd.mean(x * x, over="d") + eps) * gain


sd.use_device("cpu")
rng = np.random.default_rng(0)
x, gain = (rng.normal(size=n).astype(np.float32) for n in [(3, 8), (8,)])
y, pullback = sd.vjp(rms_norm, x, gain)
np.testing.assert_allclose(y.numpy(), rms_norm.reference(x, gain), rtol=1e-5)
assert [g.shape for g in pullback(y)] == [(3, 8), (8,)]
assert "<svg" in sd.lower(rms_norm, x, gain)._repr_html_()
with tempfile.TemporaryDirectory() as folder:
    export_web(sd.compile(rms_norm), folder, x, gain)
    assert (Path(folder) / "index.html").is_file()

# Training names the extra that it needs.
tool = str(Path(sys.executable).with_name("shaderdsl"))
for command in ([tool, "--version"], [sys.executable, "-m", "shaderdsl", "--version"]):
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said == f"shaderdsl {about['Version']}\n", said
asked = [tool, "train", "--steps", "1", "--device", "cpu", "--out", "run"]
run = subprocess.run(asked, capture_output=True, text=True)
assert run.returncode == 1 and "shaderdsl[nn]" in run.stderr, run.stderr
devices = [tool, "devices", "--json"]
subprocess.run(devices, capture_output=True, text=True, check=True)
print(f"Python {sys.version.split()[0]}: the package works, {len(names)} files")
