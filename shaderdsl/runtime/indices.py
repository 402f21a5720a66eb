"""Checks of indices that are written into a text.

A library checks a shader's indices, or leaves all checks of a device away.  Where it
leaves them away, kernels whose indices are not in range by construction get their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable


def rewritten(text: str, index: Callable[[str, str], str]) -> str:
    """A kernel's text with another index of each array: given the index and the array's
    length, both as texts.
    """
    lengths = {
        name: f"arrayLength(&{name})"
        for name in re.findall(r"var<storage, \w+> (\w+): array<", text)
    }
    lengths |= {
        name: f"{count}u"
        for name, count in re.findall(
            r"var<workgroup> (\w+): array<.*?, (\d+)u?>;", text
        )
    }
    # Ones inside of others last, so that both are looked at.
    place = 0
    while found := re.compile(r"\b(\w+)\[").search(text, place):
        place = found.end()
        if found[1] not in lengths:
            continue
        depth, end = 1, place
        while depth:
            depth += {"[": 1, "]": -1}.get(text[end], 0)
            end += 1
        new = index(text[place : end - 1], lengths[found[1]])
        text = text[:place] + new + text[end - 1 :]
    return text


def checked(text: str) -> str:
    """A kernel's text whose indices are kept in range."""
    return rewritten(text, lambda i, n: f"min(u32({i}), {n} - 1u)")
