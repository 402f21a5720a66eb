"""Training that goes on from a model on disk: all of its weights, or adapters alone."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from . import data, nn, tree
from .errors import CheckpointError, ShaderError
from .trainer import TrainConfig, Trainer

__all__ = ["Adapters", "FineTuner", "base_of", "tokenizer_of", "tokens_of"]

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """Which low-rank adapters are trained; see :func:`shaderdsl.nn.lora.attach`."""

    rank: int = 8
    alpha: float | None = None
    targets: tuple[str, ...] = ("q_proj", "v_proj")


class FineTuner(Trainer):
    """A :class:`Trainer` whose model comes from a Hugging Face folder.

    Its checkpoints are such folders again, or peft's adapter folders. Resuming needs
    the model that it came from, unchanged where adapters alone were saved.

    Args:
        folder: where the model is.
        config: as of a trainer; what it says about the model's sizes is not used.
        tokens: integers below the model's vocabulary; the last tenth is held out.
        adapters: train these and leave the weights as they are.

    Raises:
        CheckpointError: the folder holds no model that is known.
        ShaderError: sequences longer than the model's positions, tokens that it does
            not have, adapters that do not fit.
    """

    def __init__(
        self,
        folder: Path,
        config: TrainConfig,
        tokens: np.ndarray,
        source: Sequence[str] = (),
        *,
        adapters: Adapters | None = None,
    ):
        self.folder, self.adapters = Path(folder), adapters
        self._loaded = nn.load(self.folder)
        limit = self._loaded.config.max_positions
        if config.length > limit:
            raise ShaderError(
                f"sequences of {config.length}, but {folder} has {limit} positions",
                cure="train on shorter ones",
            )
        if len(tokens) and int(tokens.max()) >= self._loaded.config.vocab_size:
            raise ShaderError(
                f"the text has token {tokens.max()}, {folder} has "
                f"{self._loaded.config.vocab_size} tokens"
            )
        self.unit = "token" if tokenizer_of(self.folder) else "byte"
        super().__init__(config, tokens, source)

    def _first_model(self) -> Any:
        if self.adapters is None:
            return self._loaded
        a = self.adapters
        whole = nn.lora.attach(
            self._loaded,
            rank=a.rank,
            alpha=a.alpha,
            targets=a.targets,
            seed=self.config.seed,
        )
        ours, self._frozen = nn.lora.split(whole)
        return ours

    def _whole(self, model: Any) -> Any:
        # The frozen weights are captured: no argument, no gradient.
        return model if self.adapters is None else nn.lora.join(model, self._frozen)

    def _origin(self) -> dict[str, Any]:
        adapters = self.adapters
        origin = {
            "folder": str(self.folder.resolve()),
            "adapters": None if adapters is None else dataclasses.asdict(adapters),
            "sha256": None if adapters is None else self._digest,
        }
        return {"base": origin}

    @functools.cached_property
    def _digest(self) -> str:
        """Of the weights that adapters stand beside."""
        digest = hashlib.sha256()
        for path in sorted(self.folder.glob("*.safetensors")):
            with open(path, "rb") as file:
                while block := file.read(1 << 24):
                    digest.update(block)
        return digest.hexdigest()

    @classmethod
    def _begun(
        cls,
        about: dict[str, Any],
        config: TrainConfig,
        text: np.ndarray,
        source: Sequence[str],
    ) -> Self:
        folder, adapters, digest = base_of(about)
        tuner = cls(folder, config, text, source, adapters=adapters)
        if digest is not None and digest != tuner._digest:
            raise CheckpointError(
                f"{folder} has other weights than when the fine-tuning began",
                cure="put the model back that its adapters were trained for",
            )
        return tuner

    def _read_model(self, folder: Path) -> Any:
        if self.adapters is None:
            return super()._read_model(folder)
        ours, _ = nn.lora.split(nn.lora.load(self._loaded, folder))
        leaves, structure = tree.flatten(self.model)
        found = tree.leaves(ours)
        if [x.shape for x in found] != [x.shape for x in leaves]:
            raise CheckpointError(f"{folder} holds other adapters than {self.adapters}")
        return tree.unflatten(structure, found)

    def _write_model(self, folder: Path) -> None:
        if self.adapters is not None:
            nn.lora.save(self._whole(self.model), folder, base=str(self.folder))
            return
        nn.save(self.model, folder)
        if path := tokenizer_of(self.folder):
            shutil.copy(path, folder / TOKENIZER)


def base_of(about: dict[str, Any]) -> tuple[Path, Adapters | None, str | None]:
    """Folder, adapters and digest of the model that a fine-tuning began from.

    Raises:
        CheckpointError: the checkpoint is of none.
    """
    try:
        base = about["base"]
        adapters = base["adapters"]
        if adapters is not None:
            adapters = Adapters(**{**adapters, "targets": tuple(adapters["targets"])})
        return Path(base["folder"]), adapters, base["sha256"]
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"the checkpoint is of no fine-tuning that can be resumed: {error}"
        ) from error


def tokenizer_of(folder: Path) -> Path | None:
    """The folder's tokenizer, where it has one."""
    path = Path(folder) / TOKENIZER
    return path if path.is_file() else None


def tokens_of(folder: Path, paths: Sequence[str]) -> np.ndarray:
    """Text files as the tokens of a model: its tokenizer's, or bytes; or .npy files.

    Raises:
        DataError: a file is missing or of another kind.
        CheckpointError: a tokenizer that cannot be read.
    """
    if paths and all(str(p).endswith(".npy") for p in paths):
        return np.concatenate([data.read_tokens(p) for p in paths])
    # A text for another vocabulary is refused when it meets the model.
    text = data.read_text(paths) if paths else data.default_text()
    path = tokenizer_of(folder)
    if path is None:
        return data.encode(text)
    ids = load_tokenizer(path).encode(text.decode(), add_special_tokens=False).ids
    return np.asarray(ids, np.int32)


def load_tokenizer(path: Path) -> Any:
    """A ``tokenizer.json`` through the package tokenizers.

    Raises:
        ShaderError: the package is not there.
        CheckpointError: the file cannot be read.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ShaderError(
            f"{path} needs the package tokenizers, which is not installed",
            cure="pip install 'shaderdsl[nn]'",
        ) from error
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing narrower
        raise CheckpointError(f"cannot read {path}: {error}") from error
