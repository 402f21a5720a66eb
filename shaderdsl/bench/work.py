"""What a row of the benchmark is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

#: A peer's call, ready to be timed; given PyTorch's module and whether to compile.
TorchPeer = Callable[[Any, bool], Callable[[], Any]]


@dataclass
class Work:
    """One row at one size, with its arrays on the device.

    Attributes:
        run: launches it; returns its arrays.
        error: how far these are from float64, ``‖got - want‖ / ‖want‖`` at its worst.
        tolerance: what is right.
        bytes: the least that must be moved.
        flops: what counts as its arithmetic.
        torch: makes PyTorch's call, on its default device.
        compiles: whether torch.compile has something to gain.
        handwritten: makes the call of a hand-written kernel.
        seconds: how to time it, where that is not the sum over its kernels.
        more: called after timing for further figures.
    """

    run: Callable[[], Any]
    error: Callable[[Any], float]
    bytes: int = 0
    flops: int = 0
    tolerance: float = 1e-5
    torch: TorchPeer | None = None
    compiles: bool = True
    handwritten: Callable[[], Callable[[], Any]] | None = None
    seconds: Callable[[], float] | None = None
    more: Callable[[], dict[str, Any]] = dict


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Args:
        name: what it is called on the command line.
        title: for people.
        unit: ``"GB/s"``, ``"TFLOP/s"``, ``"µs"``, ``"ms"`` or ``"tokens/s"``.
        target: in that unit, at the large size on an H200; None where there is none.
        make: puts the arrays of the large or the quick size on the device.
        with_matrices: the target where subgroups multiply matrices, if it is another.
        beats: the peer whose figure in the same run is the target.
    """

    name: str
    title: str
    unit: str
    target: float | None
    make: Callable[[bool], Work] = field(repr=False)
    with_matrices: float | None = None
    beats: str | None = None

    def value(self, seconds: float, work: Work) -> float:
        """A time in the row's unit."""
        match self.unit:
            case "GB/s":
                return work.bytes / seconds / 1e9
            case "TFLOP/s":
                return work.flops / seconds / 1e12
            case "µs":
                return seconds * 1e6
            case "ms":
                return seconds * 1e3
        return 1.0 / seconds


def distance(got: Any, want: Any) -> float:
    """``‖got - want‖ / ‖want‖``; infinite where something is not finite."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if got.shape != want.shape or not np.isfinite(got).all():
        return float("inf")
    scale = float(np.linalg.norm(want))
    return float(np.linalg.norm(got - want)) / max(scale, 1e-300)


def some(n: int, count: int = 32) -> np.ndarray[Any, Any]:
    """Rows that are looked at: the first, the last and some between."""
    rng = np.random.default_rng(5)
    return np.unique([0, n - 1, *rng.integers(0, n, count)]).astype(np.int32)


def normal(seed: int, *shape: int) -> Any:
    """Standard normals, made on the device."""
    import shaderdsl as sd

    return sd.random.normal(sd.random.key(seed), shape)


def wide(a: Any) -> np.ndarray[Any, Any]:
    """An array of the device in float64."""
    return np.asarray(a).astype(np.float64)


def rows_of(a: Any, rows: Sequence[int] | np.ndarray[Any, Any]) -> Any:
    """Some rows of an array of the device, in float64."""
    return wide(a[np.asarray(rows, np.int32)])
