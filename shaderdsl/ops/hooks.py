"""Attention whose scores and masks are op code of the user's, traced like any other.

Each call builds the op again, so that a hook that closes over something else is another
op; equal expressions are one graph and one plan all the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .. import namespace as sd
from ..array import Array, asarray, is_number
from ..errors import DTypeError, ShapeError, TraceError
from ..ir import expr as E
from ..ir.trace import Indexed, Value, current
from ..op import Op

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def check_heads(q: Any, k: Any, v: Any) -> None:
    """Ranks, and query heads that key and value heads divide.

    Raises:
        ShapeError: they do not fit.
    """
    a, b, c = (tuple(getattr(x, "shape", ())) for x in (q, k, v))
    where = f"attention ({E.user_location()})"
    for name, shape in (("q", a), ("k", b), ("v", c)):
        if shape and len(shape) < 3:
            raise ShapeError(
                f"argument {name!r} has shape {shape}; attention takes "
                "[..., heads, length, d]",
                where=where,
                cure=f"{name}[None] for one head, or reshape",
            )
    if a and b and b[-3] and a[-3] % b[-3]:
        raise ShapeError(
            f"argument 'q': {a[-3]} query heads do not share {b[-3]} key and value "
            "heads evenly",
            where=where,
            cure="the number of query heads must be a multiple of that of kv heads",
        )


def check_numbers(window: Any, softcap: Any, start: Any, lengths: Any, k: Any) -> None:
    """Options that are known on the host. What lies on the device is not read back: a
    start or a length beyond the keys then means the last one.

    Raises:
        ShapeError: a window below 1, a start or a length that no key has, a cap that
            is not above 0.
        DTypeError: positions that are no integers.
    """
    where = f"attention ({E.user_location()})"
    for name, value in (("window", window), ("start", start), ("lengths", lengths)):
        if value is not None and not _integers(value):
            raise DTypeError(
                f"{name} is {value!r}; positions are integers",
                where=where,
                cure=f"a whole number of positions, or an array of i32 for {name}",
            )
    if is_number(softcap) and not softcap > 0:
        raise ShapeError(
            f"softcap is {softcap}, but scores are divided by it",
            where=where,
            cure="a cap above 0; softcap=None caps nothing",
        )
    if is_number(window) and window < 1:
        raise ShapeError(
            f"window is {window}, but a query sees at least its own position",
            where=where,
            cure="window=None sees all",
        )
    keys = k.shape[-2] if len(getattr(k, "shape", ())) > 2 else None
    if keys is None:
        return
    for name, value, last in (
        ("start", start, max(keys - 1, 0)),
        ("lengths", lengths, keys),
    ):
        if value is None or not (is_number(value) or _on_host(value)):
            continue
        for n in np.asarray(value).reshape(-1).tolist():
            if not 0 <= n <= last:
                raise ShapeError(
                    f"{name} is {n}, but there are {keys} keys: 0 … {last} fit",
                    where=where,
                    cure="start is the first query's position among the keys"
                    if name == "start"
                    else "lengths is how many keys, from the first on, there are",
                )


def _on_host(x: Any) -> bool:
    return isinstance(x, (np.ndarray, np.generic, list, tuple))


def _integers(x: Any) -> bool:
    """Whether a number, or all elements of an array, are integers and no booleans."""
    if is_number(x) or _on_host(x):
        return np.asarray(x).dtype.kind in "iu"
    return not isinstance(x, Array) or x.dtype in E.INTS


def check_hooks(score: Any, mask: Any, captured: Any) -> None:
    """Hooks are functions, captured arrays have names.

    Raises:
        TraceError: they are not.
    """
    where = f"attention ({E.user_location()})"
    for name, hook in (("score", score), ("mask", mask)):
        if hook is not None and not callable(hook):
            raise TraceError(
                f"{name} is a {type(hook).__name__} and no function",
                where=where,
                cure="score(x, b, h, i, j, **captured), mask(b, h, i, j, **captured)",
            )
    if captured is not None and not isinstance(captured, Mapping):
        raise TraceError(
            f"captured is a {type(captured).__name__}; it names arrays",
            where=where,
            cure="captured={'bias': array}",
        )


def _named(hook: Callable[..., Any], count: int, captured: Mapping[str, Any]) -> Any:
    """Which captured arrays a hook's signature names."""
    try:
        parameters = list(inspect.signature(hook).parameters.values())
    except (TypeError, ValueError):
        return ()
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        return tuple(captured)
    names = [p.name for p in parameters if p.kind != p.VAR_POSITIONAL]
    if len(names) < count and len(names) == len(parameters):
        raise TraceError(
            f"the hook {getattr(hook, '__name__', hook)!r} takes {len(names)} "
            f"arguments, but gets {count} before what is captured",
            where=f"attention ({E.user_location()})",
            cure="score(x, b, h, i, j, **captured), mask(b, h, i, j, **captured)",
        )
    fixed = () if any(p.kind == p.VAR_POSITIONAL for p in parameters) else names[:count]
    extra = [p for p in parameters if p.name in names and p.name not in fixed]
    missing = [p.name for p in extra if p.default is p.empty and p.name not in captured]
    if missing:
        raise TraceError(
            f"the hook {getattr(hook, '__name__', hook)!r} takes {missing[0]!r}, which "
            "is not captured",
            where=f"attention ({E.user_location()})",
            cure=f"pass captured={{{missing[0]!r}: array}}",
        )
    return tuple(p.name for p in extra if p.name in captured)


def _checked(value: Any, wanted: str, hook: Any) -> Any:
    """A hook's result, or a typed error."""
    name = getattr(hook, "__name__", "hook")
    dtype = getattr(value, "dtype", None)
    if is_number(value) and isinstance(value, bool) == (wanted == "bool"):
        kept = value if wanted == "bool" else float(value)
        return Value(E.const(kept), current())
    if not isinstance(value, Value) or dtype != wanted:
        kind = dtype if isinstance(value, Value) else type(value).__name__
        raise DTypeError(
            f"{name} gives {kind}; it must give {wanted}: "
            + ("a score" if wanted == "f32" else "whether the query sees the key"),
            where=f"attention ({E.user_location()})",
            cure="return x, changed; hide keys by mask="
            if wanted == "f32"
            else "return a comparison, such as i >= j; change scores by score=",
        )
    return value


def hooked(
    causal: bool,
    start: Any,
    lengths: Any,
    score: Callable[..., Any] | None,
    mask: Callable[..., Any] | None,
    captured: Mapping[str, Any],
    return_lse: bool,
    q: Any,
) -> tuple[list[Any], Op]:
    """The op of such a call, and what it takes after q, k and v."""
    if len(q.shape) != 4:
        raise ShapeError(
            f"q has shape {tuple(q.shape)}; attention with hooks, lengths or starts "
            "takes [batch, heads, length, d]",
            where=f"attention ({E.user_location()})",
            cure="q[None] for one batch, or reshape",
        )
    names: dict[str, tuple[str, ...]] = {"score": (), "mask": ()}
    if score is not None:
        names["score"] = _named(score, 5, captured)
    if mask is not None:
        names["mask"] = _named(mask, 4, captured)
    used = [n for n in captured if n in (*names["score"], *names["mask"])]
    given: list[Any] = []
    operands: list[str] = []
    axes: dict[str, tuple[str, ...]] = {}
    for k, name in enumerate(used):
        array = asarray(captured[name])
        axes[name] = tuple(f"{_LETTERS[k % 26]}x{k}x{i}" for i in range(array.ndim))
        given.append(array)
        operands.append(" ".join(axes[name]))
    numbers: dict[str, int] = {}
    arrays: list[str] = []
    for name, value in (("start", start), ("lengths", lengths)):
        if value is None:
            continue
        if is_number(value):
            numbers[name] = value
            continue
        array = asarray(value, "i32")
        if array.ndim > 1:
            raise ShapeError(
                f"{name} has shape {array.shape}; it is a number or one a batch",
                where=f"attention ({E.user_location()})",
                cure=f"{name} of shape [batch]",
            )
        arrays.append(name)
        given.append(array)
        operands.append("b" if array.ndim else "")

    def attention(
        q: Any, k: Any, v: Any, *more: Any, scale: Any, window: Any, softcap: Any
    ) -> Any:
        from .attention import _scores, _seen, _weigh

        known = dict(zip([*used, *arrays], more))
        # Sizes and no scalars: an index of a hook must be proven to stay in its axis.
        sizes = {n: Value(E.size(int(x)), current()) for n, x in numbers.items()}
        first = known.get("start", sizes.get("start"))
        length = known.get("lengths", sizes.get("lengths"))
        if first is None:
            first = sd.extent("s") - sd.extent("t")
        i, j = sd.index("t") + first, sd.index("s")
        b, h = sd.index("b"), sd.index("h") * sd.extent("g") + sd.index("g")
        held = {n: Indexed(known[n], axes[n], n) for n in used}
        x = _scores(q, k, scale, softcap)
        seen = None if length is None else j < length
        if mask is not None:
            m = mask(b, h, i, j, **{n: held[n] for n in names["mask"]})
            m = _checked(m, "bool", mask)
            seen = m if seen is None else seen & m
        seen = _seen(causal, window, first, seen)
        if score is not None:
            x = score(x, b, h, i, j, **{n: held[n] for n in names["score"]})
            x = _checked(x, "f32", score)
        y = _weigh(x, v, seen)
        return (y, sd.logsumexp(x, over="s", where=seen)) if return_lse else y

    text = "b (h g) t d, b h s d, b h s c"
    text += "".join(f", {o}" for o in operands) + " -> b (h g) t c"
    variant = Op(attention, text + (", b (h g) t" if return_lse else ""), {}, ())
    # Errors and kernels call the arrays what the user calls them.
    taken = ("q", "k", "v", "scale", "window", "softcap")
    called = [f"{n}_" if n in taken else n for n in (*used, *arrays)]
    variant.operands[3:] = called
    return given, variant
