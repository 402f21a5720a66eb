"""Rows that move bytes: elementwise, norms, softmax, sums, cross entropy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from . import handwritten as hand
from . import reference as ref
from .work import Row, TorchPeer, Work, distance, normal, rows_of, some, wide

#: (large, quick)
FLAT = ((32768, 4096), (128, 2048))
ROWS = ((16384, 4096), (128, 2048))
LOGITS = ((8192, 32000), (64, 4000))

Function = Callable[..., Any]


def _forward(
    function: Function,
    reference: Function,
    torch: Function,
    arrays: Sequence[Any],
    nbytes: int,
    handwritten: Any = None,
) -> Work:
    def error(y: Any) -> float:
        rows = some(len(y))
        given = [rows_of(a, rows) if a.ndim == 2 else wide(a) for a in arrays]
        return distance(rows_of(y, rows), reference(*given))

    return Work(
        lambda: function(*arrays),
        error,
        nbytes,
        torch=_torch_forward(torch, [a.shape for a in arrays]),
        handwritten=None if handwritten is None else partial(handwritten, *arrays),
    )


def _backward(
    function: Function,
    gradient: Function,
    torch: Function,
    arrays: Sequence[Any],
    nbytes: int,
    handwritten: Any = None,
) -> Work:
    import shaderdsl as sd

    y, pullback = sd.vjp(function, *arrays)
    dy = normal(99, *y.shape)

    def error(got: Any) -> float:
        got = got if isinstance(got, tuple) else (got,)
        rows = some(len(dy))
        of_rows = [k for k, a in enumerate(arrays) if a.ndim == 2]
        shared = [k for k, a in enumerate(arrays) if a.ndim == 1]

        def at(part: Any) -> Any:
            given = [rows_of(a, part) if a.ndim == 2 else wide(a) for a in arrays]
            return gradient(*given, rows_of(dy, part))

        want = at(rows)
        worst = max(distance(rows_of(got[k], rows), want[k]) for k in of_rows)
        if not shared:
            return worst
        sums: Any = 0
        for start in range(0, len(dy), 1024):
            part = np.arange(start, min(start + 1024, len(dy)))
            sums = sums + np.stack([at(part)[k] for k in shared])
        return max(worst, *(distance(got[k], s) for k, s in zip(shared, sums)))

    return Work(
        lambda: pullback(dy),
        error,
        nbytes,
        torch=_torch_backward(torch, [a.shape for a in arrays]),
        handwritten=None if handwritten is None else partial(handwritten, *arrays, dy),
    )


def _bound(function: Function, t: Any, compiled: bool) -> Function:
    def call(*xs: Any) -> Any:
        return function(t, *xs)

    result: Function = t.compile(call) if compiled else call
    return result


def _torch_forward(function: Function, shapes: Sequence[Any]) -> TorchPeer:
    def make(t: Any, compiled: bool) -> Callable[[], Any]:
        xs = [t.randn(*s) for s in shapes]
        f = _bound(function, t, compiled)

        def call() -> Any:
            with t.no_grad():
                return f(*xs)

        return call

    return make


def _torch_backward(function: Function, shapes: Sequence[Any]) -> TorchPeer:
    def make(t: Any, compiled: bool) -> Callable[[], Any]:
        xs = [t.randn(*s, requires_grad=True) for s in shapes]
        f = _bound(function, t, compiled)
        y = f(*xs)
        dy = t.randn_like(y)
        return lambda: t.autograd.grad(y, xs, dy, retain_graph=True)

    return make


# ------------------------------------------------------------------ elementwise


def copy(quick: bool) -> Work:
    import shaderdsl as sd

    double = sd.op("r n -> r n")(_double)
    x = normal(1, *FLAT[quick])
    work = _forward(
        double, lambda a: 2 * a, lambda t, a: a.clone(), [x], 8 * x.size, hand.double
    )
    work.compiles = False
    return work


def _double(x: Any) -> Any:
    return x + x


def silu(quick: bool, backward: bool) -> Work:
    from shaderdsl import ops

    arrays = [normal(k, *FLAT[quick]) for k in (1, 2)]
    n = arrays[0].size

    def torch(t: Any, g: Any, u: Any) -> Any:
        return t.nn.functional.silu(g) * u

    if backward:
        return _backward(
            ops.swiglu, ref.silu_mul_grad, torch, arrays, 20 * n, hand.silu_mul_grad
        )
    return _forward(ops.swiglu, ref.silu_mul, torch, arrays, 12 * n, hand.silu_mul)


def gelu(quick: bool, backward: bool) -> Work:
    from shaderdsl import ops

    x = normal(1, *ROWS[quick])

    def function(x: Any) -> Any:
        return ops.gelu(x, approximate="tanh")

    def torch(t: Any, x: Any) -> Any:
        return t.nn.functional.gelu(x, approximate="tanh")

    if backward:
        return _backward(
            function, ref.gelu_grad, torch, [x], 12 * x.size, hand.gelu_grad
        )
    return _forward(function, ref.gelu, torch, [x], 8 * x.size, hand.gelu)


# ------------------------------------------------------------------ rows


def rms_norm(quick: bool, backward: bool) -> Work:
    from shaderdsl import ops

    x = normal(1, *ROWS[quick])
    w = 1.0 + 0.1 * normal(2, x.shape[1])

    def torch(t: Any, x: Any, w: Any) -> Any:
        return x * t.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w

    if backward:
        return _backward(
            ops.rms_norm, ref.rms_norm_grad, torch, [x, w], 12 * x.size, None
        )
    return _forward(
        ops.rms_norm, ref.rms_norm, torch, [x, w], 8 * x.size, hand.rms_norm
    )


def layer_norm(quick: bool, backward: bool) -> Work:
    from shaderdsl import ops

    x = normal(1, *ROWS[quick])
    w, b = 1.0 + 0.1 * normal(2, x.shape[1]), normal(3, x.shape[1])

    def torch(t: Any, x: Any, w: Any, b: Any) -> Any:
        return t.nn.functional.layer_norm(x, (x.shape[-1],), w, b, 1e-5)

    if backward:
        return _backward(
            ops.layer_norm, ref.layer_norm_grad, torch, [x, w, b], 12 * x.size
        )
    return _forward(
        ops.layer_norm, ref.layer_norm, torch, [x, w, b], 8 * x.size, hand.layer_norm
    )


def softmax(quick: bool, backward: bool) -> Work:
    from shaderdsl import ops

    x = normal(1, *ROWS[quick])

    def torch(t: Any, x: Any) -> Any:
        return x.softmax(-1)

    if backward:
        return _backward(ops.softmax, ref.softmax_grad, torch, [x], 12 * x.size)
    return _forward(ops.softmax, ref.softmax, torch, [x], 8 * x.size, hand.softmax)


def row_sum(quick: bool) -> Work:
    import shaderdsl as sd

    x = normal(1, *ROWS[quick]) + 1.0
    function = sd.op("r n -> r")(_sum_n)
    return _forward(
        function,
        lambda a: a.sum(-1),
        lambda t, a: a.sum(-1),
        [x],
        4 * x.size,
        hand.row_sum,
    )


def _sum_n(x: Any) -> Any:
    import shaderdsl as sd

    return sd.sum(x, over="n")


def column_sum(quick: bool) -> Work:
    import shaderdsl as sd

    x = normal(1, *ROWS[quick]) + 1.0
    function = sd.op("n d -> d")(_sum_n)

    def error(y: Any) -> float:
        return distance(y, np.asarray(x).sum(0, dtype=np.float64))

    return Work(
        lambda: function(x),
        error,
        4 * x.size,
        torch=_torch_forward(lambda t, a: a.sum(0), [x.shape]),
    )


# ------------------------------------------------------------------ cross entropy


def cross_entropy(quick: bool, part: str) -> Work:
    """``part``: "forward", "backward", or "both" in one call."""
    import shaderdsl as sd

    t, v = LOGITS[quick]
    logits = normal(1, t, v)
    labels = np.random.default_rng(2).integers(0, v, t).astype(np.int32)
    ids = sd.asarray(labels)

    def loss(x: Any) -> Any:
        return sd.nn.cross_entropy(x, ids)

    def loss_error(y: Any) -> float:
        total = 0.0
        for start in range(0, t, 512):
            rows = np.arange(start, min(start + 512, t))
            total += float(ref.cross_entropy(rows_of(logits, rows), labels[rows]).sum())
        return distance(y, total / t)

    def grad_error(dx: Any) -> float:
        rows = some(t)
        want = ref.softmax(rows_of(logits, rows))
        want[np.arange(len(rows)), labels[rows]] -= 1
        return distance(rows_of(dx, rows), want / t)

    def torch(tt: Any, compiled: bool) -> Callable[[], Any]:
        x = tt.randn(t, v, requires_grad=part != "forward")
        y = tt.randint(0, v, (t,))
        f: Any = tt.nn.functional.cross_entropy
        f = tt.compile(f) if compiled else f
        if part == "forward":

            def call() -> Any:
                with tt.no_grad():
                    return f(x, y)

            return call
        if part == "both":
            return lambda: tt.autograd.grad(f(x, y), x)
        z = f(x, y)
        return lambda: tt.autograd.grad(z, x, retain_graph=True)

    if part == "forward":
        function = sd.compile(loss)
        return Work(lambda: function(logits), loss_error, 4 * t * v, torch=torch)
    if part == "both":
        both = sd.compile(sd.value_and_grad(loss))
        return Work(
            lambda: both(logits),
            lambda r: max(loss_error(r[0]), grad_error(r[1])),
            8 * t * v,
            torch=torch,
        )
    _, pullback = sd.vjp(loss, logits)
    one = sd.asarray(np.float32(1.0))
    return Work(lambda: pullback(one), grad_error, 8 * t * v, torch=torch)


def _pair(
    name: str, title: str, make: Callable[[bool, bool], Work], targets: tuple[int, int]
) -> list[Row]:
    return [
        Row(name, f"{title}, forward", "GB/s", targets[0], lambda q: make(q, False)),
        Row(
            f"{name}_backward",
            f"{title}, backward",
            "GB/s",
            targets[1],
            lambda q: make(q, True),
        ),
    ]


MEMORY_ROWS = [
    Row("copy", "2·x", "GB/s", None, copy),
    *_pair("swiglu", "silu(g)·u", silu, (4250, 4250)),
    *_pair("rms_norm", "RMSNorm", rms_norm, (4050, 3900)),
    *_pair("layer_norm", "LayerNorm", layer_norm, (4000, 3800)),
    *_pair("softmax", "softmax", softmax, (4030, 4280)),
    Row("row_sum", "sum of rows", "GB/s", 4300, row_sum),
    Row("column_sum", "sum of columns", "GB/s", 4000, column_sum),
    *_pair("gelu", "GELU (tanh)", gelu, (4250, 4200)),
    Row(
        "cross_entropy",
        "cross entropy, forward",
        "GB/s",
        4350,
        lambda q: cross_entropy(q, "forward"),
    ),
    Row(
        "cross_entropy_backward",
        "cross entropy, backward",
        "GB/s",
        4150,
        lambda q: cross_entropy(q, "backward"),
    ),
    Row(
        "cross_entropy_both",
        "cross entropy, loss and gradient",
        "µs",
        590,
        lambda q: cross_entropy(q, "both"),
    ),
]
