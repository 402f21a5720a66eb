"""The lines of the user's own source that a kernel comes from."""

from __future__ import annotations

import linecache
from pathlib import Path

from ..codegen.program import Kernel
from ..ir import expr as E

#: Lines of one kernel that are shown.
MOST = 12


def source_lines(kernel: Kernel) -> list[str]:
    """``model.py:7: return x * sd.rsqrt(ms + eps) * gain``, in the order of the file.

    Lines that cannot be read (typed into a prompt, say) are left out.
    """
    found = {s.loc for s in kernel.members}
    for s in kernel.members:
        if s.body is not None:
            found |= {n.loc for n in E.values(s.body)}
    places = sorted({p for p in map(_place, found) if p is not None})
    lines = []
    for file, number in places:
        if Path(file).stem == "shaderdsl":
            continue  # the program of the command line, which asked for a derivative
        text = linecache.getline(file, number).strip()
        # A decorator is where an op begins; what it computes are the lines below.
        if text and not text.startswith("@"):
            lines.append(f"{Path(file).name}:{number}: {text}")
    if len(lines) > MOST:
        lines[MOST:] = [f"and {len(lines) - MOST} more lines"]
    return lines


def _place(loc: str | None) -> tuple[str, int] | None:
    # Either "file:line" or "op (file:line)".
    inner = (loc or "").rsplit("(", 1)[-1].rstrip(")")
    file, _, number = inner.rpartition(":")
    return (file, int(number)) if file and number.isdigit() else None
