"""What a server answers, judged before a byte of the pool is touched."""

from __future__ import annotations

import pytest

from lmcache_persist.connector.replies import check_grants
from lmcache_persist.errors import MalformedMessage
from lmcache_persist.protocol import Grant, Reserved

POOL_BYTES, OBJECT_BYTES = 1 << 20, 4096


def reserved(offset: int) -> Reserved:
    """The answer to one key of one group."""
    return Reserved(boot="b" * 32, grants=[Grant(0, 7, [offset])])


@pytest.mark.parametrize("offset", [0, 1, POOL_BYTES - OBJECT_BYTES])
def test_slots_in_the_pool_are_taken(offset: int) -> None:
    """The last slot that fits is one of them."""
    answer = reserved(offset)
    assert check_grants(answer, [1], [OBJECT_BYTES], POOL_BYTES) is answer


@pytest.mark.parametrize("offset", [-1, POOL_BYTES - OBJECT_BYTES + 1, POOL_BYTES, 2**62])
def test_slots_outside_of_the_pool_are_refused(offset: int) -> None:
    """One byte beyond is too many."""
    with pytest.raises(MalformedMessage, match="does not fit"):
        check_grants(reserved(offset), [1], [OBJECT_BYTES], POOL_BYTES)
