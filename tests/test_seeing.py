"""What people look at: the user's lines, drawings, HTML, costs in the sizes."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

import shaderdsl as sd
from shaderdsl import errors, ops
from shaderdsl.interop.html import kernel_html
from shaderdsl.interop.lines import source_lines

SVG = "{http://www.w3.org/2000/svg}"


@sd.op("... d, d -> ... d")
def scaled(x, gain, *, eps=1e-6):
    """x · rsqrt(mean(x²) + eps) · gain, where 1 < 2 & 3"""
    square = x * x
    size = sd.mean(square, over="d")
    return x * sd.rsqrt(size + eps) * gain


@sd.op("t, k -> t-k+1")
def correlate(x, w):
    return sd.sum(x.at(t=sd.index("t-k+1") + sd.index("k")) * w, over="k")


def lowered(backward=False):
    x, gain = sd.spec("f32", 6, 40), sd.spec("f32", 40)
    return sd.lower(scaled, x, gain, backward=backward)


def step(x, gain, w):
    y = scaled(x, gain) @ w
    return sd.mean(y * y)


# ------------------------------------------------------------------ lines


ALONE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import shaderdsl as sd
sd.use_device("cpu")
import test_seeing as t
print(json.dumps([
    [t.source_lines(t.lowered(b).kernels[0]) for b in (False, True)],
    [k.wgsl for k in t.lowered(backward=True).kernels],
]))
"""


@pytest.fixture(scope="module")
def alone():
    """In a process of its own: equal expressions are one object, so that those of other
    tests would bring their lines along.
    """
    here = Path(__file__).parent
    out = subprocess.run(
        [sys.executable, "-c", ALONE, here], capture_output=True, text=True, check=True
    )
    return json.loads(out.stdout)


@pytest.mark.parametrize("backward", [False, True])
def test_a_kernel_comes_from_lines_of_the_user(alone, backward):
    lines = alone[0][backward]
    assert any(line.endswith('size = sd.mean(square, over="d")') for line in lines)
    assert any("return x * sd.rsqrt(size + eps) * gain" in line for line in lines)
    for line in lines:
        file, number, _ = line.split(":", 2)
        assert file == "test_seeing.py" and int(number) > 0
        assert "@sd.op" not in line


def test_lines_of_the_compiler_are_nobodys(alone):
    """Neither in the list nor in the text: operands are made by no line."""
    text = "\n".join(alone[1])
    places = re.findall(r"^// .* \((.*):\d+\)$", text, re.MULTILINE)
    assert set(places) == {"test_seeing.py"}


# ------------------------------------------------------------------ drawings


def boxes_of(svg):
    root = ET.fromstring(svg)
    groups = root.findall(f"{SVG}g")
    return root, [
        (
            [t.text for t in g.findall(f"{SVG}text")],
            {k: float(v) for k, v in g.find(f"{SVG}rect").attrib.items() if k in XYWH},
        )
        for g in groups
    ]


XYWH = ("x", "y", "width", "height")


def test_a_drawing_has_every_kernel_stage_and_array(cpu, tmp_path):
    low = lowered(backward=True)
    drawing = low.graph()
    root, boxes = boxes_of(drawing)
    titles = [texts[0] for texts, _ in boxes]
    for number, kernel in enumerate(low.kernels):
        texts = next(t for t, _ in boxes if t[0] == f"{number}. {kernel.name}")
        assert len(texts) == 1 + len(kernel.members)
        for stage, text in zip(kernel.members, texts[1:]):
            assert text.lstrip("▪ ").startswith(f"{stage.name}: f32[")
            assert text.startswith("▪") == (stage in kernel.writes)
    assert "gain: f32[40]" in titles and "dy: f32[6, 40]" in titles
    assert "d_gain: f32[40]" in titles
    arrows = list(root.findall(f"{SVG}path"))
    reads = {(k.name, b.tensor) for k in low.kernels for b in k.bindings}
    assert 0 < len(arrows) <= len(reads) + len(low.program.outputs)
    path = drawing.save(tmp_path / "graph.svg")
    assert path.read_text(encoding="utf-8") == drawing == drawing._repr_svg_()


def test_boxes_of_a_training_step_do_not_overlap(cpu):
    specs = [sd.spec("f32", *n) for n in [(8, 16), (16,), (16, 16)]]
    low = sd.lower(sd.grad(step, argnums=(0, 1, 2)), *specs)
    root, boxes = boxes_of(low.graph())
    assert len(boxes) > len(low.kernels) > 3
    width, height = (float(root.attrib[k]) for k in ("width", "height"))
    for k, (_, a) in enumerate(boxes):
        assert a["x"] >= 0 and a["x"] + a["width"] <= width
        assert a["y"] >= 0 and a["y"] + a["height"] <= height
        for _, b in boxes[:k]:
            apart = (
                a["x"] + a["width"] <= b["x"]
                or b["x"] + b["width"] <= a["x"]
                or a["y"] + a["height"] <= b["y"]
                or b["y"] + b["height"] <= a["y"]
            )
            assert apart


def test_a_program_without_kernels_is_a_drawing(cpu):
    _, boxes = boxes_of(sd.lower(lambda x: x, sd.spec("f32", 3)).graph())
    assert [texts[0] for texts, _ in boxes] == ["x: f32[3]", "x: f32[3]"]


# ------------------------------------------------------------------ notebooks


def plain(page):
    """The text that a browser shows."""
    return html.unescape(re.sub(r"<[^>]*>", "", page))


def test_an_op_in_a_notebook(cpu):
    page = scaled._repr_html_()
    ET.fromstring(page)  # well formed
    for derivative in (None, "x", "gain"):
        for line in scaled.show(derivative=derivative, math=True).splitlines():
            assert f"$${line}$$" in plain(page)
    assert "where 1 < 2 & 3" in plain(page)
    assert "gradient of table" in ops.embedding._repr_html_()
    assert "gradient of ids" not in ops.embedding._repr_html_()


def test_a_lowered_function_in_a_notebook(cpu):
    low = lowered()
    page = low._repr_html_()
    ET.fromstring(page)
    kernel = low.kernels[0]
    assert kernel.wgsl.strip() in plain(page)
    assert all(f"// {line}" in plain(page) for line in source_lines(kernel))
    assert kernel.reason in plain(page) and "<svg" in page
    assert "<span" in kernel_html(kernel)  # in colours


def test_a_profile_in_a_notebook(cpu):
    with sd.profile() as p:
        scaled(np.ones((2, 8), np.float32), np.ones(8, np.float32)).numpy()
    page = p._repr_html_()
    ET.fromstring(page)
    assert "1 dispatches" in plain(page) and "row_scaled" in plain(page)


# ------------------------------------------------------------------ costs


def size_of(formula, **sizes):
    symbols = {s.name: s for s in formula.free_symbols}
    return int(formula.subs({symbols[k]: v for k, v in sizes.items() if k in symbols}))


@pytest.mark.parametrize(
    ("op", "sizes", "shapes"),
    [
        (ops.softmax, {"…": 6, "d": 40}, [(6, 40)]),
        (scaled, {"…": 6, "d": 40}, [(6, 40), (40,)]),
        (ops.swiglu, {"…": 240}, [(240,), (240,)]),
        (ops.linear, {"…": 6, "k": 8, "n": 10}, [(6, 8), (10, 8)]),
        (correlate, {"t": 100, "k": 5}, [(100,), (5,)]),
        (ops.rope_halved, None, None),
    ],
    ids=lambda x: getattr(x, "name", None),
)
def test_costs_are_those_of_the_kernel(cpu, op, sizes, shapes):
    cost = op.cost()
    if shapes is None:
        assert str(cost.bytes) == "16*h*p*t*… + 8*p*t*…"  # r = 2 is a number
        return
    low = sd.lower(op, *(sd.spec("f32", *s) for s in shapes))
    if len(low.kernels) == 1:
        assert size_of(cost.flops, **sizes) == low.flops
        assert size_of(cost.bytes, **sizes) == low.bytes
    arrays = [*low.program.inputs, *low.program.outputs]
    assert size_of(cost.bytes, **sizes) == sum(a.nbytes for a in arrays)


def test_a_product_costs_two_operations_a_term(device):
    low = sd.lower(lambda a, b: a @ b, sd.spec("f32", 64, 96), sd.spec("f32", 96, 32))
    terms = 64 * 96 * 32
    assert low.kernels[0].flops == 2 * terms
    # Nor is it lost where something follows in the same kernel.
    fused = sd.lower(
        lambda a, b, c: sd.gelu(a @ b) + c,
        *(sd.spec("f32", *s) for s in [(64, 96), (96, 512), (64, 512)]),
    )
    least, rest = 2 * 64 * 96 * 512, 64 * 512
    assert least < sum(k.flops for k in fused.kernels) < least + 40 * rest
    assert str(ops.linear.cost().flops) == "2*k*n*…"


def test_the_cost_of_a_derivative(cpu):
    cost = ops.linear.cost(derivative="weight")
    assert str(cost.flops) == "2*k*n*…"
    with pytest.raises(errors.AxisError, match="no operand 'y'"):
        ops.linear.cost(derivative="y")
