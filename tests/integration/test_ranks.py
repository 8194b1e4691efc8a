"""Several ranks, several groups: what one of them lacks, none of them is promised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lmcache_persist.connector import ClientOptions
from lmcache_persist.geometry import Group, GroupKind
from lmcache_persist.hashing import ChunkHash
from lmcache_persist.identity import Fingerprint
from lmcache_persist.store.base import Place, chunk_key
from support.altering import alter_chunk, remove_object
from support.emulated import EmulatedEngine
from support.server import ServerProcess, inspect
from support.waiting import stays

PATIENT = ClientOptions(request_timeout_s=10.0, lookup_timeout_s=20.0)
STATE = Group(GroupKind.RECURRENT, 256, 1)
WINDOW = Group(GroupKind.SLIDING, 256, 256, 600)
FIVE = (STATE, 256, WINDOW, STATE, 64)
CHUNKS = 10


@dataclass(frozen=True)
class Loss:
    """One engine, and the object of its prompt that is lost on disk.

    Attributes:
        groups: of its model.
        ranks: that it has.
        chunk: of the lost object, counted from 0.
        place: of the lost object.
        removed: its bytes are gone; else a bit of them is another one.
        needed: by a prefix of the whole prompt.
    """

    groups: Sequence[int | Group]
    ranks: int
    chunk: int
    place: Place
    removed: bool = False
    needed: bool = True

    def engine(self, server: ServerProcess, name: str) -> EmulatedEngine:
        """A new engine; its model is one of its own."""
        return EmulatedEngine(
            server.url,
            self.groups,
            object_bytes=3000,
            world_size=self.ranks,
            name=name,
            changes={"model": name},
            options=PATIENT,
        ).join()


LOSSES = {
    "one group": Loss([256], 1, 6, Place(0, 0)),
    "five groups": Loss(FIVE, 1, 6, Place(0, 1)),
    "five groups, the last state": Loss(FIVE, 1, 9, Place(0, 3)),
    "five groups, a state on the way": Loss(FIVE, 1, 6, Place(0, 3), needed=False),
    "five groups, in the window": Loss(FIVE, 1, 7, Place(0, 2), removed=True),
    "four ranks": Loss([256], 4, 2, Place(2, 0)),
    "four ranks, removed": Loss([256], 4, 2, Place(2, 0), removed=True),
    "four ranks of five groups": Loss(FIVE, 4, 2, Place(2, 4), removed=True),
}


def prompt(engine: EmulatedEngine, number: int, num_chunks: int) -> list[bytes]:
    """Hashes of a numbered prompt; no two engines store the same bytes."""
    own = [number, *engine.name.encode()]
    return list(engine.hashes([*own, *range(len(own), num_chunks * engine.chunk_size)]))


def hit(engine: EmulatedEngine, hashes: Sequence[bytes]) -> int:
    """Chunks of a hit, of which every rank's bytes were compared."""
    found = engine.lookup(hashes, len(hashes) * engine.chunk_size + 1)
    ends = {(run.rank, run.group): run.first_chunk + len(run.offsets) for run in found.runs}
    chunks = found.tokens // engine.chunk_size
    # All ranks together: each has its part of the same prefix, of every group.
    assert set(ends.values()) <= {chunks}
    assert len(ends) == (engine.world_size * len(engine.groups) if chunks else 0)
    return chunks


def test_what_one_rank_or_group_lost_is_promised_to_none(
    make_server: Callable[..., ServerProcess],
) -> None:
    """A lost object costs its chunk and what follows, on all ranks, once; others are untouched."""
    server = make_server().start()
    keys = {}
    for name, loss in LOSSES.items():
        with loss.engine(server, name) as engine:
            for number, length in ((1, CHUNKS), (2, 3)):
                assert engine.store(prompt(engine, number, length)) == length
            engine.client.flush(20)
            fingerprint = Fingerprint(engine.register(0))
            lost = ChunkHash(prompt(engine, 1, CHUNKS)[loss.chunk])
            keys[name] = chunk_key(fingerprint, lost)
    server.terminate()
    for name, loss in LOSSES.items():
        if loss.removed:
            remove_object(server.data_dir, keys[name], loss.place)
        else:
            alter_chunk(server.data_dir, keys[name], loss.place)
    server.start()
    corrupt = 0
    for name, loss in LOSSES.items():
        with loss.engine(server, name) as engine:
            long, expected = prompt(engine, 1, CHUNKS), loss.chunk if loss.needed else CHUNKS
            assert (name, hit(engine, long)) == (name, expected)
            # It was tried once; from now on nobody is promised it.
            assert hit(engine, long) == expected
            assert hit(engine, prompt(engine, 2, 3)) == 3
            corrupt += loss.needed
            counters = engine.client.stats(timeout_s=10.0)["counters"]
            assert counters["corrupt_chunks"] == corrupt
            assert engine.store(long) == CHUNKS
            assert hit(engine, long) == CHUNKS
    assert inspect(server.data_dir)["server"]["leased_bytes"] == 0


def test_promised_prefix_outlives_its_server(make_server: Callable[..., ServerProcess]) -> None:
    """Lost between lookup and load: what was promised is read by all ranks all the same."""
    server = make_server().start()
    with LOSSES["four ranks of five groups"].engine(server, "engine") as engine:
        long = prompt(engine, 1, CHUNKS)
        engine.store(long)
        engine.client.flush(20)
        handle = engine.client.lookup(
            engine="engine", hashes=long, num_tokens=CHUNKS * engine.chunk_size + 1
        )
        found = handle.wait(20.0)
        assert found is not None
        assert found.tokens == CHUNKS * engine.chunk_size
        server.kill()
        (server.data_dir / "store" / "data.mdb").write_bytes(b"")
        engine.check(long, found)
        handle.release()


def test_quiet_ranks_stay_and_lost_ones_are_missed(server: ServerProcess) -> None:
    """Four ranks, each with a client of its own: silence is no death, an end is noticed."""
    options = ClientOptions(request_timeout_s=10.0, lookup_timeout_s=20.0, heartbeat_s=0.02)
    ranks = [
        EmulatedEngine(server.url, [256], object_bytes=3000, world_size=4, options=options)
        for _ in range(4)
    ]
    try:
        for number, rank in enumerate(ranks):
            rank.client.wait_connected(20.0)
            rank.client.bind(rank.groups, who="test", timeout_s=20.0)
            fingerprint = rank.register(number)
        long = prompt(ranks[0], 1, CHUNKS)
        for number, rank in enumerate(ranks):
            rank.store(long, ranks=[number])

        def all_there() -> bool:
            (engine,) = ranks[0].client.stats(timeout_s=10.0)["engines"]
            return bool(engine["fingerprint"] == fingerprint)

        # Fifty heartbeats of nothing else.
        stays(all_there, "ranks that ask for nothing are registered", 1.0)
        assert hit(ranks[3], long) == CHUNKS
        ranks[2].client.close()
        # Whoever asks is told at once that there is nothing, and waits for nobody.
        assert hit(ranks[0], long) == 0
        ranks[2] = EmulatedEngine(
            server.url, [256], object_bytes=3000, world_size=4, options=options
        )
        ranks[2].client.wait_connected(20.0)
        assert ranks[2].register(2) == fingerprint
        assert hit(ranks[0], long) == CHUNKS
    finally:
        for rank in ranks:
            rank.client.close()


def test_pipeline_stages_are_ranks_of_other_layers(server: ServerProcess) -> None:
    """Objects of a rank's own size, tiny where it has no layer; other cuts share nothing."""
    groups = (STATE, Group(GroupKind.FULL, 256, 256))
    stages = ((5000, 16), (700, 9000))

    def engine(name: str, stage_bytes: Sequence[Sequence[int]]) -> EmulatedEngine:
        return EmulatedEngine(
            server.url,
            groups,
            world_size=2,
            name=name,
            options=PATIENT,
            stage_bytes=stage_bytes,
        ).join()

    with engine("first", stages) as first:
        long = prompt(first, 1, CHUNKS)
        assert first.store(long) == CHUNKS
        first.client.flush(20)
    server.kill()
    server.start()
    with engine("again", stages) as again:
        assert hit(again, long) == CHUNKS
    with engine("cut elsewhere", stages[::-1]) as other:
        assert hit(other, long) == 0
