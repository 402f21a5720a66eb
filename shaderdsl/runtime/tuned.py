"""Tuned choices on disk: one file an adapter, stamped with what they were measured on.

A choice only says how a kernel runs, and every schedule checks that one fits before it
is used, so a file cannot make results wrong. One that was measured on something else,
or that somebody changed, is not used all the same, and says why.

Some files come with the package (`shaderdsl/tuned`). They were made by another version
of the code, so that each choice is used only as long as the default is what it was
measured against, and they are good for all drivers of a family. A user's own file goes
before them.
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
from ..errors import DeviceError
from .diskcache import cache_folder

#: Changes when files are laid out differently.
FORMAT = 2

#: Files that come with the package, named like a user's own.
SHIPPED = Path(__file__).parent.parent / "tuned"

#: Why there are no choices where nobody wants them.
OFF = "tuned schedules are not used: SHADERDSL_TUNE is 0"

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


def family(driver: str) -> str:
    """What drivers of one kind have in common: ``Vulkan 580`` of ``Vulkan 580.159``."""
    backend, _, version = driver.partition(" ")
    return f"{backend} {re.split(r'[^A-Za-z0-9]', version)[0]}"


def file_name(adapter: str) -> str:
    """The name of an adapter's file."""
    slug = re.sub(r"[^A-Za-z0-9]+", "-", adapter).strip("-")[:40]
    digest = hashlib.sha256(adapter.encode()).hexdigest()[:8]
    return f"{slug}-{digest}.json"


def path_of(adapter: str) -> Path:
    """A user's file of an adapter."""
    return cache_folder() / "tuned" / file_name(adapter)


def asked() -> str:
    """``SHADERDSL_TUNE``: "1" searches for whatever a program runs, "0" uses nothing
    that was tuned, "" what there is.

    Raises:
        DeviceError: it is something else.
    """
    text = os.environ.get("SHADERDSL_TUNE", "").strip()
    if text not in ("", "0", "1"):
        raise DeviceError(
            f"SHADERDSL_TUNE={text!r} is not known",
            cure="1 searches for schedules, 0 uses the defaults alone; unset, what was "
            "tuned before",
        )
    return text


def load(adapter: str, driver: str) -> Tuned:
    """The choices for an adapter, those of the package included; ``note`` says why a
    user's file was not used.
    """
    if asked() == "0":
        return Tuned(note=OFF)
    own = load_own(adapter, driver)
    return Tuned({**load_shipped(adapter, driver), **own}, own.note)


def load_own(adapter: str, driver: str) -> Tuned:
    """The choices that were measured here."""
    return _load(path_of(adapter), make_stamp(adapter, driver))


def load_shipped(adapter: str, driver: str) -> Tuned:
    """The choices that come with the package."""
    stamp = {"format": FORMAT, "adapter": adapter, "driver": family(driver)}
    return _load(SHIPPED / file_name(adapter), stamp)


def _load(path: Path, ours: Mapping[str, Any]) -> Tuned:
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
                _numbers(entry["values"]),
                _numbers(entry["over"]) if entry.get("over") else None,
            )
            for key, entry in content["kernels"].items()
        }
        whole = check == _check(stamp, content["kernels"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return _ignored(path, "it is damaged")
    for name, value in ours.items():
        if stamp.get(name) != value:
            return _ignored(
                path,
                f"the {_STAMPS[name]} was {stamp.get(name)!r}, here it is {value!r}",
            )
    if not whole:
        return _ignored(path, "it was changed after it was measured")
    return Tuned(choices)


def _numbers(values: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    return tuple((str(name), int(n)) for name, n in values.items())


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
    if load_own(adapter, driver):
        kernels = json.loads(path.read_text(encoding="utf-8"))["kernels"]
    for key, choice in choices.items():
        kernels[key] = {
            "schedule": choice.schedule,
            "values": dict(choice.values),
            **({"over": dict(choice.over)} if choice.over else {}),
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


def ship(adapter: str, driver: str, folder: Path, made: str) -> Path:
    """Write what was faster than the default here as a file for the package.

    Args:
        made: how, for people: the command, the date.

    Raises:
        OSError: it cannot be read or written.
    """
    chosen = load_own(adapter, driver)
    text = path_of(adapter).read_text(encoding="utf-8")
    kernels = {
        key: entry
        for key, entry in json.loads(text)["kernels"].items()
        if key in chosen and entry["values"] != entry.get("over")
    }
    stamp = {"format": FORMAT, "adapter": adapter, "driver": family(driver)}
    content = {
        "made": f"{made}; {adapter}, {driver}",
        "stamp": stamp,
        "check": _check(stamp, kernels),
        "kernels": kernels,
    }
    path = folder / file_name(adapter)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path


def entries(adapter: str, driver: str) -> list[dict[str, Any]]:
    """What was measured of each kernel, with the choice as text; for people."""
    found: dict[str, dict[str, Any]] = {}
    for choices, path in (
        (load_shipped(adapter, driver), SHIPPED / file_name(adapter)),
        (load_own(adapter, driver), path_of(adapter)),
    ):
        if choices:
            kernels = json.loads(path.read_text(encoding="utf-8"))["kernels"]
            for key, choice in choices.items():
                found[key] = {**kernels[key], "choice": str(choice)}
    return list(found.values())


def _check(stamp: Any, kernels: Any) -> str:
    text = json.dumps([stamp, kernels], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _ignored(path: Path, why: str) -> Tuned:
    return Tuned(note=f"tuned schedules in {path} are not used: {why}")
