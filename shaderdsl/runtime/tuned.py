"""Tuned choices on disk: one file an adapter, stamped with what they were measured on.

A choice only says how a kernel runs, and every schedule checks that one fits before it
is used, so a file cannot make results wrong. One that was measured on something else,
or that somebody changed, is not used all the same, and says why.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..codegen.choice import Choice, Tuned
from .diskcache import cache_folder

#: Changes when files are laid out differently.
FORMAT = 1

#: What a stamp consists of, with the words for people.
_STAMPS = {
    "format": "layout of the file",
    "library": "version of shaderdsl",
    "adapter": "adapter",
    "driver": "driver",
}


def make_stamp(adapter: str, driver: str) -> dict[str, Any]:
    """What a measurement is good for."""
    from ..codegen.templates import version

    return {
        "format": FORMAT,
        "library": version()[:16],
        "adapter": adapter,
        "driver": driver,
    }


def path_of(adapter: str) -> Path:
    """The file of an adapter."""
    slug = re.sub(r"[^A-Za-z0-9]+", "-", adapter).strip("-")[:40]
    digest = hashlib.sha256(adapter.encode()).hexdigest()[:8]
    return cache_folder() / "tuned" / f"{slug}-{digest}.json"


def load(adapter: str, driver: str) -> Tuned:
    """The choices of an adapter; ``note`` says why a file was not used."""
    path = path_of(adapter)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Tuned()
    except (OSError, ValueError) as error:
        return _ignored(path, f"it cannot be read ({error})")
    try:
        content = json.loads(text)
        stamp, check = content["stamp"], content["check"]
        choices = {
            str(key): Choice(
                str(entry["schedule"]),
                tuple((str(k), int(v)) for k, v in entry["values"].items()),
            )
            for key, entry in content["kernels"].items()
        }
        whole = check == _check(stamp, content["kernels"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return _ignored(path, "it is damaged")
    ours = make_stamp(adapter, driver)
    for name, words in _STAMPS.items():
        if stamp.get(name) != ours[name]:
            return _ignored(
                path, f"the {words} was {stamp.get(name)!r}, here it is {ours[name]!r}"
            )
    if not whole:
        return _ignored(path, "it was changed after it was measured")
    return Tuned(choices)


def save(
    adapter: str,
    driver: str,
    choices: Mapping[str, Choice],
    measured: Mapping[str, Mapping[str, Any]],
) -> Path:
    """Add choices to an adapter's file, with what was measured for people to read.

    Choices of the same stamp that are there already are kept; others are dropped.

    Raises:
        OSError: the folder cannot be written.
    """
    path = path_of(adapter)
    kernels: dict[str, Any] = {}
    if load(adapter, driver):
        kernels = json.loads(path.read_text(encoding="utf-8"))["kernels"]
    for key, choice in choices.items():
        kernels[key] = {
            "schedule": choice.schedule,
            "values": dict(choice.values),
            **measured.get(key, {}),
        }
    stamp = make_stamp(adapter, driver)
    content = {"stamp": stamp, "check": _check(stamp, kernels), "kernels": kernels}
    path.parent.mkdir(parents=True, exist_ok=True)
    number, partial = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with open(number, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise
    return path


def entries(adapter: str, driver: str) -> list[dict[str, Any]]:
    """What `save` wrote about each kernel, with the choice as text; for people."""
    found = load(adapter, driver)
    if not found:
        return []
    kernels = json.loads(path_of(adapter).read_text(encoding="utf-8"))["kernels"]
    return [{**kernels[key], "choice": str(choice)} for key, choice in found.items()]


def _check(stamp: Any, kernels: Any) -> str:
    text = json.dumps([stamp, kernels], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _ignored(path: Path, why: str) -> Tuned:
    return Tuned(note=f"tuned schedules in {path} are not used: {why}")
