"""A process that uses a store until it is killed; prints what is durable, line by line.

Lines: ``durable KEY`` after a write that reported it, ``evicted KEY`` likewise, ``stamped``,
``round N`` before each round. What a chunk holds follows from its number.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from lmcache_persist.hashing import EXTENT_BYTES
from lmcache_persist.store.base import ChunkKey, Place
from lmcache_persist.store.lmdb_disk import LmdbDisk
from store_support import MIB, UUID, binding, chunk, key

CAPACITY = 16 * MIB
SIZES = [3000, 40_000, 300_000, EXTENT_BYTES, MIB + 5]


def sizes(number: int) -> dict[Place, int]:
    """The objects of a numbered chunk."""
    rng = random.Random(number)
    return {Place(rank, 0): rng.choice(SIZES) for rank in range(rng.randint(1, 2))}


def say(*words: object) -> None:
    """One line, at once."""
    print(*words, flush=True)


def tell(word: str, keys: list[ChunkKey]) -> None:
    """One line for each key."""
    for name in keys:
        say(word, name.hex())


def main(directory: Path, seed: int, rounds: int) -> None:
    """Write, touch, drop, evict; each round in an order drawn from ``seed``."""
    rng = random.Random(seed)
    disk = LmdbDisk.open(directory, CAPACITY, uuid=UUID)
    disk.write_stamp(binding())
    say("stamped")
    number = 0
    for turn in range(rounds):
        say("round", turn)
        batch = [chunk(number + index, sizes(number + index)) for index in range(rng.randint(1, 5))]
        number += len(batch)
        disk.touch([key(rng.randrange(number)) for _ in range(3)])
        report = disk.write(batch)
        tell("evicted", report.evicted)
        tell("durable", report.written)
        if rng.random() < 0.3:
            tell("evicted", disk.evict())
        if rng.random() < 0.1:
            tell("evicted", disk.drop({key(rng.randrange(number)): None}))
    say("done")
    disk.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
