"""An engine without a model: stores and loads byte patterns through a real client.

Every object's bytes code its chunk, group and rank, so that anything swapped, stale or
left over is noticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from blake3 import blake3

from lmcache_persist.connector import CacheClient, ClientOptions, Registration
from lmcache_persist.connector.pool_map import PoolMap
from lmcache_persist.connector.results import LookupResult
from lmcache_persist.geometry import Group, cacheable_mask, groups_from_sizes
from lmcache_persist.hashing import ChunkHash, ChunkHasher
from lmcache_persist.protocol import MAX_KEYS_PER_RESERVE

TIMEOUT_S = 20.0


def pattern(chunk_hash: bytes, group: int, rank: int, nbytes: int) -> bytes:
    """The bytes of one object, no two alike: those of its layers and positions neither."""
    return blake3(chunk_hash + bytes([group, rank])).digest(length=nbytes)


def identity(**changes: Any) -> dict[str, Any]:
    """An identity that is complete; ``changes`` make it another model's."""
    return {
        "connector": "emulated",
        "connector_format": 1,
        "model": "emulated/model",
        "revision": None,
        "weights": "w0",
        "config": {"hidden_size": 8},
        "kv_dtype": "bfloat16",
        "quantization": None,
        "max_model_len": None,
        "parallel": {"tp": 1, "pp": 1, "dcp": 1},
        **changes,
    }


@dataclass
class EmulatedEngine:
    """All ranks of one engine in one client.

    Attributes:
        url: the server's.
        sizes: tokens_per_block of each group, 0 for scratch; or whole groups.
        object_bytes: per cacheable group and rank.
        stage_bytes: instead, per rank a list per group: pipeline stages of other layers.
        world_size: ranks.
        changes: to the identity.
    """

    url: str
    sizes: Sequence[int | Group]
    object_bytes: int = 64 * 1024
    world_size: int = 1
    name: str = "engine-0"
    changes: dict[str, Any] = field(default_factory=dict)
    options: ClientOptions = field(default_factory=ClientOptions)
    stage_bytes: Sequence[Sequence[int]] | None = None

    def __post_init__(self) -> None:
        self.groups = tuple(
            size if isinstance(size, Group) else groups_from_sizes([size])[0] for size in self.sizes
        )
        self.mask = cacheable_mask(self.groups)
        self.client = CacheClient(self.url, kind="client", label=self.name, options=self.options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.client.close()

    def join(self, base: int | None = None) -> Self:
        """Connect, bind, register every rank."""
        self.client.wait_connected(TIMEOUT_S)
        self.client.bind(self.groups, base=base, who=self.name, timeout_s=TIMEOUT_S)
        for rank in range(self.world_size):
            self.register(rank)
        return self

    def register(self, rank: int) -> str:
        """Register one rank; the fingerprint if it was the last."""
        reply = self.client.register(
            Registration(
                engine=self.name,
                rank=rank,
                world_size=self.world_size,
                identity=identity(**self.changes),
                layout={"rank": rank, "bytes": self.object_bytes},
                groups=self.groups,
                object_bytes=[
                    self._bytes_of(rank, index) if group.cacheable else 0
                    for index, group in enumerate(self.groups)
                ],
            ),
            timeout_s=TIMEOUT_S,
        )
        return reply.fingerprint

    def _bytes_of(self, rank: int, group: int) -> int:
        return self.object_bytes if self.stage_bytes is None else self.stage_bytes[rank][group]

    @property
    def chunk_size(self) -> int:
        """The bound one."""
        binding = self.client.binding
        if binding is None:
            raise RuntimeError("not bound")
        return binding.chunk_size

    def hashes(self, tokens: Sequence[int]) -> list[ChunkHash]:
        """The chunk hashes of a prompt."""
        found: list[ChunkHash] = []
        ChunkHasher(self.chunk_size).extend(found, tokens)
        return found

    def store(
        self,
        hashes: Sequence[bytes],
        *,
        ranks: Sequence[int] | None = None,
        masks: Sequence[int] | None = None,
    ) -> int:
        """Reserve, write, commit; how many chunks got slots, of the last rank.

        Args:
            hashes: of the chunks.
            ranks: that store; all by default.
            masks: per chunk the groups that are stored; all by default, none for 0.
        """
        wanted = [
            (one, mask)
            for one, mask in zip(hashes, masks or [self.mask] * len(hashes), strict=True)
            if mask
        ]
        granted = 0
        for rank in ranks if ranks is not None else range(self.world_size):
            granted = sum(
                self._store(rank, wanted[at : at + MAX_KEYS_PER_RESERVE])
                for at in range(0, len(wanted), MAX_KEYS_PER_RESERVE)
            )
        return granted

    def _store(self, rank: int, wanted: Sequence[tuple[bytes, int]]) -> int:
        reply = self.client.reserve(
            engine=self.name,
            rank=rank,
            hashes=[one for one, _ in wanted],
            masks=[mask for _, mask in wanted],
        ).result(TIMEOUT_S)
        pool = self.client.pool(reply.boot)
        if pool is None:
            raise RuntimeError("no pool is attached")
        for grant in reply.grants:
            chunk_hash, mask = wanted[grant.index]
            members = [index for index in range(len(self.groups)) if mask >> index & 1]
            for group, offset in zip(members, grant.offsets, strict=True):
                view = pool.view(offset, self._bytes_of(rank, group))
                view[:] = pattern(chunk_hash, group, rank, len(view))
        numbers = [grant.reservation for grant in reply.grants]
        if numbers:
            committed = self.client.commit(numbers).result(TIMEOUT_S)
            if committed.refused:
                raise RuntimeError(f"commit refused {committed.refused}")
        return len(numbers) + len(reply.stored)

    def lookup(self, hashes: Sequence[bytes], num_tokens: int) -> LookupResult:
        """Look up, check every byte that is promised, release; what the lookup said."""
        handle = self.client.lookup(engine=self.name, hashes=hashes, num_tokens=num_tokens)
        try:
            result = handle.wait(TIMEOUT_S)
            if result is None:
                raise RuntimeError("lookup was not decided")
            if result.tokens:
                self.check(hashes, result)
            return result
        finally:
            handle.release()

    def check(self, hashes: Sequence[bytes], result: LookupResult) -> None:
        """Every promised object holds the bytes of its place. ``AssertionError`` if not."""
        pool = self.client.pool(result.boot_id)
        if pool is None:
            raise RuntimeError("no pool is attached")
        self.check_in(pool, hashes, result)

    def check_in(self, pool: PoolMap, hashes: Sequence[bytes], result: LookupResult) -> None:
        """As :meth:`check`, in a pool that was mapped before."""
        for run in result.runs:
            for step, offset in enumerate(run.offsets):
                wanted = pattern(
                    hashes[run.first_chunk + step], run.group, run.rank, run.object_bytes
                )
                found = bytes(pool.view(offset, run.object_bytes))
                if found != wanted:
                    raise AssertionError(
                        f"wrong bytes: chunk {run.first_chunk + step}, group {run.group},"
                        f" rank {run.rank}"
                    )
