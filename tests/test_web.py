"""Exports for browsers: the plan, and real pages in a headless Chromium."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path

import browser
import numpy as np
import pytest
from web_plan import WebPlan

import shaderdsl as sd
from shaderdsl import errors, nn, tree
from shaderdsl.cli import main
from shaderdsl.cli.source import arguments
from shaderdsl.codegen import lower
from shaderdsl.ops.registry import REGISTRY
from shaderdsl.trainer import TrainConfig, Trainer
from shaderdsl.web import export_decode, export_demo, export_web
from shaderdsl.web.export import BROWSER
from shaderdsl.web.files import static

rng = np.random.default_rng(7)


@sd.op("... d, d -> ... d")
def rms_norm(x, gain, *, eps=1e-6):
    return x * sd.rsqrt(sd.mean(x * x, over="d") + eps) * gain


def normal(*shape):
    return rng.normal(size=shape).astype(np.float32)


# ------------------------------------------------------------------ the plan


def test_a_budget_for_scores_goes_along(cpu, tmp_path, monkeypatch):
    asked = []
    real = lower.lower

    def noted(outs, target, **more):
        asked.append(target.scores)
        return real(outs, target, **more)

    monkeypatch.setattr(lower, "lower", noted)
    for scores in (None, 1 << 20):
        function = sd.compile(lambda x: 2.0 * x, scores=scores)
        export_web(function, tmp_path / str(scores), sd.spec("f32", 4))
    assert asked == [None, 1 << 20]


def test_state_stays_where_the_next_call_looks_for_it(wgpu, tmp_path):
    """Results that trade places with the donated inputs, and results that lie in the
    memory of an input that another result replaces.
    """

    def turn(a, b, c, x):
        return (b + x, c * 2.0, a - x), sd.exp(a), x * 3.0

    def function(state, x):
        return turn(*state, x)

    compiled = sd.compile(function, donate=("state",))
    state = tuple(normal(3, 5) for _ in range(3))
    exported = export_web(compiled, tmp_path, state, sd.spec("f32", 3, 5))
    assert exported.feeds == {f"state.{k}": f"state.{k}" for k in range(3)}
    assert exported.given == {f"state.{k}" for k in range(3)}
    plan = WebPlan(tmp_path)
    for _ in range(4):
        x = normal(3, 5)
        state, grown, tripled = turn(*state, x)
        grown = np.exp((state[2] + x).astype(np.float64))
        plan.run(x=x)
        for k in range(3):
            np.testing.assert_allclose(plan.read(f"state.{k}"), state[k], rtol=1e-6)
        np.testing.assert_allclose(plan.read("1"), grown, rtol=1e-5)
        np.testing.assert_allclose(plan.read("2"), tripled, rtol=1e-6)


def test_a_training_step_goes_on_from_its_own_state(wgpu, tmp_path):
    trainer = small_trainer()
    exported = export_step(trainer, tmp_path)
    moments = [n for n in exported.inputs if n.startswith("state.")]
    assert set(moments) <= exported.given
    plan = WebPlan(tmp_path)
    initial = {e["name"]: e["initial"] for e in plan.plan["inputs"]}
    assert all(initial[n] == "zeros" for n in moments)  # which take no bytes
    for k in range(3):
        batch = trainer.batches(k)
        plan.run(inputs=batch[:, :-1], labels=batch[:, 1:])
        trainer.advance()
        assert plan.read("total") == pytest.approx(float(trainer._total), rel=1e-5)
    for name, parameter in nn.named_arrays(trainer.model):
        found = plan.read(f"model.{name}")
        np.testing.assert_allclose(found, parameter.numpy(), rtol=1e-3, atol=2e-5)


def test_what_was_not_donated_is_there_at_every_call(wgpu, tmp_path):
    """Parameters that an update may not overwrite, although all lie in one arena."""
    optimiser = sd.optim.AdamW(lr=0.1)
    model = {"a": normal(5, 3), "b": normal(7), "c": normal(2, 3)}
    state = optimiser.init(tree.map(sd.asarray, model))
    gradients = tree.map(np.sign, model)

    @sd.compile
    def update(model, state, gradients):
        return optimiser.update(model, gradients, state)

    export_web(update, tmp_path, model, state, gradients)
    plan = WebPlan(tmp_path)
    expected, _ = update(model, state, gradients)
    for _ in range(2):
        plan.run()
        for k, name in enumerate(model):
            entry = plan.plan["outputs"][k]["name"]
            np.testing.assert_allclose(
                plan.read(entry), expected[name].numpy(), rtol=1e-5
            )
            np.testing.assert_array_equal(plan.read(f"model.{name}"), model[name])


def test_the_arguments_of_the_last_call_are_the_default(wgpu, tmp_path):
    weight, x = sd.asarray(normal(4, 3)), normal(2, 4)
    compiled = sd.compile(lambda total, x: (total + 1.0, x @ weight), donate=("total",))
    compiled(sd.asarray(np.float32(1)), x)
    exported = export_web(compiled, tmp_path)
    assert exported.inputs == ("total", "x", "captured.0")
    assert exported.given == {"x", "captured.0"}  # the total was donated
    plan = WebPlan(tmp_path)
    plan.run(total=5.0)
    assert plan.read("total") == 6.0
    expected = x.astype(np.float64) @ weight.numpy()
    np.testing.assert_allclose(plan.read("1"), expected, rtol=1e-5, atol=1e-6)


def test_weights_are_a_safetensors_file(cpu, tmp_path):
    load_file = pytest.importorskip("safetensors.numpy").load_file
    gain = normal(6)
    half = normal(3).astype(np.float16)
    mask = np.array([True, False, True])

    @sd.compile
    def function(x, gain, half, mask):
        return rms_norm(x, gain), sd.where(mask, half, 0.0)

    export_web(function, tmp_path, sd.spec("f32", 2, 6), gain, half, mask)
    stored = load_file(tmp_path / "weights.safetensors")
    assert set(stored) == {"gain", "half", "mask"}
    np.testing.assert_array_equal(stored["gain"], gain)
    np.testing.assert_array_equal(stored["half"], half)
    np.testing.assert_array_equal(stored["mask"], mask)


def test_large_weights_are_several_files(wgpu, tmp_path, monkeypatch):
    monkeypatch.setattr("shaderdsl.web.files.SHARD_BYTES", 200)
    xs = [normal(30) for _ in range(4)]
    export_web(sd.compile(lambda xs: sum(xs)), tmp_path, xs)
    plan = WebPlan(tmp_path)
    assert len(plan.plan["weights"]) == 4
    plan.run()
    np.testing.assert_allclose(plan.read("result"), sum(xs), rtol=1e-5, atol=1e-6)


def test_an_export_replaces_an_older_one_and_leaves_other_files(cpu, tmp_path):
    (tmp_path / "mine.txt").write_text("kept")
    export_web(sd.compile(lambda a, b: a @ b), tmp_path, normal(3, 4), normal(4, 5))
    export_web(sd.compile(lambda a: a + 1.0), tmp_path, sd.spec("f32", 3), page=False)
    plan = json.loads((tmp_path / "plan.json").read_text())
    used = {kernel["file"] for kernel in plan["kernels"]}
    assert used
    there = {f"kernels/{p.name}" for p in (tmp_path / "kernels").iterdir()}
    assert there == used
    assert not list(tmp_path.glob("*.safetensors"))
    assert (tmp_path / "mine.txt").read_text() == "kept"


def test_a_model_generates_from_its_export(wgpu, tmp_path):
    """Token for token what the model itself continues."""
    config = nn.TransformerConfig(
        vocab_size=40,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        ffn_size=24,
        max_positions=64,
    )
    model = nn.Transformer.init(config, seed=3)
    exported = export_decode(model, tmp_path, positions=24)
    assert set(exported.inputs) - exported.given == {"ids", "start"}
    prompt = [5, 17, 2]
    wanted = model.generate(np.array(prompt, np.int32), max_new_tokens=12).tolist()
    plan, tokens = WebPlan(tmp_path), list(prompt)
    for at in range(len(wanted) - 1):
        plan.run(ids=[tokens[at]], start=at)
        if at + 1 == len(tokens):
            tokens.append(int(np.argmax(plan.read("0"))))
    assert tokens == wanted


def test_the_command_writes_a_site(cpu, tmp_path, capsys):
    out = tmp_path / "site"
    assert main(["web", str(out), "--steps", "7", "--device", "cpu"]) == 0
    assert f"site: {out}" in capsys.readouterr().out
    about = json.loads((out / "demo.json").read_text())
    assert about["steps"] == 7 and about["step"] == 0
    for part in ("train", "decode"):
        plan = json.loads((out / part / "plan.json").read_text())
        assert all((out / part / k["file"]).is_file() for k in plan["kernels"])
    assert (out / "index.html").is_file() and (out / "demo.js").is_file()
    # The weights are in one place, and the decoding step shares them by name.
    plan = json.loads((out / "train" / "plan.json").read_text())
    assert set(about["model"]) <= {entry["name"] for entry in plan["inputs"]}
    plan = json.loads((out / "decode" / "plan.json").read_text())
    first = {entry["name"]: entry["initial"] for entry in plan["inputs"]}
    assert {first[name] for name in about["model"]} == {None}


def test_the_command_goes_on_from_a_run(cpu, tmp_path, capsys):
    pytest.importorskip("safetensors")
    text = tmp_path / "a.txt"
    text.write_text("the quick brown fox jumps over the lazy dog; " * 30)
    trainer = small_trainer()
    trainer = Trainer(trainer.config, trainer.text, [str(text)])
    for _ in range(2):
        trainer.advance()
    trainer.save(tmp_path / "run")
    words = ["web", str(tmp_path / "site"), "--from", str(tmp_path / "run")]
    assert main([*words, "--device", "cpu"]) == 0
    about = json.loads((tmp_path / "site" / "demo.json").read_text())
    assert about["step"] == 2 and about["steps"] == 30
    assert main(["web", str(tmp_path / "x"), "--from", str(tmp_path / "no")]) == 1
    assert not (tmp_path / "x").exists()


def test_the_command_serves_until_it_is_interrupted(tmp_path):
    words = ["web", str(tmp_path), "--steps", "1", "--device", "cpu", "--serve", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "shaderdsl", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
        # What runs in the background of a shell ignores interrupts, and so would this.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        line = next(line for line in process.stdout if line.startswith("open http"))
        address = line.split()[1]
        with urllib.request.urlopen(f"{address}shaderdsl.js", timeout=30) as answer:
            assert answer.headers.get_content_type() == "text/javascript"
            assert b"navigator.gpu" in answer.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    finally:
        process.kill()
        process.communicate()


# ------------------------------------------------------------------ what is refused


def test_a_model_too_large_for_browsers_is_refused_with_numbers(cpu, tmp_path):
    model = {"embed": sd.spec("f32", 151_936, 1024), "norm": sd.spec("f32", 1024)}

    def function(model, ids):
        return rms_norm(sd.ops.embedding(model["embed"], ids), model["norm"])

    with pytest.raises(errors.LimitError) as caught:
        export_web(sd.compile(function), tmp_path / "site", model, sd.spec("i32", 8))
    text = str(caught.value)
    assert "134,217,728 B" in text and f"{151_936 * 1024 * 4:,} B" in text
    assert "model.embed" in text
    assert not (tmp_path / "site").exists()


def test_an_intermediate_too_large_is_refused(cpu, tmp_path):
    big = (sd.spec("f32", 1 << 14, 8), sd.spec("f32", 8, 1 << 14))
    twice = sd.compile(lambda a, b, c: a @ b @ c)
    with pytest.raises(errors.LimitError, match=r"1,073,741,824 B.*134,217,728 B"):
        export_web(twice, tmp_path / "site", *big, sd.spec("f32", 1 << 14, 2))
    assert not (tmp_path / "site").exists()


def test_a_function_that_was_never_called_needs_arguments(cpu, tmp_path):
    with pytest.raises(errors.TraceError, match="never called"):
        export_web(sd.compile(lambda x: x), tmp_path)
    with pytest.raises(errors.TraceError, match="takes a function"):
        export_web(3, tmp_path)


def test_ids_out_of_range_are_refused_before_anything_is_written(cpu, tmp_path):
    ids = np.array([0, 9], np.int32)
    with pytest.raises(errors.IndexRangeError):
        export_web(sd.compile(sd.ops.embedding), tmp_path / "x", normal(4, 2), ids)
    assert not (tmp_path / "x").exists()


# ------------------------------------------------------------------ in a browser


def small_trainer():
    config = TrainConfig(
        steps=30,
        batch=2,
        length=16,
        hidden=32,
        layers=1,
        heads=2,
        kv_heads=1,
        ffn=48,
        peak=1e-2,
        warmup=2,
    )
    text = "the quick brown fox jumps over the lazy dog; " * 30
    return Trainer(config, np.frombuffer(text.encode(), np.uint8))


def export_step(trainer, folder):
    rows = sd.spec("i32", trainer.config.batch, trainer.config.length)
    return export_web(
        trainer.train_step,
        folder,
        trainer.model,
        trainer.state,
        sd.asarray(np.float32(0)),
        rows,
        rows,
    )


def norm_pullback(x, gain, dy):
    y, pullback = sd.vjp(rms_norm, x, gain)
    return (y, *pullback(dy))


def look_up(table, ids, dy):
    """Gather, and its adjoint: a scatter."""
    y, pullback = sd.vjp(sd.ops.embedding, table, ids)
    return y, pullback(dy)[0]


def attend(q, k, v, dy):
    y, pullback = sd.vjp(
        lambda q, k, v: sd.ops.attention(q, k, v, causal=True), q, k, v
    )
    return (y, *pullback(dy))


def special(x):
    """What other compilers fold: NaN, infinities, -0.0."""
    cleaned = sd.where(sd.isnan(x), 0.0, x)
    return (
        sd.isnan(x),
        sd.isinf(x),
        sd.maximum(x, 0.0),
        sd.softmax(sd.clip(cleaned, -1e30, 1e30), axis=-1),
        sd.max(x, axis=-1),
        x == 0.0,
    )


def integers(a, b):
    return a * b, a // 7, a % 5, sd.cast(a, "f32") / 3.0, (a << 3) ^ b, sd.argmax(a)


ODD = np.array([[np.nan, 1, -1, 0], [np.inf, -np.inf, -0.0, 2]], np.float32)
HALF = normal(5, 7).astype(np.float16)
#: name: function, arguments, tolerance relative to the largest value
CASES = {
    "norm": (norm_pullback, (normal(9, 33), normal(33), normal(9, 33)), 1e-5),
    "long rows": (lambda x: sd.softmax(x, axis=-1), (normal(3, 5000),), 1e-5),
    "columns": (lambda x: (sd.sum(x, axis=0), sd.mean(x)), (normal(700, 37),), 1e-5),
    "product": (
        lambda a, b, c: sd.gelu(a @ b + c),
        (normal(65, 70), normal(70, 33), normal(33)),
        1e-5,
    ),
    "vector": (lambda a, b: a @ b, (normal(1, 300), normal(300, 80)), 1e-5),
    "look up": (
        look_up,
        (normal(11, 6), np.array([3, 0, 3, 10, 3], np.int32), normal(5, 6)),
        1e-5,
    ),
    "scan": (lambda x: sd.cumsum(x, axis=-1), (normal(4, 300),), 1e-5),
    "attention": (attend, tuple(normal(2, 20, 16) for _ in range(4)), 1e-5),
    "half": (lambda x: (x * 2.0, sd.sum(x, axis=1)), (HALF,), 1e-3),
    "special": (special, (ODD,), 1e-6),
    "integers": (
        integers,
        (np.arange(-20, 20, dtype=np.int32), np.arange(40, dtype=np.int32)),
        1e-6,
    ),
    "empty": (lambda x: (x + 1.0, sd.sum(x)), (normal(0, 3),), 1e-6),
    "random": (lambda s: sd.random.normal(sd.random.key(3), (50,)) * s, (1.5,), 1e-5),
}

TYPES = {
    "Float32Array": np.float32,
    "Int32Array": np.int32,
    "Uint32Array": np.uint32,
    "Uint8Array": np.uint8,
}

needs_chromium = pytest.mark.skipif(
    browser.CHROMIUM is None, reason="no chromium (Debian: apt-get install chromium)"
)


def call(name, inputs=(), reads=(), share=()):
    """One folder's part of what the page does."""
    return {
        "name": name,
        "share": dict(share),
        "calls": list(inputs),
        "reads": list(reads),
    }


@needs_chromium
def test_a_browser_gives_the_numbers_that_python_gives(cpu, tmp_path):
    """Ops, a training step and decoding from what it trained; wrong inputs; the pages.

    One test, because starting a browser and compiling there take the time.
    """
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime" / "shaderdsl.js").write_text(static("shaderdsl.js"))
    (tmp_path / "index.html").write_text(browser.PAGE)
    cases, expected = [], {}
    for name, (function, args, _) in CASES.items():
        compiled = sd.compile(function)
        exported = export_web(compiled, tmp_path / name, *args, page=False)
        cases.append(call(name, [{}], exported.outputs))
        expected[name] = [np.asarray(r) for r in tree.leaves(compiled(*args))]
    trainer = small_trainer()
    export_demo(tmp_path / "demo", trainer=trainer)
    batches, losses = [trainer.batches(k) for k in range(4)], []
    for _ in batches:
        trainer.advance()
        losses.append(float(trainer._total))
    steps = [
        {"inputs": b[:, :-1].tolist(), "labels": b[:, 1:].tolist()} for b in batches
    ]
    names = [f"model.{n}" for n, _ in nn.named_arrays(trainer.model)]
    ids = [116, 104, 101, 32, 113]
    tokens = [{"ids": [t], "start": k} for k, t in enumerate(ids)]
    logits = trainer.model(np.array(ids, np.int32)).numpy()
    cases += [
        call("demo/train", steps, ["total"]),
        call("demo/decode", tokens, ["0"], {n: ["demo/train", n] for n in names}),
        call("look up", [{"ids": [3, 0, 11, 1, 2]}], ["0"]),
        call("norm", [{"x": [1.0]}], ["0"]),
        call("norm", [{"y": [1.0]}], ["0"]),
        call("demo/train", [{}], ["total"]),
    ]
    export_web(sd.compile(rms_norm), tmp_path / "single", normal(4, 8), normal(8))
    (tmp_path / "cases.json").write_text(json.dumps(cases))

    answer = browser.visit(tmp_path, "index.html", timeout=480)
    assert "error" not in answer, answer["error"]
    results = answer["results"]
    for (name, wanted), found in zip(expected.items(), results):
        check_case(name, found, wanted)
    train, decode, *refused = results[len(CASES) :]
    assert "error" not in train, train
    assert "error" not in decode, decode
    found = [float(values(r["total"])[0]) for r in train]
    np.testing.assert_allclose(found, losses, rtol=2e-5)
    found = np.stack([values(r["0"]) for r in decode])
    scale = np.abs(logits).max()
    np.testing.assert_allclose(found, logits, rtol=0, atol=5e-4 * scale)

    said = [r["error"] for r in refused]
    assert "'ids' holds the id 11; ids are 0 to 10" in said[0]
    assert "'x' takes 297 values, f32[9,33], got 1" in said[1]
    assert "has no input 'y'; it has x, gain, dy" in said[2]
    assert "no value for the input inputs, labels" in said[3]

    single, demo = answer["pages"]["single"], answer["pages"]["demo"]
    assert single["state"] == "ran" and not single["problem"], single
    assert "rms_norm" in single["text"]
    assert demo["state"] == "ran" and not demo["problem"], demo
    assert int(demo["step"]) == 30
    assert float(demo["loss"]) < float(demo["first"]) - 1
    assert int(demo["bytes"]) == 16
    assert demo["ink"] > 500  # pixels of the curve


def check_case(name, found, wanted):
    """One case's results against Python's."""
    assert "error" not in found, (name, found)
    assert len(found[0]) == len(wanted), name
    for result, expected in zip(found[0].values(), wanted):
        got = values(result).reshape(expected.shape)
        if expected.dtype.kind in "iub":
            np.testing.assert_array_equal(got, expected, err_msg=name)
        elif expected.size:
            finite = expected[np.isfinite(expected)].astype(np.float64)
            limit = CASES[name][2] * np.abs(finite).max(initial=1e-6)
            np.testing.assert_allclose(got, expected, 0, limit, err_msg=name)


def values(found):
    kind, text = found
    return np.frombuffer(base64.b64decode(text), TYPES[kind])


@needs_chromium
def test_a_browser_takes_the_kernels_of_every_op(cpu, tmp_path, monkeypatch):
    """Its compiler is another one than wgpu's, and stricter about uniform control."""
    lanes = replace(
        BROWSER,
        features=replace(BROWSER.features, subgroups=True),
        enable_subgroups_directive=True,
    )
    texts = {}
    for target in (BROWSER, replace(BROWSER, online_from=0), lanes):
        monkeypatch.setattr(cpu, "target", target)
        for name, entry in REGISTRY.items():
            kinds = dict.fromkeys(entry.ids, "i32") | dict.fromkeys(entry.bools, "bool")
            specs, given, _ = arguments(entry.op, {}, kinds)
            for backward in (False, True):
                low = sd.lower(entry.op, *specs, backward=backward, **given)
                texts |= {k.wgsl: f"{name}: {k.name}" for k in low.kernels}
    assert len(texts) > 100
    pairs = [(name, text) for text, name in texts.items()]
    (tmp_path / "texts.json").write_text(json.dumps(pairs))
    (tmp_path / "index.html").write_text(browser.VALIDATE)
    answer = browser.visit(tmp_path, "index.html")
    assert answer == {"refused": [], "subgroups": True}


@needs_chromium
def test_a_page_without_webgpu_shows_a_sentence(tmp_path, cpu):
    export_web(sd.compile(lambda x: x + 1.0), tmp_path / "single", sd.spec("f32", 3))
    (tmp_path / "index.html").write_text(browser.ONE_PAGE)
    off = ("--disable-features=WebGPU", "--disable-blink-features=WebGPU")
    page = browser.visit(tmp_path, "index.html", flags=off)
    assert page["state"] == "refused"
    assert page["problem"].startswith("This browser has")
    assert page["problem"] in page["text"]
