"""Expressions and graphs as text, for errors, tests and people."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from .expr import Expr, topo

if TYPE_CHECKING:
    from .stage import Stage

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "mulz": "*", "div": "/", "floordiv": "//",
    "mod": "%", "lt": "<", "le": "<=", "eq": "==", "ne": "!=", "and": "&", "or": "|",
    "xor": "^", "shl": "<<", "shr": ">>",
}  # fmt: skip


def axis_name(a: int) -> str:
    """A letter for a positional axis: i, j, k, …"""
    return "ijklmnopqrstuvwxyz"[a] if a < 18 else f"a{a}"


def show(root: Expr, limit: int = 2000) -> str:
    """An expression in infix form: shared parts written out, a large one cut off."""
    text: dict[Expr, str] = {}
    for n in topo(root):
        a = [text[x] for x in n.args]
        if n.kind == "index":
            t = axis_name(n.data)
        elif n.kind in ("const", "size", "scalar"):
            t = str(n.data)
        elif n.kind == "load":
            t = f"{n.data.name}#{n.data.id}[{', '.join(a)}]"
        elif n.data in _INFIX:
            t = f"({a[0]} {_INFIX[n.data]} {a[1]})"
        elif n.data == "neg":
            t = f"-{a[0]}"
        else:
            t = f"{n.data}({', '.join(a)})"
        text[n] = t if len(t) <= limit else t[:limit] + "…"
    return text[root]


def show_stage(s: Stage) -> str:
    """One stage on one line."""
    head = f"{s.name}#{s.id}: {s.dtype}{list(s.shape)}"
    if s.body is None:
        return f"{head} = input"
    axes = ", ".join(f"{axis_name(a)}<{n}" for a, n in enumerate(s.space))
    red = ""
    if s.monoid:
        over = ", ".join(axis_name(len(s.ext) + k) for k in range(len(s.rext)))
        red = f"{s.monoid}[{over}] "
    where = f"   # {s.loc}" if s.loc else ""
    return f"{head} = [{axes}] {red}{show(s.body)}{where}"


def show_graph(outs: Iterable[Stage]) -> str:
    """A graph, one stage a line, producers first."""
    from .stage import topo_stages

    return "\n".join(show_stage(s) for s in topo_stages(outs))
