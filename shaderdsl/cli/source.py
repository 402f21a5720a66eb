"""Ops in the user's own files: ``FILE:OP`` → ops and arguments that suit them."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from ..errors import ShaderError
from ..ir.signature import Dim, terms
from ..op import Op
from ..tracing import Spec, spec

__all__ = ["arguments", "find_ops", "load_module", "pairs"]


def pairs(text: str | None, what: str) -> dict[str, str]:
    """``"t=16,d=512"`` → ``{"t": "16", "d": "512"}``."""
    from . import UsageError

    found: dict[str, str] = {}
    for part in (text or "").split(","):
        if not part.strip():
            continue
        name, equals, value = part.partition("=")
        if not equals or not name.strip() or not value.strip():
            raise UsageError(f"{what} wants name=value pairs, not {part!r}")
        found[name.strip()] = value.strip()
    return found


def find_ops(target: str) -> tuple[ModuleType, list[Op]]:
    """The ops that ``FILE``, ``FILE:OP`` or ``package.module:OP`` means.

    Raises:
        ShaderError: no such file, no such op, or the file itself raises.
    """
    file, _, name = target.rpartition(":") if ":" in target else (target, "", "")
    module = load_module(file)
    ops = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, Op) and not key.startswith("_")
    }
    if not name:
        own = [o for o in ops.values() if o.__module__.startswith(module.__name__)]
        if not own:
            raise ShaderError(
                f"{file} defines no op", cure="decorate a function with @sd.op(…)"
            )
        return module, own
    if name not in ops:
        known = ", ".join(ops) or "none"
        raise ShaderError(
            f"{file} has no op called {name!r}", cure=f"its ops are: {known}"
        )
    return module, [ops[name]]


def load_module(file: str) -> ModuleType:
    """A Python file, or a module by its dotted name, imported."""
    path = Path(file)
    is_file = path.suffix == ".py" or path.exists()
    try:
        if not is_file:
            return importlib.import_module(file)
        found = importlib.util.spec_from_file_location(path.stem, path)
        if found is None or found.loader is None or not path.is_file():
            raise ShaderError(f"there is no Python file {file}")
        module = importlib.util.module_from_spec(found)
        sys.modules[path.stem] = module  # dataclasses and pickle look there
        sys.path.insert(0, str(path.resolve().parent))  # its neighbours can be imported
        found.loader.exec_module(module)
        return module
    except ShaderError:
        raise
    except ModuleNotFoundError as error:
        if not is_file and error.name and file.startswith(error.name):
            raise ShaderError(
                f"there is no file or module {file!r}",
                cure="write FILE.py:OP or package.module:OP",
            ) from error
        raise ShaderError(f"{file}: {error}", where=_line_of(error, file)) from error
    except Exception as error:
        raise ShaderError(
            f"{file} cannot be imported: {type(error).__name__}: {error}",
            where=_line_of(error, file),
        ) from error


def _line_of(error: Exception, file: str) -> str | None:
    if isinstance(error, SyntaxError):
        return f"{error.filename or file}:{error.lineno or 1}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if Path(f.filename).name == Path(file).name]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else None


def arguments(
    op: Op, sizes: Mapping[str, str], dtypes: Mapping[str, str]
) -> tuple[list[Spec], dict[str, int], dict[str, int]]:
    """Shapes to look at an op with.

    Args:
        op: the op.
        sizes: axis → size; ``...`` is the size of one leading axis, and so is, in an op
            with ``...``, any name that is no axis of it, in order. Axes that are not
            named get 16.
        dtypes: operand → dtype; f32 where none is given.

    Returns:
        the operands, the axes that only a keyword can give, and every axis' size.
    """
    from . import UsageError

    known = dict(op.sizes)
    names = {a for a in op.signature.axes() if a.isidentifier()}
    listed = ", ".join(sorted(names))
    kinds = {d.kind for o in op.signature.inputs for d in o}
    leading = []
    for name, value in sizes.items():
        if name not in names:
            leading.append(name)
        if name not in names and "ellipsis" not in kinds:
            raise UsageError(f"{op.name} has no axis {name!r}; its axes are {listed}")
        if not value.isdigit():
            raise UsageError(f"the size of {name!r} is a number, not {value!r}")
        known[name] = int(value)
    operands = op.operands
    for name in dtypes:
        if name not in operands:
            raise UsageError(
                f"{op.name} has no operand {name!r}; they are {', '.join(operands)}"
            )

    def shape(dim: Dim) -> list[int]:
        match dim.kind:
            case "ellipsis":
                return [axis(name) for name in leading or ["..."]]
            case "derived":
                return [
                    sum(
                        sign * (int(name) if name.isdigit() else axis(name))
                        for sign, name in terms(dim.text)
                    )
                ]
        parts = [axis(name) for name in dim.axes]
        return [sum(parts) if dim.kind == "joined" else math.prod(parts)]

    def axis(name: str) -> int:
        return known.setdefault(name, 16)

    specs = [
        spec(dtypes.get(name, "f32"), *(n for dim in dims for n in shape(dim)))
        for name, dims in zip(operands, op.signature.inputs)
    ]
    read = {name for dims in op.signature.inputs for dim in dims for name in dim.axes}
    given = {
        name: axis(name)
        for dims in op.signature.outputs
        for dim in dims
        if dim.kind in ("merged", "joined")
        for name in dim.axes
        if name not in read and name not in op.sizes
    }
    return specs, given, known
