"""Every exception class of lmcache-persist.

The tree (``code`` in parentheses travels on the wire and never changes its meaning)::

    PersistError
    +-- ConfigError (config)
    |   +-- UsageError (usage)
    +-- GeometryError (geometry)
    |   +-- InvalidTokensPerBlock (invalid_tokens_per_block)
    |   +-- NoCacheableGroup (no_cacheable_group)
    |   +-- AlignmentTooLarge (alignment_too_large)
    |   +-- UnsupportedGroup (unsupported_group)
    +-- BindingError (binding)
    |   +-- IncompatibleAlignment (incompatible_alignment)
    |   +-- Unbound (unbound)
    |   +-- UnexpectedChunkSize (unexpected_chunk_size)
    |   +-- Stale (stale)
    +-- RegistrationError (registration)
    |   +-- IdentityUnknown (identity_unknown)
    |   +-- IdentityMismatch (identity_mismatch)
    |   +-- ChunkTooLarge (chunk_too_large)
    +-- StartupRefused (startup_refused)
    |   +-- BindingMismatch (binding_mismatch)
    |   +-- StoreMismatch (store_mismatch)
    |   +-- ManifestUnreadable (manifest_unreadable)
    |   +-- SchemaTooNew (schema_too_new)
    |   +-- FormatTooNew (format_too_new)
    |   +-- DataDirLocked (data_dir_locked)
    |   +-- DataDirUnusable (data_dir_unusable)
    |   +-- DiskTooSmall (disk_too_small)
    |   +-- PoolTooSmall (pool_too_small)
    +-- ManifestError (manifest)
    |   +-- ManifestBusy (manifest_busy)
    +-- StoreError (store)
    |   +-- StoreFull (store_full)
    |   +-- StoreBusy (store_busy)
    |   +-- StoreIOError (store_io)
    |   +-- StoreDamaged (store_damaged)
    |   +-- StoreGone (store_gone)
    |   +-- ObjectCorrupt (object_corrupt)
    +-- ProtocolError (protocol)
    |   +-- MalformedMessage (malformed_message)
    |   +-- MessageTooLarge (message_too_large)
    |   +-- UnsupportedVersion (unsupported_version)
    +-- OutputFailed (output)
    +-- LeaseError (lease)
    |   +-- SlotNotWritten (slot_not_written)
    +-- TransportError (transport)
        +-- RequestTimeout (request_timeout)
        +-- ServerUnreachable (server_unreachable)

A miss is a value, not an error. Programming errors are plain ``ValueError``,
``TypeError`` or ``RuntimeError`` and stand outside of the tree.
"""

from __future__ import annotations

from typing import Any, ClassVar


class PersistError(Exception):
    """Base of all errors that lmcache-persist raises on purpose.

    Args:
        message: subject, what was found, what was expected; lower case.
        hint: what resolves it, a command where there is one.
        **fields: the values the message speaks of, for programs; plain JSON values.
    """

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, hint: str | None = None, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.fields = fields

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class ConfigError(PersistError):
    """A setting is unknown, missing or out of range."""

    code = "config"


class UsageError(ConfigError):
    """A verb of the command line is called with words that do not fit it."""

    code = "usage"


class GeometryError(PersistError):
    """A geometry cannot be served."""

    code = "geometry"


class InvalidTokensPerBlock(GeometryError):
    """A tokens_per_block is no integer, negative, or not given at all."""

    code = "invalid_tokens_per_block"


class NoCacheableGroup(GeometryError):
    """No group has a positive tokens_per_block."""

    code = "no_cacheable_group"


class AlignmentTooLarge(GeometryError):
    """The chunk size that the geometry needs is beyond the configured maximum."""

    code = "alignment_too_large"


class UnsupportedGroup(GeometryError):
    """A group cannot be cached as the engine keeps it."""

    code = "unsupported_group"


class BindingError(PersistError):
    """Something disagrees with the binding."""

    code = "binding"


class IncompatibleAlignment(BindingError):
    """The bound chunk size is no multiple of the alignment a model requires."""

    code = "incompatible_alignment"


class Unbound(BindingError):
    """The verb needs a binding and there is none yet."""

    code = "unbound"
    retryable = True


class UnexpectedChunkSize(BindingError):
    """The server is bound to another size than the client was told to expect."""

    code = "unexpected_chunk_size"


class Stale(BindingError):
    """A message carries another boot id, session or binding than the server's."""

    code = "stale"
    retryable = True


class RegistrationError(PersistError):
    """A worker's registration is refused."""

    code = "registration"


class IdentityUnknown(RegistrationError):
    """What decides the meaning of the KV bytes could not be established."""

    code = "identity_unknown"


class IdentityMismatch(RegistrationError):
    """The ranks of one engine disagree about what they run."""

    code = "identity_mismatch"


class ChunkTooLarge(RegistrationError):
    """One chunk over all groups and ranks does not fit into half of the pool."""

    code = "chunk_too_large"


class StartupRefused(PersistError):
    """The server does not start; the data dir was not changed."""

    code = "startup_refused"


class BindingMismatch(StartupRefused):
    """Flags ask for another binding than the one on disk."""

    code = "binding_mismatch"


class StoreMismatch(StartupRefused):
    """Manifest and store do not belong together."""

    code = "store_mismatch"


class ManifestUnreadable(StartupRefused):
    """There is a manifest and it cannot be read."""

    code = "manifest_unreadable"


class SchemaTooNew(StartupRefused):
    """The manifest was written by a newer version."""

    code = "schema_too_new"


class FormatTooNew(StartupRefused):
    """The store was written by a newer version."""

    code = "format_too_new"


class DataDirLocked(StartupRefused):
    """Another server holds the data dir."""

    code = "data_dir_locked"


class DataDirUnusable(StartupRefused):
    """The data dir cannot be created, read, written or trusted."""

    code = "data_dir_unusable"


class DiskTooSmall(StartupRefused):
    """The file system has less room than ``--capacity`` asks for."""

    code = "disk_too_small"


class PoolTooSmall(StartupRefused):
    """The shared-memory file system has less room than ``--pool-size`` asks for."""

    code = "pool_too_small"


class ManifestError(PersistError):
    """The manifest failed while the server ran."""

    code = "manifest"


class ManifestBusy(ManifestError):
    """Another process held the manifest's lock for too long."""

    code = "manifest_busy"
    retryable = True


class StoreError(PersistError):
    """The disk tier failed while the server ran."""

    code = "store"


class StoreFull(StoreError):
    """The disk tier has no room, even after eviction."""

    code = "store_full"
    retryable = True


class StoreBusy(StoreError):
    """Something else holds the store for too long; nothing was changed."""

    code = "store_busy"
    retryable = True


class StoreIOError(StoreError):
    """The operating system or LMDB reported an error; says nothing about the object."""

    code = "store_io"
    retryable = True


class StoreDamaged(StoreError):
    """The store's own structure is broken: file length, meta or tree pages, lost records."""

    code = "store_damaged"


class StoreGone(StoreError):
    """Files of a live server were removed, moved or replaced: nothing it writes will last."""

    code = "store_gone"


class ObjectCorrupt(StoreError):
    """An object is proven bad: length, key or digest disagree with its record."""

    code = "object_corrupt"


class ProtocolError(PersistError):
    """A message breaks the protocol; the peer's fault."""

    code = "protocol"


class MalformedMessage(ProtocolError):
    """A message cannot be decoded or breaks a bound."""

    code = "malformed_message"


class MessageTooLarge(MalformedMessage):
    """A message is larger than the protocol allows."""

    code = "message_too_large"


class UnsupportedVersion(ProtocolError):
    """Client and server share no protocol version."""

    code = "unsupported_version"


class OutputFailed(PersistError):
    """Stdout cannot be written: closed, a full disk, or the like."""

    code = "output"


class LeaseError(PersistError):
    """A lease or reservation is unknown or belongs to somebody else."""

    code = "lease"


class SlotNotWritten(LeaseError):
    """A commit names a slot that still holds the bytes it was reserved with."""

    code = "slot_not_written"


class TransportError(PersistError):
    """No answer from the server."""

    code = "transport"
    retryable = True


class RequestTimeout(TransportError):
    """The server did not answer in time."""

    code = "request_timeout"


class ServerUnreachable(TransportError):
    """Nobody answers at the endpoint."""

    code = "server_unreachable"


def _tree(cls: type[PersistError]) -> list[type[PersistError]]:
    return [cls] + [sub for child in cls.__subclasses__() for sub in _tree(child)]


ERRORS_BY_CODE: dict[str, type[PersistError]] = {cls.code: cls for cls in _tree(PersistError)}
"""Error classes by their wire code, to raise at the client what the server refused."""


def from_code(code: str, message: str, *, hint: str | None = None, **fields: Any) -> PersistError:
    """The exception for a wire code; an unknown code becomes a plain :class:`PersistError`."""
    return ERRORS_BY_CODE.get(code, PersistError)(message, hint=hint, **fields)
