"""The scheduler side's bookkeeping, call by call as vLLM makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_persist.connector import LookupResult
from lmcache_persist.connector.vllm.requests import Requests
from lmcache_persist.connector.vllm.scheduler_side import IDLE_WAIT_S
from lmcache_persist.errors import ServerUnreachable, UnexpectedChunkSize
from lmcache_persist.geometry import Group, GroupKind
from lmcache_persist.hashing import ExtraKey, ExtraKind, encode_extra
from support.identities import feature, item, later, lora, write_adapter
from support.scheduler_sides import TABLE, Side, hashes
from support.vllm_fakes import binding, blocks, request, step


@pytest.fixture
def side() -> Side:
    """A fresh one."""
    return Side()


@pytest.mark.parametrize(
    ("num_tokens", "chunks"), [(7, None), (8, None), (9, 1), (16, 1), (17, 2), (30, 3)]
)
def test_lookup_leaves_a_token_to_compute(num_tokens: int, chunks: int | None, side: Side) -> None:
    """A prompt of exactly n chunks asks for n - 1 of them; a short one asks for nothing."""
    one = request(num_tokens=num_tokens)
    side.side.on_new_request(one)
    if chunks is None:
        assert side.client.handles == []
        assert side.side.matched_tokens(one, 0) == 0
    else:
        assert side.client.handles[0].hashes == hashes(one)[:chunks]
        assert side.client.handles[0].num_tokens == num_tokens


def test_undecided_is_none_until_decided(side: Side) -> None:
    """The scheduler is told to come back, then what it can load beyond its own hit."""
    one = request()
    side.side.on_new_request(one)
    assert side.side.matched_tokens(one, 0) is None
    side.decide(24)
    assert side.side.matched_tokens(one, 8) == 16
    # Its own hit may shrink, or grow beyond ours, before the request is admitted.
    assert side.side.matched_tokens(one, 0) == 24
    assert side.side.matched_tokens(one, 28) == 0
    assert side.side.matched_tokens(one, 4) == 20
    assert len(side.client.handles) == 1
    assert side.client.handles[0].releases == 0


def test_failed_lookup_is_a_miss_once(side: Side) -> None:
    """Without a server the request computes, and nobody asks again for it."""
    one = request()
    side.side.on_new_request(one)
    side.client.handles[-1].result = LookupResult(error=ServerUnreachable("gone"))
    assert side.side.matched_tokens(one, 0) == 0
    assert side.side.matched_tokens(one, 0) == 0
    assert len(side.client.handles) == 1
    assert side.counters.snapshot()["lookups_failed"] == 1


@pytest.mark.parametrize("tokens", [12, 32, 80])
def test_promise_that_was_not_asked_for_is_a_miss(tokens: int, side: Side) -> None:
    """A prefix that is no multiple, leaves no token or goes beyond the prompt is not believed."""
    one = request()
    side.side.on_new_request(one)
    side.decide(tokens)
    assert side.side.matched_tokens(one, 0) == 0
    assert side.client.handles[0].releases == 1


def test_load_fills_only_what_the_engine_does_not_hold(side: Side) -> None:
    """The job starts at the block after the engine's own hit and ends at the prefix."""
    one = request()
    side.side.on_new_request(one)
    side.decide(24)
    assert side.admit(one, local=4) == 20
    (job,) = side.side.build_step(step({})).loads
    assert job.first_blocks == (1,)
    assert job.block_ids == (tuple(TABLE[:6]),)
    assert job.boot_id == "boot"
    assert not job.broken
    assert side.side.build_step(step({})).loads == []


def test_lease_is_kept_until_every_rank_has_reported(side: Side) -> None:
    """Neither the second allocation nor the end of the request releases a running load."""
    one = request()
    side.side.on_new_request(one)
    side.decide(24)
    side.admit(one)
    side.side.after_alloc(one, blocks(TABLE), 0)
    side.side.request_finished("r")
    assert side.client.handles[0].releases == 0
    side.side.loads_finished({"r"}, set())
    assert side.client.handles[0].releases == 1
    assert side.client.handles[0].loaded_tokens == 24


def test_lease_is_released_when_nothing_is_loaded(side: Side) -> None:
    """The engine may decide for 0 after a positive answer."""
    one = request()
    side.side.on_new_request(one)
    side.decide(24)
    assert side.side.matched_tokens(one, 0) == 24
    side.side.after_alloc(one, blocks(TABLE), 0)
    assert side.client.handles[0].releases == 1


@pytest.mark.parametrize("decided", [False, True])
def test_lease_is_released_when_the_request_ends_first(decided: bool, side: Side) -> None:
    """An abort while waiting gives up the lookup, decided or not."""
    one = request()
    side.side.on_new_request(one)
    if decided:
        side.decide(24)
        side.side.matched_tokens(one, 0)
    side.side.request_finished("r")
    assert side.client.handles[0].releases == 1


def test_failed_load_is_not_tried_again(side: Side) -> None:
    """A request whose load failed once computes, and stores what it computes."""
    one = request()
    side.side.on_new_request(one)
    side.decide(24)
    side.admit(one)
    side.side.loads_finished({"r"}, {"r"})
    assert side.client.handles[0].loaded_tokens == 0, "a failed load is not loaded"
    assert side.counters.snapshot()["loaded_tokens"] == 0
    assert side.side.matched_tokens(one, 0) == 0
    assert len(side.client.handles) == 1
    assert side.stores(one, 30) == hashes(one)


def test_load_that_cannot_be_planned_is_reported_as_broken(side: Side) -> None:
    """The engine waits for a report: there is a job for every positive allocation."""
    one = request()
    side.side.on_new_request(one)
    side.decide(24)
    side.side.matched_tokens(one, 0)
    side.side.after_alloc(one, blocks(TABLE[:2]), 24)
    side.side.after_alloc(request("stranger"), blocks(TABLE), 8)
    jobs = side.side.build_step(step({})).loads
    assert [job.request_id for job in jobs] == ["r", "stranger"]
    assert all(job.broken for job in jobs)


@pytest.mark.parametrize("tokens", [8, 16, 32])
def test_load_that_ends_elsewhere_than_promised_is_broken(tokens: int, side: Side) -> None:
    """States and windows are those of the promised end: no other prefix is filled with them."""
    one = request()
    side.side.on_new_request(one)
    side.decide(24)
    side.side.matched_tokens(one, 0)
    side.side.after_alloc(one, blocks(TABLE), tokens)
    (job,) = side.side.build_step(step({})).loads
    assert f"ends at {tokens}" in job.broken


def test_chunks_are_stored_in_the_step_that_completes_them(side: Side) -> None:
    """A chunk whose last token's KV is not computed yet waits for the step that does."""
    one = request(num_tokens=30)
    side.side.on_new_request(one)
    side.decide(0)
    side.admit(one)
    expected = hashes(one)
    assert side.stores(one, 7) == []
    assert side.stores(one, 1) == expected[:1]
    assert side.stores(one, 15) == expected[1:2]
    assert side.stores(one, 7) == expected[2:3]


def test_store_jobs_name_the_chunk_s_blocks(side: Side) -> None:
    """Chunk i of 8 tokens has blocks 2i and 2i + 1."""
    one = request(num_tokens=17)
    side.side.on_new_request(one)
    made = side.side.build_step(step({"r": 17}, {"r": (TABLE,)}))
    assert [job.block_ids for job in made.stores] == [((1, 2),), ((3, 4),)]
    assert [job.mask for job in made.stores] == [1, 1]
    assert made.binding_id == side.client.binding.binding_id  # type: ignore[union-attr]


def test_null_blocks_are_not_stored() -> None:
    """A group that lacks one of a chunk's blocks is left out of it."""
    side = Side(sizes=(4, 8))
    one = request(num_tokens=16)
    side.side.on_new_request(one)
    made = side.side.build_step(step({"r": 16}, {"r": ([0, 2, 3, 4], [7, 0])}))
    assert [(job.mask, job.block_ids) for job in made.stores] == [
        (0b10, ((), (7,))),
        (0b01, ((3, 4), ())),
    ]


def test_loaded_chunks_are_not_stored_again(side: Side) -> None:
    """What came from the store is there."""
    one = request(num_tokens=40)
    side.side.on_new_request(one)
    side.decide(16)
    side.admit(one)
    one.num_computed_tokens = 16
    assert side.stores(one, 24) == hashes(one)[2:]


@pytest.mark.parametrize(("cache_decode", "stored"), [(False, 1), (True, 2)])
def test_sampled_tokens_are_stored_only_on_demand(cache_decode: bool, stored: int) -> None:
    """A chunk with sampled tokens is stored if, and only if, persist.cache_decode says so."""
    side = Side(cache_decode=cache_decode)
    one = request(num_tokens=12)
    side.side.on_new_request(one)
    found = side.stores(one, 12)
    for token in range(6):
        one.all_token_ids.append(token)
        one.num_tokens += 1
        found += side.stores(one, 1)
    assert found == hashes(one)[:stored]


def test_draft_tokens_are_not_counted_as_computed(side: Side) -> None:
    """A chunk is not complete while its last tokens may still be rejected."""
    one = request(num_tokens=8)
    side.side.on_new_request(one)
    assert side.stores(one, 8, drafts={"r": [1, 2]}) == []


def test_preempted_request_is_looked_up_anew(side: Side) -> None:
    """After a preemption everything is computed again, so the store may help again."""
    one = request()
    side.side.on_new_request(one)
    side.decide(0)
    side.admit(one)
    one.num_preemptions, one.num_computed_tokens = 1, 0
    assert side.side.matched_tokens(one, 0) is None
    assert len(side.client.handles) == 2
    side.decide(24)
    assert side.side.matched_tokens(one, 0) == 24


def test_a_preempted_prompt_counts_once(side: Side) -> None:
    """Asked once; found once, and what is found beyond that the second time."""
    one = request()
    side.side.on_new_request(one)
    for preemptions, found in enumerate((16, 24, 8)):
        one.num_preemptions = preemptions
        side.side.matched_tokens(one, 0)
        side.decide(found)
        assert side.admit(one) == found
        side.side.loads_finished({"r"}, set())
    counts = side.counters.snapshot()
    assert [handle.again for handle in side.client.handles] == [False, True, True]
    assert (counts["lookups"], counts["lookups_repeated"]) == (1, 2)
    assert (counts["lookup_tokens"], counts["hit_tokens"]) == (one.num_tokens, 24)
    assert counts["loaded_tokens"] == 16 + 24 + 8


def test_another_binding_makes_everything_anew(side: Side) -> None:
    """Nothing that was cut by the old chunk size is used under the new one."""
    one = request()
    side.side.on_new_request(one)
    side.decide(24)
    assert side.side.matched_tokens(one, 0) == 24
    side.client.binding = binding(12, "t1")
    assert side.side.matched_tokens(one, 0) is None
    assert side.client.handles[0].releases == 1
    assert side.client.handles[1].hashes == hashes(one, chunk=12)[:2]
    assert side.stores(one, 30) == hashes(one, chunk=12)


def test_incompatible_binding_is_cold(side: Side) -> None:
    """A server that came back with a size of no use serves nothing, and nothing fails."""
    one = request()
    side.side.on_new_request(one)
    side.client.binding = binding(10, "t1")
    assert side.side.matched_tokens(one, 0) == 0
    assert side.stores(one, 30) == []


def test_refused_server_is_not_used_until_it_agrees(side: Side) -> None:
    """A cold client is not asked, its refusal is told once; then all is as before."""
    refusals = [UnexpectedChunkSize(f"expected {size}") for size in (16, 24)]
    for number, side.client.cold in enumerate([refusals[0], *refusals]):
        side.side.on_new_request(request(f"r{number}"))
    one = request()
    side.side.on_new_request(one)
    assert side.side.matched_tokens(one, 0) == 0
    assert side.stores(one, 8) == []
    assert side.client.handles == []
    assert side.counters.snapshot()["binding_not_usable"] == 2
    side.client.cold = None
    assert side.side.matched_tokens(one, 0) is None
    assert side.stores(one, 22) == hashes(one)


def test_unbound_server_is_cold_until_bound(side: Side) -> None:
    """Before there is a binding nothing that depends on it exists."""
    bound, side.client.binding = side.client.binding, None
    one = request()
    side.side.on_new_request(one)
    assert side.side.matched_tokens(one, 0) == 0
    side.client.binding = bound
    assert side.side.matched_tokens(one, 0) is None


def test_salt_is_in_every_chunk(side: Side) -> None:
    """Tenants share nothing; an empty salt is none."""
    for name, salt in (("a", "t1"), ("b", ""), ("c", None)):
        side.side.on_new_request(request(name, cache_salt=salt))
    plain = hashes(request())
    extra = encode_extra([ExtraKey(ExtraKind.SALT, b"t1")])
    assert side.client.handles[0].hashes == hashes(request(), extra)[:3]
    assert not set(side.client.handles[0].hashes) & set(plain)
    assert side.client.handles[1].hashes == side.client.handles[2].hashes == plain[:3]


def test_items_are_in_the_chunks_that_they_overlap(side: Side) -> None:
    """The extra of each chunk is its own, in lookups and in stores."""
    one = request(mm_features=[feature(item(pixels=torch.ones(2)), offset=9, length=4)])
    side.side.on_new_request(one)
    asked, plain = side.client.handles[0].hashes, hashes(request())[:3]
    assert asked[0] == plain[0]
    assert not set(asked[1:]) & set(plain[1:])
    assert side.side.matched_tokens(one, 0) is None
    assert side.stores(one, 30)[:3] == asked


def test_adapter_that_changes_meanwhile_is_not_stored(tmp_path: Path) -> None:
    """Files overwritten after the request came: the engine may have loaded either."""
    adapter = lora(write_adapter(tmp_path / "a"))
    side = Side(requests=Requests(later()))
    kept, dropped = request("kept", lora_request=adapter), request("dropped", lora_request=adapter)
    for one in (kept, dropped):
        side.side.on_new_request(one)
    assert len(side.client.handles) == 2
    assert len(side.stores(kept, 30)) == 3
    write_adapter(tmp_path / "a", value=2.0)
    assert side.stores(dropped, 30) == []
    assert side.counters.snapshot()["requests_not_cached_lora"] == 1
    assert side.client.handles[1].releases == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_request": lora(Path("org/a"))},
        {"mm_features": [feature(None, name="a caller's")]},
        {"prompt_embeds": object()},
        {"prompt_token_ids": None},
        {"prompt_is_token_ids": [True]},
        {"resumable": True},
        {"all_token_ids": [-1] * 30},
        {"all_token_ids": [2**32] * 30},
    ],
)
def test_what_cannot_be_identified_is_not_cached(changes: dict[str, Any], side: Side) -> None:
    """Neither looked up nor stored, and counted."""
    one = request(**changes)
    side.side.on_new_request(one)
    assert side.client.handles == []
    assert side.side.matched_tokens(one, 0) == 0
    assert side.stores(one, 30) == []
    counts = side.counters.snapshot()
    assert sum(n for name, n in counts.items() if name.startswith("requests_not_cached")) == 1


def test_prompt_that_must_be_computed_is_not_looked_up(side: Side) -> None:
    """A request for prompt logprobs computes everything; its chunks are stored."""
    one = request(skip_reading_prefix_cache=True)
    side.side.on_new_request(one)
    assert side.side.matched_tokens(one, 0) == 0
    assert side.client.handles == []
    assert side.stores(one, 30) == hashes(one)


def test_idle_step_waits_for_an_undecided_lookup(side: Side) -> None:
    """In process vLLM would spin; a busy step, or one without a lookup, never waits."""
    one = request()
    side.side.build_step(step({}))
    side.side.on_new_request(one)
    side.side.build_step(step({"other": 1}))
    assert side.client.handles[0].waits == []
    side.side.build_step(step({}))
    assert side.client.handles[0].waits == [IDLE_WAIT_S]
    side.decide(24)
    side.admit(one)
    side.side.build_step(step({}))
    side.side.build_step(step({}))
    assert side.client.handles[0].waits == [IDLE_WAIT_S]


def test_stopped_side_does_nothing(side: Side) -> None:
    """A model that cannot be identified: no hit, no store."""
    one = request()
    side.side.on_new_request(one)
    side.decide(24)
    side.side.matched_tokens(one, 0)
    side.side.stop("unknown")
    assert side.client.handles[0].releases == 1
    assert side.side.matched_tokens(one, 0) == 0
    assert side.stores(one, 30) == []


def test_tiers_of_a_load_add_up(side: Side) -> None:
    """What the engine reports as from disk and from memory is what was loaded."""
    one = request()
    side.side.on_new_request(one)
    side.decide(24, memory_chunks=2, disk_chunks=1)
    side.admit(one, local=4)
    assert side.side.hit_sources("r", 20) == (12, 8)
    assert sum(side.side.hit_sources("unknown", 20)) == 20


def hybrid_side() -> Side:
    """A recurrent group of 8-token blocks beside the full one."""
    made = Side((8, 4))
    groups = (Group(GroupKind.RECURRENT, 8, 1), Group(GroupKind.FULL, 4, 4))
    made.side._groups, made.side._recurrent = groups, True
    return made


def test_states_are_stored_where_a_step_ends() -> None:
    """Each once: in the step that left it, with its chunk or after it."""
    side, one = hybrid_side(), request(num_tokens=30)
    side.side.on_new_request(one)
    tables = {"r": ([50, 51, 52, 53], TABLE)}
    stored = []
    for num_tokens, offers in ((8, []), (4, []), (12, []), (1, [(0, 52, 24)]), (5, [])):
        made = side.side.build_step(step({"r": num_tokens}, tables, states={"r": offers}))
        stored.append([(job.chunk_hash, job.mask, job.block_ids[0]) for job in made.stores])
        one.num_computed_tokens += num_tokens
    first, second, third = hashes(one)
    assert stored == [
        [(first, 0b11, (50,))],
        [],
        [(second, 0b10, ()), (third, 0b11, (52,))],
        [],
        [],
    ]


def test_state_of_a_loaded_prefix_is_not_stored_again() -> None:
    """The engine offers it once the load is over; states beyond it are new."""
    side, one = hybrid_side(), request(num_tokens=30)
    side.side.on_new_request(one)
    side.decide(16)
    assert side.side.matched_tokens(one, 0) == 16
    side.side.after_alloc(one, blocks([0, 51], TABLE), 16)
    side.side.loads_finished({"r"}, set())
    one.num_computed_tokens = 15
    tables = {"r": ([0, 51, 52], TABLE)}
    assert side.side.build_step(step({"r": 1}, tables)).stores == []
    one.num_computed_tokens = 16
    (job,) = side.side.build_step(step({"r": 8}, tables)).stores
    assert (job.mask, job.block_ids[0]) == (0b11, (52,))


def test_state_below_a_known_chunk_is_stored_alone() -> None:
    """The server knows the chunk, and not the state that a shorter step left in it."""
    side, one = hybrid_side(), request(num_tokens=30)
    side.side.on_new_request(one)
    side.decide(16)
    assert side.side.matched_tokens(one, 0) == 16
    side.side.after_alloc(one, blocks([50], TABLE), 0)
    (job,) = side.side.build_step(step({"r": 8}, {"r": ([50], TABLE)})).stores
    assert (job.chunk_hash, job.mask, job.block_ids) == (hashes(one)[0], 0b01, ((50,), ()))


def test_state_that_the_server_lost_is_stored_again() -> None:
    """The engine's own prefix cache has it at 16, the server nothing: both chunks and the state."""
    side, one = hybrid_side(), request(num_tokens=30)
    side.side.on_new_request(one)
    side.decide(0)
    assert side.side.matched_tokens(one, 16) == 0
    side.side.after_alloc(one, blocks([0, 51, 52], TABLE), 0)
    one.num_computed_tokens = 16
    tables = {"r": ([0, 51, 52], TABLE)}
    made = side.side.build_step(step({"r": 6}, tables, admitted=("r",)))
    first, second, _ = hashes(one)
    assert [(job.chunk_hash, job.mask, job.block_ids[0]) for job in made.stores] == [
        (first, 0b10, ()),
        (second, 0b11, (51,)),
    ]
    one.num_computed_tokens = 22
    tables = {"r": ([0, 0, 52], TABLE)}
    assert side.side.build_step(step({"r": 1}, tables)).stores == []
