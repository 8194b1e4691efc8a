"""An emulated paged worker: pages, slots and a real client, without an engine or a model.

It does what a connector does: asks for slots, gathers the pages of each chunk into them,
commits; looks prompts up, scatters what was found into other pages. Every object is a window
of one random stream that belongs to this run alone, so that swapped, stale or left-over bytes
are noticed, and no other model's objects are ever found or touched.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from blake3 import blake3

from lmcache_persist import __version__
from lmcache_persist.connector import CacheClient, LookupResult, Registration
from lmcache_persist.errors import LeaseError, RequestTimeout
from lmcache_persist.geometry import Group, cacheable_mask, object_blocks
from lmcache_persist.hashing import ChunkHash

MODEL = "lmcache-persist-bench"
"""The model's name of every run, so that what runs leave behind can be found and pruned."""
_STEP_BYTES = 64
"""Between the windows of two objects."""


@dataclass(slots=True)
class Figures:
    """What was measured.

    Attributes:
        store_ms: per prompt, slots, copies and commits, without ``wait_s``.
        lookup_ms: per prompt, until it was decided.
        load_s: seconds of copying out of slots.
        restore_s: by tier (``memory``, ``disk``): seconds of lookup and copying together, and
            the bytes; a prompt that needed the disk for any chunk counts as disk.
        waits: times that a store waited for the disk, the pool being full of what it owes.
        wait_s: seconds of that.
        memory_chunks, disk_chunks: where what was found came from.
        missing_chunks: stored and not found.
        mismatches: objects with wrong bytes.
    """

    stored_bytes: int = 0
    store_ms: list[float] = field(default_factory=list)
    lookup_ms: list[float] = field(default_factory=list)
    loaded_bytes: int = 0
    load_s: float = 0.0
    restore_s: dict[str, tuple[float, int]] = field(default_factory=dict)
    waits: int = 0
    wait_s: float = 0.0
    memory_chunks: int = 0
    disk_chunks: int = 0
    missing_chunks: int = 0
    mismatches: int = 0


class Pages:
    """The KV memory of one group: pages of one chunk's objects, under shuffled block ids."""

    def __init__(self, blocks_per_object: int, object_bytes: int, chunks: int, seed: int) -> None:
        self.page_bytes = object_bytes // blocks_per_object
        self._memory = memoryview(bytearray(object_bytes * chunks))
        ids = list(range(blocks_per_object * chunks))
        random.Random(seed).shuffle(ids)  # noqa: S311 - scattered, not secret
        self._tables = [
            ids[at : at + blocks_per_object] for at in range(0, len(ids), blocks_per_object)
        ]

    def fill(self, chunk: int, content: memoryview) -> None:
        """Have a chunk's pages hold ``content``, as a forward pass would."""
        self._move(chunk, lambda page, part: self._put(page, content[part]))

    def gather(self, chunk: int, slot: memoryview) -> None:
        """Copy a chunk's pages into a slot."""

        def copy(page: slice, part: slice) -> None:
            slot[part] = self._memory[page]

        self._move(chunk, copy)

    def scatter(self, chunk: int, slot: memoryview) -> None:
        """Copy a slot into a chunk's pages."""
        self._move(chunk, lambda page, part: self._put(page, slot[part]))

    def holds(self, chunk: int, content: memoryview) -> bool:
        """Whether a chunk's pages hold exactly ``content``."""
        found = bytearray(len(content))
        self.gather(chunk, memoryview(found))
        return found == content

    def wipe(self) -> None:
        """Forget everything, so that only a load can bring it back."""
        self._memory[:] = bytes(len(self._memory))

    def _put(self, page: slice, content: memoryview) -> None:
        self._memory[page] = content

    def _move(self, chunk: int, move: Callable[[slice, slice], None]) -> None:
        size = self.page_bytes
        for position, block in enumerate(self._tables[chunk]):
            move(
                slice(block * size, (block + 1) * size),
                slice(position * size, (position + 1) * size),
            )


class BenchWorker:
    """One run.

    Args:
        client: connected, of kind ``client``.
        groups: bound already.
        chunk_size: the bound one.
        object_bytes: of one chunk of one group, rounded up to whole pages.
        chunks: how many.
        prompt_chunks: chunks of a prompt; the last one may be shorter.
        timeout_s: for every answer.
    """

    def __init__(
        self,
        client: CacheClient,
        groups: Sequence[Group],
        chunk_size: int,
        *,
        object_bytes: int,
        chunks: int,
        prompt_chunks: int,
        timeout_s: float,
    ) -> None:
        self.run = secrets.token_hex(16)
        self._client, self._groups, self._chunk_size = client, tuple(groups), chunk_size
        self._prompt_chunks, self._timeout_s = prompt_chunks, timeout_s
        self._prompts = [
            min(prompt_chunks, chunks - first) for first in range(0, chunks, prompt_chunks)
        ]
        """Chunks of each prompt."""
        self._members = [index for index, group in enumerate(groups) if group.cacheable]
        self._mask = cacheable_mask(self._groups)
        self._blocks = {one: object_blocks(groups[one], chunk_size) for one in self._members}
        self.object_bytes = {
            one: -(-object_bytes // blocks) * blocks for one, blocks in self._blocks.items()
        }
        self.chunk_bytes = sum(self.object_bytes.values())
        self.total_bytes = chunks * self.chunk_bytes
        self.figures = Figures()
        self.fingerprint = ""
        self._stored = [0] * len(self._prompts)
        objects = chunks * len(self._members)
        longest = max(self.object_bytes.values())
        self._stream = memoryview(
            blake3(self.run.encode()).digest(length=longest + objects * _STEP_BYTES)
        )

    # -- what it is ----------------------------------------------------------------------

    def register(self) -> None:
        """Join as an engine of its own, whose objects nobody else shares.

        Raises:
            RegistrationError: the server refuses, a chunk too large for its pool for instance.
        """
        registered = self._client.register(
            Registration(
                engine=f"{MODEL}-{self.run}",
                rank=0,
                world_size=1,
                identity={
                    "connector": MODEL,
                    "connector_format": 1,
                    "model": MODEL,
                    "revision": __version__,
                    "weights": self.run,
                    "config": {"run": self.run},
                    "kv_dtype": "uint8",
                    "quantization": None,
                    "max_model_len": None,
                    "parallel": {"tp": 1, "pp": 1, "dcp": 1},
                },
                layout={"pages": self.object_bytes[self._members[0]]},
                groups=self._groups,
                object_bytes=[
                    self.object_bytes.get(index, 0) for index in range(len(self._groups))
                ],
            ),
            timeout_s=self._timeout_s,
        )
        self.fingerprint = registered.fingerprint

    def _hash(self, prompt: int, chunk: int) -> ChunkHash:
        return ChunkHash(blake3(f"{self.run} {prompt} {chunk}".encode()).digest())

    def _content(self, prompt: int, chunk: int, group: int) -> memoryview:
        number = prompt * self._prompt_chunks + chunk
        at = (number * len(self._members) + self._members.index(group)) * _STEP_BYTES
        return self._stream[at : at + self.object_bytes[group]]

    def _pages(self, seed: int) -> dict[int, Pages]:
        return {
            group: Pages(self._blocks[group], nbytes, self._prompt_chunks, seed + group)
            for group, nbytes in self.object_bytes.items()
        }

    # -- store ---------------------------------------------------------------------------

    def store(self) -> None:
        """Store every prompt, waiting for the disk where the pool is full."""
        pages = self._pages(seed=1)
        for prompt, chunks in enumerate(self._prompts):
            for group, memory in pages.items():
                for chunk in range(chunks):
                    memory.fill(chunk, self._content(prompt, chunk, group))
            begin_s, waited_s = time.monotonic(), self.figures.wait_s
            self._store(prompt, pages, begin_s + self._timeout_s)
            waited_s = self.figures.wait_s - waited_s
            self.figures.store_ms.append(1000 * (time.monotonic() - begin_s - waited_s))
            self.figures.stored_bytes += self._stored[prompt] * self.chunk_bytes

    def _store(self, prompt: int, pages: dict[int, Pages], until_s: float) -> None:
        left = list(range(self._prompts[prompt]))
        while left:
            done = self._store_some(prompt, left, pages)
            self._stored[prompt] += len(done)
            left = [chunk for chunk in left if chunk not in done]
            if left and not done:
                self.figures.waits += 1
                if time.monotonic() > until_s:
                    raise RequestTimeout(
                        f"the server had no slot for {len(left)} chunks within"
                        f" {self._timeout_s:g} s",
                        hint="its disk may be too slow, or its pool in use; see top",
                    )
                begin_s = time.monotonic()
                self._client.flush(self._timeout_s)
                self.figures.wait_s += time.monotonic() - begin_s

    def _store_some(self, prompt: int, chunks: list[int], pages: dict[int, Pages]) -> set[int]:
        """Store those of ``chunks`` that get slots; which they were."""
        reply = self._client.reserve(
            engine=f"{MODEL}-{self.run}",
            rank=0,
            hashes=[self._hash(prompt, chunk) for chunk in chunks],
            masks=[self._mask] * len(chunks),
        ).result(self._timeout_s)
        pool = self._client.pool(reply.boot)
        if pool is None:
            raise LeaseError(f"pool of boot {reply.boot} is not mapped")
        with pool.pin():
            for grant in reply.grants:
                for group, offset in zip(self._members, grant.offsets, strict=True):
                    with pool.view(offset, self.object_bytes[group]) as slot:
                        pages[group].gather(chunks[grant.index], slot)
        numbers = [grant.reservation for grant in reply.grants]
        committed = self._client.commit(numbers).result(self._timeout_s) if numbers else None
        refused = set(committed.refused) if committed else set()
        return {
            chunks[grant.index] for grant in reply.grants if grant.reservation not in refused
        } | {chunks[index] for index in reply.stored}

    # -- load ----------------------------------------------------------------------------

    def load(self) -> None:
        """Look every prompt up, load what is found, compare every byte of it."""
        pages = self._pages(seed=2)
        for prompt, chunks in enumerate(self._prompts):
            for memory in pages.values():
                memory.wipe()
            begin_s = time.monotonic()
            handle = self._client.lookup(
                engine=f"{MODEL}-{self.run}",
                hashes=[self._hash(prompt, chunk) for chunk in range(chunks)],
                num_tokens=chunks * self._chunk_size + 1,
            )
            loaded = 0
            try:
                result = handle.wait(self._timeout_s)
                if result is None:
                    raise RequestTimeout(f"a lookup was not decided within {self._timeout_s:g} s")
                if result.error is not None:
                    raise result.error
                self.figures.lookup_ms.append(1000 * (time.monotonic() - begin_s))
                self._load(result, pages, begin_s)
                loaded = result.tokens
            finally:
                handle.release(loaded_tokens=loaded)
            self._compare(prompt, result.tokens // self._chunk_size, pages)

    def _load(self, result: LookupResult, pages: dict[int, Pages], begin_s: float) -> None:
        if not result.tokens:
            return
        pool = self._client.pool(result.boot_id)
        if pool is None:
            raise LeaseError(f"pool of boot {result.boot_id} is not mapped")
        copy_s, nbytes = time.monotonic(), 0
        with pool.pin():
            for run in result.runs:
                for step, offset in enumerate(run.offsets):
                    with pool.view(offset, run.object_bytes) as slot:
                        pages[run.group].scatter(run.first_chunk + step, slot)
                    nbytes += run.object_bytes
        end_s, figures = time.monotonic(), self.figures
        figures.load_s += end_s - copy_s
        figures.loaded_bytes += nbytes
        figures.memory_chunks += result.memory_chunks
        figures.disk_chunks += result.disk_chunks
        tier = "disk" if result.disk_chunks else "memory"
        seconds, total = figures.restore_s.get(tier, (0.0, 0))
        figures.restore_s[tier] = (seconds + end_s - begin_s, total + nbytes)

    def _compare(self, prompt: int, chunks: int, pages: dict[int, Pages]) -> None:
        self.figures.missing_chunks += self._stored[prompt] - chunks
        for group, memory in pages.items():
            for chunk in range(chunks):
                if not memory.holds(chunk, self._content(prompt, chunk, group)):
                    self.figures.mismatches += 1
