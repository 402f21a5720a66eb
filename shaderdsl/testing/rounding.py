"""An op's own error bound: float64 in which every operation errs as f32 may.

Each result of an operation is moved at random by the error that the library promises
for it, each term of a sum by what adding up rounds away. How far a value moves under
that is what no f32 computation of the op can be expected to be better than; a small
multiple is what is allowed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

#: Promised errors in units of the last place, as in ``docs/numerics.md``; others round
#: correctly.
ULPS = {
    "exp": 4.0,
    "exp2": 4.0,
    "expm1": 10.0,
    "log": 4.0,
    "log2": 4.0,
    "log1p": 8.0,
    "sqrt": 1.0,
    "rsqrt": 4.0,
    "sin": 6.0,
    "cos": 6.0,
    "tan": 8.0,
    "asin": 4.0,
    "acos": 4.0,
    "atan": 4.0,
    "atan2": 6.0,
    "sinh": 5.0,
    "cosh": 5.0,
    "tanh": 4.0,
    "sigmoid": 6.0,
    "erf": 4.0,
    "softplus": 6.0,
    "pow": 2.0,
    "div": 2.5,
    "mod": 1.0,
}
_UNIT = 2.0**-23
# What chooses among given numbers, or gives whole ones, rounds nothing.
_EXACT = {"where", "maximum", "minimum", "neg", "abs", "stop_gradient", "after", "sign"}


class Rounding:
    """Moves what an evaluation computes, by its promised error.

    Args:
        seed: of the directions.
    """

    def __init__(self, seed: int = 0):
        self._random = np.random.default_rng(seed)

    def __call__(self, name: str, value: Any, terms: int) -> Any:
        """A result of the primitive ``name``, or of a load (``"load"``), moved.

        Args:
            terms: how many are added up after it.
        """
        if value.dtype.kind != "f" or name in _EXACT:
            return value
        ulps = 0.0 if name == "load" else ULPS.get(name, 0.5)
        # Sums are trees of some width: half a unit for each level, both ways.
        ulps += math.log2(max(terms, 1)) / 2
        if not ulps:
            return value
        sign = self._random.choice([-1.0, 1.0], value.shape)
        return value * (1.0 + ulps * _UNIT * sign)


def allowance(expected: Any, moved: list[Any], half: bool) -> Any:
    """|error| that is allowed at each element.

    Args:
        expected: the exact values.
        moved: the same under several roundings.
        half: whether the result is stored as f16.
    """
    e = np.asarray(expected, np.float64)
    worst = 0.0
    with np.errstate(invalid="ignore"):
        for m in moved:
            drift = np.abs(np.asarray(m, np.float64) - e)
            worst = max(worst, float(np.max(drift[np.isfinite(drift)], initial=0.0)))
        allowed = 4 * _UNIT * np.abs(e) + 8 * worst + 2.0**-126
        if half:
            allowed = allowed + np.abs(e) * 2.0**-10 + 2.0**-24
    return allowed
