"""Reading a manifest leaves no trace and misses nothing."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from pathlib import Path

import pytest

from lmcache_persist.errors import ManifestBusy, ManifestUnreadable, SchemaTooNew
from lmcache_persist.manifest import BootRow, Manifest, RejectionRow, peek, read_snapshot, snapshot
from support.manifest import AT, binding, child, folder_state


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a manifest goes, in a folder of its own."""
    folder = tmp_path / "data"
    folder.mkdir(mode=0o700)
    return folder / "manifest.sqlite"


@pytest.fixture
def filled(path: Path) -> Path:
    """A closed manifest with a row of everything."""
    manifest = Manifest.open(path)
    manifest.bind(binding())
    manifest.record_model(
        fingerprint="f" * 64,
        name="tiny",
        identity={"model": "tiny"},
        groups=[{"kind": "full"}],
        layouts=[{}],
        required_alignment=544,
        at=AT,
    )
    manifest.record_rejections([RejectionRow(AT, "r", "d", 1)])
    manifest.start_boot(BootRow("0" * 32, AT, 1, "0.1.0", "k"))
    manifest.close()
    return path


def test_everything_is_read_and_nothing_changed(filled: Path) -> None:
    """A snapshot has all that the manifest has; folder, bytes and times stay."""
    before, times = folder_state(filled.parent), filled.parent.stat()
    found = read_snapshot(filled)
    assert folder_state(filled.parent) == before
    assert filled.parent.stat().st_mtime_ns == times.st_mtime_ns
    assert found.schema_version == 1
    assert found.binding == binding()
    assert [row.name for row in found.models] == ["tiny"]
    assert [(row.reason, row.count) for row in found.rejections] == [("r", 1)]
    assert [row.pid for row in found.boots] == [1]


def test_no_private_copy_is_left(
    filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The private copy is gone after a reading and after a refusal."""
    private = tmp_path / "private"
    private.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(private))
    read_snapshot(filled)
    assert list(private.iterdir()) == []
    filled.write_bytes(b"x")
    with pytest.raises(ManifestUnreadable):
        read_snapshot(filled)
    assert list(private.iterdir()) == []


def test_read_only_files_in_a_read_only_folder(filled: Path) -> None:
    """Nothing needs to be writable (root writes anyway: then the listing is the proof)."""
    os.chmod(filled, 0o400)
    os.chmod(filled.parent, 0o500)
    try:
        before = folder_state(filled.parent)
        assert read_snapshot(filled).binding == binding()
        assert folder_state(filled.parent) == before
    finally:
        os.chmod(filled.parent, 0o700)


def test_absent(path: Path) -> None:
    """No manifest is a FileNotFoundError, and for the check before a start a None."""
    with pytest.raises(FileNotFoundError, match=r"manifest\.sqlite"):
        read_snapshot(path)
    assert peek(path) is None
    assert list(path.parent.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        read_snapshot(path.parent / "no folder" / "manifest.sqlite")


def test_empty_file(path: Path) -> None:
    """A file of no bytes is a manifest that has nothing yet, of schema 0."""
    path.touch()
    assert read_snapshot(path) == snapshot.ManifestSnapshot(0, None, [], [], [])
    assert path.stat().st_size == 0


def test_newer_schema(filled: Path) -> None:
    """A newer schema is refused, unchanged, also for reading."""
    raw = sqlite3.connect(filled)
    raw.execute("UPDATE alembic_version SET version_num = '0002'")
    raw.commit()
    raw.close()
    before = folder_state(filled.parent)
    with pytest.raises(SchemaTooNew):
        read_snapshot(filled)
    assert folder_state(filled.parent) == before


def test_unreadable_is_not_absent(filled: Path) -> None:
    """A damaged table, and a damaged value, are refused by both ways of reading."""
    raw = sqlite3.connect(filled)
    raw.execute("UPDATE models SET identity = '{'")
    raw.commit()
    raw.close()
    for read in (read_snapshot, peek):
        with pytest.raises(ManifestUnreadable):
            read(filled)
    raw = sqlite3.connect(filled)
    raw.execute("DROP TABLE models")
    raw.commit()
    raw.close()
    for read in (read_snapshot, peek):
        with pytest.raises(ManifestUnreadable):
            read(filled)


def test_while_a_writer_holds_a_transaction(filled: Path) -> None:
    """The state before an open transaction is read at once; the writer can still commit."""
    writer = sqlite3.connect(filled, isolation_level=None)
    writer.execute("PRAGMA cache_size = 1")  # spills uncommitted pages into the -wal
    writer.execute("BEGIN IMMEDIATE")
    for number in range(500):
        writer.execute(
            "INSERT INTO rejections VALUES (?, 'open', ?, '', 1)",
            (100 + number, "x" * 400 + str(number)),
        )
    assert filled.with_name(filled.name + "-wal").stat().st_size > 0
    before = folder_state(filled.parent)
    found = read_snapshot(filled)
    assert folder_state(filled.parent) == before
    assert [row.reason for row in found.rejections] == ["r"]
    writer.execute("COMMIT")
    assert len(read_snapshot(filled).rejections) == 501
    writer.close()


def test_after_a_kill_with_the_wal_left(path: Path) -> None:
    """What a killed process committed is read from its -wal, which stays as it is."""
    Manifest.open(path).close()
    process = child(path, "bind", 544, failpoints="bind.after_commit=kill")
    process.communicate(timeout=60)
    assert process.returncode == -9
    wal = path.with_name(path.name + "-wal")
    assert wal.stat().st_size > 0
    before = folder_state(path.parent)
    assert read_snapshot(path).binding == binding(544)
    assert folder_state(path.parent) == before


def test_beside_another_process(path: Path) -> None:
    """A manifest that a live process has open is read without disturbing it."""
    process = child(path, "bind-then-wait", 544)
    assert process.stdout is not None
    assert "True" in process.stdout.readline()
    before = folder_state(path.parent)
    assert read_snapshot(path).binding == binding(544)
    assert folder_state(path.parent) == before
    _, err = process.communicate("done\n", timeout=60)
    assert process.returncode == 0, err


def test_not_in_the_process_that_has_it_open(filled: Path) -> None:
    """Closing a descriptor would drop this process's own locks: a programming error."""
    manifest = Manifest.open(filled)
    with pytest.raises(RuntimeError, match="open in this process"):
        read_snapshot(filled)
    manifest.close()
    assert read_snapshot(filled).binding == binding()


def test_files_that_never_settle(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest that changes between any two readings is busy, after a bounded time."""
    numbers = iter(range(10**9))
    monkeypatch.setattr(snapshot, "SETTLE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(snapshot, "_read_files", lambda _: {"": str(next(numbers)).encode()})
    with pytest.raises(ManifestBusy):
        read_snapshot(filled)


def test_a_change_between_two_readings_is_read_again(
    filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torn first reading is thrown away."""
    real = snapshot._read_files
    readings: list[dict[str, bytes]] = []

    def torn(path: Path) -> dict[str, bytes]:
        files = real(path)
        if not readings:
            files[""] = files[""][:4096] + bytes(len(files[""]) - 4096)
        readings.append(files)
        return files

    monkeypatch.setattr(snapshot, "_read_files", torn)
    assert read_snapshot(filled).binding == binding()
    assert len(readings) == 3


@pytest.mark.parametrize("occurrence", [0, 1])
def test_index_that_disagrees_with_its_table(path: Path, occurrence: int) -> None:
    """Damage that no query would meet is found: a table and its index disagree."""
    manifest = Manifest.open(path)
    manifest.record_rejections([RejectionRow(AT, "r", "needle in the page", 1)])
    manifest.close()
    parts = path.read_bytes().split(b"needle")
    assert len(parts) == 3  # in the table and in its index
    joints = [b"noodle" if index == occurrence else b"needle" for index in range(2)]
    path.write_bytes(parts[0] + joints[0] + parts[1] + joints[1] + parts[2])
    with pytest.raises(ManifestUnreadable, match="index"):
        read_snapshot(path)
