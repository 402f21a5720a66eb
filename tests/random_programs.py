"""Random programs over arrays: maps, reductions, contractions, views, gathers, masks,
several outputs, shared parts.

`program(seed)` gives a function and its arguments. What it computes is compared on a
device with the float64 evaluation of its graph, and its gradients with float64
differences. Run as a command: ``python tests/random_programs.py FIRST COUNT``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import shaderdsl as sd
from shaderdsl import engine, tracing
from shaderdsl.ir import interpret

SIZES = (1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 33, 64)


def program(seed: int) -> tuple[Callable[..., Any], list[np.ndarray]]:
    """A function of a few arrays, and arrays for it."""
    plan = np.random.default_rng(seed)
    sizes = [int(plan.choice(SIZES)) for _ in range(3)]
    inputs = []
    for _ in range(int(plan.integers(1, 5))):
        rank = int(plan.integers(0, 4))
        shape = [int(plan.choice([*sizes, 1])) for _ in range(rank)]
        inputs.append((plan.standard_normal(shape) * 0.7).astype(np.float32))

    def build(*xs: Any) -> Any:
        rng = np.random.default_rng(seed + 1_000_000)
        pool = list(xs)
        for _ in range(int(rng.integers(3, 14))):
            try:
                y = step(rng, pool)
            except sd.errors.ShapeError:
                continue
            if y is not None and y.size <= 60_000:
                pool.append(y)
        outs = pool[len(xs) :][-3:] or [pool[0] * 2.0]
        return tuple(outs)

    return build, inputs


def pick(rng: np.random.Generator, pool: list[Any]) -> Any:
    """A value, recent ones more often."""
    return pool[min(len(pool) - 1, int(len(pool) * rng.random() ** 0.6))]


def step(rng: np.random.Generator, pool: list[Any]) -> Any:
    """One more value."""
    x = pick(rng, pool)
    kind = rng.choice(
        [
            "unary",
            "binary",
            "binary",
            "reduce",
            "softmax",
            "matmul",
            "view",
            "slice",
            "where",
            "take",
            "cumsum",
            "norm",
            "concat",
            "pad",
            "outer",
            "arg",
        ]
    )
    axis = int(rng.integers(0, x.ndim)) if x.ndim else 0
    if kind == "unary":
        f = rng.choice(
            [
                "sin",
                "tanh",
                "sigmoid",
                "silu",
                "square",
                "exp",
                "abs",
                "softplus",
                "neg",
            ]
        )
        if f == "square":
            return x * x
        if f == "neg":
            return -x
        return sd.exp(sd.tanh(x)) if f == "exp" else getattr(sd, f)(x)
    if kind == "binary":
        y = pick(rng, pool)
        f = int(rng.integers(0, 5))
        return [
            lambda: x + y,
            lambda: x * y,
            lambda: x - y,
            lambda: x / (y * y + 1.0),
            lambda: sd.maximum(x, y),
        ][f]()
    if kind == "reduce" and x.ndim:
        f = rng.choice(["sum", "mean", "max", "min", "logsumexp", "var"])
        axes: Any = axis if rng.random() < 0.7 else None
        return getattr(sd, f)(x, axis=axes, keepdims=bool(rng.random() < 0.5))
    if kind == "softmax" and x.ndim:
        return sd.softmax(x, axis=axis)
    if kind == "norm" and x.ndim:
        return x / sd.sqrt(sd.mean(x * x, axis=axis, keepdims=True) + 0.1)
    if kind == "matmul" and x.ndim >= 1:
        y = pick(rng, pool)
        if y.ndim < 1:
            return None
        if y.ndim >= 2 and rng.random() < 0.5:
            y = y.transpose(*range(y.ndim - 2), y.ndim - 1, y.ndim - 2)
        if x.shape[-1] == (y.shape[-2] if y.ndim > 1 else y.shape[0]):
            return (x @ y) * 0.3
        return (
            x @ x.transpose(*range(x.ndim - 2), x.ndim - 1, x.ndim - 2) * 0.2
            if x.ndim > 1
            else None
        )
    if kind == "outer" and x.ndim == 1:
        y = pick(rng, pool)
        return x.reshape(-1, 1) * y if y.ndim == 1 else None
    if kind == "view" and x.ndim:
        if rng.random() < 0.5:
            return x.transpose(*rng.permutation(x.ndim).tolist())
        return x.reshape(-1) if rng.random() < 0.5 else x.reshape(*x.shape[:axis], -1)
    if kind == "slice" and x.ndim and x.shape[axis] > 1:
        n = x.shape[axis]
        cut = [
            slice(1, None),
            slice(None, -1),
            slice(None, None, 2),
            slice(None, None, -1),
            slice(n // 2, n),
        ]
        return x[(slice(None),) * axis + (cut[int(rng.integers(0, 5))],)]
    if kind == "where":
        y = pick(rng, pool)
        return sd.where(x > 0.1, x, y)
    if kind == "take" and x.ndim:
        ids = rng.integers(0, x.shape[0], int(rng.integers(1, 9))).astype(np.int32)
        return sd.take(x, ids)
    if kind == "cumsum" and x.ndim:
        return sd.cumsum(x, axis=axis) * 0.2
    if kind == "concat" and x.ndim:
        return sd.concatenate(
            [x, sd.sin(x)] if rng.random() < 0.5 else [x, x * 2.0, x], axis=axis
        )
    if kind == "pad" and x.ndim:
        return sd.pad(
            x,
            [(int(rng.integers(0, 3)), int(rng.integers(0, 3))) for _ in range(x.ndim)],
        )
    if kind == "arg" and x.ndim:
        return sd.cast(sd.argmax(x, axis=axis), "f32") * 0.01
    return None


def error(got: Any, want: np.ndarray) -> float:
    """Largest difference, relative to the size of the array."""
    want = np.asarray(want, np.float64)
    if want.size == 0:
        return 0.0
    scale = max(1.0, float(np.abs(want).max()))
    return float(np.abs(np.asarray(got, np.float64) - want).max()) / scale


def check(seed: int, tolerance: float = 2e-4) -> str | None:
    """Run one program on the current device; what is wrong with it, or None."""
    f, xs = program(seed)
    traced = tracing.Traced(f, tuple(xs), "random")
    given = dict(zip(traced.inputs, xs, strict=True))
    captured = {
        s: np.asarray(s.source)
        for s in engine.captured_inputs(traced.outs, traced.inputs)
    }
    want = interpret.evaluate(traced.outs, given | captured)
    got = sd.compile(f)(*xs)
    for k, (g, w) in enumerate(zip(got, want, strict=True)):
        if g.shape != w.shape or not error(g, w) < tolerance:
            return (
                f"seed {seed}: output {k} of shape {w.shape} is off by "
                f"{error(g, w):.2e}"
            )
    weights = [
        np.random.default_rng(seed + k).standard_normal(w.shape)
        for k, w in enumerate(want)
    ]

    def loss(*arrays: Any) -> Any:
        total = 0.0
        for y, w in zip(f(*arrays), weights, strict=True):
            total = total + sd.sum(y * w.astype(np.float32))
        return total

    numbers = tuple(range(len(xs)))
    _, gradients = sd.value_and_grad(loss, argnums=numbers)(*xs)
    rng = np.random.default_rng(seed)
    for k in numbers:
        direction = rng.standard_normal(xs[k].shape)
        slope = {}
        for h in (1e-6, 1e-7):
            ends = []
            for sign in (1, -1):
                moved = dict(given)
                moved[traced.inputs[k]] = (
                    xs[k].astype(np.float64) + sign * h * direction
                )
                values = interpret.evaluate(traced.outs, moved | captured)
                ends.append(
                    sum(
                        float((v * w).sum())
                        for v, w in zip(values, weights, strict=True)
                    )
                )
            slope[h] = (ends[0] - ends[1]) / (2 * h)
        have = float((np.asarray(gradients[k], np.float64) * direction).sum())
        scale = max(1.0, float(np.abs(np.asarray(gradients[k])).sum()))
        kink = abs(slope[1e-6] - slope[1e-7]) / scale
        if kink < 1e-5 and not abs(have - slope[1e-6]) / scale < tolerance:
            return (
                f"seed {seed}: gradient {k} gives {have:.6g} along a direction, "
                f"differences {slope[1e-6]:.6g}"
            )
    return None


if __name__ == "__main__":
    first, count = int(sys.argv[1]), int(sys.argv[2])
    wrong = 0
    for s in range(first, first + count):
        try:
            message = check(s)
        except Exception as e:
            message = f"seed {s}: {type(e).__name__}: {str(e)[:300]}"
        if message:
            wrong += 1
            print(message, flush=True)
    print(f"{count} programs, {wrong} wrong")
