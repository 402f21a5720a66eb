"""Devices that tests run on."""

from __future__ import annotations

import os

import pytest

import shaderdsl as sd


def has_adapter() -> bool:
    """Whether there is an adapter; where one is expected, its absence fails."""
    found = any(d.spec.startswith("wgpu") for d in sd.devices())
    if not found and os.environ.get("SHADERDSL_EXPECT_ADAPTER") == "1":
        pytest.fail("SHADERDSL_EXPECT_ADAPTER=1, but there is no adapter")
    return found


@pytest.fixture(params=["cpu", "wgpu"])
def device(request):
    """Each device in turn, in use while the test runs."""
    if request.param == "wgpu" and not has_adapter():
        pytest.skip("no adapter")
    yield sd.use_device(request.param)
    sd.use_device("cpu")


@pytest.fixture
def wgpu():
    """An adapter, for tests of what a kernel does."""
    if not has_adapter():
        pytest.skip("no adapter")
    yield sd.use_device("wgpu")
    sd.use_device("cpu")


@pytest.fixture
def cpu():
    """NumPy's device, for tests of what is computed and not of where."""
    return sd.use_device("cpu")
