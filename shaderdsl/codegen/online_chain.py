"""A chain: runs of one kernel, and the choice of its row and line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..ir import expr as E
from ..ir.expr import Expr
from ..ir.stage import Stage, factors
from .member import Member
from .online_readers import CROWDED
from .online_runs import Run, conjuncts, parts_of, split_run
from .target import Target

#: So few rows against lines of at least so many positions, and twice as many as rows,
#: share their lines out among workgroups: a token, or a piece of a prompt, against a
#: cache. Nothing else about the line's length matters, so that a longer cache takes
#: the same texts. Drivers on the CPU have few threads to feed.
FEW_ROWS = {"software": 15}
FEW, LONG_LINE = 32, 33


#: The reductions that read a stage; None for whoever gets an output.
Stored = dict[Stage, set[Stage | None]]


@dataclass(eq=False)
class Chain:
    """Runs of one kernel. Symbols are the first run's own axes of its products."""

    runs: list[Run]
    places: dict[Stage, dict[int, int]]  # product → its axes as symbols
    reduced: set[int]
    maximum: Stage | None = None
    row: int = -1
    line: int = -1
    split: bool = False  # lines are shared out among workgroups
    extents: dict[int, int] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The kind of its group."""
        return "pieces" if self.split else "online"

    def symbols(self, run: Run) -> dict[int, int] | None:
        """A run's own axes as symbols, None where it walks the products otherwise."""
        out: dict[int, int] = {}
        for x, place in run.places.items():
            for own, reader in place.items():
                if x in self.places:
                    symbol = self.places[x][own]
                    if out.setdefault(reader, symbol) != symbol:
                        return None
        return out if len(set(out.values())) == len(out) else None

    def bounds(self, run: Run) -> bool:
        """Whether no exponential that a run adds is above 1: its y is that of the
        chain's maximum, or less of it.

        What only the sum sees may lie far above the running maximum.
        """
        (most,) = (r for r in self.runs if r.stage is self.maximum)
        ours, theirs = self.symbols(most), self.symbols(run)
        assert run.shift is not None and ours is not None and theirs is not None
        y = _named(run.shift[0].args[0].args[0], theirs)
        seen, score = _masked(_named(most.member.body, ours))
        asked, own = _masked(y)
        asked |= {_named(g, theirs) for g in factors(run.member.body)[2]}
        return own is score and seen <= asked


def _named(e: Expr, symbols: dict[int, int]) -> Expr:
    return E.substitute(e, {a: E.index(s) for a, s in symbols.items()})


def _masked(e: Expr) -> tuple[set[Expr], Expr]:
    """Conditions outside of which a value is -∞, and the value."""
    conditions: set[Expr] = set()
    while e.kind == "apply" and e.data == "where":
        c, inner, nothing = e.args
        if not (nothing.kind == "const" and nothing.data == -math.inf):
            break
        conditions |= set(conjuncts(c))
        e = inner
    return conditions, e


def bindings(runs: Sequence[Run], products: dict[Stage, Member], stored: Stored) -> int:
    """Arrays that a kernel of these runs binds at most."""
    inside = {r.stage for r in runs} | {x for r in runs for x in r.places}
    loaded = {n.data for r in runs for n in r.member.loads}
    loaded |= {n.data for r in runs for x in r.places for n in products[x].loads}
    kept = sum(
        r.column is not None or not stored.get(r.stage, set()) <= inside for r in runs
    )
    return len(loaded - inside) + kept


def complete(
    c: Chain,
    products: dict[Stage, Member],
    stored: Stored,
    target: Target,
    log: list[str],
    bare: bool = False,
) -> bool:
    """Choose the chain's row and line; whether it is worth a kernel.

    Args:
        bare: of plain sums and maxima alone, which saves nothing by itself.
    """
    name = c.runs[-1].stage.name
    if any(r.column is not None for r in c.runs) == bare:
        return False
    if not any(
        n.kind == "apply" and n.data == "exp"
        for r in c.runs
        for n in E.values(r.member.body)
    ):
        return False
    sides = []
    for x, place in c.places.items():
        p = parts_of(products[x])
        sides.append([{place[a] for a in part} for part in (p.m, p.n)])
    named = _named_axes(c)

    def rank(a: int) -> tuple[bool, int, int]:
        return a in named, c.extents[a], a

    for line in sorted(c.reduced, key=rank, reverse=True):
        if not all(line in a or line in b for a, b in sides):
            continue
        opposite = [b if line in a else a for a, b in sides]
        rows = set.intersection(*opposite) - c.reduced
        if rows:
            c.line, c.row = line, max(rows, key=rank)
            break
        if not any(opposite):
            # A single row in each batch: an axis of one position stands for it.
            c.line, c.row = line, max(c.extents) + 1
            c.extents[c.row] = 1
            break
    else:
        log.append(f"{name} is not one pass: its products have no common rows")
        return False
    if not _shape(c, products, target, name, log) or (bare and c.split):
        return False
    for r in c.runs:
        symbols = c.symbols(r)
        terms = split_run(r) if r.stage.monoid == "sum" else None
        if symbols is None:
            return False
        rows_ = [a for a, q in symbols.items() if q == c.row]
        weights = terms.weight if terms is not None else []
        if any(f.free >> a & 1 for f in weights for a in rows_):
            log.append(f"{name} is not one pass: its weights differ from row to row")
            return False
    if bindings(c.runs, products, stored) > target.limits.max_storage_buffers:
        log.append(f"{name} is not one pass: {CROWDED}")
        return False
    return True


def _shape(
    c: Chain,
    products: dict[Stage, Member],
    target: Target,
    name: str,
    log: list[str],
) -> bool:
    """Choose whether the lines of a chain are shared out; whether it is worth it."""
    height, length = c.extents[c.row], c.extents[c.line]
    few = height <= FEW_ROWS.get(target.family, FEW)
    few = few and length >= max(LONG_LINE, 2 * height)
    loops = math.prod(c.extents[a] for a in c.reduced)
    # What the schedules take for a line: a share of a step, or of a tile's loops.
    share = 2.0
    if target.family == "software":
        share = 1 / 4 if target.features.subgroups else 1 / 2
    long = loops * share > target.loop_budget * 0.9
    single = len(c.reduced) == 1
    c.split = single and (few or long)
    if c.split:
        return True
    if height == 1:
        log.append(f"{name} is not one pass: a single row against {length} lines")
        return False
    if long:
        log.append(f"{name} is not one pass: {loops} steps are beyond the loop budget")
        return False
    stored = min(x.nbytes for x in c.places)
    if stored < target.online_from:
        log.append(f"{name} is not one pass: {stored} bytes of scores are stored")
        return False
    return True


def _named_axes(c: Chain) -> set[int]:
    """Symbols whose position is used as a value: what masks are about."""
    out: set[int] = set()
    for r in c.runs:
        symbols = c.symbols(r) or {}
        for n in E.values(r.member.body):
            if n.kind == "index" and n.data in symbols:
                out.add(symbols[n.data])
    return out
