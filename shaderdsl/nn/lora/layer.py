"""A linear map with an adapter, and what is done to all adapters of a model."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY
from typing import Any

import numpy as np

from ... import ops, random
from ...array import Array, asarray
from ...errors import ShaderError
from ...ir import expr as E
from ...namespace import where
from ..layers import Linear, check_last
from ..module import combine, map_modules, named_arrays, partition, static

__all__ = ["LoRALinear", "attach", "join", "merge", "remove", "split", "unmerge"]


class LoRALinear(Linear):
    """``y = x Wᵀ + b + scale · (drop(x) Aᵀ) Bᵀ``.

    lora_A ``[rank, in]``, lora_B ``[out, rank]``. While ``merged``, the weight holds
    the product already and A and B are only kept. Dropout acts where there is a ``key``
    (u32 ``[2]``): it is a function of the key and the position, the same on every
    device.
    """

    lora_A: Array | None = None
    lora_B: Array | None = None
    key: Array | None = None
    _: KW_ONLY
    alpha: float = static(default=1.0)
    rank_stabilised: bool = static(default=False)
    dropout: float = static(default=0.0)
    merged: bool = static(default=False)

    @property
    def rank(self) -> int:
        """How many rows A has."""
        assert self.lora_A is not None
        return int(self.lora_A.shape[0])

    @property
    def scale(self) -> float:
        """alpha / rank, or alpha / √rank."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilised else self.rank)

    def __call__(self, x: Any) -> Array:
        y = super().__call__(x)
        if self.merged:
            return y
        a = check_last(x, self.weight.shape[1], "Linear")
        if self.key is not None and self.dropout:
            kept = random.uniform(self.key, a.shape) >= self.dropout
            a = where(kept, a * (1.0 / (1.0 - self.dropout)), 0.0)
        low: Array = ops.linear(a, self.lora_A)
        return y + self.scale * ops.linear(low, self.lora_B)

    def product(self) -> Array:
        """scale · B A, ``[out, in]``."""
        assert self.lora_A is not None and self.lora_B is not None
        y: Array = self.scale * (self.lora_B @ self.lora_A)
        return y


def attach(
    model: Any,
    *,
    rank: int = 8,
    alpha: float | None = None,
    targets: Sequence[str] = ("q_proj", "v_proj"),
    dropout: float = 0.0,
    rank_stabilised: bool = False,
    seed: int = 0,
) -> Any:
    """The model with an adapter beside each linear map that ``targets`` name.

    A is uniform in ±1/√in, a function of the seed and the map's path; B is zero, so
    that the model computes what it did. The new model shares the old one's arrays.

    Args:
        rank: rows of A.
        alpha: by default the rank, which makes the scale 1.
        targets: ends of attribute paths: ``"q_proj"``, ``"mlp.up_proj"``,
            ``"layers.0.self_attn.o_proj"``, ``"lm_head"``.
        dropout: the share of inputs that the adapter does not see in training; see
            :func:`with_dropout`.
        rank_stabilised: scale by alpha / √rank.

    Raises:
        ShaderError: a number out of range, a target that the model lacks, a map that
            has an adapter already.
    """
    if rank < 1 or not 0 <= dropout < 1:
        raise ShaderError(f"rank is {rank} and dropout {dropout}; ≥ 1 and in [0, 1)")
    names = (targets,) if isinstance(targets, str) else tuple(targets)
    found: set[str] = set()

    def visit(path: str, x: Linear) -> Linear:
        named = [t for t in names if path == t or path.endswith("." + t)]
        if not named:
            return x
        found.update(named)
        if isinstance(x, LoRALinear):
            raise ShaderError(
                f"{path} has an adapter already", cure="merge or remove it first"
            )
        out, size = x.weight.shape
        generator = np.random.default_rng([seed, zlib.crc32(path.encode())])
        drawn = generator.uniform(-(size**-0.5), size**-0.5, (rank, size))
        return LoRALinear(
            x.weight,
            x.bias,
            asarray(drawn, "f32"),
            asarray(np.zeros((out, rank), np.float32)),
            alpha=float(rank if alpha is None else alpha),
            rank_stabilised=rank_stabilised,
            dropout=float(dropout),
        )

    model = map_modules(model, Linear, visit)
    if missing := [t for t in names if t not in found] or (not names and ["nothing"]):
        raise ShaderError(
            f"the model has no linear map {missing[0]!r}",
            where=E.user_location(),
            cure="name ends of paths, as in model.parameters()",
        )
    return model


def split(model: Any) -> tuple[Any, Any]:
    """Adapters and all the rest, as two trees of the model's structure.

    A gradient to the first gives the rest none: no array, no kernel.
    """
    return partition(model, lambda path, _: path.endswith((".lora_A", ".lora_B")))


def join(adapters: Any, base: Any) -> Any:
    """The model from the parts that :func:`split` gave."""
    return combine(adapters, base)


def with_dropout(model: Any, key: Any) -> Any:
    """The model with dropout in its adapters, drawn from a key (:mod:`sd.random`).

    Without a key, as after ``attach`` or ``load``, nothing is dropped. A step takes
    ``with_dropout(join(adapters, base), key)`` with another key each time; the key may
    be an argument of a compiled function. None takes it off.
    """
    count = sum(1 for p, _ in named_arrays(model) if p.endswith(".lora_A"))
    keys = None if key is None else random.split(key, max(1, count))
    done = iter(range(count))

    def visit(path: str, x: LoRALinear) -> LoRALinear:
        new: LoRALinear = x.replace(key=None if keys is None else keys[next(done)])
        return new

    return map_modules(model, LoRALinear, visit)


def merge(model: Any) -> Any:
    """The model with scale · B A added to its weights; A and B are kept aside."""
    return _moved(model, merged=True, sign=1.0)


def unmerge(model: Any) -> Any:
    """The inverse of :func:`merge`, up to rounding of the weights."""
    return _moved(model, merged=False, sign=-1.0)


def _moved(model: Any, merged: bool, sign: float) -> Any:
    def visit(path: str, x: LoRALinear) -> LoRALinear:
        if x.merged == merged:
            return x
        weight = x.weight + sign * x.product()
        if weight.dtype != x.weight.dtype:
            weight = weight.astype(x.weight.dtype)
        moved: LoRALinear = x.replace(weight=weight, merged=merged)
        return moved

    return map_modules(model, LoRALinear, visit)


def remove(model: Any) -> Any:
    """The model without adapters; what was merged stays in the weights."""
    visit: Callable[[str, LoRALinear], Linear] = lambda _, x: Linear(x.weight, x.bias)  # noqa: E731
    return map_modules(model, LoRALinear, visit)
