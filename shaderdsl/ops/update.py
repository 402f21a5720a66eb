"""Steps of optimisers, elementwise: one kernel for as many parameters as there are.

What changes from step to step is an operand without dimensions, so that it may be
computed on the device: the rate, the bias corrections, the factor that clips.
"""

from __future__ import annotations

from typing import Any

from .. import namespace as sd
from ..op import op


@op("..., ..., ..., ..., , , , -> ..., ..., ...")
def adamw_update(
    p: Any,
    g: Any,
    m: Any,
    v: Any,
    lr: Any,
    correction1: Any,
    correction2: Any,
    clip: Any,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> tuple[Any, Any, Any]:
    """One step of AdamW; gives the new p, m and v.

    g' = clip · g;  m' = β₁ m + (1 - β₁) g';  v' = β₂ v + (1 - β₂) g'²;
    p' = p - lr · (m' / c₁ / (√(v' / c₂) + eps) + weight_decay · p)

    Args:
        p, g, m, v: parameter, gradient and the two moments, of one shape.
        lr: the rate of this step.
        correction1, correction2: c₁ = 1 - β₁ᵗ and c₂ = 1 - β₂ᵗ of step t = 1, 2, …
        clip: factor on the gradient: min(1, limit / ‖g‖), or 1.

    Source: Loshchilov and Hutter, "Decoupled weight decay regularization" (2017).
    """
    grad = clip * g
    first = beta1 * m + (1.0 - beta1) * grad
    second = beta2 * v + (1.0 - beta2) * (grad * grad)
    step = (first / correction1) / (sd.sqrt(second / correction2) + eps)
    return p - lr * (step + weight_decay * p), first, second


@op("..., ..., ..., , -> ..., ...")
def sgd_update(
    p: Any,
    g: Any,
    m: Any,
    lr: Any,
    clip: Any,
    *,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> tuple[Any, Any]:
    """One step of gradient descent with momentum; gives the new p and m.

    m' = momentum · m + clip · g + weight_decay · p;  p' = p - lr · m'

    Args:
        p, g, m: parameter, gradient and velocity, of one shape.
        lr: the rate of this step.
        clip: factor on the gradient, or 1.
    """
    velocity = momentum * m + clip * g + weight_decay * p
    return p - lr * velocity, velocity
