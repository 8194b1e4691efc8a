"""The I/O thread and its sockets. The only module of the connector that knows ZeroMQ.

A :class:`Wire` is one DEALER socket for one connection: libzmq is told never to reconnect
it and to take messages only for a connection that stands, so nothing that was sent to one
server can reach the next. When a connection ends, a request times out or a reply cannot be
read, the wire is dropped and all of its calls fail; a new connection is a new wire. Request
ids are never used twice, so that a late reply completes nothing.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from lmcache_persist.connector.inbox import Inbox, Timers, Work
from lmcache_persist.endpoint import Endpoint
from lmcache_persist.errors import (
    MalformedMessage,
    PersistError,
    ProtocolError,
    RequestTimeout,
    ServerUnreachable,
    TransportError,
)
from lmcache_persist.protocol import (
    MAX_MESSAGE_BYTES,
    REQUEST_ID_BYTES,
    Reply,
    decode_reply,
)

log = logging.getLogger(__name__)

DoneCall = Callable[[Reply | PersistError], None]
LateCall = Callable[[Reply], None]

_MAX_RETIRED = 4
"""Wires kept to read late replies from; each belongs to one time-out."""
_REPLIES_PER_TURN = 64
_RECEIVE_QUEUE = 64
"""Replies taken ahead of the I/O thread: at 4 MiB each, all the memory a server can have."""
_MAX_SLEEP_S = 60.0
_ENDED = (
    zmq.Event.CLOSED
    | zmq.Event.DISCONNECTED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)


class Owner(Protocol):
    """Who is told about connections; all calls come on the I/O thread."""

    def on_connected(self) -> None:
        """The connection stands; requests can be sent."""

    def on_lost(self, error: PersistError) -> None:
        """It ended, or none came about; its calls have failed already."""


@dataclass(frozen=True, slots=True)
class _Call:
    done: DoneCall
    late: LateCall | None


class Wire:
    """One socket for one connection. Threads: the I/O thread only."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: Endpoint) -> None:
        self.calls: dict[bytes, _Call] = {}
        self.connected = False
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.immediate = True
        self.socket.ipv6 = endpoint.ipv6
        self.socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self.socket.setsockopt(zmq.RCVHWM, _RECEIVE_QUEUE)
        self.monitor = self.socket.get_monitor_socket(_ENDED)
        self.monitor.linger = 0
        self.socket.connect(endpoint.url)

    def send(self, request_id: bytes, body: bytes) -> bool:
        """Whether the message went onto the connection; never waits."""
        try:
            self.socket.send_multipart((request_id, body), flags=zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def receive(self) -> list[bytes] | None:
        """The frames of one message, None if there is none; never waits."""
        try:
            return self.socket.recv_multipart(flags=zmq.DONTWAIT)
        except zmq.Again:
            return None

    def ended(self) -> bool:
        """Whether the monitor has said that the connection is over or never came about."""
        try:
            recv_monitor_message(self.monitor, flags=zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        """Drop the connection and everything unsent."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)


class Transport:
    """The I/O thread: wires, requests with deadlines, timers, and work handed in.

    Args:
        endpoint: where to connect.
        owner: is told of connections.
        max_in_flight: requests without an answer, and entries of the work queue.

    Threads: :meth:`submit`, :meth:`start`, :meth:`stop` and :meth:`on_io_thread` any; the
        rest only the I/O thread.
    """

    def __init__(self, endpoint: Endpoint, owner: Owner, max_in_flight: int) -> None:
        self._endpoint, self._owner, self._max = endpoint, owner, max_in_flight
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox, self._timers = Inbox(max_in_flight), Timers()
        self._stopping = False
        self._wire: Wire | None = None
        self._retired: list[Wire] = []
        self._numbers = itertools.count(1)
        self._poller = zmq.Poller()
        self._poller.register(self._inbox.fd, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="lmcache-persist-io", daemon=True)

    # -- any thread ----------------------------------------------------------------------

    def start(self) -> None:
        """Start the I/O thread."""
        self._thread.start()

    def on_io_thread(self) -> bool:
        """Whether the caller runs on the I/O thread."""
        return threading.current_thread() is self._thread

    def submit(self, work: Work, *, always: bool = False) -> bool:
        """Have the I/O thread run ``work``; False if it has ended or its queue is full."""
        return self._inbox.put(work, always=always)

    def stop(self, timeout_s: float) -> bool:
        """End the thread; its calls fail. False if it had not ended in time."""
        self.submit(self._stop, always=True)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # -- I/O thread: what the owner uses -------------------------------------------------

    def connect(self, timeout_s: float) -> None:
        """Start a new connection; the owner hears how it went."""
        self.drop(ServerUnreachable("connection is replaced by a new one"))
        wire = self._wire = Wire(self._context, self._endpoint)
        self._poller.register(wire.socket, zmq.POLLIN | zmq.POLLOUT)
        self._poller.register(wire.monitor, zmq.POLLIN)
        self.call_later(timeout_s, partial(self._check_connected, wire, timeout_s))

    def request(
        self, body: bytes, timeout_s: float, done: DoneCall, late: LateCall | None = None
    ) -> None:
        """Send a request; ``done`` is called once, with the reply or the error.

        ``late`` gets the reply if it comes after the time-out of any call of the wire.
        """
        wire = self._wire
        if wire is None or not wire.connected:
            done(ServerUnreachable(f"server {self._endpoint} is not connected"))
            return
        request_id = next(self._numbers).to_bytes(REQUEST_ID_BYTES, "little")
        if len(wire.calls) >= self._max or not wire.send(request_id, body):
            done(TransportError(f"server {self._endpoint} takes no more requests now"))
            return
        wire.calls[request_id] = _Call(done, late)
        self.call_later(timeout_s, partial(self._expire, wire, request_id, timeout_s))

    def call_later(self, delay_s: float, work: Work) -> None:
        """Run ``work`` after a while, unless the thread ends first."""
        self._timers.add(delay_s, work)

    def drop(self, error: PersistError, *, listen: bool = False) -> None:
        """Give the connection up and fail its calls with ``error``.

        Args:
            error: for every call without an answer.
            listen: go on reading, for replies that come late, until the server closes.
        """
        wire, self._wire = self._wire, None
        if wire is None:
            return
        calls, wire.calls = wire.calls, {}
        if listen and wire.connected and any(call.late for call in calls.values()):
            wire.calls = {key: call for key, call in calls.items() if call.late}
            self._retired.append(wire)
            if len(self._retired) > _MAX_RETIRED:
                self._discard(self._retired.pop(0))
        else:
            self._discard(wire)
        for call in calls.values():
            call.done(error)

    # -- I/O thread: inside --------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except Exception:
            log.exception("the I/O thread failed; this client has no server from now on")
        finally:
            self._end()

    def _turn(self) -> None:
        # Rounded up: a poll that ends just before its timer would spin.
        ready = dict(self._poller.poll(int(self._timers.sleep_s(_MAX_SLEEP_S) * 1000) + 1))
        self._inbox.run(woken=self._inbox.fd in ready)
        wire = self._wire
        if wire is not None and wire.socket in ready:
            self._serve(wire, ready[wire.socket])
        if wire is not None and wire is self._wire and wire.monitor in ready and wire.ended():
            ended = "closed the connection" if wire.connected else "took no connection"
            self._lose(ServerUnreachable(f"server {self._endpoint} {ended}"))
        for old in self._retired.copy():
            if old.socket in ready or old.monitor in ready:
                self._serve_retired(old)
        self._timers.run_due()

    def _serve(self, wire: Wire, events: int) -> None:
        if events & zmq.POLLOUT and not wire.connected:
            wire.connected = True
            self._poller.modify(wire.socket, zmq.POLLIN)
            self._owner.on_connected()
        for _ in range(_REPLIES_PER_TURN):
            if wire is not self._wire:
                return
            frames = wire.receive()
            if frames is None:
                return
            self._take(wire, frames)

    def _take(self, wire: Wire, frames: list[bytes]) -> None:
        call = wire.calls.pop(frames[0], None)
        if call is None and len(frames[0]) == REQUEST_ID_BYTES:
            return
        try:
            if call is None or len(frames) != 2:
                raise MalformedMessage(f"reply has {len(frames)} frames, expected 2")
            reply = decode_reply(frames[1])
        except ProtocolError as error:
            if call is not None:
                call.done(error)
            self._lose(error)
            return
        call.done(reply)

    def _serve_retired(self, wire: Wire) -> None:
        for _ in range(_REPLIES_PER_TURN):
            frames = wire.receive()
            if frames is None:
                break
            call = wire.calls.pop(frames[0], None)
            if call is None or call.late is None or len(frames) != 2:
                continue
            try:
                call.late(decode_reply(frames[1]))
            except ProtocolError:
                wire.calls.clear()
        if not wire.calls or wire.ended():
            self._retired.remove(wire)
            self._discard(wire)

    def _expire(self, wire: Wire, request_id: bytes, timeout_s: float) -> None:
        if wire is not self._wire or request_id not in wire.calls:
            return
        call = wire.calls[request_id]
        # Left in place with its late handler: the drop fails the others, this one says more.
        wire.calls[request_id] = _Call(lambda _: None, call.late)
        error = RequestTimeout(
            f"server {self._endpoint} did not answer within {timeout_s:g} s", waited_s=timeout_s
        )
        self._lose(error, listen=True)
        call.done(error)

    def _check_connected(self, wire: Wire, timeout_s: float) -> None:
        if wire is self._wire and not wire.connected:
            self._lose(
                RequestTimeout(
                    f"server {self._endpoint} does not answer within {timeout_s:g} s",
                    waited_s=timeout_s,
                )
            )

    def _lose(self, error: PersistError, *, listen: bool = False) -> None:
        self.drop(ServerUnreachable(f"connection was given up: {error.message}"), listen=listen)
        self._owner.on_lost(error)

    def _discard(self, wire: Wire) -> None:
        self._poller.unregister(wire.socket)
        self._poller.unregister(wire.monitor)
        wire.close()

    def _stop(self) -> None:
        self._stopping = True

    def _end(self) -> None:
        self._inbox.refuse()
        gone = ServerUnreachable(f"client of {self._endpoint} is closed")
        self.drop(gone)
        for wire in self._retired:
            self._discard(wire)
        self._retired.clear()
        self._owner.on_lost(gone)
        # Work that was taken still gets its answer: without a wire every request fails at once.
        self._poller.unregister(self._inbox.fd)
        self._inbox.close()
        self._context.destroy(linger=0)
