"""The worker side: pages into slots, slots into pages, and reports for all of it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from lmcache_persist.connector import Change
from lmcache_persist.connector.vllm import worker_side
from lmcache_persist.connector.vllm.counters import Counters
from lmcache_persist.connector.vllm.metadata import LoadJob, SlotsOfRun, StepMetadata, StoreJob
from lmcache_persist.connector.vllm.settings import ConnectorSettings
from lmcache_persist.connector.vllm.worker_side import EMPTY_OBJECT_BYTES, WorkerSide
from lmcache_persist.errors import (
    IdentityUnknown,
    LeaseError,
    RegistrationError,
    ServerUnreachable,
)
from lmcache_persist.geometry import Group, GroupKind
from lmcache_persist.protocol import Grant, Reserved
from support.vllm_fakes import FakeClient, binding

BLOCK, CHUNK, LAYERS, NUM_BLOCKS = 4, 8, ("a", "b"), 12
PAGE_BYTES = 2 * BLOCK * 8 * 2
OBJECT_BYTES = len(LAYERS) * (CHUNK // BLOCK) * PAGE_BYTES


class FakePool:
    """A pool in plain memory that knows how often it is pinned."""

    def __init__(self, num_slots: int) -> None:
        self.data = bytearray(num_slots * OBJECT_BYTES)
        self.pins = 0

    def view(self, offset: int, nbytes: int) -> memoryview:
        assert self.pins == 1
        return memoryview(self.data)[offset : offset + nbytes]

    @contextlib.contextmanager
    def pin(self) -> Iterator[FakePool]:
        self.pins += 1
        try:
            yield self
        finally:
            self.pins -= 1

    def slot(self, number: int) -> bytes:
        return bytes(self.data[number * OBJECT_BYTES : (number + 1) * OBJECT_BYTES])


class PreparedPool(FakePool):
    """A pool that says when it was pinned for an accelerator."""

    def __init__(self) -> None:
        super().__init__(8)
        self.prepared = threading.Event()

    def prepare(self, prepare: object) -> None:
        assert prepare is worker_side.pin_host_memory
        self.prepared.set()


class Rank:
    """Rank 1 of 2 with two layers, filled with a pattern, and a pool."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.client = FakeClient(binding(CHUNK))
        self.pool = self.client.pools["boot"] = FakePool(8)
        self.counters = Counters()
        monkeypatch.setattr(worker_side, "read_identity", self.identity)
        monkeypatch.setattr(worker_side.layouts, "describe", lambda *_: {"layout": 1})
        self.unidentified = False
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=4, dtype=torch.half)
        config = KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(list(LAYERS), spec)])
        engine = SimpleNamespace(
            parallel_config=SimpleNamespace(rank=1, world_size=2),
            kv_transfer_config=SimpleNamespace(engine_id="engine"),
        )
        self.side = WorkerSide(
            self.client,  # type: ignore[arg-type]
            (Group(GroupKind.FULL, BLOCK, BLOCK),),
            engine,
            config,
            ConnectorSettings("ipc://x"),
            self.counters,
        )
        shape = (NUM_BLOCKS, 2, BLOCK, 8)
        numbers = torch.arange(len(LAYERS) * NUM_BLOCKS * 2 * BLOCK * 8, dtype=torch.int16)
        both = numbers.view(len(LAYERS), *shape)
        self.caches = {name: both[at].clone().view(torch.half) for at, name in enumerate(LAYERS)}

    def identity(self, *_: Any) -> dict[str, Any]:
        if self.unidentified:
            raise IdentityUnknown("weights are dummies")
        return {"model": "m"}

    def page(self, layer: str, block: int) -> bytes:
        return self.caches[layer][block].contiguous().view(torch.uint8).numpy().tobytes()

    def object(self, *blocks: int) -> bytes:
        """What the slot of a chunk of these blocks holds: layer by layer, block by block."""
        return b"".join(self.page(layer, block) for layer in LAYERS for block in blocks)

    def grant(self, *grants: tuple[int, int, int]) -> None:
        """Answer the reservation: (index, reservation, slot)."""
        self.client.reserved.set_result(
            Reserved(boot="boot", grants=[Grant(i, n, [s * OBJECT_BYTES]) for i, n, s in grants])
        )

    def step(self, *jobs: StoreJob) -> StepMetadata:
        assert self.client.binding is not None
        return StepMetadata(stores=list(jobs), binding_id=self.client.binding.binding_id)


def job(name: bytes, *blocks: int) -> StoreJob:
    """A chunk of these blocks."""
    return StoreJob(name.ljust(32), 1, (blocks,))


def load(*slots: int, first: int = 0, ids: tuple[int, ...] = (3, 4, 5, 6), **changes: Any) -> Any:
    """A load of two chunks for rank 1; the slots of ranks 0 and 2 are not ours."""
    runs = tuple(
        SlotsOfRun(rank, 0, 0, OBJECT_BYTES, tuple(slot * OBJECT_BYTES for slot in part))
        for rank, part in ((0, (7, 7)), (1, slots), (2, (6, 6)))
    )
    fields = {
        "request_id": "r",
        "boot_id": "boot",
        "chunk_size": CHUNK,
        "runs": runs,
        "first_blocks": (first,),
        "block_ids": (ids,),
        "null_block_id": 0,
    }
    return LoadJob(**{**fields, **changes})


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    """A registered rank."""
    made = Rank(monkeypatch)
    made.side.register(made.caches)
    return made


def test_registration_says_what_the_rank_runs(rank: Rank) -> None:
    """Rank, world size, geometry and the bytes of one chunk's object."""
    (registration,) = rank.client.registrations
    assert (registration.rank, registration.world_size) == (1, 2)
    assert registration.object_bytes == [OBJECT_BYTES]


def test_completed_chunks_are_gathered_and_committed(rank: Rank) -> None:
    """The slot holds the pages, layer by layer; the commit names the reservations."""
    rank.side.begin_step(rank.step(job(b"x", 3, 9), job(b"y", 1, 2)))
    assert rank.client.reserves[0]["rank"] == 1
    rank.grant((0, 70, 2), (1, 71, 5))
    rank.side.store()
    assert rank.pool.slot(2) == rank.object(3, 9)
    assert rank.pool.slot(5) == rank.object(1, 2)
    assert rank.client.committed == [[70, 71]]
    assert rank.pool.pins == 0


def test_no_slot_no_store(rank: Rank) -> None:
    """Chunks without a grant are dropped and counted."""
    rank.side.begin_step(rank.step(job(b"x", 3, 9), job(b"y", 1, 2)))
    rank.grant((1, 71, 5))
    rank.side.store()
    assert rank.client.committed == [[71]]
    assert rank.counters.snapshot()["chunks_dropped_no_slot"] == 1


def test_slots_that_come_too_late_are_given_back(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the step its blocks may hold another chunk: nothing is gathered then."""
    monkeypatch.setattr(worker_side, "STORE_WAIT_S", 0.001)
    rank.side.begin_step(rank.step(job(b"x", 3, 9)))
    rank.side.store()
    rank.grant((0, 70, 2))
    rank.side.store()
    assert rank.client.committed == []
    assert rank.client.given_back == [[70]]
    assert rank.pool.slot(2) == bytes(OBJECT_BYTES)


@pytest.mark.parametrize("ids", [(3, NUM_BLOCKS), (3,), ()])
def test_store_that_goes_wrong_gives_its_slots_back(rank: Rank, ids: tuple[int, ...]) -> None:
    """Nothing half-written is ever committed."""
    rank.side.begin_step(rank.step(job(b"x", 1, 2), StoreJob(b"y" * 32, 1, (ids,) if ids else ())))
    rank.grant((0, 70, 2), (1, 71, 5))
    if ids == (3,):
        rank.pool.data = rank.pool.data[: 5 * OBJECT_BYTES]
    rank.side.store()
    assert rank.client.committed == []
    assert rank.client.given_back == [[70, 71]]


def test_server_that_is_gone_drops_stores(rank: Rank) -> None:
    """The step goes on at once."""
    rank.client.reserved.set_exception(ServerUnreachable("gone"))
    rank.side.begin_step(rank.step(job(b"x", 3, 9)))
    rank.side.store()
    assert rank.counters.snapshot()["chunks_dropped_no_server"] == 1


def test_stores_of_another_binding_are_dropped(rank: Rank) -> None:
    """The scheduler's binding may be older than this rank's."""
    made = rank.step(job(b"x", 3, 9))
    rank.client.binding = binding(CHUNK, "t1")
    rank.side.begin_step(made)
    assert rank.client.reserves == []


def test_load_fills_the_blocks(rank: Rank) -> None:
    """Slots of this rank go into its blocks, others stay; the request is reported once."""
    expected = [rank.object(1, 2), rank.object(9, 10)]
    rank.pool.data[: 2 * OBJECT_BYTES] = b"".join(expected)
    untouched = [rank.page(layer, block) for layer in LAYERS for block in (0, 7, 8, 11)]
    rank.side.begin_step(StepMetadata(loads=[load(0, 1)]))
    rank.side.load()
    assert [rank.object(3, 4), rank.object(5, 6)] == expected
    assert [rank.page(layer, block) for layer in LAYERS for block in (0, 7, 8, 11)] == untouched
    assert rank.side.take_results() == ({"r"}, set())
    assert rank.side.take_results() == (set(), set())
    assert rank.pool.pins == 0
    assert rank.counters.snapshot()["loaded_bytes"] == 2 * OBJECT_BYTES
    assert len(rank.counters.take_times()["load_seconds"]) == 1


@pytest.mark.parametrize("first", [1, 2, 3])
def test_blocks_that_the_engine_holds_are_never_written(rank: Rank, first: int) -> None:
    """Its own hit ends at a block, not at a chunk."""
    ids = (3, 4, 5, 6)
    before = [rank.object(block) for block in ids]
    rank.pool.data[: 2 * OBJECT_BYTES] = rank.object(1, 2) + rank.object(9, 10)
    loaded = [rank.object(block) for block in (1, 2, 9, 10)]
    rank.side.begin_step(StepMetadata(loads=[load(0, 1, first=first)]))
    rank.side.load()
    assert [rank.object(block) for block in ids] == before[:first] + loaded[first:]
    assert rank.side.take_results() == ({"r"}, set())


def test_null_blocks_are_never_written(rank: Rank) -> None:
    """Block 0 belongs to everybody."""
    before = rank.object(0)
    rank.side.begin_step(StepMetadata(loads=[load(0, 1, ids=(0, 4, 0, 0))]))
    rank.side.load()
    assert rank.object(0) == before
    assert rank.object(4) == bytes(OBJECT_BYTES // 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"boot_id": "another"},
        {"broken": "nothing was promised"},
        {"runs": ()},
        {"runs": (SlotsOfRun(1, 0, 0, OBJECT_BYTES - 8, (0, OBJECT_BYTES)),)},
        {"block_ids": ((3, 4, 5, NUM_BLOCKS),)},
    ],
)
def test_load_that_fails_is_reported_as_finished_and_failed(
    rank: Rank, changes: dict[str, Any]
) -> None:
    """Once, whatever went wrong; and the other load of the step goes on."""
    good = load(0, 1, request_id="good", ids=(7, 8, 9, 10))
    rank.side.begin_step(StepMetadata(loads=[load(0, 1, **changes), good]))
    rank.side.load()
    assert rank.side.take_results() == ({"r", "good"}, {"r"})
    assert rank.side.take_results() == (set(), set())


def test_other_chunk_size_is_registered_anew(rank: Rank) -> None:
    """A server that came back with another chunk size learns the new object sizes, and gets
    no store before it has.
    """
    rank.client.registered.clear()
    rank.client.binding = binding(2 * CHUNK, "t1")
    made = rank.step(job(b"x", 3, 4, 5, 6))
    rank.side.begin_step(made)
    assert rank.client.reserves == []
    rank.client.listeners[0](Change(2, "boot", rank.client.binding))
    assert rank.client.registered.wait(10)
    assert rank.client.registrations[-1].object_bytes == [2 * OBJECT_BYTES]


def test_refused_chunk_size_is_not_the_end(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of the old chunk size that follows one that refused learns the old sizes again:
    the client would tell it those that were refused.
    """
    plain = rank.client.register

    def refuse(registration: Any, timeout_s: float) -> None:
        raise RegistrationError("pool is too small")

    monkeypatch.setattr(rank.client, "register", refuse)
    rank.side._register_again(2 * CHUNK)
    assert rank.counters.snapshot()["registration_failed"] == 1
    monkeypatch.setattr(rank.client, "register", plain)
    rank.client.registered.clear()
    rank.client.listeners[0](Change(3, "boot", rank.client.binding))
    assert rank.client.registered.wait(10)
    assert rank.client.registrations[-1].object_bytes == [OBJECT_BYTES]


def test_server_that_comes_later_is_registered_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that started without a server registers when there is one."""
    made = Rank(monkeypatch)
    bound, made.client.binding = made.client.binding, None
    made.side.register(made.caches)
    assert made.client.registrations == []
    made.client.binding = bound
    made.client.listeners[0](Change(1, "boot", bound))
    assert made.client.registered.wait(10)


def test_incompatible_server_is_not_registered_with(rank: Rank) -> None:
    """Blocks of 4 do not end where chunks of 10 end: nothing is stored there."""
    rank.side._register_again(10)
    assert len(rank.client.registrations) == 1
    assert rank.counters.snapshot()["registration_failed"] == 1


def test_same_chunk_size_is_not_registered_twice(rank: Rank) -> None:
    """The client repeats a registration by itself."""
    rank.client.registered.clear()
    rank.client.listeners[0](Change(2, "boot2", binding(CHUNK, "t1")))
    assert not rank.client.registered.is_set()
    assert len(rank.client.registrations) == 1


def test_pools_are_pinned_for_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first server's with the registration, a later one's once it is there."""
    monkeypatch.setattr(WorkerSide, "_pins", True)
    made = Rank(monkeypatch)
    first = made.client.pools["boot"] = PreparedPool()
    later = made.client.pools["boot2"] = PreparedPool()
    made.side.register(made.caches)
    assert first.prepared.is_set()
    assert not later.prepared.is_set()
    made.client.boot_id = "boot2"
    made.client.listeners[0](Change(2, "boot2", binding(CHUNK, "t1")))
    assert later.prepared.wait(10)
    assert len(made.client.registrations) == 1


def test_pool_that_is_let_go_meanwhile_stops_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank is registered; its server's death costs the pin of a pool that is gone."""

    class GonePool(FakePool):
        def prepare(self, prepare: object) -> None:
            raise LeaseError("pool of boot was let go")

    monkeypatch.setattr(WorkerSide, "_pins", True)
    made = Rank(monkeypatch)
    made.client.pools["boot"] = GonePool(8)
    made.side.register(made.caches)
    assert len(made.client.registrations) == 1


def test_pools_are_not_pinned_without_an_accelerator(rank: Rank) -> None:
    """On a CPU nothing is done to the pool (this one could not be pinned)."""
    assert not hasattr(rank.pool, "prepare")
    assert len(rank.client.registrations) == 1


def test_model_without_an_identity_is_not_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dummy weights: the engine runs, nothing is stored, nothing raised."""
    made = Rank(monkeypatch)
    made.unidentified = True
    made.side.register(made.caches)
    assert made.client.registrations == []
    made.side.begin_step(made.step(job(b"x", 3, 9)))
    assert made.client.reserves == []


class HybridRank(Rank):
    """The same two layers, as a recurrent group of one and a small window of the other."""

    GROUPS = (Group(GroupKind.RECURRENT, CHUNK // 2, 1), Group(GroupKind.SLIDING, BLOCK, BLOCK, 4))

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        config = self.side._kv_cache_config
        spec = config.kv_cache_groups[0].kv_cache_spec
        config.kv_cache_groups[:] = [KVCacheGroupSpec([name], spec) for name in LAYERS]
        self.side._groups = self.GROUPS


@pytest.fixture
def hybrid(monkeypatch: pytest.MonkeyPatch) -> HybridRank:
    """A registered rank of a hybrid model."""
    made = HybridRank(monkeypatch)
    made.side.register(made.caches)
    return made


def test_objects_of_states_and_small_windows_are_single_blocks(hybrid: HybridRank) -> None:
    """A chunk of two blocks: its state is one page, and so is all that its window reaches."""
    (registration,) = hybrid.client.registrations
    assert registration.object_bytes == [PAGE_BYTES, PAGE_BYTES]


def test_groups_are_gathered_as_the_mask_says(hybrid: HybridRank) -> None:
    """A state that comes alone goes into the only slot that was granted."""
    alone = StoreJob(b"c".ljust(32), 0b01, ((5,), ()))
    both = StoreJob(b"d".ljust(32), 0b11, ((6,), (7,)))
    hybrid.client.reserved.set_result(
        Reserved(
            boot="boot",
            grants=[Grant(0, 1, [0]), Grant(1, 2, [OBJECT_BYTES, 2 * OBJECT_BYTES])],
        )
    )
    hybrid.side.begin_step(hybrid.step(alone, both))
    hybrid.side.store()
    assert hybrid.client.committed == [[1, 2]]
    assert hybrid.client.reserves[0]["masks"] == [0b01, 0b11]
    pages = [hybrid.page("a", 5), hybrid.page("a", 6), hybrid.page("b", 7)]
    assert [hybrid.pool.slot(slot)[:PAGE_BYTES] for slot in range(3)] == pages


class Stage(HybridRank):
    """A pipeline stage that has no layer of the second group."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.side._kv_cache_config.kv_cache_groups[1].layer_names = []


def test_stage_without_layers_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its part of the chunk is there, small and constant, and is loaded into nothing."""
    stage = Stage(monkeypatch)
    stage.side.register(stage.caches)
    (registration,) = stage.client.registrations
    assert registration.object_bytes == [PAGE_BYTES, EMPTY_OBJECT_BYTES]
    stage.client.reserved.set_result(Reserved(boot="boot", grants=[Grant(0, 1, [0, OBJECT_BYTES])]))
    stage.pool.data[:] = b"s" * len(stage.pool.data)
    stage.side.begin_step(stage.step(StoreJob(b"c".ljust(32), 0b11, ((5,), (7,)))))
    stage.side.store()
    assert stage.client.committed == [[1]]
    assert stage.pool.slot(0)[:PAGE_BYTES] == stage.page("a", 5)
    assert stage.pool.slot(1).rstrip(b"s") == bytes(EMPTY_OBJECT_BYTES)
    untouched = stage.caches["b"].clone()
    runs = (
        SlotsOfRun(1, 0, 0, PAGE_BYTES, (0,)),
        SlotsOfRun(1, 1, 0, EMPTY_OBJECT_BYTES, (OBJECT_BYTES,)),
    )
    job = load(runs=runs, first_blocks=(0, 0), block_ids=((0, 4), (6, 8)))
    stage.side.begin_step(StepMetadata(loads=[job]))
    stage.side.load()
    assert stage.side.take_results() == ({"r"}, set())
    assert stage.page("a", 4) == stage.page("a", 5)
    assert torch.equal(untouched.view(torch.int16), stage.caches["b"].view(torch.int16))


@pytest.mark.parametrize("held", [0, 1, 3])
def test_one_state_is_loaded(hybrid: HybridRank, held: int) -> None:
    """The one at the end of the prefix, into the last block; of the window its own blocks."""
    for slot, fill in enumerate((1, 2, 3)):
        hybrid.pool.data[slot * OBJECT_BYTES : (slot + 1) * OBJECT_BYTES] = bytes([fill]) * (
            OBJECT_BYTES
        )
    before = {name: cache.clone() for name, cache in hybrid.caches.items()}
    hybrid.side.begin_step(
        StepMetadata(
            loads=[
                load(
                    runs=(
                        SlotsOfRun(1, 0, 1, PAGE_BYTES, (0,)),
                        SlotsOfRun(1, 1, 1, PAGE_BYTES, (OBJECT_BYTES,)),
                    ),
                    first_blocks=(held, held),
                    block_ids=((0, 0, 0, 4), (0, 0, 0, 5)),
                )
            ]
        )
    )
    hybrid.side.load()
    assert hybrid.side.take_results() == ({"r"}, set())
    assert hybrid.page("a", 4) == bytes([1]) * PAGE_BYTES
    assert hybrid.page("b", 5) == bytes([2]) * PAGE_BYTES
    for name, block in (("a", 4), ("b", 5)):
        before[name][block] = hybrid.caches[name][block]
        assert torch.equal(before[name].view(torch.int16), hybrid.caches[name].view(torch.int16))


def test_planes_are_gathered_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """An object of layers with two planes: K of its blocks, then V of them, layer by layer."""
    made = Rank(monkeypatch)
    planes = {name: torch.stack([cache[:, 0], cache[:, 1]]) for name, cache in made.caches.items()}
    made.side.register(planes)
    (registration,) = made.client.registrations
    assert registration.object_bytes == [OBJECT_BYTES]
    made.grant((0, 1, 3))
    made.side.begin_step(made.step(job(b"c", 5, 2)))
    made.side.store()
    expected = b"".join(
        planes[name][plane][block].view(torch.uint8).numpy().tobytes()
        for name in LAYERS
        for plane in (0, 1)
        for block in (5, 2)
    )
    assert made.pool.slot(3) == expected
