"""shaderdsl itself: ops as a user writes them, compiled into one plan a workload."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import reference as ref
from workloads import ADAMW, SHAPE, Case, work

import shaderdsl as sd


@sd.op("n, n -> n")
def silu_mul(g, u):
    return sd.silu(g) * u


@sd.op("t d, d -> t d")
def rms_norm(x, gain):
    return x * sd.rsqrt(sd.mean(x * x, over="d") + ref.EPS) * gain


@sd.op("t d -> t d")
def softmax(x):
    return sd.softmax(x, over="d")


@sd.op("m k, k n -> m n")
def matmul(a, b):
    return sd.sum(a * b, over="k")


def pullback(function):
    def run(*args):
        *args, dy = args
        return sd.vjp(function, *args)[1](dy)

    return run


def setup(name, x, args) -> Case:
    if name == "W9":
        return _training(x)
    function, keys = {
        "W1": (silu_mul, ["y"]),
        "W2": (pullback(silu_mul), ["dg", "du"]),
        "W3": (rms_norm, ["y"]),
        "W4": (pullback(rms_norm), ["dx", "dgain"]),
        "W5": (softmax, ["y"]),
        "W6": (matmul, ["y"]),
    }[name]
    compiled = sd.compile(function)
    arrays = [sd.asarray(value) for value in x.values()]
    last = []

    def run():
        out = compiled(*arrays)
        last[:] = out if isinstance(out, tuple) else [out]
        sd.synchronize()

    def fetch():
        return {key: value.numpy() for key, value in zip(keys, last)}

    kernels = len(sd.lower(function, *arrays).kernels)
    return Case(run, fetch, {"kernels": kernels})
