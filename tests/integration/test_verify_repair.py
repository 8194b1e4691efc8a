"""``verify --repair`` on data dirs: mended offline and live, refused where it must be."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_persist.store import preallocation
from support.files import snapshot
from support.filled import OBJECT_BYTES, fill, hits
from support.mutilate import alter
from support.server import ServerProcess, cli_here, inspect, own_server, run_cli
from support.verbs import in_process

CHUNKS = 12
CAPACITY = str(16 << 20)


@pytest.fixture(scope="module")
def made() -> Iterator[Path]:
    """A data dir with some chunks that its server has left in good order."""
    with own_server(capacity=CAPACITY) as server:
        server.start()
        fill(server, CHUNKS)
        assert server.terminate() == 0
        yield server.data_dir


@pytest.fixture
def data_dir(made: Path, root: Path) -> Path:
    """A copy of it."""
    shutil.copytree(made, root / "d")
    return root / "d"


def verify(data_dir: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """Exit code and document of ``verify``."""
    return in_process("verify", str(data_dir), *flags)


def assert_clean(data_dir: Path) -> None:
    """Nothing is wrong, and a repair finds nothing to do."""
    assert (verify(data_dir)[0], verify(data_dir)[1]["violations"]) == (0, [])
    code, document = verify(data_dir, "--repair")
    assert (code, document["violations"], document["repaired"]) == (0, [], 0)


def test_a_repair_tells_what_it_did_and_leaves_the_rest(data_dir: Path) -> None:
    """Exit code 0, each finding with what was done; a server then serves what is left."""
    for name in ("flipped bit", "lost order", "orphan extents", "broken totals", "lost counters"):
        alter(data_dir / "store", name)
    code, before = verify(data_dir)
    assert code == 1
    code, document = verify(data_dir, "--repair")
    assert (code, document["ok"]) == (0, True)
    assert document["repaired"] == len(document["violations"]) > 0
    named = {one["where"] for one in document["violations"]}
    # A chunk without an entry in the order is also a number of entries: the same fault.
    assert named >= {one["where"] for one in before["violations"]} - {"store order"}
    assert document["checked_objects"] == CHUNKS
    done = {one["repaired"] for one in document["violations"]}
    assert {"dropped the chunk", "gave it a place in the order", "removed"} <= done
    assert_clean(data_dir)
    with ServerProcess(data_dir, capacity=CAPACITY) as server:
        assert hits(server, CHUNKS) > 0
        assert inspect(data_dir)["store"]["objects"] == CHUNKS - 1


def test_the_text_form_streams_one_line_each(data_dir: Path) -> None:
    """For people: what, an arrow, what was done, and a verdict."""
    alter(data_dir / "store", "orphan extents")
    done = run_cli("verify", str(data_dir), "--repair")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert all(" -> removed" in line for line in lines[:-1])
    assert lines[-1] == f"4 violations, 4 repaired, 0 left, {CHUNKS} objects checked"
    assert done.stderr == ""  # no terminal, no progress


@pytest.mark.parametrize("room", [True, False])
def test_a_replaced_store_has_the_size_of_the_one_before(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    """As at a start; the damaged one is kept even where there is no room for that."""
    wanted, least = 32 << 20, 16 << 20
    path = data_dir / "store" / "data.mdb"
    with path.open("r+b") as file:
        file.write(b"x" * 8192)
        file.truncate(wanted)
    if not room:
        free = SimpleNamespace(f_bavail=(wanted - 4096) // 4096, f_frsize=4096)
        monkeypatch.setattr(preallocation.os, "statvfs", lambda path: free)
    code, document = verify(data_dir, "--repair")
    assert code == 0
    assert path.stat().st_size == (wanted if room else least)
    assert (data_dir / "store.damaged" / "data.mdb").stat().st_size == wanted
    assert ("--capacity 32MiB" in document["violations"][0]["repaired"]) == (not room)


@pytest.mark.parametrize("damage", ["cut", "noise", "gone", "description"])
def test_a_store_that_cannot_be_mended_is_replaced(data_dir: Path, damage: str) -> None:
    """It is kept aside, an empty one has its name and uuid, and the next start goes on."""
    path = data_dir / "store" / "data.mdb"
    if damage == "cut":
        os.truncate(path, 8192)
    elif damage == "noise":
        with path.open("r+b") as file:
            for page in range(2, 60):
                file.seek(page * 4096)
                file.write(os.urandom(4096))
    elif damage == "gone":
        shutil.rmtree(data_dir / "store")
    else:
        alter(data_dir / "store", "lost description")
    binding = inspect_binding(data_dir)
    assert verify(data_dir)[0] == 1
    code, document = verify(data_dir, "--repair")
    assert code == 0
    assert "made an empty one" in document["violations"][0]["repaired"]
    assert (data_dir / "store.damaged").exists() == (damage != "gone")
    assert_clean(data_dir)
    with ServerProcess(data_dir, capacity="32MiB") as server:
        assert inspect(data_dir)["store"]["capacity_bytes"] == 32 << 20
        fill(server, 2)
    assert inspect_binding(data_dir) == binding


def inspect_binding(data_dir: Path) -> Any:
    """The binding, whatever became of the store."""
    return in_process("inspect", str(data_dir))[1]["binding"]


def test_a_model_that_is_not_what_it_says_is_forgotten(data_dir: Path) -> None:
    """Its row goes, its objects stay, and its engine has them again."""
    with sqlite3.connect(data_dir / "manifest.sqlite") as connection:
        connection.execute("UPDATE models SET required_alignment = 96")
    connection.close()
    code, document = verify(data_dir, "--repair")
    assert code == 0
    assert {one["where"].split()[1] for one in document["violations"]} == {"model"}
    assert_clean(data_dir)
    with ServerProcess(data_dir, capacity=CAPACITY) as server:
        assert hits(server, CHUNKS) == CHUNKS * 256
        assert len(inspect(data_dir)["models"]) == 1


@pytest.mark.parametrize("case", ["no manifest", "garbage manifest", "unbound", "foreign store"])
def test_what_no_repair_can_know_is_refused(data_dir: Path, root: Path, case: str) -> None:
    """Foreign bytes, and bytes without their manifest: exit code 5, a way out, not a byte."""
    if case == "no manifest":
        (data_dir / "manifest.sqlite").unlink()
    elif case == "garbage manifest":
        (data_dir / "manifest.sqlite").write_bytes(b"garbage" * 1000)
    elif case == "unbound":
        with sqlite3.connect(data_dir / "manifest.sqlite") as connection:
            connection.execute("DELETE FROM binding")
        connection.close()
    else:
        with ServerProcess(root / "other", capacity=CAPACITY) as other:
            fill(other, 1)
            assert other.terminate() == 0
        shutil.rmtree(data_dir / "store")
        shutil.move(root / "other" / "store", data_dir / "store")
    before = snapshot(data_dir)
    code, document = verify(data_dir, "--repair")
    assert code == 5
    wanted = "reset" if case == "foreign store" else "recover"
    assert f"lmcache-persist {wanted} {data_dir}" in document["error"]["hint"]
    assert snapshot(data_dir) == before
    if wanted == "recover":
        assert in_process("recover", str(data_dir), "--yes")[0] == 0
        assert_clean(data_dir)


LIVE = [
    "flipped bit",
    "lost extent",
    "orphan extents",
    "surplus order",
    "lost order",
    "wrong totals",
]


def test_a_live_server_names_and_mends_it(data_dir: Path) -> None:
    """Verify finds what the files would show, --repair mends it while the server serves."""
    for name in LIVE:
        alter(data_dir / "store", name)
    with ServerProcess(data_dir, capacity=CAPACITY) as server:
        code, document = verify(data_dir)
        assert code == 1
        assert verify(data_dir) == (1, document), "a verify changes nothing"
        assert inspect(data_dir)["server"]["disk"]["corrupt_found"] == 0
        assert server.log().count("verify found 2 bad chunks") == 1
        kinds = {one["where"].split()[0] for one in document["violations"]}
        assert {"chunk", "order", "extents", "totals"} <= kinds
        code, document = verify(data_dir, "--repair")
        assert code == 0, document
        assert document["repaired"] == len(document["violations"]) > 0
        assert verify(data_dir) == (
            0,
            {"ok": True, "checked_objects": CHUNKS - 2, "violations": []},
        )
        found = inspect(data_dir)
        assert found["store"]["objects"] == CHUNKS - 2
        # The one with an extent too few, too, which goes in the first step.
        assert found["store"]["corrupt_chunks"] == 2
        fill(server, CHUNKS)
        assert hits(server, CHUNKS) == CHUNKS * 256
        assert server.terminate() == 0
    assert_clean(data_dir)
    assert inspect(data_dir)["store"]["bytes"] == CHUNKS * OBJECT_BYTES


def test_what_a_live_verify_found_goes_with_the_next_load(data_dir: Path) -> None:
    """It is still a miss, never served, and dropped as after any read; then all is good."""
    alter(data_dir / "store", "flipped bit")
    with ServerProcess(data_dir, capacity=CAPACITY) as server:
        assert verify(data_dir)[0] == 1
        assert hits(server, CHUNKS) < CHUNKS * 256
        assert inspect(data_dir)["store"]["corrupt_chunks"] == 1
        assert server.terminate() == 0
    assert_clean(data_dir)


@pytest.mark.parametrize("lost", ["bytes", "manifest"])
def test_verify_names_the_way_out(data_dir: Path, lost: str) -> None:
    """On stderr, behind what was found: a repair, or a recovery of the manifest."""
    if lost == "bytes":
        alter(data_dir / "store", "flipped bit")
    else:
        (data_dir / "manifest.sqlite").unlink()
    code, out, err = cli_here("verify", str(data_dir))
    assert code == 1
    assert out.splitlines()[-1].startswith("1 violation, ")
    way = f"verify {data_dir} --repair" if lost == "bytes" else f"recover {data_dir}"
    assert err.splitlines()[-1].startswith("hint: ")
    assert err.endswith(f"lmcache-persist {way}\n")


def test_a_live_server_names_a_bad_record(data_dir: Path) -> None:
    """A record that is bad by itself is a violation, and gone afterwards."""
    alter(data_dir / "store", "broken record")
    with ServerProcess(data_dir, capacity=CAPACITY):
        code, document = verify(data_dir)
        assert code == 1
        assert "record has another checksum" in {one["what"] for one in document["violations"]}
        assert verify(data_dir, "--repair")[0] == 0
        assert verify(data_dir)[1]["checked_objects"] == CHUNKS - 1


def test_a_hung_server_repairs_nothing(data_dir: Path) -> None:
    """No answer, exit code 4; nobody else takes the store in hand."""
    with ServerProcess(data_dir, capacity=CAPACITY) as server:
        assert server.process is not None
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            done = run_cli("verify", str(data_dir), "--repair", "--timeout", "0.3", "--json")
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        assert done.returncode == 4
        assert json.loads(done.stdout)["error"]["code"] == "server_unreachable"
