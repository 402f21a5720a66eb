"""Contract: sums of a product whose factors have different axes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .choice import pick
from .contract_matrices import MatrixShape, matrices
from .contract_matrix_shapes import choose_matrices
from .contract_plan import Contraction, analyse
from .contract_registers import Block, block_fits, likely_blocks, registers
from .contract_shapes import Shape, choose_shape
from .contract_split import Pieces, pieces_of, sum_pieces
from .contract_tiled import tiled
from .group import Group
from .program import Kernel
from .schedule import kernel_name
from .target import Target

# Positions of k that one running sum takes at most: rounding grows with its length.
_LONGEST = 16_384


def contract_kernels(group: Group, target: Target) -> list[Kernel]:
    """Print a group whose first member is a contraction."""
    c = analyse(group, target)
    if target.family == "software":
        cut = choose_registers(c)
        return register_kernels(c, cut.block, cut.splits)
    # Half of the budget, for loops that a driver may add.
    longest = min(_LONGEST, target.loop_budget // 2)
    tiles = choose_matrices([c], longest) or choose_shape([c], longest)
    return tiled_kernels(c, *tiles)


def tiled_kernels(
    c: Contraction, shape: Shape | MatrixShape, splits: int
) -> list[Kernel]:
    """Tiles in workgroup memory; of matrices that subgroups multiply, if the shape is
    one of these.
    """
    name = kernel_name(c.group)
    splits = no_empty(max(-(-p.extent // shape.bk) for p in c.passes), splits)
    pieces = pieces_of(c, splits) if splits > 1 else None
    if isinstance(shape, MatrixShape):
        first = matrices(c, name, shape, splits, pieces)
    else:
        first = tiled(c, name, shape, splits, pieces)
    return [first] if pieces is None else in_pieces(c, first, pieces)


def register_kernels(c: Contraction, block: Block, splits: int = 0) -> list[Kernel]:
    """Blocks in registers, in pieces of k where sums are long or threads few."""
    name = kernel_name(c.group)
    steps = max(-(-p.extent // p.unroll) for p in c.passes)
    splits = no_empty(steps, splits or choose_splits(c, block))
    if splits == 1:
        return [registers(c, name, block)]
    pieces = pieces_of(c, splits)
    return in_pieces(c, registers(c, name, block, splits, pieces), pieces)


def no_empty(steps: int, splits: int) -> int:
    """Pieces, none of them empty."""
    return -(-steps // -(-steps // splits))


def in_pieces(c: Contraction, first: Kernel, pieces: Pieces) -> list[Kernel]:
    """Both stages; the second one computes and stores the members."""
    why = f"{first.reason}; {pieces.splits} pieces of k".lstrip("; ")
    return [
        replace(first, members=(), writes=(), reason=why),
        sum_pieces(c, pieces, first.name),
    ]


@dataclass(frozen=True)
class Cut:
    """A block of registers, and into how many pieces k is cut."""

    block: Block
    splits: int


def choose_registers(c: Contraction) -> Cut:
    """Blocks and pieces: the default of the cost model, or what was tuned."""
    blocks = likely_blocks(c)
    limits = c.target.limits

    def fits(cut: Cut) -> bool:
        block, steps = cut.block, max(-(-p.extent // p.unroll) for p in c.passes)
        return (
            block_fits(c, block)
            and min(block.tm, block.tn, block.x, block.y, cut.splits) >= 1
            and block.tm * block.tn * len(c.results) <= 1024
            and block.size <= limits.max_invocations
            and block.lanes == blocks[0].lanes
            and (not block.lanes or (block.x, block.y) == (blocks[0].x, blocks[0].y))
            and cut.splits >= needed_splits(c)
            and cut.splits <= steps
        )

    def candidates() -> list[Cut]:
        cuts = [Cut(b, choose_splits(c, b)) for b in blocks]
        return cuts + [Cut(x.block, max(x.splits, 1) * 2) for x in cuts[:3]]

    default = Cut(blocks[0], choose_splits(c, blocks[0]))
    return pick(c.target, "registers", default, candidates, fits)


def needed_splits(c: Contraction) -> int:
    """Pieces of k for the loop budget and for exact sums."""
    budget = c.target.loop_budget // 2
    return max(1, -(-step_count(c) // budget), -(-c.sizes[3] // _LONGEST))


def step_count(c: Contraction) -> int:
    """Steps of all loops over k."""
    return sum(-(-p.extent // p.unroll) for p in c.passes)


def choose_splits(c: Contraction, block: Block) -> int:
    """Pieces of k: for the loop budget, for exact sums, and for enough threads."""
    batch, m, n, _ = c.sizes
    steps = step_count(c)
    needed = needed_splits(c)
    groups = (
        batch
        * math.ceil(m / (block.tm * block.y))
        * math.ceil(n / (block.tn * block.x))
    )
    wanted = min(8 // groups, steps // 256) if c.target.family == "software" else 1
    return max(needed, wanted)
