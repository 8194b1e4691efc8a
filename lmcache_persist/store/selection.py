"""Which stored chunks are meant: what ``prune`` takes away. Pure.

Selectors combine: a chunk has to be meant by each that is given. Chunks are judged in the
order of use, the least recently used first, so that "down to a size" takes those away that
an eviction would, and "older than" can tell more than the record does: a record says when
its chunk was first stored, not when it was last used, but whatever stands behind a chunk
that was stored at some time was used at that time or later.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from lmcache_persist.identity import Fingerprint
from lmcache_persist.store.base import ChunkKey, ChunkRecord, FingerprintUsage, fingerprint_of


@dataclass(frozen=True, slots=True)
class Selection:
    """What is meant.

    Attributes:
        fingerprints: of these models, None for all.
        stale: only what was stored under another binding.
        stored_before: seconds since 1970; neither stored nor, as far as the order of use
            tells, used at that time or later.
        down_to_bytes: only until the objects of these models (the stale ones, with
            ``stale``) add up to no more than this.
    """

    fingerprints: frozenset[Fingerprint] | None = None
    stale: bool = False
    stored_before: int | None = None
    down_to_bytes: int | None = None

    @property
    def is_everything(self) -> bool:
        """Whether nothing limits it."""
        return self == Selection()

    @property
    def whole_models(self) -> frozenset[Fingerprint]:
        """The models of which it means all that there is; empty if something limits it."""
        if self.fingerprints and self == Selection(fingerprints=self.fingerprints):
            return self.fingerprints
        return frozenset()

    def in_scope(self, fingerprint: Fingerprint, *, stale: bool) -> bool:
        """Whether a model's chunks count in what ``down_to_bytes`` is about."""
        if self.stale and not stale:
            return False
        return self.fingerprints is None or fingerprint in self.fingerprints


@dataclass(slots=True)
class Picked:
    """Chunks that were meant, and where to go on.

    Attributes:
        keys: of the chunks.
        amounts: what they add up to, by model and whether they are stale.
        cursor: where to go on; None once there is nothing more.
        pool_chunks: at the end of a live server's preview of whole models: what its pool
            holds of them, which may not be on disk.
    """

    keys: list[ChunkKey] = field(default_factory=list)
    amounts: dict[tuple[Fingerprint, bool], FingerprintUsage] = field(default_factory=dict)
    cursor: bytes | None = None
    pool_chunks: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of all objects."""
        return sum(amount.bytes for amount in self.amounts.values())

    def add(self, record: ChunkRecord, *, stale: bool) -> None:
        """One more chunk."""
        self.keys.append(record.key)
        one = FingerprintUsage(1, len(record.objects), record.objects.table.nbytes)
        self._count((fingerprint_of(record.key), stale), one)

    def add_all(self, other: Picked) -> None:
        """What a later step picked; keys are counted, not kept."""
        for place, amount in other.amounts.items():
            self._count(place, amount)
        self.cursor = other.cursor
        self.pool_chunks += other.pool_chunks

    def _count(self, place: tuple[Fingerprint, bool], more: FingerprintUsage) -> None:
        held = self.amounts.get(place, FingerprintUsage(0, 0, 0))
        self.amounts[place] = FingerprintUsage(
            held.chunks + more.chunks, held.objects + more.objects, held.bytes + more.bytes
        )


class Chooser:
    """Judges chunks one by one, in the order of use.

    Args:
        selection: what is meant.
        binding_id: of the present binding; chunks of another one are stale.
        held_bytes: what the objects in scope add up to before anything is taken away.
        now: seconds since 1970. A chunk that says it was stored later says nothing about
            the use of those behind it: the clock was wrong.

    Attributes:
        done: whether no later chunk can be meant.
        picked: what was meant so far.
    """

    def __init__(
        self, selection: Selection, binding_id: str, *, held_bytes: int, now: float
    ) -> None:
        self._selection = selection
        self._binding_id = binding_id
        self._now = now
        target = selection.down_to_bytes
        self._surplus = None if target is None else held_bytes - target
        self.done = self._surplus is not None and self._surplus <= 0
        self.picked = Picked()

    def needs(self, key: ChunkKey) -> bool:
        """Whether a chunk's record has to be looked at."""
        selection = self._selection
        return (
            selection.stored_before is not None
            or selection.fingerprints is None
            or fingerprint_of(key) in selection.fingerprints
        )

    def judge(self, record: ChunkRecord) -> bool:
        """Whether a chunk is meant; picks it then."""
        selection = self._selection
        before = selection.stored_before
        if before is not None and record.stored_at >= before:
            self.done = record.stored_at <= self._now
            return False
        stale = record.binding_id != self._binding_id
        if not selection.in_scope(fingerprint_of(record.key), stale=stale):
            return False
        self.picked.add(record, stale=stale)
        if self._surplus is not None:
            self._surplus -= record.objects.table.nbytes
            self.done = self._surplus <= 0
        return True


def bytes_in_scope(
    selection: Selection, held: Iterable[tuple[str, str, int]], binding_id: str
) -> int:
    """What the objects that ``down_to_bytes`` is about add up to.

    Args:
        selection: what is meant.
        held: binding id, fingerprint and bytes of all that is stored.
        binding_id: of the present binding.
    """
    return sum(
        nbytes
        for owner, fingerprint, nbytes in held
        if selection.in_scope(Fingerprint(fingerprint), stale=owner != binding_id)
    )
