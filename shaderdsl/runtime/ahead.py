"""Kernels that a software driver compiles before they are launched, on all processors.

Mesa's llvmpipe compiles a kernel at its first dispatch, one after another for a device.
What it compiled goes to its cache on disk, in which all devices look. So each thread
that makes pipelines has one more device, on which it dispatches a new kernel with no
workgroups: the driver compiles it, nothing runs, and the device in use finds the code.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .adapters import library
from .diskcache import DiskCache
from .layouts import layouts
from .plan import pack_params

if TYPE_CHECKING:
    from ..codegen.program import Kernel

#: What switches the driver's cache off, and where it lies, by age.
_OFF = ("MESA_SHADER_CACHE_DISABLE", "MESA_GLSL_CACHE_DISABLE")
_PLACES = ("MESA_SHADER_CACHE_DIR", "MESA_GLSL_CACHE_DIR", "XDG_CACHE_HOME")

#: More than any kernel needs of what it is bound to when nothing runs.
_BYTES = 256


def drivers_cache() -> Path | None:
    """The folder in which Mesa keeps what it compiled; None where it keeps nothing."""
    if any(os.environ.get(name, "0").lower() in ("1", "true", "yes") for name in _OFF):
        return None
    found = next(filter(None, map(os.environ.get, _PLACES)), None)
    place = Path(found or os.path.expanduser("~/.cache"))
    there = next((p for p in (place, *place.parents) if p.exists()), place)
    return place if os.access(there, os.W_OK) else None


class Ahead:
    """Compiles kernels for the device in use, each thread on a device of its own.

    Args:
        open_device: opens one more device of the same adapter.
        driver: whose code it is; what it compiled once is not asked for again.
    """

    def __init__(self, open_device: Callable[[], Any], driver: str):
        self._open = open_device
        place = drivers_cache()
        self._own = threading.local()
        #: What the driver has in its cache already.
        self._known = DiskCache("compiled")
        self._key = f"{driver}\n{place}\n"
        self.works = place is not None and (os.cpu_count() or 1) > 1

    def compile(self, kernel: Kernel) -> None:
        """Return when the driver has a kernel's code."""
        if not self.works:
            return
        key = self._key + kernel.wgsl
        if self._known.get(key) is not None:
            return
        try:
            self._dispatch(kernel)
        except (RuntimeError, library.api.GPUError):  # Whoever launches it will tell.
            self.works = False
        else:
            self._known.put(key, "")

    def _dispatch(self, kernel: Kernel) -> None:
        api, own = library.api, self._own
        if not hasattr(own, "gpu"):
            own.gpu, own.buffers = self._open(), []
        gpu = own.gpu
        while len(own.buffers) < len(kernel.bindings):
            usage = api.BufferUsage.STORAGE
            own.buffers.append(gpu.create_buffer(size=_BYTES, usage=usage))
        access = [binding.access for binding in kernel.bindings]
        group, layout = layouts(gpu, access, bool(kernel.params))
        module = gpu.create_shader_module(label=kernel.name, code=kernel.wgsl)
        pipeline = gpu.create_compute_pipeline(
            label=kernel.name,
            layout=layout,
            compute={"module": module, "entry_point": "main"},
        )
        bound = own.buffers[: len(access)]
        if kernel.params:
            # The numbers of the launch: the driver may compile for these alone.
            words = pack_params((kernel,), 4).words
            usage = api.BufferUsage.UNIFORM
            bound = [*bound, gpu.create_buffer_with_data(data=words, usage=usage)]
        entries = [
            {"binding": i, "resource": {"buffer": b}} for i, b in enumerate(bound)
        ]
        encoder = gpu.create_command_encoder()
        step = encoder.begin_compute_pass()
        step.set_pipeline(pipeline)
        step.set_bind_group(0, gpu.create_bind_group(layout=group, entries=entries))
        step.dispatch_workgroups(0, 0, 0)
        step.end()
        gpu.queue.submit([encoder.finish()])
        gpu._poll_wait()
