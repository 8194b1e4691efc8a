"""``PersistConnector``: vLLM's connector interface, handed on to either side.

While an engine serves, nothing here raises: an exception out of a connector method ends
the engine, a miss costs a prefill. Only start-up refusals are raised.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar, cast

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from lmcache_persist.connector import CacheClient
from lmcache_persist.connector.vllm.adapters import Adapters
from lmcache_persist.connector.vllm.counters import Counters, logger
from lmcache_persist.connector.vllm.kv_geometry import (
    is_checkpoint,
    read_groups,
    scheduling_block_size,
)
from lmcache_persist.connector.vllm.media import Items
from lmcache_persist.connector.vllm.metadata import StepMetadata
from lmcache_persist.connector.vllm.metrics import PersistPromMetrics, PersistStats, Reporter
from lmcache_persist.connector.vllm.model_identity import check_identifiable
from lmcache_persist.connector.vllm.requests import Requests
from lmcache_persist.connector.vllm.scheduler_side import SchedulerSide
from lmcache_persist.connector.vllm.settings import ConnectorSettings
from lmcache_persist.connector.vllm.startup import start_client
from lmcache_persist.connector.vllm.worker_side import WorkerSide
from lmcache_persist.errors import IdentityUnknown
from lmcache_persist.geometry import GroupKind

REQUIRED_LAYOUT = "LBHNC"
"""Blocks are contiguous, layers outermost: a block of a layer is one page."""

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _in_service(fallback: Callable[[], Any]) -> Callable[[_Method], _Method]:
    """Turn any exception of a method into a count, a log line and ``fallback()``."""

    def decorate(method: _Method) -> _Method:
        @wraps(method)
        def guarded(self: PersistConnector, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - raised, it would end the engine
                self._counters.incident(f"failed_{method.__name__}", repr(error))
                return fallback()

        return cast(_Method, guarded)

    return decorate


def _nothing() -> None:
    return None


def _requests_of(vllm_config: VllmConfig) -> Requests:
    """Who identifies the engine's requests. It has loaded no adapter yet."""
    foreign = vllm_config.ec_transfer_config is not None
    return Requests(Adapters(vllm_config.lora_config), Items(foreign_embeddings=foreign))


class PersistConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps an engine's KV cache in a cache server, through restarts of either.

    Raises:
        PersistError: at start, if the engine must not run like this; the text says why.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._counters = Counters()
        self._reporter = Reporter(scheduler=role == KVConnectorRole.SCHEDULER)
        settings = ConnectorSettings.from_extra_config(
            self._kv_transfer_config.kv_connector_extra_config
        )
        groups = read_groups(
            kv_cache_config, vllm_config.parallel_config.decode_context_parallel_size
        )
        engine_id = str(self._kv_transfer_config.engine_id)
        worker = role == KVConnectorRole.WORKER
        rank = vllm_config.parallel_config.rank if worker else "scheduler"
        self._client: CacheClient = start_client(
            settings,
            self._counters,
            groups,
            kind="worker" if worker else "scheduler",
            label=f"vllm {engine_id} {rank}",
            who=str(vllm_config.model_config.model),
        )
        self._worker: WorkerSide | None = None
        self._scheduler: SchedulerSide | None = None
        self._block_pool: Any = None
        if worker:
            self._worker = WorkerSide(
                self._client, groups, vllm_config, kv_cache_config, settings, self._counters
            )
            return
        self._scheduler = SchedulerSide(
            self._client,
            groups,
            engine_id,
            settings,
            self._counters,
            _requests_of(vllm_config),
            partial(is_checkpoint, kv_cache_config),
        )
        # Of steps, if states have to be left at block ends; 0: it does not matter.
        recurrent = any(group.kind is GroupKind.RECURRENT for group in groups)
        self._step_block_size = scheduling_block_size(kv_cache_config) if recurrent else 0
        # Read after this constructor; "fail" would end a request over a cache's failure.
        self._kv_transfer_config.kv_load_failure_policy = "recompute"
        logger.info("cache: kv_load_failure_policy is recompute, a failed load costs a prefill")
        try:
            check_identifiable(vllm_config)
        except IdentityUnknown as error:
            self._scheduler.stop(str(error))
        if vllm_config.weight_transfer_config is not None:
            # Weights come from a trainer, and no call tells a connector when.
            self._scheduler.start_private_namespace(blocks_are_free=True)

    # ---- properties of the connector -----------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a store that is lost is a later miss."""
        return False

    @property
    def counters(self) -> dict[str, int]:
        """What happened so far in this role."""
        return self._counters.snapshot()

    @_in_service(_nothing)
    def get_kv_connector_stats(self) -> PersistStats | None:
        """What happened in this role since the last step."""
        counts = self._counters.snapshot()
        counts["reconnects"] = max(0, self._client.connections - 1)
        levels = {"breaker_open": int(self._client.breaker_open)}
        return self._reporter.report(counts, self._counters.take_times(), levels)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PersistStats:
        """A report as it arrived in vLLM's logger; a copy, for others read the same dict."""
        return PersistStats({part: dict(values) for part, values in (data or {}).items()})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PersistPromMetrics:
        """The reports' metrics in vLLM's registry."""
        return PersistPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """The layout whose blocks are pages."""
        return REQUIRED_LAYOUT

    def shutdown(self) -> None:
        """Say bye to the server; bounded."""
        logger.info("cache: at the end: %s", self.counters)
        self._client.close()

    # ---- worker side ---------------------------------------------------------------

    @property
    def _worker_side(self) -> WorkerSide:
        if self._worker is None:
            raise RuntimeError("a worker's method was called in the scheduler's role")
        return self._worker

    @property
    def _scheduler_side(self) -> SchedulerSide:
        if self._scheduler is None:
            raise RuntimeError("the scheduler's method was called in a worker's role")
        return self._scheduler

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Learn where the pages are and register with the server.

        Raises:
            PersistError: the caches cannot be served or the server refuses them.
        """
        self._worker_side.register(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take the step's work and ask for the slots of its stores."""
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, StepMetadata):
            self._begin_step(connector_metadata)

    @_in_service(_nothing)
    def _begin_step(self, step: StepMetadata) -> None:
        self._worker_side.begin_step(step)

    @_in_service(_nothing)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load what the step asks for; comes after the forward pass."""
        self._worker_side.load()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads are asynchronous, no layer waits for one."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: pages are gathered at the end of the step."""

    @_in_service(_nothing)
    def wait_for_save(self) -> None:
        """Gather the chunks that this step completed."""
        self._worker_side.store()

    @_in_service(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads that are over since the last call, and which of them failed."""
        finished, failed = self._worker_side.take_results()
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    # ---- scheduler side ------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Learn which block id stands for none, and who can say which are held."""
        self._scheduler_side.null_block_id = gpu_block_pool.null_block.block_id
        self._block_pool = gpu_block_pool

    @_in_service(_nothing)
    def on_new_request(self, request: Any) -> None:
        """Hash the prompt and ask the server for it."""
        self._mend_block_size()
        self._scheduler_side.on_new_request(request)

    def _mend_block_size(self) -> None:
        """Have steps end where a block of states ends.

        vLLM 0.32 cuts prefills by ``cache_config.block_size``. Where the engine core is a process
        of its own on a CPU, that has gone back to 128 by the time it serves, although the
        groups have 640: no state is left at block ends then, and vLLM's own prefix cache takes
        the state at 896 for that at 1280.
        """
        found, wanted = self._vllm_config.cache_config.block_size, self._step_block_size
        if wanted and found != wanted:
            self._vllm_config.cache_config.block_size = wanted
            logger.warning("cache: vLLM cut steps by %d tokens, now by %d", found, wanted)

    @_in_service(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be loaded, always asynchronously; None while undecided."""
        found = self._scheduler_side.matched_tokens(request, num_computed_tokens)
        return found, bool(found)

    @_in_service(_nothing)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Load into these blocks, or give up the lease."""
        self._scheduler_side.after_alloc(request, blocks, num_external_tokens)

    @_in_service(dict)
    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Which tier a load's tokens came from."""
        memory, disk = self._scheduler_side.hit_sources(request.request_id, num_external_tokens)
        found = {CacheHitSource.HOST: memory, CacheHitSource.DISK: disk}
        return {source: tokens for source, tokens in found.items() if tokens}

    @_in_service(StepMetadata)
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The step's loads and stores for the workers."""
        return self._scheduler_side.build_step(scheduler_output)

    @_in_service(_nothing)
    def update_connector_output(self, connector_output: Any) -> None:
        """Loads that every rank has reported give their slots back."""
        self._scheduler_side.loads_finished(
            set(connector_output.finished_recving or ()),
            set(connector_output.failed_recving or ()),
        )

    @_in_service(lambda: (False, None))
    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The end of a request, for engines without the hybrid memory allocator."""
        self._scheduler_side.request_finished(request.request_id)
        return False, None

    @_in_service(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The end of a request, once, aborted ones too.

        False: no store outlives its step, and vLLM keeps the blocks of a load that still runs.
        """
        self._scheduler_side.request_finished(request.request_id)
        return False, None

    @_in_service(lambda: False)
    def reset_cache(self) -> bool | None:
        """Go on in a private namespace: what runs from here on may have other weights.

        False while requests hold blocks, as vLLM's own reset says then.
        """
        pool = self._block_pool
        # Held are all but the free ones and the null block, as vLLM counts them.
        free = pool is not None and pool.num_gpu_blocks - pool.get_num_free_blocks() == 1
        return self._scheduler_side.start_private_namespace(blocks_are_free=free)
