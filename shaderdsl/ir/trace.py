"""Tracing: op bodies compute with :class:`Value`, a scalar expression over the op's
named axes.

Names are for people. A trace numbers the axes of one call, and what leaves it (stages)
is positional.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
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
from .bounds import HostCheck
from .expr import Expr
from .operators import UFUNCS, expand_power, install, instead_of
from .stage import MONOIDS, kept, make_reduce, map_stage

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


@contextlib.contextmanager
def entered(trace: Trace) -> Iterator[None]:
    """While an op's function runs: its call is the current one."""
    token = _current.set(trace)
    try:
        yield
    finally:
        _current.reset(token)


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
        prim = UFUNCS.get(ufunc.__name__)
        if prim is None or method != "__call__" or more:
            raise TraceError(
                f"np.{ufunc.__name__} cannot be used inside an op",
                where=f"{self.trace.name} ({E.user_location()})",
                cure=instead_of(ufunc.__name__),
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


install(Value, primitive)


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
