"""Shapes of tiles of matrices, and how one is chosen for contractions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .choice import pick
from .contract_matrices import MatrixShape, has_matrices
from .contract_plan import Contraction
from .contract_shapes import pieces_of_k, workgroups

#: From large to small, with a guess of the share of the best speed that each reaches on
#: a large product.
MATRIX_SHAPES = (
    (MatrixShape(128, 256, 32, 2, 4), 0.87),
    (MatrixShape(256, 128, 32, 4, 2), 0.86),
    (MatrixShape(128, 128, 32, 2, 2), 1.0),
    (MatrixShape(64, 128, 32, 2, 2), 0.82),
    (MatrixShape(128, 64, 32, 2, 2), 0.82),
    (MatrixShape(64, 64, 32, 2, 2), 0.66),
    (MatrixShape(32, 32, 32, 1, 2), 0.3),
)


@dataclass(frozen=True)
class MatrixTiling:
    """A shape, and into how many pieces k is cut."""

    shape: MatrixShape
    splits: int


def choose_matrices(
    cs: Sequence[Contraction], longest: int
) -> tuple[MatrixShape, int] | None:
    """Tiles of matrices and pieces of k for contractions that share a kernel; None
    where their factors are no f16, or the device has no such matrices.
    """
    if not all(has_matrices(c) for c in cs):
        return None
    k = max(p.extent for c in cs for p in c.passes)
    costs = {t: _cost(cs, t) for t in _tilings(cs, k, longest)}
    if not costs:
        return None

    def fits(t: MatrixTiling) -> bool:
        return (
            t.shape in [shape for shape, _ in MATRIX_SHAPES]
            and all(t.shape.fits(c) for c in cs)
            and t.splits >= 1
            and math.ceil(k / t.splits) <= max(longest, t.shape.bk)
        )

    order = sorted(costs, key=lambda t: costs[t])
    chosen = pick(cs[0].target, "matrices", order[0], lambda: order, fits)
    return chosen.shape, chosen.splits


def _tilings(cs: Sequence[Contraction], k: int, longest: int) -> Iterator[MatrixTiling]:
    """Shapes that the device allows, with pieces that are neither tiny nor too long."""
    for shape, _ in MATRIX_SHAPES:
        if not all(shape.fits(c) for c in cs):
            continue
        for splits in pieces_of_k(k, longest, shape.bk, (2, 4, 8, 16, 32)):
            yield MatrixTiling(shape, splits)


def _cost(cs: Sequence[Contraction], t: MatrixTiling) -> float:
    """Time in multiplications of a processor, with reading and writing of pieces."""
    shape, splits = t.shape, t.splits
    steps = max(sum(p.extent * len(p.products) for p in c.passes) for c in cs)
    groups = splits * sum(workgroups(c, shape) for c in cs)
    length = math.ceil(steps / splits) + 4 * shape.bk
    turns = math.ceil(groups / _PROCESSORS)
    cost = turns * shape.bm * shape.bn * length / dict(MATRIX_SHAPES)[shape]
    if splits > 1:
        results = sum(math.prod(c.sizes[:3]) * len(c.results) for c in cs)
        cost += results * (splits + 1) / _PROCESSORS * _PIECE + _STAGE
    return cost


#: Processors of a large device.
_PROCESSORS = 132
#: What moving a sum of a piece costs a processor, and another launch: multiplications.
_PIECE, _STAGE = 400, 8_000_000
