"""Tracing: op bodies compute with :class:`Value`, a scalar expression over the op's
named axes.

Names are for people. A trace numbers the axes of one call, and what leaves it (stages)
is positional.
"""

from __future__ import annotations

import contextvars
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import (
    AxisError,
    DTypeError,
    MemberError,
    ReductionError,
    ShapeError,
    TraceError,
)
from . import expr as E
from . import signature as S
from . import verify
from .bounds import HostCheck, check_ranges
from .expr import Expr
from .indexmap import Affine, merge
from .stage import MONOIDS, Stage, kept, make_reduce, map_stage

_current: contextvars.ContextVar[Trace | None] = contextvars.ContextVar(
    "trace", default=None
)


def current() -> Trace:
    """The op call that is being traced."""
    trace = _current.get()
    if trace is None:
        raise TraceError(
            "named axes exist only inside an op",
            cure="use axis= outside of @sd.op functions",
        )
    return trace


def inside() -> bool:
    """Whether an op body is being traced."""
    return _current.get() is not None


@dataclass
class Trace:
    """Axes of one call of an op: their numbers, their sizes, and checks to make on ids
    before it runs.
    """

    name: str
    sizes: dict[str, int]
    numbers: dict[str, int] = field(default_factory=dict)
    extents: list[int] = field(default_factory=list)
    checks: list[HostCheck] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name, n in self.sizes.items():
            self.numbers[name] = len(self.extents)
            self.extents.append(n)

    def axis(self, name: str) -> int:
        """The number of a named axis."""
        key = name.strip() if isinstance(name, str) else name
        if key not in self.numbers:
            raise AxisError(
                f"there is no axis {key!r} here; the axes are {', '.join(self.sizes)}",
                where=f"{self.name} ({E.user_location()})",
            )
        return self.numbers[key]

    def axes(self, names: str) -> list[int]:
        """Numbers of the axes in ``"a b"``; ``"..."`` means all leading ones."""
        if not isinstance(names, str):
            raise AxisError(
                f"axes are named in one text, not by {names!r}",
                where=f"{self.name} ({E.user_location()})",
                cure='write over="h d"',
            )
        out: list[int] = []
        for n in names.split():
            if n == "...":
                out += [v for k, v in self.numbers.items() if k.startswith("...")]
            else:
                out.append(self.axis(n))
        if len(set(out)) != len(out):
            raise AxisError(
                f"an axis is named twice in {names!r}",
                where=f"{self.name} ({E.user_location()})",
            )
        return out


class Value:
    """A scalar expression over named axes, as op bodies see it."""

    __slots__ = ("expr", "trace")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expr: Expr, trace: Trace):
        # Equal expressions are one node; the line of who wrote it last is to be blamed.
        expr.loc = E.user_location(2)
        self.expr, self.trace = expr, trace

    @property
    def dtype(self) -> str:
        """f32, i32, u32 or bool."""
        return self.expr.dtype

    def at(self, **indices: Any) -> Value:
        """Read elsewhere along some axes: ``x.at(r=1 - sd.index("r"))``,
        ``table.at(v=ids)``.
        """
        axes: dict[int, Expr] = {}
        for name, i in indices.items():
            e = unwrap(i)
            if e.dtype not in ("i32", "u32"):
                raise DTypeError(
                    f"the index for axis {name!r} is {e.dtype}; indices are i32 or u32",
                    where=f"{self.trace.name} ({E.user_location()})",
                )
            axes[self.trace.axis(name)] = E.cast(e, "i32")
        moved = E.substitute(self.expr, axes)
        # A load that leaves its axis is to be blamed on this line, not on the
        # operand's.
        before, here = set(E.loads(self.expr)), E.user_location()
        for n in E.loads(moved):
            if n not in before:
                n.loc = here
        return Value(moved, self.trace)

    def store(self) -> Value:
        """The same value, written to memory once instead of computed again by its
        readers; see :meth:`shaderdsl.Array.store`.
        """
        return self._kept("store")

    def inline(self) -> Value:
        """The same value, computed again by each reader instead of stored; see
        :meth:`shaderdsl.Array.inline`.
        """
        return self._kept("inline")

    def _kept(self, keep: str) -> Value:
        space = self.trace.extents
        axes = [a for a in E.bits(self.expr.free) if space[a] != 1]
        own: dict[int, Expr] = {a: E.const(0) for a in E.bits(self.expr.free)}
        own |= {a: E.index(i) for i, a in enumerate(axes)}
        body = E.substitute(self.expr, own)
        name, here = f"{self.trace.name}_part", E.user_location()
        stage = map_stage([space[a] for a in axes], body, name, loc=here)
        read = E.load(kept(stage, keep), [E.index(a) for a in axes])
        return Value(read, self.trace)

    def __bool__(self) -> bool:
        raise TraceError(
            "the truth of a symbolic value is not known while an op is traced",
            where=f"{self.trace.name} ({E.user_location()})",
            cure="use sd.where(condition, a, b), or pass the number as a static option",
        )

    def __float__(self) -> float:
        raise TraceError(
            "a symbolic value is no number while an op is traced",
            where=f"{self.trace.name} ({E.user_location()})",
            cure="use functions of sd, not of math (sd.exp), and sd.cast; or pass the "
            "number as a static option",
        )

    __int__ = __index__ = __float__

    def __array__(self, *args: Any, **keywords: Any) -> Any:
        raise TraceError(
            "a symbolic value cannot become a NumPy array, nor index one",
            where=f"{self.trace.name} ({E.user_location()})",
            cure="pass the array as an operand and read it along a named axis, "
            "x.at(d=…); for a hook of attention: captured={'x': x}",
        )

    def __getattr__(self, name: str) -> Any:
        # Python and NumPy ask for names with underscores to see what a thing can do.
        if name.startswith("_"):
            raise AttributeError(name)
        raise MemberError(
            f"a value inside an op is one element and has no {name!r}",
            where=f"{self.trace.name} ({E.user_location()})",
            cure='use functions over named axes, sd.sum(x, over="d"); shapes are those '
            "of the signature",
        )

    def __matmul__(self, other: Any) -> Value:
        raise TraceError(
            "values inside an op are single elements; @ multiplies arrays",
            where=f"{self.trace.name} ({E.user_location()})",
            cure='write the sum: sd.sum(x * w, over="k")',
        )

    __rmatmul__ = __matmul__

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **more: Any) -> Any:
        """NumPy numbers on the left of an operator; NumPy's functions are refused."""
        if ufunc.__name__ == "matmul":
            self.__matmul__(args)
        prim = _UFUNCS.get(ufunc.__name__)
        if prim is None or method != "__call__" or more:
            raise TraceError(
                f"np.{ufunc.__name__} cannot be used inside an op",
                where=f"{self.trace.name} ({E.user_location()})",
                cure=_instead_of(ufunc.__name__),
            )
        return power(*args) if prim == "pow" else primitive(prim, *args)

    def __getitem__(self, key: Any) -> Any:
        raise TraceError(
            "a symbolic value is one number and has no positions",
            where=f"{self.trace.name} ({E.user_location()})",
            cure="read elsewhere along a named axis: x.at(d=…)",
        )

    def __len__(self) -> int:
        raise TraceError(
            "a symbolic value is one number and has no length",
            where=f"{self.trace.name} ({E.user_location()})",
            cure='the size of a named axis is sd.extent("d")',
        )

    def __iter__(self) -> Any:
        raise TraceError(
            "a symbolic value cannot be iterated",
            where=f"{self.trace.name} ({E.user_location()})",
        )

    def __repr__(self) -> str:
        return f"Value({self.expr!r})"

    def __neg__(self) -> Value:
        return primitive("neg", self)

    def __pos__(self) -> Value:
        return self

    def __abs__(self) -> Value:
        return primitive("abs", self)

    def __invert__(self) -> Value:
        return primitive("not", self)

    def __pow__(self, other: Any) -> Value:
        return power(self, other)

    def __rpow__(self, other: Any) -> Value:
        return power(other, self)


class Indexed:
    """An array that op code reads with brackets: ``bias[h, i - j + 16]``.

    Args:
        value: the array over axes of its own.
        axes: the names of these axes.
        name: what people call the array.
    """

    __slots__ = ("axes", "name", "value")

    def __init__(self, value: Value, axes: Sequence[str], name: str):
        self.value, self.axes, self.name = value, tuple(axes), name

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""
        trace = self.value.trace
        return tuple(trace.extents[trace.axis(a)] for a in self.axes)

    @property
    def dtype(self) -> str:
        """f32, i32, u32 or bool."""
        return self.value.dtype

    def __getitem__(self, indices: Any) -> Value:
        given = indices if isinstance(indices, tuple) else (indices,)
        where = f"{self.value.trace.name} ({E.user_location()})"
        if len(given) != len(self.axes):
            raise ShapeError(
                f"{self.name!r} has {len(self.axes)} dimensions and is read with "
                f"{len(given)} indices",
                where=where,
                cure=f"{self.name}[{', '.join('ijklmnop'[: len(self.axes)])}]",
            )
        for i, n in zip(given, self.shape, strict=True):
            if isinstance(i, int) and not -1 < i < n:
                raise ShapeError(
                    f"index {i} of {self.name!r} is outside of its axis of size {n}",
                    where=where,
                    cure=f"0 … {n - 1} are there",
                )
        return (
            self.value.at(**dict(zip(self.axes, given, strict=True)))
            if self.axes
            else self.value
        )

    def __iter__(self) -> Any:
        raise TraceError(
            f"{self.name!r} cannot be iterated",
            where=f"{self.value.trace.name} ({E.user_location()})",
        )

    def __repr__(self) -> str:
        return f"Indexed({self.name} {list(self.shape)})"


def _operator(name: str, prim: str, swap: bool = False) -> None:
    def forward(self: Value, other: Any) -> Value:
        return primitive(prim, other, self) if swap else primitive(prim, self, other)

    def reflected(self: Value, other: Any) -> Value:
        return primitive(prim, other, self)

    setattr(Value, f"__{name}__", forward)
    if name not in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(Value, f"__r{name}__", reflected)


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
# NumPy's names of what its numbers do when they stand on the left.
#: Names of NumPy that are others here.
_NAMES = {
    "absolute": "abs", "fabs": "abs", "negative": "-x", "square": "x * x",
    "reciprocal": "1.0 / x", "arcsin": "asin", "arccos": "acos", "arctan": "atan",
    "arctan2": "atan2", "rint": "round", "fmax": "maximum", "fmin": "minimum",
    "float_power": "pow", "invert": "~x", "bitwise_not": "~x", "logical_and": "a & b",
    "logical_or": "a | b", "logical_not": "~a", "logical_xor": "a ^ b", "mod": "a % b",
    "fmod": "a % b", "equal": "a == b", "not_equal": "a != b", "less": "a < b",
    "less_equal": "a <= b", "greater": "a > b", "greater_equal": "a >= b",
}  # fmt: skip


def _instead_of(name: str) -> str:
    """What to write in the place of a function of NumPy."""
    own = _NAMES.get(name, name)
    if not own.isidentifier():
        return f"write {own}"
    if hasattr(sys.modules.get(__name__.partition(".")[0]), own):
        return f"use sd.{own}"
    return (
        f"there is no sd.{own}: write it of functions that there are (sd.exp, sd.log, "
        "sd.pow, sd.where, …)"
    )


_UFUNCS = {
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
for _name, _prim in OPERATORS.items():
    _operator(_name, _prim)
_operator("gt", "lt", swap=True)
_operator("ge", "le", swap=True)


def _of_another_call(x: Value) -> TraceError:
    here = _current.get()
    used = "outside of it" if here is None else f"in {here.name}"
    if here is not None and here.name == x.trace.name:
        used = "in another call of it"
    where = E.user_location()
    return TraceError(
        f"a value of the op {x.trace.name} is used {used}",
        where=where if here is None else f"{here.name} ({where})",
        cure="values and positions (sd.index) inside an op live only while it is "
        "traced: return what is needed, and pass it on as an operand",
    )


def unwrap(x: Any) -> Expr:
    """A Value or a Python or NumPy number as an expression."""
    if isinstance(x, Value):
        if x.trace is not _current.get():
            raise _of_another_call(x)
        return x.expr
    if isinstance(x, Expr):
        return x
    if (
        hasattr(x, "item")
        and getattr(x, "shape", None) == ()
        and type(x).__module__ == "numpy"
    ):
        x = x.item()
    if isinstance(x, int) and abs(x) >= 2**63:
        raise DTypeError(
            "an integer beyond 64 bits is used inside an op",
            where=f"{current().name} ({E.user_location()})",
            cure="use a float",
        )
    if isinstance(x, (bool, int, float)):
        return E.const(x)
    raise TraceError(
        f"a {type(x).__name__} cannot be used inside an op",
        where=f"{current().name} ({E.user_location()})",
        cure="pass arrays as operands of the op, so that the signature names their "
        "axes",
    )


def primitive(name: str, *args: Any) -> Value:
    """A primitive of values and numbers."""
    try:
        return Value(E.apply(name, *(unwrap(a) for a in args)), current())
    except DTypeError as error:
        if error.where is None:
            raise DTypeError(
                error.message,
                where=f"{current().name} ({E.user_location()})",
                cure=error.cure,
            ) from None
        raise


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


def power(base: Any, exponent: Any) -> Value:
    """``base ** exponent`` inside an op."""
    value: Value = expand_power(base, exponent, primitive)
    return value


def reduce(
    monoid: str, x: Any, over: str, where: Any = None, name: str | None = None
) -> Value:
    """Reduce over named axes; elements where the condition fails do not take part."""
    trace = current()
    body = unwrap(x)
    axes = trace.axes(over)
    if body.dtype == "bool":
        body = E.cast(body, "i32")
    identity = MONOIDS[monoid].identity[body.dtype]
    if monoid in ("max", "min") and any(trace.extents[a] == 0 for a in axes):
        raise ReductionError(
            f"{monoid} over {over!r} has nothing to reduce (size 0) and no identity",
            where=f"{trace.name} ({E.user_location()})",
        )
    if where is not None:
        body = E.where(unwrap(where), body, E.const(identity, body.dtype))
    out = [a for a in range(len(trace.extents)) if a not in axes]
    result = make_reduce(
        monoid,
        body,
        out,
        axes,
        trace.extents,
        name or f"{trace.name}_{monoid}",
        loc=E.user_location(),
    )
    return Value(result, trace)


# ------------------------------------------------------------------ calling an op's
# function


def operands(
    sig: S.Signature, trace: Trace, arrays: Sequence[Stage], names: Sequence[str]
) -> list[Value | tuple[Value, ...]]:
    """The arrays as values over the axes that the signature gives them."""
    out: list[Value | tuple[Value, ...]] = []
    for dims, stage, name in zip(sig.inputs, arrays, names, strict=True):
        joined = [d for d in dims if d.kind == "joined"]
        if not joined:
            node = E.load(stage, [_position(d, trace) for d in dims])
            node.label = node.label or name
            out.append(Value(node, trace))
            continue
        if len(joined) > 1:
            raise AxisError("an operand can have one joined axis", where=trace.name)
        pieces = []
        offset = 0
        for piece in joined[0].axes:
            a = trace.axis(piece)
            at = Affine({a: 1}, offset, ()).expr()
            pieces.append(
                Value(
                    E.load(
                        stage,
                        [at if d is joined[0] else _position(d, trace) for d in dims],
                    ),
                    trace,
                )
            )
            offset += trace.extents[a]
        out.append(tuple(pieces))
    return out


def _position(d: S.Dim, trace: Trace) -> Expr:
    names = (d.text,) if d.kind == "derived" else d.axes
    return merge([trace.axis(n) for n in names], trace.extents)


def run(
    function: Callable[..., Any],
    name: str,
    sig: S.Signature,
    sizes: dict[str, int],
    arrays: Sequence[Stage],
    keywords: dict[str, Any],
    names: Sequence[str],
) -> tuple[list[Stage], list[HostCheck], bool]:
    """Call an op's function once; give its results as stages, checks for ids, and
    whether it gave a tuple.
    """
    trace = Trace(name, {a: sizes[a] for a in sig.axes()} | sizes)
    token = _current.set(trace)
    try:
        args = operands(sig, trace, arrays, names)
        for part in args:  # made by nobody's line
            for value in part if isinstance(part, tuple) else (part,):
                value.expr.loc = _where(function, name)
        kw = {
            k: Value(v, trace) if isinstance(v, Expr) else v
            for k, v in keywords.items()
        }
        results = function(*args, **kw)
        many = len(sig.outputs) > 1
        if many and (
            not isinstance(results, tuple) or len(results) != len(sig.outputs)
        ):
            raise ShapeError(
                f"the op returns {len(results) if isinstance(results, tuple) else 1} "
                "values, its signature has "
                f"{len(sig.outputs)} results",
                where=_where(function, name),
            )
        half = _storage(arrays)
        stages = [
            _result(r, dims, trace, name, half, function)
            for r, dims in zip(
                results if many else (results,), sig.outputs, strict=True
            )
        ]
        verify.check(stages, "after tracing")
        return stages, trace.checks, many
    finally:
        _current.reset(token)


def _storage(arrays: Sequence[Stage]) -> bool:
    floats = [a.dtype for a in arrays if a.dtype in E.FLOATS]
    return bool(floats) and all(d == "f16" for d in floats)


def _where(function: Callable[..., Any], name: str) -> str:
    code = getattr(function, "__code__", None)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name


def _result(
    result: Any,
    dims: tuple[S.Dim, ...],
    trace: Trace,
    name: str,
    half: bool,
    function: Callable[..., Any],
) -> Stage:
    joined = [d for d in dims if d.kind == "joined"]
    if joined:
        if not isinstance(result, (tuple, list)) or len(result) != len(joined[0].axes):
            raise ShapeError(
                f"the result axis '{joined[0].text}' needs a tuple of "
                f"{len(joined[0].axes)} pieces",
                where=_where(function, name),
            )
        pieces = [unwrap(p) for p in result]
    else:
        if isinstance(result, (tuple, list)):
            raise ShapeError(
                "the op returns a tuple, its signature has one result",
                where=_where(function, name),
            )
        pieces = [unwrap(result)]
    # Axes of the result in order; a joined dimension gets a fresh axis that runs over
    # all pieces.
    axes: list[int] = []
    groups: list[tuple[int, ...]] = []
    extents = list(trace.extents)
    for d in dims:
        if d.kind == "joined":
            extents.append(sum(trace.extents[trace.axis(a)] for a in d.axes))
            members = [len(extents) - 1]
        elif d.kind == "derived":
            members = [trace.axis(d.text)]
        else:
            members = [trace.axis(a) for a in d.axes]
        groups.append(tuple(range(len(axes), len(axes) + len(members))))
        axes += members
    if len(set(axes)) != len(axes):
        raise AxisError(
            f"an axis appears twice in a result of '{trace.name}'",
            where=_where(function, name),
        )
    names = {v: k for k, v in trace.numbers.items()}
    for k, p in enumerate(pieces):
        allowed = set(axes) | ({trace.axis(joined[0].axes[k])} if joined else set())
        left = [a for a in E.bits(p.free) if a not in allowed]
        if left:
            raise AxisError(
                f"the result still depends on axis {names[left[0]]!r}, which its "
                "signature does not have",
                where=f"{name} ({p.loc or _where(function, name)})",
                cure=f"reduce it: sd.sum(…, over={names[left[0]]!r}), or add the axis "
                "to the result",
            )
        trace.checks += check_ranges(p, trace.extents, names, name)
    body = (
        pieces[0] if not joined else _join(pieces, joined[0], trace, len(extents) - 1)
    )
    body = E.substitute(body, {a: E.index(i) for i, a in enumerate(axes)})
    dtype = "f16" if half and body.dtype == "f32" else body.dtype
    return map_stage(
        [extents[a] for a in axes],
        body,
        name,
        groups=tuple(groups),
        dtype=dtype,
        loc=_where(function, name),
    )


def _join(pieces: Sequence[Expr], d: S.Dim, trace: Trace, whole: int) -> Expr:
    same = E.promote(list(pieces), "a joined axis")
    position = E.index(whole)
    start = sum(trace.extents[trace.axis(a)] for a in d.axes)
    result: Expr | None = None
    for piece, name in zip(reversed(same), reversed(d.axes), strict=True):
        a = trace.axis(name)
        start -= trace.extents[a]
        moved = E.substitute(piece, {a: Affine({whole: 1}, -start, ()).expr()})
        end = E.const(start + trace.extents[a])
        result = (
            moved
            if result is None
            else E.where(E.apply("lt", position, end), moved, result)
        )
    assert result is not None
    return result
