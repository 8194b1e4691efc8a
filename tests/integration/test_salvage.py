"""``recover --set-aside``: what can be had of a store that a start has put away, and what not."""

from __future__ import annotations

import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache_persist.config import Settings
from lmcache_persist.datadir import DataDir
from lmcache_persist.errors import DiskTooSmall
from lmcache_persist.server import opening
from lmcache_persist.server.recovery import Decision
from lmcache_persist.store import meta_page, unsynced
from lmcache_persist.store.aside import set_aside
from lmcache_persist.store.lmdb_disk import LmdbDisk
from support import mounts
from support.altering import alter_chunk
from support.data_dirs import chunk_of, key_of, make, records_of
from support.files import snapshot
from support.forked import dies_at
from support.hints import commands, follow, hint_of
from support.mutilate import alter
from support.server import ServerProcess
from support.verbs import in_process, quiet

CHUNKS = 20
CAPACITY = 32 << 20
PAGE = 4096
Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a data dir, and with the empty store that a repair makes in its place."""
    folder = tmp_path_factory.mktemp("salvage")
    make(folder / "d", capacity_bytes=CAPACITY, chunks=(CHUNKS,))
    emptied = shutil.copytree(folder / "d", folder / "emptied")
    set_aside(emptied / "store")
    assert quiet("verify", str(emptied), "--repair")[0] == 0
    assert quiet("resize", str(emptied), "--capacity", str(CAPACITY))[0] == 0
    assert not records_of(emptied)
    return folder


@pytest.fixture
def data_dir(root: Path, prepared: Path) -> Path:
    """A data dir with some chunks; the store uses a small part of its file."""
    return shutil.copytree(prepared / "d", root / "d")


@pytest.fixture
def put_away(data_dir: Path, prepared: Path) -> Callable[[Damage], None]:
    """Damages the store, and has an empty one in its place, as a start makes it."""

    def act(damage: Damage) -> None:
        damage(data_dir / "store")
        set_aside(data_dir / "store")
        shutil.copytree(prepared / "emptied" / "store", data_dir / "store")

    return act


def used_bytes(store: Path) -> int:
    """What is used of the data file."""
    return (meta_page.read_meta_page(store / "data.mdb").last_page + 1) * PAGE


def power_lost(store: Path) -> None:
    """As after a power loss with relaxed durability: the note of another boot of the kernel."""
    (store / unsynced.UNSYNCED_NAME).write_text("another boot")


def main_root(store: Path) -> int:
    """Where the root page of the databases' names lies. Source: mdb.c of 0.9, struct MDB_meta."""
    data = (store / "data.mdb").read_bytes()[: 2 * PAGE]
    newest = max((0, PAGE), key=lambda at: struct.unpack_from("<Q", data, at + 16 + 128)[0])
    return int(struct.unpack_from("<Q", data, newest + 16 + 72 + 40)[0]) * PAGE


def cut_to(nbytes: Callable[[Path], int]) -> Damage:
    """A file that was cut, by a copy that stopped for instance."""
    return lambda store: os.truncate(store / "data.mdb", nbytes(store))


def noise_at(at: Callable[[Path], int]) -> Damage:
    """4 KiB of noise."""

    def damage(store: Path) -> None:
        place = at(store)
        with (store / "data.mdb").open("r+b") as file:
            file.seek(place)
            file.write(random.Random(1).randbytes(PAGE))

    return damage


def power_lost_and_a_bad_chunk(store: Path) -> None:
    """One chunk never reached the disk as it was meant."""
    alter_chunk(store.parent, key_of(3))
    power_lost(store)


WAYS: dict[str, tuple[Damage, int | None]] = {
    "power lost, relaxed": (power_lost, CHUNKS),
    "power lost, relaxed, one bad": (power_lost_and_a_bad_chunk, CHUNKS - 1),
    "cut by one byte": (cut_to(lambda store: CAPACITY - 1), CHUNKS),
    "cut to three quarters": (cut_to(lambda store: CAPACITY * 3 // 4), CHUNKS),
    "cut to what is used": (cut_to(used_bytes), CHUNKS),
    "counters gone": (lambda store: alter(store, "lost counters"), CHUNKS),
    "servers died of it": (lambda store: None, CHUNKS),
    "everything disagrees": (lambda store: alter(store, "all"), CHUNKS - 2),
    "cut within what is used": (cut_to(lambda store: used_bytes(store) // 2), None),
    "cut to nothing": (cut_to(lambda store: 0), None),
    "noise over a meta page": (noise_at(lambda store: 0), None),
    "noise over the trees": (noise_at(main_root), None),
    "description gone": (lambda store: alter(store, "lost description"), None),
}
"""What is done to a store, and how many chunks can be had of it; None for none at all."""


@pytest.mark.parametrize("name", WAYS)
def test_what_can_be_had_of_a_store_set_aside(
    data_dir: Path, put_away: Callable[[Damage], None], name: str
) -> None:
    """Every good chunk comes back with its order of use and age, or the error says why none."""
    damage, expected = WAYS[name]
    before = records_of(data_dir)
    put_away(damage)
    aside = data_dir / "store.damaged"
    length = (aside / "data.mdb").stat().st_size
    code, out, err = quiet("recover", str(data_dir), "--set-aside")
    if expected is None:
        assert (code, "nothing can be had from" in err) == (6, True)
        assert f"rm -r {aside}" in hint_of(err)
        assert aside.exists()
        assert (aside / "data.mdb").stat().st_size == length, "it is as it was"
        assert not records_of(data_dir)
    else:
        assert code == 0, err
        assert out.startswith(f"taken back: {expected} objects")
        assert not aside.exists()
        found = records_of(data_dir)
        assert len(found) == expected
        assert all(before[key].objects == record.objects for key, record in found.items())
        if name.startswith(("power", "cut", "servers")):
            by_use = sorted(found.values(), key=lambda record: record.order)
            was = sorted((before[key] for key in found), key=lambda record: record.order)
            assert [record.key for record in by_use] == [record.key for record in was]
            assert [record.stored_at for record in by_use] == [record.stored_at for record in was]
    assert quiet("verify", str(data_dir))[0] == 0


def test_what_is_lost_is_said(data_dir: Path, put_away: Callable[[Damage], None]) -> None:
    """Chunks whose records are bad are in no other number: they are counted by themselves.

    One of the three was under a key that is not its own.
    """
    put_away(WAYS["everything disagrees"][0])
    shutil.copytree(data_dir, data_dir.with_name("e"))
    code, out, _ = quiet("recover", str(data_dir), "--set-aside")
    assert (code, "lost, no good record or not all extents: 3 chunks\n" in out) == (0, True)
    code, document = in_process("recover", str(data_dir.with_name("e")), "--set-aside")
    assert (code, document["taken_objects"], document["dropped_chunks"]) == (0, CHUNKS - 2, 3)


def test_a_second_store_aside_takes_the_first_ones_place_aloud(
    data_dir: Path, put_away: Callable[[Damage], None]
) -> None:
    """One is kept at most: whoever has not taken it back yet reads that it is gone."""
    put_away(power_lost)
    cut_to(lambda store: PAGE)(data_dir / "store")
    code, out, err = quiet("verify", str(data_dir), "--repair")
    assert code == 0, err
    assert "it is now store.damaged, and the one set aside before is gone" in out
    power_lost(data_dir / "store")
    with ServerProcess(data_dir, capacity=str(CAPACITY)) as server:
        log = server.log()
    assert f"{data_dir / 'store.damaged'} of an earlier start is removed for this one" in log


@pytest.mark.parametrize("already_aside", [False, True])
def test_a_start_that_is_refused_for_room_keeps_what_is_aside(
    root: Path, already_aside: bool
) -> None:
    """Where not even the damaged store's room would do, nothing is thrown away for it."""
    with mounts.tmpfs(root / "small", "64m") as small:
        data_dir = make(small / "d", capacity_bytes=16 << 20, chunks=(CHUNKS,))
        power_lost(data_dir / "store")
        if already_aside:
            set_aside(data_dir / "store")
        before = snapshot(data_dir)
        server = ServerProcess(data_dir, capacity="200MiB", pool_dir=root / "shm")
        server.log_path = root / "server.log"
        code, log = server.refused()
        assert (code, "disk_too_small" in log) == (5, True)
        assert snapshot(data_dir) == before
        at = server.command.index("--capacity") + 1
        server.command[at] = "56MiB"  # which takes the room of the damaged one
        with server.start():
            assert "no room for the store beside the damaged one" in server.log()
        assert not (data_dir / "store.damaged").exists()


def test_what_is_aside_goes_only_if_that_makes_room(data_dir: Path) -> None:
    """Also where the lack of room shows late, after somebody else took some."""
    set_aside(data_dir / "store")
    settings = Settings(data_dir=data_dir, capacity_bytes=1 << 50)
    with pytest.raises(DiskTooSmall):
        opening._open(Decision(None, "0" * 32), DataDir(data_dir), settings)
    assert (data_dir / "store.damaged" / "data.mdb").exists()


def test_what_is_of_another_binding_is_not_taken(data_dir: Path) -> None:
    """Chunks that a rebind left are stale in there as anywhere: counted, never of this binding."""
    assert quiet("rebind", str(data_dir), "--chunk-size", "1088", "--yes")[0] == 0
    power_lost(data_dir / "store")
    set_aside(data_dir / "store")
    assert quiet("verify", str(data_dir), "--repair")[0] == 0
    code, document = in_process("recover", str(data_dir), "--set-aside")
    assert (code, document["taken_objects"], document["stale_objects"]) == (0, 0, CHUNKS)
    assert not records_of(data_dir)


def test_a_linked_store_is_taken_back_and_reset(
    data_dir: Path, put_away: Callable[[Damage], None]
) -> None:
    """A store's folder on another disk: no verb stops half-way at the link."""
    for verb, *flags in (("recover", "--set-aside"), ("reset", "--yes")):
        elsewhere = data_dir.with_name(verb)
        (data_dir / "store").rename(elsewhere)
        (data_dir / "store").symlink_to(elsewhere)
        if verb == "recover":
            put_away(power_lost)
        code, _, err = quiet(verb, str(data_dir), *flags)
        assert code == 0, err
        assert not list(elsewhere.iterdir())
    assert not list(data_dir.glob("store*"))
    with ServerProcess(data_dir, capacity=str(CAPACITY)) as server:
        assert server.terminate() == 0


def test_a_relaxed_store_comes_back_by_the_line_in_the_log(data_dir: Path) -> None:
    """Set aside at a start, and taken back with the command of the log, byte for byte."""
    power_lost(data_dir / "store")
    with ServerProcess(data_dir, capacity=str(CAPACITY)) as server:
        assert server.terminate() == 0
        [line] = [line for line in server.log().splitlines() if "lmcache-persist" in line]
    assert not records_of(data_dir)
    assert follow(line)[0] == 0
    assert len(records_of(data_dir)) == CHUNKS
    with ServerProcess(data_dir, capacity=str(CAPACITY)):
        assert in_process("inspect", str(data_dir))[1]["store"]["objects"] == CHUNKS


def test_a_repair_before_the_start_keeps_a_relaxed_store(data_dir: Path) -> None:
    """Every page and digest was looked at: the next start has no reason to put it away."""
    power_lost(data_dir / "store")
    assert quiet("verify", str(data_dir), "--repair")[0] == 0
    with ServerProcess(data_dir, capacity=str(CAPACITY)) as server:
        assert "set aside" not in server.log()
    assert len(records_of(data_dir)) == CHUNKS


def test_what_the_new_store_has_stays(data_dir: Path, put_away: Callable[[Damage], None]) -> None:
    """Chunks of both stores are there afterwards, each once, and the order has no clash."""
    put_away(power_lost)
    disk = LmdbDisk.open(data_dir / "store", CAPACITY)
    disk.write([chunk_of(number, 50_000) for number in (0, 1, 100, 101)])
    disk.close()
    code, document = in_process("recover", str(data_dir), "--set-aside")
    assert code == 0
    assert (document["taken_objects"], document["held_objects"]) == (CHUNKS - 2, 2)
    found = records_of(data_dir)
    assert set(found) == {key_of(number) for number in (*range(CHUNKS), 100, 101)}
    assert len({record.order for record in found.values()}) == CHUNKS + 2
    assert quiet("verify", str(data_dir))[0] == 0
    assert in_process("recover", str(data_dir), "--set-aside") == (
        0,
        {"done": ["nothing to do: no store is set aside"]},
    )


def test_killed_in_the_middle_it_is_done_again(
    data_dir: Path, put_away: Callable[[Damage], None]
) -> None:
    """All that was copied is there already, and the store aside goes with the second one."""
    put_away(power_lost)
    again = ("recover", str(data_dir), "--set-aside")
    dies_at("salvage.before_removal=kill", lambda: quiet(*again))
    assert (data_dir / "store.damaged").exists()
    code, document = in_process("recover", str(data_dir), "--set-aside")
    assert (code, document["taken_objects"], document["held_objects"]) == (0, 0, CHUNKS)
    assert not (data_dir / "store.damaged").exists()
    assert quiet("verify", str(data_dir))[0] == 0


def test_what_has_no_room_stays_aside_until_there_is(root: Path) -> None:
    """The most recently used come first; after the hint's resize the rest comes, too."""
    data_dir = make(root / "d", capacity_bytes=128 << 20, chunks=(40,), nbytes=1 << 20)
    power_lost(data_dir / "store")
    set_aside(data_dir / "store")
    assert quiet("verify", str(data_dir), "--repair")[0] == 0
    code, out, err = quiet("recover", str(data_dir), "--set-aside")
    assert code == 0
    some = len(records_of(data_dir))
    assert 0 < some < 40
    assert set(records_of(data_dir)) == {key_of(number) for number in range(some)}
    assert f"no room: {40 - some} objects" in out
    [words] = commands(hint_of(err))
    assert quiet(*words[:-1], "128MiB")[0] == 0
    assert quiet("recover", str(data_dir), "--set-aside")[0] == 0
    assert len(records_of(data_dir)) == 40
    assert not (data_dir / "store.damaged").exists()


def test_another_store_is_not_taken_nor_removed(data_dir: Path, root: Path) -> None:
    """Its chunks are of another binding; refused, and nothing is changed."""
    make(root / "other", chunks=(3,))
    shutil.copytree(root / "other" / "store", data_dir / "store.damaged")
    before = snapshot(data_dir / "store.damaged")
    before.pop("lock.mdb")
    code, _, err = quiet("recover", str(data_dir), "--set-aside")
    assert (code, "has uuid" in err) == (5, True)
    assert snapshot(data_dir / "store.damaged").keys() == before.keys()
    assert len(records_of(data_dir)) == CHUNKS
