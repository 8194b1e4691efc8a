"""The server whose chunk size this one takes (``--chunk-size-from``), as its client.

The only module of the server that uses the connector: towards the first server this one is
a client like any other, with the same time-outs, breaker and reconnects.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from lmcache_persist import hashing, protocol
from lmcache_persist.connector import CacheClient, ClientOptions
from lmcache_persist.connector.replies import decode_binding
from lmcache_persist.errors import (
    BindingMismatch,
    ConfigError,
    MalformedMessage,
    PersistError,
    ServerUnreachable,
)

REQUEST_TIMEOUT_S = 2.0
"""For questions, and between two looks whether a silent server is back."""
PASS_TIMEOUT_S = 5.0
"""For a bind that is passed on: less than an engine waits for its own (10 s)."""
_PAUSE_S = 0.02
_PASSING = 16
"""Binds that may be passed on at once; more wait for these."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the first server said of itself; both None while it is unbound."""

    chunk_size: int | None
    boundary_id: str | None


@dataclass(frozen=True, slots=True)
class Passed:
    """The first server's answer to a bind that was passed on."""

    outcome: str
    chunk_size: int
    warnings: tuple[str, ...]


class Upstream:
    """The first server.

    Args:
        url: its endpoint.
        label: who asks, for its log.
        boot_id: of this server, which must not ask itself.

    Attributes:
        seen: what :meth:`wait` heard.

    Threads: any; every method but :meth:`close` waits, so not the loop.
    """

    def __init__(self, url: str, label: str, boot_id: str) -> None:
        self.url = url
        self._boot_id = boot_id
        self.seen: Seen | None = None
        options = ClientOptions(request_timeout_s=REQUEST_TIMEOUT_S)
        self._client = CacheClient(url, kind="cli", label=label, options=options)
        self.executor = ThreadPoolExecutor(_PASSING, thread_name_prefix="upstream")

    def wait(self, timeout_s: float) -> Seen | None:
        """What it says within a bounded time; None if it says nothing.

        Raises:
            BindingMismatch, ConfigError: as :meth:`look`.
        """
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            try:
                self._client.wait_connected(left)
                self.seen = self.look()
                return self.seen
            except (BindingMismatch, ConfigError):
                raise
            except PersistError:
                time.sleep(_PAUSE_S)
        return None

    def look(self) -> Seen:
        """What it is bound to.

        Raises:
            ServerUnreachable: it does not answer, or is no server of ours; names it.
            BindingMismatch: it means other boundaries by the same size.
            ConfigError: it is this server itself.
        """
        try:
            stats = self._client.stats(REQUEST_TIMEOUT_S)
        except PersistError as error:
            raise self._silent(error) from error
        self._check_other()
        size, boundary = stats.get("chunk_size"), stats.get("boundary_id")
        if size is None:
            return Seen(None, None)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise self._silent(MalformedMessage(f"it says chunk size {size!r:.40}"))
        self._check_boundary(size, str(boundary))
        return Seen(size, str(boundary))

    def pass_on(self, message: protocol.Bind) -> Passed:
        """Have it answer a bind.

        Raises:
            ServerUnreachable: it does not answer, or cannot bind now; names it. Retryable.
            GeometryError, BindingError: its refusal.
            BindingMismatch, ConfigError: as :meth:`look`.
            ConfigError: the first servers of several go round in a circle.
        """
        self._check_other()
        self._check_circle(message.via)
        try:
            reply = self._client.request(
                protocol.Bind,
                timeout_s=PASS_TIMEOUT_S,
                groups=message.groups,
                base=message.base,
                dry_run=message.dry_run,
                who=message.who,
                via=[*message.via, self._boot_id],
            )
            if not isinstance(reply, protocol.BindReply):
                raise MalformedMessage(f"bind was answered with {type(reply).__name__}")
            binding = decode_binding(reply.binding)
            if binding is None:
                raise MalformedMessage("bind was answered without a binding")
        except MalformedMessage as error:
            raise self._silent(error) from error
        except PersistError as error:
            # Stale and the like are between it and us; to the engine it does not answer.
            raise (self._silent(error) if error.retryable else error) from error
        self._check_boundary(binding.chunk_size, binding.boundary_id)
        return Passed(reply.outcome, binding.chunk_size, tuple(reply.warnings))

    def close(self) -> None:
        """Let it go; what waits for it fails at once. Bounded; repeatable."""
        self._client.close()
        self.executor.shutdown(wait=True, cancel_futures=True)

    def _check_other(self) -> None:
        if self._client.boot_id == self._boot_id:
            raise ConfigError(
                f"--chunk-size-from {self.url} is this server itself, expected another one",
                hint="give the endpoint of the server that is to decide",
            )

    def _check_circle(self, via: Sequence[str]) -> None:
        """Refuse to pass on what this server passed on already, or what came through too many."""
        if self._boot_id not in via and len(via) < protocol.MAX_HOPS:
            return
        raise ConfigError(
            f"--chunk-size-from {self.url} goes round in a circle: of {len(via)} servers that"
            " passed this on none decides, expected one that does",
            hint="start one of them without --chunk-size-from",
        )

    def _check_boundary(self, chunk_size: int, boundary_id: str) -> None:
        expected = hashing.boundary_id(chunk_size)
        if boundary_id != expected:
            raise BindingMismatch(
                f"server {self.url} is bound to chunk size {chunk_size} with boundary"
                f" {boundary_id[:12]}, expected {expected[:12]}: it hashes in another way",
                hint="run the same version of lmcache-persist on both",
                found=boundary_id,
                expected=expected,
            )

    def _silent(self, error: PersistError) -> ServerUnreachable:
        return ServerUnreachable(
            f"server {self.url}, whose chunk size this one takes (--chunk-size-from), gives no"
            f" answer: {error.fields.get('why') or error.message}",
            hint="nothing is bound before it does; start it, then try again",
            endpoint=self.url,
        )
