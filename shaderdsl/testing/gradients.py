"""Gradients three ways: as run, derived and in float64, and by differences."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import namespace as sd
from ..array import Array
from ..errors import DifferentiationError
from ..function import vjp
from ..ir.expr import user_location
from ..reference import Graph

Arrays = Sequence[Any]


def several(y: Any) -> list[Any]:
    """One result or a tuple of them, as a list."""
    return list(y) if isinstance(y, (tuple, list)) else [y]


def loss_of(reference: Callable[..., Any], cotangents: Arrays) -> Callable[..., float]:
    """Σ y · dy of a reference's results."""

    def loss(*args: Any) -> float:
        ys = several(reference(*args))
        return float(sum(np.sum(y * c) for y, c in zip(ys, cotangents, strict=True)))

    return loss


def differences(
    loss: Callable[..., float],
    args: Arrays,
    k: int,
    *,
    seed: int = 0,
    points: int = 4,
) -> list[tuple[Any, float, float]]:
    """Slopes of a loss along a few elements of ``args[k]`` and one random direction.

    Central differences of fourth order in float64. Gives (direction, slope, noise): the
    direction as an array, and how far rounding may have moved the slope.
    """
    x = np.asarray(args[k], np.float64)
    if x.size == 0:
        return []
    r = np.random.default_rng(seed)
    directions: list[Any] = []
    for at in r.permutation(x.size)[:points]:
        one: Any = np.zeros(x.size)
        one[at] = 1.0
        directions.append(one.reshape(x.shape))
    directions.append(r.standard_normal(x.shape) * np.maximum(np.abs(x), 0.01))
    out = []
    for d in directions:
        size = max(1.0, float(np.abs(x[d != 0]).max(initial=0.0)))
        unit = size / max(1.0, float(np.abs(d).max()))
        slope, noise = _slope(functools.partial(_along, loss, args, k, x, d), unit)
        out.append((d, slope, noise))
    return out


def _along(
    loss: Callable[..., float], args: Arrays, k: int, x: Any, d: Any, step: float
) -> float:
    moved = list(args)
    moved[k] = x + step * d
    return loss(*moved)


def _slope(f: Callable[[float], float], unit: float) -> tuple[float, float]:
    """The slope of f at 0, and its uncertainty: two step lengths must agree."""
    best = (0.0, np.inf)
    previous = None
    for h in (1e-4 * unit, 1e-5 * unit, 1e-6 * unit, 1e-7 * unit):
        low2, low1, high1, high2 = (f(q * h) for q in (-2, -1, 1, 2))
        slope = (8 * (high1 - low1) - (high2 - low2)) / (12 * h)
        if previous is not None:
            noise = 1e-15 * max(abs(low1), abs(high1)) / h + abs(slope - previous)
            best = min(best, (slope, noise), key=lambda t: t[1])
            if noise <= 1e-7 * abs(slope):
                break
        previous = slope
    return best


def check_gradients(
    function: Callable[..., Any],
    *args: Any,
    reference: Callable[..., Any] | None = None,
    rtol: float = 1e-3,
    atol: float = 1e-4,
    seed: int = 0,
) -> None:
    """Compare a function's gradients, as run, with finite differences in float64.

    Args:
        function: of arrays, giving an array or a tuple of them.
        args: arrays; the float ones are differentiated.
        reference: the same in NumPy; the function's own graph in float64 by default.
        rtol, atol: tolerances; ``atol`` is relative to the largest slope.
        seed: of the cotangents and of the directions.

    Raises:
        AssertionError: naming the argument, the slope and what was expected.
        DifferentiationError: no argument is a float array: nothing can be checked.
    """
    graph = Graph(function, args)
    if not graph.floats:
        raise DifferentiationError(
            "check_gradients got no float array, so it has no gradient to check",
            where=user_location(),
            cure="only f32 and f16 arrays have a derivative",
        )
    r = np.random.default_rng(seed)
    cotangents = [r.standard_normal(s.shape).astype(np.float32) for s in graph.outs]
    y, pullback = vjp(function, *args)
    dy = [Array.of_host(c, "f32") for c in cotangents]
    got = pullback(tuple(dy) if isinstance(y, tuple) else dy[0])
    got = list(got) if len(args) > 1 else [got]
    wide = [
        np.asarray(a, np.float64) if k in graph.floats else np.asarray(a)
        for k, a in enumerate(args)
    ]
    loss = loss_of(reference or (lambda *xs: graph.value(xs)), cotangents)
    for k in graph.floats:
        compare_slopes(loss, wide, k, got[k].numpy(), rtol, atol, f"argument {k}", seed)


def compare_slopes(
    loss: Callable[..., float],
    args: Arrays,
    k: int,
    gradient: Any,
    rtol: float,
    atol: float,
    what: str,
    seed: int = 0,
) -> None:
    """Assert that a gradient has the slopes of a loss."""
    found = differences(loss, args, k, seed=seed)
    scale = max([abs(s) for _, s, _ in found], default=0.0)
    for d, slope, noise in found:
        mine = float(np.sum(np.asarray(gradient, np.float64) * d))
        size = float(np.abs(np.asarray(gradient, np.float64) * d).sum())
        allowed = rtol * (abs(slope) + size) + atol * scale + 10 * noise + 1e-9
        if not abs(mine - slope) <= allowed:
            at = np.flatnonzero(d)
            where = f"element {at[0]}" if len(at) == 1 else "a random direction"
            raise AssertionError(
                f"gradient of {what} along {where}: {mine:.9g}, finite differences "
                f"give {slope:.9g} (allowed: {allowed:.3g})"
            )


def scalar_loss(function: Callable[..., Any], cotangents: Arrays) -> Any:
    """Σ y · dy as a function of arrays."""

    def loss(*xs: Any) -> Any:
        total: Any = 0.0
        for y, c in zip(several(function(*xs)), cotangents, strict=True):
            total = total + sd.sum(sd.cast(y, "f32") * c)
        return total

    return loss
