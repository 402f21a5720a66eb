"""JAX: ops as functions under ``jit`` and ``grad``, through ``jax.pure_callback``.

Needs ``jax``. Arrays pass through memory of the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ..dtypes import NUMPY, dtype_name
from ..tracing import Traced, spec
from .hostcalls import value, value_and_pullback


def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays (an op, say) as one of JAX arrays, with a reverse-mode
    derivative: ``jit`` and ``grad`` work, ``jvp`` and second derivatives do not.

    Args:
        function: of arrays, giving an array or a tuple of them. Keywords reach it as
            they are.
    """

    @functools.wraps(function, updated=())
    def call(*args: Any, **keywords: Any) -> Any:
        bound = functools.partial(function, **keywords)

        @jax.custom_vjp
        def apply(*xs: Any) -> Any:
            return jax.pure_callback(
                lambda *a: _results(value(bound, _host(a))),
                _shapes(bound, xs),
                *xs,
                vmap_method="sequential",
            )

        def forward(*xs: Any) -> Any:
            return apply(*xs), xs

        def backward(xs: Any, dy: Any) -> Any:
            cotangents = dy if isinstance(dy, tuple) else (dy,)

            def pull(*a: Any) -> Any:
                given = _host(a)
                _, _, pullback = value_and_pullback(bound, given[: len(xs)])
                return tuple(g for g in pullback(given[len(xs) :]) if g is not None)

            floats = [k for k, x in enumerate(xs) if _is_float(x)]
            shapes = tuple(
                jax.ShapeDtypeStruct(xs[k].shape, xs[k].dtype) for k in floats
            )
            found = jax.pure_callback(
                pull, shapes, *xs, *cotangents, vmap_method="sequential"
            )
            out: list[Any] = [
                np.zeros(x.shape, jax.dtypes.float0) if not _is_float(x) else None
                for x in xs
            ]
            for k, g in zip(floats, found, strict=True):
                out[k] = g
            return tuple(out)

        apply.defvjp(forward, backward)
        return apply(*(jax.numpy.asarray(a) for a in args))

    return call


def _is_float(x: Any) -> bool:
    return bool(jax.numpy.issubdtype(x.dtype, jax.numpy.floating))


def _host(args: Sequence[Any]) -> list[np.ndarray]:
    return [np.asarray(a) for a in args]


def _results(found: tuple[list[np.ndarray], bool]) -> Any:
    ys, many = found
    return tuple(ys) if many else ys[0]


def _shapes(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Shapes and dtypes of the results, as JAX states them."""
    traced = Traced(
        function, tuple(spec(dtype_name(a.dtype), *a.shape) for a in args), "jax"
    )
    found = [jax.ShapeDtypeStruct(s.shape, NUMPY[s.dtype]) for s in traced.outs]
    return tuple(found) if traced.result.kind in (tuple, list) else found[0]
