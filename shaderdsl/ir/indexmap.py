"""Index arithmetic: affine forms, intervals, mixed-radix digits.

An index map is an integer expression of axes. Most are affine sums; flattened axes are
digits of a mixed-radix number. Here maps are taken apart (to find addresses, to solve
``target == map(axes)`` for an axis) and put together again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .expr import Expr, apply, const, index, topo

_LOW, _HIGH = -(2**31), 2**31 - 1
Extents = Sequence[int] | Mapping[int, int]


def number(e: Expr) -> int | None:
    """The value of an integer constant or size."""
    return e.data if e.kind in ("const", "size") and e.dtype in ("i32", "u32") else None


@dataclass(frozen=True)
class Affine:
    """``const + Σ axes[a]·index(a) + Σ coefficient·expression``."""

    axes: dict[int, int]
    const: int
    rest: tuple[tuple[int, Expr], ...]

    def expr(self) -> Expr:
        """Back to an expression, in a fixed order so that equal forms intern."""
        if len(self.axes) == 1 and not self.const and not self.rest:
            ((a, k),) = self.axes.items()
            return index(a) if k == 1 else apply("mul", index(a), const(k))
        terms: list[Expr] = []
        for a in sorted(self.axes):
            terms.append(apply("mul", index(a), const(self.axes[a])))
        terms += [apply("mul", n, const(k)) for k, n in self.rest]
        total = const(self.const) if self.const or not terms else None
        for t in reversed(terms):
            total = t if total is None else apply("add", t, total)
        assert total is not None
        return total


def affine(e: Expr) -> Affine:
    """Take a sum apart. Products by constants distribute; anything else is a term of
    its own.
    """
    if e.kind == "index":
        return Affine({e.data: 1}, 0, ())
    axes: dict[int, int] = {}
    rest: dict[Expr, int] = {}
    total = 0
    stack = [(1, e)]
    # Terms that share their parts would be walked once for each path to them.
    patience = 256
    while stack:
        k, n = stack.pop()
        patience -= 1
        if patience < 0:
            return _affine_shared(e)
        value = number(n)
        if value is not None:
            total += k * value
        elif n.kind == "index":
            axes[n.data] = axes.get(n.data, 0) + k
        elif n.kind == "apply" and n.data == "add":
            stack += [(k, n.args[1]), (k, n.args[0])]
        elif n.kind == "apply" and n.data == "sub":
            stack += [(-k, n.args[1]), (k, n.args[0])]
        elif n.kind == "apply" and n.data == "neg":
            stack.append((-k, n.args[0]))
        elif n.kind == "apply" and n.data == "mul" and number(n.args[0]) is not None:
            stack.append((k * number(n.args[0]), n.args[1]))  # type: ignore[operator]
        elif n.kind == "apply" and n.data == "mul" and number(n.args[1]) is not None:
            stack.append((k * number(n.args[1]), n.args[0]))  # type: ignore[operator]
        else:
            rest[n] = rest.get(n, 0) + k
    return Affine(
        {a: k for a, k in axes.items() if k},
        total,
        tuple((k, n) for n, k in rest.items() if k),
    )


def _affine_shared(e: Expr) -> Affine:
    """:func:`affine` with each node visited once: coefficients add up before a node is
    opened.
    """

    def opens(n: Expr) -> bool:
        if n.kind != "apply":
            return False
        if n.data == "mul":
            return any(number(x) is not None for x in n.args)
        return n.data in ("add", "sub", "neg")

    axes: dict[int, int] = {}
    rest: list[tuple[int, Expr]] = []
    total = 0
    coefficient: dict[Expr, int] = {e: 1}
    for n in reversed(topo(e, into=opens)):
        k = coefficient.get(n, 0)
        value = number(n)
        if value is not None:
            total += k * value
        elif n.kind == "index":
            axes[n.data] = k
        elif not opens(n):
            rest.append((k, n))
        elif n.data == "mul":
            (scale,) = [x for x in n.args if number(x) is not None][:1]
            other = n.args[1] if n.args[0] is scale else n.args[0]
            coefficient[other] = coefficient.get(other, 0) + k * (number(scale) or 0)
        else:
            for x, sign in zip(n.args, (1, -1) if n.data == "sub" else (1, 1)):
                s = -k if n.data == "neg" else sign * k
                coefficient[x] = coefficient.get(x, 0) + s
    return Affine(
        {a: k for a, k in axes.items() if k},
        total,
        tuple((k, n) for k, n in rest if k),
    )


def interval(
    e: Expr, extents: Extents, memo: dict[Expr, tuple[int, int]] | None = None
) -> tuple[int, int]:
    """Least and greatest value of an integer expression, given its axes' extents."""
    if memo is None:
        memo = {}
    stack = [e]  # a chain of a thousand operations must not recurse
    while stack:
        n = stack[-1]
        if n in memo:
            stack.pop()
            continue
        todo = [x for x in _parts(n) if x not in memo]
        if todo:
            stack += todo
            continue
        memo[n] = _interval(n, extents, memo)
    return memo[e]


def _parts(e: Expr) -> Sequence[Expr]:
    """The operands whose intervals give that of an integer expression."""
    if e.kind != "apply" or e.dtype not in ("i32", "u32"):
        return ()
    if e.data in ("add", "sub", "neg", "mul"):
        rest = affine(e).rest
        if len(rest) != 1 or rest[0] != (1, e):
            return [n for _, n in rest]
        return e.args if e.data == "mul" else ()
    if e.data in ("floordiv", "mod"):
        return e.args[:1]
    if e.data == "where":
        return e.args[1:]
    if e.data in ("minimum", "maximum"):
        return e.args
    if e.data in ("to_i32", "to_u32") and e.args[0].dtype in ("i32", "u32"):
        return e.args
    return ()


def _interval(
    e: Expr, extents: Extents, memo: dict[Expr, tuple[int, int]]
) -> tuple[int, int]:
    value = number(e)
    if value is not None:
        return value, value
    if e.kind == "index":
        return 0, max(extents[e.data] - 1, 0)
    if e.kind != "apply" or e.dtype not in ("i32", "u32"):
        return (0, 2**32 - 1) if e.dtype == "u32" else (_LOW, _HIGH)
    if e.data in ("add", "sub", "neg", "mul"):
        form = affine(e)
        if len(form.rest) == 1 and form.rest[0] == (1, e):
            if e.data == "mul":
                left, right = (interval(x, extents, memo) for x in e.args)
                ends = [p * q for p in left for q in right]
                return min(ends), max(ends)
            return _LOW, _HIGH
        low = high = form.const
        for k, (p, q) in [
            (k, interval(index(a), extents, memo)) for a, k in form.axes.items()
        ] + [(k, interval(n, extents, memo)) for k, n in form.rest]:
            low += min(k * p, k * q)
            high += max(k * p, k * q)
        return low, high
    if e.data in ("floordiv", "mod"):
        low, high = interval(e.args[0], extents, memo)
        divisor = number(e.args[1])
        if divisor is None or divisor <= 0:
            return _LOW, _HIGH
        if e.data == "floordiv":
            return low // divisor, high // divisor
        if low // divisor == high // divisor:
            return low % divisor, high % divisor
        return 0, divisor - 1
    if e.data in ("to_i32", "to_u32") and e.args[0].dtype in ("i32", "u32"):
        low, high = interval(e.args[0], extents, memo)
        fits = low >= 0 and high <= _HIGH
        whole = (0, 2**32 - 1) if e.dtype == "u32" else (_LOW, _HIGH)
        return (low, high) if fits else whole
    if e.data in ("minimum", "maximum"):
        left, right = (interval(x, extents, memo) for x in e.args)
        f = min if e.data == "minimum" else max
        return f(left[0], right[0]), f(left[1], right[1])
    if e.data == "where":
        left, right = (interval(x, extents, memo) for x in e.args[1:])
        return min(left[0], right[0]), max(left[1], right[1])
    return (0, 2**32 - 1) if e.dtype == "u32" else (_LOW, _HIGH)


def merge(axes: Sequence[int], extents: Extents) -> Expr:
    """The position along merged axes: a mixed-radix number, last axis fastest."""
    stride = 1
    form: dict[int, int] = {}
    for a in reversed(axes):
        if extents[a] != 1:
            form[a] = stride
        stride *= extents[a]
    return Affine(form, 0, ()).expr()


def divmod_index(e: Expr, p: int, extents: Extents) -> tuple[Expr, Expr]:
    """Quotient and remainder by a positive number, simplified where the affine form
    allows.
    """
    if p <= 1:
        return e, const(0)
    form = affine(e)
    low = Affine(
        {a: k for a, k in form.axes.items() if k % p},
        form.const % p,
        tuple((k, n) for k, n in form.rest if k % p),
    ).expr()
    high = Affine(
        {a: k // p for a, k in form.axes.items() if k % p == 0},
        form.const // p,
        tuple((k // p, n) for k, n in form.rest if k % p == 0),
    ).expr()
    lo, hi = interval(low, extents)
    if lo >= 0 and hi < p:
        return high, low
    return (
        apply("add", high, apply("floordiv", low, const(p))),
        apply("mod", low, const(p)),
    )


def split(e: Expr, radices: Sequence[int], extents: Extents) -> list[Expr]:
    """Digits of an index in a mixed radix, most significant first; the first digit
    takes what is left.
    """
    digits: list[Expr] = []
    for p in reversed(radices[1:]):
        e, low = divmod_index(e, p, extents)
        digits.append(low)
    return [e, *reversed(digits)] if radices else []


@dataclass(frozen=True)
class Digit:
    """One digit of an index map: ``sign · index(axis) + const`` over ``extent`` values,
    worth ``extent`` of the next.
    """

    extent: int
    sign: int
    axis: int
    const: int


def digits(e: Expr, extents: Extents) -> list[Digit] | None:
    """An index map as mixed-radix digits, most significant first, or None when it is no
    such number.
    """
    if e.kind == "index":
        return [Digit(extents[e.data], 1, e.data, 0)]
    form = affine(e)
    if form.rest or not form.axes:
        return None
    items = sorted(form.axes.items(), key=lambda t: (-abs(t[1]), -extents[t[0]]))
    if abs(items[-1][1]) != 1:
        return None
    for (_, k), (b, m) in itertools.pairwise(items):
        if abs(m) * extents[b] != abs(k):
            return None
    reversal = sum((extents[a] - 1) * -k for a, k in items if k < 0)
    if form.const == reversal:
        return [
            Digit(extents[a], 1 if k > 0 else -1, a, 0 if k > 0 else extents[a] - 1)
            for a, k in items
        ]
    if len(items) == 1:
        a, k = items[0]
        return [Digit(extents[a], 1 if k > 0 else -1, a, form.const)]
    return None


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements, last dimension fastest."""
    strides: list[int] = []
    step = 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def product(numbers: Sequence[int]) -> int:
    """∏, 1 for none."""
    return math.prod(numbers)
