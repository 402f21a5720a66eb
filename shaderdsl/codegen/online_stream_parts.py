"""Parts of a streamed chain: factors, weights, and what single scores need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..ir import expr as E
from ..ir.expr import Expr
from .contract_tile import XYZW
from .online_plan import Online, steps_of
from .spelling import WIDTH

if TYPE_CHECKING:
    from .online_stream import Streaming

LOG2E = 1.4426950408889634


# ------------------------------------------------------------------ streams


class Share:
    """A thread's share of the chunks of a factor: of some of its rows (lines), vec4s
    along another axis.

    Args:
        axis: the axis that chunks follow.
        rows: rows (lines) of a chunk, for all threads.
        length: elements of a chunk along the axis.
        stem: what the names of registers begin with.
    """

    #: What a register holds.
    word = "vec4<f32>"

    def __init__(
        self,
        owner: Streaming,
        factor: Expr,
        axis: int,
        rows: int,
        length: int,
        stem: str,
    ):
        t, w = owner.t, owner.w
        self.owner, self.factor, self.axis = owner, factor, axis
        self.deep = deep = length // WIDTH
        self.names = [f"{stem}{q}" for q in range(rows * deep // t.size)]
        w.blocks[0] += [f"var {n}: {self.word};" for n in self.names]
        self.inside = w.let(f"lane % {deep}u", 0, "e")
        first = w.let(f"lane / {deep}u", 0, "e")
        #: The share's rows (lines) in a chunk, and where they lie in workgroup memory.
        self.slots: list[str] = []
        self.at: list[tuple[str, ...]] = []
        for q in range(len(self.names)):
            slot = first if not q else w.let(f"{first} + {q * t.size // deep}u", 0, "e")
            self.slots.append(slot)
            self.at.append(self.lie(slot))

    def lie(self, slot: str) -> tuple[str, ...]:
        """Name the place of a row's (line's) word in workgroup memory."""
        raise NotImplementedError

    def rows_at(self, depth: int) -> list[dict[int, int]]:
        """Copies of the workgroup's rows."""
        owner = self.owner
        out = []
        for slot in self.slots:
            name = owner.w.let(f"min(top + {slot}, {owner.row_end} - 1u)", depth, "r")
            out.append(owner.axes.at(owner.o.row, name, depth))
        return out

    def lines_at(self, at: str, depth: int) -> list[dict[int, int]]:
        """Copies of the lines from a position on."""
        owner = self.owner
        out = []
        for slot in self.slots:
            text = f"min({at} + {slot}, {owner.line_end} - 1u)"
            name = owner.w.let(text, depth, "n")
            out.append(owner.axes.at(owner.o.line, name, depth))
        return out

    def fetch(self, places: Sequence[dict[int, int]], chunk: str, depth: int) -> None:
        """Bring the share of a chunk along the axis into registers."""
        owner, w = self.owner, self.owner.w
        at = self.inside
        if chunk != "0u":
            at = w.let(f"{chunk} * {self.deep}u + {self.inside}", depth, "d")
        along = owner.axes.at(self.axis, at, depth, True)
        for name, own in zip(self.names, places, strict=True):
            v = owner.axes.value(self.factor, {**own, **along}, self.axis)
            w.line(f"{name} = {self.carried(v)};", depth)

    def carried(self, value: str) -> str:
        """A value as a register holds it."""
        return value


class Factor(Share):
    """A share of one factor of a product, along the inner axis.

    They are kept turned, so that a thread finds four neighbouring rows (lines) at one
    position of the inner axis in one word.
    """

    def __init__(
        self,
        owner: Streaming,
        factor: Expr,
        inner: int,
        near: bool,
        stem: str,
        base: int,
    ):
        t = owner.t
        rows = t.rows if near else t.lines
        self.stride, self.base = rows // WIDTH + 1, base
        super().__init__(owner, factor, inner, rows, t.dc, stem)
        self.rows = self.rows_at(0) if near else None

    def lie(self, slot: str) -> tuple[str, str]:
        w = self.owner.w
        start = f"{self.base}u + {self.inside} * {WIDTH * self.stride}u"
        place = w.let(f"{start} + {slot} / {WIDTH}u", 0, "e")
        return place, w.let(f"{slot} % {WIDTH}u", 0, "e")

    def places(self, at: str, depth: int) -> list[dict[int, int]]:
        """Copies of the rows, or of the lines of a tile that begins at a line."""
        return self.lines_at(at, depth) if self.rows is None else self.rows

    def keep(self) -> list[str]:
        """Lines that store the share to workgroup memory, turned."""
        out = []
        for name, (place, lane) in zip(self.names, self.at, strict=True):
            for k in range(WIDTH):
                at = place if k == 0 else f"{place} + {k * self.stride}u"
                out.append(f"sm[{at}][{lane}] = {name}.{XYZW[k]};")
        return out


class Weights:
    """A thread's share of the weights of some lines, as they lie in memory.

    Slot h · tx + x of a chunk holds the thread x's line of that number.
    """

    def __init__(self, owner: Streaming, number: int, base: int):
        t, w, o = owner.t, owner.w, owner.o
        self.owner, self.base = owner, base
        self.factor = owner.weights[number]
        column = owner.matrices[number].column
        assert column is not None
        self.column = column
        self.columns = t.columns(o.extent(column))
        self.width = self.columns * t.tx
        count = t.lc * self.width // t.size
        self.names = [f"w{number}_{q}" for q in range(count)]
        w.blocks[0] += [f"var {n}: vec4<f32>;" for n in self.names]
        last = steps_of(o.extent(column), WIDTH) - 1
        self.lines: list[str] = []
        self.along: list[dict[int, int]] = []
        known: dict[str, dict[int, int]] = {}
        for q in range(count):
            e = w.let(f"lane + {q * t.size}u", 0, "e")
            same = t.size % self.width == 0  # one column for all of a thread's words
            at = f"{'lane' if same else e} % {self.width}u"
            if last < self.width - 1:
                at = f"min({at}, {last}u)"
            if at not in known:
                known[at] = owner.axes.at(column, w.let(at, 0, "e"), 0, True)
            self.along.append(known[at])
            slot = w.let(f"{e} / {self.width}u", 0, "e")
            line = f"{slot} % {t.tx}u * {WIDTH}u + {slot} / {t.tx}u"
            self.lines.append(w.let(line, 0, "e"))

    def fetch(self, chunk: int | str, depth: int) -> None:
        """Bring the share of a chunk of the tile into registers."""
        owner, w, t = self.owner, self.owner.w, self.owner.t
        held = t.lc // t.tx
        if isinstance(chunk, int):
            number = chunk * held
            first = f"{number // WIDTH * t.tx * WIDTH + number % WIDTH}u"
        else:
            line = w.let(f"{chunk} * {held}u", depth, "n")
            first = f"{line} / {WIDTH}u * {t.tx * WIDTH}u + {line} % {WIDTH}u"
            first = w.let(first, depth, "n")
        for name, line, along in zip(self.names, self.lines, self.along, strict=True):
            at = f"l + {line} + {first}"
            if not owner.exact:
                at = f"min({at}, {owner.line_end} - 1u)"
            copies = owner.axes.at(owner.o.line, w.let(at, depth, "n"), depth)
            v = owner.axes.value(self.factor, {**copies, **along}, self.column)
            w.line(f"{name} = {v};", depth)

    def keep(self) -> list[str]:
        """Lines that store the share to workgroup memory."""
        size = self.owner.t.size
        return [
            f"sm[lane + {self.base + q * size}u] = {n};"
            for q, n in enumerate(self.names)
        ]


# ------------------------------------------------------------------ single scores


def take_out(e: Expr, axis: int) -> tuple[Expr, list[Expr]]:
    """A factor without divisors that are the same all along an axis, and those."""
    if e.kind != "apply":
        return e, []
    if e.data == "div" and not e.args[1].free >> axis & 1:
        core, rest = take_out(e.args[0], axis)
        return core, [*rest, e.args[1]]
    if e.data == "mul":
        a, left = take_out(e.args[0], axis)
        b, right = take_out(e.args[1], axis)
        if left or right:
            return a * b, [*left, *right]
    return e, []


def gentle(o: Online) -> Online:
    """A chain whose divisors of a whole row or line are inverted once for all of it."""
    results = {n for p in o.products for n in p.results}

    def leaf(n: Expr, args: tuple[Expr, ...]) -> Expr:
        if n.kind == "apply" and n.data == "div" and n.dtype == "f32":
            b = args[1]
            single = not (b.free >> o.row & 1 and b.free >> o.line & 1)
            if single and not results & set(E.loads(b)):
                return args[0] * E.apply("div", E.const(1.0), b)
        return E.rebuild(n, args) if n.args else n

    def soft(e: Expr | None) -> Any:
        return None if e is None else E.rewrite(e, leaf)

    sums = [replace(s, value=soft(s.value), power=soft(s.power)) for s in o.sums]
    maps = {m: soft(e) for m, e in o.maps.items()}
    return replace(o, sums=sums, score=soft(o.score), maps=maps)


def loads_of(o: Online, roots: Sequence[Expr]) -> list[Expr]:
    """Loads from memory in values of single scores."""
    results = {n for p in o.products for n in p.results}
    own = {m.stage for m in o.group.members if m.role == "online"}
    return [n for n in E.loads(*roots) if n not in results and n.data not in own]
