"""The worker side: gathers pages into slots and scatters slots into pages.

All methods run on vLLM's worker thread, inside its steps; only the repetition of a
registration after a rebind has a thread of its own.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from lmcache_persist.connector import CacheClient, Change, PoolMap, Registration
from lmcache_persist.connector.pages import PageSet, pin_host_memory
from lmcache_persist.connector.vllm import layouts
from lmcache_persist.connector.vllm.counters import Counters, logger
from lmcache_persist.connector.vllm.metadata import (
    LoadJob,
    StepMetadata,
    StoreJob,
)
from lmcache_persist.connector.vllm.model_identity import read_identity
from lmcache_persist.connector.vllm.settings import ConnectorSettings
from lmcache_persist.errors import IdentityUnknown, LeaseError, PersistError, TransportError
from lmcache_persist.geometry import Group, check_compatible, chunks_needed, object_blocks
from lmcache_persist.protocol import MAX_KEYS_PER_RESERVE, Grant, Reserved

STORE_WAIT_S = 0.05
"""Seconds that the end of a step waits for slots that were asked for at its start."""

EMPTY_OBJECT_BYTES = 16
"""Bytes of the objects of a group that has no layer on this rank, as a pipeline stage may
have it: a chunk's group is complete only when every rank has stored its part."""

REGISTER_TIMEOUT_S = 10.0
"""Seconds for the answer of a server that is known to be there."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """Stores of a step and the slots that were asked for them."""

    jobs: Sequence[StoreJob]
    slots: Future[Reserved]


class WorkerSide:
    """One rank's pages and what moves them.

    Args:
        client: connected, or on its way.
        groups: the geometry.
        vllm_config: the engine's.
        kv_cache_config: this worker's.
        settings: the operator's.
        counters: shared with the connector.

    Threads: vLLM's worker thread only.
    """

    def __init__(
        self,
        client: CacheClient,
        groups: Sequence[Group],
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        settings: ConnectorSettings,
        counters: Counters,
    ) -> None:
        self._client = client
        self._groups = tuple(groups)
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._settings = settings
        self._counters = counters
        self._rank = int(vllm_config.parallel_config.rank)
        self._engine_id = str(vllm_config.kv_transfer_config.engine_id)
        self._layers: list[list[layouts.LayerCache]] = []
        self._pages: list[PageSet | None] = []
        self._identity: dict[str, Any] | None = None
        self._layout: dict[str, Any] = {}
        # The chunk size that the server knows this rank's object sizes for; 0 for none.
        self._registered_for = 0
        self._registering = threading.Lock()
        self._loads: list[LoadJob] = []
        self._asked: list[_Asked] = []
        self._finished: set[str] = set()
        self._failed: set[str] = set()

    # ---- registration --------------------------------------------------------------

    def register(self, kv_caches: dict[str, Any]) -> None:
        """Read the layout and tell the server who this is.

        Raises:
            UnsupportedGroup: the caches have no pages.
            PersistError: the server refuses, and ``persist.required`` is not false.
        """
        config = self._kv_cache_config
        self._layers = layouts.read_layers(kv_caches, config, self._groups)
        self._pages = [
            PageSet(
                [plane for layer in members for plane in layer.planes],
                names=[
                    f"layer {layer.name} of group {index}"
                    for layer in members
                    for _ in layer.planes
                ],
            )
            if members
            else None
            for index, members in enumerate(self._layers)
        ]
        self._layout = layouts.describe(self._layers, config, self._groups, self._vllm_config)
        try:
            self._identity = read_identity(self._vllm_config, config)
        except IdentityUnknown as error:
            logger.warning("cache: not used by this model: %s", error)
            return
        binding = self._client.binding
        if binding is not None:
            try:
                self._register_for(binding.chunk_size)
            except PersistError as error:
                if self._settings.required:
                    raise
                self._counters.incident("start_without_cache", error)
        self._client.on_change(self._server_changed)

    def _register_for(self, chunk_size: int) -> None:
        check_compatible(chunk_size, self._groups)
        sizes = [
            self._object_bytes(index, object_blocks(group, chunk_size)) if group.cacheable else 0
            for index, group in enumerate(self._groups)
        ]
        if self._identity is None:
            raise RuntimeError("a worker without an identity has nothing to register")
        registration = Registration(
            engine=self._engine_id,
            rank=self._rank,
            world_size=int(self._vllm_config.parallel_config.world_size),
            identity=self._identity,
            layout=self._layout,
            groups=self._groups,
            object_bytes=sizes,
        )
        # The client repeats this from now on, even if it is refused: no older one holds.
        self._registered_for = 0
        self._client.register(registration, timeout_s=REGISTER_TIMEOUT_S)
        self._registered_for = chunk_size
        self._pin_pool()
        logger.info("cache: rank %d registered, %s bytes per chunk", self._rank, sum(sizes))

    def _server_changed(self, change: Change) -> None:
        """On the client's thread, which must not wait: another chunk size, other sizes."""
        binding = change.binding
        if binding is None:
            return
        if self._registered_for == binding.chunk_size and not self._pins:
            return
        threading.Thread(
            target=self._register_again,
            args=(binding.chunk_size,),
            name="lmcache-persist-register",
            daemon=True,
        ).start()

    def _register_again(self, chunk_size: int) -> None:
        with self._registering:
            try:
                if self._registered_for == chunk_size:
                    self._pin_pool()
                else:
                    self._register_for(chunk_size)
            except PersistError as error:
                self._counters.incident("registration_failed", error)

    @property
    def _pins(self) -> bool:
        """Whether pages are on a device whose copies want pinned memory."""
        return any(pages is not None and pages.device.type == "cuda" for pages in self._pages)

    def _pin_pool(self) -> None:
        """Pin the present server's pool, once; a few tenths of a second per GiB."""
        boot = self._client.boot_id if self._pins else None
        pool = self._client.pool(boot) if boot is not None else None
        if pool is not None:
            # Let go meanwhile, with its server: the next one's is pinned when it is there.
            with contextlib.suppress(LeaseError):
                pool.prepare(pin_host_memory)

    # ---- steps ---------------------------------------------------------------------

    def begin_step(self, step: StepMetadata) -> None:
        """Take the step's work and ask for the slots of its stores.

        Now, so that they are there when the forward pass is over.
        """
        self._loads.extend(step.loads)
        self._give_up_stores()
        binding = self._client.binding
        if not step.stores or binding is None:
            return
        if binding.binding_id != step.binding_id or binding.chunk_size != self._registered_for:
            self._counters.add("chunks_dropped_stale", len(step.stores))
            return
        for start in range(0, len(step.stores), MAX_KEYS_PER_RESERVE):
            jobs = step.stores[start : start + MAX_KEYS_PER_RESERVE]
            slots = self._client.reserve(
                engine=self._engine_id,
                rank=self._rank,
                hashes=[job.chunk_hash for job in jobs],
                masks=[job.mask for job in jobs],
            )
            self._asked.append(_Asked(jobs, slots))

    def take_results(self) -> tuple[set[str], set[str]]:
        """Requests whose loads are over, and those of them that failed on this rank."""
        finished, failed = self._finished, self._failed
        self._finished, self._failed = set(), set()
        return finished, failed

    # ---- stores --------------------------------------------------------------------

    def store(self) -> None:
        """Gather the chunks that this step completed into their slots and commit them."""
        asked, self._asked = self._asked, []
        for one in asked:
            try:
                reserved = one.slots.result(timeout=STORE_WAIT_S)
            except TimeoutError:
                self._give_back_later(one)
            except TransportError as error:
                self._counters.incident("chunks_dropped_no_server", error)
            except PersistError as error:
                self._counters.incident("chunks_dropped_refused", error)
            else:
                self._store(one.jobs, reserved)

    def _store(self, jobs: Sequence[StoreJob], reserved: Reserved) -> None:
        self._counters.add("chunks_known", len(reserved.stored))
        missing = len(jobs) - len(reserved.stored) - len(reserved.grants)
        self._counters.add("chunks_dropped_no_slot", missing)
        numbers = [grant.reservation for grant in reserved.grants]
        if not numbers:
            return
        begin_s, nbytes = time.monotonic(), 0
        try:
            pool = self._client.pool(reserved.boot)
            if pool is None:
                raise LeaseError(f"pool of boot {reserved.boot} is not mapped")
            with pool.pin():
                for grant in reserved.grants:
                    nbytes += self._gather(jobs[grant.index], grant, pool)
        except Exception as error:  # noqa: BLE001 - slots go back, whatever went wrong
            self._client.give_back(numbers)
            self._counters.incident("chunks_dropped_gather", repr(error))
            return
        # A commit that fails is a later miss, and the client knows about it.
        self._client.commit(numbers)
        self._counters.add("chunks_stored", len(numbers))
        self._counters.add("stored_bytes", nbytes)
        self._counters.observe("store_seconds", time.monotonic() - begin_s)

    def _gather(self, job: StoreJob, grant: Grant, pool: PoolMap) -> int:
        """Returns the bytes that were written."""
        nbytes = 0
        members = [index for index in range(len(self._groups)) if job.mask >> index & 1]
        for group, offset in zip(members, grant.offsets, strict=True):
            pages, ids = self._pages[group], job.block_ids[group]
            slot = pool.view(offset, self._object_bytes(group, len(ids)))
            try:
                if pages is None:
                    slot[:] = bytes(len(slot))
                else:
                    pages.gather(ids, slot)
                nbytes += slot.nbytes
            finally:
                slot.release()
        return nbytes

    def _object_bytes(self, group: int, num_blocks: int) -> int:
        """Bytes of an object of that many blocks of a cacheable group."""
        pages = self._pages[group]
        return EMPTY_OBJECT_BYTES if pages is None else pages.object_bytes(num_blocks)

    def _give_up_stores(self) -> None:
        """Slots that were asked for in a step that never came to its end."""
        for one in self._asked:
            self._give_back_later(one)
        self._asked = []

    def _give_back_later(self, one: _Asked) -> None:
        """The step is over: what its blocks hold next is another chunk's."""
        self._counters.incident(
            "chunks_dropped_late", f"{len(one.jobs)} chunks got no slots in time"
        )

        def give_back(slots: Future[Reserved]) -> None:
            if slots.exception() is None:
                self._client.give_back([grant.reservation for grant in slots.result().grants])

        one.slots.add_done_callback(give_back)

    # ---- loads ---------------------------------------------------------------------

    def load(self) -> None:
        """Scatter the slots of all loads into their blocks. Each is reported, come what may."""
        jobs, self._loads = self._loads, []
        for job in jobs:
            begin_s = time.monotonic()
            try:
                nbytes = self._load(job)
                self._counters.add("loads")
                self._counters.add("loaded_bytes", nbytes)
                self._counters.observe("load_seconds", time.monotonic() - begin_s)
            except Exception as error:  # noqa: BLE001 - the engine waits for a report
                self._failed.add(job.request_id)
                self._counters.incident("loads_failed", error)
            self._finished.add(job.request_id)

    def _load(self, job: LoadJob) -> int:
        if job.broken:
            raise LeaseError(f"load of {job.request_id} was not possible: {job.broken}")
        pool = self._client.pool(job.boot_id)
        if pool is None:
            raise LeaseError(f"pool of boot {job.boot_id} is not mapped")
        nbytes = 0
        with pool.pin():
            for index, (group, pages) in enumerate(zip(self._groups, self._pages, strict=True)):
                if pages is not None:
                    nbytes += self._load_group(job, index, group, pages, pool)
        return nbytes

    def _load_group(
        self, job: LoadJob, index: int, group: Group, pages: PageSet, pool: PoolMap
    ) -> int:
        """Returns the bytes of the slots that were read."""
        nbytes = 0
        slots = self._slots_by_chunk(job, index)
        ids, first = job.block_ids[index], job.first_blocks[index]
        per_chunk = job.chunk_size // group.tokens_per_block
        in_object = object_blocks(group, job.chunk_size)
        prefix = len(ids) * group.tokens_per_block
        for chunk in chunks_needed(group, prefix, job.chunk_size):
            end = (chunk + 1) * per_chunk
            blocks = ids[end - in_object : end]
            held = first - (end - in_object)
            if held >= in_object or all(block == job.null_block_id for block in blocks):
                continue  # The engine holds all of it, or wants none of it.
            if chunk not in slots:
                raise LeaseError(f"load of {job.request_id} has no slot for chunk {chunk}")
            offset, object_bytes = slots[chunk]
            slot = pool.view(offset, object_bytes)
            try:
                pages.scatter(blocks, slot, skip_blocks=max(0, held), null_block=job.null_block_id)
            finally:
                slot.release()
            nbytes += object_bytes
        return nbytes

    def _slots_by_chunk(self, job: LoadJob, group: int) -> dict[int, tuple[int, int]]:
        """Offset and size of this rank's slots by chunk."""
        return {
            run.first_chunk + position: (offset, run.object_bytes)
            for run in job.runs
            if run.rank == self._rank and run.group == group
            for position, offset in enumerate(run.offsets)
        }
