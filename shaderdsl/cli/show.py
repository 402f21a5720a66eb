"""Print what an op compiles to: its kernels as WGSL, exactly as a call runs them.

shaderdsl show model.py:rms_norm --sizes t=16,d=512
shaderdsl show model.py:rms_norm --backward --explain
shaderdsl show model.py:rms_norm --math
"""

from __future__ import annotations

import argparse
from typing import Any

__all__ = ["add_arguments", "kernel_heading", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="FILE:OP", help="or package.module:OP")
    parser.add_argument(
        "--sizes",
        metavar="t=16,d=512",
        help="sizes of axes, ... for leading ones (default: 16 each)",
    )
    parser.add_argument(
        "--dtypes", metavar="ids=i32", help="dtypes of operands (default: f32)"
    )
    parser.add_argument(
        "--backward", action="store_true", help="the kernels of the pullback"
    )
    parser.add_argument(
        "--math", action="store_true", help="the formula as LaTeX, no kernels"
    )
    parser.add_argument(
        "--explain", action="store_true", help="why each kernel begins and ends there"
    )


def run(args: argparse.Namespace) -> int:
    import shaderdsl as sd

    from .source import arguments, find_ops, pairs

    _, ops = find_ops(args.target)
    sizes, dtypes = pairs(args.sizes, "--sizes"), pairs(args.dtypes, "--dtypes")
    for op in ops:
        specs, given, known = arguments(op, sizes, dtypes)
        if args.math:
            print("\n".join(_definitions(op, specs, args.backward, math=True)))
            continue
        lowered = sd.lower(op, *specs, backward=args.backward, **given)
        axes = ", ".join(f"{name}={size}" for name, size in known.items())
        part = "the pullback of " if args.backward else ""
        print(f"// {part}{op.name}: {op.signature.text}  ({axes})")
        for text in _definitions(op, specs, args.backward, math=False):
            print("\n".join(f"//{line}" for line in text.splitlines()[1:]))
        for number, kernel in enumerate(lowered.kernels):
            print(f"\n// {kernel_heading(number, kernel)}")
            print(kernel.wgsl.strip())
        if args.explain:
            print()
            print("\n".join(f"// {line}" for line in lowered.explain().splitlines()))
    return 0


def kernel_heading(number: int, kernel: Any) -> str:
    """One line about a kernel."""
    groups = "×".join(str(n) for n in kernel.workgroups)
    return (
        f"kernel {number}: {kernel.name} ({kernel.archetype}), {groups} workgroups, "
        f"{kernel.bytes:,} bytes, {kernel.flops:,} FLOPs"
    )


def _definitions(op: Any, specs: list[Any], backward: bool, math: bool) -> list[str]:
    """The op's formula, or those of its derivatives."""
    if not backward:
        return [op.show(math=math)]
    floats = [n for n, x in zip(op.operands, specs) if x.dtype in ("f32", "f16")]
    return [op.show(derivative=name, math=math) for name in floats]
