"""Members: the stages that kernels are made of, with maps inlined, and what kind of
work each is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..ir import expr as E
from ..ir.expr import Expr
from ..ir.indexmap import Digit, affine, digits, split
from ..ir.stage import Stage, factors, inline_load, product
from .scan_form import scan_parts


@dataclass(eq=False)
class Member:
    """A stage that a kernel computes.

    ``body`` loads only inputs and other members. ``out`` and ``red`` are the stage's
    own axes of extent other than 1; ``role`` is ``map``, ``row``, ``column``,
    ``contract``, ``scatter`` or ``scan``.
    """

    stage: Stage
    body: Expr
    role: str
    out: tuple[int, ...]
    red: tuple[int, ...]
    loads: tuple[Expr, ...]

    @property
    def space(self) -> tuple[int, ...]:
        """Extents of all the stage's axes."""
        return self.stage.space

    @property
    def axes(self) -> tuple[int, ...]:
        """Own axes that have more than one position."""
        return self.out + self.red

    def __repr__(self) -> str:
        return f"{self.role}:{self.stage!r}"


def make_member(stage: Stage, body: Expr) -> Member:
    """Look at a stage whose maps are inlined and say what kind of work it is."""
    n = len(stage.ext)
    out = tuple(a for a in range(n) if stage.space[a] != 1)
    red = tuple(a for a in range(n, len(stage.space)) if stage.space[a] != 1)
    role = "map" if stage.kind == "map" else classify(stage, body)
    return Member(stage, body, role, out, red, tuple(E.loads(body)))


def classify(stage: Stage, body: Expr) -> str:
    """Contract, scatter, scan, row or column, by structure."""
    if stage.monoid == "sum":
        if scan_parts(stage, body) is not None:
            return "scan"
        if contract_parts(stage, body) is not None:
            return "contract"
        if scatter_parts(stage, body) is not None:
            return "scatter"
    if not stage.ext or all(n == 1 for n in stage.ext):
        return "row"
    # Which axis has stride 1 in memory: a reduced one makes a row, an output one makes
    # a column.
    weight = {True: 0, False: 0}
    no = len(stage.ext)
    for n in E.loads(body):
        if not n.args:
            continue
        for a, k in affine(n.args[-1]).axes.items():
            if abs(k) == 1:
                weight[a >= no] += n.free.bit_count()
    return "row" if weight[True] >= weight[False] else "column"


# ------------------------------------------------------------------ contractions


@dataclass
class ContractParts:
    """``number · Σ_k left(batch, m, k) · right(batch, n, k)``; axes are the stage's
    own.
    """

    number: float
    left: Expr
    right: Expr
    batch: tuple[int, ...]
    m: tuple[int, ...]
    n: tuple[int, ...]
    k: tuple[int, ...]


def contract_parts(stage: Stage, body: Expr) -> ContractParts | None:
    """A sum of a product whose factors fall into two groups by their output axes."""
    if stage.monoid != "sum" or stage.dtype not in E.FLOATS:
        return None
    no = len(stage.ext)
    out_mask = sum(1 << a for a in range(no) if stage.ext[a] != 1)
    red = tuple(a for a in range(no, len(stage.space)) if stage.space[a] != 1)
    number, fs, guards = factors(body)
    big = [f for f in fs if f.free & out_mask]
    if len(big) < 2:
        return None
    batch = out_mask
    for f in big:
        batch &= f.free
    groups: list[
        tuple[int, list[Expr]]
    ] = []  # factors joined while their output axes meet
    for f in big:
        mask = f.free & out_mask & ~batch
        members = [f]
        for g in [g for g in groups if g[0] & mask]:
            groups.remove(g)
            mask |= g[0]
            members = g[1] + members
        groups.append((mask, members))
    sided = [g for g in groups if g[0]]
    if len(sided) < 2:
        return None
    left_mask, left = sided[0]
    right_mask = 0
    right: list[Expr] = []
    for mask, members in sided[1:]:
        right_mask |= mask
        right = right + members
    shared = [f for f in fs if not f.free & out_mask] + [
        f for mask, ms in groups if not mask for f in ms
    ]
    left_guards, right_guards = [], []
    for c in guards:
        mask = c.free & out_mask & ~batch
        if not mask & ~left_mask:
            left_guards.append(c)
        elif not mask & ~right_mask:
            right_guards.append(c)
        else:
            return None  # a guard that needs both sides, such as a causal mask
    return ContractParts(
        number,
        E.guard(left_guards, product(left + shared)),
        E.guard(right_guards, product(right)),
        tuple(E.bits(batch)),
        tuple(E.bits(left_mask)),
        tuple(E.bits(right_mask)),
        red,
    )


# ------------------------------------------------------------------ the adjoint of a
# gather


@dataclass
class ScatterParts:
    """``Σ_t where(v == ids(t), value, 0)``: ``axis`` is v, an output axis that only the
    equation mentions.
    """

    axis: int
    ids: Expr
    value: Expr


def scatter_parts(stage: Stage, body: Expr) -> ScatterParts | None:
    """A sum whose terms go where an index says."""
    if stage.monoid != "sum" or not (
        body.kind == "apply" and body.data in ("where", "mul", "mulz", "neg", "div")
    ):
        return None
    no = len(stage.ext)
    number, fs, guards = factors(body)
    for c in guards:
        if c.kind != "apply" or c.data != "eq" or c.args[0].dtype not in E.INTS:
            continue
        for target, ids in (c.args, c.args[::-1]):
            if (
                target.kind != "index"
                or target.data >= no
                or ids.free >> target.data & 1
            ):
                continue
            if not any(n.kind == "load" for n in E.topo(ids)):
                continue
            v = target.data
            rest = [g for g in guards if g is not c]
            if any(x.free >> v & 1 for x in (*rest, *fs)):
                continue
            if ids.free & ((1 << no) - 1):
                # Places that differ along an output axis: not one order for all.
                continue
            value = E.guard(
                rest, product([*fs, *([E.const(number)] if number != 1.0 else [])])
            )
            return ScatterParts(v, ids, E.cast(value, body.dtype))
    return None


# ------------------------------------------------------------------ how loads walk


def anchor_axes(node: Expr, space: Sequence[int]) -> list[int] | None:
    """For each of the loaded stage's own axes (of extent other than 1), the reader's
    axis; None unless all are plain.
    """
    stage: Stage = node.data
    axis: dict[int, int] = {}
    for i, g in zip(node.args, stage.groups, strict=True):
        live = [a for a in g if stage.ext[a] != 1]
        if not live:
            continue
        for a, d in zip(
            live, split(i, [stage.ext[a] for a in live], space), strict=True
        ):
            if d.kind != "index" or space[d.data] != stage.ext[a]:
                return None
            axis[a] = d.data
    if len(set(axis.values())) != len(axis):
        return None
    return [axis[a] for a in sorted(axis)]


def digit_axes(node: Expr, space: Sequence[int]) -> list[int] | None:
    """The reader's axes in the order in which a load walks memory, None unless all are
    plain digits.
    """
    out: list[int] = []
    for i, n in zip(node.args, node.data.shape, strict=True):
        if n == 1:
            continue
        d = digits(i, space)
        if d is None or any(o.sign < 0 or o.const for o in d) or _covered(d) != n:
            return None
        out += [o.axis for o in d]
    return out if len(set(out)) == len(out) else None


def _covered(ds: Sequence[Digit]) -> int:
    return math.prod(d.extent for d in ds)


# ------------------------------------------------------------------ inlining


class Inliner:
    """Bodies with every map that is not an anchor replaced by its definition."""

    def __init__(self, anchors: set[Stage]):
        self.anchors = anchors
        self.memo: dict[tuple[int, ...], dict[Expr, Expr]] = {}

    def body(self, root: Expr, space: tuple[int, ...]) -> Expr:
        """The inlined form of an expression over a space.

        Every node is visited once, however deep the chain of maps is.
        """
        final = self.memo.setdefault(space, {})
        opened: dict[Expr, Expr] = {}
        stack = [root]
        while stack:
            n = stack[-1]
            if n in final:
                stack.pop()
                continue
            todo = [x for x in n.args if x not in final]
            if todo:
                stack += reversed(todo)
                continue
            args = tuple(final[x] for x in n.args)
            if n.kind == "load" and n.data.kind == "map" and n.data not in self.anchors:
                inner = opened.get(n)
                if inner is None:
                    inner = opened[n] = inline_load(n, args, space)
                if inner not in final:
                    stack.append(inner)
                    continue
                result = final[inner]
            else:
                result = E.rebuild(n, args) if n.args else n
            # What is inlined holds nothing more to inline.
            final[n] = final[result] = result
        return final[root]
