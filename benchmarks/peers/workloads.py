"""The workloads: inputs, float64 results, and the loop that every peer's worker runs.

A peer is a script that defines ``setup(name, inputs, args) -> Case`` and ends in
``work("peer", setup)``. ``Case.run()`` does the work once and waits for the device;
``Case.fetch()`` brings the results to the host, for the check before the timing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# Every process begins with an empty shader cache, so that first calls are cold ones.
os.environ["MESA_SHADER_CACHE_DIR"] = tempfile.mkdtemp(prefix="peers_mesa_")
os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())

import numpy as np
import reference as ref

SHAPE, ADAMW = ref.Shape(), ref.AdamW()
WORKLOADS = {
    "W1": "silu(g)*u, 2^22",
    "W2": "its pullback: dg, du",
    "W3": "RMSNorm [2048, 1024]",
    "W4": "its pullback: dx, dgain",
    "W5": "softmax of rows [2048, 2048]",
    "W6": "matmul 512^3",
    "W7": "causal attention, 512 positions, 8 heads on 2, d 64",
    "W8": "its pullback: dq, dk, dv",
    "W9": "training step, 3.0 M parameters, 256 tokens, AdamW",
    "W10": "greedy decoding of 64 tokens with a cache, 3.0 M parameters",
}
TOLERANCE = {"W9": 2e-3, "W10": 0.0}  # of the largest value; elsewhere 2e-5
TOKENS = 64


class SkipWorkload(Exception):
    """The peer cannot do this workload; says why."""


@dataclass
class Case:
    run: Callable[[], None]
    fetch: Callable[[], dict[str, np.ndarray]]
    info: dict[str, Any] = field(default_factory=dict)


def inputs(name: str) -> dict[str, Any]:
    rng = np.random.default_rng(7)

    def normal(*size):
        return rng.standard_normal(size).astype(np.float32)

    match name:
        case "W1" | "W2":
            x = {"g": normal(1 << 22), "u": normal(1 << 22)}
        case "W3" | "W4":
            x = {"x": normal(2048, 1024), "gain": normal(1024)}
        case "W5":
            return {"x": normal(2048, 2048)}
        case "W6":
            return {"a": normal(512, 512), "b": normal(512, 512)}
        case "W7" | "W8":
            x = {"q": normal(1, 8, 512, 64)}
            x |= {name: normal(1, 2, 512, 64) for name in "kv"}
        case "W9":
            text = rng.integers(0, SHAPE.vocab, SHAPE.length + 1).astype(np.int32)
            weights = ref.initial_weights(SHAPE)
            return {"weights": weights, "ids": text[:-1], "labels": text[1:]}
        case "W10":
            return {"weights": ref.initial_weights(SHAPE), "first": np.int32(1)}
        case _:
            raise KeyError(name)
    if name in ("W2", "W4", "W8"):
        x["dy"] = normal(*next(iter(x.values())).shape)
    return x


def expected(name: str, x: dict[str, Any]) -> dict[str, np.ndarray]:
    d = {k: v.astype(np.float64) for k, v in x.items() if not isinstance(v, dict)}
    match name:
        case "W1":
            return {"y": ref.silu_mul(d["g"], d["u"])}
        case "W2":
            return dict(zip(("dg", "du"), ref.silu_mul_pullback(**d)))
        case "W3":
            return {"y": ref.rms_norm(d["x"], d["gain"])}
        case "W4":
            return dict(zip(("dx", "dgain"), ref.rms_norm_pullback(**d)))
        case "W5":
            return {"y": ref.softmax(d["x"])}
        case "W6":
            return {"y": d["a"] @ d["b"]}
        case "W7" | "W8":
            d = {k: v[0].swapaxes(0, 1) for k, v in d.items()}
            if name == "W7":
                found = {"y": ref.attention(**d)}
            else:
                found = dict(zip(("dq", "dk", "dv"), ref.attention_pullback(**d)))
            return {k: v.swapaxes(0, 1)[None] for k, v in found.items()}
        case "W10":
            return {"tokens": ref.greedy(SHAPE, x["weights"], int(x["first"]), TOKENS)}
    steps = ref.losses(SHAPE, ADAMW, x["weights"], x["ids"], x["labels"], 3)
    return {"losses": steps}


def error(name: str, x: dict[str, Any], got: dict[str, np.ndarray]) -> float:
    """The largest difference, relative to the largest value of that result."""
    worst = 0.0
    for key, right in expected(name, x).items():
        have = np.asarray(got[key], np.float64).reshape(right.shape)
        if not np.isfinite(have).all():
            return float("nan")
        worst = max(worst, float(abs(have - right).max() / abs(right).max()))
    return worst


def work(
    peer: str,
    setup: Callable[[str, dict[str, Any], argparse.Namespace], Case],
    add_arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> None:
    """Sets up, checks, then runs once for every line on standard input."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=WORKLOADS)
    add_arguments(parser)
    args = parser.parse_args()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the protocol

    def say(**record: Any) -> None:
        out.write(json.dumps(record) + "\n")
        out.flush()

    name, x = args.workload, inputs(args.workload)
    try:
        start = time.perf_counter()
        case = setup(name, x, args)
        ready = time.perf_counter() - start
        first = [_timed(case.run) for _ in range(3)]
        worst = error(name, x, case.fetch())
    except SkipWorkload as reason:
        return say(skip=str(reason))
    except Exception as problem:
        traceback.print_exc()
        return say(skip=f"failed: {type(problem).__name__}: {problem}"[:200])
    right = worst <= TOLERANCE.get(name, 2e-5)
    say(setup=ready, first=first, error=worst, right=right, **case.info)
    for _ in sys.stdin:
        cpu = time.process_time()
        say(wall=_timed(case.run), cpu=time.process_time() - cpu)
    os._exit(0)  # some drivers crash when they are taken down


def _timed(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
