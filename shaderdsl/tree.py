"""Pytrees: nested tuples, lists, dicts and registered classes, flattened to leaves and
put together again.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

# class -> (parts(x) -> (children, key), build(key, children))
_registry: dict[
    type, tuple[Callable[[Any], tuple[list[Any], Any]], Callable[[Any, list[Any]], Any]]
] = {}


# Classes whose objects never change, so that what they flatten to is kept with them.
_frozen: set[type] = set()
# Those of them whose objects may begin with that alone.
_lazy: set[type] = set()
# Where it is kept: not a field, and nothing that equality or copies look at.
_KEPT = "_flattened"
_serials = itertools.count()


def register(
    cls: type,
    parts: Callable[[Any], tuple[list[Any], Any]],
    build: Callable[[Any, list[Any]], Any],
    *,
    frozen: bool = False,
    lazy: bool = False,
) -> None:
    """Make a class a pytree. ``parts`` gives children and a hashable rest; ``build`` is
    its inverse.

    Args:
        frozen: objects never change and have a ``__dict__``; a loop that hands them
            from call to call then takes them apart once.
        lazy: such objects may begin without attributes; the class calls `fill` when
            one is missing.
    """
    _registry[cls] = (parts, build)
    if frozen:
        _frozen.add(cls)
    if frozen and lazy:
        _lazy.add(cls)


def registered(x: Any) -> bool:
    """Whether a value is of a class that was made a pytree."""
    return type(x) in _registry


def children(x: Any) -> list[Any]:
    """The children of a value of a registered class."""
    return _registry[type(x)][0](x)[0]


@dataclass(frozen=True)
class Structure:
    """The shape of a pytree: hashable, equal for equal structures."""

    kind: Any
    key: Any
    children: tuple[Structure, ...]
    leaves: int

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.kind, self.key, self.children))

    @cached_property
    def number(self) -> int:
        """A number that no other object has, equal or not."""
        return next(_serials)

    @cached_property
    def frozen(self) -> bool:
        """Whether a pytree of this structure cannot change but for its leaves."""
        kind = self.kind
        own = kind in (None, "none", tuple) or kind in _frozen
        return own and all(c.frozen for c in self.children)


register(
    OrderedDict,
    lambda x: (list(x.values()), tuple(x)),
    lambda key, parts: OrderedDict(zip(key, parts, strict=True)),
)
register(
    defaultdict,
    lambda x: (list(x.values()), (x.default_factory, tuple(x))),
    lambda key, parts: defaultdict(key[0], zip(key[1], parts, strict=True)),
)

_INNER = {type(None), tuple, list, dict}
_LEAF = Structure(None, None, (), 1)
_NONE = Structure("none", None, (), 0)


def flatten(tree: Any) -> tuple[list[Any], Structure]:
    """Leaves from left to right, and the structure. None holds no leaf."""
    leaves: list[Any] = []
    return leaves, _flatten(tree, leaves)


def _flatten(x: Any, leaves: list[Any], outer: bool = True) -> Structure:
    kind = type(x)
    inner = outer and kind not in _frozen
    if x is None:
        return _NONE
    if kind in _registry:
        if kind in _frozen:
            kept = x.__dict__.get(_KEPT)
            if kept is not None:
                leaves += kept[0]
                known: Structure = kept[1]
                return known
        children, key = _registry[kind][0](x)
    elif kind in (tuple, list) or (isinstance(x, tuple) and hasattr(x, "_fields")):
        children, key = list(x), None
    elif kind is dict:
        names = list(x)
        children, key = [x[n] for n in names], tuple(names)
    else:
        leaves.append(x)
        return _LEAF
    before = len(leaves)
    parts = tuple(_flatten(c, leaves, inner) for c in children)
    structure = Structure(kind, key, parts, len(leaves) - before)
    if outer and not inner and structure.frozen:
        _keep(x, leaves[before:], structure)
    return structure


def kept(x: Any) -> tuple[Any, Structure, int] | None:
    """What is kept with an object that never changes: its leaves, its structure, and a
    number that is no other's.
    """
    found: Any = x.__dict__.get(_KEPT) if type(x) in _frozen else None
    return found


def attributes(x: Any) -> dict[str, Any]:
    """An object's attributes without what is kept with it, which names that object
    alone.
    """
    return {name: value for name, value in x.__dict__.items() if name != _KEPT}


def unflatten(structure: Structure, leaves: Iterable[Any]) -> Any:
    """The pytree of this structure with these leaves."""
    return _build(structure, iter(leaves))


def builder(structure: Structure) -> Callable[[Sequence[Any]], Any]:
    """`unflatten` for one structure, as a function of the list of leaves.

    It is one expression, written out and compiled: for a loop, which builds the same
    tree again and again.
    """
    names: dict[str, Any] = {"keep": _keep, "begin": _begin}

    def name(stem: str, value: Any) -> str:
        names[f"{stem}{len(names)}"] = value
        return f"{stem}{len(names) - 1}"

    def written(s: Structure, at: int, outer: bool) -> str:
        if s.kind is None:
            return f"x[{at}]"
        if s.kind == "none":
            return "None"
        whole = outer and s.kind in _frozen and s.frozen
        if whole and s.kind in _lazy:
            return f"begin(x[{at}:{at + s.leaves}], {name('s', s)})"
        parts = []
        start = at
        for c in s.children:
            parts.append(written(c, at, outer and not whole))
            at += c.leaves
        inner = ", ".join(parts)
        if s.kind in _registry:
            build, key = name("build", _registry[s.kind][1]), name("key", s.key)
            text = f"{build}({key}, [{inner}])"
        elif s.kind is dict:
            pairs = (f"{name('key', k)}: {v}" for k, v in zip(s.key, parts))
            text = f"{{{', '.join(pairs)}}}"
        elif s.kind is list:
            text = f"[{inner}]"
        elif s.kind is tuple:
            text = f"({inner},)" if parts else "()"
        else:
            text = f"{name('kind', s.kind)}({inner})"
        return f"keep({text}, x[{start}:{at}], {name('s', s)})" if whole else text

    text = f"lambda x: {written(structure, 0, True)}"
    build: Callable[[Sequence[Any]], Any] = eval(text, names)
    return build


def _begin(leaves: Any, s: Structure) -> Any:
    """An object that is filled when somebody looks at it; so may the leaves be."""
    if type(leaves) is list and not _plain(leaves):
        return _build(s, iter(leaves))
    x = object.__new__(s.kind)
    x.__dict__[_KEPT] = (leaves, s, next(_serials))
    return x


def fill(x: Any) -> bool:
    """Give an object of a lazy class its attributes, if it began without them."""
    own = x.__dict__
    if _KEPT not in own:
        return False
    leaves, s, _ = own[_KEPT]
    own |= _build(s, iter(leaves), False).__dict__
    return True


def _plain(leaves: list[Any]) -> bool:
    """Whether no leaf was replaced by what is none itself."""
    kinds = {type(leaf) for leaf in leaves}
    return kinds.isdisjoint(_INNER) and kinds.isdisjoint(_registry)


def _keep(x: Any, leaves: list[Any], s: Structure) -> Any:
    """Keep with an object that never changes what it flattens to."""
    if _plain(leaves):
        x.__dict__[_KEPT] = (leaves, s, next(_serials))
    return x


def _build(s: Structure, leaves: Any, outer: bool = True) -> Any:
    if s.kind is None:
        return next(leaves)
    if s.kind == "none":
        return None
    if outer and s.kind in _frozen and s.frozen:
        own = list(itertools.islice(leaves, s.leaves))
        return _keep(_build(s, iter(own), False), own, s)
    children = [_build(c, leaves, outer) for c in s.children]
    if s.kind in _registry:
        return _registry[s.kind][1](s.key, children)
    if s.kind is dict:
        return dict(zip(s.key, children, strict=True))
    if s.kind in (tuple, list):
        return s.kind(children)
    return s.kind(*children)


def map(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Apply a function leaf by leaf; further trees must have the same structure."""
    leaves, structure = flatten(tree)
    rest = []
    for o in others:
        more, s = flatten(o)
        if s != structure:
            raise ValueError("pytrees of different structure")
        rest.append(more)
    return unflatten(
        structure, [function(*xs) for xs in zip(leaves, *rest, strict=True)]
    )


def leaves(tree: Any) -> list[Any]:
    """The leaves from left to right."""
    return flatten(tree)[0]


def partition(tree: Any, chosen: Iterable[bool]) -> tuple[Any, Any]:
    """Two trees of one structure: chosen leaves in the first, the others in the second.

    None stands where a leaf is in the other tree. :func:`combine` is the inverse.
    """
    leaves, structure = flatten(tree)
    flags = list(chosen)
    ours = [x if f else None for x, f in zip(leaves, flags, strict=True)]
    theirs = [None if f else x for x, f in zip(leaves, flags, strict=True)]
    return unflatten(structure, ours), unflatten(structure, theirs)


def combine(first: Any, second: Any) -> Any:
    """The tree with each leaf from whichever of two trees has it.

    Raises:
        ValueError: the trees are of different structure, or both have a leaf.
    """
    if first is None or second is None:
        return second if first is None else first
    kind = type(first)
    if kind is not type(second):
        raise ValueError("pytrees of different structure")
    if kind in _registry:
        parts, build = _registry[kind]
        (ours, key), (theirs, other) = parts(first), parts(second)
        if key != other:
            raise ValueError("pytrees of different structure")
        return build(key, [combine(a, b) for a, b in zip(ours, theirs, strict=True)])
    if kind is dict:
        if list(first) != list(second):
            raise ValueError("pytrees of different structure")
        return {name: combine(first[name], second[name]) for name in first}
    if isinstance(first, (tuple, list)):
        both = [combine(a, b) for a, b in zip(first, second, strict=True)]
        return kind(*both) if hasattr(first, "_fields") else kind(both)
    raise ValueError("both pytrees have this leaf")
