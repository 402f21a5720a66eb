"""List the devices that ops can run on; * marks the one in use.

shaderdsl devices                     the list
shaderdsl devices --limits            with limits and features, and what they are for
shaderdsl devices --json              all of it for a program
SHADERDSL_DEVICE=wgpu:1 python …      the first column is what this, --device and
                                      sd.use_device take
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

__all__ = ["add_arguments", "run"]

#: what each feature enables
FEATURES = {
    "f16": "f16 arrays are read and written as such; without, as packed pairs",
    "subgroups": "reductions and products pass values between lanes directly",
    "timestamps": "profile(timestamps=True), bench and tune time single kernels",
    "matrix": "products of f16 by subgroups' matrices (device dawn)",
    "wide_words": "a vec4 moves as two words, for software drivers",
}
#: what each limit decides
LIMITS = {
    "max_storage_buffers": "arrays of one kernel: how much can be fused",
    "max_workgroup_storage": "bytes of tiles: how large blocks of products are",
    "max_invocations": "threads of a workgroup",
    "max_workgroup_size_x": "threads of a workgroup along x",
    "max_workgroups": "workgroups of a dispatch along one dimension",
    "max_binding_bytes": "the largest array that a kernel can read",
    "max_buffer_bytes": "the largest array",
    "uniform_alignment": "bytes between blocks of parameters",
    "storage_alignment": "bytes between arrays that share memory",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--limits", action="store_true", help="also limits, features and their use"
    )
    parser.add_argument("--json", action="store_true", help="all of it as JSON")


def run(args: argparse.Namespace) -> int:
    from .. import runtime
    from .terminal import print_table

    used = runtime.current().name
    found = runtime.devices()
    in_use = next((k for k, info in enumerate(found) if info.name == used), None)
    if args.json:
        devices = [_as_data(info, k == in_use) for k, info in enumerate(found)]
        print(json.dumps(devices, indent=1))
        return 0
    rows: list[tuple[str, ...]] = [
        (
            f"{'*' if k == in_use else ' '} {info.spec}",
            info.name,
            info.kind,
            info.backend,
            info.driver,
        )
        for k, info in enumerate(found)
    ]
    print_table(("  device", "name", "kind", "backend", "driver"), rows)
    for info in found if args.limits else ():
        about = _as_data(info, False)
        print(f"\n{info.spec}: {info.name}")
        rows = [
            (name, f"{about['limits'][name]:,}", use) for name, use in LIMITS.items()
        ]
        rows += [
            (name, "yes" if about["features"][name] else "no", use)
            for name, use in FEATURES.items()
        ]
        print_table(("limit or feature", "value", "what it is for"), rows, numbers=(1,))
    return 0


def _as_data(info: Any, used: bool) -> dict[str, Any]:
    about = {
        name: getattr(info, name)
        for name in ("spec", "name", "kind", "backend", "driver")
    }
    return about | {
        "in_use": used,
        "limits": dataclasses.asdict(info.target.limits),
        "features": dataclasses.asdict(info.target.features),
    }
