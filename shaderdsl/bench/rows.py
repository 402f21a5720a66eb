"""The table: every row that there is."""

from __future__ import annotations

from collections.abc import Sequence

from .contract_rows import CONTRACT_ROWS
from .memory_rows import MEMORY_ROWS
from .model_rows import MODEL_ROWS
from .work import Row

ROWS = (*MEMORY_ROWS, *CONTRACT_ROWS, *MODEL_ROWS)


def chosen(names: Sequence[str]) -> tuple[list[Row], list[str]]:
    """The rows of these names (all of them if there are none), and unknown names.

    A name stands for every row that begins with it and an underscore, too.
    """
    if not names:
        return list(ROWS), []
    found: list[Row] = []
    unknown = []
    for name in names:
        exact = [r for r in ROWS if r.name == name]
        rows = exact or [r for r in ROWS if r.name.startswith(f"{name}_")]
        found += [r for r in rows if r not in found]
        if not rows:
            unknown.append(name)
    return found, unknown


def order(row: Row) -> int:
    """When to measure a row: the ceilings first, which others are compared with, then
    whole models, which should not fall to a run's end.
    """
    if row.name in ("copy", "matmul_4096x4096x4096"):
        return 0
    return 1 if row in MODEL_ROWS else 2
