"""Real servers for tests: started as a process of their own, killed without mercy."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from lmcache_persist.cli import main

START_TIMEOUT_S = 60.0


class ServerProcess:
    """``lmcache-persist serve`` on a data dir, with a pool folder of its own.

    Args:
        data_dir: absolute.
        flags: further flags.
        env: further environment, failpoints for instance.
        pool_dir: for the pool; a folder beside the data dir by default, so that tests do
            not meet in ``/dev/shm`` and leave nothing there.
    """

    def __init__(
        self,
        data_dir: Path,
        *flags: str,
        env: Mapping[str, str] | None = None,
        pool_dir: Path | None = None,
        capacity: str = "64MiB",
        pool_size: str = "32MiB",
        cwd: Path | None = None,
    ) -> None:
        self.data_dir = data_dir
        self.pool_dir = pool_dir or data_dir.parent / f"{data_dir.name}.shm"
        self.pool_dir.mkdir(parents=True, exist_ok=True)
        self.log_path = data_dir.parent / f"{data_dir.name}.log"
        self.command = [
            sys.executable,
            "-m",
            "lmcache_persist.cli",
            "serve",
            "--data-dir",
            str(data_dir),
            "--capacity",
            capacity,
            "--pool-size",
            pool_size,
            "--pool-dir",
            str(self.pool_dir),
            *flags,
        ]
        self._cwd = cwd
        self._env = {**os.environ, **(env or {})}
        self.process: subprocess.Popen[str] | None = None
        self.url = ""

    def launch(self) -> Self:
        """Start the process without waiting for it."""
        log = open(self.log_path, "a")  # noqa: SIM115 - the child's
        self.process = subprocess.Popen(
            self.command,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=self._env,
            cwd=self._cwd,
            start_new_session=True,
        )
        log.close()
        return self

    def start(self) -> Self:
        """Start it and wait for its ``ready`` line."""
        self.launch()
        return self.wait_ready()

    def wait_ready(self) -> Self:
        """Wait for the first line on stdout."""
        process = self._process()
        if process.stdout is None:
            raise RuntimeError("the server's stdout is not captured")
        line = process.stdout.readline()
        word, _, url = line.strip().partition(" ")
        if word != "ready":
            code = process.wait(START_TIMEOUT_S)
            raise RuntimeError(f"server ended with {code}: {self.log()}")
        self.url = url
        return self

    def refused(self) -> tuple[int, str]:
        """Start it, expect it to end by itself; its exit status and its stderr."""
        before = len(self.log())
        self.launch()
        return self.wait(), self.log()[before:]

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        process = self._process()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(START_TIMEOUT_S)
        self._close()

    def terminate(self) -> int:
        """SIGTERM, and wait; the exit status."""
        process = self._process()
        process.terminate()
        code = process.wait(START_TIMEOUT_S)
        self._close()
        return code

    def wait(self) -> int:
        """Wait until it ends by itself; the exit status, negative for a signal."""
        code = self._process().wait(START_TIMEOUT_S)
        self._close()
        return code

    def log(self) -> str:
        """All that it wrote to stderr, over all its starts."""
        return self.log_path.read_text() if self.log_path.exists() else ""

    def _process(self) -> subprocess.Popen[str]:
        if self.process is None:
            raise RuntimeError("the server was not started")
        return self.process

    def _close(self) -> None:
        if self.process is not None and self.process.stdout is not None:
            self.process.stdout.close()

    def __enter__(self) -> Self:
        return self.start() if self.process is None else self

    def __exit__(self, *error: object) -> None:
        if self.process is not None:
            self.kill()


def run_cli(
    *args: str, timeout_s: float = 60.0, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A verb of the command line, as a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "lmcache_persist.cli", *args],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, **(env or {})},
        check=False,
    )


def cli_here(*args: str) -> tuple[int, str, str]:
    """A verb of the command line in this process: exit code, stdout, stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([*args])
    return code, out.getvalue(), err.getvalue()


def json_here(*args: str) -> dict[str, Any]:
    """The document of a verb that runs in this process, which has to go well."""
    code, out, err = cli_here(*args, "--json")
    if code != 0:
        raise RuntimeError(f"{args[0]} ended with {code}: {err}")
    document: dict[str, Any] = json.loads(out)
    return document


def inspect(data_dir: Path, *flags: str) -> dict[str, Any]:
    """The document of ``inspect --json``."""
    done = run_cli("inspect", str(data_dir), "--json", *flags)
    if done.returncode != 0:
        raise RuntimeError(f"inspect ended with {done.returncode}: {done.stderr}")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def short_folder() -> Path:
    """A fresh folder with a path short enough for sockets in it."""
    return Path(tempfile.mkdtemp(prefix="lp-"))


@contextlib.contextmanager
def own_server(**options: Any) -> Iterator[ServerProcess]:
    """A server on a data dir of its own, not started; killed and removed afterwards."""
    folder = short_folder()
    server = ServerProcess(folder / "d", **options)
    try:
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)
