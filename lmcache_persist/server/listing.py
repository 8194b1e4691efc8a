"""Paging through what a store holds: one rule for a live server and for files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from lmcache_persist.store.base import (
    FINGERPRINT_BYTES,
    ChunkRecord,
    chunk_hash_of,
    fingerprint_of,
)
from lmcache_persist.store.survey import Readable

_RECORDS_PER_LOOK = 64
_LOOKS_PER_PAGE = 256


def objects_page(
    store: Readable,
    binding_id: str,
    names: Mapping[str, str],
    *,
    after: bytes,
    limit: int,
    fingerprints: Sequence[str] | None,
) -> dict[str, Any]:
    """A page of objects in the order of their chunks' keys.

    Args:
        store: a disk tier or an offline store.
        binding_id: chunks of other ones are stale.
        names: of models by fingerprint.
        after: a chunk's key, empty for the first page.
        limit: objects at most, but always one chunk as a whole.
        fingerprints: of these models only; None for all.

    Returns:
        ``objects``, and ``next``: the key to go on after as hex, null at the end. A page
        may be empty before the end, where much has to be passed over.
    """
    prefixes = sorted(bytes.fromhex(one) for one in fingerprints) if fingerprints else [b""]
    found: list[dict[str, Any]] = []
    looks = 0
    for prefix in prefixes if fingerprints is None or fingerprints else ():
        if prefix and after[:FINGERPRINT_BYTES] > prefix:
            continue
        last: bytes | None = after if after.startswith(prefix) else prefix
        while last is not None:
            page = store.page(last, _RECORDS_PER_LOOK, prefix)
            looks += 1
            for record in page.records:
                if found and len(found) + len(record.objects) > limit:
                    return {"objects": found, "next": last.hex()}
                found += _objects(record, binding_id, names)
                last = record.key
            if page.next is not None and looks >= _LOOKS_PER_PAGE:
                return {"objects": found, "next": page.next.hex()}
            last = page.next
    return {"objects": found, "next": None}


def _objects(
    record: ChunkRecord, binding_id: str, names: Mapping[str, str]
) -> list[dict[str, Any]]:
    fingerprint = fingerprint_of(record.key)
    stored_at = datetime.fromtimestamp(record.stored_at, UTC).isoformat(timespec="seconds")
    return [
        {
            "key": record.key.hex(),
            "model": names.get(fingerprint),
            "fingerprint": fingerprint,
            "chunk_hash": chunk_hash_of(record.key).hex(),
            "rank": place.rank,
            "group": place.group,
            "bytes": entry.nbytes,
            "stale": record.binding_id != binding_id,
            "stored_at": stored_at,
            "hits": record.hits,
            "order": record.order,
        }
        for place, entry in record.objects.table.entries.items()
    ]
