"""Checkpoints appear whole or not at all, whenever the process dies."""

import json
import subprocess
import sys
import time

import pytest

from shaderdsl import checkpoint
from shaderdsl.errors import CheckpointError


def _write(content):
    def write(folder):
        (folder / "a").write_text(content)
        (folder / "deep").mkdir()
        (folder / "deep" / "b").write_text(content)

    return write


def test_the_newest_two_are_kept_and_named(tmp_path):
    for step in (5, 10, 15, 1_000_000):
        checkpoint.save(tmp_path, step, _write(str(step)))
    names = [path.name for path in checkpoint.saved(tmp_path)]
    assert names == ["step-000015", "step-1000000"]
    assert checkpoint.latest(tmp_path).name == "step-1000000"
    assert (tmp_path / "latest").read_text() == "step-1000000\n"
    assert (checkpoint.latest(tmp_path) / "deep" / "b").read_text() == "1000000"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", *names]


def test_a_failed_write_leaves_what_was_there(tmp_path):
    checkpoint.save(tmp_path, 1, _write("good"))

    def fails(folder):
        (folder / "a").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoint.save(tmp_path, 2, fails)
    assert [p.name for p in checkpoint.saved(tmp_path)] == ["step-000001"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-000001"]


def test_no_checkpoint_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        checkpoint.latest(tmp_path)


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "file"
    checkpoint.write_file(path, "one")
    checkpoint.write_file(path, b"two")
    assert path.read_text() == "two"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_stays(tmp_path, monkeypatch):
    path = tmp_path / "file"
    checkpoint.write_file(path, "one")

    def full(handle):
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint.os, "fsync", full)
    with pytest.raises(OSError, match="space"):
        checkpoint.write_file(path, "two")
    assert path.read_text() == "one" and list(tmp_path.iterdir()) == [path]


WRITER = """
import json, sys
from pathlib import Path
from shaderdsl import checkpoint
run, step = Path(sys.argv[1]), 0
def write(folder):
    for name in "abc":
        (folder / name).write_text(json.dumps({"step": step, "fill": "x" * 20000}))
print("ready", flush=True)
while True:
    step += 1
    checkpoint.save(run, step, write)
"""


def test_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    for round_ in range(20):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path / f"{round_}")],
            stdout=subprocess.PIPE,
        )
        with child:
            child.stdout.readline()
            time.sleep(0.03 + 0.004 * round_)
            child.kill()
        try:
            newest = checkpoint.latest(tmp_path / f"{round_}")
        except CheckpointError:
            continue  # killed before the first one was whole
        read = [json.loads((newest / name).read_text()) for name in "abc"]
        assert {one["step"] for one in read} == {int(newest.name[5:])}
        assert all(len(one["fill"]) == 20000 for one in read)
        checkpoint.save(tmp_path / f"{round_}", 10**6, _write("after"))
        assert not list((tmp_path / f"{round_}").glob(".*"))
