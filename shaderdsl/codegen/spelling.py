"""How types, numbers and primitives are spelled in WGSL."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..ir.expr import Expr
from ..ir.primitives import PRIMITIVES

#: Elements of a vector.
WIDTH = 4
_TYPES = {"f32": "f32", "i32": "i32", "u32": "u32", "bool": "bool", "f16": "f16"}


def wgsl_type(dtype: str, vector: bool = False) -> str:
    """The type of a value."""
    dtype = "f32" if dtype == "f16" else dtype
    return f"vec{WIDTH}<{_TYPES[dtype]}>" if vector else _TYPES[dtype]


def literal(value: bool | int | float, dtype: str) -> str | None:
    """A number as WGSL text, or None when no literal exists (infinities, NaN)."""
    if dtype == "bool":
        return "true" if value else "false"
    if dtype == "i32":
        return (
            "i32(-2147483648)"
            if value == -(2**31)
            else f"({value})"
            if value < 0
            else str(value)
        )
    if dtype == "u32":
        return f"{value}u"
    with np.errstate(over="ignore"):  # beyond the range it is infinite
        single = np.float32(value)
    if not math.isfinite(single):
        return None
    text = repr(float(str(single)))
    return f"({text})" if text.startswith("-") else text


def spell(
    name: str,
    args: Sequence[str],
    dtype: str,
    vector: bool,
    text: str | None = None,
) -> str:
    """A primitive in WGSL: names of its operands, dtype of the first.

    ``text`` takes the place of the table's own spelling.
    """
    text = PRIMITIVES[name].wgsl if text is None else text
    own = wgsl_type(dtype, vector)
    tokens = {
        "{F}": wgsl_type("f32", vector),
        "{I}": wgsl_type("i32", vector),
        "{U}": wgsl_type("u32", vector),
        "{B}": wgsl_type("bool", vector),
        "{T}": own,
        "{V}": "_v4" if vector else "",
        "{t}": dtype,
    }
    for token, v in tokens.items():
        text = text.replace(token, v)
    for k, a in enumerate(args):
        text = text.replace(f"{{{k}}}", a)
    return text


def vanishing(n: Expr) -> int | None:
    """The operand x of x · 0, x - x, x + -x in floats: 0 unless x is NaN or infinite.

    Drivers fold all three to 0 whatever x is, so that they need a text of their own.
    """
    if n.dtype != "f32" or len(n.args) != 2:
        return None
    a, b = n.args
    if n.data == "mul":
        zeros = [x.kind == "const" and x.data == 0 for x in n.args]
        return None if zeros[0] == zeros[1] else int(zeros[0])
    if n.data == "sub":
        return 0 if a is b else None
    if n.data == "add" and (_negation(b, a) or _negation(a, b)):
        return 0
    return None


def _negation(a: Expr, b: Expr) -> bool:
    return a.kind == "apply" and a.data == "neg" and a.args[0] is b
