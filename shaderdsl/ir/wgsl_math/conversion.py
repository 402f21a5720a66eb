"""Conversions between types, bits, and rounding to f16."""

from __future__ import annotations

from .text import WHOLE, Helpers

HELPERS = Helpers()

HELPERS.add(
    """
fn sd_to_i32_f32{V}(x: {F}) -> {I} {
  let v = {I}(clamp(x, {F}(-2147483648.0), {F}(2147483520.0)));
  let w = select(v, {I}(2147483647), x >= {F}(2147483648.0));
  return select(w, {I}(0), sd_isnan{V}(x));
}
"""
)
HELPERS.add(
    """
fn sd_to_u32_f32{V}(x: {F}) -> {U} {
  let v = {U}(clamp(x, {F}(0.0), {F}(4294967040.0)));
  let w = select(v, {U}(4294967295u), x >= {F}(4294967296.0));
  return select(w, {U}(0u), sd_isnan{V}(x));
}
"""
)
for _to, _result in WHOLE.items():
    for _dtype, _type in WHOLE.items():
        HELPERS.add(
            """
fn sd_to_TO_DTYPE{V}(x: TYPE) -> RESULT {
  return bitcast<RESULT>(x);
}
""",
            TO=_to,
            DTYPE=_dtype,
            TYPE=_type,
            RESULT=_result,
        )
    HELPERS.add(
        """
fn sd_to_TO_bool{V}(x: {B}) -> RESULT {
  return select(RESULT(0), RESULT(1), x);
}
""",
        TO=_to,
        RESULT=_result,
    )
for _dtype, _type, _xor, _not in (
    ("i32", "{I}", "a ^ b", "~a"),
    ("u32", "{U}", "a ^ b", "~a"),
    ("bool", "{B}", "a != b", "!a"),
):
    _parts = {"DTYPE": _dtype, "TYPE": _type}
    HELPERS.add(
        """
fn sd_xor_DTYPE{V}(a: TYPE, b: TYPE) -> TYPE {
  return XOR;
}
""",
        XOR=_xor,
        **_parts,
    )
    HELPERS.add(
        """
fn sd_not_DTYPE{V}(a: TYPE) -> TYPE {
  return NOT;
}
""",
        NOT=_not,
        **_parts,
    )
# The bits are rounded as integers; below 2^-14 the last place of f16 is that of 0.5.
HELPERS.add(
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
