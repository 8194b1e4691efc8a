"""What all tests share: Hypothesis profiles, the seed, marks by folder."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

TESTS = Path(__file__).parent
SEED = int(os.environ.get("LMCACHE_PERSIST_TEST_SEED", "20240229"))
TIMEOUTS_S = {"engine": 600, "crash": 180, "integration": 180}

# The machines that run the tests are shared: an example's duration says nothing.
_common = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", derandomize=True, print_blob=True, **_common)
settings.register_profile("default", print_blob=True, **_common)
settings.register_profile("nightly", max_examples=2000, print_blob=True, **_common)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default")
)


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job ignores Ctrl-C, and so would every program that tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    """The seed of this run, so that a failure can be had again."""
    return f"seed: {SEED} (LMCACHE_PERSIST_TEST_SEED; Hypothesis: --hypothesis-seed)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their folder and give the slow kinds a longer time limit."""
    for item in items:
        if not item.path.is_relative_to(TESTS):
            continue
        folder = item.path.relative_to(TESTS).parts[0]
        if folder in TIMEOUTS_S:
            item.add_marker(getattr(pytest.mark, folder))
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TIMEOUTS_S[folder]))


@pytest.fixture
def seed() -> int:
    """The seed of this run, for tests that draw at random."""
    return SEED


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the developer's shell leaks into a test."""
    for name in list(os.environ):
        if name.startswith("LMCACHE_PERSIST_") and name != "LMCACHE_PERSIST_TEST_SEED":
            monkeypatch.delenv(name)
