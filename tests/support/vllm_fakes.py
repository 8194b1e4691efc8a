"""A client, requests and scheduler outputs that need neither server nor engine."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from lmcache_persist.binding import Binding
from lmcache_persist.connector import LookupResult
from lmcache_persist.errors import PersistError
from lmcache_persist.protocol import Committed, Reserved


def binding(chunk_size: int, bound_at: str = "t0") -> Binding:
    """A binding of that size; another time, another id."""
    return Binding.make(
        chunk_size=chunk_size,
        required_alignment=chunk_size,
        base_chunk_size=1,
        mode="auto",
        bound_at=bound_at,
        winner="w",
        backend="lmdb",
        store_uuid="0" * 32,
        store_format_version=1,
    )


class FakeHandle:
    """A lookup that the test decides."""

    def __init__(self, hashes: list[bytes], num_tokens: int) -> None:
        self.hashes, self.num_tokens = hashes, num_tokens
        self.result: LookupResult | None = None
        self.releases = 0
        self.loaded_tokens = 0
        self.waits: list[float] = []
        self.again = False

    def poll(self) -> LookupResult | None:
        return self.result

    def wait(self, timeout_s: float) -> LookupResult | None:
        self.waits.append(timeout_s)
        return self.result

    def release(self, *, loaded_tokens: int = 0) -> None:
        self.releases += 1
        self.loaded_tokens = loaded_tokens


class FakeClient:
    """Records what it is asked for."""

    def __init__(self, bound: Binding | None) -> None:
        self.binding = bound
        self.cold: PersistError | None = None
        self.boot_id = "boot"
        self.handles: list[FakeHandle] = []
        self.reserves: list[dict[str, Any]] = []
        self.reserved: Future[Reserved] = Future()
        self.committed: list[list[int]] = []
        self.given_back: list[list[int]] = []
        self.registrations: list[Any] = []
        self.registered = threading.Event()
        self.listeners: list[Any] = []
        self.pools: dict[str, Any] = {}

    def lookup(
        self, *, engine: str, hashes: list[bytes], num_tokens: int, again: bool = False
    ) -> FakeHandle:
        self.handles.append(FakeHandle(hashes, num_tokens))
        self.handles[-1].again = again
        return self.handles[-1]

    def reserve(self, **fields: Any) -> Future[Reserved]:
        self.reserves.append(fields)
        return self.reserved

    def commit(self, reservations: list[int]) -> Future[Committed]:
        self.committed.append(list(reservations))
        return Future()

    def give_back(self, reservations: list[int]) -> None:
        self.given_back.append(list(reservations))

    def register(self, registration: Any, timeout_s: float) -> None:
        self.registrations.append(registration)
        self.registered.set()

    def on_change(self, listener: Any) -> None:
        self.listeners.append(listener)

    def pool(self, boot_id: str) -> Any:
        return self.pools.get(boot_id)


def request(name: str = "r", num_tokens: int = 30, **changes: Any) -> SimpleNamespace:
    """A request as vLLM's scheduler has it at arrival."""
    tokens = list(range(100, 100 + num_tokens))
    fields = {
        "request_id": name,
        "all_token_ids": tokens,
        "prompt_token_ids": tokens,
        "num_tokens": num_tokens,
        "num_prompt_tokens": num_tokens,
        "num_computed_tokens": 0,
        "num_preemptions": 0,
        "lora_request": None,
        "mm_features": [],
        "prompt_embeds": None,
        "prompt_is_token_ids": None,
        "resumable": False,
        "cache_salt": None,
        "skip_reading_prefix_cache": False,
    }
    return SimpleNamespace(**{**fields, **changes})


def blocks(*ids: list[int]) -> SimpleNamespace:
    """VLLM's blocks of a request, per group."""
    return SimpleNamespace(get_block_ids=lambda: tuple(ids))


def step(
    scheduled: dict[str, int],
    tables: dict[str, tuple[list[int], ...]] | None = None,
    drafts: dict[str, list[int]] | None = None,
    states: dict[str, list[tuple[int, int, int]]] | None = None,
    admitted: tuple[str, ...] = (),
) -> SimpleNamespace:
    """A scheduler output as build_connector_meta gets it."""
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in admitted],
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_spec_decode_tokens=drafts or {},
        kv_connector_block_state=SimpleNamespace(
            get_block_ids=(tables or {}).get, boundary_state_offloads=states or {}
        ),
    )
