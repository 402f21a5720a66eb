"""From graphs to running plans: placeholders, the cache of plans, and the lock that
tracing holds.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from .codegen.program import Program
from .codegen.target import Target
from .ir import verify
from .ir.expr import user_location
from .ir.stage import Stage, input_stage, topo_stages
from .runtime import current as current_device
from .runtime import tuned

# Interning is not atomic, so one thread traces, derives and plans at a time; running is
# free.
lock = threading.RLock()
_placeholders: dict[tuple[Any, ...], Stage] = {}
_plans: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
_PLANS = 2048


def placeholder(role: Any, shape: Sequence[int], dtype: str, name: str = "x") -> Stage:
    """The input stage for a role. The same role gives the same stage, so that equal
    traces are equal graphs.
    """
    key = (role, tuple(shape), dtype, name)
    with lock:
        stage = _placeholders.get(key)
        if stage is None:
            stage = _placeholders[key] = input_stage(shape, dtype, name)
        return stage


def captured_inputs(outs: Sequence[Stage], inputs: Sequence[Stage]) -> list[Stage]:
    """Inputs of the graph that are no arguments: arrays from outside the function."""
    known = set(inputs)
    return [s for s in topo_stages(outs) if s.kind == "input" and s not in known]


#: Called with a graph before it is planned, to tune its kernels: set by `tuner`.
before_planning: (
    Callable[[Sequence[Stage], Sequence[Stage], frozenset[int], Target], None] | None
) = None


def watched() -> bool:
    """Whether ``SHADERDSL_DEBUG=nan`` asks for a look at every call's results."""
    return "nan" in os.environ.get("SHADERDSL_DEBUG", "")


def _tuner() -> Any:
    if before_planning is None and tuned.asked() == "1":
        from .tuner import default_search

        return default_search().tune
    return before_planning


class Plan:
    """A lowered program with its executable and the arrays that it captured."""

    def __init__(
        self,
        outs: Sequence[Stage],
        inputs: Sequence[Stage],
        donated: frozenset[int] = frozenset(),
        scores: int | None = None,
    ):
        self.device = current_device()
        self.target = target = self.device.target
        if scores is not None:
            target = replace(target, scores=scores)
        captured = captured_inputs(outs, inputs)
        self.captured = [s.source for s in captured]
        if any(c is None for c in self.captured):
            from .errors import TraceError

            raise TraceError(
                "a symbolic array of another trace is used here",
                where=user_location(),
                cure="pass it as an argument; do not keep symbolic arrays outside of "
                "the function that made them",
            )
        self.outs = tuple(outs)
        verify.check(outs, "before the partition")
        # The compiler is loaded when it is first needed: importing stays quick.
        from .codegen.lower import lower as lower_graph

        tune = _tuner()
        if tune is not None:
            tune(outs, (*inputs, *captured), donated, target)
            target = replace(target, tuned=self.device.target.tuned)
        self.program: Program = lower_graph(
            outs,
            target,
            inputs=(*inputs, *captured),
            donated=donated,
            ready=self.device.expect,
        )
        verify.check(
            [s for k in self.program.kernels for s in k.members], "after the partition"
        )
        self.executable = self.device.build(self.program, wait=False)

    def serves(self, device: Any) -> bool:
        """Whether it was made for this device as it is; what a search found meanwhile
        is for plans to come.
        """
        if self.device is not device:
            return False
        return self.target is device.target or bool(self.target == device.target)

    def __call__(self, buffers: Sequence[Any], scalars: dict[str, Any]) -> list[Any]:
        found = self.launch(buffers, scalars)
        return found if isinstance(found, list) else found.buffers()

    def launch(self, buffers: Sequence[Any], scalars: dict[str, Any]) -> Any:
        """Results as a list of buffers, or as memory that may have none yet."""
        given = [*buffers, *(a.buffer() for a in self.captured)]
        if not watched():
            return self.executable.launch(given, scalars)
        result: list[Any] = self.executable(given, scalars)
        from . import finite

        if finite.enabled():
            inputs = dict(zip(self.program.inputs, given, strict=True))
            finite.check(self, inputs, scalars, result)
        return result


def plan_for(
    outs: Sequence[Stage],
    inputs: Sequence[Stage],
    donated: frozenset[int] = frozenset(),
    scores: int | None = None,
) -> Plan:
    """The plan of a graph on the current device, made once.

    Args:
        scores: in place of the device's own (see `Target.scores`).
    """
    if watched():
        donated = frozenset()  # a call that is looked at must leave its inputs
    device = current_device()
    key = (id(device), tuple(outs), tuple(inputs), donated, scores)
    with lock:
        plan: Plan | None = _plans.get(key)
        if plan is not None and plan.serves(device):
            _plans.move_to_end(key)
            return plan
        plan = _plans[key] = Plan(outs, inputs, donated, scores)
        while len(_plans) > _PLANS:
            _plans.popitem(last=False)
        return plan


def run_graph(
    outs: Sequence[Stage],
    inputs: Sequence[Stage],
    buffers: Sequence[Any],
    scalars: dict[str, Any],
) -> list[Any]:
    """Run a graph on buffers."""
    return plan_for(outs, inputs)(buffers, scalars)
