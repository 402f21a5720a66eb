"""The device behind WebGPU: transfers, submission, loss.

Which library it is, and what differs between libraries, is in `library`.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import (
    CompilerError,
    DeviceError,
    DeviceLostError,
    NoAdapterError,
    ShaderError,
)
from . import profiling, tuned
from .adapters import LIMIT_NAMES, found, home, library, opened, refuse_fork
from .buffers import Buffer, Pool, physical_memory
from .device import STORAGE, VISIBLE, Device, DeviceInfo, say_once
from .library import Request
from .pipelines import Pipelines, wants_unchecked
from .reading import Reading

if TYPE_CHECKING:
    from ..codegen.program import Kernel, Program
    from .executable import WgpuExecutable

#: Bytes a transfer moves at a time, so that staging memory stays small beside data.
CHUNK_BYTES = 64 << 20

#: Submissions in flight beyond which a launch waits for the oldest, so that a host
#: that outruns the device does not pile up command buffers.
MAX_IN_FLIGHT = 64

wgpu = library.api

_USAGE = (
    wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST
)


class WgpuDevice(Device):
    """A wgpu device with its memory pool and pipelines; see `Device`."""

    kind = "wgpu"

    def __init__(self, adapter: Any, info: DeviceInfo, limits: str):
        self.name, self.info, self.limits = info.name, info, limits
        target = info.target if limits == "adapter" else info.target.portable()
        #: What measurements are good for, beside the adapter's name.
        self.driver = f"{info.backend} {info.driver}, {library.version}"
        self.target = replace(target, tuned=tuned.load(info.name, self.driver))
        if self.target.tuned.note not in ("", tuned.OFF):
            say_once(f"shaderdsl: {self.target.tuned.note}; run `shaderdsl tune` again")
        #: Whether the library checks no index, so that texts must where it matters.
        self.unchecked = library.at_once and wants_unchecked(self.target)
        wanted = self.target.features
        features = [
            name
            for name, have in [
                ("shader-int64", wanted.wide_words),
                ("shader-f16", wanted.f16),
                (library.subgroups, wanted.subgroups),
                ("timestamp-query", wanted.timestamps),
            ]
            if have
        ]
        features += [name for name in library.optional if name in adapter.features]
        required = {v: getattr(self.target.limits, k) for k, v in LIMIT_NAMES.items()}
        if limits == "adapter":
            for axis in "xyz":
                name = f"max-compute-workgroup-size-{axis}"
                required[name] = adapter.limits[name]
        request = Request(features, required, self.unchecked)
        #: Opens one more device of this kind.
        self.another = partial(library.open, adapter, request)
        try:
            self.gpu = self.another()
        except (RuntimeError, wgpu.GPUError) as error:
            raise DeviceError(f"{info.name} gave no device: {error}") from error
        self.queue = self.gpu.queue
        #: Held while a call writes its parameters and submits, which must not mix with
        #: another thread's.
        self.submit_lock = threading.RLock()
        #: Tells `destroy` that no thread waits for a mapped buffer any more.
        self._quiet = threading.Condition(self.submit_lock)
        self._readers = 0
        #: Set when some device was lost; the next check finds out which.
        self.suspect = False
        self.alive = True
        software = self.target.family == "software"
        # Software drivers take RAM on trust and let the kernel kill the process.
        limit = int(0.8 * physical_memory()) if software else None
        self.pool = Pool(
            self._create,
            limit=limit,
            max_bytes=self.target.limits.max_buffer_bytes,
            on_trim=self._forget_bind_groups,
        )
        self.pipelines = Pipelines(self)
        self._executables: weakref.WeakSet[WgpuExecutable] = weakref.WeakSet()
        self._in_flight: deque[int] = deque()
        #: Memory that reads go through, kept for the next one.
        self.staging: list[Any] = []
        opened.add(self)

    @classmethod
    def open(cls, spec: str, limits: str) -> WgpuDevice:
        """The device of an adapter; one that is open already is used again."""
        for device in list(opened):
            if device.info.spec == spec and device.limits == limits and device.alive:
                return device
        for adapter, info in found():
            if info.spec == spec:
                return cls(adapter, info, limits)
        raise NoAdapterError(f"no adapter {spec!r}")

    def build(self, program: Program, *, wait: bool = True) -> WgpuExecutable:
        from .executable import WgpuExecutable

        self.check()
        executable = WgpuExecutable(self, program)
        if wait:
            executable.wait()
        self._executables.add(executable)
        return executable

    def expect(self, kernels: Sequence[Kernel]) -> None:
        self.check()
        self.pipelines.begin([k for k in kernels if 0 not in k.workgroups])

    def check(self) -> None:
        """Refuse a device that is gone, or a process that was forked.

        The driver would abort the process or hang.
        """
        if os.getpid() != home:
            refuse_fork()
        if self.suspect and self.alive:
            self.suspect = False
            self.alive = not library.gone(self.gpu)
        super().check()

    def destroy(self) -> None:
        if not self.alive:
            return
        self.synchronize()
        self.pipelines.close()
        with self._quiet:
            self.alive = False
            # Unmapped reads would wait for ever, and the driver would abort.
            self._quiet.wait_for(lambda: self._readers == 0)
            self.staging.clear()
            self.gpu.destroy()
        self._forget_bind_groups()

    def synchronize(self) -> None:
        self.check()
        self.gpu._poll_wait()

    # Transfers

    def upload(self, array: np.ndarray[Any, Any], dtype: str) -> Buffer:
        self.check()
        data = np.ascontiguousarray(array, STORAGE[dtype]).reshape(-1)
        self.check_size(data.nbytes)
        buffer = Buffer(self, self.pool.acquire(data.nbytes), data.nbytes)
        if data.nbytes:
            flat = data.view(np.uint8)
            if flat.size % 4:  # Transfers move whole words.
                flat = np.concatenate([flat, np.zeros(-flat.size % 4, np.uint8)])
            for start in range(0, flat.size, CHUNK_BYTES):
                part = flat[start : start + CHUNK_BYTES]
                try:
                    with self.submit_lock:
                        self.check()
                        self.queue.write_buffer(buffer.handle, start, part)
                except wgpu.GPUError as error:
                    raise self.translate(error, "an upload") from error
                if flat.size > CHUNK_BYTES:
                    # Staging memory is freed when a submission that uses it ends.
                    self.submit([])
                    self.synchronize()
        if profiling.active():
            profiling.note_upload(data.nbytes, self.pool.live_bytes)
        return buffer

    def fetch(
        self, buffer: Buffer, shape: Sequence[int], dtype: str
    ) -> Callable[[], np.ndarray[Any, Any]]:
        buffer.require(self)
        self.check()
        out = np.empty(tuple(shape), STORAGE[dtype])
        if out.nbytes > buffer.nbytes:
            raise CompilerError(
                f"{out.nbytes} B were to be read from a buffer of {buffer.nbytes} B"
            )
        flat = out.reshape(-1).view(np.uint8)
        reading = None
        if 0 < flat.size <= CHUNK_BYTES:
            with self._reader():
                reading = Reading(self, buffer.handle, buffer.offset, flat.size)
        else:
            for start in range(0, flat.size, CHUNK_BYTES):
                part = flat[start : start + CHUNK_BYTES]
                self.read(buffer.handle, buffer.offset + start, part)

        def wait() -> np.ndarray[Any, Any]:
            if reading is not None:
                with self._reader():
                    reading.into(flat)
            if profiling.active():
                profiling.note_download(out.nbytes)
            if VISIBLE[dtype] != STORAGE[dtype]:
                return out.astype(VISIBLE[dtype])
            return out

        return wait

    def read(self, handle: Any, start: int, out: np.ndarray[Any, Any]) -> None:
        """Fill ``out`` (bytes) from a wgpu buffer at ``start``; waits for the data."""
        with self._reader():
            Reading(self, handle, start, out.size).into(out)

    @contextmanager
    def _reader(self) -> Iterator[None]:
        """The device is not destroyed meanwhile."""
        with self._quiet:
            self.check()
            self._readers += 1
        try:
            yield
        except (wgpu.GPUError, RuntimeError) as error:
            raise self.translate(error, "reading an array back") from error
        finally:
            with self._quiet:
                self._readers -= 1
                self._quiet.notify_all()

    # Submission

    def submit(
        self, commands: list[Any], before: Callable[[], None] | None = None
    ) -> int:
        """Submit command buffers; returns the number to wait for.

        Args:
            before: called when no other thread can submit and nothing is waited for
                any more, to write what the commands need; the queue orders such writes
                after all earlier submissions.
        """
        with self.submit_lock:
            self.check()
            if len(self._in_flight) >= MAX_IN_FLIGHT:
                # Wait for half of them, then run ahead again. Who is interrupted here,
                # where loops spend their time, has not begun this one.
                while len(self._in_flight) > MAX_IN_FLIGHT // 2:
                    oldest = self._in_flight.popleft()
                # Under the lock, so that the device cannot be destroyed meanwhile.
                library.wait(self.gpu, oldest)
            if before is not None:
                before()
            last = library.submit(self.queue, commands)
            self._in_flight.append(last)
            return last

    def translate(self, error: Exception, doing: str, nbytes: int = 0) -> ShaderError:
        """The typed error for one of wgpu's, raised while ``doing`` something."""
        if isinstance(error, ShaderError):
            return error
        text = str(error)
        if "lost" in text.lower():
            self.alive = False
            return DeviceLostError(
                f"the device {self.name} was lost while {doing}",
                cure="choose a device again with use_device() and upload the data "
                "again",
            )
        if isinstance(error, wgpu.GPUOutOfMemoryError):
            return self.pool.exhausted(nbytes)
        return CompilerError(
            f"the driver refused {doing}; this is a fault of shaderdsl:\n{text}"
        )

    # Memory

    def _create(self, nbytes: int) -> Any:
        try:
            return self.gpu.create_buffer(size=nbytes, usage=_USAGE)
        except wgpu.GPUOutOfMemoryError as error:
            raise MemoryError(str(error)) from error
        except wgpu.GPUError as error:
            raise self.translate(error, f"a buffer of {nbytes:,} B") from error

    def _forget_bind_groups(self) -> None:
        # They keep buffers alive inside wgpu although nobody else does.
        for executable in list(self._executables):
            executable.forget()
