"""Time the basic kernels on this device: medians, bandwidth and rate.

Comparisons with other libraries are in the repository, under benchmarks/peers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seconds",
        type=float,
        default=1.0,
        metavar="S",
        help="time for each row (default: %(default)s)",
    )
    parser.add_argument("--large", action="store_true", help="sizes that suit a GPU")


def run(args: argparse.Namespace) -> int:
    import shaderdsl as sd

    from . import UsageError

    if args.seconds <= 0:
        raise UsageError("--seconds must be positive")
    print(f"device: {sd.runtime.current().name}")
    print(f"{'work':34}{'ms':>9}{'GB/s':>9}{'GFLOP/s':>9}{'kernels':>9}", flush=True)
    for title, call, lowered in _rows(args.large):
        seconds = _median(call, args.seconds)
        moved = sum(kernel.bytes for kernel in lowered.kernels)
        flops = sum(kernel.flops for kernel in lowered.kernels)
        print(
            f"{title:34}{seconds * 1e3:9.2f}{moved / seconds / 1e9:9.2f}"
            f"{flops / seconds / 1e9:9.2f}{len(lowered.kernels):9}",
            flush=True,
        )
    return 0


def _rows(large: bool) -> list[tuple[str, Callable[[], Any], Any]]:
    import shaderdsl as sd
    from shaderdsl import ops

    rng = np.random.default_rng(0)

    def array(*shape: int) -> Any:
        return sd.asarray(rng.standard_normal(shape, dtype=np.float32))

    rows, wide, side = (16384, 4096, 4096) if large else (1024, 1024, 256)
    x, y = array(rows, wide), array(rows, wide)
    gain = array(wide)
    a, b = array(side, side), array(side, side)
    table = [
        (f"2x [{rows}, {wide}]", sd.op("r n -> r n")(_twice), (x,)),
        (f"silu(g)*u [{rows}, {wide}]", ops.swiglu, (x, y)),
        (f"RMSNorm [{rows}, {wide}]", ops.rms_norm, (x, gain)),
        (f"softmax [{rows}, {wide}]", ops.softmax, (x,)),
        (f"x Wᵀ [{side}, {side}]", ops.linear, (a, b)),
    ]
    return [(title, partial(f, *xs), sd.lower(f, *xs)) for title, f, xs in table]


def _twice(x: Any) -> Any:
    return x + x


def _median(call: Callable[[], Any], budget: float) -> float:
    import shaderdsl as sd

    for _ in range(3):  # the first call compiles
        call()
    sd.synchronize()
    times: list[float] = []
    end = time.perf_counter() + budget
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        sd.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
