"""Exponentials, logarithms, roots and powers."""

from __future__ import annotations

from .text import Helpers, polynomial

HELPERS = Helpers()

# ------------------------------------------------------------------ exponentials

# Powers of two for whole n: the last bits of n + 1.5 · 2^23 + 127 are the exponent.
# GPUs turn floats into integers at an eighth of the speed of an addition.
HELPERS.add(
    """
fn sd_power{V}(n: {F}, offset: {F}) -> {F} {
  return bitcast<{F}>(bitcast<{U}>(n + offset) << {U}(23u));
}
"""
)
POWER = 12582912 + 127
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
HELPERS.add(
    """
fn sd_exp_offset{V}(x: {F}, offset: i32) -> {F} {
  let t = floor(x * {F}(1.44269504));
  let n = min(t, {F}(f32(255 - offset)));
  let r = fma(t, {F}(2.12194440e-4), fma(n, {F}(-0.693359375), x));
  let p = fma(r, POLY, {F}(1.0));
  let scale = sd_power{V}(n, {F}(f32(12582912 + offset)));
  return select(p * scale, {F}(0.0), x < {F}(-87.3365));
}
""",
    POLY=polynomial("r", _EXP),
)
HELPERS.add(
    """
fn sd_exp{V}(x: {F}) -> {F} {
  return sd_exp_offset{V}(x, 127);
}
"""
)
# The same without floor, for which GPUs take a quarter of their speed: 1.5 · 2^15 + x /
# log(2) has eight digits behind the point, and without them it is rounded down. The
# greatest n leaves the overflow to the last multiplication.
HELPERS.add(
    """
fn sd_exp_masked{V}(x: {F}) -> {F} {
  let z = fma(x, {F}(1.44269504), {F}(49152.0));
  let t = bitcast<{F}>(bitcast<{U}>(z) & {U}(0xffffff00u)) - {F}(49152.0);
  let n = min(t, {F}(127.0));
  let r = fma(t, {F}(2.12194440e-4), fma(n, {F}(-0.693359375), x));
  let p = fma(r, POLY, {F}(1.0));
  let scale = sd_power{V}(n, {F}(POWER.0));
  return select(p * scale, {F}(0.0), x < {F}(-87.3365));
}
""",
    POLY=polynomial("r", _EXP),
    POWER=str(POWER),
)
_EXP2 = (
    0.6931512951850891,
    0.24016444385051727,
    0.05579991266131401,
    0.009017028845846653,
    0.001867130515165627,
)
HELPERS.add(
    """
fn sd_exp2{V}(x: {F}) -> {F} {
  let n = min(floor(x), {F}(128.0));
  let r = x - n;
  let p = fma(r, POLY, {F}(1.0));
  let scale = sd_power{V}(n, {F}(POWER.0));
  return select(p * scale, {F}(0.0), x < {F}(-126.0));
}
""",
    POLY=polynomial("r", _EXP2),
    POWER=str(POWER),
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
HELPERS.add(
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
""",
    POLY=polynomial("r", _EXPM1),
    HALF=str(POWER - 1),
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
HELPERS.add(
    """
fn sd_log_parts{V}(f: {F}, e: {F}) -> {F} {
  let z = f * f;
  var y = z * f * POLY;
  y = fma(e, {F}(-2.12194440e-4), y);
  y = f + fma({F}(-0.5), z, y);
  return fma(e, {F}(0.693359375), y);
}
""",
    POLY=polynomial("f", _LOG),
)
# What a logarithm gives unless its argument is positive, normal and finite.
HELPERS.add(
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
HELPERS.add(
    """
fn sd_log{V}(x: {F}) -> {F} {
  let bits = bitcast<{I}>(x) - {I}(0x3f3504f3);
  let m = bitcast<{F}>((bits & {I}(0x007fffff)) + {I}(0x3f3504f3));
  let y = sd_log_parts{V}(m - {F}(1.0), {F}(bits >> {U}(23u)));
  return sd_log_guard{V}(x, y);
}
"""
)
HELPERS.add(
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
HELPERS.add(
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

HELPERS.add(
    """
fn sd_rsqrt{V}(x: {F}) -> {F} {
  return inverseSqrt(x);
}
"""
)
# log2|a| as the sum t1 + t2, t1 with 12 bits, times b in two parts. After FreeBSD's
# powf, with masks in place of additions that drivers would fold.
HELPERS.add(
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
""",
    POLY=polynomial(
        "s2",
        (0.6000000238, 0.4285713136, 0.3333464563, 0.2719735503, 0.2509978712),
    ),
    EXP2=polynomial(
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
