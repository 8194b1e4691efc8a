"""Sessions: locks that cannot be looked at, room for newcomers, lock files that nobody needs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_persist import protocol
from lmcache_persist.errors import LeaseError, ProtocolError
from lmcache_persist.server import sessions as module
from lmcache_persist.server.metrics import Counters
from lmcache_persist.server.sessions import Session, Sessions
from lmcache_persist.shm import PoolPaths

HOLDER = (
    "import sys; from pathlib import Path; from lmcache_persist.shm import ClientLock, PoolPaths\n"
    "print(ClientLock.of_process(PoolPaths(Path(sys.argv[1]))).token, flush=True)\n"
    "sys.stdin.read()\n"
)


@pytest.fixture
def paths(tmp_path: Path) -> PoolPaths:
    """A pool's paths, with its folder of client locks."""
    made = PoolPaths.of(tmp_path, "0" * 32)
    made.clients.mkdir()
    return made


@pytest.fixture
def ended() -> list[Session]:
    """The sessions that ended."""
    return []


@pytest.fixture
def sessions(paths: PoolPaths, ended: list[Session]) -> Sessions:
    """Sessions of a server that has a pool and nothing else."""
    state: Any = SimpleNamespace(
        pool=SimpleNamespace(paths=paths, size_bytes=4096),
        memory=SimpleNamespace(reserved_bytes=lambda token: 5),
        counters=Counters(),
        binding=None,
        boot_id="b" * 32,
    )
    return Sessions(state, ended.append)


@pytest.fixture
def token(paths: PoolPaths) -> Iterator[str]:
    """The client lock of another, living process."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(paths.pool)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.kill()


def hello(sessions: Sessions, lock: str = "", session: str = "") -> Session:
    """Open or renew a session."""
    welcome = sessions.hello(
        protocol.Hello(proto_min=1, proto_max=1, kind="worker", lock=lock, session=session)
    )
    return next(one for one in sessions.all() if one.token == welcome.session)


def test_a_lock_that_cannot_be_looked_at(
    sessions: Sessions, paths: PoolPaths, token: str, ended: list[Session]
) -> None:
    """It is refused at hello; later it says nothing about its client, nor ends the round."""
    paths.client_lock("0" * 32).symlink_to("/etc/passwd")
    with pytest.raises(LeaseError):
        hello(sessions, lock="0" * 32)
    odd, other = hello(sessions, lock=token), hello(sessions)
    paths.client_lock(token).unlink()
    paths.client_lock(token).mkdir()
    other.last_seen_s -= module.LOCKLESS_SILENCE_S + 1
    sessions.tick()
    assert ended == [other]
    assert sessions.is_alive(odd.token)


def test_room_is_made_for_newcomers(
    sessions: Sessions, token: str, ended: list[Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With too many sessions the lockless one that was silent the longest ends, no other."""
    monkeypatch.setattr(module, "MAX_SESSIONS", 3)
    locked, old = hello(sessions, lock=token), hello(sessions)
    hello(sessions)
    locked.last_seen_s -= 50
    old.last_seen_s -= 20
    hello(sessions)
    assert ended == [old]
    assert locked in sessions.all()


def test_one_process_has_so_many_sessions(
    sessions: Sessions, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process cannot take all sessions for itself."""
    monkeypatch.setattr(module, "MAX_SESSIONS_PER_LOCK", 2)
    first = hello(sessions, lock=token)
    hello(sessions, lock=token)
    with pytest.raises(ProtocolError, match="2 sessions"):
        hello(sessions, lock=token)
    sessions.end(first)
    hello(sessions, lock=token)


def test_a_process_holds_what_its_sessions_hold(sessions: Sessions, token: str) -> None:
    """Leases and reservations of all sessions of one lock are counted together."""
    first, second, other = hello(sessions, lock=token), hello(sessions, lock=token), hello(sessions)
    first.held_bytes, second.held_bytes, other.held_bytes = 100, 10, 1
    assert sessions.held_bytes(first) == sessions.held_bytes(second) == 120
    assert sessions.held_bytes(other) == 6
    sessions.end(first)
    assert sessions.held_bytes(second) == 15


def test_lock_files_that_nobody_needs_are_swept(
    sessions: Sessions, paths: PoolPaths, token: str
) -> None:
    """From time to time the lock files of ended processes go; the living keep theirs."""
    paths.client_lock("d" * 32).touch()
    sessions.tick()
    assert paths.client_lock("d" * 32).exists()
    sessions._swept_s -= module.SWEEP_EVERY_S
    sessions.tick()
    assert [path.name for path in paths.clients.iterdir()] == [token]
