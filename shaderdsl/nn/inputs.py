"""What a model is given beside its weights: ids, masks, documents, positions."""

from __future__ import annotations

from typing import Any

from ..array import Array, asarray
from ..errors import DTypeError, ShapeError
from ..ids import check_index
from ..ir import expr as E
from ..namespace import cast, where
from . import heads
from .config import TransformerConfig
from .rotary import check_positions

__all__ = ["check_ids", "row_documents", "row_positions"]


def check_ids(ids: Any) -> Array:
    """Ids as an integer array of one or two dimensions."""
    a = asarray(ids)
    if a.dtype not in E.INTS:
        raise DTypeError(f"ids are integers, not {a.dtype}", where=E.user_location())
    if a.ndim not in (1, 2) or 0 in a.shape:
        raise ShapeError(
            f"ids are [t] or [b, t] and not empty; got {list(a.shape)}",
            where=E.user_location(),
        )
    return a


def row_documents(ids: Array, mask: Any, documents: Any) -> Array | None:
    """The document of each token, -1 for padding; None where all are of one.

    Raises:
        DTypeError, ShapeError: no whole numbers or truth values, another shape.
    """
    if mask is None and documents is None:
        return None
    given = {}
    for name, x in (("mask", mask), ("documents", documents)):
        if x is None:
            continue
        a = given[name] = asarray(x)
        if a.dtype not in (*E.INTS, *(("bool",) if name == "mask" else ())):
            raise DTypeError(f"{name} is {a.dtype}", where=E.user_location())
        if a.shape not in (ids.shape, ids.shape[-1:]):
            raise ShapeError(
                f"{name} has shape {list(a.shape)} for ids of {list(ids.shape)}",
                where=E.user_location(),
            )
    kept = given.get("documents")
    if kept is not None:
        kept = cast(kept, "i32")
    if "mask" in given:
        kept = where(given["mask"] != 0, 0 if kept is None else kept, -1)
    return kept


def row_positions(
    config: TransformerConfig, ids: Array, segments: Array | None, given: Any
) -> Array | None:
    """Positions that are given, or that documents imply; None: each row's place.

    Raises:
        DTypeError, ShapeError: no integers, another shape.
        IndexRangeError: more tokens than the model has positions.
    """
    if given is None:
        if segments is None:
            return None
        check_positions(0, ids.shape[-1], config.max_positions)
        y: Array = heads.places(segments, segments)
        return y
    at = asarray(given)
    if at.dtype not in E.INTS:
        raise DTypeError(f"positions are {at.dtype}", where=E.user_location())
    if at.shape not in (ids.shape, ids.shape[-1:]):
        raise ShapeError(
            f"positions have shape {list(at.shape)} for ids of {list(ids.shape)}",
            where=E.user_location(),
        )
    check_index(at, config.max_positions, "the positions", 0, "positions")
    return at
