"""The hand-written kernels that only the training step and decoding need.

Attention is the plain three-pass form: a workgroup of 64 for each query and head that
computes its scores anew for the maximum, the sum and the result.
"""

from __future__ import annotations

from kernels import each, elementwise, row, tree

DOT = "for (var d = 0u; d < {D}u; d++) {{ {name} += {a}[{i} + d] * {b}[{j} + d]; }}"


def _dot(name: str, a: str, i: str, b: str, j: str, d: int) -> str:
    return f"var {name} = 0.0; " + DOT.format(D=d, name=name, a=a, i=i, b=b, j=j)


def attention(s: int, heads: int, kv: int, d: int):
    score = (
        f"let at = (j * {kv}u + g) * {d}u; "
        + _dot("z", "q", "at_q", "k", "at", d)
        + f" let s = z * {d**-0.5};"
    )
    passes = (
        f"  let h = group.y; let g = h / {heads // kv}u;\n"
        f"  let at_q = (r * {heads}u + h) * {d}u;\n"
        "  var m = -3.0e38;\n"
        f"  for (var j = t; j <= r; j += 64u) {{ {score} m = max(m, s); }}\n"
        + tree("m", 64, most=True)
        + "  let top = part[0];\n  var l = 0.0;\n"
        f"  for (var j = t; j <= r; j += 64u) {{ {score} l += exp(s - top); }}\n"
        + tree("l", 64)
        + f"""  let total = part[0];
  var sum = 0.0;
  for (var j0 = 0u; j0 <= r; j0 += 64u) {{
    let j = j0 + t;
    var p = 0.0;
    if (j <= r) {{ {score} p = exp(s - top) / total; }}
    workgroupBarrier();
    part[t] = p;
    workgroupBarrier();
    if (t < {d}u) {{
      for (var e = 0u; e < min(64u, r + 1u - j0); e++) {{
        sum += part[e] * v[((j0 + e) * {kv}u + g) * {d}u + t];
      }}
    }}
  }}
  if (t < {d}u) {{ out[at_q + t] = sum; }}
  if (t == 0u) {{ lse[r * {heads}u + h] = top + log(total); }}"""
    )
    text, _ = row(("q", "k", "v", "=out", "=lse"), s, passes, 64)
    return text, (s, heads)


def attention_delta(n: int, d: int):
    body = _dot("z", "out", f"i * {d}u", "dy", f"i * {d}u", d) + " delta[i] = z;"
    return elementwise(("out", "dy", "=delta"), n, body)


def attention_dq(s: int, heads: int, kv: int, d: int):
    body = f"""  let h = group.y; let g = h / {heads // kv}u;
  let at_q = (r * {heads}u + h) * {d}u;
  let low = lse[r * {heads}u + h]; let less = delta[r * {heads}u + h];
  var sum = 0.0;
  for (var j0 = 0u; j0 <= r; j0 += 64u) {{
    let j = j0 + t;
    var ds = 0.0;
    if (j <= r) {{
      let at = (j * {kv}u + g) * {d}u;
      {_dot("z", "q", "at_q", "k", "at", d)}
      {_dot("w", "dy", "at_q", "v", "at", d)}
      ds = exp(z * {d**-0.5} - low) * (w - less) * {d**-0.5};
    }}
    workgroupBarrier();
    part[t] = ds;
    workgroupBarrier();
    if (t < {d}u) {{
      for (var e = 0u; e < min(64u, r + 1u - j0); e++) {{
        sum += part[e] * k[((j0 + e) * {kv}u + g) * {d}u + t];
      }}
    }}
  }}
  if (t < {d}u) {{ dq[at_q + t] = sum; }}"""
    text, _ = row(("q", "k", "v", "dy", "lse", "delta", "=dq"), s, body, 64)
    return text, (s, heads)


def attention_dkv(s: int, heads: int, kv: int, d: int):
    body = f"""  let g = group.y;
  let at = (r * {kv}u + g) * {d}u;
  var sum_k = 0.0;
  var sum_v = 0.0;
  for (var h = g * {heads // kv}u; h < (g + 1u) * {heads // kv}u; h++) {{
    for (var i0 = r; i0 < {s}u; i0 += 64u) {{
      let i = i0 + t;
      var p = 0.0;
      var ds = 0.0;
      if (i < {s}u) {{
        let at_q = (i * {heads}u + h) * {d}u;
        {_dot("z", "q", "at_q", "k", "at", d)}
        {_dot("w", "dy", "at_q", "v", "at", d)}
        p = exp(z * {d**-0.5} - lse[i * {heads}u + h]);
        ds = p * (w - delta[i * {heads}u + h]) * {d**-0.5};
      }}
      workgroupBarrier();
      part[t] = ds;
      other[t] = p;
      workgroupBarrier();
      if (t < {d}u) {{
        for (var e = 0u; e < min(64u, {s}u - i0); e++) {{
          let from = ((i0 + e) * {heads}u + h) * {d}u + t;
          sum_k += part[e] * q[from];
          sum_v += other[e] * dy[from];
        }}
      }}
    }}
  }}
  if (t < {d}u) {{ dk[at + t] = sum_k; dv[at + t] = sum_v; }}"""
    body = body.replace("let from =", "let source =").replace("[from]", "[source]")
    names = ("q", "k", "v", "dy", "lse", "delta", "=dk", "=dv")
    text, _ = row(names, s, body, 64, "var<workgroup> other: array<f32, 64>;")
    return text, (s, kv)


def rotary(s: int, heads: int, d: int, sign: int):
    half = d // 2
    body = f"""let p = i / {heads * half}u; let e = i % {half}u;
  let at = (i / {half}u) * {d}u + e;
  let c = cos_[p * {half}u + e]; let n = {sign}.0 * sin_[p * {half}u + e];
  let a = x[at]; let b = x[at + {half}u];
  x[at] = a * c - b * n;
  x[at + {half}u] = b * c + a * n;"""
    return elementwise(("=x", "cos_", "sin_"), s * heads * half, body)


def cross_entropy(s: int, vocab: int):
    at = f"r * {vocab}u + j"
    body = (
        "  var m = -3.0e38;\n"
        + each(vocab, f"m = max(m, x[{at}]);")
        + tree("m", most=True)
        + "  let top = part[0];\n  var a = 0.0;\n"
        + each(vocab, f"a += exp(x[{at}] - top);")
        + tree("a")
        + "  let l = part[0]; let label = labels[r];\n"
        + each(
            vocab,
            f"dx[{at}] = (exp(x[{at}] - top) / l - select(0.0, 1.0, j == label)) "
            f"/ {s}.0;",
        )
        + f"  if (t == 0u) {{ loss[r] = top + log(l) - x[r * {vocab}u + label]; }}"
    )
    return row(("x", "labels:u32", "=dx", "=loss"), s, body)


def mean(n: int):
    body = f"""var a = 0.0;
  for (var j = 0u; j < {n}u; j++) {{ a += x[j]; }}
  y[0] = a / {n}.0;"""
    return elementwise(("x", "=y"), 1, body)


def embed(s: int, width: int):
    body = f"y[i] = table[ids[i / {width}u] * {width}u + i % {width}u];"
    return elementwise(("table", "ids:u32", "=y"), s * width, body)


def embed_pullback(s: int, vocab: int, width: int):
    body = f"""var a = 0.0;
  for (var j = 0u; j < {s}u; j++) {{
    if (ids[j] == i / {width}u) {{ a += dy[j * {width}u + i % {width}u]; }}
  }}
  dtable[i] = a;"""
    return elementwise(("dy", "ids:u32", "=dtable"), vocab * width, body)


def add(n: int):
    return elementwise(("=y", "x"), n, "y[i] += x[i];")


def adamw(n: int, opt):
    body = f"""let d = grad[i];
  let a = {opt.beta1} * m[i] + {1 - opt.beta1} * d;
  let b = {opt.beta2} * v[i] + {1 - opt.beta2} * d * d;
  m[i] = a;
  v[i] = b;
  w[i] = w[i] * {1 - opt.rate * opt.decay}
       - {opt.rate} * (a / bias[0]) / (sqrt(b / bias[1]) + {opt.eps});"""
    return elementwise(("=w", "grad", "=m", "=v", "bias"), n, body)


# ------------------------------------------------------------------ one token


def vector(n: int, inner: int, add: bool = False):
    """y = x·W for one row; ``add``: y is what it is added to."""
    body = f"""var a = 0.0;
  for (var k = 0u; k < {inner}u; k++) {{ a += x[k] * w[k * {n}u + i]; }}
  y[i] = {"y[i] + a" if add else "a"};"""
    return elementwise(("x", "w", "=y"), n, body)


def rotary_at(heads: int, d: int):
    """Turns one position's heads by ``state[1]``."""
    half = d // 2
    body = f"""let p = state[1]; let e = i % {half}u;
  let at = (i / {half}u) * {d}u + e;
  let c = cos_[p * {half}u + e]; let n = sin_[p * {half}u + e];
  let a = x[at]; let b = x[at + {half}u];
  x[at] = a * c - b * n;
  x[at + {half}u] = b * c + a * n;"""
    return elementwise(("=x", "cos_", "sin_", "state:u32"), heads * half, body)


def keep(n: int):
    """A row of keys and one of values go to their place in the caches."""
    body = f"keys[state[1] * {n}u + i] = k[i]; values[state[1] * {n}u + i] = v[i];"
    return elementwise(("k", "v", "=keys", "=values", "state:u32"), n, body)


def attention_at(heads: int, kv: int, d: int):
    """One query a head against a cache: a workgroup of 64 a head."""
    score = (
        f"let at = (j * {kv}u + g) * {d}u; "
        + _dot("z", "q", "at_q", "k", "at", d)
        + f" let s = z * {d**-0.5};"
    )
    body = (
        f"  let g = r / {heads // kv}u; let at_q = r * {d}u; let n = state[1] + 1u;\n"
        "  var m = -3.0e38;\n"
        f"  for (var j = t; j < n; j += 64u) {{ {score} m = max(m, s); }}\n"
        + tree("m", 64, most=True)
        + "  let top = part[0];\n  var l = 0.0;\n"
        f"  for (var j = t; j < n; j += 64u) {{ {score} l += exp(s - top); }}\n"
        + tree("l", 64)
        + f"""  let total = part[0];
  var sum = 0.0;
  for (var j0 = 0u; j0 < n; j0 += 64u) {{
    let j = j0 + t;
    var p = 0.0;
    if (j < n) {{ {score} p = exp(s - top) / total; }}
    workgroupBarrier();
    part[t] = p;
    workgroupBarrier();
    if (t < {d}u) {{
      for (var e = 0u; e < min(64u, n - j0); e++) {{
        sum += part[e] * v[((j0 + e) * {kv}u + g) * {d}u + t];
      }}
    }}
  }}
  if (t < {d}u) {{ out[at_q + t] = sum; }}"""
    )
    return row(("q", "k", "v", "state:u32", "=out"), heads, body, 64)


def likeliest(vocab: int):
    """The token to ``state[0]`` and to the list; the position moves on."""
    body = (
        "  var m = -3.0e38; var best = 0u;\n"
        + each(vocab, "if (x[j] > m) { m = x[j]; best = j; }")
        + tree("m", most=True)
        + f"""  let top = part[0];
  workgroupBarrier();
  part[t] = select({vocab}.0, f32(best), m == top);
  workgroupBarrier();
  if (t == 0u) {{
    var first = {vocab}.0;
    for (var e = 0u; e < 256u; e++) {{ first = min(first, part[e]); }}
    state[0] = u32(first);
    tokens[state[1]] = first;
    state[1] += 1u;
  }}"""
    )
    return row(("x", "=state:u32", "=tokens"), 1, body)
