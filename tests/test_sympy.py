"""Definitions as text and formulas, ops from SymPy, and pullbacks against SymPy's."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest

import shaderdsl as sd
from shaderdsl import ops
from shaderdsl.array import primitive
from shaderdsl.errors import (
    AxisError,
    DifferentiationError,
    ShaderError,
    ShapeError,
    TraceError,
)
from shaderdsl.ir.primitives import PRIMITIVES
from shaderdsl.ops.registry import REGISTRY
from shaderdsl.testing import Graph

sp = pytest.importorskip("sympy")
from shaderdsl.interop.symbolic import sympy_of_primitive  # noqa: E402

X, Y = sp.symbols("x y", real=True)

# ------------------------------------------------------------------ showing


def test_a_definition_as_text(cpu):
    assert ops.rms_norm.show() == (
        'rms_norm(x, weight, eps): "... d, d -> ... d"\n'
        "  mean[…] = Σ_{d} x[…, d] · x[…, d]\n"
        "  y[…, d] = x[…, d] · rsqrt(mean[…] / |d| + eps) · weight[d]"
    )


def test_a_derivative_as_text(cpu):
    assert ops.rms_norm.show(derivative="weight").split("\n")[-1] == (
        "  dweight[d] = Σ_{…} dy[…, d] · (x[…, d] · rsqrt(mean[…] / |d| + eps))"
    )
    assert ops.embedding.show(derivative="table").split("\n")[1] == (
        "  dtable[v, d] = Σ_{…} where(v = ids[…], dy[…, d], 0.0)"
    )


def test_index_maps_as_text(cpu):
    assert "x[…, t, h, (1-r p)]" in ops.rope_halved.show()

    @sd.op("t, k -> t-k+1")
    def correlate(x, w):
        return sd.sum(x.at(t=sd.index("t-k+1") + sd.index("k")) * w, over="k")

    assert "Σ_{k} x[t-k+1 +k] · w[k]" in correlate.show()


def test_latex(cpu):
    mean, y = ops.rms_norm.show(math=True).split("\n")
    assert mean.startswith(r"{mean}_{\ldots} = \sum_{d=0}^{N_{d} - 1}")
    assert r"\sqrt{eps + \frac{{mean}_{\ldots}}{N_{d}}}" in y
    cases = ops.embedding.show(derivative="table", math=True)
    assert r"v = {ids}_{\ldots}" in cases


@pytest.mark.parametrize("name", REGISTRY)
def test_every_op_can_be_shown(cpu, name):
    op = REGISTRY[name].op
    assert op.show().startswith(f"{name}(")
    assert "=" in op.show(math=True)
    for operand in op.operands:
        try:
            text = op.show(derivative=operand)
        except DifferentiationError:
            assert operand in (*REGISTRY[name].ids, *REGISTRY[name].bools)
            continue
        assert f"d{operand}" in text.split("\n")[-1]
        assert op.show(derivative=operand, math=True)


def test_what_cannot_be_shown(cpu):
    with pytest.raises(AxisError, match="no operand 'gain'") as caught:
        ops.rms_norm.show(derivative="gain")
    assert "x, weight" in caught.value.cure
    with pytest.raises(DifferentiationError, match="'ids' of embedding holds ids"):
        ops.embedding.show(derivative="ids")


# ------------------------------------------------------------------ ops from SymPy

_ERF = {"erf": np.vectorize(math.erf, otypes=[np.float64])}
EXPRESSIONS = [
    X * Y + X**2,
    X / (1 + Y**2) - 3,
    sp.exp(-(X**2) / 2) / sp.sqrt(2 * sp.pi),
    X**3 / 3 + Y**-2,
    sp.Piecewise((X, X > 0), (sp.exp(X) - 1, True)),
    sp.Max(X, Y, 0) * sp.Min(X, 1),
    sp.tanh(X) * sp.sin(Y) + sp.cos(X) ** 2,
    sp.log(1 + sp.exp(X)) + sp.Abs(Y),
    sp.erf(X) * sp.sign(Y) + sp.atan2(X, Y),
    sp.floor(X) + sp.ceiling(Y) + sp.Mod(X, 2),
    sp.Piecewise((1, sp.And(X > 0, Y > 0)), (2, sp.Or(X > 1, Y > 1)), (X, True)),
    sp.Rational(1, 3) * X + sp.E * Y,
    sp.Mul(X, sp.Add(Y, Y, evaluate=False), evaluate=False),
]


@pytest.mark.parametrize("expr", EXPRESSIONS, ids=str)
def test_from_sympy(device, expr):
    op = sd.from_sympy(expr, "n, n -> n", args=(X, Y))
    r = np.random.default_rng(0)
    x, y = (r.uniform(-2, 2, 50).astype(np.float32) for _ in range(2))
    f = sp.lambdify((X, Y), expr, ["numpy", _ERF])
    wide = [v.astype(np.float64) for v in (x, y)]
    expected = np.broadcast_to(f(*wide), (50,))
    np.testing.assert_allclose(op(x, y).numpy(), expected, 1e-4, 1e-5)
    np.testing.assert_allclose(op.reference(*wide), expected, 1e-12)


def test_from_sympy_has_derivatives(device):
    op = sd.from_sympy(X**2 * sp.sin(Y), "n, n -> n", args=(X, Y))
    x, y = np.float32([1.0, 2.0]), np.float32([0.5, -1.0])
    _, pullback = sd.vjp(op, x, y)
    dx, dy = pullback(np.ones(2, np.float32))
    np.testing.assert_allclose(dx.numpy(), 2 * x * np.sin(y), 1e-5)
    np.testing.assert_allclose(dy.numpy(), x * x * np.cos(y), 1e-5)
    assert op.show().startswith('from_sympy(x, y): "n, n -> n"')
    assert op(x=x, y=y).shape == (2,)


def test_structure_is_kept(cpu):
    # x / y is one division and not a product with a reciprocal.
    op = sd.from_sympy(X / Y, "n, n -> n", args=(X, Y))
    assert "x[n] / y[n]" in op.show()


def test_round_trip(cpu):
    expr = sp.sympify(sympy_of_primitive("sigmoid", [X])) * Y
    op = sd.from_sympy(expr, "n, n -> n", args=(X, Y))
    x = np.float32([-3.0, 0.0, 2.0])
    np.testing.assert_allclose(op(x, x).numpy(), x / (1 + np.exp(-x)), 1e-6)


def test_what_cannot_be_an_op(cpu):
    with pytest.raises(ShapeError, match=r"symbol 'y' .* not among args"):
        sd.from_sympy(X * Y, "n -> n", args=(X,))
    with pytest.raises(TraceError, match="besselj has no primitive"):
        sd.from_sympy(sp.besselj(0, X), "n -> n", args=(X,))
    with pytest.raises(ShaderError, match="1"):
        sd.from_sympy(X, "n, n -> n", args=(X,))


# ------------------------------------------------------------------ pullbacks

SKIP = ("mulz", "floordiv", "round_f16", "stop_gradient", "where", "mod")
DOMAIN = {
    "log": (0.2, 3), "log2": (0.2, 3), "sqrt": (0.2, 3), "rsqrt": (0.2, 3),
    "log1p": (-0.5, 3), "asin": (-0.9, 0.9), "acos": (-0.9, 0.9), "pow": (0.2, 3),
    "tan": (-1.2, 1.2),
}  # fmt: skip
TWO = ("add", "sub", "mul", "div", "pow", "maximum", "minimum", "atan2")
NAMES = [
    n
    for n, p in PRIMITIVES.items()
    if p.pull is not None and p.takes in ("float", "number") and n not in SKIP
]


@pytest.mark.parametrize("name", NAMES)
def test_pullback_is_the_derivative_that_sympy_finds(cpu, name):
    symbols = [X, Y] if name in TWO else [X]
    formula = sympy_of_primitive(name, symbols)
    assert formula is not None
    low, high = DOMAIN.get(name, (-2.0, 2.0))
    r = np.random.default_rng(3)
    points = [r.uniform(low, high, 20) for _ in symbols]
    graph = Graph(
        lambda *xs: primitive(name, *xs), [p.astype(np.float32) for p in points]
    )
    (value,) = graph.value(points)
    f = sp.lambdify(symbols, formula, ["numpy", _ERF])
    np.testing.assert_allclose(value, f(*points), 1e-9, 1e-12)
    got = graph.gradient(points, [np.ones(20)])
    for s, g in zip(symbols, got, strict=True):
        d = sp.diff(formula.doit(), s)
        d = d.replace(sp.DiracDelta, lambda *a: sp.Integer(0))
        expected = sp.lambdify(symbols, d, ["numpy", _ERF, _STEP])(*points)
        np.testing.assert_allclose(g, np.broadcast_to(expected, (20,)), 1e-9, 1e-12)


_STEP = {"Heaviside": lambda x, *_: np.heaviside(x, 0.5)}


def test_sympy_is_imported_on_use_only():
    code = (
        "import sys, numpy as np, shaderdsl as sd\n"
        "from shaderdsl import ops\n"
        "sd.use_device('cpu'); ops.silu(np.ones(2, np.float32))\n"
        "print('sympy' in sys.modules); ops.silu.show(); sd.from_sympy\n"
        "print('sympy' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stdout.split() == ["False", "False"], out.stderr
