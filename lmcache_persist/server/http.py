"""HTTP: Prometheus metrics, liveness, readiness.

Numbers are read from the loop's counters without asking it, so that an answer comes even
when the loop is busy or the disk hangs, and nothing is written anywhere.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import sys
import threading
from collections.abc import Iterator
from http.client import LineTooLong
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import BaseServer, TCPServer
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from lmcache_persist.errors import ConfigError
from lmcache_persist.server.exposition import ServerCollector
from lmcache_persist.server.health import Problem
from lmcache_persist.server.service import Service

log = logging.getLogger(__name__)

TIMEOUT_S = 5.0
MAX_CONNECTIONS = 32
"""Open at once, a thread each; one more costs the oldest its own: idle ones keep nobody out."""
MAX_HEAD_BYTES = 16 << 10
"""Of a request."""
JSON, TEXT = "application/json", "text/plain"


class HttpServer:
    """Serves ``/metrics``, ``/healthz``, ``/readyz`` on threads of its own, once started.

    Raises:
        ConfigError: the address cannot be had.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._thread: threading.Thread | None = None
        host, _, port = address.rpartition(":")
        with self._had():
            self._server = _Server((host.strip("[]"), int(port)), _Handler, bind_and_activate=False)
            try:
                self._server.server_bind()
            except OSError:
                self._server.server_close()
                raise

    @contextlib.contextmanager
    def _had(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"cannot listen at http {self._address}: {error.strerror}",
                hint="choose another --http HOST:PORT",
            ) from error

    def start(self, service: Service) -> None:
        """Answer from now on.

        Raises:
            ConfigError: somebody else listens there meanwhile.
        """
        registry = CollectorRegistry()
        registry.register(ServerCollector(service.stats))
        ProcessCollector(registry=registry)

        class Handler(_Handler):
            """Of this service."""

            def answer(self, path: str) -> tuple[int, str, bytes]:
                if path == "/metrics":
                    return 200, CONTENT_TYPE_LATEST, generate_latest(registry)
                if path == "/healthz":
                    return health_answer("alive", service.liveness())
                if path == "/readyz":
                    return health_answer("ready", service.readiness())
                return 404, TEXT, b"try /metrics, /healthz or /readyz\n"

        self._server.RequestHandlerClass = Handler
        with self._had():
            self._server.server_activate()
        self._thread = threading.Thread(target=self._server.serve_forever, name="http", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port it listens at."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop answering; repeatable."""
        if self._thread is not None:
            self._server.shutdown()
            self._thread = None
        self._server.server_close()


def health_answer(word: str, problems: list[Problem]) -> tuple[int, str, bytes]:
    """Status, content type and JSON body: ``{word: true}``, or false with the reasons."""
    reasons = [{"reason": one.reason, "detail": one.detail} for one in problems]
    body = json.dumps({word: not problems, "reasons": reasons})
    return 503 if problems else 200, JSON, body.encode() + b"\n"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(
        self, address: tuple[str, int], handler: type[_Handler], *, bind_and_activate: bool
    ) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self._lock = threading.Lock()
        self._open: dict[int, socket.socket] = {}  # the oldest first
        super().__init__(address, handler, bind_and_activate)

    def server_bind(self) -> None:
        """Bind, without asking the DNS for a name that nobody wants to know."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "", int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection on a thread of its own; if there are too many, the oldest goes."""
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                oldest = self._open.pop(next(iter(self._open)))
                with contextlib.suppress(OSError):  # its thread wakes up and ends
                    oldest.shutdown(socket.SHUT_RDWR)
            self._open[id(request)] = request
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock:
            self._open.pop(id(request), None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news; anything else is a defect of ours."""
        log.debug("http: a connection failed: %r", sys.exc_info()[1])


class _Handler(BaseHTTPRequestHandler):
    timeout = TIMEOUT_S
    error_message_format = "%(message)s\n"
    error_content_type = TEXT
    server: BaseServer

    def setup(self) -> None:
        """Bound what is read of a request."""
        super().setup()
        self.rfile = _Head(self.rfile)  # type: ignore[assignment]

    def answer(self, path: str) -> tuple[int, str, bytes]:
        """Status, content type and body of a page."""
        raise NotImplementedError

    def do_GET(self) -> None:
        """Answer with a page."""
        status, kind, body = self.answer(self.path.partition("?")[0])
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        """As :meth:`do_GET`, without the body."""
        self.do_GET()

    def _refuse(self) -> None:
        """Answer a method that no page has."""
        body = f"{self.command} is not for any page here, expected GET or HEAD\n".encode()
        self.close_connection = True  # a body that nobody reads may follow
        self.send_response(405)
        self.send_header("Allow", "GET, HEAD")
        self.send_header("Content-Type", TEXT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _refuse  # noqa: N815

    def version_string(self) -> str:
        """Who serves, without versions of anything."""
        return "lmcache-persist"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Requests are no news."""
        log.debug("http: %s", format % args)


class _Stream(Protocol):
    def readline(self, limit: int = -1, /) -> bytes: ...
    def close(self) -> None: ...


class _Head:
    """The first bytes of a stream; who reads on is told that it is too long."""

    def __init__(self, stream: _Stream) -> None:
        self._stream = stream
        self._left = MAX_HEAD_BYTES

    def readline(self, limit: int = -1) -> bytes:
        """A line, or the part of it that is within the limits.

        Raises:
            LineTooLong: all that may be read has been read; ``http.server`` answers 431.
        """
        if not self._left:
            raise LineTooLong("head")
        line = self._stream.readline(self._left if limit < 0 else min(limit, self._left))
        self._left -= len(line)
        return line

    def close(self) -> None:
        """Close the stream."""
        self._stream.close()
