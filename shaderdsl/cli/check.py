"""Test ops: forward against a NumPy reference in float64, gradients against its
differences, over shapes and values that Hypothesis draws.

The reference of an op called NAME is the function NAME_reference in the same file, if
there is one; otherwise the op's own definition, evaluated in float64. A dictionary
NAME_draws there holds further keywords of shaderdsl.testing.check_op, for instance
{"ids": {"ids": ("v", None)}} for an operand `ids` that indexes the axis v.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from types import ModuleType
from typing import Any

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", metavar="FILE[:OP]", help="a file's ops, or one; or package.module"
    )
    parser.add_argument(
        "--json", action="store_true", help="one object a line: op, passed, seconds"
    )
    parser.add_argument(
        "--examples", type=int, default=25, metavar="N", help="cases an op (25)"
    )
    parser.add_argument(
        "--seed", type=int, metavar="N", help="draw other cases, the same for each N"
    )


def run(args: argparse.Namespace) -> int:
    from importlib.util import find_spec

    from ..errors import ShaderError
    from .source import find_ops

    module, ops = find_ops(args.target)
    if find_spec("hypothesis") is None:
        raise ShaderError(
            "checking needs the package hypothesis, which is not installed",
            cure="pip install 'shaderdsl[testing]'",
        )
    from ..testing import check_op

    failed = 0
    for number, op in enumerate(ops, 1):
        if not args.json:
            print(f"[{number}/{len(ops)}] {op.name} ...", end=" ", flush=True)
        problem = None
        start = time.perf_counter()
        try:
            options = {"examples": args.examples, "seed": args.seed}
            check_op(op, **options | _options(module, op))
        except (AssertionError, ShaderError) as error:
            failed += 1
            problem = str(error)
        seconds = time.perf_counter() - start
        if args.json:
            about = {"op": op.name, "passed": problem is None, "seconds": seconds}
            print(json.dumps(about | {"problem": problem}), flush=True)
            continue
        print("FAILED" if problem else f"ok ({seconds:.1f} s)", flush=True)
        if problem:
            print(problem, file=sys.stderr)
    if not args.json:
        print(f"{len(ops) - failed} passed, {failed} failed")
    return 1 if failed else 0


def _options(module: ModuleType, op: Any) -> dict[str, Any]:
    """What ``check_op`` is given besides the op."""
    from ..ops.registry import REGISTRY

    entry = REGISTRY.get(op.name)
    if entry is not None and entry.op is op:  # one of ours
        return {
            "reference": entry.reference,
            "gradients": entry.smooth,
            "kinds": entry.kinds,
            "options": entry.options,
            "ids": entry.ids,
            "bools": entry.bools,
            "positive": entry.positive,
            "nonempty": entry.nonempty,
        }
    options = {"reference": getattr(module, f"{op.name}_reference", None)}
    return options | getattr(module, f"{op.name}_draws", {})
