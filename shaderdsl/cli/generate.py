"""Sample text from a trained model.

DIR is a folder that `shaderdsl train` wrote to, one of its checkpoints, or a Hugging
Face folder with a tokenizer.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .progress import Progress

__all__ = ["add_arguments", "load_model", "run", "sample"]


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
    folder = model_folder(args.folder)
    model = load_model(folder)
    bar = Progress(args.max_new_tokens, "token", stream=sys.stderr)
    text = sample(
        model,
        args.prompt,
        codec=codec(folder, model.config.vocab_size),
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        progress=lambda done: bar.update(done) if bar.terminal else None,
    )
    bar.close()
    print(text)
    return 0


def model_folder(folder: Path) -> Path:
    """The checkpoint that a run's folder or a model's folder means."""
    from .. import checkpoint

    return folder if (folder / "config.json").is_file() else checkpoint.latest(folder)


def load_model(folder: Path) -> Any:
    from .. import nn

    return nn.load(folder)


#: text → tokens, tokens → text
Codec = tuple[Callable[[str], Sequence[int]], Callable[[Sequence[int]], str]]


def _bytes_to_text(ids: Sequence[int]) -> str:
    return bytes(ids).decode(errors="replace")


BYTES: Codec = (lambda text: list(text.encode()), _bytes_to_text)


def codec(folder: Path, vocab_size: int) -> Codec:
    """Bytes for a byte-level model, otherwise what ``tokenizer.json`` says."""
    from ..errors import CheckpointError, ShaderError

    path = folder / "tokenizer.json"
    if not path.is_file():
        if vocab_size == 256:
            return BYTES
        raise CheckpointError(
            f"{folder} has {vocab_size} tokens and no tokenizer.json",
            cure="put the model's tokenizer.json beside its config.json",
        )
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ShaderError(
            f"{path} needs the package tokenizers, which is not installed",
            cure="pip install 'shaderdsl[nn]'",
        ) from error
    tokenizer = Tokenizer.from_file(str(path))
    return (lambda text: tokenizer.encode(text).ids), tokenizer.decode


def sample(
    model: Any,
    prompt: str,
    *,
    codec: Codec = BYTES,
    max_new_tokens: int = 200,
    seed: int = 0,
    progress: Callable[[int], None] = lambda done: None,
    **options: Any,
) -> str:
    """The prompt and what the model makes of it; options as of ``model.generate``.

    Where the text outgrows the positions that the model was trained on, it goes on
    from the newest half of them.
    """
    import numpy as np

    encode, decode = codec
    ids, limit = list(encode(prompt)), model.config.max_positions
    end, part = len(ids) + max_new_tokens, 0
    while len(ids) < end:
        whole = len(ids) < limit // 2 or end <= limit
        context = ids if whole else ids[-max(1, limit // 2) :]
        made = model.generate(
            np.asarray(context, np.int32),
            max_new_tokens=min(end - len(ids), limit - len(context)),
            seed=seed + 1_000_003 * part,
            **options,
        )
        ids += [int(token) for token in made[len(context) :]]
        part += 1
        progress(max_new_tokens - (end - len(ids)))
    return decode(ids)
