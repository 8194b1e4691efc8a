"""What ``inspect`` tells beside the contract's numbers: pages, models, starts, ages."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_persist.connector import ClientOptions
from lmcache_persist.manifest import Manifest
from lmcache_persist.server import looking
from support.emulated import EmulatedEngine
from support.files import snapshot
from support.forked import as_nobody
from support.server import ServerProcess, inspect, own_server, run_cli
from support.verbs import in_process

PATIENT = ClientOptions(request_timeout_s=10.0)
CHUNKS = 20
OBJECT_BYTES = 4096


def store(server: ServerProcess, name: str, **changes: Any) -> None:
    """Have an engine store a prompt of its own, over two groups."""
    engine = EmulatedEngine(
        server.url,
        [64, 0, 64],
        object_bytes=OBJECT_BYTES,
        name=name,
        changes=changes,
        options=PATIENT,
    )
    with engine:
        engine.join()
        hashes = engine.hashes(list(range(engine.chunk_size * CHUNKS)))
        assert engine.store(hashes) == CHUNKS
        engine.client.flush(30)


@pytest.fixture(scope="module")
def made() -> Iterator[Path]:
    """A data dir of two models; its first server was killed, its second one ended well."""
    with own_server() as server:
        server.start()
        store(server, "one", weights="w0")
        server.kill()
        server.start()
        store(server, "two", weights="w1")
        assert server.terminate() == 0
        yield server.data_dir


@pytest.fixture
def data_dir(made: Path, root: Path) -> Path:
    """A copy of it that a test may change."""
    shutil.copytree(made, root / "d")
    return root / "d"


def look(data_dir: Path, *flags: str) -> dict[str, Any]:
    """The document of ``inspect`` in this process."""
    code, document = in_process("inspect", str(data_dir), *flags)
    assert code == 0, document
    return document


def test_it_tells_how_the_binding_came_about_and_how_servers_ended(made: Path) -> None:
    """Who won the bind, and of each start whether it ended, and well."""
    document = look(made)
    assert document["binding"]["winner"]
    assert [boot["end"] for boot in document["boots"]] == ["killed", "clean"]
    text = run_cli("inspect", str(made)).stdout
    assert "winner\t" in text
    assert "killed or crashed" in text


def test_usage_is_told_by_model_and_group(made: Path) -> None:
    """Each model's groups add up to its objects and bytes; a scratch group has none."""
    document = look(made)
    assert len(document["models"]) == 2
    for model in document["models"]:
        assert (model["chunks"], model["objects"]) == (CHUNKS, 2 * CHUNKS)
        groups = model["by_group"]
        assert [group["objects"] for group in groups] == [CHUNKS, 0, CHUNKS]
        assert sum(group["bytes"] for group in groups) == model["bytes"]
        assert model["hits"] == 0
    store = document["store"]
    assert store["estimated_from"] == {"seen_chunks": 2 * CHUNKS, "of_chunks": 2 * CHUNKS}
    for histogram in ("ages", "order"):
        assert sum(part["chunks"] for part in store[histogram]) == 2 * CHUNKS
        assert sum(part["bytes"] for part in store[histogram]) == store["bytes"]


def test_models_shows_what_a_fingerprint_is_made_of(made: Path) -> None:
    """--models has identity and layouts, and the field that differs."""
    first, second = look(made, "--models")["models"]
    assert (first["identity"]["weights"], second["identity"]["weights"]) == ("w0", "w1")
    assert second["differs_from"]["fields"] == ["weights"]
    assert "identity" not in look(made)["models"][0]
    text = run_cli("inspect", str(made), "--models").stdout
    assert "weights\tw1" in text
    assert "differs from" in text


def test_model_narrows_by_name_and_by_fingerprint(made: Path) -> None:
    """A name means all of that name, the beginning of a fingerprint one; none is refused."""
    both = look(made)["models"]
    assert look(made, "--model", "emulated/model")["models"] == both
    prefix = both[1]["fingerprint"][:6]
    assert look(made, "--model", prefix)["models"] == both[1:]
    code, document = in_process("inspect", str(made), "--model", "other")
    assert (code, document["error"]["code"]) == (2, "config")
    assert "emulated/model" in document["error"]["hint"]


def pages(data_dir: Path, limit: int, *flags: str) -> list[dict[str, Any]]:
    """All objects, page by page."""
    found: list[dict[str, Any]] = []
    after = ""
    while True:
        page = look(data_dir, "--objects", "--limit", str(limit), "--after", after, *flags)
        assert 0 < len(page["objects"]) <= max(2, limit)
        found += page["objects"]
        after = page["next"]
        if after is None:
            return found


def test_objects_are_paged_the_same_offline_and_live(data_dir: Path) -> None:
    """Pages of any size put together are all objects, each once, in one order."""
    whole = pages(data_dir, 1000)
    assert len(whole) == 4 * CHUNKS
    places = [(one["key"], one["rank"], one["group"]) for one in whole]
    assert len(set(places)) == len(places)
    assert places == sorted(places)
    assert {one["bytes"] for one in whole} == {OBJECT_BYTES}
    assert not any(one["stale"] for one in whole)
    assert pages(data_dir, 7) == whole
    one = look(data_dir)["models"][0]["fingerprint"]
    mine = [item for item in whole if item["fingerprint"] == one]
    assert pages(data_dir, 15, "--model", one[:10]) == mine
    with ServerProcess(data_dir) as server:
        assert pages(server.data_dir, 33) == whole
        assert pages(server.data_dir, 15, "--model", one) == mine
        text = run_cli("inspect", str(server.data_dir), "--objects", "--limit", "2").stdout
        assert f"--after {whole[1]['key']}" in text
        assert f"endpoint\t{server.url}\n" in text
        assert "buckets" not in text  # numbers for machines are in --json


@pytest.mark.parametrize(
    "flags", [("--limit", "0"), ("--limit", "100001"), ("--after", "xyz"), ("--after", "ab")]
)
def test_odd_pages_are_refused(made: Path, flags: tuple[str, ...]) -> None:
    """A cursor that is none, or a page of nothing, is refused with what is expected."""
    code, document = in_process("inspect", str(made), "--objects", *flags)
    assert (code, document["error"]["code"]) == (2, "config")


def test_stale_objects_are_shown_as_such(data_dir: Path) -> None:
    """After a rebind the old objects are counted, paged and marked, and no model has any."""
    done = run_cli("rebind", str(data_dir), "--chunk-size", "640", "--yes")
    assert done.returncode == 0, done.stderr
    document = look(data_dir, "--objects")
    assert (document["store"]["objects"], document["store"]["stale_objects"]) == (0, 4 * CHUNKS)
    assert document["store"]["stale_bytes"] == 4 * CHUNKS * OBJECT_BYTES
    assert all(one["stale"] for one in document["objects"])
    assert {model["objects"] for model in document["models"]} == {0}
    assert {model["hits"] for model in document["models"]} == {0}


def test_objects_of_a_model_without_a_row_are_shown(data_dir: Path) -> None:
    """What an older copy of the manifest does not know is named, and is no violation."""
    name = look(data_dir)["models"][0]["fingerprint"]
    manifest = Manifest.open(data_dir / "manifest.sqlite")
    manifest.forget_models([name])
    manifest.close()
    document = look(data_dir, "--objects")
    (row,) = document["unregistered"]
    assert (row["fingerprint"], row["objects"]) == (name, 2 * CHUNKS)
    assert len(document["models"]) == 1
    assert {one["model"] for one in document["objects"]} == {None, "emulated/model"}
    assert look(data_dir, "--model", name[:8])["unregistered"] == [row]
    assert in_process("verify", str(data_dir))[0] == 0


def test_a_hung_server_has_no_objects_to_show(data_dir: Path) -> None:
    """--objects beside a server that does not answer: null, never an empty page."""
    with ServerProcess(data_dir) as server:
        assert server.process is not None
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            done = run_cli("inspect", str(data_dir), "--json", "--objects", "--timeout", "0.3")
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
    document = json.loads(done.stdout)
    assert done.returncode == 4
    assert (document["store"], document["objects"]) == ("unavailable", None)
    assert document["boots"][-1]["end"] == "running"


def test_broken_pages_cannot_end_inspect(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LMDB ends the process that reads broken pages: a child dies, and inspect tells of it."""
    # As in a store too large for a walk over its pages before.
    monkeypatch.setattr(looking, "MAX_WALKED_CHUNKS", 0)

    here = os.getpid()

    def dies(*_: object) -> None:
        if os.getpid() == here:
            raise RuntimeError("the store is read by the process itself")
        os.kill(os.getpid(), signal.SIGABRT)

    monkeypatch.setattr(looking.store_files.OfflineStore, "usage", dies)
    code, document = in_process("inspect", str(data_dir), "--objects")
    assert code == 6
    assert (document["store"], document["objects"]) == ("unavailable", None)
    assert document["binding"]["chunk_size"] == 256


@pytest.mark.parametrize("unreadable", [".", "manifest.sqlite", "store", "server.lock"])
def test_no_right_to_read_is_said(data_dir: Path, unreadable: str) -> None:
    """Whatever part cannot be read, it is named as that; nothing looks empty, lost or bad."""
    if os.geteuid() != 0:
        pytest.skip("needs root to give files away")
    os.chmod(data_dir.parent, 0o755)
    for path in (data_dir, *data_dir.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    (data_dir / unreadable).chmod(0)
    verbs = (("inspect",), ("verify",), ("verify", "--repair"))
    done = [as_nobody(*verb, str(data_dir), "--json") for verb in verbs]
    for code, out, _ in done[:2]:
        document = json.loads(out)
        assert code in (5, 6)
        assert document.get("error") or document["store"] == "unavailable"
    assert done[2][0] == 5
    said = "".join(err for _, _, err in done)
    assert said.count("Permission denied") >= 3
    assert "recover" not in said


def test_root_leaves_nothing_behind_in_a_service_users_folder(data_dir: Path) -> None:
    """Owners, modes, names and bytes are the same after root has looked at everything."""
    if os.geteuid() != 0:
        pytest.skip("needs root to give files away")
    for path in (data_dir, *data_dir.rglob("*")):
        os.chown(path, 65534, 65534)

    def owners() -> dict[str, tuple[int, int]]:
        return {str(path): (path.stat().st_uid, path.stat().st_gid) for path in data_dir.rglob("*")}

    before = snapshot(data_dir), owners()
    look(data_dir, "--models", "--objects")
    assert in_process("verify", str(data_dir))[0] == 0
    assert (snapshot(data_dir), owners()) == before


def test_a_live_server_answers_the_same_pages_while_it_stores(
    make_server: Callable[..., ServerProcess],
) -> None:
    """A page is taken at a moment; the next one goes on after it, whatever came in between."""
    server = make_server().start()
    store(server, "one", weights="w0")
    first = inspect(server.data_dir, "--objects", "--limit", "10")
    store(server, "two", weights="w1")
    rest = inspect(server.data_dir, "--objects", "--limit", "1000", "--after", first["next"])
    keys = [one["key"] for one in first["objects"] + rest["objects"]]
    assert keys == sorted(keys)
    assert rest["next"] is None
