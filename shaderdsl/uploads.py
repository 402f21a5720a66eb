"""Arrays of the host that go to the device while a plan is made."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from .array import Array
from .errors import ShaderError

#: Bytes from which on that is worth a thread.
LEAST = 1 << 20


@contextmanager
def uploading(arrays: Sequence[Array]) -> Iterator[None]:
    """Meanwhile what the arguments of a call hold on the host is uploaded."""
    waiting = [a for a in arrays if a._buffer is None and a._host is not None]
    if sum(a.nbytes for a in waiting) < LEAST:
        yield
        return
    thread = threading.Thread(target=_upload, args=(waiting,), name="shaderdsl-upload")
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _upload(arrays: Sequence[Array]) -> None:
    try:
        for a in arrays:
            a.buffer()
    except ShaderError:
        return  # The call asks for the same memory, and is told.
