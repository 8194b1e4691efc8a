"""Ctrl-C at any moment: exit status 130, no traceback. Nothing heavy is imported here.

Before a verb works, and once it is done, there is nothing to unwind, and an exception might
come up anywhere: in an import, in the parser, in the interpreter's own end. So the process
ends at once there. While a verb works, Ctrl-C is the exception that it unwinds with.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130
"""The exit status that says so; :class:`lmcache_persist.cli.exit_codes.ExitCode` has it, too."""


def _end(number: int, frame: object) -> None:
    del number, frame
    os._exit(INTERRUPTED)


def end_at_once() -> None:
    """Have Ctrl-C end the process from now on, unless who started it has it ignored.

    Threads: the main one.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


@contextmanager
def unwinding() -> Iterator[None]:
    """Around the work of a verb: Ctrl-C is a ``KeyboardInterrupt`` in it.

    Changes nothing where :func:`end_at_once` was not called.
    """
    if signal.getsignal(signal.SIGINT) is not _end:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _end)
