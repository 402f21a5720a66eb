"""The WGSL helper functions against NumPy: errors, edges, and what compilers accept."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from wgsl_numerics import (
    EDGES,
    FUNCTIONS,
    Runner,
    between,
    errors,
    measure,
    operands,
)

from shaderdsl.ir.primitives import PRIMITIVES
from shaderdsl.ir.wgsl_math import HELPERS, helper_source, used_helpers

INF, NAN = float("inf"), float("nan")
ALL = [name + suffix for name in HELPERS for suffix in ("", "_v4")]
CONSTANTS = """
@group(0) @binding(0) var<storage, read_write> x: array<f32>;
@compute @workgroup_size(1) fn main() {
  x[0] = sd_div(x[1], 0.0) + sd_div(0.0, x[1]) + sd_div(1.0, 0.0) + sd_log(0.0);
  x[1] = f32(sd_floordiv_i32(3, 0)) + f32(sd_mod_u32(3u, 0u)) + sd_exp(89.0);
  x[2] = sd_pow(-2.0, 2.5) + sd_mod_f32(1.0, 0.0) + f32(sd_to_i32_f32(1e20));
}
"""


def f32(*values):
    return np.array(values, np.float32)


@pytest.fixture(scope="module")
def run():
    return Runner()


def same(got, want):
    """Equal as values, NaN with NaN."""
    want = np.asarray(want)
    wrong = ~((got == want) | (np.isnan(got) & np.isnan(want)))
    assert not wrong.any(), (np.flatnonzero(wrong), got[wrong], want[wrong])


def both_widths(run, expression, *arrays, **more):
    """The values, after checking that vec4 gives the same bits."""
    narrow = run(expression, *arrays, **more)
    pad = -arrays[0].size % 4
    padded = [np.concatenate([a, a[:1].repeat(pad)]) for a in arrays]
    wide = run(expression, *padded, width=4, **more)[: narrow.size]
    np.testing.assert_array_equal(narrow, wide)
    return narrow


# ------------------------------------------------------------------ text


def test_each_helper_comes_once_and_after_what_it_calls():
    text = "let a = sd_softplus_v4(b) + sd_exp(c) + sd_exp(d); sd_x"
    assert used_helpers(text) == ["sd_softplus_v4", "sd_exp"]
    texts = helper_source(used_helpers(text))
    names = [t.split("(")[0].removeprefix("fn ") for t in texts]
    assert len(set(names)) == len(names)
    assert names[-1] == "sd_exp"
    for at, body in enumerate(texts):
        assert set(used_helpers(body)) <= set(names[: at + 1])
        assert "{V}" not in body and "{F}" not in body
    assert helper_source(["sd_exp"]) == texts[-3:]


def test_what_is_no_helper_is_an_error():
    with pytest.raises(KeyError):
        helper_source(["sd_nothing"])


def test_every_spelling_of_a_primitive_has_its_helper():
    for primitive in PRIMITIVES.values():
        takes = {"float": ["f32"], "number": ["f32", "i32", "u32"]}
        takes |= {"bits": ["i32", "u32", "bool"]}
        for dtype in takes.get(primitive.takes, ["f32", "i32", "u32", "bool"]):
            if primitive.name == f"to_{dtype}":
                continue
            text = primitive.wgsl.replace("{t}", dtype).replace("{V}", "_v4")
            helper_source(used_helpers(text))


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.name)
def test_error_is_within_the_bound(run, f):
    for span in f.ranges:
        error, where = measure(run, f, span)
        assert error <= f.bound, (span, error, where)


@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.name)
def test_edges(run, f):
    xs = EDGES
    if f.name in ("sin", "cos", "tan"):
        xs = xs[~(np.abs(xs) > 1e5) | np.isinf(xs)]
    arrays = [xs]
    if f.second:
        pairs = np.array(list(itertools.product(xs, xs)), np.float32)
        arrays = [pairs[:, 0].copy(), pairs[:, 1].copy()]
        if f.name == "mod_f32":  # quotients beyond 2^40 are not promised
            with np.errstate(all="ignore"):
                q = np.abs(arrays[0].astype(float) / arrays[1])
            keep = ~(q > 2**40) | np.isinf(arrays[0]) | (arrays[1] == 0)
            arrays = [a[keep] for a in arrays]
    if f.name == "atan2":  # the sign of a zero is not promised
        arrays = [np.where(a == 0, np.float32(0), a) for a in arrays]
    got = both_widths(run, f.call.replace("sd_sqrt{V}", "sqrt"), *arrays)
    bad = errors(f, arrays, got) > f.bound
    assert not bad.any(), list(zip(*(a[bad] for a in arrays), got[bad]))


@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.name)
def test_scalars_and_vectors_agree(run, f):
    arrays = [a[:: len(a) // 4096][:4096].copy() for a in operands(f, f.ranges[0])]
    both_widths(run, f.call.replace("sd_sqrt{V}", "sqrt"), *arrays)


@pytest.mark.parametrize(
    ("expression", "a", "b", "want"),
    [
        ("sd_tanh{V}(a)", f32(100, -1000, 3e38, 0, 1e-8), None, f32(1, -1, 1, 0, 1e-8)),
        ("sd_exp{V}(a)", f32(-INF, 89, -110, 0), None, f32(0, INF, 0, 1)),
        ("sd_exp_masked{V}(a)", f32(-INF, 89, -110, 0), None, f32(0, INF, 0, 1)),
        ("sd_exp_masked{V}(a)", f32(INF, 3e38, -3e38, -0.0), None, f32(INF, INF, 0, 1)),
        (
            "sd_exp2{V}(a)",
            f32(-INF, 10, 127, -126, 0),
            None,
            f32(0, 1024, 2**127, 2**-126, 1),
        ),
        ("sd_log{V}(a)", f32(1, 0, -1, INF), None, f32(0, -INF, NAN, INF)),
        ("sd_log2{V}(a)", f32(8, 2**-126, 2**127), None, f32(3, -126, 127)),
        (
            "sd_pow{V}(a, b)",
            f32(-1.5, -1.5, -1.5, -2, -1),
            f32(1, 2, 3, 3, 5),
            f32(-1.5, 2.25, -3.375, -8, -1),
        ),
        (
            "sd_pow{V}(a, b)",
            f32(0, 5, 7, 10, 3, 2),
            f32(0, 3, 2, 10, 13, -126),
            f32(1, 125, 49, 1e10, 1594323, 2**-126),
        ),
        (
            "sd_pow{V}(a, b)",
            f32(0, 0, -8, NAN, INF, 0.5),
            f32(2, -1, 1 / 3, 1, -1, INF),
            f32(0, INF, NAN, NAN, 0, 0),
        ),
        (
            "sd_mod_f32{V}(a, b)",
            f32(1e9, 1e10, 5.5, -5.5, 16777216, 9, -9),
            f32(3, 7, 2, 2, 3, 3, 3),
            f32(1, 4, 1.5, 0.5, 1, 0, 0),
        ),
        (
            "sd_mod_f32{V}(a, b)",
            f32(5, -5, 5, INF, 1),
            f32(INF, INF, -INF, 2, 0),
            f32(5, INF, -INF, NAN, NAN),
        ),
        (
            "sd_floordiv_f32{V}(a, b)",
            f32(7, -7, 7, -7, 1e9, 1, -5, 9),
            f32(2, 2, -2, -2, 3, 0, INF, 3),
            f32(3, -4, -4, 3, 333333333, INF, -1, 3),
        ),
        (
            "sd_atan2{V}(a, b)",
            f32(0, 0, 1, -1, 0),
            f32(0, -1, 0, 0, 2),
            f32(0, np.pi, np.pi / 2, -np.pi / 2, 0),
        ),
        (
            "sd_div{V}(a, b)",
            f32(0, 0, 1, -1, 6),
            f32(0, 5, 0, 0, 3),
            f32(NAN, 0, INF, -INF, 2),
        ),
        (
            "sd_max_f32{V}(a, b)",
            f32(NAN, 1, NAN, 2, -INF),
            f32(1, NAN, NAN, 3, -5),
            f32(NAN, NAN, NAN, 3, -5),
        ),
        (
            "sd_min_f32{V}(a, b)",
            f32(NAN, 1, NAN, 2, -INF),
            f32(1, NAN, NAN, 3, -5),
            f32(NAN, NAN, NAN, 2, -INF),
        ),
        ("sd_sign_f32{V}(a)", f32(NAN, -2, 0, 1e-30, INF), None, f32(NAN, -1, 0, 1, 1)),
        (
            "sd_softplus{V}(a)",
            f32(50, 100, 1000, INF, -INF),
            None,
            f32(50, 100, 1000, INF, 0),
        ),
        ("sd_erf{V}(a)", f32(0, INF, -INF, 9), None, f32(0, 1, -1, 1)),
        (
            "sd_sigmoid{V}(a)",
            f32(0, 1000, -1000, INF, -INF),
            None,
            f32(0.5, 1, 0, 1, 0),
        ),
    ],
)
def test_values(run, expression, a, b, want):
    same(both_widths(run, expression, *([a] if b is None else [a, b])), want)


def test_small_integer_powers_are_exact(run):
    pairs = [(x, n) for x in range(-30, 31) for n in range(30) if abs(x) ** n < 2**24]
    a, b = f32(*(p[0] for p in pairs)), f32(*(p[1] for p in pairs))
    same(both_widths(run, "sd_pow{V}(a, b)", a, b), f32(*(x**n for x, n in pairs)))


def test_what_drivers_fold(run):
    x = f32(0, NAN, INF, 2, -3)
    same(run("sd_div(0.0, a)", x), f32(NAN, NAN, 0, 0, 0))
    same(run("sd_div(a, 0.0)", x), f32(NAN, NAN, INF, INF, -INF))
    same(both_widths(run, "sd_vanish{V}(a)", x), f32(0, NAN, NAN, 0, 0))
    same(both_widths(run, "sd_root_squared{V}(a)", x), f32(0, NAN, INF, 2, NAN))
    same(run("sd_max_f32(a, 0.0)", x), f32(0, NAN, INF, 2, 0))
    same(run("sd_min_f32(sd_max_f32(a, 0.0), 1.0)", x), f32(0, NAN, 1, 1, 0))


@pytest.mark.parametrize(
    ("constant", "want"),
    [
        ("sd_exp(-1000.0)", 0),
        ("sd_exp(1000.0)", INF),
        ("sd_log(0.0)", -INF),
        ("sd_log(-1.0)", NAN),
        ("sd_log1p(-1.0)", -INF),
        ("sd_pow(0.0, 0.0)", 1),
        ("sd_pow(-2.0, 3.0)", -8),
        ("sd_tanh(50.0)", 1),
        ("sd_mod_f32(1.0e10, 7.0)", 4),
        ("sd_mod_f32(1.0, 0.0)", NAN),
        ("sd_floordiv_f32(-7.0, 2.0)", -4),
        ("sd_floordiv_f32(1.0, 0.0)", INF),
        ("sd_atan2(0.0, 0.0)", 0),
        ("sd_rsqrt(0.0)", INF),
        ("sd_div(0.0, 0.0)", NAN),
        ("sd_div(-1.0, 0.0)", -INF),
        ("sd_max_f32(sd_nan(), 1.0)", NAN),
        ("sd_round_f16(65520.0)", INF),
        ("f32(sd_floordiv_i32(5, 0))", 0),
        ("f32(sd_mod_i32(-7, 2))", 1),
        ("f32(sd_to_i32_f32(-1e20))", -(2.0**31)),
    ],
)
def test_constants(run, constant, want):
    same(run(f"select({constant}, a, a > 1.0)", f32(0)), f32(want))


def test_softplus_of_minus_20(run):
    got = run("sd_softplus(a)", f32(-20))
    np.testing.assert_allclose(got, 2.0611536181902037e-09, rtol=2e-5)


def test_large_angles_stay_in_range(run):
    x = between(-3e38, 3e38, 1 << 16)
    for name in ("sin", "cos"):
        assert np.abs(run(f"sd_{name}{{V}}(a)", x, width=4)).max() <= 1


def test_tests_of_the_bits(run):
    x = f32(NAN, -NAN, INF, -INF, 0, 1, 3e38)
    np.testing.assert_array_equal(
        both_widths(run, "sd_isnan{V}(a)", x, gives="bool"), np.isnan(x)
    )
    np.testing.assert_array_equal(
        both_widths(run, "sd_isinf{V}(a)", x, gives="bool"), np.isinf(x)
    )


# ------------------------------------------------------------------ integers


@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
@pytest.mark.parametrize(
    "name", ["floordiv", "mod", "max", "min", "xor", "not", "sign"]
)
def test_integers(run, dtype, name):
    t = "i32" if dtype is np.int32 else "u32"
    low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    edges = [low, low + 1, 0, 1, 2, 3, 5, 7, high - 1, high]
    edges += [-1, -2, -3, -7] if low else []
    random = np.random.default_rng(3)
    pairs = [
        *itertools.product(edges, edges),
        *random.integers(low, high + 1, (1000, 2)).tolist(),
        *random.integers(max(low, -100), 100, (1000, 2)).tolist(),
    ]
    meaning = {
        "floordiv": lambda a, b: a // b if b else 0,
        "mod": lambda a, b: a % b if b else 0,
        "max": max,
        "min": min,
        "xor": lambda a, b: a ^ b,
        "not": lambda a, b: ~a,
        "sign": lambda a, b: (a > 0) - (a < 0),
    }[name]
    want = np.array([meaning(a, b) for a, b in pairs], np.int64).astype(dtype)
    a, b = np.array(pairs, np.int64).astype(dtype).T.copy()
    if name in ("not", "sign"):
        got = both_widths(run, f"sd_{name}_{t}{{V}}(a)", a)
    else:
        got = both_widths(run, f"sd_{name}_{t}{{V}}(a, b)", a, b)
    np.testing.assert_array_equal(got, want)


def test_bools(run):
    a = np.array([0, 0, 1, 1], np.uint32)
    b = np.array([0, 1, 0, 1], np.uint32)

    for expression, want in [
        ("sd_xor_bool{V}(a > {Z}, b > {Z})", [0, 1, 1, 0]),
        ("sd_not_bool{V}(a + b > {Z})", [1, 0, 0, 0]),
    ]:
        for width, z in ((1, "0u"), (4, "vec4<u32>(0u)")):
            text = expression.replace("{Z}", z)
            got = run(text, a, b, gives="bool", width=width)
            np.testing.assert_array_equal(got, np.array(want, bool))
    for to in ("i32", "u32"):
        got = run(f"sd_to_{to}_bool(a > 0u)", a, gives=to)
        np.testing.assert_array_equal(got, a)


def test_floats_to_integers_saturate(run):
    x = np.concatenate(
        [
            f32(3.9, -3.9, -0.5, 2147483520, 2147483648, 4294967040, 4294967296),
            f32(1e20, -1e20, INF, -INF, NAN, -1, -2147483648, -2147483904, 0.99),
            between(-5e9, 5e9, 1 << 12),
        ]
    )
    exact = np.trunc(np.where(np.isnan(x), 0, x).astype(np.float64))
    for to, dtype in (("i32", np.int32), ("u32", np.uint32)):
        limits = np.iinfo(dtype)
        want = np.clip(exact, limits.min, limits.max).astype(np.int64).astype(dtype)
        got = both_widths(run, f"sd_to_{to}_f32{{V}}(a)", x, gives=to)
        np.testing.assert_array_equal(got, want)


def test_integers_to_integers_keep_the_bits(run):
    x = np.array([-1, 0, 5, -(2**31)], np.int32)
    got = both_widths(run, "sd_to_u32_i32{V}(a)", x, gives="u32")
    np.testing.assert_array_equal(got, x.view(np.uint32))
    back = both_widths(run, "sd_to_i32_u32{V}(a)", got, gives="i32")
    np.testing.assert_array_equal(back, x)


def test_rounding_to_f16(run):
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    finite = np.unique(halves[np.isfinite(halves)])
    middle = ((finite[1:].astype(float) + finite[:-1]) / 2).astype(np.float32)
    near = [np.nextafter(middle, np.float32(s)) for s in (INF, -INF)]
    limits = f32(65519.996, 65520, 65536, -65520, 1e30, INF, -INF, NAN, 2**-25, 0)
    x = np.concatenate([halves, middle, *near, limits, between(-7e4, 7e4, 1 << 16)])
    with np.errstate(over="ignore", invalid="ignore"):
        want = np.where(np.isnan(x), x, x.astype(np.float16).astype(np.float32))
    same(both_widths(run, "sd_round_f16{V}(a)", x), want)


# ------------------------------------------------------------------ compilers


def test_all_texts_compile_in_one_module(run):
    text = "\n".join(helper_source(ALL)) + CONSTANTS
    module = run.device.create_shader_module(code=text)
    run.device.create_compute_pipeline(
        layout="auto", compute={"module": module, "entry_point": "main"}
    )


def test_tint_accepts_all_texts():
    """In a process of its own; ``pip install shaderdsl[dawn]`` and no GPU needed."""
    pytest.importorskip("wgpudawn")
    program = (
        "import sys, wgpudawn\n"
        "device = wgpudawn.gpu.request_adapter_sync().request_device_sync()\n"
        "module = device.create_shader_module(code=sys.stdin.read())\n"
        "device.create_compute_pipeline(layout='auto',"
        " compute={'module': module, 'entry_point': 'main'})\n"
        "print('accepted')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input="\n".join(helper_source(ALL)) + CONSTANTS,
        env=os.environ | {"WGPU_BACKEND_TYPE": "Null"},
        capture_output=True,
        text=True,
    )
    assert "accepted" in done.stdout, done.stderr


def test_the_page_on_numbers_lists_every_function():
    page = (Path(__file__).parents[1] / "docs" / "numerics.md").read_text("utf-8")
    for f in FUNCTIONS:
        assert page.count(f"| `{f.name}` |") == len(f.ranges), f.name
