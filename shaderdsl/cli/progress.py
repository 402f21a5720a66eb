"""Progress: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

__all__ = ["Progress", "duration"]


def duration(seconds: float) -> str:
    """``75`` → ``"1:15"``."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Progress:
    """Shows how far a job of ``total`` units is.

    On a terminal one line is drawn over and over. Elsewhere each ``update`` that is due
    prints a line: every ``every`` seconds, and the last.

    Args:
        total: units of work in all.
        label: what the job is.
        done: units that an earlier run did already; time left is judged without them.
        stream: where to; standard output by default.
        every: seconds between two updates (a tenth of it on a terminal).
    """

    def __init__(
        self,
        total: int,
        label: str,
        *,
        done: int = 0,
        stream: TextIO | None = None,
        every: float = 5.0,
    ):
        self.total, self.label, self.first = total, label, done
        self.stream = stream or sys.stdout
        self.terminal = self.stream.isatty()
        self.every = every / 10 if self.terminal else every
        self.start = time.perf_counter()
        self.shown = self.start if not self.terminal else 0.0
        self.width = 0

    def due(self, done: int) -> bool:
        """Whether it is time to call ``update``: then is when numbers are read."""
        return done >= self.total or time.perf_counter() - self.shown >= self.every

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def update(self, done: int, note: str = "") -> None:
        """Shows ``done`` units, the note and the time that is left."""
        self.shown = time.perf_counter()
        worked = done - self.first
        left = ""
        if worked > 0 and done < self.total:
            rest = self.seconds / worked * (self.total - done)
            left = f"{duration(rest)} left"
        elif done >= self.total:
            left = f"took {duration(self.seconds)}"
        parts = [f"{done:{len(str(self.total))}}/{self.total}", note, left]
        text = "  ".join(part for part in parts if part)
        if self.terminal:
            filled = int(20 * done / max(1, self.total))
            text = f"{self.label} [{'#' * filled}{'.' * (20 - filled)}] {text}"
            self.stream.write("\r" + text.ljust(self.width))
            self.width = len(text)
        else:
            self.stream.write(f"{self.label} {text}\n")
        self.stream.flush()

    def line(self, text: str) -> None:
        """A line of its own above the bar."""
        if self.terminal:
            self.stream.write("\r" + " " * self.width + "\r")
        self.stream.write(text + "\n")
        self.stream.flush()

    def close(self) -> None:
        """Ends the bar's line."""
        if self.terminal and self.width:
            self.stream.write("\n")
            self.stream.flush()
