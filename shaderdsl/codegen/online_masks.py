"""What the masks of a chain prove: lines that nobody sees, and those that all see.

Guards that are affine in the row and the line bound the lines of a row. Lines beyond
the loosest bound of a workgroup's rows are never walked; a tile within the tightest one
needs no test. Nothing is told by name: whatever bounds the line counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..ir import expr as E
from ..ir.expr import Expr
from ..ir.indexmap import affine
from .kernel_text import indent
from .online_plan import Axes, Online, Sum
from .online_runs import conjuncts


def line_bounds(o: Online) -> tuple[list[tuple[Expr, int]], list[tuple[Expr, int]]]:
    """First lines and ends that guards prove, as expressions of one row.

    Each comes with the sign of the row in it: a bound that grows with the row is
    loosest at the tile's last row (an end) or at its first one (a first line).
    """
    firsts: list[tuple[Expr, int]] = []
    ends: list[tuple[Expr, int]] = []
    for g in o.guards:
        if g.kind != "apply" or g.data not in ("lt", "le", "eq"):
            continue
        if g.args[0].dtype != "i32" or g.args[1].dtype != "i32":
            continue
        sides = [(g.args[0], g.args[1], 0 if g.data == "lt" else 1)]
        if g.data == "eq":
            sides.append((g.args[1], g.args[0], 1))
        for a, b, more in sides:
            # a - b < more, solved for the line.
            form = affine(a - b)
            k = form.axes.get(o.line, 0)
            row = form.axes.get(o.row, 0)
            others = 0
            for _, n in form.rest:
                others |= n.free
            if abs(k) != 1 or others & (1 << o.line | 1 << o.row):
                continue
            rest = E.substitute(a - b, {o.line: E.const(0)})
            if k > 0:
                ends.append((E.const(more) - rest, -row))
            else:
                firsts.append((rest - more + 1, row))
    return firsts, ends


class Masks:
    """Bounds of a workgroup's rows, and which conditions hold all over a tile.

    Args:
        rows: of the workgroup, from the line ``top`` of its text on.
        lines: of a tile that begins at ``l``.
        exact: whether lines come in whole tiles.
    """

    def __init__(
        self,
        o: Online,
        axes: Axes,
        rows: int,
        ends: tuple[str, str],
        lines: int = 0,
        exact: bool = True,
    ):
        self.o, self.axes, self.w = o, axes, axes.w
        self.rows, self.lines, self.exact = rows, lines, exact
        self.row_end, self.line_end = ends
        self.last = ""
        self.sure: set[Expr] = set()
        self.from_: list[str] = []
        self.below: list[str] = []
        self.whole: str | None = None

    def _at(self, e: Expr, top: bool) -> str:
        """A bound at the workgroup's first or last row."""
        w = self.w
        if not top and not self.last:
            self.last = w.let(f"min(top + {self.rows}u, {self.row_end}) - 1u", 0)
        copy = self.axes.at(self.o.row, "top" if top else self.last, 0)
        return self.axes.value(e, copy)

    def bounds(self, depth: int) -> tuple[str, str]:
        """First line and end of what the workgroup's rows see."""
        w = self.w
        start, stop = "0u", self.line_end
        firsts, ends = line_bounds(self.o)
        for e, sign in firsts:
            v = w.let(f"u32(max({self._at(e, sign >= 0)}, 0))", depth)
            start = v if start == "0u" else w.let(f"max({start}, {v})", depth)
        for e, sign in ends:
            v = w.let(f"u32(max({self._at(e, sign < 0)}, 0))", depth)
            stop = w.let(f"min({stop}, {v})", depth)
        return start, stop

    def prove(self) -> None:
        """Say which bounds prove a condition for all rows, before tiles are walked."""
        w = self.w
        for g in self.o.guards:
            firsts, ends = line_bounds(replace(self.o, guards=[g]))
            if not firsts and not ends:
                continue
            self.sure.add(g)
            # The row that sees least: the opposite of what bounds a loop.
            for e, sign in firsts:
                self.from_.append(w.let(self._at(e, sign < 0), 1))
            for e, sign in ends:
                self.below.append(w.let(self._at(e, sign >= 0), 1))

    def tile(self) -> str | None:
        """Name "every position of this tile counts"; None if always so."""
        terms = [f"i32(l) >= {x}" for x in self.from_]
        terms += [f"i32(l) + {self.lines} <= {x}" for x in self.below]
        if not self.exact:
            terms.append(f"l + {self.lines}u <= {self.line_end}")
        self.whole = self.w.let(" && ".join(terms), 2, "b") if terms else None
        return self.whole

    def masked(
        self,
        body: Expr,
        nothing: str,
        texts: Sequence[Callable[[Expr], str]],
        inside: Sequence[str | None],
    ) -> list[str]:
        """A value at some places of a tile, ``nothing`` where it does not count.

        What bounds prove of most tiles is asked in a branch that those leave out.

        Args:
            texts: writes a value at each place.
            inside: whether a place exists, if that is to be asked.
        """
        w, plain = self.w, without(body, self.sure)

        def text(e: Expr, k: int) -> str:
            v = texts[k](e)
            return f"select({nothing}, {v}, {inside[k]})" if inside[k] else v

        if self.whole is None:
            return [w.let(text(body, k), 2, "y") for k in range(len(texts))]
        names = [w.fresh("y") for _ in texts]
        for n, at in zip(names, texts, strict=True):
            v = at(plain)
            w.line(f"var {n} = {v};")
        if plain is body and self.exact:
            return names
        w.open()
        w.base = 3
        for k, n in enumerate(names):
            v = text(body, k)
            w.line(f"{n} = {v};")
        w.base = 0
        lines = w.close()
        w.line(f"if (!{self.whole}) {{")
        w.blocks[-1] += [*indent(lines), "}"]
        return names


def without(e: Expr, sure: set[Expr]) -> Expr:
    """A value where some conditions are known to hold."""
    if not sure:
        return e

    def leaf(n: Expr, args: tuple[Expr, ...]) -> Expr:
        if n.kind == "apply" and n.data == "where":
            left = [c for c in conjuncts(args[0]) if c not in sure]
            if not left:
                return args[1]
            if len(left) < len(conjuncts(args[0])):
                condition = E.all_of(left)
                assert condition is not None
                return E.where(condition, args[1], args[2])
        return E.rebuild(n, args) if n.args else n

    return E.rewrite(e, leaf)


def peeled(e: Expr, other: float) -> tuple[Expr, set[Expr]]:
    """The value inside of ``where(c, value, other)``, and all such conditions."""
    conditions: set[Expr] = set()
    while e.kind == "apply" and e.data == "where" and e.args[2].kind == "const":
        if e.args[2].data != other:
            break
        conditions.update(conjuncts(e.args[0]))
        e = e.args[1]
    return e, conditions


def sum_value(s: Sum, score: Expr) -> Expr:
    """A sum's value, without conditions that already made the score -∞."""
    inner, conditions = peeled(s.value, 0.0)
    _, masked = peeled(score, -float("inf"))
    return inner if inner is s.power and conditions <= masked else s.value


def scores_agree(o: Online) -> bool:
    """Whether every exp(y - m) is of the very score that the maximum is taken of."""
    if o.score is None:
        return True
    y, masked = peeled(o.score, -float("inf"))
    for s in o.sums:
        if s.power is None:
            return False
        own, conditions = peeled(s.power.args[0].args[0], -float("inf"))
        if own is not y or not conditions <= masked:
            return False
        # Where the score is masked exp(y - m) is taken for 0: its sum must agree.
        _, asked = peeled(s.value, 0.0)
        if not masked <= asked | conditions:
            return False
    return True
