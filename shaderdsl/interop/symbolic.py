"""Between expressions and SymPy, node by node. SymPy is imported on first use.

Nothing is simplified on the way (``evaluate=False``): what is shown is computed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from .. import namespace as sd
from ..errors import ShapeError, TraceError
from ..ir import expr as E
from ..ir.expr import Expr
from ..ir.primitives import PRIMITIVES
from ..op import Op


def _sympy() -> Any:
    import sympy

    return sympy


# ------------------------------------------------------------------ to SymPy


def _table() -> dict[str, Callable[..., Any]]:
    sp = _sympy()
    raw = {"evaluate": False}

    def add(a: Any, b: Any) -> Any:
        return sp.Add(a, b, **raw)

    def mul(a: Any, b: Any) -> Any:
        return sp.Mul(a, b, **raw)

    def power(a: Any, b: Any) -> Any:
        return sp.Pow(a, b, **raw)

    def negative(a: Any) -> Any:
        return mul(sp.Integer(-1), a)

    def quotient(a: Any, b: Any) -> Any:
        return mul(a, power(b, sp.Integer(-1)))

    def plain(f: Any) -> Callable[..., Any]:
        return lambda *a: f(*a, **raw)

    half = sp.Rational(1, 2)
    one, two = sp.Integer(1), sp.Integer(2)
    exp = plain(sp.exp)
    log = plain(sp.log)
    table: dict[str, Callable[..., Any]] = {
        "add": add,
        "sub": lambda a, b: add(a, negative(b)),
        "mul": mul,
        "mulz": mul,
        "div": quotient,
        "neg": negative,
        "floordiv": lambda a, b: plain(sp.floor)(quotient(a, b)),
        "mod": plain(sp.Mod),
        "pow": power,
        "lt": plain(sp.Lt),
        "le": plain(sp.Le),
        "eq": plain(sp.Eq),
        "ne": plain(sp.Ne),
        "where": lambda c, a, b: sp.Piecewise((a, c), (b, True), **raw),
        "isnan": lambda x: sp.Ne(x, x, **raw),
        "isinf": lambda x: sp.Eq(sp.Abs(x, **raw), sp.oo, **raw),
        "to_bool": lambda x: sp.Ne(x, sp.Integer(0), **raw),
        "maximum": plain(sp.Max),
        "minimum": plain(sp.Min),
        "exp": exp,
        "exp2": lambda x: power(two, x),
        "expm1": lambda x: add(exp(x), -one),
        "log": log,
        "log2": lambda x: quotient(log(x), log(two)),
        "log1p": lambda x: log(add(one, x)),
        "sqrt": lambda x: power(x, half),
        "rsqrt": lambda x: power(x, -half),
        "asin": plain(sp.asin),
        "acos": plain(sp.acos),
        "atan": plain(sp.atan),
        "atan2": plain(sp.atan2),
        "sigmoid": lambda x: power(add(one, exp(negative(x))), -one),
        "softplus": lambda x: log(add(one, exp(x))),
        "abs": plain(sp.Abs),
        "sign": plain(sp.sign),
        "floor": plain(sp.floor),
        "ceil": plain(sp.ceiling),
    }
    for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh", "erf"):
        table[name] = plain(getattr(sp, name))
    for name in ("stop_gradient", "round_f16", "to_f32", "to_i32", "to_u32"):
        table[name] = lambda x: x
    table["after"] = lambda x, first: x
    return table


def to_sympy(root: Expr, leaf: Callable[[Expr], Any]) -> Any:
    """An expression as SymPy; ``leaf(node)`` gives what is neither number nor apply."""
    sp = _sympy()
    table = _table()
    memo: dict[Expr, Any] = {}
    for n in E.values(root):
        if n.kind == "const":
            memo[n] = _constant(n, sp)
        elif n.kind != "apply":
            memo[n] = leaf(n)
        else:
            args = [memo[x] for x in n.args]
            if n.data in ("and", "or", "not") and n.dtype == "bool":
                logic = {"and": sp.And, "or": sp.Or, "not": sp.Not}[n.data]
                memo[n] = logic(*args, evaluate=False)
            elif n.data in table:
                memo[n] = table[n.data](*args)
            else:
                memo[n] = sp.Function(n.data)(*args)
    return memo[root]


def _constant(n: Expr, sp: Any) -> Any:
    if n.dtype == "bool":
        return sp.true if n.data else sp.false
    if n.dtype != "f32":
        return sp.Integer(n.data)
    if n.data != n.data:
        return sp.nan
    if n.data in (float("inf"), float("-inf")):
        return sp.oo if n.data > 0 else -sp.oo
    return sp.Integer(int(n.data)) if float(n.data).is_integer() else sp.Float(n.data)


# ------------------------------------------------------------------ from SymPy

_UNARY = (
    "exp", "log", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh",
    "erf", "sign", "floor",
)  # fmt: skip


def from_sympy(
    expr: Any, signature: str, args: Sequence[Any], name: str | None = None
) -> Op:
    """An op from a SymPy expression, structurally.

    Args:
        expr: an expression in the symbols ``args``.
        signature: as in ``sd.op``, one operand a symbol and one result.
        args: the symbols, in the order of the operands.
        name: the op's name; ``"from_sympy"`` by default.

    Raises:
        ShapeError: symbols and operands differ in number, or a symbol is free.
        TraceError: a function that has no primitive.
    """
    sp = _sympy()
    expr = sp.sympify(expr)
    symbols = list(args)
    where = E.user_location()
    free = sorted(map(str, expr.free_symbols - set(symbols)))
    if free:
        raise ShapeError(
            f"the symbol {free[0]!r} of the expression is not among args",
            where=where,
            cure="give it in args, and an operand in the signature",
        )
    _convert_check(expr, where)

    def body(*operands: Any) -> Any:
        values = dict(zip(symbols, operands, strict=True))
        result: Any = _convert(expr, values)
        # A constant still has to become a value over the op's axes.
        return sd.cast(result, "f32") if hasattr(result, "expr") else result

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    body.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(str(s), kind) for s in symbols]
    )
    body.__name__ = body.__qualname__ = name or "from_sympy"
    body.__doc__ = str(expr)
    op = Op(body, signature, {}, ())
    if len(op.signature.inputs) != len(symbols):
        raise ShapeError(
            f"{len(symbols)} symbols in args, {len(op.signature.inputs)} operands in "
            f"'{signature}'",
            where=where,
        )
    return op


def _convert_check(expr: Any, where: str | None) -> None:
    """Refuse what has no primitive before anything is traced."""
    sp = _sympy()
    known = (
        sp.Symbol, sp.Number, sp.NumberSymbol, sp.Add, sp.Mul, sp.Pow, sp.Max, sp.Min,
        sp.Mod, sp.Abs, sp.ceiling, sp.atan2, sp.Piecewise, sp.And, sp.Or, sp.Not,
        sp.core.relational.Relational, sp.functions.elementary.piecewise.ExprCondPair,
        sp.core.numbers.Infinity, sp.core.numbers.NegativeInfinity,
        type(sp.true), type(sp.false),
    )  # fmt: skip
    for node in sp.preorder_traversal(expr):
        if not isinstance(node, known) and node.func.__name__ not in _UNARY:
            raise TraceError(
                f"SymPy's {node.func.__name__} has no primitive here: {node}",
                where=where,
                cure="rewrite it with functions of docs/primitives, e.g. "
                "expr.rewrite(sympy.exp)",
            )


def _convert(e: Any, values: dict[Any, Any]) -> Any:
    sp = _sympy()
    if e in values:
        return values[e]
    if isinstance(e, sp.Integer):
        return int(e)
    if isinstance(e, (sp.Number, sp.NumberSymbol)):
        return float(e)
    if e in (sp.true, sp.false):
        return bool(e)
    if isinstance(e, sp.Piecewise):
        return _pieces(e, values)
    if isinstance(e, sp.Mul):
        return _product(e, values)
    args = [_convert(a, values) for a in e.args]
    if isinstance(e, sp.Pow):
        return sd.pow(args[0], args[1])
    name = e.func.__name__
    many: dict[str, Callable[[Any, Any], Any]] = {
        "Add": lambda a, b: a + b,
        "Max": sd.maximum,
        "Min": sd.minimum,
        "Mod": lambda a, b: a % b,
        "And": lambda a, b: a & b,
        "Or": lambda a, b: a | b,
        "atan2": sd.atan2,
        "StrictLessThan": lambda a, b: a < b,
        "LessThan": lambda a, b: a <= b,
        "StrictGreaterThan": lambda a, b: a > b,
        "GreaterThan": lambda a, b: a >= b,
        "Equality": lambda a, b: a == b,
        "Unequality": lambda a, b: a != b,
    }
    if name in many:
        total = args[0]
        for a in args[1:]:
            total = many[name](total, a)
        return total
    if name == "Not":
        return ~args[0]
    function: Any = getattr(sd, {"Abs": "abs", "ceiling": "ceil"}.get(name, name))
    return function(*args)


def _product(e: Any, values: dict[Any, Any]) -> Any:
    """Factors with negative exponents divide, so that a quotient is one division."""
    sp = _sympy()
    top: Any = None
    below: Any = None
    for a in e.args:
        if isinstance(a, sp.Pow) and a.exp.is_Number and a.exp == -1:
            v = _convert(a.base, values)
            below = v if below is None else below * v
        else:
            v = _convert(a, values)
            top = v if top is None else top * v
    if below is None:
        return top
    return (1.0 if top is None else top) / below


def _pieces(e: Any, values: dict[Any, Any]) -> Any:
    """From the last piece to the first; NaN where no condition holds."""
    sp = _sympy()
    result: Any = None
    for value, condition in reversed(e.args):
        v = _convert(value, values)
        if condition == sp.true:
            result = v
        else:
            other = float("nan") if result is None else result
            result = sd.where(_convert(condition, values), v, other)
    return result


def sympy_of_primitive(name: str, symbols: Sequence[Any]) -> Any:
    """A primitive of symbols as SymPy; None where SymPy has no such function."""
    if name not in _table():
        return None
    nodes = [E.scalar(str(s), "f32") for s in symbols]
    node = E.apply(name, *nodes)
    given = dict(zip(nodes, symbols, strict=True))
    assert PRIMITIVES[name].takes in ("float", "number", "same")
    return to_sympy(node, lambda n: given[n])
