"""The codec on anything at all."""

from __future__ import annotations

import typing
from contextlib import suppress

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from lmcache_persist import protocol
from lmcache_persist.errors import ProtocolError
from lmcache_persist.geometry import GroupKind

hex32 = st.text("0123456789abcdef", min_size=32, max_size=32)
hex64 = st.text("0123456789abcdef", min_size=64, max_size=64)
digest = st.just("") | hex64
count = st.integers(0, 2**63 - 1)
label = st.text(max_size=256)
wait = st.integers(0, protocol.MAX_WAIT_MS)
tokens = st.integers(0, 2**31 - 1)
keys = st.integers(0, 8).flatmap(lambda n: st.binary(min_size=32 * n, max_size=32 * n))
group = st.builds(
    protocol.GroupSpec, st.sampled_from(GroupKind), st.integers(-(2**63), 2**63 - 1), tokens, tokens
)
groups = st.lists(group, max_size=8)
counts = st.lists(count, max_size=8)
head = {"boot": hex32, "session": hex32, "binding": digest}
tail = {"boot": st.just("") | hex32, "durable_seq": count}

REQUESTS = {
    protocol.Hello: {
        "proto_min": count,
        "proto_max": count,
        "kind": st.sampled_from(["scheduler", "worker", "client", "cli"]),
        "label": label,
        "lock": st.just("") | hex32,
        "session": st.just("") | hex32,
    },
    protocol.Bind: {
        **head,
        "groups": groups,
        "base": st.none() | st.integers(1, 2**31 - 1),
        "dry_run": st.booleans(),
        "who": label,
        "via": st.lists(hex32, max_size=protocol.MAX_HOPS),
    },
    protocol.Register: {
        **head,
        "engine": label,
        "rank": st.integers(0, protocol.MAX_RANKS - 1),
        "world_size": st.integers(1, protocol.MAX_RANKS),
        "identity": st.binary(max_size=64),
        "layout": st.binary(max_size=64),
        "groups": groups,
        "object_bytes": st.lists(st.integers(0, protocol.MAX_OBJECT_BYTES), max_size=8),
    },
    protocol.Lookup: {
        **head,
        "lookup": count,
        "engine": label,
        "num_tokens": tokens,
        "held_tokens": tokens,
        "hashes": keys,
        "wait_ms": wait,
    },
    protocol.Release: {**head, "lookup": count},
    protocol.Reserve: {
        **head,
        "engine": label,
        "rank": st.integers(0, protocol.MAX_RANKS - 1),
        "hashes": keys,
        "masks": counts,
    },
    protocol.Commit: {**head, "reservations": counts},
    protocol.GiveBack: {**head, "reservations": counts},
    protocol.Flush: {**head, "seq": st.none() | count, "wait_ms": wait},
    protocol.Ping: head,
    protocol.Stats: head,
    protocol.AdminInspect: {**head, "model": label, "details": st.booleans()},
    protocol.AdminObjects: {
        **head,
        "after": st.binary(max_size=128),
        "limit": st.integers(1, protocol.MAX_OBJECTS_PER_PAGE),
        "model": label,
    },
    protocol.AdminVerify: {**head, "cursor": st.binary(max_size=128), "repair": st.booleans()},
    protocol.AdminPrune: {
        **head,
        "fingerprints": st.none() | st.lists(hex64, max_size=3),
        "stale": st.booleans(),
        "stored_before": st.none() | count,
        "down_to_bytes": st.none() | count,
        "dry_run": st.booleans(),
        "cursor": st.binary(max_size=128),
        "counted_bytes": count,
    },
    protocol.AdminGrow: {**head, "capacity_bytes": count, "growth": count},
    protocol.AdminBackup: {**head, "cursor": st.binary(max_size=128)},
    protocol.AdminManifest: {**head, "offset": count},
    protocol.Bye: head,
}
offsets = st.lists(count, max_size=8)
run = st.builds(protocol.SlotRun, count, count, count, count, offsets)
extents = st.lists(st.binary(max_size=16), max_size=3)
part = st.builds(protocol.StorePart, st.binary(max_size=64), count, extents)
grant = st.builds(protocol.Grant, count, count, offsets)
REPLIES = {
    protocol.Welcome: {
        **tail,
        "proto": count,
        "session": hex32,
        "version": label,
        "pool": st.none() | st.builds(protocol.PoolInfo, path=label, size_bytes=count),
        "binding": st.binary(max_size=64),
    },
    protocol.BindReply: {
        **tail,
        "outcome": st.sampled_from(["bound", "compatible"]),
        "binding": st.binary(max_size=64),
        "warnings": st.lists(label, max_size=3),
    },
    protocol.Registered: {**tail, "fingerprint": digest, "missing_ranks": counts},
    protocol.Found: {
        **tail,
        "tokens": count,
        "runs": st.lists(run, max_size=4),
        "memory_chunks": count,
        "disk_chunks": count,
    },
    protocol.NotYet: {**tail, "doing": label},
    protocol.Reserved: {**tail, "grants": st.lists(grant, max_size=4), "stored": counts},
    protocol.Committed: {**tail, "seq": count, "refused": counts},
    protocol.Done: tail,
    protocol.Flushed: {**tail, "dropped_chunks": count},
    protocol.JsonReply: {**tail, "body": st.binary(max_size=64)},
    protocol.StorePiece: {
        **tail,
        "parts": st.lists(part, max_size=3),
        "cursor": st.binary(max_size=128),
        "chunks": count,
        "objects": count,
        "object_bytes": count,
        "used_bytes": count,
        "capacity_bytes": count,
    },
    protocol.ManifestPiece: {
        **tail,
        "data": st.binary(max_size=64),
        "total_bytes": count,
        "digest": digest,
    },
    protocol.ErrorReply: {**tail, "code": label, "message": label, "hint": label},
}
any_request = st.one_of([st.builds(kind, **fields) for kind, fields in REQUESTS.items()])
any_reply = st.one_of([st.builds(kind, **fields) for kind, fields in REPLIES.items()])
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
tag = st.sampled_from(
    [kind.__struct_config__.tag for kind in (*REQUESTS, *REPLIES)] + ["", "nonsense"]
)
shaped = st.builds(
    lambda kind, fields: msgspec.msgpack.encode({"t": kind, **fields}),
    tag,
    st.dictionaries(
        st.sampled_from(["boot", "session", "binding", "lookup", "groups", "hashes", "tokens"]),
        hex32 | plain,
    ),
)


def test_every_message_is_drawn() -> None:
    """A new message has to be added here, or it is not tested."""
    assert set(REQUESTS) == set(typing.get_args(protocol.Request))
    assert set(REPLIES) == set(typing.get_args(protocol.Reply))


@given(message=any_request)
def test_request_round_trip(message: protocol.Request) -> None:
    """What one side sends is what the other side reads."""
    assert protocol.decode_request(protocol.encode(message)) == message


@given(message=any_reply)
def test_reply_round_trip(message: protocol.Reply) -> None:
    """The same in the other direction."""
    assert protocol.decode_reply(protocol.encode(message)) == message


@given(body=st.binary(max_size=200) | plain.map(msgspec.msgpack.encode) | shaped)
@example(body=b"\x81\xa1t\xdb\xff\xff\xff\xff")
@example(body=b"\xdf\xff\xff\xff\xff")
@example(body=b"\x81\xa1t\xa2\xff\xfe")
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    """No bytes at all raise anything but a ProtocolError."""
    for decode in (protocol.decode_request, protocol.decode_reply):
        with suppress(ProtocolError):
            decode(body)


@given(message=any_request, at=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_one_wrong_byte(message: protocol.Request, at: int, flip: int) -> None:
    """A message with one byte changed is read as some message, or refused."""
    body = bytearray(protocol.encode(message))
    body[at % len(body)] ^= flip
    with suppress(ProtocolError):
        protocol.decode_request(bytes(body))


@given(message=any_request, keep=st.floats(0, 1, exclude_max=True))
def test_a_cut_message_is_refused(message: protocol.Request, keep: float) -> None:
    """No beginning of a message is a message."""
    body = protocol.encode(message)
    with suppress(ProtocolError):
        decoded = protocol.decode_request(body[: int(len(body) * keep)])
        raise AssertionError(f"a cut message was read as {decoded!r}")
