"""Train a byte-level Llama-style transformer on text, with AdamW, or fine-tune one.

Without --text it trains on the documentation that ships inside Python. The last tenth
of the text is held out. DIR gets the newest two checkpoints (Hugging Face layout, with
the optimiser's state beside it), the losses and their curve.

Ctrl-C saves and stops; --resume goes on as if nothing had happened.

--from DIR goes on from a Hugging Face folder: all of its weights, or with --lora
adapters beside them, which are saved as peft saves them. The text becomes tokens by
DIR's tokenizer.json, or bytes where there is none; token files (.npy) are taken as they
are. It is resumed as any other run, with the model that it began from in its place.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from .curve import draw
from .progress import Progress

if TYPE_CHECKING:
    import numpy as np

    from ..finetune import Adapters
    from ..parallel import Group
    from ..trainer import TrainConfig, Trainer

__all__ = ["add_arguments", "run", "train"]

RUNS = Path("runs")
#: option, field of TrainConfig, type, what it is
OPTIONS: tuple[tuple[str, str, type, str], ...] = (
    ("--steps", "steps", int, "steps of the optimiser"),
    ("--batch", "batch", int, "sequences a step"),
    ("--length", "length", int, "bytes a sequence"),
    ("--rate", "peak", float, "peak learning rate"),
    ("--warmup", "warmup", int, "steps until the peak, at most a tenth of all"),
    ("--hidden", "hidden", int, "width of the model"),
    ("--layers", "layers", int, "number of blocks"),
    ("--heads", "heads", int, "query heads"),
    ("--kv-heads", "kv_heads", int, "key/value heads"),
    ("--ffn", "ffn", int, "width of the feed-forward part"),
    ("--seed", "seed", int, "seed of the weights and of the order of the text"),
)
#: options of --lora
LORA: tuple[tuple[str, Any, str], ...] = (
    ("--rank", int, "rank of the adapters (default: 8)"),
    ("--alpha", float, "their scale is A / rank (default: the rank)"),
    ("--targets", str, "names of projections (default: q_proj,v_proj)"),
)
#: fields that a model on disk decides
SIZES = ("hidden", "layers", "heads", "kv_heads", "ffn")
#: peak rates of fine-tuning: of all weights, of adapters
RATES = (1e-4, 1e-3)
#: steps between two readings of the loss: what the curve is made of
READ_EVERY = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--text", nargs="+", metavar="FILE", help="UTF-8 text files, one after another"
    )
    parser.add_argument(
        "--out", metavar="DIR", type=Path, help="default: the next free runs/NNN"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from DIR's newest checkpoint (default: the newest runs/NNN)",
    )
    parser.add_argument(
        "--from", dest="base", metavar="DIR", type=Path, help="the model to fine-tune"
    )
    parser.add_argument(
        "--lora",
        action="store_true",
        help="train low-rank adapters alone (with --from)",
    )
    parser.add_argument(
        "--data-parallel",
        action="store_true",
        help="one of the processes that `mpirun -n N shaderdsl train …` starts: each "
        "has a device and takes its share of every batch",
    )
    for option, kind, text in LORA:
        parser.add_argument(option, type=kind, metavar=option[2].upper(), help=text)
    from ..trainer import TrainConfig

    for option, field, kind, text in OPTIONS:
        default = getattr(TrainConfig, field)
        parser.add_argument(
            option,
            dest=field,
            type=kind,
            metavar="N",
            help=f"{text} (default: {default:g})",
        )
    parser.add_argument(
        "--save-every", type=int, default=100, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--judge-every",
        type=int,
        default=100,
        metavar="N",
        help="steps between two samples of the held-out loss (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    from . import UsageError

    for option in ("save_every", "judge_every"):
        if getattr(args, option) < 1:
            raise UsageError(f"--{option.replace('_', '-')} must be at least 1")
    _needs_safetensors()
    if not args.data_parallel:
        return _run(args, None)
    from .. import parallel

    group = parallel.start()
    with group.guard():
        return _run(args, group)


def _run(args: argparse.Namespace, group: Group | None) -> int:
    from . import UsageError

    args.follows = group is not None and group.rank > 0
    if args.resume:
        trainer, out = _resumed(args)
    elif args.base is not None:
        trainer, out = _tuned(args)
    elif args.lora or any(getattr(args, o[2:]) is not None for o, _, _ in LORA):
        raise UsageError("--lora and its options need --from DIR")
    else:
        trainer, out = _fresh(args)
    return train(trainer, out, args.save_every, args.judge_every, group)


def train(
    trainer: Trainer,
    out: Path,
    save_every: int,
    judge_every: int,
    group: Group | None = None,
) -> int:
    """Runs a trainer to its last step, saving into ``out``; returns the exit status.

    Of several processes the first one judges, saves and prints.
    """
    from ..runtime import current

    config = trainer.config
    per_step = config.batch * config.length
    if group is not None:
        trainer.join(group)
        if group.rank:
            return _follow(trainer, group)
        print(f"{group.size} processes share each batch", flush=True)
    print(
        f"{trainer.parameters:,} parameters; {len(trainer.train_text):,} "
        f"{trainer.unit}s to train on, {len(trainer.held_out_text):,} held out; "
        f"{current().name}; into {out}",
        flush=True,
    )
    if trainer.step < config.steps:
        print("compiling the step, once", flush=True)
    bar = Progress(config.steps, "step", done=trainer.step)
    loss = held_out = None
    with _Interrupt() as interrupt:
        while trainer.step < config.steps and not _stop(interrupt, group):
            trainer.advance()
            step, last = trainer.step, trainer.step == config.steps
            if step % READ_EVERY == 0 or last:
                loss = trainer.mean_loss()
                trainer.history.append({"step": step, "loss": loss})
                _refuse_nan(loss, step, out)
            if step % judge_every == 0 and not last:
                held_out = trainer.held_out_loss(sample=4096)
                trainer.history.append({"step": step, "held_out": held_out})
            if bar.due(step):
                speed = (step - bar.first) * per_step / bar.seconds
                bar.update(step, _note(loss, speed, held_out))
            if step % save_every == 0 and not last:
                trainer.save(out)
        bar.close()
        if trainer.step < config.steps:
            trainer.save(out)
            draw(trainer.history, out / "loss.png")
            again = f"Go on with: shaderdsl train --resume --out {out}"
            print(f"stopped at step {trainer.step}; saved. {again}")
            return 130
        print("judging all of the held-out text", flush=True)
        held_out = trainer.held_out_loss(progress=_Judging())
        trainer.history.append({"step": trainer.step, "whole": held_out})
        folder = trainer.save(out)
    print(f"model: {folder}")
    print(f"curve: {draw(trainer.history, out / 'loss.png')}")
    print(f"held-out loss: {held_out:.3f} nats/{trainer.unit}", flush=True)
    return 0


def _stop(interrupt: _Interrupt, group: Group | None) -> bool:
    return interrupt.seen if group is None else group.any(interrupt.seen)


def _follow(trainer: Trainer, group: Group) -> int:
    """What the other processes do: the same steps, and nothing else."""
    with _Interrupt() as interrupt:
        while trainer.step < trainer.config.steps and not _stop(interrupt, group):
            trainer.advance()
    return 0 if trainer.step == trainer.config.steps else 130


def _note(loss: float | None, speed: float, held_out: float | None) -> str:
    parts = [
        "" if loss is None else f"loss {loss:.3f}",
        f"{speed:,.0f} tokens/s",
        "" if held_out is None else f"held out {held_out:.3f}",
    ]
    return "  ".join(part for part in parts if part)


class _Judging:
    """Shows how much of the held-out text has been judged."""

    bar: Progress | None = None

    def __call__(self, done: int, total: int) -> None:
        if self.bar is None:
            self.bar = Progress(total, "sequence", done=done)
        if self.bar.due(done) and done > self.bar.first:
            self.bar.update(done)
        if done == total:
            self.bar.close()


def _new_folder(args: argparse.Namespace) -> Path:
    from ..errors import CheckpointError

    out: Path = args.out or _next_run()
    if args.follows:  # the first process makes it
        return out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(
            f"{out} is there already; nothing was changed",
            cure="go on with --resume, or give another --out",
        )
    return out


def _tuned(args: argparse.Namespace) -> tuple[Trainer, Path]:
    from .. import finetune
    from ..trainer import TrainConfig
    from . import UsageError

    given = _given(args)
    if sizes := [f for f in SIZES if f in given]:
        raise UsageError(f"--{sizes[0].replace('_', '-')} is decided by {args.base}")
    if not args.lora and any(getattr(args, o[2:]) is not None for o, _, _ in LORA):
        raise UsageError("--rank, --alpha and --targets need --lora")
    adapters = None
    if args.lora:
        names = args.targets and tuple(args.targets.split(","))
        chosen = {"rank": args.rank, "alpha": args.alpha, "targets": names}
        adapters = finetune.Adapters(**{k: v for k, v in chosen.items() if v})
    given.setdefault("peak", RATES[args.lora])
    out = _new_folder(args)
    files = [str(Path(path).resolve()) for path in args.text or ()]
    tuner = finetune.FineTuner(
        args.base,
        TrainConfig(**given),
        finetune.tokens_of(args.base, files),
        files,
        adapters=adapters,
    )
    return tuner, out


def _fresh(args: argparse.Namespace) -> tuple[Trainer, Path]:
    from ..trainer import TrainConfig, Trainer

    out = _new_folder(args)
    files = [str(Path(path).resolve()) for path in args.text or ()]
    return Trainer(TrainConfig(**_given(args)), _text(files), files), out


def _resumed(args: argparse.Namespace) -> tuple[Trainer, Path]:
    from .. import checkpoint, finetune
    from ..trainer import Trainer, about_run, saved_run
    from . import UsageError

    out = args.out or _last_run()
    saved, files = saved_run(out)
    _refuse_changes(saved, _given(args))
    config = dataclasses.replace(saved, steps=args.steps or saved.steps)
    about = about_run(checkpoint.latest(out))
    trainer: Trainer
    if "base" in about:
        base = _same_base(args, *finetune.base_of(about)[:2])
        text = finetune.tokens_of(base, args.text or files)
        trainer = finetune.FineTuner.resume(out, text, config)
    elif args.base or args.lora or any(getattr(args, o[2:]) for o, _, _ in LORA):
        raise UsageError(f"{out} is no fine-tuning; leave out --from and --lora")
    else:
        trainer = Trainer.resume(out, _text(args.text or files), config)
    if trainer.step > config.steps:
        raise UsageError(f"{out} is at step {trainer.step}, past {config.steps}")
    print(f"resumed at step {trainer.step} of {config.steps}", flush=True)
    if config.steps != saved.steps:
        print(f"the schedule ends at step {config.steps} now, not at {saved.steps}")
    return trainer, out


def _same_base(args: argparse.Namespace, base: Path, adapters: Adapters | None) -> Path:
    """Where a fine-tuning began; what is said of it again must be the same."""
    from . import UsageError

    said: dict[str, tuple[Any, Any]] = {}
    if args.base is not None:
        said["--from"] = args.base.resolve(), base
    if args.lora:
        said["--lora"] = True, adapters is not None
    for option, _, _ in LORA:
        value = getattr(args, option[2:])
        if value is not None:
            have = adapters and getattr(adapters, option[2:])
            have = ",".join(have) if isinstance(have, tuple) else have
            said[option] = value, have
    for option, (now, before) in said.items():
        if now != before:
            raise UsageError(
                f"{option} was {before} when this run began and cannot become {now}; "
                "leave it out, or begin a new run"
            )
    return base


def _given(args: argparse.Namespace) -> dict[str, Any]:
    fields = {field: getattr(args, field) for _, field, _, _ in OPTIONS}
    return {field: value for field, value in fields.items() if value is not None}


def _refuse_changes(saved: TrainConfig, given: dict[str, Any]) -> None:
    from . import UsageError

    for option, field, _, _ in OPTIONS:
        value = given.get(field)
        if field != "steps" and value is not None and value != getattr(saved, field):
            raise UsageError(
                f"{option} was {getattr(saved, field)} when this run began and cannot "
                f"become {value}; leave it out, or begin a new run"
            )


def _text(paths: list[str]) -> np.ndarray:
    from .. import data

    return data.encode(data.read_text(paths) if paths else data.default_text())


def _next_run() -> Path:
    taken = [int(p.name) for p in RUNS.glob("[0-9]*") if p.name.isdigit()]
    return RUNS / f"{max(taken, default=0) + 1:03}"


def _last_run() -> Path:
    from . import UsageError

    runs = sorted(
        (p for p in RUNS.glob("[0-9]*") if p.name.isdigit()), key=lambda p: int(p.name)
    )
    if not runs:
        raise UsageError(f"no run in {RUNS}/ to resume; give --out DIR")
    return runs[-1]


def _needs_safetensors() -> None:
    from importlib.util import find_spec

    from ..errors import ShaderError

    if find_spec("safetensors") is None:
        raise ShaderError(
            "checkpoints need the package safetensors, which is not installed",
            cure="pip install 'shaderdsl[nn]'",
        )


def _refuse_nan(loss: float, step: int, out: Path) -> None:
    from ..errors import ShaderError

    if not math.isfinite(loss):
        raise ShaderError(
            f"the loss is {loss} at step {step}; checkpoints in {out} are untouched",
            cure="lower --rate",
        )


class _Interrupt:
    """Turns the first Ctrl-C (or SIGTERM) into a flag; the second one interrupts."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.seen = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._note) for s in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.seen:
            raise KeyboardInterrupt
        self.seen = True
