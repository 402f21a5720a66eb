"""Online: attention and its like in one pass, products computed again where needed."""

from __future__ import annotations

from dataclasses import replace

from .group import Group
from .online_masks import scores_agree
from .online_matrices import choose_matrix_stream, on_matrices
from .online_plan import Online, analyse
from .online_registers import choose_rows, registers
from .online_shape import choose_tiles
from .online_split import split_kernels
from .online_stream import streamed
from .online_stream_shape import choose_stream
from .online_tiled import tiled
from .program import Kernel
from .target import Target


def online_kernels(group: Group, target: Target) -> list[Kernel]:
    """Print a chain."""
    o = analyse(group, target)
    flops = 2 * o.batches * o.extent(o.row, o.line, *o.outer)
    inner = sum(o.extent(p.inner) for p in o.products)
    flops *= inner + sum(1 if s.column is None else o.extent(s.column) for s in o.sums)
    if group.kind == "pieces":
        first, *more = split_kernels(o)
        return [replace(first, flops=flops), *more]
    return [replace(_kernel(o), flops=flops)]


def _kernel(o: Online) -> Kernel:
    """In the first form that fits the device; rows in registers fit any."""
    if o.target.family != "software":
        agree = scores_agree(o)
        matrices = choose_matrix_stream(o) if agree else None
        if matrices is not None:
            return on_matrices(o, matrices)
        stream = choose_stream(o) if agree else None
        if stream is not None:
            return streamed(o, stream)
        tiles = choose_tiles(o)
        if tiles is not None:
            return tiled(o, tiles)
    return registers(o, choose_rows(o))
