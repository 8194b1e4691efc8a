"""Any number of racing binds has exactly one winner, and all get the same answer."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lmcache_persist.binding import Binding
from lmcache_persist.manifest import Manifest, read_snapshot
from support.manifest import binding, child

RACERS = 32
SIZES = (544, 640)


def judge(path: Path, answers: list[tuple[str, bool]]) -> None:
    """One winner, one binding, and it is the one on disk."""
    snapshot = read_snapshot(path)
    assert snapshot.binding is not None
    assert {held for held, _ in answers} == {snapshot.binding.binding_id}
    assert [won for _, won in answers].count(True) == 1
    assert snapshot.binding in [binding(size) for size in SIZES]


@pytest.mark.parametrize("shared", [True, False], ids=["one object", "an object each"])
def test_threads(tmp_path: Path, shared: bool) -> None:
    """32 threads with two candidates, on one open manifest and on one each, made by the race."""
    for round_ in range(5):
        path = tmp_path / f"manifest-{round_}"
        manifest = Manifest.open(path) if shared else None
        start = threading.Barrier(RACERS, timeout=60)

        def race(
            index: int,
            path: Path = path,
            manifest: Manifest | None = manifest,
            start: threading.Barrier = start,
        ) -> tuple[Binding, bool]:
            start.wait()
            own = manifest or Manifest.open(path, busy_timeout_s=60)
            try:
                return own.bind(binding(SIZES[index % 2]))
            finally:
                if manifest is None:
                    own.close()

        with ThreadPoolExecutor(RACERS) as pool:
            answers = list(pool.map(race, range(RACERS), timeout=90))
        if manifest is not None:
            manifest.close()
        judge(path, [(held.binding_id, won) for held, won in answers])


def test_processes(tmp_path: Path) -> None:
    """8 processes race to make, migrate and bind one manifest."""
    path = tmp_path / "manifest"
    racers = [child(path, "race", SIZES[index % 2]) for index in range(8)]
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    answers = []
    for racer in racers:
        out, err = racer.communicate(timeout=90)
        assert racer.returncode == 0, err
        held, won = out.split()
        answers.append((held, won == "True"))
    judge(path, answers)
