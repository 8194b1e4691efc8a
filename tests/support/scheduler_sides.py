"""A scheduler side on a fake client, driven call by call as vLLM's scheduler does."""

from __future__ import annotations

from typing import Any

from lmcache_persist.connector import LookupResult
from lmcache_persist.connector.vllm.counters import Counters
from lmcache_persist.connector.vllm.requests import Requests
from lmcache_persist.connector.vllm.scheduler_side import SchedulerSide
from lmcache_persist.connector.vllm.settings import ConnectorSettings
from lmcache_persist.geometry import groups_from_sizes
from lmcache_persist.hashing import ChunkHasher
from lmcache_persist.protocol import SlotRun
from support.vllm_fakes import FakeClient, binding, blocks, step

CHUNK = 8
TABLE = list(range(1, 40))


class Side:
    """A scheduler side with one group of 4-token blocks in chunks of 8."""

    def __init__(
        self, sizes: tuple[int, ...] = (4,), requests: Requests | None = None, **settings: Any
    ) -> None:
        self.client = FakeClient(binding(CHUNK))
        self.counters = Counters()
        self.side = SchedulerSide(
            self.client,  # type: ignore[arg-type]
            groups_from_sizes(sizes),
            "engine",
            ConnectorSettings("ipc://x", **settings),
            self.counters,
            requests,
        )

    def decide(self, tokens: int, **fields: Any) -> None:
        """Decide the last lookup."""
        runs = (SlotRun(0, 0, 0, 64, [64 * at for at in range(tokens // CHUNK)]),)
        self.client.handles[-1].result = LookupResult(tokens, "boot", runs, **fields)

    def admit(self, one: Any, local: int = 0) -> int:
        """Ask and allocate, as the scheduler does in one go; returns what is loaded."""
        found = self.side.matched_tokens(one, local)
        assert found is not None
        self.side.after_alloc(one, blocks(TABLE), found)
        return found

    def stores(self, one: Any, num_scheduled: int, **step_fields: Any) -> list[bytes]:
        """Hashes that a step with this request stores; the request moves on."""
        made = self.side.build_step(
            step({one.request_id: num_scheduled}, {one.request_id: (TABLE,)}, **step_fields)
        )
        one.num_computed_tokens += num_scheduled
        return [job.chunk_hash for job in made.stores]


def hashes(one: Any, extra: bytes = b"", chunk: int = CHUNK) -> list[bytes]:
    """The chunks of all tokens of a request."""
    found: list[Any] = []
    ChunkHasher(chunk).extend(found, one.all_token_ids, extra)
    return found
