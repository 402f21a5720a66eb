"""Linear addresses of loads and stores: sums of axis · coefficient, with a name for
each coefficient.

A coefficient is a runtime parameter of the kernel. Its key says what it *is* (the
product of some axes' extents), never its value, so that equal kernels of different
sizes are one text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..ir import expr as E
from ..ir.expr import Expr
from ..ir.indexmap import affine, digits, interval
from ..ir.stage import Stage
from .spelling import WIDTH

Key = tuple[Any, ...]


@dataclass(frozen=True)
class Term:
    """``coefficient · what``; ``what`` is an axis or an integer expression."""

    coefficient: int
    key: Key
    what: int | Expr


@dataclass(frozen=True)
class Address:
    """Element offset: ``const + Σ terms``."""

    terms: tuple[Term, ...]
    const: int

    def coefficient(self, axis: int) -> int:
        """The factor of an axis, 0 if absent."""
        return next(
            (
                t.coefficient
                for t in self.terms
                if t.what == axis and isinstance(t.what, int)
            ),
            0,
        )

    def axes(self) -> dict[int, int]:
        """Coefficients of plain axes."""
        return {t.what: t.coefficient for t in self.terms if isinstance(t.what, int)}

    def rest_free(self) -> int:
        """Axes inside of terms that are no plain axes."""
        mask = 0
        for t in self.terms:
            if isinstance(t.what, Expr):
                mask |= t.what.free
        return mask


def clamped(i: Expr, n: int, space: Sequence[int]) -> Expr:
    """An index that stays in its axis: clamped unless intervals prove it."""
    low, high = interval(i, space)
    if low >= 0 and high < n:
        return i
    return E.apply("minimum", E.apply("maximum", i, 0), E.size(max(n - 1, 0)))


def load_address(node: Expr, space: Sequence[int]) -> Address:
    """Where a load reads."""
    stage: Stage = node.data

    def find() -> Address:
        indices = [
            clamped(i, n, space) for i, n in zip(node.args, stage.shape, strict=True)
        ]
        return linear(stage.shape, indices, space)

    found: Address = E.known(node, ("address", tuple(space)), find)
    return found


def linear(
    shape: Sequence[int], indices: Sequence[Expr], space: Sequence[int]
) -> Address:
    """Row-major offset of an index tuple."""
    coefficients: dict[int, tuple[int, Key]] = {}
    rest: dict[Expr, tuple[int, Key]] = {}
    const = 0
    stride = 1
    inner: (
        tuple[int, ...] | None
    ) = ()  # axes whose extents multiply to the stride; None when unknown
    for k in reversed(range(len(shape))):
        form = affine(indices[k])
        d = digits(indices[k], space) if not form.rest else None
        whole = d is not None and all(o.sign > 0 and o.const == 0 for o in d)
        order = [o.axis for o in d] if whole and d is not None else []
        const += form.const * stride
        for a, c in form.axes.items():
            key: Key = ("v", c * stride)
            if inner is not None and (whole or abs(c) == 1) and c > 0:
                below = tuple(order[order.index(a) + 1 :]) if whole else ()
                key = ("axes", tuple(sorted(below + inner)))
            _add(coefficients, a, c * stride, key)
        for c, n in form.rest:
            key = (
                ("axes", tuple(sorted(inner)))
                if c == 1 and inner is not None
                else ("v", c * stride)
            )
            _add(rest, n, c * stride, key)
        covered = 1
        for a in order:
            covered *= space[a]
        if shape[k] != 1:
            inner = (
                inner + tuple(order)
                if inner is not None and whole and covered == shape[k]
                else None
            )
        stride *= shape[k]
    terms = [Term(c, key, a) for a, (c, key) in sorted(coefficients.items()) if c]
    terms += [Term(c, key, n) for n, (c, key) in rest.items() if c]
    return Address(tuple(terms), const)


def _add(table: dict[Any, tuple[int, Key]], what: Any, c: int, key: Key) -> None:
    if what in table:
        c += table[what][0]
        key = ("v", c)
    table[what] = (c, key)


def collapse(
    axes: Sequence[int],
    space: Sequence[int],
    addresses: Sequence[Mapping[int, int]],
    blocked: int,
) -> list[list[int]]:
    """Merge neighbouring axes that every address walks as one; fewer axes need fewer
    divisions.

    Axes in the mask ``blocked`` are used by themselves (as a value, or inside an index)
    and stay apart.
    """
    out: list[list[int]] = []
    for a in axes:
        if out and not blocked >> a & 1 and not blocked >> out[-1][-1] & 1:
            last = out[-1][-1]
            if all(c.get(last, 0) == c.get(a, 0) * space[a] for c in addresses):
                out[-1].append(a)
                continue
        out.append([a])
    return out


def used_alone(roots: Sequence[Expr], addresses: Mapping[Expr, Address]) -> int:
    """Axes whose index is used as a value, or in an address by more than a factor."""
    mask = 0
    seen: set[Expr] = set()
    stack = list(roots)
    while stack:
        n = stack.pop()
        if n in seen:
            continue
        seen.add(n)
        if n.kind == "index":
            mask |= n.free
        elif n.kind == "load":
            if n in addresses:
                stack += [
                    t.what for t in addresses[n].terms if isinstance(t.what, Expr)
                ]
        else:
            stack += n.args
    return mask


def contiguous(form: Address, axis: int | None) -> bool:
    """Whether an address walks neighbouring, aligned elements along the vector axis."""
    if (
        axis is None
        or form.coefficient(axis) != 1
        or form.rest_free() >> axis & 1
        or form.const % WIDTH
    ):
        return False
    return all(t.coefficient % WIDTH == 0 for t in form.terms if t.what != axis)
