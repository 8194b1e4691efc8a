"""Functions that die at a failpoint, in a process of their own: quicker than a new Python."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable

from lmcache_persist import failpoints


def dies_at(spec: str, action: Callable[[], object]) -> None:
    """Run ``action`` in a child with failpoints switched on; it has to be killed by one."""
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(60)
            failpoints.configure(spec)
            action()
        except BaseException:  # noqa: BLE001 - told by the exit status
            traceback.print_exc()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
        raise AssertionError(f"{spec}: the child was not killed, its status is {status}")


def in_child(action: Callable[[], object]) -> None:
    """Run ``action`` in a child, which has to come to its end in good order."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(60)
            action()
            code = 0
        except BaseException:  # noqa: BLE001 - told by the exit status
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if status:
        raise AssertionError(f"the child's status is {status}, expected 0")
