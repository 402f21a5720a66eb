"""A failing case as a script that repeats it."""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from ..op import Op
from .strategies import Case


def script(case: Case, reference: Callable[..., Any] | None = None) -> str:
    """Stand-alone Python that makes the operands, runs the op and its pullback, and
    compares both with float64.

    Args:
        case: the case.
        reference: used where it can be imported; ``op.reference`` otherwise.
    """
    lines = ["import numpy as np", "import shaderdsl as sd"]
    lines += ["from shaderdsl.testing import Case, check_case, make"]
    lines += ["from shaderdsl.testing.strategies import Operand", ""]
    lines += [_op_text(case.op), _reference_text(reference), ""]
    lines.append("case = Case(")
    lines.append("    op,")
    lines.append("    (")
    for o in case.operands:
        lines.append(
            f"        Operand({o.name!r}, {o.shape!r}, {o.dtype!r}, {o.kind!r}, "
            f"{o.seed}, {o.layout!r}, {dict(o.more)!r}),"
        )
    lines.append("    ),")
    lines.append(f"    {dict(case.options)!r},")
    lines.append(f"    {dict(case.sizes)!r},")
    lines.append(")")
    lines.append("arrays = case.arrays()")
    lines.append("print(op(*arrays, **case.keywords()))")
    lines.append("print(op.reference(*arrays, **case.keywords()))")
    lines.append("check_case(case, reference)")
    return "\n".join(lines) + "\n"


def _import_line(f: Any, name: str, local: str) -> str | None:
    """``from module import name as local`` where that gives this very object."""
    module = getattr(f, "__module__", None)
    if not module or module == "__main__":
        return None
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
    return f"from {module} import {name} as {local}" if found is f else None


def _op_text(op: Op) -> str:
    line = _import_line(op, op.name, "op")
    if line is not None:
        return line
    try:
        source = textwrap.dedent(inspect.getsource(op.function))
    except (OSError, TypeError):
        return f"op = ...  # {op!r}, defined at {op.where}"
    return f"{source}\nop = {op.name}"


def _reference_text(reference: Callable[..., Any] | None) -> str:
    if reference is None:
        return "reference = None"
    line = _import_line(reference, getattr(reference, "__name__", ""), "reference")
    if line is not None:
        return line
    try:
        source = textwrap.dedent(inspect.getsource(reference))
    except (OSError, TypeError):
        source = "?"
    if source.lstrip().startswith("def "):
        return f"{source}\nreference = {reference.__name__}"
    shown = "\n".join("# " + s for s in source.rstrip().splitlines())
    return f"{shown}\nreference = None  # the definition above, in NumPy"
