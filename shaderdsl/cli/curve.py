"""The loss curve as a picture."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

__all__ = ["draw"]


def draw(history: Sequence[dict[str, float]], path: Path) -> str:
    """Draws the losses of a run into a PNG; returns what to say of it.

    The picture is written aside and renamed. Without matplotlib nothing is drawn.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "not drawn: it needs matplotlib (pip install 'shaderdsl[plot]')"
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for key, style, label in (
        ("loss", "-", "training text"),
        ("held_out", "o-", "held-out text, a sample"),
        ("whole", "*", "held-out text, all of it"),
    ):
        points = [(at["step"], at[key]) for at in history if key in at]
        if points:
            axes.plot(*zip(*points), style, label=label, markersize=5, linewidth=1.2)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats/byte)")
    axes.grid(alpha=0.3)
    if history:
        axes.legend()
    aside = path.with_name(f".{path.name}.tmp")
    figure.savefig(aside, format="png", dpi=120)
    os.replace(aside, path)
    return str(path)
