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

A module of this package is a family of functions; `text` says how they are written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from . import arithmetic, circular, conversion, exponential, hyperbolic, special

__all__ = ["HELPERS", "helper_source", "used_helpers"]

#: Texts of all functions, by name.
HELPERS: dict[str, str] = {
    **special.HELPERS,
    **exponential.HELPERS,
    **circular.HELPERS,
    **hyperbolic.HELPERS,
    **arithmetic.HELPERS,
    **conversion.HELPERS,
}

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
