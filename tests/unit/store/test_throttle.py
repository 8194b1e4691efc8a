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


def test_a_burst_is_said_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    """Kinds that come in numbers get so many lines, at their level, then are counted."""
    caplog.set_level(logging.INFO)
    throttle = Throttle(logging.getLogger("test"), every_s=3600, burst=3)
    for number in range(5):
        throttle.info(f"event {number}")
    assert caplog.messages == ["event 0", "event 1", "event 2"]
    throttle._last_s = -10_000.0
    throttle.error("trouble")
    assert caplog.records[-1].levelname == "ERROR"
    assert caplog.messages[-1] == "trouble (and 2 more like it before)"


def test_a_trace_is_of_the_exception_at_hand(caplog: pytest.LogCaptureFixture) -> None:
    """A defect is said with its traceback."""
    try:
        raise ValueError("a defect")
    except ValueError:
        Throttle(logging.getLogger("test")).error("it failed", trace=True)
    assert caplog.records[0].exc_info is not None
    assert "a defect" in caplog.text
