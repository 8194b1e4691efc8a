"""A client as a process of its own, driven over pipes: stopped, killed, forked at will.

``python -m support.client_child URL`` reads one JSON array per line, ``[verb, arguments]``,
and answers each with one JSON value, ``{"error": ...}`` for an exception.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from lmcache_persist.connector import CacheClient, ClientOptions
from lmcache_persist.protocol import Grant
from support.emulated import TIMEOUT_S, EmulatedEngine, pattern
from support.results import SOAKING

LIFE_S = 900.0 if SOAKING else 170.0
"""Seconds after which a child ends itself, should its driver have been killed."""
OPTIONS = ClientOptions(request_timeout_s=5.0, lookup_timeout_s=20.0, pool_idle_s=2.0)


class Worker:
    """What the child does; one method per verb."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.engine: EmulatedEngine | None = None
        self.scheduler: CacheClient | None = None
        self.held: list[tuple[Any, list[bytes]]] = []
        self.granted: list[tuple[bytes, Grant]] = []

    def join(self, name: str, object_bytes: int, chunk: int = 256) -> str:
        """Connect, bind, register; the boot id."""
        self.engine = EmulatedEngine(
            self.url, [chunk], object_bytes=object_bytes, name=name, options=OPTIONS
        ).join()
        return self.engine.client.boot_id or ""

    def join_scheduler(self) -> bool:
        """A second client in this process, which does the lookups from now on."""
        self.scheduler = CacheClient(self.url, kind="scheduler", options=OPTIONS)
        self.scheduler.wait_connected(TIMEOUT_S)
        return True

    def store(self, prompt: int, chunks: int) -> int:
        """Store a prompt; chunks that got slots."""
        return self._engine().store(self._hashes(prompt, chunks))

    def flush(self) -> int:
        """Wait until all is durable."""
        return self._engine().client.flush(TIMEOUT_S)

    def lookup(self, prompt: int, chunks: int) -> int:
        """Look up and check bytes; chunks found."""
        engine = self._engine()
        found = engine.lookup(self._hashes(prompt, chunks), chunks * engine.chunk_size + 1)
        return found.tokens // engine.chunk_size

    def hold(self, prompt: int, chunks: int) -> int:
        """Look up without a release; chunks found."""
        engine, hashes = self._engine(), self._hashes(prompt, chunks)
        handle = (self.scheduler or engine.client).lookup(
            engine=engine.name, hashes=hashes, num_tokens=chunks * engine.chunk_size + 1
        )
        result = handle.wait(TIMEOUT_S)
        if result is None:
            raise RuntimeError("lookup was not decided")
        self.held.append((handle, hashes))
        return result.tokens // engine.chunk_size

    def check(self) -> int:
        """Check the bytes of all that is held; objects checked."""
        engine, checked = self._engine(), 0
        for handle, hashes in self.held:
            engine.check(hashes, handle.poll())
            checked += sum(len(run.offsets) for run in handle.poll().runs)
        return checked

    def release(self) -> bool:
        """Release what is held."""
        for handle, _ in self.held:
            handle.release()
        self.held.clear()
        return True

    def reserve(self, prompt: int, chunks: int) -> list[int]:
        """Reserve slots and keep them; the reservations."""
        engine, hashes = self._engine(), self._hashes(prompt, chunks)
        reply = engine.client.reserve(
            engine=engine.name, rank=0, hashes=hashes, masks=[engine.mask] * chunks
        ).result(TIMEOUT_S)
        self.granted += [(hashes[grant.index], grant) for grant in reply.grants]
        return [grant.reservation for grant in reply.grants]

    def fill(self) -> bool:
        """Write the patterns into the reserved slots."""
        engine = self._engine()
        pool = engine.client.pool(engine.client.boot_id or "")
        if pool is None:
            raise RuntimeError("no pool is attached")
        for chunk_hash, grant in self.granted:
            view = pool.view(grant.offsets[0], engine.object_bytes)
            view[:] = pattern(chunk_hash, 0, 0, engine.object_bytes)
        return True

    def commit(self) -> list[int]:
        """Commit what is reserved; those that were refused."""
        numbers = [grant.reservation for _, grant in self.granted]
        self.granted.clear()
        return self._engine().client.commit(numbers).result(TIMEOUT_S).refused

    def lookup_ids(self) -> list[int]:
        """The ids of the held lookups."""
        return [handle.id for handle, _ in self.held]

    def fork(self) -> int:
        """Fork a child that only waits to be killed; its process id."""
        child = os.fork()
        if child == 0:
            while True:
                signal.pause()
        return child

    def kill_fork(self, child: int) -> bool:
        """End a forked child and reap it."""
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return True

    def connected(self) -> bool:
        """Whether there is a server."""
        return self._engine().client.connected

    def boot(self) -> str:
        """The server's boot id, empty without one."""
        return self._engine().client.boot_id or ""

    def leave(self) -> bool:
        """Close the clients."""
        self._engine().client.close()
        if self.scheduler is not None:
            self.scheduler.close()
        return True

    def _engine(self) -> EmulatedEngine:
        if self.engine is None:
            raise RuntimeError("join first")
        return self.engine

    def _hashes(self, prompt: int, chunks: int) -> list[bytes]:
        engine = self._engine()
        return list(engine.hashes([prompt, *range(chunks * engine.chunk_size)]))


class ClientProcess:
    """The driver's end.

    Args:
        url: the server's.
        prefix: a command to run it under, ``unshare`` for instance.
    """

    def __init__(self, url: str, prefix: Sequence[str] = ()) -> None:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "support.client_child", url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            start_new_session=True,
        )
        self.pid = self.process.pid

    def call(self, verb: str, *arguments: Any) -> Any:
        """Have the child do something and wait for its answer."""
        self.send(verb, *arguments)
        return self.answer()

    def send(self, verb: str, *arguments: Any) -> None:
        """Tell the child what to do."""
        if self.process.stdin is None:
            raise RuntimeError("no pipe")
        self.process.stdin.write(json.dumps([verb, arguments]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """The child's next answer. ``RuntimeError`` with what it raised."""
        if self.process.stdout is None:
            raise RuntimeError("no pipe")
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"child ended with {self.process.wait(TIMEOUT_S)}")
        value = json.loads(line)
        if isinstance(value, dict) and "error" in value:
            raise RuntimeError(value["error"])
        return value

    def signal(self, number: int) -> None:
        """Send a signal to all of the child's processes."""
        os.killpg(self.pid, number)

    def kill(self) -> None:
        """SIGKILL to all of it, and wait."""
        if self.process.poll() is None:
            self.signal(signal.SIGKILL)
        self.process.wait(TIMEOUT_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()


def main() -> None:
    """Do what the lines on stdin say."""
    worker = Worker(sys.argv[1])
    watchdog = threading.Timer(LIFE_S, os._exit, (3,))
    watchdog.daemon = True
    watchdog.start()
    for line in sys.stdin:
        verb, arguments = json.loads(line)
        try:
            answer = getattr(worker, verb)(*arguments)
        except Exception as error:  # noqa: BLE001 - it is the driver's to judge
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
