"""A chain for GPUs with large tiles: one stream of chunks through workgroup memory.

Every chunk of every phase (a factor of a product, the weights of a sum) takes the same
way: its words are fetched into registers while the chunk before it is multiplied, kept
in workgroup memory between two barriers, multiplied. The stream does not stop between
phases or tiles: the last chunk of a tile fetches the first one of the next.

What masks prove to be seen whole is computed without asking them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..ir.expr import Expr
from .contract_tile import XYZW, plus
from .kernel_text import indent
from .online_plan import Online, close_turns, plain_tensors, steps_of
from .online_stream_parts import (
    LOG2E,
    Factor,
    Weights,
    gentle,
    loads_of,
)
from .online_stream_shape import Stream
from .online_stream_values import Values
from .online_tile import BARRIER
from .program import Kernel
from .schedule import finish, fold, kernel_name
from .spelling import WIDTH
from .writer import Writer


def streamed(o: Online, shape: Stream) -> Kernel:
    """Print the kernel."""
    o = gentle(o)
    w = Writer(o.group.space, o.target)
    plain_tensors(o, w)
    # The exact exponential is a dozen instructions; this one is off by |x| · 2^-24.
    w.spellings["exp"] = f"exp2({{0}} * {{F}}({LOG2E}))"
    lines = Streaming(o, w, shape).lines()
    count = steps_of(o.extent(o.row), shape.rows) * o.batches
    grid = fold(count, o.target)
    name = kernel_name(o.group)
    kernel = finish(o.group, w, o.layout, lines, name, "online", shape.size, grid)
    # Rows and lines are cut off at their ends before anything is loaded, and places in
    # workgroup memory follow from the invocation's number.
    return replace(kernel, in_range=True)


class Streaming(Values):
    """The text of one thread."""

    # -------------------------------------------------------------- the frame

    def lanes(self) -> None:
        """A zigzag of 32: reads of workgroup memory meet few banks twice."""
        w, t = self.w, self.t
        if t.tx == 8:
            w.line("let tx = (lane & 1u) | ((lane >> 1u) & 6u);")
            w.line(
                "let ty = ((lane >> 1u) & 1u) | ((lane >> 3u) & 2u) | "
                "((lane >> 5u) << 2u);"
            )
        else:
            assert t.tx == 16
            w.line("let tx = (lane & 1u) | ((lane >> 1u) & 14u);")
            w.line("let ty = ((lane >> 1u) & 1u) | ((lane >> 5u) << 1u);")

    def steps(self) -> list[int]:
        """Distances of lanes by which values of one row come together."""
        return [1, 4, 8] if self.t.tx == 8 else [1, 4, 8, 16]

    def lines(self) -> list[str]:
        """The kernel's text."""
        o, w, t = self.o, self.w, self.t
        self.memory()
        self.begin()
        self.declare()
        self.prepare()
        w.open()
        if o.outer:
            copies = {a: a for a in o.outer}
            self.axes.place(copies, [[a] for a in o.outer], "turn", 1)
        first, stop = self.masks.bounds(1)
        self.masks.prove()
        start = f"{first} / {t.lines}u * {t.lines}u" if first != "0u" else first
        start = w.let(start, 1, "l")
        self.warm_rows()
        self.fetch_first(self.order[0], start, 1)
        w.open()
        self.tile()
        w.loop(f"for (var l = {start}; l < {stop}; l = l + {t.lines}u)")
        close_turns(o, w)
        self.epilogue()
        return w.blocks[0]

    def memory(self) -> None:
        """Declare workgroup memory."""
        o, w, t = self.o, self.w, self.t
        widest = max(o.extent(s.column) for s in self.matrices if s.column is not None)
        w.shared.append(f"var<workgroup> sm: array<vec4<f32>, {t.memory(widest)}>;")

    def prepare(self) -> None:
        """The streams of all phases."""
        o, t = self.o, self.t
        self.streams: dict[tuple[str, int], tuple[Factor, Factor] | Weights] = {}
        for kind, i in self.order:
            if kind == "product":
                near, far = self.factors[i]
                inner = o.products[i].inner
                self.streams[kind, i] = (
                    Factor(self, near, inner, True, f"n{i}_", 0),
                    Factor(self, far, inner, False, f"f{i}_", t.dc * t.near_row),
                )
            else:
                self.streams[kind, i] = Weights(self, i, t.held * t.value_row)

    def roots(self) -> list[Expr]:
        """What is computed of single scores."""
        o = self.o
        out = [s.value for s in o.sums] + [e for x in self.extra for e in x]
        out += [*(e for x in self.shared for e in x), *o.maps.values()]
        return out + ([o.score] if o.score is not None else [])

    def warm_rows(self) -> None:
        """Fetch what depends on rows alone before the loop."""
        mask = 1 << self.o.line
        for n in loads_of(self.o, self.roots()):
            if not n.free & mask:
                for own in self.own:
                    self.axes.value(n, own)

    def warm_lines(self) -> None:
        """Fetch what depends on lines alone before the products are computed."""
        mask = 1 << self.o.row
        for n in loads_of(self.o, self.roots()):
            if not n.free & mask and n.free >> self.o.line & 1:
                for line in self.places:
                    self.axes.value(n, line)

    def fetch_first(self, phase: tuple[str, int], at: str, depth: int) -> None:
        """The first chunk of a phase of the tile that begins at a line."""
        streams = self.streams[phase]
        if isinstance(streams, Weights):
            streams.fetch(0, depth)
            return
        for s in streams:
            s.fetch(s.places(at, depth), "0u", depth)

    # -------------------------------------------------------------- a tile

    def tile(self) -> None:
        """All phases of a tile, one after another."""
        self.columns()
        self.warm_lines()
        for k, (kind, i) in enumerate(self.order):
            if k + 1 < len(self.order):
                ahead = self.ahead(self.order[k + 1])
            else:
                ahead = self.ahead(None)
            if kind == "product":
                self.product(i, ahead)
                if self.o.score is not None and k + 1 == len(self.o.products):
                    self.grow()
            else:
                self.accumulate(i, ahead)

    def ahead(self, phase: tuple[str, int] | None) -> Callable[[], None]:
        """What fetches the first chunk of a phase, or of the next tile."""

        def fetch() -> None:
            if phase is None:
                at = self.w.let(f"l + {self.t.lines}u", 2, "l")
                self.fetch_first(self.order[0], at, 2)
            else:
                self.fetch_first(phase, "l", 2)

        return fetch

    def product(self, i: int, ahead: Callable[[], None]) -> None:
        """One product of the tile: both factors a chunk at a time."""
        o, w, t = self.o, self.w, self.t
        p, streams = o.products[i], self.streams["product", i]
        assert isinstance(streams, tuple)
        near, far = streams
        # Said aloud: front ends clear a variable of a loop only where it is first met.
        zero = "vec4<f32>(0.0)"
        names = self.names(i)
        w.blocks[-1] += [f"var {n} = {zero};" for line in names for n in line]
        chunks = o.extent(p.inner) // t.dc
        if chunks > 1:
            places = [s.places("l", 2) for s in streams]
            w.open()
            w.line(BARRIER)
            w.blocks[-1] += [*near.keep(), *far.keep()]
            w.line(BARRIER)
            for s, own in zip(streams, places):
                s.fetch(own, "(d + 1u)", 3)
            w.blocks[-1] += self.multiply(i)
            body = w.close()
            w.line(f"for (var d = 0u; d < {chunks - 1}u; d = d + 1u) {{")
            w.blocks[-1] += [*indent(body), "}"]
        w.line(BARRIER)
        w.blocks[-1] += [*near.keep(), *far.keep()]
        w.line(BARRIER)
        ahead()
        w.blocks[-1] += self.multiply(i)
        self.known_products(i)

    def known_products(self, i: int) -> None:
        """Say what a product's results are, with what its factors share."""
        w, p, names = self.w, self.o.products[i], self.names(i)
        number = None if p.number == 1.0 else w.param(("number", i), p.number, "f32")
        for j, line in enumerate(self.places):
            for g in range(self.groups):
                x = names[g][j]
                terms = [self.inverse(y, g, line) for y in self.shared[i]]
                terms += [number] if number else []
                if terms:
                    w.line(f"{x} = {' * '.join([x, *terms])};")
                for e in range(WIDTH):
                    copies = {**self.own[g * WIDTH + e], **line}
                    self.axes.known(p.results, copies, f"{x}.{XYZW[e]}")

    def multiply(self, i: int) -> list[str]:
        """Multiply the chunk that lies in workgroup memory."""
        t, names = self.t, self.names(i)
        right = t.dc * t.near_row
        out = ["{"]
        for k in range(t.dc):
            for g in range(self.groups):
                at = plus("ty", k * t.near_row + g * t.ty)
                out.append(f"  let a{k}g{g} = sm[{at}];")
            for j in range(t.tl // WIDTH):
                at = plus("tx", right + k * t.far_row + j * t.tx)
                out.append(f"  let b{k}j{j} = sm[{at}];")
            for g in range(self.groups):
                for j in range(t.tl):
                    b = f"vec4<f32>(b{k}j{j // WIDTH}.{XYZW[j % WIDTH]})"
                    x = names[g][j]
                    out.append(f"  {x} = fma(a{k}g{g}, {b}, {x});")
        return [*out, "}"]

    # -------------------------------------------------------------- weighted sums

    def accumulate(self, i: int, ahead: Callable[[], None]) -> None:
        """Values of the tile times their weights, some lines at a time."""
        w, t = self.w, self.t
        stream = self.streams["sum", i]
        assert isinstance(stream, Weights)
        values = self.values(i)
        chunks = t.lines // t.lc
        held = t.lc // t.tx  # lines of a thread in a chunk
        if t.whole:
            w.line(BARRIER)
            self.keep(values, range(t.tl))
            w.open()
            w.line(BARRIER)
            w.blocks[-1] += stream.keep()
            w.line(BARRIER)
            stream.fetch("(c + 1u)", 3)
            w.blocks[-1] += self.add(i, stream, "c")
            body = w.close()
            w.line(f"for (var c = 0u; c < {chunks - 1}u; c = c + 1u) {{")
            w.blocks[-1] += [*indent(body), "}"]
        for chunk in range(chunks - 1 if t.whole else 0, chunks):
            w.line(BARRIER)
            w.blocks[-1] += stream.keep()
            if not t.whole:
                self.keep(values, range(chunk * held, (chunk + 1) * held))
            w.line(BARRIER)
            if chunk + 1 < chunks:
                stream.fetch(chunk + 1, 2)
            else:
                ahead()
            w.blocks[-1] += self.add(i, stream, f"{chunk}u" if t.whole else "0u")

    def keep(self, values: list[list[str]], lines: range) -> None:
        """Store values of some of a thread's lines to workgroup memory."""
        t = self.t
        for h, j in enumerate(lines):
            for g in range(self.groups):
                slot = f"({h * t.tx}u + tx) * {t.value_row}u"
                self.w.line(f"sm[{slot} + ty + {g * t.ty}u] = {values[g][j]};")

    def add(self, i: int, stream: Weights, chunk: str) -> list[str]:
        """Multiply the values and weights that lie in workgroup memory."""
        t, cw = self.t, stream.columns
        out = []
        for u in range(t.ku):
            row = plus("p", u * t.value_row)
            for g in range(self.groups):
                out.append(f"let p{u}g{g} = sm[{plus(row, g * t.ty)}];")
            for c in range(cw):
                out.append(f"let v{u}c{c} = sm[q + {u * stream.width + c * t.tx}u];")
            for r in range(t.tm):
                x = f"vec4<f32>(p{u}g{r // WIDTH}.{XYZW[r % WIDTH]})"
                for c in range(cw):
                    a = f"a{i}r{r}c{c}"
                    out.append(f"{a} = fma({x}, v{u}c{c}, {a});")
        base = f"{stream.base}u + tx"
        first = f"{chunk} * {t.lc * t.value_row}u + ty"
        if t.ku == t.lc:
            return ["{", f"  let p = {first};", f"  let q = {base};", *indent(out), "}"]
        head = [f"let p = k * {t.value_row}u + {first};"]
        head.append(f"let q = k * {stream.width}u + {base};")
        loop = f"for (var k = 0u; k < {t.lc}u; k = k + {t.ku}u) {{"
        return [loop, *indent([*head, *out]), "}"]
