"""Fuzzing of the codec and of all that judges what it read."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings, target
from hypothesis import strategies as st

from fuzz.make_corpus import CORPUS, bodies, replies, requests
from lmcache_persist import protocol
from lmcache_persist.errors import PersistError, ProtocolError
from support.judging import judge_reply, judge_request
from support.mutation import HEADERS, mutate

FUZZER = Path(__file__).parents[1] / "fuzz" / "fuzz_protocol.py"
FRESH = ("sh", "-c", '"$@"; exit $?', "sh")
"""Runs a command through a shell that forks: the kernel counts a child's peak memory from
that of the process that forked it, and pytest may have all of vLLM in it."""
FUZZ_RUNS = 40_000
MAX_GROWTH_BYTES = 10 << 20
SMALL_BYTES = 64 * 1024

REQUESTS = {name: protocol.encode(message) for name, message in requests().items()}
REPLIES = {name: protocol.encode(message) for name, message in replies().items()}


def read(body: bytes) -> int:
    """Read and judge a body both ways; how many ways it could be read.

    Anything but a ``ProtocolError`` of the codec or a ``PersistError`` of the judges
    comes through.
    """
    readable = 0
    with suppress(ProtocolError):
        message = protocol.decode_request(body)
        readable += 1
        with suppress(PersistError):
            judge_request(message)
    with suppress(ProtocolError):
        reply = protocol.decode_reply(body)
        readable += 1
        with suppress(PersistError):
            judge_reply(reply)
    return readable


def test_the_corpus_is_the_one_that_is_made() -> None:
    """The committed corpus is what its script makes, with every message type in it."""
    assert {path.name: path.read_bytes() for path in CORPUS.iterdir()} == bodies()
    assert {f"request-{kind.__name__}" for kind in protocol.Request.__args__} <= set(bodies())
    assert {f"reply-{kind.__name__}" for kind in protocol.Reply.__args__} <= set(bodies())


@pytest.mark.parametrize("name", sorted(bodies()))
def test_the_corpus_is_read_or_refused(name: str) -> None:
    """Good bodies are read; troublesome ones raise nothing but typed errors."""
    readable = read(bodies()[name])
    assert readable or name.startswith("trouble-")


@settings(max_examples=400)
@given(
    body=st.sampled_from([*REQUESTS.values(), *REPLIES.values()]),
    seed=st.integers(0, 2**32 - 1),
    times=st.integers(1, 3),
)
def test_mutated_messages_raise_typed_errors_only(body: bytes, seed: int, times: int) -> None:
    """However a good message is changed, it is read or refused with a typed error."""
    draw = random.Random(seed)
    for _ in range(times):
        body = mutate(body, draw)
    # The search leans towards what is still readable: there the judges have work.
    target(float(read(body)))


@settings(max_examples=60)
@given(
    body=st.sampled_from([*REQUESTS.values(), *REPLIES.values()]),
    header=st.sampled_from(HEADERS),
    at=st.integers(0, 400),
    seed=st.integers(0, 2**32 - 1),
)
def test_small_messages_take_little_memory(body: bytes, header: bytes, at: int, seed: int) -> None:
    """A small message never takes more than 10 MiB, whatever lengths it announces."""
    cut = at % len(body)
    for small in (mutate(body, random.Random(seed)), body[:cut] + header + body[cut:]):
        tracemalloc.start()
        try:
            read(small[:SMALL_BYTES])
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < MAX_GROWTH_BYTES


def test_announced_lengths_do_not_grow_a_process(tmp_path: Path) -> None:
    """Neither does the process grow, counted by the kernel: compiled code is not traced."""
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from test_fuzz_protocol import REQUESTS, REPLIES, HEADERS, read\n"
        "bodies = [*REQUESTS.values(), *REPLIES.values()]\n"
        "for body in bodies: read(body)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for body in bodies:\n"
        "    for header in HEADERS:\n"
        "        for at in range(0, len(body), 3):\n"
        "            read(body[:at] + header + body[at:])\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    done = subprocess.run(
        [*FRESH, sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 < MAX_GROWTH_BYTES


def test_coverage_guided(tmp_path: Path, seed: int) -> None:
    """A short run of the coverage-guided fuzzer over the corpus finds nothing."""
    pytest.importorskip("atheris", reason="atheris has no wheel for this Python or machine")
    (tmp_path / "new").mkdir()
    done = subprocess.run(
        [
            *FRESH,
            sys.executable,
            str(FUZZER),
            f"-atheris_runs={FUZZ_RUNS}",
            f"-seed={seed % 2**31 or 1}",
            "-max_len=16384",
            "-rss_limit_mb=512",
            f"-artifact_prefix={tmp_path}/found-",
            str(tmp_path / "new"),
            str(CORPUS),
        ],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert f"Done {FUZZ_RUNS}" in done.stderr
