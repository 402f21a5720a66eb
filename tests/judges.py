"""The second judge of WGSL: Tint, inside of Dawn, on its backend without a GPU.

naga sees each shader when it runs; Tint sees it here, at WebGPU's guaranteed limits. In
a process of its own, because Dawn and wgpu both claim the name.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence

_PROGRAM = """
import json, sys, wgpudawn
from wgpudawn.backends.dawn import extras
extras.set_instance_extras(enable_toggles=["allow_unsafe_apis"])
adapter = wgpudawn.gpu.request_adapter_sync()
wanted = ("shader-f16", "subgroups", "chromium-experimental-subgroup-matrix")
features = [f for f in wanted if f in adapter.features]
portable, texts = json.load(sys.stdin)
device = adapter.request_device_sync(required_features=features)
wrong = []
for number, text in enumerate(texts):
    try:
        module = device.create_shader_module(code=text)
        device.create_compute_pipeline(
            layout="auto", compute={"module": module, "entry_point": "main"}
        )
    except Exception as error:
        limits = ("exceeds the maximum", "maximum allowed", "maxSubgroupSize")
        if portable or not any(x in str(error) for x in limits):
            wrong.append((number, str(error)))
print("judged", json.dumps([features, wrong]))
"""


def available() -> bool:
    """Whether Tint is here: ``pip install shaderdsl[dawn]``."""
    return importlib.util.find_spec("wgpudawn") is not None


def in_the_standard(text: str) -> bool:
    """Whether a text keeps to the standard: u64 is wgpu's own, and so are subgroups
    without the directive that allows them.
    """
    subgroups = "subgroup" in text and "enable subgroups;" not in text
    return "u64" not in text and not subgroups


def refused(texts: Sequence[str], *, portable: bool = True) -> list[str]:
    """What Tint says against texts, each with the text itself.

    ``portable`` holds them to the guaranteed limits; others are planned for an
    adapter's own, and may bind more than Dawn's backend without a GPU allows.
    """
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        input=json.dumps([portable, list(texts)]),
        env=os.environ | {"WGPU_BACKEND_TYPE": "Null"},
        capture_output=True,
        text=True,
    )
    line = next((x for x in done.stdout.splitlines() if x.startswith("judged ")), None)
    assert line is not None, done.stderr[-2000:]
    _, wrong = json.loads(line.removeprefix("judged "))
    return [f"{message}\n{texts[number]}" for number, message in wrong]
