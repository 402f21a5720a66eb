"""A GPU's clocks: an idle one lowers them, and takes its time to raise them again.

How fast it runs shows in a product that is always the same. Before a row is timed the
product runs until it is about as fast as it has been in this process; if it is slower
after the row, the row was timed at low clocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ..runtime import Device
from ..runtime.timing import has_timestamps, time_once

#: What a product may take longer than the fastest one at full clocks.
_TOLERANCE = 1.04
#: What it takes longer where they are low: they fall to a fifth.
_LOW = 1.5
#: Products in a row before some are timed.
_BURST = 40


class Clocks:
    """Whether a GPU runs as fast as it has shown that it can.

    Args:
        device: one that lowers its clocks; others are always ready.
        seconds: how long the product runs at first, to find out how fast it can be.
        most: seconds after which a device is taken as it is.
    """

    def __init__(self, device: Device, seconds: float = 1.0, most: float = 2.0):
        self.device, self.most = device, most
        self.fastest = float("inf")
        self.fall = device.target.family == "gpu" and has_timestamps(device)
        if not self.fall:
            return
        product, end = self._product(), time.perf_counter() + seconds
        while time.perf_counter() < end:
            self._burst(product)

    def rise(self) -> bool:
        """Wait until the clocks are up; whether they are."""
        if not self.fall:
            return True
        product, end = self._product(), time.perf_counter() + self.most
        while time.perf_counter() < end:
            if self._burst(product) <= _TOLERANCE * self.fastest:
                return True
        return False

    def are_up(self) -> bool:
        """Whether they are, without raising them."""
        if not self.fall:
            return True
        return self._timed(self._product()) <= _LOW * self.fastest

    def _product(self) -> Callable[[], Any]:
        # Made each time: what is measured in between has the memory for itself.
        from .contract_rows import matmul

        return matmul(False, 2048, 2048, 2048).run

    def _burst(self, product: Callable[[], Any]) -> float:
        for _ in range(_BURST):
            product()
        return self._timed(product)

    def _timed(self, product: Callable[[], Any]) -> float:
        spent = time_once(self.device, product, 4)
        self.fastest = min(self.fastest, spent)
        return spent
