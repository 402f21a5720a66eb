"""What goes wrong outside of a program: nothing is lost, the process goes on, and the
error says what to do.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import has_adapter

import shaderdsl as sd
from shaderdsl import checkpoint
from shaderdsl.errors import CheckpointError, CompilerError, OutOfMemoryError

X = np.linspace(-1, 1, 12, dtype=np.float32)


@pytest.fixture
def gpu():
    if not has_adapter():
        pytest.skip("no adapter")
    yield sd.use_device("wgpu")
    sd.use_device("cpu")


# ------------------------------------------------------------------ compiling


@pytest.mark.parametrize("many", [False, True])
def test_an_interrupted_compile_leaves_nobody_waiting(gpu, monkeypatch, many):
    """Ctrl-C while kernels are waited for, and what goes wrong in the thread that makes
    one; the next call compiles what is missing.
    """
    from shaderdsl.runtime import pipelines

    number = float(np.random.default_rng().uniform(2, 3))
    make, calls = type(gpu.pipelines)._make, []

    def interrupted(self, *job):
        calls.append(job)
        if len(calls) == 1:
            raise KeyboardInterrupt
        make(self, *job)

    def f(x):
        y = sd.sin(x) * number
        if not many:
            return [y]
        z = y.reshape(3, 4)
        w = z @ z.T
        more = [sd.sum(z, axis=0), sd.max(z, axis=1), sd.softmax(w, axis=1) @ z]
        return [y, sd.cumsum(y) * number, *more, sd.sum(sd.exp(z.T @ z), axis=0)]

    def stopped(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(gpu.pipelines), "_make", interrupted)
    monkeypatch.setattr(pipelines, "wait", stopped)
    with pytest.raises(KeyboardInterrupt):
        sd.compile(f)(X)
    monkeypatch.undo()
    y = np.sin(X.astype(np.float64)) * number
    got = sd.compile(f)(X)
    np.testing.assert_allclose(got[0], y, 1e-4)
    if many:
        assert len(calls) >= 2  # on several threads
        np.testing.assert_allclose(got[1], np.cumsum(y) * number, 1e-4, 1e-5)


def test_a_refused_kernel_shows_its_text_and_the_users_line(gpu, monkeypatch):
    from shaderdsl.runtime.pipelines import Pipelines

    create = gpu.gpu.create_shader_module
    monkeypatch.setattr(
        gpu.gpu,
        "create_shader_module",
        lambda label, code: create(label=label, code=code + "\nfn odd() { nonsense; }"),
    )
    with pytest.raises(CompilerError) as caught:
        sd.compile(lambda x: sd.cosh(x) * 1.37)(X)
    text = str(caught.value)
    assert "fault of shaderdsl" in text and "nonsense" in text and "   1 |" in text
    assert "test_failures.py" in caught.value.where
    assert Pipelines is type(gpu.pipelines)


# ------------------------------------------------------------------ memory


def test_a_step_that_ran_out_of_memory_can_be_tried_again(device, monkeypatch):
    w = sd.array(np.ones((256, 256), np.float32)) * 1.0

    @sd.compile
    def step(w):
        y = sd.sin(w) @ w
        return y + sd.sum(y, axis=0), y

    expected = [y.numpy() for y in step(w)]
    device.pool.trim()  # what lies ready is not asked for
    live = device.pool.live_bytes
    monkeypatch.setattr(device.pool, "limit", live + 1000)
    with pytest.raises(OutOfMemoryError, match=r"[\d,]+ B are in use") as caught:
        step(w)
    assert caught.value.cure
    del caught
    assert device.pool.live_bytes == live  # nothing of the failed call is kept
    np.testing.assert_array_equal(w.numpy(), np.ones((256, 256)))
    monkeypatch.undo()
    for got, want in zip(step(w), expected, strict=True):
        np.testing.assert_array_equal(got, want)


# ------------------------------------------------------------------ disk

CALL = """
import numpy as np, shaderdsl as sd, sys
sd.use_device(sys.argv[1])
x = np.linspace(-1, 1, 4096, dtype=np.float32).reshape(64, 64)
def f(x):
    y = sd.softmax(x @ x, axis=1)
    return sd.sum(y * x, axis=0), sd.cumsum(x, axis=1), sd.max(x * x, axis=1)
print([float(v) for r in sd.compile(f)(x) for v in (sd.sum(r), sd.max(r))])
"""


def call(cache, device, *, before=""):
    done = subprocess.Popen(
        [sys.executable, "-c", before + CALL, device],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**__import__("os").environ, "SHADERDSL_CACHE": str(cache)},
    )  # fmt: skip
    return done


def result(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


def test_a_cache_that_is_damaged_shared_or_full(gpu, tmp_path):
    first = result(call(tmp_path / "a", "wgpu"))
    files = [p for p in (tmp_path / "a").rglob("*") if p.is_file()]
    assert files
    r = np.random.default_rng(0)
    for k, p in enumerate(files):  # flipped, cut off, of another, empty
        data = bytearray(p.read_bytes())
        if k % 4 == 0 and data:
            data[int(r.integers(len(data)))] ^= 0x55
        p.write_bytes([bytes(data), data[: len(data) // 2], files[0].read_bytes(),
                       b""][k % 4])  # fmt: skip
    assert result(call(tmp_path / "a", "wgpu")) == first
    # Two that write at once, into a new folder.
    both = [call(tmp_path / "b", "wgpu") for _ in range(2)]
    assert [result(p) for p in both] == [first] * 2
    assert not list((tmp_path / "b").rglob(".*"))
    assert result(call(tmp_path / "b", "wgpu")) == first
    # A full disk: no file may grow.
    full = (
        "import resource; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))\n"
    )
    assert result(call(tmp_path / "c", "wgpu", before=full)) == first


FULL = """
import resource, sys, numpy as np, shaderdsl as sd
from pathlib import Path
from shaderdsl import checkpoint
from shaderdsl.errors import CheckpointError
folder = Path(sys.argv[1])
sd.use_device("cpu")
config = sd.nn.TransformerConfig(vocab_size=8, hidden_size=8, num_layers=1, num_heads=1,
                                 ffn_size=8)
model = sd.nn.Transformer.init(config, seed=0)
sd.nn.save(model, folder / "model")
before = (folder / "model" / "model.safetensors").read_bytes()
def write(into):
    (into / "w").write_bytes(b"x" * 5000)
checkpoint.save(folder / "run", 1, write)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
try:
    sd.nn.save(model, folder / "model")
except CheckpointError as error:
    assert "cannot write" in str(error) and error.cure
    print("model refused")
try:
    checkpoint.save(folder / "run", 2, write)
except OSError:
    print("step refused")
assert (folder / "model" / "model.safetensors").read_bytes() == before
assert checkpoint.latest(folder / "run").name == "step-000001"
assert not [p for p in folder.rglob(".*")]
print(sd.nn.load(folder / "model").config == config)
"""


def test_a_full_disk_leaves_what_was_there(tmp_path):
    pytest.importorskip("safetensors")
    pytest.importorskip("resource")
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True
    )
    assert done.stdout.split("\n")[:3] == ["model refused", "step refused", "True"], (
        done.stderr
    )


# ------------------------------------------------------------------ files made to harm


@pytest.fixture
def folder(tmp_path, cpu):
    pytest.importorskip("safetensors")
    config = sd.nn.TransformerConfig(
        vocab_size=8, hidden_size=8, num_layers=2, num_heads=2, ffn_size=8
    )
    return sd.nn.save(sd.nn.Transformer.init(config, seed=0), tmp_path / "model")


def changed(**entries):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | entries))

    return change


def header(content, length=None):
    text = content if isinstance(content, bytes) else json.dumps(content).encode()

    def change(folder):
        start = (len(text) if length is None else length).to_bytes(8, "little")
        (folder / "model.safetensors").write_bytes(start + text + b"\0" * 64)

    return change


def shard(name):
    def change(folder):
        outside = folder.parent / "outside.safetensors"
        (folder / "model.safetensors").rename(outside)
        table = {"weight_map": {"model.norm.weight": name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(table))

    return change


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was opened",))


def pickled(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))


def tensor(**about):
    return header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | about})


HARM = {
    "nested settings": lambda f: (f / "config.json").write_text("[" * 200_000),
    "nested header": header(b"[" * 200_000),
    "a billion layers": changed(num_hidden_layers=10**9),
    "a trillion columns": changed(hidden_size=10**12),
    "vocabulary": changed(vocab_size=10**15),
    "heads": changed(num_attention_heads=10**9),
    "eps of text": changed(rms_norm_eps="nan"),
    "eps of nothing": changed(rms_norm_eps=float("nan")),
    "base below 0": changed(rope_theta=-1, rope_parameters=None),
    "no heads": changed(num_attention_heads=0),
    "true for a size": changed(num_attention_heads=True),
    "list for a size": changed(hidden_size=[8]),
    "few kinds of layers": changed(
        layer_types=["full_attention"],
        sliding_window=4,
        architectures=["Gemma2ForCausalLM"],
    ),
    "a shard outside": shard("../outside.safetensors"),
    "a shard elsewhere": shard("/etc/passwd"),
    "a shard above": shard(".."),
    "a shard without a name": shard(""),
    "a pickle": pickled,
    "a header of 8 EiB": header(b"x", 2**63),
    "a tensor of 64 EiB": tensor(shape=[1 << 62, 4], data_offsets=[0, 16]),
    "ends before it begins": tensor(data_offsets=[8, 4]),
    "beyond the file": tensor(shape=[1 << 40], data_offsets=[0, 1 << 42]),
    "dtype of a list": tensor(dtype=["F32"]),
    "offsets of text": tensor(data_offsets="ab"),
    "metadata of a number": header({"__metadata__": 5}),
}  # fmt: skip


@pytest.mark.parametrize("name", HARM)
def test_a_checkpoint_made_to_harm(folder, name):
    HARM[name](folder)
    with pytest.raises(CheckpointError) as caught:
        sd.nn.load(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        "{}",
        "null",
        "\0",
        '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": -5}, '
        '"merges": []}}',
        '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, '
        '"merges": ["b c"]}}',
    ],
    ids=range(6),
)
def test_a_tokenizer_made_to_harm(tmp_path, text):
    pytest.importorskip("tokenizers")
    from shaderdsl.finetune import load_tokenizer

    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_arrays_of_objects_are_not_opened(tmp_path):
    from shaderdsl import data

    path = tmp_path / "tokens.npy"
    np.save(path, np.array([Bomb()], object), allow_pickle=True)
    with pytest.raises(sd.errors.ShaderError):
        data.read_tokens(path)


def test_a_checkpoint_folder_that_is_a_file(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises((CheckpointError, OSError)):
        checkpoint.save(tmp_path / "run", 1, lambda folder: None)
    assert Path(tmp_path / "run").is_file()
