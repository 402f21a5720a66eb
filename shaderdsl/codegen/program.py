"""Kernels and the program they form: plain data between `codegen` and `runtime`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from ..ir.stage import Stage

#: Bytes that one element takes in memory.  A bool is stored as a u32 of 0 or 1.
ITEM_BYTES = {"f32": 4, "i32": 4, "u32": 4, "bool": 4, "f16": 2}


@dataclass(frozen=True, eq=False)
class Scratch:
    """Memory that kernels of one program share and nobody outside sees.

    Compared by identity: two scratch tensors of equal size are two tensors.

    Args:
        name: for people.
        dtype: one of the keys of `ITEM_BYTES`.
        size: number of elements.
    """

    name: str
    dtype: str
    size: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.size * ITEM_BYTES[self.dtype]


#: What a kernel binds.
Tensor: TypeAlias = "Stage | Scratch"


@dataclass(frozen=True)
class Binding:
    """One storage buffer of a kernel; its place in ``bindings`` is its number.

    Args:
        tensor: what is bound.
        access: ``"read"`` or ``"read_write"``.  A tensor that a kernel both reads and
            writes is bound once, as ``"read_write"``.
    """

    tensor: Tensor
    access: str


@dataclass(frozen=True)
class Param:
    """One 32-bit word of the parameter block.

    Args:
        value: a number, or ``("scalar", name)`` for one that each call fills in.
        dtype: ``"u32"``, ``"i32"`` or ``"f32"``: how the word is written.
    """

    value: int | float | tuple[str, str]
    dtype: str

    @property
    def scalar(self) -> str | None:
        """The name of the runtime number, or None for a constant."""
        return self.value[1] if isinstance(self.value, tuple) else None


@dataclass(frozen=True)
class Kernel:
    """One dispatch: WGSL whose entry point is ``main``.

    The storage buffers are bindings 0 to n-1 of group 0; binding n is the parameter
    block, a ``var<uniform>`` of 4 words a ``vec4<u32>``, absent if there are no
    parameters.

    Args:
        name: for people, e.g. ``"row_rms_norm"``.
        archetype: ``"map"``, ``"row"``, ``"column"``, ``"contract"``, ``"scatter"``, …
        workgroup_size: invocations of a workgroup.
        workgroups: workgroups of the dispatch; a zero means that nothing runs.
        members: what is computed, in order.
        writes: the members that are stored to memory.
        flops: floating-point operations of one dispatch.
        bytes: bytes that one dispatch must move to and from memory.
        reason: why the kernel begins and ends where it does.
        windows: tensors of this kernel that are parts of others of the program: the
            whole, and the first element. A loop binds other parts at each turn.
    """

    name: str
    archetype: str
    wgsl: str
    workgroup_size: tuple[int, int, int]
    workgroups: tuple[int, int, int]
    bindings: tuple[Binding, ...]
    params: tuple[Param, ...]
    members: tuple[Stage, ...]
    writes: tuple[Stage, ...]
    flops: int
    bytes: int
    reason: str
    in_range: bool = False
    windows: Mapping[Stage, tuple[Stage, int]] = field(
        default_factory=dict, compare=False
    )

    def whole(self, tensor: Tensor) -> tuple[Tensor, int]:
        """The program's tensor in which one of this kernel lies, and where."""
        if isinstance(tensor, Scratch):
            return tensor, 0
        return self.windows.get(tensor, (tensor, 0))

    @property
    def code(self) -> str:
        """The text without its first comments.

        They name the user's lines; called from another line, a function takes the
        same kernels.
        """
        text = self.wgsl
        while text.startswith("//"):
            text = text.partition("\n")[2]
        return text


@dataclass(frozen=True)
class Program:
    """Kernels in execution order, with what goes in and what comes out.

    Args:
        inputs: stages of kind ``"input"``; the position is that of the argument.
        outputs: may repeat and may be inputs.
        donated: positions of inputs whose memory may be reused after their last use.
        scalars: ``(name, dtype)`` of the runtime numbers.
        log: decisions, for people.
        places: tensors that lie inside of another one: ``(parent, first element)``.
            A parent may be placed itself, may be an input, or may be a stage of no
            graph (an arena), which is nothing but memory.
        inside: reductions that only exist inside of kernels, which compute them again
            where they need them: nothing that is worth keeping.
    """

    kernels: tuple[Kernel, ...]
    inputs: tuple[Stage, ...]
    outputs: tuple[Stage, ...]
    donated: frozenset[int]
    scalars: tuple[tuple[str, str], ...]
    log: tuple[str, ...]
    places: Mapping[Stage, tuple[Stage, int]] = field(
        default_factory=dict, compare=False
    )
    inside: frozenset[Stage] = frozenset()
