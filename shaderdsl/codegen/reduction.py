"""Combining values: spellings of monoids, the tree over a workgroup's lanes."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.stage import MONOIDS
from .spelling import spell, wgsl_type
from .writer import Writer

#: The maximum where something else tells of NaN: it need not ask each.
NUMBERS_MAX = "max of numbers"


def combine(monoid: str, a: str, b: str, dtype: str, vector: bool = False) -> str:
    """``a ⊕ b`` in WGSL."""
    if monoid == NUMBERS_MAX:
        return f"max({a}, {b})"
    if dtype != "f32" and monoid in ("max", "min"):
        return f"{monoid}({a}, {b})"
    return spell(MONOIDS[monoid].primitive, [a, b], dtype, vector)


def identity(w: Writer, monoid: str, dtype: str, vector: bool = False) -> str:
    """The neutral element, as text."""
    value = MONOIDS["max" if monoid == NUMBERS_MAX else monoid].identity[dtype]
    if dtype == "f32" and value in (float("inf"), float("-inf")):
        text = f"bitcast<f32>(sd_bits({'0x7f800000u' if value > 0 else '0xff800000u'}))"
    elif dtype == "f32":
        text = repr(float(value))
    elif dtype == "u32":
        text = f"{int(value)}u"
    else:
        text = f"i32({int(value)})"
    return f"{wgsl_type(dtype, True)}({text})" if vector else text


def horizontal(monoid: str, v: str, dtype: str) -> str:
    """A vec4's four elements combined in pairs."""
    first = combine(monoid, f"{v}.x", f"{v}.y", dtype)
    second = combine(monoid, f"{v}.z", f"{v}.w", dtype)
    if monoid in ("sum", "prod"):
        first, second = f"({first})", f"({second})"
    return combine(monoid, first, second, dtype)


class Tree:
    """Reductions over the lanes of a segment of a workgroup, through workgroup memory.

    Args:
        threads: invocations of the workgroup.
        width: lanes of a segment, a power of two; ``position`` is the lane's place in
            it.
    """

    def __init__(
        self, w: Writer, threads: int, width: int, position: str, subgroups: bool = True
    ):
        self.w, self.threads, self.width, self.position = w, threads, width, position
        self.arrays: dict[tuple[str, int], str] = {}
        self.dirty = False
        # Subgroups may be of any size, so a segment must be the whole workgroup.
        has = w.target.features.subgroups and w.target.family == "gpu"
        self.subgroups = subgroups and has and width == threads and threads >= 64

    def _array(self, dtype: str, slot: int) -> str:
        key = (dtype, slot)
        if key not in self.arrays:
            name = f"tree_{dtype}_{slot}"
            self.arrays[key] = name
            text = f"var<workgroup> {name}: array<{dtype}, {self.threads}>;"
            if text not in self.w.shared:  # of another text beside this one
                self.w.shared.append(text)
        return self.arrays[key]

    def reduce(
        self, values: Sequence[tuple[str, str, str]], depth: int, alone: bool = False
    ) -> list[str]:
        """Combine (monoid, dtype, value) of all lanes; every lane gets the results.

        Args:
            alone: the first lane of a segment is the only one that wants them.
        """
        if self.width == 1:
            return [v for _, _, v in values]
        w = self.w
        if self.subgroups:
            return self._by_subgroups(values, depth, alone)
        if self.dirty:
            w.line(
                "workgroupBarrier();", depth
            )  # results of the phase before have been read
        slots: dict[str, int] = {}
        names = []
        own = []  # what a lane has so far is no load
        for _, dtype, v in values:
            k = slots[dtype] = slots.get(dtype, -1) + 1
            names.append(self._array(dtype, k))
            w.line(f"{names[-1]}[lane] = {v};", depth)
            own.append(w.fresh("own"))
            w.line(f"var {own[-1]} = {v};", depth)
        w.line("workgroupBarrier();", depth)
        half = self.width // 2
        while half:
            w.line(f"if ({self.position} < {half}u) {{", depth)
            for (monoid, dtype, _), name, a in zip(values, names, own, strict=True):
                step = combine(monoid, a, f"{name}[lane + {half}u]", dtype)
                w.line(f"  {a} = {step};", depth)
                w.line(f"  {name}[lane] = {a};", depth)
            w.line("}", depth)
            w.line("workgroupBarrier();", depth)
            half //= 2
        self.dirty = True
        first = "0u" if self.width == self.threads else f"lane - {self.position}"
        return [w.let(f"{name}[{first}]", depth, "r") for name in names]

    def _by_subgroups(
        self, values: Sequence[tuple[str, str, str]], depth: int, alone: bool
    ) -> list[str]:
        """Each subgroup combines its lanes, then every subgroup combines the results.

        Works for subgroups of any size; the order of combination depends on the
        device alone.
        """
        w = self.w
        parts = [
            (dtype, w.let(subgroup(monoid, v, dtype), depth, "s"))
            for monoid, dtype, v in values
        ]
        names = self.laid_down(parts, depth)
        totals = [w.fresh("s") for _ in values]
        steps = []
        for (monoid, dtype, _), name, total in zip(values, names, totals, strict=True):
            w.line(f"var {total} = {identity(w, monoid, dtype)};", depth)
            step = combine(monoid, total, f"{name}[q]", dtype)
            steps.append(f"{total} = {step};")
        if alone:  # the other subgroups are done
            loop = f"for (var q = 0u; q < sg_count; q++) {{ {' '.join(steps)} }}"
            w.line(f"if (lane == 0u) {{ {loop} }}", depth)
            return [w.let(total, depth, "r") for total in totals]
        loop = "var q = sg_lane; q < sg_count; q += sg_size"
        w.line(f"for ({loop}) {{ {' '.join(steps)} }}", depth)
        return [
            w.let(subgroup(monoid, total, dtype), depth, "r")
            for (monoid, dtype, _), total in zip(values, totals, strict=True)
        ]

    def laid_down(self, parts: Sequence[tuple[str, str]], depth: int) -> list[str]:
        """Arrays in workgroup memory with (dtype, value) of each subgroup, by its
        number.
        """
        w = self.w
        w.uses_subgroups = True
        if self.dirty:
            w.line("workgroupBarrier();", depth)
        slots: dict[str, int] = {}
        names = []
        for dtype, part in parts:
            k = slots[dtype] = slots.get(dtype, -1) + 1
            names.append(self._array(dtype, k))
            w.line(f"if (sg_lane == 0u) {{ {names[-1]}[sg] = {part}; }}", depth)
        w.line("workgroupBarrier();", depth)
        self.dirty = True
        return names


def subgroup(monoid: str, v: str, dtype: str) -> str:
    """The combination over a subgroup's lanes; NaN wins in max and min."""
    if monoid == NUMBERS_MAX:
        return f"subgroupMax({v})"
    builtin = {"sum": "Add", "prod": "Mul", "max": "Max", "min": "Min"}[monoid]
    plain = f"subgroup{builtin}({v})"
    if dtype == "f32" and monoid in ("max", "min"):
        return f"select({plain}, sd_nan(), subgroupAny(sd_isnan({v})))"
    return plain
