"""Which blocks of a step are stored, chunk by chunk and group by group. Pure.

Full and sliding groups are stored when a chunk is complete: later the engine drops what
lies behind its window. A recurrent group is stored where the engine left a state at a
chunk's end, which it does at few of them, and in a step of its own choosing; and where its
own prefix cache had one, which the server may have lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from lmcache_persist.connector.vllm.metadata import StoreJob
from lmcache_persist.geometry import Group, GroupKind, object_blocks

IsCheckpoint = Callable[[int, range, int], bool]
"""Of a group, the positions that a step computes, and a boundary among them."""

States = Mapping[int, int]
"""Block ids of recurrent groups' states, by group."""


def boundary_states(
    groups: Sequence[Group],
    tables: Sequence[Sequence[int]],
    offers: Iterable[tuple[int, int, int]],
    steps: range,
    chunk_size: int,
    null_block: int,
    is_checkpoint: IsCheckpoint,
    *,
    admitted: bool = False,
) -> dict[int, dict[int, int]]:
    """Where a step leaves a recurrent state at the end of a chunk.

    Args:
        groups: the geometry.
        tables: per group the request's block ids.
        offers: the engine's own (group, block id, tokens), to be read at the end of this step.
        steps: positions that the step computes; its stop is where the step ends.
        chunk_size: tokens.
        null_block: id that stands for no block.
        is_checkpoint: whether the engine exports a state from inside the step.
        admitted: whether this is the request's first step. Where it begins there is the
            state that the engine found in its own prefix cache: the step goes on from a copy.

    Returns:
        Per chunk, by its number, the block that holds each group's state at its end.
        Blocks of the request's earlier steps are never named: the engine may have given
        them away, or the state in them may have moved on. Nor is an offer for a boundary
        that the step passes without a checkpoint: the block then holds the state of where
        it began.
    """
    found: dict[int, dict[int, int]] = {}
    recurrent = {index for index, one in enumerate(groups) if one.kind is GroupKind.RECURRENT}
    for group, block, tokens in offers:
        if tokens % chunk_size or group not in recurrent or block == null_block:
            continue
        if tokens == steps.stop or is_checkpoint(group, steps, tokens):
            found.setdefault(tokens // chunk_size - 1, {})[group] = block
    for computed in {steps.stop, steps.start} if admitted else {steps.stop}:
        if not computed or computed % chunk_size:
            continue
        for group in recurrent:
            last = computed // groups[group].tokens_per_block - 1
            if last < len(tables[group]) and tables[group][last] != null_block:
                chunk = found.setdefault(computed // chunk_size - 1, {})
                chunk.setdefault(group, tables[group][last])
    return found


def plan_stores(
    groups: Sequence[Group],
    tables: Sequence[Sequence[int]],
    hashes: Sequence[bytes],
    chunks: range,
    states: Mapping[int, States],
    chunk_size: int,
    null_block: int,
) -> list[StoreJob]:
    """The stores of a step: ``chunks`` are complete now, ``states`` may be of others.

    A group one of whose blocks is null is left out of its chunk.
    """
    jobs = []
    for chunk in sorted({*chunks, *states}):
        mask, block_ids = 0, []
        for index, (group, table) in enumerate(zip(groups, tables, strict=True)):
            ids: tuple[int, ...] = ()
            if group.kind is GroupKind.RECURRENT:
                state = states.get(chunk, {}).get(index)
                ids = () if state is None else (state,)
            elif group.cacheable and chunk in chunks:
                ids = _blocks_of(group, table, chunk, chunk_size, null_block)
            if ids:
                mask |= 1 << index
            block_ids.append(ids)
        if mask:
            jobs.append(StoreJob(bytes(hashes[chunk]), mask, tuple(block_ids)))
    return jobs


def _blocks_of(
    group: Group, table: Sequence[int], chunk: int, chunk_size: int, null_block: int
) -> tuple[int, ...]:
    """The blocks of a chunk's object, or none if one of them is not there."""
    end = (chunk + 1) * (chunk_size // group.tokens_per_block)
    ids = tuple(table[end - object_blocks(group, chunk_size) : end])
    return () if len(table) < end or null_block in ids else ids
