"""Messages to bytes and back."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from lmcache_persist.errors import MalformedMessage, MessageTooLarge
from lmcache_persist.hashing import CHUNK_HASH_BYTES
from lmcache_persist.protocol.fields import (
    MAX_MESSAGE_BYTES,
)
from lmcache_persist.protocol.replies import (
    Reply,
)
from lmcache_persist.protocol.requests import (
    Request,
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
