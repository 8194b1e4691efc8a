"""``prune`` of a data dir: by a live server, and on the files."""

from __future__ import annotations

import io
import json
import shutil
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

import lmcache_persist
from lmcache_persist import protocol
from lmcache_persist.cli.connection import ask_json
from lmcache_persist.connector import CacheClient, ClientOptions
from lmcache_persist.datadir import DataDirLock
from lmcache_persist.errors import DataDirLocked, MalformedMessage
from lmcache_persist.identity import Fingerprint
from lmcache_persist.server.prune import prune as prune_files
from lmcache_persist.server.rebind import rebind
from lmcache_persist.store.base import FingerprintUsage
from lmcache_persist.store.selection import Picked, Selection
from support.emulated import EmulatedEngine
from support.files import snapshot
from support.server import ServerProcess, cli_here, json_here, short_folder
from support.terminals import Interrupted, Terminal

PATIENT = ClientOptions(request_timeout_s=10.0)
OBJECT_BYTES = 8192


def engine_of(server: ServerProcess, number: int) -> EmulatedEngine:
    """An engine of a numbered model."""
    return EmulatedEngine(
        server.url,
        [256],
        object_bytes=OBJECT_BYTES,
        name=f"engine-{number}",
        changes={"model": f"emulated/model-{number}"},
        options=PATIENT,
    ).join()


def tokens(chunks: int, first: int = 7) -> list[int]:
    """A prompt of so many chunks, and a token."""
    return [first, *range(1, 256 * chunks + 1)]


def store(engine: EmulatedEngine, chunks: int) -> None:
    """Durable chunks of one prompt."""
    hashes = engine.hashes(tokens(chunks))
    assert engine.store(hashes) == chunks
    engine.client.flush(20)


def hit(engine: EmulatedEngine, chunks: int) -> int:
    """Chunks of the prompt that can be restored."""
    return engine.lookup(engine.hashes(tokens(chunks)), 256 * chunks + 1).tokens // 256


def prune(data_dir: Path, *flags: str) -> dict[str, Any]:
    """The verb's document; it does not ask."""
    return json_here("prune", str(data_dir), *flags, "--yes")


def test_a_live_server_prunes_a_model_and_goes_on(server: ServerProcess) -> None:
    """Dry run and prune say the same; the model is gone from disk and pool, others stay."""
    with engine_of(server, 1) as one, engine_of(server, 2) as two:
        store(one, 12)
        store(two, 5)
        flags = ("--model", "emulated/model-1")
        would = prune(server.data_dir, *flags, "--dry-run")
        assert (hit(one, 12), would["chunks"], would["dry_run"]) == (12, 12, True)
        done = prune(server.data_dir, *flags)
        assert {**would, "dry_run": False} == done
        assert done["models"][0]["name"] == "emulated/model-1"
        assert (done["bytes"], done["complete"]) == (12 * OBJECT_BYTES, True)
        assert (hit(one, 12), hit(two, 5)) == (0, 5)
        counters = one.client.stats(10)["counters"]
        assert (counters["pruned_chunks"], counters["disk_evictions"]) == (12, 0)
        # What was pruned can be stored again.
        store(one, 12)
        assert hit(one, 12) == 12
    rows = {
        row["name"]: row["objects"] for row in json_here("inspect", str(server.data_dir))["models"]
    }
    assert rows == {"emulated/model-1": 12, "emulated/model-2": 5}
    server.kill()
    assert list(lmcache_persist.check(server.data_dir)) == []


def test_what_is_leased_stays_in_its_slots(server: ServerProcess) -> None:
    """A lease outlives a prune of its chunks, byte for byte; they are missed after it ended."""
    with engine_of(server, 1) as engine:
        store(engine, 6)
        hashes = engine.hashes(tokens(6))
        handle = engine.client.lookup(engine=engine.name, hashes=hashes, num_tokens=256 * 6 + 1)
        result = handle.wait(20)
        assert result is not None
        assert prune(server.data_dir, "--down-to", "0")["chunks"] == 6
        store(engine_two := engine_of(server, 2), 20)
        engine_two.client.close()
        engine.check(hashes, result)
        handle.release()
        assert hit(engine, 6) == 0


def test_lookups_are_answered_while_a_store_is_pruned(server: ServerProcess) -> None:
    """Engines store and hit all through a prune of everything else."""
    with engine_of(server, 1) as one, engine_of(server, 2) as two:
        for first in range(20):
            assert one.store(one.hashes(tokens(100, first))) == 100
            one.client.flush(20)
        store(two, 5)
        ended = threading.Event()
        rounds: list[int] = []

        def work() -> None:
            while not ended.is_set():
                rounds.append(hit(two, 5))

        thread = threading.Thread(target=work)
        thread.start()
        try:
            done = prune(server.data_dir, "--model", "emulated/model-1")
        finally:
            ended.set()
            thread.join(30)
        assert done["chunks"] > 500
        assert rounds
        assert set(rounds) == {5}


def test_files_are_pruned_as_a_server_would(server: ServerProcess) -> None:
    """With no server the verb changes the files; a preview changes no byte of them."""
    with engine_of(server, 1) as one, engine_of(server, 2) as two:
        store(one, 12)
        store(two, 5)
        live = prune(server.data_dir, "--down-to", "64KiB", "--dry-run")
    assert server.terminate() == 0
    before = snapshot(server.data_dir)
    assert prune(server.data_dir, "--down-to", "64KiB", "--dry-run") == live
    assert snapshot(server.data_dir) == before
    assert prune(server.data_dir, "--down-to", "64KiB")["bytes"] == live["bytes"] == 9 * 8192
    document = json_here("inspect", str(server.data_dir))
    assert (document["store"]["bytes"], document["store"]["clean_shutdown"]) == (8 * 8192, True)
    assert list(lmcache_persist.check(server.data_dir)) == []
    fingerprint = next(row["fingerprint"] for row in document["models"] if row["objects"])
    assert prune(server.data_dir, "--older-than", "1h")["chunks"] == 0
    assert prune(server.data_dir, "--older-than", "0s", "--fingerprint", fingerprint[:9])["chunks"]
    code, out, _ = cli_here("prune", str(server.data_dir), "--stale")
    assert (code, out) == (0, "nothing to prune\n")


def test_what_a_rebind_left_is_pruned(server: ServerProcess) -> None:
    """Stale chunks go on the files at once, without a server that sweeps."""
    with engine_of(server, 1) as one:
        store(one, 12)
    server.terminate()
    rebind(server.data_dir, 512, lambda losses: None)
    assert prune(server.data_dir, "--stale")["models"][0]["stale"] is True
    assert json_here("inspect", str(server.data_dir))["store"]["stale_objects"] == 0


@pytest.fixture(scope="module")
def shared() -> Iterator[ServerProcess]:
    """A server with two chunks of a model, for what changes nothing."""
    root = short_folder()
    with ServerProcess(root / "d") as server, engine_of(server, 1) as one:
        store(one, 2)
        yield server
    shutil.rmtree(root, ignore_errors=True)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), ("--older-than", "reset")),
        (("--model", "emulated/modle-1"), ("unknown", "nearest name is 'emulated/model-1'")),
        (("--model", ""), ("is empty", "expected a name")),
        (("--fingerprint", "zz"), ("no beginning of a fingerprint",)),
        (("--fingerprint", ""), ("no beginning of a fingerprint",)),
        (("--fingerprint", "ab12"), ("first 6 or more digits",)),
        (("--fingerprint", "0" * 64), ("is unknown to this data dir",)),
        (("--older-than", "7 days"), ("no duration", "7d")),
        (("--older-than", "7"), ("with a unit", "7d")),
        (("--older-than", "999999999999s"), ("longer ago",)),
        (("--down-to", "2G"), ("no size", "2GiB")),
    ],
)
def test_what_cannot_be_meant_is_refused(
    shared: ServerProcess, flags: tuple[str, ...], words: tuple[str, ...]
) -> None:
    """Exit code 2, what was wrong, and the way out; nothing is removed."""
    code, out, err = cli_here("prune", str(shared.data_dir), *flags, "--yes")
    assert (code, out) == (2, "")
    assert all(word in err for word in words), err
    assert json_here("inspect", str(shared.data_dir))["store"]["objects"] == 2


def test_a_message_without_a_selector_is_refused(shared: ServerProcess) -> None:
    """A server prunes everything for nobody, whoever asks."""
    with CacheClient(shared.url, kind="cli", label="t", options=PATIENT) as client:
        client.wait_connected(20)
        for fields in ({}, {"stale": True, "cursor": b"x"}):
            with pytest.raises(MalformedMessage):
                client.request(protocol.AdminPrune, timeout_s=10, **fields)


@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_says_how_far_it_came(
    shared: ServerProcess, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    """Interrupted between two steps, the verb ends with 130 and tells what is done."""

    def one_step(*_: object) -> Generator[Picked, None, None]:
        step = Picked(cursor=b"x" * 8)
        step.amounts[Fingerprint("ab" * 32), False] = FingerprintUsage(3, 6, 3000)
        yield step
        raise KeyboardInterrupt

    monkeypatch.setattr("lmcache_persist.cli.prune_steps.live", one_step)
    flags = ["--json"] if as_json else []
    code, out, err = cli_here("prune", str(shared.data_dir), "--stale", *flags)
    assert code == 130
    assert "interrupted: pruned 3 chunks, 6 objects (2.93 KiB)" in err
    if as_json:
        document = json.loads(out)
        assert (document["complete"], document["objects"]) == (False, 6)
    else:
        assert "pruned 3 chunks" in out


ASKED = "prune? type yes to go on: "


def asked(
    monkeypatch: pytest.MonkeyPatch, stdin: io.StringIO, data_dir: Path, *flags: str
) -> tuple[int, str, str]:
    """The verb with somebody, or nobody, at its stdin."""
    monkeypatch.setattr("sys.stdin", stdin)
    return cli_here("prune", str(data_dir), *flags)


@pytest.mark.parametrize("is_live", [True, False])
def test_it_says_what_goes_and_asks(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, is_live: bool
) -> None:
    """Only a yes removes anything; what is said before is what --dry-run says, and what goes."""
    with engine_of(server, 1) as one, engine_of(server, 2) as two:
        store(one, 12)
        store(two, 5)
    if not is_live:
        server.terminate()

    def look() -> Any:
        return json_here("inspect", str(server.data_dir))["store"]["objects"]

    flags = ("--model", "emulated/model-1")
    would = prune(server.data_dir, *flags, "--dry-run")["models"][0]
    loss = (
        "this throws away 12 chunks, 12 objects (96.00 KiB)\n"
        f"  emulated/model-1 {would['fingerprint'][:12]}: 12 chunks, 12 objects (96.00 KiB)\n"
    )
    assert (would["chunks"], would["objects"], would["bytes"]) == (12, 12, 12 * OBJECT_BYTES)
    for stdin, is_asked in (
        (io.StringIO("yes\n"), False),
        (Terminal("no\n"), True),
        (Terminal(""), True),
    ):
        code, out, err = asked(monkeypatch, stdin, server.data_dir, *flags)
        assert (code, out, ASKED in err) == (2, "", is_asked), err
        assert loss in err
        assert "nothing was changed" in err
        assert "--yes" in err
        assert look() == 17
    code, out, err = asked(monkeypatch, Interrupted(), server.data_dir, *flags)
    assert (code, out, look()) == (130, "nothing was pruned\n", 17)
    assert err.endswith("interrupted: nothing was changed\n")
    code, out, err = asked(monkeypatch, Terminal("yes\n"), server.data_dir, *flags)
    assert (code, look()) == (0, 5)
    assert err.endswith(f"{loss}{ASKED}")
    assert out.endswith("pruned 12 chunks, 12 objects (96.00 KiB)\n")
    # Nothing is left of it: no question, whoever is there.
    code, out, err = asked(monkeypatch, io.StringIO(), server.data_dir, *flags)
    assert (code, out, ASKED in err) == (0, "nothing to prune\n", False), err


def test_files_are_locked_while_it_asks(server: ServerProcess) -> None:
    """No server starts between what was said and what is done; a no leaves every byte."""
    with engine_of(server, 1) as one:
        store(one, 3)
    server.terminate()
    before = snapshot(server.data_dir)

    def agree(would: Iterator[Picked]) -> bool:
        assert sum(step.bytes for step in would) == 3 * OBJECT_BYTES
        with pytest.raises(DataDirLocked):
            DataDirLock.acquire(server.data_dir, wait_s=0.0)
        return False

    assert list(prune_files(server.data_dir, Selection(down_to_bytes=0), agree=agree)) == []
    assert snapshot(server.data_dir) == before


@pytest.fixture
def no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting ends after one step."""
    monkeypatch.setattr("lmcache_persist.cli.prune.PREVIEW_S", 0.0)


def test_counting_ends_in_time(
    shared: ServerProcess, monkeypatch: pytest.MonkeyPatch, no_time: None
) -> None:
    """A huge store is not walked to its end for a question: it says "at least"."""
    looked: list[int] = []

    def long(*_: object, dry_run: bool) -> Iterator[Picked]:
        assert dry_run
        for _step in range(50):
            looked.append(1)
            step = Picked(cursor=b"x" * 8)
            step.amounts[Fingerprint("ab" * 32), True] = FingerprintUsage(1, 2, 1024)
            yield step

    monkeypatch.setattr("lmcache_persist.cli.prune_steps._of_server", long)
    code, _, err = asked(monkeypatch, Terminal("no\n"), shared.data_dir, "--stale")
    assert (code, len(looked)) == (2, 1)
    assert "at least 1 chunk, 2 objects (1.00 KiB), and what was not reached" in err
    assert "unknown model abababababab, stale: 1 chunk, 2 objects (1.00 KiB)\n" in err


def test_ctrl_c_while_counting_changes_nothing(
    shared: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with 130, and says so."""

    def interrupted(*_: object, dry_run: bool) -> Iterator[Picked]:
        assert dry_run
        yield Picked(cursor=b"x" * 8)
        raise KeyboardInterrupt

    monkeypatch.setattr("lmcache_persist.cli.prune_steps._of_server", interrupted)
    code, out, err = asked(monkeypatch, Terminal("yes\n"), shared.data_dir, "--stale")
    assert (code, out) == (130, "nothing was pruned\n")
    assert err.count("interrupted: nothing was changed\n") == 1


def test_what_only_the_pool_has_is_asked_about(
    shared: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that the disk evicted may be in the pool still: that is told, and asked about."""
    fingerprint = json_here("inspect", str(shared.data_dir))["models"][0]["fingerprint"]
    with CacheClient(shared.url, kind="cli", label="t", options=PATIENT) as client:
        client.wait_connected(20)
        for fields, pool_chunks in (
            ({"fingerprints": [fingerprint]}, 2),
            ({"fingerprints": [fingerprint], "down_to_bytes": 0}, 0),
        ):
            reply = ask_json(client, protocol.AdminPrune, 10, dry_run=True, **fields)
            assert reply["pool_chunks"] == pool_chunks

    def evicted(*_: object, dry_run: bool) -> Iterator[Picked]:
        assert dry_run
        yield Picked(pool_chunks=2)

    monkeypatch.setattr("lmcache_persist.cli.prune_steps._of_server", evicted)
    code, _, err = asked(monkeypatch, Terminal("no\n"), shared.data_dir, "--model", fingerprint)
    assert code == 2
    assert "this throws away 2 chunks that only the server's pool has" in err


@pytest.fixture(scope="module")
def stopped() -> Iterator[Path]:
    """Files with two chunks of a model, for what changes nothing."""
    root = short_folder()
    with ServerProcess(root / "d") as server, engine_of(server, 1) as one:
        store(one, 2)
        assert server.terminate() == 0
        yield server.data_dir
    shutil.rmtree(root, ignore_errors=True)


@pytest.mark.parametrize("wanted", ["emulated/modle-1", "abc", "0123456789"])
def test_inspect_and_prune_name_models_alike(
    shared: ServerProcess, stopped: Path, wanted: str
) -> None:
    """One rule and one wording, of a live server and on files."""
    said = {
        cli_here(verb, str(data_dir), "--model", wanted)
        for verb in ("inspect", "prune")
        for data_dir in (shared.data_dir, stopped)
    }
    ((code, out, err),) = said
    assert (code, out) == (2, "")
    assert f"model {wanted!r} is unknown to this data dir" in err


def test_a_fingerprint_is_of_the_model_that_is_named(stopped: Path) -> None:
    """Both selectors mean one model; a beginning does for either."""
    fingerprint = json_here("inspect", str(stopped))["models"][0]["fingerprint"]
    for model in ("emulated/model-1", fingerprint[:6], fingerprint):
        flags = ("--model", model, "--fingerprint", fingerprint[:8], "--dry-run")
        assert prune(stopped, *flags)["chunks"] == 2
    for model in ("emulated/model-2", fingerprint[:5]):
        code, _, err = cli_here(
            "prune", str(stopped), "--model", model, "--fingerprint", fingerprint[:8], "--yes"
        )
        assert (code, f"is of model 'emulated/model-1', expected {model!r}" in err) == (2, True)
