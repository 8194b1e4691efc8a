"""The first look into a store, in a child process.

LMDB trusts the tree pages it reads, and ends the process on some broken ones. A start
looks before anything may be changed, so there is no crash log yet that would tell the next
start; dying here would be a crash loop. A child may die: that only says that the store is
damaged.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import resource
import select
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from lmcache_persist.binding import Binding
from lmcache_persist.errors import PersistError, StoreDamaged, StoreIOError, from_code
from lmcache_persist.store.data_file import DATA_NAME
from lmcache_persist.store.offline import StorePeek, peek

TIMEOUT_S = 60.0
"""Seconds that the look may take: broken pages can also make a loop."""

_READ_BYTES = 1 << 16


def in_child(look: Callable[[], dict[str, Any]], *, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """What ``look`` returns, from a process of its own that may die of a broken store.

    Args:
        look: returns plain JSON values; may raise errors of ours.
        timeout_s: seconds after which it is given up.

    Threads: one, with no other in the process.

    Raises:
        StoreDamaged: the process died, or did not end.
        StoreIOError: there is no process to be had.
        PersistError: as ``look`` raised.
    """
    try:
        read_fd, write_fd = os.pipe()
        child = os.fork()
    except OSError as error:
        raise StoreIOError(
            f"no process to look at the store with: {error.strerror}",
            hint="raise the limit of processes or open files",
        ) from error
    if child == 0:
        os.close(read_fd)
        _run(look, write_fd, timeout_s)
    os.close(write_fd)
    try:
        answer, in_time = _read_all(read_fd, time.monotonic() + timeout_s)
    finally:
        os.close(read_fd)
        os.kill(child, signal.SIGKILL)  # without effect on one that has ended
        _, status = os.waitpid(child, 0)
    if not in_time:
        raise StoreDamaged(f"looking at it does not end within {timeout_s:g} s")
    return _decode(answer, status)


def peek_in_child(
    directory: Path,
    *,
    timeout_s: float = TIMEOUT_S,
    look: Callable[[Path], StorePeek | None] = peek,
) -> StorePeek | None:
    """As :func:`~.offline.peek`; a store on which a process dies is damaged.

    Args:
        directory: the store's folder.
        timeout_s: seconds after which the look is given up.
        look: what the child does.

    Threads: one, with no other in the process: a start and every verb look before they make
    any. (A fork beside threads may hang in the child; Python 3.12 and later warn of it.)

    Raises:
        FormatTooNew, StoreDamaged, StoreIOError: as :func:`~.offline.peek`.
    """
    if not (directory / DATA_NAME).exists():
        return None
    found = in_child(lambda: {"found": _encode(look(directory))}, timeout_s=timeout_s)["found"]
    if found is None:
        return None
    stamp = Binding.from_json(found["stamp"]) if found["stamp"] else None
    return StorePeek(**{**found, "stamp": stamp})


def _run(look: Callable[[], dict[str, Any]], write_fd: int, timeout_s: float) -> NoReturn:
    """The child: never returns, and leaves nothing behind, whatever happens."""
    try:
        # The parent tells what became of this process: no traceback, no core.
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # Broken pages can make a loop, and the parent may be gone by then.
        wanted, (_, most) = math.ceil(timeout_s) + 1, resource.getrlimit(resource.RLIMIT_CPU)
        if most == resource.RLIM_INFINITY or most > wanted:
            resource.setrlimit(resource.RLIMIT_CPU, (wanted, most))
        try:
            document = look()
        except PersistError as error:
            document = {"code": error.code, "message": error.message, "hint": error.hint}
        data = json.dumps(document).encode()
        while data:
            data = data[os.write(write_fd, data) :]
    finally:
        os._exit(0)


def _encode(found: StorePeek | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {**asdict(found), "stamp": found.stamp.to_json() if found.stamp else None}


def _read_all(fd: int, deadline: float) -> tuple[bytes, bool]:
    answer = b""
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([fd], [], [], left)[0]:
            return answer, False
        data = os.read(fd, _READ_BYTES)
        if not data:
            return answer, True
        answer += data


def _decode(answer: bytes, status: int) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(answer)
    except ValueError:
        ended = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "an unexpected error"
        raise StoreDamaged(f"looking at it ends the process by {ended}") from None
    if "code" in document:
        raise from_code(document["code"], document["message"], hint=document["hint"])
    return document
