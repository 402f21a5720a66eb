"""Sine, cosine, tangent and their inverses."""

from __future__ import annotations

from .text import Helpers, polynomial

HELPERS = Helpers()

_SIN = (-0.16666655242443085, 0.00833216030150652, -0.00019515256281010807)
_COS = (0.04166664555668831, -0.0013887316454201937, 2.443312587274704e-05)
# x less n quarter turns; the first three parts have 8 bits, so that their products with
# n below 2^16 are exact.
HELPERS.add(
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
HELPERS.add(
    """
fn sd_sin_part{V}(r: {F}) -> {F} {
  let z = r * r;
  return fma(r * z, POLY, r);
}
""",
    POLY=polynomial("z", _SIN),
)
HELPERS.add(
    """
fn sd_cos_part{V}(r: {F}) -> {F} {
  let z = r * r;
  return fma(z * z, POLY, fma({F}(-0.5), z, {F}(1.0)));
}
""",
    POLY=polynomial("z", _COS),
)
HELPERS.add(
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
HELPERS.add(
    """
fn sd_sin{V}(x: {F}) -> {F} {
  return sd_zero_of{V}(sd_wave{V}(x, 0), x);
}
"""
)
HELPERS.add(
    """
fn sd_cos{V}(x: {F}) -> {F} {
  return sd_wave{V}(x, 1);
}
"""
)
HELPERS.add(
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
HELPERS.add(
    """
fn sd_asin_part{V}(s: {F}, z: {F}) -> {F} {
  return fma(s * z, POLY, s);
}
""",
    POLY=polynomial("z", _ASIN),
)
HELPERS.add(
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
HELPERS.add(
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
HELPERS.add(
    """
fn sd_atan_part{V}(t: {F}) -> {F} {
  let z = t * t;
  return fma(t * z, POLY, t);
}
""",
    POLY=polynomial("z", _ATAN),
)
HELPERS.add(
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
HELPERS.add(
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
