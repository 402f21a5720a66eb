"""``check_op``: an op against a reference, over everything that can be drawn for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis
import numpy as np
from hypothesis import HealthCheck, given, reject, settings

from ..errors import ReductionError, TraceError
from ..function import grad, vjp
from ..op import Op
from ..tracing import Traced
from .gradients import Graph, compare_slopes, loss_of, scalar_loss, several
from .rounding import Rounding, allowance
from .script import script
from .strategies import Case, cases

# What the pytest plugin sets.
default_seed: int | None = None


@dataclass(frozen=True)
class Tolerance:
    """What is allowed besides the op's own error bound.

    |got - expected| ≤ bound + rtol · |expected| + atol · max|expected|, where the bound
    follows from the op: see :mod:`shaderdsl.testing.rounding`.
    """

    rtol: float = 0.0
    atol: float = 0.0

    def assert_close(
        self, got: Any, expected: Any, moved: list[Any], what: str, half: bool = False
    ) -> None:
        """Raise an AssertionError that says where the worst element is.

        Args:
            moved: the expected values under roundings.
            half: whether the result is f16.
        """
        g, e = np.asarray(got, np.float64), np.asarray(expected, np.float64)
        if g.shape != e.shape:
            raise AssertionError(f"{what}: shape {g.shape}, expected {e.shape}")
        if not e.size:
            return
        with np.errstate(invalid="ignore"):
            scale = np.max(np.abs(e[np.isfinite(e)]), initial=0.0)
            allowed = allowance(e, moved, half)
            allowed = allowed + self.rtol * np.abs(e) + self.atol * scale
            same = (g == e) | (np.isnan(g) & np.isnan(e))
            bad = ~same & ~(np.abs(g - e) <= allowed)
        if half:  # beyond its range
            bad &= ~(np.isinf(g) & (np.abs(e) + allowed > 65504))
        else:
            bad &= ~(np.isinf(g) & (np.abs(e) + allowed > np.finfo(np.float32).max))
        if bad.any():
            at = tuple(int(i) for i in np.argwhere(bad)[0])
            raise AssertionError(
                f"{what}: {int(bad.sum())} of {e.size} elements are wrong; at {at}: "
                f"{g[at]:.9g}, expected {e[at]:.9g} (allowed: {allowed[at]:.3g})"
            )


def check_op(
    op: Op,
    reference: Callable[..., Any] | None = None,
    *,
    examples: int = 25,
    gradients: bool = True,
    tolerance: Tolerance | None = None,
    seed: int | None = None,
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
        seed: which cases are drawn; the same ones each time by default, or those of
            the pytest option ``--shaderdsl-seed``.
        show: gets the script that repeats a failure.
        draws: options of ``cases``.

    Raises:
        AssertionError: for the smallest case that fails.
        TraceError: what is no op.
        ShaderError, or whatever the op itself raises: it cannot be traced at all.
    """
    if not isinstance(op, Op):
        raise TraceError(
            f"check_op takes an op, not a {type(op).__name__}",
            cure="check_gradients(f, *arrays) takes any function of arrays",
        )
    failed: list[Case] = []
    refused: list[Exception] = []
    seen: list[Case] = []
    seed = default_seed if seed is None else seed

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=seed is None,
        database=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )
    @given(cases(op, **draws))
    def run(case: Case) -> None:
        if refused:
            raise refused[0]
        if not seen:
            seen.append(case)
            try:
                Traced(_call(case), tuple(case.arrays()), "lower")
            except ReductionError:
                pass  # of nothing, which other cases may not ask for
            except Exception as error:
                refused.append(error)
                raise
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

    if seed is not None:
        run = hypothesis.seed(seed)(run)
    try:
        run()
    except Exception:
        if refused:  # no case is to blame: the op itself cannot be traced
            vars(refused[0]).pop("__notes__", None)  # Hypothesis' words on the case
            raise refused[0] from None
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
        graph = Graph(_call(case), arrays)
        moved = [graph.value(_nudged(wide, k), Rounding(k)) for k in range(3)]
    exact = Tolerance(1e-9, 1e-9)
    for k, (o, e) in enumerate(zip(own, expected, strict=True)):
        exact.assert_close(o, e, [e], f"{op.name}.reference, result {k}")
    got = several(op(*arrays, **case.keywords()))
    for k, (y, e) in enumerate(zip(got, expected, strict=True)):
        drift = [m[k] for m in moved]
        near.assert_close(
            y.numpy(), e, drift, f"{op.name}, result {k}", y.dtype == "f16"
        )
    half = any(a.dtype == np.float16 for a in arrays)
    if gradients and not half and case.kind in ("ordinary", "tiny", "huge"):
        _check_gradients(case, reference, arrays, wide, expected, near)


def _call(case: Case) -> Callable[..., Any]:
    return lambda *xs: case.op(*xs, **case.keywords())


def _wide(a: np.ndarray) -> np.ndarray:
    return a.astype(np.float64) if a.dtype.kind == "f" else a


def _nudged(arrays: Sequence[np.ndarray], seed: int) -> list[np.ndarray]:
    """Every float moved by about one unit in the last place of f32."""
    r = np.random.default_rng(seed)
    return [
        np.where(np.isfinite(a), a * (1 + 1.2e-7 * r.choice([-1.0, 1.0], a.shape)), a)
        if a.dtype.kind == "f"
        else a
        for a in arrays
    ]


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
    moved = [
        graph.gradient(_nudged([wide[k] for k in floats], q), dy, Rounding(q))
        for q in range(3)
    ]

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

    def agree(got: Any, how: str, of: Sequence[int]) -> None:
        for g, j in zip(got, of, strict=True):
            what = f"gradient of {op.name} to {case.operands[floats[j]].name} {how}"
            near.assert_close(g.numpy(), ds[j], [m[j] for m in moved], what)

    def middle(*xs: Any) -> Any:
        ys = several(call(*(x * 0.5 for x in xs)))
        return tuple(y * 2.0 for y in ys)

    # Doubling and halving are exact, so the gradient is the same.
    _, pullback = vjp(middle, *(a * a.dtype.type(2) for a in args))
    pulled = pullback(tuple(dy))
    every = range(len(args))
    agree([pulled] if len(args) == 1 else pulled, "inside a graph", every)
    agree(
        grad(scalar_loss(call, dy), tuple(every))(*args), "under a scalar loss", every
    )
    if len(args) > 1:  # the others are frozen: closed over, and not differentiated
        chosen = sorted({case.operands[0].seed % len(args), *every[2::2]})

        def of_some(*some: Any) -> Any:
            full = list(args)
            for j, x in zip(chosen, some, strict=True):
                full[j] = x
            return call(*full)

        loss = scalar_loss(of_some, dy)
        got = grad(loss, tuple(range(len(chosen))))(*(args[j] for j in chosen))
        agree(got, "with the others frozen", chosen)
