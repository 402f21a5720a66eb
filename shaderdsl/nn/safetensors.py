"""Reading safetensors files: mapped into memory, checked before anything is used.

The format: eight bytes (little endian) with the length of a JSON header, the header,
``{name: {"dtype", "shape", "data_offsets": [begin, end]}}``, then the data.
Source: https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError

__all__ = ["SafetensorsFile"]

_DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,  # the upper half of an f32
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_CURE = "fetch or save the file again"


class SafetensorsFile:
    """One file: names, shapes, and tensors that are read when asked for.

    Raises:
        CheckpointError: it cannot be opened, is truncated, or is no such file.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            size = path.stat().st_size
            with open(path, "rb") as file:
                start = file.read(8)
                length = int.from_bytes(start, "little")
                if len(start) < 8 or length > size - 8:
                    raise CheckpointError(
                        f"{path} is cut off: {size} bytes, its header alone needs "
                        f"{8 + length}",
                        cure=_CURE,
                    )
                text = file.read(length)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
        self._begin = 8 + length
        self.tensors = self._checked(text, size - self._begin)
        self._data: np.ndarray | None = None

    def _checked(self, text: bytes, available: int) -> dict[str, Any]:
        try:
            header = json.loads(text)
            self.metadata = dict(header.pop("__metadata__", {}))
            needed = 0
            for name, about in header.items():
                begin, end = about["data_offsets"]
                shape = about["shape"]
                if not all(isinstance(n, int) and n >= 0 for n in [*shape, begin, end]):
                    raise ValueError(f"sizes of {name!r} are no numbers")
                kind = about["dtype"]
                if kind not in _DTYPES:
                    raise CheckpointError(
                        f"{self.path}: {name} is {kind}, which is not read",
                        cure="f32, f16 and bf16 weights are",
                    )
                if end - begin != math.prod(shape) * np.dtype(_DTYPES[kind]).itemsize:
                    raise ValueError(f"{name!r} does not fill its {end - begin} bytes")
                needed = max(needed, end)
        except CheckpointError:
            raise
        except (
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            RecursionError,
        ) as error:
            raise CheckpointError(
                f"{self.path} has no safetensors header: {error}", cure=_CURE
            ) from error
        if needed > available:
            raise CheckpointError(
                f"{self.path} is cut off: {available} bytes of data, its header "
                f"promises {needed}",
                cure=_CURE,
            )
        return header

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        return tuple(self.tensors[name]["shape"])

    def read(self, name: str) -> np.ndarray:
        """A tensor; bf16 is widened to f32, all else is a view of the file."""
        about = self.tensors[name]
        begin, end = about["data_offsets"]
        if self._data is None:
            self._data = (
                np.memmap(self.path, np.uint8, "r", self._begin)
                if self.path.stat().st_size > self._begin
                else np.zeros(0, np.uint8)
            )
        raw = np.asarray(self._data[begin:end])
        if begin % np.dtype(_DTYPES[about["dtype"]]).itemsize:
            raw = raw.copy()
        x: np.ndarray = raw.view(_DTYPES[about["dtype"]]).reshape(about["shape"])
        if about["dtype"] == "BF16":
            x = (x.astype(np.uint32) << 16).view(np.float32)
        return x
