"""Bad input gets a typed error: the argument, the axis, both sizes, the user's line."""

from __future__ import annotations

import importlib
import inspect
import math
import re
from pathlib import Path

import numpy as np
import pytest

import shaderdsl as sd
from shaderdsl import errors, ops
from shaderdsl.errors import (
    AxisError,
    DifferentiationError,
    DTypeError,
    IndexRangeError,
    LimitError,
    NoAdapterError,
    OutOfMemoryError,
    ReductionError,
    ShaderError,
    ShapeError,
    SignatureError,
    TraceError,
)


def f32(*shape):
    return np.ones(shape, np.float32)


@sd.op("t d, d -> t d")
def scale(x, gain):
    return x * gain


@sd.op("t -> t")
def lost_axis(x):
    return x * sd.index("k")


@sd.op("t d -> t")
def unreduced(x):
    return x


@sd.op("t -> t")
def branching(x):
    return x if x > 0 else -x


@sd.op("t -> t")
def foreign(x):
    return x * f32(3)


@sd.op("t -> t, t")
def one_of_two(x):
    return x


@sd.op("t -> t")
def two_of_one(x):
    return x, x


@sd.op("t -> t")
def float_index(x):
    return x.at(t=x)


@sd.op("t d -> t")
def greatest(x):
    return sd.max(x, over="d")


@sd.op("t d -> t")
def average(x):
    return sd.mean(x, over="d")


@sd.op("t d -> t")
def first(x):
    return sd.cast(sd.argmax(x, over="d"), "f32")


@sd.op("t d -> t")
def nameless(x):
    return sd.sum(x)


@sd.op("t -> t k")
def tall(x):
    return x


@sd.op("t -> t")
def mixed_bits(x):
    return x & 1


@sd.op("t -> t")
def bad_condition(x):
    return sd.where(x, 1.0, 0.0)


@sd.op("(h d) -> h d")
def heads(x):
    return x


@sd.op("t k, k n -> t n")
def product_sign(x, w):
    return x @ w


@sd.op("t k, k n -> t n")
def product_of_an_array(x, w):
    return f32(3, 3) @ w


@sd.op("t d -> t")
def method(x):
    return x.sum(over="d")


@sd.op("t -> t")
def array_at_a_symbol(x):
    return x * f32(3)[sd.index("t")]


@sd.op("t -> t")
def from_math(x):
    return x * math.exp(x)


def line_of(op, needle):
    """The line of an op's body that holds this text."""
    lines, start = inspect.getsourcelines(op.function)
    return start + next(k for k, line in enumerate(lines) if needle in line)


# call, error, what the message names, and the body's text where it points, if there
BAD = {
    "sizes disagree": (
        lambda: scale(f32(2, 3), f32(4)),
        ShapeError,
        r"argument 'gain': axis 'd' is 4, but argument 'x' makes it 3",
        None,
    ),
    "never stretched from 1": (
        lambda: scale(f32(2, 3), f32(1)),
        ShapeError,
        r"argument 'gain': axis 'd' is 1, .* 3",
        None,
    ),
    "wrong rank": (
        lambda: scale(f32(3), f32(3)),
        ShapeError,
        r"argument 'x' has 1 dimensions \(3,\).* 2: 't d'",
        None,
    ),
    "@ inside an op": (
        lambda: product_sign(f32(2, 3), f32(3, 2)),
        TraceError,
        r"single elements; @ multiplies arrays",
        "x @ w",
    ),
    "a NumPy array @ a value": (
        lambda: product_of_an_array(f32(2, 3), f32(3, 2)),
        TraceError,
        r"single elements; @ multiplies arrays",
        "@ w",
    ),
    "a method of arrays inside an op": (
        lambda: method(f32(2, 3)),
        TraceError,
        r"has no 'sum'",
        "x.sum",
    ),
    "a NumPy array at a symbolic index": (
        lambda: array_at_a_symbol(f32(3)),
        TraceError,
        r"cannot become a NumPy array, nor index one",
        "f32(3)[",
    ),
    "a function of math inside an op": (
        lambda: from_math(f32(3)),
        TraceError,
        r"is no number while an op is traced",
        "math.exp",
    ),
    "too few operands": (
        lambda: scale(f32(2, 3)),
        ShapeError,
        r"takes 2 operands \(x, gain\), got 1",
        None,
    ),
    "too many operands": (
        lambda: scale(f32(2, 3), f32(3), f32(3)),
        ShapeError,
        r"got 3 arguments",
        None,
    ),
    "unknown option": (
        lambda: scale(f32(2, 3), f32(3), eps=1.0),
        AxisError,
        r"no option or axis 'eps'",
        None,
    ),
    "unknown axis": (
        lambda: lost_axis(f32(3)),
        AxisError,
        r"no axis 'k'.*are t",
        'index("k")',
    ),
    "axis not in the result": (
        lambda: unreduced(f32(2, 3)),
        AxisError,
        r"depends on axis 'd'",
        None,
    ),
    "undetermined axis": (
        lambda: tall(f32(2)),
        AxisError,
        r"nothing gives the size of axis 'k'",
        None,
    ),
    "does not divide": (
        lambda: heads(f32(7), d=2),
        ShapeError,
        r"'x': dimension '\(h d\)' of size 7",
        None,
    ),
    "if on a value": (
        lambda: branching(f32(2)),
        TraceError,
        r"truth of a symbolic value",
        "if x > 0",
    ),
    "an array inside": (
        lambda: foreign(f32(3)),
        TraceError,
        r"a ndarray cannot be used",
        "f32(3)",
    ),
    "too few results": (
        lambda: one_of_two(f32(2)),
        ShapeError,
        r"returns 1 values, .* has 2",
        None,
    ),
    "too many results": (
        lambda: two_of_one(f32(2)),
        ShapeError,
        r"returns a tuple",
        None,
    ),
    "index of floats": (
        lambda: float_index(f32(2)),
        DTypeError,
        r"axis 't' is f32",
        "x.at",
    ),
    "max over none": (
        lambda: greatest(f32(2, 0)),
        ReductionError,
        r"max over 'd' .*size 0",
        "sd.max",
    ),
    "mean over none": (
        lambda: average(f32(2, 0)),
        ReductionError,
        r"mean over 'd' of size 0",
        "sd.mean",
    ),
    "argmax over none": (
        lambda: first(f32(2, 0)),
        ReductionError,
        r"argmax over 'd' of size 0",
        "argmax",
    ),
    "reduction without axes": (
        lambda: nameless(f32(2, 3)),
        ReductionError,
        r"names its axes",
        "sd.sum",
    ),
    "bits of floats": (
        lambda: mixed_bits(f32(2)),
        DTypeError,
        r"takes integers or bools, not f32",
        "& 1",
    ),
    "condition of floats": (
        lambda: bad_condition(f32(2)),
        DTypeError,
        r"condition of where is f32",
        "sd.where",
    ),
    "ids too large": (
        lambda: ops.embedding(f32(4, 2), np.array([1, 4], np.int32)),
        IndexRangeError,
        r"ids run from 1 to 4, .*'table' has size 4",
        None,
    ),
    "ids below zero": (
        lambda: ops.embedding(f32(4, 2), np.array([-1], np.int32)),
        IndexRangeError,
        r"ids run from -1 to -1, .* size 4",
        None,
    ),
    "labels out of range": (
        lambda: ops.cross_entropy(f32(2, 5), np.array([1, 5], np.int32)),
        IndexRangeError,
        r"ids run from 1 to 5, .* size 5",
        None,
    ),
    "float ids": (
        lambda: ops.embedding(f32(4, 2), f32(2)),
        DTypeError,
        r"'v' is f32",
        None,
    ),
    "heads do not divide": (
        lambda: ops.attention(f32(3, 2, 4), f32(2, 2, 4), f32(2, 2, 4)),
        ShapeError,
        r"argument 'q': dimension '\(h g\)' of size 3 does not divide by h=2|argument",
        None,
    ),
    "rope turns too much": (
        lambda: ops.rope(f32(2, 1, 4), f32(2, 4), f32(2, 4), layout="halved"),
        ShapeError,
        r"turn 8 elements, a head of 'x' has 4",
        None,
    ),
    "rope of no layout": (
        lambda: ops.rope(f32(2, 1, 4), f32(2, 2), f32(2, 2), layout="odd"),
        ShapeError,
        r"'halved' or 'interleaved', not 'odd'",
        None,
    ),
    "unknown reduction": (
        lambda: ops.cross_entropy(f32(2, 5), np.array([1, 2]), reduction="median"),
        ShapeError,
        r"'mean', 'sum' or 'none', not 'median'",
        None,
    ),
    "integer argument": (
        lambda: sd.grad(lambda x: sd.sum(x))(np.array([1, 2], np.int32)),
        DifferentiationError,
        r"argument 0, named in argnums, is i32",
        None,
    ),
    "no scalar": (
        lambda: sd.grad(lambda x: x)(f32(3)),
        DifferentiationError,
        r"gives \(3,\)",
        None,
    ),
    "axis of an array": (
        lambda: sd.sum(f32(2, 3), axis=2),
        AxisError,
        r"axis 2 of an array with 2",
        None,
    ),
    "named axes outside an op": (
        lambda: sd.index("t"),
        TraceError,
        r"only inside an op",
        None,
    ),
    "donating what is not there": (
        lambda: sd.compile(lambda x: x, donate=("model",)),
        AxisError,
        r"'model'",
        None,
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(cpu, name):
    call, kind, message, needle = BAD[name]
    with pytest.raises(kind, match=message) as caught:
        call()
    error = caught.value
    assert isinstance(error, ShaderError)
    if name == "donating what is not there" or name == "named axes outside an op":
        return
    found = re.search(r"test_errors\.py:(\d+)", error.where or "")
    assert found, f"no line of the user's in {error.where!r}"
    if needle is not None:
        op = {o.name: o for o in globals().values() if isinstance(o, sd.Op)}[
            error.where.split(" ")[0]
        ]
        assert int(found[1]) == line_of(op, needle)


def test_signatures(cpu):
    for text in ("t", "t -> t -> t", "t (a -> t"):
        with pytest.raises(SignatureError, match=re.escape(repr(text))):
            sd.op(text)(lambda x: x)
    with pytest.raises(ShapeError, match="takes 1 operands, its signature"):
        sd.op("t, t -> t")(lambda x: x)


def test_ids_are_checked_wherever_they_are_known(cpu):
    table, bad = f32(4, 2), np.array([7], np.int32)
    for call in (
        lambda: sd.compile(ops.embedding)(table, bad),
        lambda: sd.compile(lambda w: ops.embedding(w, bad))(table),
        lambda: sd.vjp(lambda w: ops.embedding(w, bad), table),
        lambda: sd.jvp(lambda w: ops.embedding(w, bad), (table,), (table,)),
        lambda: sd.compile(
            lambda w, i: sd.grad(lambda w: sd.sum(ops.embedding(w, i)))(w)
        )(table, bad),
    ):
        with pytest.raises(IndexRangeError, match="7 to 7") as caught:
            call()
        assert "size 4" in str(caught.value)


def test_ids_that_are_computed_are_clamped(device):
    table = np.arange(4, dtype=np.float32).reshape(4, 1)
    ids = sd.array(np.array([1], np.int32)) * 9
    y = ops.embedding(table, ids)
    with pytest.raises(IndexRangeError, match="ran from 9 to 9"):
        y.tolist()
    assert y.tolist() == [[3]]
    y, pullback = sd.vjp(lambda w: ops.embedding(w, ids), table)
    with pytest.raises(IndexRangeError, match="ran from 9 to 9"):
        y.tolist()
    assert pullback(f32(1, 1)).tolist() == [[0]] * 4


def test_a_failed_call_changes_nothing(cpu):
    y = scale(f32(2, 3), f32(3))
    for name in BAD:
        with pytest.raises(ShaderError):
            BAD[name][0]()
    again = scale(f32(2, 3), f32(3))
    np.testing.assert_array_equal(y.numpy(), again.numpy())


def test_devices(cpu):
    with pytest.raises(NoAdapterError, match="'abacus'") as caught:
        sd.use_device("abacus")
    assert "cpu" in caught.value.cure


def test_wrong_arguments_of_a_compiled_function(cpu):
    @sd.compile
    def scaled(x, factor, shift=0.0):
        return x * factor + shift

    for call in (
        lambda: scaled(np.ones(3)),
        lambda: scaled(np.ones(3), 2.0, 1.0, 4.0),
        lambda: scaled(np.ones(3), 2.0, offset=1.0),
    ):
        with pytest.raises(errors.TraceError, match="scaled: ") as caught:
            call()
        assert "test_errors.py" in caught.value.where
        assert "(x, factor, shift=0.0)" in caught.value.cure


def test_an_unknown_option_names_those_that_there_are(cpu):
    with pytest.raises(AxisError, match="no option or axis 'epsilon'") as caught:
        ops.rms_norm(f32(2, 3), f32(3), epsilon=1.0)
    assert "eps" in caught.value.cure


def test_a_value_answers_what_python_and_numpy_ask(cpu):
    """hasattr and protocols see an ordinary AttributeError."""

    @sd.op("t -> t")
    def asked(x):
        assert not hasattr(x, "shape") and not hasattr(x, "__array_interface__")
        return np.float32(2) * x

    np.testing.assert_array_equal(asked(f32(3)).numpy(), 2 * f32(3))


def test_check_op_wants_an_op():
    from shaderdsl.testing import check_op

    with pytest.raises(TraceError, match="not a function") as caught:
        check_op(lambda x: x)
    assert "check_gradients" in caught.value.cure


def test_check_gradients_wants_something_to_check(cpu):
    from shaderdsl.testing import check_gradients

    with pytest.raises(DifferentiationError, match="no float array"):
        check_gradients(lambda x: x * 2, np.arange(3, dtype=np.int32))


def test_a_hook_cannot_index_what_is_not_captured(cpu):
    bias = f32(2, 4)
    with pytest.raises(TraceError, match="nor index one") as caught:
        ops.attention(
            *[f32(1, 2, 4, 8)] * 3, score=lambda x, b, h, i, j: x + bias[h, i - j]
        )
    assert "captured=" in caught.value.cure


def test_the_namespace_lists_what_comes_late():
    assert {"nn", "optim", "ops", "testing", "from_sympy", "sum"} <= set(dir(sd))
    assert all(hasattr(sd, name) for name in dir(sd))


def test_larger_than_the_device(device):
    with pytest.raises((LimitError, OutOfMemoryError)) as caught:
        sd.broadcast_to(sd.array(1.0) + 0.0, (1 << 20, 1 << 20)).numpy()
    assert re.search(r"\d[\d,]* ?B", str(caught.value))


def test_every_error_is_of_one_hierarchy():
    module = importlib.import_module("shaderdsl.errors")
    for name, cls in vars(module).items():
        if inspect.isclass(cls) and issubclass(cls, Exception):
            assert issubclass(cls, ShaderError), name
            assert cls.__doc__
    e = errors.ShapeError("a and b", where="f (x.py:3)", cure="reshape")
    assert str(e) == "a and b\n  where: f (x.py:3)\n  cure: reshape"
    assert isinstance(e, ValueError)


def test_warnings_of_hypothesis_do_not_leak():
    """The library itself never imports what only tests need."""
    code = "import sys, shaderdsl, shaderdsl.ops; print('hypothesis' in sys.modules)"
    import subprocess
    import sys

    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stdout.strip() == "False"


def user_line(error):
    """The user's line that an error names, as text."""
    file, _, number = (
        re.search(r"([\w./-]+\.py):(\d+)", str(error)).group(0).rpartition(":")
    )
    assert file == __file__
    return Path(file).read_text("utf-8").splitlines()[int(number) - 1]


def test_check_op_raises_what_tracing_raises(cpu):
    """As it is, at the user's line, before anything is drawn."""
    from shaderdsl.testing import check_op

    def typo(x):
        return sd.sum(x, over="m")  # no such axis

    def nothing(x):
        return x + not_there  # noqa: F821

    shown = []
    for f, kind, text in (
        (typo, sd.errors.AxisError, "no such axis"),
        (nothing, NameError, None),
    ):
        with pytest.raises(kind) as found:
            check_op(sd.op("n -> n")(f), show=shown.append)
        assert not getattr(found.value, "__notes__", []) and not shown
        assert found.value.__cause__ is None
        assert text is None or text in user_line(found.value)


def test_values_that_outlive_their_op(cpu):
    kept = []
    x = np.ones(3, np.float32)

    @sd.op("n -> n")
    def keeps(x):
        kept[:] = x, sd.index("n")
        return x

    keeps(x)
    value, position = kept
    uses = [
        lambda y: y + value,  # used 0
        lambda y: y.at(n=position),  # used 1
        lambda y: sd.sum(value, over="n") + y,  # used 2
        lambda y: sd.where(y > 0, y, value),  # used 3
    ]
    for k, f in enumerate(uses):
        for size in (3, 5):
            with pytest.raises(
                sd.errors.TraceError, match="the op keeps is used in"
            ) as e:
                sd.op("n -> n")(f)(np.ones(size, np.float32))
            assert f"used {k}" in user_line(e.value)
            assert "operand" in str(e.value)
    with pytest.raises(sd.errors.TraceError, match="the op keeps is used in"):
        sd.op("n -> n")(lambda y: value)(x)
    with pytest.raises(sd.errors.TraceError, match="used outside of it") as e:
        value * 2  # used late
    assert "used late" in user_line(e.value)
    with pytest.raises(sd.errors.TraceError, match="in another call of it"):
        first = []

        @sd.op("n -> n")
        def again(x):
            first.append(x)
            return x + first[0]

        again(x)
        again(np.ones(4, np.float32))


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("exp", "use sd.exp"),
        ("arctan2", "use sd.atan2"),
        ("fmax", "use sd.maximum"),
        ("square", r"write x \* x"),
        ("cbrt", "there is no sd.cbrt"),
        ("heaviside", "there is no sd.heaviside"),
        ("deg2rad", "there is no sd.deg2rad"),
    ],
)
def test_advice_on_numpy_names_what_there_is(cpu, name, cure):
    f = getattr(np, name)

    @sd.op("n -> n")
    def wrong(x):
        return f(*[x] * f.nin)  # here

    with pytest.raises(sd.errors.TraceError, match=cure) as e:
        wrong(np.ones(3, np.float32))
    assert "here" in user_line(e.value)


def test_every_advised_name_is_there():
    from shaderdsl.ir.operators import NAMES

    for name, own in NAMES.items():
        assert hasattr(np, name)
        assert not own.isidentifier() or hasattr(sd, own)


def test_numpy_that_looks_inside_is_at_the_user_line(cpu):
    @sd.op("n -> n")
    def wrong(x):
        return np.linalg.norm(x)  # here

    with pytest.raises(sd.errors.TraceError) as e:
        wrong(np.ones(3, np.float32))
    assert "here" in user_line(e.value)


def test_results_of_one_op_are_told_apart(cpu):
    @sd.op("n -> n, n")
    def two(x):
        return x * 2.0, x + 1.0

    text = sd.lower(two, sd.spec("f32", 5)).explain()
    assert "stores two (1), two (2)" in text
