"""What must hold of a graph at every step of the compiler.

``SHADERDSL_DEBUG=verify`` checks each graph after tracing, after deriving and after the
partition. A graph that fails is printed with the message under the stage at fault.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from ..errors import CompilerError
from . import expr as E
from .expr import Expr
from .primitives import PRIMITIVES
from .printer import show, show_stage
from .stage import MONOIDS, Stage

_KINDS = ("input", "given", "map", "reduce")
_LEAVES = {"const": E.DTYPES, "index": ("i32",), "size": ("i32", "u32", "f32")}


def enabled() -> bool:
    """Whether ``SHADERDSL_DEBUG`` asks for verification."""
    return "verify" in os.environ.get("SHADERDSL_DEBUG", "").split(",")


def check(outs: Iterable[Stage], when: str) -> None:
    """:func:`verify` where the environment asks for it."""
    if enabled():
        verify(outs, when)


def verify(outs: Iterable[Stage], when: str = "") -> None:
    """Check a graph.

    Args:
        outs: its outputs.
        when: after which step, for the message.

    Raises:
        CompilerError: with the graph as text and the message under the bad stage.
    """
    order = _order(list(outs), when)
    for s in order:
        for message in _faults(s):
            raise _error(order, s, message, when)


def _error(
    order: Iterable[Stage], bad: Stage, message: str, when: str
) -> CompilerError:
    lines = []
    for s in order:
        lines.append(show_stage(s))
        if s is bad:
            lines.append(f"  ^ {message}")
    step = f" {when}" if when else ""
    return CompilerError(f"a graph is not valid{step}: {message}\n" + "\n".join(lines))


def _order(outs: list[Stage], when: str) -> list[Stage]:
    """Producers first; a cycle is a fault."""
    order: list[Stage] = []
    state: dict[Stage, int] = {}  # 1: open, 2: done
    stack = [(s, False) for s in reversed(outs)]
    while stack:
        s, done = stack.pop()
        if done:
            state[s] = 2
            order.append(s)
            continue
        if s in state:
            continue
        state[s] = 1
        stack.append((s, True))
        for n in s.loads:
            if state.get(n.data) == 1:
                raise _error([*order, s], s, f"it depends on itself: {n!r}", when)
            if n.data not in state:
                stack.append((n.data, False))
    return order


def _faults(s: Stage) -> Iterator[str]:
    """What is wrong with one stage."""
    if s.kind not in _KINDS:
        yield f"its kind is {s.kind!r}"
    if s.dtype not in E.DTYPES:
        yield f"its dtype is {s.dtype!r}"
    if any(not isinstance(n, int) or n < 0 for n in s.space):
        yield f"extents are {list(s.space)}"
    if [a for g in s.groups for a in g] != list(range(len(s.ext))):
        yield f"groups {s.groups} do not cover its {len(s.ext)} axes in order"
    if (s.kind == "reduce") != bool(s.monoid) or (s.kind != "reduce" and s.rext):
        yield f"a {s.kind} with monoid {s.monoid} over {list(s.rext)}"
    if (s.body is None) != (s.kind in ("input", "given")):
        yield f"{'no body' if s.body is None else 'a body'} in a stage of kind {s.kind}"
    if s.body is None:
        return
    stored = "f32" if s.dtype == "f16" else s.dtype
    if s.body.dtype != stored:
        yield f"it stores {s.dtype}, its body is {s.body.dtype}"
    if s.monoid and (
        s.monoid not in MONOIDS or s.body.dtype not in MONOIDS[s.monoid].identity
    ):
        yield f"{s.monoid} has no identity for {s.body.dtype}"
    outside = [a for a in E.bits(s.body.free) if a >= len(s.space)]
    if outside:
        yield f"its body depends on axis {outside[0]} of {len(s.space)}"
    for n in E.topo(s.body):
        yield from (f"{message}: {show(n, 200)}" for message in _node_faults(n))


def _node_faults(n: Expr) -> Iterator[str]:
    """What is wrong with one node, given that its operands were looked at."""
    free = 0
    for x in n.args:
        free |= x.free
    if n.kind == "index":
        free = 1 << n.data
    if n.free != free:
        yield f"free axes are noted as {n.free:b}, they are {free:b}"
    if n.kind in _LEAVES:
        if n.args or n.dtype not in _LEAVES[n.kind]:
            yield f"a {n.kind} of dtype {n.dtype}"
    elif n.kind == "load":
        yield from _load_faults(n)
    elif n.kind == "apply":
        yield from _apply_faults(n)
    elif n.kind != "scalar":
        yield f"a node of kind {n.kind!r}"


def _load_faults(n: Expr) -> Iterator[str]:
    source: Stage = n.data
    if len(n.args) != len(source.shape):
        yield f"{len(n.args)} indices for the shape {source.shape}"
    for i in n.args:
        if i.dtype != "i32":
            yield f"an index is {i.dtype}, not i32"
    if n.dtype != ("f32" if source.dtype == "f16" else source.dtype):
        yield f"a load of {source.dtype} gives {n.dtype}"


def _apply_faults(n: Expr) -> Iterator[str]:
    prim = PRIMITIVES.get(n.data)
    if prim is None:
        yield f"no primitive is called {n.data!r}"
        return
    kinds = [x.dtype for x in n.args]
    if prim.takes == "where":
        if kinds[0] != "bool" or kinds[1] != kinds[2]:
            yield f"where of {', '.join(kinds)}"
    elif prim.takes == "float":
        if set(kinds) != {"f32"}:
            yield f"{n.data} takes f32, not {', '.join(kinds)}"
    elif prim.takes != "any" and len(set(kinds)) != 1:
        yield f"{n.data} mixes {', '.join(kinds)}"
    elif prim.takes == "bits" and "f32" in kinds:
        yield f"{n.data} of f32"
    if n.dtype != prim.result(n.args):
        yield f"{n.data} of {', '.join(kinds)} gives {n.dtype}"
