"""Replies of the protocol."""

from __future__ import annotations

from typing import Annotated

import msgspec

from lmcache_persist.protocol.fields import (
    Count,
    MaybeDigest,
    Message,
)


class _Reply(Message, frozen=True, kw_only=True):
    """Base of all replies: who answers, and how far the disk is."""

    boot: str = ""
    durable_seq: int = 0


class PoolInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Where the shared-memory pool is (see :mod:`lmcache_persist.shm`)."""

    path: str
    size_bytes: int


class Welcome(_Reply, frozen=True, kw_only=True, tag="welcome", forbid_unknown_fields=False):
    """Reply to hello. ``binding`` is the stamped form as JSON, empty if unbound.

    Unknown fields are passed over, as in hello, so that ``proto`` decides.
    """

    proto: int
    session: str
    version: str
    pool: PoolInfo | None = None
    binding: bytes = b""


class BindReply(_Reply, frozen=True, kw_only=True, tag="bind_reply"):
    """Reply to bind; a refusal is an :class:`ErrorReply`."""

    outcome: Annotated[str, msgspec.Meta(pattern=r"^(bound|compatible)\Z")]
    binding: bytes
    warnings: list[str] = []


class Registered(_Reply, frozen=True, kw_only=True, tag="registered"):
    """Reply to register; ``fingerprint`` is empty until all ranks are there."""

    fingerprint: MaybeDigest
    missing_ranks: list[int] = []


class SlotRun(msgspec.Struct, frozen=True, array_like=True):
    """Slots of consecutive chunks of one group on one rank: offsets into the pool."""

    rank: int
    group: int
    first_chunk: int
    object_bytes: int
    offsets: list[int]


class Found(_Reply, frozen=True, kw_only=True, tag="found"):
    """Reply to lookup once decided: P tokens, leased until release; ``runs`` has the slots."""

    tokens: int
    runs: list[SlotRun] = []
    memory_chunks: int = 0
    disk_chunks: int = 0


class NotYet(_Reply, frozen=True, kw_only=True, tag="not_yet"):
    """Reply to lookup or flush while undecided: ask again; ``doing`` is for people."""

    doing: str = ""


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """One reserved key: its index in the request, the reservation, an offset per mask bit."""

    index: int
    reservation: Count  # goes back in a commit
    offsets: list[int]


class Reserved(_Reply, frozen=True, kw_only=True, tag="reserved"):
    """Reply to reserve: grants, and the indexes that are stored already. The rest: no room."""

    grants: list[Grant] = []
    stored: list[int] = []


class Committed(_Reply, frozen=True, kw_only=True, tag="committed"):
    """Reply to commit: ``seq`` covers all of it; ``refused`` were not written or not known."""

    seq: Count  # goes back in a flush
    refused: list[int] = []


class Done(_Reply, frozen=True, kw_only=True, tag="done"):
    """Reply to release, give_back, ping and bye."""


class Flushed(_Reply, frozen=True, kw_only=True, tag="flushed"):
    """Reply to flush: all up to its ``seq`` is durable, but for what was dropped.

    ``dropped_chunks`` counts chunks that were committed and could not be written since
    the server's start (disk full, disk error, or a rank that never committed its part).
    """

    dropped_chunks: int = 0


class JsonReply(_Reply, frozen=True, kw_only=True, tag="json"):
    """Reply to stats and admin.*: one JSON document."""

    body: bytes


class StorePart(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive extents of a chunk: its record as stored, the first one's number, their bytes."""

    record: bytes
    first: int
    extents: list[bytes]


class StorePiece(_Reply, frozen=True, kw_only=True, tag="store_piece"):
    """Reply to admin.backup. At the beginning the store's numbers and no parts.

    ``cursor`` is where to go on, empty at the end; ``bad_chunks`` how many proved bad in this
    piece and are not in it.
    """

    parts: list[StorePart] = []
    cursor: bytes = b""
    bad_chunks: int = 0
    chunks: int = 0
    objects: int = 0
    object_bytes: int = 0
    used_bytes: int = 0
    capacity_bytes: int = 0


class ManifestPiece(_Reply, frozen=True, kw_only=True, tag="manifest_piece"):
    """Reply to admin.manifest: ``digest`` is BLAKE3 of all ``total_bytes``."""

    data: bytes
    total_bytes: int
    digest: MaybeDigest


class ErrorReply(_Reply, frozen=True, kw_only=True, tag="error", forbid_unknown_fields=False):
    """A refusal, see :mod:`lmcache_persist.errors`; ``fields`` is a JSON object.

    Unknown fields are passed over: a later server's refusal still has to be read.
    """

    code: str
    message: str
    hint: str = ""
    fields: bytes = b"{}"


Reply = (
    Welcome
    | BindReply
    | Registered
    | Found
    | NotYet
    | Reserved
    | Committed
    | Done
    | Flushed
    | JsonReply
    | StorePiece
    | ManifestPiece
    | ErrorReply
)
