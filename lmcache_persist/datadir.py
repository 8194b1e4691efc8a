"""The data dir: its layout, its permissions, and its lock.

One server holds a data dir, by an exclusive ``flock`` on ``server.lock``. Offline readers
hold the same lock shared. Only the kernel says that a holder is gone, by dropping its
lock, so there is nothing to clean up after ``kill -9`` and process ids decide nothing:
they are written into the file for people only. The lock belongs to the inode, so it holds
over symlinks, bind mounts and PID namespaces.

The lock is taken in two steps. :meth:`DataDirLock.acquire` changes no byte of an existing
data dir, so that a start that is refused afterwards leaves it as it was;
:meth:`DataDirLock.announce` then writes who holds it.

Only the owner of a data dir writes to it, root neither: whoever takes the lock may make files
(SQLite and LMDB do so by themselves), and those of another user its server could not open.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pwd
import shlex
import socket
import stat
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from lmcache_persist.errors import DataDirLocked, DataDirUnusable
from lmcache_persist.filesystems import file_system_of
from lmcache_persist.posix import sync_folder, try_flock
from lmcache_persist.printable import command
from lmcache_persist.units import moment

_HOLDER_BYTES = 2048
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class DataDir:
    """The paths inside one data dir; the files need not exist.

    Attributes:
        root: the data dir itself.
    """

    root: Path

    @property
    def manifest(self) -> Path:
        """The SQLite database with the binding."""
        return self.root / "manifest.sqlite"

    @property
    def store(self) -> Path:
        """The folder of the disk tier."""
        return self.root / "store"

    @property
    def lock(self) -> Path:
        """Held by the server that serves the data dir; never removed."""
        return self.root / "server.lock"

    @property
    def socket(self) -> Path:
        """The default endpoint."""
        return self.root / "server.sock"

    @property
    def crash_log(self) -> Path:
        """Where ``faulthandler`` writes when the server dies of a signal."""
        return self.root / "crash.log"

    @property
    def ballast(self) -> Path:
        """Room kept for the manifest, for a start on a full disk."""
        return self.root / "ballast"

    @property
    def resetting(self) -> Path:
        """Present while a reset is not finished: what lies beside it counts as removed."""
        return self.root / "resetting"

    @property
    def endpoint(self) -> str:
        """The default endpoint as a URL."""
        return f"ipc://{self.socket}"


@dataclass(frozen=True, slots=True)
class Modes:
    """Permissions of what the server makes, whatever the umask."""

    directory: int
    file: int
    socket: int
    group_id: int | None

    @classmethod
    def of(cls, group_id: int | None) -> Modes:
        """Owner only; a group may list, read and connect, but not write files."""
        if group_id is None:
            return cls(0o700, 0o600, 0o600, None)
        return cls(0o750, 0o640, 0o660, group_id)

    def apply(self, path: Path, mode: int) -> None:
        """Give ``path`` the mode and the group.

        Raises:
            DataDirUnusable: the path is somebody else's, or the group not one of ours.
        """
        try:
            found = os.stat(path, follow_symlinks=False)
            if self.group_id is not None and found.st_gid != self.group_id:
                os.chown(path, -1, self.group_id)
            if stat.S_IMODE(found.st_mode) != mode:
                os.chmod(path, mode)
        except OSError as error:
            raise DataDirUnusable(
                f"{path} cannot be given mode {mode:04o}: {error.strerror}",
                hint="the server must own its data dir and be a member of --group",
            ) from error


def make_data_dir(path: Path, *, group_id: int | None = None) -> DataDir:
    """Create the data dir if it is absent, check that it can be written.

    Args:
        path: absolute.
        group_id: whose members may list and read it, or None for the owner only.

    Raises:
        DataDirUnusable: it is no folder, cannot be created or written, or belongs to
            somebody else.

    Durable: the folder's name.
    """
    modes = Modes.of(group_id)
    _make_missing_folders(path, modes)
    if not path.is_dir():
        raise DataDirUnusable(
            f"data dir {path} is a file, expected a folder", hint="choose another --data-dir"
        )
    _check_writable(path)
    foreign = _of_another_user(path)
    if foreign is not None:
        raise foreign
    modes.apply(path.resolve(), modes.directory)
    return DataDir(path)


def _make_missing_folders(path: Path, modes: Modes) -> None:
    missing = []
    for folder in (path, *path.parents):
        if os.path.lexists(folder):
            break
        missing.append(folder)
    try:
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):  # somebody was quicker: as good
                os.mkdir(folder, 0o700)
                modes.apply(folder, modes.directory)
            sync_folder(folder.parent)
    except OSError as error:
        raise DataDirUnusable(
            f"data dir {path} cannot be created: {error.strerror} ({error.filename or path})",
            hint="choose another --data-dir, or make its parent writable",
        ) from error


def _check_writable(path: Path) -> None:
    if not os.access(path, os.W_OK | os.X_OK | os.R_OK):
        raise _not_writable(path)


def _not_writable(path: Path) -> DataDirUnusable:
    """The refusal of a data dir for whoever has to write to it, with what is in the way."""
    held = path.stat()
    mount = file_system_of(path)
    if mount is not None and mount.read_only:
        found = f"it lies on {mount.mount_point}, which is mounted read-only"
        way_out = "mount it for writing"
    else:
        found = f"its mode is {stat.S_IMODE(held.st_mode):04o}, owner {held.st_uid}"
        way_out = f"run it as user {owner_of(held)}"
    if _may_be_read(DataDir(path)):
        way_out += f"; what is there is shown by: {command('inspect', path)}"
    return DataDirUnusable(
        f"data dir {path} cannot be written: {found};"
        f" expected a folder that user id {os.geteuid()} can write",
        hint=way_out,
    )


def _of_another_user(path: Path) -> DataDirUnusable | None:
    """The refusal of a data dir to whoever is not its owner; None for the owner."""
    found, user = path.stat(), os.geteuid()
    if found.st_uid == user:
        return None
    return DataDirUnusable(
        f"data dir {path} belongs to user id {found.st_uid}, expected {user}: what another user"
        " makes in it, root included, its server could not open",
        hint=f"run it as user {owner_of(found)}, or have the data dir given to this one:"
        f" {shlex.join(['chown', '-R', str(user), str(path)])}",
        owner=_login_of(found.st_uid),
    )


def _may_be_read(paths: DataDir) -> bool:
    """Whether this user may look at a data dir as it is."""
    if not os.access(paths.root, os.R_OK | os.X_OK):
        return False
    files = (paths.lock, paths.manifest)
    return all(os.access(path, os.R_OK) or not os.path.lexists(path) for path in files)


def owner_of(found: os.stat_result) -> str:
    """The name of a file's owner, or the number."""
    return _name_of(found.st_uid) or f"uid {found.st_uid}"


def _login_of(uid: int) -> str:
    """A user as ``sudo -u`` takes it, also one without a name."""
    return _name_of(uid) or f"#{uid}"


def _name_of(uid: int) -> str | None:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a data dir, as it wrote into the lock file. For people and for ``inspect``.

    Attributes:
        pid: in the holder's own PID namespace; never used to decide anything.
        host: its host name.
        boot_id: the server's boot id.
        endpoint: where it listens.
        started_at: UTC, ISO 8601.
    """

    pid: int
    host: str
    boot_id: str
    endpoint: str
    started_at: str

    @classmethod
    def of_process(cls, *, boot_id: str, endpoint: str, started_at: str) -> Holder:
        """This process as holder."""
        return cls(os.getpid(), socket.gethostname(), boot_id, endpoint, started_at)


def read_holder(data_dir: Path) -> Holder | None:
    """What the lock file says; None if it is absent or says nothing.

    Says nothing about whether the lock is held: see :class:`ReaderLock`.
    """
    try:
        with open(DataDir(data_dir).lock, "rb") as file:
            value = json.loads(file.read(_HOLDER_BYTES))
        holder = Holder(**value)
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, RecursionError):
        return None
    except OSError as error:
        raise DataDirUnusable(
            f"lock file {DataDir(data_dir).lock} cannot be read: {error.strerror}",
            hint="look as the user that runs its server, or mend its disk",
        ) from error
    if not isinstance(holder.endpoint, str) or not isinstance(holder.boot_id, str):
        return None
    return holder


def _locked(data_dir: Path) -> DataDirLocked:
    holder = read_holder(data_dir)
    if holder is None:
        return DataDirLocked(
            f"data dir {data_dir} is held by another server that has not said who it is yet",
            hint="wait for it, or stop it",
        )
    return DataDirLocked(
        f"data dir {data_dir} is held by another server: pid {holder.pid} on {holder.host},"
        f" listening at {holder.endpoint} since {moment(holder.started_at)}",
        hint="use that server, stop it first, or choose another --data-dir",
        **asdict(holder),
    )


class DataDirLock:
    """The exclusive lock of a server on its data dir, held until :meth:`release`.

    The descriptor is closed on exec; a child made by a bare fork would share the lock.

    Threads: one.
    """

    def __init__(self, data_dir: DataDir, fd: int) -> None:
        self.data_dir = data_dir
        self._fd = fd
        self._announced = False

    @classmethod
    def acquire(
        cls, data_dir: Path, *, modes: Modes | None = None, wait_s: float = 10.0
    ) -> DataDirLock:
        """Take the lock; changes no byte of a data dir that had a server before.

        Args:
            data_dir: exists (:func:`make_data_dir`).
            modes: who may read who holds it; None leaves that to the server whose data dir
                it is, and makes a new file the owner's alone.
            wait_s: how long to wait for offline readers. A server is not waited for.

        Raises:
            DataDirLocked: another server, named in the message, or readers hold it.
            DataDirUnusable: the lock file cannot be opened, or the data dir is another user's
                and no server holds it, which could be asked instead.
        """
        paths = DataDir(data_dir)
        foreign = _of_another_user(data_dir)
        if modes is None and not os.path.lexists(paths.lock):
            modes = Modes.of(None)
        deadline = time.monotonic() + wait_s
        while True:
            fd = cls._open(paths.lock, foreign)
            try:
                if cls._try(fd, paths, deadline):
                    if foreign is not None:
                        raise foreign
                    if modes is not None:
                        modes.apply(paths.lock, modes.file)
                    return cls(paths, fd)
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # the file was replaced under us: take the new one

    @staticmethod
    def _open(path: Path, foreign: DataDirUnusable | None) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (0 if foreign else os.O_CREAT)
        try:
            return os.open(path, flags, 0o600)
        except OSError as error:
            if foreign is not None and error.errno == errno.ENOENT:
                raise foreign from error
            if error.errno == errno.EROFS:
                raise _not_writable(path.parent) from error
            raise DataDirUnusable(
                f"lock file {path} cannot be opened for writing: {error.strerror}",
                hint=f"run it as user {owner_of(os.stat(path.parent))}, who owns the data dir"
                if error.errno in (errno.EACCES, errno.EPERM)
                else "the server must own its data dir, on a file system that can be written",
            ) from error

    @staticmethod
    def _try(fd: int, paths: DataDir, deadline: float) -> bool:
        while not try_flock(fd):
            # If it can be shared, no server has it: readers, or another start that looks.
            if not try_flock(fd, exclusive=False):
                raise _locked(paths.root)
            fcntl.flock(fd, fcntl.LOCK_UN)
            if time.monotonic() >= deadline:
                raise DataDirLocked(
                    f"data dir {paths.root} is being read offline (inspect or verify)",
                    hint="wait for it to end, or stop it",
                )
            time.sleep(_POLL_S)
        try:
            return os.path.samestat(os.fstat(fd), os.stat(paths.lock))
        except FileNotFoundError:
            return False

    def announce(self, holder: Holder) -> None:
        """Write who holds the data dir and where it listens."""
        text = json.dumps(asdict(holder), sort_keys=True).encode()
        # One write, blank-padded: a reader sees the old text or the new one, never a mix.
        try:
            os.pwrite(self._fd, text.ljust(_HOLDER_BYTES - 1) + b"\n", 0)
        except OSError as error:
            raise DataDirUnusable(
                f"lock file {self.data_dir.lock} cannot be written: {error.strerror}",
                hint="make room on its file system",
            ) from error
        self._announced = True

    def release(self) -> None:
        """Give the data dir back; repeatable. The file stays, or two could lock two files."""
        if self._fd >= 0:
            if self._announced:
                with contextlib.suppress(OSError):  # a courtesy: the kernel's word counts
                    # Not cut: on a full disk the next server would find no block to write to.
                    os.pwrite(self._fd, b" " * (_HOLDER_BYTES - 1) + b"\n", 0)
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> DataDirLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class ReaderLock:
    """The shared lock of an offline reader; creates and changes nothing.

    Without a lock file no server ever held this data dir, and nothing is locked.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def acquire(cls, data_dir: Path) -> ReaderLock:
        """Take the lock without waiting.

        Raises:
            DataDirLocked: a server holds the data dir; ask that one.
            DataDirUnusable: the lock file is there and cannot be opened.
        """
        path = DataDir(data_dir).lock
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return cls(-1)
        except OSError as error:
            raise DataDirUnusable(
                f"lock file {path} cannot be opened: {error.strerror}",
                hint="read the data dir as the user that runs its server",
            ) from error
        if not try_flock(fd, exclusive=False):
            os.close(fd)
            raise _locked(data_dir)
        return cls(fd)

    def release(self) -> None:
        """Give the lock back; repeatable."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> ReaderLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
