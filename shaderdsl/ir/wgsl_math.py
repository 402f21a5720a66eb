"""WGSL functions that the spellings of primitives call.

The built-in functions of WGSL may be off by a lot and drivers take further liberties:
``tanh`` of a large number may be NaN, ``exp`` is 60 ULP off, ``a != a`` is false. So
the functions here are written in operations whose result is known.
``docs/numerics.md`` lists the measured error of each.

What the texts have to live with:

- Drivers reassociate floats: ``(1 + x) - 1`` becomes ``x``, ``0 * a`` becomes 0. Where
  that would hurt, the value passes through integer operations on its bits, which no
  driver rewrites.
- ``fma`` may be two roundings, so the constants of range reductions have few bits and
  their products with small integers are exact. And ``(x + n * c) + n * d`` may become
  ``x + n * (c + d)``; each term takes ``n`` from another ``min`` or ``max``.
- ``min`` and ``max`` drop NaN, and ``select(x, c, x < c)`` may be turned into ``max``.
  Tests for NaN look at the bits.
- Infinity and NaN have no literal; the bits of a ``let`` variable give them.
- Subnormal numbers count as zero on many drivers.

Every text serves a scalar and a vec4: ``{F} {I} {U} {B}`` are the types and ``{V}`` is
the suffix of function names, empty or ``_v4``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["HELPERS", "helper_source", "used_helpers"]

HELPERS: dict[str, str] = {}

_NAME = re.compile(r"\bsd_\w+(?=\()")
_DEPENDENCY = re.compile(r"\b(sd_\w+)\{V\}\(")
_WIDTHS = {
    "": {"{V}": "", "{F}": "f32", "{I}": "i32", "{U}": "u32", "{B}": "bool"},
    "_v4": {
        "{V}": "_v4",
        "{F}": "vec4<f32>",
        "{I}": "vec4<i32>",
        "{U}": "vec4<u32>",
        "{B}": "vec4<bool>",
    },
}


def used_helpers(text: str) -> list[str]:
    """The helper functions that a kernel text calls, in order of first use."""
    return list(dict.fromkeys(_NAME.findall(text)))


def helper_source(names: Iterable[str]) -> list[str]:
    """The texts of helper functions and of all that they call.

    Args:
        names: as kernels spell them, such as ``sd_exp`` and ``sd_exp_v4``.

    Returns:
        One text a function, each once and after those that it calls.

    Raises:
        KeyError: there is no such helper.
    """
    texts: dict[str, str] = {}

    def visit(base: str, suffix: str) -> None:
        if base + suffix in texts:
            return
        template = HELPERS[base]
        for other in dict.fromkeys(_DEPENDENCY.findall(template)):
            if other != base:
                visit(other, suffix)
        for token, word in _WIDTHS[suffix].items():
            template = template.replace(token, word)
        texts[base + suffix] = template

    for name in names:
        suffix = "_v4" if name.endswith("_v4") else ""
        visit(name.removesuffix("_v4"), suffix)
    return list(texts.values())


def _helper(text: str) -> None:
    text = text.strip()
    match = re.match(r"fn (\w+)\{V\}\(", text)
    assert match is not None, text
    HELPERS[match.group(1)] = text


def _literal(value: float) -> str:
    """A decimal literal that reads back as the same f32 number."""
    text = f"{value:.9g}"
    return text if any(c in text for c in ".en") else text + ".0"


def _polynomial(variable: str, coefficients: Iterable[float]) -> str:
    """Horner's rule; coefficients from the constant upwards."""
    first, *rest = reversed([f"{{F}}({_literal(c)})" for c in coefficients])
    text = first
    for c in rest:
        text = f"fma({text}, {variable}, {c})"
    return text


# ------------------------------------------------------------------ special numbers

_helper(
    """
fn sd_inf{V}() -> {F} {
  let bits = {U}(0x7f800000u);
  return bitcast<{F}>(bits);
}
"""
)
_helper(
    """
fn sd_nan{V}() -> {F} {
  let bits = {U}(0x7fc00000u);
  return bitcast<{F}>(bits);
}
"""
)
_helper(
    """
fn sd_isnan{V}(x: {F}) -> {B} {
  return (bitcast<{U}>(x) & {U}(0x7fffffffu)) > {U}(0x7f800000u);
}
"""
)
_helper(
    """
fn sd_isinf{V}(x: {F}) -> {B} {
  return (bitcast<{U}>(x) & {U}(0x7fffffffu)) == {U}(0x7f800000u);
}
"""
)
# x * 0, x - x: drivers fold both to 0, also for NaN and infinities.
_helper(
    """
fn sd_vanish{V}(x: {F}) -> {F} {
  let whole = (bitcast<{U}>(x) & {U}(0x7fffffffu)) < {U}(0x7f800000u);
  return select(sd_nan{V}(), {F}(0.0), whole);
}
"""
)
# sqrt(x) * sqrt(x): drivers fold it to |x|.
_helper(
    """
fn sd_root_squared{V}(x: {F}) -> {F} {
  return select(sd_nan{V}(), x, x >= {F}(0.0));
}
"""
)
# The upper half of the digits: products of two such numbers are exact.
_helper(
    """
fn sd_head{V}(x: {F}) -> {F} {
  return bitcast<{F}>(bitcast<{U}>(x) & {U}(0xfffff000u));
}
"""
)
# The size of x with the sign of y.
_helper(
    """
fn sd_signed{V}(x: {F}, y: {F}) -> {F} {
  let sign = bitcast<{U}>(y) & {U}(0x80000000u);
  return bitcast<{F}>((bitcast<{U}>(x) & {U}(0x7fffffffu)) | sign);
}
"""
)
# x, but a zero with the sign of y: drivers do not keep it.
_helper(
    """
fn sd_zero_of{V}(x: {F}, y: {F}) -> {F} {
  return select(x, sd_signed{V}(x, y), x == {F}(0.0));
}
"""
)
# Constants fold wrongly: 0 / b to 0 and a / 0 to anything. So both are spelled out; the
# first is NaN where b is 0 or NaN. Where 1 / b would be subnormal, GPUs that multiply
# by the reciprocal give 0; a quarter of both has the same quotient.
_helper(
    """
fn sd_div{V}(a: {F}, b: {F}) -> {F} {
  let whole = ((bitcast<{U}>(b) << {U}(1u)) - {U}(1u)) < {U}(0xff000000u);
  let none = b == {F}(0.0);
  let s = select({F}(1.0), {F}(0.25), abs(b) > {F}(4.2535296e37));
  let q = select((a * s) / select(b * s, {F}(1.0), none), a * sd_inf{V}(), none);
  let v = select(q, select(sd_nan{V}(), {F}(0.0), whole), a == {F}(0.0));
  return sd_signed{V}(v, bitcast<{F}>(bitcast<{U}>(a) ^ bitcast<{U}>(b)));
}
"""
)

# Division by what many values share, as a scale, the inverse of what is scaled, and
# what 0 is divided to.
_helper(
    """
fn sd_inverse{V}(b: f32) -> vec3<f32> {
  let bits = bitcast<u32>(b);
  let whole = ((bits << 1u) - 1u) < 0xff000000u;
  let none = b == 0.0;
  let s = select(1.0, 0.25, abs(b) > 4.2535296e37);
  let endless = (bits & 0x80000000u) | 0x7f800000u;
  let r = select(1.0 / select(b * s, 1.0, none), bitcast<f32>(endless), none);
  let nan = 0x7fc00000u;
  return vec3<f32>(s, r, select(bitcast<f32>(nan), 0.0, whole));
}
"""
)
_helper(
    """
fn sd_over{V}(a: {F}, i: vec3<f32>) -> {F} {
  return select((a * i.x) * i.y, {F}(i.z), a == {F}(0.0));
}
"""
)

# ------------------------------------------------------------------ exponentials

# Powers of two for whole n: the last bits of n + 1.5 · 2^23 + 127 are the exponent.
# GPUs turn floats into integers at an eighth of the speed of an addition.
_helper(
    """
fn sd_power{V}(n: {F}, offset: {F}) -> {F} {
  return bitcast<{F}>(bitcast<{U}>(n + offset) << {U}(23u));
}
"""
)
_POWER = 12582912 + 127
# 2 to the n times a number in [1, 2): n from floor, so that one multiplication by a
# power of two reaches the whole range; n = 128 gives the bits of infinity. The offset
# 127 may be lowered to 126 for half of the value.
_EXP = (
    1.0000059604644775,
    0.49987083673477173,
    0.16755490005016327,
    0.03906264528632164,
    0.011669368483126163,
)
_helper(
    """
fn sd_exp_offset{V}(x: {F}, offset: i32) -> {F} {
  let t = floor(x * {F}(1.44269504));
  let n = min(t, {F}(f32(255 - offset)));
  let r = fma(t, {F}(2.12194440e-4), fma(n, {F}(-0.693359375), x));
  let p = fma(r, POLY, {F}(1.0));
  let scale = sd_power{V}(n, {F}(f32(12582912 + offset)));
  return select(p * scale, {F}(0.0), x < {F}(-87.3365));
}
""".replace("POLY", _polynomial("r", _EXP))
)
_helper(
    """
fn sd_exp{V}(x: {F}) -> {F} {
  return sd_exp_offset{V}(x, 127);
}
"""
)
_EXP2 = (
    0.6931512951850891,
    0.24016444385051727,
    0.05579991266131401,
    0.009017028845846653,
    0.001867130515165627,
)
_helper(
    """
fn sd_exp2{V}(x: {F}) -> {F} {
  let n = min(floor(x), {F}(128.0));
  let r = x - n;
  let p = fma(r, POLY, {F}(1.0));
  let scale = sd_power{V}(n, {F}(POWER.0));
  return select(p * scale, {F}(0.0), x < {F}(-126.0));
}
""".replace("POLY", _polynomial("r", _EXP2)).replace("POWER", str(_POWER))
)
# h is half of 2 to the n, which does not overflow while the value is finite.
_EXPM1 = (
    0.5,
    0.1666666567325592,
    0.041666362434625626,
    0.008333389647305012,
    0.0013940619537606835,
    0.00019845875794999301,
)
_helper(
    """
fn sd_expm1{V}(x: {F}) -> {F} {
  let y = clamp(x, {F}(-30.0), {F}(90.0));
  let t = round(y * {F}(1.44269504));
  let n = min(t, {F}(129.0));
  let r = fma(t, {F}(2.12194440e-4), fma(n, {F}(-0.693359375), y));
  let q = fma(r * r, POLY, r);
  let h = sd_power{V}(n, {F}(HALF.0));
  let v = {F}(2.0) * fma(h, q, h - {F}(0.5));
  return select(sd_signed{V}(v, x), x, sd_isnan{V}(x));
}
""".replace("POLY", _polynomial("r", _EXPM1)).replace("HALF", str(_POWER - 1))
)

# ------------------------------------------------------------------ logarithms

# log(1 + f) for 1 + f in [sqrt(1/2), sqrt(2)], with e times log(2) added.
_LOG = (
    0.3333333134651184,
    -0.250008225440979,
    0.20001226663589478,
    -0.16623352468013763,
    0.14201748371124268,
    -0.1316021978855133,
    0.1276167333126068,
    -0.07634518295526505,
)
_helper(
    """
fn sd_log_parts{V}(f: {F}, e: {F}) -> {F} {
  let z = f * f;
  var y = z * f * POLY;
  y = fma(e, {F}(-2.12194440e-4), y);
  y = f + fma({F}(-0.5), z, y);
  return fma(e, {F}(0.693359375), y);
}
""".replace("POLY", _polynomial("f", _LOG))
)
# What a logarithm gives unless its argument is positive, normal and finite.
_helper(
    """
fn sd_log_guard{V}(x: {F}, y: {F}) -> {F} {
  let bits = bitcast<{U}>(x);
  let normal = (bits - {U}(0x00800000u)) < {U}(0x7f000000u);
  let tiny = (bits & {U}(0x7fffffffu)) < {U}(0x00800000u);
  let other = select(x, sd_nan{V}(), x < {F}(0.0));
  return select(select(other, -sd_inf{V}(), tiny), y, normal);
}
"""
)
_helper(
    """
fn sd_log{V}(x: {F}) -> {F} {
  let bits = bitcast<{I}>(x) - {I}(0x3f3504f3);
  let m = bitcast<{F}>((bits & {I}(0x007fffff)) + {I}(0x3f3504f3));
  let y = sd_log_parts{V}(m - {F}(1.0), {F}(bits >> {U}(23u)));
  return sd_log_guard{V}(x, y);
}
"""
)
_helper(
    """
fn sd_log2{V}(x: {F}) -> {F} {
  let bits = bitcast<{I}>(x) - {I}(0x3f3504f3);
  let m = bitcast<{F}>((bits & {I}(0x007fffff)) + {I}(0x3f3504f3));
  let y = sd_log_parts{V}(m - {F}(1.0), {F}(0.0));
  let v = fma(y, {F}(1.44269504), {F}(bits >> {U}(23u)));
  return sd_log_guard{V}(x, v);
}
"""
)
# (1 + x) / 2^e - 1 without the rounding of 1 + x: both terms of the sum are exact.
_helper(
    """
fn sd_log1p{V}(x: {F}) -> {F} {
  let u = {F}(1.0) + x;
  let e = (bitcast<{I}>(u) - {I}(0x3f3504f3)) >> {U}(23u);
  let s = bitcast<{F}>(max({I}(127) - e, {I}(0)) << {U}(23u));
  let four = bitcast<{F}>(({I}(129) - e) << {U}(23u));
  let f = fma({F}(0.25) * x, four, s - {F}(1.0));
  let y = select(sd_log_parts{V}(f, {F}(e)), x, abs(x) < {F}(5.9604645e-8));
  return select(sd_log_guard{V}(u, y), x, sd_isnan{V}(x));
}
"""
)

# ------------------------------------------------------------------ roots and powers

_helper(
    """
fn sd_rsqrt{V}(x: {F}) -> {F} {
  return inverseSqrt(x);
}
"""
)
# log2|a| as the sum t1 + t2, t1 with 12 bits, times b in two parts. After FreeBSD's
# powf, with masks in place of additions that drivers would fold.
_helper(
    """
fn sd_pow{V}(a: {F}, b: {F}) -> {F} {
  let inf = sd_inf{V}();
  let one = {F}(1.0);
  let zero = {F}(0.0);
  let bits = (bitcast<{I}>(a) & {I}(0x7fffffff)) - {I}(0x3f3504f3);
  let m = bitcast<{F}>((bits & {I}(0x007fffff)) + {I}(0x3f3504f3));
  let n = {F}(bits >> {U}(23u));
  // s = (m - 1) / (m + 1) = sh + sl
  let u = m - one;
  let v = one / (m + one);
  let s = u * v;
  let sh = sd_head{V}(s);
  let th = sd_head{V}(m + one);
  let tl = m - (th - one);
  let sl = v * ((u - sh * th) - sh * tl);
  let s2 = s * s;
  let r = fma(s2 * s2, POLY, sl * (sh + s));
  let h2 = sh * sh;
  let qh = sd_head{V}({F}(3.0) + h2 + r);
  let ql = r - ((qh - {F}(3.0)) - h2);
  let w = fma(sl, qh, ql * s);
  let ph = sd_head{V}(fma(sh, qh, w));
  let pl = w - (ph - sh * qh);
  let zh = {F}(0.961914063) * ph;
  let zl = fma({F}(-1.17368574e-4), ph, pl * {F}(0.961796701));
  let t1 = sd_head{V}((zh + zl) + n);
  let t2 = zl - ((t1 - n) - zh);
  // b log2|a| = ch + cl = k + f
  let y = clamp(b, {F}(-4.0e9), {F}(4.0e9));
  let yh = sd_head{V}(y);
  let ch = yh * t1;
  let cl = fma(y - yh, t1, y * t2);
  let tiny = (bitcast<{U}>(a) & {U}(0x7fffffffu)) < {U}(0x00800000u);
  let flat = tiny | sd_isinf{V}(a);
  let away = select(-inf, inf, (b > zero) == sd_isinf{V}(a));
  let z = select(ch + cl, away, flat);
  let k = clamp(round(z), {F}(-160.0), {F}(160.0));
  let f = (ch - k) + cl;
  let i = {I}(k);
  let j = i >> {U}(1u);
  let e = fma(f, EXP2, one)
    * bitcast<{F}>((j + {I}(127)) << {U}(23u))
    * bitcast<{F}>((i - j + {I}(127)) << {U}(23u));
  var p = select(select(e, zero, z < {F}(-150.0)), inf, z >= {F}(128.0));
  let whole = floor(b) == b;
  let odd = whole & (abs(b) < {F}(16777216.0)) & (({I}(y) & {I}(1)) == {I}(1));
  p = select(p, -p, odd & (bitcast<{I}>(a) < {I}(0)));
  p = select(sd_nan{V}(), p, whole | (a >= zero) | sd_isinf{V}(a));
  p = select(p, sd_nan{V}(), sd_isnan{V}(a) | sd_isnan{V}(b));
  return select(p, one, (b == zero) | (a == one));
}
""".replace(
        "POLY",
        _polynomial(
            "s2",
            (0.6000000238, 0.4285713136, 0.3333464563, 0.2719735503, 0.2509978712),
        ),
    ).replace(
        "EXP2",
        _polynomial(
            "f",
            (
                0.6931471824645996,
                0.24022647738456726,
                0.05550332367420197,
                0.00961843691766262,
                0.0013398875016719103,
                0.00015353360504377633,
            ),
        ),
    )
)

# ------------------------------------------------------------------ circular functions

_SIN = (-0.16666655242443085, 0.00833216030150652, -0.00019515256281010807)
_COS = (0.04166664555668831, -0.0013887316454201937, 2.443312587274704e-05)
# x less n quarter turns; the first three parts have 8 bits, so that their products with
# n below 2^16 are exact.
_helper(
    """
fn sd_turn{V}(x: {F}, n: {F}) -> {F} {
  let up = min(n, {F}(1.0e30));
  let down = max(n, {F}(-1.0e30));
  var r = fma(n, {F}(-1.5703125), x);
  r = fma(up, {F}(-0.000482559204), r);
  r = fma(down, {F}(-1.2665987e-06), r);
  r = fma(clamp(n, {F}(-1.0e30), {F}(1.0e30)), {F}(-9.92093629e-10), r);
  return clamp(r, {F}(-1.0), {F}(1.0));
}
"""
)
_helper(
    """
fn sd_sin_part{V}(r: {F}) -> {F} {
  let z = r * r;
  return fma(r * z, POLY, r);
}
""".replace("POLY", _polynomial("z", _SIN))
)
_helper(
    """
fn sd_cos_part{V}(r: {F}) -> {F} {
  let z = r * r;
  return fma(z * z, POLY, fma({F}(-0.5), z, {F}(1.0)));
}
""".replace("POLY", _polynomial("z", _COS))
)
_helper(
    """
fn sd_wave{V}(x: {F}, shift: i32) -> {F} {
  let n = round(x * {F}(0.636619772));
  let r = sd_turn{V}(x, n);
  let q = {I}(n) + {I}(shift);
  let odd = (q & {I}(1)) != {I}(0);
  let v = select(sd_sin_part{V}(r), sd_cos_part{V}(r), odd);
  let w = select(v, -v, (q & {I}(2)) != {I}(0));
  return select(w, sd_nan{V}(), sd_isnan{V}(x) | sd_isinf{V}(x));
}
"""
)
_helper(
    """
fn sd_sin{V}(x: {F}) -> {F} {
  return sd_zero_of{V}(sd_wave{V}(x, 0), x);
}
"""
)
_helper(
    """
fn sd_cos{V}(x: {F}) -> {F} {
  return sd_wave{V}(x, 1);
}
"""
)
_helper(
    """
fn sd_tan{V}(x: {F}) -> {F} {
  let n = round(x * {F}(0.636619772));
  let r = sd_turn{V}(x, n);
  let s = sd_sin_part{V}(r);
  let c = sd_cos_part{V}(r);
  let odd = ({I}(n) & {I}(1)) != {I}(0);
  let t = sd_zero_of{V}(select(s, -c, odd) / select(c, s, odd), x);
  return select(t, sd_nan{V}(), sd_isnan{V}(x) | sd_isinf{V}(x));
}
"""
)
# asin(s) for s in [0, 1/2].
_ASIN = (
    0.16666753590106964,
    0.07495241612195969,
    0.04547709599137306,
    0.02414761111140251,
    0.04221854731440544,
)
_helper(
    """
fn sd_asin_part{V}(s: {F}, z: {F}) -> {F} {
  return fma(s * z, POLY, s);
}
""".replace("POLY", _polynomial("z", _ASIN))
)
_helper(
    """
fn sd_asin{V}(x: {F}) -> {F} {
  let a = abs(x);
  let big = a > {F}(0.5);
  let z = select(a * a, fma({F}(-0.5), a, {F}(0.5)), big);
  let p = sd_asin_part{V}(select(a, sqrt(z), big), z);
  let v = select(p, {F}(1.57079637) - fma({F}(2.0), p, {F}(4.37113883e-8)), big);
  return select(sd_signed{V}(v, x), sd_nan{V}(), (a > {F}(1.0)) | sd_isnan{V}(x));
}
"""
)
_helper(
    """
fn sd_acos{V}(x: {F}) -> {F} {
  let a = abs(x);
  let big = a > {F}(0.5);
  let z = select(a * a, fma({F}(-0.5), a, {F}(0.5)), big);
  let p = sd_asin_part{V}(select(a, sqrt(z), big), z);
  let near = {F}(1.57079637) - (select(p, -p, x < {F}(0.0)) + {F}(4.37113883e-8));
  let twice = {F}(2.0) * p;
  let far = select(twice, {F}(3.14159274) - (twice + {F}(8.74227766e-8)), x < {F}(0.0));
  let v = select(near, far, big);
  return select(v, sd_nan{V}(), (a > {F}(1.0)) | sd_isnan{V}(x));
}
"""
)
# atan(t) for t in [0, 1].
_ATAN = (
    -0.3333316743373871,
    0.19994136691093445,
    -0.14214205741882324,
    0.10678929090499878,
    -0.07580552995204926,
    0.04355324059724808,
    -0.01658099703490734,
    0.0029745432548224926,
)
_helper(
    """
fn sd_atan_part{V}(t: {F}) -> {F} {
  let z = t * t;
  return fma(t * z, POLY, t);
}
""".replace("POLY", _polynomial("z", _ATAN))
)
_helper(
    """
fn sd_atan{V}(x: {F}) -> {F} {
  let a = abs(x);
  let big = a > {F}(1.0);
  let p = sd_atan_part{V}(select(a, {F}(1.0) / a, big));
  let v = select(p, {F}(1.57079637) - (p + {F}(4.37113883e-8)), big);
  return select(sd_signed{V}(v, x), x, sd_isnan{V}(x));
}
"""
)
_helper(
    """
fn sd_atan2{V}(y: {F}, x: {F}) -> {F} {
  let a = abs(x);
  let b = abs(y);
  let high = max(a, b);
  let low = min(a, b);
  // Divisors above 2^126 may be taken for infinite.
  let k = select({F}(1.0), {F}(0.0625), high > {F}(1.0e37));
  let plain = select((low * k) / (high * k), {F}(1.0), low == high);
  let t = select(plain, {F}(0.0), low == {F}(0.0));
  let p = sd_atan_part{V}(t);
  let q = select(p, {F}(1.57079637) - (p + {F}(4.37113883e-8)), b > a);
  let left = bitcast<{I}>(x) < {I}(0);
  let h = select(q, {F}(3.14159274) - (q + {F}(8.74227766e-8)), left);
  return select(sd_signed{V}(h, y), sd_nan{V}(), sd_isnan{V}(x) | sd_isnan{V}(y));
}
"""
)

# ------------------------------------------------------------------ hyperbolic and kin

_SINH = (0.1666666716337204, 0.008333350531756878, 1.983606634894386e-4, 2.81743974e-6)
_helper(
    """
fn sd_sinh{V}(x: {F}) -> {F} {
  let a = abs(x);
  let z = x * x;
  let h = sd_exp_offset{V}(a, 126);
  let v = h - {F}(0.25) / h;
  let near = fma(x * z, POLY, x);
  return select(select(v, -v, x < {F}(0.0)), near, a < {F}(1.0));
}
""".replace("POLY", _polynomial("z", _SINH))
)
_helper(
    """
fn sd_cosh{V}(x: {F}) -> {F} {
  let h = sd_exp_offset{V}(abs(x), 126);
  return h + {F}(0.25) / h;
}
"""
)
_TANH = (
    -0.33333298563957214,
    0.13331958651542664,
    -0.05378668010234833,
    0.020805377513170242,
    -0.00590586056932807,
)
# 2 to the f for f in [-1/2, 1/2].
_HALF_EXP2 = (
    0.6931470036506653,
    0.24022242426872253,
    0.05550733581185341,
    0.009671512991189957,
    0.001326472614891827,
)
# Where 1 - 2 / (e^2a + 1) is taken, e^2a may be off by three times as much as the
# result. The polynomial is what keeps NaN.
_helper(
    """
fn sd_tanh{V}(x: {F}) -> {F} {
  let a = abs(x);
  let z = x * x;
  let y = min(a * {F}(2.88539008), {F}(30.0));
  let n = round(y);
  let f = y - n;
  let p = fma(f, EXP2, {F}(1.0));
  let d = fma(p, sd_power{V}(n, {F}(POWER.0)), {F}(1.0));
  let far = fma({F}(-2.0), {F}(1.0) / d, {F}(1.0));
  let near = fma(x * z, POLY, x);
  return sd_signed{V}(select(near, far, a >= {F}(0.6)), x);
}
""".replace("POLY", _polynomial("z", _TANH))
    .replace("EXP2", _polynomial("f", _HALF_EXP2))
    .replace("POWER", str(_POWER))
)
_helper(
    """
fn sd_sigmoid{V}(x: {F}) -> {F} {
  return {F}(1.0) / ({F}(1.0) + sd_exp{V}(-x));
}
"""
)
_ERF_NEAR = (
    1.28379166e-1,
    -3.76125336e-1,
    1.12819925e-1,
    -2.67681349e-2,
    4.99119423e-3,
    -5.96761703e-4,
)
_ERF_FAR = (
    -1.28717512e-1,
    -6.34846687e-1,
    -1.06777877e-1,
    2.42546219e-2,
    -3.88396438e-3,
    3.83197126e-4,
    -1.72853470e-5,
)
_helper(
    """
fn sd_erf{V}(x: {F}) -> {F} {
  let a = abs(x);
  let z = x * x;
  let near = fma(x, NEAR, x);
  let v = {F}(1.0) - sd_exp{V}(fma(a, FAR, -a));
  return select(select(v, -v, x < {F}(0.0)), near, a < {F}(0.9277));
}
""".replace("NEAR", _polynomial("z", _ERF_NEAR)).replace(
        "FAR", _polynomial("a", _ERF_FAR)
    )
)
_helper(
    """
fn sd_softplus{V}(x: {F}) -> {F} {
  return max(x, {F}(0.0)) + sd_log1p{V}(sd_exp{V}(-abs(x)));
}
"""
)

# ---------------------------------------------------------------- quotients, remainders

for _t, _T in (("i32", "{I}"), ("u32", "{U}")):
    _fix = """
  let adjust = (rest != {I}(0)) & ((rest ^ d) < {I}(0));"""
    if _t == "u32":
        _fix = ""
    _helper(
        """
fn sd_floordiv_TYPE{V}(a: T, b: T) -> T {
  let d = select(b, T(1), b == T(0));
  let q = a / d;""".replace("TYPE", _t).replace("T", _T)
        + ("\n  let rest = a - q * d;" + _fix if _fix else "")
        + """
  return select(VALUE, T(0), b == T(0));
}
""".replace("VALUE", "select(q, q - T(1), adjust)" if _fix else "q").replace("T", _T)
    )
    _helper(
        """
fn sd_mod_TYPE{V}(a: T, b: T) -> T {
  let d = select(b, T(1), b == T(0));
  let rest = a - (a / d) * d;""".replace("TYPE", _t).replace("T", _T)
        + _fix
        + """
  return select(VALUE, T(0), b == T(0));
}
""".replace("VALUE", "select(rest, rest + d, adjust)" if _fix else "rest").replace(
            "T", _T
        )
    )
# Twelve bits of the quotient: what is left is exact.
_helper(
    """
fn sd_rest{V}(a: {F}, b: {F}) -> {F} {
  let q = sd_head{V}(trunc(a / b));
  let h = sd_head{V}(b);
  return (a - q * h) - q * (b - h);
}
"""
)
_helper(
    """
fn sd_mod_f32{V}(a: {F}, b: {F}) -> {F} {
  let x = abs(a);
  let y = abs(b);
  var r = sd_rest{V}(sd_rest{V}(sd_rest{V}(sd_rest{V}(x, y), y), y), y);
  r = select(r, r + y, r < {F}(0.0));
  r = select(r, r - y, r >= y);
  r = select(r, x, x < y);
  r = select(r, -r, a < {F}(0.0));
  r = select(r, r + b, (r != {F}(0.0)) & ((r < {F}(0.0)) != (b < {F}(0.0))));
  let bad = sd_isnan{V}(b) | (b == {F}(0.0)) | sd_isnan{V}(a) | sd_isinf{V}(a);
  return select(sd_zero_of{V}(r, b), sd_nan{V}(), bad);
}
"""
)
_helper(
    """
fn sd_floordiv_f32{V}(a: {F}, b: {F}) -> {F} {
  let q = round((a - sd_mod_f32{V}(a, b)) / b);
  let low = select({F}(0.0), {F}(-1.0), a * sign(b) < {F}(0.0));
  let v = select(q, low, sd_isinf{V}(b) & (abs(a) < abs(b)));
  let sign = bitcast<{F}>(bitcast<{U}>(a) ^ bitcast<{U}>(b));
  return select(sd_zero_of{V}(v, sign), sd_div{V}(a, b), b == {F}(0.0));
}
"""
)

# ------------------------------------------------------------------ order

for _name in ("max", "min"):
    _helper(
        """
fn sd_NAME_f32{V}(a: {F}, b: {F}) -> {F} {
  return select(select(NAME(a, b), b, sd_isnan{V}(b)), a, sd_isnan{V}(a));
}
""".replace("NAME", _name)
    )
    for _t, _T in (("i32", "{I}"), ("u32", "{U}")):
        _helper(
            """
fn sd_NAME_TYPE{V}(a: T, b: T) -> T {
  return NAME(a, b);
}
""".replace("NAME", _name)
            .replace("TYPE", _t)
            .replace("T", _T)
        )
_helper(
    """
fn sd_sign_f32{V}(x: {F}) -> {F} {
  return select(sign(x), x, sd_isnan{V}(x));
}
"""
)
_helper(
    """
fn sd_sign_i32{V}(x: {I}) -> {I} {
  return select(select({I}(0), {I}(1), x > {I}(0)), {I}(-1), x < {I}(0));
}
"""
)
_helper(
    """
fn sd_sign_u32{V}(x: {U}) -> {U} {
  return select({U}(0u), {U}(1u), x > {U}(0u));
}
"""
)

# ------------------------------------------------------------------ types and bits

_helper(
    """
fn sd_to_i32_f32{V}(x: {F}) -> {I} {
  let v = {I}(clamp(x, {F}(-2147483648.0), {F}(2147483520.0)));
  let w = select(v, {I}(2147483647), x >= {F}(2147483648.0));
  return select(w, {I}(0), sd_isnan{V}(x));
}
"""
)
_helper(
    """
fn sd_to_u32_f32{V}(x: {F}) -> {U} {
  let v = {U}(clamp(x, {F}(0.0), {F}(4294967040.0)));
  let w = select(v, {U}(4294967295u), x >= {F}(4294967296.0));
  return select(w, {U}(0u), sd_isnan{V}(x));
}
"""
)
for _to, _R in (("i32", "{I}"), ("u32", "{U}")):
    for _t, _T in (("i32", "{I}"), ("u32", "{U}")):
        _helper(
            """
fn sd_to_RES_TYPE{V}(x: T) -> R {
  return bitcast<R>(x);
}
""".replace("RES", _to)
            .replace("TYPE", _t)
            .replace("T", _T)
            .replace("R", _R)
        )
    _helper(
        """
fn sd_to_RES_bool{V}(x: {B}) -> R {
  return select(R(0), R(1), x);
}
""".replace("RES", _to).replace("R", _R)
    )
for _t, _T, _XOR, _NOT in (
    ("i32", "{I}", "a ^ b", "~a"),
    ("u32", "{U}", "a ^ b", "~a"),
    ("bool", "{B}", "a != b", "!a"),
):
    _helper(f"fn sd_xor_{_t}{{V}}(a: {_T}, b: {_T}) -> {_T} {{\n  return {_XOR};\n}}")
    _helper(f"fn sd_not_{_t}{{V}}(a: {_T}) -> {_T} {{\n  return {_NOT};\n}}")
# The bits are rounded as integers; below 2^-14 the last place of f16 is that of 0.5.
_helper(
    """
fn sd_round_f16{V}(x: {F}) -> {F} {
  let bits = bitcast<{U}>(x);
  let a = bits & {U}(0x7fffffffu);
  let odd = (a >> {U}(13u)) & {U}(1u);
  let normal = (a + {U}(0xfffu) + odd) & {U}(0xffffe000u);
  let steps = bitcast<{U}>(bitcast<{F}>(a) + {F}(0.5)) - {U}(0x3f000000u);
  let small = bitcast<{U}>({F}(steps) * {F}(5.96046448e-8));
  var r = select(normal, small, a < {U}(0x38800000u));
  r = select(r, {U}(0x7f800000u), r >= {U}(0x47800000u));
  r = select(r, a, a > {U}(0x7f800000u));
  return bitcast<{F}>(r | (bits & {U}(0x80000000u)));
}
"""
)
