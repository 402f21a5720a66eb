"""The command line: help, exit status, and messages without a traceback."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import shaderdsl as sd
from shaderdsl.cli import COMMANDS, main
from shaderdsl.codegen.choice import Tuned

OPS = '''
import numpy as np
import shaderdsl as sd


@sd.op("... d, d -> ... d")
def rms_norm(x, gain, *, eps=1e-6):
    """x · rsqrt(mean(x²) + eps) · gain"""
    return x * sd.rsqrt(sd.mean(x * x, over="d") + eps) * gain


@sd.op("v d, t -> t d")
def embedding(table, ids):
    return table.at(v=ids)


embedding_draws = {"ids": {"ids": ("v", None)}, "nonempty": ("v",)}


@sd.op("t (h r p), t p -> t (h r p)", r=2)
def turned(x, cos):
    return x.at(r=1 - sd.index("r")) * cos


@sd.op("t-k+1, k -> t")
def window(x, w):
    return sd.sum(w, over="k") + 0.0 * sd.index("t")
'''


@pytest.fixture(autouse=True)
def default_device():
    """What the command line takes by itself, whatever other tests have chosen."""
    sd.use_device()
    yield
    sd.use_device("cpu")


@pytest.fixture
def ops_file(tmp_path):
    path = tmp_path / "my_ops.py"
    path.write_text(OPS)
    yield path
    sys.modules.pop("my_ops", None)
    sys.path[:] = [p for p in sys.path if p != str(tmp_path)]


@pytest.mark.parametrize("name", [name for name, _, _ in COMMANDS])
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    assert f"shaderdsl {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["nothing"],
        ["train", "--steps", "many"],
        ["show"],
        ["generate"],
        ["bench", "--fast"],
    ],
)
def test_a_command_written_wrongly_is_status_2(words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert "usage: shaderdsl" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["shaderdsl", "shaderdsl.cli"])
def test_it_runs_as_a_module(module):
    done = subprocess.run(
        [sys.executable, "-m", module, "--version"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0
    assert done.stdout.startswith("shaderdsl")


def test_devices_marks_the_one_in_use(capsys):
    assert main(["devices", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("* cpu")]
    assert sum(line.startswith("*") for line in lines) == 1


def test_devices_say_what_limits_and_features_are_for(capsys):
    assert main(["devices", "--json", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [d["spec"] for d in found if d["in_use"]] == ["cpu"]
    assert [d["spec"] for d in found] == [d.spec for d in sd.devices()]
    assert main(["devices", "--limits", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    section = lines[lines.index("cpu: cpu") :]
    for name in (*found[-1]["limits"], *found[-1]["features"]):
        line = next(line for line in section if line.startswith(name))
        assert len(line.split(maxsplit=2)) == 3  # name, value, use


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_knows_every_command(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name, _, _ in COMMANDS)


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes(capsys):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    ask = (
        "COMP_WORDS=(shaderdsl show --ba); COMP_CWORD=2; "
        "_shtab_shaderdsl; echo ${COMPREPLY[@]}"
    )
    done = subprocess.run(
        ["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True
    )
    assert done.stdout.strip() == "--backward", done.stderr


def test_an_unknown_device_is_an_error(capsys):
    assert main(["devices", "--device", "quantum"]) == 1
    error = capsys.readouterr().err
    assert "quantum" in error
    assert "cure:" in error
    assert "Traceback" not in error


def test_tune_searches_an_op_of_a_file_and_lists_it(
    ops_file, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("SHADERDSL_CACHE", str(tmp_path))
    if not any(d.spec.startswith("wgpu") for d in sd.devices()):
        pytest.skip("no adapter")
    device = sd.use_device("wgpu")
    before = device.target
    try:
        device.target = dataclasses.replace(before, tuned=Tuned())
        target = f"{ops_file}:rms_norm"
        arguments = ["tune", target, "--sizes", "d=96,...=70", "--seconds", "0.3"]
        assert main(arguments) == 0
        out = capsys.readouterr().out
        assert "row_rms_norm" in out and "3 kernel(s)" not in out
        assert len(device.target.tuned) >= 2  # forward and pullback
        assert main(["tune", "--list"]) == 0
        assert "row_rms_norm: row(" in capsys.readouterr().out
        late = ["tune", "swiglu", "train_3M", "--quick", "--minutes", "1e-9"]
        assert main(late) == 0
        assert "time is over" in (out := capsys.readouterr().out)
        assert "map_swiglu" in out and "random" not in out.partition("train_3M")[0]
        assert "contract_linear_sum_swiglu" in out
        assert "0 kernel(s) searched" in out
        assert main(["tune", "nothing", "--seconds", "0.3"]) == 1
        assert "no row is called 'nothing'" in capsys.readouterr().err
    finally:
        device.target = before
        sd.use_device("cpu")


def test_tune_has_nothing_to_do_on_the_cpu(capsys):
    assert main(["tune", "copy", "--device", "cpu"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["tune", "--list", "--device", "cpu"]) == 0
    assert main(["tune", "--seconds", "0"]) == 2
    assert main(["tune", "--minutes", "-1"]) == 2


def test_show_prints_the_kernels_that_run(ops_file, capsys):
    assert main(["show", f"{ops_file}:rms_norm", "--sizes", "d=512,...=8"]) == 0
    shown = capsys.readouterr().out
    from my_ops import rms_norm

    lowered = sd.lower(rms_norm, sd.spec("f32", 8, 512), sd.spec("f32", 512))
    for kernel in lowered.kernels:
        assert kernel.wgsl.strip() in shown
    assert "d=512, ...=8" in shown


def test_show_backward_and_explain(ops_file, capsys):
    words = ["show", f"{ops_file}:rms_norm", "--backward", "--explain"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "the pullback of rms_norm" in shown
    assert "workgroups" in shown
    assert "computes ;" not in shown and "second stage" in shown


def test_show_leaves_its_own_program_out(ops_file, tmp_path):
    """A derivative is made by no line of the user; the program is not one either."""
    program = tmp_path / "bin" / "shaderdsl"
    program.parent.mkdir()
    program.write_text("import sys\nfrom shaderdsl.cli import main\nsys.exit(main())\n")
    root = Path(sd.__file__).parents[1]
    words = ["show", f"{ops_file}:rms_norm", "--device", "cpu"]
    for more in ([], ["--backward"]):
        done = subprocess.run(
            [sys.executable, str(program), *words, *more],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(root)},
        )
        assert done.returncode == 0, done.stderr
        assert "mean" in done.stdout and "sys.exit" not in done.stdout


def test_show_math(ops_file, capsys):
    assert main(["show", f"{ops_file}:rms_norm", "--math", "--backward"]) == 0
    assert capsys.readouterr().out.strip()


def test_show_takes_dtypes_merged_axes_and_windows(ops_file, capsys):
    words = ["show", f"{ops_file}:embedding", "--dtypes", "ids=i32"]
    assert main([*words, "--sizes", "v=100,t=3"]) == 0
    assert main(["show", f"{ops_file}:turned", "--sizes", "h=3,p=8"]) == 0
    capsys.readouterr()


def test_show_names_leading_axes(ops_file, capsys):
    target = f"{ops_file}:rms_norm"
    assert main(["show", target, "--sizes", "b=3,t=5,d=8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sizes"] == {"b": 3, "t": 5, "d": 8}
    assert found["kernels"][0]["bytes"] == 4 * (2 * 3 * 5 * 8 + 8)
    assert found["cost"] == {"value": {"flops": "8·d·…", "bytes": "8·d·… + 4·d"}}


def test_show_precedes_kernels_by_the_lines_they_come_from(ops_file, capsys):
    assert main(["show", f"{ops_file}:rms_norm", "--backward"]) == 0
    out = capsys.readouterr().out
    line = 'return x * sd.rsqrt(sd.mean(x * x, over="d") + eps) * gain'
    number = OPS.splitlines().index(f"    {line}") + 1
    assert f"// my_ops.py:{number}: {line}" in out
    assert "FLOPs, at least" in out


def test_show_writes_a_page(ops_file, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["show", f"{ops_file}:turned", "--html", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert (
        "<svg" in text
        and "turned" in text
        and "http" not in text.replace("http://www.w3.org/2000/svg", "")
    )


@pytest.mark.skipif(shutil.which("script") is None, reason="needs script(1)")
@pytest.mark.parametrize(("setting", "coloured"), [("", True), ("NO_COLOR=1 ", False)])
def test_colours_on_a_terminal_only(ops_file, capsys, setting, coloured):
    words = f"-m shaderdsl show {ops_file}:turned --device cpu"
    assert main(["show", f"{ops_file}:turned", "--device", "cpu"]) == 0
    assert "\x1b" not in capsys.readouterr().out
    command = f"{setting}TERM=xterm-256color {sys.executable} {words}"
    done = subprocess.run(
        ["script", "-qec", command, "/dev/null"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0
    found = re.search(r"\x1b\[(\d+;)*[39]\d(;\d+)*m", done.stdout)
    assert (found is not None) == coloured


def test_check_for_a_program(ops_file, capsys):
    pytest.importorskip("hypothesis")
    assert main(["check", f"{ops_file}:turned", "--json", "--device", "cpu"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["passed"] is True


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["turned", "--sizes", "q=3"], 2, "no axis 'q'"),
        (["rms_norm", "--sizes", "d"], 2, "name=value"),
        (["rms_norm", "--sizes", "d=big"], 2, "is a number"),
        (["rms_norm", "--dtypes", "y=f16"], 2, "no operand 'y'"),
        (["nothing"], 1, "no op called 'nothing'"),
        (["embedding"], 1, "embedding"),  # ids cannot be f32
    ],
)
def test_show_refuses(ops_file, capsys, words, status, said):
    name, *more = words
    assert main(["show", f"{ops_file}:{name}", *more]) == status
    assert said in capsys.readouterr().err


def test_files_that_cannot_be_imported_name_their_line(tmp_path, capsys):
    (tmp_path / "bad.py").write_text("x = 1\ny = x / 0\n")
    assert main(["show", f"{tmp_path}/bad.py:f"]) == 1
    error = capsys.readouterr().err
    assert "ZeroDivisionError" in error
    assert "bad.py:2" in error
    (tmp_path / "worse.py").write_text("def f(:\n")
    assert main(["show", f"{tmp_path}/worse.py:f"]) == 1
    assert "worse.py:1" in capsys.readouterr().err
    assert main(["show", f"{tmp_path}/gone.py:f"]) == 1
    assert "no Python file" in capsys.readouterr().err
    assert main(["show", "no_such_module:f"]) == 1
    assert "no file or module" in capsys.readouterr().err
    (tmp_path / "empty.py").write_text("x = 1\n")
    assert main(["check", f"{tmp_path}/empty.py"]) == 1
    assert "defines no op" in capsys.readouterr().err


WRONG = """
import shaderdsl as sd

@sd.op("n, n -> n")
def product(a, b):
    return a * b

def product_reference(a, b):
    return a + b
"""


def test_check_passes_a_right_op_and_fails_a_wrong_one(tmp_path, ops_file, capsys):
    pytest.importorskip("hypothesis")
    for name in ("rms_norm", "embedding"):
        assert main(["check", f"{ops_file}:{name}"]) == 0
        assert "1 passed, 0 failed" in capsys.readouterr().out
    assert main(["check", "shaderdsl.ops:embedding"]) == 0
    (tmp_path / "wrong.py").write_text(WRONG)
    assert main(["check", f"{tmp_path}/wrong.py"]) == 1
    assert "0 passed, 1 failed" in capsys.readouterr().out


def test_generate_refuses_what_is_no_model(tmp_path, capsys):
    assert main(["generate", str(tmp_path)]) == 1
    assert "no checkpoint" in capsys.readouterr().err
    assert main(["generate", str(tmp_path), "--prompt", ""]) == 2


HF = Path(__file__).parent / "data" / "hf" / "llama_gqa"


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    return path


def test_generate_from_ids_and_from_bytes(capsys):
    words = ["generate", str(HF), "--max-new-tokens", "4", "--temperature", "0"]
    assert main([*words, "--ids", "1, 2,3"]) == 0
    ids = [int(n) for n in capsys.readouterr().out.split(",")]
    assert ids[:3] == [1, 2, 3]
    assert len(ids) == 7
    assert main([*words, "--ids", "1,2,3", "--stop", str(ids[4])]) == 0
    assert capsys.readouterr().out.strip() == ",".join(map(str, ids[:5]))
    more = ["--top-k", "5", "--top-p", "0.9", "--min-p", "0.1"]
    assert main([*words, "--prompt", "ab", *more, "--repetition-penalty", "2"]) == 0
    assert capsys.readouterr().out.startswith("ab")
    for wrong in ("x", "1,-2", ""):
        assert main([*words, "--ids", wrong]) == 2
    assert main([*words, "--ids", "1,999"]) == 1
    assert main([*words, "--top-p", "3"]) == 1


@pytest.mark.parametrize("lora", [False, True], ids=["all", "lora"])
def test_fine_tuning_a_folder(lora, tmp_path, text_file, capsys):
    out = tmp_path / "run"
    words = ["train", "--from", str(HF), "--text", str(text_file), "--out", str(out)]
    words += ["--steps", "3", "--length", "8", "--batch", "2"]
    more = ["--lora", "--rank", "2", "--alpha", "3", "--targets", "q_proj,down_proj"]
    assert main([*words, *(more if lora else [])]) == 0
    assert "nats/byte" in capsys.readouterr().out
    (step,) = out.glob("step-*")
    names = {p.name for p in step.iterdir()}
    assert ("adapter_model.safetensors" in names) == lora
    assert ("model.safetensors" in names) != lora
    what = ["generate", str(HF), "--adapter", str(out)] if lora else ["generate"]
    what += [] if lora else [str(out)]
    assert main([*what, "--max-new-tokens", "2", "--ids", "5"]) == 0
    assert main([*words]) == 1  # the folder is there already


@pytest.mark.parametrize("lora", [False, True], ids=["all", "lora"])
def test_fine_tuning_goes_on_bit_for_bit(lora, tmp_path, text_file, capsys):
    from shaderdsl.nn.safetensors import SafetensorsFile

    words = ["train", "--from", str(HF), "--text", str(text_file)]
    words += ["--length", "8", "--batch", "2", "--save-every", "2"]
    more = ["--lora", "--rank", "2", "--alpha", "3", "--targets", "q_proj,down_proj"]
    words += more if lora else []
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main([*words, "--out", str(whole), "--steps", "5"]) == 0
    # the same run, which was lost after step 4
    assert main([*words, "--out", str(parts), "--steps", "5"]) == 0
    for folder in parts.glob("step-*"):
        if folder.name != "step-000004":
            shutil.rmtree(folder)
    capsys.readouterr()
    again = [*words, "--out", str(parts), "--steps", "5", "--resume"]
    short = ["train", "--resume", "--out", str(parts)]
    assert main(again if lora else short) == 0
    assert "resumed at step 4 of 5" in capsys.readouterr().out
    ends = [folder / "step-000005" for folder in (whole, parts)]
    names = sorted(p.name for p in ends[0].glob("*.safetensors"))
    assert names == sorted(p.name for p in ends[1].glob("*.safetensors"))
    assert len(names) == 2
    for name in names:
        a, b = (SafetensorsFile(folder / name) for folder in ends)
        assert sorted(a.tensors) == sorted(b.tensors)
        for tensor in a.tensors:
            np.testing.assert_array_equal(a.read(tensor), b.read(tensor))
    # another base or other adapters are refused
    for wrong in (["--from", str(tmp_path)], *([["--rank", "3"]] if lora else [])):
        assert main([*short, *wrong]) == 2
        assert "cannot become" in capsys.readouterr().err


def test_adapters_go_on_from_their_own_base_only(tmp_path, text_file, capsys):
    base, out = tmp_path / "model", tmp_path / "run"
    shutil.copytree(HF, base)
    words = ["train", "--from", str(base), "--lora", "--text", str(text_file)]
    words += ["--length", "8", "--batch", "2", "--steps", "1", "--out", str(out)]
    assert main(words) == 0
    weights = base / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    assert main(["train", "--resume", "--out", str(out), "--steps", "2"]) == 1
    assert "other weights" in capsys.readouterr().err
    plain = tmp_path / "plain"
    (plain / "step-000001").mkdir(parents=True)
    assert main(["train", "--resume", "--out", str(plain)]) == 1


def test_fine_tuning_with_a_tokenizer(tmp_path, text_file, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    words = ("the", "quick", "brown", "fox", "dog", ".", "[UNK]")
    known = {w: i for i, w in enumerate(words)}
    model = tokenizers.models.WordLevel(known, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = tmp_path / "model"
    shutil.copytree(HF, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    out = tmp_path / "run"
    train = ["train", "--from", str(folder), "--text", str(text_file)]
    train += ["--out", str(out), "--steps", "2", "--length", "8", "--batch", "2"]
    assert main(train) == 0
    assert "nats/token" in capsys.readouterr().out
    words = ["generate", str(out), "--prompt", "the fox", "--max-new-tokens", "2"]
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("the fox")


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--lora"], 2, "--from"),
        (["--rank", "3"], 2, "--from"),
        (["--from", str(HF), "--rank", "3"], 2, "--lora"),
        (["--from", str(HF), "--hidden", "3"], 2, "--hidden"),
        (["--from", str(HF), "--resume"], 1, "no checkpoint"),
        (["--from", "/nowhere"], 1, "cannot read"),
        (["--from", str(HF), "--lora", "--targets", "z_proj"], 1, "z_proj"),
        (["--from", str(HF), "--length", "1000"], 1, "128 positions"),
    ],
)
def test_fine_tuning_refuses(words, status, said, tmp_path, capsys):
    assert main(["train", "--out", str(tmp_path / "run"), *words]) == status
    assert said in capsys.readouterr().err


def test_demo_shows_an_op_and_trains(capsys):
    assert main(["demo", "--steps", "2"]) == 0
    out = capsys.readouterr().out
    for word in ("@sd.op", "@compute", "d/dgate", "agrees to", "nats/byte", "The "):
        assert word in out
    assert "DIFFERS" not in out
    assert main(["demo", "--steps", "-1"]) == 2
