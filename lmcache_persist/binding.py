"""The binding: the one-shot fact about a disk. Pure.

It is written once into the manifest and stamped, whole, into the store, so that either
can be checked against, or rebuilt from, the other.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lmcache_persist import hashing
from lmcache_persist.hashing import BindingId, BoundaryId

MODE_AUTO = "auto"
MODE_FIXED = "fixed"


@dataclass(frozen=True, slots=True)
class Binding:
    """A bound chunk size with all that it depends on.

    Attributes:
        chunk_size: tokens.
        required_alignment: tokens, of the geometry that won; the chunk size itself if
            it was fixed before any geometry was seen.
        base_chunk_size: tokens, what was wished for.
        mode: ``auto`` or ``fixed``.
        hash_algorithm: :data:`lmcache_persist.hashing.HASH_ALGORITHM` at the time.
        hash_version: likewise.
        boundary_id: equal on every server that agrees.
        binding_id: this disk's.
        bound_at: UTC, ISO 8601 with microseconds.
        winner: who won the bind, for people.
        backend: the store's kind, ``lmdb``.
        store_uuid: the store's, 32 hex digits.
        store_format_version: the store's on-disk format.
    """

    chunk_size: int
    required_alignment: int
    base_chunk_size: int
    mode: str
    hash_algorithm: str
    hash_version: int
    boundary_id: BoundaryId
    binding_id: BindingId
    bound_at: str
    winner: str
    backend: str
    store_uuid: str
    store_format_version: int

    @classmethod
    def make(
        cls,
        *,
        chunk_size: int,
        required_alignment: int,
        base_chunk_size: int,
        mode: str,
        bound_at: str,
        winner: str,
        backend: str,
        store_uuid: str,
        store_format_version: int,
    ) -> Binding:
        """A new binding with its ids computed."""
        boundary = hashing.boundary_id(chunk_size)
        return cls(
            chunk_size=chunk_size,
            required_alignment=required_alignment,
            base_chunk_size=base_chunk_size,
            mode=mode,
            hash_algorithm=hashing.HASH_ALGORITHM,
            hash_version=hashing.HASH_VERSION,
            boundary_id=boundary,
            binding_id=hashing.binding_id(
                boundary, backend, store_uuid, store_format_version, bound_at
            ),
            bound_at=bound_at,
            winner=winner,
            backend=backend,
            store_uuid=store_uuid,
            store_format_version=store_format_version,
        )

    def to_json(self) -> dict[str, Any]:
        """All fields as plain values, the form that the store is stamped with."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Binding:
        """The inverse of :meth:`to_json`; ``TypeError`` for other keys."""
        return cls(**value)

    def after_rebind(self, stamp: Binding | None, replaced: str) -> Binding:
        """The binding that holds if this is the manifest's and ``stamp`` the store's.

        A rebind stamps the store first and notes there which binding that replaced; until
        the manifest has followed, the stamp counts.

        Args:
            stamp: the store's, None if it has none.
            replaced: id of the binding that the note names, empty without a note.
        """
        if stamp is None or replaced != self.binding_id or stamp.store_uuid != self.store_uuid:
            return self
        return stamp

    def summary(self) -> dict[str, Any]:
        """The form that ``inspect --json`` and ``negotiate --json`` show."""
        return {
            "chunk_size": self.chunk_size,
            "required_alignment": self.required_alignment,
            "base_chunk_size": self.base_chunk_size,
            "mode": self.mode,
            "hash_algorithm": f"{self.hash_algorithm}-v{self.hash_version}",
            "boundary_id": self.boundary_id,
            "binding_id": self.binding_id,
            "bound_at": self.bound_at,
            "store": {
                "backend": self.backend,
                "uuid": self.store_uuid,
                "format_version": self.store_format_version,
            },
            "winner": self.winner,
        }
