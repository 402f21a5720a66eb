"""The search for a kernel's fastest choice on the device in use.

Every candidate is first compared with the plain expressions, which the interpreter
evaluates in float64, and only then timed. What fails is left out, with its reason.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

from . import engine
from .codegen.choice import Choice, Tuned
from .codegen.lower import trials
from .codegen.target import Target
from .codegen.tuning import Trial
from .errors import DeviceLostError, ShaderError
from .ir.stage import Stage
from .runtime import Buffer, current, use_device
from .runtime import tuned as files
from .runtime.device import say_once
from .runtime.timing import median_time, time_once, warm
from .tuner_check import Data, check

__all__ = ["Result", "Search", "default_search", "describe", "searching"]

#: A candidate replaces the default if it is faster by this.
MARGIN = 0.03
#: Choices that are compiled side by side before they are tried one by one.
_TOGETHER = 24
#: Positions of one stage beyond which the plain expression would take too long.
LARGEST = 1 << 38
#: Elements of one result beyond which the plain expression would not fit in memory.
LARGEST_RESULT = 1 << 28


@dataclass
class Result:
    """What a search found for one kernel.

    Attributes:
        best: the choice to use, which is the default where nothing was faster.
        default_seconds, best_seconds: both in one round, taken in turn.
        tried: candidates that were right and timed.
        failed: candidates that were not used, each with its reason.
        skipped: why nothing was searched, or "".
    """

    name: str
    default: Choice
    best: Choice
    default_seconds: float = 0.0
    best_seconds: float = 0.0
    tried: int = 0
    failed: list[tuple[Choice, str]] = field(default_factory=list)
    skipped: str = ""


@dataclass
class Search:
    """How to search.

    Args:
        seconds: time for each kernel, the float64 evaluation not counted.
        report: called with each result.
        again: whether to search for kernels that have a choice already.
        until: the reading of `time.perf_counter` after which no kernel is begun.
    """

    seconds: float = 20.0
    report: Callable[[Result], None] = lambda result: None
    again: bool = False
    until: float = float("inf")
    seen: set[str] = field(default_factory=set)

    def tune(
        self,
        outs: Sequence[Stage],
        inputs: Sequence[Stage],
        donated: frozenset[int],
        target: Target,
    ) -> None:
        """Search for every kernel of a graph that has no choice on this device yet."""
        if current().kind != "wgpu":
            return
        for trial in trials(outs, target, inputs=inputs, donated=donated):
            known = trial.key in current().target.tuned and not self.again
            if known or trial.key in self.seen:
                continue
            self.seen.add(trial.key)
            if time.perf_counter() > self.until:
                default = trial.choices[0]
                late = "not begun: the time is over"
                self.report(Result(trial.name, default, default, skipped=late))
                continue
            try:
                result = find_best(trial, self.seconds)
            except Exception as error:  # The program that is tuned goes on.
                default = trial.choices[0]
                result = Result(trial.name, default, default, skipped=_reason(error))
            self.report(result)
            if not result.skipped:
                keep(trial.key, result)


@contextlib.contextmanager
def searching(search: Search) -> Iterator[Search]:
    """Tune the kernels of every plan that is made inside of the block."""
    before, engine.before_planning = engine.before_planning, search.tune
    try:
        yield search
    finally:
        engine.before_planning = before


@cache
def default_search() -> Search:
    """What ``SHADERDSL_TUNE=1`` asks for: a line on stderr for each kernel."""
    return Search(report=lambda r: say_once(f"shaderdsl: tuned {describe(r)}"))


def keep(key: str, result: Result) -> None:
    """Use a result from now on, in this process and in later ones."""
    device: Any = current()
    best = replace(result.best, over=result.default.values)
    choices = Tuned({**device.target.tuned, key: best})
    device.target = replace(device.target, tuned=choices)
    measured = {
        "kernel": result.name,
        "microseconds": round(result.best_seconds * 1e6, 1),
        "default": str(result.default),
        "default_microseconds": round(result.default_seconds * 1e6, 1),
    }
    try:
        files.save(device.name, device.driver, {key: best}, {key: measured})
    except OSError as error:
        say_once(f"shaderdsl: tuned schedules are not kept on disk: {error}")


def find_best(trial: Trial, seconds: float) -> Result:
    """Try a kernel's choices on the device in use."""
    default = trial.choices[0]
    result = Result(trial.name, default, default)
    size = max((s.size for s in (*trial.outputs, *trial.members)), default=0)
    space = max((int(np.prod(s.space, dtype=object)) for s in trial.members), default=0)
    if size > LARGEST_RESULT or space > LARGEST:
        result.skipped = "too large to compare with the plain expression"
        return result
    try:
        data = Data.draw(trial)
    except (KeyError, ValueError, MemoryError) as error:
        result.skipped = f"its plain expression cannot be evaluated: {_reason(error)}"
        return result
    if data is None:
        result.skipped = "its plain expression is not finite on random inputs"
        return result
    start = time.perf_counter()
    runs = _right_ones(trial, data, result, start + seconds / 2)
    if default not in runs:
        result.skipped = f"the default failed: {result.failed[-1][1]}"
        return result
    _decide(result, _timed(runs, result, seconds, start + seconds), runs)
    return result


def _right_ones(
    trial: Trial, data: Data, result: Result, end: float
) -> dict[Choice, Callable[[], Any]]:
    """The choices whose results are right, with their calls; the default first."""
    default = result.default
    runs: dict[Choice, Callable[[], Any]] = {}
    buffers = data.upload(current())
    _expect(trial)
    for choice in trial.choices:
        if len(runs) > 1 and time.perf_counter() > end:
            break
        try:
            runs[choice] = _prepare(trial, choice, buffers, data)
        except DeviceLostError as error:
            result.failed.append((choice, error.message))
            _again()
            runs, buffers = {}, data.upload(current())
            if choice != default:  # What was prepared before went with the device.
                runs[default] = _prepare(trial, default, buffers, data)
        except Exception as error:
            result.failed.append((choice, _reason(error)))
        if default not in runs:
            break
    return runs


def _timed(
    runs: Mapping[Choice, Callable[[], Any]],
    result: Result,
    seconds: float,
    end: float,
) -> dict[Choice, float]:
    """Seconds of each choice, one after another, so that clocks stay up."""
    times: dict[Choice, float] = {}
    warm(current(), runs[result.default], 0.3)
    for choice, run in runs.items():
        if len(times) > 1 and time.perf_counter() > end:
            break
        try:
            first = time_once(current(), run)
            if not times or first < 2 * min(times.values()):
                each = min(0.3, seconds / 40)
                times[choice] = median_time(current(), run, each, 3, _repeats(first))
            else:
                times[choice] = first
        except DeviceLostError as error:
            result.failed.append((choice, error.message))
            _again()  # without what was prepared: the default stays
            return {c: t for c, t in times.items() if c == result.default}
        except Exception as error:
            result.failed.append((choice, _reason(error)))
    result.tried = len(times)
    return times


def _again() -> None:
    """Open a device that was lost."""
    device: Any = current()
    use_device(device.info.spec)


def _repeats(seconds: float) -> int:
    """How often a kernel runs between two timestamps: beside itself, as in a plan,
    unless it is so long that this makes no difference.
    """
    return 3 if seconds < 0.01 else 0


def _expect(trial: Trial) -> None:
    """Begin to compile the most promising choices side by side."""
    for choice in trial.choices[:_TOGETHER]:
        with contextlib.suppress(Exception):  # Its reason comes when it is its turn.
            current().expect(trial.program(choice).kernels)


def _decide(
    result: Result,
    times: Mapping[Choice, float],
    runs: Mapping[Choice, Callable[[], Any]],
) -> None:
    """Once more the fastest few beside the default, in turn: what was faster by chance
    is found out.
    """
    if result.default not in times:
        result.skipped = "the default could not be timed"
        return
    result.default_seconds = result.best_seconds = times[result.default]
    if len(times) == 1:
        return
    few = sorted(times, key=lambda c: times[c])[:3]
    few = list(dict.fromkeys([result.default, *few]))
    repeats = _repeats(times[result.default])
    rounds: dict[Choice, list[float]] = {c: [] for c in few}
    for _ in range(9):
        for c in few:
            try:
                rounds[c].append(time_once(current(), runs[c], repeats))
            except DeviceLostError as error:
                result.failed.append((c, error.message))
                _again()
                return  # nothing to compare with: the default stays
            except Exception as error:
                result.failed.append((c, _reason(error)))
                few = [x for x in few if x != c]
                if c == result.default:
                    return
    medians = {c: float(np.median(rounds[c])) for c in few}
    best = min(few, key=lambda c: medians[c])
    result.default_seconds = medians[result.default]
    if medians[best] < (1 - MARGIN) * medians[result.default]:
        result.best = best
    result.best_seconds = medians[result.best]


def _prepare(
    trial: Trial, choice: Choice, buffers: Sequence[Buffer], data: Data
) -> Callable[[], Any]:
    """A choice's call, after its results were found right.

    Raises:
        ShaderError: they are not, or the device refused it.
    """
    device = current()
    executable = device.build(trial.program(choice))

    def run() -> list[Buffer]:
        return executable(buffers, data.scalars)

    # Memory that a run before filled with right results would hide what is not written.
    device.pool.trim()
    poison = [
        device.upload(np.full(-(-s.nbytes // 4), 0x7FC12345, np.uint32), "u32")
        for s in trial.outputs
    ]
    del poison
    results = run()
    for stage, buffer, want in zip(trial.outputs, results, data.wanted, strict=True):
        got = device.download(buffer, stage.shape, stage.dtype)
        check(stage, got, want, stage in trial.hidden)
    return run


def _reason(error: Exception) -> str:
    text = error.message if isinstance(error, ShaderError) else str(error)
    return text.strip().partition("\n")[0] or type(error).__name__


def describe(result: Result) -> str:
    """One line about a result."""
    if result.skipped:
        return f"{result.name}: {result.skipped}"
    gain = result.default_seconds / max(result.best_seconds, 1e-12)
    left = f", {len(result.failed)} not used" if result.failed else ""
    if result.best == result.default:
        what = f"{result.best} stays"
    else:
        what = f"{result.best} instead of {result.default}, {gain:.2f}× as fast"
    return (
        f"{result.name}: {result.best_seconds * 1e6:,.1f} µs; {what} "
        f"({result.tried} timed{left})"
    )
