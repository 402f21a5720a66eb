"""Compute pipelines, made once for each WGSL text and way of binding."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ..errors import CompilerError, DeviceLostError
from . import profiling
from .adapters import library
from .indices import checked
from .launch import UNCHECKED, unchecked_module

if TYPE_CHECKING:
    from ..codegen.program import Kernel
    from ..codegen.target import Target
    from .wgpu_device import WgpuDevice

wgpu = library.api

#: New kernels from which compiling on several threads is worth starting them.
PARALLEL_FROM = 4

#: What tells pipelines apart: text, access of each binding, whether parameters follow.
Key = tuple[str, tuple[str, ...], bool, bool]


def wants_unchecked(target: Target) -> bool:
    """Whether kernels should go without checks where their indices are in range.

    Software drivers check at no cost.
    """
    return os.environ.get("SHADERDSL_CHECKED") != "1" and target.family == "gpu"


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
        self.compiled = 0
        #: Whether kernels whose indices are in range go without the driver's checks.
        self.unchecked = UNCHECKED and wants_unchecked(device.target)
        self._own_checks = device.unchecked

    def get(self, kernels: Sequence[Kernel]) -> list[tuple[Any, Any]]:
        """``(pipeline, bind group layout)`` of each kernel; makes what is missing.

        Raises:
            CompilerError: the driver refused a text; our own fault.
        """
        futures, new = [], []
        with self._lock:
            for kernel in kernels:
                key = self._key(kernel)
                future = self._made.get(key)
                if future is None:
                    future = self._made[key] = Future()
                    new.append((kernel, key, future))
                futures.append(future)
        workers = min(8, os.cpu_count() or 1, len(new))
        try:
            if len(new) >= PARALLEL_FROM and workers > 1:
                with ThreadPoolExecutor(workers) as threads:
                    list(threads.map(lambda job: self._make(*job), new))
            else:
                for job in new:
                    self._make(*job)
        finally:
            # Interrupted (Ctrl-C): nobody may wait for what will not be made.
            for _, key, future in new:
                if not future.done():
                    self._give_up(key, future, CompilerError("compiling was stopped"))
        return [future.result() for future in futures]

    @staticmethod
    def _key(kernel: Kernel) -> Key:
        access = tuple(binding.access for binding in kernel.bindings)
        return kernel.code, access, bool(kernel.params), kernel.in_range

    def _make(self, kernel: Kernel, key: Key, future: Future[tuple[Any, Any]]) -> None:
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
        profiling.note_compiled()
        future.set_result((pipeline, group_layout))

    def _module(self, kernel: Kernel) -> Any:
        if self.unchecked and kernel.in_range:
            return unchecked_module(self._gpu, kernel.name, kernel.wgsl)
        code = kernel.wgsl
        if self._own_checks and not kernel.in_range:
            code = checked(code)
        return self._gpu.create_shader_module(label=kernel.name, code=code)

    def _give_up(
        self, key: Key, future: Future[tuple[Any, Any]], error: Exception
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
        """Bind group layout and pipeline layout.

        Explicit, because an automatic one leaves out bindings that a text never uses.
        """
        with self._lock:
            found = self._layouts.get((access, params))
        if found is not None:
            return found
        names = {"read": "read-only-storage", "read_write": "storage"}
        types = [names[a] for a in access]
        if params:
            types.append("uniform")
        group = self._gpu.create_bind_group_layout(
            entries=[
                {
                    "binding": i,
                    "visibility": wgpu.ShaderStage.COMPUTE,
                    "buffer": {"type": kind},
                }
                for i, kind in enumerate(types)
            ]
        )
        layout = self._gpu.create_pipeline_layout(bind_group_layouts=[group])
        with self._lock:
            return self._layouts.setdefault((access, params), (group, layout))
