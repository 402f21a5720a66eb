"""Signatures: ``"t (h r p), t p -> t (h r p)"``. Operands are lists of dimensions,
dimensions are made of named axes.

A dimension is one axis (``d``), several merged (``(h r p)``), two or more pieces end to
end (``(a+b)``), an extent worked out from others (``t-k+1``), or ``...``, which stands
for any leading axes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import AxisError, ShapeError, SignatureError
from .expr import user_location

_NAME = re.compile(r"[^\W\d]\w*$")
_TERM = re.compile(r"([+-]?)([^\W\d]\w*|\d+)")
_EXTENT = re.compile(r"([^\W\d]\w*|\d+)([+-]([^\W\d]\w*|\d+))+$")


@dataclass(frozen=True)
class Dim:
    """One dimension. ``kind`` is ``merged`` (of one or more axes), ``joined``,
    ``derived`` or ``ellipsis``.
    """

    kind: str
    axes: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Signature:
    """Operands and results as lists of dimensions."""

    text: str
    inputs: tuple[tuple[Dim, ...], ...]
    outputs: tuple[tuple[Dim, ...], ...]

    def axes(self) -> list[str]:
        """Names in the order of first mention, results first."""
        seen: dict[str, None] = {}
        for operand in (*self.outputs, *self.inputs):
            for dim in operand:
                for a in (dim.text,) if dim.kind == "derived" else dim.axes:
                    seen.setdefault(a)
        return list(seen)


def parse(text: str) -> Signature:
    """Read a signature.

    Raises:
        SignatureError: with the part that cannot be read.
    """
    if not isinstance(text, str):
        raise SignatureError(
            f"an op is defined with its signature, not with {text!r}",
            where=user_location(),
            cure='write @sd.op("t d -> t")',
        )
    if text.count("->") != 1:
        raise SignatureError(
            f"{text!r} needs exactly one '->'",
            where=user_location(),
            cure="write 'operands -> result', e.g. 't d, d -> t d'",
        )
    left, right = text.split("->")
    inputs = tuple(_operand(p, text) for p in left.split(",")) if left.strip() else ()
    return Signature(text, inputs, tuple(_operand(p, text) for p in right.split(",")))


def _operand(part: str, text: str) -> tuple[Dim, ...]:
    dims: list[Dim] = []
    for token in re.findall(r"\([^()]*\)|[^\s()]+|[()]", part):
        if token == "...":
            dims.append(Dim("ellipsis", (), token))
        elif token.startswith("(") and token.endswith(")") and len(token) > 1:
            dims.append(_group(token[1:-1].strip(), text))
        elif _NAME.match(token):
            dims.append(Dim("merged", (token,), token))
        elif _EXTENT.match(token) and any(not n.isdigit() for _, n in terms(token)):
            dims.append(
                Dim(
                    "derived",
                    tuple(n for _, n in terms(token) if not n.isdigit()),
                    token,
                )
            )
        else:
            raise SignatureError(
                f"cannot read {token!r} in the signature {text!r}",
                where=user_location(),
                cure="an operand is a list of axes: 't', '(h p)', '(a+b)', 't-k+1'",
            )
    if sum(d.kind == "ellipsis" for d in dims) > 1:
        raise SignatureError(
            f"two '...' in one operand of {text!r}", where=user_location()
        )
    return tuple(dims)


def _group(inner: str, text: str) -> Dim:
    if "+" in inner and "-" not in inner:
        pieces = tuple(p.strip() for p in inner.split("+"))
        if all(_NAME.match(p) for p in pieces) and len(set(pieces)) == len(pieces):
            return Dim("joined", pieces, "(" + "+".join(pieces) + ")")
    names = tuple(inner.split())
    if names and all(_NAME.match(n) for n in names):
        return Dim("merged", names, f"({' '.join(names)})")
    raise SignatureError(
        f"cannot read '({inner})' in the signature {text!r}",
        where=user_location(),
        cure="'(h p)' merges, '(a+b)' joins",
    )


def terms(text: str) -> list[tuple[int, str]]:
    """``"t-k+1"`` as signed terms."""
    return [(-1 if sign == "-" else 1, name) for sign, name in _TERM.findall(text)]


def expand(sig: Signature, shapes: Sequence[tuple[int, ...]], where: str) -> Signature:
    """Replace ``...`` by axes ``...0``, ``...1``, … as many as the operands show."""
    if not any(d.kind == "ellipsis" for o in (*sig.inputs, *sig.outputs) for d in o):
        return sig
    count = 0
    for operand, shape in zip(sig.inputs, shapes, strict=True):
        if any(d.kind == "ellipsis" for d in operand):
            count = max(count, len(shape) - len(operand) + 1)

    def one(operand: tuple[Dim, ...], rank: int) -> tuple[Dim, ...]:
        out: list[Dim] = []
        for d in operand:
            if d.kind != "ellipsis":
                out.append(d)
                continue
            n = rank - len(operand) + 1
            # Fewer leading axes align at the right, as in NumPy.
            out += [
                Dim("merged", (f"...{count - n + i}",), f"...{count - n + i}")
                for i in range(n)
            ]
        return tuple(out)

    inputs = []
    for k, (operand, shape) in enumerate(zip(sig.inputs, shapes, strict=True)):
        if any(d.kind == "ellipsis" for d in operand) and len(shape) < len(operand) - 1:
            raise ShapeError(
                f"argument {k} has shape {shape} but the signature asks for at least "
                f"{len(operand) - 1} axes",
                where=where,
            )
        inputs.append(one(operand, len(shape)))
    outputs = tuple(one(o, count + len(o) - 1) for o in sig.outputs)
    return Signature(sig.text, tuple(inputs), outputs)


def solve(
    sig: Signature,
    shapes: Sequence[tuple[int, ...]],
    sizes: Mapping[str, int],
    names: Sequence[str],
    where: str,
) -> dict[str, int]:
    """The size of every axis from the operands' shapes and the sizes given by keyword.

    Raises:
        ShapeError: naming the argument, the axis and both sizes.
        AxisError: an axis whose size nothing determines.
    """
    known: dict[str, int] = dict(sizes)
    origin = dict.fromkeys(sizes, "a keyword")
    pending: list[tuple[int, Dim, int]] = []
    for k, (operand, shape) in enumerate(zip(sig.inputs, shapes, strict=True)):
        if len(operand) != len(shape):
            raise ShapeError(
                f"argument {names[k]!r} has {len(shape)} dimensions {tuple(shape)}; "
                "the signature gives it "
                f"{len(operand)}: '{' '.join(d.text for d in operand)}'",
                where=where,
            )
        pending += [(k, d, n) for d, n in zip(operand, shape, strict=True)]
    progress = True
    while pending and progress:
        progress = False
        rest = []
        for k, d, n in pending:
            if _settle(d, n, known, origin, names[k], where):
                progress = True
            else:
                rest.append((k, d, n))
        pending = rest
    for o in (*sig.outputs, *sig.inputs):
        for d in o:
            if d.kind == "derived" and all(a in known for a in d.axes):
                known.setdefault(d.text, _derived(d.text, known))
                if known[d.text] < 0:
                    raise ShapeError(
                        f"axis '{d.text}' has size {known[d.text]}", where=where
                    )
    missing = [a for a in sig.axes() if a not in known]
    if missing:
        raise AxisError(
            f"nothing gives the size of axis {missing[0]!r} in '{sig.text}'",
            where=where,
            cure=f"pass it by keyword: {missing[0]}=…",
        )
    return known


def _derived(text: str, known: Mapping[str, int]) -> int:
    return sum(s * (int(n) if n.isdigit() else known[n]) for s, n in terms(text))


def _settle(
    d: Dim, n: int, known: dict[str, int], origin: dict[str, str], name: str, where: str
) -> bool:
    if d.kind == "derived":
        unknown = [a for a in d.axes if a not in known]
        if len(unknown) > 1 or (unknown and d.axes.count(unknown[0]) > 1):
            return False
        if unknown:
            sign = next(s for s, t in terms(d.text) if t == unknown[0])
            others = sum(
                s * (int(t) if t.isdigit() else known[t])
                for s, t in terms(d.text)
                if t != unknown[0]
            )
            known[unknown[0]] = (n - others) * sign
            origin[unknown[0]] = f"argument {name!r}"
        if _derived(d.text, known) != n:
            raise ShapeError(
                f"argument {name!r}: axis '{d.text}' is {n}, but "
                f"{_derived(d.text, known)} follows from the others",
                where=where,
            )
        known[d.text] = n
        return True
    unknown = [a for a in d.axes if a not in known]
    if len(unknown) > 1:
        return False
    combine = sum if d.kind == "joined" else math.prod
    rest = combine([known[a] for a in d.axes if a in known])
    if unknown:
        if d.kind == "joined":
            value = n - rest
        else:
            value = n // rest if rest else 0
        if value < 0 or (d.kind != "joined" and value * rest != n):
            raise ShapeError(
                f"argument {name!r}: dimension '{d.text}' of size {n} does not divide "
                "by " + " · ".join(f"{a}={known[a]}" for a in d.axes if a in known),
                where=where,
            )
        known[unknown[0]] = value
        origin[unknown[0]] = f"argument {name!r}"
        return True
    if rest != n:
        a = d.axes[0]
        raise ShapeError(
            f"argument {name!r}: axis '{d.text}' is {n}, but "
            f"{origin.get(a, 'another argument')} makes it {rest}",
            where=where,
            cure="named axes must agree in size and never stretch from 1",
        )
    return True
