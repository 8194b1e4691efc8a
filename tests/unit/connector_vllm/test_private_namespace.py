"""After a reset the engine's weights may be others: it shares nothing with what was before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from lmcache_persist.connector.vllm import PersistConnector, connector
from lmcache_persist.connector.vllm.counters import Counters
from lmcache_persist.hashing import ChunkHasher
from support.scheduler_sides import CHUNK, Side, hashes
from support.vllm_fakes import FakeClient, binding, request, step


def asked(side: Side, one: Any) -> list[bytes]:
    """The hashes that a new request is looked up by."""
    side.side.on_new_request(one)
    return side.client.handles[-1].hashes


def test_namespaces_have_no_hash_in_common() -> None:
    """Each reset begins another one, for every chunk; within one, equal prompts are equal."""
    side = Side()
    worlds = [asked(side, request("r0"))]
    for number in (1, 2):
        assert side.side.start_private_namespace(blocks_are_free=True)
        worlds.append(asked(side, request(f"r{number}")))
        assert asked(side, request(f"again{number}")) == worlds[-1]
    other_engine = Side()
    assert other_engine.side.start_private_namespace(blocks_are_free=True)
    worlds.append(asked(other_engine, request()))
    everything = [one for world in worlds for one in world]
    assert len(set(everything)) == len(everything) == 4 * 3
    assert worlds[0] == hashes(request())[:3]


def test_what_is_computed_after_a_reset_is_found_again() -> None:
    """A request is stored under the very hashes that the next one is looked up by."""
    side = Side()
    side.side.start_private_namespace(blocks_are_free=True)
    one = request(num_tokens=25)
    found = asked(side, one)
    side.decide(0)
    side.admit(one)
    assert side.stores(one, 25) == found
    assert asked(side, request("next", num_tokens=25)) == found
    side.decide(24)
    assert side.admit(request("next", num_tokens=25)) == 24


def test_requests_that_wait_are_asked_for_anew() -> None:
    """What was promised, decided or not, is given up, and nothing of it is stored."""
    side = Side()
    waiting, promised = request("waiting"), request("promised")
    old = asked(side, waiting)
    asked(side, promised)
    side.decide(24)
    assert side.side.matched_tokens(promised, 0) == 24
    side.side.start_private_namespace(blocks_are_free=True)
    assert [handle.releases for handle in side.client.handles] == [1, 1]
    for one in (waiting, promised):
        assert side.side.matched_tokens(one, 0) is None
        assert not set(side.client.handles[-1].hashes) & set(old)
        side.decide(0)
        assert side.admit(one) == 0
        assert not set(side.stores(one, 30)) & set(old)


def test_preempted_request_is_computed_and_stored_from_its_first_chunk() -> None:
    """VLLM preempts what runs; what it had stored or loaded before is nothing to go by."""
    side = Side()
    one = request()
    side.side.on_new_request(one)
    side.decide(16)
    assert side.admit(one) == 16
    side.side.loads_finished({"r"}, set())
    one.num_computed_tokens = 16
    assert side.stores(one, 8) == hashes(one)[2:3]
    one.num_preemptions, one.num_computed_tokens = 1, 0
    side.side.start_private_namespace(blocks_are_free=True)
    assert side.side.matched_tokens(one, 0) is None
    side.decide(0)
    side.admit(one)
    stored = side.stores(one, 30)
    assert len(stored) == 3
    assert not set(stored) & set(hashes(one))


def test_load_that_runs_keeps_its_lease_and_nothing_is_stored_on_top_of_it() -> None:
    """Blocks are held: no request is served until a reset finds none, then all are."""
    side = Side()
    running = request("running")
    side.side.on_new_request(running)
    side.decide(16)
    side.admit(running)
    handle = side.client.handles[-1]
    assert not side.side.start_private_namespace(blocks_are_free=False)
    assert handle.releases == 0
    (job,) = side.side.build_step(step({})).loads
    assert not job.broken
    side.side.loads_finished({"running"}, set())
    assert handle.releases == 1
    running.num_computed_tokens = 16
    assert side.stores(running, 14) == []
    later = request("later")
    side.side.on_new_request(later)
    assert side.side.matched_tokens(later, 0) == 0
    assert side.stores(later, 30) == []
    assert len(side.client.handles) == 1
    side.side.request_finished("running")
    assert side.side.start_private_namespace(blocks_are_free=True)
    assert not set(asked(side, request("last"))) & set(hashes(running))
    counts = side.counters.snapshot()
    assert (counts["resets_too_early"], counts["resets"]) == (1, 1)


def test_namespace_outlives_the_binding() -> None:
    """A server that comes back, with another binding or the same, changes nothing about it."""
    side = Side()
    side.side.start_private_namespace(blocks_are_free=True)
    before = asked(side, request("a"))
    side.client.binding = binding(CHUNK, "t1")
    assert asked(side, request("b")) == before
    side.client.binding = binding(12, "t2")
    one = request("c")
    assert not set(asked(side, one)) & set(hashes(one, chunk=12))


def test_reset_before_the_first_binding_counts() -> None:
    """Weights that changed before any server was there are others all the same."""
    side = Side()
    bound, side.client.binding = side.client.binding, None
    assert side.side.start_private_namespace(blocks_are_free=True)
    side.client.binding = bound
    one = request()
    assert not set(asked(side, one)) & set(hashes(one))


def test_model_without_an_identity_stays_out() -> None:
    """A reset does not make an unidentified model a cached one."""
    side = Side()
    side.side.stop("unknown")
    assert side.side.start_private_namespace(blocks_are_free=True)
    side.side.on_new_request(request())
    assert side.client.handles == []


def test_root_of_a_private_chain_is_another_one() -> None:
    """The shared root is as it always was; a namespace is part of a private one."""
    shared, private = ChunkHasher(CHUNK), ChunkHasher(CHUNK, b"n" * 32)
    assert ChunkHasher(CHUNK, b"").root == shared.root
    assert len({shared.root, private.root, ChunkHasher(CHUNK, b"m" * 32).root}) == 3


@pytest.mark.parametrize("transfer", [None, SimpleNamespace(backend="nccl")])
def test_engine_that_gets_its_weights_from_a_trainer_is_private(
    transfer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its start, since nothing tells a connector when they come."""
    client = FakeClient(binding(CHUNK))
    monkeypatch.setattr(connector, "start_client", lambda *_, **__: client)
    monkeypatch.setattr(connector, "check_identifiable", lambda _: None)
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            engine_id="e", kv_connector_extra_config={"persist.server": "ipc:///s"}
        ),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, rank=0),
        model_config=SimpleNamespace(model="m"),
        cache_config=SimpleNamespace(block_size=4),
        lora_config=None,
        ec_transfer_config=None,
        weight_transfer_config=transfer,
    )
    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
    groups = KVCacheConfig(8, [], [KVCacheGroupSpec(["l"], spec)])
    made = PersistConnector(config, KVConnectorRole.SCHEDULER, groups)
    one = request()
    made.on_new_request(one)
    assert (client.handles[0].hashes == hashes(one)[:3]) is (transfer is None)


@pytest.mark.parametrize(("free_blocks", "success"), [(8, False), (9, True)])
def test_engine_s_reset_succeeds_as_vllm_s_own_does(free_blocks: int, success: bool) -> None:
    """Ten blocks with the null block: nine free ones are all; an unbound pool is not known."""
    side = Side()
    made = object.__new__(PersistConnector)
    made._counters, made._scheduler, made._block_pool = Counters(), side.side, None
    assert made.reset_cache() is False
    made.bind_gpu_block_pool(
        SimpleNamespace(
            null_block=SimpleNamespace(block_id=0),
            num_gpu_blocks=10,
            get_num_free_blocks=lambda: free_blocks,
        )
    )
    assert made.reset_cache() is success
    side.side.on_new_request(request())
    assert len(side.client.handles) == success
