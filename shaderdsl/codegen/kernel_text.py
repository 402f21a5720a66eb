"""The text of a kernel as it grows: blocks of lines, parameters and bindings."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import CompilerError
from ..ir import expr as E
from ..ir.wgsl_math import helper_source, used_helpers
from .address import Key
from .program import Binding, Param, Tensor
from .storage import FUNCTIONS, array_type
from .target import Target


class _Bound:
    """How one tensor is bound: its name in the text, whether as vec4, and how it is
    used.
    """

    def __init__(self, name: str, vector: bool):
        self.name, self.vector, self.write = name, vector, False


class KernelText:
    """Blocks of lines, each within the one before it; names; what the kernel is given.

    Args:
        space: extents of the kernel's axes.
    """

    def __init__(self, space: Sequence[int], target: Target):
        self.space, self.target = list(space), target
        self.features = target.features
        self.names: dict[int, str] = {}
        self.depth: dict[int, int] = {}
        self.base = 0
        self.blocks: list[list[str]] = [[]]
        self.memo: list[dict[Any, str]] = [{}]
        self.bound: dict[Tensor, _Bound] = {}
        self.params: dict[Key, tuple[str, Param]] = {}
        self.shared: list[str] = []
        self.uses_subgroups = False
        self._counter = 0

    # -------------------------------------------------------------- blocks

    def open(self) -> None:
        """Begin an inner block."""
        self.blocks.append([])
        self.memo.append({})

    def close(self) -> list[str]:
        """End the innermost block and give its lines."""
        self.memo.pop()
        return self.blocks.pop()

    def loop(self, header: str) -> None:
        """End the innermost block as the body of a loop in the block around it."""
        body = self.close()
        self.line(f"{header} {{")
        self.blocks[-1] += [*indent(body), "}"]

    def line(self, text: str, depth: int | None = None) -> None:
        """A line of the innermost (or of a given) block."""
        self.blocks[-1 if depth is None else depth].append(text)

    def fresh(self, stem: str = "t") -> str:
        """A new name."""
        self._counter += 1
        if stem in "iuf" and self._counter in (8, 16, 32, 64):  # the name of a type
            self._counter += 1
        return f"{stem}{self._counter}"

    def let(self, text: str, depth: int, stem: str = "t") -> str:
        """Name a value in a block."""
        name = self.fresh(stem)
        self.blocks[depth].append(f"let {name} = {text};")
        return name

    def axis(self, a: int, name: str, depth: int | None = None) -> None:
        """Say that the variable ``name`` (u32) is the position along an axis, known
        from a block on.
        """
        self.names[a] = name
        self.depth[a] = len(self.blocks) - 1 if depth is None else depth

    def level(self, mask: int) -> int:
        """The block in which all these axes are known."""
        return max([self.base, *(self.depth[a] for a in E.bits(mask))])

    # -------------------------------------------------------------- parameters and
    # bindings

    def param(
        self,
        key: Key,
        value: int | float | tuple[str, str],
        dtype: str = "u32",
        stem: str = "n",
    ) -> str:
        """A word of the parameter block."""
        if key not in self.params:
            name = f"{stem}{len(self.params)}"
            self.params[key] = (name, Param(value, dtype))
        return "P." + self.params[key][0]

    def extent(self, axes: Iterable[int], divide: int = 1) -> str:
        """The product of extents, as a parameter (divided by the vector width where
        asked).
        """
        group = tuple(sorted(axes))
        value = math.prod(self.space[a] for a in group)
        if not group:
            return "1u"
        return self.param(
            ("axes", group) if divide == 1 else ("axes", group, divide),
            -(-value // divide),
        )

    def binding(
        self, tensor: Tensor, vector: bool, write: bool, label: str | None = None
    ) -> str:
        """The name of a tensor's buffer."""
        b = self.bound.get(tensor)
        if b is None:
            stem = re.sub(r"\W", "_", label or tensor.name).strip("_") or "t"
            if not re.match("[A-Za-z]", stem):
                stem = "t" + stem
            b = self.bound[tensor] = _Bound(f"{stem}_{len(self.bound)}", vector)
        if b.vector != vector:
            raise CompilerError(f"{tensor.name} is bound both as vec4 and as scalars")
        b.write |= write
        return b.name

    # -------------------------------------------------------------- the whole text

    def text(
        self,
        comment: Sequence[str],
        size: tuple[int, int, int],
        builtins: str,
        body: Sequence[str],
    ) -> str:
        """The kernel as WGSL."""
        head = [f"// {c}" for c in comment]
        if any(t.dtype == "f16" for t in self.bound) and self.features.f16:
            head.append("enable f16;")
        if self.uses_subgroups:
            if self.target.enable_subgroups_directive:
                head.append("enable subgroups;")
            builtins += (
                ", @builtin(subgroup_size) sg_size: u32, "
                "@builtin(subgroup_invocation_id) sg_lane: u32"
                ", @builtin(subgroup_id) sg: u32, @builtin(num_subgroups) sg_count: u32"
            )
        for k, (tensor, b) in enumerate(self.bound.items()):
            access = "read_write" if b.write else "read"
            head.append(
                f"@group(0) @binding({k}) var<storage, {access}> {b.name}: "
                f"array<{array_type(tensor, b.vector, b.write, self.features)}>;"
            )
        if self.params:
            fields = ", ".join(f"{name}: {p.dtype}" for name, p in self.params.values())
            head.append(f"struct Params {{ {fields} }}")
            head.append(
                f"@group(0) @binding({len(self.bound)}) var<uniform> P: Params;"
            )
        head += self.shared
        code = "\n".join(body)
        head += [f for name, f in FUNCTIONS.items() if f"{name}(" in code]
        head += helper_source(h for h in used_helpers(code) if h not in FUNCTIONS)
        shape = ", ".join(str(n) for n in size if n > 1) or "1"
        return "\n".join(
            [
                *head,
                f"@compute @workgroup_size({shape})",
                f"fn main({builtins}) {{",
                *indent(body),
                "}",
                "",
            ]
        )

    def bindings(self) -> tuple[Binding, ...]:
        """What the kernel binds, in order."""
        return tuple(
            Binding(t, "read_write" if b.write else "read")
            for t, b in self.bound.items()
        )

    def param_block(self) -> tuple[Param, ...]:
        """The parameter block, in order."""
        return tuple(p for _, p in self.params.values())


def indent(lines: Iterable[str], by: int = 1) -> list[str]:
    """Lines moved to the right."""
    return ["  " * by + line for line in lines]
