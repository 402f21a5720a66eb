"""Several contractions in one kernel: a workgroup's number says which one it serves.

Products that are too small to fill a device do so together, and an operand that they
share is read by all of them at about the same time.
"""

from __future__ import annotations

import math
from dataclasses import replace

from .address import Key
from .contract_plan import Contraction, analyse, plain_tensors
from .contract_split import sum_pieces
from .contract_tile import FLAT
from .contract_tiled import Tiled, choose_shape, declare
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
    w = _Parts([], target)
    for c in cs:
        plain_tensors(c, w, epilogue=splits == 1)
    lines = [f"let every = {FLAT};"]
    total, memory = 0, dict[str, int]()
    after: list[Kernel] = []
    name = kernel_name(group)
    for part, c in enumerate(cs):
        w.begin(part, c)
        chunks = math.ceil(c.sizes[3] / shape.bk)
        pieces = math.ceil(chunks / math.ceil(chunks / splits))
        scratch = None
        if splits > 1:
            stage = c.member.stage
            scratch = Scratch(f"{stage.name}_pieces", "f32", pieces * stage.size)
            after.append(sum_pieces(c, scratch, pieces, kernel_name(c.group)))
        first = w.param(("first",), total, stem="first") if part else ""
        tile = Tiled(c, w, shape, pieces, f"every - {first}" if part else "every")
        text = tile.lines(scratch)
        total += tile.count
        memory = {a: max(n, memory.get(a, 0)) for a, n in tile.memory().items()}
        end = w.param(("end",), total, stem="end")
        again = "} else " if part else ""
        lines += [f"{again}if (every < {end}) {{", *indent(text)]
    w.shared += declare(memory)
    lines.append("}")
    layout = Layout(
        {m: b for c in cs for m, b in c.layout.bodies.items()},
        {n: a for c in cs for n, a in c.layout.addresses.items()},
        {m: a for c in cs for m, a in c.layout.stores.items()},
        [],
        {},
    )
    kernel = finish(
        group, w, layout, lines, name, "contract", shape.size, fold(total, target)
    )
    if splits > 1:
        why = f"{kernel.reason}; {splits} pieces of k".lstrip("; ")
        kernel = replace(kernel, members=(), writes=(), reason=why)
    return [kernel, *after]
