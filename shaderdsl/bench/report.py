"""Tables, JSON and the roofline plot of a benchmark."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .measure import Record


def ceilings(records: Sequence[Record]) -> tuple[float | None, float | None]:
    """GB/s of the copy and TFLOP/s of the fastest f32 product of the run, whoever's."""
    copy = [
        v
        for r in records
        if r.name == "copy" and r.value is not None
        for v in (r.value, *r.peers.values())
    ]
    product = [
        v
        for r in records
        if r.name.startswith("matmul_") and "f16" not in r.name and r.value is not None
        for v in (r.value, *r.peers.values())
    ]
    return max(copy, default=None), max(product, default=None)


def share(record: Record, copy: float | None, product: float | None) -> float | None:
    """How much of a ceiling a row reaches: of the product's in FLOPs a second where it
    multiplies, else of the copy's in bytes.
    """
    if record.seconds is None:
        return None
    if record.flops and record.unit != "GB/s":
        return record.flops / record.seconds / 1e12 / product if product else None
    if record.bytes:
        return record.bytes / record.seconds / 1e9 / copy if copy else None
    return None


def line(record: Record, peers: Sequence[str]) -> str:
    """One row as it is measured."""
    if record.value is None:
        return f"{record.name:39} {'; '.join(record.notes)}"
    parts = [f"{record.name:39} {number(record.value):>9} {record.unit:8}"]
    for peer in peers:
        value = record.peers.get(peer)
        text = "-"
        if value is not None:
            text = f"{number(value)} ({faster(record.value, value, record.unit)})"
        parts.append(f"{peer} {text:>14}")
    parts.append(f"{record.kernels:4} kernels  error {record.error:.0e}")
    parts += [f"{k}={v}" for k, v in record.more.items()]
    return "  ".join([*parts, *record.notes])


def number(value: float) -> str:
    """Three digits or so."""
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 1 else f"{value:.2g}"


def less_is_better(unit: str) -> bool:
    """Whether a row's unit is a time."""
    return unit in ("µs", "ms")


def faster(ours: float, theirs: float, unit: str) -> str:
    """How many times as fast as a peer ours is."""
    ratio = theirs / ours if less_is_better(unit) else ours / theirs
    return f"{ratio:.2f}×"


def table(records: Sequence[Record], peers: Sequence[str], targets: bool) -> str:
    """All rows in Markdown, with the ratio to the target and to the ceilings; beside a
    peer's figure stands how many times as fast ours is.
    """
    copy, product = ceilings(records)
    head = ["work", "measured", "of the ceiling"]
    head += ["target", "measured / target"] if targets else []
    head += [*peers, "kernels", "error"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for r in records:
        if r.value is None:
            cells = [r.title, "; ".join(r.notes) or "-"]
            lines.append(
                "| " + " | ".join(cells + [""] * (len(head) - len(cells))) + " |"
            )
            continue
        of = share(r, copy, product)
        of_text = f"{of:.0%}" if of is not None else ""
        cells = [r.title, f"{number(r.value)} {r.unit}", of_text]
        if targets:
            sign = "≤" if less_is_better(r.unit) else "≥"
            cells.append(f"{sign} {number(r.target)}" if r.target else "")
            cells.append(f"{r.value / r.target:.2f}" if r.target else "")
        cells += [
            f"{number(r.peers[p])} ({faster(r.value, r.peers[p], r.unit)})"
            if p in r.peers
            else "-"
            for p in peers
        ]
        cells += [str(r.kernels), f"{r.error:.0e}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_json(path: Path, head: dict[str, Any], records: Sequence[Record]) -> None:
    """Everything so far; a reader sees all of one state or of the one before."""
    partial = path.with_name(f".{path.name}.part")
    content = {**head, "rows": [r.as_dict() for r in records]}
    partial.write_text(json.dumps(content, indent=1), encoding="utf-8")
    os.replace(partial, path)


def roofline(path: Path, records: Sequence[Record], name: str) -> str:
    """Draw rates over arithmetic intensity; returns why not, or "".

    A row's FLOPs and bytes are the least that its work needs.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return "matplotlib is not installed: no plot (install shaderdsl[plot])"
    copy, product = ceilings(records)
    points = [
        (r.flops / r.bytes, r.flops / r.seconds / 1e12, r)
        for r in records
        if r.seconds and r.flops and r.bytes
    ]
    # What only moves bytes has no arithmetic to speak of: it stands at the left edge.
    moved = [
        (1 / 16, r.bytes / r.seconds / 1e12 / 16, r)
        for r in records
        if r.seconds and r.bytes and not r.flops
    ]
    if not points and not moved:
        return "nothing to plot was measured"
    figure, axes = plt.subplots(figsize=(9, 6), layout="constrained")
    right = max([x for x, _, _ in points] + [1024.0])
    xs = [1 / 32 * 1.2**k for k in range(200) if 1 / 32 * 1.2**k <= 2 * right]
    if copy:
        limit = [x * copy / 1e3 for x in xs]
        if product:
            limit = [min(y, product) for y in limit]
        axes.plot(xs, limit, color="0.4", lw=1, label=_limits(copy, product))
    for x, y, r in [*points, *moved]:
        axes.plot(x, y, "o", ms=4, color="C0" if r.flops else "C1")
        axes.annotate(
            r.name, (x, y), fontsize=6, xytext=(4, -3), textcoords="offset points"
        )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="FLOPs a byte (rows that only move bytes stand at 1/16)",
        ylabel="TFLOP/s",
        title=f"{name}: measured, and the ceilings of the same run",
    )
    axes.legend(loc="lower right", fontsize=8)
    axes.grid(True, which="major", alpha=0.3)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return ""


def _limits(copy: float, product: float | None) -> str:
    text = f"copy {number(copy)} GB/s"
    return text if product is None else f"{text}, product {number(product)} TFLOP/s"
