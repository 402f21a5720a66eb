"""Rows of whole models: training steps, decoding, the host's share of a replay."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from . import reference as ref
from . import torch_model
from .work import Row, Work, distance, wide

#: vocabulary, width, layers, heads, heads of keys, width of the feed-forward part,
#: tokens
LARGE = (32000, 768, 12, 12, 4, 2048, 2048)
SMALL = (512, 256, 4, 8, 2, 688, 256)
QUICK = (256, 64, 2, 4, 2, 128, 64)


def _model(shape: tuple[int, ...]) -> Any:
    import shaderdsl as sd

    v, d, layers, heads, kv, ffn, t = shape
    config = sd.nn.TransformerConfig(
        vocab_size=v,
        hidden_size=d,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv,
        ffn_size=ffn,
        max_positions=2 * t,
    )
    return sd.nn.Transformer.init(config, seed=0)


class _Training:
    """A training step with its state, which it gives up and gets back."""

    def __init__(self, shape: tuple[int, ...]):
        import shaderdsl as sd

        self.shape = shape
        self.model = _model(shape)
        self.ids = np.random.default_rng(4).integers(0, shape[0], shape[6] + 1)
        self.ids = self.ids.astype(np.int32)
        optimiser = sd.optim.AdamW(lr=1e-3)
        self.state = optimiser.init(self.model)
        ids, labels = sd.asarray(self.ids[:-1]), sd.asarray(self.ids[1:])
        # Before the first step, which donates the weights.
        self.weights = {k: wide(v) for k, v in sd.nn.state_dict(self.model).items()}

        def train_step(model: Any, state: Any, ids: Any, labels: Any) -> Any:
            def loss_of(model: Any) -> Any:
                return sd.nn.cross_entropy(model(ids), labels)

            loss, gradients = sd.value_and_grad(loss_of)(model)
            model, state = optimiser.update(model, gradients, state)
            return model, state, loss

        compiled = sd.compile(train_step, donate=("model", "state"))
        start = time.perf_counter()
        self.first = self._step(compiled, ids, labels)
        self.first_loss = float(self.first)
        self.first_call = time.perf_counter() - start
        self.step = lambda: self._step(compiled, ids, labels)

    def _step(self, compiled: Any, ids: Any, labels: Any) -> Any:
        self.model, self.state, loss = compiled(self.model, self.state, ids, labels)
        return loss

    def wall(self, count: int) -> float:
        """Seconds a step when ``count`` of them follow each other."""
        import shaderdsl as sd

        sd.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            self.step()
        sd.synchronize()
        return (time.perf_counter() - start) / count


def training(quick: bool, shape: tuple[int, ...]) -> Work:
    import shaderdsl as sd

    shape = QUICK if quick else shape
    run = _Training(shape)

    def error(_: Any) -> float:
        want = ref.llama_loss(run.weights, run.ids, run.model.config)
        run.weights.clear()
        return distance(run.first_loss, want)

    def seconds() -> float:
        count = 2 if quick else 10
        return statistics.median(run.wall(count) for _ in range(3 if quick else 7))

    def more() -> dict[str, Any]:
        with sd.profile() as p:
            run.step()
        return {
            "first_call_s": round(run.first_call, 2),
            "peak_MiB": p.peak_bytes >> 20,
            "compiled_after": p.compiled,
        }

    return Work(
        run.step,
        error,
        flops=_training_flops(shape),
        tolerance=1e-4,
        torch=lambda t, compiled: torch_model.training(t, shape, compiled),
        seconds=seconds,
        more=more,
    )


def _training_flops(shape: tuple[int, ...]) -> int:
    """Of the products, three times those of forward, and of causal attention, whose
    backward counts 2.5 times its forward. Rows of the embedding are only looked up.
    """
    v, d, layers, heads, kv, ffn, t = shape
    weights = v * d + layers * (2 * d * d + 2 * d * d * kv // heads + 3 * d * ffn)
    return 6 * weights * t + 7 * layers * t * t * d


def replay(quick: bool) -> Work:
    """Host time of a dispatch: a training step is launched, nobody waits."""
    import shaderdsl as sd

    run = _Training(QUICK if quick else SMALL)
    with sd.profile() as p:
        run.step()
    dispatches = p.dispatches

    def seconds() -> float:
        times = []
        for _ in range(15):
            sd.synchronize()
            start = time.perf_counter()
            run.step()
            times.append(time.perf_counter() - start)
        return statistics.median(times) / dispatches

    return Work(
        run.step,
        lambda loss: 0.0 if np.isfinite(float(loss)) else float("inf"),
        seconds=seconds,
        more=lambda: {"dispatches": dispatches},
    )


def decoding(quick: bool) -> Work:
    """Greedy decoding of one sequence; a unit of work is a token."""
    import shaderdsl as sd

    shape = QUICK if quick else LARGE
    model = _model(shape)
    prompt = np.random.default_rng(6).integers(0, shape[0], 32).astype(np.int32)
    count = 16 if quick else 128

    def generate(n: int) -> Any:
        return model.generate(prompt, max_new_tokens=n)

    def error(_: Any) -> float:
        """Of the loss of a short text under the model."""
        weights = {k: wide(v) for k, v in sd.nn.state_dict(model).items()}
        got = sd.nn.cross_entropy(model(prompt[:-1]), prompt[1:])
        return distance(float(got), ref.llama_loss(weights, prompt, model.config))

    def seconds() -> float:
        def wall(n: int) -> float:
            start = time.perf_counter()
            generate(n)
            return time.perf_counter() - start

        # The prompt and what precedes the tokens cancel out.
        rounds = [wall(count + 1) - wall(1) for _ in range(3)]
        return statistics.median(rounds) / count

    def more() -> dict[str, Any]:
        """Dispatches of a token."""
        counts = []
        for n in (2, 3):
            with sd.profile() as p:
                generate(n)
            counts.append(p.dispatches)
        return {"dispatches": counts[1] - counts[0]}

    def call(t: Any, compiled: bool) -> Callable[[], Any]:
        return torch_model.decoding(t, shape, compiled, len(prompt) + count)

    return Work(
        lambda: generate(2),
        error,
        tolerance=1e-4,
        torch=call,
        compiles=False,
        seconds=seconds,
        more=more,
    )


MODEL_ROWS = [
    Row(
        "train_124M",
        "training step, 124.7 M parameters, 2048 tokens",
        "ms",
        45,
        lambda q: training(q, LARGE),
    ),
    Row(
        "train_3M",
        "training step, 3.0 M parameters, 256 tokens",
        "ms",
        3.5,
        lambda q: training(q, SMALL),
    ),
    Row(
        "decode_124M",
        "greedy decoding, 124.7 M parameters, one sequence",
        "tokens/s",
        None,
        decoding,
        beats="torch",
    ),
    Row("replay", "host time of a dispatch in a replayed plan", "µs", 2, replay),
]
