"""The disk tier on LMDB against the one in memory, under any sequence of operations."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lmcache_persist.hashing import EXTENT_BYTES
from lmcache_persist.store import offline
from lmcache_persist.store.base import ChunkKey, ChunkWrite, DiskTier, Place
from lmcache_persist.store.lmdb_disk import LmdbDisk
from lmcache_persist.store.memory_disk import MemoryDisk
from store_support import MIB, UUID, binding, content, key, read

CAPACITY = 16 * MIB
NUM_CHUNKS = 24
MAX_BATCH_BYTES = 7 * MIB
"""Several transactions, but less than the tier: of a larger batch some evict others."""

PLACES = [Place(0, 0), Place(0, 3), Place(1, 0)]
SIZES = [1, 2000, 5000, 70_000, EXTENT_BYTES, EXTENT_BYTES + 1, 2 * MIB, 4 * MIB, 20 * MIB]

numbers = st.integers(0, NUM_CHUNKS - 1)
prompts = st.lists(numbers, min_size=1, max_size=6, unique=True)


class StoreMachine(RuleBasedStateMachine):
    """The oracle never evicts by itself: it drops what the real tier reports as evicted."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="lmcache-persist-machine-"))
        self.directory = self.root / "store"
        self.real = LmdbDisk.open(self.directory, CAPACITY, uuid=UUID)
        self.oracle = MemoryDisk(1 << 40, uuid=UUID)

    @initialize()
    def bind(self) -> None:
        """Stamp both."""
        self.both(lambda tier: tier.write_stamp(binding()))

    def both(self, act: object) -> None:
        """Do the same to both tiers."""
        for tier in (self.real, self.oracle):
            act(tier)  # type: ignore[operator]

    def by_age(self) -> list[ChunkKey]:
        """The oracle's chunks, least recently used first."""
        return list(self.oracle._records)

    def gone(self, evicted: list[ChunkKey], spared: set[ChunkKey]) -> None:
        """Evicted ones must be the least recently used, those being written apart."""
        expected = [name for name in self.by_age() if name not in spared][: len(evicted)]
        assert evicted == expected
        self.oracle.drop(dict.fromkeys(evicted))

    @rule(
        prompt=prompts,
        size=st.sampled_from(SIZES),
        places=st.sets(st.sampled_from(PLACES), min_size=1),
    )
    def write(self, prompt: list[int], size: int, places: set[Place]) -> None:
        """Write a batch; sizes of a chunk are its own, so that what exists stays right."""
        batch: list[ChunkWrite] = []
        room = MAX_BATCH_BYTES
        for number in prompt:
            name = key(number)
            sizes = {place: SIZES[(number + place.group) % (len(SIZES) - 3)] for place in places}
            if number == prompt[0]:
                sizes = dict.fromkeys(sorted(places)[:1], size)
            held = self.oracle.find([name])[0]
            room -= sum(sizes.values()) + (held.objects.table.nbytes if held else 0)
            if room > 0 or not batch:
                batch.append(ChunkWrite(name, {p: content(name, p, n) for p, n in sizes.items()}))
        self.oracle.apply_touches()
        report = self.real.write(batch)
        written = set(report.written)
        assert not written & set(report.evicted)
        assert written | {one.key for one in report.dropped} == {write.key for write in batch}
        self.gone(report.evicted, {write.key for write in batch})
        oracle_report = self.oracle.write([write for write in batch if write.key in written])
        assert set(oracle_report.written) == written

    @rule(prompt=prompts)
    def touch(self, prompt: list[int]) -> None:
        """Note a use; it rides in the next write."""
        self.both(lambda tier: tier.touch([key(number) for number in prompt]))

    @rule()
    def apply_touches(self) -> None:
        """Apply what is pending."""
        self.both(lambda tier: tier.apply_touches())

    @rule(prompt=prompts)
    def drop(self, prompt: list[int]) -> None:
        """Both had the same chunks."""
        names = dict.fromkeys(key(number) for number in prompt)
        assert self.real.drop(names) == self.oracle.drop(names)

    @rule()
    def evict(self) -> None:
        """Background eviction, one step."""
        self.gone(self.real.evict(), set())

    @precondition(lambda self: self.real is not None)
    @rule(relaxed=st.booleans())
    def reopen(self, relaxed: bool) -> None:
        """Close, check the files, open again: nothing changes."""
        self.oracle.apply_touches()
        self.real.close()
        assert list(offline.check(self.directory)) == []
        self.real = LmdbDisk.open(self.directory, CAPACITY, relaxed=relaxed)

    @rule(number=numbers)
    def read(self, number: int) -> None:
        """Every object of a chunk reads back."""
        record = self.real.find([key(number)])[0]
        if record is not None:
            for place in record.objects:
                expected = content(record.key, place, record.objects.nbytes(place))
                assert read(self.real, record, place) == expected

    @invariant()
    def same_chunks(self) -> None:
        """Same chunks, objects, digests, hits, order; usage exact and within the capacity."""
        names = [key(number) for number in range(NUM_CHUNKS)]
        views = [self.view(tier, names) for tier in (self.real, self.oracle)]
        assert views[0] == views[1]
        usage, expected = self.real.usage(), self.oracle.usage()
        assert usage.used_bytes <= CAPACITY
        for field in ("chunks", "objects", "bytes", "stale_objects", "by_fingerprint"):
            assert getattr(usage, field) == getattr(expected, field)
        assert self.real.corrupt_found == 0

    @staticmethod
    def view(tier: DiskTier, names: list[ChunkKey]) -> list[object]:
        """What must be equal: chunks in order of use."""
        records = [record for record in tier.find(names) if record is not None]
        records.sort(key=lambda record: record.order)
        return [(one.key, one.binding_id, one.objects, one.hits) for one in records]

    def teardown(self) -> None:
        """Close and check."""
        self.real.close()
        assert list(offline.check(self.directory)) == []
        shutil.rmtree(self.root)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=20,
    stateful_step_count=25,
    deadline=None,
    # Shrinking takes minutes; the blob of a failure is printed.
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
