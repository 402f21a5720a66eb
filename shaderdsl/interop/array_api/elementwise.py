"""Elementwise functions of the standard.

What the ``sd`` namespace lacks is composed of its functions, one kernel a call.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

from ... import namespace as sd
from ...array import Array, is_number
from ...array import asarray as _array
from ...errors import DTypeError
from ...function import compile as _compile
from ...ir import expr as E
from .dtypes import NAMES, result_type

_SIGN = 0x80000000


def _as_arrays(*xs: Any) -> list[Any]:
    """Operands brought to their common dtype: the standard's promotion, or an error."""
    arrays = [x for x in xs if not is_number(x)]
    if not arrays:
        return [_array(x) for x in xs]
    dtype = result_type(*(x if is_number(x) else _array(x) for x in xs))
    return [_array(x, dtype) for x in xs]


def _unary(function: Callable[..., Any], kinds: tuple[str, ...]) -> Any:
    @functools.wraps(function)
    def checked(x: Any, /) -> Array:
        (a,) = _as_arrays(x)
        _check(function.__name__, a, kinds)
        result: Array = function(a)
        return result

    return checked


def _binary(name: str, function: Callable[..., Any], kinds: Any, doc: str) -> Any:
    def checked(x1: Any, x2: Any, /) -> Array:
        a, b = _as_arrays(x1, x2)
        _check(name, a, kinds)
        result: Array = function(a, b)
        return result

    checked.__name__ = checked.__qualname__ = name
    checked.__doc__ = doc
    return checked


def _check(name: str, x: Array, kinds: tuple[str, ...]) -> None:
    if x.dtype not in kinds:
        raise DTypeError(
            f"{name} of {NAMES[x.dtype.name]}",
            where=E.user_location(),
            cure="convert it with astype",
        )


_FLOAT = ("f32", "f16")
_INT = ("i32", "u32")
_NUMBER = (*_INT, *_FLOAT)
_BITS = (*_INT, "bool")
_ALL = (*_NUMBER, "bool")


def _fused(function: Callable[..., Any]) -> Any:
    """A function of floats that runs as one kernel."""
    compiled = _compile(function)

    @functools.wraps(function)
    def call(*xs: Any) -> Array:
        result: Array = compiled(*xs)
        return result

    return call


# ------------------------------------------------------------- floats


def _log10(x: Any) -> Any:
    """Base 10 logarithm."""
    return sd.log(x) * (1.0 / math.log(10.0))


def _acosh(x: Any) -> Any:
    """Inverse hyperbolic cosine; NaN below 1."""
    t = x - 1.0
    near = sd.log1p(t + sd.sqrt(t * (t + 2.0)))
    far = sd.where(x > 1e9, sd.log(x) + math.log(2.0), near)
    return sd.where(x < 1.0, math.nan, far)


def _odd(x: Any, positive: Callable[[Any], Any]) -> Any:
    """An odd function from its values at |x|; the sign of zero is kept."""
    y = positive(sd.abs(x))
    return sd.where(x == 0.0, x, sd.where(x < 0.0, -y, y))


def _asinh(x: Any) -> Any:
    """Inverse hyperbolic sine."""

    def positive(a: Any) -> Any:
        square = a * a
        near = sd.log1p(a + square / (1.0 + sd.sqrt(1.0 + square)))
        return sd.where(a > 1e9, sd.log(a) + math.log(2.0), near)

    return _odd(x, positive)


def _atanh(x: Any) -> Any:
    """Inverse hyperbolic tangent; NaN beyond 1."""
    return _odd(x, lambda a: 0.5 * sd.log1p(2.0 * a / (1.0 - a)))


def _hypot(a: Any, b: Any) -> Any:
    """√(a² + b²) without overflow; infinite if either is, NaN or not."""
    p, q = sd.abs(a), sd.abs(b)
    m, n = sd.maximum(p, q), sd.minimum(p, q)
    r = n / sd.where(m == 0.0, 1.0, m)
    return sd.where(sd.isinf(a) | sd.isinf(b), math.inf, m * sd.sqrt(1.0 + r * r))


def _logaddexp(a: Any, b: Any) -> Any:
    """log(eᵃ + eᵇ)"""
    m, n = sd.maximum(a, b), sd.minimum(a, b)
    apart = m + sd.log1p(sd.exp(n - m))
    return sd.where(m == n, m + math.log(2.0), apart)


def _bits(x: Any) -> Any:
    return sd.bitcast(x, "u32")


def _copysign(a: Any, b: Any) -> Any:
    """The size of a with the sign of b."""
    return sd.bitcast((_bits(a) & (_SIGN - 1)) | (_bits(b) & _SIGN), "f32")


def _signbit(x: Any) -> Any:
    """Whether the sign bit is set: also of -0 and of NaN."""
    return sd.bitcast(x, "i32") < 0


def _nextafter(a: Any, b: Any) -> Any:
    """The float next to a on the way to b."""
    bits = sd.bitcast(a, "i32")
    away = (b > a) == (a > 0.0)
    stepped = sd.bitcast(sd.where(away, bits + 1, bits - 1), "f32")
    # From zero the least subnormal, with the sign of the direction.
    least = sd.bitcast(sd.where(b > 0.0, 1, -(2**31) + 1), "f32")
    moved = sd.where(a == 0.0, least, stepped)
    odd = sd.isnan(a) | sd.isnan(b)
    return sd.where(odd, math.nan, sd.where(a == b, b, moved))


def _named(name: str, function: Callable[..., Any], doc: str | None = None) -> Any:
    def call(*xs: Any) -> Any:
        return function(*xs)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = doc or function.__doc__
    return call


def _float1(name: str, function: Callable[..., Any]) -> Any:
    return _unary(_named(name, function), _FLOAT)


def _float2(name: str, function: Callable[..., Any]) -> Any:
    return _binary(name, function, _FLOAT, function.__doc__ or "")


def _wide(function: Callable[..., Any]) -> Callable[..., Any]:
    """Functions of bits are of float32; float16 is widened for them."""

    @functools.wraps(function)
    def call(*xs: Any) -> Any:
        y = function(*(x.astype("f32") for x in xs))
        return y.astype(xs[0].dtype) if y.dtype == "f32" else y

    return call


acos, asin, atan = (_float1(n, getattr(sd, n)) for n in ("acos", "asin", "atan"))
cos, sin, tan = (_float1(n, getattr(sd, n)) for n in ("cos", "sin", "tan"))
cosh, sinh, tanh = (_float1(n, getattr(sd, n)) for n in ("cosh", "sinh", "tanh"))
exp, expm1 = (_float1(n, getattr(sd, n)) for n in ("exp", "expm1"))
log, log1p, log2 = (_float1(n, getattr(sd, n)) for n in ("log", "log1p", "log2"))
sqrt = _float1("sqrt", sd.sqrt)
atan2 = _float2("atan2", sd.atan2)
log10 = _float1("log10", _fused(_log10))
acosh = _float1("acosh", _fused(_acosh))
asinh = _float1("asinh", _fused(_asinh))
atanh = _float1("atanh", _fused(_atanh))
hypot = _float2("hypot", _fused(_hypot))
logaddexp = _float2("logaddexp", _fused(_logaddexp))
copysign = _float2("copysign", _wide(_fused(_copysign)))
signbit = _float1("signbit", _wide(_fused(_signbit)))
nextafter = _float2("nextafter", _fused(_nextafter))


# ------------------------------------------------------------- numbers


def _of_floats(name: str) -> Any:
    """A rounding: integers are whole already."""
    function = getattr(sd, name)

    def rounded(x: Any) -> Any:
        return x if x.dtype in _INT else function(x)

    return _unary(_named(name, rounded, function.__doc__), _NUMBER)


ceil, floor, trunc = _of_floats("ceil"), _of_floats("floor"), _of_floats("trunc")
round = _of_floats("round")
abs = _unary(sd.abs, _NUMBER)
sign = _unary(sd.sign, _NUMBER)
isnan = _unary(sd.isnan, _NUMBER)
isinf = _unary(sd.isinf, _NUMBER)
isfinite = _unary(
    _named(
        "isfinite",
        _fused(lambda x: ~(sd.isnan(x) | sd.isinf(x))),
        "Neither NaN nor infinite.",
    ),
    _NUMBER,
)
negative = _unary(_named("negative", operator.neg, "-x"), _NUMBER)
positive = _unary(_named("positive", operator.pos, "x"), _NUMBER)
square = _unary(_named("square", lambda x: x * x, "x²"), _NUMBER)
reciprocal = _unary(_named("reciprocal", lambda x: 1.0 / x, "1 / x"), _FLOAT)

add = _binary("add", operator.add, _NUMBER, "x1 + x2")
subtract = _binary("subtract", operator.sub, _NUMBER, "x1 - x2")
multiply = _binary("multiply", operator.mul, _NUMBER, "x1 · x2")
divide = _binary("divide", operator.truediv, _FLOAT, "x1 / x2")
floor_divide = _binary("floor_divide", operator.floordiv, _NUMBER, "⌊x1 / x2⌋")
remainder = _binary(
    "remainder", operator.mod, _NUMBER, "x1 - x2·⌊x1 / x2⌋: of the divisor's sign"
)


@_fused
def _whole_pow(a: Any, b: Any) -> Any:
    """Integers to a power by squaring, modulo 2³²."""
    result = sd.where(b == b, 1, 1).astype(a.dtype)
    for k in range(31):
        result = sd.where((b >> k) & 1 == 1, result * a, result)
        a = a * a
    return result


def _pow(a: Any, b: Any) -> Any:
    return _whole_pow(a, b) if a.dtype in _INT else a**b


pow = _binary("pow", _pow, _NUMBER, "x1 to the power x2; integers modulo 2³²")
maximum = _binary("maximum", sd.maximum, _NUMBER, "The larger; NaN if either is.")
minimum = _binary("minimum", sd.minimum, _NUMBER, "The smaller; NaN if either is.")


def clip(x: Any, /, min: Any = None, max: Any = None) -> Array:
    """x, not below ``min`` and not above ``max``; None leaves a side open."""
    (a,) = _as_arrays(x)
    _check("clip", a, _NUMBER)
    low, high = (
        None
        if bound is None
        else _array(bound, None if not is_number(bound) else a.dtype)
        for bound in (min, max)
    )
    for bound in (low, high):
        if bound is not None:
            result_type(a, bound)
    result: Array = sd.clip(a, low, high)
    return result


# ------------------------------------------------------------- comparisons and bits

equal = _binary("equal", operator.eq, _ALL, "x1 = x2")
not_equal = _binary("not_equal", operator.ne, _ALL, "x1 ≠ x2; true for NaN")
less = _binary("less", operator.lt, _NUMBER, "x1 < x2")
less_equal = _binary("less_equal", operator.le, _NUMBER, "x1 ≤ x2")
greater = _binary("greater", operator.gt, _NUMBER, "x1 > x2")
greater_equal = _binary("greater_equal", operator.ge, _NUMBER, "x1 ≥ x2")
logical_and = _binary("logical_and", operator.and_, ("bool",), "x1 and x2")
logical_or = _binary("logical_or", operator.or_, ("bool",), "x1 or x2")
logical_xor = _binary("logical_xor", operator.xor, ("bool",), "one of them alone")
logical_not = _unary(_named("logical_not", operator.invert, "not x"), ("bool",))
bitwise_and = _binary("bitwise_and", operator.and_, _BITS, "x1 & x2")
bitwise_or = _binary("bitwise_or", operator.or_, _BITS, "x1 | x2")
bitwise_xor = _binary("bitwise_xor", operator.xor, _BITS, "x1 ^ x2")
bitwise_invert = _unary(_named("bitwise_invert", operator.invert, "~x"), _BITS)


def _shift(name: str, function: Callable[..., Any]) -> Any:
    def shifted(a: Any, b: Any) -> Any:
        """Beyond 31 places nothing is left but the sign."""
        far = b >= 32
        rest = _array(a) < 0 if name == "bitwise_right_shift" else None
        last = 0 if rest is None or a.dtype == "u32" else sd.where(rest, -1, 0)
        return sd.where(far, _array(last, a.dtype), function(a, sd.where(far, 0, b)))

    sign = "<<" if name == "bitwise_left_shift" else ">>"
    return _binary(name, shifted, _INT, f"x1 {sign} x2")


bitwise_left_shift = _shift("bitwise_left_shift", operator.lshift)
bitwise_right_shift = _shift("bitwise_right_shift", operator.rshift)

__all__ = [
    "abs",
    "acos",
    "acosh",
    "add",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "bitwise_and",
    "bitwise_invert",
    "bitwise_left_shift",
    "bitwise_or",
    "bitwise_right_shift",
    "bitwise_xor",
    "ceil",
    "clip",
    "copysign",
    "cos",
    "cosh",
    "divide",
    "equal",
    "exp",
    "expm1",
    "floor",
    "floor_divide",
    "greater",
    "greater_equal",
    "hypot",
    "isfinite",
    "isinf",
    "isnan",
    "less",
    "less_equal",
    "log",
    "log1p",
    "log2",
    "log10",
    "logaddexp",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "maximum",
    "minimum",
    "multiply",
    "negative",
    "nextafter",
    "not_equal",
    "positive",
    "pow",
    "reciprocal",
    "remainder",
    "round",
    "sign",
    "signbit",
    "sin",
    "sinh",
    "sqrt",
    "square",
    "subtract",
    "tan",
    "tanh",
    "trunc",
]
