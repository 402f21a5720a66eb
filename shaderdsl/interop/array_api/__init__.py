"""The Python array API standard for :class:`shaderdsl.Array`.

``x.__array_namespace__()`` gives this module, so that code written for the standard
runs on a GPU. Beside the functions of 2021.12 there are those of later versions that do
without complex numbers.

What the standard has and this has not is refused by name: dtypes of 8, 16 and 64 bits
and complex numbers, sorting, sets, ``fft`` and ``linalg`` beyond products. Arrays do
not change, so that ``x[i] = y`` is refused, too.

Source: https://data-apis.org/array-api/
"""

from __future__ import annotations

import math
import sys
from typing import Any

from .creation import (
    arange,
    asarray,
    empty,
    empty_like,
    eye,
    from_dlpack,
    full,
    full_like,
    linspace,
    meshgrid,
    ones,
    ones_like,
    tril,
    triu,
    zeros,
    zeros_like,
)
from .dtypes import (
    astype,
    bool,
    can_cast,
    finfo,
    float16,
    float32,
    iinfo,
    int32,
    isdtype,
    result_type,
    uint32,
)
from .elementwise import *
from .information import __array_namespace_info__
from .linalg import matmul, matrix_transpose, tensordot, vecdot
from .manipulation import (
    broadcast_arrays,
    broadcast_shapes,
    broadcast_to,
    concat,
    expand_dims,
    flip,
    moveaxis,
    permute_dims,
    repeat,
    reshape,
    roll,
    squeeze,
    stack,
    take,
    take_along_axis,
    tile,
    unstack,
)
from .statistical import (
    all,
    any,
    argmax,
    argmin,
    count_nonzero,
    cumulative_prod,
    cumulative_sum,
    diff,
    max,
    mean,
    min,
    nonzero,
    prod,
    searchsorted,
    std,
    sum,
    var,
    where,
)

#: The newest version that does not ask for complex numbers.
__array_api_version__ = "2021.12"

e = math.e
inf = math.inf
nan = math.nan
newaxis = None
pi = math.pi

_NO_DTYPE = "values are computed in float32, int32, uint32 and bool"
_MISSING = {
    **dict.fromkeys(
        ("int8", "int16", "int64", "uint8", "uint16", "uint64", "float64"), _NO_DTYPE
    ),
    **dict.fromkeys(
        ("complex64", "complex128", "conj", "imag", "real"),
        "complex numbers are not computed with",
    ),
    **dict.fromkeys(
        ("argsort", "sort", "top_k"), "nothing is sorted; use NumPy on x.numpy()"
    ),
    **dict.fromkeys(
        (
            "isin",
            "unique_all",
            "unique_counts",
            "unique_inverse",
            "unique_values",
        ),
        "there are no set functions; use NumPy on x.numpy()",
    ),
    "fft": "there are no Fourier transforms; use NumPy on x.numpy()",
    "linalg": "of linear algebra there are matmul, matrix_transpose, tensordot and "
    "vecdot",
}


def __getattr__(name: str) -> Any:
    reason = _MISSING.get(name)
    raise AttributeError(
        f"shaderdsl has no {name} of the array API standard: {reason}"
        if reason
        else f"module {__name__!r} has no attribute {name!r}"
    )


def namespace(api_version: str | None = None) -> Any:
    """This module, for ``x.__array_namespace__(api_version=…)``.

    Raises:
        ValueError: of a version that is not written YYYY.MM.
    """
    if api_version is not None:
        year, dot, month = str(api_version).partition(".")
        if not (dot and year.isdigit() and month.isdigit()):
            raise ValueError(f"{api_version!r} is no version of the array API standard")
    return sys.modules[__name__]
