"""Derivatives: reverse and forward, of every kind of index map, once and twice."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

import shaderdsl as sd
from shaderdsl.errors import DifferentiationError, ShapeError
from shaderdsl.ir.primitives import PRIMITIVES
from shaderdsl.testing import Graph, check_gradients, make


def f32(*values):
    return np.array(values, np.float32)


# ------------------------------------------------------------------ index maps

X, Y = make((4, 6)), make((4, 6), seed=1)
ROW, COLUMN = make((6,), seed=2), make((4, 1), seed=3)
IDS = np.array([3, 0, 3, 3, 1], np.int32)


@sd.op("t (h p) -> h t p", p=2)
def heads(x):
    return x * x


@sd.op("n (a+b) -> n (b+a)", a=2)
def swapped(x):
    a, b = x
    return b * b, a * 3.0


@sd.op("t d -> d t")
def reversed_both(x):
    t, d = sd.extent("t"), sd.extent("d")
    x = x.at(t=t - 1 - sd.index("t"), d=d - 1 - sd.index("d"))
    return x * x


@sd.op("t d, k -> t-k+1 d")
def correlate(x, w):
    return sd.sum(x.at(t=sd.index("t-k+1") + sd.index("k")) * w, over="k")


@sd.op("t d -> s d", s=2)
def strided(x):
    return x.at(t=2 * sd.index("s")) ** 2


@sd.op("n n -> n")
def diagonal(x):
    return x * x


@sd.op("t d, n -> n d")
def rows(x, ids):
    return x.at(t=ids) ** 2


@sd.op("t d -> t d")
def running(x):
    return sd.cumsum(x * x, over="t")


@sd.op("... d -> ... d")
def normal(x):
    c = x - sd.mean(x, over="d")
    return c * sd.rsqrt(sd.mean(c * c, over="d") + 1e-5)


PROGRAMS = {
    "broadcast": (lambda x, r, c: x * r + c * x, X, ROW, COLUMN),
    "column alone": (lambda c: c * np.ones((4, 6), np.float32), COLUMN),
    "slice": (lambda x: x[1:3] ** 2, X),
    "slice with a step": (lambda x: x[::2, 1::3] ** 2, X),
    "slice backwards": (lambda x: x[::-1, 4:0:-2] * x[:, :2], X),
    "one row": (lambda x: x[2] * x[-1], X),
    "new axis": (lambda x: x[:, None] * x[None], X),
    "pad": (lambda x: sd.pad(x, ((1, 2), (0, 3))) ** 2, X),
    "concatenate": (lambda x, y: sd.concatenate([x, y * y, x], axis=1) ** 2, X, Y),
    "stack": (lambda x, y: sd.stack([x, y], axis=1) ** 2, X, Y),
    "reshape": (lambda x: x.reshape(3, 8) ** 2, X),
    "odd reshape": (lambda x: x.reshape(8, 3) * x.reshape(2, 12).reshape(8, 3), X),
    "transpose": (lambda x: x.T @ x, X),
    "matmul": (lambda x, y: x @ y.T, X, Y),
    "batched matmul": (
        lambda a, b: a @ b, make((2, 3, 4)), make((4, 5), seed=4),
    ),
    "gather": (lambda x: x[IDS] ** 2, X),
    "gather twice": (lambda x: (x[IDS] ** 2)[IDS], X),
    "gather op": (lambda x: rows(x, IDS), X),
    "update_slice": (
        lambda x, y: sd.update_slice(x * x, y[:2] ** 2, axis=0, start=1), X, Y,
    ),
    "merged axes": (heads, X),
    "joined axes": (swapped, X),
    "reversed axes": (reversed_both, X),
    "window": (correlate, X, f32(1.0, -2.0, 0.5)),
    "stride in an op": (strided, X),
    "running sum": (running, X),
    "sum": (lambda x: sd.sum(x * x, axis=0), X),
    "mean": (lambda x: sd.mean(x * x), X),
    "max": (lambda x: sd.max(x, axis=1) ** 2, X),
    "min over both": (lambda x: sd.min(x * 2.0), X),
    "prod": (lambda x: sd.prod(x, axis=1), X),
    "var": (lambda x: sd.var(x, axis=1), X),
    "logsumexp": (lambda x: sd.logsumexp(x, axis=0), X),
    "softmax": (lambda x: sd.softmax(x, axis=0), X),
    "cumsum": (lambda x: sd.cumsum(x * x, axis=1), X),
    "where": (lambda x, y: sd.where(x > 0, x * y, y), X, Y),
    "clip": (lambda x: sd.clip(x, -0.5, 0.5) * x, X),
    "power": (lambda x: x**3 + sd.abs(x) ** 1.5 + (x * x + 1.0) ** -2, X),
    "broadcast_to": (lambda r: sd.broadcast_to(r, (4, 6)) * X, ROW),
    "normalise": (normal, X),
    "chain": (lambda x, y: sd.softmax(sd.tanh(x @ y.T) @ x, axis=-1) @ y.T, X, Y),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients(device, name):
    f, *args = PROGRAMS[name]
    check_gradients(f, *args)


@pytest.mark.parametrize("name", PROGRAMS)
def test_forward_and_reverse_agree(cpu, name):
    f, *args = PROGRAMS[name]
    tangents = [make(a.shape, seed=20 + k) for k, a in enumerate(args)]
    y, dy = sd.jvp(f, args, tangents)
    _, pullback = sd.vjp(f, *args)
    c = make(y.shape, seed=30)
    got = pullback(c)
    got = got if len(args) > 1 else (got,)
    left = float(np.sum(dy.numpy().astype(np.float64) * c))
    right = sum(
        float(np.sum(g.numpy().astype(np.float64) * t))
        for g, t in zip(got, tangents, strict=True)
    )
    size = float(np.sum(np.abs(dy.numpy() * c))) + 1
    assert abs(left - right) < 1e-4 * size


SMOOTH = [n for n in PROGRAMS if n not in ("max", "min over both", "clip", "where")]


@pytest.mark.parametrize("name", SMOOTH)
def test_second_derivatives(cpu, name):
    f, *args = PROGRAMS[name]

    def slope(*xs):
        _, pullback = sd.vjp(f, *xs)
        shape = f(*xs).shape
        pulled = pullback(sd.array(make(shape, seed=40)))
        return pulled if len(xs) > 1 else (pulled,)

    # First derivatives are evaluated in float64, second ones derived again.
    check_gradients(slope, *args)


def test_second_derivatives_on_a_device(device):
    f, *args = PROGRAMS["chain"]

    def slope(*xs):
        return sd.grad(lambda *a: sd.sum(f(*a) ** 2), (0, 1))(*xs)

    check_gradients(slope, *args)


# ------------------------------------------------------------------ primitives

DOMAIN = {
    "log": (0.2, 3), "log2": (0.2, 3), "sqrt": (0.2, 3), "rsqrt": (0.2, 3),
    "log1p": (-0.5, 3), "asin": (-0.9, 0.9), "acos": (-0.9, 0.9), "pow": (0.2, 3),
    "tan": (-1.2, 1.2), "mod": (0.2, 3),
}  # fmt: skip
FLOAT = [
    n
    for n, p in PRIMITIVES.items()
    if p.pull is not None and p.takes in ("float", "number") and n != "round_f16"
]


def points(name, count):
    low, high = DOMAIN.get(name, (-2.0, 2.0))
    r = np.random.default_rng(5)
    return [r.uniform(low, high, 9).astype(np.float32) for _ in range(count)]


def arity(name):
    two = ("add", "sub", "mul", "mulz", "div", "mod", "pow", "maximum", "minimum")
    return 2 if name in (*two, "atan2") else 1


@pytest.mark.parametrize("name", FLOAT)
def test_pullback_of_each_primitive(device, name):
    from shaderdsl.array import primitive

    check_gradients(lambda *xs: primitive(name, *xs), *points(name, arity(name)))


@pytest.mark.parametrize("name", [n for n in FLOAT if n not in ("mod", "abs")])
def test_second_pullback_of_each_primitive(cpu, name):
    from shaderdsl.array import primitive

    def slope(*xs):
        total = lambda *a: sd.sum(primitive(name, *a))  # noqa: E731
        return sd.grad(total, tuple(range(len(xs))))(*xs)

    check_gradients(slope, *points(name, arity(name)))


# ------------------------------------------------------------------ rules at the edge


def gradient(f, *values):
    return sd.grad(lambda x: sd.sum(f(x)))(f32(*values)).tolist()


def test_ties_share_equally(device):
    assert gradient(sd.max, 2.0, 1.0, 2.0) == [0.5, 0.0, 0.5]
    assert gradient(lambda x: sd.maximum(x, 1.0), 1.0, 2.0, 0.0) == [0.5, 1.0, 0.0]
    assert gradient(lambda x: sd.clip(x, 0.0, 1.0), 0.0, 0.5, 2.0) == [0.5, 1.0, 0.0]


def test_zeros_times_infinite_partials_are_zero(device):
    assert gradient(lambda x: sd.where(x > 0, sd.sqrt(x), 0.0), 0.0, 4.0) == [0, 0.25]
    assert gradient(lambda x: sd.where(x > 0, sd.log(x), 0.0), 0.0, 2.0) == [0, 0.5]
    _, pullback = sd.vjp(sd.sqrt, f32(0.0, 4.0))
    assert pullback(f32(0.0, 1.0)).tolist() == [0, 0.25]
    _, pullback = sd.vjp(lambda x: 1.0 / x, f32(0.0, 2.0))
    assert pullback(f32(0.0, 1.0)).tolist() == [0, -0.25]


def test_products_with_zeros(device):
    assert gradient(sd.prod, 2.0, 0.0, 3.0) == [0, 6, 0]
    assert gradient(sd.prod, 0.0, 0.0, 3.0) == [0, 0, 0]


def test_powers(device):
    assert gradient(lambda x: x**2, 0.0, -2.0) == [0, -4]
    assert gradient(lambda x: x**0, 0.0, 3.0) == [0, 0]
    assert gradient(lambda x: sd.pow(x, 3), -2.0, 0.0) == [12, 0]


def test_repeated_ids_add_up(device):
    _, pullback = sd.vjp(lambda x: x[np.array([0, 0, 2, 0], np.int32)], make((3, 2)))
    dy = np.arange(8, dtype=np.float32).reshape(4, 2)
    assert pullback(dy).tolist() == [[8, 11], [0, 0], [4, 5]]


def test_stop_gradient(device):
    assert gradient(lambda x: x * sd.stop_gradient(x), 3.0) == [3]
    x = f32(3.0)
    _, dy = sd.jvp(lambda x: x * sd.stop_gradient(x), (x,), (f32(1.0),))
    assert dy.tolist() == [3]
    assert gradient(lambda x: sd.stop_gradient(sd.exp(x)), 1.0) == [0]


def test_integers_and_rounding_have_no_derivative(device):
    assert gradient(lambda x: sd.floor(x) + x, 1.5) == [1]
    assert gradient(lambda x: sd.cast(sd.cast(x, "i32"), "f32") * x, 2.5) == [2]


# ------------------------------------------------------------------ functions, pytrees


@dataclass(frozen=True)
class Point:
    x: object
    y: object


sd.tree.register(
    Point, lambda p: ([p.x, p.y], None), lambda key, children: Point(*children)
)


def test_pytrees(device):
    params = {"w": f32(1.0, 2.0), "b": [f32(3.0), (4.0, None)], "n": np.int32(5)}

    def loss(p, scale):
        w, (b, (c, _)) = p["w"], p["b"]
        return sd.sum(w * w) * scale + b[0] * c

    value, g = sd.value_and_grad(loss)(params, 2.0)
    assert float(value) == 22
    assert g["w"].tolist() == [4, 8]
    assert g["b"][0].tolist() == [4] and float(g["b"][1][0]) == 3
    assert g["b"][1][1] is None and g["n"] is None

    def dot(p):
        return sd.sum(p.x * p.y)

    g = sd.grad(dot)(Point(f32(1.0, 2.0), f32(3.0, 4.0)))
    assert isinstance(g, Point) and g.x.tolist() == [3, 4]


def test_argnums_and_aux(device):
    def f(x, y):
        return sd.sum(x * y), {"double": x * 2.0}

    both = sd.value_and_grad(f, (1, 0), has_aux=True)
    (value, aux), (gy, gx) = both(f32(1.0, 2.0), f32(3.0, 4.0))
    assert float(value) == 11 and aux["double"].tolist() == [2, 4]
    assert gy.tolist() == [1, 2] and gx.tolist() == [3, 4]
    g, aux = sd.grad(f, has_aux=True)(f32(1.0), f32(5.0))
    assert g.tolist() == [5] and aux["double"].tolist() == [2]


def test_unused_arguments_get_zeros(device):
    gx, gy = sd.grad(lambda x, y: sd.sum(x), (0, 1))(f32(1.0), f32(1.0, 2.0))
    assert gx.tolist() == [1] and gy.tolist() == [0, 0]


def test_several_results(device):
    y, pullback = sd.vjp(
        lambda x: (x * 2.0, {"i": sd.cast(x, "i32"), "s": sd.sum(x)}), f32(1.0, 2.0)
    )
    assert y[1]["i"].tolist() == [1, 2]
    assert pullback((f32(1.0, 1.0), {"i": None, "s": np.float32(10)})).tolist() == [
        12,
        12,
    ]


def test_a_result_that_is_an_argument(device):
    y, pullback = sd.vjp(lambda x: (x, x), f32(1.0, 2.0))
    assert y[0].tolist() == [1, 2]
    assert pullback((f32(1.0, 1.0), f32(0.5, 0.0))).tolist() == [1.5, 1]


def test_inside_compile_and_over_closures(device):
    w = f32(2.0, 3.0)

    @sd.compile
    def step(x):
        return sd.value_and_grad(lambda v: sd.sum(v * x) ** 2)(sd.array(w))

    value, g = step(f32(1.0, 1.0))
    assert float(value) == 25 and g.tolist() == [10, 10]
    _, dy = sd.compile(lambda x: sd.jvp(lambda v: v * x, (w,), (w,)))(f32(4.0, 5.0))
    assert dy.tolist() == [8, 15]


def test_third_derivative(device):
    f = sd.sin
    for _ in range(3):
        f = sd.grad(f)
    assert math.isclose(float(f(np.float32(0.5))), -math.cos(0.5), rel_tol=1e-5)


def test_hessian_vector_product_forward_over_reverse(device):
    x, v = f32(0.5, -1.0, 2.0), f32(1.0, 2.0, -1.0)
    g = sd.grad(lambda x: sd.sum(x * x * x) * sd.sum(x))
    _, hv = sd.jvp(g, (x,), (v,))
    s, sv = x.sum(), v.sum()
    expected = 6 * x * v * s + 3 * x**2 * sv + np.sum(3 * x**2 * v)
    np.testing.assert_allclose(hv.numpy(), expected, 1e-5)


def test_gradients_keep_the_dtype(device):
    x = f32(1.0, 2.0).astype(np.float16)
    g = sd.grad(lambda x: sd.sum(sd.cast(x * x, "f32")))(x)
    assert g.dtype == "f16" and g.tolist() == [2, 4]


def test_graph_evaluates_in_float64(cpu):
    graph = Graph(sd.exp, [f32(1.0)])
    assert graph.value([np.array([1.0])])[0][0] == math.e
    assert graph.gradient([np.array([1.0])], [np.array([1.0])])[0][0] == math.e


# ------------------------------------------------------------------ refusals


def test_what_has_no_derivative(cpu):
    square = sd.grad(lambda x: sd.sum(x * x))
    with pytest.raises(DifferentiationError, match=r"argument 0.* is i32"):
        square(np.array([1, 2], np.int32))
    with pytest.raises(DifferentiationError, match=r"argument 0.* is bool"):
        square(np.array([True]))
    with pytest.raises(DifferentiationError, match="argument 0 is an integer"):
        square(3)
    with pytest.raises(DifferentiationError, match=r"gives \(2,\)") as caught:
        sd.grad(lambda x: x * x)(f32(1.0, 2.0))
    assert "sd.sum" in caught.value.cure
    with pytest.raises(DifferentiationError, match="argnums 1, but there are 1"):
        sd.grad(lambda x: sd.sum(x), 1)(f32(1.0))
    with pytest.raises(DifferentiationError, match="gives"):
        sd.grad(lambda x: sd.argmax(x))(f32(1.0, 2.0))


def test_cotangents_that_do_not_fit(cpu):
    _, pullback = sd.vjp(lambda x: x * 2.0, f32(1.0, 2.0))
    with pytest.raises(
        ShapeError, match=r"\(3,\), the result it belongs to has \(2,\)"
    ):
        pullback(f32(1.0, 2.0, 3.0))
    with pytest.raises(ShapeError, match="takes 1 cotangents, got 2"):
        pullback((f32(1.0), f32(1.0)))
    with pytest.raises(
        ShapeError, match=r"tangent has shape \(1,\), its argument \(2,\)"
    ):
        sd.jvp(sd.exp, (f32(1.0, 2.0),), (f32(1.0),))


def test_equal_bodies_from_different_graphs(cpu):
    # exp's pullback once as it stands and once with a constant cotangent inlined.
    x = f32(0.5, 1.0)
    _, pullback = sd.vjp(sd.exp, x)
    pullback(f32(1.0, 1.0))
    _, pullback = sd.vjp(sd.grad(lambda x: sd.sum(sd.exp(x))), x)
    np.testing.assert_allclose(pullback(f32(1.0, 1.0)).numpy(), np.exp(x), 1e-6)
