"""The graph of one block of rows: the stages of a loop with shorter extents, on parts
of what they read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from ..ir import expr as E
from ..ir.expr import Expr
from ..ir.indexmap import affine
from ..ir.stage import (
    MONOIDS,
    Stage,
    inline_load,
    input_stage,
    make_reduce,
    map_stage,
    reduce_stage,
)
from .blocks_rows import (
    Axes,
    joined,
    leading,
    loaded_rows,
    own_indices,
    several_each,
)
from .member import contract_parts

#: Words between places where arrays may be bound in parts, whatever the device.
ALIGNED = 64


class Refused(Exception):
    """Why a product is not worked through in blocks."""


@dataclass(frozen=True)
class Place:
    """The axes of a stage that count rows, and whether it reduces them."""

    axes: Axes
    summed: bool = False


@dataclass(eq=False)
class Loop:
    """One loop over blocks of rows.

    Args:
        count: rows.
        places: the stages inside, in order.
        large: those of them that have a row of the product for each row.
        blocks: first row and number of rows of each.
        given: for each result the stage of the graph outside that stands for it.
        externals: what the stages inside read from outside.
        scores: rows are heads, and attention's scores what is large.
        stored: the stages outside that are stored at any rate, where that is known;
            other maps are computed inside.
        moved: arrays whose rows do not come first, or begin where none may be bound,
            are copied so that they do not, and results are given with rows first.
    """

    count: int
    places: dict[Stage, Place]
    large: set[Stage]
    blocks: list[tuple[int, int]] = field(default_factory=list)
    given: dict[Stage, Stage] = field(
        default_factory=dict
    )  # result → who stands for it
    externals: list[Stage] = field(default_factory=list)
    scores: bool = False
    stored: frozenset[Stage] | None = None
    moved: bool = False

    @property
    def now(self) -> list[Stage]:
        """The externals as the graph outside has them."""
        return [n.data for n in next(iter(self.given.values())).loads]


def results(loop: Loop) -> set[Stage]:
    """Stages that may be stored: those that read something large, and reductions. Small
    maps of these are computed again where they are needed.
    """
    return {
        s
        for s in loop.places
        if s not in loop.large
        and (s.kind == "reduce" or any(n.data in loop.large for n in s.loads))
    }


def rows_first(s: Stage, axes: Axes) -> bool:
    """Whether the parts of rows lie one after another."""
    before = [a for a in range(max(axes)) if a not in axes and s.ext[a] != 1]
    return not before and list(axes) == sorted(axes)


class Body:
    """Stages for a block of so many rows.

    Args:
        loop: what is inside.
        rows: of the block.

    Attributes:
        outs: what the loop's results become, ``stages[s]`` for result s; of a sum over
            rows the sum so far with this block's share.
        inputs: what stands for arrays outside: ``(outside, whether a part of it)``.
        sums: a result that is a sum over rows → the input that holds the sum so far.
        externals: the arrays outside, in order.
        products: products outside that have the same rows.
        row_bytes: bytes of a row of each array that is bound in parts.
        copied: copies of what is read, with rows first.
    """

    def __init__(self, loop: Loop, rows: int):
        self.loop, self.rows = loop, rows
        self.inputs: dict[Stage, tuple[Stage, bool]] = {}
        self.sums: dict[Stage, Stage] = {}
        self.externals: dict[Stage, None] = {}
        self.products: dict[Stage, Axes] = {}
        self.row_bytes: dict[Stage, int] = {}
        self.copied: dict[Stage, None] = {}
        self._made: dict[tuple[Stage, Axes], Stage] = {}
        self._inputs: dict[tuple[Stage, int, int], Stage] = {}
        self._least = min(s.size for s in loop.large)
        given = results(loop)
        # In the order of the graph, so that every run and layer has the same texts.
        self.stages = {s: self._inside(s) for s in loop.places if s in given}

    # -------------------------------------------------------------- stages

    def _inside(self, s: Stage) -> Stage:
        place = self.loop.places[s]
        if not place.summed and s in results(self.loop):
            self._whole_rows(s, place.axes)
        return self._stage(s, place)

    def _whole_rows(self, s: Stage, axes: Axes) -> None:
        """A result is stored in parts of an array in which rows come first."""
        if not self.loop.moved and not rows_first(s, axes):
            raise Refused(f"the rows of {s.name} do not lie one after another")
        self.row_bytes[s] = s.nbytes // self.loop.count

    def _stage(self, s: Stage, place: Place) -> Stage:
        key = (s, place.axes)
        if key not in self._made:
            self._made[key] = self._build(s, place)
        return self._made[key]

    def _build(self, s: Stage, place: Place) -> Stage:
        """Row axes become one axis: the first, of a sum the first reduced one."""
        assert s.body is not None
        no, axes = len(s.ext), place.axes
        out = [a for a in range(no) if a not in axes]
        red = [a for a in range(no, len(s.space)) if a not in axes]
        kept = [*out, *red]
        row = (len(out) if place.summed else 0) if axes else None
        if row is not None:
            kept.insert(row, -1)
        names = {a: E.index(k) for k, a in enumerate(kept) if a >= 0}
        space = [self.rows if a < 0 else s.space[a] for a in kept]
        body = self._rewrite(s, axes, names, row)
        no = len(space) - len(s.rext if not place.summed else [-1, *red])
        if s.kind == "map":
            return map_stage(space, body, s.name, dtype=s.dtype, loc=s.loc)
        assert s.monoid is not None
        if not place.summed:
            ones = {a: E.const(0) for a in E.bits(body.free) if space[a] == 1}
            body = E.substitute(body, ones) if ones else body
            return reduce_stage(space[:no], space[no:], s.monoid, body, s.name, s.loc)
        share = make_reduce(
            s.monoid, body, range(no), range(no, len(space)), space, s.name, loc=s.loc
        )
        before = input_stage(s.shape, s.dtype, s.name)
        self.sums[s] = before
        own = E.load(before, [E.index(a) for a in range(no)])
        total = E.apply(MONOIDS[s.monoid].primitive, own, share)
        return map_stage(s.ext, total, s.name, dtype=s.dtype, loc=s.loc)

    # -------------------------------------------------------------- bodies

    def _rewrite(
        self, s: Stage, axes: Axes, names: dict[int, Expr], row: int | None
    ) -> Expr:
        """The body on what there is within a block. A row's number as a value is read
        from an array.
        """
        assert s.body is not None
        value: dict[Expr, Expr] = {}
        r = E.const(0) if row is None else E.index(row)

        def rewrite(root: Expr) -> Expr:
            for n in E.topo(root, into=lambda n: n not in value and n.kind != "load"):
                if n in value:
                    continue
                if n.kind == "index":
                    value[n] = names.get(n.data) or self._position(s, axes, n.data, r)
                elif n.kind == "load":
                    value[n] = self._load(n, s, axes, r, rewrite)
                else:
                    value[n] = E.rebuild(n, tuple(value[x] for x in n.args))
            return value[root]

        return rewrite(s.body)

    def _position(self, s: Stage, axes: Axes, axis: int, r: Expr) -> Expr:
        """The row's digit along one axis, from an array of them."""
        extents = [s.space[a] for a in axes]
        pad = self._padding(1)
        numbers = map_stage([*extents, *pad], E.index(axes.index(axis)), "position")
        at = [r, *(E.const(0) for _ in pad)]
        return E.load(self._input(numbers, len(extents)), at)

    def _padding(self, size: int) -> list[int]:
        """An axis that puts so few words of each row where a group may begin."""
        return [ALIGNED] if self.loop.scores and size < ALIGNED else []

    def _load(
        self,
        n: Expr,
        s: Stage,
        axes: Axes,
        r: Expr,
        rewrite: Callable[[Expr], Expr],
    ) -> Expr:
        """A load on a stage of the block, or on what stands for an array outside."""
        y: Stage = n.data
        count = self.loop.count
        place = self.loop.places.get(y)
        if place is None or place.summed:
            own = loaded_rows(n, axes, s.space, count) if axes else ()
            stored = self.loop.stored
            outside = stored is None or y in stored
            if own is None and y.kind == "map" and not outside:
                return rewrite(inline_load(n, n.args, s.space))
            if y.kind == "map" and self._pulled(y, own):
                place = Place(own or ())
            elif own and _is_product(y):
                self.products[y] = own
        if place is not None and not place.summed:
            indices = own_indices(n, s.space)
            counts = [indices[a] for a in place.axes]
            if E.loads(*counts):
                raise Refused(f"{y.name} is read across rows")
            args = [rewrite(x) for a, x in enumerate(indices) if a not in place.axes]
            new = E.load(self._stage(y, place), [r, *args] if place.axes else args)
        else:
            # Rows of a copy begin where arrays may be bound.
            anew = self.loop.moved and y.size // count % ALIGNED > 0
            rows = leading(n, axes, s.space, count) if axes and not anew else 0
            several = None
            if axes and not rows and self.loop.scores and not anew:
                several = several_each(n, axes, s.space, count)
            gathered = None
            if axes and not rows and several is None:
                mask = sum(1 << a for a in axes)
                large = self.loop.scores and 64 * y.size > self._least
                if not large or self.loop.moved:
                    gathered = self._gathered(n, s, axes)
                if large and n.free & mask and gathered is None:
                    raise Refused(f"the rows of {y.name} do not lie one after another")
            if gathered is not None:
                n, y, rows = gathered, gathered.data, len(axes)
            if several is not None:
                dims, each, within = several
                args = [rewrite(i) for i in (within, *n.args[dims:])]
                new = E.load(self._input(y, dims, each), [r, *args])
            else:
                args = [rewrite(i) for i in n.args[rows:]]
                new = E.load(self._input(y, rows), [r, *args] if rows else args)
        new.loc, new.label = new.loc or n.loc, new.label or n.label
        return new

    def _gathered(self, n: Expr, s: Stage, axes: Axes) -> Expr | None:
        """What a load reads for each row, as an array of its own: rows that are not all
        of an array, or do not come first in it. None where that would be large.
        """
        mask = sum(1 << a for a in axes)
        if n.free & mask != mask or any(E.loads(i) for i in n.args):
            return None
        walk = affine(joined(n.args, n.data.shape)).axes
        rest = [a for a in E.bits(n.free) if a not in axes]
        # As they lie in memory, so that every reader takes the same copy.
        order = [*axes, *sorted(rest, key=lambda a: -abs(walk.get(a, 0)))]
        ext = [s.space[a] for a in order]
        if 2 * math.prod(ext) > self._least:
            return None
        names = {a: E.index(k) for k, a in enumerate(order)}
        words = math.prod(ext[len(axes) :])
        pad = self._padding(words)
        if self.loop.moved and words % ALIGNED and not pad:
            # The longest axis grows until rows begin where they may.
            k = max(range(len(axes), len(ext)), key=lambda k: ext[k])
            step = ALIGNED // math.gcd(ALIGNED, words // ext[k])
            names[order[k]] = E.apply("minimum", E.index(k), E.size(ext[k]) - 1)
            ext[k] = -(-ext[k] // step) * step
        rows = map_stage([*ext, *pad], E.substitute(n, names), f"{n.data.name}_rows")
        self.copied[rows] = None
        return E.load(rows, [*(E.index(a) for a in order), *(E.const(0) for _ in pad)])

    def _pulled(self, y: Stage, own: Axes | None) -> bool:
        """Whether a map outside is computed in here: views, what is large, and what is
        small enough to be computed again anywhere.
        """
        if own is None:
            return False
        if self.loop.stored is not None:
            return y not in self.loop.stored
        view = y.body is not None and y.body.kind == "load"
        return (
            view
            or y.size <= self.loop.count
            or (bool(own) and 8 * y.size >= self._least)
        )

    def _input(self, outside: Stage, rows: int, each: int = 0) -> Stage:
        """What stands for an array outside, or for a block's part of it. ``rows``
        dimensions count rows, or so many things in ``each`` row.
        """
        key = (outside, rows, each)
        if key not in self._inputs:
            shape = list(outside.shape)
            shape[:rows] = ([self.rows, each] if each else [self.rows]) if rows else []
            new = input_stage(shape, outside.dtype, outside.name)
            self._inputs[key] = new
            self.inputs[new] = (outside, rows > 0)
            self.externals[outside] = None
            if rows:
                self.row_bytes[outside] = outside.nbytes // self.loop.count
        return self._inputs[key]


def _is_product(s: Stage) -> bool:
    return s.body is not None and contract_parts(s, s.body) is not None
