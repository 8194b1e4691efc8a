"""Why nobody answers: a look with a plain socket once waiting was in vain, and the error.

A connection that does not come about looks the same to ZeroMQ whatever is in its way. The
look names it, for whoever reads an engine's or a verb's error.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lmcache_persist.datadir import owner_of
from lmcache_persist.endpoint import Endpoint
from lmcache_persist.errors import PersistError, RequestTimeout, ServerUnreachable
from lmcache_persist.printable import command

Reason = Literal["absent", "refused", "denied", "failed", "folder", "listening", "silent"]
"""``listening``: a connection is taken; ``silent``: so many wait that none is."""

LOOK_S = 0.5
"""That a look takes at most, beyond what the caller waited."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a look found.

    Attributes:
        reason: for programs.
        text: for people.
        owner: of what may not be used, if it is denied.
    """

    reason: Reason
    text: str
    owner: str = ""


def look(endpoint: Endpoint, timeout_s: float = LOOK_S) -> Finding | None:
    """What stands between us and a server; None if that cannot be told within ``timeout_s``."""
    found: list[Finding] = []
    # In a thread: neither a resolver nor a hung file system can be given a time-out.
    thread = threading.Thread(
        # A little less: whether it finds a host silent must not hang on who is first.
        target=lambda: found.append(_look(endpoint, 0.8 * timeout_s)),
        name="lmcache-persist-look",
        daemon=True,
    )
    thread.start()
    thread.join(timeout_s)
    return found[0] if found else None


def unreachable(
    endpoint: Endpoint,
    trouble: PersistError | None,
    *,
    finding: Finding | None = None,
    timeout_s: float = 0.0,
) -> ServerUnreachable:
    """The error for "no server".

    Args:
        endpoint: where one was expected.
        trouble: what the connection ended with last.
        finding: of a look, which knows better than ``trouble`` unless a connection is taken.
        timeout_s: that was waited, with a ``finding``.
    """
    reason = finding.reason if finding else None
    why = trouble.message if trouble else ""
    if reason == "silent" or (
        reason == "listening" and (trouble is None or isinstance(trouble, RequestTimeout))
    ):
        reason = "silent"
        why = f"it takes the connection and does not answer within {timeout_s:g} s"
    elif finding and reason != "listening":
        why = finding.text
    return ServerUnreachable(
        f"no server answers at {endpoint}{': ' if why else ''}{why}",
        hint=_hint(endpoint, reason, finding.owner if finding else ""),
        endpoint=endpoint.url,
        reason=reason,
        why=why,
    )


def _hint(endpoint: Endpoint, reason: Reason | None, owner: str) -> str:
    if reason == "denied":
        return (
            f"run as {owner}, or start the server with --group and be in that group"
            " (docs/troubleshooting.md, Wrong rights)"
        )
    if reason == "folder":
        return f"a server on that data dir listens at {endpoint}/server.sock"
    if reason == "silent":
        return "it hangs or is very busy (docs/troubleshooting.md, The server hangs)"
    listen = () if endpoint.path.endswith("/server.sock") else ("--listen", endpoint)
    folder = endpoint.path.removesuffix("/server.sock") if not listen else "DIR"
    return f"start one with: {command('serve', '--data-dir', folder, *listen)}"


def _look(endpoint: Endpoint, timeout_s: float) -> Finding:
    try:
        if endpoint.path:
            return _look_at_socket(Path(endpoint.path), timeout_s)
        with socket.create_connection((endpoint.host, endpoint.port), timeout_s):
            return Finding("listening", "it takes connections")
    except ConnectionRefusedError:
        return Finding("refused", "connection refused")
    except socket.gaierror as error:
        return Finding("failed", f"host {endpoint.host!r} has no address: {error.strerror}")
    except TimeoutError:
        return Finding("failed", f"no connection within {timeout_s:g} s")
    except OSError as error:
        return Finding("failed", (error.strerror or type(error).__name__).lower())


def _look_at_socket(path: Path, timeout_s: float) -> Finding:
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return Finding("absent", "no socket there")
    except PermissionError:
        return _denied_by_folder(path)
    if stat.S_ISDIR(found.st_mode):
        return Finding("folder", "that is a folder, expected a socket")
    if not stat.S_ISSOCK(found.st_mode):
        return Finding("failed", "that is no socket")
    with socket.socket(socket.AF_UNIX) as plug:
        plug.settimeout(timeout_s)
        try:
            plug.connect(os.fspath(path))
        except PermissionError:
            return _denied("socket", found)
        except BlockingIOError:
            return Finding("silent", "it takes no more connections")
    return Finding("listening", "it takes connections")


def _denied_by_folder(path: Path) -> Finding:
    for folder in reversed(path.parents):
        if not os.access(folder, os.X_OK, effective_ids=True):
            return _denied(f"folder {folder}", os.stat(folder))
    return Finding("failed", "permission denied")


def _denied(what: str, found: os.stat_result) -> Finding:
    owner = owner_of(found)
    mode = stat.filemode(found.st_mode)
    text = f"permission denied ({what} {mode}, owner {owner}; you are uid {os.geteuid()})"
    return Finding("denied", text, owner)
