"""Compute pipelines, made once for each WGSL text and way of binding."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from ..errors import CompilerError, DeviceLostError
from . import profiling
from .adapters import library
from .ahead import Ahead
from .indices import checked
from .launch import UNCHECKED, unchecked_module
from .layouts import layouts

if TYPE_CHECKING:
    from ..codegen.program import Kernel
    from ..codegen.target import Target
    from .wgpu_device import WgpuDevice

wgpu = library.api

#: Kernels that are compiled at a time at most.
MOST_THREADS = 16

#: Seconds after which somebody who waits for kernels is told.
PATIENCE = 1.0

#: What tells pipelines apart: text, access of each binding, whether parameters follow.
Key = tuple[str, tuple[str, ...], bool, bool]


def wants_unchecked(target: Target) -> bool:
    """Whether kernels should go without checks where their indices are in range.

    Software drivers check at no cost.
    """
    return os.environ.get("SHADERDSL_CHECKED") != "1" and target.family == "gpu"


def finished(futures: Sequence[Future[tuple[Any, Any]]]) -> list[tuple[Any, Any]]:
    """What was begun; says on a terminal how far it is if that takes long.

    Raises:
        CompilerError: the driver refused a text; our own fault.
    """
    patience, said = PATIENCE, False
    try:
        while wait(futures, patience, FIRST_EXCEPTION).not_done:
            if any(f.done() and f.exception() for f in futures):
                break
            if sys.stderr.isatty():
                done = sum(f.done() for f in futures)
                _say(f"shaderdsl: compiling kernels, {done} of {len(futures)}")
                patience, said = 0.2, True
    except BaseException:  # Interrupted (Ctrl-C): what has not begun need not begin.
        for future in futures:
            future.cancel()
        raise
    finally:
        if said:
            _say("")
    return [future.result() for future in futures]


def _say(text: str) -> None:
    """Write over a terminal's line."""
    print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


class Pipelines:
    """The pipelines of one device.

    Attributes:
        compiled: pipelines that were created so far.
    """

    def __init__(self, device: WgpuDevice):
        # The device owns this object; a reference back would make a cycle that keeps
        # the driver's objects until a full collection.
        self._gpu, self._name = device.gpu, device.name
        self._made: dict[Key, Future[tuple[Any, Any]]] = {}
        self._layouts: dict[tuple[tuple[str, ...], bool], tuple[Any, Any]] = {}
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._closed = False
        self._unfinished = 0
        self.compiled = 0
        #: Whether kernels whose indices are in range go without the driver's checks.
        self.unchecked = UNCHECKED and wants_unchecked(device.target)
        self._own_checks = device.unchecked
        llvmpipe = "llvmpipe" in device.name and library.name == "wgpu"
        self._ahead = Ahead(device.another, device.driver) if llvmpipe else None

    def begin(self, kernels: Sequence[Kernel]) -> list[Future[tuple[Any, Any]]]:
        """``(pipeline, bind group layout)`` of each kernel, sooner or later; begins to
        make what is missing, on other threads.
        """
        futures = []
        with self._lock:
            if self._closed:
                raise DeviceLostError(f"the device {self._name} was given up")
            for kernel in kernels:
                key = self._key(kernel)
                future = self._made.get(key)
                if future is None or future.cancelled():
                    future = self._made[key] = Future()
                    if self._threads is None:
                        workers = min(MOST_THREADS, os.cpu_count() or 1)
                        self._threads = ThreadPoolExecutor(workers, "shaderdsl-compile")
                    self._unfinished += 1
                    asked = profiling.open_profiles()
                    self._threads.submit(self._work, kernel, key, future, asked)
                futures.append(future)
        return futures

    def close(self) -> None:
        """Make no more; returns when nothing is being made."""
        with self._lock:
            self._closed = True
            for future in self._made.values():
                future.cancel()
        if self._threads is not None:
            self._threads.shutdown(wait=True)

    @staticmethod
    def _key(kernel: Kernel) -> Key:
        access = tuple(binding.access for binding in kernel.bindings)
        return kernel.code, access, bool(kernel.params), kernel.in_range

    def _work(
        self,
        kernel: Kernel,
        key: Key,
        future: Future[tuple[Any, Any]],
        asked: tuple[profiling.Profile, ...],
    ) -> None:
        """What a thread does for a kernel that these profiles saw asked for."""
        try:
            if future.set_running_or_notify_cancel():
                self._make(kernel, key, future, asked)
        except BaseException as error:  # Nobody may wait for what will not be made.
            self._give_up(key, future, error)
        finally:
            with self._lock:
                self._unfinished -= 1

    def _make(
        self,
        kernel: Kernel,
        key: Key,
        future: Future[tuple[Any, Any]],
        asked: tuple[profiling.Profile, ...],
    ) -> None:
        try:
            group_layout, layout = self._layout(key[1], key[2])
            module = self._module(kernel)
            pipeline = self._gpu.create_compute_pipeline(
                label=kernel.name,
                layout=layout,
                compute={"module": module, "entry_point": "main"},
            )
        except Exception as error:
            self._give_up(key, future, self._refused(kernel, error))
            return
        with self._lock:
            self.compiled += 1
        profiling.note_compiled(profiles=asked)
        # Of a single kernel the launch itself takes as long.
        if self._ahead is not None and self._unfinished > 1:
            self._ahead.compile(kernel)
        future.set_result((pipeline, group_layout))

    def _module(self, kernel: Kernel) -> Any:
        if self.unchecked and kernel.in_range:
            return unchecked_module(self._gpu, kernel.name, kernel.wgsl)
        code = kernel.wgsl
        if self._own_checks and not kernel.in_range:
            code = checked(code)
        return self._gpu.create_shader_module(label=kernel.name, code=code)

    def _give_up(
        self, key: Key, future: Future[tuple[Any, Any]], error: BaseException
    ) -> None:
        with self._lock:  # A later attempt may have a living device.
            self._made.pop(key, None)
        future.set_exception(error)

    def _refused(self, kernel: Kernel, error: Exception) -> Exception:
        text = str(error).strip()
        if "device is lost" in text:
            return DeviceLostError(f"the device {self._name} was lost while compiling")
        if not isinstance(error, wgpu.GPUError):
            return error
        lines = kernel.wgsl.splitlines()
        numbered = "\n".join(f"{i:4} | {line}" for i, line in enumerate(lines, 1))
        return CompilerError(
            f"the driver refused the kernel {kernel.name}; this is a fault of "
            f"shaderdsl, not of your program:\n{text}\n{numbered}",
            where=next(
                filter(None, (getattr(s, "loc", None) for s in kernel.members)), None
            ),
            cure="please report this text",
        )

    def _layout(self, access: tuple[str, ...], params: bool) -> tuple[Any, Any]:
        """Bind group layout and pipeline layout."""
        with self._lock:
            found = self._layouts.get((access, params))
        if found is not None:
            return found
        made = layouts(self._gpu, access, params)
        with self._lock:
            return self._layouts.setdefault((access, params), made)
