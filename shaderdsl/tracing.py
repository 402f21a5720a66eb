"""Functions traced on placeholders: what they compute, and the ids to check first."""

from __future__ import annotations

import dataclasses
import inspect
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from . import tree
from .array import Array, asarray, is_number
from .dtypes import DTYPES, dtype_name
from .engine import captured_inputs, lock, placeholder, plan_for
from .errors import (
    DTypeError,
    IndexRangeError,
    ShapeError,
)
from .ids import flag, flag_stage, is_trusted, made_inside, settled
from .ir import arrays as A
from .ir import expr as E
from .ir import interpret
from .ir.bounds import HostCheck
from .ir.remat import Region
from .ir.stage import Stage, rebind

_state = threading.local()


class Tracing:
    """One function under trace: how deep it nests, and the checks on ids that its ops
    asked for.
    """

    def __init__(self) -> None:
        self.checks: list[HostCheck] = []
        self.regions: list[Region] = []  # of remat

    def __enter__(self) -> Tracing:
        lock.acquire()
        stack = _state.__dict__.setdefault("stack", [])
        stack.append(self)
        self.depth = len(stack)
        return self

    def __exit__(self, *error: Any) -> None:
        _state.stack.pop()
        lock.release()


def depth() -> int:
    """How many functions are under trace, one inside of another."""
    return len(getattr(_state, "stack", []))


def innermost() -> Tracing | None:
    """The function under trace, if any."""
    stack = getattr(_state, "stack", [])
    return stack[-1] if stack else None


def note_checks(checks: Iterable[HostCheck]) -> None:
    stack = getattr(_state, "stack", [])
    if stack and is_trusted():
        checks = [dataclasses.replace(c, flagged=False) for c in checks]
    if stack:
        stack[-1].checks += checks


def run_checks(
    checks: Iterable[HostCheck],
    host: dict[Stage, np.ndarray],
    scalars: dict[str, Any] | None = None,
) -> list[HostCheck]:
    """Look at ids that are known on the host; ``scalars`` are the runtime numbers that
    guards may use. Gives the checks whose ids are not.

    Raises:
        IndexRangeError: naming the array, the axis' size and the offending id.
    """
    unknown = []
    for c in checks:
        if _surely_in_range(c, host):
            continue
        known = {}
        for s in _read(c):
            values = host[s] if s in host else getattr(s.source, "_host", None)
            if values is None or s.dtype in E.FLOATS:  # the device may round otherwise
                unknown.append(c)
                break
            known[s] = values
        if len(known) < len(_read(c)):
            continue
        low, high = interpret.index_range(c.index, c.guards, c.space, known, scalars)
        if low < 0 or high >= c.extent:
            raise IndexRangeError(
                f"ids run from {low} to {high}, but axis {c.axis} of {c.array!r} has "
                f"size {c.extent}",
                where=c.where,
                cure="keep ids in range, or guard the read with sd.where",
            )
    return unknown


@lru_cache(maxsize=4096)
def _read(c: HostCheck) -> frozenset[Stage]:
    """What decides about a check."""
    return frozenset(n.data for n in E.loads(c.index, *c.guards))


def check_ids(
    checks: Sequence[HostCheck],
    inputs: Sequence[Stage],
    arrays: Sequence[Array],
    scalars: dict[str, Any] | None = None,
) -> None:
    """Look at ids of inputs: those of the host now, others at the next read.

    Raises:
        IndexRangeError: naming the array, the axis' size and the offending id.
    """
    if checks:
        left = run_checks(checks, host_copies(inputs, arrays), scalars)
        if not left or is_trusted():
            return
        inside = made_inside(left)
        flag([c for c in left if c not in inside], inputs, arrays, scalars)


def _surely_in_range(c: HostCheck, host: dict[Stage, np.ndarray]) -> bool:
    """Whether every element of the ids is in range, which says it for those read."""
    ids = host.get(c.index.data) if c.index.kind == "load" else None
    if ids is None or not ids.size:
        return False
    return bool(ids.min() >= 0 and ids.max() < c.extent)


def rebound_checks(
    checks: Iterable[HostCheck], inputs: Sequence[Stage], arrays: Sequence[Array]
) -> list[HostCheck]:
    """Checks of an inner trace in terms of the outer one's arrays."""
    given = {s: a.stage() for s, a in zip(inputs, arrays, strict=True)}

    def moved(e: E.Expr) -> E.Expr:
        return E.rewrite(
            e,
            lambda n, args: (
                E.load(rebind([n.data], given)[0], args)
                if n.kind == "load"
                else (E.rebuild(n, args) if args else n)
            ),
        )

    return [
        dataclasses.replace(
            c, index=moved(c.index), guards=tuple(moved(g) for g in c.guards)
        )
        for c in checks
    ]


def defined_at(function: Callable[..., Any]) -> str:
    """``file:line`` of a function's definition."""
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else "?"


def number_node(name: str, v: Any, static: bool, scalars: dict[str, Any] | None) -> Any:
    """An option as an expression: a runtime scalar when ``scalars`` collects them, a
    parameter inside a trace.
    """
    if isinstance(v, Array):
        check_number(name, v)
        return E.load(v.stage(), ())
    if isinstance(v, (np.generic, np.ndarray)) and v.shape == ():
        v = v.item()
    if static or not is_number(v) or isinstance(v, bool):
        return v
    dtype = "i32" if isinstance(v, int) else "f32"
    if dtype == "i32" and not -(2**31) <= v < 2**31:
        raise DTypeError(
            f"the option {name!r} = {v} does not fit i32",
            where=E.user_location(),
            cure="pass a float, or a number in range",
        )
    if scalars is None:
        return E.size(v, dtype)
    scalars[name] = v
    return E.scalar(name, dtype)


def check_number(name: str, v: Array) -> None:
    if v.shape:
        raise ShapeError(
            f"the option {name!r} is an array of shape {v.shape}; options are numbers",
            where=E.user_location(),
            cure="make it an operand, so that the signature names its axes",
        )


def hashable(v: Any) -> Any:
    try:
        hash(v)
    except TypeError:
        return repr(v)
    return (type(v), v)


def give(xs: list[Any], many: bool) -> Any:
    return tuple(xs) if many else xs[0]


def host_copies(
    inputs: Sequence[Stage], arrays: Sequence[Array]
) -> dict[Stage, np.ndarray]:
    return {
        s: a._host for s, a in zip(inputs, arrays, strict=True) if a._host is not None
    }


class Traced:
    """A function traced on placeholders: stages of its array results, and how to put
    results together.
    """

    def __init__(
        self, function: Callable[..., Any], args: Any, role: Any, named: Any = None
    ):
        leaves, structure = tree.flatten(args)
        names = leaf_names(named or function, args)
        self.arrays: list[Array] = []
        self.inputs: list[Stage] = []
        self.positions: list[int] = []
        self.static: list[Any] = []
        with Tracing() as t:
            symbols = list(leaves)
            for k, leaf in enumerate(leaves):
                a = as_leaf(leaf)
                if a is None:
                    self.static.append(leaf)
                    continue
                s = placeholder(
                    (role, t.depth, len(self.inputs)), a.shape, a.dtype.name, names[k]
                )
                self.arrays.append(a)
                self.inputs.append(s)
                self.positions.append(k)
                symbols[k] = Array.symbol(s)
                symbols[k].weak = is_number(leaf) or (
                    isinstance(leaf, Array) and leaf.weak
                )
            result = function(*tree.unflatten(structure, symbols))
            self.result_leaves, self.result = tree.flatten(result)
            self.checks = settled(t.checks)
            self.regions = t.regions
        self.outs: list[Stage] = []
        self.out_positions: list[int] = []
        for k, leaf in enumerate(self.result_leaves):
            if isinstance(leaf, (Array, np.ndarray)):
                self.outs.append(asarray(leaf).stage())
                self.out_positions.append(k)
        self.structure = structure
        self.leaves = leaves
        self._calls = 0
        self._build: Callable[[Sequence[Any]], Any] | None = None
        #: Shapes and dtypes of the results.
        self.kinds = [(s.shape, DTYPES[s.dtype]) for s in self.outs]
        #: Checks of ids that the function computes, and what decides them.
        self.made = made_inside(self.checks)
        with lock:
            self.flags = [flag_stage(c) for c in self.made]

    def results(self, arrays: Sequence[Array]) -> Any:
        """The function's result with these arrays in place of the symbols."""
        leaves: Any
        if len(self.out_positions) == len(self.result_leaves) == len(arrays):
            leaves = arrays
        else:
            leaves = list(self.result_leaves)
            for k, a in zip(self.out_positions, arrays, strict=True):
                leaves[k] = a
        if self._build is None:
            self._calls += 1
            if self._calls < 3:
                return tree.unflatten(self.result, leaves)
            self._build = tree.builder(self.result)  # Called again and again.
        return self._build(leaves)

    def symbolic(self) -> bool:
        """Whether an argument, or what the function closes over, is a symbol of an
        outer trace.
        """
        return any(a.symbolic and not a._donated for a in self.arrays) or any(
            s.source is None for s in captured_inputs(self.outs, self.inputs)
        )


def leaf_names(function: Any, args: Sequence[Any]) -> list[str]:
    """What the kernels call each leaf: a parameter that is one array has its name,
    parts of a pytree have none of their own (equal kernels of all layers must stay one
    text).
    """
    if hasattr(function, "operands"):
        names = list(function.operands)
    elif len(args) == 1 and type(args[0]) is dict:
        names = list(args[0])
        args = list(args[0].values())
    else:
        try:
            names = [
                p.name
                for p in inspect.signature(function).parameters.values()
                if p.kind != p.VAR_POSITIONAL
            ]
        except (TypeError, ValueError):
            names = []
    out: list[str] = []
    for k, a in enumerate(args):
        leaves = tree.leaves(a)
        single = len(leaves) == 1 and leaves[0] is a and k < len(names)
        out += [names[k]] if single else ["x"] * len(leaves)
    return out


def as_leaf(leaf: Any) -> Array | None:
    """An argument's leaf as an array, or None when it is static (bool, str, a
    configuration).
    """
    if type(leaf) is Array and not leaf._donated:
        return leaf
    if isinstance(leaf, Spec):
        return Array.symbol(placeholder("spec", leaf.shape, leaf.dtype))
    if isinstance(leaf, Array):
        leaf._check_live()
        return leaf
    if isinstance(leaf, (bool, str)) or leaf is None:
        return None
    if (
        is_number(leaf)
        or isinstance(leaf, (np.ndarray, np.generic))
        or hasattr(leaf, "__array__")
        or hasattr(leaf, "__dlpack__")
    ):
        return asarray(leaf)
    return None


class Spec:
    """Shape and dtype in place of an array, for :func:`lower`."""

    def __init__(self, dtype: str, *shape: int):
        self.dtype = dtype_name(dtype)
        one = len(shape) == 1 and isinstance(shape[0], (tuple, list))
        self.shape = A.sizes(shape[0] if one else shape, "an array")

    def __repr__(self) -> str:
        return f"spec({', '.join([repr(self.dtype), *map(str, self.shape)])})"


def spec(dtype: str, *shape: int) -> Spec:
    """``sd.spec("f32", 16, 512)``"""
    return Spec(dtype, *shape)


def run(
    outs: Sequence[Stage], inputs: Sequence[Stage], arrays: Sequence[Array]
) -> list[Array]:
    buffers = plan_for(outs, inputs)([a.buffer() for a in arrays], {})
    return [
        Array.of_buffer(b, s.shape, s.dtype) for b, s in zip(buffers, outs, strict=True)
    ]


def substituted(
    outs: Sequence[Stage], inputs: Sequence[Stage], arrays: Sequence[Array]
) -> list[Array]:
    """Results of an inner trace as symbols of the outer one."""
    given = {s: a.stage() for s, a in zip(inputs, arrays, strict=True)}
    return [Array.symbol(s) for s in rebind(outs, given)]
