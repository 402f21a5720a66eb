"""Sample text from a trained byte-level model.

DIR is a folder that `shaderdsl train` wrote to, or one of its checkpoints.
"""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path)
    parser.add_argument(
        "--prompt", default="The ", metavar="TEXT", help="default: %(default)r"
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=200, metavar="N", help="default: 200"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="0 takes the likeliest byte each time (default: %(default)s)",
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="of the K likeliest")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="of the likeliest that make up P"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")


def run(args: argparse.Namespace) -> int:
    from . import UsageError

    if not args.prompt:
        raise UsageError("the prompt is empty: give at least one character")
    if args.max_new_tokens < 0:
        raise UsageError("--max-new-tokens must not be negative")
    if args.temperature < 0:
        raise UsageError("--temperature must not be negative")
    model = load_model(args.folder)
    text = sample(
        model,
        args.prompt,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
    )
    print(text)
    return 0
