"""Training from the command line: it learns, stops, goes on, and never loses data."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

import shaderdsl as sd
from shaderdsl import checkpoint, data
from shaderdsl.cli import main
from shaderdsl.trainer import TrainConfig, Trainer

pytest.importorskip("safetensors")

ROOT = Path(__file__).parents[1]
SMALL = {
    "batch": 2,
    "length": 16,
    "warmup": 4,
    "hidden": 16,
    "layers": 1,
    "heads": 2,
    "kv_heads": 1,
    "ffn": 24,
}
OPTIONS = [
    word
    for name, value in SMALL.items()
    for word in (f"--{name.replace('_', '-')}", str(value))
]


@pytest.fixture(scope="module", autouse=True)
def default_device():
    """The device that a new process chooses, whatever ran in this one before."""
    sd.use_device()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(data.default_text()[:6000])
    return path


def train(out, text, *words):
    return main(["train", "--out", str(out), "--text", str(text), *OPTIONS, *words])


def start(out, text, *words):
    """The same in a process of its own, to be killed."""
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "shaderdsl.cli", "train"),
            *("--out", str(out), "--text", str(text), *OPTIONS, *words),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )


def wait_for(path, process):
    end = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < end, f"{path} never came"
        time.sleep(0.005)


def weights(out):
    """Tells whether two runs hold the same bits."""
    newest = checkpoint.latest(out)
    files = ("model.safetensors", "optimizer.safetensors")
    return [sha256((newest / name).read_bytes()).hexdigest() for name in files]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, text):
    """A run of 30 steps that nothing stopped."""
    out = tmp_path_factory.mktemp("unbroken") / "run"
    assert train(out, text, "--steps", "30", "--save-every", "5") == 0
    return out


def test_a_run_leaves_a_model_a_curve_and_its_loss(tmp_path, text, capsys):
    assert train(tmp_path / "run", text, "--steps", "12", "--save-every", "4") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"held-out loss: \d\.\d{3} nats/byte", last)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"latest", "step-000008", "step-000012"} <= names
    assert not any(name.startswith(".") for name in names)
    if "loss.png" in names:
        assert (tmp_path / "run/loss.png").read_bytes().startswith(b"\x89PNG")
    about = json.loads((tmp_path / "run/step-000012/trainer.json").read_text())
    assert about["history"][-1]["whole"] == pytest.approx(
        float(last.split()[2]), abs=1e-3
    )
    assert (tmp_path / "run/step-000012/config.json").exists()


def test_it_learns(text):
    tokens = data.encode(data.read_text([text]))
    trainer = Trainer(TrainConfig(steps=60, peak=1e-2, **SMALL), tokens)
    before = trainer.held_out_loss()
    assert before == pytest.approx(np.log(256), rel=0.15)
    for _ in range(60):
        trainer.advance()
    assert trainer.mean_loss() < before
    assert trainer.held_out_loss() < before - 1.0


def test_the_held_out_loss_is_the_mean_over_every_byte(text):
    tokens = data.encode(data.read_text([text]))[:2000]
    trainer = Trainer(TrainConfig(**SMALL), tokens)
    inputs, labels = data.windows(tokens[-200:], 16)
    logits = np.asarray(trainer.model(inputs), np.float64)
    top = logits.max(-1, keepdims=True)
    logp = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    counted = labels != -100
    right = -np.take_along_axis(logp, np.maximum(labels, 0)[..., None], -1)[..., 0]
    assert trainer.held_out_loss() == pytest.approx(right[counted].mean(), rel=1e-4)
    assert trainer.held_out_loss(sample=64) == pytest.approx(np.log(256), rel=0.2)


def test_a_step_compiles_and_downloads_nothing_after_the_first(text):
    tokens = data.encode(data.read_text([text]))
    trainer = Trainer(TrainConfig(steps=8, **SMALL), tokens)
    trainer.advance()
    sd.synchronize()
    with sd.profile() as seen:
        for _ in range(3):
            trainer.advance()
        sd.synchronize()
    assert seen.compiled == 0
    assert seen.downloads == 0


def test_resume_after_kill_9_reaches_the_same_weights(tmp_path, text, unbroken):
    out = tmp_path / "run"
    with start(out, text, "--steps", "30", "--save-every", "5") as child:
        wait_for(out / "step-000010", child)
        child.kill()
    stopped = int(checkpoint.latest(out).name[5:])
    assert 10 <= stopped < 30
    assert main(["train", "--out", str(out), "--resume", "--save-every", "5"]) == 0
    assert checkpoint.latest(out).name == "step-000030"
    same = weights(out) == weights(unbroken)  # compared here: no report of each byte
    assert same


def test_ctrl_c_saves_and_resume_goes_on(tmp_path, text, unbroken):
    out = tmp_path / "run"
    with start(out, text, "--steps", "30", "--save-every", "5") as child:
        wait_for(out / "step-000005", child)
        child.send_signal(signal.SIGINT)
        said = child.communicate()[0]
    assert child.returncode in (130, 0), said
    if child.returncode == 130:  # it may have been about to end anyway
        assert "--resume" in said
    assert main(["train", "--out", str(out), "--resume"]) == 0
    same = weights(out) == weights(unbroken)  # compared here: no report of each byte
    assert same


def test_a_finished_run_resumes_to_its_result(unbroken, capsys):
    before = weights(unbroken)
    assert main(["train", "--out", str(unbroken), "--resume"]) == 0
    assert "held-out loss" in capsys.readouterr().out.splitlines()[-1]
    assert weights(unbroken) == before


def test_more_steps_can_be_added(tmp_path, text, capsys):
    out = tmp_path / "run"
    assert train(out, text, "--steps", "5") == 0
    assert main(["train", "--out", str(out), "--resume", "--steps", "8"]) == 0
    assert checkpoint.latest(out).name == "step-000008"
    assert "schedule" in capsys.readouterr().out
    assert main(["train", "--out", str(out), "--resume", "--steps", "6"]) == 2


def test_a_run_overwrites_nothing(tmp_path, text, unbroken, capsys):
    (tmp_path / "mine").write_text("precious")
    for out in (tmp_path, tmp_path / "mine", unbroken):
        before = sorted(os.listdir(out)) if out.is_dir() else None
        assert train(out, text, "--steps", "2") == 1
        assert "is there already" in capsys.readouterr().err
        assert before == (sorted(os.listdir(out)) if out.is_dir() else None)
    assert (tmp_path / "mine").read_text() == "precious"
    (tmp_path / "empty").mkdir()
    assert train(tmp_path / "empty", text, "--steps", "2") == 0


def test_bad_text_is_refused_before_anything_is_made(tmp_path, capsys):
    bad = tmp_path / "bad"
    for content, said in [
        (b"a\0b", "zero byte"),
        (b"short", "too few"),
        (b"\xff\xfe", "UTF-16"),
    ]:
        bad.write_bytes(content)
        assert train(tmp_path / "run", bad) == 1
        assert said in capsys.readouterr().err
    assert train(tmp_path / "run", tmp_path / "gone") == 1
    assert not (tmp_path / "run").exists()


def test_resume_refuses_what_would_not_be_the_same_run(tmp_path, unbroken, capsys):
    other = tmp_path / "other.txt"
    other.write_text("something else " * 300)
    words = ["train", "--out", str(unbroken), "--resume"]
    assert main([*words, "--text", str(other)]) == 1
    assert "another text" in capsys.readouterr().err
    assert main([*words, "--hidden", "32"]) == 2
    assert "--hidden was 16" in capsys.readouterr().err
    assert main(["train", "--out", str(tmp_path / "no"), "--resume"]) == 1
    assert "no checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["trainer.json", "optimizer.safetensors", "model.safetensors"]
)
def test_a_damaged_checkpoint_is_refused(tmp_path, text, name, capsys):
    out = tmp_path / "run"
    assert train(out, text, "--steps", "2") == 0
    path = checkpoint.latest(out) / name
    path.write_bytes(path.read_bytes()[:40])
    capsys.readouterr()
    assert main(["train", "--out", str(out), "--resume"]) == 1
    error = capsys.readouterr().err
    assert name in error
    assert "Traceback" not in error


def test_a_checkpoint_of_another_shape_is_refused(tmp_path, text, unbroken, capsys):
    out = tmp_path / "run"
    assert train(out, text, "--steps", "2", "--ffn", "32") == 0
    for name in ("model.safetensors", "config.json"):
        foreign = (checkpoint.latest(unbroken) / name).read_bytes()
        (checkpoint.latest(out) / name).write_bytes(foreign)
    capsys.readouterr()
    assert main(["train", "--out", str(out), "--resume"]) == 1
    assert "shape" in capsys.readouterr().err


def test_a_loss_that_is_not_a_number_stops_the_run(tmp_path, text, capsys):
    out = tmp_path / "run"
    words = ("--steps", "40", "--rate", "1e30", "--save-every", "1000")
    assert train(out, text, *words) == 1
    assert "lower --rate" in capsys.readouterr().err
    assert not checkpoint.saved(out)


def test_generate_samples_from_a_run(unbroken, capsys):
    words = ["generate", str(unbroken), "--prompt", "The ", "--max-new-tokens", "20"]
    texts = []
    for _ in range(2):
        assert main([*words, "--seed", "3"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith("The ")
    assert main([*words, "--temperature", "0"]) == 0
    assert main(["generate", str(checkpoint.latest(unbroken))]) == 0


def test_default_runs_are_numbered(tmp_path, text, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["train", "--text", str(text), *OPTIONS, "--steps", "1"]
    assert main(words) == 0
    assert main(words) == 0
    assert sorted(os.listdir("runs")) == ["001", "002"]
    assert main(["train", "--resume", "--steps", "2"]) == 0
    assert checkpoint.latest(Path("runs/002")).name == "step-000002"
