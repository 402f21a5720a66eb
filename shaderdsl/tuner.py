"""The search for a kernel's fastest choice on the device in use.

Every candidate is first compared with the plain expressions, which the interpreter
evaluates in float64, and only then timed. What fails is left out, with its reason.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from .ir import expr as E
from .ir import interpret
from .ir.stage import Stage, topo_stages
from .runtime import Buffer, Device, current, use_device
from .runtime import tuned as files
from .runtime.device import say_once
from .runtime.timing import median_time, time_once, warm

__all__ = ["Result", "Search", "default_search", "describe", "searching"]

#: A candidate replaces the default if it is faster by this.
MARGIN = 0.03
#: Seconds of work before each candidate is timed.
_WARM = 0.04
#: Choices that are compiled side by side before they are tried one by one.
_TOGETHER = 24
#: Positions of one stage beyond which the plain expression would take too long.
LARGEST = 1 << 38
#: Elements of one result beyond which the plain expression would not fit in memory.
LARGEST_RESULT = 1 << 28
#: How far a result may be from float64: relative to itself and to the result's scale.
TOLERANCE = {"f32": 3e-4, "f16": 4e-3}
#: Elements that are compared at a time: what the caches of a processor hold.
_PIECE = 1 << 18


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
    device: Any = current()
    spec = device.info.spec
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
    times: dict[Choice, float] = {}
    runs: dict[Choice, Callable[[], Any]] = {}
    _expect(trial)
    end = time.perf_counter() + seconds
    buffers = data.upload(current())
    for choice in trial.choices:
        if len(times) > 1 and time.perf_counter() > end:
            break
        try:
            run = _prepare(trial, choice, buffers, data)
            # Clocks fall while the host prints the next candidate.
            warm(current(), run, _WARM if times else 0.3)
            first = time_once(current(), run)
            if times and first > 2 * min(times.values()):
                times[choice] = first
                continue
            times[choice] = median_time(current(), run, min(0.3, seconds / 20))
            runs[choice] = run
        except DeviceLostError as error:
            result.failed.append((choice, error.message))
            use_device(spec)
            buffers, runs = data.upload(current()), {}
        except Exception as error:
            result.failed.append((choice, _reason(error)))
        if choice == default and default not in times:
            result.skipped = f"the default failed: {result.failed[-1][1]}"
            return result
    result.tried = len(times)
    _decide(result, times, runs)
    return result


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
    result.default_seconds = result.best_seconds = times[result.default]
    if result.default not in runs:
        return
    few = sorted(runs, key=lambda c: times[c])[:3]
    few = list(dict.fromkeys([result.default, *few]))
    rounds: dict[Choice, list[float]] = {c: [] for c in few}
    for _ in range(7):
        for c in few:
            try:
                rounds[c].append(time_once(current(), runs[c]))
            except Exception as error:
                result.failed.append((c, _reason(error)))
                if c == result.default or isinstance(error, DeviceLostError):
                    return  # nothing to compare with: the default stays
                few = [x for x in few if x != c]
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
        check(stage, got, want)
    return run


def check(stage: Stage, got: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> None:
    """Compare a result with the plain expression's.

    Raises:
        ShaderError: where they differ, and by how much.
    """
    pieces = [slice(k, k + _PIECE) for k in range(0, max(want.size, 1), _PIECE)]
    mine, plain = got.reshape(-1), want.reshape(-1)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # NumPy leaves the others to run
        scale = 0.0
        if stage.dtype in TOLERANCE:
            parts = list(pool.map(_squares, (plain[p] for p in pieces)))
            count = sum(n for _, n in parts)
            scale = float(np.sqrt(sum(s for s, _ in parts) / max(count, 1)))
        tolerance = TOLERANCE.get(stage.dtype)
        found = pool.map(
            lambda p: _first_wrong(mine[p], plain[p], tolerance, scale), pieces
        )
        for piece, first in zip(pieces, found):
            if first is not None:
                at = np.unravel_index(piece.start + first, want.shape)
                raise ShaderError(
                    f"wrong: {stage.name}{list(map(int, at))} is {got[at]}, the plain "
                    f"expression gives {want[at]}"
                )


def _squares(want: np.ndarray[Any, Any]) -> tuple[float, int]:
    """The sum of the squares of what is finite, and how much that is."""
    value = want.astype(np.float64)
    finite = value[np.isfinite(value)]
    return float(finite @ finite), finite.size


def _first_wrong(
    got: np.ndarray[Any, Any],
    want: np.ndarray[Any, Any],
    tolerance: float | None,
    scale: float,
) -> int | None:
    """The first place where they differ; exactly, where there is no tolerance."""
    if tolerance is None:
        wrong = got != want
    else:
        value = want.astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            off = np.abs(got.astype(np.float64) - value)
            wrong = ~(off <= tolerance * (np.abs(value) + scale))
        wrong &= ~((got == value) | (np.isnan(got) & np.isnan(value)))
    return int(np.argmax(wrong)) if wrong.any() else None


@dataclass
class Data:
    """Inputs for a trial, and what the plain expressions make of them in float64."""

    inputs: list[np.ndarray[Any, Any]]
    scalars: dict[str, float]
    wanted: list[np.ndarray[Any, Any]]
    dtypes: list[str]

    @classmethod
    def draw(cls, trial: Trial) -> Data | None:
        """Random inputs of both signs, else positive ones; None if no result is finite
        on those either.

        Raises:
            ValueError: a kernel that was derived from more than it reads, such as the
                sum that attention's backward takes from its results, cannot be
                compared apart from them.
        """
        bounds = _id_bounds(trial)
        scalars = {
            n.data: 1 if n.dtype != "f32" else 0.5
            for s in trial.members
            if s.body is not None
            for n in E.topo(s.body)
            if n.kind == "scalar"
        }
        for positive in (False, True):
            rng = np.random.default_rng(7)
            given = {s: _random(rng, s, positive, bounds) for s in trial.inputs}
            values: dict[Stage, Any] = {
                s: v.astype(np.float64) if s.dtype in E.FLOATS else v
                for s, v in given.items()
            }
            for member in trial.members:
                # What a kernel computes for itself alone comes before its readers.
                for s in topo_stages([member], stop=values):
                    if s.kind == "input" and s not in values:
                        raise ValueError(f"{s.name} is not among what it is given")
                    if s not in values:
                        values[s] = interpret.evaluate_stage(
                            s, values, "float64", scalars
                        )
            wanted = [values[s] for s in trial.outputs]
            if all(np.isfinite(w).all() for w in wanted):
                dtypes = [s.dtype for s in trial.inputs]
                return cls(list(given.values()), scalars, wanted, dtypes)
        return None

    def upload(self, device: Device) -> list[Buffer]:
        """The inputs on a device."""
        return [
            device.upload(x, dtype)
            for x, dtype in zip(self.inputs, self.dtypes, strict=True)
        ]


def _random(
    rng: np.random.Generator, s: Stage, positive: bool, bounds: Mapping[Stage, int]
) -> np.ndarray[Any, Any]:
    if s.dtype in E.FLOATS:
        x = rng.standard_normal(s.shape, dtype=np.float32)
        if positive:
            x = 0.25 + 0.75 * rng.random(s.shape, dtype=np.float32)
        return np.asarray(x, np.float16 if s.dtype == "f16" else np.float32)
    if s.dtype == "bool":
        return np.asarray(rng.integers(0, 2, s.shape), np.bool_)
    kind = np.int32 if s.dtype == "i32" else np.uint32
    if s in bounds:
        return np.asarray(rng.integers(0, bounds[s], s.shape), kind)
    # Counts more likely than not: of steps, of rows.
    return np.asarray(rng.integers(1, 8, s.shape), kind)


def _id_bounds(trial: Trial) -> dict[Stage, int]:
    """For integer inputs the size of the axis that they index."""
    bounds: dict[Stage, int] = {}

    def note(e: E.Expr, size: int) -> None:
        for n in E.loads(e):
            if n.dtype in ("i32", "u32"):
                bounds[n.data] = min(size, bounds.get(n.data, size))

    for s in trial.members:
        if s.body is None:
            continue
        for n in E.topo(s.body):
            if n.kind == "load":
                for i, size in zip(n.args, n.data.shape, strict=True):
                    note(i, max(size, 1))
            elif n.kind == "apply" and n.data == "eq":
                for a, b in (n.args, n.args[::-1]):
                    if a.kind == "index":
                        note(b, s.space[a.data])
    return bounds


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
