"""A cache server in a process of its own, to be killed."""

from __future__ import annotations

import contextlib
import json
import selectors
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lmcache_persist.errors import PersistError


class ServerFailed(PersistError):
    """The server ended, or was not ready in time; the end of its log is in the text."""

    code = "demo_server_failed"


class ServerProcess:
    """``lmcache-persist serve``, started and waited for by the constructor.

    Args:
        data_dir: the server's.
        log: file that gets its log.
        flags: more of them, as on a command line.
        timeout_s: until it says that it is ready.

    Raises:
        ServerFailed: it did not.
    """

    def __init__(self, data_dir: Path, log: Path, *flags: str, timeout_s: float = 60.0) -> None:
        self.data_dir, self.log = data_dir, log
        command = [sys.executable, "-m", "lmcache_persist.cli", "serve"]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*command, "--data-dir", str(data_dir), *flags],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
            )
        self.url = self._wait_ready(timeout_s)

    def _wait_ready(self, timeout_s: float) -> str:
        stdout = self._process.stdout
        if stdout is None:
            raise RuntimeError("the server has no stdout")
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            if selector.select(max(0.0, deadline - time.monotonic())):
                line = stdout.readline().decode().strip()
                if line.startswith("ready "):
                    return line.removeprefix("ready ")
        self.kill()
        tail = self.log.read_bytes()[-4000:].decode(errors="replace")
        raise ServerFailed(f"server was not ready within {timeout_s:.0f} s:\n{tail}")

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self._process.poll() is None

    def kill(self) -> None:
        """SIGKILL it, and wait for its end."""
        self._process.kill()
        self._process.wait(timeout=30)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def run(self, verb: str, *arguments: str, timeout_s: float = 60.0) -> str:
        """Another verb of the command line; its stdout.

        Raises:
            ServerFailed: it ended with another status than 0.
        """
        done = subprocess.run(
            [sys.executable, "-m", "lmcache_persist.cli", verb, *arguments],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if done.returncode != 0:
            raise ServerFailed(f"{verb} ended with {done.returncode}:\n{done.stderr}{done.stdout}")
        return done.stdout

    def flush(self) -> None:
        """Return when all that was committed is durable."""
        self.run("flush", "--server", self.url)

    def inspect(self) -> dict[str, Any]:
        """What ``inspect --json`` says."""
        found: dict[str, Any] = json.loads(self.run("inspect", str(self.data_dir), "--json"))
        return found

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        # In good order, or its pool would stay behind; one that was killed is left as it is.
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=30)
        self.kill()
