"""Bounds of the protocol, and the types of its fields."""

from __future__ import annotations

from typing import Annotated

import msgspec

from lmcache_persist.geometry import MAX_GROUPS, MAX_TOKENS_PER_BLOCK, Group, GroupKind
from lmcache_persist.hashing import CHUNK_HASH_BYTES

PROTOCOL_VERSION = 1
"""The version this code speaks; bumped when an old peer would misread a message."""
MIN_PROTOCOL_VERSION = 1

REQUEST_ID_BYTES = 8
MAX_MESSAGE_BYTES = 4 << 20
MAX_CHUNKS_PER_LOOKUP = 65536
MAX_KEYS_PER_RESERVE = 4096
MAX_OBJECTS_PER_PAGE = 4096
MAX_WAIT_MS = 10_000
MAX_RANKS = 4096
MAX_OBJECT_BYTES = 1 << 40
MAX_HOPS = 8
"""Servers that may pass on one bind."""
MAX_FINGERPRINTS = 4096

_I63 = 2**63 - 1
Count = Annotated[int, msgspec.Meta(ge=0, le=_I63)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]
WorldSize = Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
WaitMs = Annotated[int, msgspec.Meta(ge=0, le=MAX_WAIT_MS)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS_PER_BLOCK)]
ObjectBytes = Annotated[int, msgspec.Meta(ge=0, le=MAX_OBJECT_BYTES)]
Id32 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
MaybeId32 = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{32})?\Z")]
MaybeDigest = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")]
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
Fingerprints = Annotated[list[Digest], msgspec.Meta(max_length=MAX_FINGERPRINTS)]
Label = Annotated[str, msgspec.Meta(max_length=256)]
Blob = Annotated[bytes, msgspec.Meta(max_length=256 * 1024)]
Hashes = Annotated[bytes, msgspec.Meta(max_length=MAX_CHUNKS_PER_LOOKUP * CHUNK_HASH_BYTES)]


class GroupSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A :class:`~lmcache_persist.geometry.Group` on the wire."""

    kind: GroupKind
    tokens_per_block: int
    slots_per_block: Tokens = 0
    window: Tokens = 0

    def group(self) -> Group:
        """The group; its numbers are still to be judged by ``geometry``."""
        return Group(self.kind, self.tokens_per_block, self.slots_per_block, self.window)

    @classmethod
    def of(cls, group: Group) -> GroupSpec:
        """The inverse of :meth:`group`."""
        return cls(group.kind, group.tokens_per_block, group.slots_per_block, group.window)


Groups = Annotated[list[GroupSpec], msgspec.Meta(max_length=MAX_GROUPS)]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", forbid_unknown_fields=True):
    """Base of all messages."""
