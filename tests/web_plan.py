"""Runs an exported folder on wgpu as `shaderdsl.js` runs it in a browser: a second
reader of the format, for machines without one.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np

DTYPES = {"f32": "f4", "f16": "f2", "i32": "i4", "u32": "u4", "bool": "u4"}


class WebPlan:
    """A folder on the adapter in use."""

    def __init__(self, folder: Path):
        import wgpu

        from shaderdsl.runtime import current

        self.wgpu, self.gpu = wgpu, current().gpu
        self.plan = json.loads((folder / "plan.json").read_text())
        usage = wgpu.BufferUsage
        self.slots = [
            self.gpu.create_buffer(
                size=max(16, size),
                usage=usage.STORAGE | usage.COPY_SRC | usage.COPY_DST,
            )
            for size in self.plan["slots"]
        ]
        self.inputs = {e["name"]: e for e in self.plan["inputs"]}
        self.outputs = {e["name"]: e for e in self.plan["outputs"]}
        stored = {n: v for f in self.plan["weights"] for n, v in _read(folder / f)}
        weighted = {n for n, e in self.inputs.items() if e["initial"] == "weights"}
        assert set(stored) == weighted
        for name, data in stored.items():
            self._write(self.inputs[name], data)
        self.steps = [self._step(folder, kernel) for kernel in self.plan["kernels"]]

    def _step(self, folder: Path, kernel):
        wgpu = self.wgpu
        names = {"read": "read-only-storage", "read_write": "storage"}
        types = [names[a] for a in kernel["access"]]
        resources = []
        for slot, offset, size in kernel["bind"]:
            size = min(size, self.slots[slot].size - offset)
            resources.append((self.slots[slot], offset, size))
        if kernel["params"]:
            types.append("uniform")
            words = np.array(kernel["params"], np.uint32)
            words = np.pad(words, (0, -len(words) % 4))
            uniform = self.gpu.create_buffer_with_data(
                data=words.tobytes(), usage=wgpu.BufferUsage.UNIFORM
            )
            resources.append((uniform, 0, words.nbytes))
        layout = self.gpu.create_bind_group_layout(
            entries=[
                {
                    "binding": i,
                    "visibility": wgpu.ShaderStage.COMPUTE,
                    "buffer": {"type": kind},
                }
                for i, kind in enumerate(types)
            ]
        )
        code = (folder / kernel["file"]).read_text()
        pipeline = self.gpu.create_compute_pipeline(
            layout=self.gpu.create_pipeline_layout(bind_group_layouts=[layout]),
            compute={
                "module": self.gpu.create_shader_module(code=code),
                "entry_point": "main",
            },
        )
        group = self.gpu.create_bind_group(
            layout=layout,
            entries=[
                {
                    "binding": i,
                    "resource": {"buffer": buffer, "offset": offset, "size": size},
                }
                for i, (buffer, offset, size) in enumerate(resources)
            ],
        )
        return pipeline, group, kernel["workgroups"]

    def _write(self, entry, data: bytes):
        data += bytes(-len(data) % 4)
        if data:
            self.gpu.queue.write_buffer(
                self.slots[entry["slot"]], entry["offset"], data
            )

    def run(self, **values):
        """One call."""
        for name, value in values.items():
            entry = self.inputs[name]
            self._write(entry, np.asarray(value, DTYPES[entry["dtype"]]).tobytes())
        encoder = self.gpu.create_command_encoder()
        self._copy(encoder, self.plan["before"])
        compute = encoder.begin_compute_pass()
        for pipeline, group, workgroups in self.steps:
            compute.set_pipeline(pipeline)
            compute.set_bind_group(0, group)
            compute.dispatch_workgroups(*workgroups)
        compute.end()
        self._copy(encoder, self.plan["after"])
        self.gpu.queue.submit([encoder.finish()])

    def _copy(self, encoder, moves):
        for source, start, target, at, nbytes in moves:
            assert source != target  # which WebGPU refuses
            encoder.copy_buffer_to_buffer(
                self.slots[source], start, self.slots[target], at, nbytes
            )

    def read(self, name: str) -> np.ndarray:
        """A result of the last call."""
        entry = self.outputs.get(name) or self.inputs[name]
        count = int(np.prod(entry["shape"], dtype=int))
        dtype = np.dtype(DTYPES[entry["dtype"]])
        nbytes = -(-count * dtype.itemsize // 4) * 4
        if not nbytes:
            return np.zeros(entry["shape"], dtype)
        raw = self.gpu.queue.read_buffer(
            self.slots[entry["slot"]], entry["offset"], nbytes
        )
        return np.frombuffer(raw, dtype, count).reshape(entry["shape"])


def _read(path: Path):
    """``(name, bytes)`` of each tensor of a safetensors file."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    for name, about in json.loads(raw[8 : 8 + length]).items():
        start, stop = (8 + length + at for at in about["data_offsets"])
        yield name, raw[start:stop]
