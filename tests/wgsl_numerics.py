"""Measure the WGSL helper functions against float64 NumPy on an adapter.

``PYTHONPATH=. python tests/wgsl_numerics.py`` writes ``docs/numerics.md``.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import wgpu

from shaderdsl.ir.wgsl_math import helper_source, used_helpers

POINTS = 1 << 20
LARGEST = float(np.finfo(np.float32).max)
SMALLEST = 2.0**-126
WGSL = {"f": "f32", "i": "i32", "u": "u32"}

_ORDINARY = (0, 1, 0.5, 2, 3, 10, 87, 88, 100, 127.5, 128, 150, 1 + 2**-23, 1 - 2**-24)
_EXTREME = (1e-30, SMALLEST, 1e30, LARGEST, np.inf)
EDGES = np.array([*_ORDINARY, *_EXTREME, np.nan], np.float32)
EDGES = np.concatenate([EDGES, -EDGES])


class Runner:
    """Runs one expression over arrays."""

    def __init__(self) -> None:
        os.environ.setdefault("XDG_RUNTIME_DIR", "/tmp")
        found = wgpu.gpu.enumerate_adapters_sync()
        ranked = sorted(found, key=lambda a: a.info["backend_type"] == "OpenGL")
        if not ranked:
            raise LookupError("there is no adapter")
        self.device_name = str(ranked[0].info["device"])
        self.driver = str(ranked[0].info["description"])
        self.device = ranked[0].request_device_sync()

    def __call__(
        self,
        expression: str,
        *arrays: np.ndarray,
        gives: str | None = None,
        width: int = 1,
    ) -> np.ndarray:
        """``expression`` of ``a`` and ``b``, e.g. ``sd_max_f32{V}(a, b)``.

        ``width`` 4 takes vec4 values; the length of the arrays must allow it.
        """
        kinds = [array.dtype.kind for array in arrays]
        out = gives or WGSL[kinds[0]]
        size = arrays[0].size
        assert size % width == 0
        count = size // width
        wide = (lambda t: f"vec4<{t}>") if width == 4 else (lambda t: t)
        expression = expression.replace("{V}", "_v4" if width == 4 else "")
        if out == "bool":
            expression = f"select({wide('u32')}(0u), {wide('u32')}(1u), {expression})"
        stored = "u32" if out == "bool" else out
        lines = helper_source(used_helpers(expression))
        names = "ab"[: len(arrays)]
        for at, (name, kind) in enumerate(zip(names, kinds)):
            element = wide(WGSL[kind])
            lines.append(
                f"@group(0) @binding({at}) var<storage, read> in_{name}: "
                f"array<{element}>;"
            )
        lines.append(
            f"@group(0) @binding({len(arrays)}) var<storage, read_write> out: "
            f"array<{wide(stored)}>;"
        )
        lines += [
            "@compute @workgroup_size(64)",
            "fn main(@builtin(global_invocation_id) id: vec3<u32>) {",
            "  let i = id.x;",
            f"  if (i >= {count}u) {{ return; }}",
            *(f"  let {name} = in_{name}[i];" for name in names),
            f"  out[i] = {expression};",
            "}",
        ]
        device = self.device
        module = device.create_shader_module(code="\n".join(lines))
        pipeline = device.create_compute_pipeline(
            layout="auto", compute={"module": module, "entry_point": "main"}
        )
        usage = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC
        buffers = [
            device.create_buffer_with_data(data=np.ascontiguousarray(a), usage=usage)
            for a in arrays
        ]
        buffers.append(device.create_buffer(size=size * 4, usage=usage))
        group = device.create_bind_group(
            layout=pipeline.get_bind_group_layout(0),
            entries=[
                {"binding": at, "resource": {"buffer": b, "offset": 0, "size": b.size}}
                for at, b in enumerate(buffers)
            ],
        )
        encoder = device.create_command_encoder()
        compute = encoder.begin_compute_pass()
        compute.set_pipeline(pipeline)
        compute.set_bind_group(0, group)
        compute.dispatch_workgroups(-(-count // 64))
        compute.end()
        device.queue.submit([encoder.finish()])
        raw = device.queue.read_buffer(buffers[-1])
        dtype = {"f32": np.float32, "i32": np.int32}.get(stored, np.uint32)
        result = np.frombuffer(raw, dtype).copy()
        return result.astype(bool) if out == "bool" else result


def ulp(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Error in units of the last place of the f32 nearest to ``want``.

    Where the value is next to the subnormal numbers, which drivers may take for zero
    in between as well, the result may be any number there. Where the value is not
    finite the error is 0 or infinite.
    """
    with np.errstate(all="ignore"):
        near = want.astype(np.float32)
        error = np.abs(got.astype(np.float64) - want)
        unit = np.spacing(np.maximum(np.abs(near), np.float32(SMALLEST)))
        error = error / unit.astype(np.float64)
        tiny = np.abs(want) < 4 * SMALLEST
        error = np.where(tiny & (np.abs(got) <= np.float32(4 * SMALLEST)), 0.0, error)
        special = ~np.isfinite(near)
        same = (got == near) | (np.isnan(got) & np.isnan(near))
        return np.where(special, np.where(same, 0.0, np.inf), error)


def between(low: float, high: float, points: int = POINTS) -> np.ndarray:
    """Half the points evenly spaced, half with random bits, so evenly in exponent."""
    random = np.random.default_rng(7)
    even = np.linspace(low, high, points // 2).astype(np.float32)

    def order(x: float) -> int:
        bits = int(np.abs(np.float32(x)).view(np.int32))
        return -bits if x < 0 else bits

    keys = random.integers(order(low), order(high) + 1, points - even.size)
    bits = np.abs(keys).astype(np.int32).view(np.float32)
    return np.clip(
        np.concatenate([even, np.where(keys < 0, -bits, bits)]),
        np.float32(low),
        np.float32(high),
    ).astype(np.float32)


_erf = np.frompyfunc(math.erf, 1, 1)


def sigmoid(x: np.ndarray) -> np.ndarray:
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


@dataclass(frozen=True)
class Function:
    """A helper, its meaning, the bound that is promised and where it holds."""

    name: str
    numpy: Callable[..., Any]
    bound: float
    ranges: Sequence[tuple[float, float]]
    second: tuple[float, float] | None = None

    @property
    def call(self) -> str:
        return f"sd_{self.name}{{V}}" + ("(a, b)" if self.second else "(a)")


FUNCTIONS = [
    Function("exp", np.exp, 4, [(-87.33, 88.72), (-1, 1)]),
    Function("exp_masked", np.exp, 4, [(-87.33, 88.72), (-1, 1)]),
    Function("exp2", np.exp2, 4, [(-126, 127.999), (-1, 1)]),
    Function("expm1", np.expm1, 10, [(-100, 88.72), (-1, 1)]),
    Function("log", np.log, 4, [(SMALLEST, LARGEST), (0.5, 2)]),
    Function("log2", np.log2, 4, [(SMALLEST, LARGEST), (0.5, 2)]),
    Function("log1p", np.log1p, 8, [(-1, LARGEST), (-0.999, 1)]),
    Function("sqrt", np.sqrt, 1, [(0, LARGEST)]),
    Function("rsqrt", lambda x: 1 / np.sqrt(x), 4, [(SMALLEST, LARGEST)]),
    Function("sin", np.sin, 6, [(-100, 100), (-1e5, 1e5)]),
    Function("cos", np.cos, 6, [(-100, 100), (-1e5, 1e5)]),
    Function("tan", np.tan, 8, [(-100, 100), (-1e5, 1e5)]),
    Function("asin", np.arcsin, 4, [(-1, 1)]),
    Function("acos", np.arccos, 4, [(-1, 1)]),
    Function("atan", np.arctan, 4, [(-LARGEST, LARGEST), (-4, 4)]),
    Function("atan2", np.arctan2, 6, [(-4, 4), (-LARGEST, LARGEST)], (-4, 4)),
    Function("sinh", np.sinh, 5, [(-89.4, 89.4), (-2, 2)]),
    Function("cosh", np.cosh, 5, [(-89.4, 89.4), (-2, 2)]),
    Function("tanh", np.tanh, 4, [(-LARGEST, LARGEST), (-10, 10)]),
    Function("sigmoid", sigmoid, 6, [(-87, 88), (-4, 4)]),
    Function(
        "erf",
        lambda x: _erf(np.asarray(x, np.float64)).astype(np.float64),
        4,
        [(-LARGEST, LARGEST), (-4, 4)],
    ),
    Function("softplus", lambda x: np.logaddexp(0, x), 6, [(-87, 1000), (-4, 4)]),
    Function("pow", np.power, 2, [(SMALLEST, 1000), (0.9, 1.1)], (-40, 40)),
    Function("div", np.divide, 2.5, [(-1e18, 1e18)], (-1e18, 1e18)),
    Function("mod_f32", np.mod, 1, [(-1e5, 1e5), (-1e10, 1e10)], (-100, 100)),
]


def operands(f: Function, span: tuple[float, float]) -> list[np.ndarray]:
    """The points of a sweep."""
    arrays = [between(*span)]
    if f.second:
        random = np.random.default_rng(11)
        second = random.permutation(between(*f.second))
        if f.name == "mod_f32":
            near = np.abs(second) > np.abs(arrays[0]) * 2.0**-40
            second = np.where(near, second, np.float32(7))
        arrays.append(second.astype(np.float32))
    return arrays


def errors(f: Function, arrays: list[np.ndarray], got: np.ndarray) -> np.ndarray:
    """Errors in ULP; a driver may take subnormal operands for zero."""
    flushed = [np.where(np.abs(a) < SMALLEST, np.float32(0), a) for a in arrays]
    found = []
    for operands_ in (arrays, flushed):
        with np.errstate(all="ignore"):
            want = np.asarray(f.numpy(*(a.astype(np.float64) for a in operands_)))
        zero = operands_[-1 if f.name == "div" else 0] == 0
        if f.name in ("div", "pow", "rsqrt"):  # the sign of a zero is not promised
            infinite = np.isinf(want) & zero
            want = np.where(infinite, np.abs(want), want)
            found.append(ulp(np.where(infinite, np.abs(got), got), want))
        else:
            found.append(ulp(got, want))
    return np.minimum(*found)


def measure(run: Runner, f: Function, span: tuple[float, float]) -> tuple[float, list]:
    """The largest error in ULP and the operands where it occurs."""
    arrays = operands(f, span)
    call = f.call.replace("sd_sqrt{V}", "sqrt")
    got = run(call, *arrays, width=4)
    error = errors(f, arrays, got)
    at = int(np.argmax(error))
    return float(error[at]), [*(float(a[at]) for a in arrays), float(got[at])]


def _number(x: float) -> str:
    named = {SMALLEST: "2⁻¹²⁶", LARGEST: "3.4e38", -LARGEST: "-3.4e38"}
    return named.get(x, f"{x:g}").replace("e+", "e")


def table(run: Runner) -> str:
    """The table in Markdown."""
    rows = ["| function | range | largest error, ULP | promised |", "|---|---|---|---|"]
    for f in FUNCTIONS:
        for span in f.ranges:
            error, _ = measure(run, f, span)
            where = f"{_number(span[0])} … {_number(span[1])}"
            if f.second:
                where += f"; b: {_number(f.second[0])} … {_number(f.second[1])}"
            rows.append(f"| `{f.name}` | {where} | {error:.2f} | {f.bound:g} |")
    return "\n".join(rows)


TEXT = """# Numbers: how exact they are

Written by `PYTHONPATH=. python tests/wgsl_numerics.py`; do not edit. Driver: {driver}.

Values are computed in f32. Addition, subtraction, multiplication and `sqrt` are the
driver's, everything else is built from those in `shaderdsl/ir/wgsl_math/`. The table
gives the largest error that was measured against float64 NumPy, in units of the last
place (ULP) of the f32 result, over {points:,} points a range: half of them evenly
spaced, half spread evenly over exponents. *Promised* is the bound that the tests
assert. Where the driver's division or square root is less exact than here, the
functions that use them may lose as much.

{table}

## Beyond the table

- **NaN and infinity.** NaN in gives NaN out, also in `max`, `min` and `sign`;
  `pow(x, 0)` and `pow(1, x)` are 1 for every x. Infinities follow NumPy.
- **Overflow.** Results above the f32 range are infinite; at the very end of the range a
  result within the stated error of it may be infinite too.
- **Zero and subnormal numbers.** Only the value of a zero is promised, not its sign.
  Results below 2⁻¹²⁶ may be zero; logarithms and `pow` take such arguments for zero.
- **sin, cos, tan.** Beyond |x| = 10⁵ digits are lost; `sin` and `cos` stay in [-1, 1].
- **mod, floordiv of floats.** Python's rule: the result has the sign of the divisor.
  `mod` is exact before that adjustment while |a / b| < 2⁴⁰. Beyond, it is undefined.
- **Integers.** `//` and `%` follow Python; by zero they give 0; overflow wraps.
- **To integers.** Fractions are cut off, values out of range saturate, NaN gives 0.
- **f16.** Rounds to nearest, ties to even; overflow is infinite.
"""


def document(run: Runner) -> str:
    """The text of docs/numerics.md."""
    driver = f"{run.device_name}, {run.driver}"
    return TEXT.format(driver=driver, points=POINTS, table=table(run))


if __name__ == "__main__":
    runner = Runner()
    if "--raw" in sys.argv:
        for function in FUNCTIONS:
            for part in function.ranges:
                print(function.name, part, *measure(runner, function, part))
    else:
        page = Path(__file__).parents[1] / "docs" / "numerics.md"
        page.write_text(document(runner), encoding="utf-8")
