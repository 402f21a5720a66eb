"""Search for faster schedules on this device and keep them for later processes.

shaderdsl tune model.py:rms_norm --sizes t=2048,d=768
shaderdsl tune matmul swiglu          (rows of `shaderdsl bench`; see bench --rows)
shaderdsl tune --list
shaderdsl tune --ship shaderdsl/tuned      (a file that comes with the package)

Each candidate is compared with the plain expression in float64 before it is timed.
SHADERDSL_TUNE=1 does the same for whatever a program runs; SHADERDSL_TUNE=0 uses
nothing that was tuned.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import ShaderError

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "targets",
        nargs="*",
        metavar="FILE:OP | ROW",
        help="ops of a file or module, or rows of the benchmark (default: all rows)",
    )
    parser.add_argument(
        "--sizes", metavar="t=16,d=512", help="sizes of an op's axes (default: 16)"
    )
    parser.add_argument(
        "--dtypes", metavar="ids=i32", help="dtypes of an op's operands (default: f32)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        metavar="S",
        help="time for each kernel (default: %(default)s)",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="M",
        help="begin no kernel after this (default: no limit)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="the small sizes of the benchmark's rows"
    )
    parser.add_argument(
        "--again", action="store_true", help="also what was tuned before"
    )
    parser.add_argument(
        "--ship",
        metavar="FOLDER",
        help="write what was faster than the default as a file to be shipped",
    )
    parser.add_argument(
        "--list", action="store_true", help="print what was tuned on this device"
    )


def run(args: argparse.Namespace) -> int:
    from ..runtime import current
    from ..tuner import Search, describe, searching
    from . import UsageError

    if args.seconds <= 0 or (args.minutes is not None and args.minutes <= 0):
        raise UsageError("--seconds and --minutes must be positive")
    device = current()
    if args.list:
        return _list(device)
    if args.ship:
        return _ship(device, args.ship)
    if device.kind != "wgpu":
        print(f"shaderdsl tune: {device.name} has nothing to tune", file=sys.stderr)
        return 1
    failed = found = 0

    def report(result: Any) -> None:
        nonlocal found
        found += not result.skipped
        print(f"  {describe(result)}", flush=True)
        for choice, why in result.failed:
            print(f"    {choice} was not used: {why}", flush=True)

    print(f"device: {device.name}")
    search = Search(args.seconds, report, args.again)
    if args.minutes is not None:
        search.until = time.perf_counter() + 60 * args.minutes
    for name, prepare in _works(args):
        print(name, flush=True)
        try:
            work = prepare()
            with searching(search):
                work()
        except Exception as error:  # The others are tuned all the same.
            failed += 1
            print(f"  could not be tuned: {error}", file=sys.stderr, flush=True)
    print(f"{found} kernel(s) searched; the winners are kept for this device")
    return 1 if failed else 0


def _works(args: argparse.Namespace) -> list[tuple[str, Any]]:
    """By name, what makes the inputs and gives what to plan under the search."""
    import shaderdsl as sd

    from ..bench import rows
    from .source import arguments, find_ops, pairs

    named = [t for t in args.targets if ":" in t or t.endswith(".py")]
    chosen = [t for t in args.targets if t not in named]
    works: list[tuple[str, Any]] = []
    sizes, dtypes = pairs(args.sizes, "--sizes"), pairs(args.dtypes, "--dtypes")
    for target in named:
        for op in find_ops(target)[1]:
            specs, given, known = arguments(op, sizes, dtypes)
            axes = ", ".join(f"{name}={size}" for name, size in known.items())

            def plan(op: Any = op, specs: Any = specs, given: Any = given) -> None:
                sd.lower(op, *specs, **given)
                if any(x.dtype in ("f32", "f16") for x in specs):
                    sd.lower(op, *specs, backward=True, **given)

            works.append((f"{op.name} ({axes})", lambda plan=plan: plan))
    if chosen or not named:
        found, unknown = rows.chosen(chosen)
        for name in unknown:
            works.append((name, partial(_unknown, name)))
        for row in found:
            works.append((row.name, partial(_of_row, row, args.quick)))
    return works


def _of_row(row: Any, quick: bool) -> Any:
    """The kernels that make a row's inputs are none of its own, but a model is planned
    while its row is made.
    """
    from ..bench.model_rows import MODEL_ROWS

    if row in MODEL_ROWS:
        return lambda: row.make(quick).run()
    return row.make(quick).run


def _unknown(name: str) -> None:
    raise ShaderError(f"no row is called {name!r}", cure="bench --rows lists them")


def _ship(device: Any, folder: str) -> int:
    from ..runtime import tuned

    if device.kind != "wgpu" or not tuned.load_own(device.name, device.driver):
        print(f"shaderdsl tune: nothing was tuned on {device.name}", file=sys.stderr)
        return 1
    made = f"shaderdsl tune, {datetime.date.today()}"
    print(tuned.ship(device.name, device.driver, Path(folder), made))
    return 0


def _list(device: Any) -> int:
    from ..runtime import tuned

    if device.kind != "wgpu":
        print(f"{device.name} has nothing to tune")
        return 0
    known = device.target.tuned
    shipped = tuned.load_shipped(device.name, device.driver)
    own = len(tuned.load_own(device.name, device.driver))
    print(known.note or f"{own} kernel(s) in {tuned.path_of(device.name)}")
    print(shipped.note or f"{len(shipped)} kernel(s) came with shaderdsl")
    for entry in tuned.entries(device.name, device.driver):
        print(
            f"  {entry['kernel']}: {entry['choice']}, {entry['microseconds']:,} µs "
            f"({entry['default']}: {entry['default_microseconds']:,} µs)"
        )
    return 0
