"""The ROUTER loop: the one thread that owns all of a server's state.

Frames come in, are decoded, handled, answered; answers may also come later. Nothing a
client sends ends the loop: a bad message is answered with an error, or dropped if it has
no request id to answer to. Sends never wait: a client that does not read loses answers
and asks again.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import stat
import time
import traceback
from collections.abc import Callable

import zmq

from lmcache_persist import protocol
from lmcache_persist.endpoint import parse_endpoint
from lmcache_persist.errors import ConfigError, MessageTooLarge, PersistError, ProtocolError
from lmcache_persist.server.mailbox import Mailbox
from lmcache_persist.server.state import ServerState
from lmcache_persist.server.wire import Answer, error_reply
from lmcache_persist.store.throttle import Throttle

log = logging.getLogger(__name__)

MAX_MESSAGES_PER_TURN = 64
SEND_QUEUE = 1024
"""Answers kept for a client that does not read; beyond it they are dropped."""
RECEIVE_QUEUE = 64
"""Requests taken from one client ahead of the loop: at 4 MiB each, all the memory it can get."""
POLL_S = 1.0
LONG_TURN_S = 0.5
"""Seconds. Half of what a client waits for an answer."""


class Loop:
    """The server's socket and event loop.

    Args:
        state: the server's.
        handle: called with each decoded message and the way to answer it.

    Threads: one, but ``stop``, which any thread or signal handler may call.
    """

    def __init__(
        self, state: ServerState, handle: Callable[[protocol.Request, Answer], None]
    ) -> None:
        self._state = state
        self._handle = handle
        self._mailbox: Mailbox = state.mailbox
        self._running = True
        self._socket_path = ""
        self._bad_messages, self._long_turns = Throttle(log), Throttle(log)
        self._defects: dict[tuple[str, int], Throttle] = {}
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, SEND_QUEUE)
        self._socket.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE)
        self._socket.setsockopt(zmq.MAXMSGSIZE, protocol.MAX_MESSAGE_BYTES)

    def listen(self, endpoint: str) -> str:
        """Bind the socket; returns the endpoint with its port.

        Raises:
            ConfigError: the endpoint cannot be had.
        """
        if endpoint.startswith("ipc://"):
            path = endpoint.removeprefix("ipc://")
            _check_socket(path)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        _bind(self._socket, endpoint)
        url = str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        self._socket_path = url.removeprefix("ipc://") if url.startswith("ipc://") else ""
        return url

    def run(self) -> None:
        """Serve until :meth:`stop`."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._mailbox.fd, zmq.POLLIN)
        while self._running:
            wait_ms = math.ceil(1000 * self._state.timers.next_in_s(POLL_S))
            due_s = time.monotonic() + wait_ms / 1000
            ready = dict(poller.poll(wait_ms))
            # Who wakes up late was stopped, or got no processor: that is silence, too.
            began_s = min(due_s, time.monotonic())
            if self._mailbox.fd in ready:
                self._mailbox.drain(self._guard)
            if self._socket in ready:
                self._receive()
            self._guard(self._state.timers.run_due)
            self._note(began_s)

    def _note(self, began_s: float) -> None:
        """Nobody is answered during a turn: a long one is a defect, ours or the machine's.

        The monotonic clock stands while the machine is suspended: then nobody asks either.
        """
        self._state.turned_s = time.monotonic()
        turn_s = self._state.turned_s - began_s
        self._state.longest_turn_s = max(self._state.longest_turn_s, turn_s)
        if turn_s >= LONG_TURN_S:
            self._long_turns.warning(f"the server answered nobody for {turn_s:.1f} s")

    def stop(self) -> None:
        """End :meth:`run` soon."""
        self._mailbox.post(self._stop)

    def _stop(self) -> None:
        self._running = False

    def close(self) -> None:
        """Close the socket; what is unsent is dropped."""
        self._socket.close(linger=0)
        self._context.term()
        if self._socket_path:  # ours: never somebody else's at the same path
            with contextlib.suppress(OSError):  # gone, or on a disk that turned read-only
                os.unlink(self._socket_path)

    def _receive(self) -> None:
        for _ in range(MAX_MESSAGES_PER_TURN):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._guard(lambda: self._message(frames))  # noqa: B023 - called now

    def _message(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != protocol.REQUEST_ID_BYTES:
            self._bad(f"message of {len(frames)} frames dropped, expected an id and a body")
            return
        answer = self._answer_to(frames[0], frames[1])
        try:
            message = protocol.decode_request(frames[2])
        except ProtocolError as error:
            self._bad(str(error))
            answer(error)
            return
        try:
            self._handle(message, answer)
        except Exception:
            # A defect of ours must not leave the client waiting.
            answer(PersistError("the server failed on this message; see its log"))
            raise

    def _bad(self, text: str) -> None:
        self._state.counters.bad_messages += 1
        self._bad_messages.warning(f"bad message: {text}")

    def _answer_to(self, peer: bytes, request_id: bytes) -> Answer:
        open_ = True

        def answer(reply: protocol.Reply | PersistError) -> None:
            nonlocal open_
            if open_:
                open_ = False
                self._send(peer, request_id, reply)

        return answer

    def _send(self, peer: bytes, request_id: bytes, reply: protocol.Reply | PersistError) -> None:
        if isinstance(reply, PersistError):
            reply = error_reply(reply)
        durable = self._state.sequence.durable_seq
        try:
            body = protocol.encode_reply(reply, self._state.boot_id, durable)
        except MessageTooLarge as error:
            body = protocol.encode_reply(error_reply(error), self._state.boot_id, durable)
        try:
            self._socket.send_multipart([peer, request_id, body], zmq.NOBLOCK)
        except (zmq.Again, zmq.ZMQError):
            # The peer is gone or does not read: it will ask again, or never.
            self._state.counters.undeliverable += 1

    def _guard(self, action: Callable[[], None]) -> None:
        """Run ``action``; a defect of ours costs this message, not the server."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - the last line: logged with its trace, counted
            self._state.counters.defects += 1
            # Per place in the code: one that comes with every message hides no other.
            said = self._defects.setdefault(_place(error), Throttle(log))
            said.error("defect in the server; please report it", trace=True)


def _place(error: Exception) -> tuple[str, int]:
    """Where in the code it was raised."""
    *_, frame = traceback.walk_tb(error.__traceback__)
    return frame[0].f_code.co_filename, frame[1]


def check_free(endpoint: str) -> None:
    """Refuse an endpoint that :meth:`Loop.listen` could not have; changes nothing.

    Raises:
        ConfigError: somebody listens there, or nobody can.
    """
    if endpoint.startswith("ipc://"):
        _check_socket(endpoint.removeprefix("ipc://"))
        return
    context = zmq.Context(io_threads=1)
    try:
        with context.socket(zmq.ROUTER) as probe:
            _bind(probe, endpoint)
    finally:
        context.destroy(linger=0)


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> None:
    # Only then: a dual-stack socket would call 127.0.0.1 by another name.
    socket.setsockopt(zmq.IPV6, int(parse_endpoint(endpoint).ipv6))
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"cannot listen at {endpoint}: {error.strerror}", hint="choose another --listen"
        ) from error


def _check_socket(path: str) -> None:
    """Whether a socket can be made there; a dead server's may be in the way.

    ``bind`` would silently take a living one's.

    Raises:
        ConfigError: somebody listens there, it is no socket, or its folder takes none.
    """
    folder = os.path.dirname(path)
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            f"socket {path} cannot be made: {folder} is no folder that uid {os.geteuid()} can"
            " write",
            hint="make that folder, or choose another --listen",
        )
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise ConfigError(f"{path} is no socket", hint="choose another --listen")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except OSError as error:
            raise ConfigError(
                f"socket {path} cannot be used: {error.strerror or error}",
                hint="choose another --listen",
            ) from error
    raise ConfigError(
        f"another process listens at {path}", hint="choose another --listen, or stop it"
    )
