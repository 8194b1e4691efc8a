"""The demo: a real engine cold, everything killed, everything started again, warm."""

from __future__ import annotations

import difflib
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lmcache_persist.demo.engine import EngineProcess
from lmcache_persist.demo.model import make_hybrid, make_llama, make_prompt
from lmcache_persist.demo.server import ServerProcess
from lmcache_persist.errors import ConfigError

LAYERS = 8
NEW_TOKENS = 8
SIZES = ("--capacity", "1GiB", "--pool-size", "256MiB")
BLOCK_MULTIPLE = 32
"""Tokens. What vLLM's CPU backend takes."""

_IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@dataclass(frozen=True)
class Subject:
    """A model for the demo.

    Attributes:
        title: what it is.
        make: writes it into a folder.
        prompt_tokens: long enough that a prefill is felt, short enough for its 4096.
        options: of the engine.
    """

    title: str
    make: Callable[[Path], Path]
    prompt_tokens: int
    options: dict[str, Any]


SUBJECTS = {
    # In bfloat16 a near tie is decided by how a prompt is cut into steps: plain vLLM's own
    # prefix cache then changes tokens too (measured: 1 of 4 prompts).
    "llama": Subject(
        f"a Llama of {LAYERS} layers",
        lambda folder: make_llama(folder, layers=LAYERS),
        3900,
        {"dtype": "float32"},
    ),
    # 640 tokens a block in bfloat16. Cold and warm runs cut this prompt into the same steps.
    "hybrid": Subject(
        "a Qwen3-Next of three linear attention layers and a full one",
        make_hybrid,
        1500,
        {"dtype": "bfloat16"},
    ),
}
"""By the name that ``--model`` takes."""


@dataclass(frozen=True)
class Run:
    """One engine's answer to the prompt.

    Attributes:
        tokens: greedy ones.
        cached_tokens: of the prompt, how many were not computed.
        first_token_s: seconds, after a request that was thrown away.
        counters: of the connector; empty for an engine without one.
    """

    tokens: list[int]
    cached_tokens: int
    first_token_s: float
    counters: dict[str, int]

    @property
    def tier(self) -> str:
        """Where the cached tokens came from."""
        found = {
            "disk": self.counters.get("load_disk_chunks", 0),
            "memory": self.counters.get("load_memory_chunks", 0),
        }
        return " and ".join(name for name, chunks in found.items() if chunks) or "-"


@dataclass(frozen=True)
class Outcome:
    """What the demo found."""

    chunk_size: int
    prompt_tokens: int
    plain: Run
    cold: Run
    warm: Run
    inspect: dict[str, Any]

    @property
    def tokens_equal(self) -> bool:
        """Whether both runs say what an engine without a cache says."""
        return self.plain.tokens == self.cold.tokens == self.warm.tokens

    @property
    def good(self) -> bool:
        """Whether the restart kept the cache, and kept it right."""
        return self.tokens_equal and self.cold.cached_tokens == 0 < self.warm.cached_tokens


def run(*, model: str = "llama", block_size: int | None = None, json_output: bool = False) -> int:
    """Run the demo in a temporary folder and print what it found.

    Args:
        model: one of :data:`SUBJECTS`.
        block_size: tokens, of the engine; None is 544 for the Llama, and vLLM's own choice
            for the hybrid, which has no other.
        json_output: print JSON instead of a table.

    Returns:
        0 if the warm run restored the prefix and all tokens are equal, else 1.

    Raises:
        ConfigError: there is no such model, or the engine does not take the block size.
        EngineFailed, ServerFailed: a process did not start or did not answer.
    """
    subject = _subject(model, block_size)
    if block_size is not None and (block_size <= 0 or block_size % BLOCK_MULTIPLE):
        raise ConfigError(
            f"--block-size is {block_size}, expected a positive multiple of {BLOCK_MULTIPLE}",
            hint="that is what vLLM's CPU backend takes",
        )
    console = Console(stderr=json_output)
    with tempfile.TemporaryDirectory(prefix="lmcache-persist-demo-") as folder:
        outcome = play(Path(folder), subject, console)
    if json_output:
        # On stdout alone; the story goes to stderr.
        Console().print_json(json.dumps({**asdict(outcome), "good": outcome.good}))
    else:
        console.print(_table(outcome))
        console.print(_summary(outcome))
        console.print(
            "inspect says (there is also a prompt that only warmed the engine up):", style="bold"
        )
        console.print_json(json.dumps(_without_server(outcome.inspect)))
    return 0 if outcome.good else 1


def _subject(model: str, block_size: int | None) -> Subject:
    if model not in SUBJECTS:
        raise ConfigError(
            f"--model is {model!r}, expected one of {', '.join(SUBJECTS)}",
            hint=f"try {next(iter(difflib.get_close_matches(model, SUBJECTS)), 'llama')}",
        )
    subject = SUBJECTS[model]
    if model == "llama":
        return replace(subject, options={**subject.options, "block_size": block_size or 544})
    if block_size is not None:
        raise ConfigError(
            f"--block-size is {block_size}, expected none with --model {model}",
            hint="its block size follows from the size of its states",
        )
    return subject


def play(folder: Path, subject: Subject, console: Console) -> Outcome:
    """The whole story, in ``folder``; errors as :func:`run`."""
    console.print(f"making {subject.title}, with random weights")
    model = subject.make(folder / "model")
    options, prompt = subject.options, make_prompt(subject.prompt_tokens, seed=1)
    console.print("an engine without a cache says what is right")
    plain = _ask(model, folder, prompt, options, None)
    console.print("server on auto, engine cold")
    with ServerProcess(folder / "data", folder / "server.log", *SIZES) as server:
        with _start(model, folder, options, server.url) as engine:
            cold = _measure(engine, prompt)
            server.flush()
            console.print("SIGKILL to the server and to the engine's process group")
            server.kill()
    console.print("both again, engine warm")
    with ServerProcess(folder / "data", folder / "server.log", *SIZES) as server:
        warm = _ask(model, folder, prompt, options, server.url)
        found = server.inspect()
    return Outcome(found["binding"]["chunk_size"], len(prompt), plain, cold, warm, found)


def _start(model: Path, folder: Path, options: dict[str, Any], url: str | None) -> EngineProcess:
    return EngineProcess(
        model,
        folder / "engine.log",
        settings=None if url is None else {"persist.server": url},
        options=options,
        env=_IN_PROCESS,
    )


def _ask(
    model: Path, folder: Path, prompt: list[int], options: dict[str, Any], url: str | None
) -> Run:
    with _start(model, folder, options, url) as engine:
        return _measure(engine, prompt)


def _measure(engine: EngineProcess, prompt: list[int]) -> Run:
    engine.wait_ready()
    # The first request of an engine pays about two seconds for all of them.
    engine.generate([make_prompt(len(prompt), seed=99)], 2)
    before = engine.call("counters")
    (result,) = engine.generate([prompt], NEW_TOKENS)
    after = engine.call("counters")
    counters = {name: after[name] - before.get(name, 0) for name in after}
    return Run(result["tokens"], result["cached_tokens"], result["first_token_s"], counters)


def _table(outcome: Outcome) -> Table:
    table = Table(title="a restart, seen from the engine", title_justify="left")
    for column in ("", "no cache", "cold", "killed, started, warm"):
        table.add_column(column, justify="left" if not column else "right")
    runs = (outcome.plain, outcome.cold, outcome.warm)
    table.add_row("bound chunk size", "-", *[str(outcome.chunk_size)] * 2)
    table.add_row("prompt tokens", *[str(outcome.prompt_tokens)] * 3)
    table.add_row("cached tokens", *(str(one.cached_tokens) for one in runs))
    table.add_row("from", *(one.tier for one in runs))
    table.add_row("time to first token", *(f"{one.first_token_s * 1000:.0f} ms" for one in runs))
    equal = [one.tokens == outcome.plain.tokens for one in runs]
    table.add_row("same tokens", "-", *("yes" if same else "NO" for same in equal[1:]))
    return table


def _summary(outcome: Outcome) -> str:
    """The table in a sentence."""
    warm, size = outcome.warm, outcome.chunk_size
    if not outcome.good:
        return "This is not what it should be: see the table."
    left = outcome.prompt_tokens - warm.cached_tokens
    return (
        f"After the kill {warm.cached_tokens} tokens, {warm.cached_tokens // size} chunks of"
        f" {size}, came from {warm.tier}. The other {left} are no whole chunk and were computed."
    )


def _without_server(found: dict[str, Any]) -> dict[str, Any]:
    """The part of ``inspect`` that is about the disk."""
    return {key: value for key, value in found.items() if key != "server"}
