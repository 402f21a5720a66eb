"""Learning rates as functions of the step: of numbers, or of arrays on the device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import namespace as sd
from .array import asarray, is_number
from .errors import ShaderError

__all__ = ["Schedule", "cosine", "linear"]

#: the rate at step 0, 1, …: a number, or an array of the step's shape for an array
Schedule = Callable[[Any], Any]


@dataclass(frozen=True)
class _Warmed:
    """A rise from peak / warmup to the peak, then a fall to ``final`` at ``steps``."""

    peak: float
    steps: int
    warmup: int
    final: float
    shape: str

    def __call__(self, step: Any) -> Any:
        if is_number(step) or isinstance(step, np.integer):
            return float(self(asarray(np.float32(step))))
        t = sd.cast(step, "f32")
        rise = (t + 1.0) * (self.peak / max(1, self.warmup))
        length = max(1, self.steps - self.warmup)
        done = sd.clip((t - float(self.warmup)) / float(length), 0.0, 1.0)
        if self.shape == "cosine":
            done = 0.5 - 0.5 * sd.cos(math.pi * done)
        fall = self.peak + (self.final - self.peak) * done
        return sd.where(t < float(self.warmup), rise, fall)


def _warmed(shape: str, peak: float, steps: int, warmup: int, final: float) -> _Warmed:
    if steps < 1 or not 0 <= warmup <= steps:
        raise ShaderError(f"a schedule of {steps} steps, {warmup} of them warm-up")
    return _Warmed(float(peak), steps, warmup, float(final), shape)


def cosine(peak: float, steps: int, warmup: int = 0, final: float = 0.0) -> Schedule:
    """peak · (s + 1) / warmup, then half a cosine from ``peak`` to ``final``.

    Step s counts from 0; from step ``steps`` on the rate is ``final``. The schedule
    takes a number or an array without dimensions, traced or not.
    """
    return _warmed("cosine", peak, steps, warmup, final)


def linear(peak: float, steps: int, warmup: int = 0, final: float = 0.0) -> Schedule:
    """As :func:`cosine`, but the fall is a straight line."""
    return _warmed("linear", peak, steps, warmup, final)
