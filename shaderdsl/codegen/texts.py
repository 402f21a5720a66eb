"""Where printed kernels outlive the process. The runtime says where."""

from __future__ import annotations

from typing import Protocol


class Store(Protocol):
    """Texts by key; whatever goes wrong reads as "not there"."""

    def get(self, key: str) -> str | None:
        """The text that was put, or None."""
        ...

    def put(self, key: str, text: str) -> None:
        """Keep a text."""
        ...


#: Without it texts are kept in memory alone.
store: Store | None = None
