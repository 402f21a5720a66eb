"""Optimisers whose every number lives on the device: step count, rate, corrections.

An update is one op for each parameter, all with the same scalar operands. Inside
``sd.compile`` it is part of the step's one plan, and nothing is read back.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY
from typing import Any

import numpy as np

from . import namespace as sd
from . import ops, tree
from .array import Array, asarray, is_number
from .dtypes import NUMPY
from .errors import DTypeError, ShaderError, ShapeError
from .ir import expr as E
from .nn.module import Module, named_arrays, static
from .op import Op
from .schedules import cosine, linear

__all__ = [
    "SGD",
    "AdamState",
    "AdamW",
    "SGDState",
    "accumulate",
    "clip_by_global_norm",
    "cosine",
    "global_norm",
    "linear",
    "matrices",
]

#: whether weights decay: (attribute path, parameter) → bool
Predicate = Callable[[str, Any], bool]


# ------------------------------------------------------------------ gradients


#: gradients of one size that one kernel reads; it binds at most eight arrays
_TOGETHER = 6


@functools.cache
def _square_sums(count: int) -> Op:
    """Σ x² + y² + … over all elements of arrays of one size."""

    def square_sum(*xs: Any) -> Any:
        total = xs[0] * xs[0]
        for x in xs[1:]:
            total = total + x * x
        return sd.sum(total, over="n")

    return Op(square_sum, ", ".join(["n"] * count) + " ->", {}, ())


def global_norm(gradients: Any) -> Array:
    """√ Σ g² over all elements of all leaves, f32 without dimensions."""
    sizes: dict[int, list[Array]] = {}
    for g in tree.leaves(gradients):
        flat = sd.cast(asarray(g), "f32").reshape(-1)
        sizes.setdefault(flat.shape[0], []).append(flat)
    if not sizes:
        return asarray(np.float32(0))
    # Sums of sums, pairwise: a long chain would round more.
    sums = [
        _square_sums(len(some))(*some)
        for flats in sizes.values()
        for at in range(0, len(flats), _TOGETHER)
        for some in [flats[at : at + _TOGETHER]]
    ]
    while len(sums) > 1:
        pairs = [a + b for a, b in zip(sums[::2], sums[1::2])]
        sums = pairs + (sums[-1:] if len(sums) % 2 else [])
    norm: Array = sd.sqrt(sums[0])
    return norm


def _clip_factor(gradients: Any, limit: Any) -> Any:
    """min(1, limit / norm), without a division by 0; NaN stays NaN."""
    if limit is None:
        return asarray(np.float32(1))
    return limit / sd.maximum(global_norm(gradients), limit)


def clip_by_global_norm(gradients: Any, limit: float) -> Any:
    """The gradients, scaled so that their global norm is at most ``limit``."""
    factor = _clip_factor(gradients, limit)
    return tree.map(lambda g: g * factor, gradients)


def accumulate(total: Any, gradients: Any, weight: Any = 1.0) -> Any:
    """``total + weight · gradients`` in f32, leaf by leaf; a total of None starts one.

    Means of parts of a batch add up to the mean of all with weight (rows of the part
    that count) / (rows of the batch that count). Inside ``sd.compile`` a donated total
    is written in place.
    """

    def scaled(g: Any) -> Any:
        return sd.cast(g, "f32") * weight

    if total is None:
        return tree.map(scaled, gradients)
    return tree.map(lambda t, g: t + scaled(g), total, gradients)


def matrices(path: str, parameter: Any) -> bool:
    """A predicate for weight decay: matrices and tables, not norms and biases."""
    return len(parameter.shape) > 1


def _pairs(model: Any, gradients: Any) -> Iterator[tuple[str, Any, Any]]:
    """(path, parameter, its gradient or None) for each leaf of a model.

    Raises:
        ShapeError: a gradient that belongs to no parameter, or is of another shape.
    """
    given = {p: g for p, g in named_arrays(gradients) if g is not None}
    for path, p in named_arrays(model):
        g = given.pop(path, None)
        if g is not None and g.shape != p.shape:
            raise ShapeError(
                f"the gradient of {path} has shape {g.shape}, the parameter {p.shape}",
                where=E.user_location(),
            )
        yield path, p, g
    if given:
        raise ShapeError(
            f"there is a gradient for {next(iter(given))}, which the model lacks",
            where=E.user_location(),
            cure="give the gradient of the model itself, from sd.grad",
        )


def _rebuilt(like: Any, leaves: list[Any]) -> Any:
    return tree.unflatten(tree.flatten(like)[1], leaves)


def _zeros(model: Any) -> Any:
    """f32 zeros of the model's structure; None where a leaf is not floating point."""

    for path, x in named_arrays(model):
        if isinstance(x, (int, float)):
            raise DTypeError(
                f"{path or 'the model'} is the number {x}, not an array",
                where=E.user_location(),
                cure="a parameter is an array: sd.array(…); a setting of a module is "
                "declared with sd.nn.static(default=…)",
            )

    def zero(x: Any) -> Array | None:
        if asarray(x).dtype not in E.FLOATS:
            return None
        return asarray(np.zeros(x.shape, NUMPY["f32"]))

    return tree.map(zero, model)


def _rate(lr: Any, step: Array) -> Any:
    rate = lr(step) if callable(lr) else lr
    return asarray(np.float32(rate)) if is_number(rate) else rate


def _same_dtype(new: Array, old: Any) -> Array:
    return new if new.dtype == old.dtype else new.astype(old.dtype)


# ------------------------------------------------------------------ optimisers


class AdamState(Module):
    """Steps done (i32, no dimensions) and the two moments, of the model's structure."""

    step: Array
    first: Any
    second: Any


class AdamW(Module):
    """Adam with decoupled weight decay.

    m = β₁ m + (1 - β₁) g;  v = β₂ v + (1 - β₂) g²;
    p = p - lr · (m / (1 - β₁ᵗ) / (√(v / (1 - β₂ᵗ)) + eps) + weight_decay · p)

    Args:
        lr: the rate, or a schedule: a function of the step, counted from 0.
        max_grad_norm: gradients are scaled to at most this global norm.
        decay: which parameters decay, ``(path, parameter) → bool``; all by default.
            ``sd.optim.matrices`` leaves out norms and biases.

    It is a pytree: passed to a compiled function its numbers are runtime values, and
    another rate compiles nothing. Parameters without a gradient stay as they are.

    Source: Loshchilov and Hutter, "Decoupled weight decay regularization" (2017).
    """

    lr: Any = 1e-3
    betas: tuple[Any, Any] = (0.9, 0.999)
    eps: Any = 1e-8
    weight_decay: Any = 0.01
    max_grad_norm: Any = None
    _: KW_ONLY
    decay: Predicate | None = static(default=None)

    def __post_init__(self) -> None:
        numbers = {"eps": self.eps, "weight_decay": self.weight_decay}
        if not callable(self.lr):
            numbers["lr"] = self.lr
        for name, x in numbers.items():
            if is_number(x) and not x >= 0:
                raise ShaderError(f"AdamW: {name} is {x}; it must not be negative")
        for b in self.betas:
            if is_number(b) and not 0 <= b < 1:
                raise ShaderError(f"AdamW: betas are {self.betas}; each is in [0, 1)")

    def init(self, model: Any) -> AdamState:
        """The state before the first step."""
        return AdamState(asarray(np.int32(0)), _zeros(model), _zeros(model))

    def update(
        self, model: Any, gradients: Any, state: AdamState
    ) -> tuple[Any, AdamState]:
        """The model and the state after one step.

        Raises:
            ShapeError: gradients that are not the model's.
        """
        t = state.step + 1
        correction1, correction2 = (_correction(b, t) for b in self.betas)
        lr = _rate(self.lr, state.step)
        clip = _clip_factor(gradients, self.max_grad_norm)
        beta1, beta2 = self.betas
        news: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
        first = dict(named_arrays(state.first))
        second = dict(named_arrays(state.second))
        for path, p, g in _pairs(model, gradients):
            m, v = first.get(path), second.get(path)
            if g is None or m is None or v is None:
                new = (p, m, v)
            else:
                decays = self.decay is None or self.decay(path, p)
                new = ops.adamw_update(
                    *(p, g, m, v, lr, correction1, correction2, clip),
                    beta1=beta1,
                    beta2=beta2,
                    eps=self.eps,
                    weight_decay=self.weight_decay if decays else 0.0,
                )
                new = (_same_dtype(new[0], p), *new[1:])
            for kept, x in zip(news, new):
                if x is not None:
                    kept.append(x)
        model_, first_, second_ = (
            _rebuilt(like, new)
            for like, new in zip((model, state.first, state.second), news)
        )
        return model_, AdamState(t, first_, second_)


def _correction(beta: Any, t: Array) -> Array:
    """1 - βᵗ = -expm1(t log β): the difference itself would lose digits for small t."""
    if not is_number(beta):
        log = sd.log(beta)
    elif beta == 0:
        return asarray(np.float32(1))
    else:
        # Of the β that the moments see: then the first step's correction is exact.
        log = math.log(np.float32(beta))
    correction: Array = -sd.expm1(sd.cast(t, "f32") * log)
    return correction


class SGDState(Module):
    """Steps done (i32, no dimensions) and the velocity, of the model's structure."""

    step: Array
    velocity: Any


class SGD(Module):
    """Gradient descent: m = momentum · m + g + weight_decay · p;  p = p - lr · m.

    Args:
        lr: the rate, or a schedule: a function of the step, counted from 0.
        max_grad_norm: gradients are scaled to at most this global norm.
        decay: which parameters decay, ``(path, parameter) → bool``; all by default.
    """

    lr: Any = 1e-2
    momentum: Any = 0.0
    weight_decay: Any = 0.0
    max_grad_norm: Any = None
    _: KW_ONLY
    decay: Predicate | None = static(default=None)

    def init(self, model: Any) -> SGDState:
        """The state before the first step."""
        return SGDState(asarray(np.int32(0)), _zeros(model))

    def update(
        self, model: Any, gradients: Any, state: SGDState
    ) -> tuple[Any, SGDState]:
        """The model and the state after one step.

        Raises:
            ShapeError: gradients that are not the model's.
        """
        lr = _rate(self.lr, state.step)
        clip = _clip_factor(gradients, self.max_grad_norm)
        velocity = dict(named_arrays(state.velocity))
        parameters: list[Any] = []
        velocities: list[Any] = []
        for path, p, g in _pairs(model, gradients):
            m = velocity.get(path)
            if g is not None and m is not None:
                decays = self.decay is None or self.decay(path, p)
                new, m = ops.sgd_update(
                    *(p, g, m, lr, clip),
                    momentum=self.momentum,
                    weight_decay=self.weight_decay if decays else 0.0,
                )
                p = _same_dtype(new, p)
            parameters.append(p)
            if m is not None:
                velocities.append(m)
        moved = _rebuilt(model, parameters)
        return moved, SGDState(state.step + 1, _rebuilt(state.velocity, velocities))
