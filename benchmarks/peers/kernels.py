"""WGSL as one writes it by hand: the usual GPU forms, nothing exotic.

Elementwise kernels have a thread an element; rows have a workgroup of 256 and a tree in
workgroup memory; matmul comes as 64×64 tiles in workgroup memory with 4×4 results a
thread, or as 8×8 results a thread straight from storage.

Each function returns the text and the number of workgroups.
"""

from __future__ import annotations

EPS = 1e-5


def declare(*bindings: str) -> str:
    """``"x"`` is read, ``"=y"`` written; ``"ids:u32"`` gives the element type."""
    lines = []
    for number, binding in enumerate(bindings):
        name, _, kind = binding.lstrip("=").partition(":")
        access = "read_write" if binding.startswith("=") else "read"
        lines.append(
            f"@group(0) @binding({number}) var<storage, {access}> {name}: "
            f"array<{kind or 'f32'}>;\n"
        )
    return "".join(lines)


def elementwise(bindings: tuple[str, ...], n: int, body: str):
    groups = -(-n // 256)
    wide = min(groups, 32768)
    text = f"""{declare(*bindings)}
@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {{
  let i = id.x + id.y * {wide * 256}u;
  if (i >= {n}u) {{ return; }}
  {body}
}}"""
    return text, (wide, -(-groups // wide))


def row(bindings: tuple[str, ...], rows: int, body: str, size: int = 256, more=""):
    text = f"""{declare(*bindings)}
var<workgroup> part: array<f32, {size}>;
{more}
@compute @workgroup_size({size})
fn main(@builtin(workgroup_id) group: vec3<u32>,
        @builtin(local_invocation_index) t: u32) {{
  let r = group.x;
{body}
}}"""
    return text, (rows,)


def tree(value: str, size: int = 256, most: bool = False) -> str:
    """Reduces ``value`` over the workgroup into ``part[0]``."""
    join = "max(part[t], part[t + s])" if most else "part[t] + part[t + s]"
    return f"""  workgroupBarrier();
  part[t] = {value};
  workgroupBarrier();
  for (var s = {size // 2}u; s > 0u; s >>= 1u) {{
    if (t < s) {{ part[t] = {join}; }}
    workgroupBarrier();
  }}
"""


def each(n: int, body: str, step: int = 256) -> str:
    return f"  for (var j = t; j < {n}u; j += {step}u) {{ {body} }}\n"


def silu_mul(n: int):
    body = "let a = g[i]; y[i] = a / (1.0 + exp(-a)) * u[i];"
    return elementwise(("g", "u", "=y"), n, body)


def silu_mul_pullback(n: int):
    body = """let a = g[i]; let d = dy[i];
  let s = 1.0 / (1.0 + exp(-a));
  dg[i] = d * u[i] * s * (1.0 + a * (1.0 - s));
  du[i] = d * a * s;"""
    return elementwise(("g", "u", "dy", "=dg", "=du"), n, body)


def rms_norm(rows: int, n: int):
    at = f"r * {n}u + j"
    body = (
        "  var a = 0.0;\n"
        + each(n, f"let v = x[{at}]; a += v * v;")
        + tree("a")
        + f"  let k = inverseSqrt(part[0] / {n}.0 + {EPS});\n"
        + "  if (t == 0u) { scale[r] = k; }\n"
        + each(n, f"y[{at}] = x[{at}] * k * gain[j];")
    )
    return row(("x", "gain", "=y", "=scale"), rows, body)


def rms_norm_dx(rows: int, n: int, add: bool = False):
    at = f"r * {n}u + j"
    body = (
        "  var a = 0.0;\n"
        + each(n, f"a += x[{at}] * dy[{at}] * gain[j];")
        + tree("a")
        + f"  let k = scale[r]; let m = part[0] / {n}.0 * k * k * k;\n"
        + each(
            n,
            f"dx[{at}] {'+=' if add else '='} dy[{at}] * gain[j] * k - x[{at}] * m;",
        )
    )
    return row(("x", "gain", "dy", "scale", "=dx"), rows, body)


def rms_norm_dgain(rows: int, n: int):
    body = f"""var a = 0.0;
  for (var r = 0u; r < {rows}u; r++) {{
    a += x[r * {n}u + i] * dy[r * {n}u + i] * scale[r];
  }}
  dgain[i] = a;"""
    return elementwise(("x", "dy", "scale", "=dgain"), n, body)


def softmax(rows: int, n: int):
    at = f"r * {n}u + j"
    body = (
        "  var m = -3.0e38;\n"
        + each(n, f"m = max(m, x[{at}]);")
        + tree("m", most=True)
        + "  let top = part[0];\n  var a = 0.0;\n"
        + each(n, f"a += exp(x[{at}] - top);")
        + tree("a")
        + "  let over = 1.0 / part[0];\n"
        + each(n, f"y[{at}] = exp(x[{at}] - top) * over;")
    )
    return row(("x", "=y"), rows, body)


def matmul(form: str, m: int, n: int, k: int, ta=False, tb=False, add=False):
    """out[m, n] (+)= A[m, k] · B[k, n]; ta: A is stored [k, m]; tb: B [n, k]."""
    if form == "regs" and m % 8 == 0 and n % 8 == 0:
        return _matmul_registers(m, n, k, ta, tb, add)
    return _matmul_tiles(m, n, k, ta, tb, add)


def _matmul_registers(m, n, k, ta, tb, add):
    kinds = ("a:vec4<f32>" if ta else "a", "b" if tb else "b:vec4<f32>")
    lines = [
        declare(*kinds, "=out:vec4<f32>"),
        "@compute @workgroup_size(8, 8)",
        "fn main(@builtin(global_invocation_id) id: vec3<u32>) {",
        "  let i = id.y * 8u; let j = id.x * 8u;",
        f"  if (i >= {m}u || j >= {n}u) {{ return; }}",
    ]
    cells = [(y, x) for y in range(8) for x in range(2)]
    lines += [f"  var c{y}{x} = vec4<f32>();" for y, x in cells]
    lines.append(f"  for (var q = 0u; q < {k}u; q++) {{")
    if ta:
        lines += [f"    let w{h} = a[(q * {m}u + i) / 4u + {h}u];" for h in range(2)]
        lines += [f"    let a{y} = w{y // 4}[{y % 4}];" for y in range(8)]
    else:
        lines += [f"    let a{y} = a[(i + {y}u) * {k}u + q];" for y in range(8)]
    for x in range(2):
        if tb:
            four = ", ".join(f"b[(j + {4 * x + z}u) * {k}u + q]" for z in range(4))
            lines.append(f"    let b{x} = vec4<f32>({four});")
        else:
            lines.append(f"    let b{x} = b[(q * {n}u + j) / 4u + {x}u];")
    lines += [f"    c{y}{x} = fma(vec4<f32>(a{y}), b{x}, c{y}{x});" for y, x in cells]
    lines.append("  }")
    sign = "+=" if add else "="
    lines += [
        f"  out[((i + {y}u) * {n}u + j) / 4u + {x}u] {sign} c{y}{x};" for y, x in cells
    ]
    return "\n".join([*lines, "}"]), (-(-n // 64), -(-m // 64))


def _matmul_tiles(m, n, k, ta, tb, add):
    a = f"a[(q0 + q) * {m}u + i0 + i]" if ta else f"a[(i0 + i) * {k}u + q0 + q]"
    b = f"b[(j0 + j) * {k}u + q0 + q]" if tb else f"b[(q0 + q) * {n}u + j0 + j]"
    # neighbouring threads read neighbouring addresses, whichever way it is stored
    at_a = (
        "let i = e % 64u; let q = e / 64u;"
        if ta
        else "let i = e / 16u; let q = e % 16u;"
    )
    at_b = (
        "let q = e % 16u; let j = e / 16u;"
        if tb
        else "let q = e / 64u; let j = e % 64u;"
    )
    cells = [(y, x) for y in range(4) for x in range(4)]
    zero = "\n".join(f"  var c{y}{x} = 0.0;" for y, x in cells)
    loads = "\n".join(
        f"      let a{y} = left[q * 64u + ty * 4u + {y}u];\n"
        f"      let b{y} = right[q * 64u + tx * 4u + {y}u];"
        for y in range(4)
    )
    multiply = "\n".join(f"      c{y}{x} += a{y} * b{x};" for y, x in cells)
    sign = "+=" if add else "="
    store = "\n".join(
        f"  if (i + {y}u < {m}u && j + {x}u < {n}u) "
        f"{{ out[(i + {y}u) * {n}u + j + {x}u] {sign} c{y}{x}; }}"
        for y, x in cells
    )
    text = f"""{declare("a", "b", "=out")}
var<workgroup> left: array<f32, 1024>;
var<workgroup> right: array<f32, 1024>;
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>,
        @builtin(local_invocation_index) t: u32) {{
  let tx = t % 16u; let ty = t / 16u;
  let i0 = group.y * 64u; let j0 = group.x * 64u;
{zero}
  for (var q0 = 0u; q0 < {k}u; q0 += 16u) {{
    for (var e = t; e < 1024u; e += 256u) {{
      {at_a}
      var v = 0.0;
      if (i0 + i < {m}u && q0 + q < {k}u) {{ v = {a}; }}
      left[q * 64u + i] = v;
    }}
    for (var e = t; e < 1024u; e += 256u) {{
      {at_b}
      var v = 0.0;
      if (j0 + j < {n}u && q0 + q < {k}u) {{ v = {b}; }}
      right[q * 64u + j] = v;
    }}
    workgroupBarrier();
    for (var q = 0u; q < 16u; q++) {{
{loads}
{multiply}
    }}
    workgroupBarrier();
  }}
  let i = i0 + ty * 4u; let j = j0 + tx * 4u;
{store}
}}"""
    return text, (-(-n // 64), -(-m // 64))
