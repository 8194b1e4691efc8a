"""SIGKILL of a real server at moments that have no name, under load.

The short form runs with the suite; ``make soak`` runs the long one.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.load import CHUNK, Contents, Ledger, Worker, contents, judge, running
from support.results import SOAKING, kept_on_failure
from support.server import ServerProcess

MakeServer = Callable[..., ServerProcess]
KILLS = 100 if SOAKING else 6
"""Per capacity; there are two."""
LONGEST_LOAD_S = 1.0
REOPEN_EVERY = 3


@dataclass
class Figures:
    """What a run is reported with."""

    kills: int = 0
    rounds: int = 0
    evicted: int = 0
    hits: int = 0


@pytest.mark.timeout(40 * KILLS)
@pytest.mark.parametrize("capacity", ["32MiB", "1GiB"])
def test_killed_at_any_moment(
    make_server: MakeServer, root: Path, seed: int, capacity: str
) -> None:
    """What was durable is there or evicted, nothing else is served, nothing is left held."""
    print(f"seed {seed}, {KILLS} kills, capacity {capacity}")
    rng = random.Random(f"{seed} {capacity}")
    server = make_server(capacity=capacity, pool_size="24MiB")
    ledger, figures = Ledger(), Figures()
    with kept_on_failure(root, f"random-kills-{capacity}-{seed}"):
        for _ in range(KILLS):
            server.start()
            check_fresh_start(server, bound=bool(ledger.known))
            with running(server.url, ledger, rng.randrange(1 << 30)) as workers:
                threading.Event().wait(rng.uniform(0.02, LONGEST_LOAD_S))
                server.kill()
            figures.kills += 1
            figures.rounds += sum(worker.rounds for worker in workers)
            found = judge(server.data_dir, ledger)
            if figures.kills % REOPEN_EVERY == 0:
                reopen(server, found)
        server.start()
        figures.hits = serve_again(server, ledger)
        server.terminate()
        figures.evicted = judge(server.data_dir, ledger).counters.evicted
    report(capacity, figures, ledger)
    assert ledger.durable, "nothing was ever durable: the load is no load"
    # Of the larger one nothing is evicted for a while, so that any loss shows at once.
    if capacity == "32MiB" or not SOAKING:
        assert (figures.evicted > 0) == (capacity == "32MiB")


def test_a_load_outlives_its_server(make_server: MakeServer, seed: int) -> None:
    """What was leased at the kill stays right in the dead server's pool; the lease is gone."""
    print(f"seed {seed}")
    server = make_server(pool_size="4MiB").start()
    ledger = Ledger()
    worker = Worker(server.url, 0, ledger, seed)
    try:
        worker.join()
        hashes = worker.store(6)
        worker.flush([hashes])
        handle = worker.engine.client.lookup(
            engine=worker.engine.name, hashes=hashes, num_tokens=6 * CHUNK + 1
        )
        leased = handle.wait(20)
        assert leased.tokens == 6 * CHUNK
        assert stats(server)["leased_bytes"] > 0
        pool = worker.engine.client.pool(leased.boot_id)
        assert pool is not None
        server.kill()
        server.start()
        check_fresh_start(server, bound=True)
        other = Worker(server.url, 1, ledger, seed + 1)
        try:
            other.join()
            for _ in range(10):  # more than the new pool holds
                other.flush([other.store(2)])
        finally:
            other.stop()
        worker.engine.check_in(pool, hashes, leased)
    finally:
        worker.stop()


def stats(server: ServerProcess) -> dict[str, Any]:
    """A server's numbers, asked for by somebody who holds nothing."""
    from lmcache_persist.connector import CacheClient

    with CacheClient(server.url, kind="cli", label="test") as client:
        client.wait_connected(20)
        return client.stats(20)


def check_fresh_start(server: ServerProcess, *, bound: bool) -> None:
    """Before anybody comes back, nothing is leased, reserved or looked up."""
    found = stats(server)
    assert found["leased_bytes"] == 0
    assert found["lookups_open"] == 0
    assert found["pool"]["reservations"] == 0
    assert found["pool"]["free_bytes"] == found["pool"]["size_bytes"]
    if bound:
        assert found["chunk_size"] == CHUNK


def reopen(server: ServerProcess, before: Contents) -> None:
    """Another start and end changes no record and no count."""
    server.start()
    assert server.terminate() == 0
    after = contents(server.data_dir / "store")
    assert after.records == before.records
    assert (after.counters.evicted, after.counters.dropped, after.counters.serial) == (
        before.counters.evicted,
        before.counters.dropped,
        before.counters.serial,
    )


def serve_again(server: ServerProcess, ledger: Ledger) -> int:
    """Every engine gets its prompts, byte for byte; the tokens that were hit."""
    hits = 0
    for number in range(3):
        worker = Worker(server.url, number, ledger, number)
        try:
            worker.join()
            hits += worker.look_up(30)
        finally:
            worker.stop()
    assert hits, "nothing is served any more"
    return hits


def report(capacity: str, figures: Figures, ledger: Ledger) -> None:
    """The figures, for the record."""
    print(
        f"{figures.kills} kills survived at {capacity}: {figures.rounds} rounds,"
        f" {len(ledger.known)} chunks offered, {len(ledger.durable)} confirmed durable,"
        f" {figures.evicted} evicted, {ledger.checked_objects} objects checked,"
        f" {figures.hits} tokens hit at the end"
    )
