"""Waiting for something to become true, with a deadline and without bare sleeps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
DEFAULT_TIMEOUT_S = 20.0
_PAUSE_S = 0.005


def wait_until(condition: Callable[[], T], what: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> T:
    """The first true value of ``condition``.

    Raises:
        AssertionError: it stayed false; the text says ``what``.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not so within {timeout_s:g} s: {what}")
        time.sleep(_PAUSE_S)


def stays(condition: Callable[[], bool], what: str, duration_s: float = 0.3) -> None:
    """Fail if ``condition`` turns false within a short while.

    For "nothing happens": too short a while can only miss a defect, never invent one.
    """
    deadline = time.monotonic() + duration_s
    while time.monotonic() < deadline:
        if not condition():
            raise AssertionError(f"no longer so: {what}")
        time.sleep(_PAUSE_S)
