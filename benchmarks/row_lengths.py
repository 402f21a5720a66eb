"""Norms and softmax at every row length.

``PYTHONPATH=. python benchmarks/row_lengths.py`` prints the table. Each array has 2^26
elements (``--elements`` changes that). Speeds count one reading and one writing;
results are compared with float64 on some rows first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import shaderdsl as sd
from shaderdsl import ops
from shaderdsl.bench import reference
from shaderdsl.bench.clocks import Clocks
from shaderdsl.bench.measure import REPEATS
from shaderdsl.bench.work import distance, normal, rows_of, some, wide
from shaderdsl.runtime import current, profile
from shaderdsl.runtime.timing import median_time, warm

LENGTHS = (32, 64, 128, 256, 512, 768, 1000, 1024, 2048, 4096)
LONG = (8192, 16384, 32000, 50257, 200_000)


def measure(
    call: Callable[[], Any], want: Callable[[Any], Any], x: Any, clocks: Clocks
) -> tuple[float, int]:
    """GB/s and kernels of a call that gives an array like ``x``."""
    rows = some(len(x), 8)
    error = distance(rows_of(call(), rows), want(rows_of(x, rows)))
    if not error <= 1e-5:
        raise AssertionError(f"{error:.1e} from float64")
    clocks.rise()
    warm(current(), call, 0.05)
    seconds = median_time(current(), call, 0.1, 5, REPEATS)
    with profile() as p:
        call()
    return 8 * x.size / seconds / 1e9, p.dispatches


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=1 << 26)
    elements = parser.parse_args().elements
    sd.use_device("wgpu")
    clocks = Clocks(current())
    double = sd.op("r n -> r n")(lambda a: a + a)
    x = normal(1, 1, elements)
    speed, _ = measure(partial(double, x), lambda a: 2 * a, x, clocks)
    print(f"2·x: {speed:,.0f} GB/s\n")
    del x
    print("| elements a row | RMSNorm, GB/s | softmax, GB/s | kernels |")
    print("|---|---|---|---|")
    for n in (*LENGTHS, *LONG):
        x, w = normal(1, max(1, elements // n), n), 1.0 + 0.1 * normal(2, n)
        norm = partial(reference.rms_norm, w=wide(w))
        first = measure(partial(ops.rms_norm, x, w), norm, x, clocks)
        second = measure(partial(ops.softmax, x), reference.softmax, x, clocks)
        kernels = f"{first[1]} / {second[1]}"
        print(f"| {n:,} | {first[0]:,.0f} | {second[0]:,.0f} | {kernels} |", flush=True)
        del x, w
        current().pool.trim()


if __name__ == "__main__":
    main()
