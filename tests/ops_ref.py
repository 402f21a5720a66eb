"""Values and gradients of single operations that torch computed in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

safetensors = pytest.importorskip("safetensors")
FOLDER = Path(__file__).parent / "data" / "ops_ref"


def load(files: str = "*") -> dict[tuple[str, str], tuple[Any, dict[str, Any]]]:
    """(file, case) → parameters and tensors."""
    out: dict[tuple[str, str], tuple[Any, dict[str, Any]]] = {}
    for path in sorted(FOLDER.glob(f"{files}.safetensors")):
        with safetensors.safe_open(path, "np") as f:
            cases = json.loads(f.metadata()["cases"])
            for name in f.keys():  # noqa: SIM118
                case, _, tensor = name.partition(".")
                _, tensors = out.setdefault((path.stem, case), (cases[case], {}))
                tensors[tensor] = f.get_tensor(name)
    return out
