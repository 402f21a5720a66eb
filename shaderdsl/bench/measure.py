"""Measuring a row: checked first, warmed, then medians; the peers in the same run."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..runtime import Device, current, profile
from ..runtime.timing import median_time, warm
from .clocks import Clocks
from .work import Row, Work

#: How often the kernels of a call run between two timestamps, as PyTorch's do.
REPEATS = 3

#: What `--against` may name.
PEERS = ("torch", "torch.compile", "handwritten")


@dataclass
class Record:
    """What was measured of one row.

    Attributes:
        seconds: the median, or None where nothing was timed.
        value: in the row's unit.
        error: how far the result is from float64.
        peers: each peer's value in the row's unit.
        notes: what a reader has to know.
        more: further figures.
    """

    name: str
    title: str
    unit: str
    target: float | None
    seconds: float | None = None
    value: float | None = None
    error: float | None = None
    kernels: int = 0
    bytes: int = 0
    flops: int = 0
    peers: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)
    failed: bool = False

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass
class Bench:
    """How to measure.

    Args:
        quick: the small sizes.
        seconds: time for the calls of each row.
        peers: of `PEERS`.
        torch: the module, or None where it is not there.
        compile_until: the reading of `time.perf_counter` after which torch.compile is
            left out.
        clocks: of the device; its rows are timed while they are up.
    """

    quick: bool
    seconds: float
    peers: Sequence[str] = ()
    torch: Any = None
    compile_until: float = float("inf")
    clocks: Clocks = field(default_factory=lambda: Clocks(current()))

    def row(self, row: Row) -> Record:
        """Measure one row; whatever goes wrong is a note of its record."""
        target = row.target
        if row.with_matrices and current().target.features.matrix:
            target = row.with_matrices
        if self.quick:
            target = None  # which is of the large size
        record = Record(row.name, row.title, row.unit, target)
        try:
            work = row.make(self.quick)
            self._ours(row, work, record)
        except Exception as error:
            record.failed = True
            record.notes.append(f"failed: {_line(error)}")
            self._clear()
            return record
        for peer in self.peers:
            self._peer(peer, row, work, record)
        if row.beats is not None and not self.quick:
            record.target = record.peers.get(row.beats)
            if record.target is None:
                record.notes.append(f"its target is {row.beats}, which was not timed")
        del work
        self._clear()
        return record

    def _ours(self, row: Row, work: Work, record: Record) -> None:
        device = current()
        work.run()  # what is traced and compiled once is no part of it
        with profile() as p:
            result = work.run()
        record.kernels, record.bytes, record.flops = (
            p.dispatches,
            work.bytes,
            work.flops,
        )
        record.error = work.error(result)
        del result
        if not record.error <= work.tolerance:
            record.failed = True
            record.notes.append(f"WRONG: {record.error:.1e} from float64")
            return
        record.seconds = self._time(device, work.run, work.seconds, record)
        record.value = row.value(record.seconds, work)
        record.more = work.more()
        # Where a unit of work is no call.
        record.kernels = record.more.get("dispatches", record.kernels)

    def _time(
        self,
        device: Device,
        run: Callable[[], Any],
        seconds: Callable[[], float] | None,
        record: Record,
    ) -> float:
        def measured() -> float:
            warm(device, run, min(0.2, self.seconds))
            if seconds:
                return seconds()
            return median_time(device, run, self.seconds, 5, REPEATS)

        return self._at_full_clocks(measured, record)

    def _at_full_clocks(self, measured: Callable[[], float], record: Record) -> float:
        """The least of up to three measurements, one if the clocks are up after it."""
        times = []
        for _ in range(3):
            self.clocks.rise()
            times.append(measured())
            if self.clocks.are_up():
                return min(times)
        record.notes.append("the device's clocks were low")
        return min(times)

    def _peer(self, peer: str, row: Row, work: Work, record: Record) -> None:
        try:
            if peer == "handwritten":
                self._handwritten(row, work, record)
            elif work.torch is not None and self.torch is not None:
                compiled = peer == "torch.compile"
                if compiled and not work.compiles:
                    return
                if compiled and time.perf_counter() > self.compile_until:
                    record.notes.append("torch.compile left out: the time is short")
                    return
                run = work.torch(self.torch, compiled)
                spent = self._at_full_clocks(
                    lambda: time_torch(self.torch, run, self.seconds), record
                )
                record.peers[peer] = row.value(spent, work)
        except Exception as error:
            record.notes.append(f"{peer} failed: {_line(error)}")

    def _handwritten(self, row: Row, work: Work, record: Record) -> None:
        if work.handwritten is None or current().kind != "wgpu":
            return  # `find_torch` and the command say what is missing
        run = work.handwritten()
        error = work.error(run())
        if not error <= 10 * work.tolerance:
            record.notes.append(f"handwritten is wrong: {error:.1e} from float64")
            return
        spent = self._time(current(), run, None, record)
        record.peers["handwritten"] = row.value(spent, work)

    def _clear(self) -> None:
        """Give memory back before the next row."""
        gc.collect()  # what a training step holds in cycles
        current().pool.trim()
        if self.torch is not None:
            if "torch.compile" in self.peers:
                self.torch._dynamo.reset()
            self.torch.cuda.empty_cache()


def time_torch(torch: Any, run: Callable[[], Any], seconds: float) -> float:
    """Median seconds of a call by CUDA's events, `REPEATS` calls between two."""
    end = time.perf_counter() + min(0.2, seconds)
    for _ in range(4):
        run()
    while time.perf_counter() < end:  # Compiling took long, and the clocks fell.
        run()
        torch.cuda.synchronize()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or (time.perf_counter() < end and len(times) < 50):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(REPEATS):
            run()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last) / (1e3 * REPEATS))
    return statistics.median(times)


def find_torch(peers: Sequence[str]) -> tuple[Any, str]:
    """PyTorch if it is asked for and has a CUDA device, and else why not."""
    if not any(p.startswith("torch") for p in peers):
        return None, ""
    try:
        import torch
    except ImportError:
        return None, "PyTorch is not installed: its columns stay empty"
    if not torch.cuda.is_available():
        return None, "PyTorch finds no CUDA device: its columns stay empty"
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.set_default_device("cuda")
    return torch, ""


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
