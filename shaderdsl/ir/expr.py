"""Scalar expressions over positional axes: immutable, interned, compared by identity.

``Expr`` is what the compiler computes with; people write
:class:`~shaderdsl.ir.trace.Value`. Two expressions that are built alike are one object,
so a common subexpression costs nothing to find and a memo can be keyed by the node.
"""

from __future__ import annotations

import math
import operator
import struct
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import CompilerError, DTypeError

if TYPE_CHECKING:
    from .primitives import Primitive

FLOATS = ("f32", "f16")
INTS = ("i32", "u32")
DTYPES = ("f32", "f16", "i32", "u32", "bool")


class Expr:
    """One node. ``kind`` is const, index, size, scalar, load or apply (see
    ``docs/design.md``).

    ``free`` is the bit mask of axes that the value depends on; ``loc`` is the user's
    ``file:line`` where the node was first made and ``label`` what the op calls a loaded
    operand; neither is part of its identity. ``kept`` holds what was found out about
    the node, by question, and ``below`` what :func:`topo` gives before the node itself.
    """

    __slots__ = (
        "__weakref__",
        "args",
        "below",
        "data",
        "dtype",
        "free",
        "kept",
        "kind",
        "label",
        "loc",
    )
    kind: str
    args: tuple[Expr, ...]
    data: Any
    dtype: str
    free: int
    loc: str | None
    label: str | None
    kept: dict[Any, Any] | None
    below: tuple[Expr, ...] | None

    def __add__(self, other: Expr | float) -> Expr:
        return apply("add", self, other)

    def __radd__(self, other: Expr | float) -> Expr:
        return apply("add", other, self)

    def __sub__(self, other: Expr | float) -> Expr:
        return apply("sub", self, other)

    def __rsub__(self, other: Expr | float) -> Expr:
        return apply("sub", other, self)

    def __mul__(self, other: Expr | float) -> Expr:
        return apply("mul", self, other)

    def __rmul__(self, other: Expr | float) -> Expr:
        return apply("mul", other, self)

    def __truediv__(self, other: Expr | float) -> Expr:
        return apply("div", self, other)

    def __rtruediv__(self, other: Expr | float) -> Expr:
        return apply("div", other, self)

    def __neg__(self) -> Expr:
        return apply("neg", self)

    def __repr__(self) -> str:
        from .printer import show

        return show(self)


class _Ref(weakref.ref[Expr]):
    """A reference that knows under which key the table has it."""

    __slots__ = ("key",)
    key: tuple[Any, ...]


# Nodes that are alive, by what makes them equal. A `WeakValueDictionary` would do, at
# three times the cost, and every node that is made asks.
_table: dict[tuple[Any, ...], _Ref] = {}


def _gone(ref: _Ref, table: dict[tuple[Any, ...], _Ref] = _table) -> None:
    if table.get(ref.key) is ref:
        del table[ref.key]


def _make(
    kind: str, args: tuple[Expr, ...], data: Any, dtype: str, free: int, key: Any
) -> Expr:
    full = (kind, args, key)
    ref = _table.get(full)
    node = ref() if ref is not None else None
    if node is None:
        node = object.__new__(Expr)
        node.kind, node.args, node.data, node.dtype = kind, args, data, dtype
        node.free = free
        node.loc = node.label = node.kept = None
        node.below = None if args else ()
        ref = _table[full] = _Ref(node, _gone)
        ref.key = full
    return node


# ------------------------------------------------------------------ leaves


def const(value: bool | int | float, dtype: str | None = None) -> Expr:
    """A number. Keys hold type and bits, so 1, 1.0, True and -0.0 stay apart."""
    if dtype is None:
        dtype = (
            "bool"
            if isinstance(value, bool)
            else "i32"
            if isinstance(value, int)
            else "f32"
        )
    if dtype == "bool":
        value = bool(value)
    elif dtype in INTS:
        value = int(value)
    else:
        dtype, value = "f32", float(value)
    bits = struct.pack("<d", value) if dtype == "f32" else value
    return _make("const", (), value, dtype, 0, (dtype, bits))


def index(axis: int) -> Expr:
    """The position along an axis, i32."""
    return _make("index", (), axis, "i32", 1 << axis, axis)


def size(value: int | float, dtype: str = "i32") -> Expr:
    """A number that is known when planned but printed as a runtime parameter: an
    extent, an option of an op.
    """
    return _make("size", (), value, dtype, 0, (dtype, struct.pack("<d", value)))


def scalar(name: str, dtype: str) -> Expr:
    """A runtime number that is given at each call."""
    return _make("scalar", (), name, dtype, 0, (name, dtype))


def load(stage: Any, indices: Iterable[Expr]) -> Expr:
    """An element of a stage: one integer expression for each dimension of its shape."""
    idx = tuple(indices)
    if len(idx) != len(stage.shape):
        raise CompilerError(
            f"a load of {stage} has {len(idx)} indices for shape {stage.shape}"
        )
    dtype = "f32" if stage.dtype == "f16" else stage.dtype
    # Nothing can be read from an empty array, so that no kernel ever has to bind one.
    if 0 in stage.shape:
        return const(0, dtype)
    free = 0
    for i in idx:
        free |= i.free
    return _make("load", idx, stage, dtype, free, stage)


# ------------------------------------------------------------------ application

#: The rows of `primitives`, which fills it.
PRIMITIVES: dict[str, Primitive] = {}


def lift(value: Expr | bool | int | float, dtype: str | None = None) -> Expr:
    """A Python number becomes a constant; an expression stays."""
    return value if isinstance(value, Expr) else const(value, dtype)


def cast(value: Expr, dtype: str) -> Expr:
    """Numeric conversion; constants are converted at once."""
    if dtype == "f16":
        dtype = "f32"
    if value.dtype == dtype:
        return value
    if (
        value.kind == "const"
        and dtype != "bool"
        and (dtype == "f32" or float(value.data).is_integer())
    ):
        if dtype == "f32":
            return const(float(value.data), dtype)
        return const(_fitted(int(value.data), value.dtype, dtype), dtype)
    return _make("apply", (value,), "to_" + dtype, dtype, value.free, "to_" + dtype)


def _fitted(n: int, source: str, dtype: str) -> int:
    """An integer in the range of a dtype: floats saturate, integers wrap."""
    low = 0 if dtype == "u32" else -(1 << 31)
    if source == "f32":
        return min(max(n, low), low + (1 << 32) - 1)
    return (n - low) % (1 << 32) + low


def _fitting(args: list[Expr], dtype: str) -> list[Expr]:
    """Weak integers take a dtype, if they can."""
    low = 0 if dtype == "u32" else -(1 << 31)
    for a in args:
        if a.kind in ("const", "size") and not low <= a.data < low + (1 << 32):
            raise DTypeError(
                f"the number {a.data} does not fit {dtype}",
                cure="use a float, or a number in range",
            )
    return [a if a.dtype == dtype else cast(a, dtype) for a in args]


def promote(args: list[Expr], where: str = "") -> list[Expr]:
    """Bring operands to one dtype: bool < i32, u32 < f32; constants are weak."""
    dtype = args[0].dtype
    for a in args:
        if a.dtype != dtype:
            break
    else:
        return _fitting(args, dtype) if dtype in INTS else args
    kinds = {a.dtype for a in args if a.kind != "const"} or {a.dtype for a in args}
    # A float constant makes integers into floats; an integer constant takes the others'
    # type.
    if "f32" in kinds or any(a.kind == "const" and a.dtype == "f32" for a in args):
        return [cast(a, "f32") for a in args]
    if "i32" in kinds and "u32" in kinds:
        raise DTypeError(
            f"{where or 'an operation'} mixes i32 and u32",
            cure="convert one of them: sd.cast(x, 'i32') or sd.cast(x, 'u32')",
        )
    for dtype in ("u32", "i32"):
        if dtype in kinds:
            return _fitting(args, dtype)
    if kinds == {"bool"} and any(a.dtype == "i32" for a in args):
        return [cast(a, "i32") for a in args]
    return args


def apply(name: str, *operands: Expr | bool | int | float) -> Expr:
    """A primitive of operands, with types brought together and the simplest identities
    removed.
    """
    prim = PRIMITIVES[name]
    args = prim.prepare([a if type(a) is Expr else lift(a) for a in operands])
    if name == "neg" and args[0].dtype == "u32":
        return apply("sub", const(0, "u32"), args[0])
    simple = _simplify(name, args)
    if simple is not None:
        return simple
    free = 0
    for a in args:
        free |= a.free
    return _make("apply", tuple(args), name, prim.result(args), free, name)


def where(condition: Expr, a: Expr | float, b: Expr | float) -> Expr:
    """``a`` where the condition holds, else ``b``."""
    return apply("where", condition, a, b)


def _is(e: Expr, value: float) -> bool:
    return e.kind == "const" and e.dtype != "bool" and e.data == value


_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "lt": operator.lt,
    "le": operator.le,
    "eq": operator.eq,
    "ne": operator.ne,
}


def _simplify(name: str, a: list[Expr]) -> Expr | None:
    if name == "where":
        if a[1] is a[2]:
            return a[1]
        if a[0].kind == "const":
            return a[1] if a[0].data else a[2]
        return None
    if name == "and":
        for i in (0, 1):
            if a[i].kind == "const" and a[i].dtype == "bool":
                return a[1 - i] if a[i].data else a[i]
        return a[0] if a[0] is a[1] else None
    if a[0].kind == "const" and a[-1].kind == "const":
        if name in _COMPARE and a[0].dtype in INTS and a[1].dtype in INTS:
            return const(_COMPARE[name](a[0].data, a[1].data))
        if name in ("add", "sub", "mul", "neg") and a[0].dtype != "bool":
            return _fold(name, a)
    if name == "add":
        if _is(a[0], 0):
            return a[1]
        if _is(a[1], 0):
            return a[0]
    elif name == "sub" and _is(a[1], 0):
        return a[0]
    elif name == "mul":
        for i in (0, 1):
            if _is(a[i], 1):
                return a[1 - i]
            if _is(a[i], 0) and a[i].dtype != "f32":
                return a[i]
            if _is(a[i], -1) and a[i].dtype != "u32":
                return apply("neg", a[1 - i])
    elif name == "div" and _is(a[1], 1):
        return a[0]
    elif name == "neg" and a[0].kind == "apply" and a[0].data == "neg":
        return a[0].args[0]
    elif name in ("floordiv", "mod") and _is(a[1], 1) and a[0].dtype != "f32":
        return a[0] if name == "floordiv" else const(0, a[0].dtype)
    elif name == "stop_gradient" and (a[0].kind == "const" or a[0].dtype not in FLOATS):
        return a[0]
    return None


def _fold(name: str, a: list[Expr]) -> Expr:
    x = a[0].data
    y = a[1].data if len(a) > 1 else 0
    value = {
        "add": lambda: x + y,
        "sub": lambda: x - y,
        "mul": lambda: x * y,
        "neg": lambda: -x,
    }[name]()
    dtype = a[0].dtype
    if dtype == "i32":  # wraps, as the device does
        value = (value + (1 << 31)) % (1 << 32) - (1 << 31)
    elif dtype == "u32":
        value %= 1 << 32
    return const(value, dtype)


# ------------------------------------------------------------------ traversal
# (iterative: a deep graph must not recurse)


#: So many nodes are kept with the one above them; where there are more, one walks.
_KEEP = 256
#: What stands for them then.
_MANY: Any = (None,)


def topo(*roots: Expr, into: Callable[[Expr], bool] | None = None) -> list[Expr]:
    """Nodes reachable from the roots, operands first. ``into(node)`` false keeps its
    operands out.
    """
    if into is None:
        below = [_below(r) for r in roots]
        if None not in below:
            if len(roots) == 1:
                return [*(below[0] or ()), roots[0]]
            pairs = zip(below, roots)
            return list(dict.fromkeys([n for b, r in pairs for n in (*(b or ()), r)]))
    out: list[Expr] = []
    seen: set[Expr] = set()
    # A node under a None has its operands behind it.
    stack: list[Expr | None] = list(reversed(roots))
    while stack:
        node = stack.pop()
        if node is None:
            done = stack.pop()
            assert done is not None
            out.append(done)
        elif node not in seen:
            seen.add(node)
            if node.args and (into is None or into(node)):
                stack += (node, None)
                stack += node.args[::-1]
            else:
                out.append(node)
    return out


def _below(root: Expr) -> tuple[Expr, ...] | None:
    """The nodes below one, operands first; None where they are too many to keep."""
    stack = [root]
    while stack:
        node = stack[-1]
        if node.below is None:
            missing = [x for x in node.args if x.below is None]
            if missing:
                stack += missing
                continue
            found: dict[Expr, None] = {}
            for x in node.args:
                if x.below is _MANY:
                    break
                found |= dict.fromkeys((*(x.below or ()), x))
            else:
                if len(found) <= _KEEP:
                    node.below = tuple(found)
            if node.below is None:
                node.below = _MANY
        stack.pop()
    return None if root.below is _MANY else root.below


def values(*roots: Expr) -> list[Expr]:
    """Like :func:`topo`, but an index inside a load is an address and not a value."""
    if len(roots) != 1 or not roots[0].args:
        return topo(*roots, into=_is_no_load)
    below: tuple[Expr, ...] = known(
        roots[0], "values", lambda: tuple(topo(*roots, into=_is_no_load)[:-1])
    )
    return [*below, roots[0]]


def _is_no_load(n: Expr) -> bool:
    return n.kind != "load"


def loads(*roots: Expr) -> list[Expr]:
    """The load nodes below the roots, those inside indices included."""
    if len(roots) != 1 or roots[0].kind == "load":
        return [n for n in topo(*roots) if n.kind == "load"]
    found: tuple[Expr, ...] = known(
        roots[0], "loads", lambda: tuple(n for n in topo(*roots) if n.kind == "load")
    )
    return list(found)


def known(node: Expr, question: Any, answer: Callable[[], Any]) -> Any:
    """What was found out about a node: a constant, which is kept with it.

    An answer must not refer to the node itself, which it would keep alive.
    """
    kept = node.kept
    if kept is None:
        kept = node.kept = {}
    found = kept.get(question)
    if found is None:
        found = kept[question] = answer()
    return found


def bits(mask: int) -> Iterator[int]:
    """The axes in a ``free`` mask."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def rebuild(node: Expr, args: tuple[Expr, ...]) -> Expr:
    """The node with other operands."""
    if args == node.args:
        return node
    if node.kind == "load":
        new = load(node.data, args)
    elif node.data.startswith("to_"):
        new = cast(args[0], node.data[3:])
    else:
        new = apply(node.data, *args)
    if new.loc is None:
        new.loc = node.loc
    if new.label is None:
        new.label = node.label
    return new


def rewrite(root: Expr, leaf: Callable[[Expr, tuple[Expr, ...]], Expr]) -> Expr:
    """Rebuild from the leaves; ``leaf(node, new_args)`` gives the replacement."""
    memo: dict[Expr, Expr] = {}
    for n in topo(root):
        memo[n] = leaf(n, tuple([memo[x] for x in n.args]))
    return memo[root]


def replace(root: Expr, old: Expr, new: Expr) -> Expr:
    """The expression with one node replaced wherever it stands."""
    memo: dict[Expr, Expr] = {}
    for n in topo(root):
        args = tuple(memo[x] for x in n.args)
        memo[n] = new if n is old else rebuild(n, args) if n.args else n
    return memo[root]


def substitute(root: Expr, axes: Mapping[int, Expr]) -> Expr:
    """Replace axes by expressions. There are no binders, so nothing can be captured."""
    mask = 0
    for a in axes:
        mask |= 1 << a
    if not root.free & mask:
        return root
    memo: dict[Expr, Expr] = {}
    for n in topo(root):
        if not n.free & mask:
            continue
        if n.kind == "index":
            memo[n] = axes[n.data]
        else:
            memo[n] = rebuild(n, tuple([memo.get(x, x) for x in n.args]))
    return memo[root]


def all_of(conditions: Iterable[Expr]) -> Expr | None:
    """The conjunction, or None for no condition."""
    result: Expr | None = None
    for c in conditions:
        result = c if result is None else apply("and", result, c)
    return result


def guard(conditions: Iterable[Expr], value: Expr) -> Expr:
    """``value`` where all conditions hold, zero elsewhere."""
    c = all_of(conditions)
    return value if c is None else where(c, value, const(0, value.dtype))


# ------------------------------------------------------------------ where the user
# wrote it

_OWN = __file__.rsplit("/ir/", 1)[0] + "/"
_NUMPY = np.__file__.rsplit("/", 1)[0] + "/"


def user_location(skip: int = 1) -> str | None:
    """``file:line`` of the nearest frame outside the compiler and NumPy."""
    frame = sys._getframe(skip)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_OWN, _NUMPY)):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return None


def is_finite_const(e: Expr) -> bool:
    """A constant that WGSL can write as a literal."""
    return e.kind == "const" and (e.dtype != "f32" or math.isfinite(e.data))
