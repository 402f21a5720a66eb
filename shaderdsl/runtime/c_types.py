"""C types by name, all parsed at once.

wgpu-py names C types by text (``ffi.new("WGPUBufferDescriptor *")``), and cffi parses
each such text together with the names of all 650 types of the header, in Python: 10 to
20 ms each, for forty of them in a first call. Here they are the parameters of one
function type, which is parsed once, and cffi is told what each of them is.
"""

from __future__ import annotations

import contextlib
from typing import Any

#: What wgpu-py and this package ask for until a first call has returned, as it is
#: written there. What is missing here is parsed by itself, as ever.
NAMES = (
    "WGPUAdapterInfo *",
    "WGPUAdapter[]",
    "WGPUBindGroupDescriptor *",
    "WGPUBindGroupEntry *",
    "WGPUBindGroupEntry[]",
    "WGPUBindGroupLayoutDescriptor *",
    "WGPUBindGroupLayoutEntry *",
    "WGPUBindGroupLayoutEntry[]",
    "WGPUBindGroupLayout[]",
    "WGPUBufferBindingLayout *",
    "WGPUBufferDescriptor *",
    "WGPUBufferMapCallbackInfo *",
    "WGPUChainedStruct *",
    "WGPUChainedStruct * ",
    "WGPUCommandBufferDescriptor *",
    "WGPUCommandBuffer[]",
    "WGPUCommandEncoderDescriptor *",
    "WGPUComputePassDescriptor *",
    "WGPUComputePipelineDescriptor *",
    "WGPUComputeState *",
    "WGPUDeviceDescriptor *",
    "WGPUDeviceExtras *",
    "WGPUDeviceLostCallbackInfo *",
    "WGPUFeatureName[]",
    "WGPUInstanceDescriptor *",
    "WGPULimits *",
    "WGPUNativeLimits *",
    "WGPUPipelineLayoutDescriptor *",
    "WGPUQueueDescriptor *",
    "WGPURequestDeviceCallbackInfo *",
    "WGPUShaderModuleDescriptor *",
    "WGPUShaderSourceWGSL *",
    "WGPUUncapturedErrorCallbackInfo *",
    "char []",
    "intptr_t",
    "uint32_t []",
    "uint64_t *",
    "uint8_t *",
    "uint8_t []",
    "uintptr_t",
    "void *",
    "void(WGPUDevice const *, WGPUDeviceLostReason, WGPUStringView, void *, void *)",
    "void(WGPUDevice const *, WGPUErrorType, WGPUStringView, void *, void *)",
    "void(WGPUMapAsyncStatus, WGPUStringView, void *, void *)",
    "void(WGPURequestDeviceStatus, WGPUDevice, WGPUStringView, void *, void *)",
)


def parse(ffi: Any) -> bool:
    """Have cffi know all of them; False where its insides are not as expected.

    Then nothing is changed, and each name is parsed when it is asked for.
    """
    known = getattr(ffi, "_parsed_types", None)
    text = f"void(*)({', '.join(map(_parameter, NAMES))})"
    with contextlib.suppress(Exception):  # a name that this header lacks
        function = ffi.typeof(text)
        # cffi keeps what a text means, and whether it is a function.
        if isinstance(known, dict) and known.get(text) == (function, False):
            for name, found in zip(NAMES, function.args, strict=True):
                own = found.item if name.endswith("[]") else found
                known.setdefault(name, (own, name.startswith("void(")))
            return True
    return False


def _parameter(name: str) -> str:
    """The type as a parameter's: arrays and functions would become pointers."""
    if name.endswith("[]"):
        return f"{name[:-2]} (*)[]"
    return name.replace("void(", "void(*)(", 1)
