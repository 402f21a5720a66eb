"""Whether an index can leave its axis: by intervals, by the guards around it, or by
looking at the ids before a launch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import IndexRangeError
from . import expr as E
from .expr import Expr
from .indexmap import affine, interval


@dataclass(frozen=True)
class HostCheck:
    """An index that depends on ids: to be looked at before a launch when the ids come
    from the host.

    Wherever all ``guards`` hold, ``0 <= index < extent`` must hold.
    """

    index: Expr
    extent: int
    guards: tuple[Expr, ...]
    space: tuple[int, ...]
    array: str
    where: str


def check_ranges(
    root: Expr, extents: Sequence[int], names: Mapping[int, str], op: str
) -> list[HostCheck]:
    """Refuse an index that can leave its axis; give the checks that need the ids
    themselves.

    Raises:
        IndexRangeError: at the user's line, for an index map that no guard keeps in
            range.
    """
    checks: list[HostCheck] = []
    seen: set[tuple[Expr, tuple[Expr, ...]]] = set()
    stack: list[tuple[Expr, tuple[Expr, ...], tuple[int, ...]]] = [
        (root, (), tuple(extents))
    ]
    memo: dict[tuple[int, ...], dict[Expr, tuple[int, int]]] = {}
    while stack:
        node, guards, space = stack.pop()
        if (node, guards) in seen or (not node.args and node.kind != "load"):
            continue
        seen.add((node, guards))
        if node.kind == "apply" and node.data == "where":
            c, a, b = node.args
            stack += [
                (c, guards, space),
                (a, _with(guards, _conjuncts(c)), space),
                (b, _with(guards, _negated(c)), space),
            ]
            continue
        if node.kind == "load":
            ranges = memo.setdefault(space, {})
            for i, n in zip(node.args, node.data.shape, strict=True):
                low, high = interval(i, space, ranges)
                if (low >= 0 and high < n) or 0 in (n, *space):
                    continue
                if any(m.kind == "load" for m in E.topo(i)):
                    checks.append(_host_check(node, i, n, guards, space, op))
                elif not _implied(i, n, guards, space):
                    raise IndexRangeError(
                        f"an index of {node.data.name!r} runs from {low} to {high}, "
                        f"outside of its axis of size {n}",
                        where=f"{op} ({node.loc or E.user_location()})",
                        cure="guard it: sd.where(condition, x.at(…), 0.0), or sd.clip "
                        "the index",
                    )
            if node.data.kind == "reduce" and node.data.body is not None:
                inner = _carry(node, guards)
                stack.append((node.data.body, inner, node.data.space))
        stack += [(a, guards, space) for a in node.args]
    return checks


def _host_check(
    node: Expr,
    i: Expr,
    n: int,
    guards: tuple[Expr, ...],
    space: tuple[int, ...],
    op: str,
) -> HostCheck:
    return HostCheck(
        i, n, guards, space, node.data.name, f"{op} ({node.loc or E.user_location()})"
    )


def _with(guards: tuple[Expr, ...], more: Sequence[Expr]) -> tuple[Expr, ...]:
    return guards + tuple(g for g in more if g not in guards)


def _conjuncts(c: Expr) -> list[Expr]:
    out: list[Expr] = []
    stack = [c]
    while stack:
        n = stack.pop()
        if n.kind == "apply" and n.data == "and":
            stack += n.args
        elif n.kind == "apply" and n.data == "not" and n.args[0].dtype == "bool":
            out += _negated(n.args[0])
        else:
            out.append(n)
    return out


def _negated(c: Expr) -> list[Expr]:
    """Facts that follow when a condition fails."""
    if c.kind != "apply":
        return []
    if c.data == "or":
        return _negated(c.args[0]) + _negated(c.args[1])
    if c.data == "not":
        return _conjuncts(c.args[0])
    opposite: dict[str, Any] = {
        "lt": lambda a, b: E.apply("le", b, a),
        "le": lambda a, b: E.apply("lt", b, a),
        "eq": lambda a, b: E.apply("ne", a, b),
        "ne": lambda a, b: E.apply("eq", a, b),
    }
    return [opposite[c.data](*c.args)] if c.data in opposite else []


def _carry(node: Expr, guards: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """Guards around a load of a reduction, in the axes of its body, where the load's
    indices are plain axes.
    """
    back = {i.data: E.index(k) for k, i in enumerate(node.args) if i.kind == "index"}
    return tuple(
        E.substitute(g, back) for g in guards if all(a in back for a in E.bits(g.free))
    )


def _facts(g: Expr) -> list[Expr]:
    """Expressions that a guard makes ≤ 0."""
    if (
        g.kind != "apply"
        or g.data not in ("lt", "le", "eq")
        or g.args[0].dtype != "i32"
    ):
        return []
    d = g.args[0] - g.args[1]
    return [d + 1] if g.data == "lt" else [d] if g.data == "le" else [d, -d]


def _implied(i: Expr, n: int, guards: tuple[Expr, ...], space: tuple[int, ...]) -> bool:
    facts = [f for g in guards for f in _facts(g)]
    for wanted in (-i, i - (n - 1)):  # both ≤ 0
        if interval(wanted, space)[1] <= 0:
            continue
        if not any(interval(affine(wanted - f).expr(), space)[1] <= 0 for f in facts):
            return False
    return True
