"""Layouts of bind groups and pipelines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .adapters import library

_TYPES = {"read": "read-only-storage", "read_write": "storage"}


def layouts(gpu: Any, access: Sequence[str], params: bool) -> tuple[Any, Any]:
    """Bind group layout and pipeline layout for the access of each binding.

    Explicit, because an automatic one leaves out bindings that a text never uses.
    """
    types = [_TYPES[a] for a in access] + (["uniform"] if params else [])
    entries = [
        {
            "binding": i,
            "visibility": library.api.ShaderStage.COMPUTE,
            "buffer": {"type": kind},
        }
        for i, kind in enumerate(types)
    ]
    group = gpu.create_bind_group_layout(entries=entries)
    return group, gpu.create_pipeline_layout(bind_group_layouts=[group])
