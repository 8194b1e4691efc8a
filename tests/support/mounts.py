"""File systems of a test's own: a small tmpfs, an ext4 in an image. Needs root."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

COMMAND_TIMEOUT_S = 60


def need_root(*programs: str) -> None:
    """Skip the test, with the reason, where it cannot mount."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    for program in ("mount", "umount", *programs):
        if shutil.which(program) is None:
            pytest.skip(f"there is no {program} here")


def run(*command: str) -> None:
    """Run a command; skip the test if the kernel does not let us."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
    )
    if done.returncode:
        pytest.skip(f"{' '.join(command)}: {done.stderr.strip()}")


@contextmanager
def mounted(folder: Path, *arguments: str) -> Iterator[Path]:
    """Mount at ``folder``; the arguments are those of ``mount`` before the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    run("mount", *arguments, str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=COMMAND_TIMEOUT_S)


@contextmanager
def tmpfs(folder: Path, size: str) -> Iterator[Path]:
    """A tmpfs of ``size``, such as ``64m``."""
    need_root()
    with mounted(folder, "-t", "tmpfs", "-o", f"size={size}", "tmpfs"):
        yield folder


@contextmanager
def read_only(folder: Path) -> Iterator[Path]:
    """``folder`` itself, mounted read-only."""
    need_root()
    with mounted(folder, "--bind", str(folder)):
        run("mount", "-o", "remount,ro,bind", str(folder))
        yield folder


def make_image(image: Path, size_bytes: int) -> None:
    """An empty ext4 in a sparse file."""
    need_root("mkfs.ext4")
    with image.open("wb") as file:
        file.truncate(size_bytes)
    run("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", str(image))


@contextmanager
def image_mounted(image: Path, folder: Path) -> Iterator[Path]:
    """The ext4 of an image, with a commit interval long enough not to hide a missing sync."""
    with mounted(folder, "-t", "ext4", "-o", "loop,commit=600,errors=remount-ro", str(image)):
        yield folder


def copy_as_a_power_cut_leaves_it(image: Path, target: Path) -> None:
    """Copy what of an image has reached the disk, while it is mounted and written to.

    What the mounted file system still holds back in its page cache is not in the image: that
    is what a power cut loses.
    """
    subprocess.run(
        ["cp", "--sparse=always", str(image), str(target)], check=True, timeout=COMMAND_TIMEOUT_S
    )


def break_file_system(folder: Path) -> None:
    """Let an ext4 find itself in error, as a failing disk does: it turns read-only."""
    source = next(
        line.partition(" - ")[2].split()[1]
        for line in Path("/proc/self/mountinfo").read_text().splitlines()
        if line.split()[4] == str(folder)
    )
    trigger = Path("/sys/fs/ext4") / Path(source).name / "trigger_fs_error"
    try:
        trigger.write_text("a test")
    except OSError as error:
        pytest.skip(f"{trigger}: {error.strerror}")


def _allocate(fd: int, leave_bytes: int) -> None:
    """Take all room but ``leave_bytes``; a server that writes meanwhile may be quicker."""
    for attempt in range(20):
        stats = os.fstatvfs(fd)
        try:
            os.posix_fallocate(fd, 0, max(1, stats.f_bavail * stats.f_frsize - leave_bytes))
        except OSError as error:
            if error.errno != errno.ENOSPC or attempt == 19:
                raise
        else:
            return


def fill(folder: Path, leave_bytes: int = 0) -> Path:
    """A foreign file that takes all room of a file system but ``leave_bytes``."""
    path = folder / "foreign"
    with path.open("wb", buffering=0) as file:
        _allocate(file.fileno(), leave_bytes)
        if not leave_bytes:
            file.seek(0, os.SEEK_END)
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass
    return path
