"""Print what an op compiles to: its kernels as WGSL, exactly as a call runs them.

shaderdsl show model.py:rms_norm                        every axis of size 16
shaderdsl show model.py:rms_norm --sizes t=16,d=512     names besides the op's axes
                                                        stand for leading ones ("...")
shaderdsl show model.py:rms_norm --backward --explain   the derivative, and why each
                                                        kernel begins and ends there
shaderdsl show model.py:rms_norm --math                 the formula as LaTeX
shaderdsl show model.py:rms_norm --html page.html       all of it as a page
shaderdsl show model.py:rms_norm --json | jq '.kernels[].name'

Each kernel is preceded by the lines of your file that it comes from.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
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
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page with all of it"
    )
    parser.add_argument(
        "--json", action="store_true", help="kernels and formulas for a program"
    )


def run(args: argparse.Namespace) -> int:
    import shaderdsl as sd

    from ..interop.html import op_html
    from .source import arguments, find_ops, pairs
    from .terminal import print_wgsl

    _, ops = find_ops(args.target)
    sizes, dtypes = pairs(args.sizes, "--sizes"), pairs(args.dtypes, "--dtypes")
    found, pages = [], []
    for op in ops:
        specs, given, known = arguments(op, sizes, dtypes)
        if args.math:
            print("\n".join(_definitions(op, specs, args.backward, math=True)))
            continue
        lowered = sd.lower(op, *specs, backward=args.backward, **given)
        if args.json:
            found.append(_as_data(op, specs, known, args.backward, lowered))
        elif args.html:
            pages.append(op_html(op, math=False) + lowered._repr_html_())
        else:
            print_wgsl(_as_text(op, specs, known, args, lowered))
    if args.json:
        print(json.dumps(found[0] if len(found) == 1 else found, indent=1))
    if pages:
        args.html.write_text(_PAGE.format("<hr>".join(pages)), encoding="utf-8")
        print(f"page: {args.html}")
    return 0


def _as_text(op: Any, specs: Any, known: Any, args: Any, lowered: Any) -> str:
    from ..interop.lines import source_lines

    axes = ", ".join(f"{name}={size}" for name, size in known.items())
    part = "the pullback of " if args.backward else ""
    lines = [f"// {part}{op.name}: {op.signature.text}  ({axes})"]
    for text in _definitions(op, specs, args.backward, math=False):
        lines += [f"//{line}" for line in text.splitlines()[1:]]
    for about in _costs(op, specs, args.backward).values():
        lines.append(f"// {about['flops']} FLOPs, at least {about['bytes']} bytes")
    for number, kernel in enumerate(lowered.kernels):
        lines += ["", f"// {kernel_heading(number, kernel)}"]
        lines += [f"// {line}" for line in source_lines(kernel)]
        lines.append(kernel.wgsl.strip())
    if args.explain:
        lines += ["", *(f"// {line}" for line in lowered.explain().splitlines())]
    return "\n".join(lines)


def _as_data(op: Any, specs: Any, known: Any, backward: bool, lowered: Any) -> Any:
    from ..interop.lines import source_lines

    return {
        "op": op.name,
        "signature": op.signature.text,
        "backward": backward,
        "sizes": known,
        "formula": [
            line.strip()
            for text in _definitions(op, specs, backward, math=False)
            for line in text.splitlines()[1:]
        ],
        "cost": _costs(op, specs, backward),
        "kernels": [
            {
                "name": k.name,
                "archetype": k.archetype,
                "workgroup_size": k.workgroup_size,
                "workgroups": k.workgroups,
                "bytes": k.bytes,
                "flops": k.flops,
                "reason": k.reason,
                "lines": source_lines(k),
                "wgsl": k.wgsl,
            }
            for k in lowered.kernels
        ],
    }


def kernel_heading(number: int, kernel: Any) -> str:
    """One line about a kernel."""
    groups = "×".join(str(n) for n in kernel.workgroups)
    return (
        f"kernel {number}: {kernel.name} ({kernel.archetype}), {groups} workgroups, "
        f"{kernel.bytes:,} bytes, {kernel.flops:,} FLOPs"
    )


def _wanted(op: Any, specs: list[Any], backward: bool) -> list[str | None]:
    """The op, or its derivatives with respect to what is floating point."""
    if not backward:
        return [None]
    return [n for n, x in zip(op.operands, specs) if x.dtype in ("f32", "f16")]


def _definitions(op: Any, specs: list[Any], backward: bool, math: bool) -> list[str]:
    """The op's formula, or those of its derivatives."""
    return [op.show(derivative=n, math=math) for n in _wanted(op, specs, backward)]


def _costs(op: Any, specs: list[Any], backward: bool) -> dict[str, dict[str, str]]:
    """Operations and bytes in the sizes of the axes."""
    costs = {}
    for name in _wanted(op, specs, backward):
        cost = op.cost(derivative=name)
        flops, moved = (
            str(e).replace("**", "^").replace("*", "·")
            for e in (cost.flops, cost.bytes)
        )
        costs[name or "value"] = {"flops": flops, "bytes": moved}
    return costs


_PAGE = """<!doctype html>
<meta charset="utf-8">
<title>shaderdsl</title>
<body style="font-family: system-ui, sans-serif; background: #fff; color: #111">
{}
</body>
"""
