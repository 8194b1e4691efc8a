"""SIGKILL at every named step of rebind, recover and reset.

Whoever looks next, a start, the verb again or ``inspect``, finds the state before the step
that decides or the one after it, never a mix.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import lmcache_persist
from lmcache_persist import failpoints
from lmcache_persist.errors import DataDirUnusable
from lmcache_persist.server.looking import inspect_offline
from lmcache_persist.server.rebind import Outcome, rebind
from lmcache_persist.server.recover import recover
from support.filled import engine_of, fill, filled, hits, prompt
from support.server import ServerProcess, inspect, run_cli, short_folder

MakeServer = Callable[..., ServerProcess]
NUM_OBJECTS = 20
OLD, NEW = 256, 512

REBIND_OUTCOMES = {
    "rebind.before_stamp": OLD,
    "rebind.after_stamp": NEW,
    "rebind.before_commit": NEW,
    "rebind.after_commit": NEW,
}
RESET_OUTCOMES = {
    "reset.before_mark": OLD,
    "reset.after_mark": None,
    "reset.after_manifest": None,
    "reset.after_store": None,
}
RECOVER_POINTS = ("recover.after_set_aside", "bind.before_commit", "bind.after_commit")


def test_the_steps_are_the_ones_tested() -> None:
    """A new step has to be given its outcome here."""
    for verb, tested in (("rebind", REBIND_OUTCOMES), ("reset", RESET_OUTCOMES)):
        assert set(tested) == {name for name in failpoints.NAMES if name.startswith(f"{verb}.")}
    named = {name for name in failpoints.NAMES if name.startswith("recover.")}
    assert named <= set(RECOVER_POINTS)


@pytest.fixture(scope="module")
def template() -> Iterator[Path]:
    """A data dir that a server filled, to be copied."""
    root = short_folder()

    def make(**_: object) -> ServerProcess:
        return ServerProcess(root / "d")

    server = filled(make, NUM_OBJECTS)
    yield server.data_dir
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def server(make_server: MakeServer, template: Path) -> ServerProcess:
    """A server, not started, on a copy of the filled data dir."""
    made = make_server()
    shutil.copytree(template, made.data_dir)
    return made


def killed(point: str, verb: str, server: ServerProcess, *flags: str) -> None:
    """Run a verb that dies at a failpoint."""
    done = run_cli(verb, str(server.data_dir), *flags, env={failpoints.ENV: f"{point}=kill"})
    assert done.returncode == -9, done.stderr


def look(server: ServerProcess) -> dict[str, Any]:
    """What inspect says of a data dir that nobody serves, without a process for it."""
    return inspect_offline(server.data_dir)


def all_good(server: ServerProcess) -> bool:
    """Whether verify finds nothing in a data dir that nobody serves."""
    return list(lmcache_persist.check(server.data_dir)) == []


def stored_under(server: ServerProcess, size: int | None) -> None:
    """A running server has what was stored if it is bound to the old size, else nothing."""
    binding = inspect(server.data_dir)["binding"]
    assert (binding and binding["chunk_size"]) == size
    assert hits(server, NUM_OBJECTS) == (NUM_OBJECTS * OLD if size == OLD else 0)


@pytest.mark.parametrize("point", REBIND_OUTCOMES)
def test_a_rebind_is_all_or_nothing(server: ServerProcess, point: str) -> None:
    """Killed in a rebind, a data dir has the old binding or the new one, for everybody."""
    before = look(server)["binding"]
    killed(point, "rebind", server, "--chunk-size", str(NEW), "--yes")
    found = look(server)["binding"]
    size = REBIND_OUTCOMES[point]
    assert found["chunk_size"] == size
    assert (found == before) is (size == OLD)
    assert all_good(server)
    server.start()
    stored_under(server, size)
    if size == NEW:
        with engine_of(server) as engine:
            engine.join()
            hashes = engine.hashes(prompt(0, 4, NEW))
            assert engine.store(hashes) == 4
            engine.client.flush(20)
    server.kill()
    assert look(server)["binding"] == found
    assert all_good(server)


@pytest.mark.parametrize("point", [*REBIND_OUTCOMES, "recover"])
def test_a_rebind_after_a_killed_one(server: ServerProcess, point: str) -> None:
    """The next rebind, or recover, needs no start in between."""
    at = point if point != "recover" else "rebind.after_stamp"
    killed(at, "rebind", server, "--chunk-size", str(NEW), "--yes")
    half = look(server)["binding"]
    if point == "recover":
        assert "rebind" in recover(server.data_dir)[0]
        assert look(server)["binding"] == half
    rebind(server.data_dir, 1024, lambda losses: None)
    document = look(server)
    assert document["binding"]["chunk_size"] == 1024
    assert document["binding"]["binding_id"] != half["binding_id"]
    assert document["store"]["stale_objects"] == NUM_OBJECTS
    assert all_good(server)


@pytest.mark.parametrize("point", REBIND_OUTCOMES)
def test_a_killed_rebind_is_repeated(server: ServerProcess, point: str) -> None:
    """The same rebind again makes one that had decided whole, and no binding beyond it."""
    killed(point, "rebind", server, "--chunk-size", str(NEW), "--yes")
    half = look(server)["binding"]
    done = rebind(server.data_dir, NEW, lambda losses: None)
    assert look(server)["binding"] == done.binding.summary()
    expected = {OLD: Outcome.BOUND, NEW: Outcome.COMPLETED}[REBIND_OUTCOMES[point]]
    if point == "rebind.after_commit":
        expected = Outcome.UNCHANGED
    assert done.outcome is expected
    assert (done.binding.summary() == half) is (expected is not Outcome.BOUND)
    assert all_good(server)


@pytest.mark.parametrize("point", RECOVER_POINTS)
def test_a_killed_recover_is_recovered(server: ServerProcess, point: str) -> None:
    """Killed at any step, recover can be repeated, and the whole cache is back."""
    before = look(server)["binding"]
    (server.data_dir / "manifest.sqlite").write_bytes(b"not a database" * 1000)
    killed(point, "recover", server, "--yes")
    if point == "recover.after_set_aside":
        code, log = server.refused()
        assert code == 5
        assert "lmcache-persist recover" in log
    recover(server.data_dir)
    assert look(server)["binding"] == before
    server.start()
    stored_under(server, OLD)


@pytest.mark.parametrize("by", ["start", "reset"])
@pytest.mark.parametrize("point", RESET_OUTCOMES)
def test_a_reset_is_all_or_nothing(server: ServerProcess, point: str, by: str) -> None:
    """Killed in a reset, a data dir is whole still, or the next start or reset clears it."""
    killed(point, "reset", server, "--yes", "--pool-dir", str(server.pool_dir))
    size = RESET_OUTCOMES[point]
    if size is None:
        for verb in (
            look,
            all_good,
            lambda server: recover(server.data_dir),
            lambda server: rebind(server.data_dir, 512, lambda losses: None),
        ):
            with pytest.raises(DataDirUnusable, match="being reset"):
                verb(server)
        if by == "reset":
            done = run_cli("reset", str(server.data_dir), "--yes")
            assert done.returncode == 0, done.stderr
            assert not (server.data_dir / "store").exists()
            assert not (server.data_dir / "manifest.sqlite").exists()
    elif by == "reset":
        return  # whole, as after "start"
    server.start()
    assert not (server.data_dir / "resetting").exists()
    document = inspect(server.data_dir)
    assert (document["binding"] or {}).get("chunk_size") == size
    if size is None:
        assert document["store"]["objects"] == 0
        fill(server, 1)
    else:
        stored_under(server, size)
