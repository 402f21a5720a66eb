"""What ``sd.lower`` gives: the kernels of a call, and the reasons for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .codegen.program import Kernel, Program
from .ir.printer import show_graph
from .ir.stage import Stage


class Lowered:
    """Kernels exactly as a call dispatches them. ``residuals``: what forward keeps for
    the pullback.
    """

    def __init__(self, program: Program, residuals: Sequence[Stage]):
        self.program = program
        self.residuals = tuple(residuals)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """In order of execution."""
        return self.program.kernels

    @property
    def flops(self) -> int:
        """Floating-point operations of one call."""
        return sum(k.flops for k in self.kernels)

    @property
    def bytes(self) -> int:
        """Bytes that one call must move."""
        return sum(k.bytes for k in self.kernels)

    def graph(self) -> Any:
        """Kernels and the stages in them as a drawing: SVG text that notebooks show.

        ``low.graph().save("graph.svg")`` writes it to a file.
        """
        from .interop.drawing import draw_program

        return draw_program(self.program)

    def stages(self) -> str:
        """The stage graph as text."""
        return show_graph(self.program.outputs)

    def explain(self) -> str:
        """Why each kernel begins and ends where it does; bytes and FLOPs."""
        lines = [
            f"{len(self.kernels)} kernel(s), {self.bytes:,} bytes, {self.flops:,} FLOPs"
        ]
        seen: set[tuple[str, str]] = set()
        names = _apart(s for k in self.kernels for s in (*k.members, *k.writes))
        for i, k in enumerate(self.kernels):
            if k.windows and (k.name, k.wgsl) in seen:
                continue  # the same on another block of rows
            seen.add((k.name, k.wgsl))
            groups = "×".join(str(n) for n in k.workgroups)
            size = "×".join(str(n) for n in k.workgroup_size)
            lines.append(f"{i}. {k.name} [{k.archetype}] {groups} workgroups of {size}")
            if k.members:  # a second stage has none of its own; its reason says all
                made, stored = (
                    ", ".join(names[s] for s in of) for of in (k.members, k.writes)
                )
                lines.append(f"   computes {made}; stores {stored}")
            lines.append(f"   {k.bytes:,} bytes, {k.flops:,} FLOPs")
            if k.reason:
                lines.append(f"   {k.reason}")
        if self.residuals:
            kept = ", ".join(f"{s.name} {list(s.shape)}" for s in self.residuals)
            lines.append(f"forward keeps for this: {kept}")
        lines += self.program.log
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from .interop.html import lowered_html

        return lowered_html(self)

    def __repr__(self) -> str:
        return self.explain()


def _apart(stages: Iterable[Stage]) -> dict[Stage, str]:
    """Names of stages, with a number where several have the same."""
    by_name: dict[str, list[Stage]] = {}
    for s in dict.fromkeys(stages):
        by_name.setdefault(s.name, []).append(s)
    return {
        s: name if len(same) == 1 else f"{name} ({i})"
        for name, same in by_name.items()
        for i, s in enumerate(same, 1)
    }
