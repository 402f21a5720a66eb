"""How texts of helper functions are written down.

Every text serves a scalar and a vec4: ``{F} {I} {U} {B}`` are the types and ``{V}`` is
the suffix of function names, empty or ``_v4``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_NAME = re.compile(r"fn (\w+)\{V\}\(")

#: The WGSL types of i32 and u32, for functions that have a text for either.
WHOLE = {"i32": "{I}", "u32": "{U}"}


class Helpers(dict[str, str]):
    """Texts by the function's name."""

    def add(self, text: str, **parts: str) -> None:
        """Add a function.

        Args:
            parts: what takes the place of words in capitals, in this order.
        """
        for word, part in parts.items():
            text = text.replace(word, part)
        text = text.strip()
        match = _NAME.match(text)
        assert match is not None, text
        self[match.group(1)] = text


def polynomial(variable: str, coefficients: Iterable[float]) -> str:
    """Horner's rule; coefficients from the constant upwards."""
    first, *rest = reversed([f"{{F}}({_literal(c)})" for c in coefficients])
    text = first
    for c in rest:
        text = f"fma({text}, {variable}, {c})"
    return text


def _literal(value: float) -> str:
    """A decimal literal that reads back as the same f32 number."""
    text = f"{value:.9g}"
    return text if any(c in text for c in ".en") else text + ".0"
