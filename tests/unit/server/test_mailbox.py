"""Work for the loop: one action that fails costs only itself."""

from __future__ import annotations

import os
import select
from collections.abc import Callable

from lmcache_persist.server.mailbox import Mailbox


def test_a_failing_action_does_not_hold_up_the_rest() -> None:
    """What was posted after an action that raises is done in the same round."""
    mailbox, done = Mailbox(), []

    def run(action: Callable[[], None]) -> None:
        try:
            action()
        except ZeroDivisionError:
            done.append("failed")

    def fail() -> None:
        raise ZeroDivisionError

    for action in (fail, lambda: done.append("first"), lambda: done.append("second")):
        mailbox.post(action)
    try:
        mailbox.drain(run)
    except ZeroDivisionError:
        done.append("came through")
    assert done == ["failed", "first", "second"]
    assert select.select([mailbox.fd], [], [], 0)[0] == []
    mailbox.close()


def test_what_is_posted_after_the_end_reaches_no_other_file() -> None:
    """A thread that is late does not write to what has the descriptor's number by then."""
    mailbox = Mailbox()
    number = mailbox.fd
    mailbox.close()
    other = os.eventfd(0)
    if other != number:
        os.dup2(other, number, inheritable=False)
    try:
        mailbox.post(lambda: None)
        assert select.select([other], [], [], 0)[0] == []
    finally:
        for fd in {other, number}:
            os.close(fd)
