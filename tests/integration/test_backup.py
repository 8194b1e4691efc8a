"""``backup`` and ``restore``: a pair of manifest and store, also of a server that is at work."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import lmcache_persist
from lmcache_persist import protocol
from lmcache_persist.connector import CacheClient, ClientOptions
from lmcache_persist.errors import (
    DataDirLocked,
    DataDirUnusable,
    DiskTooSmall,
    FormatTooNew,
    MalformedMessage,
)
from lmcache_persist.manifest import read_snapshot
from lmcache_persist.server import backup_file
from lmcache_persist.server.backup import FilesSource, back_up
from lmcache_persist.server.rebind import rebind
from lmcache_persist.server.restore import restore
from lmcache_persist.store import preallocation
from support import mutilate
from support.altering import alter_chunk
from support.data_dirs import chunk_of, key_of, make, records_of
from support.emulated import EmulatedEngine
from support.files import snapshot
from support.hints import commands
from support.server import ServerProcess, cli_here, json_here, run_cli

MakeServer = Callable[..., ServerProcess]
PATIENT = ClientOptions(request_timeout_s=20.0)
MIB = 1 << 20


def engine_of(server: ServerProcess, object_bytes: int = 200_000) -> EmulatedEngine:
    """An engine with two groups."""
    return EmulatedEngine(server.url, [256, 64], object_bytes=object_bytes, options=PATIENT).join()


def prompt(number: int, chunks: int = 4) -> list[int]:
    """The tokens of a numbered prompt, and one more."""
    return [number, *range(1, 256 * chunks + 1)]


def store(engine: EmulatedEngine, *numbers: int) -> None:
    """Durable prompts of four chunks."""
    for number in numbers:
        assert engine.store(engine.hashes(prompt(number))) == 4
        engine.client.flush(30)


def hits(engine: EmulatedEngine, *numbers: int) -> list[int]:
    """Chunks of each prompt that can be restored, every byte compared."""
    return [
        engine.lookup(engine.hashes(prompt(number)), 256 * 4 + 1).tokens // 256
        for number in numbers
    ]


def all_good(root: Path) -> bool:
    """Whether verify finds nothing."""
    return list(lmcache_persist.check(root)) == []


def back_up_files(data_dir: Path, dest: Path) -> backup_file.Descriptor:
    """A backup of a data dir that nobody serves."""
    with FilesSource.open(data_dir) as source:
        return back_up(source, dest)


def test_a_live_server_is_backed_up_and_restored(server: ServerProcess, root: Path) -> None:
    """What was durable at the beginning is in the copy; the server never stopped serving."""
    dest, back = root / "backup", root / "back"
    with engine_of(server, 4 * MIB) as large:
        assert large.store(large.hashes(prompt(900, 2))) == 2
    with engine_of(server) as engine:
        store(engine, 1, 2, 3)
        document = json_here("backup", str(server.data_dir), str(dest), "--verify")
        store(engine, 4)
        assert hits(engine, 1, 4) == [4, 4]
        with pytest.raises(DataDirUnusable, match="is no backup that can be restored"):
            restore(server.data_dir, back)
        assert engine.client.stats(10)["counters"]["dropped_chunks"] == 0
    assert (document["objects"], document["left_out_chunks"]) == (28, 0)
    assert document["verified"] is True
    assert document["capacity_bytes"] == 64 * MIB
    live = json_here("inspect", str(server.data_dir))
    copy = json_here("inspect", str(dest))
    assert copy["binding"] == live["binding"]
    assert [row["fingerprint"] for row in copy["models"]] == [
        row["fingerprint"] for row in live["models"]
    ]
    assert copy["store"]["clean_shutdown"] is True
    assert sorted(path.name for path in root.iterdir() if path.name.startswith("backup")) == [
        "backup"
    ]
    for path in (dest, *dest.rglob("*")):
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path
    before = snapshot(dest)
    server.kill()

    restored = json_here("restore", str(dest), str(back))
    assert (restored["objects"], restored["capacity_bytes"]) == (28, 64 * MIB)
    assert restored["binding"] == live["binding"]
    assert snapshot(dest) == before
    assert all_good(back)
    shutil.rmtree(server.data_dir)
    back.rename(server.data_dir)
    server.start()
    with engine_of(server) as engine:
        assert hits(engine, 1, 2, 3, 4) == [4, 4, 4, 0]
    with engine_of(server, 4 * MIB) as large:
        # More than that has no room in the pool beside a lease.
        assert large.lookup(large.hashes(prompt(900, 1)), 257).tokens == 256


def test_a_full_store_goes_on_writing_while_it_is_backed_up(
    server: ServerProcess, root: Path
) -> None:
    """Nothing is kept from being reused: no store is dropped, evictions go on, the copy is good."""
    with engine_of(server, MIB) as engine:
        store(engine, *range(12))
        ended = threading.Event()
        written: list[int] = []

        def work() -> None:
            number = 100
            while not ended.is_set():
                store(engine, number)
                written.append(number)
                number += 1

        thread = threading.Thread(target=work)
        thread.start()
        try:
            code, _, err = cli_here("backup", str(server.data_dir), str(root / "backup"))
        finally:
            ended.set()
            thread.join(60)
        counters = engine.client.stats(10)["counters"]
    assert (code, counters["dropped_chunks"]) == (0, 0), err
    assert counters["disk_evictions"] > 0
    assert written
    assert all_good(root / "backup")
    assert backup_file.read(root / "backup").chunks > 0


def test_files_are_backed_up_as_a_server_would(root: Path) -> None:
    """Order of use, hits, age and bytes are kept over backup and restore; sources stay as is."""
    make(root / "d", chunks=(30, 5))
    before, records = snapshot(root / "d"), records_of(root / "d")
    made = back_up_files(root / "d", root / "b")
    assert (made.chunks, made.capacity_bytes, made.chunk_size) == (35, 64 * MIB, 544)
    assert snapshot(root / "d") == before
    assert made.data_file_bytes < 24 * MIB
    restore(root / "b", root / "r")
    assert all_good(root / "r")
    found = records_of(root / "r")
    assert found.keys() == records.keys()
    for key, record in found.items():
        was = records[key]
        assert (record.order, record.stored_at, record.objects, record.binding_id) == (
            was.order,
            was.stored_at,
            was.objects,
            was.binding_id,
        )
    assert read_snapshot(root / "r" / "manifest.sqlite") == read_snapshot(
        root / "d" / "manifest.sqlite"
    )


def test_a_smaller_store_takes_what_was_used_last(root: Path) -> None:
    """Restored into less room, the head of the order is there, and it is said what is not."""
    make(root / "d", capacity_bytes=128 * MIB, chunks=(60,), nbytes=MIB)
    back_up_files(root / "d", root / "b")
    code, out, err = cli_here("restore", str(root / "b"), str(root / "r"), "--capacity", "32MiB")
    assert code == 0, err
    kept = [key_of(number) in records_of(root / "r") for number in range(60)]
    assert kept == sorted(kept, reverse=True)
    assert 5 < sum(kept) < 32
    assert f"{60 - sum(kept)} objects" in err
    assert f"left out: {60 - sum(kept)}" in out
    assert all_good(root / "r")


def test_a_second_server_gets_a_binding_of_its_own(make_server: MakeServer, root: Path) -> None:
    """With --new-id two servers of one backup live side by side; without, the second is refused."""
    first = make_server(name="d").start()
    with engine_of(first) as engine:
        store(engine, 1)
    json_here("backup", str(first.data_dir), str(root / "b"))
    twin = make_server(name="twin", pool_dir=first.pool_dir)
    json_here("restore", str(root / "b"), str(twin.data_dir))
    code, log = twin.refused()
    assert code == 5
    assert "--new-id" in log
    second = make_server(name="second", pool_dir=first.pool_dir)
    document = json_here("restore", str(root / "b"), str(second.data_dir), "--new-id")
    held = json_here("inspect", str(first.data_dir))["binding"]
    assert document["binding"]["boundary_id"] == held["boundary_id"]
    assert document["binding"]["binding_id"] != held["binding_id"]
    assert document["binding"]["store"]["uuid"] != held["store"]["uuid"]
    assert all_good(second.data_dir)
    second.start()
    with engine_of(second) as engine:
        assert hits(engine, 1) == [4]


def test_a_rebind_that_stopped_half_way_is_completed_in_the_copy(root: Path) -> None:
    """The pair that is copied belongs together, whatever the source still had to do."""
    make(root / "d", chunks=(5,))
    shutil.copytree(root / "d", root / "old")
    rebind(root / "d", 1088, lambda losses: None)
    # The store as after its stamp, the manifest as before.
    from lmcache_persist.store.lmdb_disk import LmdbDisk

    new = read_snapshot(root / "d" / "manifest.sqlite").binding
    old = read_snapshot(root / "old" / "manifest.sqlite").binding
    assert new is not None
    assert old is not None
    disk = LmdbDisk.open(root / "old" / "store", 64 * MIB)
    disk.restamp(new, replaces=old.binding_id)
    disk.close()
    made = back_up_files(root / "old", root / "b")
    assert (made.binding_id, made.chunks) == (new.binding_id, 0)
    restore(root / "b", root / "r")
    assert read_snapshot(root / "r" / "manifest.sqlite").binding == new
    assert all_good(root / "r")


@pytest.fixture
def backup(root: Path) -> Path:
    """A small backup."""
    make(root / "d", chunks=(5,))
    back_up_files(root / "d", root / "b")
    return root / "b"


def alter(path: Path, at: int = 200) -> None:
    """Flip a byte."""
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def newer(folder: Path) -> None:
    """As a later version would write it."""
    document = json.loads((folder / "backup.json").read_text())
    (folder / "backup.json").write_text(json.dumps({**document, "format": 99}))


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (lambda folder: (folder / "backup.json").unlink(), DataDirUnusable, "interrupted"),
        (lambda folder: alter(folder / "backup.json"), DataDirUnusable, "altered"),
        (lambda folder: (folder / "backup.json").write_text("[]"), DataDirUnusable, "altered"),
        (newer, FormatTooNew, "99"),
        (lambda folder: os.truncate(folder / "store" / "data.mdb", 4096), DataDirUnusable, "4096"),
        (lambda folder: shutil.rmtree(folder / "store"), DataDirUnusable, "data.mdb"),
    ],
)
def test_what_is_no_whole_backup_is_refused(
    root: Path,
    backup: Path,
    damage: Callable[[Path], object],
    error: type[Exception],
    words: str,
) -> None:
    """Restore takes only what backup finished, as it finished it; nothing is made."""
    damage(backup)
    with pytest.raises(error, match=words):
        restore(backup, root / "r")
    assert not (root / "r").exists()


@pytest.mark.parametrize("new_id", [False, True])
@pytest.mark.parametrize("lost", ["gone", "noise", "other"])
def test_a_lost_manifest_of_a_backup_is_rebuilt(
    root: Path, backup: Path, lost: str, new_id: bool
) -> None:
    """The stamp in its good store holds the binding; the restore says so, and loses nothing."""
    bound = read_snapshot(backup / "manifest.sqlite").binding
    assert bound is not None
    if lost == "gone":
        (backup / "manifest.sqlite").unlink()
    elif lost == "noise":
        (backup / "manifest.sqlite").write_bytes(b"noise" * 1000)
    else:
        make(root / "other", chunks=(1,))
        shutil.copy(root / "other" / "manifest.sqlite", backup / "manifest.sqlite")
    said: list[str] = []
    before = snapshot(backup)
    done = restore(backup, root / "r", new_id=new_id, say=said.append)
    assert (done.objects, done.manifest_rebuilt) == (5, True)
    assert [text for text in said if text.startswith("warning: its manifest ")]
    held = read_snapshot(root / "r" / "manifest.sqlite").binding
    assert held == done.binding
    assert (held == bound) is not new_id
    assert all_good(root / "r")
    assert snapshot(backup) == before


def test_a_lost_manifest_is_not_rebuilt_from_another_store(root: Path, backup: Path) -> None:
    """A stamp that is not of the binding that the backup was made of says nothing about it."""
    make(root / "other", chunks=(5,))
    back_up_files(root / "other", root / "c")
    shutil.copy(root / "c" / "store" / "data.mdb", backup / "store" / "data.mdb")
    (backup / "manifest.sqlite").unlink()
    with pytest.raises(DataDirUnusable, match="another stamp"):
        restore(backup, root / "r")
    assert not (root / "r").exists()


def test_a_folder_that_is_no_data_dir_is_not_backed_up(root: Path) -> None:
    """It is refused as by other verbs: with a code of its own and a hint, exit code 5."""
    (root / "etc").mkdir()
    (root / "etc" / "hosts").touch()
    code, _, err = cli_here("backup", str(root / "etc"), str(root / "b"))
    assert (code, "[data_dir_unusable]" in err, "hint: " in err) == (5, True, True)


def test_a_bad_chunk_of_a_backup_is_left_out(root: Path, backup: Path) -> None:
    """Bytes that were altered in the backup never reach a data dir."""
    path = backup / "store" / "data.mdb"
    alter(path, path.read_bytes().find(bytes(chunk_of(3, 50_000).objects[(0, 0)])[1000:2000]))  # type: ignore[index]
    done = restore(backup, root / "r")
    assert (done.objects, done.no_room_objects, done.bad_objects) == (4, 0, 1)
    assert all_good(root / "r")


def test_a_restore_takes_an_empty_folder_only(root: Path, backup: Path) -> None:
    """A data dir, or anything else that is there, stays as it is."""
    for name in ("d", "other"):
        folder = root / name
        if name == "other":
            folder.mkdir()
            (folder / "precious").write_text("x")
        before = snapshot(folder)
        with pytest.raises(DataDirUnusable, match="expected an absent or empty folder"):
            restore(backup, folder)
        after = snapshot(folder)
        after.pop("server.lock", None)
        before.pop("server.lock", None)
        assert after == before
    (root / "empty" / "lost+found").mkdir(parents=True)
    assert restore(backup, root / "empty").objects == 5


@pytest.mark.parametrize(
    "verb",
    [
        ("prune", "--stale"),
        ("resize", "--capacity", "32MiB", "--yes"),
        ("verify", "--repair"),
        ("rebind", "--chunk-size", "512", "--yes"),
        ("recover", "--yes"),
        ("serve",),
    ],
)
def test_a_backup_is_not_changed(root: Path, backup: Path, verb: tuple[str, ...]) -> None:
    """Verbs that change a data dir, and a server, leave a backup as it was made."""
    before = snapshot(backup)
    where = ("--data-dir", str(backup)) if verb == ("serve",) else (str(backup),)
    done = run_cli(verb[0], *where, *verb[1:])
    assert done.returncode == 5
    assert f"lmcache-persist restore {backup}" in done.stderr
    assert snapshot(backup) == before
    assert restore(backup, root / "r").objects == 5


def test_another_store_format_is_not_backed_up(root: Path) -> None:
    """A server of another version may write what this one does not know."""
    make(root / "d", chunks=(1,))
    with FilesSource.open(root / "d") as source:
        source.binding = replace(source.binding, store_format_version=2)
        with pytest.raises(FormatTooNew, match="format 2"):
            back_up(source, root / "b")


def test_a_backup_is_never_written_over_anything(root: Path, backup: Path) -> None:
    """A name that is taken, a folder that is not there, nothing to back up: refused."""
    before = snapshot(backup)
    code, _, err = cli_here("backup", str(root / "d"), str(backup))
    assert (code, "never written over" in err) == (5, True)
    assert snapshot(backup) == before
    assert cli_here("backup", str(root / "d"), str(root / "no" / "b"))[0] == 5
    make(root / "unbound", bound=False)
    assert cli_here("backup", str(root / "unbound"), str(root / "c"))[0] == 3
    assert not (root / "c").exists()
    assert not (root / "c.partial").exists()


def test_too_little_room_is_refused_with_both_numbers(
    root: Path, backup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said before anything is made, and nothing is."""

    def too_small(directory: Path, needed_bytes: int, *, what: str, way_out: str) -> None:
        raise DiskTooSmall(f"{directory} lacks {needed_bytes} for {what}", hint=way_out)

    code, _, err = cli_here("restore", str(backup), str(root / "r"), "--capacity", "1000TiB")
    assert code == 5
    assert "bytes) more in" in err
    assert "(10995116" in err
    assert "available" in err
    assert cli_here("restore", str(backup), str(root / "r"), "--capacity", "0")[0] == 2
    monkeypatch.setattr(preallocation, "check_room", too_small)
    code, _, err = cli_here("backup", str(root / "d"), str(root / "c"))
    assert code == 5
    assert f"this needs 16.00 MiB ({16 << 20} bytes) more" in err
    assert "for the backup" in err
    assert "--capacity" not in err
    code, _, err = cli_here("rebind", str(root / "d"), "--chunk-size", "1088", "--yes")
    assert (code, "for the manifest" in err, "--capacity" in err) == (5, True, False)
    assert not (root / "r").exists()
    assert not list(root.glob("c*"))


def test_an_interrupted_copy_leaves_nothing(root: Path, backup: Path) -> None:
    """Ctrl-C in the middle: no backup, no data dir, and the next try works."""

    def interrupt(record: object) -> None:
        raise KeyboardInterrupt

    with FilesSource.open(root / "d") as source, pytest.raises(KeyboardInterrupt):
        back_up(source, root / "c", on_chunk=interrupt)
    assert not list(root.glob("c*"))
    with pytest.raises(KeyboardInterrupt):
        restore(backup, root / "r", on_chunk=interrupt)
    assert [path.name for path in (root / "r").iterdir()] == ["server.lock"]
    assert restore(backup, root / "r").objects == 5


def test_an_interrupted_verb_says_what_is_left(
    root: Path, backup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C: nothing, or what could not be removed; after the copy, that it is whole."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    copy = ("backup", str(root / "d"), str(root / "c"), "--verify")
    with monkeypatch.context() as patch:
        patch.setattr("lmcache_persist.cli.ticker.CopyTicker.on_chunk", interrupt)
        said = "interrupted: nothing was restored\n"
        code, _, err = cli_here("restore", str(backup), str(root / "r"))
        assert (code, err.endswith(said)) == (130, True)
        code, _, err = cli_here(*copy)
        assert (code, err.endswith("interrupted: nothing was left behind\n")) == (130, True)
        assert not list(root.glob("c*"))
        patch.setattr("shutil.rmtree", lambda *_, **__: None)
        code, _, err = cli_here(*copy)
        assert (code, f"interrupted: {root / 'c.partial'} is left" in err) == (130, True)
    with monkeypatch.context() as patch:
        patch.setattr("lmcache_persist.server.offline.check", interrupt)
        code, _, err = cli_here(*copy)
    assert not (root / "c.partial").exists()
    assert code == 130
    assert f"interrupted: backup {root / 'c'} is whole, but not verified" in err
    assert cli_here(*commands(err)[0])[0] == 0


@pytest.mark.parametrize("live", [False, True])
def test_what_is_bad_is_left_out_and_counted(root: Path, live: bool) -> None:
    """From files and from a server: a backup says what it lacks, in text, JSON and descriptor."""
    make(root / "d", chunks=(5,))
    for number in (1, 3):
        alter_chunk(root / "d", key_of(number))
    with contextlib.ExitStack() as stack:
        if live:
            stack.enter_context(ServerProcess(root / "d", capacity="64MiB"))
        code, out, err = cli_here("backup", str(root / "d"), str(root / "b"))
        assert code == 0
        assert "left out: 2 objects (2 chunks)" in out
        assert "2 chunks proved bad" in err
        assert (f"lmcache-persist verify {root / 'd'} --repair" in err) is not live
    assert backup_file.read(root / "b").left_out_chunks == 2
    if not live:
        document = json_here("backup", str(root / "d"), str(root / "c"))
        assert (document["left_out_chunks"], document["left_out_objects"]) == (2, 2)
        assert document["left_out_bad_chunks"] == 2


def test_log_and_verb_count_what_is_bad_alike(root: Path) -> None:
    """A bad record is a bad chunk as altered bytes are, and pieces are summed up."""
    make(root / "d", chunks=(16,), nbytes=1 << 20)
    for number in range(0, 16, 3):
        alter_chunk(root / "d", key_of(number))
    mutilate.alter(root / "d" / "store", "broken record")
    with ServerProcess(root / "d", capacity="64MiB") as server:
        document = json_here("backup", str(root / "d"), str(root / "b"))
        log = server.log()
    bad = document["left_out_bad_chunks"]
    assert bad == document["left_out_chunks"] >= 6
    said = [int(found) for found in re.findall(r"backup found (\d+) bad chunk", log)]
    assert said[-1] == bad


def test_a_data_dir_is_not_backed_up_into_itself(root: Path) -> None:
    """Nor by way of a link; nothing is made."""
    make(root / "d", chunks=(1,))
    (root / "link").symlink_to(root / "d")
    before = snapshot(root / "d")
    for dest in (root / "d" / "b", root / "link" / "b"):
        code, _, err = cli_here("backup", str(root / "d"), str(dest))
        assert (code, "in the data dir" in err) == (5, True)
    assert snapshot(root / "d") == before


def test_two_backups_to_one_name(root: Path, backup: Path) -> None:
    """The second one is refused while the first is at it."""
    met: list[bool] = []

    def again(record: object) -> None:
        if not met:
            met.append(True)
            with pytest.raises(DataDirLocked):
                back_up(source, root / "c")

    with FilesSource.open(root / "d") as source:
        back_up(source, root / "c", on_chunk=again)
    assert met
    assert all_good(root / "c")


@pytest.fixture
def unbound(server: ServerProcess) -> Iterator[CacheClient]:
    """A client of a server that is not bound."""
    with CacheClient(server.url, kind="cli", label="t", options=PATIENT) as client:
        client.wait_connected(20)
        yield client


def test_messages_that_make_no_sense_are_refused(
    server: ServerProcess, unbound: CacheClient, root: Path
) -> None:
    """Unbound, a wrong cursor, an offset behind the end."""
    assert cli_here("backup", str(server.data_dir), str(root / "b"))[0] == 3
    with engine_of(server) as engine:
        store(engine, 1)
        with pytest.raises(MalformedMessage):
            engine.client.request(protocol.AdminBackup, timeout_s=10, cursor=b"x")
        piece = engine.client.request(protocol.AdminManifest, timeout_s=10, offset=1 << 40)
        assert isinstance(piece, protocol.ManifestPiece)
        assert piece.data == b""
        assert piece.total_bytes > 0
