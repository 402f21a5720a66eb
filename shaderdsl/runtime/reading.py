"""Reading device memory: a copy that is queued now, and waited for later.

Whoever wants a result while the device goes on with the next call begins to read it
before that call is launched, and waits for the copy alone.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import wgpu
from wgpu.backends.wgpu_native import ffi, lib
from wgpu.backends.wgpu_native._api import libf

if TYPE_CHECKING:
    from .wgpu_device import WgpuDevice

#: Staging buffers up to this size (bytes) are kept for the next small read.
KEEP_STAGING_BYTES = 1 << 20

_STAGING = wgpu.BufferUsage.MAP_READ | wgpu.BufferUsage.COPY_DST

# What the driver's callback is told is a number: whoever asked may be gone by then.
_numbers = itertools.count(1)
_statuses: dict[int, int | None] = {}


@ffi.callback("void(WGPUMapAsyncStatus, WGPUStringView, void *, void *)")
def _mapped(status: int, message: Any, number: Any, _: Any) -> None:
    key = int(ffi.cast("uintptr_t", number))
    if key in _statuses:
        _statuses[key] = status


class Reading:
    """``nbytes`` from ``start`` of a wgpu buffer, as they are when it is made.

    Raises:
        GPUError, RuntimeError: the driver's, for the caller to translate.
    """

    def __init__(self, device: WgpuDevice, handle: Any, start: int, nbytes: int):
        self._device, self._nbytes = device, nbytes
        whole = -(-nbytes // 4) * 4  # Copies move whole words.
        self._staging = _take_staging(device, whole)
        encoder = device.gpu.create_command_encoder()
        encoder.copy_buffer_to_buffer(handle, start, self._staging, 0, whole)
        self._index = device.submit([encoder.finish()])
        self._number = next(_numbers)
        _statuses[self._number] = None
        info = ffi.new("WGPUBufferMapCallbackInfo *")
        info.mode = lib.WGPUCallbackMode_AllowProcessEvents
        info.callback = _mapped
        info.userdata1 = ffi.cast("void *", self._number)
        libf.wgpuBufferMapAsync(
            self._staging._internal, lib.WGPUMapMode_Read, 0, whole, info[0]
        )

    def __del__(self) -> None:
        _statuses.pop(self.__dict__.get("_number", 0), None)

    def into(self, out: np.ndarray[Any, Any]) -> None:
        """Wait for the bytes and put them into ``out``; once."""
        gpu = self._device.gpu._internal
        index = ffi.new("uint64_t *", self._index)
        # Another thread that waits may be about to tell the status.
        while _statuses[self._number] is None:
            lib.wgpuDevicePoll(gpu, True, index)
        if _statuses[self._number] != lib.WGPUMapAsyncStatus_Success:
            raise RuntimeError("memory to read from could not be mapped")
        raw = self._staging._internal
        pointer = lib.wgpuBufferGetConstMappedRange(raw, 0, -(-self._nbytes // 4) * 4)
        out[:] = np.frombuffer(ffi.buffer(pointer, self._nbytes), np.uint8)
        lib.wgpuBufferUnmap(raw)
        kept = self._device.staging
        if self._staging.size <= KEEP_STAGING_BYTES and len(kept) < 8:
            kept.append(self._staging)
        else:
            # Do not wait for garbage collection with tens of megabytes.
            self._staging.destroy()
        del self._staging


def _take_staging(device: WgpuDevice, nbytes: int) -> Any:
    try:
        staging = device.staging.pop()
        if staging.size >= nbytes:
            return staging
    except IndexError:
        pass
    size = nbytes if nbytes > KEEP_STAGING_BYTES else max(4096, 2 * nbytes)
    return device.gpu.create_buffer(size=size, usage=_STAGING)
