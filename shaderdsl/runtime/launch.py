"""The driver's C functions where wgpu-py's methods are slow or lack something.

Its methods encode a dispatch at five times the cost, so they are only the way where
the library has no such functions.  What goes wrong is reported when an encoder
finishes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .adapters import library

#: Pipeline (None: the one before), bind group, and the workgroups.
Step = tuple[Any, Any, int, int, int]

lib, ffi = library.raw, library.ffi

_NAMES = ("SetPipeline", "SetBindGroup", "DispatchWorkgroups")
_set_pipeline, _set_group, _dispatch = (
    getattr(lib, f"wgpuComputePassEncoder{name}", None) for name in _NAMES
)
_NULL = ffi.NULL

#: Whether the C functions are there.
DIRECT = None not in (_set_pipeline, _set_group, _dispatch)


def handles(steps: Sequence[Step]) -> list[Step]:
    """Steps of wgpu-py's objects as `launch` takes them."""
    if not DIRECT:
        return list(steps)
    return [
        (None if p is None else p._internal, group._internal, x, y, z)
        for p, group, x, y, z in steps
    ]


def launch(compute: Any, steps: Sequence[Step]) -> None:
    """Encode steps, made by `handles`, into one of wgpu-py's compute passes."""
    if not DIRECT:
        for pipeline, group, x, y, z in steps:
            if pipeline is not None:
                compute.set_pipeline(pipeline)
            compute.set_bind_group(0, group)
            compute.dispatch_workgroups(x, y, z)
        return
    raw = compute._internal
    set_pipeline: Any = _set_pipeline
    set_group: Any = _set_group
    dispatch: Any = _dispatch
    for pipeline, group, x, y, z in steps:
        if pipeline is not None:
            set_pipeline(raw, pipeline)
        set_group(raw, 0, group, 0, _NULL)
        dispatch(raw, x, y, z)


#: Whether shader modules can go without the checks that the library writes into them.
UNCHECKED = hasattr(lib, "wgpuDeviceCreateShaderModuleTrusted")


def unchecked_module(gpu: Any, label: str, code: str) -> Any:
    """A shader module without checks of indices and of loops.

    For texts whose indices are in range by construction alone.
    """
    from wgpu.backends.wgpu_native import _api

    source = _api.new_struct_p(
        "WGPUShaderSourceWGSL *", code=_api.to_c_string_view(code)
    )
    source[0].chain.next = ffi.NULL
    source[0].chain.sType = lib.WGPUSType_ShaderSourceWGSL
    descriptor = _api.new_struct_p(
        "WGPUShaderModuleDescriptor *",
        nextInChain=ffi.cast("WGPUChainedStruct *", source),
        label=_api.to_c_string_view(label),
    )
    create = _api.libf.wgpuDeviceCreateShaderModuleTrusted
    return _api.GPUShaderModule(label, create(gpu._internal, descriptor, 0), gpu)
