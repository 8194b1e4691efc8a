"""Reading one chunk's objects from the disk tier into slots, on a reader's thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from lmcache_persist.errors import ObjectCorrupt, StoreError
from lmcache_persist.store.base import ChunkRecord, Place


@dataclass(frozen=True, slots=True)
class Read:
    """What reading one chunk's objects gave, and how many seconds it took."""

    good: set[Place]
    corrupt: bool = False
    error: str = ""
    seconds: float = 0.0


def read_objects(
    read_into: Callable[[ChunkRecord, Place, memoryview], bool],
    record: ChunkRecord,
    views: Mapping[Place, memoryview],
) -> Read:
    """Read and verify objects of one chunk; never raises for a disk's sake. Threads: any."""
    begin_s = time.monotonic()
    read = _read(read_into, record, views)
    return replace(read, seconds=time.monotonic() - begin_s)


def _read(
    read_into: Callable[[ChunkRecord, Place, memoryview], bool],
    record: ChunkRecord,
    views: Mapping[Place, memoryview],
) -> Read:
    good: set[Place] = set()
    for place, view in views.items():
        try:
            if not read_into(record, place, view):
                return Read(good)
        except ObjectCorrupt as error:
            return Read(good, True, str(error))
        except (StoreError, OSError) as error:
            return Read(good, False, str(error))
        good.add(place)
    return Read(good)
