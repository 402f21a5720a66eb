"""Functions of arrays: ``op``, ``compile``, ``vjp``, ``jvp``, ``grad``,
``value_and_grad``, ``lower``.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from . import tree
from .array import NUMPY, Array, asarray, dtype_name, host_array, is_number
from .engine import Plan, captured_inputs, lock, placeholder, plan_for
from .errors import (
    AxisError,
    DifferentiationError,
    DTypeError,
    IndexRangeError,
    ShapeError,
    SignatureError,
)
from .ir import arrays as A
from .ir import differentiate, interpret
from .ir import expr as E
from .ir import signature as S
from .ir import trace as T
from .ir.bounds import HostCheck
from .ir.remat import Region, region
from .ir.stage import Stage, map_stage, rebind, topo_stages
from .lowered import Lowered
from .runtime import current as current_device

_state = threading.local()


class _Tracing:
    """One function under trace: how deep it nests, and the checks on ids that its ops
    asked for.
    """

    def __init__(self) -> None:
        self.checks: list[HostCheck] = []
        self.regions: list[Region] = []  # of remat

    def __enter__(self) -> _Tracing:
        lock.acquire()
        stack = _state.__dict__.setdefault("stack", [])
        stack.append(self)
        self.depth = len(stack)
        return self

    def __exit__(self, *error: Any) -> None:
        _state.stack.pop()
        lock.release()


def _note_checks(checks: Iterable[HostCheck]) -> None:
    stack = getattr(_state, "stack", [])
    if stack:
        stack[-1].checks += checks


def run_checks(
    checks: Iterable[HostCheck],
    host: dict[Stage, np.ndarray],
    scalars: dict[str, Any] | None = None,
) -> None:
    """Look at ids that are known on the host; ``scalars`` are the runtime numbers that
    guards may use.

    Raises:
        IndexRangeError: naming the array, the axis' size and the offending id.
    """
    for c in checks:
        stages = {n.data for n in E.loads(c.index, *c.guards)}
        known = {
            s: host[s] if s in host else getattr(s.source, "_host", None)
            for s in stages
        }
        if any(v is None for v in known.values()):
            continue
        low, high = interpret.index_range(c.index, c.guards, c.space, known, scalars)
        if low < 0 or high >= c.extent:
            raise IndexRangeError(
                f"ids run from {low} to {high}, but the indexed axis of {c.array!r} "
                f"has size {c.extent}",
                where=c.where,
                cure="keep ids in range, or guard the read with sd.where",
            )


def _rebound(
    checks: Iterable[HostCheck], inputs: Sequence[Stage], arrays: Sequence[Array]
) -> list[HostCheck]:
    """Checks of an inner trace in terms of the outer one's arrays."""
    given = {s: a.stage() for s, a in zip(inputs, arrays, strict=True)}

    def moved(e: E.Expr) -> E.Expr:
        return E.rewrite(
            e,
            lambda n, args: (
                E.load(rebind([n.data], given)[0], args)
                if n.kind == "load"
                else (E.rebuild(n, args) if args else n)
            ),
        )

    return [
        dataclasses.replace(
            c, index=moved(c.index), guards=tuple(moved(g) for g in c.guards)
        )
        for c in checks
    ]


# ------------------------------------------------------------------ ops


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
        self._operands = self._operand_names()
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
                where=T_where(self.function),
            )
        return names[:count]

    @property
    def where(self) -> str:
        """The op and the line of its definition."""
        return f"{self.name} ({T_where(self.function)})"

    def _bind(
        self, args: Sequence[Any], keywords: dict[str, Any]
    ) -> tuple[list[Any], dict[str, int], dict[str, Any]]:
        values = list(args[: len(self._operands)])
        options = dict(keywords)
        twice = [k for k in self._operands[: len(values)] if k in options]
        if twice:
            raise ShapeError(
                f"{self.name} got {twice[0]!r} twice: by position and by name",
                where=f"{self.name} ({E.user_location()})",
            )
        for name in self._operands[len(values) :]:
            if name not in options:
                raise ShapeError(
                    f"{self.name} takes {len(self._operands)} operands "
                    f"({', '.join(self._operands)}), got {len(args)}",
                    where=f"{self.name} ({E.user_location()})",
                )
            values.append(options.pop(name))
        params = self._parameters.parameters
        extra = [p for p in params.values() if p.name not in self._operands]
        for p, v in zip(extra, args[len(self._operands) :], strict=False):
            options[p.name] = v
        if len(args) > len(self._operands) + len(extra):
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
                )
        return values, sizes, keep

    def _graph(
        self, stages: list[Stage], sizes: dict[str, int], options: dict[str, Any]
    ) -> tuple[list[Stage], list[HostCheck], bool]:
        shapes = [s.shape for s in stages]
        where = f"{self.name} ({E.user_location()})"
        with lock:
            sig = S.expand(self.signature, shapes, where)
            known = S.solve(sig, shapes, sizes, self._operands, where)
            return T.run(
                self.function, self.name, sig, known, stages, options, self._operands
            )

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        values, sizes, options = self._bind(args, keywords)
        arrays = [asarray(v) for v in values]
        # An array without dimensions may stand for a number.
        extra = [k for k, v in options.items() if isinstance(v, Array)]
        everything = arrays + [options[k] for k in extra]
        if any(a.symbolic and not a._donated for a in everything):
            expressions = {
                k: _number_node(k, v, k in self.static, None)
                for k, v in options.items()
            }
            outs, checks, many = self._graph(
                [a.stage() for a in arrays], sizes, expressions
            )
            _note_checks(checks)
            return _give([Array.symbol(s) for s in outs], many)
        scalars: dict[str, Any] = {}
        inputs = [
            placeholder(("op", k), a.shape, a.dtype, (self._operands + extra)[k])
            for k, a in enumerate(everything)
        ]
        expressions = {}
        for k, v in options.items():
            if k in extra:
                _check_number(k, v)
                expressions[k] = E.load(inputs[len(arrays) + extra.index(k)], ())
            else:
                expressions[k] = _number_node(k, v, k in self.static, scalars)
        key = (
            tuple(inputs),
            tuple(sorted(sizes.items())),
            tuple(
                (k, v if isinstance(v, E.Expr) else _hashable(v))
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
            run_checks(checks, _host_copies(inputs, everything), scalars)
        buffers = plan_for(outs, inputs)([a.buffer() for a in everything], scalars)
        return _give(
            [
                Array.of_buffer(b, s.shape, s.dtype)
                for b, s in zip(buffers, outs, strict=True)
            ],
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
            for k, (a, n) in enumerate(zip(arrays, self._operands, strict=True))
        ]
        expressions = {
            k: _number_node(k, v, k in self.static, None) for k, v in options.items()
        }
        outs, checks, many = self._graph(stages, sizes, expressions)
        given = dict(zip(stages, arrays, strict=True))
        run_checks(checks, {s: a for s, a in given.items() if s.dtype in E.INTS})
        return _give(interpret.evaluate(outs, given), many)

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

    def __repr__(self) -> str:
        return f"<op {self.name} '{self.signature.text}'>"


def T_where(function: Callable[..., Any]) -> str:
    """``file:line`` of a function's definition."""
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else "?"


def _number_node(
    name: str, v: Any, static: bool, scalars: dict[str, Any] | None
) -> Any:
    """An option as an expression: a runtime scalar when ``scalars`` collects them, a
    parameter inside a trace.
    """
    if isinstance(v, Array):
        _check_number(name, v)
        return E.load(v.stage(), ())
    if isinstance(v, (np.generic, np.ndarray)) and v.shape == ():
        v = v.item()
    if static or not is_number(v) or isinstance(v, bool):
        return v
    dtype = "i32" if isinstance(v, int) else "f32"
    if dtype == "i32" and not -(2**31) <= v < 2**31:
        raise DTypeError(
            f"the option {name!r} = {v} does not fit i32",
            where=E.user_location(),
            cure="pass a float, or a number in range",
        )
    if scalars is None:
        return E.size(v, dtype)
    scalars[name] = v
    return E.scalar(name, dtype)


def _check_number(name: str, v: Array) -> None:
    if v.shape:
        raise ShapeError(
            f"the option {name!r} is an array of shape {v.shape}; options are numbers",
            where=E.user_location(),
            cure="make it an operand, so that the signature names its axes",
        )


def _hashable(v: Any) -> Any:
    try:
        hash(v)
    except TypeError:
        return repr(v)
    return (type(v), v)


def _give(xs: list[Any], many: bool) -> Any:
    return tuple(xs) if many else xs[0]


def _host_copies(
    inputs: Sequence[Stage], arrays: Sequence[Array]
) -> dict[Stage, np.ndarray]:
    return {
        s: a._host for s, a in zip(inputs, arrays, strict=True) if a._host is not None
    }


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


# ------------------------------------------------------------------ tracing functions


class _Traced:
    """A function traced on placeholders: stages of its array results, and how to put
    results together.
    """

    def __init__(
        self, function: Callable[..., Any], args: Any, role: Any, named: Any = None
    ):
        leaves, structure = tree.flatten(args)
        names = _leaf_names(named or function, args)
        self.arrays: list[Array] = []
        self.inputs: list[Stage] = []
        self.positions: list[int] = []
        self.static: list[Any] = []
        with _Tracing() as t:
            symbols = list(leaves)
            for k, leaf in enumerate(leaves):
                a = _as_leaf(leaf)
                if a is None:
                    self.static.append(leaf)
                    continue
                s = placeholder(
                    (role, t.depth, len(self.inputs)), a.shape, a.dtype, names[k]
                )
                self.arrays.append(a)
                self.inputs.append(s)
                self.positions.append(k)
                symbols[k] = Array.symbol(s)
                symbols[k].weak = is_number(leaf) or (
                    isinstance(leaf, Array) and leaf.weak
                )
            result = function(*tree.unflatten(structure, symbols))
            self.result_leaves, self.result = tree.flatten(result)
            self.checks = t.checks
            self.regions = t.regions
        self.outs: list[Stage] = []
        self.out_positions: list[int] = []
        for k, leaf in enumerate(self.result_leaves):
            if isinstance(leaf, (Array, np.ndarray)):
                self.outs.append(asarray(leaf).stage())
                self.out_positions.append(k)
        self.structure = structure
        self.leaves = leaves

    def results(self, arrays: Sequence[Array]) -> Any:
        """The function's result with these arrays in place of the symbols."""
        leaves = list(self.result_leaves)
        for k, a in zip(self.out_positions, arrays, strict=True):
            leaves[k] = a
        return tree.unflatten(self.result, leaves)

    def symbolic(self) -> bool:
        """Whether an argument, or what the function closes over, is a symbol of an
        outer trace.
        """
        return any(a.symbolic and not a._donated for a in self.arrays) or any(
            s.source is None for s in captured_inputs(self.outs, self.inputs)
        )


def _leaf_names(function: Any, args: Sequence[Any]) -> list[str]:
    """What the kernels call each leaf: a parameter that is one array has its name,
    parts of a pytree have none of their own (equal kernels of all layers must stay one
    text).
    """
    if isinstance(function, Op):
        names = list(function._operands)
    elif len(args) == 1 and type(args[0]) is dict:
        names = list(args[0])
        args = list(args[0].values())
    else:
        try:
            names = [
                p.name
                for p in inspect.signature(function).parameters.values()
                if p.kind != p.VAR_POSITIONAL
            ]
        except (TypeError, ValueError):
            names = []
    out: list[str] = []
    for k, a in enumerate(args):
        leaves = tree.leaves(a)
        single = len(leaves) == 1 and leaves[0] is a and k < len(names)
        out += [names[k]] if single else ["x"] * len(leaves)
    return out


def _as_leaf(leaf: Any) -> Array | None:
    """An argument's leaf as an array, or None when it is static (bool, str, a
    configuration).
    """
    if isinstance(leaf, Spec):
        return Array.symbol(placeholder("spec", leaf.shape, leaf.dtype))
    if isinstance(leaf, Array):
        leaf._check_live()
        return leaf
    if isinstance(leaf, (bool, str)) or leaf is None:
        return None
    if (
        is_number(leaf)
        or isinstance(leaf, (np.ndarray, np.generic))
        or hasattr(leaf, "__array__")
        or hasattr(leaf, "__dlpack__")
    ):
        return asarray(leaf)
    return None


class Spec:
    """Shape and dtype in place of an array, for :func:`lower`."""

    def __init__(self, dtype: str, *shape: int):
        self.dtype = dtype_name(dtype)
        one = len(shape) == 1 and isinstance(shape[0], (tuple, list))
        self.shape = A.sizes(shape[0] if one else shape, "an array")


def spec(dtype: str, *shape: int) -> Spec:
    """``sd.spec("f32", 16, 512)``"""
    return Spec(dtype, *shape)


def _run(
    outs: Sequence[Stage], inputs: Sequence[Stage], arrays: Sequence[Array]
) -> list[Array]:
    buffers = plan_for(outs, inputs)([a.buffer() for a in arrays], {})
    return [
        Array.of_buffer(b, s.shape, s.dtype) for b, s in zip(buffers, outs, strict=True)
    ]


def _substituted(
    outs: Sequence[Stage], inputs: Sequence[Stage], arrays: Sequence[Array]
) -> list[Array]:
    """Results of an inner trace as symbols of the outer one."""
    given = {s: a.stage() for s, a in zip(inputs, arrays, strict=True)}
    return [Array.symbol(s) for s in rebind(outs, given)]


# ------------------------------------------------------------------ compile


class Compiled:
    """A function traced once a signature, then one replayed plan."""

    def __init__(self, function: Callable[..., Any], donate: tuple[str, ...]):
        functools.update_wrapper(self, function)
        self.function = function
        self.donate = donate
        self._parameters = inspect.signature(function)
        self._plans: dict[Any, tuple[_Traced, Plan, list[int]]] = {}
        unknown = [d for d in donate if d not in self._parameters.parameters]
        if unknown:
            raise AxisError(
                f"donate names {unknown[0]!r}, which is no parameter of "
                f"{getattr(function, '__name__', function)}",
                where=E.user_location(),
            )

    def _flatten(
        self, args: Sequence[Any], keywords: dict[str, Any]
    ) -> tuple[dict[str, Any], list[Any]]:
        bound = self._parameters.bind(*args, **keywords)
        bound.apply_defaults()
        return dict(bound.arguments), [bound]

    def _call(self, arguments: dict[str, Any]) -> Any:
        args: list[Any] = []
        keywords: dict[str, Any] = {}
        for p in self._parameters.parameters.values():
            v = arguments[p.name]
            if p.kind == p.VAR_POSITIONAL:
                args += v
            elif p.kind == p.VAR_KEYWORD:
                keywords.update(v)
            elif p.kind == p.KEYWORD_ONLY:
                keywords[p.name] = v
            else:
                args.append(v)
        return self.function(*args, **keywords)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        arguments, _ = self._flatten(args, keywords)
        leaves, structure = tree.flatten(arguments)
        arrays = [_as_leaf(x) for x in leaves]
        if any(a is not None and a.symbolic for a in arrays):
            return self._call(arguments)
        key = (
            id(current_device()),
            structure,
            tuple(
                (a.shape, a.dtype, is_number(x))
                if a is not None
                else ("static", _hashable(x))
                for a, x in zip(arrays, leaves, strict=True)
            ),
        )
        found = self._plans.get(key)
        if found is None or found[1].device is not current_device():
            found = self._plans[key] = self._trace(arguments)
        traced, plan, donated = found
        given = [a for a in arrays if a is not None]
        run_checks(traced.checks, _host_copies(traced.inputs, given))
        buffers = [a.buffer() for a in given]
        for k in donated:
            given[k].donate()
        try:
            results = plan(buffers, {})
        except BaseException:
            # Nothing is taken by a call that failed before it began.
            for k in donated:
                given[k].restore(buffers[k])
            raise
        return traced.results(
            [
                Array.of_buffer(b, s.shape, s.dtype)
                for b, s in zip(results, plan.outs, strict=True)
            ]
        )

    def _trace(self, arguments: dict[str, Any]) -> tuple[_Traced, Plan, list[int]]:
        traced = _Traced(lambda a: self._call(a), (arguments,), "compile")
        donated: list[int] = []
        k = 0
        for name, value in arguments.items():
            count = sum(1 for x in tree.leaves(value) if _as_leaf(x) is not None)
            if name in self.donate:
                donated += range(k, k + count)
            k += count
        plan = plan_for(traced.outs, traced.inputs, frozenset(donated))
        return traced, plan, donated


def compile(
    function: Callable[..., Any] | None = None, *, donate: Sequence[str] = ()
) -> Any:
    """Compile a function of arrays (and pytrees of them) into one plan.

    It is traced once for each signature (structure, shapes, dtypes, values of bools and
    strings). Python numbers are runtime values: another number compiles nothing.

    Args:
        donate: names of parameters whose arrays may be overwritten; they cannot be used
            afterwards.
    """
    names = (donate,) if isinstance(donate, str) else tuple(donate)
    if function is None:
        return lambda f: Compiled(f, names)
    return Compiled(function, names)


# ------------------------------------------------------------------ derivatives


def _check_float(a: Any, what: str) -> None:
    if isinstance(a, Array) and a.dtype not in E.FLOATS:
        raise DifferentiationError(
            f"{what} is {a.dtype}; only f32 and f16 arrays have a derivative",
            where=E.user_location(),
            cure="leave it out of argnums, or convert it to f32",
        )


def _differentiable(traced: _Traced) -> list[int]:
    return [k for k, s in enumerate(traced.inputs) if s.dtype in E.FLOATS]


def vjp(function: Callable[..., Any], *args: Any) -> tuple[Any, Callable[..., Any]]:
    """``y, pullback = vjp(f, *args)``: the value, and the function from a cotangent of
    y to cotangents of the args.

    The pullback gives one result for each argument (the only one bare), of the
    argument's own structure; leaves that are not floating point get None.
    """
    traced = _Traced(function, args, "vjp")
    wrt = [traced.inputs[k] for k in _differentiable(traced)]
    floats = [k for k, s in enumerate(traced.outs) if s.dtype in E.FLOATS]
    cots = [
        placeholder(
            ("cotangent", len(getattr(_state, "stack", []))),
            traced.outs[k].shape,
            traced.outs[k].dtype,
            "dy",
        )
        if len(floats) == 1
        else placeholder(
            ("cotangent", len(getattr(_state, "stack", [])), k),
            traced.outs[k].shape,
            traced.outs[k].dtype,
            "dy",
        )
        for k in floats
    ]
    with lock:
        seeds: list[Stage | None] = [None] * len(traced.outs)
        for k, c in zip(floats, cots, strict=True):
            seeds[k] = c
        grads = differentiate.vjp(traced.outs, seeds, wrt, traced.regions)
        outer = traced.symbolic()
        if outer:
            _note_checks(_rebound(traced.checks, traced.inputs, traced.arrays))
            outs = _substituted(traced.outs, traced.inputs, traced.arrays)
            residuals: list[Stage] = []
            kept: list[Array] = []
        else:
            run_checks(traced.checks, _host_copies(traced.inputs, traced.arrays))
            residuals, placeholders, grads = _split(traced.outs, traced.inputs, grads)
            got = _run([*traced.outs, *residuals], traced.inputs, traced.arrays)
            outs, kept = got[: len(traced.outs)], got[len(traced.outs) :]
    y = traced.results(outs)
    shapes = [(outs[k].shape, outs[k].dtype) for k in floats]

    def pullback(cotangent: Any) -> Any:
        leaves = _cotangent_leaves(cotangent, traced, floats, shapes)
        real = [(g, s) for g, s in enumerate(grads) if s is not None]
        stages = [s for _, s in real]
        inputs = [*traced.inputs, *cots]
        arrays = [*traced.arrays, *leaves]
        if outer or any(a.symbolic for a in arrays):
            if residuals:
                inputs, arrays = [*inputs, *placeholders], [*arrays, *kept]
            results = _substituted(stages, inputs, arrays)
        else:
            if residuals:
                inputs, arrays = [*inputs, *placeholders], [*arrays, *kept]
            used = set(topo_stages(stages))
            pairs = [(s, a) for s, a in zip(inputs, arrays, strict=True) if s in used]
            results = _run(stages, [s for s, _ in pairs], [a for _, a in pairs])
        by_input: list[Any] = [None] * len(traced.inputs)
        for k in _differentiable(traced):
            by_input[k] = _zeros(traced.inputs[k])
        for (g, _), r in zip(real, results, strict=True):
            by_input[_differentiable(traced)[g]] = r
        return _per_argument(traced, by_input)

    return y, pullback


def _zeros(s: Stage) -> Array:
    return asarray(np.zeros(s.shape, NUMPY[s.dtype]), s.dtype)


def _per_argument(traced: _Traced, by_input: Sequence[Any]) -> Any:
    leaves: list[Any] = [None] * len(traced.leaves)
    for k, position in enumerate(traced.positions):
        leaves[position] = by_input[k]
    result = tree.unflatten(traced.structure, leaves)
    return result[0] if len(result) == 1 else result


def _cotangent_leaves(
    cotangent: Any,
    traced: _Traced,
    floats: Sequence[int],
    shapes: Sequence[tuple[tuple[int, ...], str]],
) -> list[Array]:
    given = tree.leaves(cotangent)
    if len(given) == len(traced.outs) != len(floats):
        given = [given[k] for k in floats]
    if len(given) != len(floats):
        raise ShapeError(
            f"the pullback takes {len(floats)} cotangents, got {len(given)}",
            where=E.user_location(),
        )
    out = []
    for g, (shape, dtype) in zip(given, shapes, strict=True):
        a = asarray(g)
        if a.shape != shape:
            raise ShapeError(
                f"a cotangent has shape {a.shape}, the result it belongs to has "
                f"{shape}",
                where=E.user_location(),
            )
        out.append(a if a.dtype == dtype else a.astype(dtype))
    return out


def _split(
    outs: Sequence[Stage], inputs: Sequence[Stage], grads: Sequence[Stage | None]
) -> tuple[list[Stage], list[Stage], list[Stage | None]]:
    """What forward keeps for backward: reductions and stages that it stores anyway;
    maps are computed again, and so are products that exist only inside of a kernel.
    """
    forward = {s for s in topo_stages(outs) if s.kind != "input"}
    real = [g for g in grads if g is not None]
    plan = plan_for(outs, inputs)
    stored = {s for k in plan.program.kernels for s in k.writes if isinstance(s, Stage)}
    again = plan.program.inside
    residuals: dict[Stage, None] = {}
    seen: set[Stage] = set()
    stack = list(real)
    while stack:
        s = stack.pop()
        if s in seen:
            continue
        seen.add(s)
        kept_anyway = s in stored or (s.kind == "reduce" and s not in again)
        if s in forward and kept_anyway:
            residuals[s] = None
            continue
        stack += [n.data for n in s.loads]
    kept = sorted(residuals, key=lambda s: s.id)
    places = [
        placeholder(("residual", k), s.shape, s.dtype, s.name)
        for k, s in enumerate(kept)
    ]
    renamed = iter(rebind(real, dict(zip(kept, places, strict=True))))
    return kept, places, [None if g is None else next(renamed) for g in grads]


def jvp(
    function: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[Any, Any]:
    """``y, dy = jvp(f, (x,), (tx,))``: the value, and its change along the tangents."""
    for given in (primals, tangents):
        if not isinstance(given, (tuple, list)):
            raise ShapeError(
                "jvp takes its arguments and their tangents as two tuples",
                where=E.user_location(),
                cure="write sd.jvp(f, (x,), (tx,))",
            )
    traced = _Traced(function, tuple(primals), "jvp")
    given = tree.leaves(tuple(tangents))
    wrt_positions = _differentiable(traced)
    if len(given) == len(traced.inputs):
        given = [given[k] for k in wrt_positions]
    if len(given) != len(wrt_positions):
        raise ShapeError(
            f"jvp takes a tangent for each of {len(wrt_positions)} float arguments, "
            f"got {len(given)}",
            where=E.user_location(),
            cure="give tangents the structure of the arguments; None for integers",
        )
    wrt = [traced.inputs[k] for k in wrt_positions]
    directions = [asarray(t, s.dtype) for t, s in zip(given, wrt, strict=True)]
    for t, s in zip(directions, wrt, strict=True):
        if t.shape != s.shape:
            raise ShapeError(
                f"a tangent has shape {t.shape}, its argument {s.shape}",
                where=E.user_location(),
            )
    places = [
        placeholder(
            ("tangent", len(getattr(_state, "stack", [])), k), s.shape, s.dtype, "t"
        )
        for k, s in enumerate(wrt)
    ]
    with lock:
        pushed = differentiate.jvp(traced.outs, wrt, places)
        real = [s for s in pushed if s is not None]
        stages = [*traced.outs, *real]
        inputs, arrays = [*traced.inputs, *places], [*traced.arrays, *directions]
        if traced.symbolic() or any(a.symbolic for a in arrays):
            _note_checks(_rebound(traced.checks, traced.inputs, traced.arrays))
            got = _substituted(stages, inputs, arrays)
        else:
            run_checks(traced.checks, _host_copies(traced.inputs, traced.arrays))
            got = _run(stages, inputs, arrays)
    n = len(traced.outs)
    rest = iter(got[n:])
    dy = [
        next(rest) if s is not None else _zeros(o)
        for s, o in zip(pushed, traced.outs, strict=True)
    ]
    return traced.results(got[:n]), traced.results(dy)


def value_and_grad(
    function: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """The function that gives ``(f(*args), gradient)``; f must give a scalar.

    Gradients have the structure of the arguments in ``argnums``; leaves that are not
    floating point get None. With ``has_aux`` f gives ``(scalar, anything)``.

    Raises:
        DifferentiationError: an argument named in ``argnums`` is an integer or bool
            array, or f gives no scalar.
    """
    several = argnums if isinstance(argnums, (tuple, list)) else None
    asked = tuple(
        A.integer(k, "an entry of argnums", DifferentiationError)
        for k in ((argnums,) if several is None else several)
    )

    def wrapped(*args: Any, **keywords: Any) -> Any:
        numbers = tuple(k + len(args) if k < 0 else k for k in asked)
        for k in numbers:
            if not 0 <= k < len(args):
                raise DifferentiationError(
                    f"argnums {k}, but there are {len(args)} positional arguments",
                    where=E.user_location(),
                )
            leaf = args[k]
            a = None if leaf is None else _as_leaf(leaf)
            if a is None and any(x is leaf for x in tree.leaves(leaf)):
                raise DifferentiationError(
                    f"argument {k}, named in argnums, is a {type(leaf).__name__}, "
                    "which holds no arrays",
                    where=E.user_location(),
                    cure="pass arrays, or register the class with sd.tree.register",
                )
            if a is not None:
                if isinstance(leaf, int) and not isinstance(leaf, bool):
                    raise DifferentiationError(
                        f"argument {k} is an integer",
                        where=E.user_location(),
                        cure="pass a float",
                    )
                _check_float(a, f"argument {k}, named in argnums,")

        def call(*xs: Any) -> Any:
            return function(*xs, **keywords)

        traced = _Traced(call, args, "grad", named=function)
        value = traced.results([Array.symbol(s) for s in traced.outs])
        if has_aux and not (isinstance(value, (tuple, list)) and len(value) == 2):
            raise DifferentiationError(
                "with has_aux the function gives a pair (loss, anything)",
                where=T_where(function),
            )
        loss = value[0] if has_aux else value
        if (
            not isinstance(loss, Array)
            or loss.shape != ()
            or loss.dtype not in E.FLOATS
        ):
            shape = (
                f"{loss.shape} of {loss.dtype}"
                if isinstance(loss, Array)
                else f"a {type(loss).__name__}"
            )
            raise DifferentiationError(
                "grad needs a function that gives a float scalar; this one gives "
                f"{shape}",
                where=T_where(function)
                if hasattr(function, "__code__")
                else E.user_location(),
                cure="reduce it, e.g. with sd.sum or sd.mean, or use sd.vjp with a "
                "cotangent",
            )
        chosen = set(numbers)
        owners = _owners(args)
        wrt_positions = [
            k for k in _differentiable(traced) if owners[traced.positions[k]] in chosen
        ]
        wrt = [traced.inputs[k] for k in wrt_positions]
        with lock:
            one = map_stage((), E.const(1.0), "one", dtype=loss.dtype)
            seeds: list[Stage | None] = [
                one if s is loss.stage() else None for s in traced.outs
            ]
            first = seeds.index(one)
            seeds = [one if k == first else None for k in range(len(seeds))]
            grads = differentiate.vjp(traced.outs, seeds, wrt, traced.regions)
            real = [g for g in grads if g is not None]
            stages = [*traced.outs, *real]
            if traced.symbolic():
                _note_checks(_rebound(traced.checks, traced.inputs, traced.arrays))
                got = _substituted(stages, traced.inputs, traced.arrays)
            else:
                run_checks(traced.checks, _host_copies(traced.inputs, traced.arrays))
                got = _run(stages, traced.inputs, traced.arrays)
        n = len(traced.outs)
        rest = iter(got[n:])
        by_input: list[Any] = [None] * len(traced.inputs)
        for k, g in zip(wrt_positions, grads, strict=True):
            by_input[k] = next(rest) if g is not None else _zeros(traced.inputs[k])
        leaves: list[Any] = [None] * len(traced.leaves)
        for k, position in enumerate(traced.positions):
            leaves[position] = by_input[k]
        everything = tree.unflatten(traced.structure, leaves)
        gradient = (
            tuple(everything[k] for k in numbers)
            if several is not None
            else everything[numbers[0]]
        )
        return traced.results(got[:n]), gradient

    functools.update_wrapper(wrapped, function, updated=())
    return wrapped


def _owners(args: Sequence[Any]) -> list[int]:
    """Which argument each leaf belongs to."""
    out: list[int] = []
    for k, a in enumerate(args):
        out += [k] * len(tree.leaves(a))
    return out


def grad(
    function: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """The function that gives the gradient of a scalar function (see
    :func:`value_and_grad`).
    """
    both = value_and_grad(function, argnums, has_aux=has_aux)

    def wrapped(*args: Any, **keywords: Any) -> Any:
        value, gradient = both(*args, **keywords)
        return (gradient, value[1]) if has_aux else gradient

    functools.update_wrapper(wrapped, function, updated=())
    return wrapped


def remat(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, whose inside the backward pass computes again.

    A derivative keeps its arguments and results until then, and nothing in between: a
    layer's memory for its time. What the function closes over from the same trace
    counts as its inside; pass it as an argument. Values and derivatives are the same.

    Example:
        >>> for block in model.layers:
        ...     x = sd.remat(block)(x)
    """

    def wrapped(*args: Any, **keywords: Any) -> Any:
        result = function(*args, **keywords)
        with lock:
            outs, starts = (
                [
                    x.stage()
                    for x in tree.leaves(t)
                    if isinstance(x, Array) and x.symbolic
                ]
                for t in (result, (args, keywords))
            )
            stack = getattr(_state, "stack", [])
            if stack and outs:
                stack[-1].regions.append(region(outs, starts))
        return result

    functools.update_wrapper(wrapped, function, updated=())
    return wrapped


# ------------------------------------------------------------------ inspection


def lower(
    function: Callable[..., Any], *args: Any, backward: bool = False, **keywords: Any
) -> Lowered:
    """What a call would run: kernels with their WGSL, and why they begin and end where
    they do.

    Args:
        args: arrays or ``sd.spec(dtype, *shape)``.
        backward: the pullback's kernels; ``residuals`` lists what forward keeps for it.
    """
    target: Any = function
    if isinstance(function, Compiled):
        target = function.function
    traced = _Traced(lambda *xs: target(*xs, **keywords), args, "lower", named=target)
    with lock:
        if not backward:
            return Lowered(Plan(traced.outs, traced.inputs, frozenset()).program, ())
        wrt = [traced.inputs[k] for k in _differentiable(traced)]
        seeds = [
            placeholder(("cotangent", 0, k), s.shape, s.dtype, "dy")
            if s.dtype in E.FLOATS
            else None
            for k, s in enumerate(traced.outs)
        ]
        grads = differentiate.vjp(traced.outs, seeds, wrt, traced.regions)
        residuals, places, grads = _split(traced.outs, traced.inputs, grads)
        stages = [g for g in grads if g is not None]
        inputs = [*traced.inputs, *(s for s in seeds if s is not None), *places]
        more = captured_inputs(stages, inputs)
        used = set(topo_stages(stages))
        plan = Plan(stages, [s for s in [*inputs, *more] if s in used], frozenset())
        return Lowered(plan.program, tuple(residuals))
