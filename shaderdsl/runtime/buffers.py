"""Device memory: buffers, the pool that reuses them, and the account of both.

A `Buffer` is what callers hold.  It keeps an allocation alive; when the last buffer of
an allocation is garbage collected, the allocation returns to the pool.  That is safe
without waiting for the device, because the queue runs submissions in order: whoever
gets the memory next writes to it after every earlier reader has finished.
"""

from __future__ import annotations

import bisect
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ..errors import DeviceError, DeviceLostError, DonatedError, OutOfMemoryError

if TYPE_CHECKING:
    from .device import Device

#: Smallest allocation in bytes: one vec4, so that no binding ever has size 0 (a driver
#: aborts the process on that).
MIN_BYTES = 16

#: Free memory in bytes that a pool keeps although nobody has needed as much at once.
KEEP_FREE_BYTES = 256 << 20

_serials = itertools.count(1)

#: How often something changed that calls which are alike take for granted: memory was
#: shared, or an array that they hold was given away or moved.
changes = [0]


def new_serial() -> int:
    """A number that names memory, or who borrows it, once in a process."""
    return next(_serials)


@lru_cache(maxsize=4096)
def size_class(nbytes: int) -> int:
    """Bytes that are allocated for a request: eight steps to each power of two.

    The step bounds waste to 1/8 of the request, and few classes make reuse likely.
    """
    nbytes = max(nbytes, MIN_BYTES)
    step = max(MIN_BYTES, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step


def physical_memory() -> int:
    """Bytes of RAM that this process may use: the machine's, or its container's."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 8 << 30
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            total = min(total, int(file.read()))
    except (OSError, ValueError):
        pass  # No container, or one without a limit ("max").
    return total


class Allocation:
    """One piece of device memory; returns to its pool when nobody holds it.

    Attributes:
        handle: the backend's object (a wgpu buffer, or an ndarray).
        capacity: its size in bytes.
        serial: a number that names this memory for as long as it exists.
        shared: whether several buffers show the same bytes, so that none may be
            written in place.
        parts: ``(offset, nbytes)`` of each buffer of an arena, by offset; None where
            one buffer has it all.  Parts do not overlap, so that each may be written.
    """

    __slots__ = (
        "__weakref__",
        "_pool",
        "capacity",
        "handle",
        "parts",
        "serial",
        "shared",
    )

    def __init__(self, pool: Pool, handle: Any, capacity: int, serial: int):
        self._pool = pool
        self.handle, self.capacity, self.serial = handle, capacity, serial
        self.shared = False
        self.parts: tuple[tuple[int, int], ...] | None = None

    def share(self) -> None:
        """Note that several buffers show the same bytes."""
        if not self.shared:
            self.shared = True
            changes[0] += 1

    def __del__(self) -> None:
        # Runs in any thread at any moment, so it takes no lock: appending is atomic.
        self._pool.returned.append((self.capacity, self.serial))


class Bundle:
    """Allocations that one plan borrows together for each of its calls.

    Attributes:
        allocations: they stay alive, and their memory the same, until the pool takes
            the bundle apart.
        nbytes: their capacity in all.
        serial: a number that names this memory.
    """

    __slots__ = ("allocations", "nbytes", "serial")

    def __init__(self, allocations: list[Allocation]):
        self.allocations = allocations
        self.nbytes = sum(a.capacity for a in allocations)
        self.serial = next(_serials)


class Pool:
    """Allocations by size class, with an account of what is in use.

    Args:
        create: makes a piece of memory of so many bytes.
        reuse: whether memory that comes back is kept for the next request.
        limit: bytes in use at once beyond which an allocation fails, or None.
        max_bytes: the largest piece that may be made.
        on_trim: called before free memory is let go, to drop what refers to it.
    """

    def __init__(
        self,
        create: Callable[[int], Any],
        *,
        reuse: bool = True,
        limit: int | None = None,
        max_bytes: int | None = None,
        on_trim: Callable[[], None] = lambda: None,
    ):
        self._create, self.reuse, self._on_trim = create, reuse, on_trim
        self.limit, self.max_bytes = limit, max_bytes
        self.returned: deque[tuple[int, int]] = deque()
        # The handles of live allocations, where they are to be used again. A handle
        # that only its allocation held would be finalised together with it when both
        # are part of a reference cycle, and come back to the pool dead.
        self._held: dict[int, Any] = {}
        # Sorted by serial, so that a repeated sequence of requests gets the same
        # memory each time and cached bind groups fit again.
        self._free: dict[int, list[tuple[int, Any]]] = {}
        # Bundles that wait for their owner's next call, by owner.  They count as free,
        # and are taken apart as soon as somebody else needs memory.
        self._bundles: dict[int, Bundle] = {}
        self._lock = threading.RLock()
        self._live = self._free_bytes = self._peak = 0

    @property
    def live_bytes(self) -> int:
        """Bytes in use now."""
        with self._lock:
            self._collect()
            return self._live

    @property
    def free_bytes(self) -> int:
        """Bytes kept for reuse now."""
        with self._lock:
            self._collect()
            return self._free_bytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes that were in use at once."""
        return self._peak

    def acquire(self, nbytes: int) -> Allocation:
        """Memory of at least ``nbytes``.

        Raises:
            OutOfMemoryError: it does not fit, even after free memory was let go.
        """
        return self.acquire_all([nbytes])[0]

    def acquire_all(self, sizes: Sequence[int]) -> list[Allocation]:
        """Memory of at least each of these sizes.

        Raises:
            OutOfMemoryError: see `acquire`.
        """
        with self._lock:
            self._collect()
            return [self._acquire(nbytes) for nbytes in sizes]

    def _acquire(self, nbytes: int) -> Allocation:
        capacity = size_class(nbytes)
        if self.max_bytes is not None and capacity > self.max_bytes:
            capacity = -(-nbytes // MIN_BYTES) * MIN_BYTES
            if capacity > self.max_bytes:
                # Limits such as 2³¹-1 are no multiple of a vec4 themselves.
                capacity = -(-nbytes // 4) * 4
        ready = self._free.get(capacity)
        if not ready and self._bundles:
            self._unbundle()
            ready = self._free.get(capacity)
        if ready:
            serial, handle = ready.pop(0)
            self._free_bytes -= capacity
        else:
            if self.limit is not None:
                if self._live + capacity > self.limit:
                    raise self.exhausted(nbytes)
                if self._live + self._free_bytes + capacity > self.limit:
                    self._let_go()
            serial, handle = next(_serials), self._make(capacity, nbytes)
        if self.reuse:
            self._held[serial] = handle
        self._live += capacity
        if self._live > self._peak:
            self._peak = self._live
        return Allocation(self, handle, capacity, serial)

    def borrow(self, owner: int, sizes: Sequence[int]) -> Bundle:
        """Memory for temporaries of these sizes: what the owner gave back, or new.

        Raises:
            OutOfMemoryError: see `acquire`.
        """
        with self._lock:
            bundle = self._bundles.pop(owner, None)
            if bundle is not None:
                self._free_bytes -= bundle.nbytes
                self._live += bundle.nbytes
                self._peak = max(self._peak, self._live)
                return bundle
        return Bundle(self.acquire_all(sizes))

    def give_back(self, owner: int, bundle: Bundle) -> None:
        """End of a call; what runs on the device later comes after it."""
        if not self.reuse:
            return
        with self._lock:
            if owner not in self._bundles:
                self._bundles[owner] = bundle
                self._live -= bundle.nbytes
                self._free_bytes += bundle.nbytes

    def _unbundle(self) -> None:
        """Make what waits in bundles ready for anybody."""
        for bundle in self._bundles.values():
            self._free_bytes -= bundle.nbytes
            self._live += bundle.nbytes
            # Nobody else holds them: the count of references ends here.
            bundle.allocations.clear()
        self._bundles.clear()
        self._collect()

    def trim(self) -> None:
        """Let go of all memory that nobody uses."""
        with self._lock:
            self._collect()
            self._let_go()

    def _make(self, capacity: int, nbytes: int) -> Any:
        try:
            return self._create(capacity)
        except MemoryError:
            self._let_go()
        try:
            return self._create(capacity)
        except MemoryError as error:
            raise self.exhausted(nbytes) from error

    def _let_go(self) -> None:
        if self._bundles:
            self._unbundle()
        if self._free:
            self._on_trim()
        self._free.clear()
        self._free_bytes = 0

    def _collect(self) -> None:
        while self.returned:
            try:
                capacity, serial = self.returned.popleft()
            except IndexError:  # Another thread was faster.
                break
            self._live -= capacity
            if self.reuse:
                # Serials differ, so handles are never compared.
                free = self._free.setdefault(capacity, [])
                bisect.insort(free, (serial, self._held.pop(serial)))
                self._free_bytes += capacity
        if self._free_bytes > max(KEEP_FREE_BYTES, self._peak):
            self._let_go()

    def exhausted(self, nbytes: int) -> OutOfMemoryError:
        """The error for a request of ``nbytes`` that cannot be met."""
        limit = "not told by the driver" if self.limit is None else f"{self.limit:,} B"
        return OutOfMemoryError(
            f"out of device memory: {nbytes:,} B were asked for, {self._live:,} B are "
            f"in use, the limit is {limit}",
            cure="drop arrays that are no longer needed, use smaller batches, or "
            "donate inputs",
        )


class Buffer:
    """A range of device memory, as arrays hold it.

    Attributes:
        device: where it lies.
        nbytes: size of the data in bytes, possibly 0.
        key: ``(serial, offset, nbytes)``: equal keys are the same bytes.  None once it
            was consumed.
    """

    __slots__ = (
        "__weakref__",
        "allocation",
        "device",
        "key",
        "nbytes",
        "offset",
    )

    def __init__(
        self, device: Device, allocation: Allocation, nbytes: int, offset: int = 0
    ):
        self.device, self.allocation = device, allocation
        self.nbytes, self.offset = nbytes, offset
        self.key: tuple[int, int, int] | None = (allocation.serial, offset, nbytes)

    @property
    def consumed(self) -> bool:
        """Whether it was donated and is no longer to be used."""
        return self.key is None

    @property
    def handle(self) -> Any:
        """The backend's object."""
        return self.allocation.handle

    def consume(self) -> None:
        """Give the memory up: it belongs to an output now, or goes back to the pool."""
        if self.key is not None:
            self.key = None
            del self.allocation

    def alias(self) -> Buffer:
        """The same memory under a second name; neither may then be overwritten."""
        self.require(self.device)
        self.allocation.share()
        return Buffer(self.device, self.allocation, self.nbytes, self.offset)

    def view(self, offset: int, nbytes: int) -> Buffer:
        """A range of it; ``offset`` in bytes must suit the device's alignment.

        Raises:
            DeviceError: the range leaves the buffer, or is not aligned.
        """
        self.require(self.device)
        alignment = self.device.target.limits.storage_alignment
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise DeviceError(
                f"bytes {offset} to {offset + nbytes} leave a buffer of {self.nbytes} B"
            )
        if offset % alignment:
            raise DeviceError(f"offset {offset} is no multiple of {alignment} B")
        self.allocation.share()
        return Buffer(self.device, self.allocation, nbytes, self.offset + offset)

    def require(self, device: Device) -> None:
        """Check that ``device`` may use it now.

        Raises:
            DonatedError: it was donated before.
            DeviceLostError: its device is gone.
            DeviceError: it lies on another device.
        """
        if self.consumed:
            raise DonatedError(
                "this array was donated to an earlier call, which reused its memory",
                cure="use what that call returned, or do not donate the argument",
            )
        if self.device is not device:
            if not self.device.alive:
                raise DeviceLostError(
                    f"the device {self.device.name} is gone, and this array with it",
                    cure="upload the data again",
                )
            raise DeviceError(
                f"this array lies on {self.device.name}, the call runs on "
                f"{device.name}",
                cure="convert the array with .numpy() and pass that",
            )


def handed_out(
    device: Device,
    memory: Sequence[Allocation],
    places: Sequence[tuple[int, int, int]],
) -> list[Buffer]:
    """A buffer for each ``(number of its memory, offset, nbytes)``."""
    # Written out: a replay makes hundreds.
    new, out = Buffer.__new__, []
    for number, offset, nbytes in places:
        buffer = new(Buffer)
        buffer.device, buffer.allocation = device, memory[number]
        buffer.nbytes, buffer.offset = nbytes, offset
        buffer.key = (buffer.allocation.serial, offset, nbytes)
        out.append(buffer)
    return out


def consume_all(buffers: Sequence[Buffer], positions: Sequence[int]) -> None:
    """`Buffer.consume` for those at these positions."""
    for position in positions:
        buffer = buffers[position]
        if buffer.key is not None:
            buffer.key = None
            del buffer.allocation


def bound_bytes(nbytes: int) -> int:
    """Bytes to bind for a tensor: whole vec4s, so that vector loads reach its end."""
    return max(MIN_BYTES, -(-nbytes // MIN_BYTES) * MIN_BYTES)
