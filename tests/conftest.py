"""Devices that tests run on."""

from __future__ import annotations

import dataclasses
import os

import judges
import pytest

import shaderdsl as sd
from shaderdsl.codegen.target import Features, Limits


@pytest.fixture(scope="session", autouse=True)
def second_judge():
    """Every shader that was compiled in this process passes Tint, too."""
    texts: set[str] = set()
    try:
        from shaderdsl.runtime.pipelines import Pipelines
    except ImportError:
        yield
        return
    make = Pipelines._make

    def noted(self, kernel, key, future, asked):
        make(self, kernel, key, future, asked)
        if future.exception() is None:
            texts.add(kernel.wgsl)

    Pipelines._make = noted
    yield
    Pipelines._make = make
    if judges.available():
        wrong = judges.refused(
            sorted(filter(judges.in_the_standard, texts)), portable=False
        )
        assert not wrong, f"Tint refuses {len(wrong)} of {len(texts)}:\n{wrong[0]}"


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
def retarget(wgpu):
    """Plan for another target on the same device."""
    device = wgpu
    before = device.target

    def change(**options):
        device.target = dataclasses.replace(device.target, **options)

    yield change
    device.target = before


@pytest.fixture
def schedules(wgpu, retarget):
    """Plan with the schedules of a family: ``"software"``, ``"gpu"``, or
    ``"portable"``, a GPU with the least limits.
    """

    def change(family):
        if family == "gpu":
            features = dataclasses.replace(wgpu.target.features, wide_words=False)
            retarget(family="gpu", features=features)
        elif family == "portable":
            retarget(family="gpu", features=Features(), limits=Limits())
        return family

    return change


@pytest.fixture
def gpu(wgpu, schedules):
    """The adapter, planned for as a GPU."""
    schedules("gpu")
    return wgpu


@pytest.fixture
def cpu():
    """NumPy's device, for tests of what is computed and not of where."""
    return sd.use_device("cpu")
