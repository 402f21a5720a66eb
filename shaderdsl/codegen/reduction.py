"""Combining values: spellings of monoids, and the tree over the lanes of a workgroup.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.stage import MONOIDS
from .writer import Writer, spell, wgsl_type


def combine(monoid: str, a: str, b: str, dtype: str, vector: bool = False) -> str:
    """``a ⊕ b`` in WGSL."""
    if dtype != "f32" and monoid in ("max", "min"):
        return f"{monoid}({a}, {b})"
    return spell(MONOIDS[monoid].primitive, [a, b], dtype, vector)


def identity(w: Writer, monoid: str, dtype: str, vector: bool = False) -> str:
    """The neutral element, as text."""
    value = MONOIDS[monoid].identity[dtype]
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

    def __init__(self, w: Writer, threads: int, width: int, position: str):
        self.w, self.threads, self.width, self.position = w, threads, width, position
        self.arrays: dict[tuple[str, int], str] = {}
        self.dirty = False
        # Subgroups may be of any size, so a segment must be the whole workgroup.
        has = w.target.features.subgroups and w.target.family == "gpu"
        self.subgroups = has and width == threads and threads >= 64

    def _array(self, dtype: str, slot: int) -> str:
        key = (dtype, slot)
        if key not in self.arrays:
            name = f"tree_{dtype}_{slot}"
            self.arrays[key] = name
            self.w.shared.append(
                f"var<workgroup> {name}: array<{dtype}, {self.threads}>;"
            )
        return self.arrays[key]

    def reduce(self, values: Sequence[tuple[str, str, str]], depth: int) -> list[str]:
        """Combine (monoid, dtype, value) of all lanes; every lane gets the results."""
        if self.width == 1:
            return [v for _, _, v in values]
        w = self.w
        if self.subgroups:
            return self._by_subgroups(values, depth)
        if self.dirty:
            w.line(
                "workgroupBarrier();", depth
            )  # results of the phase before have been read
        slots: dict[str, int] = {}
        names = []
        for _, dtype, v in values:
            k = slots[dtype] = slots.get(dtype, -1) + 1
            names.append(self._array(dtype, k))
            w.line(f"{names[-1]}[lane] = {v};", depth)
        w.line("workgroupBarrier();", depth)
        half = self.width // 2
        while half:
            w.line(f"if ({self.position} < {half}u) {{", depth)
            for (monoid, dtype, _), name in zip(values, names, strict=True):
                a, b = f"{name}[lane]", f"{name}[lane + {half}u]"
                w.line(f"  {name}[lane] = {combine(monoid, a, b, dtype)};", depth)
            w.line("}", depth)
            w.line("workgroupBarrier();", depth)
            half //= 2
        self.dirty = True
        first = "0u" if self.width == self.threads else f"lane - {self.position}"
        return [w.let(f"{name}[{first}]", depth, "r") for name in names]

    def _by_subgroups(
        self, values: Sequence[tuple[str, str, str]], depth: int
    ) -> list[str]:
        """Shuffles inside of each subgroup, then all lanes of each read the subgroups'
        results.

        Works for subgroups of any size; the order of combination depends on the device
        alone.
        """
        w = self.w
        w.uses_subgroups = True
        if self.dirty:
            w.line("workgroupBarrier();", depth)
        slots: dict[str, int] = {}
        names, totals = [], []
        for monoid, dtype, v in values:
            k = slots[dtype] = slots.get(dtype, -1) + 1
            names.append(self._array(dtype, k))
            total = w.fresh("s")
            totals.append(total)
            w.line(f"var {total} = {v};", depth)
            other = f"subgroupShuffleXor({total}, d)"
            w.line(
                "for (var d = sg_size / 2u; d > 0u; d /= 2u) "
                f"{{ {total} = {combine(monoid, total, other, dtype)}; }}",
                depth,
            )
            w.line(f"if (sg_lane == 0u) {{ {names[-1]}[sg] = {total}; }}", depth)
        w.line("workgroupBarrier();", depth)
        for (monoid, dtype, _), name, total in zip(values, names, totals, strict=True):
            neutral = identity(w, monoid, dtype)
            w.line(f"{total} = {neutral};", depth)
            step = combine(monoid, total, f"{name}[q]", dtype)
            w.line(
                "for (var q = sg_lane; q < sg_count; q += sg_size) "
                f"{{ {total} = {step}; }}",
                depth,
            )
            other = f"subgroupShuffleXor({total}, d)"
            w.line(
                "for (var d = sg_size / 2u; d > 0u; d /= 2u) "
                f"{{ {total} = {combine(monoid, total, other, dtype)}; }}",
                depth,
            )
        self.dirty = True
        return [w.let(total, depth, "r") for total in totals]
