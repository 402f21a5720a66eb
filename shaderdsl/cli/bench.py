"""Time the benchmark's rows on this device, beside others in the same run.

shaderdsl bench                       every row at the sizes of a large GPU
shaderdsl bench --quick               sizes that a software driver does in a minute
shaderdsl bench matmul softmax --against torch,torch.compile,handwritten
shaderdsl bench --rows                the names

Each result is checked against NumPy in float64 before it is timed. Times are medians
of the device's own timestamps; of whole steps, of the wall clock.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="rows, or beginnings of their names"
    )
    parser.add_argument(
        "--rows", action="store_true", help="print the names of the rows and stop"
    )
    parser.add_argument(
        "--against",
        default="",
        metavar="PEER,…",
        help="torch, torch.compile, handwritten",
    )
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, for software drivers"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help="time for the calls of a row (default: 0.5, --quick 0.2)",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=60.0,
        metavar="M",
        help="begin no row after this (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw a roofline")


def run(args: argparse.Namespace) -> int:
    from ..bench import report
    from ..bench.measure import PEERS, Bench, find_torch
    from ..bench.rows import ROWS, chosen, order
    from ..runtime import current
    from ..runtime.timing import has_timestamps
    from . import UsageError

    if args.rows:
        for row in ROWS:
            target = f"  target {row.target:g} {row.unit}" if row.target else ""
            if row.beats:
                target = f"  target: no less than {row.beats}"
            print(f"{row.name:39} {row.title}{target}")
        return 0
    seconds = args.seconds if args.seconds is not None else 0.2 if args.quick else 0.5
    if seconds <= 0 or args.minutes <= 0:
        raise UsageError("--seconds and --minutes must be positive")
    peers = [p for p in args.against.split(",") if p]
    for peer in peers:
        if peer not in PEERS:
            raise UsageError(f"--against knows {', '.join(PEERS)}, not {peer!r}")
    rows, unknown = chosen(args.names)
    for name in unknown:
        print(
            f"shaderdsl bench: no row is called {name!r}; --rows lists them",
            file=sys.stderr,
        )
    if not rows:
        return 1
    rows.sort(key=order)
    start = time.perf_counter()
    device = current()
    head = _head(device)
    print("\n".join(f"{key}: {value}" for key, value in head.items()))
    torch, missing = find_torch(peers)
    for text in (
        missing,
        "the device has no kernels: the column of hand-written ones stays empty"
        if "handwritten" in peers and device.kind != "wgpu"
        else "",
        "" if has_timestamps(device) else "no timestamps: times of the wall clock",
    ):
        if text:
            print(text)
    sys.stdout.flush()
    if torch is not None:
        head["torch"] = f"{torch.__version__}, TF32 off"
    # Compiling takes PyTorch longest: it may have three quarters of the time.
    compile_until = start + 45 * args.minutes
    bench = Bench(args.quick, seconds, peers, torch, compile_until)
    records = []
    for row in rows:
        if time.perf_counter() - start > 60 * args.minutes:
            print(f"{row.name:39} not begun: the {args.minutes:g} minutes are over")
            continue
        records.append(bench.row(row))
        print(report.line(records[-1], peers), flush=True)
        if args.json:
            report.write_json(args.json, head, records)
    print()
    if args.quick:
        print("small sizes; the names are those of the large ones\n")
    print(report.table(records, peers, targets=not args.quick))
    if args.plot:
        trouble = report.roofline(args.plot, records, device.name)
        print(trouble or f"roofline: {args.plot}")
    print(f"{time.perf_counter() - start:.0f} s")
    return 1 if unknown or any(r.failed for r in records) else 0


def _head(device: Any) -> dict[str, Any]:
    """What the figures belong to."""
    import numpy as np

    from .. import __version__

    return {
        "device": device.name,
        "driver": getattr(device, "driver", f"NumPy {np.__version__}"),
        "shaderdsl": __version__,
        "python": f"{platform.python_version()} on {platform.machine()}",
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }
