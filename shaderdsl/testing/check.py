"""``check_op``: an op against a reference, over everything that can be drawn for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, reject, settings

from ..errors import ReductionError
from ..function import grad, vjp
from ..op import Op
from .gradients import Graph, compare_slopes, loss_of, scalar_loss, several
from .script import script
from .strategies import Case, cases


@dataclass(frozen=True)
class Tolerance:
    """|got - expected| ≤ rtol · |expected| + atol · max|expected| + sensitivity.

    The sensitivity is how far the expected value moves when every input moves by one
    unit in its last place: what no f32 computation can be better than.
    """

    rtol: float = 1e-4
    atol: float = 1e-5
    half: float = 2e-3

    def assert_close(
        self,
        got: Any,
        expected: Any,
        moved: Any,
        what: str,
        half: bool = False,
        scale: float = 0.0,
    ) -> None:
        """Raise an AssertionError that says where the worst element is."""
        g, e = np.asarray(got, np.float64), np.asarray(expected, np.float64)
        if g.shape != e.shape:
            raise AssertionError(f"{what}: shape {g.shape}, expected {e.shape}")
        if not e.size:
            return
        rtol, atol = (self.half, self.half) if half else (self.rtol, self.atol)
        with np.errstate(invalid="ignore"):
            drift = np.abs(np.asarray(moved, np.float64) - e)
            worst = np.max(drift[np.isfinite(drift)], initial=0.0)
            scale = np.max(np.abs(e[np.isfinite(e)]), initial=scale)
            allowed = rtol * np.abs(e) + atol * scale + 8 * worst + 1e-30
            same = (g == e) | (np.isnan(g) & np.isnan(e))
            bad = ~same & ~(np.abs(g - e) <= allowed)
        if half:  # beyond its range
            bad &= ~(np.isinf(g) & (np.abs(e) > 65504 * (1 - self.half)))
        if bad.any():
            at = tuple(int(i[0]) for i in np.nonzero(bad))
            raise AssertionError(
                f"{what}: {int(bad.sum())} of {e.size} elements are wrong; at {at}: "
                f"{g[at]:.9g}, expected {e[at]:.9g}"
            )


def check_op(
    op: Op,
    reference: Callable[..., Any] | None = None,
    *,
    examples: int = 25,
    gradients: bool = True,
    tolerance: Tolerance | None = None,
    derandomize: bool = True,
    show: Callable[[str], None] = print,
    **draws: Any,
) -> None:
    """Check an op's values and gradients over drawn shapes, strides, dtypes and values.

    Forward is compared with the reference in float64 and with ``op.reference``; each
    gradient with the reference's finite differences, in the middle of a graph under a
    random cotangent and under a scalar loss.

    Args:
        op: the op.
        reference: the same in NumPy, given the operands and the options by keyword;
            ``op.reference`` by default.
        examples: how many cases are drawn.
        gradients: whether gradients are checked (for ordinary, tiny and huge values).
        tolerance: what counts as equal.
        derandomize: draw the same cases each time.
        show: gets the script that repeats a failure.
        draws: options of ``cases``.

    Raises:
        AssertionError: for the smallest case that fails.
    """
    failed: list[Case] = []

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=derandomize,
        database=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )
    @given(cases(op, **draws))
    def run(case: Case) -> None:
        try:
            check_case(case, reference, gradients=gradients, tolerance=tolerance)
        except ReductionError:
            # A maximum or a mean of nothing: refused, and rightly so.
            if all(math.prod(o.shape) for o in case.operands):
                failed.append(case)
                raise
            reject()
        except BaseException:
            failed.append(case)
            raise

    try:
        run()
    except Exception:
        if failed:  # the last one that ran is the smallest
            show(script(failed[-1], reference))
        raise


def check_case(
    case: Case,
    reference: Callable[..., Any] | None = None,
    *,
    gradients: bool = True,
    tolerance: Tolerance | None = None,
) -> None:
    """Check one call of an op; see :func:`check_op`."""
    near = tolerance or Tolerance()
    op, options = case.op, dict(case.options)
    arrays = case.arrays()
    wide = [_wide(a) for a in arrays]
    # NumPy in float64 is the judge; it may warn where infinities meet.
    with np.errstate(all="ignore"):
        own = several(op.reference(*wide, **case.keywords()))
        expected = several(reference(*wide, **options)) if reference else own
        moved = [_nudged(a, k) for k, a in enumerate(wide)]
        drift = several(
            (reference or op.reference)(
                *moved, **(options if reference else case.keywords())
            )
        )
    exact = Tolerance(1e-9, 1e-9)
    for k, (o, e) in enumerate(zip(own, expected, strict=True)):
        exact.assert_close(o, e, e, f"{op.name}.reference, result {k}")
    got = several(op(*arrays, **case.keywords()))
    for k, (y, e, d) in enumerate(zip(got, expected, drift, strict=True)):
        near.assert_close(y.numpy(), e, d, f"{op.name}, result {k}", y.dtype == "f16")
    half = any(a.dtype == np.float16 for a in arrays)
    if gradients and not half and case.kind in ("ordinary", "tiny", "huge"):
        _check_gradients(case, reference, arrays, wide, expected, near)


def _wide(a: np.ndarray) -> np.ndarray:
    return a.astype(np.float64) if a.dtype.kind == "f" else a


def _nudged(a: np.ndarray, seed: int) -> np.ndarray:
    """Every float moved by about one unit in the last place of f32."""
    if a.dtype.kind != "f":
        return a
    r = np.random.default_rng(seed)
    return np.where(
        np.isfinite(a), a * (1 + 1.2e-7 * r.choice([-1.0, 1.0], a.shape)), a
    )


def _check_gradients(
    case: Case,
    reference: Callable[..., Any] | None,
    arrays: Sequence[np.ndarray],
    wide: Sequence[np.ndarray],
    expected: Sequence[Any],
    near: Tolerance,
) -> None:
    op, options = case.op, dict(case.options)
    floats = [k for k, a in enumerate(arrays) if a.dtype.kind == "f"]
    if not floats:
        return
    r = np.random.default_rng(1)
    dy = [r.standard_normal(np.shape(e)).astype(np.float32) for e in expected]

    def call(*xs: Any) -> Any:
        full: list[Any] = list(arrays)
        for k, x in zip(floats, xs, strict=True):
            full[k] = x
        return op(*full, **case.keywords())

    args = [arrays[k] for k in floats]
    graph = Graph(call, args)
    ds = graph.gradient([wide[k] for k in floats], dy)
    nudged = graph.gradient([_nudged(wide[k], k) for k in floats], dy)

    def refer(*xs: Any) -> Any:
        full = list(wide)
        for k, x in zip(floats, xs, strict=True):
            full[k] = x
        if reference is None:
            return op.reference(*full, **case.keywords())
        return reference(*full, **options)

    with np.errstate(all="ignore"):
        loss = loss_of(refer, dy)
        for j, k in enumerate(floats):
            what = f"{op.name} to {case.operands[k].name}"
            wrt = [wide[q] for q in floats]
            compare_slopes(loss, wrt, j, ds[j], 1e-5, 1e-6, what)

    terms = max(
        float(np.abs(e * c).max(initial=0.0)) for e, c in zip(expected, dy, strict=True)
    )

    def agree(got: Any, how: str) -> None:
        for j, k in enumerate(floats):
            what = f"gradient of {op.name} to {case.operands[k].name} {how}"
            # Terms of this size may cancel, each with a rounding of its own.
            scale = 0.1 * terms
            near.assert_close(got[j].numpy(), ds[j], nudged[j], what, scale=scale)

    def middle(*xs: Any) -> Any:
        ys = several(call(*(x * 0.5 for x in xs)))
        return tuple(y * 2.0 for y in ys)

    # Doubling and halving are exact, so the gradient is the same.
    _, pullback = vjp(middle, *(a * a.dtype.type(2) for a in args))
    pulled = pullback(tuple(dy))
    agree([pulled] if len(args) == 1 else pulled, "inside a graph")
    numbers = tuple(range(len(args)))
    agree(grad(scalar_loss(call, dy), numbers)(*args), "under a scalar loss")
