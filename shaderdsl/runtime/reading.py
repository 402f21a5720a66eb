"""Reading device memory: a copy that is queued now, and waited for later.

Whoever wants a result while the device goes on with the next call begins to read it
before that call is launched, and waits for the copy alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .adapters import library
from .launch import encode

if TYPE_CHECKING:
    from .wgpu_device import WgpuDevice

#: Staging buffers up to this size (bytes) are kept for the next small read.
KEEP_STAGING_BYTES = 1 << 20

_USAGE = library.api.BufferUsage
_STAGING = _USAGE.MAP_READ | _USAGE.COPY_DST


class Reading:
    """``nbytes`` from ``start`` of a wgpu buffer, as they are when it is made.

    Raises:
        GPUError, RuntimeError: the driver's, for the caller to translate.
    """

    def __init__(self, device: WgpuDevice, handle: Any, start: int, nbytes: int):
        self._device, self._nbytes = device, nbytes
        whole = -(-nbytes // 4) * 4  # Copies move whole words.
        self._staging = _take_staging(device, whole)
        move = (handle, start, self._staging, 0, whole)
        self._index = device.submit([encode(device.gpu, (), [move])])
        self._mapping = library.map(self._staging, whole)

    def __del__(self) -> None:
        if "_mapping" in self.__dict__:
            library.forget(self._mapping)

    def into(self, out: np.ndarray[Any, Any]) -> None:
        """Wait for the bytes and put them into ``out``; once."""
        gpu, whole = self._device.gpu, -(-self._nbytes // 4) * 4
        raw = library.mapped(gpu, self._mapping, self._index, self._staging, whole)
        out[:] = np.frombuffer(raw, np.uint8, self._nbytes)
        del raw
        library.unmap(self._staging)
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
