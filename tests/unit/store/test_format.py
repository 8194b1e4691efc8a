"""The encodings of the store."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_persist.hashing import EXTENT_BYTES
from lmcache_persist.store import format as fmt
from lmcache_persist.store.base import ChunkRecord, Place, StoredObject, StoredObjects
from lmcache_persist.store.objects import decode_table, num_extents
from store_support import key


def _record(sizes: dict[Place, int], binding_id: str = "ab" * 32) -> ChunkRecord:
    objects = {
        place: StoredObject(
            nbytes, tuple(bytes([index % 256]) * 16 for index in range(num_extents(nbytes)))
        )
        for place, nbytes in sizes.items()
    }
    return ChunkRecord(key(1), binding_id, StoredObjects.of(objects), 5, 6, 7, 1_700_000_000)


_SIZES = st.dictionaries(
    st.builds(Place, st.integers(0, 65535), st.integers(0, 65535)),
    st.integers(1, 4 * EXTENT_BYTES),
    min_size=1,
    max_size=8,
)


@given(_SIZES)
def test_record_survives_encoding(sizes: dict[Place, int]) -> None:
    """A record decodes to what was encoded, digests of each object included."""
    record = _record(sizes)
    decoded = fmt.decode_record(fmt.encode_record(record))
    assert decoded == record
    assert dict(decoded.objects) == dict(record.objects)


@given(_SIZES, st.data())
def test_altered_record_is_refused(sizes: dict[Place, int], data: st.DataObject) -> None:
    """One flipped bit, one byte less or one more is noticed."""
    raw = bytearray(fmt.encode_record(_record(sizes)))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= 1 << data.draw(st.integers(0, 7))
    for altered in (bytes(raw), fmt.encode_record(_record(sizes))[:-1], bytes(raw) + b"\0"):
        with pytest.raises(fmt.FormatError):
            fmt.decode_record(altered)


def test_recorded_bytes() -> None:
    """The format on disk has not changed since version 1."""
    record = _record({Place(0, 0): 100, Place(1, 2): EXTENT_BYTES + 1})
    encoded = fmt.encode_record(record)
    assert (fmt.FORMAT_VERSION, len(encoded)) == (1, 8 + 132 + 2 * 12 + 3 * 16)
    assert encoded[8:40].hex() == (
        "05000000000000000600000000000000070000000000000000f1536500000000"
    )
    assert fmt.extent_key(1, Place(2, 3), 4).hex() == "00000000000000010002000300000004"
    assert fmt.order_key(258).hex() == "0000000000000102"


def test_no_binding_has_its_own_bytes() -> None:
    """A record written before any binding says so."""
    record = _record({Place(0, 0): 1}, fmt.NO_BINDING)
    assert fmt.decode_record(fmt.encode_record(record)).binding_id == ""


def test_altered_meta_is_refused() -> None:
    """A changed byte in a meta value is noticed; what is whole decodes."""
    raw = fmt.encode_meta({"a": 1})
    assert fmt.decode_meta(raw) == {"a": 1}
    with pytest.raises(fmt.FormatError):
        fmt.decode_meta(raw.replace(b"1", b"2"))


def test_equal_tables_are_shared() -> None:
    """Chunks with the same places and sizes share one decoded table, whose masks agree."""
    one, two = (_record({Place(0, 0): 1, Place(1, 0): 2, Place(0, 3): 3}) for _ in range(2))
    first = fmt.decode_record(fmt.encode_record(one))
    second = fmt.decode_record(fmt.encode_record(two))
    assert first.objects.table is second.objects.table
    assert first.objects.group_mask(1) == 0b1001
    assert first.objects.group_mask(2) == 0b0001


@pytest.mark.parametrize("raw", [b"x" * 11, b"\0" * 24])
def test_bad_table_is_refused(raw: bytes) -> None:
    """A table that is cut or repeats a place is refused."""
    with pytest.raises(ValueError, match="object table"):
        decode_table(raw)
