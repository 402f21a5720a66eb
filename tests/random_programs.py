"""Random programs over arrays, as data: maps, reductions, contractions, gathers, views,
masks, scans, windows, several results, shared parts, deep chains, many inputs, rank 0
to 6.

``draw(seed)`` gives a `Program`. It is replayable and can be cut down: a step that does
not suit its operands any more passes the first one on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import shaderdsl as sd
from shaderdsl import ops
from shaderdsl.tracing import Traced, spec

SIZES = (1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 33, 64)
LARGEST = 60_000  # elements of one value
RANKS = (0, 1, 1, 2, 2, 2, 3, 3, 4, 5, 6)


@dataclass(frozen=True)
class Step:
    """One value of a program.

    Args:
        kind: a name in `KINDS`.
        args: numbers of earlier values: the inputs first, then one a step.
        n: numbers that say what exactly, whatever the operands are.
    """

    kind: str
    args: tuple[int, ...]
    n: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """A function of arrays.

    Args:
        seed: of the inputs' values.
        shapes: of the inputs.
        steps: in order.
        outs: numbers of the values that are results.
    """

    seed: int
    shapes: tuple[tuple[int, ...], ...]
    steps: tuple[Step, ...]
    outs: tuple[int, ...]

    def inputs(self) -> list[np.ndarray]:
        """f32 arrays, the same each time."""
        return [
            np.asarray(
                np.random.default_rng([self.seed, k]).standard_normal(s) * 0.7,
                np.float32,
            )
            for k, s in enumerate(self.shapes)
        ]

    def __call__(self, *xs: Any) -> tuple[Any, ...]:
        values = list(xs)
        for s in self.steps:
            operands = [values[k] for k in s.args]
            values.append(attempt(s.kind, operands, s.n))
        # A result is something computed, and a float.
        return tuple(values[k] * 1.0 for k in self.outs)

    def without(self, k: int) -> Program:
        """The program with step k left out: its readers get its first operand."""
        gone, instead = len(self.shapes) + k, self.steps[k].args[0]

        def moved(v: int) -> int:
            v = instead if v == gone else v
            return v - 1 if v > gone else v

        steps = tuple(
            replace(s, args=tuple(moved(v) for v in s.args))
            for i, s in enumerate(self.steps)
            if i != k
        )
        return replace(self, steps=steps, outs=tuple(moved(v) for v in self.outs))

    def resized(self, old: int, new: int) -> Program:
        """Every axis of one size made another."""
        shapes = tuple(tuple(new if d == old else d for d in s) for s in self.shapes)
        return replace(self, shapes=shapes)


# ------------------------------------------------------------------ what a step does

UNARY: tuple[Callable[[Any], Any], ...] = (
    sd.sin,
    sd.tanh,
    sd.sigmoid,
    sd.silu,
    sd.abs,
    sd.softplus,
    sd.gelu,
    sd.erf,
    lambda x: x * x,
    lambda x: -x,
    lambda x: sd.exp(sd.tanh(x)),
    lambda x: sd.log1p(x * x),
    lambda x: sd.rsqrt(x * x + 0.5),
    lambda x: sd.cos(x) * x,
    lambda x: x**3 * 0.1,
    lambda x: sd.sqrt(x * x + 0.1),
)
BINARY: tuple[Callable[[Any, Any], Any], ...] = (
    lambda x, y: x + y,
    lambda x, y: x * y,
    lambda x, y: x - y,
    lambda x, y: x / (y * y + 1.0),
    sd.maximum,
    sd.minimum,
    lambda x, y: sd.where(y > 0.1, x, 0.0) + y,
    lambda x, y: sd.atan2(x, y * y + 1.0),
)
REDUCTIONS = ("sum", "mean", "max", "min", "logsumexp", "var", "prod")


def window(x):
    return sd.sum(x.at(t=sd.index("t-k+1") + sd.index("k")), over="k") * 0.5


WINDOWS = [sd.op("... t -> ... t-k+1", k=k)(window) for k in (2, 3)]


@sd.op("... (h r) -> ... (h r)", r=2)
def rotated(x):
    sign = sd.where(sd.index("r") == 0, -1.0, 1.0)
    return x * 0.6 + sign * x.at(r=1 - sd.index("r")) * 0.8


@sd.op("... t, ... s -> ... t")
def causal_sum(x, y):
    """Under a mask that drops most of what is there."""
    seen = sd.index("s") <= sd.index("t")
    return x + 0.1 * sd.sum(sd.where(seen, y, 0.0), over="s")


@sd.op("v d, t -> t d")
def picked(table, ids):
    return table.at(v=ids)


@sd.op("t d -> t d")
def neighbour(x):
    """A guarded read of the row before, and the mirrored row."""
    t = sd.index("t")
    before = sd.where(t > 0, x.at(t=t - 1), 0.0)
    return x.at(t=sd.extent("t") - 1 - t) * 0.5 + before


def axis(x: Any, n: int) -> int:
    return n % x.ndim


def reduced(xs: Sequence[Any], n: Sequence[int]) -> Any:
    (x,) = xs
    over: Any = axis(x, n[1])
    if n[2] % 4 == 0:
        over = None
    elif n[2] % 4 == 1 and x.ndim > 1:
        over = tuple(sorted({over, axis(x, n[3])}))
    name = REDUCTIONS[n[0] % len(REDUCTIONS)]
    if name == "prod":
        x = sd.tanh(x) * 0.2 + 1.0
    return getattr(sd, name)(x, axis=over, keepdims=bool(n[2] // 4 % 2))


def product(xs: Sequence[Any], n: Sequence[int]) -> Any:
    x, y = xs
    if n[0] % 2 and y.ndim > 1:
        y = y.transpose(*range(y.ndim - 2), y.ndim - 1, y.ndim - 2)
    if x.shape[-1] != y.shape[-2 if y.ndim > 1 else 0]:
        if x.ndim < 2:
            return None
        y = x.transpose(*range(x.ndim - 2), x.ndim - 1, x.ndim - 2)
    return x @ y * (1.0 / (1 + x.shape[-1] ** 0.5))


def attended(xs: Sequence[Any], n: Sequence[int]) -> Any:
    q, k = (x.reshape(-1, x.shape[-1]) if x.ndim else x for x in xs)
    if k.ndim != 2 or q.shape[1] != k.shape[1]:
        k = q
    if q.shape[0] * k.shape[0] > LARGEST:
        return None
    causal = bool(n[0] % 2) and q.shape[0] <= k.shape[0]
    shape = (1, *q.shape), (1, *k.shape)
    v = sd.sin(k)
    return ops.attention(
        q.reshape(shape[0]), k.reshape(shape[1]), v.reshape(shape[1]), causal=causal
    ).reshape(xs[0].shape)


def sliced(xs: Sequence[Any], n: Sequence[int]) -> Any:
    (x,) = xs
    a = axis(x, n[0])
    size = x.shape[a]
    cut = (
        slice(1, None),
        slice(None, -1),
        slice(None, None, 2),
        slice(None, None, -1),
        slice(size // 2, None),
    )[n[1] % 5]
    return x[(slice(None),) * a + (cut,)] if size > 1 else None


def viewed(xs: Sequence[Any], n: Sequence[int]) -> Any:
    (x,) = xs
    if n[0] % 4 == 0:
        return x.transpose(*np.random.default_rng(n[1]).permutation(x.ndim).tolist())
    if n[0] % 4 == 1:
        return x.reshape(-1)
    if n[0] % 4 == 2:
        return x.reshape(*x.shape[: axis(x, n[1])], -1)
    return x.reshape(*x.shape[: axis(x, n[1])], 1, *x.shape[axis(x, n[1]) :])


def split(xs: Sequence[Any], n: Sequence[int]) -> Any:
    """An axis seen as two, and swapped with another."""
    (x,) = xs
    a = axis(x, n[0])
    for k in (2, 3, 4):
        if x.shape[a] % k == 0:
            y = x.reshape(*x.shape[:a], k, x.shape[a] // k, *x.shape[a + 1 :])
            order = list(range(y.ndim))
            order[a], order[a + 1] = order[a + 1], order[a]
            return y.transpose(*order) if y.ndim <= 6 else None
    return None


def taken(xs: Sequence[Any], n: Sequence[int]) -> Any:
    (x,) = xs
    ids = np.random.default_rng(n[0]).integers(0, x.shape[0], 1 + n[1] % 9)
    ids = ids.astype(np.int32)
    return picked(x, ids) if x.ndim == 2 and n[2] % 2 else sd.take(x, ids)


def routed(xs: Sequence[Any], n: Sequence[int]) -> Any:
    """Rows chosen by what was computed."""
    (x,) = xs
    best = sd.argmax(x.reshape(x.shape[0], -1), axis=0)
    return sd.take(x, best)


def padded(xs: Sequence[Any], n: Sequence[int]) -> Any:
    (x,) = xs
    r = np.random.default_rng(n[0])
    return sd.pad(x, [tuple(r.integers(0, 3, 2).tolist()) for _ in range(x.ndim)])


def windowed(xs: Sequence[Any], n: Sequence[int]) -> Any:
    (x,) = xs
    return WINDOWS[n[0] % 2](x) if x.shape[-1] > 2 else None


def chained(xs: Sequence[Any], n: Sequence[int]) -> Any:
    """A deep chain, half of it shared."""
    y, x = xs[0], xs[0]
    for k in range(8 + n[0] % 25):
        y = sd.sin(y * 1.01 + 0.1) if k % 3 else y * 0.9 + x * 0.1
    return y


def joined(xs: Sequence[Any], n: Sequence[int]) -> Any:
    x, y = xs
    if n[0] % 3 == 0 and x.shape == y.shape:
        return sd.stack([x, y], axis=axis(x, n[1])) if x.ndim < 6 else None
    return sd.concatenate([x, sd.sin(x), x][: 2 + n[0] % 2], axis=axis(x, n[1]))


def outer(xs: Sequence[Any], n: Sequence[int]) -> Any:
    x, y = xs
    if x.ndim + y.ndim > 6:
        return None
    return x.reshape(*x.shape, *[1] * y.ndim) * y


KINDS: dict[str, tuple[int, int, Callable[[Sequence[Any], Sequence[int]], Any]]] = {
    # name: operands, least rank of the first, what it is
    "unary": (1, 0, lambda xs, n: UNARY[n[0] % len(UNARY)](*xs)),
    "binary": (2, 0, lambda xs, n: BINARY[n[0] % len(BINARY)](*xs)),
    "reduce": (1, 1, reduced),
    "softmax": (1, 1, lambda xs, n: sd.softmax(xs[0], axis=axis(xs[0], n[0]))),
    "normal": (
        1,
        1,
        lambda xs, n: (
            xs[0]
            / sd.sqrt(
                sd.mean(xs[0] * xs[0], axis=axis(xs[0], n[0]), keepdims=True) + 0.1
            )
        ),
    ),
    "matmul": (2, 1, product),
    "attention": (2, 2, attended),
    "outer": (2, 0, outer),
    "view": (1, 1, viewed),
    "split": (1, 1, split),
    "slice": (1, 1, sliced),
    "where": (2, 0, lambda xs, n: sd.where(xs[0] > 0.1, xs[0], xs[1])),
    "take": (1, 1, taken),
    "route": (1, 2, routed),
    "cumsum": (1, 1, lambda xs, n: sd.cumsum(xs[0], axis=axis(xs[0], n[0])) * 0.2),
    "join": (2, 1, joined),
    "pad": (1, 1, padded),
    "arg": (
        1,
        1,
        lambda xs, n: (
            xs[0] * 0.5
            + sd.cast(
                sd.argmax(xs[0], axis=axis(xs[0], n[0]), keepdims=True)
                % 3, "f32",
            )
        ),
    ),
    "windows": (1, 1, windowed),
    "rotate": (
        1,
        1,
        lambda xs, n: rotated(xs[0]) if xs[0].shape[-1] % 2 == 0 else None,
    ),
    "causal": (
        2,
        1,
        lambda xs, n: (
            causal_sum(*xs) if xs[0].shape[:-1] == xs[1].shape[:-1] else None
        ),
    ),
    "neighbour": (1, 2, lambda xs, n: neighbour(xs[0]) if xs[0].ndim == 2 else None),
    "chain": (1, 0, chained),
}  # fmt: skip
# What is drawn more often than once.
WEIGHTS = {"binary": 4, "unary": 3, "reduce": 3, "matmul": 3, "attention": 2, "view": 2}
NAMES = [k for k in KINDS for _ in range(WEIGHTS.get(k, 1))]


def attempt(kind: str, operands: Sequence[Any], n: Sequence[int]) -> Any:
    """A step's value; the first operand where the step does not suit them."""
    value = suited(kind, operands, n)
    return operands[0] if value is None else value


def suited(kind: str, operands: Sequence[Any], n: Sequence[int]) -> Any:
    """A step's value, or None where it does not suit its operands."""
    count, rank, function = KINDS[kind]
    if len(operands) != count or any(x.ndim < min(rank, 1) for x in operands):
        return None
    if operands[0].ndim < rank:
        return None
    try:
        value = function(operands, n)
    except sd.errors.ShapeError:  # sizes that do not fit each other
        if count == 1:
            raise
        return None
    if value is None or value.size > LARGEST or value.ndim > 6 or not value.size:
        return None
    return value


# ------------------------------------------------------------------ drawing


def draw(seed: int) -> Program:
    """A program; every tenth has 40 inputs, every tenth few axes of many dimensions."""
    r = np.random.default_rng(seed)
    many, high = seed % 10 == 3, seed % 10 == 7
    sizes = [int(n) for n in r.choice(SIZES[:6] if high else SIZES, 3)]
    shapes = []
    for _ in range(40 if many else int(r.integers(1, 5))):
        rank = int(r.integers(4, 7)) if high else int(r.choice(RANKS[:8]))
        shapes.append(tuple(int(r.choice([*sizes[: 2 if many else 3], 1]))
                            for _ in range(rank)))  # fmt: skip
    steps: list[Step] = []

    def trace(*xs: Any) -> Any:
        values = list(xs)

        def add(kind: str, args: Sequence[int]) -> None:
            n = tuple(int(v) for v in r.integers(0, 1 << 16, 4))
            value = suited(kind, [values[k] for k in args], n)
            if value is not None:
                steps.append(Step(kind, tuple(args), n))
                values.append(value)

        def recent() -> int:
            return min(len(values) - 1, int(len(values) * r.random() ** 0.6))

        if many:  # each is used: what fits is added to what is there
            for k in range(1, len(xs)):
                add("binary", (len(values) - 1, k))
        for _ in range(int(r.integers(2, 10))):
            kind = str(r.choice(NAMES))
            add(kind, [recent() for _ in range(KINDS[kind][0])])
        return values[-1] * 1.0

    Traced(trace, tuple(spec("f32", *s) for s in shapes), "drawing")
    first, count = len(shapes), len(shapes) + len(steps)
    used = {v for s in steps for v in s.args}
    ends = [v for v in range(first, count) if v not in used]
    outs = ends[-3:] + [v for v in range(max(first, count - 2), count) if v in used][:1]
    return Program(seed, tuple(shapes), tuple(steps), tuple(outs or [0]))
