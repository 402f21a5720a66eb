"""What the namespace can do, in the standard's own terms."""

from __future__ import annotations

from typing import Any

from ...dtypes import DTYPES
from ...runtime import Device, current, devices
from .dtypes import _KINDS, NAMES


class Info:
    """The answers of ``__array_namespace_info__()``."""

    def capabilities(self) -> dict[str, Any]:
        """Optional parts: masks as indices and shapes that depend on data work, by
        reading the data; arrays have 64 dimensions at most.
        """
        return {
            "boolean indexing": True,
            "data-dependent shapes": True,
            "max dimensions": 64,
        }

    def default_device(self) -> Device:
        """Where arrays are made."""
        return current()

    def default_dtypes(self, *, device: Any = None) -> dict[str, Any]:
        """The dtypes of Python numbers and of indices."""
        return {
            "real floating": DTYPES["f32"],
            "integral": DTYPES["i32"],
            "indexing": DTYPES["i32"],
        }

    def dtypes(self, *, device: Any = None, kind: Any = None) -> dict[str, Any]:
        """The dtypes there are, of a kind or of several."""
        if isinstance(kind, tuple):
            return {n: d for k in kind for n, d in self.dtypes(kind=k).items()}
        return {
            full: DTYPES[short]
            for short, full in NAMES.items()
            if short != "f16" and (kind is None or short in _KINDS[kind])
        }

    def devices(self) -> list[str]:
        """Names of all devices that could be used."""
        return [d.spec for d in devices()]


def __array_namespace_info__() -> Info:
    """What the namespace can do."""
    return Info()
