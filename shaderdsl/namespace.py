"""The functions of the ``sd`` namespace. Inside an op they take values over named axes,
outside they take arrays.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .array import Array, asarray, call, is_number, primitive
from .dtypes import NUMPY, dtype_name
from .errors import (
    AxisError,
    DTypeError,
    IndexRangeError,
    ReductionError,
    ShapeError,
)
from .ir import arrays as A
from .ir import expr as E
from .ir import trace as T
from .ir.stage import MONOIDS


def _elementwise(name: str, *xs: Any) -> Any:
    if builtins.any(isinstance(x, T.Value) for x in xs) or (
        T.inside() and builtins.all(is_number(x) for x in xs)
    ):
        return T.primitive(name, *xs)
    if builtins.all(is_number(x) for x in xs):
        xs = (asarray(xs[0]), *xs[1:])
    return primitive(name, *xs)


def _make(name: str) -> Any:
    from .ir.primitives import PRIMITIVES

    def function(x: Any) -> Any:
        return _elementwise(name, x)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = PRIMITIVES[name].doc
    return function


exp, exp2, expm1 = _make("exp"), _make("exp2"), _make("expm1")
log, log2, log1p = _make("log"), _make("log2"), _make("log1p")
sqrt, rsqrt = _make("sqrt"), _make("rsqrt")
sin, cos, tan = _make("sin"), _make("cos"), _make("tan")
asin, acos, atan = _make("asin"), _make("acos"), _make("atan")
sinh, cosh, tanh = _make("sinh"), _make("cosh"), _make("tanh")
sigmoid, erf, softplus = _make("sigmoid"), _make("erf"), _make("softplus")
abs, sign = _make("abs"), _make("sign")
floor, ceil, round, trunc = (
    _make("floor"),
    _make("ceil"),
    _make("round"),
    _make("trunc"),
)
isnan, isinf = _make("isnan"), _make("isinf")
stop_gradient = _make("stop_gradient")


def atan2(y: Any, x: Any) -> Any:
    """The angle of the point (x, y), in radians; 0 at the origin."""
    return _elementwise("atan2", y, x)


def minimum(a: Any, b: Any) -> Any:
    """The smaller; NaN if either is; a tie halves the cotangent."""
    return _elementwise("minimum", a, b)


def maximum(a: Any, b: Any) -> Any:
    """The larger; NaN if either is; a tie halves the cotangent."""
    return _elementwise("maximum", a, b)


def where(condition: Any, a: Any, b: Any) -> Any:
    """``a`` where the condition holds, else ``b``; the branch not taken contributes
    exactly 0 to a gradient.
    """
    return _elementwise("where", condition, a, b)


def pow(a: Any, b: Any) -> Any:
    """a to the power b; a negative base needs an integer exponent."""
    if T.inside():
        return T.power(a, b)
    return asarray(a) ** b


def clip(x: Any, low: Any, high: Any) -> Any:
    """``minimum(maximum(x, low), high)``; None leaves a side open."""
    if low is not None:
        x = maximum(x, low)
    return x if high is None else minimum(x, high)


def silu(x: Any) -> Any:
    """x · sigmoid(x)"""
    x, narrow = _wide(x)
    return narrow(x * sigmoid(x))


def gelu(x: Any, approximate: str = "none") -> Any:
    """x · Φ(x); ``approximate="tanh"``: 0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³)))"""
    if approximate not in ("none", "tanh"):
        raise ShapeError(
            f"gelu: approximate is 'none' or 'tanh', not {approximate!r}",
            where=E.user_location(),
        )
    x, narrow = _wide(x)
    if approximate == "tanh":
        # (1 + tanh(y)) / 2 without the digits that cancel where y is far below 0.
        twice = 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))
        return narrow(x * sigmoid(twice))
    return narrow(0.5 * x * (1.0 + erf(x * math.sqrt(0.5))))


def _wide(x: Any) -> tuple[Any, Any]:
    """What several steps compute with, and how their result is stored: f16 arrays are
    widened once and rounded once.
    """
    if isinstance(x, T.Value) or T.inside():
        return x, lambda y: y
    a = asarray(x)
    if a.dtype == "f16":
        return a.astype("f32"), lambda y: y.astype("f16")
    return a, lambda y: y


def cast(x: Any, dtype: Any) -> Any:
    """Numeric conversion; float to integer saturates, NaN is 0."""
    name = dtype_name(dtype)
    if isinstance(x, T.Value) or (T.inside() and is_number(x)):
        value = T.primitive("round_f16", x) if name == "f16" else x
        return T.Value(E.cast(T.unwrap(value), name), T.current())
    return asarray(x).astype(name)


def bitcast(x: Any, dtype: Any) -> Any:
    """The same 32 bits as another dtype."""
    name = dtype_name(dtype)
    if name not in ("f32", "i32", "u32") or getattr(x, "dtype", "f32") in (
        "bool",
        "f16",
    ):
        raise DTypeError("bitcast is between f32, i32 and u32", where=E.user_location())
    return _elementwise(f"bitcast_{name}", x)


# ------------------------------------------------------------------ named axes


def index(axis: str) -> Any:
    """The position along a named axis, i32; inside an op."""
    trace = T.current()
    return T.Value(E.index(trace.axis(axis)), trace)


def extent(axis: str) -> Any:
    """The size of a named axis, i32; inside an op. A new size compiles nothing."""
    trace = T.current()
    return T.Value(E.size(trace.extents[trace.axis(axis)]), trace)


# ------------------------------------------------------------------ reductions


def _named(x: Any, over: Any, name: str) -> bool:
    """Whether a reduction is over named axes: inside an op, and only there, it must."""
    if isinstance(x, T.Value) or T.inside():
        if over is None:
            raise ReductionError(
                f"sd.{name} inside an op names its axes",
                where=_here(),
                cure='write over="d"',
            )
        return True
    if over is not None:
        raise AxisError(
            f"over={over!r} names axes of an op; outside of one there are none",
            where=E.user_location(),
            cure=f"write sd.{name}(x, axis=…)",
        )
    return False


def _nothing(x: Any, over: str | None, axis: Any) -> bool:
    """Whether a reduction of x has nothing to reduce."""
    if T.inside():
        trace = T.current()
        return 0 in [trace.extents[a] for a in trace.axes(over or "")]
    return 0 in [x.shape[a] for a in A._axes(axis, x.ndim)]


def _here() -> str:
    """The op that is being traced, and the user's line."""
    return f"{T.current().name} ({E.user_location()})"


def _reduction(
    monoid: str,
    x: Any,
    over: str | None,
    axis: Any,
    keepdims: bool,
    condition: Any,
    name: str,
) -> Any:
    if _named(x, over, name):
        return T.reduce(monoid, x, over or "", condition, f"{T.current().name}_{name}")
    arrays = [asarray(x)] + ([asarray(condition)] if condition is not None else [])
    return call(lambda a, c=None: A.reduce(monoid, a, axis, keepdims, c, name), *arrays)


def sum(
    x: Any,
    over: str | None = None,
    *,
    axis: Any = None,
    keepdims: bool = False,
    where: Any = None,
) -> Any:
    """Σ over axes; 0 over none."""
    return _reduction("sum", x, over, axis, keepdims, where, "sum")


def prod(
    x: Any,
    over: str | None = None,
    *,
    axis: Any = None,
    keepdims: bool = False,
    where: Any = None,
) -> Any:
    """∏ over axes; 1 over none."""
    return _reduction("prod", x, over, axis, keepdims, where, "prod")


def max(
    x: Any,
    over: str | None = None,
    *,
    axis: Any = None,
    keepdims: bool = False,
    where: Any = None,
) -> Any:
    """Greatest element over axes; NaN where there is one; ties share the cotangent
    equally.
    """
    return _reduction("max", x, over, axis, keepdims, where, "max")


def min(
    x: Any,
    over: str | None = None,
    *,
    axis: Any = None,
    keepdims: bool = False,
    where: Any = None,
) -> Any:
    """Least element over axes; NaN where there is one; ties share the cotangent
    equally.
    """
    return _reduction("min", x, over, axis, keepdims, where, "min")


def _count(
    x: Any, over: str | None, axis: Any, condition: Any, keepdims: bool, name: str
) -> Any:
    """How many elements take part: a known number, or a sum over the condition."""
    if condition is not None:
        if T.inside():
            return sum(cast(condition, "f32"), over)
        c = asarray(condition)
        shape = A.broadcast_shape(asarray(x).shape, c.shape)
        taking = broadcast_to(cast(c, "f32"), shape)
        return sum(taking, axis=axis, keepdims=keepdims)
    if T.inside():
        trace = T.current()
        value: Any = None
        for a in trace.axes(over or ""):
            if trace.extents[a] == 0:
                raise ReductionError(f"{name} over {over!r} of size 0", where=_here())
            n = T.Value(E.cast(E.size(trace.extents[a]), "f32"), trace)
            value = n if value is None else value * n
        return value
    count = A.count(asarray(x).shape, axis)
    if count == 0:
        raise ReductionError(f"{name} over an axis of size 0", where=E.user_location())
    return float(count)


def mean(
    x: Any,
    over: str | None = None,
    *,
    axis: Any = None,
    keepdims: bool = False,
    where: Any = None,
) -> Any:
    """Σ x / n over axes; n counts the elements that take part."""
    _named(x, over, "mean")
    x, narrow = _wide(x)
    # Integers are added as floats: their sum may not fit.
    x = cast(x, "f32")
    total = _reduction("sum", x, over, axis, keepdims, where, "mean")
    return narrow(total / _count(x, over, axis, where, keepdims, "mean"))


def var(
    x: Any,
    over: str | None = None,
    *,
    axis: Any = None,
    keepdims: bool = False,
    where: Any = None,
) -> Any:
    """Population variance, in two passes: mean((x - mean(x))²)"""
    _named(x, over, "var")
    x, narrow = _wide(x)
    centre = mean(x, over, axis=axis, keepdims=True, where=where)
    d = x - centre
    return narrow(mean(d * d, over, axis=axis, keepdims=keepdims, where=where))


def logsumexp(
    x: Any,
    over: str | None = None,
    *,
    axis: Any = None,
    keepdims: bool = False,
    where: Any = None,
) -> Any:
    """log Σ eˣ, shifted by the maximum; -inf where nothing takes part."""
    _named(x, over, "logsumexp")
    x, narrow = _wide(x)
    if _nothing(x, over, axis):
        return log(sum(exp(x), over, axis=axis, keepdims=keepdims))
    m = max(x, over, axis=axis, keepdims=True, where=where)
    # The shift is finite, so that -inf - (-inf) never arises.
    m = stop_gradient(_select(isinf(m), 0.0, m))
    s = sum(exp(x - m), over, axis=axis, keepdims=True, where=where)
    # Of a row of nothing but -inf the derivative is 0, not 0 / 0.
    empty = s == 0.0
    result = _select(empty, -math.inf, log(_select(empty, 1.0, s)) + m)
    if isinstance(result, Array) and not keepdims:
        gone = A._axes(axis, len(x.shape))
        result = result.reshape(
            tuple(n for a, n in enumerate(result.shape) if a not in gone)
        )
    return narrow(result)


def softmax(
    x: Any, over: str | None = None, *, axis: Any = -1, where: Any = None
) -> Any:
    """eˣ / Σ eˣ, shifted by the maximum. A row with nothing in it gives zeros."""
    axis = axis if _named(x, over, "softmax") is False else None
    x, narrow = _wide(x)
    if _nothing(x, over, axis):
        return narrow(exp(x))
    m = max(x, over, axis=axis, keepdims=True, where=where)
    m = stop_gradient(_select(isinf(m), 0.0, m))
    e = exp(x - m)
    if where is not None:
        e = _select(where, e, 0.0)
    s = sum(e, over, axis=axis, keepdims=True)
    # Every element -inf (or masked): 0 / 0 is defined to be 0.
    return narrow(e / _select(s == 0.0, 1.0, s))


def _select(c: Any, a: Any, b: Any) -> Any:
    return _elementwise("where", c, a, b)


def any(
    x: Any,
    over: str | None = None,
    *,
    axis: Any = None,
    keepdims: bool = False,
    where: Any = None,
) -> Any:
    """Whether any element is nonzero; False over none."""
    return sum(_as_count(x), over, axis=axis, keepdims=keepdims, where=where) > 0


def all(
    x: Any,
    over: str | None = None,
    *,
    axis: Any = None,
    keepdims: bool = False,
    where: Any = None,
) -> Any:
    """Whether all elements are nonzero; True over none."""
    zeros = 1 - _as_count(x)
    return sum(zeros, over, axis=axis, keepdims=keepdims, where=where) == 0


def _as_count(x: Any) -> Any:
    return cast(x if getattr(x, "dtype", None) == "bool" else (x != 0), "i32")


def argmax(
    x: Any,
    over: str | None = None,
    *,
    axis: Any = None,
    keepdims: bool = False,
    where: Any = None,
) -> Any:
    """Index of the first greatest element, i32; of the first NaN where there is one.

    Elements where the condition fails do not take part; where none does it is 0.
    """
    return _arg("max", x, over, axis, keepdims, where)


def argmin(
    x: Any,
    over: str | None = None,
    *,
    axis: Any = None,
    keepdims: bool = False,
    where: Any = None,
) -> Any:
    """Index of the first least element, i32; of the first NaN where there is one.

    Elements where the condition fails do not take part; where none does it is 0.
    """
    return _arg("min", x, over, axis, keepdims, where)


def _arg(
    monoid: str, x: Any, over: str | None, axis: Any, keepdims: bool, condition: Any
) -> Any:
    named = _named(x, over, f"arg{monoid}")
    if condition is not None:
        x = x if isinstance(x, T.Value) or named else asarray(x)
        if named:
            x = T.Value(T.unwrap(x), T.current())
        identity = MONOIDS[monoid].identity
        kind = "f32" if x.dtype == "f16" else "i32" if x.dtype == "bool" else x.dtype
        x = _select(condition, x, identity[kind])
    if named:
        x = T.Value(T.unwrap(x), T.current())
        trace = T.current()
        axes = trace.axes(over or "")
        if len(axes) != 1:
            raise ReductionError(
                f"arg{monoid} is over one axis, not {over!r}", where=_here()
            )
        if trace.extents[axes[0]] == 0:
            raise ReductionError(f"arg{monoid} over {over!r} of size 0", where=_here())
        kept = [a for a in range(len(trace.extents)) if a != axes[0]]
        return T.Value(
            A.first_hit(
                monoid,
                x.expr,
                kept,
                axes[0],
                trace.extents,
                f"{trace.name}_arg{monoid}",
            ),
            trace,
        )
    return call(lambda a: A.arg_extreme(monoid, a, axis, keepdims), asarray(x))


def cumsum(
    x: Any, over: str | None = None, *, axis: int = -1, where: Any = None
) -> Any:
    """Running sum along one axis; elements where the condition fails count as 0."""
    named = _named(x, over, "cumsum")
    if where is not None:
        x = _select(where, x if named else asarray(x), 0)
    if named:
        x = T.Value(T.unwrap(x), T.current())
        trace = T.current()
        axes = trace.axes(over or "")
        if len(axes) != 1:
            raise AxisError(f"cumsum is over one axis, not {over!r}", where=_here())
        (a,) = axes
        trace.extents.append(trace.extents[a])
        j = len(trace.extents) - 1
        body = E.substitute(x.expr, {a: E.index(j)})
        return T.Value(
            A.running_sum(body, a, j, trace.extents, f"{trace.name}_cumsum"), trace
        )
    return call(lambda s: A.cumsum(s, axis), asarray(x))


# ------------------------------------------------------------------ arrays


def array(x: Any, dtype: Any = None) -> Array:
    """An array from NumPy, from nested lists, or from anything with ``__array__`` or
    ``__dlpack__``.
    """
    return asarray(x, dtype)


def _shape(shape: Any) -> tuple[int, ...]:
    return A.sizes(shape, "an array")


def full(shape: Any, value: Any, dtype: Any = None) -> Array:
    """An array of one value."""
    if isinstance(value, Array):
        name = dtype_name(dtype) if dtype is not None else value.dtype.name
        return call(
            lambda v: A.broadcast_to(A.reshape(A.cast(v, name), ()), _shape(shape)),
            value,
        )
    name = dtype_name(dtype) if dtype is not None else asarray(value).dtype.name
    return asarray(np.full(_shape(shape), value), name)


def zeros(shape: Any, dtype: Any = "f32") -> Array:
    """An array of zeros."""
    return full(shape, 0, dtype)


def ones(shape: Any, dtype: Any = "f32") -> Array:
    """An array of ones."""
    return full(shape, 1, dtype)


def zeros_like(x: Any) -> Array:
    """Zeros of an array's shape and dtype."""
    return zeros(x.shape, x.dtype)


def ones_like(x: Any) -> Array:
    """Ones of an array's shape and dtype."""
    return ones(x.shape, x.dtype)


def arange(start: Any, stop: Any = None, step: Any = 1, dtype: Any = None) -> Array:
    """Evenly spaced numbers, as in NumPy."""
    if step == 0:
        raise ShapeError("arange with a step of 0", where=E.user_location())
    values = np.arange(start) if stop is None else np.arange(start, stop, step)
    name = (
        dtype_name(dtype)
        if dtype is not None
        else ("f32" if values.dtype.kind == "f" else "i32")
    )
    return asarray(values, name)


def reshape(x: Any, shape: Any) -> Array:
    """The same elements under another shape."""
    return asarray(x).reshape(shape)


def transpose(x: Any, axes: Sequence[int] | None = None) -> Array:
    """Permuted axes, reversed by default."""
    return asarray(x).transpose(*(axes or ()))


def broadcast_to(x: Any, shape: Any) -> Array:
    """The array stretched to a shape."""
    sizes = _shape(shape)
    return call(lambda a: A.broadcast_to(a, sizes), asarray(x))


def matmul(a: Any, b: Any) -> Array:
    """``a @ b``"""
    return asarray(a) @ asarray(b)


def concatenate(xs: Sequence[Any], axis: int = 0) -> Array:
    """Arrays end to end along an axis."""
    return call(lambda *s: A.concatenate(s, axis), *(asarray(x) for x in xs))


def stack(xs: Sequence[Any], axis: int = 0) -> Array:
    """Arrays along a new axis."""
    return call(lambda *s: A.stack(s, axis), *(asarray(x) for x in xs))


def pad(x: Any, widths: Any, value: float = 0.0) -> Array:
    """Elements of one value before and after: ``widths`` is a pair for each axis, or
    one pair, or one number.
    """
    a = asarray(x)
    given = np.asarray(widths)
    if given.dtype.kind not in "iu" or given.shape not in ((), (2,), (a.ndim, 2)):
        raise ShapeError(
            f"pad widths {widths!r} for an array with {a.ndim} dimensions",
            where=E.user_location(),
            cure="give a pair of integers for each axis, one pair, or one integer",
        )
    pairs = [(int(p), int(q)) for p, q in np.broadcast_to(given, (a.ndim, 2))]
    number = float(value)
    if a.dtype in E.INTS:
        info = np.iinfo(NUMPY[a.dtype.name])
        if not number.is_integer() or not info.min <= number <= info.max:
            raise DTypeError(
                f"pad: the value {value} is no {a.dtype}", where=E.user_location()
            )
        number = int(value)
    return call(lambda s: A.pad(s, pairs, E.const(number)), a)


def take(x: Any, ids: Any) -> Array:
    """Rows ``x[ids]``."""
    return asarray(x)[asarray(ids)]


def update_slice(base: Any, new: Any, *, axis: int, start: Any) -> Array:
    """``base`` with ``new`` from position ``start`` on along an axis.

    In place when ``base`` was donated or is not used again. ``start`` is a number or an
    array without dimensions.

    Raises:
        IndexRangeError: a start known on the host, beyond what fits.
    """
    b, n = asarray(base), asarray(new)
    if is_number(start) or isinstance(start, np.generic):
        start = A.integer(start, "the start of update_slice")
        a = A.normal_axis(axis, b.ndim)
        if start < 0 or start + n.shape[a] > b.shape[a]:
            raise IndexRangeError(
                f"update_slice: positions {start} … {start + n.shape[a]} of axis {a}, "
                f"which has size {b.shape[a]}",
                where=E.user_location(),
            )
        return call(lambda x, y, s: A.update_slice(x, y, axis, s), b, n, start)
    s = asarray(start)
    if s.shape or s.dtype not in E.INTS:
        raise ShapeError(
            f"the start of update_slice is {s.dtype}{list(s.shape)}; it is one integer",
            where=E.user_location(),
        )
    return call(lambda x, y, z: A.update_slice(x, y, axis, E.load(z, ())), b, n, s)


__all__ = [
    "abs",
    "acos",
    "all",
    "any",
    "arange",
    "argmax",
    "argmin",
    "array",
    "asin",
    "atan",
    "atan2",
    "bitcast",
    "broadcast_to",
    "cast",
    "ceil",
    "clip",
    "concatenate",
    "cos",
    "cosh",
    "cumsum",
    "erf",
    "exp",
    "exp2",
    "expm1",
    "extent",
    "floor",
    "full",
    "gelu",
    "index",
    "isinf",
    "isnan",
    "log",
    "log1p",
    "log2",
    "logsumexp",
    "matmul",
    "max",
    "maximum",
    "mean",
    "min",
    "minimum",
    "ones",
    "ones_like",
    "pad",
    "pow",
    "prod",
    "reshape",
    "round",
    "rsqrt",
    "sigmoid",
    "sign",
    "silu",
    "sin",
    "sinh",
    "softmax",
    "softplus",
    "sqrt",
    "stack",
    "stop_gradient",
    "sum",
    "take",
    "tan",
    "tanh",
    "transpose",
    "trunc",
    "update_slice",
    "var",
    "where",
    "zeros",
    "zeros_like",
]
