"""Which part of k a tile of a contraction needs, where a factor is 0 outside of it.

The factor ``where(k ≤ m, x, 0)`` makes chunks of k beyond a tile's last row idle: they
are left out. What stands there is not even read, so it need not have been written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..ir import expr as E
from ..ir.expr import Expr
from ..ir.indexmap import affine
from .online_runs import zero_guards

if TYPE_CHECKING:
    from .contract_plan import Contraction, Loop
    from .contract_tiled import Tiled


@dataclass
class Seen:
    """What conditions say of k. ``grows``: later rows of a run need more of it.

    Attributes:
        sides: for rows and columns: a bound, what is added to it, its sign, its slope.
    """

    sides: tuple[list[tuple[Expr, int, int, int]], ...]

    @property
    def grows(self) -> bool:
        """Whether later rows need more of k."""
        return any(sign > 0 and slope > 0 for _, _, sign, slope in self.sides[0])

    def texts(self, tile: Tiled) -> tuple[list[str], list[str]]:
        """First positions of k and ends that a tile needs, as texts of i32."""
        c, s = tile.c, tile.shape
        firsts: list[str] = []
        ends: list[str] = []
        places = (
            (c.m, "m0", s.bm, tile.m_end),
            (c.n, "n0", s.bn, tile.n_end),
        )
        for found, (loop, base, extent, stop) in zip(self.sides, places):
            if not found:
                continue
            end = tile.w.let(f"min({base} + {extent}u, {stop}) - 1u", 0, "o")
            first = tile.placed(loop, base, False)
            last = tile.placed(loop, end, False)
            for e, more, sign, slope in found:
                # Of the row (column) that needs most.
                where = last if (slope > 0) == (sign > 0) else first
                v = tile.w.value(tile.copies.bring(e + more, where))
                (ends if sign > 0 else firsts).append(v)
        return firsts, ends


def seen(c: Contraction, bm: int, bn: int) -> Seen:
    """What the conditions of both factors prove for tiles of a size."""
    sides: list[list[tuple[Expr, int, int, int]]] = [[], []]
    first = c.passes[0]
    single = len(c.passes) == len(first.lefts) == len(first.rights) == 1
    if single and len(first.k) == 1 and len(first.k[0]) == 1:
        factors = ((first.lefts[0], c.m, bm), (first.rights[0], c.n, bn))
        for found, (factor, loop, extent) in zip(sides, factors):
            for more, e, sign in _solved(zero_guards(factor.expr), first.k[0][0]):
                if _steady(c, loop, extent, e):
                    slope = sum(affine(e).axes.get(a, 0) for q in loop for a in q)
                    found.append((e, more, sign, slope))
    return Seen(tuple(sides))


def asked_later(factor: Expr) -> tuple[Expr, Expr | None]:
    """A factor without the conditions that load nothing, and those."""
    if factor.kind != "apply" or factor.data != "where":
        return factor, None
    condition, value, other = factor.args
    if other.kind != "const" or other.data != 0 or E.loads(condition):
        return factor, None
    return value, condition


def _solved(guards: list[Expr], k: int) -> list[tuple[int, Expr, int]]:
    """``k < bound`` (1) and ``k ≥ bound`` (-1) of conditions: a number, the rest."""
    out = []
    for g in guards:
        if g.kind != "apply" or g.data not in ("lt", "le", "eq"):
            continue
        if g.args[0].dtype != "i32" or g.args[1].dtype != "i32":
            continue
        strict = 0 if g.data == "lt" else 1
        sides = [(g.args[0], g.args[1], strict)]
        if g.data == "eq":
            sides.append((g.args[1], g.args[0], strict))
        for a, b, more in sides:  # a - b < more
            form = affine(a - b)
            if any(n.free >> k & 1 for _, n in form.rest):
                continue
            rest = E.substitute(a - b, {k: E.const(0)})
            if form.axes.get(k, 0) == 1:
                out.append((more, -rest, 1))
            elif form.axes.get(k, 0) == -1:
                out.append((1 - more, rest, -1))
    return out


def _steady(c: Contraction, loop: Loop, extent: int, e: Expr) -> bool:
    """Whether a bound only grows, or only falls, along a tile."""
    form = affine(e)
    own = [a for q in loop for a in q]
    mask = sum(1 << a for a in own)
    if any(n.free & mask for _, n in form.rest):
        return False
    moving = [a for a in own if form.axes.get(a, 0)]
    if not moving:
        return True
    inner = loop[-1]
    if len(inner) != 1 or moving != [inner[0]]:
        return False
    return len(loop) == 1 or c.group.space[inner[0]] % extent == 0
