"""Which part of k a tile of a contraction needs, where a factor is 0 outside of it.

The factor ``where(k ≤ m, x, 0)`` makes chunks of k beyond a tile's last row idle: they
are left out. What stands there is not even read, so it need not have been written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..ir import expr as E
from ..ir.expr import Expr
from ..ir.indexmap import affine
from .online_runs import zero_guards

if TYPE_CHECKING:
    from .contract_plan import Loop
    from .contract_tiled import Tiled


def bounds(tile: Tiled) -> tuple[list[str], list[str], bool]:
    """First positions of k and ends that a tile needs, as texts of i32.

    The last result says whether later tiles need more.
    """
    c = tile.c
    firsts: list[str] = []
    ends: list[str] = []
    grows = False
    sides = (
        (c.left, c.m, "m0", tile.shape.bm, tile.m_end),
        (c.right, c.n, "n0", tile.shape.bn, tile.n_end),
    )
    if len(c.k) != 1 or len(c.k[0]) != 1:
        return firsts, ends, grows
    for factor, loop, base, extent, stop in sides:
        last: dict[int, int] | None = None
        first: dict[int, int] | None = None
        for more, e, sign in _solved(zero_guards(factor), c.k[0][0]):
            if not _steady(tile, loop, extent, e):
                continue
            if first is None or last is None:
                end = tile.w.let(f"min({base} + {extent}u, {stop}) - 1u", 0, "o")
                first = tile.placed(loop, base, False)
                last = tile.placed(loop, end, False)
            # What the row needs that needs most.
            slope = sum(affine(e).axes.get(a, 0) for q in loop for a in q)
            where = last if (slope > 0) == (sign > 0) else first
            v = tile.w.value(tile.copies.bring(e + more, where))
            (ends if sign > 0 else firsts).append(v)
            grows |= sign > 0 and slope > 0 and base == "m0"
    return firsts, ends, grows


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


def _steady(tile: Tiled, loop: Loop, extent: int, e: Expr) -> bool:
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
    return len(loop) == 1 or tile.c.group.space[inner[0]] % extent == 0
