"""SIGKILL at every step of a growth: the old capacity or the new one, the store good."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import lmcache_persist
from lmcache_persist import failpoints, protocol
from lmcache_persist.connector import CacheClient, ClientOptions
from lmcache_persist.errors import PersistError, StoreBusy
from lmcache_persist.server.looking import inspect_offline
from lmcache_persist.store import preallocation
from lmcache_persist.store.lmdb_disk import LmdbDisk
from store_support import assert_reads_back
from support.data_dirs import chunk_of, make, records_of
from support.filled import fill, hits
from support.forked import dies_at
from support.load import Ledger, judge, running
from support.results import SOAKING, kept_on_failure
from support.server import ServerProcess, cli_here
from support.waiting import wait_until

MIB = 1 << 20
BEFORE, AFTER = 64 * MIB, 96 * MIB
KILLS = 60 if SOAKING else 3
STEP = MIB
"""Bytes that each growth of many adds."""

OUTCOMES = {
    "grow.while_allocating=kill": BEFORE,
    "grow.while_allocating=kill@2": BEFORE,
    "grow.after_allocate=kill": BEFORE,
    "grow.after_map=kill": BEFORE,
    "grow.after_note=kill": AFTER,
}


def test_the_steps_are_the_ones_tested() -> None:
    """A new step has to be given its outcome here."""
    tested = {spec.split("=")[0] for spec in OUTCOMES}
    assert {name for name in failpoints.NAMES if name.startswith("grow.")} == tested


def size_of(root: Path) -> int:
    """Length of the data file."""
    return (root / "store" / "data.mdb").stat().st_size


def grow(root: Path) -> None:
    """As a live server does, with pieces of 16 MiB and a write before the note."""
    preallocation._PIECE_BYTES = 16 * MIB
    disk = LmdbDisk.open(root / "store", BEFORE)
    disk.allocate(AFTER, lambda done: None)
    disk.grow(AFTER, over_bytes=BEFORE)


@pytest.mark.parametrize("then", [BEFORE, AFTER])
@pytest.mark.parametrize("spec", OUTCOMES)
def test_a_killed_growth_is_the_old_capacity_or_the_new_one(
    root: Path, spec: str, then: int
) -> None:
    """Before the note the old one holds, with a file that may be longer; a start cuts it."""
    make(root / "d", capacity_bytes=BEFORE)
    before = records_of(root / "d")
    dies_at(spec, lambda: grow(root / "d"))
    capacity = OUTCOMES[spec]
    assert BEFORE < size_of(root / "d") <= AFTER
    assert list(lmcache_persist.check(root / "d")) == []
    assert inspect_offline(root / "d")["store"]["capacity_bytes"] == capacity
    assert records_of(root / "d") == before
    disk = LmdbDisk.open(root / "d" / "store", max(capacity, then))
    assert size_of(root / "d") == disk.capacity_bytes == max(capacity, then)
    assert_reads_back(disk, [chunk_of(number, 50_000) for number in range(20)])
    disk.allocate(2 * AFTER, lambda done: None)
    disk.grow(2 * AFTER)
    disk.close()
    assert list(lmcache_persist.check(root / "d")) == []


def test_a_server_killed_while_it_grows(make_server: Callable[..., ServerProcess]) -> None:
    """The verb says that nobody answers; what was durable is served again, and it grows."""
    server = make_server(env={failpoints.ENV: "grow.after_map=kill"}).start()
    fill(server, 100)
    code, out, _ = cli_here("resize", str(server.data_dir), "--capacity", "96MiB", "--timeout", "5")
    assert (code, out) == (4, "")
    assert server.wait() == -9
    assert list(lmcache_persist.check(server.data_dir)) == []
    server._env.pop(failpoints.ENV)
    server.start()
    assert size_of(server.data_dir) == BEFORE
    assert hits(server, 100) == 100 * 256
    code, out, _ = cli_here("resize", str(server.data_dir), "--capacity", "96MiB")
    assert (code, out) == (0, "capacity: 64.00 MiB before, 96.00 MiB now\nkept: 100 objects\n")
    assert hits(server, 100) == 100 * 256


def test_a_stop_while_it_allocates(make_server: Callable[..., ServerProcess], root: Path) -> None:
    """A server that is stopped meanwhile ends in good order, and the room is given back."""
    until = root / "go"
    server = make_server(env={failpoints.ENV: f"grow.while_allocating=pause:{until}"}).start()
    fill(server, 10)
    code, _, err = cli_here(
        "resize", str(server.data_dir), "--capacity", "96MiB", "--timeout", "0.5"
    )
    assert (code, "the growth stands still" in err) == (4, True)
    assert size_of(server.data_dir) == AFTER
    assert server.process is not None
    server.process.terminate()
    socket = server.data_dir / "server.sock"
    wait_until(lambda: not socket.exists(), "it stops")
    until.touch()
    assert server.wait() == 0
    assert size_of(server.data_dir) == BEFORE
    assert inspect_offline(server.data_dir)["store"]["clean_shutdown"]
    assert list(lmcache_persist.check(server.data_dir)) == []


@pytest.mark.timeout(40 * KILLS)
def test_killed_at_any_moment_of_growth_after_growth(
    make_server: Callable[..., ServerProcess], root: Path, seed: int
) -> None:
    """Under load: what was durable is there or evicted, and the capacity never falls."""
    print(f"seed {seed}, {KILLS} kills")
    rng = random.Random(f"grow {seed}")
    server, ledger = make_server(capacity="24MiB"), Ledger()
    capacity_bytes, growths = 24 * MIB, 0
    with kept_on_failure(root, f"grow-kills-{seed}"):
        for _ in range(KILLS):
            server.start()
            with running(server.url, ledger, rng.randrange(1 << 30)):
                killed = threading.Timer(rng.uniform(0.3, 1.0), server.kill)
                killed.start()
                for told in growing(server.url, capacity_bytes):
                    growths, capacity_bytes = growths + 1, max(capacity_bytes, told)
                killed.join()
            judge(server.data_dir, ledger)
            found = inspect_offline(server.data_dir)["store"]["capacity_bytes"]
            assert found >= capacity_bytes, "a growth that was answered is undone"
            capacity_bytes = found
    print(f"{growths} growths, {capacity_bytes // MIB} MiB, {len(ledger.durable)} durable")
    assert growths


def growing(url: str, capacity_bytes: int) -> Iterator[int]:
    """Grow by a little again and again, until nobody answers; the capacities that were told."""
    with CacheClient(url, kind="cli", label="grow", options=ClientOptions()) as client:
        client.wait_connected(20)
        growth = 0
        while True:
            wanted = capacity_bytes + STEP
            try:
                reply = client.request(
                    protocol.AdminGrow, timeout_s=5, capacity_bytes=wanted, growth=growth
                )
            except StoreBusy:
                growth = 0
                continue
            except PersistError as error:
                if "only grows" in str(error):  # the last server got that far without a word
                    capacity_bytes = wanted
                    continue
                return
            assert isinstance(reply, protocol.JsonReply)
            told = json.loads(reply.body)
            growth = told["growth"]
            if told["phase"] == "done":
                yield wanted
                capacity_bytes, growth = wanted, 0
