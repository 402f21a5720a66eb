"""Just enough of wgpu-py for kernels written by hand: one pass, one submit."""

from __future__ import annotations

import numpy as np
import wgpu

USAGE = wgpu.BufferUsage
STORAGE = USAGE.STORAGE | USAGE.COPY_SRC | USAGE.COPY_DST
LIMITS = (
    "max-buffer-size",
    "max-storage-buffer-binding-size",
    "max-storage-buffers-per-shader-stage",
    "max-compute-invocations-per-workgroup",
    "max-compute-workgroup-size-x",
    "max-compute-workgroup-storage-size",
)


class Gpu:
    def __init__(self):
        rank = {"DiscreteGPU": 0, "IntegratedGPU": 1}
        adapters = wgpu.gpu.enumerate_adapters_sync()
        vulkan = [a for a in adapters if a.info["backend_type"] == "Vulkan"]
        adapter = min(vulkan, key=lambda a: rank.get(a.info["adapter_type"], 2))
        self.device = adapter.request_device_sync(
            required_limits={k: adapter.limits[k] for k in LIMITS}
        )
        self.pipelines = {}
        self.tape = []

    def buffer(self, content: np.ndarray | int) -> wgpu.GPUBuffer:
        """A buffer with these numbers, or room for so many 32-bit words."""
        if isinstance(content, int):
            return self.device.create_buffer(size=max(4, 4 * content), usage=STORAGE)
        data = np.ascontiguousarray(content)
        return self.device.create_buffer_with_data(data=data, usage=STORAGE)

    def read(self, buffer: wgpu.GPUBuffer) -> np.ndarray:
        return np.frombuffer(self.device.queue.read_buffer(buffer), np.float32)

    def add(self, wgsl: str, buffers: list[wgpu.GPUBuffer], *workgroups: int) -> None:
        """Puts a dispatch at the end of the tape."""
        if wgsl not in self.pipelines:
            module = self.device.create_shader_module(code=wgsl)
            self.pipelines[wgsl] = self.device.create_compute_pipeline(
                layout="auto", compute={"module": module, "entry_point": "main"}
            )
        pipeline = self.pipelines[wgsl]
        entries = [
            {"binding": i, "resource": {"buffer": b}} for i, b in enumerate(buffers)
        ]
        group = self.device.create_bind_group(
            layout=pipeline.get_bind_group_layout(0), entries=entries
        )
        self.tape.append((pipeline, group, (*workgroups, 1, 1)[:3]))

    def run(self, times: int = 1) -> None:
        """Plays the whole tape, so many times, and waits for the device."""
        encoder = self.device.create_command_encoder()
        play = encoder.begin_compute_pass()
        for pipeline, group, workgroups in self.tape * times:
            play.set_pipeline(pipeline)
            play.set_bind_group(0, group)
            play.dispatch_workgroups(*workgroups)
        play.end()
        self.device.queue.submit([encoder.finish()])
        self.device._poll_wait()
