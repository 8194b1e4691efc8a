"""``inspect`` and ``verify`` on the files of a data dir that nobody serves."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lmcache_persist
from lmcache_persist.cli.output import error_document
from lmcache_persist.datadir import DataDirLock, ReaderLock, make_data_dir
from lmcache_persist.errors import DataDirLocked, PersistError, StoreMismatch
from lmcache_persist.hashing import ChunkHash
from lmcache_persist.identity import fingerprint
from lmcache_persist.manifest import Manifest, RejectionRow
from lmcache_persist.server.backup import FilesSource
from lmcache_persist.server.looking import inspect_offline
from lmcache_persist.server.offline import Progress, check
from lmcache_persist.store.base import ChunkWrite, Place, chunk_key
from lmcache_persist.store.lmdb_disk import LmdbDisk
from support.emulated import identity
from support.files import snapshot
from support.manifest import binding
from support.server import cli_here, run_cli
from support.verbs import in_process

CAPACITY_BYTES = 32 << 20
OBJECT_BYTES = 100_000
GROUPS = [{"kind": "full", "tokens_per_block": 544, "slots_per_block": 544, "window": 0}]
AT = "2026-01-02T03:04:05.000006Z"
KEYS = {
    "schema_version": None,
    "binding": {
        "chunk_size",
        "required_alignment",
        "base_chunk_size",
        "mode",
        "hash_algorithm",
        "boundary_id",
        "binding_id",
        "bound_at",
        "store",
        "winner",
    },
    "models": {
        "name",
        "fingerprint",
        "groups",
        "required_alignment",
        "objects",
        "bytes",
        "first_seen",
        "last_seen",
        "chunks",
        "hits",
        "by_group",
    },
    "store": {
        "objects",
        "bytes",
        "capacity_bytes",
        "stale_objects",
        "clean_shutdown",
        "chunks",
        "used_bytes",
        "stale_bytes",
        "evicted_chunks",
        "dropped_chunks",
        "pruned_chunks",
        "corrupt_chunks",
        "estimated_from",
        "ages",
        "order",
    },
    "rejections": {"at", "reason", "detail", "count", "hint"},
    "unregistered": None,
    "boots": None,
    "left_out": None,
}


def model_of(**changes: Any) -> str:
    """The fingerprint of a model with this identity."""
    return fingerprint(identity(**changes), GROUPS, [{}])


def record(manifest: Manifest, **changes: Any) -> None:
    """Register a model."""
    manifest.record_model(
        fingerprint=model_of(**changes),
        name="emulated/model",
        identity=identity(**changes),
        groups=GROUPS,
        layouts=[{}],
        required_alignment=544,
        at=AT,
    )


def fill(root: Path, *, chunks: int = 5, stamped: bool = True, bound: bool = True) -> None:
    """A data dir as a server leaves it: two models, objects of the second, one rejection."""
    paths = make_data_dir(root)
    with DataDirLock.acquire(paths.root):
        manifest = Manifest.open(paths.manifest)
        disk = LmdbDisk.open(paths.store, CAPACITY_BYTES)
        try:
            held = binding(544, store_uuid=disk.uuid, store_format_version=disk.format_version)
            if bound:
                manifest.bind(held)
                record(manifest, weights="w0")
                record(manifest, weights="w1")
            if stamped:
                disk.write_stamp(held)
                key = model_of(weights="w1")
                report = disk.write(
                    [
                        ChunkWrite(
                            chunk_key(key, ChunkHash(bytes([number]) * 32)),  # type: ignore[arg-type]
                            {Place(0, 0): os.urandom(OBJECT_BYTES)},
                        )
                        for number in range(chunks)
                    ]
                )
                assert len(report.written) == chunks
            manifest.record_rejections([RejectionRow(AT, "incompatible_alignment", "640", 1)])
        finally:
            disk.close()
            manifest.close()


def verify(root: Path) -> tuple[int, dict[str, Any]]:
    """Exit code and document of ``verify --json``."""
    return in_process("verify", str(root))


def inspect(root: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """Exit code and document of ``inspect --json``."""
    return in_process("inspect", str(root), *flags)


@pytest.fixture
def data_dir(root: Path) -> Path:
    """A filled data dir."""
    fill(root / "d")
    return root / "d"


def test_inspect_has_the_documented_keys_and_numbers(data_dir: Path) -> None:
    """The document's keys are a contract; its numbers are those of the store."""
    code, document = inspect(data_dir)
    assert code == 0
    assert list(document) == list(KEYS)
    assert set(document["binding"]) == KEYS["binding"]
    assert set(document["binding"]["store"]) == {"backend", "uuid", "format_version"}
    assert set(document["models"][0]) == KEYS["models"]
    assert set(document["rejections"][0]) == KEYS["rejections"]
    assert document["binding"]["chunk_size"] == 544
    assert [(row["objects"], row["bytes"]) for row in document["models"]] in (
        [(0, 0), (5, 5 * OBJECT_BYTES)],
        [(5, 5 * OBJECT_BYTES), (0, 0)],
    )
    assert set(document["store"]) == KEYS["store"]
    assert (
        document["store"]
        | {
            "objects": 5,
            "bytes": 5 * OBJECT_BYTES,
            "capacity_bytes": CAPACITY_BYTES,
            "stale_objects": 0,
            "clean_shutdown": True,
        }
        == document["store"]
    )
    assert document == inspect_offline(data_dir)


def test_models_of_one_name_are_told_apart_by_field(data_dir: Path) -> None:
    """--models names the field in which two identities differ."""
    _, document = inspect(data_dir, "--models")
    first, second = document["models"]
    assert first["differs_from"] is None
    assert second["differs_from"] == {
        "fingerprint": first["fingerprint"],
        "fields": ["weights"],
    }


def test_the_text_form_shows_the_same(data_dir: Path) -> None:
    """For people: binding, store, models and rejections as tables."""
    done = run_cli("inspect", str(data_dir), "--models")
    assert done.returncode == 0
    assert done.stderr == ""
    assert "chunk size\t544" in done.stdout
    assert "objects\t5" in done.stdout
    assert "incompatible_alignment" in done.stdout
    assert "incompatible_alignment\tstart the engine with block sizes that divide" in done.stdout
    assert "in: weights" in done.stdout


def test_looking_creates_and_changes_nothing(data_dir: Path) -> None:
    """Names, bytes and modes are the same after inspect and verify."""
    before = snapshot(data_dir)
    assert inspect(data_dir)[0] == 0
    assert verify(data_dir) == (0, {"ok": True, "checked_objects": 5, "violations": []})
    assert snapshot(data_dir) == before


def test_a_read_only_mount_can_be_looked_at(data_dir: Path) -> None:
    """Neither verb needs to write, not even a lock."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare to make a read-only mount")
    cli = f"{sys.executable} -m lmcache_persist.cli"
    script = (
        f"mount --bind {data_dir} {data_dir} && mount -o remount,bind,ro {data_dir} || exit 77\n"
        f"{cli} inspect {data_dir} --json && {cli} verify {data_dir} >&2"
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip(f"mounting is not permitted: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["store"]["objects"] == 5


def test_an_unbound_data_dir_is_shown_as_such(root: Path) -> None:
    """A manifest without binding is a fact, not an error, and nothing is wrong with it."""
    fill(root / "d", stamped=False, bound=False)
    code, document = inspect(root / "d")
    assert code == 0
    assert document["binding"] is None
    assert document["models"] == []
    assert verify(root / "d")[0] == 0


def test_a_bind_without_its_stamp_is_clean(root: Path) -> None:
    """The state that a crash between manifest and store leaves is a legal one."""
    fill(root / "d", stamped=False)
    assert verify(root / "d") == (0, {"ok": True, "checked_objects": 0, "violations": []})


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: None])
def test_no_data_dir_is_an_error_not_an_empty_cache(root: Path, make: Any) -> None:
    """A mistyped folder is never reported as holding nothing."""
    make(root / "typo")
    for verb in ("inspect", "verify"):
        code, document = in_process(verb, str(root / "typo"))
        assert (code, document["error"]["code"]) == (5, "data_dir_unusable")
    assert not (root / "typo").exists() or not list((root / "typo").iterdir())


def test_a_store_without_manifest_is_an_error(data_dir: Path) -> None:
    """A lost manifest is not taken for an unbound data dir."""
    (data_dir / "manifest.sqlite").unlink()
    for name in ("manifest.sqlite-wal", "manifest.sqlite-shm"):
        (data_dir / name).unlink(missing_ok=True)
    with pytest.raises(StoreMismatch) as caught:
        with FilesSource.open(data_dir):
            pass
    for verb in (("inspect",), ("verify", "--repair"), ("prune", "--stale")):
        code, document = in_process(verb[0], str(data_dir), *verb[1:])
        assert (code, document["error"]) == (5, error_document(caught.value)), "one rule"
    code, document = verify(data_dir)
    assert code == 1
    assert "no manifest" in document["violations"][0]["what"]


@pytest.mark.parametrize("verb", [("prune", "--stale"), ("reset", "--yes")])
def test_room_is_spoken_of_only_by_a_verb_that_needs_some(
    data_dir: Path, verb: tuple[str, ...]
) -> None:
    """Neither before a refusal nor before a removal."""
    name, flag = verb
    with DataDirLock.acquire(data_dir):
        for root in (data_dir, data_dir / "no"):
            code, _, err = cli_here(name, str(root), flag)
            assert (code, "room" in err) == (5, False), err
    code, _, err = cli_here(name, str(data_dir), flag)
    assert (code, "room" in err) == (0, False)


def test_an_unreadable_manifest_is_an_error(data_dir: Path) -> None:
    """Garbage in the manifest's place is never "unbound"."""
    (data_dir / "manifest.sqlite").write_bytes(b"not a database" * 1000)
    code, document = inspect(data_dir)
    assert (code, document["error"]["code"]) == (5, "manifest_unreadable")
    assert verify(data_dir)[0] == 1


def data_file(data_dir: Path) -> Path:
    """The store's data file."""
    return data_dir / "store" / "data.mdb"


@pytest.mark.parametrize("size", [0, 4096, 1 << 20])
def test_a_cut_store_is_unavailable_and_a_violation(data_dir: Path, size: int) -> None:
    """Inspect shows the manifest and says why not the store; verify says it is bad."""
    os.truncate(data_file(data_dir), size)
    code, document = inspect(data_dir)
    assert code == 6
    assert document["store"] == "unavailable"
    assert document["binding"]["chunk_size"] == 544
    assert document["models"][0]["objects"] is None
    said = []
    for words in (("inspect",), ("backup", str(data_dir.parent / "b"))):
        _, _, err = cli_here(words[0], str(data_dir), *words[1:])
        said.append(err.splitlines())
    assert said[0] == said[1], "one text, one way out"
    assert said[0][0].count("is damaged") == 1
    assert f"lmcache-persist verify {data_dir} --repair" in said[0][1]
    code, document = verify(data_dir)
    assert code == 1
    assert document["violations"]


def test_one_flipped_byte_in_an_object_is_found(data_dir: Path) -> None:
    """Verify reads every extent against its digest and names the chunk."""
    raw = bytearray(data_file(data_dir).read_bytes())
    wanted = first_object(data_dir)
    at = raw.find(wanted)
    assert at > 0
    raw[at + 500] ^= 1
    data_file(data_dir).write_bytes(raw)
    code, document = verify(data_dir)
    assert code == 1
    assert [row["what"] for row in document["violations"]] == ["it has another digest"]
    assert "chunk" in document["violations"][0]["where"]
    assert inspect(data_dir)[0] == 0  # the totals are fine


def first_object(data_dir: Path) -> bytes:
    """Some bytes from the middle of a stored object."""
    with DataDirLock.acquire(data_dir):
        disk = LmdbDisk.open(data_dir / "store", CAPACITY_BYTES)
        try:
            key = chunk_key(model_of(weights="w1"), ChunkHash(bytes(32)))  # type: ignore[arg-type]
            [found] = disk.find([key])
            assert found is not None
            buffer = bytearray(OBJECT_BYTES)
            assert disk.read_into(found, Place(0, 0), memoryview(buffer))
            return bytes(buffer[1000:2000])
        finally:
            disk.close()


def test_a_deleted_store_is_shown_empty_and_reported(data_dir: Path) -> None:
    """Lost bytes are lost cache: inspect shows none, verify says that they are gone."""
    shutil.rmtree(data_dir / "store")
    code, document = inspect(data_dir)
    assert code == 0
    assert document["store"]["objects"] == 0
    code, document = verify(data_dir)
    assert code == 1
    assert "absent" in document["violations"][0]["what"]


def test_a_foreign_store_is_a_violation(root: Path, data_dir: Path) -> None:
    """The store of another data dir beside this manifest is noticed."""
    fill(root / "other")
    shutil.rmtree(data_dir / "store")
    shutil.move(root / "other" / "store", data_dir / "store")
    code, document = verify(data_dir)
    assert code == 1
    assert "store uuid" in {row["where"] for row in document["violations"]}


@pytest.mark.parametrize(
    ("statement", "where"),
    [
        ("UPDATE binding SET chunk_size = 1088", "manifest"),
        ("UPDATE binding SET binding_id = boundary_id", "manifest"),
        ("UPDATE binding SET bound_at = 'never'", "manifest"),
        ("UPDATE models SET identity = replace(identity, 'w1', 'w2')", "manifest model"),
        ("UPDATE models SET required_alignment = 32", "manifest model"),
        ("DELETE FROM binding", "manifest model"),
        ("DELETE FROM binding", "store stamp"),
        ("DELETE FROM binding", "store totals"),
    ],
)
def test_a_falsified_manifest_is_noticed(data_dir: Path, statement: str, where: str) -> None:
    """Every fact of the manifest is checked against what it was made from."""
    with sqlite3.connect(data_dir / "manifest.sqlite") as connection:
        connection.execute(statement)
    connection.close()
    code, document = verify(data_dir)
    assert code == 1
    assert any(row["where"].startswith(where) for row in document["violations"]), document


def test_objects_of_a_model_that_does_not_fit_are_noticed(data_dir: Path) -> None:
    """A model whose blocks do not end where chunks end cannot have objects."""
    groups = [{**GROUPS[0], "tokens_per_block": 640, "slots_per_block": 640}]
    name = fingerprint(identity(), groups, [{}])
    with DataDirLock.acquire(data_dir):
        with contextlib.closing(Manifest.open(data_dir / "manifest.sqlite")) as manifest:
            manifest.record_model(
                fingerprint=name,
                name="misfit",
                identity=identity(),
                groups=groups,
                layouts=[{}],
                required_alignment=640,
                at=AT,
            )
        with contextlib.closing(LmdbDisk.open(data_dir / "store", CAPACITY_BYTES)) as disk:
            disk.write([ChunkWrite(chunk_key(name, ChunkHash(bytes(32))), {Place(0, 0): b"x"})])
    code, document = verify(data_dir)
    assert code == 1
    assert ["does not divide" in row["what"] for row in document["violations"]] == [True]


def test_check_is_the_same_function_in_python(data_dir: Path) -> None:
    """lmcache_persist.check yields what verify prints."""
    assert list(lmcache_persist.check(data_dir)) == []
    os.truncate(data_file(data_dir), 4096)
    assert [str(found) for found in lmcache_persist.check(str(data_dir))] == [
        f"{row['where']}: {row['what']}" for row in verify(data_dir)[1]["violations"]
    ]


def test_check_counts_what_it_looked_at(data_dir: Path) -> None:
    """The number of objects whose digests were read is reported."""
    progress = Progress()
    assert list(check(data_dir, progress=progress)) == []
    assert progress.checked_objects == 5


def test_check_holds_the_lock_while_it_runs(data_dir: Path) -> None:
    """No server starts on files that are being read, and none is read while one runs."""
    (data_dir / "store" / "data.mdb").write_bytes(b"")
    findings = iter(lmcache_persist.check(data_dir))
    next(findings)
    with pytest.raises(DataDirLocked):
        DataDirLock.acquire(data_dir, wait_s=0)
    findings.close()  # type: ignore[attr-defined]
    with DataDirLock.acquire(data_dir, wait_s=0), pytest.raises(PersistError):
        list(lmcache_persist.check(data_dir))
    ReaderLock.acquire(data_dir).release()


def test_a_held_data_dir_without_an_answer_shows_the_manifest_only(data_dir: Path) -> None:
    """Beside a hung server: store unavailable, exit code 4, and the holder is named."""
    with DataDirLock.acquire(data_dir):
        code, document = inspect(data_dir, "--timeout", "0.3")
        assert code == 4
        assert document["store"] == "unavailable"
        assert document["binding"]["chunk_size"] == 544
        assert in_process("verify", str(data_dir), "--timeout", "0.3")[0] == 4
    assert inspect(data_dir)[0] == 0
