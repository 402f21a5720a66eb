"""Rows of a table."""

from __future__ import annotations

from typing import Any

from ..op import op


@op("v d, ... -> ... d")
def embedding(table: Any, ids: Any) -> Any:
    """table[ids]; the gradient adds up what repeated ids receive, in a fixed order.

    Args:
        table: [v, d].
        ids: i32 or u32 of any shape, 0 ≤ id < v.

    Raises:
        IndexRangeError: ids known on the host leave the table.
    """
    return table.at(v=ids)
