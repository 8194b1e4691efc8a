"""Why nobody answers: what a look finds, and what the error says of it."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_persist.connector import CacheClient, ClientOptions
from lmcache_persist.connector import unreachable as unreachable_module
from lmcache_persist.connector.unreachable import Finding, look, unreachable
from lmcache_persist.endpoint import Endpoint, parse_endpoint
from lmcache_persist.errors import MalformedMessage, RequestTimeout, ServerUnreachable

LATE = RequestTimeout("server X did not answer within 1 s")
NOBODY = 65534


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a socket may be."""
    return tmp_path / "server.sock"


@pytest.fixture
def plug(path: Path) -> Iterator[socket.socket]:
    """A socket bound to ``path``; nobody listens yet."""
    with socket.socket(socket.AF_UNIX) as found:
        found.bind(os.fspath(path))
        yield found


def at(path: Path) -> Endpoint:
    """The endpoint of a socket."""
    return parse_endpoint(f"ipc://{path}")


@contextlib.contextmanager
def another_user() -> Iterator[int]:
    """Somebody without rights; root becomes one, anybody else is one."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        yield os.geteuid()
    finally:
        os.seteuid(before)


def test_what_is_in_the_way_is_named(path: Path, plug: socket.socket) -> None:
    """Absent, no socket, refused, taken: each is told apart."""
    assert look(at(path.with_name("none"))) == Finding("absent", "no socket there")
    path.with_name("file").touch()
    assert look(at(path.with_name("file"))) == Finding("failed", "that is no socket")
    folder = look(at(path.parent))
    assert folder == Finding("folder", "that is a folder, expected a socket")
    error = unreachable(at(path.parent), None, finding=folder)
    assert error.hint == f"a server on that data dir listens at {at(path.parent)}/server.sock"
    assert look(at(path)) == Finding("refused", "connection refused")
    plug.listen(0)
    assert look(at(path)) == Finding("listening", "it takes connections")


def test_a_full_queue_of_connections_is_silence(path: Path, plug: socket.socket) -> None:
    """A server that hangs under many clients takes no connection any more."""
    plug.listen(0)
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
            waiting.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                waiting.connect(os.fspath(path))
        found = look(at(path))
    assert found is not None
    assert found.reason == "silent"


def test_a_tcp_port_without_a_server_refuses() -> None:
    """The same words as for a socket."""
    with socket.socket() as plug:
        plug.bind(("127.0.0.1", 0))
        port = plug.getsockname()[1]
        found = look(parse_endpoint(f"tcp://127.0.0.1:{port}"))
    assert found == Finding("refused", "connection refused")


@pytest.mark.parametrize("closed", ["socket", "folder"])
def test_missing_rights_are_named_with_owner_and_mode(
    tmp_path: Path, closed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server of another user: what is in the way, whose it is, who we are; no start command."""
    monkeypatch.chdir(tmp_path)  # whoever may not look into the folders above does not have to
    folder, path = Path("kv"), Path("kv/server.sock")
    folder.mkdir()
    endpoint = Endpoint(f"ipc://{path}", path=str(path))
    with socket.socket(socket.AF_UNIX) as plug:
        plug.bind(str(path))
        plug.listen(0)
        for one, mode in ((tmp_path, 0o755), (path, 0o777), (folder, 0o755)):
            one.chmod(mode)
        (path if closed == "socket" else folder).chmod(0)
        with another_user() as uid:
            found = look(endpoint)
        folder.chmod(0o700)
    assert found is not None
    assert found.reason == "denied"
    for part in (closed, "---------, owner", f"you are uid {uid}"):
        assert part in found.text
    error = unreachable(endpoint, None, finding=found, timeout_s=1)
    assert found.text in error.message
    assert error.hint is not None
    assert f"run as {found.owner}" in error.hint
    assert "--group" in error.hint
    assert "lmcache-persist serve" not in error.hint


def test_a_look_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resolver or a file system that hangs costs the look, not the caller."""
    import threading

    asked = threading.Event()
    monkeypatch.setattr(unreachable_module, "_look", lambda *_: asked.wait(60))
    assert look(at(path), timeout_s=0.01) is None
    asked.set()


@pytest.mark.parametrize(
    ("trouble", "finding", "said"),
    [
        (None, None, "no server answers at tcp://h:1"),
        (LATE, None, "server X did not answer within 1 s"),
        (LATE, Finding("absent", "no socket there"), "tcp://h:1: no socket there"),
        (LATE, Finding("listening", ""), "does not answer within 2 s"),
        (None, Finding("listening", ""), "does not answer within 2 s"),
        (ServerUnreachable("closed"), Finding("silent", ""), "does not answer within 2 s"),
        (MalformedMessage("no reply of ours"), Finding("listening", ""), "1: no reply of ours"),
    ],
)
def test_the_error_says_what_is_known_best(
    trouble: ServerUnreachable | None, finding: Finding | None, said: str
) -> None:
    """What a look found counts, but for a connection that is taken: then what came of it."""
    endpoint = parse_endpoint("tcp://h:1")
    assert unreachable(endpoint, trouble, finding=finding, timeout_s=2).message.endswith(said)


def test_a_client_that_waited_in_vain_says_why(path: Path) -> None:
    """What operators read in an engine's log."""
    options = ClientOptions(request_timeout_s=0.1)
    with CacheClient(f"ipc://{path}", kind="worker", options=options) as client:
        with pytest.raises(ServerUnreachable, match=r"server\.sock: no socket there") as caught:
            client.wait_connected(0.05)
    assert caught.value.fields["reason"] == "absent"
