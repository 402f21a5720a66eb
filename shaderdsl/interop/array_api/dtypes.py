"""Data types of the standard and the functions about them."""

from __future__ import annotations

import builtins
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...array import Array, asarray
from ...dtypes import DTYPES, NUMPY, DType, dtype_name
from ...errors import DTypeError
from ...ir import expr as E

bool = DTYPES["bool"]
int32 = DTYPES["i32"]
uint32 = DTYPES["u32"]
float16 = DTYPES["f16"]
float32 = DTYPES["f32"]

#: The standard's name of each dtype, by ours.
NAMES = {
    "bool": "bool",
    "i32": "int32",
    "u32": "uint32",
    "f16": "float16",
    "f32": "float32",
}

_KINDS = {
    "bool": {"bool"},
    "signed integer": {"i32"},
    "unsigned integer": {"u32"},
    "integral": {"i32", "u32"},
    "real floating": {"f32", "f16"},
    "complex floating": set(),
    "numeric": {"i32", "u32", "f32", "f16"},
}
# float16 is no part of the standard; it meets float32 as one would expect.
_JOIN = {
    frozenset({"f16", "f32"}): "f32",
}


def dtype_of(x: Any) -> DType:
    """The dtype of an array, or the dtype itself."""
    return x.dtype if isinstance(x, Array) else DTYPES[dtype_name(x)]


def result_type(*arrays_and_dtypes: Any) -> DType:
    """The dtype that operands of these dtypes are brought to.

    Python numbers take the dtype of what they meet.

    Raises:
        DTypeError: the standard defines no common dtype, or it has 64 bits.
    """
    numbers = [x for x in arrays_and_dtypes if isinstance(x, (int, float))]
    found = {str(dtype_of(x)) for x in arrays_and_dtypes if x not in _either(numbers)}
    if not found:
        raise DTypeError(
            "result_type of no array and no dtype", where=E.user_location()
        )
    joined = found.pop() if len(found) == 1 else _JOIN.get(frozenset(found))
    if joined is None:
        raise DTypeError(
            f"{' and '.join(sorted(NAMES[n] for n in found))} have no common dtype",
            where=E.user_location(),
            cure="convert one of them with astype",
        )
    for number in numbers:
        if isinstance(number, builtins.bool):
            fits = joined == "bool"
        elif isinstance(number, int):
            fits = joined != "bool"
        else:
            fits = joined in E.FLOATS
        if not fits:
            raise DTypeError(
                f"the number {number!r} does not become {NAMES[joined]}",
                where=E.user_location(),
                cure="convert the array with astype",
            )
    return DTYPES[joined]


class _either:
    """Membership by identity: comparing arrays gives arrays."""

    def __init__(self, items: list[Any]):
        self.ids = {id(x) for x in items}

    def __contains__(self, x: object) -> builtins.bool:
        return id(x) in self.ids


def can_cast(from_: Any, to: Any) -> builtins.bool:
    """Whether promotion brings one dtype (or an array's) to another."""
    a, b = str(dtype_of(from_)), str(dtype_of(to))
    return a == b or _JOIN.get(frozenset({a, b})) == b


def isdtype(dtype: Any, kind: Any) -> builtins.bool:
    """Whether a dtype is of a kind: a name such as ``"real floating"``, a dtype, or a
    tuple of these.
    """
    if isinstance(kind, tuple):
        return any(isdtype(dtype, k) for k in kind)
    name = str(dtype_of(dtype))
    if isinstance(kind, str):
        if kind not in _KINDS:
            raise DTypeError(
                f"{kind!r} is no kind of dtype; there are {', '.join(_KINDS)}",
                where=E.user_location(),
            )
        return name in _KINDS[kind]
    return name == str(dtype_of(kind))


def astype(
    x: Array, dtype: Any, /, *, copy: builtins.bool = True, device: Any = None
) -> Array:
    """The array in another dtype; floats to integers truncate."""
    y = asarray(x, dtype)
    return y if device is None else y.to_device(device)


@dataclass(frozen=True)
class FloatInfo:
    """Limits of a floating-point dtype."""

    bits: int
    eps: float
    max: float
    min: float
    smallest_normal: float
    dtype: DType


@dataclass(frozen=True)
class IntInfo:
    """Limits of an integer dtype."""

    bits: int
    max: int
    min: int
    dtype: DType


def finfo(type: Any, /) -> FloatInfo:
    """Limits of a floating-point dtype, or of an array's."""
    dtype = dtype_of(type)
    if dtype not in E.FLOATS:
        raise DTypeError(f"finfo of {dtype}", where=E.user_location())
    i = np.finfo(NUMPY[dtype.name])
    return FloatInfo(
        i.bits, float(i.eps), float(i.max), float(i.min), float(i.tiny), dtype
    )


def iinfo(type: Any, /) -> IntInfo:
    """Limits of an integer dtype, or of an array's."""
    dtype = dtype_of(type)
    if dtype not in E.INTS:
        raise DTypeError(f"iinfo of {dtype}", where=E.user_location())
    i = np.iinfo(NUMPY[dtype.name])
    return IntInfo(i.bits, int(i.max), int(i.min), dtype)
