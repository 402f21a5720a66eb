"""What candidates of a search are compared with: the plain expressions in float64."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from .codegen.tuning import Trial
from .errors import ShaderError
from .ir import expr as E
from .ir import interpret
from .ir.stage import Stage, topo_stages
from .runtime import Buffer, Device

#: How far a result may be from float64: relative to itself and to the result's scale.
TOLERANCE = {"f32": 3e-4, "f16": 4e-3}
#: Elements that are compared at a time: what the caches of a processor hold.
_PIECE = 1 << 18


def check(
    stage: Stage,
    got: np.ndarray[Any, Any],
    want: np.ndarray[Any, Any],
    hidden: bool = False,
) -> None:
    """Compare a result with the plain expression's.

    Args:
        hidden: whether what is not written (NaN) stands for 0.

    Raises:
        ShaderError: where they differ, and by how much.
    """
    pieces = [slice(k, k + _PIECE) for k in range(0, max(want.size, 1), _PIECE)]
    mine, plain = got.reshape(-1), want.reshape(-1)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # NumPy leaves the others to run
        scale = 0.0
        if stage.dtype in TOLERANCE:
            parts = list(pool.map(_squares, (plain[p] for p in pieces)))
            count = sum(n for _, n in parts)
            scale = float(np.sqrt(sum(s for s, _ in parts) / max(count, 1)))
        tolerance = TOLERANCE.get(stage.dtype)
        found = pool.map(
            lambda p: _first_wrong(mine[p], plain[p], tolerance, scale, hidden), pieces
        )
        for piece, first in zip(pieces, found):
            if first is not None:
                at = np.unravel_index(piece.start + first, want.shape)
                raise ShaderError(
                    f"wrong: {stage.name}{list(map(int, at))} is {got[at]}, the plain "
                    f"expression gives {want[at]}"
                )


def _squares(want: np.ndarray[Any, Any]) -> tuple[float, int]:
    """The sum of the squares of what is finite, and how much that is."""
    value = want.astype(np.float64)
    finite = value[np.isfinite(value)]
    return float(finite @ finite), finite.size


def _first_wrong(
    got: np.ndarray[Any, Any],
    want: np.ndarray[Any, Any],
    tolerance: float | None,
    scale: float,
    hidden: bool,
) -> int | None:
    """The first place where they differ; exactly, where there is no tolerance."""
    if tolerance is None:
        wrong = got != want
    else:
        value = want.astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            off = np.abs(got.astype(np.float64) - value)
            wrong = ~(off <= tolerance * (np.abs(value) + scale))
        wrong &= ~((got == value) | (np.isnan(got) & np.isnan(value)))
        if hidden:
            wrong &= ~(np.isnan(got) & (value == 0))
    return int(np.argmax(wrong)) if wrong.any() else None


@dataclass
class Data:
    """Inputs for a trial, and what the plain expressions make of them in float64."""

    inputs: list[np.ndarray[Any, Any]]
    scalars: dict[str, float]
    wanted: list[np.ndarray[Any, Any]]
    dtypes: list[str]

    @classmethod
    def draw(cls, trial: Trial) -> Data | None:
        """Random inputs of both signs, else positive ones; None if no result is finite
        on those either.

        Raises:
            ValueError: a kernel that was derived from more than it reads, such as the
                sum that attention's backward takes from its results, cannot be
                compared apart from them.
        """
        bounds = _id_bounds(trial)
        scalars = {
            n.data: 1 if n.dtype != "f32" else 0.5
            for s in trial.members
            if s.body is not None
            for n in E.topo(s.body)
            if n.kind == "scalar"
        }
        for positive in (False, True):
            rng = np.random.default_rng(7)
            given = {s: _random(rng, s, positive, bounds) for s in trial.inputs}
            values: dict[Stage, Any] = {
                s: v.astype(np.float64) if s.dtype in E.FLOATS else v
                for s, v in given.items()
            }
            for member in trial.members:
                # What a kernel computes for itself alone comes before its readers.
                for s in topo_stages([member], stop=values):
                    if s.kind == "input" and s not in values:
                        raise ValueError(f"{s.name} is not among what it is given")
                    if s not in values:
                        values[s] = interpret.evaluate_stage(
                            s, values, "float64", scalars
                        )
            wanted = [values[s] for s in trial.outputs]
            if all(np.isfinite(w).all() for w in wanted):
                dtypes = [s.dtype for s in trial.inputs]
                return cls(list(given.values()), scalars, wanted, dtypes)
        return None

    def upload(self, device: Device) -> list[Buffer]:
        """The inputs on a device."""
        return [
            device.upload(x, dtype)
            for x, dtype in zip(self.inputs, self.dtypes, strict=True)
        ]


def _random(
    rng: np.random.Generator, s: Stage, positive: bool, bounds: Mapping[Stage, int]
) -> np.ndarray[Any, Any]:
    if s.dtype in E.FLOATS:
        x = rng.standard_normal(s.shape, dtype=np.float32)
        if positive:
            x = 0.25 + 0.75 * rng.random(s.shape, dtype=np.float32)
        return np.asarray(x, np.float16 if s.dtype == "f16" else np.float32)
    if s.dtype == "bool":
        return np.asarray(rng.integers(0, 2, s.shape), np.bool_)
    kind = np.int32 if s.dtype == "i32" else np.uint32
    if s in bounds:
        return np.asarray(rng.integers(0, bounds[s], s.shape), kind)
    # Counts more likely than not: of steps, of rows.
    return np.asarray(rng.integers(1, 8, s.shape), kind)


def _id_bounds(trial: Trial) -> dict[Stage, int]:
    """For integer inputs the size of the axis that they index."""
    bounds: dict[Stage, int] = {}

    def note(e: E.Expr, size: int) -> None:
        for n in E.loads(e):
            if n.dtype in ("i32", "u32"):
                bounds[n.data] = min(size, bounds.get(n.data, size))

    for s in trial.members:
        if s.body is None:
            continue
        for n in E.topo(s.body):
            if n.kind == "load":
                for i, size in zip(n.args, n.data.shape, strict=True):
                    note(i, max(size, 1))
            elif n.kind == "apply" and n.data == "eq":
                for a, b in (n.args, n.args[::-1]):
                    if a.kind == "index":
                        note(b, s.space[a.data])
    return bounds
