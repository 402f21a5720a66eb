"""Low-rank adapters: small matrices beside frozen ones, trained, merged and stored.

``y = W x + b + scale · B (A x)`` with A ``[rank, in]`` and B ``[out, rank]``; scale is
alpha / rank, or alpha / √rank where it is rank-stabilised.

Example:
    >>> model = sd.nn.lora.attach(model, rank=8, targets=("q_proj", "v_proj"))
    >>> adapters, base = sd.nn.lora.split(model)
    >>> def loss_of(adapters):
    ...     return loss(sd.nn.lora.join(adapters, base))
    >>> loss, gradients = sd.value_and_grad(loss_of)(adapters)

Source: Hu et al., "LoRA: low-rank adaptation of large language models" (2021);
Kalajdzievski, "A rank stabilization scaling factor for fine-tuning with LoRA" (2023).
"""

from __future__ import annotations

from .files import load, save, state_dict
from .layer import (
    LoRALinear,
    attach,
    join,
    merge,
    remove,
    split,
    unmerge,
    with_dropout,
)

__all__ = [
    "LoRALinear",
    "attach",
    "join",
    "load",
    "merge",
    "remove",
    "save",
    "split",
    "state_dict",
    "unmerge",
    "with_dropout",
]
