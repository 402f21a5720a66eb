"""Modules: frozen dataclasses that are pytrees.

Fields that hold arrays, modules or tuples of them are children. Fields made with
:func:`static` are configuration: hashable, part of the structure, never a leaf.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, dataclass_transform

from .. import tree
from ..array import Array, asarray
from ..errors import CheckpointError
from ..ir.expr import user_location

__all__ = [
    "Module",
    "combine",
    "map_modules",
    "named_arrays",
    "partition",
    "static",
]


def static(*, default: Any = dataclasses.MISSING) -> Any:
    """A keyword-only field of configuration: hashable, part of the structure."""
    return dataclasses.field(default=default, metadata={"static": True}, kw_only=True)


class _Field:
    """A field in its class, which an object's own values hide once it has them.

    What a compiled function returns is mostly handed to the next call as it is, so it
    begins without attributes and gets them when the first one is asked for.
    """

    def __init__(self, name: str, default: Any):
        self.name, self.default = name, default

    def __get__(self, owner: Any, cls: type) -> Any:
        if owner is not None and tree.fill(owner):
            return owner.__dict__[self.name]
        if owner is None and self.default is not dataclasses.MISSING:
            return self.default
        raise AttributeError(f"{cls.__name__!r} object has no attribute {self.name!r}")


@dataclass_transform(
    eq_default=False, frozen_default=True, field_specifiers=(static, dataclasses.field)
)
class Module:
    """Base of layers and models; a subclass becomes a frozen dataclass and a pytree.

    ``sd.value_and_grad(loss)(model)`` gives gradients as a module of the same class, so
    ``gradient.layers[0].mlp.up_proj.weight`` is what it says.

    Example:
        >>> class Affine(sd.nn.Module):
        ...     weight: sd.Array
        ...     bias: sd.Array
        ...     def __call__(self, x):
        ...         return x * self.weight + self.bias
    """

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
        children: list[str] = []
        configuration: list[str] = []
        for f in dataclasses.fields(cls):  # type: ignore[arg-type]
            (configuration if f.metadata.get("static") else children).append(f.name)

        names = (*configuration, *children)

        def parts(x: Any) -> tuple[list[Any], Any]:
            key = tuple(getattr(x, n) for n in configuration)
            return [getattr(x, n) for n in children], key

        def build(key: Any, values: list[Any]) -> Any:
            # Leaves may be anything (None, symbols, cotangents): checks of __init__
            # were made when the module was first built.
            new = object.__new__(cls)
            # Frozen to everybody else.
            new.__dict__.update(zip(names, (*key, *values), strict=True))
            return new

        for f in dataclasses.fields(cls):  # type: ignore[arg-type]
            setattr(cls, f.name, _Field(f.name, f.default))
        tree.register(cls, parts, build, frozen=True, lazy=True)

    def replace(self, **changes: Any) -> Any:
        """The same module with other values in these fields."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    def parameters(self) -> dict[str, Array]:
        """Every array under its attribute path: ``{"layers.0.norm1.weight": …}``."""
        return dict(named_arrays(self))

    def with_parameters(self, named: Mapping[str, Any]) -> Any:
        """The same module with these arrays, named as :meth:`parameters` names them.

        Each takes the dtype of the one in whose place it comes.

        Example:
            >>> np.savez("net.npz", **net.parameters())
            >>> net = net.with_parameters(np.load("net.npz"))

        Raises:
            CheckpointError: names or shapes are not those of the module.
        """
        own = self.parameters()
        wrong = [f"{k}: missing" for k in own if k not in named]
        wrong += [f"{k}: not in this module" for k in named if k not in own]
        new = {k: asarray(named[k], x.dtype) for k, x in own.items() if k in named}
        wrong += [
            f"{k}: shape {x.shape} in place of {own[k].shape}"
            for k, x in new.items()
            if x.shape != own[k].shape
        ]
        if wrong:
            raise CheckpointError(
                f"these are not the parameters of this {type(self).__name__}: "
                + "; ".join(wrong),
                where=user_location(),
            )
        return tree.unflatten(tree.flatten(self)[1], [new[k] for k in own])

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles begin with."""
        for f in dataclasses.fields(self):  # type: ignore[arg-type]
            getattr(self, f.name)  # which fills a module that began without them
        return tree.attributes(self)

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__}("]
        for f in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if value is not None:
                text = _show(value).replace("\n", "\n  ")
                lines.append(f"  {f.name}: {text}")
        return "\n".join(lines) + "\n)" if len(lines) > 1 else lines[0] + ")"


def _show(x: Any) -> str:
    if isinstance(x, Array):
        return f"{x.dtype}{list(x.shape)}"
    if isinstance(x, (tuple, list)) and x and isinstance(x[0], Module):
        return f"{len(x)} × {x[0]!r}"
    return repr(x)


def named_arrays(x: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of a pytree of modules with their paths, in the order of its leaves."""
    if x is None:
        return
    if isinstance(x, Module):
        for f in dataclasses.fields(x):  # type: ignore[arg-type]
            if not f.metadata.get("static"):
                yield from named_arrays(getattr(x, f.name), _join(path, f.name))
    elif isinstance(x, (tuple, list)):
        for k, v in enumerate(x):
            yield from named_arrays(v, _join(path, str(k)))
    elif isinstance(x, dict):
        for k, v in x.items():
            yield from named_arrays(v, _join(path, str(k)))
    elif tree.registered(x):
        for k, v in enumerate(tree.children(x)):
            yield from named_arrays(v, _join(path, str(k)))
    else:
        yield path, x


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def map_modules(
    x: Any, kind: type, visit: Callable[[str, Any], Any], path: str = ""
) -> Any:
    """A pytree of modules with those of a kind replaced by ``visit(path, module)``."""
    if isinstance(x, kind):
        return visit(path, x)
    if isinstance(x, Module):
        changes = {}
        for f in dataclasses.fields(x):  # type: ignore[arg-type]
            if not f.metadata.get("static"):
                old = getattr(x, f.name)
                new = map_modules(old, kind, visit, _join(path, f.name))
                if new is not old:
                    changes[f.name] = new
        return x.replace(**changes) if changes else x
    if type(x) in (tuple, list):
        parts = [
            map_modules(v, kind, visit, _join(path, str(k))) for k, v in enumerate(x)
        ]
        return type(x)(parts) if any(a is not b for a, b in zip(parts, x)) else x
    return x


def partition(model: Any, chosen: Callable[[str, Any], bool]) -> tuple[Any, Any]:
    """The parameters that ``chosen(path, parameter)`` names, and all the others.

    Two trees of the model's structure, with None where a parameter is in the other
    one. A gradient to the first gives the others none: no array and no kernel.
    Optimisers take the first as they take a model.

    Example:
        >>> ours, frozen = sd.nn.partition(model, lambda path, _: "mlp" in path)
        >>> loss, g = sd.value_and_grad(lambda p: f(sd.nn.combine(p, frozen)))(ours)
    """
    return tree.partition(model, [chosen(p, x) for p, x in named_arrays(model)])


def combine(first: Any, second: Any) -> Any:
    """The model from the two parts that :func:`partition` gave."""
    return tree.combine(first, second)
