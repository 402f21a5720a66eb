"""The memory plan and the parameter block of a program.  No device is touched here.

Tensors of a program live in *slots*; one slot is one piece of memory.  Tensors whose
lifetimes do not meet share a slot.  A tensor lives from the first kernel that binds it
to the last one, both included, so two tensors of one kernel never share: reading and
writing one buffer in a single dispatch is refused by WebGPU.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..codegen.program import Kernel, Param, Program, Tensor
from ..codegen.target import Limits
from ..errors import CompilerError, DTypeError, LimitError
from .buffers import size_class

_RANGES = {"i32": (-(1 << 31), 1 << 31), "u32": (0, 1 << 32)}


@dataclass
class Slot:
    """One piece of memory during a call.

    Attributes:
        kind: ``"input"`` (given by the caller), ``"output"`` (kept by the caller) or
            ``"temp"`` (back to the pool after the call).
        nbytes: its size.
        busy: pairs of first and last kernel between which it holds a tensor.
    """

    kind: str
    nbytes: int
    busy: list[tuple[int, int]] = field(default_factory=list)

    def is_free(self, first: int, last: int) -> bool:
        """Whether it holds nothing from kernel ``first`` to ``last``."""
        return all(last < a or b < first for a, b in self.busy)


@dataclass(frozen=True)
class MemoryPlan:
    """Where every tensor lives.

    Attributes:
        slots: the inputs in argument order, then outputs and temporaries.
        bindings: for each kernel the slot of each binding.
        outputs: for each output its slot.
        reused: input slots whose memory an output took over.
    """

    slots: tuple[Slot, ...]
    bindings: tuple[tuple[int, ...], ...]
    outputs: tuple[int, ...]
    reused: frozenset[int]


def plan_memory(program: Program, donated: frozenset[int]) -> MemoryPlan:
    """Assign tensors to slots.

    Args:
        donated: input positions whose memory may be overwritten after their last use.

    Raises:
        CompilerError: a tensor is read before it is written, an input is written that
            was not donated, or an output is never written.
    """
    first, last = _lifetimes(program, donated)
    end = len(program.kernels)
    place: dict[Tensor, int] = {}
    slots: list[Slot] = []
    for position, stage in enumerate(program.inputs):
        place.setdefault(stage, position)
        stop = last.get(stage, -1) if position in donated else end
        if stage in program.outputs:
            stop = end
        slots.append(Slot("input", stage.nbytes, [(-1, stop)]))
    reused: set[int] = set()

    fresh = [t for t in first if t not in place]
    outputs: list[Tensor] = []
    outputs += [t for t in dict.fromkeys(program.outputs) if t not in place]
    # The earliest first: the later an output is written, the more memory is free.
    for tensor in sorted(outputs, key=lambda t: first.get(t, end)):
        # An empty output has no kernel.
        span = (first.get(tensor, end), end)
        # An output outlives the call, so it must not occupy much more than it needs.
        fits = [
            i
            for i in sorted(donated)
            if _room(tensor.nbytes)
            <= _room(slots[i].nbytes)
            <= 2 * _room(tensor.nbytes)
            and slots[i].is_free(*span)
        ]
        if fits:
            place[tensor] = min(fits, key=lambda i: (slots[i].nbytes, i))
            reused.add(place[tensor])
        else:
            place[tensor] = len(slots)
            slots.append(Slot("output", tensor.nbytes))
        slots[place[tensor]].busy.append(span)

    # The largest first: whatever comes later fits into what is there already.  Among
    # equals the last first, because outputs occupy the end.
    temps = [t for t in fresh if t not in place]
    for tensor in sorted(temps, key=lambda t: (-t.nbytes, -last[t])):
        span = (first[tensor], last[tensor])
        fits = [
            i
            for i, slot in enumerate(slots)
            if _room(slot.nbytes) >= _room(tensor.nbytes) and slot.is_free(*span)
        ]
        if fits:
            place[tensor] = min(fits, key=lambda i: (slots[i].nbytes, i))
        else:
            place[tensor] = len(slots)
            slots.append(Slot("temp", tensor.nbytes))
        slots[place[tensor]].busy.append(span)

    return MemoryPlan(
        slots=tuple(slots),
        bindings=tuple(
            tuple(place[b.tensor] for b in kernel.bindings)
            for kernel in program.kernels
        ),
        outputs=tuple(place[stage] for stage in program.outputs),
        reused=frozenset(reused),
    )


def _room(nbytes: int) -> int:
    """Bytes that an allocation for ``nbytes`` surely has.

    Large ones are not rounded up where that would pass the device's largest buffer.
    """
    return size_class(nbytes) if nbytes <= 1 << 27 else nbytes


def _lifetimes(
    program: Program, donated: frozenset[int]
) -> tuple[dict[Tensor, int], dict[Tensor, int]]:
    """First and last kernel of every tensor, with the checks of `plan_memory`."""
    first: dict[Tensor, int] = {}
    last: dict[Tensor, int] = {}
    given: dict[Tensor, int] = {}
    for position, stage in enumerate(program.inputs):
        given.setdefault(stage, position)
    for number, kernel in enumerate(program.kernels):
        for binding in kernel.bindings:
            tensor, writes = binding.tensor, binding.access == "read_write"
            if tensor in given:
                if writes and given[tensor] not in donated:
                    raise CompilerError(
                        f"kernel {kernel.name} writes the input {tensor.name}, which "
                        "was not donated"
                    )
            elif tensor not in first and not writes:
                raise CompilerError(
                    f"kernel {kernel.name} reads {tensor.name} before it is written"
                )
            first.setdefault(tensor, number)
            last[tensor] = number
    for stage in program.outputs:
        if stage not in given and stage not in first and stage.size:
            raise CompilerError(f"no kernel writes the output {stage.name}")
    return first, last


@dataclass(frozen=True)
class ParamBlock:
    """All kernels' parameters in one uniform buffer.

    Attributes:
        words: the bytes, with zeros where scalars belong.
        ranges: for each kernel ``(offset, nbytes)``, or None without parameters.
        patches: ``(byte offset, name, dtype)`` of each word that a call fills in.
    """

    words: bytes
    ranges: tuple[tuple[int, int] | None, ...]
    patches: tuple[tuple[int, str, str], ...]

    def fill(self, scalars: Mapping[str, float]) -> bytes:
        """The bytes for one call.

        Raises:
            DTypeError: a scalar is missing or does not fit its dtype.
        """
        if not self.patches:
            return self.words
        words = bytearray(self.words)
        for offset, name, dtype in self.patches:
            if name not in scalars:
                raise DTypeError(f"the number {name!r} was not given")
            words[offset : offset + 4] = _word(scalars[name], dtype, name)
        return bytes(words)


def pack_params(kernels: tuple[Kernel, ...], alignment: int) -> ParamBlock:
    """Lay the parameters of all kernels out; equal blocks are stored once."""
    words = bytearray()
    ranges: list[tuple[int, int] | None] = []
    patches: list[tuple[int, str, str]] = []
    seen: dict[tuple[tuple[str, str], ...], tuple[int, int]] = {}
    for kernel in kernels:
        if not kernel.params:
            ranges.append(None)
            continue
        # As text, because 1 == 1.0 == True and 0.0 == -0.0 in Python.
        key = tuple((repr(p.value), p.dtype) for p in kernel.params)
        if key not in seen:
            words += bytes(-len(words) % alignment)
            offset = len(words)
            for i, param in enumerate(kernel.params):
                if param.scalar is not None:
                    patches.append((offset + 4 * i, param.scalar, param.dtype))
                words += _constant(param)
            words += bytes(-len(words) % 16)
            seen[key] = (offset, len(words) - offset)
        ranges.append(seen[key])
    return ParamBlock(bytes(words), tuple(ranges), tuple(patches))


def _constant(param: Param) -> bytes:
    if isinstance(param.value, tuple):
        return bytes(4)
    return _word(param.value, param.dtype, "a parameter")


def _word(value: float, dtype: str, name: str) -> bytes:
    """One parameter as four little-endian bytes."""
    if dtype == "f32":
        try:
            return struct.pack("<f", value)
        except OverflowError:  # Beyond f32: what a conversion in NumPy gives.
            return struct.pack("<f", float("inf") if value > 0 else float("-inf"))
    low, high = _RANGES[dtype]
    whole = int(value)
    if whole != value or not low <= whole < high:
        raise DTypeError(f"{name} = {value!r} does not fit {dtype}")
    return struct.pack("<i" if dtype == "i32" else "<I", whole)


def check_limits(program: Program, limits: Limits) -> None:
    """Refuse what the device does not allow, before anything is launched.

    Raises:
        LimitError: says which kernel and both numbers.
    """
    for kernel in program.kernels:
        # Sizes of arrays first: too many workgroups often follow from them.
        for binding in kernel.bindings:
            nbytes = binding.tensor.nbytes
            if nbytes > limits.max_binding_bytes:
                raise LimitError(
                    f"{binding.tensor.name} has {nbytes:,} B, a kernel may bind "
                    f"{limits.max_binding_bytes:,} B at most",
                    where=f"kernel {kernel.name}",
                    cure="split the array",
                )
        x, y, z = kernel.workgroup_size
        measured = [
            (len(kernel.bindings), limits.max_storage_buffers, "storage buffers"),
            (x * y * z, limits.max_invocations, "invocations a workgroup"),
            (x, limits.max_workgroup_size_x, "invocations along x"),
            (
                max(kernel.workgroups),
                limits.max_workgroups,
                "workgroups in one dimension",
            ),
        ]
        for number, limit, what in measured:
            if number > limit:
                raise LimitError(
                    f"kernel {kernel.name} needs {number:,} {what}, the device "
                    f"allows {limit:,}"
                )
