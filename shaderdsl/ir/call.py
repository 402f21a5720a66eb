"""Calling an op's function: arrays become values over named axes, and what it returns
becomes stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..errors import AxisError, ShapeError
from . import expr as E
from . import signature as S
from . import verify
from .bounds import HostCheck, check_ranges
from .expr import Expr
from .indexmap import Affine, merge
from .stage import Stage, map_stage
from .trace import Trace, Value, entered, unwrap


def operands(
    sig: S.Signature, trace: Trace, arrays: Sequence[Stage], names: Sequence[str]
) -> list[Value | tuple[Value, ...]]:
    """The arrays as values over the axes that the signature gives them."""
    out: list[Value | tuple[Value, ...]] = []
    for dims, stage, name in zip(sig.inputs, arrays, names, strict=True):
        joined = [d for d in dims if d.kind == "joined"]
        if not joined:
            node = E.load(stage, [_position(d, trace) for d in dims])
            node.label = node.label or name
            out.append(Value(node, trace))
            continue
        if len(joined) > 1:
            raise AxisError("an operand can have one joined axis", where=trace.name)
        pieces = []
        offset = 0
        for piece in joined[0].axes:
            a = trace.axis(piece)
            at = Affine({a: 1}, offset, ()).expr()
            pieces.append(
                Value(
                    E.load(
                        stage,
                        [at if d is joined[0] else _position(d, trace) for d in dims],
                    ),
                    trace,
                )
            )
            offset += trace.extents[a]
        out.append(tuple(pieces))
    return out


def _position(d: S.Dim, trace: Trace) -> Expr:
    names = (d.text,) if d.kind == "derived" else d.axes
    return merge([trace.axis(n) for n in names], trace.extents)


def run(
    function: Callable[..., Any],
    name: str,
    sig: S.Signature,
    sizes: dict[str, int],
    arrays: Sequence[Stage],
    keywords: dict[str, Any],
    names: Sequence[str],
) -> tuple[list[Stage], list[HostCheck], bool]:
    """Call an op's function once; give its results as stages, checks for ids, and
    whether it gave a tuple.
    """
    trace = Trace(name, {a: sizes[a] for a in sig.axes()} | sizes)
    with entered(trace):
        args = operands(sig, trace, arrays, names)
        for part in args:  # made by nobody's line
            for value in part if isinstance(part, tuple) else (part,):
                value.expr.loc = _where(function, name)
        kw = {
            k: Value(v, trace) if isinstance(v, Expr) else v
            for k, v in keywords.items()
        }
        results = function(*args, **kw)
        many = len(sig.outputs) > 1
        if many and (
            not isinstance(results, tuple) or len(results) != len(sig.outputs)
        ):
            raise ShapeError(
                f"the op returns {len(results) if isinstance(results, tuple) else 1} "
                "values, its signature has "
                f"{len(sig.outputs)} results",
                where=_where(function, name),
            )
        half = _storage(arrays)
        stages = [
            _result(r, dims, trace, name, half, function)
            for r, dims in zip(
                results if many else (results,), sig.outputs, strict=True
            )
        ]
        verify.check(stages, "after tracing")
        return stages, trace.checks, many


def _storage(arrays: Sequence[Stage]) -> bool:
    floats = [a.dtype for a in arrays if a.dtype in E.FLOATS]
    return bool(floats) and all(d == "f16" for d in floats)


def _where(function: Callable[..., Any], name: str) -> str:
    code = getattr(function, "__code__", None)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name


def _result(
    result: Any,
    dims: tuple[S.Dim, ...],
    trace: Trace,
    name: str,
    half: bool,
    function: Callable[..., Any],
) -> Stage:
    joined = [d for d in dims if d.kind == "joined"]
    if joined:
        if not isinstance(result, (tuple, list)) or len(result) != len(joined[0].axes):
            raise ShapeError(
                f"the result axis '{joined[0].text}' needs a tuple of "
                f"{len(joined[0].axes)} pieces",
                where=_where(function, name),
            )
        pieces = [unwrap(p) for p in result]
    else:
        if isinstance(result, (tuple, list)):
            raise ShapeError(
                "the op returns a tuple, its signature has one result",
                where=_where(function, name),
            )
        pieces = [unwrap(result)]
    # Axes of the result in order; a joined dimension gets a fresh axis that runs over
    # all pieces.
    axes: list[int] = []
    groups: list[tuple[int, ...]] = []
    extents = list(trace.extents)
    for d in dims:
        if d.kind == "joined":
            extents.append(sum(trace.extents[trace.axis(a)] for a in d.axes))
            members = [len(extents) - 1]
        elif d.kind == "derived":
            members = [trace.axis(d.text)]
        else:
            members = [trace.axis(a) for a in d.axes]
        groups.append(tuple(range(len(axes), len(axes) + len(members))))
        axes += members
    if len(set(axes)) != len(axes):
        raise AxisError(
            f"an axis appears twice in a result of '{trace.name}'",
            where=_where(function, name),
        )
    names = {v: k for k, v in trace.numbers.items()}
    for k, p in enumerate(pieces):
        allowed = set(axes) | ({trace.axis(joined[0].axes[k])} if joined else set())
        left = [a for a in E.bits(p.free) if a not in allowed]
        if left:
            raise AxisError(
                f"the result still depends on axis {names[left[0]]!r}, which its "
                "signature does not have",
                where=f"{name} ({p.loc or _where(function, name)})",
                cure=f"reduce it: sd.sum(…, over={names[left[0]]!r}), or add the axis "
                "to the result",
            )
        trace.checks += check_ranges(p, trace.extents, names, name)
    body = (
        pieces[0] if not joined else _join(pieces, joined[0], trace, len(extents) - 1)
    )
    body = E.substitute(body, {a: E.index(i) for i, a in enumerate(axes)})
    dtype = "f16" if half and body.dtype == "f32" else body.dtype
    return map_stage(
        [extents[a] for a in axes],
        body,
        name,
        groups=tuple(groups),
        dtype=dtype,
        loc=_where(function, name),
    )


def _join(pieces: Sequence[Expr], d: S.Dim, trace: Trace, whole: int) -> Expr:
    same = E.promote(list(pieces), "a joined axis")
    position = E.index(whole)
    start = sum(trace.extents[trace.axis(a)] for a in d.axes)
    result: Expr | None = None
    for piece, name in zip(reversed(same), reversed(d.axes), strict=True):
        a = trace.axis(name)
        start -= trace.extents[a]
        moved = E.substitute(piece, {a: Affine({whole: 1}, -start, ()).expr()})
        end = E.const(start + trace.extents[a])
        result = (
            moved
            if result is None
            else E.where(E.apply("lt", position, end), moved, result)
        )
    assert result is not None
    return result
