"""Functions of arrays called by other libraries, with arrays of the host.

Arguments are NumPy arrays; a function of float64 arrays is evaluated in float64 by
NumPy, everything else on the device in use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..array import Array
from ..errors import DTypeError
from ..function import vjp
from ..ir import expr as E
from ..reference import Graph

Pullback = Callable[[Sequence[np.ndarray]], list[np.ndarray | None]]


def several(y: Any) -> list[Any]:
    """One result or a tuple of them, as a list."""
    return list(y) if isinstance(y, (tuple, list)) else [y]


def _wide(args: Sequence[np.ndarray]) -> bool:
    return any(a.dtype == np.float64 for a in args)


def value(
    function: Callable[..., Any], args: Sequence[np.ndarray]
) -> tuple[list[np.ndarray], bool]:
    """The results, and whether the function gives a tuple of them."""
    if _wide(args):
        graph = Graph(function, _narrow(args))
        return _of_graph(graph, args), graph.several
    y = function(*args)
    return [np.asarray(r) for r in several(y)], isinstance(y, (tuple, list))


def value_and_pullback(
    function: Callable[..., Any], args: Sequence[np.ndarray]
) -> tuple[list[np.ndarray], bool, Pullback]:
    """The results, whether they are several, and the pullback: from cotangents of all
    results to one cotangent for each argument, None for those that are not float.
    """
    if _wide(args):
        graph = Graph(function, _narrow(args))

        def wide(cotangents: Sequence[np.ndarray]) -> list[np.ndarray | None]:
            out: list[np.ndarray | None] = [None] * len(args)
            found = graph.gradient(args, cotangents)
            for k, g in zip(graph.floats, found, strict=True):
                out[k] = np.asarray(g, np.float64)
            return out

        return _of_graph(graph, args), graph.several, wide
    y, back = vjp(function, *args)
    results = several(y)

    def pullback(cotangents: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        given = [
            c
            for c, r in zip(cotangents, results, strict=True)
            if isinstance(r, Array) and r.dtype in E.FLOATS
        ]
        got = back(tuple(given))
        found = list(got) if len(args) > 1 else [got]
        return [None if g is None else np.asarray(g) for g in found]

    return [np.asarray(r) for r in results], isinstance(y, (tuple, list)), pullback


def _narrow(args: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What the graph is traced with: only shapes and dtypes count."""
    for a in args:
        if a.dtype.kind == "f" and a.dtype != np.float64:
            raise DTypeError(
                "float64 arrays together with float32 ones",
                where=E.user_location(),
                cure="convert all of them to one dtype",
            )
    return [a.astype(np.float32) if a.dtype == np.float64 else a for a in args]


def _of_graph(graph: Graph, args: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [
        np.asarray(y, np.float64 if s.dtype in E.FLOATS else None)
        for y, s in zip(graph.value(args), graph.outs, strict=True)
    ]
