"""Schedules' choices: what they may not change, the search, the file of winners."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import shaderdsl as sd
from shaderdsl import engine, ops, tuner
from shaderdsl.codegen import choice as choices
from shaderdsl.codegen import row
from shaderdsl.codegen.choice import Choice, Fixed, Tuned
from shaderdsl.codegen.column import ColumnSchedule
from shaderdsl.codegen.lower import trials
from shaderdsl.codegen.row import RowSchedule
from shaderdsl.codegen.target import UNBOUNDED_LOOP_BUDGET, Features, Limits
from shaderdsl.errors import DeviceError, DeviceLostError, ShaderError
from shaderdsl.runtime import current, tuned
from shaderdsl.tracing import Traced
from shaderdsl.tuner_check import Data, check

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """The adapter with a cache folder of its own, and its choices put back after."""
    monkeypatch.setenv("SHADERDSL_CACHE", str(tmp_path))
    if not any(d.spec.startswith("wgpu") for d in sd.devices()):
        pytest.skip("no adapter")
    device = sd.use_device("wgpu")
    before = device.target
    device.target = dataclasses.replace(before, tuned=Tuned())
    yield device
    device.target = before
    sd.use_device("cpu")


def as_gpu(device):
    """Plan as for a GPU, on whatever driver there is."""
    features = dataclasses.replace(device.target.features, wide_words=False)
    device.target = dataclasses.replace(device.target, family="gpu", features=features)


@sd.op("r n -> r n")
def softmax(x):
    return sd.softmax(x, over="n")


@sd.op("r n, n -> n")
def column_sum(x, w):
    return sd.sum(x * x, over="r") * w


@sd.op("m k, k n -> m n")
def matmul(a, b):
    return sd.sum(a * b, over="k")


@sd.op("n, n -> n")
def gated(g, u):
    return sd.silu(g) * u


@sd.op("h t c, h s c, h s c -> h t c")
def attend(q, k, v):
    p = sd.softmax(sd.sum(q * k, over="c"), over="s")
    return sd.sum(p * v, over="s")


@sd.op("d, m d, n d -> m, n")
def products_of_a_normed_row(x, v, w):
    y = x / sd.sqrt(sd.sum(x * x, over="d"))
    return sd.sum(y * v, over="d"), sd.sum(y * w, over="d")


WORKS = {
    "row": (softmax, [(5, 100)]),
    "short rows": (softmax, [(37, 12)]),
    "long rows": (softmax, [(3, 1500)]),
    "one row": (products_of_a_normed_row, [(90,), (37, 90), (20, 90)]),
    "column": (column_sum, [(70, 36), (36,)]),
    "contract": (matmul, [(33, 70), (70, 20)]),
    "map": (gated, [(1030,), (1030,)]),
    "online": (attend, [(2, 40, 16), (2, 50, 16), (2, 50, 16)]),
}


def trials_of(function, shapes, backward=False):
    """Trials of an op at given shapes, on the device in use."""
    specs = [sd.spec("f32", *shape) for shape in shapes]
    traced = Traced(function, specs, "lower", named=function)
    return trials(traced.outs, current().target, inputs=traced.inputs)


@pytest.mark.parametrize("family", ["software", "gpu"])
@pytest.mark.parametrize("work", WORKS)
def test_every_candidate_computes_the_plain_expression(work, family, gpu):
    if family == "gpu":
        as_gpu(gpu)
    function, shapes = WORKS[work]
    for trial in trials_of(function, shapes):
        data = Data.draw(trial)
        buffers = data.upload(gpu)
        # Some of each: all of them would take minutes on a software driver.
        some = 1 if work == "online" else 3
        for choice in trial.choices[:: -max(1, len(trial.choices) // some)]:
            tuner._prepare(trial, choice, buffers, data)


def test_a_norm_with_column_sums_takes_every_kind_of_choice(gpu):
    def pullback(x, w, dy):
        return sd.vjp(ops.rms_norm, x, w)[1](dy)

    (trial,) = (
        t
        for t in trials_of(pullback, [(50, 96), (96,), (50, 96)])
        if len(t.outputs) > 1
    )
    data = Data.draw(trial)
    buffers = data.upload(gpu)
    groups = {dict(c.values)["groups"] for c in trial.choices}
    assert len(groups) > 1
    for choice in trial.choices[:: max(1, len(trial.choices) // 4)]:
        tuner._prepare(trial, choice, buffers, data)


def test_a_choice_that_does_not_cover_the_row_is_not_taken(gpu):
    (trial,) = trials_of(softmax, [(4, 400)])
    short = Choice.of("row", RowSchedule(8, 1, 2))
    gpu.target = dataclasses.replace(gpu.target, tuned=Tuned({trial.key: short}))
    low = sd.lower(softmax, sd.spec("f32", 4, 400))
    assert "does not fit here: row(width=8" in low.explain()
    x = np.random.default_rng(0).standard_normal((4, 400), np.float32)
    want = np.exp(x - x.max(1, keepdims=True))
    want /= want.sum(1, keepdims=True)
    np.testing.assert_allclose(softmax(x).numpy(), want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "schedule",
    [
        RowSchedule(0, 1, 4),
        RowSchedule(24, 1, 8),  # no power of two
        RowSchedule(64, 64, 4),  # too many invocations
        RowSchedule(64, 1, 1),  # does not reach the end
        RowSchedule(64, 1, 4, 7),  # walks rows for no column
        RowSchedule(64, 1, -1),
    ],
)
def test_row_refuses(schedule):
    from shaderdsl.codegen.target import PORTABLE

    assert not row.fits(schedule, 100, 200, False, 2, PORTABLE)


def test_winners_are_used_by_a_second_process(gpu, tmp_path):
    search = tuner.Search(seconds=0.5)
    results = []
    search.report = results.append
    with tuner.searching(search):
        sd.lower(column_sum, sd.spec("f32", 300, 64), sd.spec("f32", 64))
    assert len(results) == 2  # the sum and the map after it
    assert engine.before_planning is None
    (trial, *_) = trials_of(column_sum, [(300, 64), (64,)])
    assert trial.key in gpu.target.tuned
    # Whatever won: the second process is to see what the file says.
    other = Choice.of("column", ColumnSchedule(3, 32))
    tuned.save(gpu.name, gpu.driver, {trial.key: other}, {})
    code = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "import shaderdsl as sd\n"
        "from test_tuning import column_sum\n"
        "sd.use_device('wgpu')\n"
        "low = sd.lower(column_sum, sd.spec('f32', 296, 64), sd.spec('f32', 64))\n"
        "print(low.explain())\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT
    )
    assert run.returncode == 0, run.stderr
    assert f"tuned: {other}" in run.stdout
    assert "workgroups of 32" in run.stdout


def test_the_same_schedules_give_the_same_bits(gpu):
    x = np.random.default_rng(1).standard_normal((6, 700), np.float32)
    (trial,) = trials_of(softmax, [x.shape])
    for choice in trial.choices[:2]:
        gpu.target = dataclasses.replace(gpu.target, tuned=Tuned({trial.key: choice}))
        results = []
        for _ in range(3):
            engine._plans.clear()
            results.append(softmax(x).numpy().tobytes())
        assert len(set(results)) == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda c: c["stamp"].update(library="older"), "version of shaderdsl was"),
        (lambda c: c["stamp"].update(driver="other"), "the driver was 'other'"),
        (lambda c: c["stamp"].update(adapter="other"), "the adapter was 'other'"),
        (lambda c: c["stamp"].update(format=0), "layout of the file was 0"),
        (
            lambda c: next(iter(c["kernels"].values()))["values"].update(size=128),
            "it was changed after it was measured",
        ),
        (lambda c: c.pop("kernels"), "it is damaged"),
        (
            lambda c: next(iter(c["kernels"].values())).update(values={"size": "x"}),
            "it is damaged",
        ),
    ],
)
def test_a_foreign_file_is_not_used_and_says_why(change, reason, gpu):
    one = Choice("map", (("size", 32), ("wide", 1)))
    path = tuned.save(gpu.name, gpu.driver, {"key": one}, {})
    assert tuned.load(gpu.name, gpu.driver) == {"key": one}
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    found = tuned.load(gpu.name, gpu.driver)
    assert not found
    assert reason in found.note
    gpu.target = dataclasses.replace(gpu.target, tuned=found)
    assert reason in sd.lower(gated, sd.spec("f32", 64), sd.spec("f32", 64)).explain()


@pytest.fixture
def shipped(gpu, tmp_path, monkeypatch):
    """A shipped file of two kernels, of which one was no faster than its default; how
    the device plans a norm of columns with what is loaded; the winner.
    """
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path / "shipped")
    (trial, *_) = trials_of(column_sum, [(300, 64), (64,)])
    default, other = trial.choices[0], Choice.of("column", ColumnSchedule(3, 32))
    assert other.values != default.values
    best = dataclasses.replace(other, over=default.values)
    stays = dataclasses.replace(default, over=default.values)
    tuned.save(gpu.name, gpu.driver, {trial.key: best, "no faster": stays}, {})
    path = tuned.ship(gpu.name, gpu.driver, tuned.SHIPPED, "by a test")
    tuned.path_of(gpu.name).unlink()

    def explained():
        found = tuned.load(gpu.name, gpu.driver)
        gpu.target = dataclasses.replace(gpu.target, tuned=found)
        return sd.lower(
            column_sum, sd.spec("f32", 296, 64), sd.spec("f32", 64)
        ).explain()

    return path, explained, trial.key, other


def test_shipped_choices_are_used_by_drivers_of_a_family(gpu, shipped):
    path, explained, key, other = shipped
    content = json.loads(path.read_text())
    assert list(content["kernels"]) == [key] and "by a test" in content["made"]
    assert f"tuned: {other}" in explained()
    assert [e["choice"] for e in tuned.entries(gpu.name, gpu.driver)] == [str(other)]
    backend, version = gpu.driver.split(" ", 1)
    assert tuned.load(gpu.name, f"{backend} {version}.1, later")
    for driver in (f"Metal {version}", f"{backend} X{version}"):
        assert not tuned.load(gpu.name, driver)
        assert "not used: the driver" in tuned.load_shipped(gpu.name, driver).note
        # Nobody can mend that: it is no word for each process.
        assert not tuned.load(gpu.name, driver).note
    assert not tuned.load("another adapter", gpu.driver)


def test_what_was_measured_here_goes_before_what_was_shipped(gpu, shipped):
    _, explained, key, _ = shipped
    mine = Choice.of("column", ColumnSchedule(5, 32))
    tuned.save(gpu.name, gpu.driver, {key: mine}, {})
    assert f"tuned: {mine}" in explained()


@pytest.mark.parametrize(
    ("change", "used"),
    [
        (lambda c, e: None, True),
        # Another default than it was compared with.
        (lambda c, e: e["over"].update({next(iter(e["over"])): 77}), False),
        # Numbers and names that the schedule does not know.
        (lambda c, e: e["values"].update({next(iter(e["values"])): -1}), False),
        (lambda c, e: e.update(values={"rows": 1}), False),
        (lambda c, e: e.update(schedule="other"), False),
    ],
)
def test_a_shipped_choice_that_means_nothing_any_more_is_left_out(
    gpu, shipped, change, used
):
    """The default stands in, whose results are right."""
    path, explained, key, _ = shipped
    content = json.loads(path.read_text())
    change(content, content["kernels"][key])
    content["check"] = tuned._check(content["stamp"], content["kernels"])
    path.write_text(json.dumps(content))
    assert ("tuned: " in explained()) == used
    x, w = np.random.default_rng(0).standard_normal((2, 296, 64), np.float32)
    got = column_sum(x, w[0]).numpy()
    want = np.sum(x.astype(np.float64) ** 2, 0) * w[0]
    np.testing.assert_allclose(got, want, 1e-5, 1e-4)


def test_shipped_files_suit_the_schedules_of_this_version():
    """Each is whole, and each choice has the fields of its schedule's default."""
    for path in tuned.SHIPPED.glob("*.json"):
        content = json.loads(path.read_text())
        assert content["made"] and path.name == tuned.file_name(
            content["stamp"]["adapter"]
        )
        found = tuned._load(path, content["stamp"])
        assert found and not found.note
        for choice in found.values():
            assert choice.over is not None and choice.values != choice.over
            assert [n for n, _ in choice.values] == [n for n, _ in choice.over]


def test_shipped_choices_are_those_of_kernels_that_exist(retarget):
    """Their keys follow from the structure, which a change of the compiler may alter:
    then what was measured is to be measured again.
    """
    limits = Limits(
        max_storage_buffers=524_288,
        max_workgroup_storage=49_152,
        max_invocations=1024,
        max_workgroup_size_x=1024,
        max_workgroups=65_535,
        max_binding_bytes=2_147_483_644,
        max_buffer_bytes=4_292_870_144,
        uniform_alignment=64,
        storage_alignment=32,
    )
    retarget(
        family="gpu",
        limits=limits,
        features=Features(f16=True, subgroups=True, timestamps=True),
        loop_budget=UNBOUNDED_LOOP_BUDGET,
        online_from=0,
        tuned=tuned.load_shipped("NVIDIA H200", "Vulkan 580.159.04, wgpu 0.32.0"),
    )
    f = sd.compile(lambda *x: ops.attention(*x, causal=True), scores=2 << 30)
    heads = [sd.spec("f32", n, 2048, 64) for n in (12, 4, 4)]
    assert "tuned: " in sd.lower(f, *heads, backward=True).explain()


def test_a_file_that_is_no_text_or_no_json_is_not_used(gpu):
    path = tuned.path_of(gpu.name)
    path.parent.mkdir(parents=True)
    for content in (b"\xff\xfe\x00", b"[]", b"null", b"{", b""):
        path.write_bytes(content)
        found = tuned.load(gpu.name, gpu.driver)
        assert not found
        assert "not used" in found.note
    # What cannot be used is replaced by the next winner.
    one = Choice("map", (("size", 32), ("wide", 1)))
    tuned.save(gpu.name, gpu.driver, {"key": one}, {})
    assert tuned.load(gpu.name, gpu.driver) == {"key": one}


def test_a_wrong_candidate_is_found_out_and_stops_nothing(gpu, monkeypatch):
    (trial,) = trials_of(softmax, [(64, 256)])
    wrong = [
        RowSchedule(16, 4, 1),  # reaches a part of the row only
        RowSchedule(4096, 1, 16),  # more invocations than the device has
        RowSchedule(3, 1, 0),  # the tree needs a power of two
    ]
    bad = [Choice.of("row", s) for s in wrong]
    monkeypatch.setattr(row, "fits", lambda *args: True)
    trial.choices[1:] = [*bad, *trial.choices[1:3]]
    result = tuner.find_best(trial, 40.0)
    assert not result.skipped
    assert [c for c, _ in result.failed] == bad
    reasons = [why for _, why in result.failed]
    assert "the plain expression gives" in reasons[0]
    assert result.best not in bad
    assert result.tried == len(trial.choices) - 3


def test_scores_that_a_mask_hides_need_not_be_written(gpu):
    """Nobody reads them; what is seen is compared all the same."""
    as_gpu(gpu)
    gpu.target = dataclasses.replace(gpu.target, online_from=0, scores=1 << 20)

    def pullback(q, k, v, dy):
        return sd.vjp(lambda *x: ops.attention(*x, causal=True), q, k, v)[1](dy)

    found = trials_of(pullback, [(1, 96, 16)] * 4)
    (trial,) = (t for t in found if t.hidden)
    data = Data.draw(trial)
    (scores,) = trial.hidden
    at = trial.outputs.index(scores)
    hidden = np.triu(np.ones((96, 96), bool), 1)
    want = data.wanted[at].reshape(96, 96)
    assert (want == 0)[hidden].all()
    assert (want != 0)[~hidden].mean() > 0.99
    buffers = data.upload(gpu)
    run = tuner._prepare(trial, trial.choices[0], buffers, data)
    got = gpu.download(run()[at], scores.shape, "f32")
    assert np.isnan(got.reshape(96, 96)).any()
    got.reshape(96, 96)[95, 3] = np.nan
    with pytest.raises(ShaderError, match=r"sum\[95, 3\] is nan"):
        check(scores, got, data.wanted[at], hidden=True)


def test_a_candidate_that_does_not_compile_stops_nothing(gpu):
    (trial,) = trials_of(gated, [(512,), (512,)])
    whole, bad = trial.program, trial.choices[1]

    def broken(choice):
        program = whole(choice)
        (kernel,) = program.kernels
        if choice == bad:
            kernel = dataclasses.replace(kernel, wgsl=f"{kernel.wgsl}\nfn nothing(")
        return dataclasses.replace(program, kernels=(kernel,))

    trial.program = broken
    del trial.choices[4:]
    result = tuner.find_best(trial, 40.0)
    assert [c for c, _ in result.failed] == [bad]
    assert result.tried == 3 and not result.skipped and result.best != bad


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("error", [DeviceLostError("gone"), RuntimeError("out of it")])
def test_a_candidate_that_fails_when_it_runs_stops_nothing(
    gpu, monkeypatch, error, late
):
    """Whether while it is timed for the first time or when the best are compared."""
    (trial,) = trials_of(gated, [(512,), (512,)])
    del trial.choices[4:]
    bad, prepare = trial.choices[1], tuner._prepare

    def failing(trial, choice, buffers, data):
        run = prepare(trial, choice, buffers, data)

        def call():
            if choice == bad and (not late or once.decided):
                raise error
            return run()

        return call

    class once:
        decided = False

    decide = tuner._decide

    def deciding(result, times, runs):
        once.decided = True
        if late:  # It would be taken if it ran.
            times[bad] = 1e-9
        decide(result, times, runs)

    monkeypatch.setattr(tuner, "_prepare", failing)
    monkeypatch.setattr(tuner, "_decide", deciding)
    result = tuner.find_best(trial, 40.0)
    assert [c for c, _ in result.failed] == [bad]
    assert result.best != bad and not result.skipped and result.best_seconds > 0
    if isinstance(error, DeviceLostError):  # and all that was prepared on it
        assert result.best == result.default
    else:
        assert result.tried == (4 if late else 3)


@pytest.mark.parametrize("default", [False, True])
def test_a_device_that_is_lost_is_opened_again(gpu, monkeypatch, default):
    (trial,) = trials_of(gated, [(512,), (512,)])
    del trial.choices[4:]
    bad = trial.choices[0 if default else 2]
    prepare, tried, opened = tuner._prepare, [], []

    def losing(trial, choice, buffers, data):
        tried.append(choice)
        if choice == bad:
            raise DeviceLostError("gone")
        return prepare(trial, choice, buffers, data)

    monkeypatch.setattr(tuner, "_prepare", losing)
    monkeypatch.setattr(tuner, "use_device", opened.append)
    result = tuner.find_best(trial, 40.0)
    assert opened == [gpu.info.spec] and result.failed == [(bad, "gone")]
    first, second, third, fourth = trial.choices
    if default:
        assert tried == [first] and result.skipped == "the default failed: gone"
    else:
        assert tried == [first, second, third, first, fourth]
        assert result.tried == 2 and not result.skipped


def test_a_kernel_that_cannot_be_searched_stops_nothing(gpu, monkeypatch):
    def fail(trial, seconds):
        raise MemoryError("no room\nmore")

    monkeypatch.setattr(tuner, "find_best", fail)
    found = []
    x = np.ones(96, np.float32)
    with tuner.searching(tuner.Search(report=found.append)):
        y = gated(x, x).numpy()
    np.testing.assert_allclose(y, 1 / (1 + np.exp(-1)), 1e-6)
    assert [r.skipped for r in found] == ["no room"]
    assert not gpu.target.tuned


def test_no_kernel_is_begun_after_the_time(gpu):
    found = []
    x = np.ones(100, np.float32)
    with tuner.searching(tuner.Search(report=found.append, until=0.0)):
        gated(x, x).numpy()
    assert [r.skipped for r in found] == ["not begun: the time is over"]
    assert "not begun" in tuner.describe(found[0]) and not gpu.target.tuned


def test_tuned_choices_can_be_switched_off(gpu, shipped, monkeypatch):
    _, explained, key, other = shipped
    mine = Choice.of("column", ColumnSchedule(5, 32))
    assert f"tuned: {other}" in explained()
    tuned.save(gpu.name, gpu.driver, {key: mine}, {})
    monkeypatch.setenv("SHADERDSL_TUNE", "0")
    text = explained()
    assert "tuned: " not in text
    assert "tuned schedules are not used: SHADERDSL_TUNE is 0" in text
    monkeypatch.setenv("SHADERDSL_TUNE", "")
    assert f"tuned: {mine}" in explained()


def test_an_unknown_wish_for_tuning_is_refused(cpu, monkeypatch):
    monkeypatch.setenv("SHADERDSL_TUNE", "yes")
    with pytest.raises(DeviceError, match="SHADERDSL_TUNE='yes'") as info:
        sd.lower(gated, sd.spec("f32", 17), sd.spec("f32", 17))
    assert "0 uses the defaults" in str(info.value)


def test_results_that_are_not_written_are_found_out(gpu):
    (trial,) = trials_of(gated, [(512,), (512,)])
    data = Data.draw(trial)
    buffers = data.upload(gpu)
    tuner._prepare(trial, trial.choices[0], buffers, data)
    whole = trial.program

    def half(choice):
        program = whole(choice)
        (kernel,) = program.kernels
        kernel = dataclasses.replace(kernel, workgroups=(1, 1, 1))
        return dataclasses.replace(program, kernels=(kernel,))

    trial.program = half
    with pytest.raises(ShaderError, match="wrong: gated"):
        tuner._prepare(trial, trial.choices[0], buffers, data)


@pytest.mark.parametrize("dtype", ["f32", "i32"])
def test_check_finds_single_wrong_values(dtype):
    class Result:
        name = "y"

    Result.dtype = dtype
    want = np.arange(12).reshape(3, 4) * (1.0 if dtype == "f32" else 1)
    check(Result, want.copy(), want)
    off = want.copy()
    off[2, 1] += 1
    with pytest.raises(ShaderError, match=r"y\[2, 1\] is 10"):
        check(Result, off, want)
    if dtype == "f32":
        off[2, 1] = np.nan
        with pytest.raises(ShaderError, match=r"y\[2, 1\] is nan"):
            check(Result, off, want)


def test_the_environment_asks_for_a_search(gpu, tmp_path):
    code = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "import numpy as np, shaderdsl as sd\n"
        "from test_tuning import gated\n"
        "sd.use_device('wgpu')\n"
        "x = np.ones(4096, np.float32)\n"
        "y = gated(x, x).numpy()\n"
        "assert abs(y[7] - 1 / (1 + np.exp(-1))) < 1e-6\n"
    )
    import os

    environment = {**os.environ, "SHADERDSL_TUNE": "1"}
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    assert run.returncode == 0, run.stderr
    assert "shaderdsl: tuned map_gated" in run.stderr
    assert len(tuned.load(gpu.name, gpu.driver)) == 1


def test_a_folder_that_cannot_be_written_stops_nothing(gpu, monkeypatch, capsys):
    def refuse(*args, **keywords):
        raise PermissionError("read-only")

    monkeypatch.setattr(tuned, "save", refuse)
    best = Choice("map", (("size", 128), ("wide", 1)))
    tuner.keep("key", tuner.Result("k", best, best))
    assert "not kept on disk" in capsys.readouterr().err
    assert gpu.target.tuned["key"].values == best.values


def test_keys_tell_structures_and_size_classes_apart(cpu):
    def key(function, *shapes):
        return trials_of(function, shapes)[0].key

    assert key(gated, (1000,), (1000,)) == key(gated, (1020,), (1020,))
    assert key(gated, (1000,), (1000,)) != key(gated, (1001,), (1001,))
    assert key(gated, (1000,), (1000,)) != key(gated, (2000,), (2000,))
    renamed = sd.op("n, n -> n")(lambda a, b: sd.silu(a) * b)
    assert key(gated, (1000,), (1000,)) == key(renamed, (1000,), (1000,))
    other = sd.op("n, n -> n")(lambda a, b: sd.silu(a) + b)
    assert key(gated, (1000,), (1000,)) != key(other, (1000,), (1000,))


def test_a_choice_of_other_fields_is_not_taken():
    config = RowSchedule(8, 1, 2)
    assert Choice.of("row", config).applied(RowSchedule(1, 1, 1)) == config
    with pytest.raises(ValueError):
        Choice("row", (("width", 8),)).applied(config)
    fixed = Fixed(Choice("row", (("width", 8),)))
    assert fixed.decide("row", config, lambda: (), lambda s: True) is config
    assert not fixed.used
    assert choices.Survey().decide("row", config, lambda: (), lambda s: True) is config


def test_a_step_of_adamw_is_tuned_in_its_contraction(gpu):
    """Updates in an epilogue overwrite what they read; apart they are tried as maps."""
    optimiser = sd.optim.AdamW(lr=1e-3)
    weight = sd.asarray(np.ones((24, 16), np.float32))
    x = sd.asarray(np.ones((8, 16), np.float32))

    def step(model, state, x):
        def loss(model):
            return sd.mean(ops.linear(x, model["w"]) ** 2)

        value, grads = sd.value_and_grad(loss)(model)
        return (*optimiser.update(model, grads, state), value)

    model = {"w": weight}
    state = optimiser.init(model)
    results = []
    compiled = sd.compile(step, donate=("model", "state"))
    with tuner.searching(tuner.Search(seconds=0.2, report=results.append)):
        model, state, _ = compiled(model, state, x)
    updates = [r for r in results if "adamw" in r.name and r.default.schedule != "map"]
    assert updates and not any(r.skipped for r in updates)
    assert np.isfinite(model["w"].numpy()).all()
