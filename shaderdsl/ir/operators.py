"""Python's operators and NumPy's functions as primitives, for the values of an op and
for arrays alike.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

#: Python's binary operators; x > y is y < x.
OPERATORS = {
    "add": "add",
    "sub": "sub",
    "mul": "mul",
    "truediv": "div",
    "floordiv": "floordiv",
    "mod": "mod",
    "and": "and",
    "or": "or",
    "xor": "xor",
    "lshift": "shl",
    "rshift": "shr",
    "lt": "lt",
    "le": "le",
    "eq": "eq",
    "ne": "ne",
}
_COMPARISONS = ("lt", "le", "eq", "ne")

#: NumPy's functions that its numbers call when they stand on the left.
UFUNCS = {
    "add": "add",
    "subtract": "sub",
    "multiply": "mul",
    "divide": "div",
    "true_divide": "div",
    "floor_divide": "floordiv",
    "remainder": "mod",
    "power": "pow",
    "bitwise_and": "and",
    "bitwise_or": "or",
    "bitwise_xor": "xor",
    "left_shift": "shl",
    "right_shift": "shr",
    "less": "lt",
    "less_equal": "le",
    "equal": "eq",
    "not_equal": "ne",
}

#: Names of NumPy that are others here.
NAMES = {
    "absolute": "abs", "fabs": "abs", "negative": "-x", "square": "x * x",
    "reciprocal": "1.0 / x", "arcsin": "asin", "arccos": "acos", "arctan": "atan",
    "arctan2": "atan2", "rint": "round", "fmax": "maximum", "fmin": "minimum",
    "float_power": "pow", "invert": "~x", "bitwise_not": "~x", "logical_and": "a & b",
    "logical_or": "a | b", "logical_not": "~a", "logical_xor": "a ^ b", "mod": "a % b",
    "fmod": "a % b", "equal": "a == b", "not_equal": "a != b", "less": "a < b",
    "less_equal": "a <= b", "greater": "a > b", "greater_equal": "a >= b",
}  # fmt: skip


def install(
    cls: type,
    primitive: Callable[..., Any],
    takes: Callable[[Any], bool] = lambda other: True,
) -> None:
    """Give a class the binary operators.

    Args:
        primitive: a primitive of operands, by its name.
        takes: whether something may stand on the other side; else Python asks that.
    """

    def method(prim: str, swap: bool) -> Callable[[Any, Any], Any]:
        def operator(self: Any, other: Any) -> Any:
            if not takes(other):
                return NotImplemented
            return primitive(prim, *((other, self) if swap else (self, other)))

        return operator

    for name, prim in OPERATORS.items():
        setattr(cls, f"__{name}__", method(prim, False))
        if name not in _COMPARISONS:
            setattr(cls, f"__r{name}__", method(prim, True))
    for name, mirrored in (("gt", "lt"), ("ge", "le")):
        setattr(cls, f"__{name}__", method(mirrored, True))


def instead_of(name: str) -> str:
    """What to write in the place of a function of NumPy."""
    own = NAMES.get(name, name)
    if not own.isidentifier():
        return f"write {own}"
    if hasattr(sys.modules.get(__name__.partition(".")[0]), own):
        return f"use sd.{own}"
    return (
        f"there is no sd.{own}: write it of functions that there are (sd.exp, sd.log, "
        "sd.pow, sd.where, …)"
    )


def expand_power(base: Any, exponent: Any, prim: Callable[..., Any]) -> Any:
    """``base ** exponent`` for a known exponent: products, roots and reciprocals; else
    the primitive.
    """
    if isinstance(exponent, (int, float)) and not isinstance(exponent, bool):
        if getattr(base, "dtype", None) in ("i32", "u32", "bool"):
            if isinstance(exponent, int) and 0 <= exponent < 2**31:
                return _integer_power(base, exponent, prim)
            base = prim("mul", base, 1.0)
        n = float(exponent) if abs(exponent) < 2**63 else math.inf
        if n == 0.5:
            return prim("sqrt", base)
        if n == -0.5:
            return prim("rsqrt", base)
        if n.is_integer() and 0 < abs(n) <= 64:
            k = int(abs(n))
            result = None
            square = base
            while k:
                if k & 1:
                    result = square if result is None else prim("mul", result, square)
                k >>= 1
                if k:
                    square = prim("mul", square, square)
            return prim("div", 1.0, result) if n < 0 else result
    return prim("pow", base, exponent)


def _integer_power(base: Any, k: int, prim: Callable[..., Any]) -> Any:
    """An integer to a known power: products, which wrap."""
    result = prim("add", prim("mul", base, 0), 1) if k == 0 else None
    while k:
        if k & 1:
            result = base if result is None else prim("mul", result, base)
        k >>= 1
        if k:
            base = prim("mul", base, base)
    return result
