"""How long a device takes for a call: its own timestamps, else the wall clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from .device import Device
from .profiling import profile


def has_timestamps(device: Device) -> bool:
    """Whether kernels are timed by the device and not by the host."""
    return device.kind == "wgpu" and device.target.features.timestamps


def time_once(device: Device, call: Callable[[], Any], repeats: int = 0) -> float:
    """Seconds of one call: the sum over its kernels, or of the wall clock to the end of
    the work where the device has no timestamps.

    Args:
        repeats: how often its kernels run between two timestamps; with 0 each has two
            of its own, which adds what it takes to start and drain a pass.
    """
    if has_timestamps(device):
        with profile(timestamps=True, repeats=repeats) as p:
            call()
        return p.seconds
    device.synchronize()
    start = time.perf_counter()
    call()
    device.synchronize()
    return time.perf_counter() - start


def median_time(
    device: Device,
    call: Callable[[], Any],
    seconds: float,
    least: int = 3,
    repeats: int = 0,
) -> float:
    """Median seconds of calls during about ``seconds``, of at least ``least`` calls;
    ``repeats`` as of `time_once`.
    """
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < least or (time.perf_counter() < end and len(times) < 200):
        times.append(time_once(device, call, repeats))
    return statistics.median(times)


def warm(device: Device, call: Callable[[], Any], seconds: float) -> None:
    """Keep a device busy until its clocks have risen."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        call()
    device.synchronize()
