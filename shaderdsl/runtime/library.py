"""The WebGPU library of this process: wgpu-py on wgpu-native, or wgpudawn on Dawn.

Both have the same API and differ in what lies beyond it: how devices are opened, how
work is waited for, what the library calls its features. All of that is here, and only
here is either imported. A process runs on one of them, because arrays of one are
nothing to the other: on the one that ``SHADERDSL_DEVICE`` names or that is asked for
first, by default wgpu-py.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import DeviceError, NoAdapterError
from . import c_types

#: What each library is called where it is imported.
PACKAGES = {"wgpu": "wgpu", "dawn": "wgpudawn"}


@dataclass(frozen=True)
class Request:
    """What a device is to have: features, limits, and whether it goes without checks
    of indices, where a library decides that `at_once`.
    """

    features: Sequence[str]
    limits: Mapping[str, int]
    unchecked: bool


class Library(Protocol):
    """What the device needs of a library beside the API that both share.

    Attributes:
        name: ``"wgpu"`` or ``"dawn"``; devices are called so.
        api: the module.
        version: for people, with the library's name.
        subgroups: the feature of subgroups.
        standard: whether texts must say ``enable subgroups;``.
        raw, ffi: its C functions.
        backend: the module that wraps them; its ``libf`` raise what goes wrong.
        optional: features that a device takes where the adapter has them.
        at_once: whether it leaves checks of indices to all of a device's kernels or to
            none; otherwise each module says so.
    """

    name: str
    api: Any
    version: str
    subgroups: str
    standard: bool
    raw: Any
    ffi: Any
    backend: Any
    optional: tuple[str, ...]
    at_once: bool

    def open(self, adapter: Any, request: Request) -> Any:
        """A device of an adapter."""
        ...

    def commands(self, raw: Any, gpu: Any) -> Any:
        """A command buffer of the C functions, as `submit` takes it."""
        ...

    def submit(self, queue: Any, commands: Sequence[Any]) -> int:
        """Submit command buffers; gives what `wait` takes."""
        ...

    def wait(self, gpu: Any, submission: int) -> None:
        """Wait until a submission, at least, has run."""
        ...

    def map(self, buffer: Any, nbytes: int) -> Any:
        """Begin to map a buffer for reading; gives what the next two take."""
        ...

    def mapped(
        self, gpu: Any, mapping: Any, submission: int, buffer: Any, nbytes: int
    ) -> Any:
        """Wait for a mapping and the submission before it: the buffer's bytes.

        Raises:
            RuntimeError: it could not be mapped.
        """
        ...

    def forget(self, mapping: Any) -> None:
        """Nobody waits for a mapping any more."""
        ...

    def unmap(self, buffer: Any) -> None:
        """End a mapping; its bytes are gone."""
        ...

    def period(self, queue: Any) -> float:
        """Nanoseconds of a tick of its timestamps."""
        ...

    def gone(self, gpu: Any) -> bool:
        """Whether a device that may be lost is."""
        ...

    def matrix(self, adapter: Any) -> tuple[int, ...]:
        """Shape of matrices that subgroups multiply: see `Features.matrix`."""
        ...


class _Commands:
    """A command buffer; wgpu-py's own class costs a dispatch's time and more."""

    __slots__ = ("_internal", "_release")

    def __init__(self, raw: Any, release: Callable[[Any], None]):
        self._internal, self._release = raw, release

    def __del__(self) -> None:
        self._release(self._internal)


class _Native:
    """wgpu-py."""

    name, subgroups, standard, at_once = "wgpu", "subgroup", False, False
    optional: tuple[str, ...] = ("subgroup-barrier",)

    def __init__(self, api: Any):
        native = importlib.import_module("wgpu.backends.wgpu_native")
        self.backend = importlib.import_module(f"{native.__name__}._api")
        self._checked = self.backend.libf
        self.api, self.raw, self.ffi = api, native.lib, native.ffi
        c_types.parse(self.ffi)
        self.version = f"wgpu {api.__version__}"
        # What the driver's callback is told is a number: whoever asked may be gone.
        self._numbers = itertools.count(1)
        self._statuses: dict[int, int | None] = {}
        self._told = self.ffi.callback(
            "void(WGPUMapAsyncStatus, WGPUStringView, void *, void *)", self._tell
        )

    def open(self, adapter: Any, request: Request) -> Any:
        return adapter.request_device_sync(
            required_features=list(request.features),
            required_limits=dict(request.limits),
        )

    def commands(self, raw: Any, gpu: Any) -> Any:
        return _Commands(raw, self.raw.wgpuCommandBufferRelease)

    def submit(self, queue: Any, commands: Sequence[Any]) -> int:
        every = [c._internal for c in commands]
        handles = self.ffi.new("WGPUCommandBuffer[]", every)
        submit = self._checked.wgpuQueueSubmitForIndex
        return int(submit(queue._internal, len(every), handles))

    def wait(self, gpu: Any, submission: int) -> None:
        index = self.ffi.new("uint64_t *", submission)
        self.raw.wgpuDevicePoll(gpu._internal, True, index)

    def _tell(self, status: int, message: Any, number: Any, _: Any) -> None:
        key = int(self.ffi.cast("uintptr_t", number))
        if key in self._statuses:
            self._statuses[key] = status

    def map(self, buffer: Any, nbytes: int) -> Any:
        number = next(self._numbers)
        self._statuses[number] = None
        info = self.ffi.new("WGPUBufferMapCallbackInfo *")
        info.mode = self.raw.WGPUCallbackMode_AllowProcessEvents
        info.callback = self._told
        info.userdata1 = self.ffi.cast("void *", number)
        mode = self.raw.WGPUMapMode_Read
        self._checked.wgpuBufferMapAsync(buffer._internal, mode, 0, nbytes, info[0])
        return number

    def mapped(
        self, gpu: Any, mapping: Any, submission: int, buffer: Any, nbytes: int
    ) -> Any:
        # Another thread that waits may be about to tell the status.
        while self._statuses[mapping] is None:
            self.wait(gpu, submission)
        if self._statuses[mapping] != self.raw.WGPUMapAsyncStatus_Success:
            raise RuntimeError("memory to read from could not be mapped")
        place = self.raw.wgpuBufferGetConstMappedRange(buffer._internal, 0, nbytes)
        return self.ffi.buffer(place, nbytes)

    def forget(self, mapping: Any) -> None:
        self._statuses.pop(mapping, None)

    def unmap(self, buffer: Any) -> None:
        self.raw.wgpuBufferUnmap(buffer._internal)

    def period(self, queue: Any) -> float:
        return float(self.raw.wgpuQueueGetTimestampPeriod(queue._internal))

    def gone(self, gpu: Any) -> bool:
        try:
            gpu.create_buffer(size=16, usage=self.api.BufferUsage.STORAGE)
        except self.api.GPUError:
            return True
        return False

    def matrix(self, adapter: Any) -> tuple[int, ...]:
        return ()


#: Matrices are an experiment of Dawn's, which it offers only if it is asked to; f16
#: on Vulkan drivers of NVIDIA is off because of images, which are not used here.
_TOGGLES = ("allow_unsafe_apis", "vulkan_enable_f16_on_nvidia")

#: Workgroup memory is written before it is read, and ticks of 0.1 ms time no kernel.
_DEVICE_ON = ("disable_workgroup_init",)
_DEVICE_OFF = ("timestamp_quantization",)
_UNCHECKED = ("disable_robustness",)

_MATRICES = "chromium-experimental-subgroup-matrix"


class _Dawn:
    """wgpudawn.  Texts keep to the standard."""

    name, subgroups, standard, at_once = "dawn", "subgroups", True, True
    #: Pipelines are made by several threads at a time.
    optional: tuple[str, ...] = ("implicit-device-synchronization", _MATRICES)

    def __init__(self, api: Any):
        dawn = importlib.import_module("wgpudawn.backends.dawn")
        self._extras = importlib.import_module(f"{dawn.__name__}.extras")
        self.backend = importlib.import_module(f"{dawn.__name__}._api")
        self.api, self.raw, self.ffi = api, dawn.lib, dawn.ffi
        self.version = f"wgpudawn {api.__version__}"
        # A program that used wgpudawn before has an instance: without matrices.
        with contextlib.suppress(RuntimeError):
            self._extras.set_instance_extras(enable_toggles=list(_TOGGLES))

    def open(self, adapter: Any, request: Request) -> Any:
        return self._extras.request_device_sync(
            self._fresh(adapter),
            required_features=list(request.features),
            required_limits=dict(request.limits),
            enable_toggles=(*_DEVICE_ON, *(_UNCHECKED if request.unchecked else ())),
            disable_toggles=_DEVICE_OFF,
        )

    def _fresh(self, adapter: Any) -> Any:
        """The adapter again: one gives a single device."""
        every = self.api.gpu.enumerate_adapters_sync()
        wanted = dict(adapter.info)
        return next((a for a in every if dict(a.info) == wanted), adapter)

    def commands(self, raw: Any, gpu: Any) -> Any:
        return self.backend.GPUCommandBuffer("", raw, gpu)

    def submit(self, queue: Any, commands: Sequence[Any]) -> int:
        queue.submit(commands)
        return 0

    def wait(self, gpu: Any, submission: int) -> None:
        gpu._poll_wait()

    def map(self, buffer: Any, nbytes: int) -> Any:
        return buffer.map_async("READ", 0, nbytes)

    def mapped(
        self, gpu: Any, mapping: Any, submission: int, buffer: Any, nbytes: int
    ) -> Any:
        mapping.sync_wait()
        return buffer.read_mapped(0, nbytes, copy=False)

    def forget(self, mapping: Any) -> None:
        pass

    def unmap(self, buffer: Any) -> None:
        buffer.unmap()

    def period(self, queue: Any) -> float:
        return 1.0

    def gone(self, gpu: Any) -> bool:
        return True  # It says so of lost devices alone.

    def matrix(self, adapter: Any) -> tuple[int, ...]:
        if not {_MATRICES, "shader-f16", "subgroups"} <= set(adapter.features):
            return ()
        about = self._extras.get_adapter_properties(adapter)
        shapes = [
            (c["m"], c["n"], c["k"], c["min_subgroup_size"])
            for c in about.get("subgroup_matrix_configs", ())
            if (c["component_type"], c["result_component_type"]) == ("f16", "f32")
            and c["min_subgroup_size"] == c["max_subgroup_size"]
        ]
        return max(shapes, default=())


_lock = threading.Lock()
_library: Library | None = None


def chosen() -> Library:
    """The library of this process; the first call decides.

    Raises:
        ImportError: it is not installed, or does not start here.
    """
    name = os.environ.get("SHADERDSL_DEVICE", "").partition(":")[0]
    with _lock:
        return _library or _load("dawn" if name == "dawn" else "wgpu")


def choose(name: str) -> Library:
    """Decide for a library.

    Raises:
        NoAdapterError: it is not installed.
        DeviceError: this process runs on the other one.
    """
    with _lock:
        if _library is not None and _library.name != name:
            raise DeviceError(
                f"{PACKAGES[name]} was asked for, but this process runs on "
                f"{PACKAGES[_library.name]} already",
                cure=f"set SHADERDSL_DEVICE={name}, or call use_device({name!r}) "
                "before anything else of shaderdsl",
            )
        if _library is not None:
            return _library
        try:
            return _load(name)
        except ImportError as error:
            extra = "[dawn]" if name == "dawn" else ""
            raise NoAdapterError(
                f"{PACKAGES[name]} cannot be imported: {error}",
                cure=f"pip install 'shaderdsl{extra}'",
            ) from error


def _load(name: str) -> Library:
    global _library
    api = importlib.import_module(PACKAGES[name])
    _library = _Dawn(api) if name == "dawn" else _Native(api)
    return _library
