"""Second stage of a contraction in pieces of k: adds them up, then the epilogue."""

from __future__ import annotations

import math
from dataclasses import replace

from .address import Address, Term, collapse, used_alone
from .contract_plan import Contraction
from .program import Kernel, Scratch
from .schedule import decode, finish, fold, lay_out, make_writer, vector_axis, visible
from .writer import WIDTH, contiguous, wgsl_type


def sum_pieces(c: Contraction, scratch: Scratch, splits: int, name: str) -> Kernel:
    """A thread adds the pieces of its results, in order."""
    g, target = c.group, c.target
    layout = lay_out(g, c.epilogue, [])
    own = layout.stores[c.member]
    walks = [f.axes() for f in (*layout.addresses.values(), *layout.stores.values())]
    blocked = used_alone(list(c.epilogue.values()), layout.addresses)
    loop = collapse(range(len(g.rows)), g.space, walks, blocked)
    layout = replace(
        layout,
        loops=[loop],
        extents={q[-1]: math.prod(g.space[a] for a in q) for q in loop},
    )
    vector = vector_axis(layout, loop)
    w = make_writer(g, layout, target, vector)
    for m in g.stored:
        if not contiguous(visible(layout, layout.stores[m]), vector):
            w.plain.add(g.target(m)[0])
    piece = len(w.space)
    w.space.append(splits)
    own = visible(layout, own)
    term = Term(c.member.stage.size, ("axes", tuple(range(len(g.rows)))), piece)
    form = Address((*own.terms, term), own.const)
    wide = vector is not None and contiguous(form, vector)
    if not wide:
        w.plain.add(scratch)
    size = 64 if target.family == "software" else 256
    w.line(f"let at = (group.y * groups.x + group.x) * {size}u + lane;")
    w.open()
    w.base = 1
    decode(w, "at", loop, 1, vector)
    kind = wgsl_type("f32", vector is not None)
    w.line(f"var total: {kind};")
    w.open()
    w.axis(piece, "s", 2)
    if wide:
        part = w.read(scratch, w.address(form, WIDTH), True)
    elif vector is None:
        part = w.read(scratch, w.address(form), False)
    else:
        lanes = [w.read(scratch, at, False) for at in w.lane_addresses(form)]
        part = f"{kind}({', '.join(lanes)})"
    w.line(f"total = total + {part};")
    lines = w.close()
    count = w.param(("splits",), splits, stem="splits")
    w.line(f"for (var s = 0u; s < {count}; s = s + 1u) {{")
    w.blocks[-1] += [*("  " + x for x in lines), "}"]
    value = "total"
    if c.number not in (1.0, -1.0):
        value = w.let(
            f"total * {w.param(('number',), c.number, 'f32', 'number')}", 1, "r"
        )
    elif c.number == -1.0:
        value = w.let("-total", 1, "r")
    w.local.update(dict.fromkeys(c.result, value))
    values = [
        w.splat(e) if vector is not None else w.value(e) for e in c.epilogue.values()
    ]
    for (m, e), v in zip(c.epilogue.items(), values, strict=True):
        w.store(
            g.target(m)[0],
            visible(layout, layout.stores[m]),
            v,
            e.dtype,
            vector is not None,
        )
    inner = w.close()
    threads = math.prod(g.rows) // (WIDTH if vector is not None else 1)
    count = w.param(("threads",), threads, stem="threads")
    lines = [*w.blocks[0], f"if (at >= {count}) {{ return; }}", *inner]
    kernel = finish(
        g,
        w,
        layout,
        lines,
        f"{name}_sum",
        "contract",
        size,
        fold(-(-threads // size), target),
    )
    return replace(
        kernel,
        flops=splits * math.prod(g.rows),
        reason="adds the pieces of the kernel before, in a fixed order",
    )
