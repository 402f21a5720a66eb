"""Operations on whole arrays, as stages: what ``sd.Array`` and the functions of the
``sd`` namespace are made of.

Everything here is a map or one reduction over positional axes, so it fuses like an op.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import (
    AxisError,
    DTypeError,
    IndexRangeError,
    ReductionError,
    ShaderError,
    ShapeError,
)
from . import expr as E
from .expr import Expr
from .indexmap import Affine, merge, split
from .stage import MONOIDS, Stage, as_stage, make_reduce, map_stage, whole

Operand = Stage | Expr  # an array, or a number (constant or runtime scalar)


def integer(x: Any, what: str, error: type[ShaderError] = ShapeError) -> int:
    """A Python integer from anything that is one (NumPy's included)."""
    try:
        return operator.index(x)
    except TypeError:
        raise error(
            f"{what} is an integer, not {x!r}", where=E.user_location()
        ) from None


def sizes(shape: Any, what: str) -> tuple[int, ...]:
    """The sizes of a new array: one number or several, none below zero."""
    many = shape if isinstance(shape, (tuple, list, np.ndarray)) else (shape,)
    out = tuple(integer(n, f"a size of {what}") for n in many)
    if any(n < 0 for n in out):
        raise ShapeError(f"{what} of negative size {out}", where=E.user_location())
    return out


def normal_axis(axis: int, rank: int) -> int:
    """A possibly negative axis as a position."""
    axis = integer(axis, "an axis", AxisError)
    if not -rank <= axis < rank:
        raise AxisError(
            f"axis {axis} of an array with {rank} dimensions", where=E.user_location()
        )
    return axis % rank


def broadcast_shape(*shapes: Sequence[int]) -> tuple[int, ...]:
    """NumPy's rule."""
    rank = max((len(s) for s in shapes), default=0)
    out = [1] * rank
    for s in shapes:
        for k, n in enumerate(s):
            at = rank - len(s) + k
            if out[at] == 1:
                out[at] = n
            elif n not in (1, out[at]):
                raise ShapeError(
                    f"shapes {' and '.join(str(tuple(x)) for x in shapes)} do not "
                    "broadcast: "
                    f"axis {at} is {out[at]} and {n}",
                    where=E.user_location(),
                )
    return tuple(out)


def read(x: Operand, shape: Sequence[int]) -> Expr:
    """An operand over the axes of a shape that it broadcasts to."""
    if isinstance(x, Expr):
        return x
    first = len(shape) - len(x.shape)
    return E.load(
        x,
        [
            E.index(first + k) if n != 1 or shape[first + k] == 1 else E.const(0)
            for k, n in enumerate(x.shape)
        ],
    )


def _storage(xs: Sequence[Operand], body: Expr) -> str:
    floats = [x.dtype for x in xs if isinstance(x, Stage) and x.dtype in E.FLOATS]
    return (
        "f16"
        if body.dtype == "f32" and floats and all(d == "f16" for d in floats)
        else body.dtype
    )


def elementwise(name: str, *xs: Operand) -> Stage:
    """A primitive of broadcast arrays and numbers."""
    shape = broadcast_shape(*(x.shape for x in xs if isinstance(x, Stage)))
    body = E.apply(name, *(read(x, shape) for x in xs))
    dtype = name[3:] if name.startswith("to_") else _storage(xs, body)
    here = E.user_location()
    if body.kind == "apply":
        body.loc = here  # equal expressions are one: who wrote it last
    return map_stage(shape, body, name, dtype=dtype, loc=here)


def cast(x: Stage, dtype: str) -> Stage:
    """Another dtype; f16 rounds when it is stored."""
    body = E.cast(whole(x), dtype)
    if dtype == "f16" and x.dtype != "f16":
        # Rounded here too, where the result is used without being stored.
        body = E.apply("round_f16", body)
    return map_stage(
        x.ext, body, "cast", groups=x.groups, dtype=dtype, loc=E.user_location()
    )


def broadcast_to(x: Stage, shape: Sequence[int]) -> Stage:
    """The array stretched to a shape."""
    if broadcast_shape(x.shape, shape) != tuple(shape):
        raise ShapeError(
            f"shape {x.shape} does not broadcast to {tuple(shape)}",
            where=E.user_location(),
        )
    return map_stage(shape, read(x, shape), "broadcast", dtype=x.dtype)


def full(shape: Sequence[int], value: Expr, dtype: str) -> Stage:
    """An array of one value."""
    return map_stage(shape, E.cast(value, dtype), "full", dtype=dtype)


def arange(n: int, start: Expr, step: Expr, dtype: str) -> Stage:
    """``start + step·i``."""
    i: Expr = E.index(0)
    body = E.cast(start, dtype) + E.cast(step, dtype) * E.cast(i, dtype)
    return map_stage([n], body, "arange", dtype=dtype)


# ------------------------------------------------------------------ reductions


def _axes(axis: int | Sequence[int] | None, rank: int) -> list[int]:
    if axis is None:
        return list(range(rank))
    many = axis if isinstance(axis, (tuple, list)) else (axis,)
    chosen = [normal_axis(a, rank) for a in many]
    if len(set(chosen)) != len(chosen):
        raise AxisError(f"axis {axis} names an axis twice", where=E.user_location())
    return sorted(chosen)


def reduce(
    monoid: str,
    x: Stage,
    axis: int | Sequence[int] | None,
    keepdims: bool,
    condition: Stage | None = None,
    name: str | None = None,
) -> Stage:
    """Reduce over axes."""
    shape = x.shape if condition is None else broadcast_shape(x.shape, condition.shape)
    body = read(x, shape)
    if body.dtype == "bool":
        body = E.cast(body, "i32")
    axes = _axes(axis, len(shape))
    if monoid in ("max", "min") and any(shape[a] == 0 for a in axes):
        raise ReductionError(
            f"{monoid} over an axis of size 0 has no identity (shape {shape}, axis "
            f"{axis})",
            where=E.user_location(),
        )
    if condition is not None:
        identity = E.const(MONOIDS[monoid].identity[body.dtype], body.dtype)
        body = E.where(read(condition, shape), body, identity)
    kept = [a for a in range(len(shape)) if a not in axes]
    value = make_reduce(
        monoid, body, kept, axes, shape, name or monoid, loc=E.user_location()
    )
    return _keep(value, shape, kept, keepdims, name or monoid, _storage([x], value))


def _keep(
    value: Expr,
    shape: Sequence[int],
    kept: list[int],
    keepdims: bool,
    name: str,
    dtype: str,
) -> Stage:
    if keepdims:
        return map_stage(
            [n if a in kept else 1 for a, n in enumerate(shape)],
            value,
            name,
            dtype=dtype,
        )
    body = E.substitute(value, {a: E.index(i) for i, a in enumerate(kept)})
    return map_stage([shape[a] for a in kept], body, name, dtype=dtype)


def count(shape: Sequence[int], axis: int | Sequence[int] | None) -> int:
    """Elements that a reduction over these axes combines."""
    return math.prod(shape[a] for a in _axes(axis, len(shape)))


def arg_extreme(monoid: str, x: Stage, axis: int | None, keepdims: bool) -> Stage:
    """Index of the first greatest (least) element, or of the first NaN."""
    if axis is None:
        x, axis = reshape(x, (x.size,)), 0
    a = normal_axis(axis, len(x.shape))
    if x.shape[a] == 0:
        raise ReductionError(
            f"arg{monoid} over an axis of size 0", where=E.user_location()
        )
    kept = [k for k in range(len(x.shape)) if k != a]
    value = first_hit(monoid, read(x, x.shape), kept, a, x.shape, f"arg{monoid}")
    return _keep(value, x.shape, kept, keepdims, f"arg{monoid}", "i32")


def first_hit(
    monoid: str, body: Expr, kept: Sequence[int], axis: int, extents: Any, name: str
) -> Expr:
    """The least index whose element equals the row's extreme."""
    if body.dtype == "bool":
        body = E.cast(body, "i32")
    body = as_stage(body, extents, f"{name}_of")
    best = make_reduce(monoid, body, kept, [axis], extents, f"{name}_{monoid}")
    hit = E.apply("eq", body, best)
    if body.dtype == "f32":
        hit = E.apply("or", hit, E.apply("isnan", body))
    masked = E.where(hit, E.index(axis), E.const(2**31 - 1))
    return make_reduce("min", masked, kept, [axis], extents, name)


def cumsum(x: Stage, axis: int) -> Stage:
    """Running sum: y[i] = Σ over j ≤ i of x[j]."""
    a = normal_axis(axis, len(x.shape))
    j = len(x.shape)
    body = E.substitute(read(x, x.shape), {a: E.index(j)})
    value = running_sum(body, a, j, [*x.shape, x.shape[a]], "cumsum")
    return map_stage(
        x.shape, value, "cumsum", dtype=x.dtype if x.dtype != "bool" else "i32"
    )


def cumprod(x: Stage, axis: int) -> Stage:
    """Running product: y[i] = ∏ over j ≤ i of x[j]."""
    a = normal_axis(axis, len(x.shape))
    j = len(x.shape)
    body = E.substitute(read(x, x.shape), {a: E.index(j)})
    value = running("prod", body, a, j, [*x.shape, x.shape[a]], "cumprod")
    return map_stage(x.shape, value, "cumprod", dtype=x.dtype)


def running_sum(body: Expr, out: int, red: int, extents: Any, name: str) -> Expr:
    """Σ over ``red ≤ out`` of a body over the axis ``red``."""
    if body.dtype == "bool":
        body = E.cast(body, "i32")
    return running("sum", body, out, red, extents, name)


def running(
    monoid: str, body: Expr, out: int, red: int, extents: Any, name: str
) -> Expr:
    """A reduction over ``red ≤ out`` of a body over the axis ``red``."""
    identity = E.const(MONOIDS[monoid].identity[body.dtype], body.dtype)
    masked = E.where(E.apply("le", E.index(red), E.index(out)), body, identity)
    kept = [k for k in range(len(extents)) if k != red]
    return make_reduce(monoid, masked, kept, [red], extents, name)


# ------------------------------------------------------------------ products


def matmul(a: Stage, b: Stage) -> Stage:
    """``a @ b`` with NumPy's rules for ranks 1, 2 and batches."""
    if not a.shape or not b.shape:
        raise ShapeError(
            "@ needs arrays of at least one dimension", where=E.user_location()
        )
    left, right = a.shape, b.shape
    k, kb = left[-1], right[-2] if len(right) > 1 else right[0]
    if k != kb:
        raise ShapeError(
            f"{left} @ {right}: the last axis of the left side is {k}, the contracted "
            f"axis of the right is {kb}",
            where=E.user_location(),
        )
    batch = broadcast_shape(left[:-2], right[:-2])
    m = left[-2:-1]
    n = right[-1:] if len(right) > 1 else ()
    out = [*batch, *m, *n]
    red = len(out)

    def at(x: Stage, own: list[int]) -> Expr:
        lead = x.shape[: len(x.shape) - len(own)]
        first = len(batch) - len(lead)
        idx = [E.index(first + q) if s != 1 else E.const(0) for q, s in enumerate(lead)]
        return E.load(x, idx + [E.index(q) for q in own])

    row = [len(batch)] if m else []
    col = [len(batch) + len(m)] if n else []
    body = at(a, [*row, red]) * at(b, [red, *col])
    value = make_reduce(
        "sum", body, range(red), [red], [*out, k], "matmul", loc=E.user_location()
    )
    return map_stage(out, value, "matmul", dtype=_storage([a, b], value))


# ------------------------------------------------------------------ views


def reshape(x: Stage, shape: Sequence[int]) -> Stage:
    """The same elements in row-major order under another shape; one size may be -1."""
    new = [integer(n, "a size of reshape") for n in shape]
    if new.count(-1) > 1 or any(n < -1 for n in new):
        raise ShapeError(
            f"reshape to {tuple(new)}: one size may be -1, the others are not negative",
            where=E.user_location(),
        )
    if -1 in new:
        rest = math.prod(n for n in new if n != -1)
        new[new.index(-1)] = x.size // rest if rest else 0
    if math.prod(new) != x.size:
        raise ShapeError(
            f"cannot reshape {x.shape} ({x.size} elements) to {tuple(shape)} "
            f"({math.prod(new)})",
            where=E.user_location(),
        )
    if tuple(new) == x.shape:
        return x
    if x.size == 0:
        return full(new, E.const(0), x.dtype)
    cuts = sorted(_suffixes(x.shape) | _suffixes(new), reverse=True)
    if all(a % b == 0 for a, b in itertools.pairwise(cuts)):
        return _reshape_digits(x, new, cuts)
    flat = merge(range(len(new)), new)
    return map_stage(
        new, E.load(x, split(flat, x.shape, new)), "reshape", dtype=x.dtype
    )


def _suffixes(shape: Sequence[int]) -> set[int]:
    return {math.prod(shape[k:]) for k in range(len(shape) + 1)}


def _reshape_digits(x: Stage, new: Sequence[int], cuts: list[int]) -> Stage:
    """A reshape whose sizes share a common refinement: merged and split axes, no
    division.
    """
    ext = [a // b for a, b in itertools.pairwise(cuts)]

    def groups(shape: Sequence[int]) -> list[tuple[int, ...]]:
        out, top = [], math.prod(shape)
        for n in shape:
            low = top // n
            out.append(
                tuple(
                    k for k in range(len(ext)) if low <= cuts[k + 1] and cuts[k] <= top
                )
                if n > 1
                else ()
            )
            top = low
        return out

    idx = [merge(g, ext) for g in groups(x.shape)]
    return map_stage(
        ext, E.load(x, idx), "reshape", groups=tuple(groups(new)), dtype=x.dtype
    )


def transpose(x: Stage, order: Sequence[int] | None = None) -> Stage:
    """Permuted axes; reversed by default."""
    rank = len(x.shape)
    perm = (
        list(reversed(range(rank)))
        if order is None
        else [normal_axis(a, rank) for a in order]
    )
    if sorted(perm) != list(range(rank)):
        raise AxisError(
            f"{order} is no permutation of {rank} axes", where=E.user_location()
        )
    idx: list[Expr] = [E.const(0)] * rank
    for k, a in enumerate(perm):
        idx[a] = E.index(k)
    return map_stage(
        [x.shape[a] for a in perm], E.load(x, idx), "transpose", dtype=x.dtype
    )


def get(x: Stage, key: Any, arrays: Sequence[Stage]) -> Stage:
    """Basic indexing (ints, slices with steps, None, ...), or an integer array on the
    first axis.

    An integer array stands in ``key`` as ``("array", position in arrays)``.
    """
    items = list(key) if isinstance(key, tuple) and not _is_array(key) else [key]
    if items and _is_array(items[0]):
        ids = arrays[items[0][1]]
        if len(items) > 1:
            raise ShapeError(
                "an integer array indexes the first axis alone", where=E.user_location()
            )
        return take(x, ids)
    used = sum(1 for i in items if i is not None and i is not Ellipsis)
    if used > len(x.shape):
        raise AxisError(
            f"{used} indices for {len(x.shape)} dimensions {x.shape}",
            where=E.user_location(),
        )
    if items.count(Ellipsis) > 1:
        raise AxisError("an index has one '...' at most", where=E.user_location())
    if Ellipsis in items:
        at = items.index(Ellipsis)
        items[at : at + 1] = [slice(None)] * (len(x.shape) - used)
    else:
        items += [slice(None)] * (len(x.shape) - used)
    idx: list[Expr] = []
    shape: list[int] = []
    axis = 0
    for i in items:
        if i is None:
            shape.append(1)
            continue
        n = x.shape[axis]
        if isinstance(i, slice):
            if i.step == 0:
                raise IndexRangeError(
                    "a slice of step 0", where=E.user_location(), cure="use another"
                )
            start, stop, step = i.indices(n)
            length = len(range(start, stop, step))
            idx.append(
                Affine({len(shape): step}, start, ()).expr()
                if length != 1
                else E.const(start)
            )
            shape.append(length)
        else:
            if not -n <= i < n:
                raise IndexRangeError(
                    f"index {i} is out of range for axis {axis} of size {n}",
                    where=E.user_location(),
                )
            idx.append(E.const(int(i) % n))
        axis += 1
    if 0 in shape:
        return full(shape, E.const(0), x.dtype)
    return map_stage(
        shape, E.load(x, idx), "slice", dtype=x.dtype, loc=E.user_location()
    )


def _is_array(i: Any) -> bool:
    return isinstance(i, tuple) and len(i) == 2 and i[0] == "array"


def take(x: Stage, ids: Stage, axis: int = 0) -> Stage:
    """``x[ids]`` along an axis, whose place the axes of the ids take."""
    a = _indexed_axis(x, ids, axis)
    rank = len(ids.shape)
    here = [E.index(a + k) for k in range(rank)]
    picked = E.cast(E.load(ids, here), "i32")
    after = range(a + rank, len(x.shape) + rank - 1)
    idx = [*map(E.index, range(a)), picked, *map(E.index, after)]
    body = E.load(x, idx)
    body.loc = body.loc or E.user_location()
    shape = [*x.shape[:a], *ids.shape, *x.shape[a + 1 :]]
    return map_stage(shape, body, "take", dtype=x.dtype, loc=E.user_location())


def take_along_axis(x: Stage, ids: Stage, axis: int) -> Stage:
    """``y[…, i, …] = x[…, ids[…, i, …], …]``; the other axes broadcast."""
    a = _indexed_axis(x, ids, axis)
    if len(ids.shape) != len(x.shape):
        raise ShapeError(
            f"take_along_axis of {x.shape} with indices {ids.shape}: both need the "
            "same number of axes",
            where=E.user_location(),
        )
    rest = broadcast_shape(
        [1 if k == a else n for k, n in enumerate(x.shape)],
        [1 if k == a else n for k, n in enumerate(ids.shape)],
    )
    shape = [*rest[:a], ids.shape[a], *rest[a + 1 :]]
    idx = [E.index(k) if n != 1 else E.const(0) for k, n in enumerate(x.shape)]
    idx[a] = E.cast(read(ids, shape), "i32")
    body = E.load(x, idx)
    body.loc = body.loc or E.user_location()
    return map_stage(shape, body, "take", dtype=x.dtype, loc=E.user_location())


def _indexed_axis(x: Stage, ids: Stage, axis: int) -> int:
    """The axis that an index array picks from."""
    if ids.dtype not in E.INTS:
        raise DTypeError(
            f"an index array is {ids.dtype}; it must be i32 or u32",
            where=E.user_location(),
        )
    if not x.shape:
        raise AxisError(
            "an array without dimensions cannot be indexed", where=E.user_location()
        )
    return normal_axis(axis, len(x.shape))


def concatenate(xs: Sequence[Stage], axis: int = 0) -> Stage:
    """Arrays end to end along an axis."""
    if not xs:
        raise ShapeError("concatenate of no arrays", where=E.user_location())
    rank = len(xs[0].shape)
    a = normal_axis(axis, rank)
    for x in xs:
        if len(x.shape) != rank or any(
            p != q
            for k, (p, q) in enumerate(zip(x.shape, xs[0].shape, strict=True))
            if k != a
        ):
            raise ShapeError(
                f"concatenate of shapes {[x.shape for x in xs]} along axis {a}",
                where=E.user_location(),
            )
    shape = list(xs[0].shape)
    shape[a] = sum(x.shape[a] for x in xs)
    parts = [x for x in xs if x.shape[a]] or [xs[0]]
    bodies = []
    start = 0
    for x in parts:
        idx = [E.index(k) for k in range(rank)]
        idx[a] = Affine({a: 1}, -start, ()).expr() if shape[a] != 1 else E.const(0)
        start += x.shape[a]
        bodies.append((start, E.load(x, idx)))
    same = E.promote([b for _, b in bodies], "concatenate")
    result = same[-1]
    for (end, _), body in zip(reversed(bodies[:-1]), reversed(same[:-1]), strict=True):
        result = E.where(E.apply("lt", E.index(a), E.const(end)), body, result)
    return map_stage(
        shape, result, "concatenate", dtype=_storage(xs, result), loc=E.user_location()
    )


def stack(xs: Sequence[Stage], axis: int = 0) -> Stage:
    """Arrays along a new axis."""
    if not xs:
        raise ShapeError("stack of no arrays", where=E.user_location())
    a = normal_axis(axis, len(xs[0].shape) + 1)
    return concatenate([reshape(x, [*x.shape[:a], 1, *x.shape[a:]]) for x in xs], a)


def pad(x: Stage, widths: Sequence[tuple[int, int]], value: Expr) -> Stage:
    """Add elements of one value before and after along each axis."""
    if len(widths) != len(x.shape) or any(w < 0 for pair in widths for w in pair):
        raise ShapeError(
            f"pad widths {list(widths)} for shape {x.shape}", where=E.user_location()
        )
    shape = [lo + n + hi for n, (lo, hi) in zip(x.shape, widths, strict=True)]
    if 0 in x.shape:
        return full(shape, value, x.dtype)
    idx, guards = [], []
    for k, (n, (lo, hi)) in enumerate(zip(x.shape, widths, strict=True)):
        idx.append(Affine({k: 1}, -lo, ()).expr() if shape[k] != 1 else E.const(0))
        if lo:
            guards.append(E.apply("le", E.const(lo), E.index(k)))
        if hi:
            guards.append(E.apply("lt", E.index(k), E.const(lo + n)))
    inner = E.load(x, idx)
    c = E.all_of(guards)
    body = inner if c is None else E.where(c, inner, E.cast(value, inner.dtype))
    return map_stage(shape, body, "pad", dtype=x.dtype, loc=E.user_location())


def update_slice(base: Stage, new: Stage, axis: int, start: Expr) -> Stage:
    """``base`` with ``new`` from position ``start`` on along an axis."""
    rank = len(base.shape)
    a = normal_axis(axis, rank)
    if len(new.shape) != rank or any(
        p != q
        for k, (p, q) in enumerate(zip(base.shape, new.shape, strict=True))
        if k != a
    ):
        raise ShapeError(
            f"update_slice of {new.shape} into {base.shape} along axis {a}",
            where=E.user_location(),
        )
    if new.shape[a] > base.shape[a]:
        raise ShapeError(
            f"update_slice: {new.shape[a]} positions do not fit into axis {a} of size "
            f"{base.shape[a]}",
            where=E.user_location(),
        )
    start = E.cast(start, "i32")
    # As in XLA the start is moved so that the slice fits; a start from the host was
    # checked before.
    start = E.apply(
        "minimum", E.apply("maximum", start, 0), E.size(base.shape[a] - new.shape[a])
    )
    here = E.index(a)
    idx = [E.index(k) for k in range(rank)]
    idx[a] = here - start
    inside = E.apply(
        "and",
        E.apply("le", start, here),
        E.apply("lt", here, start + E.size(new.shape[a])),
    )
    body = E.where(
        inside,
        E.cast(E.load(new, idx), whole(base).dtype),
        E.load(base, [E.index(k) for k in range(rank)]),
    )
    return map_stage(
        base.shape, body, "update_slice", dtype=base.dtype, loc=E.user_location()
    )
