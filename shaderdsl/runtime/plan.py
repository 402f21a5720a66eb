"""The memory plan and the parameter block of a program.  No device is touched here.

Tensors of a program live in *slots*; one slot is one piece of memory.  Tensors whose
lifetimes do not meet share a slot.  A tensor lives from the first kernel that binds it
to the last one, both included, so two tensors of one kernel never share: reading and
writing one buffer in a single dispatch is refused by WebGPU.

A tensor with a place (see `Program.places`) lies inside of its *home*, which lives as
long as any of its parts.  A home that holds inputs is an `Arena`: a call uses the
inputs' own memory if they lie there just so already, and else copies them together.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from ..codegen.program import ITEM_BYTES, Kernel, Param, Program, Tensor
from ..codegen.target import Limits
from ..errors import CompilerError, DTypeError, LimitError
from .buffers import size_class

if TYPE_CHECKING:
    from ..ir.stage import Stage

_RANGES = {"i32": (-(1 << 31), 1 << 31), "u32": (0, 1 << 32)}


@dataclass
class Slot:
    """One piece of memory during a call.

    Attributes:
        kind: ``"input"`` (given by the caller), ``"arena"`` (put together from inputs),
            ``"output"`` (kept by the caller) or ``"temp"`` (back to the pool after the
            call).
        nbytes: its size.
        busy: pairs of first and last kernel between which it holds a tensor.
    """

    kind: str
    nbytes: int
    busy: list[tuple[int, int]] = field(default_factory=list)

    def is_free(self, first: int, last: int) -> bool:
        """Whether it holds nothing from kernel ``first`` to ``last``."""
        # A loop: a plan of hundreds of kernels asks tens of thousands of times.
        for a, b in self.busy:  # noqa: SIM110
            if a <= last and first <= b:
                return False
        return True


#: A slot, and an offset in it in bytes.
Place: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class Arena:
    """Memory in which inputs lie side by side.

    Attributes:
        slot: its slot.
        nbytes: its size.
        parts: ``(position, offset, nbytes)`` of each input, by offset.
        written: whether kernels write to it.
    """

    slot: int
    nbytes: int
    parts: tuple[tuple[int, int, int], ...]
    written: bool


@dataclass(frozen=True)
class MemoryPlan:
    """Where every tensor lives.

    Attributes:
        slots: the inputs in argument order, then arenas, outputs and temporaries.
        bindings: for each kernel the place of each binding.
        outputs: for each output its place.
        reused: input slots whose memory an output took over.
        arenas: what inputs are put together in.
    """

    slots: tuple[Slot, ...]
    bindings: tuple[tuple[Place, ...], ...]
    outputs: tuple[Place, ...]
    reused: frozenset[int]
    arenas: tuple[Arena, ...]


def plan_memory(program: Program, donated: frozenset[int]) -> MemoryPlan:
    """Assign tensors to slots.

    Args:
        donated: input positions whose memory may be overwritten after their last use.

    Raises:
        CompilerError: a tensor is read before it is written, an input is written that
            was not donated, or an output is never written.
    """
    homes = Homes(program)
    first, last = _lifetimes(program, homes, donated)
    end = len(program.kernels)
    place: dict[Tensor, int] = {}
    slots: list[Slot] = []
    given: dict[Tensor, int] = {}
    for position, stage in enumerate(program.inputs):
        given.setdefault(stage, position)
        in_arena = homes.of(stage)[0] in homes.parts
        if not in_arena:
            place.setdefault(stage, position)
        stop = last.get(stage, -1) if position in donated and not in_arena else end
        if stage in program.outputs:
            stop = end
        slots.append(Slot("input", stage.nbytes, [(-1, stop)]))
    arenas = []
    for home, parts in homes.parts.items():
        place[home] = len(slots)
        slots.append(Slot("arena", home.nbytes, [(-1, end)]))
        arenas.append(
            Arena(place[home], home.nbytes, tuple(parts), home in homes.written)
        )
    reused: set[int] = set()

    fresh = [t for t in first if t not in place]
    outputs = dict.fromkeys(homes.of(stage)[0] for stage in program.outputs)
    outputs = {t: None for t in outputs if t not in place}
    same: dict[int, list[int]] = {}  # donated inputs by room, the smallest first
    for i in sorted(donated, key=lambda i: (slots[i].nbytes, i)):
        same.setdefault(_room(slots[i].nbytes), []).append(i)
    # The earliest first: the later an output is written, the more memory is free.
    for tensor in sorted(outputs, key=lambda t: first.get(t, end)):
        # An empty output has no kernel.
        span = (first.get(tensor, end), end)
        # Memory of another size would be passed on from call to call, and grow.
        fits: Iterable[int] = same.get(_room(tensor.nbytes), [])
        found = next((i for i in fits if slots[i].is_free(*span)), None)
        if found is None:
            found = len(slots)
            slots.append(Slot("output", tensor.nbytes))
        else:
            reused.add(found)
        place[tensor] = found
        slots[found].busy.append(span)

    # The largest first: whatever comes later fits into what is there already.  Among
    # equals the last first, because outputs occupy the end.
    temps = [t for t in fresh if t not in place]
    some = [i for i, slot in enumerate(slots) if (-1, end) not in slot.busy]
    sizes = sorted((_room(slots[i].nbytes), slots[i].nbytes, i) for i in some)
    for tensor in sorted(temps, key=lambda t: (-t.nbytes, -last[t])):
        span, room = (first[tensor], last[tensor]), _room(tensor.nbytes)
        fits = (i for _, _, i in sizes[bisect_left(sizes, (room,)) :])
        found = next((i for i in fits if slots[i].is_free(*span)), None)
        if found is None:
            found = len(slots)
            slots.append(Slot("temp", tensor.nbytes))
            insort(sizes, (room, tensor.nbytes, found))
        place[tensor] = found
        slots[found].busy.append(span)

    def at(tensor: Tensor) -> Place:
        home, offset = homes.of(tensor)
        return place[home], offset

    def bound(kernel: Kernel, tensor: Tensor) -> Place:
        whole, first = kernel.whole(tensor)
        slot, offset = at(whole)
        return slot, offset + first * ITEM_BYTES[whole.dtype]

    return MemoryPlan(
        slots=tuple(slots),
        bindings=tuple(
            tuple(bound(kernel, b.tensor) for b in kernel.bindings)
            for kernel in program.kernels
        ),
        # An input that is an output too is given back as it came.
        outputs=tuple(
            (given[stage], 0) if stage in given else at(stage)
            for stage in program.outputs
        ),
        reused=frozenset(reused),
        arenas=tuple(arenas),
    )


class Homes:
    """Where tensors lie when places in places are followed to the end.

    Attributes:
        parts: for each home that holds inputs ``(position, offset, nbytes)`` of them.
        written: the homes that kernels write.
    """

    def __init__(self, program: Program):
        self._places: dict[Tensor, tuple[Stage, int]] = dict(program.places.items())
        self.parts: dict[Tensor, list[tuple[int, int, int]]] = {}
        homes = {self.of(stage)[0] for stage in self._places}
        for position, stage in enumerate(program.inputs):
            home, offset = self.of(stage)
            if home in homes:
                self.parts.setdefault(home, []).append((position, offset, stage.nbytes))
        for parts in self.parts.values():
            parts.sort(key=lambda part: part[1])
        self.written = {
            self.of(kernel.whole(binding.tensor)[0])[0]
            for kernel in program.kernels
            for binding in kernel.bindings
            if binding.access == "read_write"
        }

    def of(self, tensor: Tensor) -> tuple[Tensor, int]:
        """The home of a tensor, and its offset there in bytes."""
        offset = 0
        while tensor in self._places:
            tensor, start = self._places[tensor]
            offset += start * ITEM_BYTES[tensor.dtype]
        return tensor, offset


def _room(nbytes: int) -> int:
    """Bytes that an allocation for ``nbytes`` surely has.

    Large ones are not rounded up where that would pass the device's largest buffer.
    """
    return size_class(nbytes) if nbytes <= 1 << 27 else nbytes


def _lifetimes(
    program: Program, homes: Homes, donated: frozenset[int]
) -> tuple[dict[Tensor, int], dict[Tensor, int]]:
    """First and last kernel of every home, with the checks of `plan_memory`."""
    first: dict[Tensor, int] = {}
    last: dict[Tensor, int] = {}
    position: dict[Tensor, int] = {}
    for number, stage in enumerate(program.inputs):
        position.setdefault(stage, number)
    filled: set[Tensor] = {*position, *homes.parts}
    for number, kernel in enumerate(program.kernels):
        for binding in kernel.bindings:
            tensor, _ = kernel.whole(binding.tensor)
            writes = binding.access == "read_write"
            home, _ = homes.of(tensor)
            if not writes and tensor not in filled and home not in filled:
                raise CompilerError(
                    f"kernel {kernel.name} reads {tensor.name} before it is written"
                )
            # An arena with inputs that were not donated is always a copy.
            loose = home in position and home not in homes.parts
            if writes and loose and position[home] not in donated:
                raise CompilerError(
                    f"kernel {kernel.name} writes the input {tensor.name}, which "
                    "was not donated"
                )
            filled |= {tensor, home}
            first.setdefault(home, number)
            last[home] = number
    for stage in program.outputs:
        home, _ = homes.of(stage)
        if stage.size and stage not in position and home not in filled:
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
