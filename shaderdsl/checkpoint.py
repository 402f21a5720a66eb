"""Folders that appear whole or not at all, and the newest few of them.

A run's folder holds ``step-000200/`` and the like. Each is written under another name,
synced and then renamed, so that a crash at any moment leaves the older ones as they
were and never half of a new one.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from .errors import CheckpointError
from .nn.storage import sync

__all__ = ["latest", "save", "saved", "write_file"]

_NAME = re.compile(r"step-(\d{6,})")


def write_file(path: Path, data: bytes | str) -> None:
    """Replaces a file in one step: written aside, synced and renamed."""
    content = data.encode() if isinstance(data, str) else data
    aside = path.with_name(f".{path.name}.tmp")  # the next writer clears up a dead one
    try:
        with open(aside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync(path.parent)


def save(run: Path, step: int, write: Callable[[Path], None], *, keep: int = 2) -> Path:
    """Makes ``run/step-NNNNNN`` from what ``write(folder)`` puts into a folder.

    Then names it in ``run/latest`` and removes all but the newest ``keep``. A step that
    is there already is left as it is.
    """
    run.mkdir(parents=True, exist_ok=True)
    name = f"step-{step:06d}"
    final, aside = run / name, run / f".{name}.{os.getpid()}.tmp"
    _remove_leftovers(run)
    if final.exists():
        return final
    try:
        aside.mkdir()
        write(aside)
        _sync_tree(aside)
        os.rename(aside, final)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    sync(run)
    write_file(run / "latest", name + "\n")
    for old in saved(run)[:-keep]:
        os.rename(old, run / f".{old.name}.{os.getpid()}.tmp")  # never a half under it
    _remove_leftovers(run)
    return final


def saved(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    found = (p for p in run.glob("step-*") if _NAME.fullmatch(p.name))
    return sorted((p for p in found if p.is_dir()), key=lambda p: int(p.name[5:]))


def latest(run: Path) -> Path:
    """The newest whole checkpoint of a run.

    Raises:
        CheckpointError: there is none.
    """
    # A crash between the rename and the update of `latest` leaves it one behind; the
    # rename is what makes a checkpoint whole, so the names decide.
    if folders := saved(run):
        return folders[-1]
    raise CheckpointError(
        f"no checkpoint in {run}",
        cure="give the folder that `shaderdsl train --out` wrote to",
    )


def _remove_leftovers(run: Path) -> None:
    """What a killed process had begun."""
    for path in run.glob(".step-*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def _sync_tree(folder: Path) -> None:
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            with open(os.path.join(root, name), "rb") as file:
                os.fsync(file.fileno())
        sync(Path(root))
