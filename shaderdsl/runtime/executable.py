"""A program on a wgpu device: one encoder, one pass and one submission a call."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..codegen.program import Kernel, Program
from ..errors import CompilerError
from . import profiling
from .adapters import library
from .arenas import Copy, Memory, gather
from .buffers import (
    Allocation,
    Buffer,
    Bundle,
    bound_bytes,
    consume_all,
    new_serial,
)
from .device import Executable
from .launch import Move, Step, bind_group, encode, handles
from .pipelines import finished
from .plan import MemoryPlan, Place, check_limits, pack_params, plan_memory
from .replay import KEEP, Encoded, Outcome, Parts, Replay, Replays

if TYPE_CHECKING:
    from .wgpu_device import WgpuDevice

wgpu = library.api

#: Bind groups that a program remembers for each kernel.
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
        self._work = work
        device.pipelines.begin([kernel for _, kernel in work])
        self._lock = threading.Lock()
        self._given = sorted(program.donated)
        self._out_sizes = [stage.nbytes for stage in program.outputs]
        self._twin_lists: dict[int, list[int | None]] = {}
        self._replays = Replays()
        self._owner = new_serial()
        self._groups: list[OrderedDict[Key, Any]] = [OrderedDict() for _ in work]

    @cached_property
    def _steps(self) -> list[_Step]:
        """The dispatches; waits for the pipelines."""
        kernels = [kernel for _, kernel in self._work]
        pipelines = finished(self.device.pipelines.begin(kernels))
        return [
            _Step(kernel, *pipeline, self._block.ranges[i], i)
            for (i, kernel), pipeline in zip(self._work, pipelines)
        ]

    def wait(self) -> None:
        """Return when everything is compiled.

        Raises:
            CompilerError: the driver refused a text; our own fault.
        """
        assert self._steps is not None

    def __call__(
        self, inputs: Sequence[Buffer], scalars: Mapping[str, float] | None = None
    ) -> list[Buffer]:
        found = self.launch(inputs, scalars)
        return found.buffers() if isinstance(found, Outcome) else found

    def launch(
        self, inputs: Sequence[Buffer], scalars: Mapping[str, float] | None = None
    ) -> list[Buffer] | Outcome:
        device = self.device
        device.check()
        words = self._block.fill(scalars or {})
        replay, memory = self._replays.find(inputs)
        try:
            if replay is None or memory is None:
                self._check(inputs)
                return self._first(inputs, words)
            bundle = device.pool.borrow(self._owner, replay.temps[1])
            try:
                return self._again(replay, memory, inputs, bundle, words)
            finally:
                device.pool.give_back(self._owner, bundle)
        except wgpu.GPUError as error:
            raise device.translate(error, "a launch") from error

    def again(
        self,
        replay: Replay,
        memory: list[Allocation],
        scalars: Mapping[str, float],
        begun: Callable[[], None],
    ) -> Outcome | None:
        device = self.device
        device.check()
        words = self._block.fill(scalars)
        bundle = device.pool.borrow(self._owner, replay.temps[1])
        try:
            fresh = device.pool.acquire_all(replay.outputs[1])
            encoded = replay.encoded.get(self._acquired(bundle, fresh))
            if encoded is None:
                return None
            return self._outcome(replay, encoded, memory + fresh, words, begun)
        except wgpu.GPUError as error:
            raise device.translate(error, "a launch") from error
        finally:
            device.pool.give_back(self._owner, bundle)

    def _check(self, inputs: Sequence[Buffer]) -> None:
        """Refuse inputs of another number or size, consumed or elsewhere."""
        stages = self.program.inputs
        if len(inputs) != len(stages):
            raise CompilerError(
                f"{len(inputs)} inputs were given to a program of {len(stages)}"
            )
        for buffer, stage in zip(inputs, stages):
            buffer.require(self.device)
            if buffer.nbytes != stage.nbytes:
                raise CompilerError(
                    f"a buffer of {buffer.nbytes} B was given for {stage.name} of "
                    f"{stage.nbytes} B"
                )

    def _first(self, inputs: Sequence[Buffer], words: bytes) -> list[Buffer]:
        """A call whose inputs lie as they never did before."""
        pool = self.device.pool
        seen = Counter(buffer.allocation.serial for buffer in inputs)
        donated = self._donated(inputs, seen)
        plan = self._plan(donated)
        temps, outputs = _of_kind(plan, "temp"), _of_kind(plan, "output")
        # Temporaries are asked for first: they come back at once, so they get the same
        # memory in each call, while outputs change with what the caller keeps.
        memory: list[Any] = [(b.allocation, b.offset) for b in inputs]
        memory += [None] * (len(plan.slots) - len(inputs))
        copies: list[Copy] = []
        for arena in plan.arenas:
            memory[arena.slot], more = gather(
                arena, inputs, self.program.donated, seen, pool
            )
            copies += more
        bundle = pool.borrow(self._owner, temps[1])
        try:
            for slot, allocation in zip(temps[0], bundle.allocations):
                memory[slot] = (allocation, 0)
            fresh = pool.acquire_all(outputs[1])
            for slot, allocation in zip(outputs[0], fresh):
                memory[slot] = (allocation, 0)
            held = [b.allocation for b in inputs]
            shared, divided = [a.shared for a in held], [a.parts for a in held]
            key = tuple([b.key for b in inputs])
            encoded = self._encode(self._bind(plan, memory))
            results = self._results(plan, inputs, memory, donated)
            # Noted while the temporaries are held: they count.
            self._note(self._run(encoded, words, copies, self._taker(inputs)))
        finally:
            pool.give_back(self._owner, bundle)
        parts = self._note_parts(plan, results, memory, len(inputs), donated)
        if not copies:
            last = {a.serial: k for k, a in enumerate(held)}
            ours = {b.allocation.serial for b in results}
            ours |= {memory[slot][0].serial for slot, _ in parts}
            kept = sorted(last[s] for s in ours & set(last))
            every = [*(held[k] for k in kept), *fresh]
            number = {a.serial: k for k, a in enumerate(every)}
            alone = len({b.key for b in results}) == len(results) and not any(
                slot < len(inputs) and slot not in donated for slot, _ in plan.outputs
            )
            # How memory is divided when such a call begins is known: for most of it
            # there is nothing to tell afterwards.
            before = [*(divided[k] for k in kept), *(None for _ in fresh)]
            told = [(number[memory[slot][0].serial], p) for slot, p in parts]
            told = [(n, p) for n, p in told if p != before[n]]
            replay = Replay(
                plan,
                kept,
                donated,
                shared,
                divided,
                [(a.slot, a.parts[0][0], a.parts[0][1]) for a in plan.arenas],
                temps,
                outputs,
                [(number[b.allocation.serial], b.offset, b.nbytes) for b in results]
                if alone
                else None,
                told,
            )
            replay.encoded[self._acquired(bundle, fresh)] = encoded
            with self._lock:
                self._replays.add(key, replay)
        return results

    def _again(
        self,
        replay: Replay,
        held: list[Allocation],
        inputs: Sequence[Buffer],
        bundle: Bundle,
        words: bytes,
    ) -> list[Buffer] | Outcome:
        """A call whose inputs lie as an earlier call's did, in memory ``held``."""
        fresh = self.device.pool.acquire_all(replay.outputs[1])
        acquired = self._acquired(bundle, fresh)
        encoded = replay.encoded.get(acquired)
        if encoded is None:
            memory = replay.memory(inputs, bundle, fresh)
            encoded = self._encode(self._bind(replay.plan, memory))
            with self._lock:
                replay.encoded[acquired] = encoded
                if len(replay.encoded) > KEEP:
                    replay.encoded.popitem(last=False)
        held = [held[k] for k in replay.kept]
        held += fresh
        begun = self._taker(inputs)
        if replay.results is not None:
            return self._outcome(replay, encoded, held, words, begun)
        memory = replay.memory(inputs, bundle, fresh)
        results = self._results(replay.plan, inputs, memory, replay.donated)
        self._note(self._run(encoded, words, [], begun))
        for number, parts in replay.parts:
            held[number].parts = parts
        return results

    def _outcome(
        self,
        replay: Replay,
        encoded: Encoded,
        memory: list[Allocation],
        words: bytes,
        begun: Callable[[], None],
    ) -> Outcome:
        self._note(self._run(encoded, words, [], begun))
        for number, parts in replay.parts:
            memory[number].parts = parts
        return Outcome(self.device, memory, replay, encoded)

    def _taker(self, inputs: Sequence[Buffer]) -> Callable[[], None]:
        """What takes the donated inputs: called when their memory is about to be
        overwritten, so that nobody has it whatever happens from then on.
        """
        return partial(consume_all, inputs, self._given)

    @staticmethod
    def _acquired(bundle: Bundle, fresh: Sequence[Allocation]) -> tuple[int, ...]:
        return (bundle.serial, *[a.serial for a in fresh])

    def _note(self, seconds: list[float] | None) -> None:
        if profiling.active():
            profiling.note_dispatches(
                [step.kernel for step in self._steps],
                self.device.pool.live_bytes,
                seconds,
            )

    def forget(self) -> None:
        """Drop cached bind groups, which keep their buffers from being freed."""
        with self._lock:
            self._replays.clear()
            for cache in self._groups:
                cache.clear()

    def _donated(self, inputs: Sequence[Buffer], seen: Counter[int]) -> frozenset[int]:
        """Donated inputs whose memory nobody else sees in this call."""
        donated = self.program.donated
        refused = [
            i
            for i in self._loose
            if seen[inputs[i].allocation.serial] != 1
            or inputs[i].allocation.shared
            or inputs[i].allocation.parts is not None
        ]
        return donated.difference(refused) if refused else donated

    def _plan(self, donated: frozenset[int]) -> MemoryPlan:
        plan = self._plans.get(donated)
        if plan is None:
            plan = self._plans[donated] = plan_memory(self.program, donated)
        return plan

    def _bind(self, plan: MemoryPlan, memory: list[Memory]) -> list[Any]:
        """The bind group of each step."""
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
        return groups

    def _encode(self, groups: list[Any]) -> Encoded:
        """The steps of the pass as the driver's functions take them."""
        steps: list[Step] = []
        current = None
        for step, group in zip(self._steps, groups):
            new = step.pipeline is not current
            current = step.pipeline
            steps.append((current if new else None, group, *step.kernel.workgroups))
        return Encoded(handles(steps), groups)

    def _group(self, step: _Step, memory: list[Memory]) -> Any:
        entries = []
        for binding, (allocation, offset) in zip(step.kernel.bindings, memory):
            # Only next to the device's largest buffer is there less room.
            room = allocation.capacity - offset
            size = min(bound_bytes(binding.tensor.nbytes), room)
            entries.append((allocation.handle, offset, size))
        if step.params is not None:
            entries.append((self._uniform, *step.params))
        return bind_group(self.device.gpu, step.group_layout, entries)

    def _run(
        self,
        encoded: Encoded,
        words: bytes,
        copies: list[Copy],
        begun: Callable[[], None],
    ) -> list[float] | None:
        """Launch; returns each step's device time in seconds if that was asked for.

        Args:
            begun: called when nothing can be taken back any more.
        """
        if not self._steps:
            begun()
            return None
        groups = encoded.groups
        if profiling.wants_timestamps() and self.device.target.features.timestamps:
            every = list(zip(self._steps, groups))
            repeats = profiling.wanted_repeats()
            if repeats:
                times = 1 if self.program.donated else repeats
                (whole,) = self._run_timed([every * times], words, copies, begun)
                return [whole / times]
            seconds: list[float] = []
            for start in range(0, len(groups), MAX_QUERIES // 2):
                passes = [[one] for one in every[start : start + MAX_QUERIES // 2]]
                seconds += self._run_timed(passes, words, copies, begun)
                copies = []
            return seconds
        commands = encode(self.device.gpu, encoded.steps, _moves(copies))
        self._submit(commands, words, begun)
        return None

    def _submit(self, commands: Any, words: bytes, begun: Callable[[], None]) -> None:
        def write() -> None:
            begun()
            # The last call's words are still there if nothing changed.
            if words != self._written:
                self.device.queue.write_buffer(self._uniform, 0, words)
                self._written = words

        self.device.submit([commands], before=write)

    def _run_timed(
        self,
        passes: list[list[tuple[_Step, Any]]],
        words: bytes,
        copies: list[Copy],
        begun: Callable[[], None],
    ) -> list[float]:
        """Passes of steps with their groups, each between two timestamps; waits for the
        end and gives their times in seconds.
        """
        gpu, count = self.device.gpu, 2 * len(passes)
        queries = gpu.create_query_set(type="timestamp", count=count)
        ticks = gpu.create_buffer(
            size=8 * count,
            usage=wgpu.BufferUsage.QUERY_RESOLVE | wgpu.BufferUsage.COPY_SRC,
        )
        encoder = gpu.create_command_encoder()
        for move in _moves(copies):
            encoder.copy_buffer_to_buffer(*move)
        for i, steps in enumerate(passes):
            compute = encoder.begin_compute_pass(
                timestamp_writes={
                    "query_set": queries,
                    "beginning_of_pass_write_index": 2 * i,
                    "end_of_pass_write_index": 2 * i + 1,
                }
            )
            for step, group in steps:
                compute.set_pipeline(step.pipeline)
                compute.set_bind_group(0, group)
                compute.dispatch_workgroups(*step.kernel.workgroups)
            compute.end()
        encoder.resolve_query_set(queries, 0, count, ticks, 0)
        self._submit(encoder.finish(), words, begun)
        raw = np.empty(count, np.uint64)
        self.device.read(ticks, 0, raw.view(np.uint8))
        spent = (raw[1::2] - raw[::2]).astype(np.float64)
        period = library.period(self.device.queue)
        return [float(s) for s in spent * period * 1e-9]

    def _results(
        self,
        plan: MemoryPlan,
        inputs: Sequence[Buffer],
        memory: list[Memory],
        donated: frozenset[int],
    ) -> list[Buffer]:
        """A buffer for each output; memory that appears twice is marked as shared."""
        device, given = self.device, len(inputs)
        results: list[Buffer] = []
        for (slot, offset), nbytes, first in zip(
            plan.outputs, self._out_sizes, self._twins(plan)
        ):
            if first is not None:
                results.append(results[first].alias())
            elif slot < given and slot not in donated:
                results.append(inputs[slot].alias())
            else:
                allocation, start = memory[slot]
                results.append(Buffer(device, allocation, nbytes, start + offset))
        return results

    def _twins(self, plan: MemoryPlan) -> list[int | None]:
        """For each output the earlier one in the same place, if any."""
        twins = self._twin_lists.get(id(plan))
        if twins is None:
            seen: dict[Place, int] = {}
            twins = [
                i if (i := seen.setdefault(place, k)) != k else None
                for k, place in enumerate(plan.outputs)
            ]
            self._twin_lists[id(plan)] = twins
        return twins

    def _note_parts(
        self,
        plan: MemoryPlan,
        results: Sequence[Buffer],
        memory: list[Memory],
        given: int,
        donated: frozenset[int],
    ) -> list[tuple[int, Parts]]:
        """Tell allocations which of their bytes belong to whom; returns what it told,
        by slot.
        """
        parts: dict[int, list[tuple[int, int]]] = {}
        for (slot, _), buffer, first in zip(plan.outputs, results, self._twins(plan)):
            if first is not None or not buffer.nbytes:
                continue
            if slot >= given or slot in plan.reused:
                parts.setdefault(slot, []).append((buffer.offset, buffer.nbytes))
        # An input that was written in place has the part that it had.
        for arena in plan.arenas:
            if len(arena.parts) == 1 and memory[arena.slot][0].parts is not None:
                parts.pop(arena.slot, None)
        told: list[tuple[int, Parts]] = []
        for slot, found in parts.items():
            alone = len(found) == 1 and found[0][0] == 0
            told.append((slot, None if alone else tuple(sorted(found))))
            memory[slot][0].parts = told[-1][1]
        return told


def _moves(copies: list[Copy]) -> list[Move]:
    return [
        (source.handle, start, target.handle, offset, copy.nbytes)
        for copy in copies
        for (source, start), (target, offset) in [(copy.source, copy.target)]
    ]


def _of_kind(plan: MemoryPlan, kind: str) -> tuple[list[int], list[int]]:
    """Slots of a kind, and their sizes."""
    slots = [i for i, slot in enumerate(plan.slots) if slot.kind == kind]
    return slots, [plan.slots[i].nbytes for i in slots]
