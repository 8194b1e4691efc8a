"""The data dir: permissions whatever the umask, and a lock that only the kernel decides."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_persist.datadir import (
    DataDir,
    DataDirLock,
    Holder,
    Modes,
    ReaderLock,
    make_data_dir,
    read_holder,
)
from lmcache_persist.errors import DataDirLocked, DataDirUnusable

HOLDER = Holder(
    pid=1, host="h", boot_id="b" * 32, endpoint="ipc:///x/server.sock", started_at="2026-01-01"
)

# A process that locks a data dir, says so, and keeps it until its stdin ends.
CHILD = """
import sys
from pathlib import Path
from lmcache_persist.datadir import DataDirLock, Holder, ReaderLock
root, kind = Path(sys.argv[1]), sys.argv[2]
if kind == "server":
    lock = DataDirLock.acquire(root, wait_s=0)
    lock.announce(Holder.of_process(boot_id="c" * 32, endpoint="ipc:///c.sock", started_at="now"))
else:
    lock = ReaderLock.acquire(root)
print("locked", flush=True)
sys.stdin.read()
"""
TRY = """
import sys
from pathlib import Path
from lmcache_persist.datadir import DataDirLock
from lmcache_persist.errors import DataDirLocked
try:
    DataDirLock.acquire(Path(sys.argv[1]), wait_s=0)
except DataDirLocked as error:
    print(error.message)
    sys.exit(5)
"""


class Child:
    """A process that holds a lock."""

    def __init__(self, root: Path, kind: str, prefix: tuple[str, ...] = ()) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-c", CHILD, str(root), kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == "locked"

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate(timeout=20)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A fresh data dir."""
    return make_data_dir(tmp_path / "kv").root


@pytest.fixture
def server(root: Path) -> Iterator[Child]:
    """Another process that holds the data dir as a server does."""
    child = Child(root, "server")
    yield child
    child.kill()


def mode_of(path: Path) -> int:
    """Permission bits."""
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
def test_folders_and_lock_are_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    """The data dir and missing folders above are 0700, the lock file 0600."""
    before = os.umask(umask)
    try:
        paths = make_data_dir(tmp_path / "above" / "kv")
        with DataDirLock.acquire(paths.root):
            assert mode_of(paths.lock) == 0o600
    finally:
        os.umask(before)
    assert mode_of(paths.root) == 0o700
    assert mode_of(tmp_path / "above") == 0o700


def test_an_existing_open_folder_is_closed(tmp_path: Path) -> None:
    """A data dir made by hand with 0777 is closed to others."""
    folder = tmp_path / "kv"
    folder.mkdir()
    folder.chmod(0o777)
    make_data_dir(folder)
    assert mode_of(folder) == 0o700


def test_a_group_may_look_and_connect_but_not_write(tmp_path: Path) -> None:
    """--group widens to the group alone."""
    paths = make_data_dir(tmp_path / "kv", group_id=os.getgid())
    assert mode_of(paths.root) == 0o750
    assert paths.root.stat().st_gid == os.getgid()
    with DataDirLock.acquire(paths.root, modes=Modes.of(os.getgid())):
        assert mode_of(paths.lock) == 0o640
    assert Modes.of(os.getgid()).socket == 0o660
    assert Modes.of(None).socket == 0o600


@pytest.mark.parametrize("mode", [0o600, 0o640])
def test_an_offline_verb_keeps_the_mode_of_the_lock(tmp_path: Path, mode: int) -> None:
    """Who may read who holds a data dir is the server's to say, also while a verb has it."""
    group = os.getgid() if mode == 0o640 else None
    paths = make_data_dir(tmp_path / "kv", group_id=group)
    DataDirLock.acquire(paths.root, modes=Modes.of(group)).release()
    with DataDirLock.acquire(paths.root):
        assert mode_of(paths.lock) == mode
    with DataDirLock.acquire(paths.root, modes=Modes.of(None)):
        assert mode_of(paths.lock) == 0o600


def test_a_file_in_the_place_of_the_data_dir_is_refused(tmp_path: Path) -> None:
    """A file is no folder, and below a file there is none either."""
    (tmp_path / "kv").write_text("")
    with pytest.raises(DataDirUnusable, match="is a file"):
        make_data_dir(tmp_path / "kv")
    with pytest.raises(DataDirUnusable, match="cannot be created"):
        make_data_dir(tmp_path / "kv" / "below")


@pytest.fixture(params=[0, 4711])
def foreign(root: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The data dir is another user's; how its refusal begins."""
    user, owner = request.param, root.stat().st_uid
    if owner == user:
        owner = 65534
        os.chown(root, owner, -1)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    return f"belongs to user id {owner}, expected {user}"


def test_only_its_owner_serves_a_data_dir(root: Path, foreign: str) -> None:
    """Root neither: what it makes there the owner's own server could not open."""
    with pytest.raises(DataDirUnusable, match=foreign):
        make_data_dir(root)


def test_only_its_owner_locks_a_data_dir_for_writing(root: Path, foreign: str) -> None:
    """No lock file is made for anybody else, and one that is there stays free and as it is."""
    with pytest.raises(DataDirUnusable, match=foreign):
        DataDirLock.acquire(root)
    assert not os.listdir(root)
    (root / "server.lock").write_text("as it was")
    with pytest.raises(DataDirUnusable, match=foreign):
        DataDirLock.acquire(root)
    assert (root / "server.lock").read_text() == "as it was"
    ReaderLock.acquire(root).release()


def test_another_user_is_told_of_the_server_first(root: Path, server: Child, foreign: str) -> None:
    """It can be asked to do the work, and makes its files itself."""
    assert server.process.poll() is None
    with pytest.raises(DataDirLocked, match=r"listening at ipc:///c\.sock"):
        DataDirLock.acquire(root)


def test_a_dangling_symlink_is_refused(tmp_path: Path) -> None:
    """A link to nowhere is not taken for a folder to be made elsewhere."""
    (tmp_path / "kv").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataDirUnusable):
        make_data_dir(tmp_path / "kv")
    assert not (tmp_path / "nowhere").exists()


def test_a_folder_that_cannot_be_written_is_refused_with_both_facts(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal says what the folder is like and who would have to write it."""
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(DataDirUnusable) as caught:
        make_data_dir(root)
    assert "mode is 0700" in caught.value.message
    assert f"user id {os.geteuid()} can write" in caught.value.message


def test_a_read_only_mount_is_refused_and_can_be_read(tmp_path: Path, root: Path) -> None:
    """On a read-only mount a server is refused by name of the fact, a reader is not."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare to make a read-only mount")
    with DataDirLock.acquire(root):
        pass
    script = f"""
mount --bind {root} {root} && mount -o remount,bind,ro {root} || exit 77
{sys.executable} - <<'END'
from pathlib import Path
from lmcache_persist.datadir import ReaderLock, make_data_dir
from lmcache_persist.errors import DataDirUnusable
ReaderLock.acquire(Path({str(root)!r})).release()
try:
    make_data_dir(Path({str(root)!r}))
except DataDirUnusable as error:
    print(error.message)
END
"""
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip(f"mounting is not permitted: {done.stderr.strip()}")
    assert "read-only" in done.stdout, done.stderr


def test_a_second_server_is_refused_and_names_the_first(root: Path, server: Child) -> None:
    """The refusal says who holds the data dir and where it listens."""
    with pytest.raises(DataDirLocked) as caught:
        DataDirLock.acquire(root, wait_s=0)
    assert f"pid {server.process.pid}" in caught.value.message
    assert "ipc:///c.sock" in caught.value.message
    assert caught.value.fields["endpoint"] == "ipc:///c.sock"


def test_the_lock_holds_through_a_symlink(root: Path, server: Child) -> None:
    """Another name for the folder is still the same folder."""
    link = root.parent / "link"
    link.symlink_to(root)
    with pytest.raises(DataDirLocked):
        DataDirLock.acquire(link, wait_s=0)
    with pytest.raises(DataDirLocked):
        ReaderLock.acquire(link)


def test_the_lock_holds_across_pid_namespaces(root: Path) -> None:
    """Two containers in which both servers are process 1 do not both get the lock."""
    prefix = ("unshare", "-pf", "--kill-child")
    if shutil.which("unshare") is None or subprocess.run([*prefix, "true"], check=False).returncode:
        pytest.skip("PID namespaces are not permitted here")
    first = Child(root, "server", prefix)
    try:
        holder = read_holder(root)
        assert holder is not None
        assert holder.pid == 1
        second = subprocess.run(
            [*prefix, sys.executable, "-c", TRY, str(root)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert second.returncode == 5, second.stderr
        assert "ipc:///c.sock" in second.stdout
    finally:
        first.kill()
    DataDirLock.acquire(root, wait_s=0).release()


def test_kill_leaves_nothing_to_clean_up(root: Path, server: Child) -> None:
    """After SIGKILL the next server starts, though the file still names the dead one's id."""
    server.kill()
    holder = read_holder(root)
    assert holder is not None
    # Whoever has that process id now (here: this process) does not matter.
    (root / "server.lock").write_text(json.dumps({**vars_of(holder), "pid": os.getpid()}))
    DataDirLock.acquire(root, wait_s=0).release()


def vars_of(holder: Holder) -> dict[str, object]:
    """A holder's fields."""
    return {name: getattr(holder, name) for name in Holder.__slots__}


def test_taking_and_leaving_the_lock_changes_no_byte(root: Path, server: Child) -> None:
    """A start that is refused after locking leaves the data dir as it was."""
    server.kill()
    before = {path.name: path.read_bytes() for path in root.iterdir()}
    DataDirLock.acquire(root, wait_s=0).release()
    assert {path.name: path.read_bytes() for path in root.iterdir()} == before


def test_a_clean_end_leaves_no_name_behind(root: Path) -> None:
    """After release the file is there, says nothing, and can be locked again."""
    lock = DataDirLock.acquire(root)
    lock.announce(HOLDER)
    assert read_holder(root) == HOLDER
    lock.release()
    lock.release()
    assert read_holder(root) is None
    assert (root / "server.lock").exists()
    DataDirLock.acquire(root, wait_s=0).release()


def test_a_later_announcement_replaces_the_earlier(root: Path) -> None:
    """No rest of a longer text stays behind."""
    with DataDirLock.acquire(root) as lock:
        lock.announce(Holder(1, "h" * 500, "b", "e" * 500, "t"))
        lock.announce(HOLDER)
        assert read_holder(root) == HOLDER


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', '{"endpoint": 5}', "\x00" * 50])
def test_a_lock_file_with_other_contents_names_nobody(root: Path, text: str) -> None:
    """Whatever is in the file, reading it gives a holder or none."""
    (root / "server.lock").write_text(text)
    assert read_holder(root) is None


def test_readers_share_and_a_server_waits_for_them(root: Path) -> None:
    """Two readers at once; a server is told that readers are in its way, and starts after."""
    DataDirLock.acquire(root).release()
    first, second = ReaderLock.acquire(root), ReaderLock.acquire(root)
    with pytest.raises(DataDirLocked, match="read offline"):
        DataDirLock.acquire(root, wait_s=0)
    first.release()
    second.release()
    second.release()
    DataDirLock.acquire(root, wait_s=0).release()


def test_a_reader_creates_nothing(root: Path) -> None:
    """Where no server ever was, a reader locks nothing and leaves nothing."""
    with ReaderLock.acquire(root):
        assert list(root.iterdir()) == []


def test_a_killed_reader_leaves_nothing(root: Path) -> None:
    """A reader that dies, or was stopped and then dies, is no obstacle."""
    DataDirLock.acquire(root).release()
    reader = Child(root, "reader")
    os.kill(reader.process.pid, signal.SIGSTOP)
    with pytest.raises(DataDirLocked):
        DataDirLock.acquire(root, wait_s=0)
    reader.kill()
    DataDirLock.acquire(root, wait_s=0).release()


def test_a_symlink_in_place_of_the_lock_file_is_refused(root: Path) -> None:
    """The lock is never taken on a file elsewhere."""
    (root / "server.lock").symlink_to("/etc/hostname")
    with pytest.raises(DataDirUnusable):
        DataDirLock.acquire(root, wait_s=0)
    with pytest.raises(DataDirUnusable):
        ReaderLock.acquire(root)


def test_a_lock_file_that_was_replaced_is_taken_anew(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who locked a file that is no longer the lock file locks the one that is."""
    original = os.path.samestat
    swapped = []

    def swap_once(left: os.stat_result, right: os.stat_result) -> bool:
        if not swapped:
            swapped.append(True)
            return False
        return original(left, right)

    monkeypatch.setattr(os.path, "samestat", swap_once)
    with DataDirLock.acquire(root, wait_s=0), pytest.raises(DataDirLocked):
        ReaderLock.acquire(root)
    assert swapped


def test_an_unreadable_lock_file_is_an_error_not_an_absence(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be read is never taken for "nobody there"."""

    def denied(*_: object, **__: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(DataDirUnusable, match="Permission denied"):
        ReaderLock.acquire(root)


def test_the_layout_is_that_of_the_documentation() -> None:
    """Names inside a data dir are a contract with what is on people's disks."""
    paths = DataDir(Path("/kv"))
    assert [path.name for path in (paths.manifest, paths.store, paths.lock, paths.socket)] == [
        "manifest.sqlite",
        "store",
        "server.lock",
        "server.sock",
    ]
    assert paths.crash_log.name == "crash.log"
    assert paths.endpoint == "ipc:///kv/server.sock"
