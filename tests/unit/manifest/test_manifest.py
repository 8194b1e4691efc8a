"""The manifest open for writing: opening, binding, models, rejections, boots."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_persist import failpoints
from lmcache_persist.errors import (
    DataDirUnusable,
    IdentityUnknown,
    ManifestBusy,
    ManifestError,
    ManifestUnreadable,
    SchemaTooNew,
)
from lmcache_persist.manifest import MAX_BOOTS, MAX_REJECTIONS, BootRow, Manifest, RejectionRow
from support.manifest import AT, binding, folder_state

LATER = "2026-01-02T03:04:06.000000Z"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a manifest goes, in a folder of its own."""
    folder = tmp_path / "data"
    folder.mkdir(mode=0o700)
    return folder / "manifest.sqlite"


@pytest.fixture
def manifest(path: Path) -> Iterator[Manifest]:
    """A new manifest."""
    opened = Manifest.open(path)
    yield opened
    opened.close()


@pytest.fixture
def _failpoints() -> Iterator[None]:
    yield
    failpoints.configure("")


def test_new_manifest_is_empty(manifest: Manifest) -> None:
    """A new manifest is unbound and knows nothing."""
    assert manifest.binding() is None
    assert manifest.models() == []
    assert manifest.rejections() == []
    assert manifest.boots() == []


def test_first_bind_wins_and_stays(manifest: Manifest) -> None:
    """The first candidate holds; later ones are told so, also an equal one."""
    first = binding(544)
    assert manifest.bind(first) == (first, True)
    assert manifest.bind(binding(640)) == (first, False)
    assert manifest.bind(first) == (first, False)
    assert manifest.binding() == first


def test_a_rebind_replaces_the_binding_that_it_names(manifest: Manifest) -> None:
    """One binding goes, another comes, and models stay; a wrong name changes nothing."""
    manifest.bind(binding(544))
    with pytest.raises(ManifestError):
        manifest.rebind(binding(640).binding_id, binding(1088))
    assert manifest.binding() == binding(544)
    manifest.rebind(binding(544).binding_id, binding(640))
    assert manifest.binding() == binding(640)
    assert manifest.bind(binding(544)) == (binding(640), False)


def test_an_unbound_manifest_is_not_rebound(manifest: Manifest) -> None:
    """There is nothing to replace."""
    with pytest.raises(ManifestError):
        manifest.rebind(binding(544).binding_id, binding(640))
    assert manifest.binding() is None


def test_binding_survives_reopening(path: Path) -> None:
    """Every field of the binding is there after a restart."""
    opened = Manifest.open(path)
    opened.bind(binding(1088, required_alignment=544, winner="ü\n'; --", mode="fixed"))
    opened.close()
    again = Manifest.open(path)
    assert again.binding() == binding(1088, required_alignment=544, winner="ü\n'; --", mode="fixed")
    again.close()


def test_reopening_changes_no_byte(path: Path) -> None:
    """Opening and closing without writing leaves the file as it was."""
    opened = Manifest.open(path)
    opened.bind(binding())
    opened.close()
    before = path.read_bytes()
    for _ in range(3):
        again = Manifest.open(path)
        assert again.binding() == binding()
        again.close()
    assert path.read_bytes() == before


def test_bind_is_in_the_file_itself(manifest: Manifest, path: Path) -> None:
    """After a bind the -wal is empty: a copy of the file alone has the binding."""
    manifest.bind(binding())
    assert path.with_name(path.name + "-wal").stat().st_size == 0


def test_second_row_is_impossible(manifest: Manifest, path: Path) -> None:
    """The table itself refuses a second binding, and one that is not aligned."""
    manifest.bind(binding())
    raw = sqlite3.connect(path)
    columns = [row[1] for row in raw.execute("PRAGMA table_info(binding)") if row[1] != "id"]
    names = ", ".join(columns)
    for number in (1, 2):
        with pytest.raises(sqlite3.IntegrityError):
            raw.execute(f"INSERT INTO binding (id, {names}) SELECT {number}, {names} FROM binding")
    with pytest.raises(sqlite3.IntegrityError):
        raw.execute("UPDATE binding SET required_alignment = 7")
    raw.close()


@pytest.mark.usefixtures("_failpoints")
def test_failure_before_the_commit_binds_nothing(manifest: Manifest) -> None:
    """An error inside the transaction rolls it back, and the next bind goes through."""
    failpoints.configure("bind.before_commit=error@1")
    with pytest.raises(ManifestError):
        manifest.bind(binding(544))
    assert manifest.binding() is None
    assert manifest.bind(binding(640)) == (binding(640), True)


@pytest.mark.usefixtures("_failpoints")
def test_failure_after_the_commit_is_bound(manifest: Manifest) -> None:
    """An error after the commit is told, and the binding holds."""
    failpoints.configure("bind.after_commit=error@1")
    with pytest.raises(ManifestError):
        manifest.bind(binding(544))
    assert manifest.binding() == binding(544)


@pytest.mark.usefixtures("_failpoints")
def test_failed_migration_leaves_nothing(path: Path) -> None:
    """An error at the end of the first migration leaves no table behind."""
    failpoints.configure("migrate.before_commit=error@1")
    with pytest.raises(ManifestError):
        Manifest.open(path)
    raw = sqlite3.connect(path)
    assert raw.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
    raw.close()
    again = Manifest.open(path)
    assert again.binding() is None
    again.close()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o277])
def test_modes_do_not_hang_on_the_umask(path: Path, umask: int) -> None:
    """The file and its side files have mode 0600 under any umask."""
    old = os.umask(umask)
    try:
        opened = Manifest.open(path)
        opened.bind(binding())
        opened.record_rejections([RejectionRow(AT, "r", "d", 1)])
        names = {item.name for item in path.parent.iterdir()}
        modes = {stat.S_IMODE(item.stat().st_mode) for item in path.parent.iterdir()}
        opened.close()
    finally:
        os.umask(old)
    assert names == {path.name, path.name + "-wal", path.name + "-shm"}
    assert modes == {0o600}


def test_durability_settings(manifest: Manifest, path: Path) -> None:
    """WAL, and a sync at every commit, on every connection of the pool."""
    pragma = manifest._database._pragma
    assert pragma("journal_mode") == "wal"
    assert pragma("synchronous") == 2
    assert sqlite3.connect(path).execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_locked_for_a_while(path: Path) -> None:
    """A manifest that another process holds too long is busy: not empty, not damaged."""
    opened = Manifest.open(path, busy_timeout_s=0.2)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(ManifestBusy) as caught:
        opened.bind(binding())
    assert caught.value.retryable
    assert opened.binding() is None
    other.execute("ROLLBACK")
    other.close()
    assert opened.bind(binding()) == (binding(), True)
    opened.close()


def test_who_holds_it_is_named(path: Path) -> None:
    """The process that is in the way, by number and name."""
    opened = Manifest.open(path, busy_timeout_s=0.2)
    script = (
        "import sqlite3, sys; c = sqlite3.connect(sys.argv[1], isolation_level=None);"
        " c.execute('BEGIN IMMEDIATE'); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        with pytest.raises(ManifestBusy, match=rf"is locked by pid {child.pid} \(.+\)"):
            opened.bind(binding())
        child.communicate(timeout=20)
    opened.close()


def test_locked_at_the_first_open(path: Path) -> None:
    """A lock on a file that has no schema yet is waited for, then said to be busy."""
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(ManifestBusy):
        Manifest.open(path, busy_timeout_s=0.2)
    other.execute("ROLLBACK")
    other.close()
    Manifest.open(path).close()


@pytest.mark.parametrize(
    "content", [b"not a database at all" * 400, b"SQLite format 3\0" + b"\xff" * 4080, b"x"]
)
def test_damaged_file_is_refused_untouched(path: Path, content: bytes) -> None:
    """What is no database is refused, never replaced, and nothing is made beside it."""
    path.write_bytes(content)
    before = folder_state(path.parent)
    with pytest.raises(ManifestUnreadable) as caught:
        Manifest.open(path)
    assert str(path) in caught.value.message
    assert caught.value.hint
    assert folder_state(path.parent) == before


def test_flipped_pages_are_refused(path: Path) -> None:
    """A manifest with a damaged page is refused before anything is opened for writing."""
    opened = Manifest.open(path)
    opened.bind(binding())
    opened.close()
    data = bytearray(path.read_bytes())
    data[4096:8192] = b"\xaa" * 4096
    path.write_bytes(data)
    before = folder_state(path.parent)
    with pytest.raises(ManifestUnreadable):
        Manifest.open(path)
    assert folder_state(path.parent) == before


@pytest.mark.parametrize("kept", [1, 15, 50, 600, 4095, 4096, 8192, -4096, -1])
def test_cut_file_is_refused(path: Path, kept: int) -> None:
    """A manifest that lost its end is refused untouched, wherever it was cut."""
    opened = Manifest.open(path)
    opened.bind(binding())
    opened.close()
    path.write_bytes(path.read_bytes()[:kept])
    before = folder_state(path.parent)
    with pytest.raises(ManifestUnreadable):
        Manifest.open(path)
    assert folder_state(path.parent) == before


def test_altered_binding_is_refused(path: Path) -> None:
    """A binding whose fields do not give its own id is damage, not a binding."""
    opened = Manifest.open(path)
    opened.bind(binding(544))
    opened.close()
    raw = sqlite3.connect(path)
    raw.execute("UPDATE binding SET chunk_size = 1088")
    raw.commit()
    raw.close()
    with pytest.raises(ManifestUnreadable, match="binding has id"):
        Manifest.open(path)


def test_binding_of_another_hash_version_is_read(path: Path) -> None:
    """A binding that another hash version made is handed out: start-up judges it."""
    opened = Manifest.open(path)
    opened.bind(binding(544))
    opened.close()
    raw = sqlite3.connect(path)
    raw.execute("UPDATE binding SET hash_version = 2")
    raw.commit()
    raw.close()
    again = Manifest.open(path)
    found = again.binding()
    assert found is not None
    assert found.hash_version == 2
    again.close()


def test_empty_file_is_a_first_start_that_crashed(path: Path) -> None:
    """A file of no bytes, as a crash at creation leaves it, becomes a manifest."""
    path.touch()
    opened = Manifest.open(path)
    assert opened.binding() is None
    opened.close()


def test_wal_beside_an_empty_file_is_refused(path: Path) -> None:
    """A -wal may hold the only copy of a binding: SQLite would delete it."""
    path.touch()
    side = path.with_name(path.name + "-wal")
    side.write_bytes(b"\x37\x7f\x06\x82" + bytes(4096))
    before = folder_state(path.parent)
    with pytest.raises(ManifestUnreadable, match="-wal"):
        Manifest.open(path)
    path.unlink()
    before.pop(path.name)
    with pytest.raises(ManifestUnreadable, match="-wal"):
        Manifest.open(path)
    assert folder_state(path.parent) == before


def test_wal_of_another_database_is_refused(tmp_path: Path, path: Path) -> None:
    """A -wal that was left by another, larger database is not taken for this one's."""
    other_path = tmp_path / "other.sqlite"
    other = sqlite3.connect(other_path, isolation_level=None)
    other.execute("PRAGMA journal_mode = WAL")
    other.execute("CREATE TABLE t (x)")
    other.execute("INSERT INTO t SELECT randomblob(50000)")
    wal = other_path.with_name(other_path.name + "-wal").read_bytes()
    other.close()
    opened = Manifest.open(path)
    opened.bind(binding())
    opened.close()
    path.with_name(path.name + "-wal").write_bytes(wal)
    before = folder_state(path.parent)
    with pytest.raises(ManifestUnreadable):
        Manifest.open(path)
    assert folder_state(path.parent) == before


@pytest.mark.parametrize("revision", ["0002", "9999", "a1b2c3d4e5f6", "0000", ""])
def test_newer_schema_is_refused_untouched(path: Path, revision: str) -> None:
    """A schema that this version does not know is refused with both numbers and a hint."""
    opened = Manifest.open(path)
    opened.bind(binding())
    opened.close()
    raw = sqlite3.connect(path)
    raw.execute("UPDATE alembic_version SET version_num = ?", (revision,))
    raw.commit()
    raw.close()
    before = folder_state(path.parent)
    with pytest.raises(SchemaTooNew, match="0001") as caught:
        Manifest.open(path)
    assert caught.value.hint
    assert caught.value.fields["found"] == revision
    assert folder_state(path.parent) == before


def test_foreign_database_is_refused_untouched(path: Path) -> None:
    """A database of something else is not made into a manifest."""
    raw = sqlite3.connect(path)
    raw.execute("CREATE TABLE songs (title)")
    raw.close()
    before = folder_state(path.parent)
    with pytest.raises(ManifestUnreadable, match="songs"):
        Manifest.open(path)
    assert folder_state(path.parent) == before


@pytest.mark.parametrize("rows", [0, 2])
def test_version_table_without_one_row(path: Path, rows: int) -> None:
    """A manifest that does not say which schema it has is damage."""
    Manifest.open(path).close()
    raw = sqlite3.connect(path)
    if rows:
        raw.execute("INSERT INTO alembic_version VALUES ('0002')")
    else:
        raw.execute("DELETE FROM alembic_version")
    raw.commit()
    raw.close()
    with pytest.raises(ManifestUnreadable, match=f"{rows} rows"):
        Manifest.open(path)


def test_no_folder(tmp_path: Path) -> None:
    """A manifest in a folder that is not there is a data dir that cannot be used."""
    with pytest.raises(DataDirUnusable, match="nowhere"):
        Manifest.open(tmp_path / "nowhere" / "manifest.sqlite")


def test_a_folder_in_its_place(path: Path) -> None:
    """A folder where the manifest should be is refused."""
    path.mkdir()
    with pytest.raises(ManifestUnreadable, match="directory"):
        Manifest.open(path)


def test_percent_and_spaces_in_the_path(tmp_path: Path) -> None:
    """Any folder name will do."""
    folder = tmp_path / "50% of ?a=b#c ü"
    folder.mkdir()
    opened = Manifest.open(folder / "manifest.sqlite")
    opened.bind(binding())
    opened.close()
    assert [item.name for item in folder.iterdir()] == ["manifest.sqlite"]


def test_closed_manifest(path: Path) -> None:
    """A closed manifest does nothing and does not open the file again by itself."""
    opened = Manifest.open(path)
    opened.close()
    opened.close()
    with pytest.raises(RuntimeError, match="closed"):
        opened.binding()
    with pytest.raises(RuntimeError, match="closed"):
        opened.bind(binding())


def test_two_objects_in_one_process(path: Path) -> None:
    """Opening the same file twice in one process keeps the locks of both."""
    one, two = Manifest.open(path), Manifest.open(path)
    assert one.bind(binding(544))[1] is True
    assert two.bind(binding(640)) == (binding(544), False)
    two.close()
    assert one.binding() == binding(544)
    one.close()


def model(**changes: Any) -> dict[str, Any]:
    """Arguments of record_model."""
    return {
        "fingerprint": "f" * 64,
        "name": "tiny",
        "identity": {"model": "tiny", "revision": None, "rope": 1e-5},
        "groups": [{"kind": "full", "tokens_per_block": 544}],
        "layouts": [{"layers": ["a"]}, {"layers": ["b"]}],
        "required_alignment": 544,
        "at": AT,
        **changes,
    }


def test_models_are_upserted(manifest: Manifest) -> None:
    """A model seen again keeps its row and its first time."""
    manifest.record_model(**model())
    manifest.record_model(**model(fingerprint="e" * 64, name="other"))
    manifest.record_model(**model(at=LATER))
    found = {row.name: row for row in manifest.models()}
    assert set(found) == {"tiny", "other"}
    assert (found["tiny"].first_seen, found["tiny"].last_seen) == (AT, LATER)
    assert (found["other"].first_seen, found["other"].last_seen) == (AT, AT)
    assert found["tiny"].identity == model()["identity"]
    assert found["tiny"].groups == model()["groups"]
    assert found["tiny"].layouts == model()["layouts"]
    assert found["tiny"].required_alignment == 544


def test_model_without_json_form(manifest: Manifest) -> None:
    """An identity that cannot be written is refused, and nothing is recorded."""
    with pytest.raises(IdentityUnknown):
        manifest.record_model(**model(identity={"model": object()}))
    assert manifest.models() == []


def test_idle_models_are_bounded(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound those seen longest ago go; what has objects or an engine stays."""
    monkeypatch.setattr("lmcache_persist.manifest.catalog.MAX_IDLE_MODELS", 3)

    def seen(number: int, **changes: Any) -> None:
        manifest.record_model(**model(fingerprint=f"{number:064x}", name=str(number), **changes))

    used = {f"{number:064x}" for number in (0, 1)}
    for number in range(5):
        seen(number, at=f"2026-01-0{number + 1}", used=used)
    assert [row.name for row in manifest.models()] == ["0", "1", "2", "3", "4"]
    seen(2, at="2026-01-06", used=used)  # seen again: nothing new, and the latest now
    seen(5, at="2026-01-07", used=used)
    assert len(manifest.models()) == 6, "three idle ones, two in use, and the new one"
    seen(6, at="2025-01-01", used=used)  # with a clock that was set back, it stays all the same
    assert [row.name for row in manifest.models()] == ["6", "0", "1", "2", "4", "5"]
    seen(7, at="2026-01-08")
    assert len(manifest.models()) == 7, "without word from the store nothing goes"


def test_idle_models_are_bounded_in_bytes(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few that say very much of themselves go, too."""
    monkeypatch.setattr("lmcache_persist.manifest.catalog.MAX_IDLE_MODEL_BYTES", 3000)
    for number in range(4):
        long = [{"layers": ["x" * 1000]}]
        name = f"{number:064x}"
        manifest.record_model(**model(fingerprint=name, name=str(number), layouts=long, used=()))
    assert {row.name for row in manifest.models()} >= {"3"}
    assert len(manifest.models()) == 3  # the new one, and what fits beside it


def test_a_long_refusal_is_cut(manifest: Manifest) -> None:
    """Equal beginnings are one row, of bounded length."""
    for end in "ab":
        manifest.record_rejections([RejectionRow(AT, "r", "x" * 100_000 + end, 1)])
    (row,) = manifest.rejections()
    assert row.count == 2
    assert len(row.detail) == 1000
    assert row.detail.endswith("x...")


def test_equal_rejections_are_merged(manifest: Manifest) -> None:
    """Equal reason and detail are counted; the latest comes last, whatever the clock says."""
    for detail, at in (("a", LATER), ("b", AT), ("a", AT)):
        manifest.record_rejections([RejectionRow(at, "incompatible_alignment", detail, 1)])
    manifest.record_rejections([RejectionRow(AT, "other", "a", 1)])
    found = [(row.reason, row.detail, row.count, row.at) for row in manifest.rejections()]
    assert found == [
        ("incompatible_alignment", "b", 1, AT),
        ("incompatible_alignment", "a", 2, AT),
        ("other", "a", 1, AT),
    ]


def test_rejections_are_bounded(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound those that were seen longest ago go, not those made first."""
    assert MAX_REJECTIONS == 1000
    monkeypatch.setattr("lmcache_persist.manifest.catalog.MAX_REJECTIONS", 5)
    for index in range(5):
        manifest.record_rejections([RejectionRow(AT, "r", str(index), 1)])
    manifest.record_rejections([RejectionRow(AT, "r", "0", 1)])
    for index in range(5, 8):
        manifest.record_rejections([RejectionRow(AT, "r", str(index), 1)])
    assert [row.detail for row in manifest.rejections()] == ["4", "0", "5", "6", "7"]


def test_a_flood_pushes_out_only_its_own_kind(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond a reason's bound its oldest rows go; those of another reason stay."""
    monkeypatch.setattr("lmcache_persist.manifest.catalog.MAX_REJECTIONS_OF_A_REASON", 3)
    manifest.record_rejections([RejectionRow(AT, "incompatible_alignment", "a real one", 1)])
    flood = [RejectionRow(AT, "invalid_tokens_per_block", str(number), 2) for number in range(9)]
    manifest.record_rejections(flood)
    found = [(row.reason, row.detail, row.count) for row in manifest.rejections()]
    assert found == [
        ("incompatible_alignment", "a real one", 1),
        *(("invalid_tokens_per_block", number, 2) for number in "678"),
    ]


def boot(number: int) -> BootRow:
    """A start."""
    return BootRow(
        boot_id=f"{number:032x}", started_at=AT, pid=number, version="0.1.0", kernel_boot_id="k"
    )


def test_boots(manifest: Manifest) -> None:
    """A start without an end stays open; one that ended says how."""
    manifest.start_boot(boot(1))
    manifest.start_boot(boot(2))
    manifest.end_boot(boot(2).boot_id, at=LATER, clean=True)
    one, two = manifest.boots()
    assert one == boot(1)
    assert (two.boot_id, two.ended_at, two.clean) == (boot(2).boot_id, LATER, True)


def test_boots_that_never_were(manifest: Manifest) -> None:
    """Ending an unknown start is a programming error; starting one twice is refused."""
    with pytest.raises(ValueError, match="never started"):
        manifest.end_boot("0" * 32, at=AT, clean=False)
    manifest.start_boot(boot(1))
    with pytest.raises(ManifestError):
        manifest.start_boot(boot(1))
    assert manifest.boots() == [boot(1)]


def test_boots_are_bounded(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash loop does not fill the disk: the oldest starts go."""
    assert MAX_BOOTS == 1000
    monkeypatch.setattr("lmcache_persist.manifest.catalog.MAX_BOOTS", 3)
    for number in range(5):
        manifest.start_boot(boot(number))
    assert [row.pid for row in manifest.boots()] == [2, 3, 4]
