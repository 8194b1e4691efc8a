"""``prune`` of a data dir: by a live server, and on the files."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

import lmcache_persist
from lmcache_persist import protocol
from lmcache_persist.connector import CacheClient, ClientOptions
from lmcache_persist.errors import ConfigError, MalformedMessage
from lmcache_persist.identity import Fingerprint
from lmcache_persist.server.prune import fingerprints_of
from lmcache_persist.server.rebind import rebind
from lmcache_persist.store.base import FingerprintUsage
from lmcache_persist.store.selection import Picked
from support.emulated import EmulatedEngine
from support.files import snapshot
from support.server import ServerProcess, cli_here, json_here, short_folder

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
    """The verb's document."""
    return json_here("prune", str(data_dir), *flags)


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
        (("--model", "emulated/modle-1"), ("unknown", "nearest is 'emulated/model-1'")),
        (("--fingerprint", "zz"), ("no model",)),
        (("--fingerprint", ""), ("expected of one",)),
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
    code, out, err = cli_here("prune", str(shared.data_dir), *flags)
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

    monkeypatch.setattr("lmcache_persist.cli.prune._live", one_step)
    flags = ["--json"] if as_json else []
    code, out, err = cli_here("prune", str(shared.data_dir), "--stale", *flags)
    assert code == 130
    assert "interrupted: pruned 3 chunks, 6 objects, 2.93 KiB" in err
    if as_json:
        document = json.loads(out)
        assert (document["complete"], document["objects"]) == (False, 6)
    else:
        assert "pruned 3 chunks" in out


def test_names_mean_all_of_their_fingerprints() -> None:
    """A name means each model that has it; with a fingerprint, that one of them."""
    models = [
        {"name": "a", "fingerprint": "ab" * 32},
        {"name": "a", "fingerprint": "ac" * 32},
        {"name": "b", "fingerprint": "bc" * 32},
    ]
    assert fingerprints_of(models, None, None) is None
    assert fingerprints_of(models, "a", None) == {"ab" * 32, "ac" * 32}
    assert fingerprints_of(models, "a", "ab") == {"ab" * 32}
    assert fingerprints_of(models, None, "FF" * 32) == {"ff" * 32}
    for name, fingerprint in (("a", "bc"), (None, "a"), ("c", None)):
        with pytest.raises(ConfigError):
            fingerprints_of(models, name, fingerprint)
