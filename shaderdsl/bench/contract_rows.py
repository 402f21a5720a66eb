"""Rows that multiply: products of matrices and vectors, attention, and gathers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from . import handwritten as hand
from . import reference as ref
from .work import Row, Work, distance, normal, rows_of, some, wide


def _torch(function: Callable[..., Any], shapes: Sequence[Any], half: bool = False):
    def make(t: Any, compiled: bool) -> Callable[[], Any]:
        kind = t.float16 if half else t.float32
        xs = [t.randn(*s, dtype=kind) for s in shapes]
        f = t.compile(function) if compiled else function

        def call() -> Any:
            with t.no_grad():
                return f(*xs)

        return call

    return make


def matmul(quick: bool, m: int, k: int, n: int, half: bool = False) -> Work:
    import shaderdsl as sd

    if quick:
        m, k, n = (max(1, x // 16 // 64) * 64 for x in (m, k, n))
    a, b = normal(1, m, k), normal(2, k, n)
    if half:
        a, b = a.astype("f16"), b.astype("f16")
    function = sd.op("m k, k n -> m n")(_product)

    def error(y: Any) -> float:
        rows = some(m)
        return distance(rows_of(y, rows), rows_of(a, rows) @ wide(b))

    return Work(
        lambda: function(a, b),
        error,
        (2 if half else 4) * (m * k + k * n + m * n),
        2 * m * k * n,
        # The sum is f32; the result is rounded to f16.
        1e-3 if half else 1e-5,
        torch=_torch(lambda x, y: x @ y, [(m, k), (k, n)], half),
        compiles=False,
        handwritten=None if half else partial(hand.matmul, a, b),
    )


def _product(a: Any, b: Any) -> Any:
    import shaderdsl as sd

    return sd.sum(a * b, over="k")


def gemv(quick: bool, transposed: bool) -> Work:
    import shaderdsl as sd

    k, n = (512, 1376) if quick else (4096, 11008)
    x = normal(1, k)
    w = normal(2, n, k) if transposed else normal(2, k, n)
    signature = "k, n k -> n" if transposed else "k, k n -> n"
    function = sd.op(signature)(_product)

    def error(y: Any) -> float:
        return distance(y, wide(w) @ wide(x) if transposed else wide(x) @ wide(w))

    def torch(v: Any, m: Any) -> Any:
        return m @ v if transposed else v @ m

    return Work(
        lambda: function(x, w),
        error,
        4 * (k * n + k + n),
        2 * k * n,
        torch=_torch(torch, [(k,), w.shape]),
        compiles=False,
        handwritten=partial(hand.gemv_t, x, w) if transposed else None,
    )


def embedding(quick: bool) -> Work:
    import shaderdsl as sd
    from shaderdsl import ops

    v, d, t = (2000, 128, 256) if quick else (32000, 768, 2048)
    labels = np.random.default_rng(3).integers(0, v, t).astype(np.int32)
    ids, table, dy = sd.asarray(labels), normal(1, v, d), normal(2, t, d)
    _, pullback = sd.vjp(lambda table: ops.embedding(table, ids), table)

    def error(got: Any) -> float:
        want = np.zeros((v, d))
        np.add.at(want, labels, wide(dy))
        return distance(got, want)

    def torch(tt: Any, compiled: bool) -> Callable[[], Any]:
        table = tt.randn(v, d, requires_grad=True)
        at = tt.randint(0, v, (t,))
        f = tt.nn.functional.embedding
        y = (tt.compile(f) if compiled else f)(at, table)
        dy = tt.randn_like(y)
        return lambda: tt.autograd.grad(y, table, dy, retain_graph=True)

    return Work(lambda: pullback(dy), error, 4 * (v * d + 2 * t * d), torch=torch)


# ------------------------------------------------------------------ attention


#: What the targets of attention's backward are those of: the gradient of the scores is
#: stored, as far as that goes.
SCRATCH = 2 << 30


def attention(
    quick: bool,
    length: int,
    heads: int,
    kv: int,
    d: int,
    backward: bool,
    scores: int | None = None,
) -> Work:
    import shaderdsl as sd
    from shaderdsl import ops

    if quick:
        length, heads, kv, d = 128, 4, 4 * kv // heads, min(d, 64)
    q = normal(1, heads, length, d)
    k, v, do = normal(2, kv, length, d), normal(3, kv, length, d), normal(4, *q.shape)
    group = heads // kv
    flops = 2 * 2 * heads * length * length * d // 2

    def function(q: Any, k: Any, v: Any) -> Any:
        return ops.attention(q, k, v, causal=True)

    def torch(t: Any, compiled: bool) -> Callable[[], Any]:
        xs = [t.randn(1, *a.shape, requires_grad=backward) for a in (q, k, v)]

        def f(q: Any, k: Any, v: Any) -> Any:
            return t.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )

        f = t.compile(f) if compiled else f
        if not backward:

            def call() -> Any:
                with t.no_grad():
                    return f(*xs)

            return call
        y = f(*xs)
        dy = t.randn_like(y)
        return lambda: t.autograd.grad(y, xs, dy, retain_graph=True)

    def head(a: Any, n: int) -> Any:
        return rows_of(a, [n])[0]

    if not backward:
        compiled = sd.compile(function)

        def error(y: Any) -> float:
            last = heads - 1
            want = ref.attention(head(q, last), head(k, kv - 1), head(v, kv - 1))
            return distance(head(y, last), want)

        moved = 4 * (2 * q.size + 2 * k.size)
        return Work(
            lambda: compiled(q, k, v),
            error,
            moved,
            flops,
            torch=torch,
            compiles=False,
        )
    _, pullback = sd.vjp(function, q, k, v)
    if scores is not None:
        pullback = sd.compile(pullback, scores=scores)

    def grad_error(got: Any) -> float:
        # One head of keys and values, with all the heads that read it.
        n = kv - 1
        dk: Any = 0
        dv: Any = 0
        worst = 0.0
        for h in range(n * group, (n + 1) * group):
            dq, dk1, dv1 = ref.attention_grad(
                head(q, h), head(k, n), head(v, n), head(do, h)
            )
            worst = max(worst, distance(head(got[0], h), dq))
            dk, dv = dk + dk1, dv + dv1
        return max(worst, distance(head(got[1], n), dk), distance(head(got[2], n), dv))

    moved = 4 * (4 * q.size + 4 * k.size)
    return Work(
        lambda: pullback(do),
        grad_error,
        moved,
        flops * 5 // 2,
        torch=torch,
        compiles=False,
    )


def _matmul_row(m: int, k: int, n: int, target: float, half: bool = False) -> Row:
    kind = "_f16" if half else ""
    return Row(
        f"matmul{kind}_{m}x{k}x{n}",
        f"matmul {m}×{k}×{n}{' f16 in, f32 sums' if half else ''}",
        "TFLOP/s",
        target,
        lambda quick: matmul(quick, m, k, n, half),
        with_matrices=200 if half else None,
    )


def _attention_rows(
    length: int, heads: int, kv: int, d: int, unit: str, targets: tuple[float, float]
) -> list[Row]:
    """Forward; backward with memory for the gradient of the scores; and with what it
    may take by default, which is a quarter of an attention's own arrays.
    """
    name = f"attention_{length}_{heads}_{kv}_{d}"
    title = f"causal attention S {length}, {heads} on {kv} heads, d {d}"
    make = partial(attention, length=length, heads=heads, kv=kv, d=d)
    forward, backward = targets
    return [
        Row(name, f"{title}, forward", unit, forward, partial(make, backward=False)),
        Row(
            f"{name}_backward",
            f"{title}, backward, 2 GiB of scratch",
            unit,
            backward,
            partial(make, backward=True, scores=SCRATCH),
        ),
        Row(
            f"{name}_backward_default",
            f"{title}, backward, default budget",
            unit,
            None,
            partial(make, backward=True),
        ),
    ]


CONTRACT_ROWS = [
    Row("gemv", "x·W, 4096 by 11008", "GB/s", 3700, lambda q: gemv(q, False)),
    Row("gemv_t", "x·Wᵀ, 11008 by 4096", "GB/s", 4200, lambda q: gemv(q, True)),
    Row("embedding_backward", "gradient of embedding", "µs", 33, embedding),
    _matmul_row(4096, 4096, 4096, 45),
    _matmul_row(8192, 4096, 11008, 46),
    _matmul_row(256, 4096, 4096, 41),
    _matmul_row(4096, 4096, 4096, 44, half=True),
    *_attention_rows(4096, 16, 16, 64, "TFLOP/s", (38, 31)),
    *_attention_rows(4096, 32, 8, 128, "TFLOP/s", (39, 34)),
    *_attention_rows(2048, 12, 4, 64, "µs", (270, 720)),
]
