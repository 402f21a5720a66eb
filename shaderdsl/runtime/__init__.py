"""Running programs: devices, memory, profiling.  wgpu is imported on first use."""

from ..codegen import texts
from .buffers import Buffer
from .device import (
    Device,
    DeviceInfo,
    Executable,
    begin_to_choose,
    chosen,
    current,
    devices,
    open_device,
    owner,
    use_device,
)
from .diskcache import DiskCache
from .profiling import Profile, profile

texts.store = DiskCache("kernels")

__all__ = [
    "Buffer",
    "Device",
    "DeviceInfo",
    "Executable",
    "Profile",
    "begin_to_choose",
    "chosen",
    "current",
    "devices",
    "open_device",
    "owner",
    "profile",
    "synchronize",
    "use_device",
]


def synchronize() -> None:
    """Wait until everything launched on the current device has finished."""
    current().synchronize()
