"""The dispatches of a pass, through the driver's C functions themselves.

wgpu-py's methods cost five times as much, so they are only the way where its library
has no such functions.  What goes wrong here is reported when the encoder finishes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wgpu.backends.wgpu_native import ffi, lib

#: Pipeline (None: the one before), bind group, and the workgroups.
Step = tuple[Any, Any, int, int, int]

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
