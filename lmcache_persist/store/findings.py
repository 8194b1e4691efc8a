"""What checks and repairs of a store tell. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmcache_persist.store.base import ChunkKey


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that is not as it must be.

    Attributes:
        where: the database and the key, for people.
        what: what is wrong.
    """

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(frozen=True, slots=True)
class Mended:
    """Something that was wrong, and what was done about it.

    Attributes:
        violation: what was wrong.
        done: what was done, durable; None if it is left as it is.
        dropped: the chunk that went with it, None if none did.
    """

    violation: Violation
    done: str | None
    dropped: bytes | None = None


@dataclass(frozen=True, slots=True)
class CheckPart:
    """What a part of a check found.

    Attributes:
        violations: what is wrong.
        bad: chunks that are proven bad, to be dropped: the copies as :meth:`DiskTier.drop` names
            them.
        checked_objects, checked_bytes: what was looked at.
        cursor: where to go on; None at the end. Each one is larger than the one before.
        notes: what could not be told, and why.
    """

    violations: list[Violation]
    bad: dict[ChunkKey, int]
    checked_objects: int
    checked_bytes: int
    cursor: bytes | None
    notes: list[str] = field(default_factory=list)
