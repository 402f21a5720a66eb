"""Random programs run in every way there is, against float64; failures are cut down.

As a command: ``python tests/program_checks.py --first 0 --count 10000`` runs each
program on the device ``cpu`` and in one more way, in turn, and every fifth in all ways.
A failure is printed as the smallest program found that still fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from random_programs import Program, Step, draw

import shaderdsl as sd
from shaderdsl import finite
from shaderdsl.codegen import split
from shaderdsl.engine import Plan, captured_inputs, placeholder
from shaderdsl.ir import differentiate, interpret
from shaderdsl.ir.stage import Stage, kept, retarget, topo_stages
from shaderdsl.tracing import Traced

__all__ = ["WAYS", "Program", "Step", "check", "shrink"]

TOLERANCE = 2e-4


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Decides at random among all choices of a schedule that fit."""

    seed: int

    def decide(
        self,
        schedule: str,
        default: Any,
        candidates: Callable[[], Any],
        fits: Callable[[Any], bool],
    ) -> Any:
        options = [default, *(c for c in candidates() if fits(c))]
        number = zlib.crc32(f"{self.seed} {schedule} {default}".encode())
        return options[number % len(options)]


def _target(**changes: Any) -> Callable[[Any, int], Any]:
    def changed(target: Any, seed: int) -> Any:
        if changes.get("family") == "gpu":
            features = dataclasses.replace(target.features, wide_words=False)
            target = dataclasses.replace(target, features=features)
        more = {k: v(seed) if callable(v) else v for k, v in changes.items()}
        return dataclasses.replace(target, **more)

    return changed


# From where products are cut into blocks, scores stored, loops cut.
SMALL: dict[str, Any] = {"block_from": 256, "scores": 4096, "loop_budget": 100}

# name: device, limits, what the target becomes, what the graph becomes
WAYS: dict[str, tuple[str, str, Callable[[Any, int], Any], str | None]] = {
    "cpu": ("cpu", "adapter", _target(), None),
    "software": ("wgpu", "adapter", _target(), None),
    "portable": ("wgpu", "portable", _target(), None),
    "gpu": ("wgpu", "adapter", _target(family="gpu"), None),
    "gpu portable": ("wgpu", "portable", _target(family="gpu"), None),
    "drawn": ("wgpu", "portable", _target(choice=Drawn), None),
    "gpu drawn": ("wgpu", "portable", _target(family="gpu", choice=Drawn), None),
    "two-pass": ("wgpu", "portable", _target(online=False), None),
    "gpu two-pass": (
        "wgpu",
        "portable",
        _target(family="gpu", online=False),
        None,
    ),
    "stored": ("wgpu", "portable", _target(), "store"),
    "inlined": ("wgpu", "portable", _target(), "inline"),
    "unfused": ("wgpu", "portable", _target(), "alone"),
    "cut": ("wgpu", "portable", _target(**SMALL), None),
    "gpu cut": ("wgpu", "portable", _target(family="gpu", choice=Drawn, **SMALL), None),
}
#: Ways in which small sizes meet what is there for large ones.
CUT = ("cut", "gpu cut")
THRESHOLDS: tuple[tuple[Any, str, int], ...] = (
    (split, "LONG_ROW", 16),
    (split, "SHARE", 4),
    (split, "SCATTER", 8),
)


@contextmanager
def way(name: str, seed: int) -> Iterator[str | None]:
    """The device and target of one way; gives what becomes of the graph."""
    device_name, limits, change, graph = WAYS[name]
    device = sd.use_device(device_name, limits=limits)
    before = device.target
    device.target = change(before, seed)
    with ExitStack() as stack:
        stack.callback(setattr, device, "target", before)
        for module, constant, value in THRESHOLDS if name in CUT else ():
            stack.callback(setattr, module, constant, getattr(module, constant))
            setattr(module, constant, value)
        yield graph


class Job:
    """A program's graph with its gradients, and what float64 says."""

    def __init__(self, program: Program, expected: bool = True):
        self.program = program
        self.xs = program.inputs()
        traced = Traced(program, tuple(self.xs), "random")
        r = np.random.default_rng(program.seed + 1)
        # A random cotangent in the middle of a graph, or a plain sum as the loss.
        self.dys = [
            np.asarray(
                r.standard_normal(s.shape) if program.seed % 2 else np.ones(s.shape),
                np.float32,
            )
            for s in traced.outs
        ]
        seeds = [
            placeholder(("program cotangent", k), s.shape, s.dtype, "dy")
            for k, s in enumerate(traced.outs)
        ]
        gradients = differentiate.vjp(traced.outs, seeds, traced.inputs)
        self.results = len(traced.outs)
        self.forward = traced.outs
        self.names = [f"result {k}" for k in range(len(traced.outs))]
        self.names += [f"gradient {k}" for k, g in enumerate(gradients) if g]
        self.outs = [*traced.outs, *(g for g in gradients if g is not None)]
        self.wrt = [k for k, g in enumerate(gradients) if g is not None]
        self.inputs = [*traced.inputs, *seeds]
        self.given = dict(zip(self.inputs, [*self.xs, *self.dys], strict=True))
        self.captured = {
            s: np.asarray(s.source) for s in captured_inputs(self.outs, self.inputs)
        }
        self.expected = self.wide() if expected else []

    def wide(self, **moved: Any) -> list[np.ndarray]:
        """Everything in float64; ``moved`` gives other inputs."""
        given = {**self.given, **moved.get("given", {}), **self.captured}
        return interpret.evaluate(moved.get("outs", self.outs), given)

    def nudged(self) -> list[np.ndarray]:
        """How far each value moves when inputs move by some last places: what cliffs
        and bad conditioning make of rounding. Sums move too, each for itself: which of
        two equal ones is greater depends on the order of addition.
        """
        worst = [np.zeros(()) for _ in self.outs]
        for k in range(6):
            r = np.random.default_rng(k)
            given = {
                s: x.astype(np.float64) * (1 + 2e-6 * r.standard_normal(x.shape))
                for s, x in self.given.items()
            }
            if k < 3:
                moved = self.wide(given=given)
            else:
                moved = self._with_moved_sums(r)
            for i, v in enumerate(moved):
                step = np.abs(v - self.expected[i]).max(initial=0.0)
                worst[i] = np.maximum(worst[i], step)
        return worst

    def _with_moved_sums(self, r: np.random.Generator) -> list[np.ndarray]:
        values = {
            s: x.astype(np.float64) if x.dtype.kind == "f" else x
            for s, x in {**self.given, **self.captured}.items()
        }
        for s in topo_stages(self.outs, stop=values):
            if s not in values:
                values[s] = interpret.evaluate_stage(s, values)
                if s.monoid == "sum" and s.dtype == "f32":
                    shift = r.standard_normal(values[s].shape)
                    values[s] = values[s] * (1 + 3e-7 * shift)
        return [values[s] for s in self.outs]

    def overflows(self) -> bool:
        """Whether f32 cannot hold what lies in between, which makes it infinite, and
        NaN of two such.
        """
        values = {**self.given, **self.captured}
        stages = [s for s in topo_stages(self.outs, stop=values) if s not in values]
        most = np.finfo(np.float32).max
        return any(
            np.abs(v).max(initial=0.0, where=np.isfinite(v)) > most
            for v in self.wide(outs=stages)
            if v.dtype.kind == "f"
        )

    def run(self, graph: str | None) -> list[np.ndarray]:
        """On the device in use."""
        outs = list(self.outs)
        if graph == "alone":
            return self._alone()
        if graph is not None:
            new: dict[Stage, Stage] = {}
            for s in topo_stages(outs):
                new[s] = kept(retarget(s, new), graph)
            outs = [new[s] for s in outs]
        plan = Plan(outs, self.inputs, frozenset())
        buffers = [plan.device.upload(self.given[s], s.dtype) for s in self.inputs]
        results = plan(buffers, {})
        return [
            plan.device.download(b, s.shape, s.dtype)
            for b, s in zip(results, outs, strict=True)
        ]

    def _alone(self) -> list[np.ndarray]:
        values = {**self.given, **self.captured}
        for s in topo_stages(self.outs):
            if s not in values:
                values[s] = finite.run_alone(s, values, {})
        return [values[s] for s in self.outs]

    def derivative_fault(self) -> str | None:
        """The derived gradient in float64 against differences along one direction."""
        r = np.random.default_rng(self.program.seed)
        directions = {self.inputs[k]: r.standard_normal(self.xs[k].shape)
                      for k in self.wrt}  # fmt: skip
        have = sum(
            float((g * directions[self.inputs[k]]).sum())
            for k, g in zip(self.wrt, self.expected[self.results :], strict=True)
        )
        slopes = []
        for h in (1e-6, 1e-7):
            ends = []
            for sign in (1, -1):
                given = {s: self.given[s].astype(np.float64) + sign * h * d
                         for s, d in directions.items()}  # fmt: skip
                values = self.wide(outs=self.forward, given=given)
                ends.append(sum(float((v * dy).sum())
                                for v, dy in zip(values, self.dys)))  # fmt: skip
            slopes.append((ends[0] - ends[1]) / (2 * h))
        size = sum(float(np.abs(g).sum()) for g in self.expected[self.results :])
        scale = max(1.0, size)
        kink = abs(slopes[0] - slopes[1]) / scale
        if kink < 1e-6 and not abs(have - slopes[0]) / scale < 1e-5:
            return f"derived slope {have:.9g}, differences {slopes[0]:.9g}"
        return None


def fault(job: Job, name: str) -> str | None:
    """What is wrong with a program in one way, or None."""
    with way(name, job.program.seed) as graph:
        got = job.run(graph)
    drift: list[np.ndarray] | None = None
    for k, (g, w) in enumerate(zip(got, job.expected, strict=True)):
        if g.shape != w.shape:
            return f"{name}: {job.names[k]} has shape {g.shape}, not {w.shape}"
        if not w.size:
            continue
        scale = max(1.0, float(np.abs(w).max()))
        off = float(np.abs(g - w).max())
        if off <= TOLERANCE * scale:  # a NaN is not
            continue
        with np.errstate(over="ignore"):
            narrow = w.astype(np.float32)
        if not np.isfinite(narrow).all() and np.array_equal(g, narrow, equal_nan=True):
            continue
        if not np.isfinite(g).all() and job.overflows():
            continue
        drift = drift or job.nudged()
        if not off <= TOLERANCE * scale + 10 * float(drift[k]):
            return f"{name}: {job.names[k]} of shape {w.shape} is off by {off:.3g}"
    return None


def check(program: Program, ways: Sequence[str]) -> str | None:
    """What is wrong with a program, or None; whatever is raised counts as wrong."""
    try:
        job = Job(program)
        message = job.derivative_fault()
        for name in ways:
            message = message or fault(job, name)
        return message
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:400]}"


def ways_of(seed: int) -> list[str]:
    """NumPy and one more in turn; every fifth program all."""
    names = list(WAYS)
    return names if seed % 5 == 0 else ["cpu", names[1 + seed % (len(names) - 1)]]


def shrink(program: Program, wrong: Callable[[Program], Any]) -> Program:
    """A smaller program for which ``wrong`` is still true."""
    before = None
    while before != program:
        before = program
        for smaller in (_result_less, _steps_less, _input_less, _size_less):
            program = smaller(program, wrong)
    return program


Wrong = Callable[[Program], Any]


def _result_less(p: Program, wrong: Wrong) -> Program:
    for k in reversed(range(len(p.outs))):
        q = dataclasses.replace(p, outs=p.outs[:k] + p.outs[k + 1 :])
        if q.outs and wrong(q):
            p = q
    return p


def _steps_less(p: Program, wrong: Wrong) -> Program:
    # All but the results' own steps, then half, a quarter, …, one at a time.
    size = len(p.steps)
    while size:
        for end in range(len(p.steps), 0, -size):
            q = p
            for k in reversed(range(max(0, end - size), min(end, len(p.steps)))):
                q = q.without(k)
            if q != p and wrong(q):
                p = q
        size //= 2
    return p


def _input_less(p: Program, wrong: Wrong) -> Program:
    for k in reversed(range(len(p.shapes))):
        used = {v for s in p.steps for v in s.args} | set(p.outs)
        if k in used or len(p.shapes) == 1:
            continue
        steps = tuple(
            dataclasses.replace(s, args=tuple(v - (v > k) for v in s.args))
            for s in p.steps
        )
        shapes = p.shapes[:k] + p.shapes[k + 1 :]
        q = Program(p.seed, shapes, steps, tuple(v - (v > k) for v in p.outs))
        if wrong(q):
            p = q
    return p


def _size_less(p: Program, wrong: Wrong) -> Program:
    for n in sorted({d for s in p.shapes for d in s}, reverse=True):
        for new in (1, 2, 3, n // 2):
            if 0 < new < n and wrong(q := p.resized(n, new)):
                p = q
                break
    return p


def report(program: Program, ways: Sequence[str]) -> str:
    """A failing program, cut down, as text to put into a test."""
    message = check(program, ways)
    if message is None:
        return "nothing is wrong"
    first = message.partition(":")[0]
    names = [first] if first in WAYS else list(ways)
    small = shrink(program, lambda p: check(p, names))
    return f"{check(small, names)}\n{small!r}\nways: {names}"


def run_range(
    first: int, count: int, ways: str | None, seconds: float | None
) -> tuple[int, int, int, int]:
    """Check a range of seeds: programs, those in all ways, runs, wrong ones."""
    wrong = done = runs = full = 0
    start = time.perf_counter()
    for seed in range(first, first + count):
        if seconds and time.perf_counter() - start > seconds:
            break
        names = ways.split(",") if ways else ways_of(seed)
        program = draw(seed)
        if check(program, names) is not None:
            wrong += 1
            print(f"seed {seed}: {report(program, names)}", flush=True)
        done, runs, full = done + 1, runs + len(names), full + (names == list(WAYS))
    return done, full, runs, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=500, help="how many programs")
    parser.add_argument("--ways", help="comma-separated, for every program")
    parser.add_argument("--seconds", type=float, help="stop after so long")
    parser.add_argument("--jobs", type=int, default=1, help="how many processes")
    args = parser.parse_args()
    start = time.perf_counter()
    step = 50 if args.seconds is None else args.count // args.jobs + 1
    ranges = [
        (k, min(step, args.first + args.count - k), args.ways, args.seconds)
        for k in range(args.first, args.first + args.count, step)
    ]
    total = [0, 0, 0, 0]
    # Processes begin anew: a driver does not survive a fork.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, mp_context=spawn) as pool:
        for found in pool.map(run_range, *zip(*ranges, strict=True)):
            total = [x + y for x, y in zip(total, found, strict=True)]
            spent = time.perf_counter() - start
            print(f"{total[0]}: {total[3]} wrong, {spent:.0f} s", file=sys.stderr)
    done, full, runs, wrong = total
    print(
        f"{done} programs ({full} of them in all {len(WAYS)} ways), {runs} runs, "
        f"{wrong} wrong, {time.perf_counter() - start:.0f} s"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
