"""Random numbers that are a function of (key, position): Threefry-2x32 with 20 rounds,
the same on every device.

A key is an array of two u32. Source: Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3" (2011).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .array import Array, asarray, call
from .errors import DTypeError, ShapeError
from .ir import arrays as A
from .ir import expr as E
from .ir.expr import Expr
from .ir.stage import Stage, map_stage

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def key(seed: int | Any) -> Array:
    """A key from a seed (its low and high 32 bits)."""
    n = A.integer(seed, "a seed")
    return asarray(np.array([n & 0xFFFFFFFF, n >> 32 & 0xFFFFFFFF], np.uint32))


def _add(a: Expr, b: Expr) -> Expr:
    return E.apply("add", a, b)


def threefry(k0: Expr, k1: Expr, x0: Expr, x1: Expr) -> tuple[Expr, Expr]:
    """20 rounds of Threefry-2x32 on u32 expressions."""
    parity = E.apply("xor", E.apply("xor", k0, k1), E.const(0x1BD11BDA, "u32"))
    keys = (k0, k1, parity)
    x0, x1 = _add(x0, k0), _add(x1, k1)
    for group in range(5):
        for r in _ROTATIONS[group % 2]:
            x0 = _add(x0, x1)
            left = E.apply("shl", x1, E.const(r, "u32"))
            right = E.apply("shr", x1, E.const(32 - r, "u32"))
            x1 = E.apply("xor", E.apply("or", left, right), x0)
        x0 = _add(x0, keys[(group + 1) % 3])
        x1 = _add(_add(x1, keys[(group + 2) % 3]), E.const(group + 1, "u32"))
    return x0, x1


def _flat(shape: tuple[int, ...]) -> Expr:
    position: Expr = E.const(0, "u32")
    for a, n in enumerate(shape):
        position = _add(
            E.apply("mul", position, E.cast(E.size(n), "u32")),
            E.cast(E.index(a), "u32"),
        )
    return position


def _bits(k: Stage, shape: tuple[int, ...], name: str) -> tuple[Expr, Expr]:
    k0, k1 = (E.load(k, [E.const(j)]) for j in (0, 1))
    return threefry(k0, k1, _flat(shape), E.const(0, "u32"))


def _check(k: Any, shape: Any) -> tuple[Array, tuple[int, ...]]:
    a = asarray(k)
    if a.dtype != "u32":
        raise DTypeError(
            f"a random key is u32, not {a.dtype}",
            where=E.user_location(),
            cure="use sd.random.key(seed)",
        )
    if a.shape != (2,):
        raise ShapeError(
            f"a random key has shape (2,), not {a.shape}", where=E.user_location()
        )
    return a, A.sizes(shape, "an array")


def bits(k: Any, shape: Any) -> Array:
    """Uniform u32 bits."""
    a, n = _check(k, shape)
    return call(
        lambda s: map_stage(n, _bits(s, n, "bits")[0], "random_bits", dtype="u32"), a
    )


def split(k: Any, num: int = 2) -> Array:
    """``num`` independent keys, shape [num, 2]."""
    a, _ = _check(k, ())
    (num,) = A.sizes((num,), "an array of keys")

    def build(s: Stage) -> Stage:
        k0, k1 = (E.load(s, [E.const(j)]) for j in (0, 1))
        x0, x1 = threefry(k0, k1, E.cast(E.index(0), "u32"), E.const(1, "u32"))
        return map_stage(
            [num, 2],
            E.where(E.apply("eq", E.index(1), 0), x0, x1),
            "random_split",
            dtype="u32",
        )

    return call(build, a)


def _unit(b: Expr) -> Expr:
    """The top 24 bits as a number in [0, 1)."""
    return E.apply("mul", E.cast(E.apply("shr", b, E.const(8, "u32")), "f32"), 2.0**-24)


def uniform(k: Any, shape: Any, low: float = 0.0, high: float = 1.0) -> Array:
    """Uniform in [low, high), f32."""
    a, n = _check(k, shape)

    def build(s: Stage, lo: Any, hi: Any) -> Stage:
        u = _unit(_bits(s, n, "uniform")[0])
        return map_stage(n, lo + u * (hi - lo), "random_uniform", dtype="f32")

    return call(build, a, float(low), float(high))


def normal(k: Any, shape: Any) -> Array:
    """Standard normal, f32, by the Box-Muller transform."""
    a, n = _check(k, shape)

    def build(s: Stage) -> Stage:
        b0, b1 = _bits(s, n, "normal")
        u = 1.0 - _unit(b0)  # in (0, 1]
        r = E.apply("sqrt", -2.0 * E.apply("log", u))
        return map_stage(
            n,
            r * E.apply("cos", (2 * math.pi) * _unit(b1)),
            "random_normal",
            dtype="f32",
        )

    return call(build, a)
