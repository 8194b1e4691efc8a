"""Damaged, lost, swapped and foreign files: what a real server's start makes of each.

Lost or broken bytes are lost cache: it starts empty under the same binding and says so
once. Foreign bytes, and bytes without their manifest, are refused, and a refusal changes
nothing. docs/durability.md has the table for people.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import lmdb
import pytest

from lmcache_persist import failpoints
from lmcache_persist.connector import ClientOptions
from lmcache_persist.datadir import DataDir
from lmcache_persist.errors import PersistError
from lmcache_persist.manifest import read_snapshot
from lmcache_persist.server import recovery
from lmcache_persist.server.offline import check
from lmcache_persist.store import format as fmt
from support.emulated import EmulatedEngine
from support.files import snapshot
from support.mutilate import alter
from support.results import SOAKING, kept_on_failure
from support.server import ServerProcess, short_folder
from support.waiting import wait_until

MakeServer = Callable[..., ServerProcess]
Damage = Callable[[Path], None]
OPTIONS = ClientOptions(request_timeout_s=5.0, reconnect_max_s=0.1)
CHUNK = 544
NUM_CHUNKS = 5
CAPACITY = 16 << 20
PAGE = 4096
OBJECT_BYTES = 64 * 1024


def serve(folder: Path, chunk_size: int) -> None:
    """Make a data dir with some chunks in it, and stop its server."""
    server = ServerProcess(folder, capacity=str(CAPACITY)).start()
    try:
        with EmulatedEngine(server.url, [chunk_size], options=OPTIONS) as engine:
            engine.join()
            hashes = engine.hashes(list(range(chunk_size * NUM_CHUNKS + 1)))
            assert engine.store(hashes) == NUM_CHUNKS
            engine.client.flush(20)
        # A second start, so that there are two boots and an older copy differs.
        server.kill()
        (folder / "server.sock").unlink()  # no copy of a socket
        shutil.copytree(folder, folder.with_name(f"{folder.name}.killed"))
        server.start()
        assert server.terminate() == 0
    finally:
        server.kill()


@pytest.fixture(scope="module")
def made() -> Iterator[Path]:
    """A folder with data dirs: ``a`` and ``b``, of another binding each, and ``*.killed``."""
    root = short_folder()
    try:
        serve(root / "a", CHUNK)
        serve(root / "b", 640)
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def prepared(make_server: MakeServer, root: Path, made: Path) -> Callable[..., ServerProcess]:
    """A server, not started, on a damaged copy of a data dir."""

    def prepare(damage: Damage, kind: str = "a", **options: object) -> ServerProcess:
        shutil.copytree(made / kind, root / "d")
        damage(root / "d")
        return make_server(capacity=str(CAPACITY), **options)

    return prepare


def hits(server: ServerProcess, *, then: int = NUM_CHUNKS) -> int:
    """Chunks of the old prompt that are hit, byte for byte; then a new prompt must work."""
    with EmulatedEngine(server.url, [CHUNK], options=OPTIONS) as engine:
        engine.join()
        assert engine.chunk_size == CHUNK
        hashes = engine.hashes(list(range(CHUNK * NUM_CHUNKS + 1)))
        found = engine.lookup(hashes, CHUNK * NUM_CHUNKS + 1).tokens // CHUNK
        fresh = engine.hashes([7, *range(CHUNK * then)])
        assert engine.store(fresh) == then
        engine.client.flush(20)
        assert engine.lookup(fresh, CHUNK * then + 1).tokens == CHUNK * then
        return found


def binding_id(data_dir: Path) -> str:
    """Of the manifest."""
    binding = read_snapshot(data_dir / "manifest.sqlite").binding
    assert binding is not None
    return binding.binding_id


# -- what is done to the files ---------------------------------------------------------------


def data_file(data_dir: Path) -> Path:
    """The store's."""
    return data_dir / "store" / "data.mdb"


def cut(nbytes: int) -> Damage:
    """Cut the data file."""
    return lambda folder: os.truncate(data_file(folder), nbytes)


def overwrite(path: Path, at: int, content: bytes) -> None:
    """Write over a part of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


def zero_pages(*pages: int) -> Damage:
    """Write zeros over LMDB pages."""

    def damage(folder: Path) -> None:
        for page in pages:
            overwrite(data_file(folder), page * PAGE, bytes(PAGE))

    return damage


def roots(path: Path) -> dict[str, int]:
    """The root pages of the newest tree: LMDB's two own, and those of the named databases.

    Source: mdb.c of 0.9, struct MDB_meta (two MDB_db of 48 bytes at 40 and 88 of the page, the
    root their last 8), MDB_node of a leaf (lo, hi, flags, ksize: u16 each, key, data).
    """
    data = path.read_bytes()
    newest = max((0, PAGE), key=lambda at: struct.unpack_from("<Q", data, at + 16 + 128)[0])
    found = {
        "free": struct.unpack_from("<Q", data, newest + 16 + 24 + 40)[0],
        "main": struct.unpack_from("<Q", data, newest + 16 + 72 + 40)[0],
    }
    page = data[found["main"] * PAGE :][:PAGE]
    (lower,) = struct.unpack_from("<H", page, 12)
    for slot in range(16, lower, 2):
        (at,) = struct.unpack_from("<H", page, slot)
        (ksize,) = struct.unpack_from("<H", page, at + 6)
        name = page[at + 8 : at + 8 + ksize].decode()
        found[name] = struct.unpack_from("<Q", page, at + 8 + ksize + 40)[0]
    return found


def noise(name: str) -> Damage:
    """4 KiB of noise over the root page of a tree."""

    def damage(folder: Path) -> None:
        page = roots(data_file(folder))[name]
        overwrite(data_file(folder), page * PAGE, random.Random(name).randbytes(PAGE))

    return damage


def in_manifest(statement: str) -> Damage:
    """Run SQL on the manifest."""

    def damage(folder: Path) -> None:
        with closing(sqlite3.connect(folder / "manifest.sqlite")) as connection, connection:
            connection.execute(statement).close()
        # As a clean end leaves it.
        with closing(sqlite3.connect(folder / "manifest.sqlite")) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").close()

    return damage


def in_meta(name: bytes, value: bytes | None) -> Damage:
    """Write or delete a value of the store's own description."""

    def damage(folder: Path) -> None:
        with closing(
            lmdb.open(
                str(folder / "store"), writemap=True, map_size=CAPACITY, max_dbs=9, lib_version=0
            )
        ) as env:
            with env.begin(write=True) as txn:
                meta = env.open_db(b"meta", txn=txn)
                if value is None:
                    txn.delete(name, db=meta)
                else:
                    txn.put(name, value, db=meta)
        (folder / "store" / "lock.mdb").unlink()

    return damage


def newer_lmdb(folder: Path) -> None:
    """LMDB's own data format, one further."""
    for page in (0, PAGE):
        overwrite(data_file(folder), page + 16 + 4, struct.pack("<I", 2))


def lmdb_1(folder: Path) -> None:
    """A file as LMDB 1.0 makes it, whose page header is longer."""
    data_file(folder).unlink()
    with closing(lmdb.open(str(folder / "store"), map_size=CAPACITY, lib_version=1)):
        pass
    (folder / "store" / "lock.mdb").unlink()


def replace_by(source: str, made: Path, name: str) -> Damage:
    """Put a file or folder of another data dir in the place of ours."""

    def damage(folder: Path) -> None:
        target = folder / name
        if target.is_dir():
            shutil.rmtree(target)
            shutil.copytree(made / source / name, target)
        else:
            shutil.copy2(made / source / name, target)

    return damage


def copy_manifest(source: Path, folder: Path) -> None:
    """Put another manifest, with its side files, in the place of ours."""
    for path in source.glob("manifest*"):
        shutil.copy2(path, folder)


def gone(*names: str) -> Damage:
    """Remove files or folders."""

    def damage(folder: Path) -> None:
        for name in names:
            path = folder / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    return damage


# -- lost or broken: empty, under the same binding --------------------------------------------

LOST: dict[str, tuple[Damage, str]] = {
    "cut to 75 %": (cut(CAPACITY * 3 // 4), "the data file has"),
    "cut to one page": (cut(PAGE), "meta page 1"),
    "cut to 0": (cut(0), "meta page 0"),
    "cut by one byte": (cut(CAPACITY - 1), "the data file has"),
    "pages 0 and 1 zeroed": (zero_pages(0, 1), "meta page 0"),
    "page 0 zeroed": (zero_pages(0), "meta page 0"),
    "page 1 zeroed": (zero_pages(1), "meta page 1"),
    "file gone": (gone("store/data.mdb"), "the store is gone"),
    "folder gone": (gone("store"), "the store is gone"),
    "noise in the main tree": (noise("main"), "set aside"),
    "noise in the description": (noise("meta"), "set aside"),
    "description gone": (in_meta(fmt.META_STORE, None), "set aside"),
    "description altered": (in_meta(fmt.META_STORE, b"x" * 40), "set aside"),
}


TWICE = ("cut to 75 %", "noise in the main tree", "folder gone", "store of another")
"""Where another start is tried, too: neither a refusal nor a recovery leaves a loop behind."""


@pytest.mark.parametrize("name", LOST)
def test_lost_bytes_are_lost_cache(prepared: Callable[..., ServerProcess], name: str) -> None:
    """It starts empty, once, with one loud line, the same binding, and works from then on."""
    damage, said = LOST[name]
    server = prepared(damage)
    bound = binding_id(server.data_dir)
    server.start()
    log = server.log()
    assert said in log
    assert log.count("starting empty under binding") == 1
    assert "Traceback" not in log
    assert hits(server) == 0
    server.kill()
    assert binding_id(server.data_dir) == bound
    assert [str(violation) for violation in check(server.data_dir)] == []
    if name in TWICE:
        server.start()
        assert server.log().count("starting empty") == 1
    assert (server.data_dir / "store.damaged").exists() == ("gone" not in said)


UNSOUND = {
    "lost counters": "",
    "broken totals": "",
    "lost totals": "totals would become less than nothing",
    "swapped order": "its order is another one's",
}
"""Ways to alter a store (see :mod:`support.mutilate`), and what its last server said of it."""


@pytest.mark.parametrize("name", UNSOUND)
def test_what_only_counts_or_orders_is_mended(
    prepared: Callable[..., ServerProcess], name: str
) -> None:
    """A store whose pages are well is never set aside: a start puts it right and keeps it."""

    def damage(folder: Path) -> None:
        alter(folder / "store", name)
        if UNSOUND[name]:
            (folder / "crash.log").write_text(f"store damaged: {UNSOUND[name]}\n")

    server = prepared(damage)
    # A verb that is no start leaves it to the one that mends.
    look = recovery.look(DataDir(server.data_dir), deep=False, thorough=bool(UNSOUND[name]))
    assert look.store is recovery.StoreState.DAMAGED
    bound = binding_id(server.data_dir)
    server.start()
    assert server.log().count("the store is mended") == 1
    assert "starting empty" not in server.log()
    assert hits(server) == NUM_CHUNKS
    server.kill()
    assert binding_id(server.data_dir) == bound
    assert [str(violation) for violation in check(server.data_dir)] == []
    assert not (server.data_dir / "store.damaged").exists()
    if name == "broken totals":  # no loop: another start has nothing to mend
        server.start()
        assert server.log().count("the store is mended") == 1
        assert hits(server) == NUM_CHUNKS


def test_what_cannot_be_mended_is_set_aside(prepared: Callable[..., ServerProcess]) -> None:
    """Totals that cannot be read in a store with a broken page: it starts all the same, empty."""

    def damage(folder: Path) -> None:
        alter(folder / "store", "broken totals")
        noise("extents")(folder)

    server = prepared(damage).start()
    assert server.log().count("starting empty under binding") == 1
    assert "is mended" not in server.log()
    assert hits(server) == 0
    assert (server.data_dir / "store.damaged").exists()


@pytest.mark.parametrize("name", ["chunks", "order", "totals", "extents", "free"])
def test_noise_in_a_tree_never_loops(prepared: Callable[..., ServerProcess], name: str) -> None:
    """A tree that a start does not read may cost a server's life once, and no wrong byte."""
    server = prepared(noise(name))
    bound = binding_id(server.data_dir)
    deaths = use_until_well(server)
    print(f"noise in {name}: {deaths} death(s)")
    assert binding_id(server.data_dir) == bound
    server.terminate()
    assert [str(violation) for violation in check(server.data_dir)] == []


def use_until_well(server: ServerProcess) -> int:
    """Start and use a server until a restarted one is well; how many died of it meanwhile."""
    deaths = 0
    for _ in range(4):
        server.start()
        alive = True
        try:
            hits(server)
        except (PersistError, RuntimeError, AssertionError) as error:
            if "wrong bytes" in str(error):
                raise
            alive = server.process is not None and server.process.poll() is None
        if not alive:
            deaths += 1
            code = server.wait()
            assert code < 0, f"it ended with {code}: {server.log()[-2000:]}"
            assert "starting empty" not in server.log()
            continue
        # Those that live and cannot write tell the next start.
        server.kill()
        if [str(violation) for violation in check(server.data_dir)] == []:
            server.start()
            hits(server)
            assert "Traceback" not in server.log()
            return deaths
    raise AssertionError(f"no server was ever well: {server.log()[-3000:]}")


@pytest.mark.timeout(1200)
def test_noise_anywhere_never_loops(
    prepared: Callable[..., ServerProcess], root: Path, made: Path, seed: int
) -> None:
    """4 KiB of noise at pages drawn at random: never a wrong byte, never a crash loop."""
    rng = random.Random(f"noise {seed}")
    server = prepared(lambda folder: None)
    whole = data_file(server.data_dir).read_bytes()
    tree = [
        at // PAGE
        for at in range(2 * PAGE, len(whole), PAGE)
        if struct.unpack_from("<QHH", whole, at)[::2] in ((at // PAGE, 1), (at // PAGE, 2))
    ]
    used = len(whole.rstrip(b"\0")) // PAGE
    deaths = empty = 0
    attempts = 40 if SOAKING else 5
    for attempt in range(attempts):
        shutil.rmtree(server.data_dir)
        shutil.copytree(made / "a", server.data_dir)
        server.log_path.unlink(missing_ok=True)
        page = rng.choice(tree) if attempt % 2 else rng.randrange(2, used)
        print(f"seed {seed}, page {page}")
        with kept_on_failure(root, f"noise-{seed}-{page}"):
            overwrite(data_file(server.data_dir), page * PAGE, rng.randbytes(PAGE))
            deaths += use_until_well(server)
            empty += "starting empty" in server.log()
            server.kill()
    print(f"{attempts} pages of noise: {deaths} deaths, {empty} stores emptied, no wrong byte")


def test_no_engine_is_disturbed(make_server: MakeServer, root: Path) -> None:
    """An engine that lives through all of it sees misses, then hits; no error, no signal."""
    server = make_server(capacity=str(CAPACITY)).start()
    with EmulatedEngine(server.url, [CHUNK], options=OPTIONS) as engine:
        engine.join()
        hashes = engine.hashes(list(range(CHUNK * NUM_CHUNKS + 1)))
        assert engine.store(hashes) == NUM_CHUNKS
        engine.client.flush(20)
        boot = engine.client.boot_id
        server.kill()
        os.truncate(data_file(server.data_dir), PAGE)
        assert engine.lookup(hashes, CHUNK * NUM_CHUNKS + 1).tokens == 0
        server.start()
        wait_until(lambda: engine.client.boot_id not in (None, boot), "it is back by itself")
        assert engine.lookup(hashes, CHUNK * NUM_CHUNKS + 1).tokens == 0
        assert engine.store(hashes) == NUM_CHUNKS
        engine.client.flush(20)
        wanted = CHUNK * NUM_CHUNKS
        assert engine.lookup(hashes, wanted + 1).tokens == wanted


# -- bad values: each a miss, dropped, counted ------------------------------------------------


def bad_extent(change: Callable[[bytes], bytes]) -> Damage:
    """Change the one extent of the third chunk that was stored."""

    def damage(folder: Path) -> None:
        store = lmdb.open(
            str(folder / "store"), writemap=True, map_size=CAPACITY, max_dbs=9, lib_version=0
        )
        with closing(store) as env, env.begin(write=True) as txn:
            extents = env.open_db(b"extents", txn=txn)
            key, value = list(txn.cursor(db=extents))[2]
            txn.put(key, change(value), db=extents)
        (folder / "store" / "lock.mdb").unlink()

    return damage


BAD_VALUES = {
    "empty": lambda value: b"",
    "one byte short": lambda value: value[:-1],
    "one byte more": lambda value: value + b"x",
    "one bit flipped": lambda value: bytes([value[0] ^ 1]) + value[1:],
    "another chunk's bytes": lambda value: random.Random(1).randbytes(len(value)),
}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_a_bad_value_is_a_miss(prepared: Callable[..., ServerProcess], name: str) -> None:
    """It ends the hit before its chunk, is dropped and counted, and can be stored again."""
    server = prepared(bad_extent(BAD_VALUES[name])).start()
    with EmulatedEngine(server.url, [CHUNK], options=OPTIONS) as engine:
        engine.join()
        wanted = CHUNK * NUM_CHUNKS
        hashes = engine.hashes(list(range(wanted + 1)))
        hit = engine.lookup(hashes, wanted + 1).tokens // CHUNK
        assert hit < NUM_CHUNKS
        assert engine.client.stats(20)["counters"]["corrupt_chunks"] == 1
        assert engine.lookup(hashes, wanted + 1).tokens // CHUNK == hit
        assert engine.client.stats(20)["counters"]["corrupt_chunks"] == 1
        assert engine.store(hashes) == NUM_CHUNKS
        engine.client.flush(20)
        assert engine.lookup(hashes, wanted + 1).tokens == wanted
    server.kill()
    assert [str(violation) for violation in check(server.data_dir)] == []


# -- foreign, or without its manifest: refused, nothing changed --------------------------------


def refusals(made: Path) -> dict[str, tuple[Damage, str, list[str]]]:
    """What is done, the error's code, and words that the message has."""
    newer = {"format_version": 2, "uuid": "0" * 32}
    return {
        "manifest gone": (gone("manifest.sqlite"), "store_mismatch", ["manifest", "544"]),
        "manifest empty": (
            lambda folder: os.truncate(folder / "manifest.sqlite", 0),
            "store_mismatch",
            ["unbound", "544"],
        ),
        "manifest cut": (
            lambda folder: os.truncate(folder / "manifest.sqlite", 5000),
            "manifest_unreadable",
            ["manifest"],
        ),
        "manifest noise": (
            lambda folder: overwrite(folder / "manifest.sqlite", 0, os.urandom(8192)),
            "manifest_unreadable",
            ["manifest"],
        ),
        "manifest of another": (
            replace_by("b", made, "manifest.sqlite"),
            "store_mismatch",
            ["uuid"],
        ),
        "store of another": (replace_by("b", made, "store"), "store_mismatch", ["uuid"]),
        "newer schema": (
            in_manifest("UPDATE alembic_version SET version_num = '0999'"),
            "schema_too_new",
            ["0999"],
        ),
        "binding altered": (
            in_manifest("UPDATE binding SET chunk_size = 1088"),
            "manifest_unreadable",
            ["binding"],
        ),
        "binding deleted": (
            in_manifest("DELETE FROM binding"),
            "store_mismatch",
            ["unbound", "544"],
        ),
        "newer store format": (
            in_meta(fmt.META_STORE, fmt.encode_meta(newer)),
            "format_too_new",
            ["format 2"],
        ),
        "newer LMDB format": (newer_lmdb, "format_too_new", ["2"]),
        "LMDB 1.0": (lmdb_1, "format_too_new", ["LMDB"]),
        "stamp gone": (in_meta(fmt.META_STAMP, None), "store_mismatch", ["stamp"]),
        "both without manifest and cut": (
            lambda folder: (gone("manifest.sqlite")(folder), cut(PAGE)(folder))[0],
            "store_mismatch",
            ["manifest", "damaged"],
        ),
    }


REFUSALS = list(refusals(Path("/nowhere")))


@pytest.mark.parametrize("name", REFUSALS)
def test_foreign_bytes_are_refused(
    prepared: Callable[..., ServerProcess], made: Path, name: str
) -> None:
    """One message with a code and a way out, exit status 5, and not one byte is changed."""
    damage, code, words = refusals(made)[name]
    server = prepared(damage)
    before = snapshot(server.data_dir)
    for _ in range(2 if name in TWICE else 1):
        status, log = server.refused()
        assert status == 5, log
        assert log.count("error: ") == 1
        assert f"[{code}]" in log
        assert log.count("hint: ") == 1
        for word in words:
            assert word in log
        assert "Traceback" not in log
        assert snapshot(server.data_dir) == before


def test_what_is_put_back_starts(prepared: Callable[..., ServerProcess], made: Path) -> None:
    """A refusal left everything usable: with the right manifest back, all is hit."""
    server = prepared(gone("manifest.sqlite"))
    assert server.refused()[0] == 5
    shutil.copy2(made / "a" / "manifest.sqlite", server.data_dir)
    server.start()
    assert hits(server) == NUM_CHUNKS


# -- what has to start as if nothing were -----------------------------------------------------


def whole(made: Path) -> dict[str, tuple[str, Damage]]:
    """The data dir to begin with, and what is done to it."""
    return {
        "killed": ("a.killed", lambda folder: None),
        "older manifest": (
            "a",
            lambda folder: copy_manifest(made / "a.killed", folder),
        ),
        "older store": ("a", replace_by("a.killed", made, "store")),
        "-wal gone": ("a.killed", gone("manifest.sqlite-wal")),
        "-shm gone": ("a.killed", gone("manifest.sqlite-shm")),
        "-wal cut": (
            "a.killed",
            lambda folder: os.truncate(folder / "manifest.sqlite-wal", 5000),
        ),
        "lock files gone": ("a", gone("server.lock")),
        "crash log gone": ("a", gone("crash.log")),
        "half-made store beside it": (
            "a",
            lambda folder: (folder / "store" / ".new").mkdir(),
        ),
    }


@pytest.mark.parametrize("name", list(whole(Path("/nowhere"))))
def test_what_starts_whole(prepared: Callable[..., ServerProcess], made: Path, name: str) -> None:
    """An older copy under the same binding, or a lost side file, costs nothing durable."""
    kind, damage = whole(made)[name]
    server = prepared(damage, kind)
    server.start()
    assert hits(server) == NUM_CHUNKS
    assert server.terminate() == 0
    assert [str(violation) for violation in check(server.data_dir)] == []
    assert "Traceback" not in server.log()


@pytest.mark.parametrize("file", ["b", "b.killed", "fresh"])
def test_a_wal_beside_another_file(
    prepared: Callable[..., ServerProcess], made: Path, file: str
) -> None:
    """SQLite cannot tell whose -wal it is: the start refuses, or goes on as the store says."""

    def damage(folder: Path) -> None:
        main = folder / "manifest.sqlite"
        if file == "fresh":
            main.unlink()
            with closing(sqlite3.connect(main)) as connection:
                connection.execute("CREATE TABLE t (x)").close()
        else:
            shutil.copy2(made / file / "manifest.sqlite", main)

    server = prepared(damage, "a.killed")
    before = snapshot(server.data_dir)
    status: int | None = None
    try:
        server.start()
    except RuntimeError:
        status = server.wait()
    log = server.log()
    assert "Traceback" not in log
    if status is not None:
        assert status == 5, log
        assert snapshot(server.data_dir) == before
        return
    assert hits(server) == NUM_CHUNKS
    server.terminate()
    assert [str(violation) for violation in check(server.data_dir)] == []


@pytest.mark.parametrize("side", ["empty", "absent"])
def test_a_wal_without_its_file_is_refused(
    prepared: Callable[..., ServerProcess], side: str
) -> None:
    """The only copy of what was committed last is never thrown away in silence."""

    def damage(folder: Path) -> None:
        main = folder / "manifest.sqlite"
        if side == "empty":
            os.truncate(main, 0)
        else:
            main.unlink()

    server = prepared(damage, "a.killed")
    before = snapshot(server.data_dir)
    status, log = server.refused()
    assert (status, log.count("error: ")) == (5, 1)
    assert "manifest.sqlite-wal" in log
    assert snapshot(server.data_dir) == before


def test_an_interrupted_migration_is_done_again(make_server: MakeServer) -> None:
    """Killed before its migration commits, three times; then it starts, and binds."""
    server = make_server(capacity=str(CAPACITY))
    clean = server._env
    server._env = {**clean, failpoints.ENV: "migrate.before_commit=kill"}
    for _ in range(3):
        server.launch()
        assert server.wait() == -signal.SIGKILL
    server._env = clean
    server.start()
    assert hits(server) == 0
    assert "Traceback" not in server.log()


# -- deaths that say who did it ----------------------------------------------------------------


def die(server: ServerProcess) -> None:
    """Let a running server die as LMDB lets it: by SIGABRT, with a crash log."""
    assert server.process is not None
    server.process.send_signal(signal.SIGABRT)
    assert server.wait() == -signal.SIGABRT
    assert (server.data_dir / "crash.log").stat().st_size > 0


def test_the_third_death_in_ten_minutes_empties_the_store(
    prepared: Callable[..., ServerProcess],
) -> None:
    """Two deaths are forgiven if the pages look well, the third is not; then it counts anew."""
    server = prepared(lambda folder: None)
    for _ in range(2):
        server.start()
        die(server)
    server.start()
    assert hits(server) == NUM_CHUNKS
    die(server)
    server.start()
    assert "servers keep crashing on it" in server.log()
    assert hits(server) == 0
    die(server)
    server.start()
    assert server.log().count("set aside") == server.log().count("servers keep crashing")
    with EmulatedEngine(server.url, [CHUNK], options=OPTIONS) as engine:
        engine.join()
        fresh = engine.hashes([7, *range(CHUNK * NUM_CHUNKS)])
        assert engine.lookup(fresh, CHUNK * NUM_CHUNKS + 1).tokens == CHUNK * NUM_CHUNKS
    server.terminate()


def test_deaths_long_ago_do_not_count(prepared: Callable[..., ServerProcess]) -> None:
    """Three deaths spread over more than ten minutes cost no store."""
    server = prepared(lambda folder: None)
    for _ in range(3):
        server.start()
        die(server)
        for path in server.data_dir.glob("crash*.log"):
            old = time.time() - 400
            os.utime(path, (old - 100 * ("." in path.stem), old))
        for path in server.data_dir.glob("crash.?.log"):
            os.utime(path, (time.time() - 700,) * 2)
    server.start()
    assert hits(server) == NUM_CHUNKS


def test_a_crash_without_a_store_starts(prepared: Callable[..., ServerProcess]) -> None:
    """A crash log and no store any more: started empty, not stumbled over."""
    server = prepared(lambda folder: None)
    server.start()
    die(server)
    shutil.rmtree(server.data_dir / "store")
    server.start()
    assert hits(server) == 0


def test_damage_found_while_running_is_told_to_the_next_start(
    prepared: Callable[..., ServerProcess],
) -> None:
    """A server that cannot write for its store's structure leaves a note; the next one acts."""
    server = prepared(in_meta(fmt.META_SHUTDOWN, b"x"))
    server.start()
    with EmulatedEngine(server.url, [CHUNK], options=OPTIONS) as engine:
        engine.join()
        # Under its feet: the map shows what is written to the file.
        content = data_file(server.data_dir).read_bytes()
        body = b'"dropped": '
        at = content.index(body)
        while at >= 0:
            overwrite(data_file(server.data_dir), at, b'"DROPPED": ')
            at = content.find(body, at + 1)
        engine.store(engine.hashes([9, *range(CHUNK)]))
        wait_until(
            lambda: engine.client.stats(20)["writer"]["failures"], "the writer meets the damage"
        )
        assert engine.client.stats(20)["writer"]["failing"]
    assert "store damaged: " in (server.data_dir / "crash.log").read_text()
    server.kill()
    server.start()
    assert "the store is mended" in server.log()
    assert "set aside" not in server.log()
    assert hits(server) == NUM_CHUNKS


def test_one_store_is_kept_aside_and_makes_room_when_needed(
    prepared: Callable[..., ServerProcess], root: Path
) -> None:
    """A second damage replaces the first store aside; without room for both it is given up."""
    from support import mounts

    with mounts.tmpfs(root / "small", "28m"):
        server = prepared(cut(PAGE))
        shutil.copytree(server.data_dir, root / "small" / "d")
        server.command[server.command.index("--data-dir") + 1] = str(root / "small" / "d")
        server.data_dir = root / "small" / "d"
        os.truncate(server.data_dir / "store" / "data.mdb", 0)
        with data_file(server.data_dir).open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, CAPACITY)
        server.start()
        assert "no room for the store beside the damaged one" in server.log()
        assert hits(server) == 0
        assert not (server.data_dir / "store.damaged").exists()
        server.kill()


AS_NOBODY = """
import os, sys
from pathlib import Path
from lmcache_persist.cli.exit_codes import exit_code_of
from lmcache_persist.cli.output import say_error
from lmcache_persist.config import Settings
from lmcache_persist.datadir import DataDir
from lmcache_persist.errors import PersistError
from lmcache_persist.server.app import serve

settings = Settings.load({"data_dir": sys.argv[1], "pool_dir": sys.argv[2], "capacity": "16MiB"})
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
try:
    serve(settings)
except PersistError as error:
    say_error(error)
    sys.exit(exit_code_of(error))
"""


def test_a_start_by_the_wrong_user_says_so(prepared: Callable[..., ServerProcess]) -> None:
    """Files that cannot be read are no reason to start empty: refused, nothing changed."""
    if os.geteuid() != 0:
        pytest.skip("needs root to give files away")
    server = prepared(lambda folder: os.chmod(folder, 0o755))
    before = snapshot(server.data_dir)
    # Imported as root: the interpreter itself may lie where others cannot read.
    done = subprocess.run(
        [server.command[0], "-c", AS_NOBODY, str(server.data_dir), str(server.pool_dir)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 5, done.stderr
    assert done.stderr.count("error: ") == 1
    assert "Traceback" not in done.stderr
    assert snapshot(server.data_dir) == before
