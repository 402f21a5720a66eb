"""Training with two processes equals training with one. Needs mpi4py and mpirun."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from shaderdsl.nn.safetensors import SafetensorsFile

pytest.importorskip("mpi4py")
if shutil.which("mpirun") is None:
    pytest.skip("no mpirun", allow_module_level=True)

OPTIONS = [
    *("--batch", "4", "--length", "16", "--hidden", "16", "--layers", "1"),
    *("--heads", "2", "--kv-heads", "1", "--ffn", "32"),
    *("--save-every", "5", "--judge-every", "1000"),
]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("What one process does on a batch, two do on halves of it. " * 40)
    return path


def command(processes, text, out, *more):
    mpi = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(processes)]
    own = [sys.executable, "-m", "shaderdsl", "train", "--text", text, "--out", out]
    own += [*OPTIONS, *more]
    return [*mpi, *own, "--data-parallel"] if processes > 1 else own


def environment():
    # Open MPI wants short names for its sockets.
    return dict(os.environ, SHADERDSL_DEVICE="cpu", TMPDIR="/tmp", OMP_NUM_THREADS="1")


def trained(*args):
    done = subprocess.run(
        command(*args), env=environment(), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def weights(run: Path):
    path = max(run.glob("*/model.safetensors"), key=lambda p: p.parent.name)
    stored = SafetensorsFile(path)
    return {name: np.array(stored.read(name)) for name in stored.tensors}


def test_two_processes_are_one_on_the_joined_batch(text, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    trained(1, text, one, "--steps", "12")
    shown = trained(2, text, two, "--steps", "12")
    assert "2 processes share each batch" in shown
    assert shown.count("held-out loss") == 1
    expected, got = weights(one), weights(two)
    assert expected.keys() == got.keys()
    for name, w in expected.items():
        np.testing.assert_allclose(got[name], w, rtol=1e-3, atol=1e-5, err_msg=name)


def test_processes_that_disagree_are_refused(text, tmp_path):
    ranks = command(2, text, tmp_path / "run", "--steps", "5")
    at = ranks.index("-n")
    own = ranks[at + 2 :]
    both = [*ranks[:at], "-n", "1", *own, ":", "-n", "1", *own, "--seed", "1"]
    done = subprocess.run(
        both, env=environment(), capture_output=True, text=True, timeout=240
    )
    assert done.returncode != 0
    assert "process 1 and process 0 disagree on the options" in done.stderr
    odd = subprocess.run(
        command(3, text, tmp_path / "odd", "--steps", "5"),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert odd.returncode != 0
    assert "a batch of 4 does not divide among 3 processes" in odd.stderr


def test_a_killed_process_ends_the_others(text, tmp_path):
    run = tmp_path / "run"
    job = subprocess.Popen(
        command(2, text, run, "--steps", "100000"),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        end = time.monotonic() + 120
        while not list(run.glob("*/trainer.json")) and time.monotonic() < end:
            time.sleep(0.1)
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
        _, said = job.communicate(timeout=60)
    finally:
        job.kill()
    assert job.returncode != 0
    assert "exited on signal 9" in said
    # What was saved is whole, and one process can go on from it.
    resumed = [sys.executable, "-m", "shaderdsl", "train", "--resume", "--out", run]
    about = max(run.glob("*/trainer.json"), key=lambda p: p.parent.name)
    step = int(about.parent.name.split("-")[-1])
    done = subprocess.run(
        [*resumed, "--steps", str(step + 2)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert f"resumed at step {step}" in done.stdout
