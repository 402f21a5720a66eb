"""Sample text from a trained model.

DIR is a folder that `shaderdsl train` wrote to, one of its checkpoints, or a Hugging
Face folder. Text becomes tokens by the folder's tokenizer.json, or is bytes where there
is none and the model has 256 tokens. With --ids the model goes on from token ids, and
prints ids.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .progress import Progress

__all__ = ["add_arguments", "load_model", "run", "sample"]

#: option, its type, what it is; all are options of ``model.generate``
OPTIONS: tuple[tuple[str, Any, str], ...] = (
    ("--top-k", int, "draw from the N likeliest"),
    ("--top-p", float, "draw from the likeliest that together make up N"),
    ("--min-p", float, "draw from those with N times the greatest probability"),
    ("--repetition-penalty", float, "make tokens that were there less likely"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path)
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--prompt", default="The ", metavar="TEXT", help="default: %(default)r"
    )
    what.add_argument("--ids", metavar="N,N,…", help="token ids in place of a text")
    parser.add_argument(
        "--adapter", metavar="DIR", type=Path, help="low-rank adapters to add (peft)"
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=200, metavar="N", help="default: 200"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="N",
        help="0 takes the likeliest token each time (default: %(default)s)",
    )
    for option, kind, text in OPTIONS:
        parser.add_argument(option, type=kind, metavar="N", help=text)
    parser.add_argument(
        "--stop", default="", metavar="N,N,…", help="token ids that end the text"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")


def run(args: argparse.Namespace) -> int:
    from . import UsageError

    if args.ids is None and not args.prompt:
        raise UsageError("the prompt is empty: give at least one character")
    if args.max_new_tokens < 0:
        raise UsageError("--max-new-tokens must not be negative")
    if args.temperature < 0:
        raise UsageError("--temperature must not be negative")
    stop, prompt = _ids(args.stop, "--stop"), args.prompt
    if args.ids is not None and not _ids(args.ids, "--ids"):
        raise UsageError("--ids is empty: give at least one")
    folder = model_folder(args.folder, "config.json")
    model = load_model(folder)
    if args.adapter is not None:
        from ..nn import lora

        adapter = model_folder(args.adapter, "adapter_config.json")
        model = lora.merge(lora.load(model, adapter))
    words = codec(folder, model.config.vocab_size) if args.ids is None else IDS
    bar = Progress(args.max_new_tokens, "token", stream=sys.stderr)
    names = [option[2:].replace("-", "_") for option, _, _ in OPTIONS]
    text = sample(
        model,
        prompt if args.ids is None else args.ids,
        codec=words,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        seed=args.seed,
        stop=stop,
        progress=lambda n: bar.update(n) if bar.terminal and bar.due(n) else None,
        **{name: getattr(args, name) for name in names},
    )
    bar.close()
    print(text)
    return 0


def model_folder(folder: Path, config: str = "config.json") -> Path:
    """The checkpoint that a run's folder or a model's folder means."""
    from .. import checkpoint

    return folder if (folder / config).is_file() else checkpoint.latest(folder)


def load_model(folder: Path) -> Any:
    from .. import nn

    return nn.load(folder)


#: text → tokens, tokens → text
Codec = tuple[Callable[[str], Sequence[int]], Callable[[Sequence[int]], str]]


def _ids(text: str, option: str) -> list[int]:
    from . import UsageError

    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() for part in parts):
        raise UsageError(f"{option} is a list of numbers like 1,2,3; not {text!r}")
    return [int(part) for part in parts]


def _bytes_to_text(ids: Sequence[int]) -> str:
    return bytes(ids).decode(errors="replace")


BYTES: Codec = (lambda text: list(text.encode()), _bytes_to_text)
IDS: Codec = (lambda text: _ids(text, "--ids"), lambda ids: ",".join(map(str, ids)))


def codec(folder: Path, vocab_size: int) -> Codec:
    """Bytes for a byte-level model, otherwise what ``tokenizer.json`` says."""
    from ..errors import CheckpointError
    from ..finetune import load_tokenizer, tokenizer_of

    path = tokenizer_of(folder)
    if path is None:
        if vocab_size == 256:
            return BYTES
        raise CheckpointError(
            f"{folder} has {vocab_size} tokens and no tokenizer.json",
            cure="put the model's tokenizer.json beside its config.json, or give --ids",
        )
    tokenizer = load_tokenizer(path)
    return (lambda text: tokenizer.encode(text).ids), tokenizer.decode


def sample(
    model: Any,
    prompt: str,
    *,
    codec: Codec = BYTES,
    max_new_tokens: int = 200,
    seed: int = 0,
    stop: Sequence[int] = (),
    progress: Callable[[int], None] = lambda done: None,
    **options: Any,
) -> str:
    """The prompt and what the model makes of it; options as of ``model.generate``.

    Where the text outgrows the positions that the model was trained on, it goes on
    from the newest half of them.
    """
    import numpy as np

    from .. import nn

    encode, decode = codec
    ids, limit = list(encode(prompt)), model.config.max_positions
    begin, part = len(ids), 0
    end, going = begin + max_new_tokens, True
    while going and len(ids) < end:
        whole = len(ids) < limit // 2 or end <= limit
        context = ids if whole else ids[-max(1, limit // 2) :]
        for (token,) in nn.stream(
            model,
            np.asarray(context, np.int32),
            max_new_tokens=min(end - len(ids), limit - len(context)),
            seed=seed + 1_000_003 * part,
            stop=stop,
            **options,
        ):
            assert token is not None
            ids.append(token)
            progress(len(ids) - begin)
            going = token not in stop
        part += 1
    return decode(ids)
