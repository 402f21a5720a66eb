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

    Wherever all ``guards`` hold, ``0 <= index < extent`` must hold. Ids that the device
    makes are looked at if ``flagged``.
    """

    index: Expr
    extent: int
    guards: tuple[Expr, ...]
    space: tuple[int, ...]
    array: str
    where: str
    axis: int = 0
    flagged: bool = True


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
    for node, guards, space in _reads(root, tuple(extents)):
        for k, (i, n) in enumerate(zip(node.args, node.data.shape, strict=True)):
            low, high = interval(i, space)
            if (low >= 0 and high < n) or 0 in (n, *space):
                continue
            if any(m.kind == "load" for m in E.topo(i)):
                checks.append(_host_check(node, k, n, guards, space, op))
            elif not _implied(i, n, guards, space):
                raise IndexRangeError(
                    f"an index of {node.data.name!r} runs from {low} to {high}, "
                    f"outside of its axis of size {n}",
                    where=f"{op} ({node.loc or E.user_location()})",
                    cure="guard it: sd.where(condition, x.at(…), 0.0), or sd.clip "
                    "the index",
                )
    return checks


Space = tuple[int, ...]
Guards = tuple[Expr, ...]
# Paths of nested conditions to one load that are looked at one by one.
_MOST_PATHS = 20_000


def _reads(root: Expr, space: Space) -> list[tuple[Expr, Guards, Space]]:
    """Loads that may leave an axis, each with the conditions under which it is read.

    A load that several nested conditions share is given once for each path to it; where
    there are too many paths, once with the conditions that all of them have in common.
    """
    risky = _Risk()
    out: list[tuple[Expr, Guards, Space]] = []
    seen: set[tuple[Expr, Guards, Space]] = set()
    stack: list[tuple[Expr, Guards, Space]] = [(root, (), space)]
    while stack:
        item = node, guards, here = stack.pop()
        if item in seen or not risky(node, here):
            continue
        seen.add(item)
        if len(seen) > _MOST_PATHS:
            return _common(root, space, risky)
        if node.kind == "load" and risky.leaves(node, here):
            out.append(item)
        stack += _below(node, guards, here)
    return out


def _common(root: Expr, space: Space, risky: _Risk) -> list[tuple[Expr, Guards, Space]]:
    """:func:`_reads` in one pass over the nodes, readers first."""
    out: list[tuple[Expr, Guards, Space]] = []
    bodies: list[tuple[Expr, Guards, Space]] = [(root, (), space)]
    while bodies:
        top, outer, here = bodies.pop()
        held: dict[Expr, Guards] = {top: outer}
        for node in reversed(E.topo(top)):
            if node not in held or not risky(node, here):
                continue
            guards = held[node]
            if node.kind == "load" and risky.leaves(node, here):
                out.append((node, guards, here))
            for x, more, inner in _below(node, guards, here):
                if node.kind == "load" and x is node.data.body:
                    bodies.append((x, more, inner))
                else:
                    known = held.get(x, more)
                    held[x] = tuple(g for g in known if g in more)
    return out


def _below(
    node: Expr, guards: Guards, space: Space
) -> list[tuple[Expr, Guards, Space]]:
    """The operands of a node, and the body of the reduction that it loads, each with
    its conditions.
    """
    if node.kind == "apply" and node.data == "where":
        c, a, b = node.args
        return [
            (c, guards, space),
            (a, _with(guards, _conjuncts(c)), space),
            (b, _with(guards, _negated(c)), space),
        ]
    out = [(x, guards, space) for x in node.args]
    if (
        node.kind == "load"
        and node.data.kind == "reduce"
        and node.data.body is not None
    ):
        out.append((node.data.body, _carry(node, guards), node.data.space))
    return out


class _Risk:
    """Whether anything below a node may leave its axis, by intervals alone."""

    def __init__(self) -> None:
        self._known: dict[tuple[Expr, Space], bool] = {}
        self._ranges: dict[Space, dict[Expr, tuple[int, int]]] = {}

    def leaves(self, load: Expr, space: Space) -> bool:
        """Whether an index of this load may leave its axis."""
        ranges = self._ranges.setdefault(space, {})
        for i, n in zip(load.args, load.data.shape, strict=True):
            low, high = interval(i, space, ranges)
            if not (low >= 0 and high < n):
                return True
        return False

    def __call__(self, root: Expr, space: Space) -> bool:
        known = self._known
        if (root, space) not in known:
            for n in E.topo(root, into=lambda n: (n, space) not in known):
                if (n, space) in known:
                    continue
                found = any(known[x, space] for x in n.args)
                if n.kind == "load" and not found:
                    found = self.leaves(n, space)
                    if n.data.kind == "reduce" and n.data.body is not None:
                        found = found or self(n.data.body, n.data.space)
                known[n, space] = found
        return known[root, space]


def _host_check(
    node: Expr,
    k: int,
    n: int,
    guards: tuple[Expr, ...],
    space: tuple[int, ...],
    op: str,
) -> HostCheck:
    where = f"{op} ({node.loc or E.user_location()})"
    return HostCheck(node.args[k], n, guards, space, node.data.name, where, k)


def _with(guards: tuple[Expr, ...], more: Sequence[Expr]) -> tuple[Expr, ...]:
    return guards + tuple(g for g in more if g not in guards)


_OPPOSITE: dict[str, Any] = {
    "lt": lambda a, b: E.apply("le", b, a),
    "le": lambda a, b: E.apply("lt", b, a),
    "eq": lambda a, b: E.apply("ne", a, b),
    "ne": lambda a, b: E.apply("eq", a, b),
}


def _conjuncts(c: Expr, holds: bool = True) -> list[Expr]:
    """Facts that follow when a condition holds (or fails); each node is seen once."""
    out: list[Expr] = []
    seen: set[tuple[Expr, bool]] = set()
    stack = [(c, holds)]
    while stack:
        n, truth = stack.pop()
        if (n, truth) in seen:
            continue
        seen.add((n, truth))
        name = n.data if n.kind == "apply" and n.dtype == "bool" else None
        if name == "not":
            stack.append((n.args[0], not truth))
        elif name == ("and" if truth else "or"):
            stack += [(x, truth) for x in n.args]
        elif truth:
            out.append(n)
        elif name in _OPPOSITE:
            out.append(_OPPOSITE[name](*n.args))
    return out


def _negated(c: Expr) -> list[Expr]:
    """Facts that follow when a condition fails."""
    return _conjuncts(c, holds=False)


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
