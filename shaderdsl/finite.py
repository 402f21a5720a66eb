"""``SHADERDSL_DEBUG=nan``: which line made the first NaN or infinity.

A call whose results hold a NaN, or an infinity that was not given to it, is run again
one stage at a time, unfused, on the same device. The first stage whose result has a NaN
where nothing that it reads has one, or an infinity where all that it reads is finite
and its definition writes none, is named with the user's line.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .engine import placeholder, plan_for
from .errors import CompilerError, NotFiniteError
from .ir import expr as E
from .ir import interpret
from .ir.expr import Expr
from .ir.stage import Stage, retarget, topo_stages

if TYPE_CHECKING:
    from .engine import Plan

__all__ = ["check", "enabled", "run_alone"]

# Elements of a stage's space up to which the operation inside of it is looked for.
_MOST = 1 << 24


def enabled() -> bool:
    """Whether ``SHADERDSL_DEBUG`` asks for this."""
    return "nan" in os.environ.get("SHADERDSL_DEBUG", "").split(",")


def check(
    plan: Plan,
    given: Mapping[Stage, Any],
    scalars: Mapping[str, Any],
    results: Sequence[Any],
) -> None:
    """Look at the results of a call.

    Args:
        plan: what was called.
        given: the buffer of every input.
        scalars: the runtime numbers of the call.
        results: the buffers of the results.

    Raises:
        NotFiniteError: at the line that made the first NaN or infinity.
    """
    outs = list(zip(plan.outs, results, strict=True))
    worst = max((_state(_read(plan, b, s)) for s, b in outs), default=0)
    if worst == 0:
        return
    order = topo_stages(plan.outs)
    last = {n.data: k for k, s in enumerate(order) for n in s.loads}
    inner = _of_extremes(order) - set(plan.outs)
    for t in inner:  # what it was made from is told with the extreme
        for n in t.loads:
            last[n.data] = max(last[n.data], last[t])
    values: dict[Stage, np.ndarray] = {}
    started = 0
    for k, s in enumerate(order):
        if s.kind == "input":
            values[s] = _read(plan, given[s], s)
            started = max(started, _state(values[s]))
        else:
            values[s] = run_alone(s, values, scalars)
            part = inner & {n.data for n in s.loads}
            known = [_state(values[n.data]) for n in s.loads if n.data not in part]
            written = max(map(_written, (s, *part)))
            # An infinity that an extreme leaves out is none of its result.
            least = 2 if s in inner else 1
            if _state(values[s]) > max([*known, written, least - 1]):
                wild = [t for t in part if _state(values[t])]
                raise _error((wild or [s])[0], values, scalars)
        for t in [t for t in values if last.get(t, len(order)) == k]:
            del values[t]
    if worst == 2 and started < 2 and not _written_anywhere(order):
        names = ", ".join(k.name for k in plan.program.kernels)
        raise CompilerError(
            "a result holds a NaN that its stages do not make one by one; this is a "
            f"fault of shaderdsl in one of the kernels {names}",
            cure="please report this with the function that was called",
        )


def _of_extremes(order: Sequence[Stage]) -> set[Stage]:
    """Maps that nothing but extremes read: the body of an extreme of an op."""
    others = {n.data for s in order if s.monoid not in ("max", "min") for n in s.loads}
    read = {n.data for s in order for n in s.loads}
    return {s for s in read - others if s.kind == "map"}


def _read(plan: Plan, buffer: Any, s: Stage) -> np.ndarray:
    values: np.ndarray = plan.device.download(buffer, s.shape, s.dtype)
    return values


def _state(x: np.ndarray) -> int:
    """0: all finite, 1: there are infinities, 2: there are NaNs."""
    if x.dtype.kind != "f":
        return 0
    return 0 if np.isfinite(x).all() else 2 if np.isnan(x).any() else 1


def _written(s: Stage) -> int:
    """The same of the constants in a stage's own definition."""
    found = 0
    for n in E.topo(s.body) if s.body is not None else ():
        if n.kind in ("const", "size") and isinstance(n.data, float):
            found = max(found, 2 if math.isnan(n.data) else int(math.isinf(n.data)))
    return found


def _written_anywhere(order: Sequence[Stage]) -> bool:
    return any(_written(s) for s in order)


def run_alone(
    s: Stage, values: Mapping[Stage, np.ndarray], scalars: Mapping[str, Any]
) -> np.ndarray:
    """One stage, run by itself on the device."""
    if not s.size:
        return np.zeros(s.shape, np.float32)
    sources = list(dict.fromkeys(n.data for n in s.loads))
    places = [
        placeholder(("finite", k), t.shape, t.dtype, t.name)
        for k, t in enumerate(sources)
    ]
    one = retarget(s, dict(zip(sources, places, strict=True)))
    plan = plan_for([one], places)
    buffers = [
        plan.device.upload(values[t], t.dtype) if t.size else _empty(plan, t)
        for t in sources
    ]
    (result,) = plan.executable(buffers, dict(scalars))
    return _read(plan, result, one)


def _empty(plan: Plan, t: Stage) -> Any:
    return plan.device.upload(np.zeros(t.shape, np.float32), t.dtype)


def _error(
    s: Stage, values: Mapping[Stage, np.ndarray], scalars: Mapping[str, Any]
) -> NotFiniteError:
    x = values[s]
    nan = _state(x) == 2
    bad = np.isnan(x) if nan else np.isinf(x)
    at = tuple(int(i) for i in np.argwhere(bad)[0])
    what = "NaN" if nan else "infinity"
    known = [values[n.data] for n in s.loads]
    told = f"{int(bad.sum()):,} of {x.size:,} elements, the first at {list(at)}"
    culprit = _inside(s, at, values, scalars, nan)
    how, where = "", s.loc
    if culprit is not None:
        how, line = culprit
        where = line or where
    elif s.kind == "reduce":
        how = f": its {s.monoid} over {math.prod(s.rext):,} elements does"
    if nan and any(_state(v) == 1 for v in known):
        how += "; an infinity that it was given takes part"
    return NotFiniteError(
        f"{s.name} {list(s.shape)} makes the first {what} ({told}){how}",
        where=where,
        cure="guard the argument (sd.where, sd.maximum), or scale it down; the stages "
        "before this one are finite" + ("" if nan else ", as is what was given"),
    )


def _inside(
    s: Stage,
    at: tuple[int, ...],
    values: Mapping[Stage, np.ndarray],
    scalars: Mapping[str, Any],
    nan: bool,
) -> tuple[str, str | None] | None:
    """The operation of a stage's body that makes it, with its operands, and its line.

    Evaluated in NumPy f32; where that differs from the device it finds nothing.
    """
    if math.prod(s.space) > _MOST or s.body is None:
        return None
    wide = {
        t: v.astype(np.float32) if v.dtype == np.float16 else v
        for t, v in values.items()
    }
    nodes = interpret.node_values(s, wide, "float32", scalars)
    bad = np.isnan if nan else np.isinf
    place = _position(s, at)
    for n, value in nodes.items():
        if n.kind != "apply" or n.dtype != "f32":
            continue
        operands = [nodes[a] for a in n.args]
        made = bad(value)
        for a in operands:
            if a.dtype.kind == "f":
                made = made & (~bad(a) if nan else np.isfinite(a))
        here = np.argwhere(np.broadcast_to(made, s.space)[place])
        if len(here):
            spot = (*place, *(int(i) for i in here[0]))
            how = _told(n, nodes, s.space, spot)
            # What an operation got may be the fault: go down to where that began.
            cause = n
            while cause.kind == "apply":
                wild = [a for a in cause.args if not _finite(nodes[a], s.space, spot)]
                if not wild or wild[0].kind != "apply":
                    break
                cause = wild[0]
            if cause is not n:
                how += f", because {_told(cause, nodes, s.space, spot)}"
            return f": {how}", cause.loc
    return None


def _told(
    n: Expr,
    nodes: Mapping[Expr, np.ndarray],
    space: tuple[int, ...],
    spot: tuple[int, ...],
) -> str:
    shown = ", ".join(_shown(nodes[a], space, spot) for a in n.args)
    return f"{n.data}({shown}) is {_shown(nodes[n], space, spot)}"


def _finite(x: np.ndarray, space: tuple[int, ...], spot: tuple[int, ...]) -> bool:
    return x.dtype.kind != "f" or bool(np.isfinite(np.broadcast_to(x, space)[spot]))


def _position(s: Stage, at: tuple[int, ...]) -> tuple[int, ...]:
    """An index into ``shape`` as an index into ``ext``."""
    flat = int(np.ravel_multi_index(at, s.shape)) if at else 0
    return tuple(int(i) for i in np.unravel_index(flat, s.ext)) if s.ext else ()


def _shown(x: np.ndarray, space: tuple[int, ...], spot: tuple[int, ...]) -> str:
    return f"{np.broadcast_to(x, space)[spot]:.6g}"
