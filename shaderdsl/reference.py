"""A function's graph and its derivative, evaluated in NumPy float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .engine import placeholder
from .ir import differentiate, interpret
from .ir.expr import FLOATS
from .tracing import Traced

Arrays = Sequence[Any]


class Graph:
    """A function's graph and its derivative, evaluated in NumPy float64.

    Args:
        function: of arrays, giving an array or a tuple of them.
        args: arrays that show shapes and dtypes.

    Attributes:
        several: whether the function gives a tuple.
        floats: positions of the arguments that are differentiated.
    """

    def __init__(self, function: Callable[..., Any], args: Arrays):
        traced = Traced(function, tuple(args), "reference")
        self.inputs, self.outs = traced.inputs, traced.outs
        self.several = traced.result.kind in (tuple, list)
        self.floats = [k for k, s in enumerate(self.inputs) if s.dtype in FLOATS]
        self.seeds = [
            placeholder(("reference cotangent", k), s.shape, s.dtype, "dy")
            if s.dtype in FLOATS
            else None
            for k, s in enumerate(self.outs)
        ]
        wrt = [self.inputs[k] for k in self.floats]
        self.gradients = differentiate.vjp(self.outs, self.seeds, wrt)
        self.captured = {
            s: s.source.numpy()
            for s in _captured([*self.outs, *(g for g in self.gradients if g)])
            if s not in self.inputs and s.source is not None
        }

    def _given(self, args: Arrays) -> dict[Any, Any]:
        return dict(zip(self.inputs, args, strict=True)) | self.captured

    def value(self, args: Arrays, noise: Any = None) -> list[Any]:
        """The results; under ``noise`` (see ``testing.rounding``) as f32 may give."""
        return interpret.evaluate(self.outs, self._given(args), noise=noise)

    def gradient(self, args: Arrays, cotangents: Arrays, noise: Any = None) -> Any:
        """Cotangents of the float arguments, in order; zeros where none."""
        given = self._given(args)
        given |= {
            s: c for s, c in zip(self.seeds, cotangents, strict=True) if s is not None
        }
        real = [g for g in self.gradients if g is not None]
        found = iter(interpret.evaluate(real, given, noise=noise))
        return [
            np.zeros(np.shape(args[k])) if g is None else next(found)
            for k, g in zip(self.floats, self.gradients, strict=True)
        ]


def _captured(outs: Arrays) -> list[Any]:
    from .ir.stage import topo_stages

    return [s for s in topo_stages(outs) if s.kind == "input"]
