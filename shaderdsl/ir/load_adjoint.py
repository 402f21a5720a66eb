"""The adjoint of a load: what a reader's cotangent is where it reads.

``x[f(i)]`` passes ``Σ_i where(j == f(i), g[i], 0)`` on to ``x[j]``. The equations are
solved for the reader's axes where they can be; then nothing is summed, or little.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from . import expr as E
from .expr import Expr
from .indexmap import Affine, affine, digits, merge, split
from .stage import Groups, make_reduce

# A contribution to an adjoint: given the adjoint's axes (extents, groups), an
# expression over them.
Contribution = Callable[[tuple[int, ...], Groups], Expr]


@dataclass
class _Solution:
    """Consumer axes in terms of the target's, guards, and equations that stay."""

    axes: dict[int, Expr | None] = field(default_factory=dict)
    guards: list[Expr] = field(default_factory=list)
    pending: list[tuple[Expr, Expr]] = field(default_factory=list)
    later: list[tuple[Expr, int, Affine]] = field(default_factory=list)


def pull_load(n: Expr, g: Expr, space: tuple[int, ...]) -> Contribution:
    """Σ over the consumer's axes of ``where(target == index, g, 0)``, equations solved
    where they can be.
    """

    def build(ext: tuple[int, ...], groups: Groups) -> Expr:
        off = len(ext)
        s = _Solution()
        for i, group in zip(n.args, groups, strict=True):
            _solve_dim(
                i, merge(group, ext), math.prod(ext[a] for a in group), ext, space, s
            )
        rest = [a for a in range(len(space)) if a not in s.axes]
        axes = {a: v for a, v in s.axes.items() if v is not None}
        axes.update({a: E.index(off + a) for a in rest})
        guards = list(s.guards)
        for target, a, form in s.later:
            others = Affine(
                {q: k for q, k in form.axes.items() if q != a}, form.const, ()
            ).expr()
            left = E.substitute(others, axes)
            v = target - left if form.axes[a] > 0 else left - target
            axes[a] = v
            guards += _within(v, space[a])
        guards += [E.apply("eq", t, E.substitute(i, axes)) for t, i in s.pending]
        body = E.guard(guards, E.substitute(g, axes))
        if not rest:
            return body
        extents = dict(enumerate(ext)) | {off + a: space[a] for a in rest}
        return make_reduce(
            "sum",
            body,
            range(off),
            [off + a for a in rest],
            extents,
            f"d_{n.data.name}",
            loc=n.loc,
        )

    return build


def _within(v: Expr, n: int) -> list[Expr]:
    return [E.apply("le", E.const(0), v), E.apply("lt", v, E.size(n))]


def _solve_dim(
    i: Expr,
    target: Expr,
    extent: int,
    ext: Sequence[int],
    space: Sequence[int],
    s: _Solution,
) -> None:
    """Solve ``target == i`` for consumer axes, for one dimension."""
    d = digits(i, space)
    if d is not None and math.prod(o.extent for o in d) == extent and extent > 0:
        parts = split(target, [o.extent for o in d], ext) if len(d) > 1 else [target]
        for t, o in zip(parts, d, strict=True):
            if o.axis in s.axes:
                s.pending.append((t, Affine({o.axis: o.sign}, o.const, ()).expr()))
                continue
            v = t - o.const if o.sign > 0 else E.const(o.const) - t
            s.axes[o.axis] = v
            full = o.const == (0 if o.sign > 0 else o.extent - 1)
            if not full:
                s.guards += _within(v, space[o.axis])
        return
    form = affine(i)
    if form.rest or not form.axes:
        s.pending.append((target, i))
        return
    if len(form.axes) == 1:
        ((a, k),) = form.axes.items()
        if a in s.axes:
            s.pending.append((target, i))
            return
        v = target - form.const if k > 0 else E.const(form.const) - target
        if abs(k) > 1:
            s.guards.append(
                E.apply("eq", E.apply("mod", v, E.const(abs(k))), E.const(0))
            )
            v = E.apply("floordiv", v, E.const(abs(k)))
        s.axes[a] = v
        s.guards += _within(v, space[a])
        return
    inner = digits(Affine(form.axes, 0, ()).expr(), space)
    if inner is not None and all(o.sign > 0 and o.axis not in s.axes for o in inner):
        # Part of a flattened axis: a number of several digits from an offset on.
        u = target - form.const
        s.guards += _within(u, math.prod(o.extent for o in inner))
        for t, o in zip(split(u, [o.extent for o in inner], ext), inner, strict=True):
            s.axes[o.axis] = t
        return
    free = [a for a, k in form.axes.items() if abs(k) == 1 and a not in s.axes]
    if free:
        a = max(free, key=lambda q: space[q])
        s.axes[a] = None
        s.later.append((target, a, form))
    else:
        s.pending.append((target, i))
