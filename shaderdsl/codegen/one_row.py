"""A single row that is normed and then multiplied: each product norms it itself.

Before: ``s = Σ_k x[k]²``, ``v[k] = x[k] · rsqrt(s/K + ε) · g[k]`` and ``y[n] = Σ_k v[k]
· W[n, k]`` are two kernels, of which the first is one workgroup. After: ``s[n] = Σ_k
x[k]²`` and ``y[n] = rsqrt(s[n]/K + ε) · Σ_k x[k] · g[k] · W[n, k]`` are rows of one
kernel. To sum a row that a workgroup reads anyway costs less than a launch, and than
the wait for it. All are ordinary stages, so nothing else has to know.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..ir import expr as E
from ..ir.expr import Expr
from ..ir.stage import (
    Stage,
    inline_load,
    kept,
    make_reduce,
    map_stage,
    reduce_stage,
    retarget,
    topo_stages,
)
from .member import contract_parts
from .target import Target

#: The longest row that stays in the registers of a workgroup, and the fewest products
#: of it that are worth a kernel.
LONGEST, FEWEST = 8192, 16


def norm_again(outs: Sequence[Stage], target: Target) -> list[Stage]:
    """The same outputs, with products of one normed row that norm it themselves."""
    if target.family != "gpu":
        # On the CPU a launch costs little and every workgroup's work counts.
        return list(outs)
    order = topo_stages(outs)
    if not any(_is_statistic(s) for s in order):
        return list(outs)
    inlined = _normed_rows(order, set(outs))
    new: dict[Stage, Stage] = {}
    for s in order:
        moved = retarget(s, new)
        rows = {new[n.data] for n in s.loads if n.data in inlined}
        if rows and s.kind == "reduce":
            moved = _Product(moved, {new[t] for t in inlined if t in new}).normed()
        new[s] = moved
    return [new[s] for s in outs]


def _is_statistic(s: Stage) -> bool:
    """A sum, or the like, over one row."""
    return (
        s.kind == "reduce"
        and s.size == 1
        and s.dtype == "f32"
        and FEWEST <= math.prod(s.rext) <= LONGEST
    )


def _normed_rows(order: Sequence[Stage], outs: set[Stage]) -> set[Stage]:
    """Maps of one row, or of a number, that read statistics, at once or through such
    maps, and whose readers are all products of the row.
    """
    readers: dict[Stage, list[Stage]] = {}
    warm: set[Stage] = set()
    for s in order:
        for t in dict.fromkeys(n.data for n in s.loads):
            readers.setdefault(t, []).append(s)
        if s.kind != "map" or s.keep is not None or s in outs:
            continue
        if sum(n != 1 for n in s.ext) < 2 and any(
            n.data in warm or _is_statistic(n.data) for n in s.loads
        ):
            warm.add(s)
    found: set[Stage] = set()
    for s in reversed(order):
        if s in warm and all(r in found or _multiplies(r, s) for r in readers[s]):
            found.add(s)
    return found


def _multiplies(p: Stage, row: Stage) -> bool:
    """Whether a stage is a sum of a row with the rows of a matrix."""
    if p.kind != "reduce" or p.monoid != "sum" or p.dtype != "f32" or p.body is None:
        return False
    if p.size < FEWEST or math.prod(p.rext) != row.size:
        return False
    outer = (1 << len(p.ext)) - 1
    loads = [n for n in p.loads if n.data is row]
    return not any(n.free & outer for n in loads) and contract_parts(p, p.body) is None


class _Product:
    """A product of a normed row.

    Args:
        rows: maps to write out, the row's and those that it reads.
    """

    def __init__(self, stage: Stage, rows: set[Stage]):
        self.stage, self.rows = stage, rows
        self.own: dict[Stage, Stage] = {}  # statistics, a result of the product each

    def normed(self) -> Stage:
        """The product with its row's maps and statistics written out."""
        p = self.stage
        assert p.body is not None
        out, red = range(len(p.ext)), range(len(p.ext), len(p.space))
        extents = dict(enumerate(p.space))
        value = make_reduce(
            "sum", self._open(p.body), out, red, extents, p.name, loc=p.loc
        )
        # Stored, because readers would take two arrays in its place.
        return kept(map_stage(p.ext, value, p.name, loc=p.loc), "store")

    def _open(self, body: Expr) -> Expr:
        p = self.stage

        def leaf(n: Expr, args: tuple[Expr, ...]) -> Expr:
            if n.kind == "load" and n.data in self.rows:
                return self._open(inline_load(n, args, dict(enumerate(p.space))))
            if n.kind == "load" and self._is_own(n.data):
                every = [E.index(a) for a in range(len(p.ext))]
                return E.load(self._statistic(n.data), every)
            return E.rebuild(n, args) if args else n

        return E.rewrite(body, leaf)

    def _is_own(self, s: Stage) -> bool:
        return _is_statistic(s) and s.rext == self.stage.rext

    def _statistic(self, s: Stage) -> Stage:
        """A statistic as the rows of the product compute it."""
        if s not in self.own:
            p = self.stage
            assert s.body is not None and s.monoid is not None
            axes: dict[int, Expr] = {a: E.const(0) for a in range(len(s.ext))}
            for i in range(len(s.rext)):
                axes[len(s.ext) + i] = E.index(len(p.ext) + i)
            body = self._open(E.substitute(s.body, axes))
            self.own[s] = reduce_stage(p.ext, s.rext, s.monoid, body, s.name, s.loc)
        return self.own[s]
