"""Kernels by structure: a group like one printed before takes its text over and only
binds other arrays.

The layers of a model give the same groups again and again, and so does the next
process; printing is most of the host's work. The key is everything that the text
depends on, with arrays by number in the order in which the bodies meet them.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from ..ir import expr as E
from ..ir.stage import Stage
from . import texts
from .group import Group
from .program import Binding, Kernel, Param, Scratch, Tensor
from .schedule import members_of
from .target import Target
from .tuning import decided, noted, tuning_key

Schedule = Callable[[Group, Target], list[Kernel]]


_memory: OrderedDict[Any, list[dict[str, Any]]] = OrderedDict()
_tuning_keys: OrderedDict[Any, str] = OrderedDict()
_KEPT = 4096


def kernels_of(g: Group, target: Target, schedule: Schedule) -> list[Kernel]:
    """The kernels of a group: printed, or taken over from an equal one."""
    key, tensors = signature(g)
    target = decided(target, lambda: _tuning_key(g, target, key))
    key = (key, target)
    found = _memory.get(key)
    store = texts.store
    if found is None and store is not None:
        found = _read(store.get(_text_key(key)))
    if found is None:
        kernels = noted(schedule(g, target), target)
        found = _abstract(kernels, tensors, g)
        if found is not None:
            if store is not None:
                store.put(_text_key(key), json.dumps(found))
            _remember(key, found)
        return kernels
    _remember(key, found)
    return _concrete(found, list(tensors), g)


def _tuning_key(g: Group, target: Target, key: Any) -> str:
    """See `tuning_key`; asked once for groups that are alike."""
    found = _tuning_keys.get((key, target))
    if found is None:
        found = _tuning_keys[key, target] = tuning_key(g, target)
        while len(_tuning_keys) > _KEPT:
            _tuning_keys.popitem(last=False)
    return found


def _remember(key: Any, found: list[dict[str, Any]]) -> None:
    _memory[key] = found
    _memory.move_to_end(key)
    while len(_memory) > _KEPT:
        _memory.popitem(last=False)


@cache
def version() -> str:
    """A digest of the code that prints, so that another version never takes over its
    texts.
    """
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for path in sorted([*here.rglob("*.py"), *(here.parent / "ir").rglob("*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _text_key(key: Any) -> str:
    return f"{version()} {key!r}"


# ------------------------------------------------------------------ what a text depends
# on


def signature(g: Group) -> tuple[Any, dict[Tensor, int]]:
    """Everything that the kernels of a group depend on, and its arrays by number."""
    tensors: dict[Tensor, int] = {}
    parts: list[Any] = []

    def number(s: Stage) -> int:
        if s not in tensors:
            tensors[s] = len(tensors)
            parts.append(("array", s.kind, s.shape, s.ext, s.groups, s.dtype, s.name))
        return tensors[s]

    ids: dict[E.Expr, int] = {}
    for m in g.members:
        roots = [m.body]
        place = g.targets.get(m.stage)
        if place is not None:
            roots += place[1]
        for n in E.topo(*roots):
            if n in ids:
                continue
            data: Any = number(n.data) if n.kind == "load" else n.data
            if isinstance(data, float):
                data = data.hex()
            ids[n] = len(ids)
            parts.append(
                (n.kind, data, n.dtype, n.label, tuple(ids[x] for x in n.args))
            )
        parts.append(
            (
                "member",
                number(m.stage),
                m.role,
                m.stage.kind,
                m.stage.monoid,
                m.stage.loc,
                m.space,
                m.out,
                m.red,
                tuple(g.axes[m]),
                m in g.stored,
                ids[m.body],
                None
                if place is None
                else (number(place[0]), tuple(ids[x] for x in place[1])),
            )
        )
    # Equal bodies may come from different stages that were inlined: what is computed is
    # numbered by these.
    computed = members_of(g)
    at = {s: i for i, s in enumerate(computed)}
    inlined = tuple(tuple(at.get(n.data, -1) for n in s.loads) for s in computed)
    own = tuple(at.get(m.stage, -1) for m in g.members)
    return (g.kind, g.rows, g.lanes, tuple(g.why), tuple(parts), inlined, own), tensors


# ------------------------------------------------------------------ kernels without
# their arrays


def _abstract(
    kernels: list[Kernel], tensors: dict[Tensor, int], g: Group
) -> list[dict[str, Any]] | None:
    """Kernels as plain data, arrays by number, or None when one binds something
    unknown.
    """
    scratch: dict[Scratch, int] = {}
    computed = {s: i for i, s in enumerate(members_of(g))}
    if any(s not in computed for k in kernels for s in (*k.members, *k.writes)):
        return None
    out = []
    for k in kernels:
        bindings: list[Any] = []
        for b in k.bindings:
            if isinstance(b.tensor, Scratch):
                number = scratch.setdefault(b.tensor, len(scratch))
                bindings.append(
                    [
                        b.access,
                        "scratch",
                        number,
                        b.tensor.name,
                        b.tensor.dtype,
                        b.tensor.size,
                    ]
                )
            elif b.tensor in tensors:
                bindings.append([b.access, "array", tensors[b.tensor]])
            else:
                return None
        out.append(
            {
                "name": k.name,
                "archetype": k.archetype,
                "wgsl": k.wgsl,
                "size": k.workgroup_size,
                "grid": k.workgroups,
                "bindings": bindings,
                "params": [
                    [list(p.value) if isinstance(p.value, tuple) else p.value, p.dtype]
                    for p in k.params
                ],
                "members": [computed[s] for s in k.members],
                "writes": [computed[s] for s in k.writes],
                "flops": k.flops,
                "bytes": k.bytes,
                "reason": k.reason,
                "in_range": k.in_range,
            }
        )
    return out


def _concrete(
    found: list[dict[str, Any]], tensors: list[Tensor], g: Group
) -> list[Kernel]:
    """The kernels of a group from plain data."""
    scratch: dict[int, Scratch] = {}
    computed = members_of(g)
    out = []
    for k in found:
        bindings = []
        for access, kind, number, *rest in k["bindings"]:
            if kind == "scratch":
                tensor: Tensor = scratch.setdefault(number, Scratch(*rest))
            else:
                tensor = tensors[number]
            bindings.append(Binding(tensor, access))
        params = tuple(
            Param(tuple(v) if isinstance(v, list) else v, d) for v, d in k["params"]
        )
        kernel = Kernel(
            name=k["name"],
            archetype=k["archetype"],
            wgsl=k["wgsl"],
            workgroup_size=(k["size"][0], k["size"][1], k["size"][2]),
            workgroups=(k["grid"][0], k["grid"][1], k["grid"][2]),
            bindings=tuple(bindings),
            params=params,
            members=tuple(computed[i] for i in k["members"]),
            writes=tuple(computed[i] for i in k["writes"]),
            flops=k["flops"],
            bytes=k["bytes"],
            reason=k["reason"],
            in_range=k["in_range"],
        )
        out.append(kernel)
    return out


def _read(text: str | None) -> list[dict[str, Any]] | None:
    """Kept texts, or None when they are damaged."""
    if text is None:
        return None
    try:
        found = json.loads(text)
        fields = {"name", "wgsl", "size", "grid", "bindings", "params"}
        return found if all(fields <= set(k) for k in found) else None
    except (ValueError, TypeError):
        return None
