"""The table of docs/performance.md from one or two files of `shaderdsl bench --json`.

    PYTHONPATH=. python benchmarks/table.py first.json second.json
    PYTHONPATH=. python benchmarks/table.py first.json second.json --into FILE.md

prints it, or puts it in place of the one in a Markdown file (the table whose first
columns are "work" and "kernels"). A row is met if all runs meet its target; else its
cell says how far the worse one is from it: measured / target. Beside a peer's figure
stands how many times as fast as that peer ours was in the same run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shaderdsl.bench.report import faster, less_is_better, number
from shaderdsl.bench.rows import ROWS

PEERS = {
    "torch": "PyTorch eager",
    "torch.compile": "torch.compile",
    "handwritten": "WGSL by hand",
}
START = "| work | kernels |"


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    """A run's rows by name."""
    return {r["name"]: r for r in json.loads(path.read_text("utf-8"))["rows"]}


def table(runs: Sequence[Mapping[str, dict[str, Any]]]) -> str:
    """All rows of the runs, in the order of the benchmark's own table."""
    counted = (
        ["first run", "second run"][: len(runs)] if len(runs) > 1 else ["measured"]
    )
    head = ["work", "kernels", *counted, "target", "met", *PEERS.values()]
    known = [r.name for r in ROWS]
    names = [n for n in known if any(n in run for run in runs)]
    names += [n for run in runs for n in run if n not in known and n not in names]
    lines = [head, ["---"] * len(head)]
    for name in dict.fromkeys(names):
        lines.append(line(name, [run.get(name) for run in runs]))
    return "\n".join(
        "|" + "|".join(f" {c} " if c != "---" else c for c in cells) + "|"
        for cells in lines
    )


def line(name: str, found: Sequence[dict[str, Any] | None]) -> list[str]:
    """The cells of one row; a run that lacks it leaves a dash."""
    some = next(r for r in found if r is not None)
    values = [r["value"] if r is not None else None for r in found]
    kernels = [str(r["kernels"]) for r in found if r is not None and r["kernels"]]
    return [
        f"{some['title']}, {some['unit']}",
        " / ".join(dict.fromkeys(kernels)),
        *(number(v) if v is not None else "-" for v in values),
        *target(name, found),
        *(peer(p, found) for p in PEERS),
    ]


def target(name: str, found: Sequence[dict[str, Any] | None]) -> tuple[str, str]:
    """The target, and whether all runs meet it, else the worst measured / target."""
    wanted = [r["target"] for r in found if r is not None and r["target"] is not None]
    if not wanted:
        return "", ""
    some = next(r for r in found if r is not None)
    less = less_is_better(some["unit"])
    beats = next((r.beats for r in ROWS if r.name == name), None)
    text = PEERS[beats] if beats else f"{wanted[0]:,g}"
    shown = f"{'≤' if less else '≥'} {text}"
    # A target that is a peer's figure may stand in one of the runs alone.
    pairs = [
        (r["value"], wanted[0] if r["target"] is None else r["target"])
        for r in found
        if r is not None and r["value"] is not None
    ]
    if len(pairs) < len(found):
        return shown, "not measured"
    ratios = [value / goal for value, goal in pairs]
    worst = max(ratios) if less else min(ratios)
    if worst <= 1 if less else worst >= 1:
        return shown, "yes"
    return shown, f"{worst:.2f}" if abs(worst - 1) >= 0.005 else f"{worst:.3f}"


def peer(name: str, found: Sequence[dict[str, Any] | None]) -> str:
    """A peer's figure, of the first run that has it."""
    for r in found:
        if r is not None and name in r["peers"]:
            theirs = r["peers"][name]
            if r["value"] is None:
                return number(theirs)
            return f"{number(theirs)} ({faster(r['value'], theirs, r['unit'])})"
    return ""


def replaced(text: str, new: str) -> str:
    """A Markdown text with another table.

    Raises:
        ValueError: it has no such table.
    """
    start = text.find(START)
    if start < 0:
        raise ValueError(f"there is no table that begins with {START!r}")
    end = text.find("\n\n", start)
    return text[:start] + new + (text[end:] if end >= 0 else "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN.json")
    parser.add_argument("--into", type=Path, metavar="FILE.md")
    args = parser.parse_args()
    if len(args.runs) > 2:
        parser.error("one run or two")
    text = table([rows_of(path) for path in args.runs])
    if args.into:
        old = args.into.read_text("utf-8")
        args.into.write_text(replaced(old, text), "utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
