"""Every op of the registry over what can be drawn for it, and at awkward sizes."""

from __future__ import annotations

import numpy as np
import pytest

import shaderdsl as sd
from shaderdsl import ops
from shaderdsl.ops.registry import REGISTRY
from shaderdsl.testing import Tolerance, cases, check_gradients, check_op, dims, make
from shaderdsl.testing.script import script


def draws(e):
    return {
        "options": e.options,
        "ids": e.ids,
        "bools": e.bools,
        "positive": e.positive,
        "nonempty": e.nonempty,
    }


@pytest.mark.parametrize("name", REGISTRY)
def test_op(device, name):
    e = REGISTRY[name]
    examples = 20 if device.kind == "cpu" else 8
    check_op(
        e.op,
        e.reference,
        examples=examples,
        gradients=e.smooth,
        kinds=e.kinds,
        elements=4000,
        **draws(e),
    )


@pytest.mark.parametrize("name", ["silu", "swiglu", "rms_norm", "softmax", "linear"])
def test_half(device, name):
    e = REGISTRY[name]
    kinds = ("ordinary", "zeros")
    check_op(
        e.op,
        e.reference,
        examples=8,
        dtypes=("f16",),
        kinds=kinds,
        elements=2000,
        **draws(e),
    )


# Rows of 2 to 200,000, and so many short ones that a dispatch of one workgroup a row
# has more than 65,535 of them.
ROWS = [(70_001, 2), (70_001, 5), (3, 1009), (2, 4097), (2, 65_537), (1, 200_000)]
LONG = ["softmax", "log_softmax", "rms_norm", "layer_norm", "cross_entropy_rows"]


@pytest.mark.parametrize("shape", ROWS, ids=str)
@pytest.mark.parametrize("name", LONG)
def test_rows(device, name, shape):
    e = REGISTRY[name]
    x = make(shape)
    args = [x]
    if name == "cross_entropy_rows":
        args.append(make(shape[:1], "i32", below=shape[1], extra=-100))
    elif name in ("rms_norm", "layer_norm"):
        args += [make(shape[1:], seed=k) for k in range(len(e.op.signature.inputs) - 1)]
    wide = [a.astype(np.float64) if a.dtype.kind == "f" else a for a in args]
    expected = e.reference(*wide)
    y, pullback = sd.vjp(
        lambda *xs: e.op(*xs, *args[len(xs) :]),
        *[a for a in args if a.dtype.kind == "f"],
    )
    np.testing.assert_allclose(y.numpy(), expected, 2e-4, 1e-6)
    dy = make(expected.shape, seed=7)
    got = pullback(dy)
    dx = (got[0] if isinstance(got, tuple) else got).numpy()
    # One random direction through the reference in float64.
    d = make(shape, seed=8).astype(np.float64)
    h = 1e-5
    slope = np.sum(
        (
            e.reference(wide[0] + h * d, *wide[1:])
            - e.reference(wide[0] - h * d, *wide[1:])
        )
        * dy
    ) / (2 * h)
    size = np.abs(dx.astype(np.float64) * d).sum()
    assert abs((dx * d).sum() - slope) <= 1e-5 * size + 1e-6


def test_more_elements_than_one_dimension_of_workgroups(device):
    x = make((4_194_305,))
    y, pullback = sd.vjp(ops.silu, x)
    w = x.astype(np.float64)
    s = 1 / (1 + np.exp(-w))
    np.testing.assert_allclose(y.numpy(), w * s, 1e-5, 1e-7)
    dx = pullback(np.ones_like(x)).numpy()
    np.testing.assert_allclose(dx, s + w * s * (1 - s), 1e-5, 1e-6)


@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("lengths", [(1, 1), (3, 5), (5, 65), (63, 64), (64, 64)])
def test_attention_heads_share_keys(device, ratio, lengths):
    t, s = lengths
    q, k, v = make((2 * ratio, t, 4)), make((2, s, 4), seed=1), make((2, s, 4), seed=2)
    reference = REGISTRY["attention"].reference
    wide = [a.astype(np.float64) for a in (q, k, v)]
    np.testing.assert_allclose(
        ops.attention(q, k, v).numpy(), reference(*wide), 1e-4, 1e-5
    )
    check_gradients(ops.attention, q, k, v, reference=reference)


# ------------------------------------------------------------------ the checker itself


def test_a_wrong_reference_is_caught_and_shown(cpu):
    shown = []
    with pytest.raises(AssertionError, match=r"rms_norm\.reference, result 0"):
        check_op(ops.rms_norm, lambda x, weight: x, nonempty=("d",), show=shown.append)
    assert "from shaderdsl.ops.norm import rms_norm as op" in shown[0]


@sd.op("n -> n")
def forgetful(x):
    """The value of 2x with the derivative of x."""
    return x + sd.stop_gradient(x)


def test_a_wrong_gradient_is_caught_and_its_script_repeats_it(cpu):
    shown = []
    with pytest.raises(AssertionError, match="gradient of forgetful to x along"):
        check_op(forgetful, lambda x: 2 * x, show=shown.append)
    text = shown[0]
    compile(text, "script", "exec")
    assert "'ordinary'" in text or "'tiny'" in text


def test_the_script_of_an_importable_op_runs(cpu):
    from hypothesis import find

    e = REGISTRY["softmax"]
    case = find(cases(e.op, nonempty=("d",)), lambda c: True)
    scope = {}
    exec(script(case, e.reference), scope)
    assert scope["case"] == case


def test_check_op_takes_windows_and_joined_axes(cpu):
    @sd.op("t, k -> t-k+1")
    def correlate(x, w):
        return sd.sum(x.at(t=sd.index("t-k+1") + sd.index("k")) * w, over="k")

    check_op(correlate, nonempty=("t", "k"), maximum=9)

    @sd.op("n (a+b) -> n a", b=2)
    def first_times_last(x):
        left, right = x
        return left * sd.sum(right, over="b")

    check_op(first_times_last, maximum=9)


def test_dims_and_make():
    from hypothesis import find

    assert find(dims(), lambda n: n == 0) == 0
    assert find(dims(), lambda n: n > 60) == 63
    for layout in ("transposed", "strided", "reversed", "offset"):
        x = make((5, 7), layout=layout)
        np.testing.assert_array_equal(x, make((5, 7)))
        assert not x.flags.c_contiguous or layout == "offset"
    assert np.isinf(make((99,), kind="infinite")).any()
    assert set(make((99,), "i32", below=3, extra=-1)) == {-1, 0, 1, 2}
    with pytest.raises(ValueError, match="kind"):
        make((3,), kind="odd")


def test_tolerance_says_where():
    with pytest.raises(
        AssertionError, match=r"y: 1 of 3 elements are wrong; at \(1,\)"
    ):
        Tolerance().assert_close([1, 2, 3], [1, 2.1, 3], [[1, 2.1, 3]], "y")


def test_check_op_as_people_call_it(device):
    @sd.op("... d, d -> ... d")
    def rms_norm(x, gain, *, eps=1e-6):
        """x · rsqrt(mean(x²) + eps) · gain"""
        return x * sd.rsqrt(sd.mean(x * x, over="d") + eps) * gain

    check_op(
        rms_norm,
        reference=lambda x, gain, eps=1e-6: (
            x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * gain
        ),
        examples=12,
    )


# ------------------------------------------------------------------ tolerances, pytest


def test_an_ops_own_bound(cpu):
    """Far below a guess, and what it allows is what cancellation makes of rounding."""
    near = ops.silu
    check_op(near, examples=3)
    off = sd.op("n -> n")(lambda x: x * (1 + 3e-6))  # 25 units in the last place
    with pytest.raises(AssertionError, match="allowed"):
        check_op(off, lambda x: x * 1.0, examples=3, show=lambda text: None)
    off = sd.op("n -> n")(lambda x: x * 1.0)
    cancelled = sd.op("n -> n")(lambda x: (1.0 + x) - 1.0)
    check_op(off, examples=3)
    check_op(cancelled, lambda x: x * 1.0, examples=6, kinds=("tiny",), dtypes=("f32",))


def test_bounds_are_those_that_are_promised():
    from wgsl_numerics import FUNCTIONS

    from shaderdsl.testing.rounding import ULPS

    promised = {f.name.removesuffix("_f32"): f.bound for f in FUNCTIONS}
    # Another spelling of the same function.
    assert promised.pop("exp_masked") == promised["exp"]
    assert promised == ULPS


def test_frozen_operands_are_looked_at(cpu, monkeypatch):
    from shaderdsl.testing import check

    seen = []
    real = check.grad

    def noted(loss, numbers):
        seen.append(len(numbers))
        return real(loss, numbers)

    monkeypatch.setattr(check, "grad", noted)
    check_op(ops.swiglu, examples=8, kinds=("ordinary",), dtypes=("f32",))
    assert {1, 2} <= set(seen)


def test_seeds_draw_other_cases(cpu):
    def drawn(seed):
        cases_ = []
        op = sd.op("a b -> a b")(lambda x: x * 2.0)

        def noted(x):
            cases_.append((x.shape, x.tobytes()))
            return x * 2.0

        check_op(op, noted, examples=5, gradients=False, seed=seed)
        return cases_

    assert drawn(None) == drawn(None)
    assert drawn(1) == drawn(1) != drawn(2)


PLUGGED = """
import shaderdsl as sd
from shaderdsl.runtime import current
from shaderdsl.testing import check, check_op

def test_here():
    assert current().kind == "cpu"
    assert check.default_seed == 7
    check_op(sd.op("n -> n")(lambda x: sd.exp(x) * 0.5), kinds=("ordinary", "ties"))
"""


def test_the_pytest_plugin(tmp_path):
    import subprocess
    import sys
    from importlib.metadata import entry_points

    (tmp_path / "test_mine.py").write_text(PLUGGED)

    def pytest_(*options):
        # Where the package is installed pytest finds it by itself.
        found = entry_points(group="pytest11", name="shaderdsl")
        load = [] if found else ["-p", "shaderdsl.pytest_plugin"]
        call = [sys.executable, "-m", "pytest", *load, "-q"]
        return subprocess.run(
            [*call, "-p", "no:cacheprovider", *options, str(tmp_path)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )

    done = pytest_("-v", "--shaderdsl-device=cpu", "--shaderdsl-seed=7")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "shaderdsl: device 'cpu', seed 7" in done.stdout
    done = pytest_("--shaderdsl-device=quantum")
    assert done.returncode != 0 and "quantum" in done.stderr + done.stdout
