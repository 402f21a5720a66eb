"""A program on a wgpu device: one encoder, one pass and one submission a call."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import wgpu
from wgpu.backends.wgpu_native import ffi, lib

from ..codegen.program import Kernel, Program
from ..errors import CompilerError
from . import profiling
from .arenas import Copy, Memory, gather
from .buffers import Buffer, bound_bytes
from .device import Executable
from .plan import MemoryPlan, Place, check_limits, pack_params, plan_memory

if TYPE_CHECKING:
    from .wgpu_device import WgpuDevice

#: Sets of buffers whose bind groups a program remembers as a whole, and bind groups
#: that it remembers for each kernel.
KEEP_SETS = 16
KEEP_GROUPS = 16

#: Timestamps of one query set; WebGPU allows 4096.
MAX_QUERIES = 4096

Key = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _Step:
    """One dispatch that really happens."""

    kernel: Kernel
    pipeline: Any
    group_layout: Any
    params: tuple[int, int] | None
    number: int


class WgpuExecutable(Executable):
    """See `Executable`.  Thread-safe: each call encodes on its own, and the queue runs
    calls one after another, so they may share memory and the parameter block.
    """

    def __init__(self, device: WgpuDevice, program: Program):
        check_limits(program, device.target.limits)
        self.device, self.program = device, program
        self._plans = {program.donated: plan_memory(program, program.donated)}
        # What belongs to an arena is looked at by `gather` alone.
        arenas = self._plans[program.donated].arenas
        self._loose = program.donated - {part[0] for a in arenas for part in a.parts}
        self._block = pack_params(
            program.kernels, device.target.limits.uniform_alignment
        )
        self._uniform: Any = None
        self._written = self._block.words
        if self._block.words:
            self._uniform = device.gpu.create_buffer_with_data(
                data=self._block.words,
                usage=wgpu.BufferUsage.UNIFORM | wgpu.BufferUsage.COPY_DST,
            )
        # A dispatch of no workgroups computes nothing.
        work = [(i, k) for i, k in enumerate(program.kernels) if 0 not in k.workgroups]
        pipelines = device.pipelines.get([kernel for _, kernel in work])
        self._steps = [
            _Step(kernel, *pipeline, self._block.ranges[i], i)
            for (i, kernel), pipeline in zip(work, pipelines)
        ]
        self._lock = threading.Lock()
        self._sets: OrderedDict[Key, list[Any]] = OrderedDict()
        self._groups: list[OrderedDict[Key, Any]] = [OrderedDict() for _ in self._steps]

    def __call__(
        self, inputs: Sequence[Buffer], scalars: Mapping[str, float] | None = None
    ) -> list[Buffer]:
        device, program = self.device, self.program
        device.check()
        if len(inputs) != len(program.inputs):
            raise CompilerError(
                f"{len(inputs)} inputs were given to a program of {len(program.inputs)}"
            )
        for buffer, stage in zip(inputs, program.inputs):
            buffer.require(device)
            if buffer.nbytes != stage.nbytes:
                raise CompilerError(
                    f"a buffer of {buffer.nbytes} B was given for {stage.name} of "
                    f"{stage.nbytes} B"
                )
        words = self._block.fill(scalars or {})
        seen = Counter(buffer.key[0] for buffer in inputs)
        donated = self._donated(inputs, seen)
        plan = self._plan(donated)
        memory, copies = self._memory(plan, inputs, seen)
        try:
            groups = self._bind(plan, memory)
            seconds = self._run(groups, words, copies)
        except wgpu.GPUError as error:
            raise device.translate(error, "a launch") from error
        if profiling.active():
            profiling.note_dispatches(
                [step.kernel for step in self._steps], device.pool.live_bytes, seconds
            )
        results = self._results(plan, inputs, memory, donated)
        for position in program.donated:
            inputs[position].consume()
        return results

    def forget(self) -> None:
        """Drop cached bind groups, which keep their buffers from being freed."""
        with self._lock:
            self._sets.clear()
            for cache in self._groups:
                cache.clear()

    def _donated(self, inputs: Sequence[Buffer], seen: Counter[int]) -> frozenset[int]:
        """Donated inputs whose memory nobody else sees in this call."""
        donated = self.program.donated
        refused = [
            i
            for i in self._loose
            if seen[inputs[i].key[0]] != 1
            or inputs[i].allocation.shared
            or inputs[i].allocation.parts is not None
        ]
        return donated.difference(refused) if refused else donated

    def _plan(self, donated: frozenset[int]) -> MemoryPlan:
        plan = self._plans.get(donated)
        if plan is None:
            plan = self._plans[donated] = plan_memory(self.program, donated)
        return plan

    def _memory(
        self, plan: MemoryPlan, inputs: Sequence[Buffer], seen: Counter[int]
    ) -> tuple[list[Memory], list[Copy]]:
        """``(allocation, offset)`` of every slot, and what to copy there first.

        Temporaries are asked for first: they come back at once, so they get the same
        memory in each call, while outputs change with what the caller keeps.
        """
        memory: list[Any] = [(b.allocation, b.offset) for b in inputs]
        memory += [None] * (len(plan.slots) - len(inputs))
        copies: list[Copy] = []
        for arena in plan.arenas:
            memory[arena.slot], more = gather(
                arena, inputs, self.program.donated, seen, self.device.pool
            )
            copies += more
        for kind in ("temp", "output"):
            for i, slot in enumerate(plan.slots):
                if slot.kind == kind:
                    memory[i] = (self.device.pool.acquire(slot.nbytes), 0)
        return memory, copies

    def _bind(self, plan: MemoryPlan, memory: list[Memory]) -> list[Any]:
        """The bind group of each step."""
        keys = tuple((a.serial, offset) for a, offset in memory)
        with self._lock:
            groups = self._sets.get(keys)
            if groups is not None:
                self._sets.move_to_end(keys)
                return groups
        groups = []
        for step, cache in zip(self._steps, self._groups):
            bound = [
                (memory[slot][0], memory[slot][1] + offset)
                for slot, offset in plan.bindings[step.number]
            ]
            key = tuple((a.serial, offset) for a, offset in bound)
            with self._lock:
                group = cache.get(key)
            if group is None:
                group = self._group(step, bound)
                with self._lock:
                    cache[key] = group
                    if len(cache) > KEEP_GROUPS:
                        cache.popitem(last=False)
            groups.append(group)
        with self._lock:
            self._sets[keys] = groups
            if len(self._sets) > KEEP_SETS:
                self._sets.popitem(last=False)
        return groups

    def _group(self, step: _Step, memory: list[Memory]) -> Any:
        entries = []
        for binding, (allocation, offset) in zip(step.kernel.bindings, memory):
            # Only next to the device's largest buffer is there less room.
            room = allocation.capacity - offset
            size = min(bound_bytes(binding.tensor.nbytes), room)
            entries.append((allocation.handle, offset, size))
        if step.params is not None:
            entries.append((self._uniform, *step.params))
        return self.device.gpu.create_bind_group(
            layout=step.group_layout,
            entries=[
                {
                    "binding": i,
                    "resource": {"buffer": handle, "offset": offset, "size": size},
                }
                for i, (handle, offset, size) in enumerate(entries)
            ],
        )

    def _run(
        self, groups: list[Any], words: bytes, copies: list[Copy]
    ) -> list[float] | None:
        """Launch; returns each step's device time in seconds if that was asked for."""
        if not self._steps:
            return None
        if profiling.wants_timestamps() and self.device.target.features.timestamps:
            seconds: list[float] = []
            for start in range(0, len(groups), MAX_QUERIES // 2):
                stop = start + MAX_QUERIES // 2
                seconds += self._run_timed(start, groups[start:stop], words, copies)
                copies = []
            return seconds
        encoder = self.device.gpu.create_command_encoder()
        _encode(encoder, copies)
        compute = encoder.begin_compute_pass()
        # The C functions themselves: wgpu-py's methods cost five times as much.  What
        # goes wrong here is reported when the encoder finishes.
        set_pipeline = lib.wgpuComputePassEncoderSetPipeline
        set_group = lib.wgpuComputePassEncoderSetBindGroup
        dispatch = lib.wgpuComputePassEncoderDispatchWorkgroups
        raw, current = compute._internal, None
        for step, group in zip(self._steps, groups):
            if step.pipeline is not current:
                current = step.pipeline
                set_pipeline(raw, current._internal)
            set_group(raw, 0, group._internal, 0, ffi.NULL)
            dispatch(raw, *step.kernel.workgroups)
        compute.end()
        self._submit(encoder.finish(), words)
        return None

    def _submit(self, commands: Any, words: bytes) -> None:
        def write() -> None:
            # The last call's words are still there if nothing changed.
            if words != self._written:
                self.device.queue.write_buffer(self._uniform, 0, words)
                self._written = words

        self.device.submit([commands], before=write)

    def _run_timed(
        self, start: int, groups: list[Any], words: bytes, copies: list[Copy]
    ) -> list[float]:
        """Each step in a pass of its own between two timestamps; waits for the end."""
        gpu, count = self.device.gpu, 2 * len(groups)
        queries = gpu.create_query_set(type="timestamp", count=count)
        ticks = gpu.create_buffer(
            size=8 * count,
            usage=wgpu.BufferUsage.QUERY_RESOLVE | wgpu.BufferUsage.COPY_SRC,
        )
        encoder = gpu.create_command_encoder()
        _encode(encoder, copies)
        for i, group in enumerate(groups):
            step = self._steps[start + i]
            compute = encoder.begin_compute_pass(
                timestamp_writes={
                    "query_set": queries,
                    "beginning_of_pass_write_index": 2 * i,
                    "end_of_pass_write_index": 2 * i + 1,
                }
            )
            compute.set_pipeline(step.pipeline)
            compute.set_bind_group(0, group)
            compute.dispatch_workgroups(*step.kernel.workgroups)
            compute.end()
        encoder.resolve_query_set(queries, 0, count, ticks, 0)
        self._submit(encoder.finish(), words)
        raw = np.empty(count, np.uint64)
        self.device.read(ticks, 0, raw.view(np.uint8))
        spent = (raw[1::2] - raw[::2]).astype(np.float64)
        period = lib.wgpuQueueGetTimestampPeriod(self.device.queue._internal)
        return [float(s) for s in spent * period * 1e-9]

    def _results(
        self,
        plan: MemoryPlan,
        inputs: Sequence[Buffer],
        memory: list[Memory],
        donated: frozenset[int],
    ) -> list[Buffer]:
        """A buffer for each output; memory that appears twice is marked as shared."""
        made: dict[Place, Buffer] = {}
        results = []
        for place, stage in zip(plan.outputs, self.program.outputs):
            slot, offset = place
            if place in made:
                results.append(made[place].alias())
                continue
            if slot < len(inputs) and slot not in donated:
                made[place] = inputs[slot].alias()
            else:
                allocation, start = memory[slot]
                made[place] = Buffer(
                    self.device, allocation, stage.nbytes, start + offset
                )
            results.append(made[place])
        self._note_parts(plan, made, memory, len(inputs))
        return results

    def _note_parts(
        self,
        plan: MemoryPlan,
        made: Mapping[Place, Buffer],
        memory: list[Memory],
        given: int,
    ) -> None:
        """Tell allocations which of their bytes belong to whom."""
        parts: dict[int, list[tuple[int, int]]] = {}
        for (slot, _), buffer in made.items():
            if buffer.nbytes and (slot >= given or slot in plan.reused):
                parts.setdefault(slot, []).append((buffer.offset, buffer.nbytes))
        # An input that was written in place has the part that it had.
        for arena in plan.arenas:
            if len(arena.parts) == 1 and memory[arena.slot][0].parts is not None:
                parts.pop(arena.slot, None)
        for slot, found in parts.items():
            alone = len(found) == 1 and found[0][0] == 0
            memory[slot][0].parts = None if alone else tuple(sorted(found))


def _encode(encoder: Any, copies: list[Copy]) -> None:
    for copy in copies:
        (source, start), (target, offset) = copy.source, copy.target
        encoder.copy_buffer_to_buffer(
            source.handle, start, target.handle, offset, copy.nbytes
        )
