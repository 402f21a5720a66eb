"""The driver's C functions where wgpu-py's methods are slow or lack something.

Its methods encode a dispatch and make a bind group at five times the cost, so they are
only the way where the library has no such functions.  What goes wrong in a pass is
reported when its encoder finishes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .adapters import library

#: Pipeline (None: the one before), bind group, and the workgroups.
Step = tuple[Any, Any, int, int, int]

#: Source, its offset, target, its offset, bytes.
Move = tuple[Any, int, Any, int, int]

lib, ffi, backend = library.raw, library.ffi, library.backend

_FUNCTIONS: tuple[Any, ...] = tuple(
    getattr(lib, f"wgpu{name}", None)
    for name in (
        "DeviceCreateCommandEncoder",
        "CommandEncoderCopyBufferToBuffer",
        "CommandEncoderBeginComputePass",
        "ComputePassEncoderSetPipeline",
        "ComputePassEncoderSetBindGroup",
        "ComputePassEncoderDispatchWorkgroups",
        "ComputePassEncoderRelease",
        "CommandEncoderRelease",
        "DeviceCreateBindGroup",
    )
)
_encoder, _copy, _begin, _set_pipeline, _set_group, _dispatch, *_rest = _FUNCTIONS
_release_pass, _release, _ = _rest
_NULL = ffi.NULL

#: Whether the C functions are there.
DIRECT = None not in _FUNCTIONS


if DIRECT:
    _ENTRIES = ffi.typeof("WGPUBindGroupEntry[]")
    _DESCRIPTOR = ffi.typeof("WGPUBindGroupDescriptor *")


def bind_group(gpu: Any, layout: Any, ranges: Sequence[tuple[Any, int, int]]) -> Any:
    """A bind group of ``(buffer, offset, bytes)``."""
    if not DIRECT:
        return gpu.create_bind_group(
            layout=layout,
            entries=[
                {
                    "binding": i,
                    "resource": {"buffer": buffer, "offset": offset, "size": size},
                }
                for i, (buffer, offset, size) in enumerate(ranges)
            ],
        )
    entries = ffi.new(_ENTRIES, len(ranges))
    for i, (buffer, offset, size) in enumerate(ranges):
        entry = entries[i]
        entry.binding, entry.buffer = i, buffer._internal
        entry.offset, entry.size = offset, size
    descriptor = ffi.new(_DESCRIPTOR)
    descriptor.layout = layout._internal
    descriptor.entries, descriptor.entryCount = entries, len(ranges)
    raw = backend.libf.wgpuDeviceCreateBindGroup(gpu._internal, descriptor)
    return backend.GPUBindGroup("", raw, gpu)


def handles(steps: Sequence[Step]) -> list[Step]:
    """Steps of wgpu-py's objects as `encode` takes them."""
    if not DIRECT:
        return list(steps)
    return [
        (None if p is None else p._internal, group._internal, x, y, z)
        for p, group, x, y, z in steps
    ]


def encode(gpu: Any, steps: Sequence[Step], moves: Sequence[Move] = ()) -> Any:
    """A command buffer of copies, then one compute pass of steps made by `handles`."""
    if not DIRECT:
        return _encode_slowly(gpu, steps, moves)
    set_pipeline, set_group, dispatch = _set_pipeline, _set_group, _dispatch
    encoder = _encoder(gpu._internal, _NULL)
    try:
        for source, start, target, offset, nbytes in moves:
            _copy(encoder, source._internal, start, target._internal, offset, nbytes)
        if steps:
            compute = _begin(encoder, _NULL)
            for pipeline, group, x, y, z in steps:
                if pipeline is not None:
                    set_pipeline(compute, pipeline)
                set_group(compute, 0, group, 0, _NULL)
                dispatch(compute, x, y, z)
            backend.libf.wgpuComputePassEncoderEnd(compute)
            _release_pass(compute)
        raw = backend.libf.wgpuCommandEncoderFinish(encoder, _NULL)
    finally:
        _release(encoder)
    return library.commands(raw, gpu)


def _encode_slowly(gpu: Any, steps: Sequence[Step], moves: Sequence[Move]) -> Any:
    encoder = gpu.create_command_encoder()
    for move in moves:
        encoder.copy_buffer_to_buffer(*move)
    if steps:
        compute = encoder.begin_compute_pass()
        for pipeline, group, x, y, z in steps:
            if pipeline is not None:
                compute.set_pipeline(pipeline)
            compute.set_bind_group(0, group)
            compute.dispatch_workgroups(x, y, z)
        compute.end()
    return encoder.finish()


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
