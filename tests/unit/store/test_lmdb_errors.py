"""Every exception of lmdb becomes one of ours."""

from __future__ import annotations

import errno

import lmdb
import pytest

from lmcache_persist.errors import StoreDamaged, StoreError, StoreFull, StoreIOError
from lmcache_persist.store import lmdb_errors
from lmcache_persist.store.lmdb_errors import mapping_errors


def _classes() -> list[type[lmdb.Error]]:
    return [
        value
        for value in vars(lmdb).values()
        if isinstance(value, type) and issubclass(value, lmdb.Error) and value is not lmdb.Error
    ]


def test_tables_name_every_class_once() -> None:
    """The three tables together hold every exception class of lmdb, each once."""
    tables = [*lmdb_errors.DAMAGED, *lmdb_errors.FULL, *lmdb_errors.IO]
    assert len(tables) == len(set(tables))
    assert set(tables) == set(_classes())
    assert len(tables) >= 29


@pytest.mark.parametrize("cls", [lmdb.Error, *_classes()], ids=lambda cls: cls.__name__)
def test_each_class_is_mapped(cls: type[lmdb.Error]) -> None:
    """Whatever lmdb raises comes out as a StoreError with the cause kept."""
    with pytest.raises(StoreError, match="trying") as caught, mapping_errors("trying"):
        raise cls("mdb_something")
    assert isinstance(caught.value.__cause__, cls)
    expected = (
        StoreDamaged
        if cls in lmdb_errors.DAMAGED
        else StoreFull
        if cls in lmdb_errors.FULL
        else StoreIOError
    )
    assert type(caught.value) is expected


def test_os_errors_are_mapped() -> None:
    """An errno says nothing about an object: it is an I/O error, never damage."""
    with pytest.raises(StoreIOError, match="trying: Input/output error"), mapping_errors("trying"):
        raise OSError(errno.EIO, "Input/output error")
