"""The command line: ``shaderdsl COMMAND``.

Exit status: 0 all went well, 1 it did not, 2 the command was written wrongly, 130 it
was interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from ..errors import ShaderError

__all__ = ["main"]

#: command, the module of this package that holds it, what it does
COMMANDS = (
    ("demo", "demo", "an op, its WGSL, its derivative, its check; then a training"),
    ("devices", "devices", "list the devices that ops can run on"),
    ("show", "show", "print what an op compiles to, or its formula"),
    ("check", "check", "test ops against their reference, forward and gradients"),
    ("train", "train", "train a byte-level transformer on text"),
    ("generate", "generate", "sample text from a trained model"),
    ("web", "web", "write a site that trains and generates in the browser"),
    ("bench", "bench", "time the basic kernels on this device"),
    ("tune", "tune", "search for faster schedules on this device"),
    ("completion", "completion", "print completions for a shell"),
)

EXAMPLES = """\
first steps:
  shaderdsl demo                                an op from its definition to training
  shaderdsl show model.py:rms_norm              the WGSL of an op of your own
  shaderdsl show model.py:rms_norm --backward   that of its derivative
  shaderdsl check model.py                      your ops against float64
  shaderdsl train --out runs/mine               a small transformer
  shaderdsl generate runs/mine --prompt "The "

Every command has --help with examples. --device, or SHADERDSL_DEVICE, chooses where
things run: cpu, wgpu, wgpu:0, wgpu:NAME, dawn. Exit status: 0 all went well, 1 it did
not, 2 the command was written wrongly, 130 it was interrupted.
"""


class UsageError(Exception):
    """The command was written wrongly in a way that argparse cannot see."""


def parser() -> argparse.ArgumentParser:
    """The whole parser; each command's module adds its own options to its part."""
    top = argparse.ArgumentParser(
        prog="shaderdsl",
        description="GPU operations as expressions: their derivative and their WGSL.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=_version())
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module, summary in COMMANDS:
        command = import_module(f".{module}", __name__)
        part = commands.add_parser(
            name,
            help=summary,
            description=command.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        part.add_argument(
            "--device",
            metavar="NAME",
            help="cpu, wgpu, wgpu:NAME, dawn (default: best)",
        )
        command.add_arguments(part)
        part.set_defaults(run=command.run, part=part)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    args = parser().parse_args(argv)
    try:
        if args.device is not None:
            from .. import use_device

            use_device(args.device)
        return int(args.run(args) or 0)
    except UsageError as error:
        args.part.print_usage(sys.stderr)
        print(f"shaderdsl {args.command}: error: {error}", file=sys.stderr)
        return 2
    except ShaderError as error:
        print(f"shaderdsl {args.command}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `shaderdsl show … | head`
        sys.stderr.close()
        return 1
    except OSError as error:
        print(f"shaderdsl {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"shaderdsl {args.command}: interrupted", file=sys.stderr)
        return 130


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"shaderdsl {version('shaderdsl')}"
    except PackageNotFoundError:  # run from a checkout
        return "shaderdsl (not installed)"
