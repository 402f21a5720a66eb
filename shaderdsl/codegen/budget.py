"""How long the loops of rows may be: what one invocation may spend on them.

A driver that counts iterations ends every loop of an invocation silently once they are
used up (see `Target.loop_budget`), so what is longer is cut before it is planned.
Half of the budget stays for loops that a driver may add.
"""

from __future__ import annotations

from .target import Target

#: Walks of a row that one reduction of the longest kind leaves room for.
_WALKS = 4
#: Positions of a row, of which a loop may look some beyond the end, fit 32 bits.
_POSITIONS = 1 << 30


def row_lanes(target: Target) -> int:
    """Lanes that walk a row which is too long to be held in registers."""
    most = min(target.limits.max_invocations, target.limits.max_workgroup_size_x)
    return min(64 if target.family == "software" else 256, most)


def longest_row(target: Target) -> int:
    """Elements of a row that one reduction may walk."""
    most = row_lanes(target) * max(1, target.loop_budget // (2 * _WALKS))
    return min(most, _POSITIONS)


def longest_scan(target: Target) -> int:
    """Elements of a running sum, which are walked twice."""
    return row_lanes(target) * max(1, target.loop_budget // 4)


def row_fits(elements: int, walks: int, target: Target) -> bool:
    """Whether a row may be walked so many times by one kernel."""
    steps = -(-elements // row_lanes(target))
    return walks * steps <= target.loop_budget // 2
