"""The session with the server: hello, restore, heartbeats, and starting over.

States, all moved on by the I/O thread::

    down --connect--> greeting --welcome, lock, pool, welcome--> restoring
         --remembered bind and registrations answered--> up (or up and cold: refused)
    any --connection lost, time-out, other boot id, stale--> down

Callers see only :attr:`Session.link`: an immutable snapshot while up, None otherwise.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from lmcache_persist.binding import Binding
from lmcache_persist.connector import replies
from lmcache_persist.connector.debts import Debts, Make
from lmcache_persist.connector.greeting import Greeting
from lmcache_persist.connector.link import Link, WishKey
from lmcache_persist.connector.options import ClientOptions
from lmcache_persist.connector.pool_map import PoolMaps
from lmcache_persist.connector.restoring import Remembered
from lmcache_persist.connector.results import Change
from lmcache_persist.connector.transport import DoneCall, LateCall, Transport
from lmcache_persist.connector.unreachable import look, unreachable
from lmcache_persist.endpoint import Endpoint
from lmcache_persist.errors import (
    PersistError,
    ServerUnreachable,
    Stale,
    UnexpectedChunkSize,
)
from lmcache_persist.protocol import Bye, Ping, Reply, encode

log = logging.getLogger(__name__)

_GLANCE_S = 0.1
"""For a look on the I/O thread: a log line is not worth more."""
_REAP_S = 0.25
_BYE_S = 0.5
_JOIN_S = 5.0


class Session:
    """The state machine of one client.

    Threads: attributes may be read, and :meth:`send`, :meth:`owe` and the ``set`` calls
        made, by any; ``on_*`` and names with an underscore the I/O thread.
    """

    def __init__(self, endpoint: Endpoint, kind: str, label: str, options: ClientOptions) -> None:
        self.endpoint, self.options = endpoint, options
        self.remembered = Remembered()
        self.pools = PoolMaps(options.pool_idle_s, options.touch_pool)
        self.link: Link | None = None
        self.binding: Binding | None = None
        self.durable_seq = 0
        self.last_session_id = ""
        self.trouble: PersistError | None = None
        self._transport = Transport(endpoint, self, options.max_in_flight)
        self._greeting = Greeting(self._transport, kind, label, self.pools, options)
        self._changed = threading.Condition()
        self._closing = False
        self._listeners: list[Callable[[Change], None]] = []
        self._debts = Debts(self._send_debt)
        self._generation = 0
        self._failures = 0
        self._reaping = False
        self._reconnecting = False

    # -- any thread ----------------------------------------------------------------------

    def start(self) -> None:
        """Start the I/O thread and the first connection."""
        self._transport.start()
        self._transport.submit(self._connect, always=True)

    def on_io_thread(self) -> bool:
        """Whether the caller runs on the I/O thread."""
        return self._transport.on_io_thread()

    @property
    def connections(self) -> int:
        """How often it went up."""
        return self._generation

    def wait_link(self, timeout_s: float) -> Link:
        """Wait until up.

        Raises:
            ServerUnreachable: not within ``timeout_s``; says why, as far as a look can tell,
                which takes half a second more at most.
            PersistError: a server answers and cannot be worked with.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                link, trouble = self.link, self.trouble
                if link is not None:
                    return link
                # Seen twice: the first may come of a server that is just being replaced.
                if trouble is not None and not trouble.retryable and self._failures > 1:
                    raise trouble
                left = deadline - time.monotonic()
                if left <= 0 or self._closing:
                    break
                self._changed.wait(left)
        if self._closing:
            raise self.unreachable()
        finding = look(self.endpoint)  # without the lock: it takes a moment
        raise unreachable(self.endpoint, trouble, finding=finding, timeout_s=timeout_s)

    def unreachable(self) -> ServerUnreachable:
        """The error for "no server", with what was seen last; waits for nothing."""
        return unreachable(self.endpoint, self.trouble)

    def missing(self) -> ServerUnreachable:
        """As :meth:`unreachable`, with what a look finds, which takes half a second at most."""
        if self.trouble is None or self._closing:
            return self.unreachable()
        waited_s = self.trouble.fields.get("waited_s", self.options.request_timeout_s)
        return unreachable(
            self.endpoint, self.trouble, finding=look(self.endpoint), timeout_s=waited_s
        )

    def send(
        self,
        link: Link,
        body: bytes,
        timeout_s: float,
        done: DoneCall,
        late: LateCall | None = None,
    ) -> None:
        """Send an encoded request that was made for ``link``; ``done`` is called once."""
        if not self._transport.submit(partial(self._send, link, body, timeout_s, done, late)):
            done(self.unreachable())

    def owe(self, session_id: str, make: Make) -> None:
        """Say something to the server of that session, now or when it is back; or never."""
        self._transport.submit(partial(self._owe, session_id, make), always=True)

    def set_bound(self, boot: str, binding: Binding) -> None:
        """The server of that boot agreed to a bind."""
        with self._changed:
            if self.link is not None and self.link.boot == boot:
                self.link = replace(self.link.agreed(None), binding=binding)
                self.binding = binding

    def set_registered(self, boot: str, key: WishKey) -> None:
        """The server of that boot agreed to a registration."""
        with self._changed:
            if self.link is not None and self.link.boot == boot:
                self.link = self.link.agreed(key)

    def set_refused(self, key: WishKey, error: PersistError) -> None:
        """The server refused: lookups and stores fail with ``error`` until it agrees."""
        with self._changed:
            if self.link is not None:
                self.link = self.link.refused(key, error)

    def add_listener(self, callback: Callable[[Change], None]) -> None:
        """Call ``callback`` on the I/O thread after each connection, and for the present one."""
        self._transport.submit(partial(self._add_listener, callback), always=True)

    def close(self) -> None:
        """Say bye and end the thread; bounded, repeatable."""
        self._closing = True
        said = threading.Event()
        if not self.on_io_thread() and self._transport.submit(
            partial(self._say_bye, said), always=True
        ):
            said.wait(_BYE_S)
        if not self._transport.stop(_JOIN_S):
            log.warning("the I/O thread of the client of %s did not end", self.endpoint)
        self.pools.close()

    # -- I/O thread: requests ------------------------------------------------------------

    def later(self, delay_s: float, work: Callable[[], None]) -> None:
        """Run ``work`` after a while. Threads: the I/O thread only."""
        self._transport.call_later(delay_s, work)

    def _send(
        self, link: Link, body: bytes, timeout_s: float, done: DoneCall, late: LateCall | None
    ) -> None:
        now = self.link
        if now is None:
            done(self.unreachable())
        elif now.generation != link.generation:
            done(Stale("the server was connected anew after the request was made"))
        else:
            self._transport.request(body, timeout_s, partial(self._judge, link, done), late)

    def _judge(self, link: Link, done: DoneCall, reply: Reply | PersistError) -> None:
        """Pass a reply on, unless it shows that this is not the server that was greeted."""
        outcome, lost = replies.judge(link.boot, reply)
        if not isinstance(outcome, PersistError):
            self.durable_seq = max(self.durable_seq, outcome.durable_seq)
        if lost is not None and self.link is not None and self.link.generation == link.generation:
            self._lose(lost)
        done(outcome)

    def _owe(self, session_id: str, make: Make) -> None:
        self._debts.add(self.link, session_id, make)

    def _send_debt(self, link: Link, body: bytes, done: DoneCall) -> None:
        timeout_s = self.options.request_timeout_s
        self._transport.request(body, timeout_s, partial(self._judge, link, done))

    # -- I/O thread: connection ----------------------------------------------------------

    def _connect(self) -> None:
        self._reconnecting = False
        if not self._closing:
            self._transport.connect(self.options.request_timeout_s)

    def on_connected(self) -> None:
        """Greet the server."""
        self._greeting.begin(self.last_session_id, self._greeted)

    def on_lost(self, error: PersistError) -> None:
        """Down; try again: at once if a heartbeat had been answered, else after a pause."""
        was_up = self.link is not None
        with self._changed:
            self.link, self.trouble = None, error
            self._changed.notify_all()
        # Of a time-out both the transport and whoever waited for the answer tell.
        if self._closing or self._reconnecting:
            return
        self._reconnecting = True
        if was_up:
            finding = look(self.endpoint, _GLANCE_S)
            now = f"; now: {finding.text}" if finding and finding.reason != "listening" else ""
            log.warning("cache server %s is gone: %s%s", self.endpoint, error.message, now)
        self._start_reaping()
        delay_s = 0.0
        if self._failures:
            delay_s = min(
                self.options.reconnect_max_s,
                self.options.reconnect_min_s * 2 ** min(self._failures - 1, 16),
            )
        self._failures += 1
        self._transport.call_later(delay_s, self._connect)

    def _lose(self, error: PersistError) -> None:
        self._transport.drop(ServerUnreachable(f"connection was given up: {error.message}"))
        self.on_lost(error)

    def _greeted(self, outcome: Link | PersistError) -> None:
        if isinstance(outcome, PersistError):
            self._lose(outcome)
            return
        self.remembered.restore(
            self._transport, outcome, self.options.connect_timeout_s, self._restored
        )

    def _restored(self, outcome: Link | PersistError) -> None:
        if isinstance(outcome, PersistError):
            self._lose(outcome)
        else:
            self._go_up(outcome)

    def _go_up(self, link: Link) -> None:
        self._generation += 1
        link = replace(link, generation=self._generation)
        if link.session != self.last_session_id:
            self.durable_seq = 0
        with self._changed:
            self.link, self.trouble, self.binding = link, None, link.binding
            self.last_session_id = link.session
            self._changed.notify_all()
        size = link.binding.chunk_size if link.binding else None
        log.info("cache server %s: boot %s, chunk size %s", self.endpoint, link.boot, size)
        self._debts.settle(link)
        self._tell_all(link)
        self._start_reaping()
        self._transport.call_later(self.options.heartbeat_s, partial(self._beat, link.generation))

    def _beat(self, generation: int) -> None:
        link = self.link
        if link is None or link.generation != generation:
            return
        self._transport.request(
            encode(Ping(**link.header())),
            self.options.request_timeout_s,
            partial(self._judge, link, self._beat_answered),
        )
        if self._awaits_binding(link):
            self.remembered.restore(
                self._transport,
                replace(link, refusals=()),
                self.options.request_timeout_s,
                partial(self._bound_meanwhile, generation),
            )
        self._transport.call_later(self.options.heartbeat_s, partial(self._beat, generation))

    def _beat_answered(self, reply: Reply | PersistError) -> None:
        if not isinstance(reply, PersistError):
            self._failures = 0

    @staticmethod
    def _awaits_binding(link: Link) -> bool:
        """Whether the server is unbound, and not what is expected if it were bound now.

        Only then can a refusal turn into an agreement without another connection:
        somebody else may bind it to the expected size.
        """
        return link.binding is None and isinstance(link.refusal(None), UnexpectedChunkSize)

    def _bound_meanwhile(self, generation: int, outcome: Link | PersistError) -> None:
        now = self.link
        if now is None or now.generation != generation or not self._awaits_binding(now):
            return
        if isinstance(outcome, PersistError):
            self._lose(outcome)
        elif not self._awaits_binding(outcome):
            with self._changed:
                self.link, self.binding = outcome, outcome.binding
            self._tell_all(outcome)

    def _add_listener(self, callback: Callable[[Change], None]) -> None:
        self._listeners.append(callback)
        if self.link is not None:
            self._tell(callback, self.link)

    def _tell_all(self, link: Link) -> None:
        if link.cold is not None:
            log.warning("running cold, cache server %s refuses: %s", self.endpoint, link.cold)
        for callback in self._listeners:
            self._tell(callback, link)

    def _tell(self, callback: Callable[[Change], None], link: Link) -> None:
        try:
            callback(Change(link.generation, link.boot, link.binding, link.cold))
        except Exception:
            # It is the user's; the connection must not die of it.
            log.exception("an on_change callback failed")

    def _start_reaping(self) -> None:
        if not self._reaping:
            self._reaping = True
            self._transport.call_later(0, self._reap)

    def _reap(self) -> None:
        self._reaping = False
        if self.pools.reap(self.link.boot if self.link else None) and not self._closing:
            self._reaping = True
            self._transport.call_later(_REAP_S, self._reap)

    def _say_bye(self, said: threading.Event) -> None:
        link = self.link
        if link is None:
            said.set()
            return
        self._transport.request(encode(Bye(**link.header())), _BYE_S, lambda _: said.set())
