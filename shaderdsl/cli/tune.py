"""Search for faster schedules on this device. Not in this version yet."""

from __future__ import annotations

import argparse
import sys

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(args: argparse.Namespace) -> int:
    print(
        "shaderdsl tune: not implemented yet; the built-in schedules are used",
        file=sys.stderr,
    )
    return 1
