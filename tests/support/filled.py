"""Data dirs that a real server has filled."""

from __future__ import annotations

from collections.abc import Callable

from lmcache_persist.connector import ClientOptions
from support.emulated import EmulatedEngine
from support.server import ServerProcess

PATIENT = ClientOptions(request_timeout_s=10.0)
OBJECT_BYTES = 4096
CHUNKS_PER_PROMPT = 100


def engine_of(server: ServerProcess, name: str = "engine-0") -> EmulatedEngine:
    """An engine with blocks of 64 tokens and small objects."""
    return EmulatedEngine(server.url, [64], object_bytes=OBJECT_BYTES, name=name, options=PATIENT)


def prompt(number: int, chunks: int, chunk_size: int) -> list[int]:
    """Tokens of a numbered prompt: so many chunks, and one more token."""
    return [number, *range(1, chunk_size * chunks + 1)]


def fill(server: ServerProcess, objects: int) -> None:
    """Have a running server store so many durable objects; it is bound to 256 tokens."""
    with engine_of(server) as engine:
        engine.join()
        for start in range(0, objects, CHUNKS_PER_PROMPT):
            count = min(CHUNKS_PER_PROMPT, objects - start)
            hashes = engine.hashes(prompt(start, count, engine.chunk_size))
            if engine.store(hashes) != count:
                raise RuntimeError(f"prompt {start} got no slots")
        engine.client.flush(30)


def filled(make_server: Callable[..., ServerProcess], objects: int) -> ServerProcess:
    """A server that stored so many objects and has ended."""
    server = make_server().start()
    fill(server, objects)
    server.terminate()
    return server


def hits(server: ServerProcess, objects: int) -> int:
    """Tokens of the prompts of :func:`fill` that a running server can restore."""
    with engine_of(server) as engine:
        engine.join()
        found = 0
        for start in range(0, objects, CHUNKS_PER_PROMPT):
            tokens = prompt(start, min(CHUNKS_PER_PROMPT, objects - start), 256)
            found += engine.lookup(engine.hashes(tokens), len(tokens)).tokens
        return found
