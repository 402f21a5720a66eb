"""shaderdsl: GPU operations as symbolic expressions over named axes.

They are differentiated, fused, printed as WGSL and run through WebGPU.
"""

from __future__ import annotations

from typing import Any

from . import errors, random, tree
from .array import Array, asarray
from .function import compile, grad, jvp, lower, remat, value_and_grad, vjp
from .lowered import Lowered
from .namespace import *
from .op import Op, op
from .runtime import devices, profile, synchronize, use_device
from .tracing import spec

__version__ = "0.1.0"

_LAZY = ("nn", "ops", "optim", "interop", "testing", "web")


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return importlib.import_module(f".{name}", __name__)
    if name == "from_sympy":
        from .interop.show import from_sympy

        return from_sympy
    if name == "export_web":
        from .web import export_web

        return export_web
    raise AttributeError(f"module 'shaderdsl' has no attribute {name!r}")


def __dir__() -> list[str]:
    names = {*globals(), *_LAZY, "from_sympy", "export_web"}
    return sorted(names - {"Any", "annotations"})
