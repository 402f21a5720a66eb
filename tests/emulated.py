"""Kernels of subgroup matrices in a text that any driver runs: no matrix is ever held.

A matrix of f16 that was loaded is the place where it lies, which stays as it is until
the next barrier; of a matrix of sums each of the 32 lanes keeps eight elements.
"""

import dataclasses
import re

_LANES, _SIDE = 32, 16
_OWN = _SIDE * _SIDE // _LANES


def emulated(kernel, seen=None):
    """The kernel without the extension, with the same tiles and the same indices;
    ``seen`` gets its text if it had any matrices.
    """
    text = kernel.wgsl
    if "subgroupMatrixMultiplyAccumulate" not in text:
        return kernel
    if seen is not None:
        seen.append(text)
    arrays = re.findall(r"var<workgroup> (\w+): array<f16", text)
    text = text.replace(
        "enable f16, subgroups, chromium_experimental_subgroup_matrix;", "enable f16;"
    )
    if "sg_lane" not in text:
        text = text.replace(", @builtin(subgroup_id) sg: u32", "")
        text = re.sub(r"(fn main\(.*\n)", rf"\1  let sg = lane / {_LANES}u;\n", text)
    text = re.sub(
        rf"subgroup_matrix_result<f32, {_SIDE}, {_SIDE}>", f"array<f32, {_OWN}>", text
    )
    text = re.sub(
        r"subgroupMatrixLoad<.*?>, (row|col)_major>\(&(\w+), (.*), (\d+)u\);",
        lambda m: (
            f"Held({arrays.index(m[2])}u, {m[3]}, {m[4]}u, {m[1] == 'row'});".lower()
        ).replace("held(", "Held("),
        text,
    )
    text = re.sub(
        r"(\w+) = subgroupMatrixMultiplyAccumulate\((\w+), (\w+), \1\);",
        r"\1 = sd_multiplied(\2, \3, \1, lane);",
        text,
    )
    text = re.sub(
        r"subgroupMatrixStore<(row|col)_major>\(&sums, (.*), (\w+), (\d+)u\);",
        lambda m: (
            f"sd_laid_down({m[2]}, {m[3]}, "
            + (f"{m[4]}u, 1u" if m[1] == "row" else f"1u, {m[4]}u")
            + ", lane);"
        ),
        text,
    )
    assert "subgroupMatrix" not in text and "subgroup_matrix" not in text
    cases = "\n".join(
        f"    case {i}u{', default' if i == len(arrays) - 1 else ''}: "
        f"{{ return f32({a}[at]); }}"
        for i, a in enumerate(arrays)
    )
    helpers = f"""
struct Held {{ which: u32, start: u32, stride: u32, by_row: bool }}
fn sd_element(m: Held, row: u32, column: u32) -> f32 {{
  let at = m.start + select(column * m.stride + row, row * m.stride + column, m.by_row);
  switch m.which {{
{cases}
  }}
}}
fn sd_multiplied(
  l: Held, r: Held, c: array<f32, {_OWN}>, lane: u32
) -> array<f32, {_OWN}> {{
  var sums = c;
  let first = lane % {_LANES}u * {_OWN}u;
  let row = first / {_SIDE}u;
  for (var k = 0u; k < {_SIDE}u; k = k + 1u) {{
    let left = sd_element(l, row, k);
"""
    for e in range(_OWN):
        helpers += (
            f"    sums[{e}] = sums[{e}] + left * "
            f"sd_element(r, k, first % {_SIDE}u + {e}u);\n"
        )
    helpers += f"""  }}
  return sums;
}}
fn sd_laid_down(
  start: u32, c: array<f32, {_OWN}>, rows: u32, columns: u32, lane: u32
) {{
  let first = lane % {_LANES}u * {_OWN}u;
  let at = start + first / {_SIDE}u * rows + first % {_SIDE}u * columns;
"""
    for e in range(_OWN):
        helpers += f"  sums[at + {e}u * columns] = c[{e}];\n"
    helpers += "}\n"
    text = text.replace("@compute", helpers + "@compute")
    return dataclasses.replace(kernel, wgsl=text)
