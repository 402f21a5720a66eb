"""Evaluate graphs in NumPy: in float64 the reference, in float32 the device ``cpu``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from . import expr as E
from .expr import Expr
from .indexmap import digits, interval
from .primitives import PRIMITIVES
from .stage import MONOIDS, Stage, factors, topo_stages

Array = Any  # numpy.ndarray of the dtype at hand
Noise = Callable[[str, Array, int], Array]
# Elements that one evaluation may hold; larger spaces are walked in pieces.
_PIECE = 1 << 24
_INTS = {"i32": np.int32, "u32": np.uint32, "bool": np.bool_}


def evaluate(
    outs: Sequence[Stage],
    inputs: Mapping[Stage, Array],
    dtype: str = "float64",
    scalars: Mapping[str, float] | None = None,
    noise: Noise | None = None,
) -> list[Array]:
    """Values of the outputs, given those of the input stages.

    ``noise`` changes each float that is computed: given the primitive (or ``"load"``),
    the value and how many such are added up.
    """
    values: dict[Stage, Array] = {}
    order = topo_stages(outs, stop=inputs)
    for s in order:
        if s in inputs:
            given = np.asarray(inputs[s])
            if s.dtype in E.FLOATS:
                given = given.astype(dtype)
            values[s] = given
        else:
            values[s] = evaluate_stage(s, values, dtype, scalars, noise)
    return [values[s] for s in outs]


def evaluate_stage(
    s: Stage,
    values: Mapping[Stage, Array],
    dtype: str = "float64",
    scalars: Mapping[str, float] | None = None,
    noise: Noise | None = None,
) -> Array:
    """One stage, given arrays of every stage that it loads."""
    assert s.body is not None
    with np.errstate(all="ignore"):
        ev = _Evaluator(s, values, np.dtype(dtype), scalars or {}, noise)
        r = ev.reduce() if s.kind == "reduce" else ev.full(s.body, range(len(s.ext)))
    r = np.ascontiguousarray(np.broadcast_to(r, s.ext)).reshape(s.shape)
    if s.dtype == "f16":  # what storing would keep
        r = r.astype(np.float16).astype(dtype)
    return r


def node_values(
    s: Stage,
    values: Mapping[Stage, Array],
    dtype: str = "float64",
    scalars: Mapping[str, float] | None = None,
) -> dict[Expr, Array]:
    """Every node of a stage's body, operands first; arrays broadcast over its space."""
    assert s.body is not None
    with np.errstate(all="ignore"):
        ev = _Evaluator(s, values, np.dtype(dtype), scalars or {})
        ev.value(s.body)
        return {n: ev.memo[n] for n in E.values(s.body)}


class _Evaluator:
    """Values of expressions over the space of one stage; every array has one dimension
    an axis.
    """

    def __init__(
        self,
        s: Stage,
        values: Mapping[Stage, Array],
        dtype: Any,
        scalars: Mapping[str, float],
        noise: Noise | None = None,
    ):
        self.noise = noise
        self.s, self.values, self.dtype, self.scalars = s, values, dtype, scalars
        self.space = list(s.space)
        self.ranges = [np.arange(n, dtype=np.int32) for n in self.space]
        self.memo: dict[Expr, Array] = {}
        self.intervals: dict[Expr, tuple[int, int]] = {}

    def numpy_type(self, dtype: str) -> Any:
        return _INTS.get(dtype, self.dtype)

    def value(self, root: Expr) -> Array:
        """An array that broadcasts over the current ranges."""
        for n in E.values(root):
            if n not in self.memo:
                v = self._node(n)
                if self.noise is not None and n.kind in ("apply", "load"):
                    name = n.data if n.kind == "apply" else "load"
                    v = self.noise(name, v, math.prod(self.s.rext))
                self.memo[n] = v
        return self.memo[root]

    def _node(self, n: Expr) -> Array:
        rank = len(self.space)
        if n.kind in ("const", "size"):
            return np.asarray(n.data, self.numpy_type(n.dtype)).reshape([1] * rank)
        if n.kind == "scalar":
            return np.asarray(self.scalars[n.data], self.numpy_type(n.dtype)).reshape(
                [1] * rank
            )
        if n.kind == "index":
            shape = [1] * rank
            shape[n.data] = len(self.ranges[n.data])
            return self.ranges[n.data].reshape(shape)
        if n.kind == "load":
            return self._load(n)
        r = PRIMITIVES[n.data].numpy(*(self.memo[x] for x in n.args))
        return np.asarray(r).astype(self.numpy_type(n.dtype), copy=False)

    def _load(self, n: Expr) -> Array:
        source = np.asarray(self.values[n.data])
        fast = self._view(n, source)
        if fast is not None:
            return fast
        rank = len(self.space)
        if source.size == 0:
            shape = [
                len(r) if n.free >> a & 1 else 1 for a, r in enumerate(self.ranges)
            ]
            return np.zeros(shape, source.dtype)
        idx = []
        for i, size in zip(n.args, source.shape, strict=True):
            v = self.value(i)
            low, high = interval(i, self.space, self.intervals)
            if low < 0 or high >= size:
                v = np.clip(v.astype(np.int64), 0, size - 1)
            idx.append(v)
        return source[tuple(idx)] if idx else source.reshape([1] * rank)

    def _view(self, n: Expr, source: Array) -> Array | None:
        """A load whose indices are digits of distinct axes is a reshaped and transposed
        view.
        """
        shape: list[int] = []
        axes: list[int] = []
        cut: list[slice] = []
        for i, size in zip(n.args, source.shape, strict=True):
            if i.kind in ("const", "size"):
                if not 0 <= i.data < size:
                    return None
                shape.append(size)
                axes.append(-1)
                cut.append(slice(i.data, i.data + 1))
                continue
            d = digits(i, self.space)
            if d is None:
                return None
            if math.prod(o.extent for o in d) == size and all(
                o.sign > 0 and o.const == 0 for o in d
            ):
                shape += [o.extent for o in d]
                cut += [slice(None)] * len(d)
            elif (
                len(d) == 1 and d[0].sign > 0 and 0 <= d[0].const <= size - d[0].extent
            ):
                shape.append(size)
                cut.append(slice(d[0].const, d[0].const + d[0].extent))
            else:
                return None
            axes += [o.axis for o in d]
        real = [a for a in axes if a >= 0]
        if len(set(real)) != len(real):
            return None
        view = source.reshape(shape)[tuple(cut)]
        view = view.reshape(
            [m for m, a in zip(view.shape, axes, strict=True) if a >= 0]
        )
        order = sorted(range(len(real)), key=lambda k: real[k])
        view = view.transpose(order)
        full = [1] * len(self.space)
        for k in order:
            full[real[k]] = self.space[real[k]]
        view = view.reshape(full)
        for a in real:  # a piece of the space
            if len(self.ranges[a]) != self.space[a]:
                r = self.ranges[a]
                first = int(r[0]) if len(r) else 0
                view = view[(slice(None),) * a + (slice(first, first + len(r)),)]
        return view

    # -------------------------------------------------------------- whole spaces

    def full(self, body: Expr, axes: Sequence[int]) -> Array:
        """A map over all its axes, in pieces along the first when that is large."""
        total = math.prod(self.space)
        if total <= _PIECE or not self.space or self.space[0] <= 1:
            return self._dense(body)
        step = max(1, _PIECE * self.space[0] // total)
        whole = self.ranges[0]
        out = None
        for start in range(0, self.space[0], step):
            self.ranges[0], self.memo = whole[start : start + step], {}
            piece = self._dense(body)
            if out is None:
                out = np.empty(self.space, piece.dtype)
            out[start : start + step] = piece
        self.ranges[0], self.memo = whole, {}
        return out

    def _dense(self, body: Expr) -> Array:
        return np.broadcast_to(self.value(body), [len(r) for r in self.ranges])

    def reduce(self) -> Array:
        """The stage's reduction."""
        s = self.s
        body = s.body
        assert body is not None and s.monoid is not None
        if 0 in s.rext:
            identity = MONOIDS[s.monoid].identity[body.dtype]
            return np.full(s.ext, identity, self.numpy_type(body.dtype))
        if s.monoid == "sum":
            for special in (self._cumulative, self._scatter, self._einsum):
                r = special(body)
                if r is not None:
                    return r
        return self._pieces(body)

    def _pieces(self, body: Expr) -> Array:
        axes = tuple(range(len(self.s.ext), len(self.space)))
        combine: Any = {
            "sum": np.add,
            "prod": np.multiply,
            "max": np.maximum,
            "min": np.minimum,
        }[self.s.monoid or "sum"]
        kind = self.numpy_type(body.dtype)
        total = math.prod(self.space)
        if total <= _PIECE:
            return combine.reduce(self._dense(body), axis=axes, dtype=kind)
        a = max(range(len(self.space)), key=lambda q: self.space[q])
        step = max(1, _PIECE * self.space[a] // total)
        whole = self.ranges[a]
        parts = []
        for start in range(0, self.space[a], step):
            self.ranges[a], self.memo = whole[start : start + step], {}
            parts.append(combine.reduce(self._dense(body), axis=axes, dtype=kind))
        self.ranges[a], self.memo = whole, {}
        if a < len(self.s.ext):
            return np.concatenate(parts, axis=a)
        return combine.reduce(np.stack(parts), axis=0, dtype=kind)

    def _einsum(self, body: Expr) -> Array | None:
        """A sum of a product whose factors have different axes is a contraction."""
        if body.dtype != "f32":
            return None
        number, fs, guards = factors(body)
        groups: list[tuple[int, Expr]] = []
        for f in fs:
            for k, (mask, g) in enumerate(groups):
                if not (f.free & ~mask and mask & ~f.free):
                    groups[k] = (mask | f.free, g * f)
                    break
            else:
                groups.append((f.free, f))
        for c in guards:
            k = min(
                range(len(groups)),
                key=lambda q: (c.free & ~groups[q][0]).bit_count(),
                default=-1,
            )
            if k < 0:
                return None
            groups[k] = (groups[k][0] | c.free, E.guard([c], groups[k][1]))
        if len(groups) < 2:
            return None

        def count(mask: int) -> int:
            return math.prod(self.space[a] for a in E.bits(mask))

        if math.prod(self.space) <= 2 * max(count(m) for m, _ in groups):
            return None
        operands: list[Any] = []
        for mask, f in groups:
            v = self.value(f)
            axes = list(E.bits(mask))
            operands += [
                np.broadcast_to(
                    v,
                    [self.space[a] if a in axes else 1 for a in range(len(self.space))],
                )
            ]
            operands[-1] = operands[-1].reshape([self.space[a] for a in axes])
            operands.append(axes)
        covered = {a for m, _ in groups for a in E.bits(m)}
        out = [a for a in range(len(self.s.ext)) if a in covered]
        r = np.einsum(*operands, out, optimize=True)
        scale = number * math.prod(
            self.space[a]
            for a in range(len(self.s.ext), len(self.space))
            if a not in covered
        )
        if scale != 1.0:
            r = r * np.asarray(scale, self.dtype)
        shape = [self.space[a] if a in covered else 1 for a in range(len(self.s.ext))]
        return np.broadcast_to(r.reshape(shape), self.s.ext)

    def _scatter(self, body: Expr) -> Array | None:
        """Σ over t of where(v == ids[t], g, 0) adds each g at its place: the adjoint of
        a gather.
        """
        if not (
            body.kind == "apply"
            and body.data == "where"
            and body.args[2].kind == "const"
        ):
            return None
        number, fs, guards = factors(body)
        no = len(self.s.ext)
        for c in guards:
            if c.data != "eq" or c.args[0].dtype not in ("i32", "u32"):
                continue
            for target, ids in (c.args, c.args[::-1]):
                if (
                    target.kind == "index"
                    and target.data < no
                    and not ids.free >> target.data & 1
                ):
                    v = target.data
                    if all(not g.free >> v & 1 for g in guards if g is not c) and all(
                        not f.free >> v & 1 for f in fs
                    ):
                        others = [g for g in guards if g is not c]
                        return self._add_at(body, number, fs, others, v, ids)
        return None

    def _add_at(
        self,
        body: Expr,
        number: float,
        fs: list[Expr],
        guards: list[Expr],
        v: int,
        ids: Expr,
    ) -> Array | None:
        no = len(self.s.ext)
        value = E.const(number) if not fs else fs[0]
        for f in fs[1:]:
            value = value * f
        if fs and number != 1.0:
            value = value * number
        value = E.cast(E.guard(guards, value), body.dtype)
        shape = [n for a, n in enumerate(self.space) if a != v]
        if math.prod(shape) > 8 * _PIECE:
            return None
        values = np.broadcast_to(
            self.value(value), [1 if a == v else n for a, n in enumerate(self.space)]
        )
        where = np.broadcast_to(self.value(ids), values.shape)
        out = np.zeros([self.space[a] for a in range(no)], values.dtype)
        valid = (where >= 0) & (where < self.space[v])
        index = []
        for a in range(no):
            if a == v:
                index.append(np.where(valid, where, 0))
            else:
                grid = [1] * len(self.space)
                grid[a] = self.space[a]
                index.append(np.arange(self.space[a]).reshape(grid))
        np.add.at(
            out, tuple(index), np.where(valid, values, np.zeros((), values.dtype))
        )
        return out

    def _cumulative(self, body: Expr) -> Array | None:
        """Σ over j ≤ i of x[j] is a running sum."""
        no = len(self.s.ext)
        if len(self.s.rext) != 1 or not (body.kind == "apply" and body.data == "where"):
            return None
        c, x, zero = body.args
        if zero.kind != "const" or zero.data != 0 or c.data != "le":
            return None
        j, i = c.args
        if not (
            j.kind == "index" and i.kind == "index" and j.data == no and i.data < no
        ):
            return None
        if self.space[i.data] != self.space[no] or x.free >> i.data & 1:
            return None
        values = np.broadcast_to(
            self.value(x), [1 if a == i.data else n for a, n in enumerate(self.space)]
        )
        running = np.cumsum(values, axis=no, dtype=values.dtype)
        return np.moveaxis(running, no, i.data).squeeze(i.data + 1)


def index_range(
    index: Expr,
    guards: Sequence[Expr],
    space: Sequence[int],
    values: Mapping[Stage, Array],
    scalars: Mapping[str, float] | None = None,
) -> tuple[int, int]:
    """Least and greatest value of an index wherever all guards hold; (0, -1) turned to
    (0, 0) where none do.
    """
    fake = Stage("map", space, (), None, index, None, "i32", "check")
    ev = _Evaluator(fake, values, np.dtype(np.float32), scalars or {})
    free = index.free
    c = E.all_of(guards)
    with np.errstate(all="ignore"):
        v = ev.value(index)
        if c is not None:
            free |= c.free
            v, holds = np.broadcast_arrays(v, ev.value(c))
            v = v[holds]
    return (int(v.min()), int(v.max())) if v.size else (0, 0)
