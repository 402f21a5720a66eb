"""Quotients, remainders, the greater and the less, signs."""

from __future__ import annotations

from .text import WHOLE, Helpers

HELPERS = Helpers()

# ------------------------------------------------------------ quotients, remainders

# Rounded down; WGSL rounds towards 0.
HELPERS.add(
    """
fn sd_floordiv_i32{V}(a: {I}, b: {I}) -> {I} {
  let d = select(b, {I}(1), b == {I}(0));
  let q = a / d;
  let rest = a - q * d;
  let adjust = (rest != {I}(0)) & ((rest ^ d) < {I}(0));
  return select(select(q, q - {I}(1), adjust), {I}(0), b == {I}(0));
}
"""
)
HELPERS.add(
    """
fn sd_floordiv_u32{V}(a: {U}, b: {U}) -> {U} {
  let d = select(b, {U}(1), b == {U}(0));
  let q = a / d;
  return select(q, {U}(0), b == {U}(0));
}
"""
)
HELPERS.add(
    """
fn sd_mod_i32{V}(a: {I}, b: {I}) -> {I} {
  let d = select(b, {I}(1), b == {I}(0));
  let rest = a - (a / d) * d;
  let adjust = (rest != {I}(0)) & ((rest ^ d) < {I}(0));
  return select(select(rest, rest + d, adjust), {I}(0), b == {I}(0));
}
"""
)
HELPERS.add(
    """
fn sd_mod_u32{V}(a: {U}, b: {U}) -> {U} {
  let d = select(b, {U}(1), b == {U}(0));
  let rest = a - (a / d) * d;
  return select(rest, {U}(0), b == {U}(0));
}
"""
)
# Twelve bits of the quotient: what is left is exact.
HELPERS.add(
    """
fn sd_rest{V}(a: {F}, b: {F}) -> {F} {
  let q = sd_head{V}(trunc(a / b));
  let h = sd_head{V}(b);
  return (a - q * h) - q * (b - h);
}
"""
)
HELPERS.add(
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
HELPERS.add(
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
    HELPERS.add(
        """
fn sd_NAME_f32{V}(a: {F}, b: {F}) -> {F} {
  return select(select(NAME(a, b), b, sd_isnan{V}(b)), a, sd_isnan{V}(a));
}
""",
        NAME=_name,
    )
    for _dtype, _type in WHOLE.items():
        HELPERS.add(
            """
fn sd_NAME_DTYPE{V}(a: TYPE, b: TYPE) -> TYPE {
  return NAME(a, b);
}
""",
            NAME=_name,
            DTYPE=_dtype,
            TYPE=_type,
        )
HELPERS.add(
    """
fn sd_sign_f32{V}(x: {F}) -> {F} {
  return select(sign(x), x, sd_isnan{V}(x));
}
"""
)
HELPERS.add(
    """
fn sd_sign_i32{V}(x: {I}) -> {I} {
  return select(select({I}(0), {I}(1), x > {I}(0)), {I}(-1), x < {I}(0));
}
"""
)
HELPERS.add(
    """
fn sd_sign_u32{V}(x: {U}) -> {U} {
  return select({U}(0u), {U}(1u), x > {U}(0u));
}
"""
)
