"""Second stage of a contraction in pieces of k: adds them up, then the epilogue."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .address import Address, Term, collapse, contiguous, used_alone
from .contract_plan import Contraction, inner_axis
from .kernel_text import indent
from .parts import only
from .program import Kernel, Scratch
from .schedule import (
    Layout,
    decode,
    lay_out,
    make_writer,
    vector_axis,
    visible,
)
from .spelling import WIDTH, wgsl_type
from .writer import Writer


@dataclass
class Pieces:
    """Where the pieces of a contraction's sums lie: ``scratch`` from ``first`` on, one
    accumulator after the other.
    """

    scratch: Scratch
    splits: int
    first: int = 0

    def start(self, c: Contraction, acc: int) -> int:
        """The first element of an accumulator."""
        return self.first + acc * self.splits * c.member.stage.size

    def forms(self, c: Contraction, piece: int) -> list[Address]:
        """Where the first stage stores each accumulator; ``piece`` is the axis that
        counts pieces.
        """
        own = c.store(c.member)
        key = ("axes", tuple(range(len(c.group.rows))))
        term = Term(c.member.stage.size, key, piece)
        return [
            Address((*own.terms, term), own.const + self.start(c, acc))
            for acc in range(len(c.results))
        ]

    def lies_plain(self, c: Contraction) -> bool:
        """Whether the first stage cannot store the sums as vec4s."""
        axis = inner_axis(c, c.n)
        forms = self.forms(c, len(c.group.space))
        return not c.wide or not all(contiguous(f, axis) for f in forms)


def piece_count(c: Contraction, splits: int) -> int:
    """Elements that the pieces of a contraction take, in whole vec4s."""
    size = splits * c.member.stage.size * len(c.results)
    return -(-size // WIDTH) * WIDTH


def pieces_of(c: Contraction, splits: int) -> Pieces:
    """Memory for the pieces of one contraction."""
    name = f"{c.member.stage.name}_pieces"
    return Pieces(Scratch(name, "f32", piece_count(c, splits)), splits)


class PieceSums:
    """The text of a thread that adds the pieces of its results, in order."""

    def __init__(self, c: Contraction, pieces: Pieces):
        self.c, self.pieces = c, pieces
        self.group = g = c.group
        layout = lay_out(g, c.epilogue, [])
        forms = (*layout.addresses.values(), *layout.stores.values())
        blocked = used_alone(list(c.epilogue.values()), layout.addresses)
        walks = [f.axes() for f in forms]
        self.loop = collapse(range(len(g.rows)), g.space, walks, blocked)
        extents = {q[-1]: math.prod(g.space[a] for a in q) for q in self.loop}
        self.layout: Layout = replace(layout, loops=[self.loop], extents=extents)
        self.vector = vector_axis(self.layout, self.loop)
        own = visible(self.layout, layout.stores[c.member])
        key = ("axes", tuple(range(len(g.rows))))
        term = Term(c.member.stage.size, key, len(g.space))
        self.forms = [
            Address((*own.terms, term), own.const + pieces.start(c, acc))
            for acc in range(len(c.results))
        ]
        width = 1 if self.vector is None else WIDTH
        self.threads = math.prod(g.rows) // width

    @property
    def flops(self) -> int:
        """Additions."""
        return self.pieces.splits * math.prod(self.c.group.rows) * len(self.forms)

    def writer(self) -> Writer:
        """A writer for this text alone; it knows what cannot be bound as vec4."""
        w = make_writer(self.c.group, self.layout, self.c.target, self.vector)
        for m in self.c.group.stored:
            form = visible(self.layout, self.layout.stores[m])
            if not contiguous(form, self.vector):
                w.plain.add(self.c.group.target(m)[0])
        if not all(contiguous(f, self.vector) for f in self.forms):
            w.plain.add(self.pieces.scratch)
        return w

    def lines(self, w: Writer) -> list[str]:
        """The text, from the thread's number ``at`` on; opens no block before 1."""
        c, scratch, splits = self.c, self.pieces.scratch, self.pieces.splits
        vector = self.vector is not None
        piece = len(w.space)
        w.space.append(splits)
        w.open()
        w.base = 1
        decode(w, "at", self.loop, 1, self.vector)
        kind = wgsl_type("f32", vector)
        totals = [f"total{acc or ''}" for acc in range(len(self.forms))]
        for total in totals:
            w.line(f"var {total}: {kind};")
        w.open()
        w.axis(piece, "s", 2)
        for total, form in zip(totals, self.forms, strict=True):
            if vector and scratch not in w.plain:
                part = w.read(scratch, w.address(form, WIDTH), True)
            elif not vector:
                part = w.read(scratch, w.address(form), False)
            else:
                lanes = [w.read(scratch, at, False) for at in w.lane_addresses(form)]
                part = f"{kind}({', '.join(lanes)})"
            w.line(f"{total} = {total} + {part};")
        lines = w.close()
        count = w.param(("splits",), splits, stem="splits")
        w.line(f"for (var s = 0u; s < {count}; s = s + 1u) {{")
        w.blocks[-1] += [*indent(lines), "}"]
        for acc, (total, number) in enumerate(zip(totals, c.numbers, strict=True)):
            value = total
            if abs(number) != 1.0:
                key = ("number", acc) if acc else ("number",)
                scale = w.param(key, number, "f32", "number")
                value = w.let(f"{total} * {scale}", 1, "r")
            elif number == -1.0:
                value = w.let(f"-{total}", 1, "r")
            w.local.update(dict.fromkeys(c.results[acc], value))
        values = [w.splat(e) if vector else w.value(e) for e in c.epilogue.values()]
        for (m, e), v in zip(c.epilogue.items(), values, strict=True):
            form = visible(self.layout, self.layout.stores[m])
            w.store(c.group.target(m)[0], form, v, e.dtype, vector)
        inner = w.close()
        threads = w.param(("threads",), self.threads, stem="threads")
        return [*w.blocks[0], f"if (at >= {threads}) {{ return; }}", *inner]


def sum_pieces(c: Contraction, pieces: Pieces, name: str) -> Kernel:
    """A kernel that adds the pieces of one contraction."""
    s = PieceSums(c, pieces)
    size = 64 if c.target.family == "software" else 256
    return as_second(only(s, size, f"{name}_sum", "contract", c.target), [s])


def as_second(kernel: Kernel, sums: Sequence[PieceSums]) -> Kernel:
    """A kernel with what is true of second stages."""
    return replace(
        kernel,
        flops=sum(s.flops for s in sums),
        reason="adds the pieces of the kernel before, in a fixed order",
    )
