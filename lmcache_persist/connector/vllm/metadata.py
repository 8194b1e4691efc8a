"""What the scheduler side tells the workers in a step. Plain values, picklable."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


@dataclass(frozen=True, slots=True)
class SlotsOfRun:
    """Slots of consecutive chunks of one group on one rank: offsets into the pool.

    Attributes:
        rank: whose.
        group: index of the group.
        first_chunk: the chunk that ``offsets[0]`` holds.
        object_bytes: bytes in each slot.
        offsets: bytes from the start of the pool.
    """

    rank: int
    group: int
    first_chunk: int
    object_bytes: int
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadJob:
    """One request's load: leased slots, and the blocks that they go into.

    Attributes:
        request_id: the engine's.
        boot_id: whose pool the offsets are of.
        chunk_size: tokens, that the offsets are cut by.
        runs: slots of every rank.
        first_blocks: per group the position of the first block to fill; those below it
            hold what the engine found itself and are never written.
        block_ids: per group the ids from position 0 to the end of the load, exclusive.
        null_block_id: the id that stands for no block: nothing is written to it.
        broken: why nothing can be loaded, "" if it can. The request waits all the same,
            so the workers report it as failed.
    """

    request_id: str
    boot_id: str
    chunk_size: int
    runs: tuple[SlotsOfRun, ...]
    first_blocks: tuple[int, ...]
    block_ids: tuple[tuple[int, ...], ...]
    null_block_id: int
    broken: str = ""


@dataclass(frozen=True, slots=True)
class StoreJob:
    """One chunk whose last token's KV is computed in this step.

    Attributes:
        chunk_hash: 32 bytes.
        mask: bit i set: group i is stored.
        block_ids: per group the ids of the blocks that its object holds
            (:func:`~lmcache_persist.geometry.object_blocks`), empty where the bit is not set.
    """

    chunk_hash: bytes
    mask: int
    block_ids: tuple[tuple[int, ...], ...]


@dataclass
class StepMetadata(KVConnectorMetadata):
    """All loads and stores of a step.

    Attributes:
        loads: to start after the step's forward pass.
        stores: to gather at the end of the step.
        binding_id: the binding that ``stores`` were cut and hashed under.
    """

    loads: list[LoadJob] = field(default_factory=list)
    stores: list[StoreJob] = field(default_factory=list)
    binding_id: str = ""
