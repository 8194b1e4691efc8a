"""HTTP: Prometheus metrics, liveness, readiness.

Numbers are read from the loop's counters without asking it, so that an answer comes even
when the loop is busy, and nothing is written anywhere.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lmcache_persist.errors import ConfigError
from lmcache_persist.server.service import Service

log = logging.getLogger(__name__)

PREFIX = "lmcache_persist_"
TIMEOUT_S = 5.0

COUNTERS: dict[str, str] = {
    "binds": "Binds asked for.",
    "lookups": "Lookups started.",
    "lookup_tokens": "Tokens of prompts that were looked up.",
    "hit_tokens": "Tokens that lookups found restorable.",
    "memory_hit_chunks": "Chunks of hits that were in the pool.",
    "disk_hit_chunks": "Chunks of hits that were read from disk.",
    "loaded_bytes": "Bytes read from disk and verified.",
    "stored_bytes": "Bytes made durable.",
    "commits": "Reservations committed.",
    "reserve_refused": "Keys that got no slot.",
    "not_written": "Commits refused because their slot was not written.",
    "dropped_chunks": "Committed chunks that did not become durable.",
    "disk_evictions": "Chunks evicted from disk.",
    "corrupt_chunks": "Chunks proven bad and dropped.",
    "read_failures": "Reads that failed without a verdict on the object.",
    "rejections": "Binds and registrations refused.",
    "bad_messages": "Messages that could not be understood.",
    "undeliverable": "Answers whose client was gone or did not read.",
    "dead_clients": "Sessions ended because their process died.",
}
"""Counters by the field of :class:`~lmcache_persist.server.state.Counters`."""


class _Collector(Collector):
    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        stats = self._service.stats()
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(PREFIX + name, text, value=stats["counters"][name])
        gauges = {
            "pool_size_bytes": ("Size of the pool.", stats["pool"]["size_bytes"]),
            "pool_free_bytes": ("Bytes of the pool in no slot.", stats["pool"]["free_bytes"]),
            "pool_chunks": ("Chunks in the pool.", stats["pool"]["chunks"]),
            "leased_bytes": ("Bytes of the pool that lookups hold.", stats["leased_bytes"]),
            "sessions": ("Sessions open.", stats["sessions"]),
            "lookups_open": ("Lookups not yet released.", stats["lookups_open"]),
            "longest_turn_seconds": (
                "Longest time in which nobody was answered.",
                stats["longest_turn_s"],
            ),
            "writer_backlog": ("Chunks that wait for the disk.", stats["writer"]["backlog"]),
            "chunk_size_tokens": ("Bound chunk size, 0 if unbound.", stats["chunk_size"] or 0),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(PREFIX + name, text, value=value)


def readiness(service: Service) -> list[str]:
    """Why the data path does not work; empty if it does."""
    stats = service.stats()
    problems = []
    if not stats["writer"]["alive"]:
        problems.append("the writer thread has stopped")
    if stats["writer"]["failing"]:
        problems.append(f"the disk tier fails: {stats['writer']['last_error']}")
    if stats["chunk_size_from"] and stats["chunk_size_from"]["agrees"] is False:
        problems.append(stats["chunk_size_from"]["trouble"])
    if not any(not engine["missing_ranks"] for engine in stats["engines"]):
        problems.append("no engine is registered")
    return problems


class HttpServer:
    """Serves ``/metrics``, ``/healthz``, ``/readyz`` on a thread of its own.

    Raises:
        ConfigError: the address cannot be had.
    """

    def __init__(self, address: str, service: Service) -> None:
        host, _, port = address.rpartition(":")
        registry = CollectorRegistry()
        registry.register(_Collector(service))

        class Handler(BaseHTTPRequestHandler):
            timeout = TIMEOUT_S

            def do_GET(self) -> None:
                if self.path == "/metrics":
                    self._reply(200, generate_latest(registry), CONTENT_TYPE_LATEST)
                elif self.path == "/healthz":
                    self._reply(200, b"ok\n")
                elif self.path == "/readyz":
                    problems = readiness(service)
                    body = "\n".join(problems or ["ready"]) + "\n"
                    self._reply(503 if problems else 200, body.encode())
                else:
                    self._reply(404, b"try /metrics, /healthz or /readyz\n")

            def _reply(self, status: int, body: bytes, kind: str = "text/plain") -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                log.debug(format, *args)

        try:
            self._server = ThreadingHTTPServer((host.strip("[]"), int(port)), Handler)
        except OSError as error:
            raise ConfigError(
                f"cannot listen at http {address}: {error.strerror}",
                hint="choose another --http HOST:PORT",
            ) from error
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="http", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port it listens at."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
