"""Ids that only the device knows: clamped where they are used, told at the next read.

Ids from the host are looked at before a launch. Where an index depends on ids that
kernels made, a reduction over these ids alone gives the least and the greatest index,
two numbers that stay on the device until the user reads something. Nothing waits, and
the kernels that use the ids stay as they are.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from .engine import lock, placeholder, plan_for
from .errors import IndexRangeError
from .ir import expr as E
from .ir.bounds import HostCheck
from .ir.indexmap import interval
from .ir.stage import Stage, reduce_stage, topo_stages, whole

#: Flags that wait for a read; more are looked at without one.
_MOST = 64
_NONE = 2**31 - 1


@dataclass(frozen=True)
class Flag:
    """Least and negated greatest index of a check, i32 [2] on the device."""

    buffer: Any
    check: HostCheck


_pending: list[Flag] = []
_guard = threading.Lock()
_state = threading.local()


@contextmanager
def trusted() -> Iterator[None]:
    """Ids made on the device are not looked at: the caller knows or sees to it."""
    before = is_trusted()
    _state.trusted = True
    try:
        yield
    finally:
        _state.trusted = before


def is_trusted() -> bool:
    """Whether this runs inside of :func:`trusted`."""
    return getattr(_state, "trusted", False)


def settled(checks: Iterable[HostCheck]) -> list[HostCheck]:
    """Checks over inputs and reductions alone, without those that intervals prove."""
    from .codegen.member import Inliner

    found: dict[tuple[Any, ...], HostCheck] = {}
    inliner = Inliner(set())
    for c in checks:
        index = inliner.body(c.index, c.space)
        low, high = interval(index, c.space)
        if low >= 0 and high < c.extent:
            continue
        guards = tuple(inliner.body(g, c.space) for g in c.guards)
        new = dataclasses.replace(c, index=index, guards=guards)
        found.setdefault((index, guards, c.extent, c.array, c.flagged), new)
    return list(found.values())


def made_inside(checks: Iterable[HostCheck]) -> list[HostCheck]:
    """Checks of ids that the graph itself computes."""
    return [
        c
        for c in checks
        if c.flagged
        and any(n.data.kind != "input" for n in E.loads(c.index, *c.guards))
    ]


@lru_cache(maxsize=4096)
def flag_stage(c: HostCheck) -> Stage:
    """Least and negated greatest index wherever the guards hold."""
    free = c.index.free
    for g in c.guards:
        free |= g.free
    axes = [a for a in E.bits(free) if c.space[a] != 1]
    place = {a: E.const(0) for a in E.bits(free)}
    place |= {a: E.index(1 + k) for k, a in enumerate(axes)}
    index = E.cast(E.substitute(c.index, place), "i32")
    first = E.apply("eq", E.index(0), E.const(0))
    body = E.where(first, index, E.apply("neg", index))
    holds = E.all_of(E.substitute(g, place) for g in c.guards)
    if holds is not None:
        body = E.where(holds, body, E.const(_NONE))
    extents = [c.space[a] for a in axes]
    return reduce_stage([2], extents, "min", body, "ids", None)


def flag(
    checks: Sequence[HostCheck],
    inputs: Sequence[Stage],
    arrays: Sequence[Any],
    scalars: dict[str, Any] | None = None,
) -> None:
    """Look at ids of inputs on the device, at the next read."""
    checks = [c for c in checks if c.flagged]
    if not checks or is_trusted():
        return
    with lock:
        stages = [flag_stage(c) for c in checks]
        used = set(topo_stages(stages))
        pairs = [(s, a) for s, a in zip(inputs, arrays, strict=True) if s in used]
        plan = plan_for(stages, [s for s, _ in pairs])
    note(checks, plan([a.buffer() for _, a in pairs], scalars or {}))


def note(checks: Sequence[HostCheck], buffers: Sequence[Any]) -> None:
    """Remember what :func:`flag_stage` gave."""
    if not checks or is_trusted():
        return
    with _guard:
        _pending.extend(map(Flag, buffers, checks))
        many = len(_pending) > _MOST
    if many:
        look()


def look() -> None:
    """Tell of ids that were out of range, once.

    Raises:
        IndexRangeError: naming the op and its line, the array, its axis and the ids.
    """
    if not _pending:
        return
    with _guard:
        flags = list(_pending)
        _pending.clear()
    for k, f in enumerate(flags):
        device = f.buffer.device
        if not device.alive:
            continue
        low, negated = np.asarray(device.download(f.buffer, (2,), "i32")).tolist()
        high, c = -negated, f.check
        if low == _NONE or (low >= 0 and high < c.extent):
            continue
        with _guard:
            _pending[:0] = flags[k + 1 :]
        raise IndexRangeError(
            f"ids made on the device ran from {low} to {high}, but axis {c.axis} of "
            f"{c.array!r} has size {c.extent}; they were clamped",
            where=c.where,
            cure="keep ids in range (sd.clip), or guard the read with sd.where",
        )


def check_index(array: Any, extent: int, name: str, axis: int, op: str) -> None:
    """Have an integer array looked at that will be an index of ``name``.

    Raises:
        IndexRangeError: at once where the host knows the values, else at the next read.
    """
    from .tracing import check_ids, note_checks

    shape = array.shape
    s = array.stage() if array.symbolic else placeholder("ids", shape, array.dtype.name)
    index = whole(s)
    where = f"{op} ({E.user_location()})"
    checks = [HostCheck(index, extent, (), shape, name, where, axis)]
    if 0 in shape:
        return
    if array.symbolic:
        note_checks(checks)
    else:
        check_ids(settled(checks), [s], [array])
