"""PyTorch: ops as differentiable functions of tensors.

Needs the extra ``torch``. Tensors pass through memory of the host.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ..errors import DTypeError
from ..function import vjp
from ..ir import expr as E
from .hostcalls import several, value, value_and_pullback

_said: set[str] = set()


def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays (an op, say) as a function of tensors with a derivative.

    The backward pass is the derived one: ``torch.autograd`` gives gradients, and
    gradients of gradients. Works in a ``torch.nn.Module`` and under
    ``DistributedDataParallel``.

    Tensors of float64 are evaluated in float64 by NumPy, which is what ``gradcheck``
    needs; float32 and float16 run on the device in use; bfloat16 is widened to float32
    and rounded again. Results are on the device of the first tensor. Tensors on a GPU
    and those that are not contiguous are copied, which is said once.

    Args:
        function: of arrays, giving an array or a tuple of them. Positional arguments
            that are no tensors, and keywords, reach it as they are.

    Raises:
        DTypeError: float64 tensors together with other floats.
    """

    @functools.wraps(function, updated=())
    def call(*args: Any, **keywords: Any) -> Any:
        places = [k for k, a in enumerate(args) if isinstance(a, torch.Tensor)]
        if not places:
            raise DTypeError(
                "a wrapped function takes at least one tensor",
                where=E.user_location(),
                cure="call the function itself with arrays",
            )

        def bound(*arrays: Any) -> Any:
            given = list(args)
            for k, a in zip(places, arrays, strict=True):
                given[k] = a
            return function(*given, **keywords)

        tensors = [args[k] for k in places]
        call_ = _Call(bound)
        results = _Apply.apply(call_, *tensors)
        return results if call_.several else results[0]

    return call


class _Call:
    """A function of arrays alone, and what is learnt of it when it runs."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.several = False


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: torch.Tensor) -> Any:
        arrays = [_to_numpy(t) for t in tensors]
        ctx.call = call
        ctx.save_for_backward(*tensors)
        wanted = any(ctx.needs_input_grad[1:])
        if wanted:
            ys, call.several, ctx.pullback = value_and_pullback(call.function, arrays)
        else:
            ys, call.several = value(call.function, arrays)
        out = tuple(_to_torch(y, tensors) for y in ys)
        ctx.mark_non_differentiable(*(t for t in out if not t.is_floating_point()))
        return out

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        tensors = ctx.saved_tensors
        if torch.is_grad_enabled():
            # The gradient is to be differentiated again: it is a function of its own.
            found = _again(ctx.call.function, tensors, cotangents)
        else:
            given = [_to_numpy(c) for c in cotangents]
            found = [
                None if g is None else _to_torch(g, [t])
                for g, t in zip(ctx.pullback(given), tensors, strict=True)
            ]
        return (
            None,
            *(
                g if needed else None
                for g, needed in zip(found, ctx.needs_input_grad[1:], strict=True)
            ),
        )


def _again(
    function: Callable[..., Any],
    tensors: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor],
) -> list[torch.Tensor | None]:
    """The pullback as a function of the arguments and the cotangents."""
    n = len(tensors)
    floats = [k for k, t in enumerate(tensors) if t.is_floating_point()]
    seeds = [c for c in cotangents if c.is_floating_point()]

    def gradient(*arrays: Any) -> Any:
        y, pullback = vjp(function, *arrays[:n])
        dy = arrays[n:]
        got = pullback(dy if len(several(y)) > 1 else dy[0])
        got = list(got) if n > 1 else [got]
        return tuple(got[k] for k in floats)

    out: list[torch.Tensor | None] = [None] * n
    found = _Apply.apply(_Call(gradient), *tensors, *seeds)
    for k, g in zip(floats, found, strict=True):
        out[k] = g
    return out


def _to_numpy(t: torch.Tensor) -> np.ndarray:
    t = t.detach()
    if t.device.type != "cpu":
        _say(f"tensors on {t.device.type} are copied through the host")
        t = t.cpu()
    if not t.is_contiguous():
        _say("tensors that are not contiguous are copied")
        t = t.contiguous()
    if t.dtype == torch.bfloat16:
        t = t.float()
    return t.numpy()


def _to_torch(y: np.ndarray, like: Sequence[torch.Tensor]) -> torch.Tensor:
    """A tensor on the device of those that went in; bfloat16 where all floats were."""
    t = torch.from_numpy(np.require(y, requirements=["C", "W"])).to(like[0].device)
    floats = {x.dtype for x in like if x.is_floating_point()}
    if t.dtype == torch.float32 and floats == {torch.bfloat16}:
        t = t.to(torch.bfloat16)
    return t


def _say(line: str) -> None:
    if line not in _said:
        _said.add(line)
        warnings.warn(line, stacklevel=4)
