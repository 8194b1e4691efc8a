"""Pool names and locks, with real processes: only the kernel says that one is dead."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmcache_persist.errors import LeaseError
from lmcache_persist.posix import try_flock
from lmcache_persist.shm import ClientLock, PoolPaths, client_is_dead, server_is_gone

UUID = "cd" * 16
HOLDER = """
import sys
from pathlib import Path
from lmcache_persist.shm import ClientLock, PoolPaths
print(ClientLock.of_process(PoolPaths(Path(sys.argv[1]))).token, flush=True)
{more}
sys.stdin.read()
"""
FORK = """
import os
child = os.fork()
if child == 0:
    print("forked", ClientLock.of_process(PoolPaths(Path(sys.argv[1]))).token, flush=True)
    sys.stdin.read()
    os._exit(0)
"""
Holder = Callable[..., tuple[subprocess.Popen[str], str]]


@pytest.fixture
def paths(tmp_path: Path) -> PoolPaths:
    """A pool's paths, with the folder that its server makes."""
    it = PoolPaths.of(tmp_path, UUID)
    it.clients.mkdir()
    return it


@pytest.fixture
def holder(paths: PoolPaths) -> Iterator[Holder]:
    """Starts processes that take a client lock; gives process and token."""
    started: list[subprocess.Popen[str]] = []

    def start(more: str = "") -> tuple[subprocess.Popen[str], str]:
        child = subprocess.Popen(
            [sys.executable, "-c", HOLDER.format(more=more), str(paths.pool)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(child)
        assert child.stdout is not None
        return child, child.stdout.readline().strip()

    yield start
    for child in started:
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        child.wait(20)
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                stream.close()


def kill(child: subprocess.Popen[str]) -> None:
    """SIGKILL, and wait until it has gone."""
    child.kill()
    child.wait(20)


def test_names_lie_beside_each_other(tmp_path: Path) -> None:
    """All files of a store's pool share one folder and one stem."""
    paths = PoolPaths.of(tmp_path, UUID)
    assert paths.pool == tmp_path / f"lmcache-persist-{UUID}.pool"
    assert paths.server_lock == tmp_path / f"lmcache-persist-{UUID}.server.lock"
    assert paths.client_lock("t") == tmp_path / f"lmcache-persist-{UUID}.clients" / "t"


def test_living_client_is_not_dead(paths: PoolPaths, holder: Holder) -> None:
    """A process that holds its lock is alive, however often one looks."""
    _, token = holder()
    assert not client_is_dead(paths.client_lock(token))
    assert not client_is_dead(paths.client_lock(token))


def test_killed_client_is_dead(paths: PoolPaths, holder: Holder) -> None:
    """A killed process is dead; its lock file stays and is nobody's."""
    child, token = holder()
    kill(child)
    assert paths.client_lock(token).exists()
    assert client_is_dead(paths.client_lock(token))


def test_stopped_client_is_not_dead(paths: PoolPaths, holder: Holder) -> None:
    """A stopped process keeps its lock: it may go on at any moment."""
    child, token = holder()
    child.send_signal(signal.SIGSTOP)
    assert os.waitpid(child.pid, os.WUNTRACED)[0] == child.pid
    assert not client_is_dead(paths.client_lock(token))
    kill(child)
    assert client_is_dead(paths.client_lock(token))


def test_forked_child_has_a_lock_of_its_own(paths: PoolPaths, holder: Holder) -> None:
    """A forked child takes another lock, and does not keep its dead parent's."""
    parent, token = holder(FORK)
    assert parent.stdout is not None
    word, child_token = parent.stdout.readline().split()
    assert word == "forked"
    assert child_token != token
    parent.kill()
    parent.wait(20)
    assert client_is_dead(paths.client_lock(token))
    assert not client_is_dead(paths.client_lock(child_token))


def test_removed_lock_is_dead(paths: PoolPaths) -> None:
    """A client without a lock file is dead."""
    assert client_is_dead(paths.client_lock("0" * 32))


def test_lock_is_taken_once_per_process(paths: PoolPaths, holder: Holder) -> None:
    """Several clients of one process share its lock: a second open would drop the first."""
    more = "print(ClientLock.of_process(PoolPaths(Path(sys.argv[1]))).token, flush=True)"
    child, token = holder(more)
    assert child.stdout is not None
    assert child.stdout.readline().strip() == token
    assert [entry.name for entry in paths.clients.iterdir()] == [token]
    assert not client_is_dead(paths.client_lock(token))


def test_lock_is_renewed_when_its_file_is_gone(paths: PoolPaths) -> None:
    """A lock whose file was removed (a new folder) is taken anew, under another token."""
    first = ClientLock.of_process(paths)
    paths.client_lock(first.token).unlink()
    second = ClientLock.of_process(paths)
    assert second.token != first.token
    assert ClientLock.of_process(paths).token == second.token


def test_lock_files_are_private(paths: PoolPaths) -> None:
    """Lock files have mode 0600 whatever the umask."""
    old = os.umask(0)
    try:
        token = ClientLock.of_process(paths).token
    finally:
        os.umask(old)
    assert paths.client_lock(token).stat().st_mode & 0o777 == 0o600


def test_no_folder_is_a_typed_error(tmp_path: Path) -> None:
    """Where the pool's folder cannot be seen the error says what has to be."""
    with pytest.raises(LeaseError, match=r"cannot be taken.*must see"):
        ClientLock.of_process(PoolPaths.of(tmp_path / "absent", UUID))


def test_server_lock(paths: PoolPaths) -> None:
    """A server is gone when its lock is free or absent; looking does not disturb it."""
    assert server_is_gone(paths)
    fd = os.open(paths.server_lock, os.O_RDWR | os.O_CREAT, 0o600)
    assert server_is_gone(paths)
    assert try_flock(fd)
    assert not server_is_gone(paths)
    assert not server_is_gone(paths)
    os.close(fd)
    assert server_is_gone(paths)


def test_two_lookers_do_not_take_each_other_for_a_server(paths: PoolPaths) -> None:
    """A client that looks while another one looks still sees that the server is gone."""
    fd = os.open(paths.server_lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        assert server_is_gone(paths)
    finally:
        os.close(fd)


FORK_MEANWHILE = """
import os, signal, sys
from pathlib import Path
from lmcache_persist.shm import ClientLock, PoolPaths
paths = PoolPaths(Path(sys.argv[1]))
parents = ClientLock.of_process(paths).token
ClientLock._guard.acquire()  # as another thread might have it
child = os.fork()
if child == 0:
    signal.alarm(10)
    own = ClientLock.of_process(paths).token
    os._exit(0 if own != parents else 1)
print(os.waitpid(child, 0)[1], flush=True)
"""


def test_a_fork_while_a_lock_is_taken(paths: PoolPaths) -> None:
    """A child that was forked while another thread took a lock can take one of its own."""
    done = subprocess.run(
        [sys.executable, "-c", FORK_MEANWHILE, str(paths.pool)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == "0", done.stderr
