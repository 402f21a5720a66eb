"""Several contractions in one kernel: a workgroup's number says which one it serves.

Products that are too small to fill a device do so together, and an operand that they
share is read by all of them at about the same time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from .address import Key
from .contract_plan import Contraction, analyse, plain_tensors
from .contract_shapes import Shape, choose_shape
from .contract_split import Pieces, PieceSums, as_second, piece_count, sum_pieces
from .contract_tile import FLAT
from .contract_tiled import Tiled, declare
from .partition import Group
from .program import Kernel, Scratch
from .schedule import Layout, finish, fold, kernel_name
from .target import Target
from .writer import Writer, indent


class _Parts(Writer):
    """A writer of several texts with axes of their own, over the same bindings."""

    part = 0

    def param(
        self,
        key: Key,
        value: int | float | tuple[str, str],
        dtype: str = "u32",
        stem: str = "n",
    ) -> str:
        # Axes are numbered anew in each part.
        return super().param((self.part, *key), value, dtype, stem)

    def begin(self, part: int, c: Contraction) -> None:
        """Forget one part's values."""
        self.part, self.space = part, list(c.group.space)
        self.names, self.depth, self.local, self.addresses = {}, {}, {}, {}
        self.blocks, self.memo, self.vector, self.base = [[]], [{}], None, 0


def sibling_kernels(group: Group, target: Target) -> list[Kernel]:
    """Print a group that stands for several contractions."""
    assert group.stands_for
    cs = [analyse(g, target) for g in group.stands_for]
    shape, splits = choose_shape(cs, min(16_384, target.loop_budget // 2))
    name = kernel_name(group)
    if splits == 1:
        return [_first_stage(group, cs, shape, name, [None] * len(cs))]
    counts = []
    for c in cs:
        chunks = max(math.ceil(p.extent / shape.bk) for p in c.passes)
        counts.append(math.ceil(chunks / math.ceil(chunks / splits)))
    sizes = [piece_count(c, n) for c, n in zip(cs, counts, strict=True)]
    scratch = Scratch(f"{name}_pieces", "f32", sum(sizes))
    pieces = [Pieces(scratch, n, sum(sizes[:i])) for i, n in enumerate(counts)]
    kernel = _first_stage(group, cs, shape, name, pieces)
    why = f"{kernel.reason}; {splits} pieces of k".lstrip("; ")
    first = replace(kernel, members=(), writes=(), reason=why)
    second = _second_stage(group, cs, pieces, name)
    if len(second.bindings) <= target.limits.max_storage_buffers:
        return [first, second]
    apart = zip(cs, pieces, strict=True)
    return [first, *(sum_pieces(c, p, kernel_name(c.group)) for c, p in apart)]


def _first_stage(
    group: Group,
    cs: Sequence[Contraction],
    shape: Shape,
    name: str,
    pieces: Sequence[Pieces | None],
) -> Kernel:
    """The sums, of pieces of k where there are such."""
    target = cs[0].target
    w = _Parts([], target)
    for c, p in zip(cs, pieces, strict=True):
        plain_tensors(c, w, epilogue=p is None)
    lines = [f"let every = {FLAT};"]
    total, memory = 0, dict[str, int]()
    for part, (c, p) in enumerate(zip(cs, pieces, strict=True)):
        w.begin(part, c)
        first = w.param(("first",), total, stem="first") if part else ""
        number = f"every - {first}" if part else "every"
        tile = Tiled(c, w, shape, p.splits if p else 1, number)
        text = tile.lines(p)
        total += tile.count
        memory = {a: max(n, memory.get(a, 0)) for a, n in tile.memory().items()}
        end = w.param(("end",), total, stem="end")
        again = "} else " if part else ""
        lines += [f"{again}if (every < {end}) {{", *indent(text)]
    w.shared += declare(memory)
    lines.append("}")
    layout = _together([c.layout for c in cs])
    grid = fold(total, target)
    return finish(group, w, layout, lines, name, "contract", shape.size, grid)


def _second_stage(
    group: Group, cs: Sequence[Contraction], pieces: Sequence[Pieces], name: str
) -> Kernel:
    """Adds the pieces of all contractions."""
    target, size = cs[0].target, 256
    sums = [PieceSums(c, p) for c, p in zip(cs, pieces, strict=True)]
    w = _Parts([], target)
    for s in sums:
        w.plain |= s.writer().plain
    lines = [f"let every = {FLAT};"]
    total = 0
    for part, s in enumerate(sums):
        w.begin(part, s.c)
        w.vector, w.addresses = s.vector, s.writer().addresses
        first = w.param(("first",), total, stem="first") if part else ""
        number = f"(every - {first})" if part else "every"
        w.line(f"let at = {number} * {size}u + lane;")
        text = s.lines(w)
        total += -(-s.threads // size)
        end = w.param(("end",), total, stem="end")
        again = "} else " if part else ""
        lines += [f"{again}if (every < {end}) {{", *indent(text)]
    lines.append("}")
    layout = _together([s.layout for s in sums])
    grid = fold(total, target)
    kernel = finish(group, w, layout, lines, f"{name}_sum", "contract", size, grid)
    return as_second(kernel, sums)


def _together(layouts: Sequence[Layout]) -> Layout:
    """What a kernel reads and writes, for its figures."""
    return Layout(
        {m: b for x in layouts for m, b in x.bodies.items()},
        {n: a for x in layouts for n, a in x.addresses.items()},
        {m: a for x in layouts for m, a in x.stores.items()},
        [],
        {},
    )
