"""The pytest plugin: which device tests run on, and which cases are drawn.

``--shaderdsl-device SPEC`` is what ``sd.use_device`` takes; ``--shaderdsl-seed N``
draws other cases in ``check_op`` than the default ones, the same for each N. The
report's head says both, so that a failure can be repeated.

pytest loads this wherever shaderdsl is installed, so it needs nothing when it is not
asked for anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("shaderdsl")
    group.addoption(
        "--shaderdsl-device",
        metavar="SPEC",
        help="the device of the tests: cpu, wgpu, wgpu:<name or number> or dawn",
    )
    group.addoption(
        "--shaderdsl-seed",
        metavar="N",
        type=int,
        help="draw the cases of check_op from this seed",
    )


def pytest_configure(config: pytest.Config) -> None:
    import pytest

    from .errors import ShaderError

    device = config.getoption("--shaderdsl-device")
    if device is not None:
        from .runtime import use_device

        try:
            use_device(device)
        except ShaderError as error:
            raise pytest.UsageError(f"--shaderdsl-device: {error}") from None
    seed = config.getoption("--shaderdsl-seed")
    if seed is not None:
        from .testing import check

        check.default_seed = seed


def pytest_report_header(config: pytest.Config) -> str | None:
    device = config.getoption("--shaderdsl-device")
    seed = config.getoption("--shaderdsl-seed")
    if device is None and seed is None:
        return None
    from .runtime import current

    return f"shaderdsl: device {current().name!r}, seed {seed}"
