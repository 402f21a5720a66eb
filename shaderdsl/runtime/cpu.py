"""The device ``cpu``: the same programs in NumPy, with no driver and no wgpu."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..codegen.program import Program
from ..codegen.target import Limits, Target
from ..errors import CompilerError, OutOfMemoryError
from ..ir.stage import topo_stages
from . import profiling
from .buffers import Buffer, Pool, physical_memory
from .device import STORAGE, VISIBLE, Device, Executable

if TYPE_CHECKING:
    from ..ir.stage import Stage

#: Kernels are planned as for a portable GPU, so that they look the same; NumPy itself
#: has no limits on sizes.
CPU_TARGET = Target(
    name="cpu",
    family="cpu",
    limits=Limits(
        max_binding_bytes=1 << 46, max_buffer_bytes=1 << 46, storage_alignment=4
    ),
)


class CpuDevice(Device):
    """NumPy in f32; see `Device`."""

    name, kind, target = "cpu", "cpu", CPU_TARGET
    _only: CpuDevice | None = None

    def __init__(self) -> None:
        self.alive = True
        # NumPy's allocator reuses memory itself; the pool only keeps the account.
        self.pool = Pool(
            lambda nbytes: None, reuse=False, limit=int(0.8 * physical_memory())
        )
        self._met: set[str] = set()
        self._lock = threading.Lock()

    @classmethod
    def instance(cls) -> CpuDevice:
        """The one device of the process, or a new one after that was destroyed."""
        if cls._only is None or not cls._only.alive:
            cls._only = cls()
        return cls._only

    def build(self, program: Program, *, wait: bool = True) -> CpuExecutable:
        self.check()
        texts = {kernel.code for kernel in program.kernels}
        with self._lock:
            new = texts - self._met
            self._met |= new
        if new:
            profiling.note_compiled(len(new))
        return CpuExecutable(self, program)

    def hold(self, array: np.ndarray[Any, Any], dtype: str) -> Buffer:
        """A buffer that shows ``array`` itself, which nobody may change afterwards."""
        nbytes = array.size * STORAGE[dtype].itemsize
        allocation = self.pool.acquire(nbytes)
        allocation.handle = array
        return Buffer(self, allocation, nbytes)

    def upload(self, array: np.ndarray[Any, Any], dtype: str) -> Buffer:
        self.check()
        buffer = self.hold(np.array(array, VISIBLE[dtype], order="C"), dtype)
        if profiling.active():
            profiling.note_upload(buffer.nbytes, self.pool.live_bytes)
        return buffer

    def fetch(
        self, buffer: Buffer, shape: Sequence[int], dtype: str
    ) -> Callable[[], np.ndarray[Any, Any]]:
        self.check()
        buffer.require(self)
        if profiling.active():
            profiling.note_download(buffer.nbytes)
        array = np.asarray(buffer.handle, VISIBLE[dtype]).reshape(tuple(shape)).copy()
        return lambda: array

    def synchronize(self) -> None:
        self.check()

    def destroy(self) -> None:
        self.alive = False


def _widened(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """As a load sees it: f16 is a storage type, computing is done in f32."""
    return array.astype(np.float32) if array.dtype == np.float16 else array


def _missing(stage: Stage, values: Mapping[Stage, Any]) -> list[Stage]:
    """The stage, after what it loads and is not there."""
    if all(n.data in values for n in stage.loads):
        return [stage]
    order = topo_stages([stage], stop=[s for s in values if s is not stage])
    return [s for s in order if s not in values or s is stage]


class CpuExecutable(Executable):
    """Evaluates the members of each kernel in order; see `Executable`."""

    def __init__(self, device: CpuDevice, program: Program):
        self.device, self.program = device, program
        given = set(program.inputs)
        written: set[Any] = {
            kernel.whole(stage)[0]
            for kernel in program.kernels
            for stage in kernel.writes
        }
        for stage in program.outputs:
            if stage.size and stage not in given and stage not in written:
                raise CompilerError(f"no kernel writes the output {stage.name}")
        # Values are dropped after the last kernel that binds them, as on a GPU.
        last: dict[Any, int] = {}
        for number, kernel in enumerate(program.kernels):
            for binding in kernel.bindings:
                last[kernel.whole(binding.tensor)[0]] = number
            # Of an arena the kernel binds the whole, and here there are only parts.
            for stage in kernel.members:
                last.update(
                    (kernel.whole(load.data)[0], number) for load in stage.loads
                )
            for stage in kernel.writes:
                last.setdefault(kernel.whole(stage)[0], number)
        kept = given | set(program.outputs)
        self._drop: list[list[Stage]] = [[] for _ in program.kernels]
        for tensor, number in last.items():
            if tensor in written and tensor not in kept:
                self._drop[number].append(tensor)

    def __call__(
        self, inputs: Sequence[Buffer], scalars: Mapping[str, float] | None = None
    ) -> list[Buffer]:
        device, program = self.device, self.program
        device.check()
        if len(inputs) != len(program.inputs):
            raise CompilerError(
                f"{len(inputs)} inputs were given to a program of {len(program.inputs)}"
            )
        values: dict[Stage, np.ndarray[Any, Any]] = {}
        held: dict[Stage, Buffer] = {}
        for buffer, stage in zip(inputs, program.inputs):
            buffer.require(device)
            values[stage] = _widened(buffer.handle.reshape(stage.shape))
            held[stage] = buffer
        try:
            self._run(values, held, scalars or {})
            results = self._results(values, held)
        except OutOfMemoryError:
            raise
        except MemoryError as error:  # NumPy's own, of an intermediate.
            live = device.pool.live_bytes
            raise OutOfMemoryError(
                f"out of memory: {error}; arrays take {live:,} B",
                cure="drop arrays that are no longer needed or use smaller batches",
            ) from error
        for position in program.donated:
            inputs[position].consume()
        return results

    def _run(
        self,
        values: dict[Stage, np.ndarray[Any, Any]],
        held: dict[Stage, Buffer],
        scalars: Mapping[str, float],
    ) -> None:
        from ..ir.interpret import evaluate_stage

        for number, kernel in enumerate(self.program.kernels):
            began = time.perf_counter()
            computed: list[Stage] = []
            for part, (whole, first) in kernel.windows.items():
                if whole in values:
                    flat = values[whole].reshape(-1)[first : first + part.size]
                    values[part] = flat.reshape(part.shape)
            with np.errstate(all="ignore"):
                for stage in kernel.members:
                    # A member that was taken apart to fit the bindings is evaluated
                    # whole here, with what an earlier kernel had kept to itself.
                    for s in _missing(stage, values):
                        values[s] = evaluate_stage(
                            s, values, dtype="float32", scalars=scalars
                        )
                        computed.append(s)
            for stage in kernel.writes:
                # A store narrows, e.g. f16.
                stored = np.ascontiguousarray(values[stage], VISIBLE[stage.dtype])
                if stage in kernel.windows:
                    self._write_part(stored, *kernel.windows[stage], values, held)
                    continue
                held[stage] = self.device.hold(stored.reshape(stage.shape), stage.dtype)
                values[stage] = _widened(held[stage].handle)
            for stage in (*computed, *kernel.windows):
                if stage not in held:
                    values.pop(stage, None)
            if profiling.active():
                spent = time.perf_counter() - began
                live = self.device.pool.live_bytes
                profiling.note_dispatches([kernel], live, [spent])
            for stage in self._drop[number]:
                del values[stage], held[stage]

    def _write_part(
        self,
        stored: np.ndarray[Any, Any],
        whole: Any,
        first: int,
        values: dict[Stage, np.ndarray[Any, Any]],
        held: dict[Stage, Buffer],
    ) -> None:
        """Store a part of an array, which begins to exist with the first one."""
        if whole not in held:
            held[whole] = self.device.hold(
                np.empty(whole.shape, stored.dtype), whole.dtype
            )
        array = held[whole].handle
        array.reshape(-1)[first : first + stored.size] = stored.reshape(-1)
        values[whole] = _widened(array)

    def _results(
        self,
        values: dict[Stage, np.ndarray[Any, Any]],
        held: dict[Stage, Buffer],
    ) -> list[Buffer]:
        results: list[Buffer] = []
        for stage in self.program.outputs:
            if stage not in values:  # Empty, so that no kernel was needed.
                empty = np.zeros(stage.shape, VISIBLE[stage.dtype])
                held[stage] = self.device.hold(empty, stage.dtype)
                values[stage] = empty
            results.append(held[stage].alias())
        return results
