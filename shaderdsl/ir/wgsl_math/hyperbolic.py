"""Hyperbolic functions, the sigmoid, the error function and softplus."""

from __future__ import annotations

from .exponential import POWER
from .text import Helpers, polynomial

HELPERS = Helpers()

_SINH = (0.1666666716337204, 0.008333350531756878, 1.983606634894386e-4, 2.81743974e-6)
HELPERS.add(
    """
fn sd_sinh{V}(x: {F}) -> {F} {
  let a = abs(x);
  let z = x * x;
  let h = sd_exp_offset{V}(a, 126);
  let v = h - {F}(0.25) / h;
  let near = fma(x * z, POLY, x);
  return select(select(v, -v, x < {F}(0.0)), near, a < {F}(1.0));
}
""",
    POLY=polynomial("z", _SINH),
)
HELPERS.add(
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
HELPERS.add(
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
""",
    POLY=polynomial("z", _TANH),
    EXP2=polynomial("f", _HALF_EXP2),
    POWER=str(POWER),
)
HELPERS.add(
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
HELPERS.add(
    """
fn sd_erf{V}(x: {F}) -> {F} {
  let a = abs(x);
  let z = x * x;
  let near = fma(x, NEAR, x);
  let v = {F}(1.0) - sd_exp{V}(fma(a, FAR, -a));
  return select(select(v, -v, x < {F}(0.0)), near, a < {F}(0.9277));
}
""",
    NEAR=polynomial("z", _ERF_NEAR),
    FAR=polynomial("a", _ERF_FAR),
)
HELPERS.add(
    """
fn sd_softplus{V}(x: {F}) -> {F} {
  return max(x, {F}(0.0)) + sd_log1p{V}(sd_exp{V}(-abs(x)));
}
"""
)
