"""Data-parallel training: several processes, each with a device and a share of a batch.

Processes are started and joined by MPI (``mpirun -n 2 …``, through mpi4py): gradients
are averaged on the host, so that every process makes the same step.
"""

from __future__ import annotations

import hashlib
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from . import tree
from .array import asarray
from .dtypes import NUMPY
from .errors import DataError, ShaderError
from .runtime import devices, use_device

__all__ = ["Group", "start"]

_LOCAL_RANK = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


class Group:
    """The processes that train together.

    Attributes:
        rank: which one this is, from 0 on.
        size: how many there are.
    """

    def __init__(self, communicator: Any):
        self._world = communicator
        self.rank: int = communicator.Get_rank()
        self.size: int = communicator.Get_size()

    def average(self, values: Any) -> Any:
        """The mean over all processes of a pytree of f32 or f16 arrays.

        All of them get the same bits. Waits for the device.
        """
        leaves, structure = tree.flatten(values)
        parts = [np.asarray(x, np.float32) for x in leaves]
        flat = np.concatenate([p.ravel() for p in parts]) if parts else np.zeros(0)
        flat = flat.astype(np.float32)
        self._world.Allreduce(self._in_place(), flat)
        flat /= np.float32(self.size)
        out, at = [], 0
        for x, p in zip(leaves, parts, strict=True):
            mean = flat[at : at + p.size].reshape(p.shape)
            out.append(asarray(mean.astype(NUMPY[x.dtype.name])))
            at += p.size
        return tree.unflatten(structure, out)

    def any(self, flag: bool) -> bool:
        """Whether one of the processes says so."""
        return bool(self._world.allreduce(int(flag)))

    def check_same(self, values: Any, what: str) -> None:
        """Refuse processes that disagree.

        Raises:
            DataError: in all of them, naming those that differ from the first.
        """
        digests = self._world.allgather(_digest(values))
        others = [r for r, d in enumerate(digests) if d != digests[0]]
        if others:
            raise DataError(
                f"process{'es' * (len(others) > 1)} {', '.join(map(str, others))} "
                f"and process 0 disagree on {what}",
                cure="start all processes with the same options, files and checkpoint",
            )

    def share(self, batch: np.ndarray) -> np.ndarray:
        """The rows of a batch that this process works on.

        Raises:
            ShaderError: the batch does not divide.
        """
        each, rest = divmod(len(batch), self.size)
        if rest:
            raise ShaderError(
                f"a batch of {len(batch)} does not divide among {self.size} processes",
                cure="choose a multiple",
            )
        return batch[self.rank * each : (self.rank + 1) * each]

    @contextmanager
    def guard(self) -> Iterator[None]:
        """End all processes when this one fails; the others would wait forever."""
        try:
            yield
        except BaseException:
            if self.size > 1:
                traceback.print_exc()
                print(f"process {self.rank} failed: all end", file=sys.stderr)
                sys.stderr.flush()
                self._world.Abort(1)
            raise

    @staticmethod
    def _in_place() -> Any:
        from mpi4py import MPI

        return MPI.IN_PLACE


def start() -> Group:
    """Join the processes that MPI started, and take a device for this one.

    Without ``SHADERDSL_DEVICE`` the processes of one machine share out its GPUs.

    Raises:
        ShaderError: mpi4py or MPI itself is not installed.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ShaderError(
            f"training on several devices needs MPI: {error}",
            cure="install Open MPI (Debian: apt-get install openmpi-bin) and "
            "pip install 'shaderdsl[mpi]'",
        ) from error
    group = Group(MPI.COMM_WORLD)
    if "SHADERDSL_DEVICE" not in os.environ:
        found = [d for d in devices() if d.kind in ("discrete", "integrated")]
        same = [d for d in found if d.backend == found[0].backend]
        if same:
            use_device(same[_local_rank(group) % len(same)].spec)
    return group


def _local_rank(group: Group) -> int:
    for name in _LOCAL_RANK:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return group.rank


def _digest(values: Any) -> str:
    h = hashlib.sha256()
    leaves, structure = tree.flatten(values)
    h.update(repr(structure).encode())
    for leaf in leaves:
        x = np.asarray(leaf)
        h.update(f"{x.dtype}{x.shape}".encode())
        h.update(np.ascontiguousarray(x).tobytes())
    return h.hexdigest()
