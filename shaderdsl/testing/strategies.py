"""What Hypothesis draws: sizes of named axes, and whole cases of an op."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ..errors import AxisError
from ..ir import signature as S
from ..op import Op
from .values import LAYOUTS, make

# Small ones first: Hypothesis shrinks towards them.
_SIZES = (1, 2, 3, 5, 7, 8, 9, 13, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 257, 1009)


def dims(
    maximum: int = 65, *, zero: bool = True, minimum: int = 1
) -> st.SearchStrategy[int]:
    """Sizes on which tilings go wrong: 1, primes, powers of two ± 1, and 0.

    Args:
        maximum: the largest size.
        zero: whether 0 is among them.
        minimum: the least of the others.
    """
    sizes = [n for n in _SIZES if minimum <= n <= maximum] or [minimum]
    return st.sampled_from([*sizes, 0] if zero else sizes)


@dataclass(frozen=True)
class Operand:
    """The recipe of one operand, as arguments of ``make``."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    seed: int
    layout: str
    more: Mapping[str, Any] = field(default_factory=dict)

    def array(self) -> np.ndarray:
        """The operand itself."""
        m, s = make, self
        return m(s.shape, s.dtype, s.kind, s.seed, s.layout, **s.more)


@dataclass(frozen=True)
class Case:
    """One call of an op."""

    op: Op
    operands: tuple[Operand, ...]
    options: Mapping[str, Any]
    sizes: Mapping[str, int]

    def arrays(self) -> list[np.ndarray]:
        """The operands."""
        return [o.array() for o in self.operands]

    def keywords(self) -> dict[str, Any]:
        """Options, and sizes that no operand shows."""
        return {**self.options, **self.sizes}

    @property
    def kind(self) -> str:
        """The kind of its values."""
        return self.operands[0].kind if self.operands else "ordinary"


@st.composite
def cases(
    draw: Any,
    op: Op,
    *,
    options: Mapping[str, Sequence[Any]] | None = None,
    ids: Mapping[str, tuple[str, int | None]] | None = None,
    bools: Iterable[str] = (),
    positive: Iterable[str] = (),
    nonempty: Iterable[str] = (),
    kinds: Sequence[str] = ("ordinary", "tiny", "huge", "zeros", "ties"),
    dtypes: Sequence[str] = ("f32", "f16"),
    sizes: Mapping[str, int] | None = None,
    maximum: int = 65,
    elements: int = 20_000,
) -> Case:
    """Calls of an op: shapes, strides, dtypes, values and options.

    Args:
        op: the op.
        options: the choices for each keyword.
        ids: integer operands → the axis that they index and a further value or None.
        bools: operands that are bool.
        positive: operands that must be greater than 0.
        nonempty: axes that cannot have size 0.
        kinds: kinds of values (see ``make``).
        dtypes: dtypes of the float operands, ``f32`` and ``f16``.
        sizes: axes of a fixed size.
        maximum: the largest size of an axis.
        elements: the most points in the space of all axes.
    """
    sig = op.signature
    fixed = {**op.sizes, **(sizes or {})}
    needed = set(nonempty)
    known: dict[str, int] = {}
    room = elements
    names = [a for a in sig.axes() if not any(c in a for c in "+-")]
    ellipsis = any(d.kind == "ellipsis" for o in sig.inputs for d in o)
    names += [f"...{k}" for k in range(draw(st.integers(0, 2)) if ellipsis else 0)]
    for a in names:
        top = max(1, min(maximum, room))
        n = fixed[a] if a in fixed else draw(dims(top, zero=a not in needed))
        known[a] = n
        room //= max(n, 1)
    lead = tuple(n for a, n in known.items() if a.startswith("..."))
    # A window is no longer than what it moves over.
    for o in (*sig.inputs, *sig.outputs):
        for d in o:
            if d.kind == "derived":
                _lengthen(d, known, fixed)
    kind = draw(st.sampled_from(list(kinds)))
    dtype = draw(st.sampled_from(list(dtypes)))
    seed = draw(st.integers(0, 999))
    operands = []
    for k, (name, o) in enumerate(zip(op.operands, sig.inputs, strict=True)):
        shape = tuple(n for d in o for n in _dimension(d, known, lead))
        more: dict[str, Any] = {}
        own = dtype
        if ids and name in ids:
            axis, extra = ids[name]
            own, more = "i32", {"below": known[axis], "extra": extra}
        elif name in set(bools):
            own = "bool"
        elif name in set(positive):
            more = {"positive": True}
        layout = draw(st.sampled_from(LAYOUTS)) if shape else "contiguous"
        operands.append(Operand(name, shape, own, kind, seed + k, layout, more))
    chosen = {k: draw(st.sampled_from(list(v))) for k, v in (options or {}).items()}
    shown = _shown(op, [o.shape for o in operands], known)
    return Case(op, tuple(operands), chosen, shown)


def _lengthen(d: S.Dim, known: dict[str, int], fixed: Mapping[str, int]) -> None:
    total = sum(s * (int(n) if n.isdigit() else known[n]) for s, n in S.terms(d.text))
    if total < 0:
        longest = next(n for s, n in S.terms(d.text) if s > 0 and not n.isdigit())
        if longest not in fixed:
            known[longest] -= total


def _dimension(
    d: S.Dim, known: Mapping[str, int], lead: tuple[int, ...]
) -> tuple[int, ...]:
    if d.kind == "ellipsis":
        return lead
    if d.kind == "derived":
        terms = S.terms(d.text)
        return (sum(s * (int(n) if n.isdigit() else known[n]) for s, n in terms),)
    combine: Any = sum if d.kind == "joined" else math.prod
    return (combine([known[a] for a in d.axes]),)


def _shown(
    op: Op, shapes: list[tuple[int, ...]], known: Mapping[str, int]
) -> dict[str, int]:
    """Sizes to pass by keyword: those that the operands do not determine."""
    sig = S.expand(op.signature, shapes, op.name)
    given = dict(op.sizes)
    extra: dict[str, int] = {}
    for a in (None, *[a for a in known if not a.startswith("...")]):
        if a is not None:
            extra[a] = known[a]
        try:
            S.solve(sig, shapes, {**given, **extra}, op.operands, op.name)
        except AxisError:
            continue
        return extra
    return extra
