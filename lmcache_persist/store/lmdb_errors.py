"""LMDB's exceptions become ours, once, here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import lmdb

from lmcache_persist.errors import StoreDamaged, StoreError, StoreFull, StoreIOError

DAMAGED: tuple[type[lmdb.Error], ...] = (
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.PageFullError,
    lmdb.CursorFullError,
    lmdb.PanicError,
    lmdb.InvalidError,
    lmdb.VersionMismatchError,
    lmdb.IncompatibleError,
    lmdb.BadChecksumError,
    lmdb.ProblemError,
    # Of transactions, handles and keys as we use them: only broken pages bring these.
    lmdb.BadTxnError,
    lmdb.BadDbiError,
    lmdb.BadValsizeError,
    lmdb.KeyExistsError,
    lmdb.NotFoundError,
)
"""The store's own structure is broken, or no store of ours."""

FULL: tuple[type[lmdb.Error], ...] = (lmdb.MapFullError, lmdb.TxnFullError)
"""More room is needed than there is."""

IO: tuple[type[lmdb.Error], ...] = (
    lmdb.DiskError,
    lmdb.MemoryError,
    lmdb.LockError,
    lmdb.ReadonlyError,
    lmdb.ReadersFullError,
    lmdb.TlsFullError,
    lmdb.DbsFullError,
    lmdb.MapResizedError,
    lmdb.BadRslotError,
    lmdb.InvalidParameterError,
    lmdb.CryptoFailError,
    lmdb.EnvEncryptionError,
)
"""Something else failed; says nothing about what is stored."""


def mapped(error: lmdb.Error, doing: str) -> StoreError:
    """Our exception for one of LMDB's."""
    text = f"{doing}: {error}"
    if isinstance(error, DAMAGED):
        return StoreDamaged(text)
    if isinstance(error, FULL):
        return StoreFull(text)
    return StoreIOError(text)


@contextmanager
def mapping_errors(doing: str) -> Iterator[None]:
    """Raise what LMDB and the operating system raise as ours.

    Args:
        doing: the start of the message, such as ``"a write to the store failed"``.

    Raises:
        StoreDamaged, StoreFull, StoreIOError: see the tables of this module.
    """
    try:
        yield
    except lmdb.Error as error:
        raise mapped(error, doing) from error
    except OSError as error:
        raise StoreIOError(f"{doing}: {error.strerror or error}") from error
