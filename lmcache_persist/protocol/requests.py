"""Requests of the protocol."""

from __future__ import annotations

from typing import Annotated

import msgspec

from lmcache_persist.geometry import MAX_GROUPS, MAX_TOKENS_PER_BLOCK
from lmcache_persist.hashing import CHUNK_HASH_BYTES
from lmcache_persist.protocol.fields import (
    MAX_HOPS,
    MAX_KEYS_PER_RESERVE,
    MAX_OBJECTS_PER_PAGE,
    Blob,
    Count,
    Fingerprints,
    Groups,
    Hashes,
    Id32,
    Label,
    MaybeDigest,
    MaybeId32,
    Message,
    ObjectBytes,
    Rank,
    Tokens,
    WaitMs,
    WorldSize,
)


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


class _Request(Message, frozen=True, kw_only=True):
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


class AdminGrow(_Request, frozen=True, kw_only=True, tag="admin.grow"):
    """Asks for a larger disk tier, or how far that is.

    ``growth`` 0 starts one, or joins the one to the same capacity; else its number, from an
    earlier answer.
    """

    capacity_bytes: Count
    growth: Count = 0


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
    | AdminGrow
    | AdminBackup
    | AdminManifest
    | Bye
)
