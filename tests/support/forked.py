"""Functions in a process of their own, which may die or be another user's: quicker than Python."""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections.abc import Callable

import pytest

from lmcache_persist import failpoints
from support.resident_cli import import_all
from support.verbs import quiet

NOBODY = 65534
"""A user, and a group, without any rights."""


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


def as_nobody(*words: str) -> tuple[int, str, str]:
    """A verb as :data:`NOBODY` runs it: exit code, stdout and stderr. Skips where that is not root.

    What verbs need is imported before: other users may not read where it lies.
    """
    if os.geteuid() != 0:
        pytest.skip("becoming another user takes root")
    import_all()
    quiet("plan", "544")  # what the parser imports when it runs

    def become() -> None:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)

    return forked(*words, first=become)


def forked(*words: str, first: Callable[[], object] = lambda: None) -> tuple[int, str, str]:
    """A verb that changes its process, ``serve`` for one: exit code, stdout and stderr.

    Args:
        words: of the verb.
        first: done before, in the child.
    """
    reader, writer = os.pipe()

    def run() -> None:
        first()
        with os.fdopen(writer, "w") as pipe:
            json.dump(quiet(*words), pipe)

    with os.fdopen(reader) as answer:
        try:
            in_child(run)
        finally:
            os.close(writer)
        code, out, err = json.load(answer)
    return int(code), str(out), str(err)
