"""Uses that once broke: each faulty kind of use, with its right value or its error."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections import OrderedDict, defaultdict

import numpy as np
import pytest

import shaderdsl as sd
from shaderdsl.codegen.compared import compared, recomputed
from shaderdsl.errors import (
    AxisError,
    DifferentiationError,
    DTypeError,
    IndexRangeError,
    ShaderError,
    ShapeError,
    SignatureError,
    TraceError,
)
from shaderdsl.ir.stage import topo_stages
from shaderdsl.reference import Graph

F32 = np.float32
V = np.array([1, 2, 3], F32)
X = (np.arange(6, dtype=F32) - 2).reshape(2, 3)


def i32(*xs):
    return np.array(xs, np.int32)


def u32(*xs):
    return np.array(xs, np.uint32)


def run(signature, function, *args, **options):
    return sd.op(signature)(function)(*args, **options)


def close(got, expected, rtol=1e-5, atol=1e-6):
    np.testing.assert_allclose(np.asarray(got), expected, rtol, atol)


# ------------------------------------------------------------------ reductions


def test_what_does_not_take_part_is_not_looked_at(device):
    x = np.array([[1, np.nan, 3], [np.inf, 4, 8]], F32)
    good = np.isfinite(x)
    close(sd.mean(x, where=good), x[good].mean())
    close(sd.mean(x, axis=1, where=good), [2, 6])
    close(sd.var(x, axis=1, where=good), [1, 4])
    close(sd.mean(X, axis=0, where=np.array([True, False, True])), [-0.5, np.nan, 1.5])
    close(
        run("t d -> t", lambda x: sd.mean(1.0, over="d", where=x > 0), X), [np.nan, 1]
    )


def test_means_of_what_does_not_add_up_in_its_own_type(device):
    close(sd.mean(i32(2**31 - 1, 2**31 - 1)), 2**31)
    close(
        run("t -> ", lambda x: sd.mean(x, over="t"), i32(2**31 - 1, 2**31 - 1)), 2**31
    )
    half = np.full(70_000, 2, np.float16)
    for y, expected in [
        (sd.mean(half), 2),
        (sd.var(half), 0),
        (sd.logsumexp(half), 2 + np.log(70_000)),
        (sd.softmax(half)[0], 1 / 70_000),
        (sd.gelu(half[:1] * 30), 60),
    ]:
        assert y.dtype == "f16"
        close(y, expected, rtol=1e-3)


def test_the_variance_of_what_is_far_from_zero(device):
    """In one pass, mean(x²) - mean(x)², all digits cancel."""
    x = (10_000 + np.random.default_rng(0).standard_normal((3, 400))).astype(F32)
    want = x.astype(np.float64).var(1)
    close(sd.var(x, axis=1), want, rtol=1e-4)
    close(run("t d -> t", lambda x: sd.var(x, over="d"), x), want, rtol=1e-4)


def test_reductions_of_nothing(device):
    none = np.zeros((2, 0), F32)
    assert sd.softmax(none).shape == (2, 0)
    close(sd.logsumexp(none, axis=1), [-np.inf] * 2)
    close(sd.logsumexp(none, axis=1, keepdims=True), [[-np.inf]] * 2)
    close(run("t d -> t", lambda x: sd.logsumexp(x, over="d"), none), [-np.inf] * 2)


def test_conditions_of_argmax_and_cumsum(device):
    c = X < 1
    close(sd.argmax(X, axis=1, where=c), [2, 0])
    close(sd.argmin(X, axis=1, where=~c), [0, 0])
    close(sd.cumsum(X, axis=1, where=c), np.cumsum(np.where(c, X, 0), 1))
    close(
        run("t d -> t", lambda x: sd.argmax(x, over="d", where=x < 1), X),
        [2, 0],
    )
    close(
        run("t d -> t d", lambda x: sd.cumsum(x, over="d", where=x < 1), X),
        np.cumsum(np.where(c, X, 0), 1),
    )
    close(run("t -> t", lambda x: x + sd.cumsum(1, over="t"), V), [2, 4, 6])


def test_named_axes_outside_of_an_op_are_refused(cpu):
    for name in ("sum", "mean", "max", "prod", "any", "all", "argmax", "softmax",
                 "logsumexp", "var", "cumsum"):  # fmt: skip
        for over in ("d", 0):
            with pytest.raises(AxisError, match="names axes of an op"):
                getattr(sd, name)(X, over)


# ------------------------------------------------------------------ numbers


def test_weak_integers_of_any_size(device):
    close(sd.array(V) + 2**40, V + 2.0**40)
    close(sd.array(V) * 1e39, [np.inf] * 3)
    assert (sd.array(u32(1)) + (2**32 - 1)).tolist() == [0]
    assert run(
        "t -> t", lambda x: sd.cast(sd.index("t"), "u32") + 2**31, V
    ).tolist() == [
        2**31,
        2**31 + 1,
        2**31 + 2,
    ]
    for bad in (
        lambda: sd.array(i32(1)) + 2**31,
        lambda: sd.array(u32(1)) + 2**32,
        lambda: sd.array(u32(1)) + -1,
        lambda: sd.array(V) * 10**400,
        lambda: run("t -> t", lambda x: sd.index("t") + 2**31, V),
        lambda: run("t -> t", lambda x: sd.cast(sd.index("t"), "u32") + -1, V),
        lambda: run("t -> t", lambda x: x * 10**400, V),
        lambda: run("t -> t", lambda x, s=1: x * s, V, s=2**40),
        lambda: sd.pad(i32(1), 1, 2**40),
        lambda: sd.pad(i32(1), 1, float("nan")),
    ):
        with pytest.raises(DTypeError) as caught:
            bad()
        assert "test_breakers.py" in caught.value.where


def test_unsigned_negation(device):
    assert (-sd.array(u32(3, 0))).tolist() == [2**32 - 3, 0]
    got = run("t -> t", lambda x: -sd.cast(sd.index("t"), "u32"), V)
    assert got.tolist() == [0, 2**32 - 1, 2**32 - 2]


@pytest.mark.parametrize("k", [0, 1, 2, 5, 31, 100])
def test_integer_powers_are_integers_and_wrap(device, k):
    expected = [(3**k + 2**31) % 2**32 - 2**31, (-2) ** k if k < 32 else 0]
    if k == 31:
        expected[1] = -(2**31)
    got = sd.array(i32(3, -2)) ** k
    assert got.dtype == "i32" and got.tolist() == expected
    got = run("t -> t", lambda x: x**k, i32(3, -2))
    assert got.dtype == "i32" and got.tolist() == expected


def test_integers_to_a_float_power_are_floats(device):
    got = sd.array(i32(3)) ** 2.0
    assert got.dtype == "f32" and got.tolist() == [9]
    got = run("t -> t", lambda x: sd.index("t") ** 2.0, V)
    assert got.dtype == "f32" and got.tolist() == [0, 1, 4]
    close(sd.array(i32(4)) ** -1, [0.25])


def test_numbers_stay_weak_when_compiled(device):
    for a, n in ((u32(1, 2), 3), (V.astype(np.float16), 2.5), (i32(1), 2.5), (V, 2)):
        for f in (lambda a, n: a * n + n, lambda a, n: sd.where(a > n, a, n * 2)):
            eager, compiled = f(sd.array(a), n), sd.compile(f)(a, n)
            assert compiled.dtype == eager.dtype
            close(compiled, eager.numpy())
    one = sd.compile(lambda a, n: a * n)
    half = V.astype(np.float16)
    assert one(half, 2.0).dtype == "f16"
    assert one(half, sd.array(2.0)).dtype == "f32"


def test_floats_become_integers_as_on_the_device(device):
    x = [1.5, -2.5, np.nan, 1e20, -1e20]
    assert sd.array(x, "i32").tolist() == [1, -2, 0, 2**31 - 1, -(2**31)]
    assert sd.array(x, "u32").tolist() == [1, 0, 0, 2**32 - 1, 0]
    assert sd.full((1,), float("nan"), "i32").tolist() == [0]


# ------------------------------------------------------------------ arguments


class Wrapped:
    """A tensor of another library: ``__dlpack__`` and nothing else."""

    def __init__(self, a):
        self.a = a

    def __dlpack__(self, **more):
        return self.a.__dlpack__(**more)

    def __dlpack_device__(self):
        return self.a.__dlpack_device__()


def test_arrays_of_other_makers(device):
    close(sd.array(V) + Wrapped(V), 2 * V)
    close(sd.grad(lambda a: sd.sum(a * a))(Wrapped(V)), 2 * V)
    close(sd.array(V.astype(">f4")), V)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        close(sd.array(V.astype(np.longdouble)), V)
    close(sd.array(V) + V.tolist(), 2 * V)
    close(sd.silu([0.0, 1.0]), [0, 0.7310586])
    close(sd.gelu([0.0, 1.0], approximate="tanh"), [0, 0.841192])
    assert sd.array(X)[[]].shape == (0, 3)


def test_numpy_integers_as_sizes_and_axes(device):
    n = np.int64
    a = sd.array(X)
    assert a.reshape(n(3), n(2)).shape == a.reshape((n(3), -1)).shape == (3, 2)
    assert a.reshape(n(-1)).shape == (6,)
    close(sd.sum(X, axis=n(0)), X.sum(0))
    close(sd.pad(X, np.array([[1, 1], [0, 2]])), np.pad(X, ((1, 1), (0, 2))))
    close(sd.pad(X, n(1)), np.pad(X, 1))
    close(sd.broadcast_to(X, (n(2), n(2), n(3))), np.broadcast_to(X, (2, 2, 3)))


def test_named_pieces_of_signatures_in_any_script(device):
    close(run("größe -> größe", lambda x: x * 2, V), 2 * V)
    close(run("t -> t", lambda x: x.at(t=sd.cast(sd.index("t"), "u32")), V), V)
    close(run("t -> t", lambda x: np.float64(2) * x - np.int64(1), V), 2 * V - 1)
    close(run("t -> t", lambda x: x + sd.cast(2.7, "i32"), V), V + 2)
    close(sd.op("t -> t")(functools.partial(lambda s, x: x * s, 2.0))(V), 2 * V)


def outside(x):
    return x


other = sd.op("t -> t")(outside)

BAD = {
    "negative sizes": (lambda: sd.array(X).reshape(-2, -3), ShapeError),
    "negative full": (lambda: sd.full((-1,), 1.0), ShapeError),
    "negative broadcast": (lambda: sd.broadcast_to(V[:1], (-3,)), ShapeError),
    "negative random": (lambda: sd.random.bits(sd.random.key(0), -1), ShapeError),
    "negative axis by keyword": (lambda: run("t -> t k", outside, V, k=-2), ShapeError),
    "axis of a fraction": (lambda: run("t -> t k", outside, V, k=2.5), ShapeError),
    "axis of a text": (lambda: run("t -> t k", outside, V, k="a"), ShapeError),
    "fraction of a size": (lambda: sd.zeros(1.5), ShapeError),
    "fraction of an axis": (lambda: sd.sum(X, axis=1.5), AxisError),
    "no axis": (lambda: sd.cumsum(X, axis=None), AxisError),
    "two axes": (lambda: sd.argmax(X, axis=(0, 1)), AxisError),
    "two named axes": (
        lambda: run("t d -> t d", lambda x: sd.cumsum(x, over="t d"), X),
        AxisError,
    ),
    "axes in a tuple": (
        lambda: run("t d -> t", lambda x: sd.sum(x, over=("d",)), X),
        AxisError,
    ),
    "index by number": (lambda: run("t -> t", lambda x: sd.index(0), V), AxisError),
    "fraction of an index": (lambda: sd.array(X)[1.5], DTypeError),
    "bool for an index": (lambda: sd.array(X)[True], DTypeError),
    "text for an index": (lambda: sd.array(X)["a"], DTypeError),
    "slice of step 0": (lambda: sd.array(X)[::0], IndexRangeError),
    "two ellipses": (lambda: sd.array(X)[..., ...], AxisError),
    "arange of step 0": (lambda: sd.arange(0, 1, 0), ShapeError),
    "ragged": (lambda: sd.array([[1, 2], [3]]), ShapeError),
    "many for a number": (lambda: float(sd.array(X)), ShapeError),
    "start of a fraction": (
        lambda: sd.update_slice(X, X[:1], axis=0, start=1.7),
        ShapeError,
    ),
    "starts": (
        lambda: sd.update_slice(X, X[:1], axis=0, start=i32(0)),
        ShapeError,
    ),
    "i32 and u32": (lambda: sd.concatenate([i32(1), u32(1)]), DTypeError),
    "condition of floats": (lambda: sd.where(X, 1, 0), DTypeError),
    "complement of floats": (lambda: ~sd.array(X), DTypeError),
    "option of several": (
        lambda: run("t -> t", lambda x, s=1: x * s, V, s=sd.array(V)),
        ShapeError,
    ),
    "option left out": (lambda: run("t -> t", lambda x, *, s: x * s, V), ShapeError),
    "operand twice": (lambda: run("t -> t", outside, V, x=V), ShapeError),
    "static of nothing": (
        lambda: sd.op("t -> t", static=("q",))(outside),
        AxisError,
    ),
    "NumPy's function": (lambda: run("t -> t", lambda x: np.exp(x), V), TraceError),
    "position of a value": (lambda: run("t -> t", lambda x: x[0], V), TraceError),
    "length of a value": (lambda: run("t -> t", lambda x: x * len(x), V), TraceError),
    "op inside an op": (lambda: run("t -> t", lambda x: other(x), V), TraceError),
    "gelu of a kind": (lambda: sd.gelu(X, "fast"), ShapeError),
    "no signature": (lambda: sd.op(outside), SignatureError),
    "no function": (lambda: sd.op("t -> t")(3), SignatureError),
    "2t": (lambda: sd.op("2t -> 2t")(outside), SignatureError),
    "t+": (lambda: sd.op("t+ -> t")(outside), SignatureError),
    "t--k": (lambda: sd.op("t--k -> t")(outside), SignatureError),
    "(a+a)": (lambda: sd.op("(a+a) -> a")(outside), SignatureError),
    "spaces": (lambda: sd.op("t - k + 1 -> t")(outside), SignatureError),
    "argnums beyond": (lambda: sd.grad(outside, argnums=-2)(V), DifferentiationError),
    "argnums text": (lambda: sd.grad(outside, argnums="x"), DifferentiationError),
    "no aux": (
        lambda: sd.grad(lambda x: sd.sum(x), has_aux=True)(V),
        DifferentiationError,
    ),
    "tangent of no tuple": (lambda: sd.jvp(outside, V, V), ShapeError),
    "tangents": (lambda: sd.jvp(outside, (V,), (V, V)), ShapeError),
    "donated name": (lambda: sd.compile(outside, donate="y"), AxisError),
    "range of a number": (
        lambda: sd.compile(lambda a, n: sum(a for _ in range(n)))(V, 2),
        TraceError,
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_use(device, name):
    call, kind = BAD[name]
    with pytest.raises(kind) as caught:
        call()
    assert isinstance(caught.value, ShaderError)
    assert "test_breakers.py" in caught.value.where


def test_what_is_donated_and_used_again_names_the_users_line(device):
    a = sd.array(V) + 0
    captured = sd.compile(lambda z: z * a)
    captured(V)
    sd.compile(lambda model: model * 2, donate="model")(a)
    with pytest.raises(sd.errors.DonatedError) as caught:
        captured(V)
    assert "test_breakers.py" in caught.value.where


# ------------------------------------------------------------------ derivatives


def test_argnums_from_the_end(device):
    def f(a, b):
        return sd.sum(a * b)

    close(sd.grad(f, argnums=-1)(V, 2 * V), V)
    close(sd.grad(f, argnums=np.int64(1))(V, 2 * V), V)
    both = sd.grad(f, argnums=(-1, 0))(V, 2 * V)
    close(both[0], V)
    close(both[1], 2 * V)


@pytest.mark.parametrize(
    "make",
    [
        lambda a, b: [a, b],
        lambda a, b: OrderedDict(a=a, b=b),
        lambda a, b: defaultdict(list, a=a, b=b),
        lambda a, b: {"a": [a], "b": (b, None, 3)},
    ],
)
def test_arguments_of_any_structure(device, make):
    def f(p):
        a, b, *_ = (x for x in sd.tree.leaves(p) if isinstance(x, sd.Array))
        return sd.sum(a) * sd.sum(b)

    got = sd.grad(f)(make(V, X))
    assert type(got) is type(make(V, X))
    a, b, *_ = sd.tree.leaves(got)
    close(a, [X.sum()] * 3)
    close(b, np.full((2, 3), V.sum()))


def test_a_class_that_is_no_pytree_has_no_gradient(cpu):
    @dataclasses.dataclass
    class Plain:
        w: np.ndarray

    with pytest.raises(DifferentiationError, match="a Plain, which holds no arrays"):
        sd.grad(lambda p: sd.sum(p.w))(Plain(V))


# ------------------------------------------------------------------ deep and shared


def test_deep_chains_take_a_moment(cpu):
    def chain(a):
        return functools.reduce(lambda y, k: y * 1.0001 + 0.001 * k, range(1500), a)

    expected = chain(V.astype(np.float64))
    close(sd.compile(chain)(V), expected, rtol=1e-3)
    close(sd.grad(lambda a: sd.sum(chain(a)))(V), [1.0001**1500] * 3, rtol=1e-3)


def test_shared_parts_are_walked_once(device):
    def times(n, f):
        return lambda a: functools.reduce(lambda y, _: f(y), range(n), a)

    ones = np.ones(3, F32)
    close(sd.compile(times(40, lambda y: y + y))(ones), [2.0**40] * 3)
    power = sd.compile(lambda a: sd.sum(times(40, lambda y: y * y)(a)))
    close(power(ones), 3)
    close(sd.grad(lambda a: sd.sum(times(20, lambda y: y * y)(a)))(ones), [2.0**20] * 3)
    close(sd.grad(lambda a: sd.sum(times(20, lambda y: y + y)(a)))(ones), [2.0**20] * 3)


def test_indices_and_conditions_that_share_parts(device):
    def doubled(x):
        t = sd.index("t")
        i = functools.reduce(lambda q, _: q + q, range(25), t)
        return x.at(t=sd.clip(i, 0, sd.extent("t") - 1))

    close(run("t -> t", doubled, V), V[[0, 2, 2]])

    def nested(x):
        t = sd.index("t")
        y = sd.where(t > 0, x.at(t=t - 1), 0.0)
        for k in range(80):
            y = sd.where(y > k, y, y + 1)
        return y

    close(run("t -> t", nested, V), [80, 80, 80])

    def unguarded(x):
        y = x.at(t=sd.index("t") - 1)
        for k in range(80):
            y = sd.where(y > k, y, y + 1)
        return y

    with pytest.raises(IndexRangeError, match="runs from -1 to 1"):
        run("t -> t", unguarded, V)


# ------------------------------------------------------------------ zero times infinity

NAN, INF = np.nan, np.inf


def f32(*xs):
    return np.array(xs, F32)


def gradient(f, *xs):
    return sd.grad(lambda *a: sd.sum(f(*a)))(*xs)


def test_a_row_of_nothing_but_minus_infinity_has_no_gradient(device):
    x = np.array([[-INF, -INF], [1, -INF]], F32)
    close(sd.logsumexp(x, axis=1), [-INF, 1])
    close(gradient(lambda x: sd.logsumexp(x, axis=1), x), [[0, 0], [1, 0]])
    close(gradient(lambda x: sd.softmax(x, axis=1) * f32(1, 2), x), [[0, 0], [0, 0]])
    op = sd.op("t d -> t")(lambda x: sd.logsumexp(x, over="d"))
    close(gradient(op, x), [[0, 0], [1, 0]])


def test_what_does_not_take_part_has_no_gradient(device):
    x = np.array([[1, NAN], [3, 5]], F32)
    c = ~np.isnan(x)
    close(gradient(lambda x: sd.mean(x, axis=1, where=c), x), [[1, 0], [0.5, 0.5]])
    close(gradient(lambda x: sd.var(x, axis=1, where=c), x), [[0, 0], [-1, 1]])
    p = 1 / (1 + np.exp(2))
    close(gradient(lambda x: sd.logsumexp(x, axis=1, where=c), x), [[1, 0], [p, 1 - p]])
    y = gradient(lambda x: sd.softmax(x, axis=1, where=c) * f32(1, 2), x)
    close(y, [[0, 0], [-p * (1 - p), p * (1 - p)]])


def test_positions_that_are_not_read_have_no_gradient(device):
    x = f32(NAN, INF, 1, 2)
    e = np.exp(x[2:].astype(np.float64))
    close(gradient(lambda x: sd.exp(x * x)[2:], x), [0, 0, 2 * e[0], 4 * np.exp(4.0)])
    close(gradient(lambda x: sd.where(x < 2, sd.log(x), 0.0)[2:], x), [0, 0, 1, 0])
    twice = gradient(lambda x: (lambda y: y[2:] + y[2:] * y[2:])(sd.exp(x)), x)
    close(twice, [0, 0, *(e + 2 * e * e)])


@pytest.mark.parametrize(
    "name", ["exp", "exp2", "expm1", "sinh", "cosh", "log", "sqrt"]
)
def test_no_cotangent_no_gradient(device, name):
    x = f32(0, 1e4, 1)
    _, pullback = sd.vjp(getattr(sd, name), x)
    got = np.asarray(pullback(f32(0, 0, 0)))
    close(got, [0, 0, 0])


def test_no_cotangent_for_one_element(device):
    _, pullback = sd.vjp(sd.pow, f32(0), f32(0.5))
    for g in pullback(f32(0)):
        close(g, [0])


def hessian(f, x):
    rows = [sd.jvp(sd.grad(f), (x,), (e,))[1] for e in np.eye(len(x), dtype=F32)]
    return np.stack([r.numpy() for r in rows])


@pytest.mark.parametrize("x", [(2, 4, 3), (2, 0, 3), (0, 0, 3), (0, 0, 0)], ids=str)
def test_products_with_zeros_have_second_derivatives(device, x):
    x = f32(*x)
    expected = [[0 if i == j else x[3 - i - j] for j in range(3)] for i in range(3)]
    close(hessian(sd.prod, x), expected)
    first = sd.grad(lambda a: sd.sum(sd.grad(sd.prod)(a) * f32(1, 2, 3)))(x)
    close(first, np.array(expected) @ [1, 2, 3])


def test_products_of_tiny_and_huge(device):
    close(sd.grad(sd.prod)(f32(1e-25, 1e-25, 1e25)), [1, 1, 0])
    x = np.ones((3, 4000), F32)
    x[0, 7] = x[1, 8] = x[1, 9] = 0
    got = gradient(lambda x: sd.prod(x, axis=1), x).numpy()
    close(got[2], np.ones(4000))
    assert got[0].sum() == got[0, 7] == 1 and not got[1].any()


def test_gradients_in_range_when_squares_are_not(device):
    ga, gb = sd.vjp(sd.atan2, f32(1, 1e-25, 1e25), f32(2, 1e-25, 1e25))[1](f32(1, 1, 1))
    np.testing.assert_allclose(ga.numpy(), f32(0.4, 5e24, 5e-26), 1e-5)
    np.testing.assert_allclose(gb.numpy(), f32(-0.2, -5e24, -5e-26), 1e-5)


def test_a_cast_to_f16_rounds_also_where_it_is_not_stored(device):
    x = f32(0.1, 1e-9, 7e4)
    got = sd.compile(lambda a: a.astype("f16").astype("f32") * 1.0)(x)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(got.numpy(), x.astype(np.float16).astype(F32))
    close(gradient(lambda a: a.astype("f16").astype("f32") * 3, f32(0.1)), [3])


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x * 0.0,
        lambda x: 0 * x,
        lambda x: x - x,
        lambda x: x + (-x),
        lambda x: (x + 1) - (x + 1),
        lambda x: sd.sum(x.reshape(4, 1) * 0.0, axis=1),
        lambda x: (x * 1e30) * 0.0,
    ],
)
def test_what_vanishes_keeps_nan(device, f):
    """Drivers take x · 0 and x - x for 0, whatever x is."""
    got = sd.compile(f)(f32(INF, NAN, -INF, 2))
    np.testing.assert_array_equal(got, f32(NAN, NAN, NAN, 0))


def test_the_square_of_a_root(device):
    x = f32(-4, -INF, NAN, 0, 4)
    for f in (lambda x: sd.sqrt(x) * sd.sqrt(x), lambda x: sd.sqrt(x) ** 2):
        close(sd.compile(f)(x), f32(NAN, NAN, NAN, 0, 4))


# ------------------------------------------------------------------ calls that fail


def test_a_call_that_fails_takes_nothing(device):
    a = sd.array(V) + 0
    huge = sd.compile(
        lambda a: sd.broadcast_to(a[:1], (1 << 20, 1 << 20)) * 2.0, donate=("a",)
    )
    with pytest.raises(ShaderError):
        huge(a)
    close(a, V)
    close(sd.compile(lambda a: a + 1, donate=("a",))(a), V + 1)


def test_deep_index_maps(device):
    def deep(x):
        t = functools.reduce(
            lambda q, k: sd.minimum(q // 1 + k % 2, 5), range(1200), sd.index("t")
        )
        return x.at(t=sd.clip(t, 0, 2))

    close(run("t -> t", deep, V), [3, 3, 3])


def test_bad_specs_and_devices(device):
    with pytest.raises(DTypeError, match="'f64'"):
        sd.spec("f64", 3)
    with pytest.raises(ShapeError, match="negative"):
        sd.spec("f32", -3)
    assert len(sd.lower(lambda x: x * 2, sd.spec("f32", np.int64(3))).kernels) == 1
    with pytest.raises(sd.errors.NoAdapterError, match="not by 3"):
        sd.use_device(3)
    with pytest.raises(ShapeError, match=r"not 1\.5"):
        sd.random.key(1.5)


# ------------------------------------------------------------------ what must be equal


@pytest.mark.parametrize("block_from", [0, 400])
def test_a_maximum_that_is_a_result_keeps_its_gradient(device, block_from):
    """No element of a product made again by another schedule equals its maximum."""
    r = np.random.default_rng(0)
    shapes = (3, 100, 20), (32, 20), (32,)
    args = [r.standard_normal(s).astype(F32) for s in shapes]

    def f(h, w, bias):
        x = sd.tanh((h @ w.transpose(1, 0) + bias) / 5.0) * 5.0
        return sd.logsumexp(x, axis=-1), sd.max(x, axis=-1)

    graph = Graph(f, args)
    dy = [r.standard_normal(s.shape).astype(F32) for s in graph.outs]
    expected = graph.gradient(args, dy)
    # Whether another schedule rounds otherwise is luck: the product must be the same.
    outs = [*graph.outs, *graph.gradients]
    order = topo_stages(outs)
    x = {s for s in order if s.kind == "reduce" and s.shape == (3, 100, 32)}
    assert x and compared(order, outs, x) == x
    assert not compared(topo_stages(graph.outs), graph.outs, x)
    before = device.target
    device.target = dataclasses.replace(before, block_from=block_from)
    try:
        _, pullback = sd.vjp(f, *args)
        both = sd.compile(lambda *a: sd.vjp(f, *a)[1](tuple(dy)))
        for got in (pullback(tuple(dy)), both(*args)):
            for g, e in zip(got, expected, strict=True):
                close(g, e, rtol=1e-4, atol=1e-4)
    finally:
        device.target = before


def test_a_map_is_not_computed_again_beside_its_maximum():
    """A driver may contract a·b + c in one kernel and not in another."""

    def f(x):
        return sd.max(x * x + x, axis=-1)

    def computed(f):
        graph = Graph(f, [x])
        return [s for s in topo_stages([*graph.outs, *graph.gradients]) if s.body]

    x = np.ones((5, 300), F32)
    order = computed(f)
    assert {s.name for s in recomputed(order, (), ())} == {"add"}
    assert not recomputed(order, (), recomputed(order, (), ()))
    low = sd.lower(lambda x: sd.vjp(f, x)[1](np.ones(5, F32)), x)
    assert "it is compared with its own maximum" in low.explain()
    # One rounding is the same everywhere; what is only subtracted is not compared.
    for g in (lambda x: sd.max(x * x, axis=-1), lambda x: sd.softmax(x * x + x)):
        assert not recomputed(computed(g), (), ())


@pytest.mark.parametrize("n", [4, 8, 4096])
def test_what_does_not_depend_on_the_summed_axis_counts_each_time(device, n):
    ids = np.zeros(n, np.int32)

    def f(x):
        y = sd.take(x, ids)
        return sd.sum(y), sd.softmax(y), sd.logsumexp(y), sd.prod(1 + y / n)

    x = np.asarray([0.5], F32)
    row = np.full(n, 0.5)
    wanted = row.sum(), np.full(n, 1 / n), 0.5 + np.log(n), np.prod(1 + row / n)
    for got, want in zip(sd.compile(f)(x), wanted, strict=True):
        close(got, want, rtol=1e-5)
    _, pullback = sd.vjp(lambda x: f(x)[2] + f(x)[0], x)
    close(pullback(np.float32(1))[0], [1.0 + n], rtol=1e-5)


def test_whoever_makes_products_again_asks_whether_they_are_compared(device):
    """Loops over blocks, one pass over lines, and what forward keeps for backward."""

    def f(h, w):
        x = sd.tanh(h @ w)
        return sd.logsumexp(x, axis=-1), sd.max(x, axis=-1)

    def alone(h, w):
        return f(h, w)[0]

    def all_of(g):
        def both(h, w):
            y, pullback = sd.vjp(g, h, w)
            dy = tuple(sd.ones_like(v) for v in y) if isinstance(y, tuple) else y
            return y, pullback(dy)

        return both

    def product(low):
        (x,) = {s for s in topo_stages(low.program.outputs) if s.shape == (100, 33)
                and s.kind == "reduce"}  # fmt: skip
        return x

    args = sd.spec("f32", 100, 20), sd.spec("f32", 20, 33)
    before = device.target
    device.target = dataclasses.replace(before, block_from=400, online=False)
    try:
        for g, cut in ((alone, True), (f, False)):
            low = sd.lower(all_of(g), *args)
            assert any("never exists whole" in x for x in low.program.log) is cut
            assert ("compared with its own maximum" in low.explain()) is not cut
        device.target = dataclasses.replace(before, block_from=0, online=True)
        for g, virtual in ((alone, True), (f, False)):
            low = sd.lower(all_of(g), *args)
            assert (product(low) in low.program.inside) is virtual
        # Forward alone never stores it; what backward needs it must be given.
        device.target = dataclasses.replace(before, block_from=400, online=False)
        for g, again in ((alone, True), (f, False)):
            low = sd.lower(g, *args)
            assert any(s.shape == (100, 33) for s in low.program.inside)
            kept = sd.lower(g, *args, backward=True).residuals
            assert all(s.shape != (100, 33) for s in kept) is again
    finally:
        device.target = before
