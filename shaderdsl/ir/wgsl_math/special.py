"""Infinity, NaN, signs and division, as drivers do not fold them."""

from __future__ import annotations

from .text import Helpers

HELPERS = Helpers()

HELPERS.add(
    """
fn sd_inf{V}() -> {F} {
  let bits = {U}(0x7f800000u);
  return bitcast<{F}>(bits);
}
"""
)
HELPERS.add(
    """
fn sd_nan{V}() -> {F} {
  let bits = {U}(0x7fc00000u);
  return bitcast<{F}>(bits);
}
"""
)
HELPERS.add(
    """
fn sd_isnan{V}(x: {F}) -> {B} {
  return (bitcast<{U}>(x) & {U}(0x7fffffffu)) > {U}(0x7f800000u);
}
"""
)
HELPERS.add(
    """
fn sd_isinf{V}(x: {F}) -> {B} {
  return (bitcast<{U}>(x) & {U}(0x7fffffffu)) == {U}(0x7f800000u);
}
"""
)
# x * 0, x - x: drivers fold both to 0, also for NaN and infinities.
HELPERS.add(
    """
fn sd_vanish{V}(x: {F}) -> {F} {
  let whole = (bitcast<{U}>(x) & {U}(0x7fffffffu)) < {U}(0x7f800000u);
  return select(sd_nan{V}(), {F}(0.0), whole);
}
"""
)
# sqrt(x) * sqrt(x): drivers fold it to |x|.
HELPERS.add(
    """
fn sd_root_squared{V}(x: {F}) -> {F} {
  return select(sd_nan{V}(), x, x >= {F}(0.0));
}
"""
)
# The upper half of the digits: products of two such numbers are exact.
HELPERS.add(
    """
fn sd_head{V}(x: {F}) -> {F} {
  return bitcast<{F}>(bitcast<{U}>(x) & {U}(0xfffff000u));
}
"""
)
# The size of x with the sign of y.
HELPERS.add(
    """
fn sd_signed{V}(x: {F}, y: {F}) -> {F} {
  let sign = bitcast<{U}>(y) & {U}(0x80000000u);
  return bitcast<{F}>((bitcast<{U}>(x) & {U}(0x7fffffffu)) | sign);
}
"""
)
# x, but a zero with the sign of y: drivers do not keep it.
HELPERS.add(
    """
fn sd_zero_of{V}(x: {F}, y: {F}) -> {F} {
  return select(x, sd_signed{V}(x, y), x == {F}(0.0));
}
"""
)
# Constants fold wrongly: 0 / b to 0 and a / 0 to anything. So both are spelled out; the
# first is NaN where b is 0 or NaN. Where 1 / b would be subnormal, GPUs that multiply
# by the reciprocal give 0; a quarter of both has the same quotient.
HELPERS.add(
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

# Division by what many values share, as a scale and the inverse of what is scaled. That
# is finite but for a divisor of 0, so that 0 needs no question: a subnormal divisor is
# scaled, and where the device takes it for 0 its inverse is the greatest number.
HELPERS.add(
    """
fn sd_inverse{V}(b: f32) -> vec2<f32> {
  let bits = bitcast<u32>(b);
  let size = bits & 0x7fffffffu;
  let tiny = size < 0x00800000u;
  let s = select(select(1.0, 0.25, abs(b) > 4.2535296e37), 16777216.0, tiny);
  let c = b * s;
  let r = 1.0 / select(c, 1.0, c == 0.0);
  let most = (bits & 0x80000000u) | select(0x7f7fffffu, 0x7f800000u, size == 0u);
  return vec2<f32>(s, select(r, bitcast<f32>(most), c == 0.0));
}
"""
)
HELPERS.add(
    """
fn sd_over{V}(a: {F}, i: vec2<f32>) -> {F} {
  return (a * i.x) * i.y;
}
"""
)
