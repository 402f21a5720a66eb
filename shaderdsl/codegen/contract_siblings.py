"""Several contractions in one kernel: a workgroup's number says which one it serves.

Products that are too small to fill a device do so together, and an operand that they
share is read by all of them at about the same time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from .contract_matrices import (
    Matrices,
    MatrixShape,
    declare_matrices,
    with_matrices,
)
from .contract_matrix_shapes import choose_matrices
from .contract_plan import Contraction, analyse, plain_tensors
from .contract_shapes import Shape, choose_shape
from .contract_split import Pieces, PieceSums, as_second, piece_count, sum_pieces
from .contract_tiled import Tiled, declare
from .group import Group
from .parts import FLAT, Parts, side_by_side, together
from .program import Kernel, Scratch
from .schedule import finish, fold, kernel_name
from .target import Target


def sibling_kernels(group: Group, target: Target) -> list[Kernel]:
    """Print a group that stands for several contractions."""
    assert group.stands_for
    cs = [analyse(g, target) for g in group.stands_for]
    longest = min(16_384, target.loop_budget // 2)
    shape, splits = choose_matrices(cs, longest) or choose_shape(cs, longest)
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
    sums = [PieceSums(c, p) for c, p in zip(cs, pieces, strict=True)]
    second = side_by_side(group, sums, 256, f"{name}_sum", "contract", target)
    if len(second.bindings) <= target.limits.max_storage_buffers:
        return [first, as_second(second, sums)]
    apart = zip(cs, pieces, strict=True)
    return [first, *(sum_pieces(c, p, kernel_name(c.group)) for c, p in apart)]


def _first_stage(
    group: Group,
    cs: Sequence[Contraction],
    shape: Shape | MatrixShape,
    name: str,
    pieces: Sequence[Pieces | None],
) -> Kernel:
    """The sums, of pieces of k where there are such."""
    target = cs[0].target
    w = Parts([], target)
    for c, p in zip(cs, pieces, strict=True):
        plain_tensors(c, w, epilogue=p is None)
        if p is not None and p.lies_plain(c):  # one buffer, so of all of them
            w.plain.add(p.scratch)
    lines = [f"let every = {FLAT};"]
    total, memory = 0, dict[str, int]()
    for part, (c, p) in enumerate(zip(cs, pieces, strict=True)):
        w.begin(part, c.group)
        number, own = w.first(total), p.splits if p else 1
        tile = (
            Matrices(c, w, shape, own, number)
            if isinstance(shape, MatrixShape)
            else Tiled(c, w, shape, own, number)
        )
        text = tile.lines(p)
        total += tile.count
        memory = {a: max(n, memory.get(a, 0)) for a, n in tile.memory().items()}
        lines += w.branch(total, text)
    on_matrices = isinstance(shape, MatrixShape)
    w.shared += declare_matrices(memory) if on_matrices else declare(memory)
    lines.append("}")
    layout = together([c.layout for c in cs])
    grid = fold(total, target)
    kernel = finish(group, w, layout, lines, name, "contract", shape.size, grid)
    return with_matrices(kernel) if on_matrices else kernel
