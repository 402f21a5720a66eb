"""List the devices that ops can run on; * marks the one in use.

The first column is what --device and SHADERDSL_DEVICE take.
"""

from __future__ import annotations

import argparse

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--limits", action="store_true", help="also print limits and features"
    )


def run(args: argparse.Namespace) -> int:
    from .. import runtime

    used = runtime.current().name
    found = runtime.devices()
    width = max(len(info.spec) for info in found)
    marked = False
    for info in found:
        mark = "*" if info.name == used and not marked else " "
        marked |= mark == "*"
        print(
            f"{mark} {info.spec:{width}}  {info.name} "
            f"({info.kind}, {info.backend}, {info.driver})"
        )
        if args.limits:
            print(f"      {info.target}")
    return 0
