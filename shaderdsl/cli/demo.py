"""An op, its WGSL, its derivative and its check, then a short training and a sample."""

from __future__ import annotations

import argparse
import inspect
import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np

from .progress import Progress

if TYPE_CHECKING:
    from ..op import Op

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="steps of the training; 0 leaves it out (default: 200, on cpu 40)",
    )


def run(args: argparse.Namespace) -> int:
    import shaderdsl as sd

    from . import UsageError

    device = sd.runtime.current()
    steps = args.steps
    if steps is None:
        steps = 40 if device.kind == "cpu" else 200
    if steps < 0:
        raise UsageError("--steps must not be negative")
    swiglu = _op()
    rng = np.random.default_rng(0)
    gate, up, dy = rng.standard_normal((3, 64, 1000), dtype=np.float32)

    _title("An op, written once")
    print(textwrap.dedent(inspect.getsource(swiglu.function)).strip())
    _title("What it compiles to")
    _kernels(sd.lower(swiglu, gate, up), bindings=True)
    _title("Its derivative, which nobody wrote")
    for name in ("gate", "up"):
        print(swiglu.show(derivative=name).splitlines()[-1].strip())
    _kernels(sd.lower(swiglu, gate, up, backward=True), bindings=False)
    _title(f"Checked against NumPy in float64, on {device.name}")
    good = _check(swiglu, gate, up, dy)
    if steps:
        _title("A transformer made of such ops learns Python's documentation")
        _train(steps)
    return 0 if good else 1


def _op() -> Op:
    import shaderdsl as sd

    @sd.op("... d, ... d -> ... d")
    def swiglu(gate, up):
        """silu(gate) · up"""
        return sd.silu(gate) * up

    return swiglu


def _title(text: str) -> None:
    print(f"\n── {text} {'─' * max(0, 75 - len(text))}", flush=True)


def _kernels(lowered: Any, bindings: bool) -> None:
    """The WGSL without the library's own helpers, which `shaderdsl show` prints."""
    for kernel in lowered.kernels:
        head, _, main = kernel.wgsl.strip().partition("@compute")
        if bindings:
            own = [line for line in head.splitlines() if line.startswith("@group")]
            print("\n".join(own))
        print("@compute" + main)
    count = len(lowered.kernels)
    print(f"({count} kernel{'s' * (count != 1)})")


def _check(swiglu: Op, gate: Any, up: Any, dy: Any) -> bool:
    import shaderdsl as sd

    y, pullback = sd.vjp(swiglu, gate, up)
    dgate, dup = pullback(dy)
    g, u, d = (x.astype(np.float64) for x in (gate, up, dy))
    s = 1 / (1 + np.exp(-g))
    right = {
        "silu(gate) · up": (y, g * s * u),
        "d/dgate": (dgate, d * u * s * (1 + g * (1 - s))),
        "d/dup": (dup, d * g * s),
    }
    good = True
    for name, (got, want) in right.items():
        worst = float(abs(np.asarray(got) - want).max() / abs(want).max())
        good &= worst < 1e-5
        print(f"{name:16} {'agrees' if worst < 1e-5 else 'DIFFERS'} to {worst:.1e}")
    return good


def _train(steps: int) -> None:
    from .. import data
    from ..trainer import TrainConfig, Trainer
    from .generate import sample

    config = TrainConfig(steps=steps)
    trainer = Trainer(config, data.encode(data.default_text()))
    print(f"{trainer.parameters:,} parameters; one step is one compiled plan")
    bar = Progress(steps, "step")
    for step in range(1, steps + 1):
        trainer.advance()
        if bar.due(step):
            tokens = step * config.batch * config.length / bar.seconds
            loss = trainer.mean_loss()
            bar.update(step, f"loss {loss:.3f} nats/byte  {tokens:,.0f} tokens/s")
    bar.close()
    print(f"on a sample of the held-out text: {trainer.held_out_loss(4096):.3f}")
    _title("A sample")
    print(sample(trainer.model, "The ", max_new_tokens=160, temperature=0.7))
    print("\n`shaderdsl train` trains on to a loss below 2 and keeps the model.")
