"""``recover`` and ``reset`` of data dirs that a real server filled."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import lmcache_persist
from lmcache_persist.server.looking import inspect_offline
from support.files import snapshot
from support.filled import fill, filled, hits
from support.server import ServerProcess, cli_here, json_here, run_cli, short_folder

MakeServer = Callable[..., ServerProcess]
NUM_OBJECTS = 20


@pytest.fixture(scope="module")
def template() -> Iterator[Path]:
    """A data dir that a server filled, to be copied."""
    root = short_folder()
    server = filled(lambda: ServerProcess(root / "d"), NUM_OBJECTS)
    yield server.data_dir
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def server(make_server: MakeServer, template: Path) -> ServerProcess:
    """A server, not started, on a copy of the filled data dir."""
    made = make_server()
    shutil.copytree(template, made.data_dir)
    return made


def recover(server: ServerProcess) -> tuple[int, str]:
    """Exit code and all that the verb says."""
    done = run_cli("recover", str(server.data_dir), "--yes")
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


def lose(data_dir: Path) -> None:
    """The manifest is deleted."""
    (data_dir / "manifest.sqlite").unlink()


def garble(data_dir: Path) -> None:
    """The manifest is no database, and a -wal lies beside it."""
    (data_dir / "manifest.sqlite").write_bytes(b"not a database" * 1000)
    (data_dir / "manifest.sqlite-wal").write_bytes(b"nor a log")


def unbind(data_dir: Path) -> None:
    """The manifest is a copy from before the bind."""
    with sqlite3.connect(data_dir / "manifest.sqlite") as connection:
        connection.execute("DELETE FROM binding")
        connection.execute("DELETE FROM models")
    connection.close()


@pytest.mark.parametrize("accident", [lose, garble, unbind])
def test_a_lost_manifest_is_rebuilt(
    server: ServerProcess, accident: Callable[[Path], None]
) -> None:
    """A start refuses and names ``recover``; that brings binding and hits back."""
    before = inspect_offline(server.data_dir)["binding"]
    accident(server.data_dir)
    broken = snapshot(server.data_dir)
    code, log = server.refused()
    assert code == 5
    assert f"lmcache-persist recover {server.data_dir}" in log
    assert snapshot(server.data_dir) == broken
    code, text = recover(server)
    assert code == 0
    assert "chunk size 256" in text
    assert inspect_offline(server.data_dir)["binding"] == before
    assert list(lmcache_persist.check(server.data_dir)) == []
    aside = sorted(path.name for path in server.data_dir.glob("manifest.sqlite.unreadable*"))
    if accident is garble:
        assert aside == ["manifest.sqlite.unreadable", "manifest.sqlite.unreadable-wal"]
        kept = (server.data_dir / aside[0]).read_bytes()
        assert kept == b"not a database" * 1000
        assert str(server.data_dir / aside[0]) in text
    else:
        assert aside == []
    server.start()
    assert hits(server, NUM_OBJECTS) == NUM_OBJECTS * 256


def test_a_manifest_is_moved_aside_only_if_that_is_confirmed(server: ServerProcess) -> None:
    """What the new one will not know is said, and without a yes nothing happens."""
    garble(server.data_dir)
    before = snapshot(server.data_dir)
    done = run_cli("recover", str(server.data_dir))
    assert done.returncode == 2
    assert "manifest.sqlite.unreadable" in done.stderr
    assert f"nothing that is stored is lost: {NUM_OBJECTS} chunks" in done.stderr
    assert snapshot(server.data_dir) == before
    # Where nothing is moved, nothing is asked.
    lose(server.data_dir)
    (server.data_dir / "manifest.sqlite-wal").unlink()
    assert run_cli("recover", str(server.data_dir)).returncode == 0


def test_a_good_manifest_is_left_alone(server: ServerProcess) -> None:
    """With nothing to do recover says so, and changes no byte."""
    before = snapshot(server.data_dir)
    code, text = recover(server)
    assert (code, "nothing to do" in text) == (0, True)
    assert snapshot(server.data_dir) == before


def test_two_set_aside_manifests_are_both_kept(server: ServerProcess) -> None:
    """Nothing that was set aside is written over."""
    for _ in range(2):
        garble(server.data_dir)
        assert recover(server)[0] == 0
    names = {path.name for path in server.data_dir.glob("manifest.sqlite.unreadable*")}
    assert {"manifest.sqlite.unreadable", "manifest.sqlite.unreadable.2"} <= names


def test_what_cannot_be_recovered_is_refused(
    server: ServerProcess, make_server: MakeServer
) -> None:
    """A manifest that is good and says otherwise, or a store without a stamp: no byte changes."""
    other = make_server("--chunk-size", "512", name="other").start()
    other.terminate()
    manifest = (server.data_dir / "manifest.sqlite").read_bytes()
    (server.data_dir / "manifest.sqlite").write_bytes(
        (other.data_dir / "manifest.sqlite").read_bytes()
    )
    before = snapshot(server.data_dir)
    code, text = recover(server)
    assert code == 5
    assert "uuid" in text
    assert snapshot(server.data_dir) == before
    (server.data_dir / "manifest.sqlite").write_bytes(manifest)
    garble(server.data_dir)
    shutil.rmtree(server.data_dir / "store")
    before = snapshot(server.data_dir)
    code, text = recover(server)
    assert code == 5
    assert f"lmcache-persist reset {server.data_dir}" in text
    assert snapshot(server.data_dir) == before


def test_a_newer_manifest_is_not_rebuilt(server: ServerProcess) -> None:
    """What a newer version wrote is no accident."""
    with sqlite3.connect(server.data_dir / "manifest.sqlite") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '0999'")
    connection.close()
    code, text = recover(server)
    assert code == 5
    assert "0999" in text


def test_a_living_server_is_not_touched(server: ServerProcess) -> None:
    """Recover and reset refuse a data dir that is served, and name who serves it."""
    server.start()
    for verb in (["recover"], ["reset", "--yes"]):
        done = run_cli(verb[0], str(server.data_dir), *verb[1:])
        assert done.returncode == 5
        assert server.url in done.stderr
    assert hits(server, NUM_OBJECTS) == NUM_OBJECTS * 256


def test_reset_throws_everything_away(server: ServerProcess) -> None:
    """Manifest, store, what was set aside, and a killed server's pool; then a fresh start."""
    server.start()
    server.kill()
    garble_aside = server.data_dir / "manifest.sqlite.unreadable"
    garble_aside.write_bytes(b"x")
    shutil.copytree(server.data_dir / "store", server.data_dir / "store.damaged")
    (server.data_dir / "notes.txt").write_text("somebody's own")
    assert list(server.pool_dir.iterdir())
    fingerprint = inspect_offline(server.data_dir)["models"][0]["fingerprint"]
    before = snapshot(server.data_dir)
    done = run_cli("reset", str(server.data_dir))
    assert done.returncode == 2
    assert f"emulated/model {fingerprint[:12]}: {NUM_OBJECTS} chunks" in done.stderr
    assert (
        "beside them: manifest.sqlite.unreadable, crash.log (empty), ballast, server.sock"
        in done.stderr
    )
    assert "chunk size 256" in done.stderr
    assert snapshot(server.data_dir) == before
    done = run_cli(
        "reset", str(server.data_dir), "--yes", "--json", "--pool-dir", str(server.pool_dir)
    )
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["removed"]) == 5
    left = {path.name for path in server.data_dir.iterdir()}
    assert left == {"server.lock", "notes.txt"}
    assert (server.data_dir / "notes.txt").read_text() == "somebody's own"
    assert list(server.pool_dir.iterdir()) == []
    server.start()
    assert hits(server, NUM_OBJECTS) == 0
    fill(server, 5)


def test_a_second_reset_has_nothing_to_do(server: ServerProcess) -> None:
    """Of an empty data dir nothing is asked and nothing said to be removed, however often."""
    assert cli_here("reset", str(server.data_dir), "--yes")[0] == 0
    before = snapshot(server.data_dir)
    assert set(before) <= {".", "server.lock"}
    for _ in range(2):
        code, out, err = cli_here("reset", str(server.data_dir))
        assert (code, err) == (0, "")
        assert out == f"nothing to remove: {server.data_dir} holds nothing of a server\n"
    assert json_here("reset", str(server.data_dir)) == {"removed": []}
    assert snapshot(server.data_dir) == before
    # What an interrupted one left is finished without a question: it was answered.
    (server.data_dir / "resetting").touch()
    assert "interrupted" in json_here("reset", str(server.data_dir))["removed"][0]
    assert snapshot(server.data_dir) == before
    server.start()
    assert hits(server, NUM_OBJECTS) == 0


def test_reset_takes_parts_of_a_manifest_and_no_others(server: ServerProcess) -> None:
    """A file of SQLite without its database goes; names that only look like ours stay."""
    assert cli_here("reset", str(server.data_dir), "--yes")[0] == 0
    (server.data_dir / "manifest.sqlite-shm").write_bytes(b"x")
    (server.data_dir / "crash-notes.log").write_text("somebody's own")
    code, _, err = cli_here("reset", str(server.data_dir))
    assert (code, "side files of a manifest that is absent" in err) == (2, True)
    assert cli_here("reset", str(server.data_dir), "--yes")[0] == 0
    left = {path.name for path in server.data_dir.iterdir()}
    assert left == {"server.lock", "crash-notes.log"}


def test_reset_takes_what_nobody_can_read(server: ServerProcess) -> None:
    """Garbage in both places is what a reset is for."""
    garble(server.data_dir)
    (server.data_dir / "store" / "data.mdb").write_bytes(b"garbage")
    code, log = server.refused()
    assert code == 5
    assert "Traceback" not in log
    assert run_cli("reset", str(server.data_dir), "--yes").returncode == 0
    server.start()


def test_reset_of_another_folder_is_refused(root: Path) -> None:
    """A folder that no server ever had is not emptied."""
    (root / "home").mkdir()
    (root / "home" / "thesis.txt").write_text("x")
    done = run_cli("reset", str(root / "home"), "--yes")
    assert done.returncode == 5
    assert (root / "home" / "thesis.txt").exists()
    assert [path.name for path in (root / "home").iterdir()] == ["thesis.txt"]
