"""Counting and timing what a device does: ``with profile() as p: step(...)``.

Counters cost one test of an empty tuple while nothing is profiled.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..codegen.program import Kernel

_lock = threading.Lock()
_active: tuple[Profile, ...] = ()


@dataclass
class Event:
    """One dispatch: host time in seconds since the profile began; device time in s.

    ``seconds`` is None where the device was not timed.
    """

    name: str
    archetype: str
    start: float
    seconds: float | None
    bytes: int
    flops: int
    thread: int


@dataclass
class Profile:
    """What happened inside a ``with profile()`` block, on every device and thread.

    Attributes:
        dispatches: kernels that were launched.
        compiled: pipelines that were created (on the device ``cpu``: kernels met for
            the first time).
        uploads, downloads: transfers between NumPy and the device.
        upload_bytes, download_bytes: their sizes.
        peak_bytes: most bytes of device memory in use at once.
        timestamps: whether device time was asked for; each kernel then runs in a pass
            of its own, and each call waits for its end.
        repeats: how often the kernels of a call run between two timestamps, if those
            of each kernel are not wanted.
        seconds: device time of the calls, where it was asked for.
    """

    timestamps: bool = False
    repeats: int = 0
    seconds: float = 0.0
    dispatches: int = 0
    compiled: int = 0
    uploads: int = 0
    downloads: int = 0
    upload_bytes: int = 0
    download_bytes: int = 0
    peak_bytes: int = 0
    events: list[Event] = field(default_factory=list, repr=False)
    began: float = field(default_factory=time.perf_counter, repr=False)

    def rows(self) -> list[tuple[str, ...]]:
        """Titles, and one row a kernel name, the dearest first: launches, device ms,
        bytes and FLOPs.
        """
        rows: dict[tuple[str, str], list[float]] = {}
        timed: set[tuple[str, str]] = set()
        for event in list(self.events):
            key = (event.name, event.archetype)
            row = rows.setdefault(key, [0, 0.0, 0, 0])
            row[0] += 1
            row[2] += event.bytes
            row[3] += event.flops
            if event.seconds is not None:
                row[1] += event.seconds * 1e3
                timed.add(key)
        # The dearest first; without times, the one that moves most.
        order = sorted(rows, key=lambda k: (-rows[k][1], -rows[k][2], k))
        lines: list[tuple[str, ...]] = [
            ("kernel", "archetype", "count", "ms", "bytes", "FLOPs")
        ]
        for key in order:
            count, ms, moved, flops = rows[key]
            spent = f"{ms:.3f}" if key in timed else "-"
            lines.append(
                (*key, f"{count:.0f}", spent, f"{moved:,.0f}", f"{flops:,.0f}")
            )
        return lines

    def table(self) -> str:
        """One line a kernel name: launches, device ms, bytes and FLOPs, in columns."""
        lines = self.rows()
        widths = [max(len(line[i]) for line in lines) for i in range(6)]
        text = []
        for line in lines:
            left = [line[i].ljust(widths[i]) for i in range(2)]
            right = [line[i].rjust(widths[i]) for i in range(2, 6)]
            text.append("  ".join(left + right).rstrip())
        return "\n".join(text)

    def _repr_html_(self) -> str:
        from ..interop.html import profile_html

        return profile_html(self)

    def save(self, path: str | Path) -> None:
        """Write a trace that chrome://tracing and ui.perfetto.dev open (JSON)."""
        trace = []
        for event in list(self.events):
            entry: dict[str, object] = {
                "name": event.name,
                "cat": event.archetype,
                "pid": 0,
                "tid": event.thread,
                "ts": event.start * 1e6,
                "args": {"bytes": event.bytes, "flops": event.flops},
            }
            if event.seconds is None:
                entry |= {"ph": "i", "s": "t"}
            else:
                entry |= {"ph": "X", "dur": event.seconds * 1e6}
            trace.append(entry)
        text = json.dumps({"traceEvents": trace, "displayTimeUnit": "ms"})
        Path(path).write_text(text, encoding="utf-8")


@contextmanager
def profile(*, timestamps: bool = False, repeats: int = 0) -> Iterator[Profile]:
    """Count what happens inside the block; blocks may nest and each sees its own.

    Args:
        timestamps: also time each kernel on the device where it can.  It slows the
            work down, because each kernel gets a pass of its own.
        repeats: with ``timestamps``, time whole calls instead: what a call launches
            runs so often in one pass, as in a loop of such calls, and ``seconds`` is
            the mean.  Calls that overwrite what they were given run once.
    """
    global _active
    mine = Profile(timestamps=timestamps, repeats=repeats)
    with _lock:
        _active = (*_active, mine)
    try:
        yield mine
    finally:
        with _lock:
            _active = tuple(p for p in _active if p is not mine)


def active() -> bool:
    """Whether anything is being profiled."""
    return bool(_active)


def wants_timestamps() -> bool:
    """Whether any open profile asked for device times."""
    return any(p.timestamps for p in _active)


def wanted_repeats() -> int:
    """How often a timed call is to run as a whole; 0 times each kernel."""
    return max((p.repeats for p in _active), default=0)


def note_dispatches(
    kernels: list[Kernel], live_bytes: int, seconds: list[float] | None = None
) -> None:
    """Count launches in order; ``seconds`` holds their device times if known, or that
    of all of them.
    """
    if not _active:
        return
    now, thread = time.perf_counter(), threading.get_ident()
    with _lock:
        for p in _active:
            p.dispatches += len(kernels)
            p.peak_bytes = max(p.peak_bytes, live_bytes)
            # Timed kernels ended one after another, the last of them about now.
            start = now - p.began - sum(seconds or ())
            p.seconds += sum(seconds or ())
            apart = seconds is not None and len(seconds) == len(kernels)
            for i, kernel in enumerate(kernels):
                spent = seconds[i] if seconds and apart else None
                p.events.append(
                    Event(
                        kernel.name,
                        kernel.archetype,
                        start,
                        spent,
                        kernel.bytes,
                        kernel.flops,
                        thread,
                    )
                )
                start += spent or 0.0


def open_profiles() -> tuple[Profile, ...]:
    """Who counts what is asked for now and done later by another thread."""
    return _active


def note_compiled(count: int = 1, profiles: tuple[Profile, ...] | None = None) -> None:
    """Count created pipelines, for those who asked for them if said."""
    with _lock:
        for p in _active if profiles is None else profiles:
            p.compiled += count


def note_upload(nbytes: int, live_bytes: int) -> None:
    """Count one transfer to the device."""
    with _lock:
        for p in _active:
            p.uploads += 1
            p.upload_bytes += nbytes
            p.peak_bytes = max(p.peak_bytes, live_bytes)


def note_download(nbytes: int) -> None:
    """Count one transfer from the device."""
    with _lock:
        for p in _active:
            p.downloads += 1
            p.download_bytes += nbytes
