"""Whether a server's files are still where it opened them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_persist.datadir import DataDir
from lmcache_persist.errors import DataDirUnusable, StoreGone
from lmcache_persist.server.own_files import OwnFiles

NAMES = ("store/data.mdb", "manifest.sqlite")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A data dir with both files."""
    folder = tmp_path / "kv"
    (folder / "store").mkdir(parents=True)
    for name in NAMES:
        (folder / name).write_text("mine")
    return folder


@pytest.fixture
def files(root: Path) -> Iterator[OwnFiles]:
    """What watches them."""
    made = OwnFiles(root, [root / name for name in NAMES])
    yield made
    made.close()


@pytest.mark.parametrize(
    ("moved", "named"),
    [
        ("store/data.mdb", "kv/store/data.mdb"),
        ("store", "kv/store"),
        ("manifest.sqlite", "kv/manifest.sqlite"),
        (".", "kv"),
    ],
)
def test_what_was_moved_is_named_and_may_come_back(
    root: Path, files: OwnFiles, caplog: pytest.LogCaptureFixture, moved: str, named: str
) -> None:
    """The outermost name that is missing; told once, however often one looks, and once more."""
    caplog.set_level(logging.WARNING)
    told: list[str] = []
    files.on_change = told.append
    assert files.look()
    aside = root.parent / "aside"
    (root / moved).rename(aside)
    for _ in range(3):
        assert not files.look()
    assert files.gone == f"{root.parent / named} is not there any more"
    with pytest.raises(StoreGone, match="move it back"):
        files.require()
    aside.rename(root / moved)
    assert files.look()
    files.require()
    assert told == [f"{root.parent / named} is not there any more", ""]
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]


@pytest.mark.parametrize(
    ("moved", "saves"),
    [("store", True), ("manifest.sqlite", True), ("server.lock", False), (".", False)],
)
def test_a_backup_is_named_where_it_finds_the_server(root: Path, moved: str, saves: bool) -> None:
    """A restart starts empty, a backup saves all: said unless its way to the server is gone."""
    lock = DataDir(root).lock
    lock.touch()
    files = OwnFiles(root, [*(root / name for name in NAMES), lock])
    try:
        (root / moved.replace("server.lock", lock.name)).rename(root.parent / "aside")
        assert not files.look()
        hint = str(files.error().hint)
        assert "move it back" in hint
        assert (f"lmcache-persist backup {root} DEST" in hint) == saves
    finally:
        files.close()


def test_a_copy_is_not_the_same_file(root: Path, files: OwnFiles) -> None:
    """Equal bytes under the name are another file; what was removed is told from what was moved."""
    path = root / NAMES[0]
    kept = path.read_bytes()
    path.unlink()
    path.write_bytes(kept)
    assert not files.look()
    assert files.gone == f"{path} is another file now"
    assert files.removed
    assert "lmcache-persist backup" in str(files.error())


def test_what_cannot_be_looked_at_is_not_gone(
    root: Path, files: OwnFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fails to answer proves nothing."""

    def fails(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", fails)
        assert files.look()


def test_all_have_to_be_there_at_first(root: Path) -> None:
    """A file that vanished during the start is a refusal; no descriptor stays open."""
    before = len(os.listdir("/proc/self/fd"))
    (root / NAMES[1]).unlink()
    with pytest.raises(DataDirUnusable, match="manifest"):
        OwnFiles(root, [root / name for name in NAMES])
    assert len(os.listdir("/proc/self/fd")) == before
