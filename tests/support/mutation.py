"""Structure-aware mutation of messages: seeded, so that a failure can be had again.

A body is taken apart as plain MessagePack values, one or more places are changed, and it
is put together again; some mutations work on the bytes, for what no encoder would write.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

NUMBERS = (
    -1,
    0,
    1,
    63,
    64,
    255,
    4096,
    2**31 - 1,
    2**31,
    2**32,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
    -(2**31),
    -(2**63),
)
TEXTS = (
    "",
    "\0",
    "../../etc/passwd",
    "/etc/passwd",
    "org/model\nINFO forged line",
    "0" * 32,
    "f" * 64,
    "g" * 32,
    "\u202e\U0001f600",
    "x" * 5000,
)
OTHERS: tuple[Any, ...] = (
    None,
    True,
    False,
    0.5,
    float("nan"),
    float("inf"),
    b"",
    b"\xff" * 33,
    [],
    {},
    [[[[[]]]]],
)
HEADERS = (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff")
"""A list, a map and a text that announce four billion items and have none."""

Path = tuple[Any, ...]


def mutate(body: bytes, draw: random.Random, words: Sequence[Any] = ()) -> bytes:
    """A changed ``body``: valid or not, never longer than a few kilobytes more.

    Args:
        body: a message, best a valid one.
        draw: the source of chance.
        words: values of this conversation to put in (other clients' ids, for instance).
    """
    if draw.random() < 0.25:
        return _mutate_bytes(body, draw)
    try:
        value = msgspec.msgpack.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):  # too broken for more than bytes
        return _mutate_bytes(body, draw)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        value = _mutate_value(value, draw, words)
    try:
        packed = msgspec.msgpack.encode(value)
    except (OverflowError, ValueError):  # a number that MessagePack cannot have
        return _mutate_bytes(body, draw)
    return _duplicate_key(packed, draw) if draw.random() < 0.1 else packed


def _mutate_bytes(body: bytes, draw: random.Random) -> bytes:
    data = bytearray(body or b"\x80")
    kind = draw.randrange(6)
    if kind == 0:
        return bytes(data[: draw.randrange(len(data) + 1)])
    if kind == 1:
        return bytes(data) + draw.randbytes(draw.randint(1, 16))
    if kind == 2:
        at = draw.randrange(len(data))
        return bytes(data[:at]) + draw.choice(HEADERS) + bytes(data[at:])
    if kind == 3:
        return b"\x91" * draw.choice((10, 1000, 50_000)) + bytes(data)
    if kind == 4:
        return draw.randbytes(draw.randint(0, 200))
    for _ in range(draw.randint(1, 8)):
        data[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(data)


def _duplicate_key(packed: bytes, draw: random.Random) -> bytes:
    """The same map with one of its entries said twice, the second time otherwise."""
    if not 0x81 <= packed[0] <= 0x8E:
        return packed
    value = msgspec.msgpack.decode(packed)
    name = draw.choice(list(value))
    extra = msgspec.msgpack.encode(name) + msgspec.msgpack.encode(draw.choice(NUMBERS))
    return bytes([packed[0] + 1]) + packed[1:] + extra


def _places(value: Any, path: Path = ()) -> list[Path]:
    places = [path]
    if isinstance(value, dict):
        for key in value:
            places += _places(value[key], (*path, key))
    elif isinstance(value, list):
        for index in range(min(len(value), 16)):
            places += _places(value[index], (*path, index))
    return places


def _mutate_value(value: Any, draw: random.Random, words: Sequence[Any]) -> Any:
    path = draw.choice(_places(value))
    return _change(value, path, lambda old: _other(old, draw, words), draw)


def _change(value: Any, path: Path, change: Callable[[Any], Any], draw: random.Random) -> Any:
    if not path:
        return change(value)
    copy = dict(value) if isinstance(value, dict) else list(value)
    head = path[0]
    if len(path) == 1 and draw.random() < 0.15:
        del copy[head]
        return copy
    copy[head] = _change(copy[head], path[1:], change, draw)
    return copy


def _other(old: Any, draw: random.Random, words: Sequence[Any]) -> Any:
    if words and draw.random() < 0.4:
        return draw.choice(words)
    if isinstance(old, dict) and draw.random() < 0.8:
        return {**old, draw.choice(("more", "t", "boot", "session", "lookup")): 1}
    if isinstance(old, list) and draw.random() < 0.8:
        return old * draw.choice((0, 2, 3)) + [draw.choice((*NUMBERS, *OTHERS))]
    if isinstance(old, bytes) and draw.random() < 0.8:
        return old * draw.choice((0, 2)) + draw.randbytes(draw.choice((0, 1, 31, 32)))
    same_kind: Sequence[Any] = ()
    if isinstance(old, int):
        same_kind = (*NUMBERS, old + 1, old - 1)
    elif isinstance(old, str):
        same_kind = (*TEXTS, old + "0", old[:-1], old.upper())
    return draw.choice(same_kind if same_kind and draw.random() < 0.7 else (*OTHERS, *NUMBERS))
