"""``sd.Array`` against NumPy."""

from __future__ import annotations

import operator
import sys
import warnings

import numpy as np
import pytest

import shaderdsl as sd
from shaderdsl.errors import (
    AxisError,
    DonatedError,
    DTypeError,
    IndexRangeError,
    ReductionError,
    ShapeError,
    TraceError,
)
from shaderdsl.testing import make

X = make((3, 4))
POSITIVE = make((3, 4), positive=True)


def same(got, expected, rtol=1e-5, atol=1e-6):
    expected = np.asarray(expected)
    assert got.shape == expected.shape
    np.testing.assert_allclose(got.numpy(), expected, rtol, atol)


BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "lt", "le", "gt", "ge",
          "eq", "ne"]  # fmt: skip
SHAPES = [((3, 4), (3, 4)), ((3, 4), (4,)), ((3, 1), (1, 4)), ((2, 3, 4), (3, 1)),
          ((), (3,)), ((0, 3), (3,)), ((1,), (0,))]  # fmt: skip


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_operators_broadcast(device, name, shapes):
    f = getattr(operator, name)
    a, b = make(shapes[0]), make(shapes[1], seed=1, positive=True)
    same(f(sd.array(a), sd.array(b)), f(a, b))
    same(f(sd.array(a), b), f(a, b))
    if name not in ("lt", "le", "gt", "ge", "eq", "ne"):
        same(f(a, sd.array(b)), f(a, b))


@pytest.mark.parametrize("name", BINARY)
def test_operators_with_numbers(device, name):
    f = getattr(operator, name)
    same(f(sd.array(X), 2), f(X, np.float32(2)))
    same(f(2.5, sd.array(POSITIVE)), f(np.float32(2.5), POSITIVE))


@pytest.mark.parametrize("name", ["add", "sub", "mul", "floordiv", "mod", "and_", "or_",
                                  "xor", "lshift", "rshift"])  # fmt: skip
@pytest.mark.parametrize("kind", ["i32", "u32"])
def test_integer_operators(device, name, kind):
    dtype = {"i32": np.int32, "u32": np.uint32}[kind]
    a = np.array([7, 12, 5, 2**30, 255], dtype)
    b = np.array([2, 5, 3, 1, 4], dtype)
    got = getattr(operator, name)(sd.array(a), sd.array(b))
    assert got.dtype == kind
    np.testing.assert_array_equal(got.numpy(), getattr(operator, name)(a, b))


def test_integers_wrap_and_divide_like_python(device):
    a = sd.array(np.array([2**31 - 1, -(2**31), -7, 7], np.int32))
    assert (a + 1).tolist() == [-(2**31), -(2**31) + 1, -6, 8]
    assert (a // 2).tolist() == [2**30 - 1, -(2**30), -4, 3]
    assert (a % 4).tolist() == [3, 0, 1, 3]
    assert (a // 0).tolist() == [0] * 4 and (a % 0).tolist() == [0] * 4


def test_unary_and_bools(device):
    b = np.array([True, False])
    same(-sd.array(X), -X)
    same(abs(sd.array(X)), abs(X))
    assert (~sd.array(b)).tolist() == [False, True]
    assert (sd.array(b) & np.array([True, True])).tolist() == [True, False]
    assert (~sd.array(np.array([5], np.int32))).tolist() == [-6]
    assert (sd.array(b) + 1).tolist() == [2, 1]
    same(+sd.array(X), X)


@pytest.mark.parametrize("power", [0, 1, 2, 3, -1, -2, 0.5, -0.5, 1.5])
def test_powers(device, power):
    same(sd.array(POSITIVE) ** power, POSITIVE**power, 2e-5)


def test_power_of_arrays(device):
    a, b = make((5,), positive=True), make((5,), seed=1)
    same(sd.array(a) ** b, a**b, 2e-5)
    same(2.0 ** sd.array(b), 2.0**b, 2e-5)
    same(sd.pow(a, 2.0), a * a, 2e-5)


REDUCTIONS = ["sum", "mean", "max", "min", "prod", "any", "all"]
AXES = [None, 0, 1, -1, (0, 2), (1, -1), (0, 1, 2)]


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("axis", AXES, ids=str)
def test_reductions(device, name, axis):
    x = make((2, 3, 4))
    for keep in (False, True):
        expected = getattr(np, name)(x, axis=axis, keepdims=keep)
        same(getattr(sd.array(x), name)(axis=axis, keepdims=keep), expected)
        same(getattr(sd, name)(x, axis=axis, keepdims=keep), expected)


@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_arg_reductions(device, axis):
    x = np.array([[3.0, 1.0, 3.0], [1.0, 1.0, 5.0]], np.float32)
    for name in ("argmax", "argmin"):
        got = getattr(sd.array(x), name)(axis=axis)
        assert got.dtype == "i32"
        np.testing.assert_array_equal(got.numpy(), getattr(np, name)(x, axis=axis))


def test_more_reductions(device):
    x = make((3, 5))
    same(sd.var(x, axis=1), x.var(1))
    same(sd.logsumexp(x, axis=1), np.log(np.exp(x).sum(1)))
    e = np.exp(x)
    same(sd.softmax(x), e / e.sum(1, keepdims=True))
    same(sd.cumsum(x, axis=0), np.cumsum(x, 0))
    same(sd.cumsum(np.arange(5, dtype=np.int32)), np.cumsum(np.arange(5)))
    same(sd.sum(x, axis=1, where=x > 0), np.sum(x, 1, where=x > 0))
    same(sd.mean(x, where=x > 0), np.mean(x, where=x > 0))
    assert int(sd.sum(x > 0)) == (x > 0).sum()
    same(sd.max(np.array([1.0, np.nan], np.float32)), np.nan)


def test_empty_reductions(device):
    x = np.zeros((0, 3), np.float32)
    assert sd.sum(x, axis=0).tolist() == [0, 0, 0]
    assert sd.prod(x, axis=0).tolist() == [1, 1, 1]
    assert sd.sum(x, axis=1).shape == (0,)
    assert sd.max(x, axis=1).shape == (0,)
    assert bool(sd.all(x)) and not bool(sd.any(x))
    for name in ("max", "min", "argmax", "argmin", "mean"):
        with pytest.raises(ReductionError):
            getattr(sd, name)(x, axis=0)


@pytest.mark.parametrize(
    ("a", "b"),
    [((3, 4), (4, 5)), ((4,), (4, 5)), ((3, 4), (4,)), ((4,), (4,)),
     ((2, 3, 4), (4, 5)), ((2, 3, 4), (2, 4, 5)), ((5, 1, 3, 4), (2, 4, 5)),
     ((0, 4), (4, 5)), ((3, 0), (0, 5)), ((1, 1), (1, 1)), ((65, 33), (33, 70))],
    ids=str,
)  # fmt: skip
def test_matmul(device, a, b):
    x, y = make(a), make(b, seed=1)
    same(sd.array(x) @ y, x @ y, 1e-4, 1e-5)
    same(x @ sd.array(y), x @ y, 1e-4, 1e-5)
    same(sd.matmul(x, y), x @ y, 1e-4, 1e-5)


@pytest.mark.parametrize(
    "shape", [(12,), (2, 6), (4, 3), (-1, 2), (1, 12, 1), (2, 2, 3)]
)
def test_reshape(device, shape):
    same(sd.array(X).reshape(shape), X.reshape(shape))
    same(sd.array(X).reshape(*shape), X.reshape(shape))
    same(sd.reshape(sd.array(X).T, shape), X.T.reshape(shape))


def test_transpose(device):
    x = make((2, 3, 4))
    same(sd.array(x).T, x.T)
    same(sd.array(x).transpose(1, 0, 2), x.transpose(1, 0, 2))
    same(sd.transpose(x, (2, 0, 1)), x.transpose(2, 0, 1))
    same(sd.array(x).transpose(-1, 0, 1), x.transpose(-1, 0, 1))


KEYS = [
    np.s_[1], np.s_[-1], np.s_[:, 1], np.s_[1:], np.s_[::2], np.s_[::-1],
    np.s_[2:0:-1, ::3], np.s_[..., 0], np.s_[None], np.s_[:, None, 1:3],
    np.s_[5:2], np.s_[-2:], np.s_[1, 2], np.s_[...], np.s_[:, -3:-1],
]  # fmt: skip


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_slices(device, key):
    same(sd.array(X)[key], X[key])


@pytest.mark.parametrize("ids", [[0, 2, 2], [[1], [0]], [], 1], ids=str)
def test_integer_arrays_index_the_first_axis(device, ids):
    i = np.array(ids, np.int32)
    same(sd.array(X)[i], X[i])
    same(sd.take(X, i), X[i])
    same(sd.array(X)[sd.array(i)], X[i])


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_concatenate_and_stack(device, axis):
    parts = [X, X * 2, X[:0] if axis == 0 else X[:, :0], X + 1]
    same(sd.concatenate(parts, axis=axis), np.concatenate(parts, axis))
    same(sd.stack([X, X * 2], axis=axis), np.stack([X, X * 2], axis))


def test_pad(device):
    same(
        sd.pad(X, ((1, 0), (0, 2)), 3.0), np.pad(X, ((1, 0), (0, 2)), constant_values=3)
    )
    same(sd.pad(X, 1), np.pad(X, 1))
    same(sd.pad(X, (1, 2)), np.pad(X, (1, 2)))
    same(sd.pad(np.zeros((0,), np.float32), 1, 5.0), [5, 5])


def test_making(device):
    assert sd.zeros((2, 3)).tolist() == [[0] * 3] * 2
    assert sd.ones(2, "i32").dtype == "i32"
    assert sd.full((2,), 7).tolist() == [7, 7]
    assert sd.full((), 2.5).dtype == "f32"
    np.testing.assert_array_equal(sd.arange(5).numpy(), np.arange(5))
    np.testing.assert_array_equal(sd.arange(2, 9, 3).numpy(), np.arange(2, 9, 3))
    same(sd.arange(0.0, 1.0, 0.25), np.arange(0.0, 1.0, 0.25))
    assert sd.zeros_like(sd.ones((2,), "u32")).dtype == "u32"
    same(sd.broadcast_to(X[0], (2, 4)), np.broadcast_to(X[0], (2, 4)))
    assert sd.array([[1, 2], [3, 4]]).dtype == "i32"
    assert sd.array([1.5]).dtype == "f32"


def test_update_slice(device):
    base, new = np.zeros((5, 3), np.float32), make((2, 3))
    expected = base.copy()
    expected[1:3] = new
    same(sd.update_slice(base, new, axis=0, start=1), expected)
    same(sd.update_slice(base, new, axis=-2, start=sd.array(1)), expected)

    step = sd.compile(
        lambda base, new, at: sd.update_slice(base, new, axis=0, start=at),
        donate=("base",),
    )
    kept = sd.array(base) + 0.0
    same(step(kept, new, 1), expected)
    with pytest.raises(DonatedError, match=r"\(5, 3\) was donated"):
        kept.numpy()


# ------------------------------------------------------------------ dtypes, exchange


def test_dtype_rules(device):
    i, u, f = (sd.ones(2, d) for d in ("i32", "u32", "f32"))
    h, b = sd.ones(2, "f16"), sd.ones(2, "bool")
    assert (i + f).dtype == (i + 1.5).dtype == (i / 2).dtype == "f32"
    assert (u + 1).dtype == "u32" and (i + 1).dtype == (b + 1).dtype == "i32"
    assert (h + h).dtype == (h * 2.0).dtype == (h + 1).dtype == "f16"
    assert (h + f).dtype == "f32"
    assert (i < 2).dtype == "bool" and (b & b).dtype == "bool"
    assert (f * 2).dtype == "f32"
    with pytest.raises(DTypeError, match="mixes i32 and u32"):
        i + u


def test_astype(device):
    x = np.array([1.7, -2.3, np.nan, 3e9, -3e9, 0.0], np.float32)
    assert sd.array(x).astype("i32").tolist() == [1, -2, 0, 2**31 - 1, -(2**31), 0]
    assert sd.array(x).astype(np.uint32).tolist() == [1, 0, 0, 3_000_000_000, 0, 0]
    assert sd.array(x[:2]).astype(bool).tolist() == [True, True]
    half = sd.array(x[:2]).astype(np.float16)
    assert half.dtype == "f16"
    np.testing.assert_array_equal(half.numpy(), x[:2].astype(np.float16))
    bits = sd.bitcast(x[:2], "u32")
    np.testing.assert_array_equal(bits.numpy(), x[:2].view(np.uint32))


def test_half_accumulates_in_f32(device):
    x = sd.ones(20_000, "f16")
    assert float(sd.sum(x)) == 20_000
    assert sd.sum(x).dtype == "f16"


def test_float64_is_converted_with_one_warning(device, monkeypatch):
    monkeypatch.setattr(sys.modules["shaderdsl.dtypes"], "_warned", False)
    with pytest.warns(UserWarning, match="float64 is rounded") as seen:
        assert sd.ops.silu(np.zeros(2)).dtype == "f32"
    assert seen[0].filename == __file__  # the user's line, however deep it was
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sd.array(np.zeros(2))


def test_wide_integers_are_range_checked(device):
    assert sd.array(np.array([1, -5])).dtype == "i32"
    with pytest.raises(IndexRangeError, match=r"3 … 2147483648, outside of i32"):
        sd.array(np.array([3, 2**31]))
    with pytest.raises(DTypeError, match="complex"):
        sd.array(np.zeros(2, complex))
    with pytest.raises(DTypeError, match="not one of"):
        sd.zeros(2, "f64")


@pytest.mark.parametrize("layout", ["transposed", "strided", "reversed", "offset"])
def test_strided_inputs(device, layout):
    x = make((5, 7), layout=layout)
    same(sd.array(x) + 1.0, x + 1)


def test_exchange(device):
    a = sd.array(X) * 2.0
    np.testing.assert_array_equal(np.asarray(a), X * 2)
    np.testing.assert_array_equal(np.from_dlpack(a), X * 2)
    assert np.asarray(a, np.float64).dtype == np.float64

    class Capsule:
        def __dlpack__(self, **keywords):
            return X.__dlpack__(**keywords)

        def __dlpack_device__(self):
            return X.__dlpack_device__()

    same(sd.array(Capsule()), X)
    y = a.numpy()
    y[:] = 0  # a copy
    np.testing.assert_array_equal(a.numpy(), X * 2)


def test_python_protocols(device):
    a = sd.array(X) + 0.0
    assert len(a) == 3 and [r.shape for r in a] == [(4,)] * 3
    assert float(a[0, 0]) == X[0, 0] and int(sd.array(3) + 0) == 3
    assert bool(sd.array(True)) and list(range(5))[sd.array(2)] == 2
    assert repr(sd.array([1, 2])) == "Array([1 2], dtype=i32)"
    assert (a.ndim, a.size) == (2, 12)
    with pytest.raises(TypeError, match="unhashable"):
        hash(a)
    with pytest.raises(TypeError):
        len(sd.array(1.0))
    with pytest.raises(TypeError, match="integer array"):
        operator.index(sd.array(1.0))


def test_symbols_have_no_values(device):
    def branch(x):
        return x if x[0] > 0 else -x

    for use in (branch, lambda x: float(x[0]), lambda x: x.numpy()):
        with pytest.raises(TraceError, match="symbolic array") as caught:
            sd.compile(use)(np.ones(2, np.float32))
        assert "test_array.py" in caught.value.where


def test_what_does_not_fit(cpu):
    a = sd.array(X)
    for f, error in (
        (lambda: a + np.ones(3, np.float32), ShapeError),
        (lambda: a @ np.ones(3, np.float32), ShapeError),
        (lambda: a.reshape(5, -1), ShapeError),
        (lambda: a.reshape(-1, -1), ShapeError),
        (lambda: a.transpose(0, 0), AxisError),
        (lambda: a.sum(axis=2), AxisError),
        (lambda: a.sum(axis=(0, 0)), AxisError),
        (lambda: a[3], IndexRangeError),
        (lambda: a[0, 0, 0], AxisError),
        (lambda: a[np.array([3])], IndexRangeError),
        (lambda: a[np.array([0.5], np.float32)], DTypeError),
        (lambda: a[:, np.array([0])], IndexRangeError),
        (lambda: sd.concatenate([a, a[:, :2]]), ShapeError),
        (lambda: sd.concatenate([]), ShapeError),
        (lambda: sd.stack([]), ShapeError),
        (lambda: sd.pad(a, ((1, 1),)), ShapeError),
        (lambda: sd.update_slice(a, a, axis=0, start=1), IndexRangeError),
        (lambda: sd.update_slice(a, a[:, :1], axis=0, start=0), ShapeError),
        (lambda: sd.broadcast_to(a, (4, 4)), ShapeError),
        (lambda: sd.bitcast(a.astype("f16"), "u32"), DTypeError),
    ):
        with pytest.raises(error) as caught:
            f()
        assert "test_array.py" in (caught.value.where or ""), caught.value


# ------------------------------------------------------------------ compile


def test_compile_traces_once_a_signature(device):
    calls = []

    @sd.compile
    def f(x, k, flag=True):
        calls.append(x.shape)
        return x * k if flag else x

    for k in (1.0, 2.0, 3.5):
        assert f(np.ones(2, np.float32), k).tolist() == [k, k]
    f(np.ones(3, np.float32), 1.0)
    f(np.ones(2, np.float32), 1.0, flag=False)
    assert len(calls) == 3


def test_another_number_compiles_nothing(device):
    x = sd.array(X) + 0.0
    y = x * 1.5
    with sd.profile() as p:
        for k in range(5):
            y = x * float(k)
    assert p.compiled == 0 and p.downloads == 0
    same(y, X * 4)


# ------------------------------------------------------------------ random numbers


def test_random_numbers_are_a_function_of_the_key(device):
    k = sd.random.key(7)
    a, b = sd.random.bits(k, (5, 3)), sd.random.bits(k, (5, 3))
    np.testing.assert_array_equal(a.numpy(), b.numpy())
    assert a.dtype == "u32"
    # Threefry-2x32 with 20 rounds, worked out once: the same everywhere.
    sd.use_device("cpu")
    np.testing.assert_array_equal(sd.random.bits(k, (5, 3)).numpy(), a.numpy())


def test_threefry_known_answers(device):
    # From the Random123 distribution: all zeros.
    from shaderdsl.ir import expr as E
    from shaderdsl.ir import interpret
    from shaderdsl.ir.stage import map_stage
    from shaderdsl.random import threefry

    zero = E.const(0, "u32")
    out = [map_stage((), e, "t") for e in threefry(zero, zero, zero, zero)]
    got = [int(v) for v in interpret.evaluate(out, {})]
    assert got == [0x6B200159, 0x99BA4EFE]
    assert int(sd.random.bits(sd.random.key(0), (1,))[0]) == 0x6B200159


def test_random_distributions(device):
    k1, k2 = sd.random.split(sd.random.key(0))
    u = sd.random.uniform(k1, 100_000).numpy()
    assert u.min() >= 0 and u.max() < 1 and abs(u.mean() - 0.5) < 5e-3
    z = sd.random.normal(k2, (1000, 100)).numpy()
    assert abs(z.mean()) < 0.02 and abs(z.std() - 1) < 0.01 and np.isfinite(z).all()
    w = sd.random.uniform(k1, 1000, 2.0, 3.0).numpy()
    assert w.min() >= 2 and w.max() < 3
    assert sd.random.split(k1, 5).shape == (5, 2)
    with pytest.raises(DTypeError, match="u32"):
        sd.random.bits(np.array([0, 1], np.int32), 3)
    with pytest.raises(ShapeError, match=r"\(2,\)"):
        sd.random.bits(np.array([0], np.uint32), 3)
