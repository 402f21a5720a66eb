"""Which device runs things: the base class, the list of devices and the choice.

Choice is lazy: nothing imports wgpu before the first array needs a device.
"""

from __future__ import annotations

import abc
import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..codegen.target import Target
from ..errors import DeviceError, DeviceLostError, LimitError, NoAdapterError
from . import library
from .buffers import Allocation, Buffer, Pool

if TYPE_CHECKING:
    from ..codegen.program import Kernel, Program
    from .replay import Outcome, Replay

#: How each dtype lies in memory.  A bool is a u32 of 0 or 1.
STORAGE: dict[str, np.dtype[Any]] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "i32": np.dtype(np.int32),
    "u32": np.dtype(np.uint32),
    "bool": np.dtype(np.uint32),
}

#: What NumPy shows of each dtype.
VISIBLE: dict[str, np.dtype[Any]] = STORAGE | {"bool": np.dtype(np.bool_)}


class Executable(abc.ABC):
    """A program made ready for one device; it may be called from several threads."""

    program: Program

    @abc.abstractmethod
    def __call__(
        self, inputs: Sequence[Buffer], scalars: Mapping[str, float] | None = None
    ) -> list[Buffer]:
        """Run it; returns one buffer an output, without waiting for the device.

        Donated inputs are consumed: using them again raises `DonatedError`.
        """

    def launch(
        self, inputs: Sequence[Buffer], scalars: Mapping[str, float] | None = None
    ) -> list[Buffer] | Outcome:
        """The same, with results that may have no buffers yet."""
        return self(inputs, scalars)

    def again(
        self,
        replay: Replay,
        memory: list[Allocation],
        scalars: Mapping[str, float],
        begun: Callable[[], None],
    ) -> Outcome | None:
        """A call in the memory of an earlier one; None if it is not known any more.

        Args:
            memory: of the inputs that `Replay.kept` names.  What of it is donated
                belongs to the results.
            begun: called when that memory is about to be overwritten.
        """
        return None


class Device(abc.ABC):
    """Something that holds arrays and runs programs.

    Attributes:
        name: for people.
        kind: ``"wgpu"`` or ``"cpu"``.
        target: what kernels are planned for.
        pool: its memory and the account of it.
        alive: False once it was destroyed or lost.
    """

    name: str
    kind: str
    target: Target
    pool: Pool
    alive: bool = True

    @abc.abstractmethod
    def build(self, program: Program, *, wait: bool = True) -> Executable:
        """Make a program ready: plan its memory and compile its kernels.

        Args:
            wait: whether for the kernels; else the first call waits for them.

        Raises:
            LimitError: a tensor or a dispatch is larger than the device allows.
            CompilerError: a kernel is not valid; our own fault.
        """

    def expect(self, kernels: Sequence[Kernel]) -> None:  # noqa: B027
        """Kernels of a program that is being planned: they may be compiled already."""

    @abc.abstractmethod
    def upload(self, array: np.ndarray[Any, Any], dtype: str) -> Buffer:
        """Copy an array to the device, converted to ``dtype``'s layout."""

    @abc.abstractmethod
    def fetch(
        self, buffer: Buffer, shape: Sequence[int], dtype: str
    ) -> Callable[[], np.ndarray[Any, Any]]:
        """Begin to copy a buffer into a new array, as it is at this point of the queue.

        What is returned waits for that copy alone, not for what is launched later.
        """

    def download(
        self, buffer: Buffer, shape: Sequence[int], dtype: str
    ) -> np.ndarray[Any, Any]:
        """Copy a buffer into a new array; waits for the work that fills it."""
        return self.fetch(buffer, shape, dtype)()

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Wait until everything that was launched has finished."""

    @abc.abstractmethod
    def destroy(self) -> None:
        """Give the device up: later use of it or its arrays raises an error."""

    def check(self) -> None:
        """Refuse a device that is gone.

        Raises:
            DeviceLostError: it was destroyed or lost.
        """
        if not self.alive:
            raise DeviceLostError(
                f"the device {self.name} is gone, and its arrays with it",
                cure="choose a device again with use_device() and upload the data "
                "again",
            )

    def check_size(self, nbytes: int) -> None:
        """Refuse an array that the device can never hold.

        Raises:
            LimitError: it is larger than the largest buffer.
        """
        limit = self.target.limits.max_buffer_bytes
        if nbytes > limit:
            raise LimitError(
                f"an array of {nbytes:,} B is larger than the largest buffer of "
                f"{self.name}, {limit:,} B",
                cure="split it",
            )

    def __repr__(self) -> str:
        return f"<{self.kind} device {self.name!r}{'' if self.alive else ' (gone)'}>"


@dataclass(frozen=True)
class DeviceInfo:
    """One entry of `devices()`.

    Attributes:
        spec: what to give to `use_device` or to ``SHADERDSL_DEVICE``.
        name: the adapter's name.
        kind: ``"discrete"``, ``"integrated"``, ``"software"``, ``"other"``, ``"cpu"``.
        backend: ``"Vulkan"``, ``"Metal"``, … or ``"numpy"``.
        driver: the driver's own description.
        target: limits and features.
    """

    spec: str
    name: str
    kind: str
    backend: str
    driver: str
    target: Target


_lock = threading.RLock()
_current: Device | None = None
#: The device that `current` chose, and what stands for it, before that too.
_first: weakref.ref[Device] | None = None
_FIRST = object()


def devices() -> list[DeviceInfo]:
    """Every device that could be used: adapters, the preferred first, then ``cpu``."""
    from .cpu import CPU_TARGET

    version = f"NumPy {np.__version__}"
    cpu = DeviceInfo("cpu", "cpu", "cpu", "numpy", version, CPU_TARGET)
    return [*_adapters(), cpu]


def current() -> Device:
    """The device in use; chosen at the first call.

    ``SHADERDSL_DEVICE`` names it: ``cpu``, ``wgpu``, ``wgpu:<name or number>``, or
    ``dawn`` in place of ``wgpu``.
    Without it the best adapter is taken, or ``cpu`` where there is none.

    Raises:
        NoAdapterError: no such adapter; or none at all and ``SHADERDSL_EXPECT_ADAPTER``
            is 1.
    """
    global _current, _first
    # Read without the lock: replacing the reference is atomic.
    device = _current
    if device is None:
        with _lock:
            if _current is None:
                opened = _choose(os.environ.get("SHADERDSL_DEVICE"), None)
                # In this order: `owner` takes no lock.
                _first = _first or weakref.ref(opened)
                _current = opened
            device = _current
    return device


def chosen() -> bool:
    """Whether a device is in use."""
    return _current is not None


def begin_to_choose() -> None:
    """Have another thread do what `current` does at its first call.

    Opening a device takes as long as tracing a model. Whoever needs the device waits
    for it, and is told what goes wrong.
    """

    def choose() -> None:
        with contextlib.suppress(Exception):
            current()

    # No daemon: a process must not end in the middle of a driver's start.
    threading.Thread(target=choose, name="shaderdsl-device").start()


def owner() -> object:
    """Names the device in use in keys of what lies there; chooses none."""
    device = _current
    if device is None or (_first is not None and _first() is device):
        return _FIRST
    return device


def use_device(
    spec: str | Device | None = None, *, limits: str | None = None
) -> Device:
    """Choose the device for what follows, in all threads.

    Args:
        spec: ``"cpu"``, ``"wgpu"``, ``"wgpu:<name or number>"``, ``"dawn"`` (the same
            adapters through wgpudawn, ``pip install shaderdsl[dawn]``; a process runs
            on one of the two), a `Device` that was returned before, or None for the
            default.
        limits: ``"adapter"`` uses all that the adapter offers, ``"portable"`` only what
            every WebGPU implementation guarantees (smaller kernels, no f16, no
            subgroups); by default what ``SHADERDSL_LIMITS`` says, else ``"adapter"``.

    Raises:
        NoAdapterError: there is no such adapter, or wgpudawn is not installed; says
            what there is.
        DeviceError: wgpudawn was asked for where wgpu is in use, or the reverse.
    """
    global _current
    with _lock:
        if isinstance(spec, Device):
            spec.check()
            _current = spec
        elif not isinstance(spec, str | None):
            raise NoAdapterError(
                f"a device is chosen by its name, not by {spec!r}",
                cure="call sd.devices() to see them; e.g. sd.use_device('cpu')",
            )
        else:
            _current = _choose(spec or os.environ.get("SHADERDSL_DEVICE"), limits)
        return _current


def open_device(spec: str | Device) -> Device:
    """A device by its name, without choosing it for what follows.

    Raises:
        NoAdapterError: there is no such device; says what there is.
    """
    if isinstance(spec, Device):
        spec.check()
        return spec
    return _choose(spec, None)


def _adapters() -> list[DeviceInfo]:
    """The adapters, or none where no library can be imported or finds a driver."""
    try:
        from . import adapters
    except (ImportError, OSError, RuntimeError):
        return []
    return [info for _, info in adapters.found()]


def _choose(spec: str | None, limits: str | None) -> Device:
    from .cpu import CpuDevice

    limits = limits or os.environ.get("SHADERDSL_LIMITS") or "adapter"
    if limits not in ("adapter", "portable"):
        raise DeviceError(
            f"limits={limits!r} is not known", cure="say 'adapter' or 'portable'"
        )
    if spec == "cpu":
        return CpuDevice.instance()
    backend, _, wanted = (spec or "").partition(":")
    if backend not in ("", "wgpu", "dawn"):
        raise NoAdapterError(
            f"the device {spec!r} is not known", cure=_what_there_is(_adapters())
        )
    if backend:
        library.choose(backend)
    found = _adapters()
    if wanted:
        matches = [info for info in found if _matches(info, wanted)]
        if not matches:
            raise NoAdapterError(
                f"no adapter is called {wanted!r}", cure=_what_there_is(found)
            )
        return _open(matches[0], limits)
    reason = "no WebGPU adapter was found"
    for info in found:
        try:
            return _open(info, limits)
        except DeviceError as error:  # A broken driver must not hide a working one.
            reason = error.message
    expected = os.environ.get("SHADERDSL_EXPECT_ADAPTER") == "1"
    if spec or expected:
        raise NoAdapterError(
            reason,
            cure="install a Vulkan, Metal or Direct3D 12 driver (Mesa's software "
            "driver will do), or set SHADERDSL_DEVICE=cpu",
        )
    say_once(f"shaderdsl: {reason}; running on the CPU with NumPy")
    return CpuDevice.instance()


def _open(info: DeviceInfo, limits: str) -> Device:
    from .wgpu_device import WgpuDevice

    return WgpuDevice.open(info.spec, limits)


def _matches(info: DeviceInfo, wanted: str) -> bool:
    if wanted.isdigit():
        return info.spec.endswith(f":{wanted}")
    text = f"{info.name} {info.driver} {info.backend}".lower()
    return wanted.lower() in text


def _what_there_is(found: list[DeviceInfo]) -> str:
    names = [f"{i.spec} ({i.name}, {i.backend})" for i in found]
    return "choose one of: " + ", ".join([*names, "cpu"])


_said: set[str] = set()


def say_once(line: str) -> None:
    """Print a line on stderr, once a process."""
    if line not in _said:
        _said.add(line)
        print(line, file=sys.stderr)
