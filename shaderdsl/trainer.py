"""Trains a byte-level Llama-style transformer and can stop and go on at any step.

One step (forward, backward, clipping, AdamW) is one compiled plan. Nothing is read back
but the loss, and that only when somebody asks for it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from . import checkpoint, data, nn, optim, tree
from .array import Array, asarray
from .errors import CheckpointError, ShaderError
from .function import compile, value_and_grad
from .nn.safetensors import SafetensorsFile
from .parallel import Group
from .runtime import synchronize

__all__ = ["TrainConfig", "Trainer", "saved_run"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All that a run depends on, besides the text.

    The defaults suit a software driver: three minutes on two cores.
    """

    steps: int = 600
    batch: int = 4  # sequences a step
    length: int = 64  # bytes a sequence
    peak: float = 4e-3  # the learning rate after the warm-up
    warmup: int = 60
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    seed: int = 0
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 172

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "length", "warmup"):
            if getattr(self, name) < 1:
                raise ShaderError(f"{name} is {getattr(self, name)}; it must be ≥ 1")
        _ = self.model  # which has sizes of its own to refuse

    @property
    def rising(self) -> int:
        """Steps of warm-up: ``warmup``, but at most a tenth of all."""
        return min(self.warmup, max(1, self.steps // 10))

    @property
    def model(self) -> nn.TransformerConfig:
        return nn.TransformerConfig(
            vocab_size=256,
            hidden_size=self.hidden,
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            ffn_size=self.ffn,
            max_positions=max(self.length, 2),
        )


class Trainer:
    """A model, its optimiser's state and the step they are at.

    Args:
        config: what to train and how.
        text: the tokens; the last tenth is held out.
        source: the files that the text is from; only kept for a later resume.
    """

    def __init__(
        self, config: TrainConfig, text: np.ndarray, source: Sequence[str] = ()
    ):
        self.config, self.text, self.source = config, text, tuple(source)
        self.train_text, self.held_out_text = data.split(text)
        self.batches = data.Batches(
            self.train_text, config.batch, config.length, config.seed
        )
        self._judged = data.windows(self.held_out_text, config.length)
        self.step = 0
        self.history: list[dict[str, float]] = []
        self.model = self._first_model()
        self.optimiser = optim.AdamW(
            lr=optim.cosine(config.peak, config.steps, config.rising),
            betas=config.betas,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
            decay=optim.matrices,
        )
        self.state = self.optimiser.init(self.model)
        self._total = _zero()
        self._counted = 0
        #: one step: (model, state, total, inputs, labels) to the first three, new
        self.train_step = compile(self._step, donate=("model", "state", "total"))
        self._judge = compile(self._judge_batch, donate=("total",))
        self._group: Group | None = None

    #: what one token of the text is
    unit = "byte"

    def _first_model(self) -> Any:
        """What is trained, as it is at step 0."""
        return nn.Transformer.init(self.config.model, seed=self.config.seed)

    def _whole(self, model: Any) -> Any:
        """What is trained, as something that can be called."""
        return model

    @property
    def parameters(self) -> int:
        """How many numbers are trained."""
        return sum(math.prod(x.shape) for _, x in nn.named_arrays(self.model))

    def _step(
        self, model: Any, state: Any, total: Array, inputs: Array, labels: Array
    ) -> tuple[Any, Any, Array]:
        loss, gradients = self._loss_and_gradients(model, inputs, labels)
        return self._updated(model, state, total, loss, gradients)

    def _judge_batch(
        self, model: Any, total: Array, inputs: Array, labels: Array
    ) -> Array:
        logits = self._whole(model)(inputs)
        return total + nn.cross_entropy(logits, labels, reduction="sum")

    def join(self, group: Group) -> None:
        """Train together with other processes: each takes its share of every batch, and
        all make the same step, that of one process on the whole batch.

        Raises:
            ShaderError: the batch does not divide among them.
            DataError: they disagree on the model, the text or the step.
        """
        group.share(self.batches(self.step))
        group.check_same(dataclasses.astuple(self.config), "the options")
        group.check_same(self.text, "the text")
        group.check_same((self.model, self.state, self.step), "the model")
        self._group = group
        self._differentiate = compile(self._loss_and_gradients)
        self._update = compile(
            self._updated, donate=("model", "state", "total", "gradients")
        )

    def _loss_and_gradients(
        self, model: Any, inputs: Array, labels: Array
    ) -> tuple[Array, Any]:
        def loss_of(model: Any) -> Array:
            return nn.cross_entropy(self._whole(model)(inputs), labels)

        loss, gradients = value_and_grad(loss_of)(model)
        return loss, gradients

    def _updated(
        self, model: Any, state: Any, total: Array, loss: Array, gradients: Any
    ) -> tuple[Any, Any, Array]:
        model, state = self.optimiser.update(model, gradients, state)
        return model, state, total + loss

    def advance(self) -> None:
        """One step; returns before the device has done it, unless there are other
        processes to wait for.
        """
        batch = self.batches(self.step)
        if self._group is None:
            self.model, self.state, self._total = self.train_step(
                self.model, self.state, self._total, batch[:, :-1], batch[:, 1:]
            )
        else:
            own = self._group.share(batch)
            mine = self._differentiate(self.model, own[:, :-1], own[:, 1:])
            loss, gradients = self._group.average(mine)
            self.model, self.state, self._total = self._update(
                self.model, self.state, self._total, loss, gradients
            )
        self.step += 1
        self._counted += 1

    def mean_loss(self) -> float:
        """The mean loss of the steps since the last call, in nats a byte.

        Waits for the device and reads one number.
        """
        mean = float(self._total) / max(1, self._counted)
        self._total, self._counted = _zero(), 0
        return mean

    def held_out_loss(
        self,
        sample: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> float:
        """The loss on the text that is not trained on, in nats a byte.

        Args:
            sample: judge about so many bytes, spread over it; by default all of it.
            progress: is told now and then how many of how many sequences are done.
        """
        inputs, labels = self._judged
        if sample is not None:
            wanted = max(1, min(len(inputs), sample // self.config.length))
            chosen = np.linspace(0, len(inputs) - 1, wanted).round().astype(int)
            inputs, labels = inputs[chosen], labels[chosen]
        # in batches of the training's shape, whose kernels are compiled already
        count = self.config.batch
        if short := -len(inputs) % count:
            inputs = np.pad(inputs, ((0, short), (0, 0)))
            labels = np.pad(labels, ((0, short), (0, 0)), constant_values=-100)
        total = _zero()
        for at in range(0, len(inputs), count):
            rows = slice(at, at + count)
            total = self._judge(self.model, total, inputs[rows], labels[rows])
            done = at + count
            if progress is not None and (at // count % 8 == 7 or done == len(inputs)):
                synchronize()
                progress(done, len(inputs))
        return float(total) / int((labels != -100).sum())

    def save(self, run: Path) -> Path:
        """Writes a checkpoint of this step into the run's folder; returns its path."""
        return checkpoint.save(run, self.step, self._write)

    def _write(self, folder: Path) -> None:
        from safetensors.numpy import save_file

        self._write_model(folder)
        leaves = [np.array(leaf) for leaf in tree.leaves(self.state)]
        named = zip(_leaf_names(len(leaves)), leaves)
        save_file(dict(named), folder / "optimizer.safetensors")
        about = {
            "step": self.step,
            "tokens": f"{self.unit}s",
            **self._origin(),
            "text": {
                "sha256": data.digest(self.text),
                "bytes": len(self.text),
                "files": list(self.source),
            },
            "config": dataclasses.asdict(self.config),
            "history": self.history,
        }
        (folder / "trainer.json").write_text(json.dumps(about, indent=1))

    def _write_model(self, folder: Path) -> None:
        nn.save(self.model, folder)

    def _read_model(self, folder: Path) -> Any:
        """What :meth:`_write_model` wrote."""
        return _same_shapes(nn.load(folder), self.model, folder)

    def _origin(self) -> dict[str, Any]:
        """What a checkpoint says about where the model came from."""
        return {}

    @classmethod
    def _begun(
        cls,
        about: dict[str, Any],
        config: TrainConfig,
        text: np.ndarray,
        source: Sequence[str],
    ) -> Self:
        """A trainer at step 0 of the run that a checkpoint is of."""
        if "base" in about:
            raise CheckpointError(
                "a fine-tuning, which goes on from its base",
                cure="resume it with FineTuner.resume",
            )
        return cls(config, text, source)

    @classmethod
    def resume(
        cls, run: Path, text: np.ndarray, config: TrainConfig | None = None
    ) -> Self:
        """Goes on from the newest checkpoint of a run as if it had never stopped.

        Args:
            run: the run's folder.
            text: the same tokens as before.
            config: another one than the saved one, for instance with more steps.

        Raises:
            CheckpointError: there is no checkpoint, it cannot be read, it is of another
                model, or the text is another.
        """
        folder = checkpoint.latest(run)
        about = about_run(folder)
        if about["text"]["sha256"] != data.digest(text):
            raise CheckpointError(
                f"{run} was trained on another text ({about['text']['bytes']:,} bytes; "
                f"this one has {len(text):,})",
                cure="give the same --text files in the same order, unchanged",
            )
        source = about["text"]["files"]
        trainer = cls._begun(about, config or _config(about, folder), text, source)
        trainer.model = trainer._read_model(folder)
        trainer.state = _load_state(folder, trainer.state)
        trainer.step = int(about["step"])
        trainer.history = about["history"]
        return trainer


def saved_run(run: Path) -> tuple[TrainConfig, list[str]]:
    """What a run was started with: its configuration and its text files."""
    folder = checkpoint.latest(run)
    about = about_run(folder)
    return _config(about, folder), about["text"]["files"]


def _zero() -> Array:
    return asarray(np.zeros((), np.float32))


def about_run(folder: Path) -> dict[str, Any]:
    """What a checkpoint says about its run.

    Raises:
        CheckpointError: it cannot be read.
    """
    path = folder / "trainer.json"
    try:
        about = json.loads(path.read_text())
        if not {"step", "text", "config", "history"} <= set(about):
            raise ValueError("entries are missing")
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"cannot read {path}: {error}",
            cure="give a folder that `shaderdsl train --out` wrote to",
        ) from error
    return dict(about)


def _config(about: dict[str, Any], folder: Path) -> TrainConfig:
    try:
        fields = dict(about["config"])
        fields["betas"] = tuple(fields["betas"])
        return TrainConfig(**fields)
    except (TypeError, KeyError) as error:
        raise CheckpointError(
            f"{folder / 'trainer.json'} is of another version: {error}"
        ) from error


def _same_shapes(loaded: Any, wanted: Any, folder: Path) -> Any:
    have, need = nn.state_dict(loaded), nn.state_dict(wanted)
    for name, leaf in need.items():
        if name not in have:
            raise CheckpointError(f"{folder} lacks the weight {name}")
        if have[name].shape != leaf.shape:
            raise CheckpointError(
                f"{folder}: {name} has the shape {have[name].shape}, "
                f"the model's has {leaf.shape}"
            )
    return loaded


def _load_state(folder: Path, state: Any) -> Any:
    path = folder / "optimizer.safetensors"
    stored = SafetensorsFile(path)
    leaves, structure = tree.flatten(state)
    names = _leaf_names(len(leaves))
    if sorted(stored.tensors) != names or any(
        stored.shape(name) != tuple(leaf.shape) for name, leaf in zip(names, leaves)
    ):
        raise CheckpointError(f"{path} holds the state of another model or optimiser")
    return tree.unflatten(structure, [asarray(stored.read(n).copy()) for n in names])


def _leaf_names(count: int) -> list[str]:
    return [f"{i:05}" for i in range(count)]
