"""Eight virtual CPU devices, cheap compilation, and a float64 switch.

JAX reads its settings when it is first imported, so they are set here, before any test module is.
Every xdist worker is a process of its own and reads this file too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from zlib import crc32

import pytest
from hypothesis import settings

# The machine's speed is not under test; equal examples in every run make failures repeatable.
settings.register_profile("hetpass", deadline=None, derandomize=True)
settings.load_profile("hetpass")

NUM_DEVICES = 8
_FLAGS = (
    f"--xla_force_host_platform_device_count={NUM_DEVICES}",
    # Compilation dominates small tests: no optimization cuts it to about a quarter.
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)

if "jax" in sys.modules:
    raise RuntimeError("jax was imported before tests/conftest.py could set its flags")
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_FLAGS]).strip()
# Tests that start a process of their own hand this environment on.


@pytest.fixture
def x64() -> Iterator[None]:
    """64-bit types for one test: `@pytest.mark.usefixtures("x64")`, or as an argument."""
    import jax

    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-plans",
        action="store_true",
        help="run every step of tests/programs in all layouts, not in a chosen few",
    )
    parser.addoption(
        "--share",
        type=int,
        default=1,
        metavar="N",
        help="of the tests with parameters run one in N, chosen by name",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    share = config.getoption("--share")
    chosen = [i for i in items if "[" not in i.name or crc32(i.name.encode()) % share == 0]
    left_out = [i for i in items if i not in set(chosen)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = chosen


@pytest.fixture
def all_plans(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--all-plans"))
