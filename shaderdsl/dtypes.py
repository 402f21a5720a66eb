"""The dtypes that arrays have, and arrays of the host brought to one of them."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from .errors import DTypeError, IndexRangeError, ShaderError, ShapeError, TraceError
from .ir import expr as E
from .ir.primitives import PRIMITIVES
from .ir.trace import Value

NUMPY = {
    "f32": np.float32,
    "f16": np.float16,
    "i32": np.int32,
    "u32": np.uint32,
    "bool": np.bool_,
}
_NAMES = {np.dtype(t): n for n, t in NUMPY.items()}


class DType:
    """The dtype of an array. It equals its name: ``x.dtype == "f32"``.

    It is no string, because the array API standard's tools take a string for one of the
    standard's own names (``"float32"``).
    """

    __slots__ = ("name",)

    def __init__(self, name: str):
        self.name = name

    def __eq__(self, other: object) -> bool:
        if isinstance(other, DType):
            return self.name == other.name
        return self.name == other if isinstance(other, str) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return repr(self.name)

    def __format__(self, form: str) -> str:
        return format(self.name, form)


DTYPES = {name: DType(name) for name in NUMPY}


def dtype_name(dtype: Any) -> str:
    """``"f32"``, ``np.float32``, ``"float32"``, … as one of our dtypes.

    Raises:
        DTypeError: for a dtype that is not computed in.
    """
    if isinstance(dtype, DType):
        return dtype.name
    if isinstance(dtype, str) and dtype in NUMPY:
        return dtype
    try:
        return _NAMES[np.dtype(dtype)]
    except (KeyError, TypeError):
        raise DTypeError(
            f"dtype {dtype!r} is not one of {', '.join(NUMPY)}",
            where=E.user_location(),
            cure="convert first",
        ) from None


_warned = False


def host_array(x: Any, dtype: str | None = None) -> tuple[np.ndarray, str]:
    """Anything array-like as a NumPy array of one of our dtypes.

    float64 is rounded to f32 (with one warning a process); 64-bit integers are checked
    against the range of i32. Floats saturate where integers are asked for, NaN is 0.
    """
    global _warned
    if isinstance(x, Value):
        raise TraceError(
            "a value of an op is used where an array is needed",
            where=E.user_location(),
            cure="inside an op, call the plain function of another: other.function(x)",
        )
    if not isinstance(x, np.ndarray):
        if not hasattr(x, "__array__") and hasattr(x, "__dlpack__"):
            x = np.from_dlpack(x)
        python = isinstance(x, (float, list, tuple))
        try:
            x = np.asarray(x)
        except ShaderError:
            raise
        except (TypeError, ValueError) as error:
            raise ShapeError(
                f"this {type(x).__name__} is no array: {error}",
                where=E.user_location(),
            ) from None
        if python and x.dtype == np.float64 and dtype is None:
            dtype = "f32"
    if not x.dtype.isnative:
        x = x.astype(x.dtype.newbyteorder("="))
    if dtype is not None:
        dtype = dtype_name(dtype)
        if x.dtype.kind not in "fiub" and x.dtype.name != "bfloat16":
            raise _no_array_of(x.dtype)
        if dtype in E.INTS and x.dtype.kind in "iu":
            _check_range(x, dtype)
        if dtype in E.INTS and x.dtype.kind == "f":
            return PRIMITIVES[f"to_{dtype}"].numpy(x), dtype
        with np.errstate(over="ignore"):
            return np.asarray(x, NUMPY[dtype]), dtype
    if x.dtype in _NAMES:
        return x, _NAMES[x.dtype]
    if x.dtype.kind == "f" and x.dtype.itemsize >= 8:
        if not _warned:
            _warned = True
            file, _, line = (E.user_location() or "").rpartition(":")
            warnings.warn_explicit(
                "float64 is rounded to float32", UserWarning, file, int(line or 0)
            )
        with np.errstate(over="ignore"):
            return x.astype(np.float32), "f32"
    if x.dtype.kind in "iu":
        name = "u32" if x.dtype == np.uint64 else "i32"
        _check_range(x, name)
        return x.astype(NUMPY[name]), name
    if x.dtype.name == "bfloat16":
        return x.astype(np.float32), "f32"
    raise _no_array_of(x.dtype)


def _no_array_of(dtype: Any) -> DTypeError:
    return DTypeError(
        f"an array of {dtype} cannot be used",
        where=E.user_location(),
        cure="convert it to float32 or int32",
    )


def _check_range(x: np.ndarray, name: str) -> None:
    info = np.iinfo(NUMPY[name])
    if x.size and (int(x.min()) < info.min or int(x.max()) > info.max):
        raise IndexRangeError(
            f"an integer array holds {x.min()} … {x.max()}, outside of {name}",
            where=E.user_location(),
        )
