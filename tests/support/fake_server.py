"""A small scripted server: real sockets, a real pool file, answers as told.

Runs in a thread of the test, or (``python -m support.fake_server URL BOOT FOLDER``) as a
process of its own that can be stopped and killed.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from lmcache_persist import protocol
from lmcache_persist.binding import Binding
from lmcache_persist.connector import Registration
from lmcache_persist.geometry import groups_from_sizes
from lmcache_persist.protocol import Reply, Request
from lmcache_persist.shm import PoolPaths

UUID = "ab" * 16
POOL_BYTES = 1 << 20
BOOT_A, BOOT_B = "a" * 32, "b" * 32
GROUPS = groups_from_sizes([64])
OBJECT_BYTES = 4096
REGISTRATION = Registration(
    engine="engine",
    rank=0,
    world_size=1,
    identity={"model": "tiny"},
    layout={"layers": 1},
    groups=GROUPS,
    object_bytes=[OBJECT_BYTES],
)
Answer = Reply | bytes | list[bytes] | None
Handler = Callable[[Any], Answer]
"""A reply; or raw bytes or frames; or None for silence."""


def make_binding(chunk_size: int = 64, bound_at: str = "2026-01-01T00:00:00.000000Z") -> Binding:
    """A binding as a server would have it."""
    return Binding.make(
        chunk_size=chunk_size,
        required_alignment=chunk_size,
        base_chunk_size=chunk_size,
        mode="auto",
        bound_at=bound_at,
        winner="test",
        backend="memory",
        store_uuid=UUID,
        store_format_version=1,
    )


def binding_bytes(binding: Binding | None) -> bytes:
    """A binding as it travels."""
    return json.dumps(binding.to_json()).encode() if binding else b""


class FakeServer:
    """A scripted ROUTER.

    Args:
        url: where to listen.
        folder: for the pool and its locks.
        boot: its boot id.
        binding: what it is bound to.
        pool_bytes: size of the pool; 0 for no pool.
        fresh_pool: replace the pool file that an earlier server left.
    """

    def __init__(
        self,
        url: str,
        folder: Path,
        *,
        boot: str = BOOT_A,
        binding: Binding | None = None,
        pool_bytes: int = POOL_BYTES,
        fresh_pool: bool = True,
    ) -> None:
        self.url, self.boot, self.binding = url, boot, binding
        self.paths = PoolPaths.of(folder, UUID)
        self.pool_bytes = pool_bytes
        self.requests: list[Request] = []
        self.sessions: list[str] = []
        self.peers: set[bytes] = set()
        self.heads: dict[type, tuple[bytes, bytes]] = {}
        self.handlers: dict[type, Handler] = {}
        self.reading = threading.Event()
        self.reading.set()
        self._guard = threading.Lock()
        self._outbox: list[list[bytes]] = []
        self._stop = False
        self._lock_fd = self._make_pool(fresh_pool)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(url)
        self._thread = threading.Thread(target=self._run, name="fake-server", daemon=True)
        self._thread.start()

    def _make_pool(self, fresh: bool) -> int:
        if not self.pool_bytes:
            return -1
        lock_fd = os.open(self.paths.server_lock, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock_fd, fcntl.LOCK_EX)
        if fresh:
            self.paths.pool.unlink(missing_ok=True)
        self.paths.clients.mkdir(exist_ok=True)
        fd = os.open(self.paths.pool, os.O_RDWR | os.O_CREAT, 0o600)
        os.posix_fallocate(fd, 0, self.pool_bytes)
        os.close(fd)
        return lock_fd

    # -- for tests -----------------------------------------------------------------------

    def on(self, kind: type, handler: Handler) -> None:
        """Answer messages of ``kind`` with what ``handler`` returns."""
        self.handlers[kind] = handler

    def got(self, kind: type) -> list[Any]:
        """The messages of ``kind`` so far."""
        with self._guard:
            return [message for message in self.requests if isinstance(message, kind)]

    def hang(self) -> None:
        """Stop reading and answering; connections stay."""
        self.reading.clear()
        os.eventfd_write(self._wake, 1)

    def resume(self) -> None:
        """Undo :meth:`hang`."""
        self.reading.set()
        os.eventfd_write(self._wake, 1)

    def send_later(self, frames: list[bytes]) -> None:
        """Send raw frames ``[peer, request id, body]`` from the server's thread."""
        with self._guard:
            self._outbox.append(frames)
        os.eventfd_write(self._wake, 1)

    def close(self, *, free_lock: bool = True) -> None:
        """End like a process that dies: socket and lock go, the pool file stays."""
        if not self._stop:
            self._stop = True
            self.resume()
            self._thread.join(10)
            os.close(self._wake)
        if free_lock and self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    # -- its thread ----------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        poller.register(self._socket, zmq.POLLIN)
        while not self._stop:
            if not self.reading.wait(0.5):
                continue
            ready = dict(poller.poll(500))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            with self._guard:
                outbox, self._outbox = self._outbox, []
            for frames in outbox:
                self._socket.send_multipart(frames, zmq.DONTWAIT)
            if self._socket in ready and self.reading.is_set() and not self._stop:
                self._serve()
        self._socket.close(0)
        self._context.term()

    def _serve(self) -> None:
        peer, request_id, body = self._socket.recv_multipart()
        message = protocol.decode_request(body)
        with self._guard:
            self.requests.append(message)
            self.peers.add(peer)
            self.last = self.heads[type(message)] = (peer, request_id)
        answer = self.answer(message)
        if answer is None:
            return
        if isinstance(answer, bytes):
            answer = [request_id, answer]
        if not isinstance(answer, list):
            answer = [request_id, self.encode(answer)]
        self._socket.send_multipart([peer, *answer], zmq.DONTWAIT)

    def encode(self, reply: Reply) -> bytes:
        """A reply as bytes, with this server's boot id unless it has one."""
        if not reply.boot:
            reply = msgspec.structs.replace(reply, boot=self.boot)
        return protocol.encode(reply)

    def answer(self, message: Request) -> Answer:
        """The scripted answer, else the plain one."""
        handler = self.handlers.get(type(message))
        return handler(message) if handler else self.plain_answer(message)

    def plain_answer(self, message: Request) -> Answer:
        """What a well-behaved server without any objects answers."""
        if isinstance(message, protocol.Hello):
            if message.session in self.sessions:
                session = message.session
            else:
                session = f"{len(self.sessions):016x}{self.boot[:16]}"
                self.sessions.append(session)
            pool = protocol.PoolInfo(path=str(self.paths.pool), size_bytes=self.pool_bytes)
            return protocol.Welcome(
                proto=1,
                session=session,
                version="test",
                pool=pool if self.pool_bytes else None,
                binding=binding_bytes(self.binding),
            )
        if message.boot != self.boot or message.session not in self.sessions:
            return protocol.ErrorReply(code="stale", message="another boot or session")
        if isinstance(message, protocol.Bind):
            outcome = "compatible" if self.binding else "bound"
            self.binding = self.binding or make_binding()
            return protocol.BindReply(outcome=outcome, binding=binding_bytes(self.binding))
        if isinstance(message, protocol.Register):
            return protocol.Registered(fingerprint="f" * 64)
        if isinstance(message, protocol.Lookup):
            return protocol.Found(tokens=0)
        if isinstance(message, protocol.Reserve):
            return protocol.Reserved()
        if isinstance(message, protocol.Commit):
            return protocol.Committed(seq=len(self.got(protocol.Commit)))
        if isinstance(message, protocol.Flush):
            return protocol.Flushed()
        if isinstance(message, protocol.Stats | protocol.AdminInspect):
            return protocol.JsonReply(body=b'{"fake": true, "committed_seq": 9}')
        return protocol.Done()


def main() -> None:
    """Serve until killed; says ``ready`` first."""
    url, boot, folder = sys.argv[1:4]
    FakeServer(url, Path(folder), boot=boot, binding=make_binding())
    print("ready", flush=True)
    threading.Event().wait(120)


if __name__ == "__main__":
    main()
