"""The benchmark: rows, peers, what it says of what is missing or wrong."""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

import shaderdsl as sd
from shaderdsl import engine, function, ops
from shaderdsl.bench import clocks, measure, reference, report
from shaderdsl.bench.measure import Bench, Record
from shaderdsl.bench.rows import ROWS, chosen, order
from shaderdsl.bench.work import Row, distance
from shaderdsl.cli import main

NAMES = [r.name for r in ROWS]
ROOT = Path(__file__).resolve().parents[1]


def _tables():
    spec = importlib.util.spec_from_file_location(
        "table", ROOT / "benchmarks" / "table.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tables = _tables()


def test_names_are_unique_and_stand_for_what_begins_with_them():
    assert len(set(NAMES)) == len(NAMES)
    assert [r.name for r in chosen(["softmax"])[0]] == ["softmax"]
    assert [r.name for r in chosen(["matmul"])[0]] == [
        n for n in NAMES if n.startswith("matmul_")
    ]
    found, unknown = chosen(["copy", "nothing", "copy"])
    assert [r.name for r in found] == ["copy"]
    assert unknown == ["nothing"]
    assert len(chosen([])[0]) == len(ROWS)


@pytest.mark.parametrize(
    "row", [r for r in ROWS if r.name != "replay"], ids=lambda r: r.name
)
def test_each_row_is_right_at_its_small_size(row, cpu):
    work = row.make(True)
    result = work.run()
    error = work.error(result)
    assert error <= work.tolerance
    first = result[0] if isinstance(result, tuple | list) else result
    if isinstance(first, sd.Array) and row.name[:5] != "train":
        # A check that nothing can fail would let anything pass.
        wrong = first + 0.1 * (1.0 + sd.cast(first > 0.0, "f32"))
        if isinstance(result, tuple):
            wrong = (wrong, *result[1:])
        assert work.error(wrong) > work.tolerance


OPS = {
    "silu_mul": (ops.swiglu, [(3, 5), (3, 5)]),
    "gelu": (lambda x: ops.gelu(x, approximate="tanh"), [(3, 5)]),
    "rms_norm": (ops.rms_norm, [(4, 6), (6,)]),
    "layer_norm": (ops.layer_norm, [(4, 6), (6,), (6,)]),
    "softmax": (ops.softmax, [(4, 6)]),
}


@pytest.mark.parametrize("name", OPS)
def test_reference_gradients_are_those_of_differences(name):
    rng = np.random.default_rng(0)
    xs = [rng.standard_normal(s) for s in OPS[name][1]]
    f = getattr(reference, name)
    dy = rng.standard_normal(f(*xs).shape)
    got = getattr(reference, f"{name}_grad")(*xs, dy)
    for k, x in enumerate(xs):
        want = np.zeros_like(x)
        for i in np.ndindex(x.shape):
            steps = []
            for h in (1e-5, -1e-5):
                moved = [z.copy() for z in xs]
                moved[k][i] += h
                steps.append((f(*moved) * dy).sum())
            want[i] = (steps[0] - steps[1]) / 2e-5
        np.testing.assert_allclose(got[k], want, rtol=1e-6, atol=1e-8)


def test_reference_attention_is_that_of_differences():
    rng = np.random.default_rng(1)
    q, k, v, do = rng.standard_normal((4, 5, 3))
    got = reference.attention_grad(q, k, v, do)
    for n in range(3):
        for i in np.ndindex(5, 3):
            steps = []
            for h in (1e-5, -1e-5):
                moved = [q.copy(), k.copy(), v.copy()]
                moved[n][i] += h
                steps.append((reference.attention(*moved) * do).sum())
            want = (steps[0] - steps[1]) / 2e-5
            np.testing.assert_allclose(got[n][i], want, rtol=1e-5, atol=1e-8)


def test_distance_is_infinite_where_something_is_not_finite():
    assert distance([1.0, 2.0], [1.0, 2.0]) == 0
    assert distance([1.0, np.nan], [1.0, 2.0]) == np.inf
    assert distance([1.0], [1.0, 2.0]) == np.inf


def test_a_wrong_row_and_a_failing_row_are_told_and_not_timed(cpu):
    right = ROWS[NAMES.index("row_sum")]

    def wrong(quick):
        work = right.make(quick)
        run = work.run
        return dataclasses.replace(work, run=lambda: run() + 1.0)

    def failing(quick):
        raise ValueError("no such size\nmore")

    bench = Bench(True, 0.01)
    record = bench.row(Row("wrong", "", "GB/s", None, wrong))
    assert record.failed and record.seconds is None
    assert "WRONG" in record.notes[0]
    record = bench.row(Row("failing", "", "GB/s", None, failing))
    assert record.failed and record.notes == ["failed: ValueError: no such size"]
    record = bench.row(right)
    assert not record.failed and record.seconds > 0
    assert record.value == pytest.approx(128 * 2048 * 4 / record.seconds / 1e9)


def test_a_row_timed_at_low_clocks_is_timed_again(cpu, monkeypatch):
    class Falling:
        def __init__(self):
            self.asked, self.raised = [False, True, False, False, False], 0

        def rise(self):
            self.raised += 1

        def are_up(self):
            return self.asked.pop(0)

    times = iter([5.0, 2.0, 4.0, 3.0, 6.0])
    monkeypatch.setattr(measure, "median_time", lambda *args: next(times))
    row, falling = ROWS[NAMES.index("row_sum")], Falling()
    bench = Bench(True, 0.01, clocks=falling)
    record = bench.row(row)
    assert (record.seconds, record.notes, falling.raised) == (2.0, [], 2)
    record = bench.row(row)
    assert (record.seconds, falling.raised) == (3.0, 5)
    assert record.notes == ["the device's clocks were low"]


def test_clocks_are_up_where_the_product_is_fast(wgpu, retarget, monkeypatch):
    retarget(family="gpu")
    times = [1.0, 0.5, 2.5, 2.5, 0.51, 0.6, 0.8, 9.0, 9.0]
    monkeypatch.setattr(clocks, "time_once", lambda device, call, repeats: times.pop(0))
    monkeypatch.setattr(clocks.Clocks, "_product", lambda self: lambda: None)
    # The clock of the host goes on by one with each look at it.
    now = iter(range(100))
    monkeypatch.setattr(clocks.time, "perf_counter", lambda: next(now))
    c = clocks.Clocks(wgpu, seconds=3, most=4)
    assert c.fastest == 0.5
    assert c.rise() and times == [0.6, 0.8, 9.0, 9.0]
    assert c.are_up()
    assert not c.are_up()
    times[:] = [9.0] * 9
    assert not c.rise() and c.fastest == 0.5 and times


def test_ceilings_come_first_then_models():
    names = [r.name for r in sorted(ROWS, key=order)]
    assert set(names[:2]) == {"copy", "matmul_4096x4096x4096"}
    assert names[2].startswith("train_")


def test_peers_are_timed_checked_and_left_out_when_time_is_short(cpu, monkeypatch):
    monkeypatch.setattr(measure, "time_torch", lambda torch, run, seconds: run())
    right = ROWS[NAMES.index("row_sum")]

    def make(quick):
        def torch(module, compiled):
            if module.broken:
                raise RuntimeError("no memory")
            return lambda: 0.25 if compiled else 0.5

        return dataclasses.replace(right.make(quick), torch=torch)

    class Torch:
        broken = False

        class cuda:
            empty_cache = staticmethod(lambda: None)

        class _dynamo:
            reset = staticmethod(lambda: None)

    row = dataclasses.replace(right, make=make)
    peers = ["torch", "torch.compile", "handwritten"]
    record = Bench(True, 0.01, peers, Torch).row(row)
    moved = 128 * 2048 * 4 / 1e9
    assert record.peers == {"torch": moved / 0.5, "torch.compile": moved / 0.25}
    record = Bench(True, 0.01, peers, Torch, 0.0).row(row)
    assert list(record.peers) == ["torch"]
    assert record.notes == ["torch.compile left out: the time is short"]
    Torch.broken = True
    record = Bench(True, 0.01, ["torch"], Torch).row(row)
    assert record.notes == ["torch failed: RuntimeError: no memory"]
    assert record.value and not record.failed


def test_what_peers_give_can_be_the_target(cpu, monkeypatch):
    monkeypatch.setattr(measure, "time_torch", lambda torch, run, seconds: 0.5)
    right = ROWS[NAMES.index("row_sum")]

    def make(quick):
        return dataclasses.replace(right.make(True), torch=lambda *_: None)

    class Torch:
        class cuda:
            empty_cache = staticmethod(lambda: None)

    row = dataclasses.replace(right, make=make, beats="torch")
    record = Bench(False, 0.01, ["torch"], Torch).row(row)
    assert record.target == record.peers["torch"] == 128 * 2048 * 4 / 1e9 / 0.5
    record = Bench(False, 0.01).row(row)
    assert record.target is None
    assert record.notes == ["its target is torch, which was not timed"]
    # Targets are of the large sizes.
    record = Bench(True, 0.01, ["torch"], Torch).row(row)
    assert record.target is None and not record.notes
    assert right.target and Bench(True, 0.01).row(right).target is None


@pytest.mark.parametrize("row", [r for r in ROWS if r.name.endswith("_default")])
def test_attention_backward_is_timed_with_scratch_and_by_default(row, cpu, monkeypatch):
    """What the targets are those of, and what an attention alone gets by itself."""
    asked = []
    plan_for = engine.plan_for
    monkeypatch.setattr(
        function, "plan_for", lambda *a: asked.append(a[3:]) or plan_for(*a)
    )
    (other,) = [r for r in ROWS if f"{r.name}_default" == row.name]
    assert row.target is None and "default budget" in row.title
    assert other.target is not None and "2 GiB of scratch" in other.title
    row.make(True).run()
    assert not any(a for a in asked)
    other.make(True).run()
    assert asked[-1] == (2 << 30,)


def test_units():
    work = type("W", (), {"bytes": 8e9, "flops": 6e12})
    values = {"GB/s": 4.0, "TFLOP/s": 3.0, "µs": 2e6, "ms": 2e3, "tokens/s": 0.5}
    for unit, value in values.items():
        assert Row("r", "", unit, None, None).value(2.0, work) == value


@pytest.mark.parametrize(
    "name",
    [
        "copy",
        "swiglu",
        "swiglu_backward",
        "gelu",
        "gelu_backward",
        "rms_norm",
        "layer_norm",
        "softmax",
        "row_sum",
        "gemv_t",
        "matmul_8192x4096x11008",
    ],
)
def test_handwritten_kernels_are_right(name, wgpu):
    work = ROWS[NAMES.index(name)].make(True)
    assert work.error(work.handwritten()()) < 1e-5


def test_the_command_goes_on_past_what_is_missing(cpu, capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    figures, plot = tmp_path / "b.json", tmp_path / "b.png"
    arguments = ["bench", "nothing", "row_sum", "copy", "--quick", "--seconds", "0.01"]
    arguments += ["--against", "torch,handwritten", "--json", str(figures)]
    assert main([*arguments, "--plot", str(plot)]) == 1
    out, err = capsys.readouterr()
    assert "no row is called 'nothing'" in err
    assert "PyTorch is not installed" in out
    assert "no timestamps" in out
    assert "column of hand-written ones stays empty" in out
    content = json.loads(figures.read_text())
    assert [r["name"] for r in content["rows"]] == ["copy", "row_sum"]
    assert all(r["value"] > 0 and not r["peers"] for r in content["rows"])
    assert content["device"] == "cpu"
    assert plot.read_bytes()[:4] == b"\x89PNG"
    assert "| sum of rows |" in out


def test_time_that_is_over_is_said(cpu, capsys):
    arguments = ["bench", "copy", "row_sum", "--quick", "--seconds", "0.01"]
    assert main([*arguments, "--minutes", "1e-9"]) == 0
    out = capsys.readouterr().out
    assert "copy" in out and "not begun" in out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--against", "tensorflow"],
        ["--seconds", "0"],
        ["--minutes", "-1"],
    ],
)
def test_the_command_refuses(arguments, cpu, capsys):
    assert main(["bench", "copy", "--quick", *arguments]) == 2


def test_the_rows_are_listed(capsys):
    assert main(["bench", "--rows"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()] == NAMES


def test_only_unknown_rows_are_an_error(cpu, capsys):
    assert main(["bench", "nothing"]) == 1
    assert "nothing" in capsys.readouterr().err


def test_the_table_has_ratios_to_targets_and_ceilings():
    def record(name, unit, value, target=None, **more):
        moved = {"GB/s": value * 1e9, "µs": 1}.get(unit, 0)
        flops = value * 1e12 if unit == "TFLOP/s" else 0
        return Record(
            name, name, unit, target, 1.0, value, 1e-7, 0, moved, flops, **more
        )

    records = [
        record("copy", "GB/s", 4000.0, peers={"torch": 4100.0}),
        record("matmul_4096", "TFLOP/s", 40.0, 45.0, peers={"torch": 50.0}),
        record("half", "GB/s", 2050.0, 4000.0),
        record("slow", "µs", 600.0, 590.0),
        Record("bad", "bad", "µs", None, notes=["failed: x"], failed=True),
    ]
    assert report.ceilings(records) == (4100.0, 50.0)
    lines = report.table(records, ["torch"], True).splitlines()
    assert lines[3].split(" | ")[1:6] == [
        "40.0 TFLOP/s",
        "80%",
        "≥ 45.0",
        "0.89",
        "50.0 (0.80×)",
    ]
    assert "50%" in lines[4] and "0.51" in lines[4]
    assert "≤ 590" in lines[5] and "1.02" in lines[5]
    assert "failed: x" in lines[6]
    assert all(line.count("|") == lines[0].count("|") for line in lines)


def run_of(*rows):
    return {
        name: {
            "title": name,
            "unit": unit,
            "value": value,
            "target": target,
            "kernels": kernels,
            "peers": peers,
        }
        for name, unit, value, target, kernels, peers in rows
    }


def test_shares_of_the_ceilings_are_of_bytes_or_of_flops():
    def of(unit, **more):
        record = Record("r", "r", unit, None, 2e-3, 1.0, **more)
        return report.share(record, 4000.0, 50.0)

    assert of("GB/s", bytes=4e9, flops=1) == 0.5
    assert of("TFLOP/s", bytes=4e9, flops=2e10) == 0.2
    assert of("µs", bytes=4e9) == 0.5
    assert of("µs", bytes=4e9, flops=2e10) == of("ms", flops=2e10) == 0.2
    assert of("tokens/s") is None
    record = Record("r", "r", "µs", None, 2e-3, 1.0, bytes=1, flops=1)
    assert report.share(record, None, None) is None


def test_two_runs_make_one_table():
    first = run_of(
        ("train_3M", "ms", 2.0, 3.5, 170, {"torch": 9.0, "torch.compile": 5.0}),
        ("decode_124M", "tokens/s", 1200.0, 800.0, 87, {"torch": 800.0}),
        ("copy", "GB/s", 4000.0, None, 1, {"torch": 4100.0, "handwritten": 2000.0}),
        ("softmax", "GB/s", 3999.0, 4030.0, 1, {}),
        ("swiglu", "GB/s", 4249.0, 4250.0, 1, {}),
        ("replay", "µs", 2.5, 2.0, 170, {}),
        ("gelu", "GB/s", None, 4250.0, 0, {"torch": 4000.0}),
        ("gemv", "GB/s", 3701.0, 3700.0, 2, {}),
        ("of another version", "µs", 5.0, None, 1, {}),
    )
    second = run_of(
        ("copy", "GB/s", 4010.0, None, 2, {}),
        ("softmax", "GB/s", 4040.0, 4030.0, 1, {}),
        ("swiglu", "GB/s", 4260.0, 4250.0, 1, {}),
        ("gelu", "GB/s", 4251.0, 4250.0, 1, {}),
        ("replay", "µs", 1.9, 2.0, 170, {}),
        ("train_3M", "ms", 2.1, 3.5, 170, {}),
        ("decode_124M", "tokens/s", 900.0, None, 87, {}),
    )
    head, _, *lines = tables.table([first, second]).splitlines()
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines]
    assert head.startswith(tables.START)
    assert all(len(c) == 9 for c in cells)
    # In the order of the benchmark's rows, whatever was measured when.
    assert [c[0] for c in cells] == [
        "copy, GB/s",
        "swiglu, GB/s",
        "softmax, GB/s",
        "gelu, GB/s",
        "gemv, GB/s",
        "train_3M, ms",
        "decode_124M, tokens/s",
        "replay, µs",
        "of another version, µs",
    ]
    found = {c[0].partition(",")[0]: c[1:] for c in cells}
    assert found["copy"] == [
        "1 / 2",
        "4,000",
        "4,010",
        "",
        "",
        "4,100 (0.98×)",
        "",
        "2,000 (2.00×)",
    ]
    assert found["train_3M"][1:] == [
        "2.00",
        "2.10",
        "≤ 3.5",
        "yes",
        "9.00 (4.50×)",
        "5.00 (2.50×)",
        "",
    ]
    assert found["decode_124M"][3:6] == ["≥ PyTorch eager", "yes", "800 (1.50×)"]
    assert found["softmax"][3:5] == ["≥ 4,030", "0.99"]
    # Close, and yet missed.
    assert found["swiglu"][3:5] == ["≥ 4,250", "1.000"]
    assert found["replay"][3:5] == ["≤ 2", "1.25"]
    # One run is not enough.
    assert found["gemv"][:5] == ["2", "3,701", "-", "≥ 3,700", "not measured"]
    assert found["gelu"][:6] == ["1", "-", "4,251", "≥ 4,250", "not measured", "4,000"]


def test_the_table_of_one_run_goes_into_a_text(tmp_path, monkeypatch, capsys):
    run = run_of(("copy", "GB/s", 4000.0, None, 1, {}))
    path, text = tmp_path / "run.json", tmp_path / "text.md"
    path.write_text(json.dumps({"rows": list(run.values())}))
    rows = [{"name": n, **r} for n, r in run.items()]
    path.write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(sys, "argv", ["table.py", str(path)])
    tables.main()
    new = capsys.readouterr().out.strip()
    assert "| copy, GB/s | 1 | 4,000 |" in new and "second" not in new
    text.write_text("# A\n\n| work | kernels |\n|---|---|\n| old | 1 |\n\nafter\n")
    monkeypatch.setattr(sys, "argv", ["table.py", str(path), "--into", str(text)])
    for _ in range(2):  # what it wrote, it finds again
        tables.main()
        assert text.read_text() == f"# A\n\n{new}\n\nafter\n"
    text.write_text("no table\n")
    with pytest.raises(ValueError, match="no table"):
        tables.main()
    assert text.read_text() == "no table\n"


def test_the_table_in_the_docs_can_be_replaced():
    text = (ROOT / "docs" / "performance.md").read_text("utf-8")
    new = tables.replaced(text, "| new |")
    assert len(new) < len(text) - 2000 and "| new |\n\n" in new


def test_pytorch_without_cuda_is_said(monkeypatch):
    class Torch:
        class cuda:
            is_available = staticmethod(lambda: False)

    monkeypatch.setitem(sys.modules, "torch", Torch)
    torch, why = measure.find_torch(["torch"])
    assert torch is None and "no CUDA device" in why
    assert measure.find_torch(["handwritten"]) == (None, "")
