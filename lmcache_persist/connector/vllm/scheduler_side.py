"""The scheduler side: hash, look up, decide what workers load and store.

All methods run on vLLM's scheduler thread. None of them waits for the server, but for a
few milliseconds when the engine has nothing else to do.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from lmcache_persist.binding import Binding
from lmcache_persist.connector import CacheClient, LookupHandle, LookupResult
from lmcache_persist.connector.vllm.counters import Counters, logger
from lmcache_persist.connector.vllm.metadata import (
    LoadJob,
    SlotsOfRun,
    StepMetadata,
    StoreJob,
)
from lmcache_persist.connector.vllm.requests import Requests, TrackedRequest
from lmcache_persist.connector.vllm.settings import ConnectorSettings
from lmcache_persist.connector.vllm.store_plan import IsCheckpoint, boundary_states, plan_stores
from lmcache_persist.errors import PersistError
from lmcache_persist.geometry import Group, GroupKind, check_compatible
from lmcache_persist.hashing import ChunkHasher

IDLE_WAIT_S = 0.003
"""Seconds to wait in an idle step. In process vLLM spins and starves the client's thread."""

NAMESPACE_BYTES = 32
"""Random bytes that tell a private namespace from all others."""


class _Load(NamedTuple):
    """A load under way: its lease, and how many tokens it brings."""

    handle: LookupHandle | None
    result: LookupResult | None
    tokens: int


_NO_LOAD = _Load(None, None, 0)


class SchedulerSide:
    """Bookkeeping of live requests.

    Args:
        client: connected, or on its way.
        groups: the geometry.
        engine_id: the same as the workers'.
        settings: the operator's.
        counters: shared with the connector.
        requests: says what identifies a request.
        is_checkpoint: whether the engine exports a state from inside a step.

    Threads: vLLM's scheduler thread only.
    """

    def __init__(
        self,
        client: CacheClient,
        groups: Sequence[Group],
        engine_id: str,
        settings: ConnectorSettings,
        counters: Counters,
        requests: Requests | None = None,
        is_checkpoint: IsCheckpoint = lambda group, steps, boundary: False,
    ) -> None:
        self._client = client
        self._groups = tuple(groups)
        self._is_checkpoint = is_checkpoint
        self._recurrent = any(group.kind is GroupKind.RECURRENT for group in groups)
        self._engine_id = engine_id
        self._settings = settings
        self._counters = counters
        self._requests = requests or Requests()
        self._binding: Binding | None = None
        self._hasher: ChunkHasher | None = None
        self._tracked: dict[str, TrackedRequest] = {}
        self._loading: dict[str, _Load] = {}
        self._new_loads: list[LoadJob] = []
        self._stopped = ""
        # Empty until the first reset: hashes that all engines of this identity share.
        self._namespace = b""
        self._mixed = False
        self._cold: PersistError | None = None
        self.null_block_id = 0

    # ---- binding -------------------------------------------------------------------

    def stop(self, reason: str) -> None:
        """Neither look up nor store anything from now on."""
        self._stopped = reason
        self._forget_hashes()
        logger.warning("cache: not used from now on: %s", reason)

    def start_private_namespace(self, *, blocks_are_free: bool) -> bool:
        """Share nothing with what was computed so far, by this engine or any other.

        The engine's weights may be others now, and nothing says which. What it computes
        from here on is found by itself alone, until it is started again or this is called
        again. Loads that run are of blocks that somebody holds.

        Args:
            blocks_are_free: whether no request holds a block. If one does, its next tokens
                stand on old ones: nothing is cached until this is called with True.

        Returns:
            ``blocks_are_free``.
        """
        # First, so that nothing old is used under new weights whatever fails below.
        self._namespace, self._hasher = os.urandom(NAMESPACE_BYTES), None
        self._mixed = not blocks_are_free
        if self._binding is not None:
            self._adopt(self._binding)
        if self._mixed:
            why = "requests hold blocks: not used until the engine resets it without any"
            self._counters.incident("resets_too_early", why)
        else:
            self._counters.incident("resets", "private to this engine until it starts again")
        return blocks_are_free

    def _ready_hasher(self) -> ChunkHasher | None:
        """The hasher of the binding that holds now; None while there is none for us."""
        binding = self._client.binding
        if binding is None or self._stopped or self._mixed or self._is_cold():
            return None
        if self._binding is None or binding.binding_id != self._binding.binding_id:
            self._adopt(binding)
        return self._hasher

    def _is_cold(self) -> bool:
        """Whether the server is one that is not used; says so once for each reason."""
        cold = self._client.cold
        if cold is not None and cold is not self._cold:
            self._counters.incident("binding_not_usable", cold)
        self._cold = cold
        return cold is not None

    def _adopt(self, binding: Binding) -> None:
        self._forget_hashes()
        self._binding = binding
        try:
            check_compatible(binding.chunk_size, self._groups)
        except PersistError as error:
            self._hasher = None
            self._counters.incident("binding_not_usable", error)
            return
        self._hasher = ChunkHasher(binding.chunk_size, self._namespace)
        logger.info("cache: bound to a chunk size of %d tokens", binding.chunk_size)

    def _forget_hashes(self) -> None:
        """Nothing that was cut by another chunk size may be used; loads go on."""
        for tracked in self._tracked.values():
            tracked.drop_lookup()
            tracked.hashes.clear()
            tracked.next_store = 0
            tracked.states.clear()
            tracked.asked = False

    # ---- lookups -------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Hash the prompt and let the server bring what it has, before there is a slot."""
        extra = self._requests.identify(request)
        if isinstance(extra, str):
            self._counters.add(f"requests_not_cached_{extra}")
            return
        self._counters.add("requests")
        tracked = TrackedRequest(request, extra)
        self._tracked[request.request_id] = tracked
        self._look_up(tracked)

    def _look_up(self, tracked: TrackedRequest) -> None:
        hasher, request = self._ready_hasher(), tracked.request
        if hasher is None or request.skip_reading_prefix_cache:
            return
        # At least one token is left to compute.
        num_chunks = (request.num_tokens - 1) // hasher.chunk_size
        if num_chunks == 0:
            return
        tracked.asked, tracked.preemptions = True, request.num_preemptions
        if not self._hash(tracked, hasher, num_chunks):
            return
        again, tracked.counted = tracked.counted, True
        self._counters.add("lookups_repeated" if again else "lookups")
        self._counters.add("lookup_tokens", 0 if again else request.num_tokens)
        tracked.lookup = self._client.lookup(
            engine=self._engine_id,
            hashes=[bytes(one) for one in tracked.hashes[:num_chunks]],
            num_tokens=request.num_tokens,
            again=again,
        )

    def _hash(self, tracked: TrackedRequest, hasher: ChunkHasher, num_chunks: int) -> bool:
        """Have the hashes of the first ``num_chunks`` chunks; False if one cannot be named."""
        if len(tracked.hashes) >= num_chunks:
            return True
        tokens, size = tracked.request.all_token_ids, hasher.chunk_size
        if hasher.extend(
            tracked.hashes, tokens, tracked.extra.of_chunks(size, len(tokens) // size)
        ):
            return len(tracked.hashes) >= num_chunks
        self._counters.add("requests_not_cached_token")
        self._tracked.pop(tracked.request.request_id, None)
        return False

    def matched_tokens(self, request: Any, num_computed_tokens: int) -> int | None:
        """Tokens that can be loaded beyond those; None while that is not decided. O(1)."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or not tracked.may_load or self._ready_hasher() is None:
            return 0
        tracked.local_tokens = num_computed_tokens
        if not tracked.asked or request.num_preemptions != tracked.preemptions:
            tracked.drop_lookup()
            self._look_up(tracked)
        if tracked.lookup is None:
            return 0
        if tracked.result is None:
            tracked.result = tracked.lookup.poll()
            if tracked.result is None:
                return None
            self._judge(tracked, tracked.result)
        # The lease stays although the engine may hold more itself: that may shrink.
        prefix = tracked.result.tokens if tracked.result is not None else 0
        return max(0, prefix - num_computed_tokens)

    def _judge(self, tracked: TrackedRequest, result: LookupResult) -> None:
        """Drop a result that says nothing, or that cannot be true."""
        if result.error is not None:
            self._counters.incident("lookups_failed", result.error)
        chunk_size = self._binding.chunk_size if self._binding is not None else 1
        prefix = result.tokens
        if prefix % chunk_size or prefix > min(
            tracked.request.num_tokens - 1, len(tracked.hashes) * chunk_size
        ):
            self._counters.incident(
                "lookups_failed", f"a prefix of {prefix} tokens was never asked for"
            )
            prefix = 0
        # Once per prompt: after a preemption only what is found beyond the first time.
        self._counters.add("hit_tokens", max(0, prefix - tracked.hit_tokens))
        tracked.hit_tokens = max(prefix, tracked.hit_tokens)
        if prefix == 0:
            tracked.drop_lookup()

    # ---- loads ---------------------------------------------------------------------

    def after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """What the engine decided: load so many tokens, or none."""
        request_id = request.request_id
        tracked = self._tracked.get(request_id)
        if num_external_tokens == 0:
            if tracked is not None:
                self._skip_known_chunks(tracked)
                tracked.drop_lookup()
            return
        handle, result = (tracked.lookup, tracked.result) if tracked else (None, None)
        if tracked is not None:
            self._skip_known_chunks(tracked)
            tracked.lookup = tracked.result = None
        # From here on the lease is the load's, until every rank has reported.
        self._loading[request_id] = _Load(handle, result, num_external_tokens)
        try:
            job = self._plan_load(request_id, tracked, result, blocks, num_external_tokens)
        except Exception as error:  # noqa: BLE001 - the engine waits for a report, come what may
            self._counters.incident("loads_not_planned", repr(error))
            job = broken_load(request_id, repr(error))
        self._new_loads.append(job)

    def _skip_known_chunks(self, tracked: TrackedRequest) -> None:
        if tracked.result is not None and self._binding is not None:
            known = tracked.result.tokens // self._binding.chunk_size
            tracked.next_store = max(tracked.next_store, known)
            tracked.states.add(known - 1)

    def _plan_load(
        self,
        request_id: str,
        tracked: TrackedRequest | None,
        result: LookupResult | None,
        blocks: Any,
        num_external_tokens: int,
    ) -> LoadJob:
        if tracked is None or result is None or self._binding is None:
            return broken_load(request_id, "nothing was promised")
        begin, end = tracked.local_tokens, tracked.local_tokens + num_external_tokens
        if end != result.tokens:
            return broken_load(request_id, f"load ends at {end}, promised were {result.tokens}")
        first_blocks: list[int] = []
        block_ids: list[tuple[int, ...]] = []
        for group, ids in zip(self._groups, blocks.get_block_ids(), strict=True):
            size = group.tokens_per_block
            if not group.cacheable:
                first_blocks.append(0)
                block_ids.append(())
                continue
            if begin % size or len(ids) < end // size:
                return broken_load(request_id, f"blocks {len(ids)} x {size} for [{begin}, {end})")
            first_blocks.append(begin // size)
            block_ids.append(tuple(ids[: end // size]))
        self._counters.add("load_tokens", num_external_tokens)
        self._counters.add("load_memory_chunks", result.memory_chunks)
        self._counters.add("load_disk_chunks", result.disk_chunks)
        return LoadJob(
            request_id,
            result.boot_id,
            self._binding.chunk_size,
            tuple(
                SlotsOfRun(
                    run.rank, run.group, run.first_chunk, run.object_bytes, tuple(run.offsets)
                )
                for run in result.runs
            ),
            tuple(first_blocks),
            tuple(block_ids),
            self.null_block_id,
        )

    def hit_sources(self, request_id: str, num_external_tokens: int) -> tuple[int, int]:
        """Of a load's tokens, how many came from memory and how many from disk."""
        result = self._loading.get(request_id, _NO_LOAD).result
        if result is None or self._binding is None:
            return num_external_tokens, 0
        from_disk = min(num_external_tokens, result.disk_chunks * self._binding.chunk_size)
        return num_external_tokens - from_disk, from_disk

    def loads_finished(self, finished: set[str], failed: set[str]) -> None:
        """Every rank has reported these loads: their slots may go."""
        for request_id in finished:
            load = self._loading.pop(request_id, _NO_LOAD)
            loaded_tokens = 0 if request_id in failed else load.tokens
            if load.handle is not None:
                load.handle.release(loaded_tokens=loaded_tokens)
            self._counters.add("loads_failed" if request_id in failed else "loads")
            self._counters.add("loaded_tokens", loaded_tokens)
        for request_id in failed:
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                tracked.may_load, tracked.next_store = False, 0
                tracked.states.clear()

    def request_finished(self, request_id: str) -> None:
        """Forget a request; a load of it that still runs keeps its lease."""
        tracked = self._tracked.pop(request_id, None)
        if tracked is not None:
            tracked.drop_lookup()

    # ---- steps ---------------------------------------------------------------------

    def build_step(self, scheduler_output: Any) -> StepMetadata:
        """The step's loads and stores."""
        step = StepMetadata(loads=self._new_loads)
        self._new_loads = []
        try:
            self._add_stores(step, scheduler_output)
            if scheduler_output.total_num_scheduled_tokens == 0 and not step.loads:
                self._wait_for_a_lookup()
        except Exception as error:  # noqa: BLE001
            # Loads have been promised and go out whatever happens to stores.
            step.stores.clear()
            self._counters.incident("stores_not_planned", repr(error))
        return step

    def _add_stores(self, step: StepMetadata, scheduler_output: Any) -> None:
        hasher = self._ready_hasher()
        if hasher is None or self._binding is None:
            return
        step.binding_id = self._binding.binding_id
        drafts = scheduler_output.scheduled_spec_decode_tokens
        for request_id, num_scheduled in scheduler_output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            # Draft tokens may be rejected; what is accepted counts in the next step.
            certain = num_scheduled - len(drafts.get(request_id, ()))
            computed = tracked.request.num_computed_tokens
            steps = range(computed, computed + certain)
            end = min(steps.stop, self._storable_tokens(tracked.request)) // hasher.chunk_size
            step.stores.extend(self._stores_of(tracked, scheduler_output, steps, end, hasher))

    def _storable_tokens(self, request: Any) -> int:
        if self._settings.cache_decode:
            return int(request.num_tokens)
        return int(min(request.num_tokens, request.num_prompt_tokens))

    def _stores_of(
        self,
        tracked: TrackedRequest,
        scheduler_output: Any,
        steps: range,
        end: int,
        hasher: ChunkHasher,
    ) -> list[StoreJob]:
        """What a request's step leaves: chunks it completes below ``end``, and states."""
        request_id, size = tracked.request.request_id, hasher.chunk_size
        state = scheduler_output.kv_connector_block_state
        offers = state.boundary_state_offloads.get(request_id, ()) if self._recurrent else ()
        at_boundary = self._recurrent and not (steps.start % size and steps.stop % size)
        if end <= tracked.next_store and not (offers or at_boundary):
            return []
        tables = state.get_block_ids(request_id)
        states = boundary_states(
            self._groups,
            tables,
            offers,
            steps,
            size,
            self.null_block_id,
            self._is_checkpoint,
            admitted=any(one.req_id == request_id for one in scheduler_output.scheduled_new_reqs),
        )
        fresh = {c: found for c, found in states.items() if c < end and c not in tracked.states}
        if end <= tracked.next_store and not fresh:
            return []
        if not self._hash(tracked, hasher, end) or not self._still_holds(tracked):
            return []
        chunks = range(tracked.next_store, end)
        jobs = plan_stores(
            self._groups, tables, tracked.hashes, chunks, fresh, size, self.null_block_id
        )
        tracked.next_store = max(tracked.next_store, end)
        tracked.states.update(fresh)
        self._counters.add("chunks_offered", len(jobs))
        return jobs

    def _still_holds(self, tracked: TrackedRequest) -> bool:
        """Whether what identified a request still does; else no more of it is stored."""
        if tracked.extra.still_holds():
            return True
        self._counters.add("requests_not_cached_lora")
        self.request_finished(tracked.request.request_id)
        return False

    def _wait_for_a_lookup(self) -> None:
        for tracked in self._tracked.values():
            if tracked.lookup is not None and tracked.result is None:
                tracked.lookup.wait(IDLE_WAIT_S)
                return


def broken_load(request_id: str, why: str) -> LoadJob:
    """A load that every rank reports as failed: the engine waits for the report."""
    return LoadJob(request_id, "", 0, (), (), (), 0, broken=why)
