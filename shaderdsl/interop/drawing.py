"""A program as a picture: kernels as boxes with their stages, arrays as arrows.

Boxes stand in layers, each below what it reads; within a layer they are ordered by the
mean place of what they read, a few times down and up, so that few arrows cross.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from ..codegen.program import Program, Scratch, Tensor
from ..ir.stage import Stage

_ROW, _PAD, _GAP_X, _GAP_Y = 17, 9, 28, 46
_CHAR = 6.7  # width of a character at 11 px
_SWEEPS = 4
_SIGNS = {"sum": "Σ", "max": "max", "min": "min", "prod": "∏"}


class Drawing(str):
    """SVG text; notebooks show the picture."""

    __slots__ = ()

    def _repr_svg_(self) -> str:
        return str(self)

    def save(self, path: str | Path) -> Path:
        """Write it to a file."""
        target = Path(path)
        target.write_text(self, encoding="utf-8")
        return target


@dataclass
class _Box:
    """A kernel, or an array that comes in or goes out."""

    title: str
    rows: list[str]
    kind: str  # "kernel", "input" or "output"
    about: str = ""
    layer: int = 0
    x: float = 0.0
    y: float = 0.0
    reads: dict[int, list[str]] = field(default_factory=dict)  # box → arrays

    @property
    def width(self) -> float:
        longest = max(len(t) for t in [self.title, *self.rows])
        return longest * _CHAR + 2 * _PAD

    @property
    def height(self) -> float:
        return (1 + len(self.rows)) * _ROW + _PAD


def draw_program(program: Program) -> Drawing:
    """The picture of a program."""
    boxes = _boxes(program)
    layers = _layers(boxes)
    _order(boxes, layers)
    width, height = _place(boxes, layers)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" '
        f'height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" '
        'font-family="ui-monospace, monospace" font-size="11">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#667"/>'
        "</marker></defs>",
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#fff"/>',
    ]
    for number, box in enumerate(boxes):
        parts += [_arrow(boxes[k], box, names) for k, names in box.reads.items()]
        assert number not in box.reads
    parts += map(_drawn, boxes)
    return Drawing("\n".join([*parts, "</svg>"]))


# ------------------------------------------------------------------ what there is


def _boxes(program: Program) -> list[_Box]:
    boxes: list[_Box] = []
    owner: dict[Tensor, int] = {}
    used = {b.tensor for k in program.kernels for b in k.bindings}
    for stage in program.inputs:
        if stage in used or stage in program.outputs:
            owner.setdefault(stage, len(boxes))
            boxes.append(_Box(_typed(stage), [], "input"))
    for number, kernel in enumerate(program.kernels):
        box = _Box(f"{number}. {kernel.name}", [], "kernel")
        groups = " × ".join(map(str, kernel.workgroups))
        box.about = (
            f"{kernel.archetype}, {groups} workgroups, {kernel.bytes:,} bytes, "
            f"{kernel.flops:,} FLOPs. {kernel.reason}"
        )
        stored = set(kernel.writes)
        box.rows = [_computed(s, s in stored) for s in kernel.members]
        for binding in kernel.bindings:
            # What is updated in place is read from whoever had it before.
            source = owner.get(_whole(binding.tensor, program))
            if source is not None and source != len(boxes):
                box.reads.setdefault(source, []).append(binding.tensor.name)
        written = [b.tensor for b in kernel.bindings if b.access == "read_write"]
        for tensor in [*written, *kernel.writes]:
            owner[_whole(tensor, program)] = len(boxes)
            owner[tensor] = len(boxes)
        boxes.append(box)
    for stage in dict.fromkeys(program.outputs):
        source = owner.get(stage, owner.get(_whole(stage, program)))
        box = _Box(_typed(stage), [], "output")
        if source is not None:
            box.reads[source] = [stage.name]
        boxes.append(box)
    return boxes


def _whole(tensor: Tensor, program: Program) -> Tensor:
    """The memory that a tensor lies in."""
    while isinstance(tensor, Stage) and tensor in program.places:
        tensor = program.places[tensor][0]
    return tensor


def _typed(stage: Stage | Scratch) -> str:
    shape = stage.shape if isinstance(stage, Stage) else (stage.size,)
    return f"{stage.name}: {stage.dtype}[{', '.join(map(str, shape))}]"


def _computed(stage: Stage, stored: bool) -> str:
    reads = ", ".join(dict.fromkeys(n.data.name for n in stage.loads))
    sign = f" = {_SIGNS[stage.monoid]}" if stage.monoid else " ="
    keeps = "▪ " if stored else "  "
    return f"{keeps}{_typed(stage)}{sign} ({reads})"


# ------------------------------------------------------------------ where it stands


def _layers(boxes: Sequence[_Box]) -> list[list[int]]:
    for box in boxes:
        box.layer = max((boxes[k].layer + 1 for k in box.reads), default=0)
    # An array that comes in stands just above its first reader.
    first: dict[int, int] = {}
    for box in boxes:
        for k in box.reads:
            first[k] = min(first.get(k, box.layer), box.layer)
    for k, layer in first.items():
        if boxes[k].kind == "input":
            boxes[k].layer = layer - 1
    layers: list[list[int]] = [
        [] for _ in range(1 + max((b.layer for b in boxes), default=-1))
    ]
    for number, box in enumerate(boxes):
        layers[box.layer].append(number)
    return layers


def _order(boxes: Sequence[_Box], layers: Sequence[list[int]]) -> None:
    readers: dict[int, list[int]] = {}
    for number, box in enumerate(boxes):
        for k in box.reads:
            readers.setdefault(k, []).append(number)
    place: dict[int, float] = {}

    def settle(layer: list[int], near: Mapping[int, Sequence[int]]) -> None:
        def wanted(number: int) -> float:
            others = [place[k] for k in near.get(number, ()) if k in place]
            return sum(others) / len(others) if others else place.get(number, 0.5)

        layer.sort(key=wanted)
        for k, number in enumerate(layer):
            place[number] = (k + 0.5) / len(layer)

    above = {number: list(box.reads) for number, box in enumerate(boxes)}
    for _ in range(_SWEEPS):
        for layer in layers:
            settle(layer, above)
        for layer in reversed(layers):
            settle(layer, readers)


def _place(boxes: Sequence[_Box], layers: Sequence[Sequence[int]]) -> tuple[float, ...]:
    spans = [
        sum(boxes[k].width for k in layer) + _GAP_X * (len(layer) - 1)
        for layer in layers
    ]
    widest = max(spans, default=0.0)
    y = float(_GAP_X)
    for layer, span in zip(layers, spans):
        x = _GAP_X + (widest - span) / 2
        for k in layer:
            boxes[k].x, boxes[k].y = x, y
            x += boxes[k].width + _GAP_X
        y += max((boxes[k].height for k in layer), default=0.0) + _GAP_Y
    return widest + 2 * _GAP_X, y - _GAP_Y + _GAP_X


# ------------------------------------------------------------------ what it looks like

_FILLS = {"kernel": "#eef3fb", "input": "#f4f4f4", "output": "#eaf6ea"}


def _drawn(box: _Box) -> str:
    radius = 3 if box.kind == "kernel" else 10
    left = box.x + _PAD
    lines = [
        f'<g><title>{escape(box.about or box.title)}</title><rect x="{box.x:.1f}" '
        f'y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" '
        f'rx="{radius}" fill="{_FILLS[box.kind]}" stroke="#667"/>',
        f'<text x="{left:.1f}" y="{box.y + _ROW:.1f}" fill="#112" '
        f'font-weight="{"bold" if box.kind == "kernel" else "normal"}">'
        f"{escape(box.title)}</text>",
    ]
    for k, row in enumerate(box.rows, 2):
        lines.append(
            f'<text x="{left:.1f}" y="{box.y + k * _ROW:.1f}" fill="#334" '
            f'xml:space="preserve">{escape(row)}</text>'
        )
    return "".join([*lines, "</g>"])


def _arrow(source: _Box, target: _Box, names: Sequence[str]) -> str:
    x1, y1 = source.x + source.width / 2, source.y + source.height
    x2, y2 = target.x + target.width / 2, target.y
    bend = max(18.0, (y2 - y1) / 2)
    title = escape(", ".join(dict.fromkeys(names)))
    return (
        f'<path d="M{x1:.1f} {y1:.1f} C{x1:.1f} {y1 + bend:.1f} {x2:.1f} '
        f'{y2 - bend:.1f} {x2:.1f} {y2:.1f}" fill="none" stroke="#667" '
        f'marker-end="url(#tip)"><title>{title}</title></path>'
    )
