"""Contract: sums of a product whose factors have different axes, from a tile of results per workgroup to a GEMV."""

from __future__ import annotations

from .contract_plan import Contraction, analyse
from .contract_registers import choose_block, registers
from .partition import Group
from .program import Kernel
from .schedule import kernel_name
from .target import Target


def contract_kernels(group: Group, target: Target) -> list[Kernel]:
    """Print a group whose first member is a contraction."""
    c = analyse(group, target)
    return [registers(c, kernel_name(group), choose_block(c))]
