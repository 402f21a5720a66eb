"""Kernels by what decides their speed, and what there is to choose for them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..ir import expr as E
from ..ir.stage import Stage
from .choice import Choice, Fixed, Survey
from .group import Group
from .program import Kernel, Program, Scratch
from .schedule import members_of
from .target import Target

Schedule = Callable[[Group, Target], list[Kernel]]

#: Extents up to here are told apart.
_EXACT = 16


def tuning_key(g: Group, target: Target) -> str:
    """A name for all kernels that one measurement speaks for.

    It is the structure of the bodies with the extents' classes (powers of two, and
    whether vec4s fit) and the limits that the schedule keeps to. Names, lines of source
    and the values of constants change no kernel's speed.
    """
    tensors: dict[Any, int] = {}
    ids: dict[E.Expr, int] = {}
    parts: list[Any] = [
        target.family,
        target.limits,
        target.features,
        g.kind,
        tuple(map(_class, g.rows)),
        tuple(map(_class, g.lanes)),
    ]

    def number(s: Stage) -> int:
        if s not in tensors:
            tensors[s] = len(tensors)
            parts.append((s.dtype, tuple(map(_class, s.shape))))
        return tensors[s]

    for m in g.members:
        for n in E.topo(m.body):
            if n in ids:
                continue
            data: Any = n.data
            if n.kind == "load":
                data = number(n.data)
            elif n.kind in ("const", "scalar"):
                data = None
            elif n.kind == "size":
                data = _class(n.data) if isinstance(n.data, int) else None
            ids[n] = len(ids)
            parts.append((n.kind, data, n.dtype, tuple(ids[x] for x in n.args)))
        parts.append(
            (
                m.role,
                m.stage.kind,
                m.stage.monoid,
                tuple(map(_class, m.space)),
                m.out,
                m.red,
                tuple(g.axes[m]),
                m in g.stored,
                number(m.stage),
                ids[m.body],
            )
        )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _class(n: int) -> tuple[int, bool]:
    """Sizes that one choice suits."""
    return (n, True) if n <= _EXACT else ((n - 1).bit_length(), n % 4 == 0)


def decided(target: Target, key: Callable[[], str]) -> Target:
    """The target with the choice that was measured for a group, if there is one.

    Args:
        key: gives the group's `tuning_key`; called if there are choices.
    """
    if target.choice is not None or not target.tuned:
        return target
    choice = target.tuned.get(key())
    return target if choice is None else replace(target, choice=Fixed(choice))


def noted(kernels: list[Kernel], target: Target) -> list[Kernel]:
    """The kernels with a word about the choice they were printed with."""
    if not isinstance(target.choice, Fixed) or not kernels:
        return kernels
    choice = target.choice
    word = "tuned" if choice.used else "does not fit here"
    first = kernels[0]
    reason = "; ".join(x for x in (first.reason, f"{word}: {choice.choice}") if x)
    return [replace(first, reason=reason), *kernels[1:]]


@dataclass
class Trial:
    """A kernel (with its second stages) apart from its program, to try choices on.

    Attributes:
        key: see `tuning_key`.
        choices: the default first.
        members: what is computed, in order: the plain expressions.
        inputs: what is read and not computed.
        outputs: what is stored.
        hidden: outputs that are not written where masks make them 0 (`online_scores`).
    """

    key: str
    group: Group
    target: Target
    schedule: Schedule
    choices: list[Choice]
    members: tuple[Stage, ...]
    inputs: tuple[Stage, ...]
    outputs: tuple[Stage, ...]
    name: str
    nbytes: int
    hidden: frozenset[Stage] = frozenset()

    def program(self, choice: Choice) -> Program:
        """The kernels of a choice.

        Raises:
            ValueError: the schedule does not take it.
        """
        decider = Fixed(choice)
        kernels = self.schedule(self.group, replace(self.target, choice=decider))
        if not decider.used:
            raise ValueError("the schedule does not take it")
        scalars = {
            n.data: n.dtype
            for s in self.members
            if s.body is not None
            for n in E.topo(s.body)
            if n.kind == "scalar"
        }
        return Program(
            tuple(kernels),
            self.inputs,
            self.outputs,
            frozenset(),
            tuple(scalars.items()),
            (),
        )


def trial(g: Group, target: Target, schedule: Schedule) -> Trial | None:
    """A group's trial; None where nothing can be chosen, or where it writes parts of
    another array, which stand for nothing by themselves.
    """
    if g.targets:
        if g.stands_for is not None:
            return None
        # What it overwrites here is no part of what it computes.
        g = replace(g, targets={})
    survey = Survey()
    kernels = schedule(g, replace(target, choice=survey))
    if len(survey.choices) < 2:
        return None
    written = {s for k in kernels for s in k.writes}
    for k in kernels:
        for b in k.bindings:
            if b.access == "read_write" and not isinstance(b.tensor, Scratch):
                written.add(b.tensor)
    bound = dict.fromkeys(
        b.tensor
        for k in kernels
        for b in k.bindings
        if not isinstance(b.tensor, Scratch)
    )
    return Trial(
        tuning_key(g, target),
        g,
        target,
        schedule,
        survey.choices,
        members_of(g),
        tuple(s for s in bound if s not in written),
        tuple(s for s in bound if s in written),
        kernels[0].name,
        sum(k.bytes for k in kernels),
        frozenset(
            m.stage for m in g.members if m.role == "online" and m.stage.kind == "map"
        ),
    )
