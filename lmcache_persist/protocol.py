"""Messages between clients and the server: types, bounds, codec. No sockets.

Frames: a client's DEALER sends ``[request id, body]``, the server's ROUTER answers with
the same request id. A request id is 8 bytes that the client chose and does not use again
on that socket. A body is one MessagePack map with the message's type under ``"t"``.

Life of a session: ``hello`` (the reply names boot id, session and pool) -> a client that
wants slots takes its client lock and says ``hello`` again with it -> ``bind`` ->
``register`` by each worker -> ``lookup``/``release`` by the scheduler,
``reserve``/``commit``/``give_back`` by workers -> ``bye``, or the lock drops.

Every request but ``hello`` carries boot id, session and binding id; a wrong one is
answered with the error ``stale`` and the client starts over with ``hello``.

A :class:`lmcache_persist.errors.ProtocolError` here is always the peer's fault.
``docs/protocol.md`` lists all of it for people.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from lmcache_persist.errors import MalformedMessage, MessageTooLarge
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


class _Message(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="t", forbid_unknown_fields=True
):
    """Base of all messages."""


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="hello"):
    """Opens or renews a session; unknown fields are passed over, so that versions can talk.

    ``lock`` names the client lock this process holds, empty before it has one.
    ``session`` is the one to renew, empty for a new one.
    """

    proto_min: Count
    proto_max: Count
    kind: Annotated[str, msgspec.Meta(pattern=r"^(scheduler|worker|client|cli)\Z")]
    label: Label = ""
    lock: MaybeId32 = ""
    session: MaybeId32 = ""


class _Request(_Message, frozen=True, kw_only=True):
    """Base of every request but hello."""

    boot: Id32
    session: Id32
    binding: MaybeDigest = ""


class Bind(_Request, frozen=True, kw_only=True, tag="bind"):
    """Negotiates the chunk size: the first positive geometry wins, later ones are judged.

    ``via`` holds the boot ids of unbound servers that passed it on, the first one first.
    """

    groups: Groups
    base: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS_PER_BLOCK)] | None = None
    dry_run: bool = False
    who: Label = ""
    via: Annotated[list[Id32], msgspec.Meta(max_length=MAX_HOPS)] = []


class Register(_Request, frozen=True, kw_only=True, tag="register"):
    """A worker says what it runs; identity and layout are canonical JSON objects.

    ``object_bytes`` holds, per group, the bytes of one chunk's object on this rank (0 for
    scratch groups); ``groups`` is the geometry that was bound.
    """

    engine: Label
    rank: Rank
    world_size: WorldSize
    identity: Blob
    layout: Blob
    groups: Groups
    object_bytes: Annotated[list[ObjectBytes], msgspec.Meta(max_length=MAX_GROUPS)]


class Lookup(_Request, frozen=True, kw_only=True, tag="lookup"):
    """Asks for the restorable prefix; the same ``lookup`` id again polls.

    ``held_tokens`` is what the engine holds itself: chunks that end there or before are
    not brought into slots. ``hashes`` and the rest count only the first time.
    ``again``: this prompt was looked up before under another id (it was preempted), so that
    metrics count it once.
    """

    lookup: Count
    engine: Label
    num_tokens: Tokens
    held_tokens: Tokens = 0
    hashes: Hashes = b""
    wait_ms: WaitMs = 0
    again: bool = False


class Release(_Request, frozen=True, kw_only=True, tag="release"):
    """Gives up a lookup: its lease, or the wish for one. Unknown ids are fine.

    ``loaded_tokens`` of what was found have been loaded; 0 if the load failed or never was.
    """

    lookup: Count
    loaded_tokens: Tokens = 0


class Reserve(_Request, frozen=True, kw_only=True, tag="reserve"):
    """Asks for slots: per key (``hashes``) for the groups in its bit mask, on this rank."""

    engine: Label
    rank: Rank
    hashes: Annotated[bytes, msgspec.Meta(max_length=MAX_KEYS_PER_RESERVE * CHUNK_HASH_BYTES)]
    masks: Annotated[list[Count], msgspec.Meta(max_length=MAX_KEYS_PER_RESERVE)]


class Commit(_Request, frozen=True, kw_only=True, tag="commit"):
    """The slots of these reservations are written; each may be named once."""

    reservations: Annotated[list[Count], msgspec.Meta(max_length=MAX_KEYS_PER_RESERVE)]


class GiveBack(_Request, frozen=True, kw_only=True, tag="give_back"):
    """These reservations will not be used. Unknown ids are fine."""

    reservations: Annotated[list[Count], msgspec.Meta(max_length=MAX_KEYS_PER_RESERVE)]


class Flush(_Request, frozen=True, kw_only=True, tag="flush"):
    """Answered when ``durable_seq`` reached ``seq`` (None: all so far) or ``wait_ms`` is over.

    A wait that runs out is answered with ``not_yet``.
    """

    seq: Count | None = None
    wait_ms: WaitMs = 0


class Ping(_Request, frozen=True, kw_only=True, tag="ping"):
    """Liveness; also renews the session."""


class Stats(_Request, frozen=True, kw_only=True, tag="stats"):
    """Asks for the server's numbers."""


class AdminInspect(_Request, frozen=True, kw_only=True, tag="admin.inspect"):
    """Asks for what ``inspect --json`` prints.

    ``model`` narrows it to a name or a fingerprint; ``details`` asks for what each
    fingerprint was made of.
    """

    model: Label = ""
    details: bool = False


class AdminObjects(_Request, frozen=True, kw_only=True, tag="admin.objects"):
    """Asks for a page of at most ``limit`` objects, after the chunk with key ``after``."""

    after: Annotated[bytes, msgspec.Meta(max_length=128)] = b""
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_OBJECTS_PER_PAGE)] = MAX_OBJECTS_PER_PAGE
    model: Label = ""


class AdminVerify(_Request, frozen=True, kw_only=True, tag="admin.verify"):
    """Asks the live server to check every digest from ``cursor`` on, for a bounded while.

    With ``repair`` the first part mends order, leftovers and sums, and what is named later
    is dropped before the answer.
    """

    cursor: Annotated[bytes, msgspec.Meta(max_length=128)] = b""
    repair: bool = False


class AdminPrune(_Request, frozen=True, kw_only=True, tag="admin.prune"):
    """Asks to remove chunks that all of its selectors mean, a bounded number per message.

    ``fingerprints`` None: of all models. ``stored_before``: seconds since 1970. With
    ``dry_run`` nothing is removed, and ``counted_bytes`` is what earlier answers counted.
    """

    fingerprints: Fingerprints | None = None
    stale: bool = False
    stored_before: Count | None = None
    down_to_bytes: Count | None = None
    dry_run: bool = False
    cursor: Annotated[bytes, msgspec.Meta(max_length=128)] = b""
    counted_bytes: Count = 0


class AdminBackup(_Request, frozen=True, kw_only=True, tag="admin.backup"):
    """Asks for the next piece of the store; an empty cursor begins, with numbers only."""

    cursor: Annotated[bytes, msgspec.Meta(max_length=128)] = b""


class AdminManifest(_Request, frozen=True, kw_only=True, tag="admin.manifest"):
    """Asks for the manifest's file as of now, from a byte on."""

    offset: Count = 0


class Bye(_Request, frozen=True, kw_only=True, tag="bye"):
    """Ends the session: leases, reservations and registrations are given up."""


Request = (
    Hello
    | Bind
    | Register
    | Lookup
    | Release
    | Reserve
    | Commit
    | GiveBack
    | Flush
    | Ping
    | Stats
    | AdminInspect
    | AdminObjects
    | AdminVerify
    | AdminPrune
    | AdminBackup
    | AdminManifest
    | Bye
)


class _Reply(_Message, frozen=True, kw_only=True):
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
    reservation: int
    offsets: list[int]


class Reserved(_Reply, frozen=True, kw_only=True, tag="reserved"):
    """Reply to reserve: grants, and the indexes that are stored already. The rest: no room."""

    grants: list[Grant] = []
    stored: list[int] = []


class Committed(_Reply, frozen=True, kw_only=True, tag="committed"):
    """Reply to commit: ``seq`` covers all of it; ``refused`` were not written or not known."""

    seq: int
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

    ``cursor`` is where to go on, empty at the end.
    """

    parts: list[StorePart] = []
    cursor: bytes = b""
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


class _Codec:
    encoder: ClassVar[msgspec.msgpack.Encoder] = msgspec.msgpack.Encoder()
    requests: ClassVar[msgspec.msgpack.Decoder[Request]] = msgspec.msgpack.Decoder(Request)
    replies: ClassVar[msgspec.msgpack.Decoder[Reply]] = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    """A message as MessagePack. ``MessageTooLarge`` if nobody would take it."""
    data = _Codec.encoder.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise MessageTooLarge(
            f"message {type(message).__name__} has {len(data)} bytes,"
            f" expected at most {MAX_MESSAGE_BYTES}"
        )
    return data


def encode_reply(reply: Reply, boot: str, durable_seq: int) -> bytes:
    """A reply with the server's boot id and ``durable_seq`` put in."""
    return encode(msgspec.structs.replace(reply, boot=boot, durable_seq=durable_seq))


def _check_size(data: bytes | memoryview) -> None:
    if len(data) > MAX_MESSAGE_BYTES:
        raise MessageTooLarge(
            f"message has {len(data)} bytes, expected at most {MAX_MESSAGE_BYTES}"
        )


def decode_request(data: bytes | memoryview) -> Request:
    """Decode what a client sent.

    Raises:
        MalformedMessage: no MessagePack, unknown type, or a field is wrong.
    """
    _check_size(data)
    try:
        return _Codec.requests.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, MemoryError) as error:
        raise MalformedMessage(f"request cannot be decoded: {error}") from error


def decode_reply(data: bytes | memoryview) -> Reply:
    """Decode what a server sent; errors as :func:`decode_request`."""
    _check_size(data)
    try:
        return _Codec.replies.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, MemoryError) as error:
        raise MalformedMessage(f"reply cannot be decoded: {error}") from error


def split_hashes(packed: bytes) -> list[bytes]:
    """Concatenated chunk hashes, taken apart.

    Raises:
        MalformedMessage: the length is no multiple of a hash's.
    """
    if len(packed) % CHUNK_HASH_BYTES:
        raise MalformedMessage(
            f"hashes have {len(packed)} bytes, expected a multiple of {CHUNK_HASH_BYTES}"
        )
    return [packed[at : at + CHUNK_HASH_BYTES] for at in range(0, len(packed), CHUNK_HASH_BYTES)]
