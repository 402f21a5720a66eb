"""Ops: functions over named axes, defined once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .array import Array, asarray
from .dtypes import host_array
from .engine import lock, placeholder, plan_for
from .errors import (
    AxisError,
    ShapeError,
    SignatureError,
)
from .ids import flag_stage, made_inside, note, settled
from .ir import arrays as A
from .ir import expr as E
from .ir import interpret
from .ir import signature as S
from .ir.bounds import HostCheck
from .ir.call import run
from .ir.stage import Stage
from .tracing import (
    check_ids,
    check_number,
    defined_at,
    give,
    hashable,
    note_checks,
    number_node,
    run_checks,
)


class Op:
    """An operation defined by an expression over named axes. Call it with arrays;
    everything else follows from it.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        text: str,
        sizes: dict[str, int],
        static: tuple[str, ...],
    ):
        if not callable(function):
            raise SignatureError(
                f"an op is made of a function, not of {function!r}",
                where=E.user_location(),
            )
        functools.update_wrapper(self, function)
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__)
        self.signature = S.parse(text)
        self.sizes = sizes
        self.static = static
        self._parameters = inspect.signature(function)
        self._graphs: dict[Any, tuple[list[Stage], list[HostCheck], bool]] = {}
        self.operands = self._operand_names()
        kinds = {p.kind for p in self._parameters.parameters.values()}
        unknown = [k for k in static if k not in self._parameters.parameters]
        if unknown and inspect.Parameter.VAR_KEYWORD not in kinds:
            raise AxisError(
                f"static names {unknown[0]!r}, which is no parameter of {self.name}",
                where=self.where,
            )

    def _operand_names(self) -> list[str]:
        names = [
            p.name
            for p in self._parameters.parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        count = len(self.signature.inputs)
        if any(
            p.kind == p.VAR_POSITIONAL for p in self._parameters.parameters.values()
        ):
            return names + [f"arg{k}" for k in range(len(names), count)]
        if len(names) < count:
            raise ShapeError(
                f"{self.name} takes {len(names)} operands, its signature "
                f"'{self.signature.text}' names {count}",
                where=defined_at(self.function),
            )
        return names[:count]

    @property
    def where(self) -> str:
        """The op and the line of its definition."""
        return f"{self.name} ({defined_at(self.function)})"

    def _bind(
        self, args: Sequence[Any], keywords: dict[str, Any]
    ) -> tuple[list[Any], dict[str, int], dict[str, Any]]:
        values = list(args[: len(self.operands)])
        options = dict(keywords)
        twice = [k for k in self.operands[: len(values)] if k in options]
        if twice:
            raise ShapeError(
                f"{self.name} got {twice[0]!r} twice: by position and by name",
                where=f"{self.name} ({E.user_location()})",
            )
        for name in self.operands[len(values) :]:
            if name not in options:
                raise ShapeError(
                    f"{self.name} takes {len(self.operands)} operands "
                    f"({', '.join(self.operands)}), got {len(args)}",
                    where=f"{self.name} ({E.user_location()})",
                )
            values.append(options.pop(name))
        params = self._parameters.parameters
        extra = [p for p in params.values() if p.name not in self.operands]
        for p, v in zip(extra, args[len(self.operands) :], strict=False):
            options[p.name] = v
        if len(args) > len(self.operands) + len(extra):
            raise ShapeError(
                f"{self.name} got {len(args)} arguments",
                where=f"{self.name} ({E.user_location()})",
            )
        for p in extra:
            if p.default is not p.empty:
                options.setdefault(p.name, p.default)
            elif p.name not in options and p.kind not in (
                p.VAR_POSITIONAL,
                p.VAR_KEYWORD,
            ):
                raise ShapeError(
                    f"{self.name} needs the option {p.name!r}",
                    where=f"{self.name} ({E.user_location()})",
                    cure=f"pass it by keyword: {p.name}=…",
                )
        axes = set(self.signature.axes())
        sizes = dict(self.sizes)
        keep: dict[str, Any] = {}
        for k, v in options.items():
            if k in axes:
                (sizes[k],) = A.sizes((v,), f"the axis {k!r}")
                if k in params:
                    keep[k] = sizes[k]
            elif k in params or any(p.kind == p.VAR_KEYWORD for p in params.values()):
                keep[k] = v
            else:
                raise AxisError(
                    f"{self.name} has no option or axis {k!r}",
                    where=f"{self.name} ({E.user_location()})",
                    cure="its options are: " + ", ".join(p.name for p in extra)
                    if extra
                    else None,
                )
        return values, sizes, keep

    def _graph(
        self, stages: list[Stage], sizes: dict[str, int], options: dict[str, Any]
    ) -> tuple[list[Stage], list[HostCheck], bool]:
        shapes = [s.shape for s in stages]
        where = f"{self.name} ({E.user_location()})"
        with lock:
            sig = S.expand(self.signature, shapes, where)
            known = S.solve(sig, shapes, sizes, self.operands, where)
            outs, checks, many = run(
                self.function, self.name, sig, known, stages, options, self.operands
            )
            return outs, settled(checks), many

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        values, sizes, options = self._bind(args, keywords)
        arrays = [asarray(v) for v in values]
        # An array without dimensions may stand for a number.
        extra = [k for k, v in options.items() if isinstance(v, Array)]
        everything = arrays + [options[k] for k in extra]
        if any(a.symbolic and not a._donated for a in everything):
            expressions = {
                k: number_node(k, v, k in self.static, None) for k, v in options.items()
            }
            outs, checks, many = self._graph(
                [a.stage() for a in arrays], sizes, expressions
            )
            note_checks(checks)
            return give([Array.symbol(s) for s in outs], many)
        scalars: dict[str, Any] = {}
        inputs = [
            placeholder(("op", k), a.shape, a.dtype, (self.operands + extra)[k])
            for k, a in enumerate(everything)
        ]
        expressions = {}
        for k, v in options.items():
            if k in extra:
                check_number(k, v)
                expressions[k] = E.load(inputs[len(arrays) + extra.index(k)], ())
            else:
                expressions[k] = number_node(k, v, k in self.static, scalars)
        key = (
            tuple(inputs),
            tuple(sorted(sizes.items())),
            tuple(
                (k, v if isinstance(v, E.Expr) else hashable(v))
                for k, v in expressions.items()
            ),
        )
        found = self._graphs.get(key)
        if found is None:
            found = self._graph(inputs[: len(arrays)], sizes, expressions)
            if len(self._graphs) > 512:
                self._graphs.clear()
            self._graphs[key] = found
        outs, checks, many = found
        if checks:
            check_ids(checks, inputs, everything, scalars)
        made = made_inside(checks) if checks else []
        if made:
            with lock:
                flags = [flag_stage(c) for c in made]
        plan = plan_for([*outs, *(flags if made else ())], inputs)
        buffers = plan([a.buffer() for a in everything], scalars)
        note(made, buffers[len(outs) :])
        return give(
            [Array.of_buffer(b, s.shape, s.dtype) for b, s in zip(buffers, outs)],
            many,
        )

    def reference(self, *args: Any, **keywords: Any) -> Any:
        """The same definition in NumPy float64."""
        values, sizes, options = self._bind(args, keywords)
        arrays = [np.asarray(v) for v in values]
        stages = [
            placeholder(
                ("op", k),
                a.shape,
                "f32" if a.dtype.kind == "f" else host_array(a)[1],
                n,
            )
            for k, (a, n) in enumerate(zip(arrays, self.operands, strict=True))
        ]
        expressions = {
            k: number_node(k, v, k in self.static, None) for k, v in options.items()
        }
        outs, checks, many = self._graph(stages, sizes, expressions)
        given = dict(zip(stages, arrays, strict=True))
        run_checks(checks, {s: a for s, a in given.items() if s.dtype in E.INTS})
        return give(interpret.evaluate(outs, given), many)

    def show(
        self,
        *,
        derivative: str | None = None,
        math: bool = False,
        sizes: dict[str, int] | None = None,
    ) -> str:
        """The op's definition as text, or as LaTeX with ``math=True``; of a derivative
        where one is named.
        """
        from .interop.show import show_op

        return show_op(self, derivative=derivative, math=math, sizes=sizes)

    def cost(self, *, derivative: str | None = None) -> Any:
        """Operations and bytes as SymPy formulas in the sizes of the axes.

        ``flops`` counts one for each arithmetic operation on f32 and position, computed
        once; ``bytes`` are those of operands and results, each moved once: what no
        kernel can do without.

        Example:
            >>> rms_norm.cost().flops
            4*d*… + 3*…
        """
        from .interop.show import cost_of

        return cost_of(self, derivative=derivative)

    def _repr_html_(self) -> str:
        from .interop.html import op_html

        return op_html(self)

    def __repr__(self) -> str:
        return f"<op {self.name} '{self.signature.text}'>"


def op(
    signature: str, *, static: Sequence[str] = (), **sizes: int
) -> Callable[[Callable[..., Any]], Op]:
    """Define an op: ``@sd.op("... d, d -> ... d")``.

    Args:
        signature: operands and results over named axes (see ``docs/signatures.md``).
        static: keyword options that are constants of the kernel and not runtime
            scalars.
        sizes: sizes of axes that the operands do not determine.

    Raises:
        SignatureError: the text cannot be read.
    """

    S.parse(signature)

    def decorate(function: Callable[..., Any]) -> Op:
        return Op(function, signature, sizes, tuple(static))

    return decorate
