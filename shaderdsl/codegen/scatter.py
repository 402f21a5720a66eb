"""Scatter: the adjoint of a gather, ``Σ_t where(v == ids[t], value, 0)``, without
atomics and in a fixed order.

The first kernel links each contribution to the next one with the same destination (and
clears the result): a workgroup compares one contribution with all. In the second, the
first contribution of each destination walks its chain and writes the sum.
"""

from __future__ import annotations

import math

from ..errors import CompilerError
from ..ir import expr as E
from .address import contiguous
from .group import Group
from .kernel_text import indent
from .member import scatter_parts
from .program import Kernel, Scratch
from .schedule import (
    decode,
    finish,
    fold,
    kernel_name,
    lay_out,
    make_writer,
    vector_axis,
    visible,
)
from .spelling import WIDTH, wgsl_type
from .target import Target

#: Marks a contribution that is the first of its destination.
_FIRST = "0x80000000u"
#: Invocations of a workgroup.
_SIZE = 256
#: The same where contributions are compared and the result is cleared.
_LINK_SIZE = 512


def _size(target: Target, size: int) -> int:
    if target.family == "software":
        return 64
    limits = target.limits
    return min(size, limits.max_invocations, limits.max_workgroup_size_x)


def scatter_kernels(g: Group, target: Target) -> list[Kernel]:
    """Print a group of one scatter-add."""
    m = g.members[0]
    parts = scatter_parts(m.stage, m.body)
    if parts is None or len(g.members) != 1:
        raise CompilerError(f"{m.stage.name} is no scatter")
    count = math.prod(g.lanes)
    links = Scratch(f"{m.stage.name}_links", "u32", count)
    return [_link(g, target, links, count), _sum(g, target, links, count)]


def _link(g: Group, target: Target, links: Scratch, count: int) -> Kernel:
    """next[t], with the top bit set where t is the first; also zeros the result."""
    m = g.members[0]
    parts = scatter_parts(m.stage, m.body)
    assert parts is not None
    place = dict(zip(m.axes, g.axes[m], strict=True))
    ids = E.substitute(parts.ids, {a: E.index(q) for a, q in place.items()})
    lanes = list(range(len(g.rows), len(g.space)))
    # A second copy of the contribution's axes, for the one that it is compared with.
    other = {a: E.index(len(g.space) + i) for i, a in enumerate(lanes)}
    their = E.substitute(ids, other)
    layout = lay_out(g, {m: ids}, [[], lanes])
    w = make_writer(g, layout, target, None)
    w.space = [*g.space, *(g.space[a] for a in lanes)]
    zeros = m.stage.size // WIDTH if m.stage.size % WIDTH == 0 else m.stage.size
    vector = m.stage.size % WIDTH == 0
    if m.stage.dtype == "f16" and not target.features.f16:
        raise CompilerError("a scatter of f16 needs the adapter's shader-f16")
    size = _size(target, _LINK_SIZE)
    w.line("let mine = group.y * groups.x + group.x;")
    w.line(f"let at = mine * {size}u + lane;")
    clear = w.write(m.stage, "at", f"{wgsl_type(m.body.dtype, vector)}(0)", vector)
    w.line(f"if (at < {w.param(('zeros',), zeros, stem='zeros')}) {{ {clear} }}")
    n = w.param(("count",), count, stem="count")
    # The least position behind, and whether there is one before: neither depends on
    # who comes first.
    w.shared += [
        "var<workgroup> link: atomic<u32>;",
        "var<workgroup> before: atomic<u32>;",
    ]
    w.line(f"if (mine >= {n}) {{ return; }}")
    w.line(f"if (lane == 0u) {{ atomicStore(&link, {n}); atomicStore(&before, 0u); }}")
    w.line("workgroupBarrier();")
    w.open()
    w.base = 1
    decode(w, "mine", layout.loops[1], 1)
    me = w.value(ids)
    w.open()
    loop = [[int(other[a].data) for a in group] for group in layout.loops[1]]
    decode(w, "u", loop, 2)
    same = f"{w.value(their)} == {me}"
    test = w.close()
    w.line(f"for (var u = lane; u < {n}; u += {size}u) {{", 1)
    w.blocks[1] += [
        *indent(test),
        f"  if ({same}) {{",
        "    if (u > mine) { atomicMin(&link, u); }",
        "    if (u < mine) { atomicStore(&before, 1u); }",
        "  }",
        "}",
    ]
    w.line("workgroupBarrier();", 1)
    chain = w.binding(links, False, True)
    w.line("if (lane == 0u) {", 1)
    w.line("  let next = atomicLoad(&link);", 1)
    mark = f"select(next | {_FIRST}, next, atomicLoad(&before) == 1u)"
    w.line(f"  {chain}[mine] = {mark};", 1)
    w.line("}", 1)
    lines = [*w.blocks[0], *w.close()]
    groups = max(count, -(-zeros // size))
    kernel = finish(
        g,
        w,
        layout,
        lines,
        f"link_{m.stage.name}",
        "scatter",
        size,
        fold(groups, target),
    )
    return kernel


def _sum(g: Group, target: Target, links: Scratch, count: int) -> Kernel:
    """The first contribution of each destination adds up its chain."""
    m = g.members[0]
    parts = scatter_parts(m.stage, m.body)
    assert parts is not None
    place = dict(zip(m.axes, g.axes[m], strict=True))
    rename = {a: E.index(q) for a, q in place.items()}
    ids, value = E.substitute(parts.ids, rename), E.substitute(parts.value, rename)
    target_axis = place[parts.axis]
    rest = [q for q in range(len(g.rows)) if q != target_axis]
    lanes = list(range(len(g.rows), len(g.space)))
    layout = lay_out(g, {m: value}, [rest, lanes], more=[ids])
    vector = vector_axis(layout, layout.loops[0])
    w = make_writer(g, layout, target, vector)
    store = visible(layout, layout.stores[m])
    if vector is not None and not contiguous(store, vector):
        w.plain.add(m.stage)
    dtype = m.body.dtype
    wide = vector is not None
    width = math.prod(g.space[q] for q in rest) // (WIDTH if wide else 1)
    size = _size(target, _SIZE)
    per = w.extent(rest, WIDTH if wide else 1)
    w.line(f"let at = (group.y * groups.x + group.x) * {size}u + lane;")
    w.line(f"let start = at / {per};")
    n = w.param(("count",), count, stem="count")
    w.line(f"if (start >= {n}) {{ return; }}")
    chain = w.binding(links, False, False)
    decode(w, w.let(f"at % {per}", 0, "d"), layout.loops[0], 0, vector)
    # Link, destination and value of the first are fetched at once.
    w.line(f"let head = {chain}[start];")
    w.open()
    decode(w, "start", layout.loops[1], 1)
    goes = w.value(ids)
    first = w.splat(value) if wide else w.value(value)
    w.line(f"var sum = {first};")
    w.blocks[0] += w.close()
    w.line(f"if ((head & {_FIRST}) == 0u) {{ return; }}")
    w.line(
        f"if ({goes} < 0 || u32({goes}) >= {w.extent([target_axis])}) {{ return; }}"
        if ids.dtype == "i32"
        else f"if ({goes} >= {w.extent([target_axis])}) {{ return; }}"
    )
    w.line(f"let goes_to = u32({goes});")
    w.open()
    decode(w, "t", layout.loops[1], 1)
    v = w.splat(value) if wide else w.value(value)
    w.line(f"sum = sum + {v};")
    step = w.close()
    w.line("var t = head & 0x7fffffffu;")
    w.line(f"for (; t < {n};) {{")
    w.blocks[0] += [*indent(step), f"  t = {chain}[t] & 0x7fffffffu;", "}"]
    w.axis(target_axis, "goes_to", 0)
    w.store(m.stage, store, "sum", dtype, wide)
    kernel = finish(
        g,
        w,
        layout,
        w.blocks[0],
        kernel_name(g),
        "scatter",
        size,
        fold(-(-(count * width) // size), target),
    )
    return _second(kernel)


def _second(kernel: Kernel) -> Kernel:
    """The kernel before counts as the one that computes the members."""
    from dataclasses import replace

    return replace(kernel, members=(), writes=())
