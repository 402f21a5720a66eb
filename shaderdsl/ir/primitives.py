"""The table of primitives: one row gives meaning, spelling and derivative; tests and
docs follow from the row.

A pullback maps ``(g, args, out)`` to a cotangent for each argument, or ``None`` where
there is none. It is linear in ``g``; because a primitive is elementwise, the same
function applied to a tangent is the forward mode.

WGSL templates: ``{0} {1} …`` are operands; ``{F} {I} {U} {B}`` are the float, i32, u32
and bool types at the width in use (scalar or vec4), ``{T}`` the type of the first
operand, and ``{V}`` is ``""`` or ``"_v4"``, so that one helper text serves both widths;
``{t}`` is the dtype of the first operand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import DTypeError
from .expr import PRIMITIVES as PRIMITIVES
from .expr import Expr, apply, cast, const, promote, where

Pull = Callable[..., Sequence[Expr | None]]


@dataclass(frozen=True)
class Primitive:
    """A row of the table.

    Args:
        name: what nodes say.
        numpy: the meaning, in whatever float type it is given.
        wgsl: spelling of the kernel text; may call helpers of ``wgsl_math``.
        pull: the pullback, or None where the derivative is zero everywhere.
        takes: ``same`` brings operands to one dtype, ``float`` to f32, ``int``,
            ``bool``, ``number`` check.
        gives: dtype of the result; None is the dtype of the first operand.
        doc: one line.
    """

    name: str
    numpy: Callable[..., Any]
    wgsl: str
    pull: Pull | None = None
    takes: str = "same"
    gives: str | None = None
    doc: str = ""

    def prepare(self, args: list[Expr]) -> list[Expr]:
        """Bring operands to the dtypes that the primitive takes."""
        if self.takes == "float":
            return [cast(a, "f32") for a in args]
        if self.takes == "where":
            c, a, b = args
            if c.dtype != "bool":
                raise DTypeError(
                    f"the condition of where is {c.dtype}, not bool",
                    cure="compare it: x != 0",
                )
            return [c, *promote([a, b], "where")]
        if self.takes == "bits" and any(a.dtype == "f32" for a in args):
            raise DTypeError(
                f"{self.name} takes integers or bools, not f32",
                cure="convert with sd.cast(x, 'i32')",
            )
        if self.takes == "any":
            return args
        args = promote(args, self.name)
        if self.takes == "number":
            args = [cast(a, "i32") if a.dtype == "bool" else a for a in args]
        return args

    def result(self, args: Sequence[Expr]) -> str:
        """The dtype of the value."""
        if self.gives:
            return self.gives
        return args[1].dtype if self.takes == "where" else args[0].dtype


def _row(
    name: str,
    numpy: Callable[..., Any],
    wgsl: str,
    pull: Pull | None = None,
    **more: Any,
) -> None:
    PRIMITIVES[name] = Primitive(name, numpy, wgsl, pull, **more)


def _safe(g: Expr, partial: Expr) -> Expr:
    """A cotangent times a partial that may be infinite: a zero cotangent gives zero."""
    return apply("mulz", g, partial)


def _atan2_pull(g: Expr, b: Expr, a: Expr) -> tuple[Expr, Expr]:
    """∂ atan2(b, a): a / (a² + b²) and -b / (a² + b²), scaled so that squares stay in
    range.
    """
    scale = apply("stop_gradient", apply("maximum", apply("abs", a), apply("abs", b)))
    p, q = a / scale, b / scale
    square = p * p + q * q
    return _safe(g, p / square / scale), _safe(g, -q / square / scale)


# ---------------------------------------------------------------- meanings that NumPy
# lacks


def _erf(x: Any) -> Any:
    """erf in float64 to about 1e-15: series near 0, continued fraction outside."""
    x = np.asarray(x)
    y = np.asarray(x, np.float64)
    a = np.abs(y)
    small = np.minimum(a, 2.5)
    term = small.copy()
    total = small.copy()
    for k in range(1, 60):
        term = term * (-(small * small)) / k
        total = total + term / (2 * k + 1)
    inner = total * (2 / np.sqrt(np.pi))
    big = np.where(np.isfinite(a), np.maximum(a, 2.5), 30.0)
    f = big.copy()
    for k in range(60, 0, -1):
        f = big + (k / 2) / f
    outer = 1 - np.exp(-big * big) / (f * np.sqrt(np.pi))
    r = np.sign(y) * np.where(a < 2.5, inner, np.where(np.isinf(a), 1.0, outer))
    return np.where(np.isnan(y), np.nan, r).astype(
        x.dtype if x.dtype.kind == "f" else np.float64
    )


def _sigmoid(x: Any) -> Any:
    x = np.asarray(x)
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


def _floordiv(a: Any, b: Any) -> Any:
    a, b = np.asarray(a), np.asarray(b)
    if a.dtype.kind == "f":
        return np.floor_divide(a, b)
    safe = np.where(b == 0, 1, b).astype(b.dtype)
    return np.where(b == 0, 0, np.floor_divide(a, safe)).astype(a.dtype)


def _mod(a: Any, b: Any) -> Any:
    a, b = np.asarray(a), np.asarray(b)
    if a.dtype.kind == "f":
        return np.mod(a, b)
    safe = np.where(b == 0, 1, b).astype(b.dtype)
    return np.where(b == 0, 0, np.mod(a, safe)).astype(a.dtype)


def _to_int(kind: str) -> Callable[[Any], Any]:
    low, high = (-(2**31), 2**31 - 1) if kind == "i32" else (0, 2**32 - 1)
    dtype = np.int32 if kind == "i32" else np.uint32

    def convert(x: Any) -> Any:
        x = np.asarray(x)
        if x.dtype.kind != "f":
            return x.astype(np.int64).astype(dtype)
        # Saturates; NaN is 0. The largest float below 2**31 is 2**31 - 128.
        clean = np.where(np.isnan(x), 0.0, x).astype(np.float64)
        return np.clip(np.trunc(clean), low, high).astype(np.int64).astype(dtype)

    return convert


def _mulz(g: Any, p: Any) -> Any:
    g = np.asarray(g)
    return np.where(
        g == 0, np.zeros((), g.dtype), g * np.where(g == 0, np.ones((), g.dtype), p)
    )


def _shift(left: bool) -> Callable[[Any, Any], Any]:
    def shift(a: Any, b: Any) -> Any:
        a = np.asarray(a)
        n = np.asarray(b) & np.asarray(31, np.asarray(b).dtype)
        return (np.left_shift(a, n) if left else np.right_shift(a, n)).astype(a.dtype)

    return shift


def _round_trip(kind: Any) -> Callable[[Any], Any]:
    def bitcast(x: Any) -> Any:
        x = np.asarray(x)
        if x.dtype == np.float64:
            x = x.astype(np.float32)
        return np.ascontiguousarray(x).view(kind).reshape(x.shape)

    return bitcast


# ---------------------------------------------------------------- arithmetic

_row("add", np.add, "{0} + {1}", lambda g, a, y: (g, g), takes="number", doc="a + b")
_row(
    "sub",
    np.subtract,
    "{0} - {1}",
    lambda g, a, y: (g, -g),
    takes="number",
    doc="a - b",
)
_row(
    "mul",
    np.multiply,
    "{0} * {1}",
    lambda g, a, y: (g * a[1], g * a[0]),
    takes="number",
    doc="a · b",
)
_row(
    "mulz",
    _mulz,
    "select({0} * {1}, {T}(0), {0} == {T}(0))",
    lambda g, a, y: (_safe(g, a[1]), _safe(g, a[0])),
    takes="float",
    doc="a · b, and 0 wherever a is 0: a zero cotangent times any partial",
)
_row(
    "div",
    np.divide,
    "sd_div{V}({0}, {1})",
    lambda g, a, y: (_safe(g, 1.0 / a[1]), _safe(-g, y / a[1])),
    takes="float",
    doc="a / b",
)
_row("neg", np.negative, "-{0}", lambda g, a, y: (-g,), takes="number", doc="-a")
_row(
    "floordiv",
    _floordiv,
    "sd_floordiv_{t}{V}({0}, {1})",
    None,
    takes="number",
    doc="floor(a / b); integers: Python's rule, 0 where b is 0",
)
_row(
    "mod",
    _mod,
    "sd_mod_{t}{V}({0}, {1})",
    lambda g, a, y: (g, -g * apply("floordiv", a[0], a[1])),
    takes="number",
    doc="a - b·floor(a / b), the sign of b; integers: 0 where b is 0",
)
_row(
    "pow",
    np.power,
    "sd_pow{V}({0}, {1})",
    lambda g, a, y: (
        _safe(
            g, where(apply("eq", a[1], 0.0), 0.0, a[1] * apply("pow", a[0], a[1] - 1.0))
        ),
        _safe(
            g, where(apply("eq", a[0], 0.0), 0.0, y * apply("log", apply("abs", a[0])))
        ),
    ),
    takes="float",
    doc="a to the power b; a negative base needs an integer exponent",
)

# ---------------------------------------------------------------- comparison, logic,
# selection

_row("lt", np.less, "{0} < {1}", takes="number", gives="bool", doc="a < b")
_row("le", np.less_equal, "{0} <= {1}", takes="number", gives="bool", doc="a ≤ b")
_row("eq", np.equal, "{0} == {1}", takes="same", gives="bool", doc="a = b")
# Drivers fold a != a to false for NaN; the negation of == is right.
_row(
    "ne",
    np.not_equal,
    "!({0} == {1})",
    takes="same",
    gives="bool",
    doc="a ≠ b; true for NaN",
)
_row("and", np.bitwise_and, "{0} & {1}", takes="bits", doc="a and b, bit by bit")
_row("or", np.bitwise_or, "{0} | {1}", takes="bits", doc="a or b, bit by bit")
_row("xor", np.bitwise_xor, "sd_xor_{t}{V}({0}, {1})", takes="bits", doc="exclusive or")
_row("not", np.invert, "sd_not_{t}{V}({0})", takes="bits", doc="complement")
_row(
    "shl",
    _shift(True),
    "{0} << ({U}({1}) & {U}(31u))",
    takes="bits",
    doc="shift left by b mod 32",
)
_row(
    "shr",
    _shift(False),
    "{0} >> ({U}({1}) & {U}(31u))",
    takes="bits",
    doc="shift right by b mod 32, with sign for i32",
)
_row(
    "where",
    lambda c, a, b: np.where(c, a, b),
    "select({2}, {1}, {0})",
    lambda g, a, y: (None, where(a[0], g, 0.0), where(a[0], 0.0, g)),
    takes="where",
    doc="a where c holds, else b; the branch not taken contributes exactly 0",
)


def _tie(
    g: Expr, a: Sequence[Expr], less: Callable[[Expr, Expr], Expr]
) -> tuple[Expr, Expr]:
    half = where(apply("eq", a[0], a[1]), g * 0.5, 0.0)
    return where(less(a[0], a[1]), g, half), where(less(a[1], a[0]), g, half)


_row(
    "maximum",
    np.maximum,
    "sd_max_{t}{V}({0}, {1})",
    lambda g, a, y: _tie(g, a, lambda p, q: apply("lt", q, p)),
    takes="number",
    doc="the larger; NaN if either is; a tie halves the cotangent",
)
_row(
    "minimum",
    np.minimum,
    "sd_min_{t}{V}({0}, {1})",
    lambda g, a, y: _tie(g, a, lambda p, q: apply("lt", p, q)),
    takes="number",
    doc="the smaller; NaN if either is; a tie halves the cotangent",
)
_row(
    "isnan", np.isnan, "sd_isnan{V}({0})", takes="float", gives="bool", doc="a bit test"
)
_row(
    "isinf", np.isinf, "sd_isinf{V}({0})", takes="float", gives="bool", doc="a bit test"
)

# ---------------------------------------------------------------- functions of one
# float


def _unary(
    name: str,
    numpy: Callable[..., Any],
    wgsl: str,
    partial: Callable[[Expr, Expr], Expr],
    doc: str,
) -> None:
    _row(
        name,
        numpy,
        wgsl,
        lambda g, a, y: (g * partial(a[0], y),),
        takes="float",
        doc=doc,
    )


def _unary_safe(
    name: str,
    numpy: Callable[..., Any],
    wgsl: str,
    p: Callable[[Expr, Expr], Expr],
    doc: str,
) -> None:
    _row(
        name,
        numpy,
        wgsl,
        lambda g, a, y: (_safe(g, p(a[0], y)),),
        takes="float",
        doc=doc,
    )


_LN2 = 0.6931471805599453
_unary_safe("exp", np.exp, "sd_exp{V}({0})", lambda x, y: y, "eˣ")
_unary_safe("exp2", np.exp2, "sd_exp2{V}({0})", lambda x, y: y * _LN2, "2ˣ")
_unary_safe("expm1", np.expm1, "sd_expm1{V}({0})", lambda x, y: y + 1.0, "eˣ - 1")
_unary_safe("log", np.log, "sd_log{V}({0})", lambda x, y: 1.0 / x, "natural logarithm")
_unary_safe(
    "log2",
    np.log2,
    "sd_log2{V}({0})",
    lambda x, y: (1.0 / _LN2) / x,
    "base 2 logarithm",
)
_unary_safe(
    "log1p", np.log1p, "sd_log1p{V}({0})", lambda x, y: 1.0 / (1.0 + x), "log(1 + x)"
)
_unary_safe("sqrt", np.sqrt, "sqrt({0})", lambda x, y: 0.5 / y, "square root")
_unary_safe(
    "rsqrt",
    lambda x: 1 / np.sqrt(x),
    "sd_rsqrt{V}({0})",
    lambda x, y: -0.5 * (y * y * y),
    "1 / √x",
)
_unary(
    "sin", np.sin, "sd_sin{V}({0})", lambda x, y: apply("cos", x), "sine, x in radians"
)
_unary(
    "cos",
    np.cos,
    "sd_cos{V}({0})",
    lambda x, y: -apply("sin", x),
    "cosine, x in radians",
)
_unary(
    "tan", np.tan, "sd_tan{V}({0})", lambda x, y: 1.0 + y * y, "tangent, x in radians"
)
_unary_safe(
    "asin",
    np.arcsin,
    "sd_asin{V}({0})",
    lambda x, y: apply("rsqrt", (1.0 - x) * (1.0 + x)),
    "inverse sine",
)
_unary_safe(
    "acos",
    np.arccos,
    "sd_acos{V}({0})",
    lambda x, y: -apply("rsqrt", (1.0 - x) * (1.0 + x)),
    "inverse cosine",
)
_unary(
    "atan",
    np.arctan,
    "sd_atan{V}({0})",
    lambda x, y: 1.0 / (1.0 + x * x),
    "inverse tangent",
)
_row(
    "atan2",
    np.arctan2,
    "sd_atan2{V}({0}, {1})",
    lambda g, a, y: _atan2_pull(g, a[0], a[1]),
    takes="float",
    doc="angle of the point (x = b, y = a); 0 at the origin",
)
_unary_safe(
    "sinh", np.sinh, "sd_sinh{V}({0})", lambda x, y: apply("cosh", x), "hyperbolic sine"
)
_unary_safe(
    "cosh",
    np.cosh,
    "sd_cosh{V}({0})",
    lambda x, y: apply("sinh", x),
    "hyperbolic cosine",
)
_unary(
    "tanh", np.tanh, "sd_tanh{V}({0})", lambda x, y: 1.0 - y * y, "hyperbolic tangent"
)
_unary(
    "sigmoid",
    _sigmoid,
    "sd_sigmoid{V}({0})",
    lambda x, y: y * (1.0 - y),
    "1 / (1 + e⁻ˣ)",
)
_unary(
    "erf",
    _erf,
    "sd_erf{V}({0})",
    lambda x, y: 1.1283791670955126 * apply("exp", -(x * x)),
    "error function",
)
_unary(
    "softplus",
    lambda x: np.logaddexp(0, x),
    "sd_softplus{V}({0})",
    lambda x, y: apply("sigmoid", x),
    "log(1 + eˣ), without overflow",
)
_row(
    "abs",
    np.abs,
    "abs({0})",
    lambda g, a, y: (g * apply("sign", a[0]),),
    takes="number",
    doc="absolute value; derivative 0 at 0",
)
_row(
    "sign", np.sign, "sd_sign_{t}{V}({0})", takes="number", doc="-1, 0 or 1; NaN stays"
)
_row("floor", np.floor, "floor({0})", takes="float", doc="largest integer not above")
_row("ceil", np.ceil, "ceil({0})", takes="float", doc="smallest integer not below")
_row(
    "round",
    np.round,
    "round({0})",
    takes="float",
    doc="nearest integer, halves to even",
)
_row("trunc", np.trunc, "trunc({0})", takes="float", doc="towards zero")

# ---------------------------------------------------------------- types

_row(
    "stop_gradient",
    lambda x: x,
    "{0}",
    None,
    takes="any",
    doc="the value; its derivative is taken to be zero",
)
# The value once something else is there: what is computed from it again cannot be the
# same stage as before, nor run earlier.
_row(
    "after",
    lambda x, first: x,
    "{0}",
    lambda g, a, y: (g, None),
    takes="any",
    doc="the first operand, when the second one is computed",
)
# The value is rounded to float16 and back, as storing it would.
_row(
    "round_f16",
    lambda x: np.asarray(x).astype(np.float16).astype(np.asarray(x).dtype),
    "sd_round_f16{V}({0})",
    lambda g, a, y: (g,),
    takes="float",
    doc="nearest f16 value",
)
_row(
    "to_f32",
    lambda x: x,
    "{F}({0})",
    lambda g, a, y: (None,),
    takes="any",
    gives="f32",
    doc="as f32",
)
_row(
    "to_i32",
    _to_int("i32"),
    "sd_to_i32_{t}{V}({0})",
    takes="any",
    gives="i32",
    doc="as i32; saturates, NaN is 0",
)
_row(
    "to_u32",
    _to_int("u32"),
    "sd_to_u32_{t}{V}({0})",
    takes="any",
    gives="u32",
    doc="as u32; saturates, NaN is 0",
)
_row(
    "to_bool",
    lambda x: np.asarray(x) != 0,
    "!({0} == {T}(0))",
    takes="any",
    gives="bool",
    doc="x ≠ 0",
)
_row(
    "bitcast_f32",
    _round_trip(np.float32),
    "bitcast<{F}>({0})",
    takes="any",
    gives="f32",
    doc="the bits as f32",
)
_row(
    "bitcast_i32",
    _round_trip(np.int32),
    "bitcast<{I}>({0})",
    takes="any",
    gives="i32",
    doc="the bits as i32",
)
_row(
    "bitcast_u32",
    _round_trip(np.uint32),
    "bitcast<{U}>({0})",
    takes="any",
    gives="u32",
    doc="the bits as u32",
)


def zero(dtype: str) -> Expr:
    """The zero of a dtype."""
    return const(False if dtype == "bool" else 0, dtype)
