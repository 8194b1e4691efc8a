"""One line of a kind per time."""

from __future__ import annotations

import logging

import pytest

from lmcache_persist.store.throttle import Throttle


def test_the_first_is_said_and_the_rest_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Of many at once one is said; the next one said later tells how many were not."""
    throttle = Throttle(logging.getLogger("test"), every_s=3600)
    for number in range(100):
        throttle.warning(f"trouble {number}")
    assert caplog.messages == ["trouble 0"]
    throttle._last_s = -10_000.0
    throttle.warning("trouble again")
    assert caplog.messages[1:] == ["trouble again (and 99 more like it before)"]
