"""What a first call does beside its own work, and what it says meanwhile."""

import itertools
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

import shaderdsl as sd
from shaderdsl import errors, function
from shaderdsl.runtime.device import Device

PATIENCE, SLOW = 0.1, 0.5  # seconds
_numbers = itertools.count(3)


@pytest.fixture
def device():
    if not any(d.spec.startswith("wgpu") for d in sd.devices()):
        pytest.skip("no adapter")
    yield sd.use_device("wgpu")
    sd.use_device("cpu")


# ------------------------------------------------------------------ progress


@pytest.fixture
def slow(device, monkeypatch):
    """Kernels take a while to compile, from when they are waited for on; gives a call
    whose kernel is a new one.
    """
    from shaderdsl.runtime import executable, pipelines

    make, finished = pipelines.Pipelines._make, pipelines.finished
    asked = threading.Event()

    def waited_for(futures):
        asked.set()
        return finished(futures)

    def slowly(self, *args):
        asked.wait(30)
        time.sleep(SLOW)
        make(self, *args)

    monkeypatch.setattr(pipelines.Pipelines, "_make", slowly)
    monkeypatch.setattr(executable, "finished", waited_for)
    monkeypatch.setattr(pipelines, "PATIENCE", PATIENCE)

    def call():
        k = 0.001 * next(_numbers)
        x = np.ones(5, np.float32)
        got = sd.compile(lambda x: sd.sin(x * k) + sd.cos(x + k))(x).numpy()
        np.testing.assert_allclose(got, np.sin(k) + np.cos(1 + k), rtol=1e-6)

    return call


@contextmanager
def terminal(monkeypatch):
    """A pseudo terminal in the place of stderr; gives what was written to it."""
    # Not as a fixture: pytest puts its own stderr back when the test begins.
    pty = pytest.importorskip("pty", reason="no pseudo terminals here")
    ours, theirs = pty.openpty()
    with open(theirs, "w", encoding="utf-8") as stderr, open(ours, "rb") as screen:

        def written():
            stderr.write("end")
            stderr.flush()
            seen = b""
            while not seen.endswith(b"end"):
                seen += os.read(screen.fileno(), 4096)
            return seen.decode().removesuffix("end")

        with monkeypatch.context() as m:
            m.setattr(sys, "stderr", stderr)
            yield written


def visible(text):
    """What a terminal's line shows in the end."""
    return text.rpartition("\r\033[K")[2]


def test_a_terminal_shows_how_many_kernels_are_compiled(slow, monkeypatch):
    with terminal(monkeypatch) as written:
        slow()
        text = written()
    assert "compiling kernels, 0 of 1" in text
    assert "\n" not in text and visible(text) == ""


def test_a_terminal_shows_nothing_where_it_is_quick(slow, monkeypatch):
    monkeypatch.setattr("shaderdsl.runtime.pipelines.PATIENCE", 60.0)
    with terminal(monkeypatch) as written:
        slow()
        assert written() == ""


def test_nothing_is_said_where_nobody_looks(slow, capsys):
    assert not sys.stderr.isatty()
    slow()
    said = capsys.readouterr()
    assert said.err == "" and said.out == ""


def test_the_line_is_cleared_before_an_error(slow, monkeypatch):
    def refuse(self, kernel):
        raise ValueError("this driver refuses all")

    monkeypatch.setattr("shaderdsl.runtime.pipelines.Pipelines._module", refuse)
    with terminal(monkeypatch) as written:
        with pytest.raises(ValueError, match="refuses all"):
            slow()
        text = written()
    assert "compiling kernels" in text and visible(text) == ""


# ------------------------------------------------------------------ beside planning


def test_arguments_are_uploaded_while_the_plan_is_made(device, monkeypatch):
    threads = {}
    plan_for, upload = function.plan_for, type(device).upload

    def watched(*args):
        plan = plan_for(*args)
        time.sleep(SLOW)
        threads["planned"] = [a._buffer is not None for a in arrays]
        return plan

    def noted(self, array, dtype):
        threads.setdefault("uploads", []).append(threading.current_thread().name)
        return upload(self, array, dtype)

    monkeypatch.setattr(function, "plan_for", watched)
    monkeypatch.setattr(type(device), "upload", noted)
    rng = np.random.default_rng(0)
    hosts = [rng.standard_normal((512, 512), np.float32) for _ in range(3)]
    arrays = [sd.asarray(x) for x in hosts]
    step = sd.compile(lambda a, b, c: a * b + c, donate=("c",))
    got = step(*arrays).numpy()
    np.testing.assert_allclose(got, hosts[0] * hosts[1] + hosts[2], rtol=1e-5)
    assert threads["planned"] == [True] * 3
    assert threads["uploads"] == ["shaderdsl-upload"] * 3
    assert arrays[2].donated and not arrays[0].donated


def test_memory_that_is_not_there_is_told_of_by_the_call(device, monkeypatch):
    class Full(errors.OutOfMemoryError):
        pass

    def refuse(self, array, dtype):
        raise Full("no room")

    monkeypatch.setattr(type(device), "upload", refuse)
    x = sd.asarray(np.ones((1024, 1024), np.float32))
    with pytest.raises(Full):
        sd.compile(lambda x: x * 3.5)(x)
    monkeypatch.undo()
    assert not x.donated and x.numpy()[5, 5] == 1.0


# ------------------------------------------------------------------ of a process

_SCRIPT = """
import os, sys, threading
import numpy as np
import shaderdsl as sd
from shaderdsl import runtime

seen = []
current = runtime.device.current

def noted():
    seen.append(threading.current_thread().name)
    return current()

runtime.device.current = noted

def f(x):
    if sys.argv[1] == "fails":
        raise KeyError("the user's own")
    return sd.nn.RotaryEmbedding(dim=4, head_dim=4)(x)

step = sd.compile(f)
x = np.linspace(0, 1, 8, dtype=np.float32).reshape(2, 4)
try:
    first = step(x)
    assert seen == ["shaderdsl-device"], seen
    traced = step.last_traced
    again = step(x)
    assert step.last_traced is traced
    np.testing.assert_array_equal(first.numpy(), again.numpy())
    # The same graph, so that nothing is planned again.
    plan = runtime.current()
    other = sd.compile(lambda x: f(x))(x).numpy()
    np.testing.assert_array_equal(first.numpy(), other)
    from shaderdsl import engine
    assert len(engine._plans) == 1, len(engine._plans)
    print("right")
except Exception as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize(
    "mode, spec, said",
    [
        ("works", "cpu", "right"),
        ("works", "wgpu", "right"),
        ("fails", "wgpu", "KeyError"),
        ("works", "wgpu:no such adapter", "NoAdapterError"),
    ],
)
def test_a_process_traces_while_its_device_is_opened(mode, spec, said, request):
    if spec != "cpu":
        request.getfixturevalue("device")
    environ = {**os.environ, "SHADERDSL_DEVICE": spec}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, mode],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == said, done.stderr


def test_the_first_device_has_one_name_before_and_after_it_is_chosen(monkeypatch):
    from shaderdsl.runtime import device as module

    class Some(Device):
        def __init__(self):
            pass

        build = upload = fetch = synchronize = destroy = None

    Some.__abstractmethods__ = frozenset()
    one, other = Some(), Some()
    monkeypatch.setattr(module, "_current", None)
    monkeypatch.setattr(module, "_first", None)
    monkeypatch.setattr(module, "_choose", lambda spec, limits: one)
    before = module.owner()
    assert module.current() is one and module.owner() is before
    monkeypatch.setattr(module, "_current", other)
    assert module.owner() is other
    monkeypatch.setattr(module, "_current", one)
    assert module.owner() is before


# ------------------------------------------------------------------ names of C types

_PARSES = """
import cffi.cparser as parser
parse, asked = parser.Parser._parse, []

def noted(self, text):
    asked.append(text)
    return parse(self, text)

parser.Parser._parse = noted
import numpy as np
import shaderdsl as sd
from shaderdsl.runtime import library
library.chosen()
before = len(asked)
step = sd.compile(lambda x, y: (x @ y, sd.sum(x)), donate=("x",))
x = sd.asarray(np.ones((4, 4), np.float32))
print(float(step(x, x + 1.0)[1]))
print(asked[before:])
"""


def test_a_first_call_parses_no_name_of_a_c_type(device):
    environ = {**os.environ, "SHADERDSL_DEVICE": "wgpu"}
    done = subprocess.run(
        [sys.executable, "-c", _PARSES],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["16.0", "[]"]


@pytest.fixture
def ffi(device):
    from shaderdsl.runtime.adapters import library

    return library.ffi


def test_c_types_are_what_cffi_takes_their_names_for(ffi):
    from shaderdsl.runtime import c_types

    assert c_types.parse(ffi)
    known = ffi._parsed_types
    for name in c_types.NAMES:
        ours = known.pop(name)
        ffi._typeof(name, consider_function_as_funcptr=True)
        assert known[name] == ours, name


def test_unknown_names_are_left_to_cffi(ffi, monkeypatch):
    from shaderdsl.runtime import c_types

    monkeypatch.setattr(c_types, "NAMES", ("uint16_t *", "WGPUNoSuchThing *"))
    ffi._parsed_types.pop("uint16_t *", None)
    assert not c_types.parse(ffi)
    assert "uint16_t *" not in ffi._parsed_types
    assert ffi.new("uint16_t *", 7)[0] == 7
    assert not c_types.parse(object())
