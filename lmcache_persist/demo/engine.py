"""A vLLM engine in a process group of its own, driven over pipes, killed as a whole.

SIGKILL of an engine's parent leaves its engine core and workers alive, so the child leads
a group and the group is what dies.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lmcache_persist.errors import PersistError

CONNECTOR = {
    "kv_connector": "PersistConnector",
    "kv_connector_module_path": "lmcache_persist.connector.vllm",
    "kv_role": "kv_both",
}
"""What ``--kv-transfer-config`` takes, without the settings."""

_SMALL_MACHINE = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


_SEGMENT = re.compile(r"(/dev/shm/(?:psm_|vllm_|sem\.mp-)\S+)$", re.MULTILINE)


class EngineFailed(PersistError):
    """The engine ended or did not answer in time; the end of its output is in the text."""

    code = "demo_engine_failed"


class EngineProcess:
    """One engine, started by the constructor, which returns at once.

    Args:
        model: folder of the model.
        log: file that gets the engine's output.
        settings: of the connector, ``persist.*``; None for an engine without a cache.
        options: more arguments of ``vllm.LLM``.
        env: more environment variables.
        child: module that runs the engine.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        settings: dict[str, Any] | None = None,
        options: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        child: str = "lmcache_persist.demo.engine_child",
    ) -> None:
        self.log = log
        arguments: dict[str, Any] = {
            "model": str(model),
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": 4096,
            "disable_log_stats": False,
            **(options or {}),
        }
        if settings is not None:
            arguments["kv_transfer_config"] = {
                **CONNECTOR,
                "kv_connector_extra_config": settings,
            }
        read_fd, write_fd = os.pipe()
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", child, str(write_fd)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[write_fd],
                start_new_session=True,
                env={**os.environ, **_SMALL_MACHINE, **(env or {})},
            )
        os.close(write_fd)
        self._answers = os.fdopen(read_fd, "rb", buffering=0)
        self._buffer = b""
        self._send(arguments)

    def wait_ready(self, timeout_s: float = 240.0) -> EngineProcess:
        """Wait until the engine serves.

        Raises:
            EngineFailed: it ended, or took longer.
        """
        self._receive(timeout_s)
        return self

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int = 8,
        *,
        timeout_s: float = 120.0,
        **request: Any,
    ) -> list[dict[str, Any]]:
        """Run prompts at the same time; see :meth:`engine_child.Engine.generate`.

        Raises:
            EngineFailed: the engine ended, or took longer than ``timeout_s``.
        """
        result: list[dict[str, Any]] = self.call(
            "generate", timeout_s, prompts=prompts, max_tokens=max_tokens, **request
        )
        return result

    def call(self, verb: str, timeout_s: float = 120.0, **arguments: Any) -> Any:
        """Any verb of the child; errors as :meth:`generate`."""
        self._send({"verb": verb, **arguments})
        return self._receive(timeout_s)["result"]

    def tail(self, num_bytes: int = 6000) -> str:
        """The end of the engine's output."""
        return self.log.read_bytes()[-num_bytes:].decode(errors="replace")

    def kill(self) -> None:
        """SIGKILL the engine's whole process group and wait for its leader.

        What vLLM would have removed from /dev/shm, had it ended by itself, goes too.
        """
        left_over = self._shared_memory()
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # The leader was reaped and nobody of its group is left.
        self._process.wait(timeout=30)
        for path in left_over:
            path.unlink(missing_ok=True)
        if self._process.stdin is not None and not self._process.stdin.closed:
            try:
                self._process.stdin.close()
            except BrokenPipeError:
                pass  # What was not sent dies with the engine.
        self._answers.close()

    def _shared_memory(self) -> set[Path]:
        """Segments of vLLM and of multiprocessing that processes of the group have mapped."""
        found: set[Path] = set()
        for entry in Path("/proc").iterdir():
            try:
                if not entry.name.isdigit() or os.getpgid(int(entry.name)) != self._process.pid:
                    continue
                maps = (entry / "maps").read_text()
            except OSError:
                continue  # It ended meanwhile.
            found.update(Path(path) for path in _SEGMENT.findall(maps))
        return found

    def wait_ended(self, timeout_s: float) -> int:
        """Exit status of an engine that ends by itself; ``TimeoutExpired`` if it does not."""
        return self._process.wait(timeout=timeout_s)

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _send(self, value: dict[str, Any]) -> None:
        if self._process.stdin is None:
            raise RuntimeError("the engine has no stdin")
        try:
            self._process.stdin.write(json.dumps(value).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._failed("ended") from error

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise self._failed(f"gave no answer within {timeout_s:.0f} s")
                part = self._answers.read(1 << 16)
                if not part:
                    raise self._failed("ended")
                self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failed(self, what: str) -> EngineFailed:
        return EngineFailed(
            f"engine {what}; the end of its output:\n{self.tail()}", hint=f"see {self.log}"
        )
