"""Functions of arrays: ``compile``, ``vjp``, ``jvp``, ``grad``,
``value_and_grad``, ``lower``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import handed, ids, tree
from .array import Array, asarray, is_number
from .codegen.compared import compared, recomputed
from .dtypes import NUMPY
from .engine import Plan, captured_inputs, lock, placeholder, plan_for, watched
from .errors import (
    AxisError,
    DifferentiationError,
    ShaderError,
    ShapeError,
    TraceError,
)
from .ir import arrays as A
from .ir import differentiate
from .ir import expr as E
from .ir.remat import region
from .ir.stage import Stage, map_stage, rebind, topo_stages
from .lowered import Lowered
from .runtime import begin_to_choose, chosen
from .runtime import current as current_device
from .runtime.buffers import consume_all
from .tracing import (
    Traced,
    as_leaf,
    check_ids,
    defined_at,
    depth,
    hashable,
    innermost,
    note_checks,
    rebound_checks,
    run,
    substituted,
)
from .uploads import uploading

# ------------------------------------------------------------------ compile


class _Known:
    """What a signature gave, and how to tell that a call is of it."""

    def __init__(self, traced: Traced, plan: Plan, donated: list[int]):
        self.traced, self.plan, self.donated = traced, plan, donated
        self.watched = watched()  # such a plan leaves its inputs
        loads = [n for c in traced.checks for n in E.loads(c.index, *c.guards)]
        read = set(topo_stages([n.data for n in loads]))
        # Inputs that decide about ids.
        self.looked = [k for k, s in enumerate(traced.inputs) if s in read]
        self.ids = [traced.inputs[k] for k in self.looked]
        plain = [c for c in traced.checks if c.index.kind == "load"]
        at = {s: k for k, s in enumerate(self.ids)}
        # Which of these an index is, and below what it must be, if all are so plain.
        self.plain = [(at[c.index.data], c.extent) for c in plain if c.index.data in at]
        if len(self.plain) < len(traced.checks):
            self.plain = []

    def check(self, looked: Sequence[Array]) -> None:
        """Look at the ids of a call: see `check_ids`."""
        for k, extent in self.plain:
            span = looked[k].span()
            if span is None or span[0] < 0 or span[1] >= extent:
                break
        else:
            if self.plain:
                return
        check_ids(self.traced.checks, self.ids, looked)

    def seen(self, arrays: Sequence[Array], structure: tree.Structure) -> None:
        """Note a call of this signature whose leaves are all arrays."""
        self.structure = structure
        self.shapes = [a.shape for a in arrays]
        self.dtypes = [a.dtype for a in arrays]

    def fits(self, leaves: list[Any], structure: tree.Structure, device: Any) -> bool:
        """Whether a call is like the one that was seen, and runs now."""
        if (
            self.plan.device is not device
            or self.watched != watched()
            or set(map(type, leaves)) != _ARRAYS
            or [a.shape for a in leaves] != self.shapes
            or [a.dtype for a in leaves] != self.dtypes
            or structure != self.structure
        ):
            return False
        # The next one's is mostly the same object, which is equal at once.
        self.structure = structure
        for a in leaves:
            if a._buffer is None and (a._host is None or a._donated):
                return False
        return True


_ARRAYS = {Array}


class Compiled:
    """A function traced once a signature, then one replayed plan."""

    def __init__(
        self,
        function: Callable[..., Any],
        donate: tuple[str, ...],
        scores: int | None = None,
    ):
        functools.update_wrapper(self, function)
        self.function = function
        self.donate = donate
        self.scores = scores
        self._parameters = inspect.signature(function)
        # Names, if arguments are given by position alone.
        parameters = self._parameters.parameters.values()
        plain = all(p.kind == p.POSITIONAL_OR_KEYWORD for p in parameters)
        self._plain = [p.name for p in parameters] if plain else None
        self._plans: dict[Any, _Known] = {}
        self._latest: _Known | None = None
        self._links = handed.Links()
        #: what the last new signature gave
        self.last_traced: Traced | None = None
        unknown = [d for d in donate if d not in self._parameters.parameters]
        if unknown:
            raise AxisError(
                f"donate names {unknown[0]!r}, which is no parameter of "
                f"{getattr(function, '__name__', function)}",
                where=E.user_location(),
            )

    def arguments(
        self, args: Sequence[Any], keywords: dict[str, Any]
    ) -> dict[str, Any]:
        """The arguments of a call by the names of the parameters."""
        if self._plain and not keywords and len(args) == len(self._plain):
            return dict(zip(self._plain, args))
        try:
            bound = self._parameters.bind(*args, **keywords)
        except TypeError as error:
            name = getattr(self.function, "__name__", "the function")
            raise TraceError(
                f"{name}: {error}",
                where=E.user_location(),
                cure=f"its parameters are {self._parameters}",
            ) from None
        given = set(bound.arguments)
        bound.apply_defaults()
        # A number that nobody gave is the function's own, known when it is traced.
        return {
            k: v
            for k, v in bound.arguments.items()
            if k in given
            or not is_number(v)
            or k in self.donate
            or self._parameters.parameters[k].kind == inspect.Parameter.POSITIONAL_ONLY
        }

    def _call(self, arguments: dict[str, Any]) -> Any:
        args: list[Any] = []
        keywords: dict[str, Any] = {}
        left_out = False
        for p in self._parameters.parameters.values():
            if p.name not in arguments:
                left_out = True
                continue
            v = arguments[p.name]
            if p.kind == p.VAR_POSITIONAL:
                args += v
            elif p.kind == p.VAR_KEYWORD:
                keywords.update(v)
            elif p.kind == p.KEYWORD_ONLY or left_out:
                keywords[p.name] = v
            else:
                args.append(v)
        return self.function(*args, **keywords)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        early = None
        if not chosen() and not depth():
            # The first call of a process traces while the device is opened.
            begin_to_choose()
            early = self.trace(self.arguments(args, keywords))
        device = current_device()
        g = None
        looked_at = watched()
        if self._plain and not keywords and len(args) == len(self._plain):
            g = None if looked_at else handed.given(args, device)
        link = self._links.find(g, device) if g is not None else None
        if g is not None and link is not None:
            done, result = self._repeat(g, link)
            if done:
                return result
        arguments = self.arguments(args, keywords)
        leaves, structure = tree.flatten(arguments)
        known = self._latest
        if known is not None and known.fits(leaves, structure, device):
            given: list[Array] = leaves
        else:
            made = g.made if g is not None else {}
            arrays = [made[id(x)][0] if id(x) in made else as_leaf(x) for x in leaves]
            if any(a is not None and a.symbolic for a in arrays):
                return self._call(arguments)
            key = (
                id(device),
                looked_at,
                structure,
                tuple(
                    (a.shape, a.dtype.name, a is not x and is_number(x))
                    if a is not None
                    else ("static", hashable(x))
                    for a, x in zip(arrays, leaves, strict=True)
                ),
            )
            known = self._plans.get(key)
            if known is None or known.plan.device is not device:
                known = self._plans[key] = self._plan(arguments, early)
            given = [a for a in arrays if a is not None]
            if all(type(x) is Array for x in leaves):
                known.seen(leaves, structure)
                self._latest = known
        traced, plan, donated = known.traced, known.plan, known.donated
        if traced.checks:
            known.check([given[k] for k in known.looked])
        buffers = [
            b if (b := a._buffer) is not None and b.device is device else a.buffer()
            for a in given
        ]
        try:
            for k in donated:
                given[k].donate()
            results = plan.launch(buffers, {})
        except BaseException:
            # Nothing is taken by a call that failed before it began.
            for k in donated:
                given[k].restore(buffers[k])
            raise
        if isinstance(results, list):
            if traced.made:
                ids.note(traced.made, results[len(traced.outs) :])
            return traced.results(Array.of_buffers(results, traced.kinds))
        if g is not None:
            gone = [name in self.donate for name in self._plain or ()]
            self._links.add(g, known, results.replay, gone, len(given))
        return self._results(traced, results)

    def _repeat(self, g: handed.Given, link: handed.Link) -> tuple[bool, Any]:
        """A call that is given the same as one before, and whether it went so."""
        known = link.known
        traced: Traced = known.traced
        if traced.checks:
            known.check([g.others[k] for k in link.looked])
        held: list[Any] = []  # each argument's memory
        taken: list[tuple[handed.Handed, Any]] = []
        given: list[int] = []
        for item, gone in zip(g.items, link.donated):
            own: list[Any] | None = g.memory
            if type(item) is handed.Handed:
                own = item.take() if gone else item.memory
                if own is None:  # Somebody looked just now.
                    break
                if gone:
                    taken.append((item, own))
            held.append(own)
        else:
            given = link.given
            memory = [held[argument][k] for argument, k in link.sources]
            begun = functools.partial(self._begun, g, taken, given)
            again = known.plan.executable.again
            try:
                for k in given:
                    g.others[k].donate()
                found = again(link.replay, memory, {}, begun)
            except BaseException:
                self._restore(g, taken, given)
                raise
            if found is not None:
                return True, self._results(traced, found)
        self._restore(g, taken, given)
        return False, None

    @staticmethod
    def _begun(g: handed.Given, taken: Any, given: list[int]) -> None:
        """Nothing can be restored from here on."""
        taken.clear()
        consume_all(g.buffers, given)

    @staticmethod
    def _restore(g: handed.Given, taken: Any, given: list[int]) -> None:
        for item, memory in taken:
            item.memory = memory
        for k in given:
            g.others[k].restore(g.buffers[k])

    @staticmethod
    def _results(traced: Traced, found: Any) -> Any:
        if traced.made:
            made = range(len(traced.outs), len(found.places))
            ids.note(traced.made, [found.buffer(k) for k in made])
        return traced.results(handed.Results(found, traced.kinds))

    def trace(self, arguments: dict[str, Any]) -> tuple[Traced, frozenset[int]]:
        """The function on placeholders, and which of its inputs are donated."""
        traced = Traced(lambda a: self._call(a), (arguments,), "compile")
        donated: list[int] = []
        k = 0
        for name, value in arguments.items():
            count = sum(1 for x in tree.leaves(value) if as_leaf(x) is not None)
            if name in self.donate:
                donated += range(k, k + count)
            k += count
        return traced, frozenset(donated)

    def _plan(
        self,
        arguments: dict[str, Any],
        early: tuple[Traced, frozenset[int]] | None,
    ) -> _Known:
        traced, donated = early or self.trace(arguments)  # early: traced before
        self.last_traced = traced
        outs = [*traced.outs, *traced.flags]
        with uploading(traced.arrays):
            plan = plan_for(outs, traced.inputs, donated, self.scores)
        return _Known(traced, plan, sorted(donated))


def compile(
    function: Callable[..., Any] | None = None,
    *,
    donate: Sequence[str] = (),
    scores: int | None = None,
) -> Any:
    """Compile a function of arrays (and pytrees of them) into one plan.

    It is traced once for each signature (structure, shapes, dtypes, values of bools and
    strings). Python numbers are runtime values: another number compiles nothing.
    Those that must be known while tracing (a count of loops) come by a default that the
    call leaves alone: ``sd.compile(functools.partial(f, n=3))``. What the function
    reads from elsewhere (variables that it closes over, globals) is taken as it was
    when a signature was first met: what changes comes as an argument.

    Args:
        donate: names of parameters whose arrays may be overwritten; they cannot be used
            afterwards.
        scores: bytes of memory that the backward pass of attention may take for the
            gradient of its scores, at any one time; storing it saves two of seven
            products. 0 stores nothing of queries by keys. By default what
            ``SHADERDSL_SCORES`` says, else a quarter of what the graph takes and
            gives, which is little for an attention alone: ``sd.compile(pullback,
            scores=2 << 30)``. Inside of another compiled function that one's counts.

    Raises:
        AxisError: ``donate`` names what is no parameter.
        ShaderError: ``scores`` is no number of bytes.
    """
    names = (donate,) if isinstance(donate, str) else tuple(donate)
    if scores is not None and (
        isinstance(scores, bool) or not isinstance(scores, int) or scores < 0
    ):
        raise ShaderError(
            f"scores={scores!r} is no number of bytes",
            where=E.user_location(),
            cure="a whole number, such as 2 << 30 for 2 GiB, or 0 to store none",
        )
    if function is None:
        return lambda f: Compiled(f, names, scores)
    return Compiled(function, names, scores)


# ------------------------------------------------------------------ derivatives


def _check_float(a: Any, what: str) -> None:
    if isinstance(a, Array) and a.dtype not in E.FLOATS:
        raise DifferentiationError(
            f"{what} is {a.dtype}; only f32 and f16 arrays have a derivative",
            where=E.user_location(),
            cure="leave it out of argnums, or convert it to f32",
        )


def _differentiable(traced: Traced) -> list[int]:
    return [k for k, s in enumerate(traced.inputs) if s.dtype in E.FLOATS]


def vjp(function: Callable[..., Any], *args: Any) -> tuple[Any, Callable[..., Any]]:
    """``y, pullback = vjp(f, *args)``: the value, and the function from a cotangent of
    y to cotangents of the args.

    The pullback gives one result for each argument (the only one bare), of the
    argument's own structure; leaves that are not floating point get None.
    """
    traced = Traced(function, args, "vjp")
    wrt = [traced.inputs[k] for k in _differentiable(traced)]
    floats = [k for k, s in enumerate(traced.outs) if s.dtype in E.FLOATS]
    cots = [
        placeholder(
            ("cotangent", depth()),
            traced.outs[k].shape,
            traced.outs[k].dtype,
            "dy",
        )
        if len(floats) == 1
        else placeholder(
            ("cotangent", depth(), k),
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
            note_checks(rebound_checks(traced.checks, traced.inputs, traced.arrays))
            outs = substituted(traced.outs, traced.inputs, traced.arrays)
            residuals: list[Stage] = []
            kept: list[Array] = []
        else:
            check_ids(traced.checks, traced.inputs, traced.arrays)
            residuals, placeholders, grads = _split(traced.outs, traced.inputs, grads)
            got = _run_flagged(traced, [*traced.outs, *residuals])
            outs, kept = got[: len(traced.outs)], got[len(traced.outs) :]
    y = traced.results(outs)
    shapes = [(outs[k].shape, outs[k].dtype.name) for k in floats]

    def pullback(cotangent: Any) -> Any:
        leaves = _cotangent_leaves(cotangent, traced, floats, shapes)
        real = [(g, s) for g, s in enumerate(grads) if s is not None]
        stages = [s for _, s in real]
        inputs = [*traced.inputs, *cots]
        arrays = [*traced.arrays, *leaves]
        if outer or any(a.symbolic for a in arrays):
            if residuals:
                inputs, arrays = [*inputs, *placeholders], [*arrays, *kept]
            results = substituted(stages, inputs, arrays)
        else:
            if residuals:
                inputs, arrays = [*inputs, *placeholders], [*arrays, *kept]
            used = set(topo_stages(stages))
            pairs = [(s, a) for s, a in zip(inputs, arrays, strict=True) if s in used]
            results = run(stages, [s for s, _ in pairs], [a for _, a in pairs])
        by_input: list[Any] = [None] * len(traced.inputs)
        found = {g: r for (g, _), r in zip(real, results, strict=True)}
        for g, k in enumerate(_differentiable(traced)):
            by_input[k] = found[g] if g in found else _zeros(traced.inputs[k])
        return _per_argument(traced, by_input)

    return y, pullback


def _run_flagged(
    traced: Traced,
    stages: Sequence[Stage],
    inputs: Sequence[Stage] | None = None,
    arrays: Sequence[Array] | None = None,
) -> list[Array]:
    """Run stages of a traced function, and what decides about the ids that it makes."""
    got = run(
        [*stages, *traced.flags],
        traced.inputs if inputs is None else inputs,
        traced.arrays if arrays is None else arrays,
    )
    ids.note(traced.made, [a.buffer() for a in got[len(stages) :]])
    return got[: len(stages)]


def _zeros(s: Stage) -> Array:
    return asarray(np.zeros(s.shape, NUMPY[s.dtype]), s.dtype)


def _per_argument(traced: Traced, by_input: Sequence[Any]) -> Any:
    leaves: list[Any] = [None] * len(traced.leaves)
    for k, position in enumerate(traced.positions):
        leaves[position] = by_input[k]
    result = tree.unflatten(traced.structure, leaves)
    return result[0] if len(result) == 1 else result


def _cotangent_leaves(
    cotangent: Any,
    traced: Traced,
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
    # What is compared with its own maximum must be what the maximum was taken of.
    order = topo_stages([*outs, *real])
    again -= compared(order, [*outs, *real], again)
    exact = recomputed(order, [*outs, *real], stored)
    residuals: dict[Stage, None] = {}
    seen: set[Stage] = set()
    stack = list(real)
    while stack:
        s = stack.pop()
        if s in seen:
            continue
        seen.add(s)
        kept_anyway = s in stored or s in exact
        kept_anyway |= s.kind == "reduce" and s not in again
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
    traced = Traced(function, tuple(primals), "jvp")
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
        placeholder(("tangent", depth(), k), s.shape, s.dtype, "t")
        for k, s in enumerate(wrt)
    ]
    with lock:
        pushed = differentiate.jvp(traced.outs, wrt, places)
        real = [s for s in pushed if s is not None]
        stages = [*traced.outs, *real]
        inputs, arrays = [*traced.inputs, *places], [*traced.arrays, *directions]
        if traced.symbolic() or any(a.symbolic for a in arrays):
            note_checks(rebound_checks(traced.checks, traced.inputs, traced.arrays))
            got = substituted(stages, inputs, arrays)
        else:
            check_ids(traced.checks, traced.inputs, traced.arrays)
            got = _run_flagged(traced, stages, inputs, arrays)
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
            a = None if leaf is None else as_leaf(leaf)
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

        traced = Traced(call, args, "grad", named=function)
        value = traced.results([Array.symbol(s) for s in traced.outs])
        if has_aux and not (isinstance(value, (tuple, list)) and len(value) == 2):
            raise DifferentiationError(
                "with has_aux the function gives a pair (loss, anything)",
                where=defined_at(function),
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
                where=defined_at(function)
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
            one = map_stage((), E.const(1.0), "one", dtype=loss.dtype.name)
            seeds: list[Stage | None] = [
                one if s is loss.stage() else None for s in traced.outs
            ]
            first = seeds.index(one)
            seeds = [one if k == first else None for k in range(len(seeds))]
            grads = differentiate.vjp(traced.outs, seeds, wrt, traced.regions)
            real = [g for g in grads if g is not None]
            stages = [*traced.outs, *real]
            if traced.symbolic():
                note_checks(rebound_checks(traced.checks, traced.inputs, traced.arrays))
                got = substituted(stages, traced.inputs, traced.arrays)
            else:
                check_ids(traced.checks, traced.inputs, traced.arrays)
                got = _run_flagged(traced, stages)
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
            outer = innermost()
            if outer is not None and outs:
                outer.regions.append(region(outs, starts))
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
        function: of arrays. What ``sd.compile`` gave is planned as its calls are, with
            its ``donate`` and ``scores``.
        args: arrays or ``sd.spec(dtype, *shape)``.
        backward: the pullback's kernels; ``residuals`` lists what forward keeps for it.
    """
    target: Any = function
    scores, donated = None, frozenset[int]()
    if isinstance(function, Compiled):
        target, scores = function.function, function.scores
    if isinstance(function, Compiled) and not backward:
        traced, donated = function.trace(function.arguments(args, keywords))
    else:
        traced = Traced(
            lambda *xs: target(*xs, **keywords), args, "lower", named=target
        )
    with lock:
        if not backward:
            stages = [*traced.outs, *traced.flags]
            plan = Plan(stages, traced.inputs, donated, scores)
            return Lowered(plan.program, ())
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
        given = [s for s in [*inputs, *more] if s in used]
        plan = Plan(stages, given, scores=scores)
        return Lowered(plan.program, tuple(residuals))
