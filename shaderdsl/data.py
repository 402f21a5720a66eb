"""Text and token files, and batches that depend on nothing but a seed and a step."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .errors import DataError

__all__ = [
    "Batches",
    "default_text",
    "digest",
    "encode",
    "read_text",
    "read_tokens",
    "split",
    "windows",
]


def default_text() -> bytes:
    """The documentation topics that ship inside every CPython, sorted by name.

    About half a megabyte of English with code. The topics of another Python version
    are another text, which is why a checkpoint keeps the digest of its own.
    """
    from pydoc_data.topics import topics

    return "\n\n".join(topics[key] for key in sorted(topics)).encode()


def read_text(paths: Sequence[str | Path]) -> bytes:
    """The files' bytes, one after another, a blank line between two.

    Raises:
        DataError: a file is missing, cannot be read, is empty or is not UTF-8 text.
    """
    return b"\n\n".join(_read_one(Path(path)) for path in paths)


def _read_one(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise DataError(
            f"cannot read {path}: {reason}", cure="give the path of a text file"
        ) from error
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(
            f"{path} is UTF-16, not UTF-8 text",
            cure=f"convert it: iconv -f UTF-16 -t UTF-8 {path}",
        )
    if (at := data.find(b"\0")) >= 0:
        raise DataError(
            f"{path} is not text: it has a zero byte at offset {at}",
            cure="give a UTF-8 text file",
        )
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text: byte {data[error.start]:#04x} at offset "
            f"{error.start} cannot be decoded",
            cure="convert it to UTF-8, for instance with iconv",
        ) from error
    if not data:
        raise DataError(f"{path} is empty", cure="give a file with text in it")
    return data


def encode(text: bytes | str) -> np.ndarray:
    """Byte-level tokens: one number from 0 to 255 a byte, as u8."""
    data = text.encode() if isinstance(text, str) else text
    return np.frombuffer(data, dtype=np.uint8)


def read_tokens(path: str | Path) -> np.ndarray:
    """A token file: a ``.npy`` file with one axis of integers, mapped, not read."""
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot read {path} as tokens: {error}",
            cure="write token files with numpy.save(path, tokens)",
        ) from error
    if not isinstance(tokens, np.ndarray) or tokens.dtype.kind not in "iu":
        found = getattr(tokens, "dtype", type(tokens).__name__)
        raise DataError(f"{path} holds {found}, not integer tokens")
    if tokens.ndim != 1:
        raise DataError(
            f"{path} has the shape {tokens.shape}; a token file has one axis",
            cure="flatten the tokens before saving them",
        )
    return tokens


def digest(tokens: np.ndarray) -> str:
    """SHA-256 of the tokens: tells whether two runs saw the same text."""
    return hashlib.sha256(np.ascontiguousarray(tokens).tobytes()).hexdigest()


def split(tokens: np.ndarray, held_out: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    """The first part, to train on, and the last ``held_out`` of it, to judge by."""
    cut = len(tokens) - int(len(tokens) * held_out)
    return tokens[:cut], tokens[cut:]


@dataclass(frozen=True)
class Batches:
    """Shuffled windows of ``length + 1`` tokens, ``size`` of them a batch.

    ``batches(step)`` is a function of ``seed`` and ``step`` alone: a run that resumes
    at a step sees what the unbroken run would have seen. Every epoch shifts the windows
    by a random offset and visits each once, in an order of its own.
    """

    tokens: np.ndarray
    size: int
    length: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.size < 1 or self.length < 1:
            raise DataError(
                f"a batch of {self.size} sequences of {self.length} tokens is empty"
            )
        if len(self.tokens) <= self.length:
            raise DataError(
                f"{len(self.tokens)} tokens are too few for a sequence of "
                f"{self.length} and the token after it",
                cure="give more text or shorter sequences",
            )

    @property
    def windows(self) -> int:
        """Windows an epoch; the last one is missing where the offset pushes it out."""
        return max(1, (len(self.tokens) - self.length) // self.length)

    def __call__(self, step: int) -> np.ndarray:
        """The batch of ``step``: i32 ``[size, length + 1]``."""
        first = step * self.size
        starts = [self._start(first + row) for row in range(self.size)]
        index = np.asarray(starts)[:, None] + np.arange(self.length + 1)
        return self.tokens[index].astype(np.int32)

    def _start(self, position: int) -> int:
        epoch, within = divmod(position, self.windows)
        offset, order = _epoch(
            self.seed, epoch, self.windows, len(self.tokens), self.length
        )
        return offset + int(order[within]) * self.length


@functools.lru_cache(maxsize=4)
def _epoch(
    seed: int, epoch: int, count: int, total: int, length: int
) -> tuple[int, np.ndarray]:
    rng = np.random.default_rng([seed, epoch])
    room = total - (count * length + 1)  # how far the last window may move
    offset = int(rng.integers(0, min(room, length - 1) + 1))
    return offset, rng.permutation(count)


def windows(tokens: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """All of ``tokens`` as inputs and labels ``[n, length]``, each token judged once.

    Labels past the end are -100, which the loss does not count.
    """
    if len(tokens) < 2:
        raise DataError(
            f"{len(tokens)} held-out tokens cannot be predicted from one another",
            cure="give more text",
        )
    count = -(-(len(tokens) - 1) // length)
    inputs = np.zeros(count * length, np.int32)
    labels = np.full(count * length, -100, np.int32)
    inputs[: len(tokens) - 1] = tokens[:-1]
    labels[: len(tokens) - 1] = tokens[1:]
    return inputs.reshape(count, length), labels.reshape(count, length)
