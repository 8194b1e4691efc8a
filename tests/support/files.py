"""Comparing folders byte for byte."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path


def snapshot(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Name, mode, mtime and digest of everything below ``folder``."""
    found = {}
    for path in sorted(folder.rglob("*")):
        stat = path.lstat()
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path.relative_to(folder))] = (stat.st_mode, stat.st_mtime_ns, digest)
    return found


@contextmanager
def manifest_held(path: Path) -> Iterator[None]:
    """Hold the manifest's write lock, so that nothing is bound meanwhile."""
    with closing(sqlite3.connect(path, isolation_level=None, timeout=10)) as connection:
        connection.execute("BEGIN IMMEDIATE").close()
        try:
            yield
        finally:
            connection.execute("ROLLBACK").close()
