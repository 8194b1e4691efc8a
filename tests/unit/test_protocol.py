"""The codec's bounds: what is refused, and by which error."""

from __future__ import annotations

import typing
from typing import Any

import msgspec
import pytest

from lmcache_persist import protocol
from lmcache_persist.errors import MalformedMessage, MessageTooLarge, ProtocolError
from lmcache_persist.geometry import Group, GroupKind

BOOT, SESSION = "0" * 32, "f" * 32
HEAD: dict[str, Any] = {"boot": BOOT, "session": SESSION}


def pack(value: object) -> bytes:
    """Any plain value as MessagePack."""
    return msgspec.msgpack.encode(value)


def test_every_message_has_a_type_of_its_own() -> None:
    """No two messages of one direction share a type."""
    for union in (protocol.Request, protocol.Reply):
        tags = [item.__struct_config__.tag for item in typing.get_args(union)]
        assert len(tags) == len(set(tags))
        assert all(tags)


def test_type_is_under_t() -> None:
    """A body is one map with the type under `t`, as the wire format says."""
    body = msgspec.msgpack.decode(protocol.encode(protocol.Ping(**HEAD)))
    assert body == {"t": "ping", "boot": BOOT, "session": SESSION, "binding": ""}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        pack([]),
        pack(None),
        pack({}),
        pack({"t": "nonsense"}),
        pack({"t": 1}),
        pack({"t": "ping"}),
        pack({"t": "ping", **HEAD, "more": 1}),
        pack({"t": "ping", "boot": "0" * 31, "session": SESSION}),
        pack({"t": "ping", "boot": "G" * 32, "session": SESSION}),
        pack({"t": "ping", "boot": BOOT + "\n", "session": SESSION}),
        pack({"t": "ping", **HEAD, "binding": "abc"}),
        pack({"t": "release", **HEAD, "lookup": -1}),
        pack({"t": "release", **HEAD, "lookup": 2**63}),
        pack({"t": "release", **HEAD, "lookup": 1.5}),
        pack({"t": "release", **HEAD, "lookup": True}),
        pack({"t": "release", **HEAD, "lookup": "1"}),
        pack({"t": "hello", "proto_min": 1, "proto_max": 1, "kind": "root"}),
        pack({"t": "hello", "proto_min": 1, "proto_max": 1, "kind": "cli", "lock": "../../etc"}),
        pack({"t": "flush", **HEAD, "wait_ms": protocol.MAX_WAIT_MS + 1}),
        pack({"t": "bind", **HEAD, "groups": [["full", 16]] * 65}),
        pack({"t": "bind", **HEAD, "groups": [["other", 16]]}),
        pack({"t": "bind", **HEAD, "groups": [["full", 16.5]]}),
        pack({"t": "bind", **HEAD, "groups": [["full", 16, 16, 0, 1]]}),
        pack({"t": "bind", **HEAD, "groups": [["full", 16]], "base": 0}),
        pack({"t": "admin.verify", **HEAD, "cursor": bytes(129)}),
        protocol.encode(protocol.Ping(**HEAD))[:-1],
        protocol.encode(protocol.Ping(**HEAD)) + b"\x00",
        b"\x81" * 100_000,
        b"\x91" * 100_000,
    ],
)
def test_malformed_request(body: bytes) -> None:
    """Whatever breaks a rule is a MalformedMessage, and nothing else."""
    with pytest.raises(MalformedMessage):
        protocol.decode_request(body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        pack({"t": "ping", **HEAD}),
        pack({"t": "error"}),
        # What goes back to the server is bounded as there.
        pack({"t": "reserved", "grants": [[0, -1, [0]]]}),
        pack({"t": "committed", "seq": -1}),
    ],
)
def test_malformed_reply(body: bytes) -> None:
    """A client holds a server to the same rules."""
    with pytest.raises(MalformedMessage):
        protocol.decode_reply(body)


def test_negative_tokens_per_block_reach_geometry() -> None:
    """A geometry's own numbers pass the codec, so that geometry can refuse them by name."""
    body = pack({"t": "bind", **HEAD, "groups": [["full", -16]]})
    message = protocol.decode_request(body)
    assert isinstance(message, protocol.Bind)
    assert message.groups[0].group() == Group(GroupKind.FULL, -16)


def test_hello_passes_over_what_it_does_not_know() -> None:
    """A newer client's hello is understood, so that versions can be compared."""
    fields = {"t": "hello", "proto_min": 1, "proto_max": 9, "kind": "worker", "new": [1]}
    message = protocol.decode_request(pack(fields))
    assert isinstance(message, protocol.Hello)
    assert message.proto_max == 9


@pytest.mark.parametrize("absent", ["proto_min", "proto_max", "kind"])
def test_hello_without_a_field_is_refused_by_its_name(absent: str) -> None:
    """What the greeting is decided by has to be there."""
    fields = {"t": "hello", "proto_min": 1, "proto_max": 1, "kind": "worker"}
    del fields[absent]
    with pytest.raises(MalformedMessage, match=absent):
        protocol.decode_request(pack(fields))


def test_too_large_to_decode() -> None:
    """A body above the bound is refused by its size, in both directions."""
    for decode in (protocol.decode_request, protocol.decode_reply):
        with pytest.raises(MessageTooLarge, match=str(protocol.MAX_MESSAGE_BYTES)):
            decode(bytes(protocol.MAX_MESSAGE_BYTES + 1))


def test_too_large_to_send() -> None:
    """Nobody sends what nobody would take."""
    with pytest.raises(MessageTooLarge, match="JsonReply"):
        protocol.encode(protocol.JsonReply(body=bytes(protocol.MAX_MESSAGE_BYTES)))


def test_the_largest_lookup_fits() -> None:
    """A lookup of the most chunks is within the size of a message, one more is refused."""
    most = bytes(32 * protocol.MAX_CHUNKS_PER_LOOKUP)
    fields: dict[str, Any] = {**HEAD, "lookup": 1, "engine": "e", "num_tokens": 1}
    message = protocol.Lookup(**fields, hashes=most)
    assert protocol.decode_request(protocol.encode(message)) == message
    with pytest.raises(ProtocolError):
        protocol.decode_request(protocol.encode(protocol.Lookup(**fields, hashes=most + bytes(32))))


def test_split_hashes() -> None:
    """Hashes are taken apart in order; a rest is malformed."""
    one, two = b"a" * 32, b"b" * 32
    assert protocol.split_hashes(one + two) == [one, two]
    assert protocol.split_hashes(b"") == []
    with pytest.raises(MalformedMessage, match="33 bytes"):
        protocol.split_hashes(bytes(33))


def test_group_spec_round_trip() -> None:
    """A group crosses the wire unchanged."""
    group = Group(GroupKind.SLIDING, 128, 100, 512)
    assert protocol.GroupSpec.of(group).group() == group
