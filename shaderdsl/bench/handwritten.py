"""Kernels written by hand in WGSL, the usual GPU forms: what ours are compared with.

They run through the same device, memory and timestamps, as programs of one kernel each
whose text nobody generated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..array import Array
from ..codegen.program import Binding, Kernel, Program
from ..ir.stage import Stage, input_stage, map_stage
from ..runtime import current

Call = Callable[[], Any]

_HEAD = """@compute @workgroup_size({size})
fn main(@builtin(workgroup_id) group: vec3<u32>,
        @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) t: u32) {{
  let wg = group.y * groups.x + group.x;
"""


def _ready(
    name: str,
    body: str,
    inputs: Sequence[Any],
    outputs: Sequence[tuple[int, ...]],
    size: int,
    workgroups: int,
    shared: str = "",
    kind: str = "vec4<f32>",
) -> Call:
    """A call of one kernel; bindings are b0, b1, …: inputs, then outputs."""
    from ..ir import expr as E

    given = [input_stage(x.shape, "f32", f"b{k}") for k, x in enumerate(inputs)]
    made: list[Stage] = [
        map_stage(shape, E.const(float(k)), f"out{k}")
        for k, shape in enumerate(outputs)
    ]
    lines = [
        f"@group(0) @binding({k}) var<storage, "
        f"{'read' if k < len(given) else 'read_write'}> b{k}: array<{kind}>;"
        for k in range(len(given) + len(made))
    ]
    text = "\n".join([*lines, shared, _HEAD.format(size=size), body, "}"])
    limit = current().target.limits.max_workgroups
    deep = -(-workgroups // limit)
    while workgroups % deep:  # no kernel here tests for the end of the grid
        deep += 1
    kernel = Kernel(
        name=f"hand_{name}",
        archetype="handwritten",
        wgsl=text,
        workgroup_size=(size, 1, 1),
        workgroups=(workgroups // deep, deep, 1),
        bindings=(
            *(Binding(s, "read") for s in given),
            *(Binding(s, "read_write") for s in made),
        ),
        params=(),
        members=tuple(made),
        writes=tuple(made),
        flops=0,
        bytes=sum(s.nbytes for s in (*given, *made)),
        reason="written by hand",
    )
    program = Program((kernel,), tuple(given), tuple(made), frozenset(), (), ())
    executable = current().build(program)
    buffers = [x.buffer() for x in inputs]

    def call() -> Any:
        results = [
            Array.of_buffer(b, s.shape, "f32")
            for b, s in zip(executable(buffers, {}), made)
        ]
        return results[0] if len(results) == 1 else tuple(results)

    return call


def _elementwise(name: str, body: str, inputs: Sequence[Any], outputs: int) -> Call:
    n = inputs[0].size // 4
    return _ready(
        name,
        f"  let i = wg * 256u + t;\n{body}",
        inputs,
        [inputs[0].shape] * outputs,
        256,
        n // 256,
    )


def double(x: Any) -> Call:
    return _elementwise("double", "  b1[i] = b0[i] + b0[i];", [x], 1)


def silu_mul(g: Any, u: Any) -> Call:
    return _elementwise(
        "silu_mul", "  let a = b0[i]; b2[i] = a / (1.0 + exp(-a)) * b1[i];", [g, u], 1
    )


def silu_mul_grad(g: Any, u: Any, dy: Any) -> Call:
    body = """  let a = b0[i]; let d = b2[i];
  let s = 1.0 / (1.0 + exp(-a));
  b3[i] = d * b1[i] * s * (1.0 + a * (1.0 - s));
  b4[i] = d * a * s;"""
    return _elementwise("silu_mul_grad", body, [g, u, dy], 2)


_TANH = """  let x = b0[i];
  let w = tanh(0.7978845608 * (x + 0.044715 * x * x * x));
"""


def gelu(x: Any) -> Call:
    return _elementwise("gelu", _TANH + "  b1[i] = 0.5 * x * (1.0 + w);", [x], 1)


def gelu_grad(x: Any, dy: Any) -> Call:
    body = f"""{_TANH}  let s = 0.7978845608 * (1.0 + 0.134145 * x * x);
  b2[i] = b1[i] * 0.5 * (1.0 + w + x * (1.0 - w * w) * s);"""
    return _elementwise("gelu_grad", body, [x, dy], 1)


def _tree(value: str, size: int, join: str) -> str:
    return f"""  workgroupBarrier();
  part[t] = {value};
  workgroupBarrier();
  for (var s = {size // 2}u; s > 0u; s >>= 1u) {{
    if (t < s) {{ part[t] = {join}; }}
    workgroupBarrier();
  }}
"""


def _row_kernel(name: str, body: str, inputs: Sequence[Any], size: int) -> Call:
    x = inputs[0]
    return _ready(
        name,
        body,
        inputs,
        [x.shape],
        size,
        x.shape[0],
        f"var<workgroup> part: array<f32, {size}>;",
    )


_ADD = "part[t] + part[t + s]"


def rms_norm(x: Any, w: Any) -> Call:
    n, size = x.shape[1] // 4, 256
    each = f"for (var j = t; j < {n}u; j += {size}u)"
    body = f"""  let base = wg * {n}u;
  var a = 0.0;
  {each} {{ let v = b0[base + j]; a += dot(v, v); }}
{_tree("a", size, _ADD)}
  let k = inverseSqrt(part[0] / {4 * n}.0 + 1e-6);
  {each} {{ b2[base + j] = b0[base + j] * k * b1[j]; }}"""
    return _row_kernel("rms_norm", body, [x, w], size)


def layer_norm(x: Any, w: Any, b: Any) -> Call:
    n, size = x.shape[1] // 4, 256
    each = f"for (var j = t; j < {n}u; j += {size}u)"
    body = f"""  let base = wg * {n}u;
  var a = 0.0;
  {each} {{ a += dot(b0[base + j], vec4<f32>(1.0)); }}
{_tree("a", size, _ADD)}
  let mean = part[0] / {4 * n}.0;
  a = 0.0;
  {each} {{ let v = b0[base + j] - mean; a += dot(v, v); }}
{_tree("a", size, _ADD)}
  let k = inverseSqrt(part[0] / {4 * n}.0 + 1e-5);
  {each} {{ b3[base + j] = (b0[base + j] - mean) * k * b1[j] + b2[j]; }}"""
    return _row_kernel("layer_norm", body, [x, w, b], size)


def row_sum(x: Any) -> Call:
    """A workgroup four rows, so that it stores a vec4."""
    n, size = x.shape[1] // 4, 256
    each = f"for (var j = t; j < {n}u; j += {size}u)"
    body = f"""  var a = vec4<f32>();
  for (var r = 0u; r < 4u; r++) {{
    let base = (wg * 4u + r) * {n}u;
    {each} {{ a[r] += dot(b0[base + j], vec4<f32>(1.0)); }}
  }}
{_tree("a", size, _ADD)}
  if (t == 0u) {{ b1[wg] = part[0]; }}"""
    shared = f"var<workgroup> part: array<vec4<f32>, {size}>;"
    rows = x.shape[0]
    return _ready("row_sum", body, [x], [(rows,)], size, rows // 4, shared)


def softmax(x: Any) -> Call:
    n, size = x.shape[1] // 4, 256
    each = f"for (var j = t; j < {n}u; j += {size}u)"
    body = f"""  let base = wg * {n}u;
  var m = vec4<f32>(-3.0e38);
  {each} {{ m = max(m, b0[base + j]); }}
{_tree("max(max(m.x, m.y), max(m.z, m.w))", size, "max(part[t], part[t + s])")}
  let top = part[0];
  var a = 0.0;
  {each} {{ a += dot(exp(b0[base + j] - top), vec4<f32>(1.0)); }}
{_tree("a", size, _ADD)}
  let over = 1.0 / part[0];
  {each} {{ b1[base + j] = exp(b0[base + j] - top) * over; }}"""
    return _row_kernel("softmax", body, [x], size)


def gemv_t(x: Any, w: Any) -> Call:
    """W [n, k] · x [k]: a workgroup four rows."""
    (k,), (n, _) = x.shape, w.shape
    size = 128
    body = f"""  var a = vec4<f32>();
  for (var j = t; j < {k // 4}u; j += {size}u) {{
    let v = b0[j];
    for (var r = 0u; r < 4u; r++) {{
      a[r] += dot(v, b1[(wg * 4u + r) * {k // 4}u + j]);
    }}
  }}
{_tree("a", size, _ADD)}
  if (t == 0u) {{ b2[wg] = part[0]; }}"""
    shared = f"var<workgroup> part: array<vec4<f32>, {size}>;"
    return _ready("gemv_t", body, [x, w], [(n,)], size, n // 4, shared)


def matmul(a: Any, b: Any) -> Call:
    """A [m, k] · B [k, n]: tiles of 64 by 64 in workgroup memory, 4 by 4 a thread."""
    m, k = a.shape
    n = b.shape[1]
    body = f"""  let tiles = {n // 64}u;
  let i0 = wg / tiles * 64u; let j0 = wg % tiles * 16u;
  let tx = t % 16u; let ty = t / 16u;
  var c0 = vec4<f32>(); var c1 = c0; var c2 = c0; var c3 = c0;
  for (var q0 = 0u; q0 < {k}u; q0 += 16u) {{
    workgroupBarrier();
    let l = b0[((i0 + t / 4u) * {k}u + q0) / 4u + t % 4u];
    for (var e = 0u; e < 4u; e++) {{
      left[(t % 4u * 4u + e) * 16u + t / 16u][t / 4u % 4u] = l[e];
    }}
    right[t] = b1[(q0 + ty) * {n // 4}u + j0 + tx];
    workgroupBarrier();
    for (var q = 0u; q < 16u; q++) {{
      let x = left[q * 16u + ty]; let y = right[q * 16u + tx];
      c0 = fma(vec4<f32>(x.x), y, c0); c1 = fma(vec4<f32>(x.y), y, c1);
      c2 = fma(vec4<f32>(x.z), y, c2); c3 = fma(vec4<f32>(x.w), y, c3);
    }}
  }}
  let at = (i0 + ty * 4u) * {n // 4}u + j0 + tx;
  b2[at] = c0; b2[at + {n // 4}u] = c1;
  b2[at + {n // 2}u] = c2; b2[at + {3 * n // 4}u] = c3;"""
    shared = (
        "var<workgroup> left: array<vec4<f32>, 256>;\n"
        "var<workgroup> right: array<vec4<f32>, 256>;"
    )
    return _ready("matmul", body, [a, b], [(m, n)], 256, m // 64 * (n // 64), shared)
