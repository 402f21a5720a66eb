"""Stages: the nodes of a graph. A stage is an array that is given, a map of its axes,
or one reduction of a map.

Equal stages are one object, so what two ops have in common is computed once.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from . import expr as E
from .expr import Expr
from .indexmap import merge, row_major, split

Groups = tuple[tuple[int, ...], ...]
ITEMSIZE = {"f32": 4, "i32": 4, "u32": 4, "bool": 4, "f16": 2}


@dataclass(frozen=True)
class Monoid:
    """An associative, commutative combination with its identity for each dtype."""

    name: str
    primitive: str  # the binary primitive that combines
    identity: dict[str, float | int | bool]


_INT_MIN, _INT_MAX, _INF = -(2**31), 2**31 - 1, math.inf
MONOIDS = {
    "sum": Monoid("sum", "add", {"f32": 0.0, "i32": 0, "u32": 0}),
    "prod": Monoid("prod", "mul", {"f32": 1.0, "i32": 1, "u32": 1}),
    "max": Monoid("max", "maximum", {"f32": -_INF, "i32": _INT_MIN, "u32": 0}),
    "min": Monoid("min", "minimum", {"f32": _INF, "i32": _INT_MAX, "u32": 2**32 - 1}),
}

_ids = itertools.count()
_table: weakref.WeakValueDictionary[Any, Stage] = weakref.WeakValueDictionary()


class Stage:
    """One array of the graph.

    ``ext`` are the extents of the output axes, ``rext`` of the reduced ones; the body's
    axes are positions in ``ext + rext``. ``groups`` says which output axes merge into
    each dimension of ``shape``.
    """

    __slots__ = (
        "__weakref__",
        "body",
        "dtype",
        "ext",
        "groups",
        "id",
        "keep",
        "kind",
        "loads",
        "loc",
        "monoid",
        "name",
        "rext",
        "shape",
        "size",
        "source",
        "strides",
    )

    def __init__(
        self,
        kind: str,
        ext: Sequence[int],
        rext: Sequence[int],
        monoid: str | None,
        body: Expr | None,
        groups: Groups | None,
        dtype: str,
        name: str,
        keep: str | None = None,
    ):
        self.kind, self.ext, self.rext = kind, tuple(ext), tuple(rext)
        self.monoid, self.body, self.dtype = monoid, body, dtype
        self.groups: Groups = (
            tuple((i,) for i in range(len(ext))) if groups is None else groups
        )
        self.shape = tuple(math.prod(self.ext[a] for a in g) for g in self.groups)
        self.strides = row_major(self.shape)
        self.size = math.prod(self.shape)
        self.name, self.loc, self.id = name, None, next(_ids)
        # "store" or "inline" where the user decides, else None: the partition does.
        self.keep = keep
        # What an input stands for: set by whoever makes it (a concrete array, a
        # placeholder's position).
        self.source: Any = None
        self.loads: list[Expr] = E.loads(body) if body is not None else []

    loc: str | None

    @property
    def nbytes(self) -> int:
        """Bytes of its memory."""
        return self.size * ITEMSIZE[self.dtype]

    @property
    def space(self) -> tuple[int, ...]:
        """Extents of all the body's axes."""
        return self.ext + self.rext

    def __repr__(self) -> str:
        red = f"/{list(self.rext)}" if self.rext else ""
        return (
            f"{self.name}#{self.id}:{self.monoid or self.kind}{list(self.shape)}{red}"
        )


def input_stage(
    shape: Sequence[int], dtype: str, name: str, source: Any = None
) -> Stage:
    """An array that is given. Each call makes a new one."""
    stage = Stage("input", shape, (), None, None, None, str(dtype), name)
    stage.source = source
    return stage


def _intern(
    kind: str,
    ext: Sequence[int],
    rext: Sequence[int],
    monoid: str | None,
    body: Expr,
    groups: Groups | None,
    dtype: str,
    name: str,
    loc: str | None,
    keep: str | None = None,
) -> Stage:
    key = (kind, tuple(ext), tuple(rext), monoid, body, groups, dtype, keep)
    stage = _table.get(key)
    if stage is None:
        stage = Stage(kind, ext, rext, monoid, body, groups, dtype, name, keep)
        _table[key] = stage
    # Equal stages are one; an error belongs to the line of who wrote it last.
    stage.loc = loc or stage.loc
    return stage


def map_stage(
    ext: Sequence[int],
    body: Expr,
    name: str = "map",
    *,
    groups: Groups | None = None,
    dtype: str | None = None,
    loc: str | None = None,
    keep: str | None = None,
) -> Stage:
    """An elementwise stage. A body that loads a whole stage unchanged is that stage.

    ``keep`` is the user's word on whether it is stored; see :func:`kept`.
    """
    dtype = str(dtype or body.dtype)
    body = _drop_ones(body, ext)
    if (
        groups is not None
        and all(g == (i,) for i, g in enumerate(groups))
        and len(groups) == len(ext)
    ):
        groups = None
    if keep is None and body.kind == "load" and body.data.dtype == dtype:
        source: Stage = body.data
        own = groups or tuple((i,) for i in range(len(ext)))
        if source.shape == tuple(math.prod(ext[a] for a in g) for g in own) and all(
            i is merge(g, ext) for i, g in zip(body.args, own, strict=True)
        ):
            return source
    return _intern("map", ext, (), None, body, groups, dtype, name, loc, keep)


def kept(s: Stage, keep: str) -> Stage:
    """The same array under the user's word to the partition: ``"store"`` writes it to
    memory once, ``"inline"`` computes it again wherever it is read.

    An input is stored already. A reduction cannot be computed inside of its readers, so
    ``"inline"`` leaves it to the partition.
    """
    if s.kind == "map":
        assert s.body is not None
        body, loc = s.body, s.loc
    elif s.kind == "reduce" and keep == "store":
        body, loc = whole(s), s.loc
    else:
        return s
    return map_stage(
        s.ext, body, s.name, groups=s.groups, dtype=s.dtype, loc=loc, keep=keep
    )


def _drop_ones(body: Expr, extents: Any) -> Expr:
    """An axis of size 1 has the one position 0; bodies never mention it."""
    ones = {a: E.const(0) for a in E.bits(body.free) if extents[a] == 1}
    return E.substitute(body, ones) if ones else body


def whole(stage: Stage) -> Expr:
    """The load of a stage at its own axes."""
    return E.load(stage, [merge(g, stage.ext) for g in stage.groups])


# ------------------------------------------------------------------ normal form of sums


# A product is taken apart into this many factors; a power of a power of … stays whole.
_MOST_FACTORS = 256


def factors(body: Expr) -> tuple[float, list[Expr], list[Expr]]:
    """``body`` as number · ∏ factors where all guards hold and 0 elsewhere."""
    out: list[Expr] = []
    guards: list[Expr] = []
    sign = 1.0
    stack = [body]
    while stack:
        n = stack.pop()
        name = n.data if n.kind == "apply" else None
        if name == "where" and n.args[2].kind == "const" and n.args[2].data == 0:
            guards.append(n.args[0])
            stack.append(n.args[1])
        elif name == "mulz" and n.args[0].free == n.args[1].free:
            # Nothing to hoist: a zero that wins over an infinite partial stays one.
            out.append(n)
        elif name in ("mul", "mulz") and len(out) + len(stack) < _MOST_FACTORS:
            stack += [n.args[1], n.args[0]]
        elif name == "neg":
            sign = -sign
            stack.append(n.args[0])
        elif name == "add" and n.args[0] is n.args[1] and n.dtype == "f32":
            # What the derivative of a square gives.
            sign *= 2.0
            stack.append(n.args[0])
        elif name == "div":
            stack.append(n.args[0])
            out.append(E.apply("div", 1.0, n.args[1]))
        elif n.kind == "const" and n.dtype == "f32" and math.isfinite(n.data):
            sign *= n.data
        else:
            out.append(n)
    return sign, out, _conjuncts(guards)


def _conjuncts(guards: Iterable[Expr]) -> list[Expr]:
    seen: dict[Expr, None] = {}
    stack = list(guards)[::-1]
    while stack:
        g = stack.pop()
        if g in seen:
            continue
        seen[g] = None
        if g.kind == "apply" and g.data == "and":
            stack += [g.args[1], g.args[0]]
    return [g for g in seen if not (g.kind == "apply" and g.data == "and")]


def product(fs: Sequence[Expr]) -> Expr:
    """∏ of factors; quotients are put back as divisions."""
    top = [f for f in fs if not _is_reciprocal(f)]
    below = [f.args[1] for f in fs if _is_reciprocal(f)]
    result: Expr | None = None
    for f in top:
        result = f if result is None else result * f
    if result is None:
        result = E.const(1.0)
    for f in below:
        result = result / f
    return result


def _is_reciprocal(f: Expr) -> bool:
    return (
        f.kind == "apply"
        and f.data == "div"
        and f.args[0].kind == "const"
        and f.args[0].data == 1.0
    )


Space = Callable[[int], int]


def make_reduce(
    monoid: str,
    body: Expr,
    out_axes: Sequence[int],
    red_axes: Sequence[int],
    extents: Any,
    name: str = "sum",
    *,
    loc: str | None = None,
) -> Expr:
    """Reduce ``body`` over ``red_axes``; the result is a load of the new stage, over
    the caller's axes.

    Sums come out in normal form: what lacks the reduced axes is hoisted out, an axis
    that nothing depends on becomes a factor of its extent. A reduction of a reduction
    of the same kind is one reduction.
    """
    if any(extents[a] == 0 for a in red_axes):
        return E.const(MONOIDS[monoid].identity[body.dtype], body.dtype)
    body = _drop_ones(body, extents)
    red = [a for a in red_axes if extents[a] != 1]
    outer: list[Expr] = []
    outer_guards: list[Expr] = []
    sign = 1.0
    if monoid == "sum" and body.dtype == "f32":
        mask = sum(1 << a for a in red)
        number, fs, guards = factors(body)
        outer = [f for f in fs if not f.free & mask]
        outer_guards = [g for g in guards if not g.free & mask]
        if outer or outer_guards or number != 1.0:
            inner = [f for f in fs if f.free & mask]
            sign = number
            body = E.guard([g for g in guards if g.free & mask], product(inner))
    absent = [a for a in red if not body.free >> a & 1]
    if absent and monoid == "sum":
        for a in absent:
            factor = E.cast(E.size(extents[a]), body.dtype)
            if body.dtype == "f32":
                outer.append(factor)
            else:
                body = body * factor
        red = [a for a in red if a not in absent]
    elif absent and monoid in ("max", "min") and all(extents[a] > 0 for a in absent):
        red = [a for a in red if a not in absent]
    if not red:
        value = body
    else:
        if monoid in ("max", "min"):
            body = as_stage(body, extents, f"{name}_of", loc=loc)
        value = _reduce(monoid, body, out_axes, red, extents, name, loc)
    if outer or sign != 1.0:
        value = product([value, *outer])
        if sign != 1.0:
            value = -value if sign == -1.0 else value * sign
    return E.guard(outer_guards, value)


#: Operations whose result is one of their operands, but for its sign.
_PICKS = frozenset({"where", "maximum", "minimum", "neg", "abs", "stop_gradient"})


def as_stage(body: Expr, extents: Any, name: str, *, loc: str | None = None) -> Expr:
    """What is computed as a map of its own, which is read instead.

    An extreme is compared with what it was taken of, in its derivative or for its
    position. As a stage this has a name: whoever plans can see to it that it is
    computed once.
    """
    if body.dtype not in E.FLOATS or not any(
        n.kind == "apply" and n.dtype in E.FLOATS and n.data not in _PICKS
        for n in E.values(body)
    ):
        return body
    body = _drop_ones(body, extents)
    axes = [a for a in range(body.free.bit_length()) if body.free >> a & 1]
    own = E.substitute(body, {a: E.index(k) for k, a in enumerate(axes)})
    x = map_stage([extents[a] for a in axes], own, name, loc=loc)
    return E.load(x, [E.index(a) for a in axes])


def _reduce(
    monoid: str,
    body: Expr,
    out_axes: Sequence[int],
    red: Sequence[int],
    extents: Any,
    name: str,
    loc: str | None,
) -> Expr:
    out = [a for a in out_axes if body.free >> a & 1 and a not in red]
    merged = _merge_reductions(monoid, body, out, red, extents)
    if merged is not None:
        body, red_ext, out = merged
        axes = {a: E.index(i) for i, a in enumerate(out)}
        axes.update({a: E.index(len(out) + i) for i, (a, _) in enumerate(red_ext)})
        rext = [n for _, n in red_ext]
    else:
        axes = {a: E.index(i) for i, a in enumerate([*out, *red])}
        rext = [extents[a] for a in red]
    stage = _intern(
        "reduce",
        [extents[a] for a in out],
        rext,
        monoid,
        E.substitute(body, axes),
        None,
        body.dtype,
        name,
        loc or E.user_location(3),
    )
    return E.load(stage, [E.index(a) for a in out])


def _merge_reductions(
    monoid: str, body: Expr, out: Sequence[int], red: Sequence[int], extents: Any
) -> tuple[Expr, list[tuple[int, int]], list[int]] | None:
    """sum over i of (sum over j of x) is the sum over both, when the inner one is read
    at plain axes.
    """
    if body.kind != "load" or body.data.kind != "reduce" or body.data.monoid != monoid:
        return None
    inner: Stage = body.data
    if (
        inner.body is None
        or any(i.kind != "index" for i in body.args)
        or len({i.data for i in body.args}) != len(body.args)
    ):
        return None
    if len(inner.shape) != len(inner.ext):
        return None
    base = max([*out, *red, *(i.data for i in body.args)], default=0) + 1
    axes = dict(enumerate(body.args))
    axes.update({len(inner.ext) + j: E.index(base + j) for j in range(len(inner.rext))})
    joined = [(a, extents[a]) for a in red] + [
        (base + j, n) for j, n in enumerate(inner.rext)
    ]
    return E.substitute(inner.body, axes), joined, list(out)


# ------------------------------------------------------------------ graphs


def topo_stages(outs: Iterable[Stage], stop: Iterable[Stage] = ()) -> list[Stage]:
    """Stages that the outputs need, producers first. ``stop`` are taken as given."""
    given = set(stop)
    order: list[Stage] = []
    seen: set[Stage] = set()
    stack: list[tuple[Stage, bool]] = [(s, False) for s in reversed(list(outs))]
    while stack:
        s, done = stack.pop()
        if done:
            order.append(s)
            continue
        if s in seen:
            continue
        seen.add(s)
        stack.append((s, True))
        if s not in given:
            stack.extend(
                (n.data, False) for n in reversed(s.loads) if n.data not in seen
            )
    return order


def inline_load(node: Expr, args: Sequence[Expr], extents: Any) -> Expr:
    """The body of the loaded map, at the load's indices (split into the digits of
    merged axes).
    """
    stage: Stage = node.data
    assert stage.body is not None
    axes: dict[int, Expr] = {}
    for i, g in zip(args, stage.groups, strict=True):
        for a, d in zip(g, split(i, [stage.ext[q] for q in g], extents), strict=True):
            axes[a] = d
    return E.substitute(stage.body, axes)


def reduce_stage(
    ext: Sequence[int],
    rext: Sequence[int],
    monoid: str,
    body: Expr,
    name: str,
    loc: str | None,
) -> Stage:
    """A reduction as it stands: axes of the body are positions in ``ext + rext``."""
    return _intern("reduce", ext, rext, monoid, body, None, body.dtype, name, loc)


def retarget(s: Stage, new: dict[Stage, Stage]) -> Stage:
    """The same stage, loading ``new[t]`` in place of t."""
    if s.kind == "given":  # made for one plan alone, whose graph this is
        s.loads = [E.load(new.get(n.data, n.data), n.args) for n in s.loads]
        return s
    if s.body is None or all(new.get(n.data, n.data) is n.data for n in s.loads):
        return s

    def leaf(n: Expr, args: tuple[Expr, ...]) -> Expr:
        if n.kind == "load":
            return _reload(n, new.get(n.data, n.data), args)
        return E.rebuild(n, args) if args else n

    return _intern(
        s.kind,
        s.ext,
        s.rext,
        s.monoid,
        E.rewrite(s.body, leaf),
        s.groups,
        s.dtype,
        s.name,
        s.loc,
        s.keep,
    )


def _reload(n: Expr, stage: Stage, args: Sequence[Expr]) -> Expr:
    node = E.load(stage, args)
    node.loc, node.label = node.loc or n.loc, node.label or n.label
    return node


def rebind(outs: Sequence[Stage], given: dict[Stage, Stage]) -> list[Stage]:
    """The same graph with some stages replaced by others of equal shape."""
    new: dict[Stage, Stage] = dict(given)
    for s in topo_stages(outs, stop=given):
        if s not in new:
            new[s] = retarget(s, new)
    return [new[s] for s in outs]
