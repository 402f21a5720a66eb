"""A folder of texts by key: printed kernels, tuned schedules.

A cache must never be the reason that something fails: whatever goes wrong with the
disk reads as "not there".
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """``$SHADERDSL_CACHE``, or the platform's folder for a user's caches."""
    chosen = os.environ.get("SHADERDSL_CACHE")
    if chosen:
        return Path(chosen)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(base)) / "shaderdsl"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


class DiskCache:
    """Texts by key, one file each.

    Args:
        name: a subfolder, e.g. ``"wgsl"``.
        folder: where it lies; the user's cache folder by default.
    """

    def __init__(self, name: str, folder: Path | None = None):
        self._folder = (folder or cache_folder()) / name

    def _path(self, key: str) -> Path:
        return self._folder / _digest(key)

    def get(self, key: str) -> str | None:
        """The text that was put, or None if there is none or the file is damaged."""
        try:
            found = self._path(key).read_bytes().decode("utf-8")
        except (OSError, ValueError):
            return None
        check, _, text = found.partition("\n")
        return text if check == _digest(key + text) else None

    def put(self, key: str, text: str) -> None:
        """Keep a text; readers in other processes see all of it or none."""
        partial = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            number, partial = tempfile.mkstemp(dir=self._folder, prefix=".")
            # As bytes, because text files translate line ends.
            with open(number, "wb") as file:
                file.write(f"{_digest(key + text)}\n{text}".encode())
            os.replace(partial, self._path(key))
        except (OSError, UnicodeError):
            if partial is not None:
                with contextlib.suppress(OSError):
                    os.unlink(partial)
