"""An op's definition, or its derivative, for people: as text, or as LaTeX by SymPy.

The op is traced at sizes of its own, all different, so that every axis of the graph can
be called by the name that the signature gives it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ..array import is_number
from ..errors import AxisError, DifferentiationError, DTypeError
from ..ir import differentiate
from ..ir import expr as E
from ..ir import signature as S
from ..ir.call import run
from ..ir.expr import Expr
from ..ir.indexmap import Digit, affine, digits
from ..ir.stage import ITEMSIZE, Stage, input_stage, topo_stages
from ..op import Op
from .symbolic import from_sympy, to_sympy

__all__ = ["Cost", "cost_of", "from_sympy", "show_op"]

# Primes far from the numbers that people write.
_PRIMES = (10007, 10009, 10037, 10039, 10061, 10067, 10069, 10079, 10091, 10093, 10099)
_FACTORS = {"sum": "Σ", "max": "max", "min": "min", "prod": "∏"}


def show_op(
    op: Op,
    derivative: str | None = None,
    math: bool = False,
    sizes: dict[str, int] | None = None,
) -> str:
    """The definition of an op, one line for each array that it computes.

    Args:
        op: the op.
        derivative: an operand: show its gradient for the cotangent ``dy``.
        math: LaTeX by SymPy, nothing simplified.
        sizes: sizes of axes that are to be shown as numbers.

    Raises:
        AxisError: ``derivative`` names no operand.
        DifferentiationError: it names one that is not float.
    """
    graph = _Graph(op, sizes or {})
    outs = graph.outs
    if derivative is not None:
        outs = [graph.gradient(derivative)]
    lines = graph.latex(outs) if math else graph.text(outs)
    if math:
        return "\n".join(lines)
    return "\n".join([graph.heading(derivative), *("  " + t for t in lines)])


class Cost(NamedTuple):
    """Two SymPy expressions in the sizes of the axes."""

    flops: Any
    bytes: Any


def cost_of(op: Op, derivative: str | None = None) -> Cost:
    """Operations and bytes of an op as formulas; see ``Op.cost``.

    Raises:
        AxisError: ``derivative`` names no operand.
        DifferentiationError: it names one that is not float.
    """
    graph = _Graph(op, {})
    outs = graph.outs if derivative is None else [graph.gradient(derivative)]
    return graph.cost(outs)


class _Graph:
    """One op, traced at distinct sizes."""

    def __init__(self, op: Op, given: dict[str, int]):
        self.op = op
        # "..." is shown as one axis.
        shown = [(1,) * len(o) for o in op.signature.inputs]
        sig = S.expand(op.signature, shown, op.name)
        primes = iter(_PRIMES)
        known = {**op.sizes, **given}
        for a in sig.axes():
            if a not in known and not any(c in a for c in "+-"):
                known[a] = next(primes)
        for o in (*sig.inputs, *sig.outputs):
            for d in o:
                if d.kind == "derived":
                    _widen(d, known)
                    known[d.text] = S._derived(d.text, known)
        self.sizes = known
        self.names: dict[int, str] = {}
        for a, n in known.items():
            self.names.setdefault(n, _axis(a))
        shapes = [[_extent(d, known) for d in o] for o in sig.inputs]
        options = _options(op)
        self.options = {k: v for k, v in options.items() if isinstance(v, Expr)}
        for dtypes in _guesses(len(shapes)):
            self.operands = [
                input_stage(n, d, name)
                for n, d, name in zip(shapes, dtypes, op.operands, strict=True)
            ]
            try:
                self.outs, _, _ = run(
                    op.function,
                    op.name,
                    sig,
                    known,
                    self.operands,
                    options,
                    op.operands,
                )
                break
            except DTypeError as error:
                refused = error
        else:
            raise refused
        self.labels: dict[Stage, str] = {s: s.name for s in self.operands}

    def gradient(self, name: str) -> Stage:
        """The gradient's stage."""
        names = self.op.operands
        if name not in names:
            raise AxisError(
                f"{self.op.name} has no operand {name!r}",
                where=self.op.where,
                cure=f"name one of {', '.join(names)}",
            )
        wrt = self.operands[names.index(name)]
        if wrt.dtype not in E.FLOATS:
            raise DifferentiationError(
                f"operand {name!r} of {self.op.name} holds ids", where=self.op.where
            )
        several = len(self.outs) > 1
        seeds: list[Stage | None] = []
        for k, s in enumerate(self.outs):
            if s.dtype in E.FLOATS:
                c = input_stage(s.shape, s.dtype, f"dy{k}" if several else "dy")
                self.labels[c] = c.name
                seeds.append(c)
            else:
                seeds.append(None)
        (found,) = differentiate.vjp(self.outs, seeds, [wrt])
        if found is None:
            raise DifferentiationError(
                f"{self.op.name} does not depend on {name!r}", where=self.op.where
            )
        self.labels[found] = f"d{name}"
        return found

    def heading(self, derivative: str | None) -> str:
        """``rms_norm(x, weight, eps): "... d, d -> ... d"``"""
        given = ", ".join([*self.op.operands, *self.options])
        of = f"gradient of {derivative} in " if derivative else ""
        return f'{of}{self.op.name}({given}): "{self.op.signature.text}"'

    # -------------------------------------------------------------- cost

    def cost(self, outs: Sequence[Stage]) -> Cost:
        """Each stage computed once; each array that comes in or goes out moved once."""
        import sympy as sp

        def size(extents: Iterable[int]) -> Any:
            return sp.Mul(*(self._extent(n) for n in extents))

        order = topo_stages(outs)
        work = sp.Integer(0)
        for s in order:
            if s.body is None:
                continue
            values = E.values(s.body)
            count = sum(1 for n in values if n.kind == "apply" and n.dtype == "f32")
            work += (count + (s.monoid is not None)) * size(s.space)
        moved = {*outs, *(s for s in order if s.kind == "input")}
        return Cost(
            sp.expand(work),
            sp.expand(sp.Add(*(ITEMSIZE[s.dtype] * size(s.shape) for s in moved))),
        )

    def _extent(self, n: int) -> Any:
        """A size as a formula in those of the axes."""
        import sympy as sp

        if n in self.names:
            parts = S.terms(self.names[n]) if n not in self.op.sizes.values() else []
            if len(parts) > 1:  # "t-k+1"
                return sp.Add(
                    *(
                        sign * (sp.Integer(t) if t.isdigit() else _size_symbol(t))
                        for sign, t in parts
                    )
                )
            if n > 9999:
                return _size_symbol(self.names[n])
            return sp.Integer(n)
        # Several axes of the signature as one dimension.
        found = sp.Integer(1)
        for size, name in self.names.items():
            if size > 9999 and n % size == 0:
                found, n = found * _size_symbol(name), n // size
        return found * n

    # -------------------------------------------------------------- naming

    def _label(self, outs: Sequence[Stage]) -> list[Stage]:
        """Give every stage a name; stages in the order of computing."""
        order = [s for s in topo_stages(outs) if s.body is not None]
        taken = set(self.labels.values())
        for s in outs:
            if s in order and s not in self.labels:
                wanted = "y" if len(outs) == 1 else f"y{list(outs).index(s)}"
                self.labels[s] = wanted if wanted not in taken else f"{wanted}_"
                taken.add(self.labels[s])
        for s in order:
            if s in self.labels:
                continue
            stem = s.name.replace(f"d_{self.op.name}_", "d").replace(
                self.op.name + "_", ""
            )
            fresh = (f"{stem}{k or ''}" for k in itertools.count())
            self.labels[s] = next(n for n in fresh if n not in taken)
            taken.add(self.labels[s])
        return order

    def axes(self, s: Stage) -> list[str]:
        """Names of a stage's axes; a second one of a size gets a prime."""
        out: list[str] = []
        for n in s.space:
            name = self.names.get(n, f"i{n}")
            while name in out:
                name += "'"
            out.append(name)
        return out

    def _number(self, v: Any) -> str:
        n = int(v) if float(v).is_integer() else None
        if n in self.names and abs(v) > 9999:
            return f"|{self.names[n]}|"
        return str(v)

    def _index(self, i: Expr, s: Stage, axes: Sequence[str]) -> str:
        d = digits(i, s.space)
        if d is not None and all(o.const == _start(o) for o in d):
            names = [
                axes[o.axis] if o.sign > 0 else f"{self._last(o.extent)}-{axes[o.axis]}"
                for o in d
            ]
            return names[0] if len(names) == 1 else f"({' '.join(names)})"
        form = affine(i)
        if form.rest:
            return self._write(i, s, axes)
        parts = []
        for a, k in form.axes.items():
            factor = "" if abs(k) == 1 else f"{abs(k)}·"
            parts.append(("-" if k < 0 else "+") + factor + axes[a])
        if form.const:
            parts.append(self._offset(form.const))
        return " ".join(parts).removeprefix("+") or "0"

    def _last(self, n: int) -> str:
        return f"|{self.names[n]}|-1" if n > 9999 and n in self.names else str(n - 1)

    def _offset(self, n: int) -> str:
        for size, name in self.names.items():
            rest = abs(n) - size
            if size > 9999 and abs(rest) < 100:
                more = f"{rest:+d}" if rest else ""
                return ("-" if n < 0 else "+") + f"(|{name}|{more})"
        return f"{n:+d}"

    # -------------------------------------------------------------- text

    def text(self, outs: Sequence[Stage]) -> list[str]:
        """One line a stage."""
        lines = []
        for s in self._label(outs):
            assert s.body is not None
            axes = self.axes(s)
            red = ""
            if s.monoid:
                red = f"{_FACTORS[s.monoid]}_{{{' '.join(axes[len(s.ext) :])}}} "
            lines.append(f"{self._head(s, axes)} = {red}{self._write(s.body, s, axes)}")
        return lines

    def _head(self, s: Stage, axes: Sequence[str]) -> str:
        dims = [" ".join(axes[a] for a in g) for g in s.groups]
        dims = [
            f"({d})" if len(g) > 1 else d or "0"
            for d, g in zip(dims, s.groups, strict=True)
        ]
        return self.labels[s] + (f"[{', '.join(dims)}]" if dims else "")

    def _write(self, root: Expr, s: Stage, axes: Sequence[str]) -> str:
        text: dict[Expr, tuple[str, int]] = {}  # with its binding strength
        for n in E.values(root):
            a = [text[x] for x in n.args] if n.kind == "apply" else []
            if n.kind == "load":
                inner = ", ".join(self._index(i, s, axes) for i in n.args)
                text[n] = (self.labels[n.data] + (f"[{inner}]" if inner else ""), 9)
            elif n.kind == "index":
                text[n] = (axes[n.data], 9)
            elif n.kind == "scalar":
                text[n] = (n.data, 9)
            elif n.kind in ("const", "size"):
                shown = self._number(n.data) if n.dtype != "bool" else str(n.data)
                text[n] = (shown, 3 if shown.startswith("-") else 9)
            else:
                text[n] = _infix(n.data, a)
        return text[root][0]

    # -------------------------------------------------------------- LaTeX

    def latex(self, outs: Sequence[Stage]) -> list[str]:
        """One equation a stage."""
        import sympy as sp

        lines = []
        for s in self._label(outs):
            assert s.body is not None
            names = [a.replace("…", r"\ldots") for a in self.axes(s)]
            symbols = [sp.Symbol(a, integer=True) for a in names]
            right = to_sympy(s.body, functools.partial(self._leaf, s, symbols))
            for k in range(len(s.rext)):
                axis = symbols[len(s.ext) + k]
                size = sp.Symbol(f"N_{axis.name}", integer=True)
                bounds = (axis, 0, size - 1)
                if s.monoid == "sum":
                    right = sp.Sum(right, bounds)
                elif s.monoid == "prod":
                    right = sp.Product(right, bounds)
                else:
                    right = sp.Function(rf"\{s.monoid}_{{{axis.name}}}")(right)
            left = _element(self.labels[s], symbols[: len(s.ext)])
            lines.append(f"{sp.latex(left)} = {sp.latex(right)}")
        return lines

    def _leaf(self, s: Stage, symbols: Sequence[Any], n: Expr) -> Any:
        import sympy as sp

        if n.kind == "index":
            return symbols[n.data]
        if n.kind == "scalar":
            return sp.Symbol(n.data)
        if n.kind == "size":
            name = self.names.get(n.data) if isinstance(n.data, int) else None
            return sp.Symbol(f"N_{name}", integer=True) if name else sp.sympify(n.data)
        parts = []
        for i in n.args:
            d = digits(i, s.space)
            if d is not None and all(o.sign > 0 and o.const == 0 for o in d):
                parts += [symbols[o.axis] for o in d]
            else:
                at = to_sympy(i, functools.partial(self._leaf, s, symbols))
                parts.append(sp.sympify(at))
        found = _element(self.labels[n.data], parts)
        return sp.Ne(found, 0, evaluate=False) if n.dtype == "bool" else found


def _size_symbol(name: str) -> Any:
    import sympy as sp

    return sp.Symbol(name, integer=True, positive=True)


def _element(name: str, indices: Sequence[Any]) -> Any:
    import sympy as sp

    if not indices:
        return sp.Symbol(name)
    return sp.Indexed(sp.IndexedBase(name), *indices)


def _axis(name: str) -> str:
    return "…" if name.startswith("...") else name


def _start(o: Digit) -> int:
    """The constant of a digit that runs over its whole axis."""
    return 0 if o.sign > 0 else o.extent - 1


def _widen(d: S.Dim, known: dict[str, int]) -> None:
    """Make what a window moves over longer than the window."""
    if S._derived(d.text, known) < 1:
        signed = S.terms(d.text)
        longest = next(n for sign, n in signed if sign > 0 and not n.isdigit())
        known[longest] += 20_002


def _extent(d: S.Dim, known: dict[str, int]) -> int:
    if d.kind == "derived":
        return known[d.text]
    combine: Any = sum if d.kind == "joined" else math.prod
    return int(combine([known[a] for a in d.axes]))


def _options(op: Op) -> dict[str, Any]:
    """Keyword options as symbols; what is static keeps its default."""
    out: dict[str, Any] = {}
    for p in op._parameters.parameters.values():
        if p.name in op.operands or p.default is p.empty:
            continue
        v = p.default
        fixed = p.name in op.static or not is_number(v) or isinstance(v, bool)
        out[p.name] = (
            v if fixed else E.scalar(p.name, "i32" if type(v) is int else "f32")
        )
    return out


def _guesses(count: int) -> Iterator[list[str]]:
    """Dtypes of operands: floats, then one or two that are ids or masks."""
    yield ["f32"] * count
    for changed in (1, 2):
        for places in itertools.combinations(reversed(range(count)), changed):
            for kinds in itertools.product(("i32", "bool", "u32"), repeat=changed):
                dtypes = ["f32"] * count
                for at, kind in zip(places, kinds, strict=True):
                    dtypes[at] = kind
                yield dtypes


_LEVEL = {
    "or": 0, "and": 1, "lt": 2, "le": 2, "eq": 2, "ne": 2, "add": 3, "sub": 3,
    "mul": 4, "mulz": 4, "div": 4, "floordiv": 4, "mod": 4,
}  # fmt: skip
_SIGN = {
    "or": "|", "and": "&", "lt": "<", "le": "≤", "eq": "=", "ne": "≠", "add": "+",
    "sub": "-", "mul": "·", "mulz": "·", "div": "/", "floordiv": "//", "mod": "%",
}  # fmt: skip


def _infix(name: str, a: list[tuple[str, int]]) -> tuple[str, int]:
    """An application with as few parentheses as its meaning needs."""
    if name in _LEVEL:
        level = _LEVEL[name]
        left = a[0][0] if a[0][1] >= level else f"({a[0][0]})"
        right = a[1][0] if a[1][1] > level else f"({a[1][0]})"
        return f"{left} {_SIGN[name]} {right}", level
    if name == "neg":
        return f"-{a[0][0] if a[0][1] > 4 else f'({a[0][0]})'}", 3
    if name == "to_f32":
        return a[0]
    return f"{name}({', '.join(t for t, _ in a)})", 9
