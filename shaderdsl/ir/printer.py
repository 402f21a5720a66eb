"""Expressions and graphs as text, for errors, tests and people."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from .expr import Expr, topo

if TYPE_CHECKING:
    from .stage import Stage

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "mulz": "*", "div": "/", "floordiv": "//", "mod": "%", "lt": "<", "le": "<=",
    "eq": "==", "ne": "!=", "and": "&", "or": "|", "xor": "^", "shl": "<<", "shr": ">>",
}  # fmt: skip


def axis_name(a: int) -> str:
    """A letter for a positional axis: i, j, k, …"""
    return "ijklmnopqrstuvwxyz"[a] if a < 18 else f"a{a}"


def show(root: Expr, limit: int = 2000) -> str:
    """An expression in infix form. Shared parts are written out; a very large one is cut off."""
    text: dict[Expr, str] = {}
    for n in topo(root):
        a = [text[x] for x in n.args]
        if n.kind == "index":
            t = axis_name(n.data)
        elif n.kind in ("const", "size"):
            t = str(n.data)
        elif n.kind == "scalar":
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


def show_graph(outs: Iterable[Stage]) -> str:
    """A graph, one stage a line, producers first."""
    from .stage import topo_stages

    lines = []
    for s in topo_stages(outs):
        head = f"{s.name}#{s.id}: {s.dtype}{list(s.shape)}"
        if s.kind == "input":
            lines.append(f"{head} = input")
            continue
        assert s.body is not None
        axes = ", ".join(f"{axis_name(a)}<{n}" for a, n in enumerate(s.space))
        red = f"{s.monoid}[{', '.join(axis_name(len(s.ext) + k) for k in range(len(s.rext)))}] " if s.monoid else ""
        lines.append(f"{head} = [{axes}] {red}{show(s.body)}" + (f"   # {s.loc}" if s.loc else ""))
    return "\n".join(lines)
