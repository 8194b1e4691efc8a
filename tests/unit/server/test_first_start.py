"""What a refused start takes back, and what it never touches."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_persist.datadir import DataDirLock, make_data_dir
from lmcache_persist.errors import ManifestError, PersistError, PoolTooSmall
from lmcache_persist.server.first_start import FirstStart


def start(root: Path, error: Exception, *, served: bool = False) -> None:
    """A start that makes what a start makes, and ends with an error."""
    with pytest.raises(type(error)):
        _start(root, error, served=served)


def _start(root: Path, error: Exception, *, served: bool) -> None:
    first = FirstStart.of(root)
    paths = make_data_dir(root)
    with DataDirLock.acquire(root), first.undone_if_refused():
        paths.store.mkdir(exist_ok=True)
        for path in (paths.manifest, paths.ballast, paths.crash_log, paths.store / "data.mdb"):
            path.write_text("made")
        if served:
            first.served()
        raise error


def test_a_refused_one_leaves_nothing(tmp_path: Path) -> None:
    """Folders too, as far as the start made them; again is the same."""
    for _ in range(2):
        start(tmp_path / "a" / "b", PoolTooSmall("no room"))
        assert list(tmp_path.iterdir()) == []


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    """A stranger's file keeps its folder; ours are gone."""
    root = tmp_path / "d"
    root.mkdir(mode=0o755)
    (root / "notes").write_text("x")
    start(root, PoolTooSmall("no room"))
    assert [path.name for path in root.iterdir()] == ["notes"]
    assert root.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("name", ["manifest.sqlite", "manifest.sqlite-wal", "store", "server.lock"])
def test_what_was_there_before_is_never_touched(tmp_path: Path, name: str) -> None:
    """One file of a server that was there before stays; what the start made beside it goes."""
    if name == "store":
        (tmp_path / name).mkdir()
        (tmp_path / name / "kept").touch()
    else:
        (tmp_path / name).touch()
    start(tmp_path, PoolTooSmall("no room"))
    left = {path.name for path in tmp_path.iterdir()}
    side = {"manifest.sqlite"} if name.startswith("manifest") else set()
    assert left == {name} | side
    if name == "store":
        assert (tmp_path / name / "kept").exists()


def test_once_it_served_everything_stays(tmp_path: Path) -> None:
    """An error at the end of a first run costs nothing that was stored in it."""
    start(tmp_path / "d", ManifestError("disk on fire"), served=True)
    assert (tmp_path / "d" / "store" / "data.mdb").read_text() == "made"


def test_a_defect_leaves_all_for_a_look(tmp_path: Path) -> None:
    """Only refusals are taken back."""
    start(tmp_path / "d", ZeroDivisionError())
    assert not issubclass(ZeroDivisionError, PersistError)
    assert (tmp_path / "d" / "manifest.sqlite").exists()
