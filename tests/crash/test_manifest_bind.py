"""SIGKILL at every named step of making and binding a manifest."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from lmcache_persist.manifest import Manifest, read_snapshot
from support.manifest import binding, child


def killed_at(failpoint: str, path: Path, *arguments: object) -> None:
    """Run a child on ``path`` that dies at ``failpoint``."""
    process = child(path, *arguments, failpoints=f"{failpoint}=kill")
    out, err = process.communicate(timeout=90)
    assert process.returncode == -signal.SIGKILL, f"{out}{err}"
    assert out == ""


def test_killed_before_the_commit(tmp_path: Path) -> None:
    """Killed before its commit, a bind never was: unbound, and the next candidate wins."""
    path = tmp_path / "manifest"
    killed_at("bind.before_commit", path, "bind", 544)
    assert read_snapshot(path).binding is None
    manifest = Manifest.open(path)
    assert manifest.binding() is None
    assert manifest.bind(binding(640)) == (binding(640), True)
    manifest.close()
    assert read_snapshot(path).binding == binding(640)


def test_killed_after_the_commit(tmp_path: Path) -> None:
    """Killed after its commit, a bind holds: whole, and the next candidate loses."""
    path = tmp_path / "manifest"
    killed_at("bind.after_commit", path, "bind", 544)
    assert read_snapshot(path).binding == binding(544)
    manifest = Manifest.open(path)
    assert manifest.binding() == binding(544)
    assert manifest.bind(binding(640)) == (binding(544), False)
    manifest.close()
    assert read_snapshot(path).binding == binding(544)


@pytest.mark.parametrize("times", [1, 3])
def test_killed_in_the_migration(tmp_path: Path, times: int) -> None:
    """Killed before its migration commits, a new manifest has no table; the next start has all."""
    path = tmp_path / "manifest"
    for _ in range(times):
        killed_at("migrate.before_commit", path, "open")
        found = read_snapshot(path)
        assert (found.schema_version, found.binding) == (0, None)
    manifest = Manifest.open(path)
    assert manifest.bind(binding()) == (binding(), True)
    manifest.close()
    assert read_snapshot(path).schema_version == 1
    assert [item.name for item in tmp_path.iterdir()] == ["manifest"]


@pytest.mark.parametrize("failpoint", ["bind.before_commit", "bind.after_commit"])
def test_killed_while_others_race(tmp_path: Path, failpoint: str) -> None:
    """A racer that dies in its bind takes nobody along: one binding, and all others get it."""
    path = tmp_path / "manifest"
    Manifest.open(path).close()
    doomed = child(path, "race", 544, failpoints=f"{failpoint}=kill")
    others = [child(path, "race", 640) for _ in range(3)]
    for process in (doomed, *others):
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    doomed.communicate(timeout=90)
    answers = []
    for process in others:
        out, err = process.communicate(timeout=90)
        assert process.returncode == 0, err
        answers.append(out.split()[0])
    held = read_snapshot(path).binding
    assert held is not None
    assert set(answers) == {held.binding_id}
    if failpoint == "bind.before_commit":
        assert held == binding(640)
