"""The adapters that the WebGPU library finds, and word of their loss.

Importing this module imports the library.
"""

from __future__ import annotations

import gc
import logging
import os
import tempfile
import threading
import weakref
from typing import TYPE_CHECKING, Any

from ..codegen.target import (
    SOFTWARE_LOOP_BUDGET,
    UNBOUNDED_LOOP_BUDGET,
    Features,
    Limits,
    Target,
)
from ..errors import DeviceError
from .device import DeviceInfo
from .library import PACKAGES, chosen

if TYPE_CHECKING:
    from .wgpu_device import WgpuDevice

# Mesa prints an error for each adapter that is looked at while the variable is unset.
os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())

library = chosen()

#: Our names for wgpu's limits.
LIMIT_NAMES = {
    "max_storage_buffers": "max-storage-buffers-per-shader-stage",
    "max_workgroup_storage": "max-compute-workgroup-storage-size",
    "max_invocations": "max-compute-invocations-per-workgroup",
    "max_workgroup_size_x": "max-compute-workgroup-size-x",
    "max_workgroups": "max-compute-workgroups-per-dimension",
    "max_binding_bytes": "max-storage-buffer-binding-size",
    "max_buffer_bytes": "max-buffer-size",
    "uniform_alignment": "min-uniform-buffer-offset-alignment",
    "storage_alignment": "min-storage-buffer-offset-alignment",
}

_KINDS = {"DiscreteGPU": "discrete", "IntegratedGPU": "integrated", "CPU": "software"}
_ORDER = ("discrete", "integrated", "other", "software")


class _LossWatch(logging.Handler):
    """Keeps wgpu's log off stderr and notices when it reports a lost device.

    wgpu-py offers no callback for the loss of a device, only this line in its log.
    Having a handler also stops Python from printing the log where nobody asked for it;
    an application that configures logging still gets it.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if "device was lost" in record.getMessage():
            # Called from inside the driver: only take a note here.
            for device in list(opened):
                device.suspect = True


#: Devices that exist.
opened: weakref.WeakSet[WgpuDevice] = weakref.WeakSet()
logging.getLogger(PACKAGES[library.name]).addHandler(_LossWatch())

_adapter_lock = threading.Lock()
_list: list[tuple[Any, DeviceInfo]] | None = None

#: The process that the driver belongs to.
home = os.getpid()

# Destroying what was garbage at the fork would hang a child, so it keeps that for ever.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=gc.freeze)


def found() -> list[tuple[Any, DeviceInfo]]:
    """wgpu's adapters, the preferred first: native before OpenGL, GPUs before software.

    Raises:
        DeviceError: this process was forked from one that had imported wgpu.
    """
    global _list
    refuse_fork()
    with _adapter_lock:
        if _list is None:
            every = list(library.api.gpu.enumerate_adapters_sync())
            every.sort(key=_preference)
            _list = [(a, _describe(a, i)) for i, a in enumerate(every)]
        return _list


def _kind(adapter: Any) -> str:
    return _KINDS.get(adapter.info["adapter_type"], "other")


def _preference(adapter: Any) -> tuple[bool, int]:
    opengl = "opengl" in adapter.info["backend_type"].lower()
    return opengl, _ORDER.index(_kind(adapter))


def _scores() -> int | None:
    """Bytes that the gradient of scores may take (``SHADERDSL_SCORES``); None if unset.

    Raises:
        DeviceError: the variable is no number of bytes.
    """
    text = os.environ.get("SHADERDSL_SCORES", "").strip()
    if not text:
        return None
    if not text.isdecimal():
        raise DeviceError(
            f"SHADERDSL_SCORES is {text!r}, which is no number of bytes",
            cure="0 never stores scores of attention; unset, a quarter of what a graph "
            "takes and gives",
        )
    return int(text)


def _describe(adapter: Any, number: int) -> DeviceInfo:
    info, have = adapter.info, adapter.features
    name = info["device"] or info["description"] or info["vendor"] or "unnamed"
    if library.name != "wgpu":  # what is tuned on one is kept apart
        name = f"{name} ({library.name.capitalize()})"
    software = _kind(adapter) == "software"
    target = Target(
        name=name,
        family="software" if software else "gpu",
        limits=Limits(**{k: int(adapter.limits[v]) for k, v in LIMIT_NAMES.items()}),
        features=Features(
            wide_words=software and "shader-int64" in have,
            f16="shader-f16" in have,
            subgroups=library.subgroups in have,
            timestamps="timestamp-query" in have,
            matrix=library.matrix(adapter),
        ),
        enable_subgroups_directive=library.standard,
        loop_budget=SOFTWARE_LOOP_BUDGET if software else UNBOUNDED_LOOP_BUDGET,
        scores=_scores(),
    )
    return DeviceInfo(
        spec=f"{library.name}:{number}",
        name=name,
        kind=_kind(adapter),
        backend=info["backend_type"],
        driver=info["description"],
        target=target,
    )


def refuse_fork() -> None:
    """Raise `DeviceError` in a forked process, where the driver would hang."""
    if os.getpid() != home:
        raise DeviceError(
            "the GPU driver was used before this process forked; it would hang here",
            cure="start workers with the 'spawn' method, or use_device('cpu') in them",
        )
