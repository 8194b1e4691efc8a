"""Many requests at once in one engine, some of them aborted, and what must not be left over."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from lmcache_persist.demo.engine import EngineProcess
from lmcache_persist.demo.server import ServerProcess
from support.waiting import wait_until

SEED = 20261130

Compare = Callable[[list[dict[str, Any]], dict[str, Any]], None]
"""Requests, and what driving them gave; ``AssertionError`` if one says something wrong."""


def assert_nothing_is_held(engine: EngineProcess, server: ServerProcess) -> None:
    """No block, lease, slot or bookkeeping is left over, and vLLM's own cache can be emptied."""
    assert engine.call("reset_prefix_cache")
    assert set(engine.call("held").values()) == {0}

    def free() -> bool:
        found = server.inspect()["server"]
        held = found["lookups_open"], found["leased_bytes"], found["pool"]["reservations"]
        return held == (0, 0, 0)

    wait_until(free, "no lease and no reservation is left")


def check_aborts(engine: EngineProcess, requests: list[dict[str, Any]], compare: Compare) -> None:
    """A part of the crowd is aborted, at steps or when preempted, while the rest goes on."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    aborted = [
        {**one, "abort": one["start"] + rng.choice([1, 2, 3, 5, 8, 20])} if at % 3 == 1 else one
        for at, one in enumerate(requests)
    ]
    found = engine.call("drive", requests=aborted, abort_preempted=2)
    compare(requests, found)
    # One alone, at each of its first steps: before, during and after its load.
    for step in range(1, 10):
        assert engine.call("reset_prefix_cache")
        alone = {**requests[1], "id": f"alone-{step}", "start": 0, "abort": step}
        found["aborted_in"] += engine.call("drive", requests=[alone])["aborted_in"]
    print(f"aborted in {sorted(set(found['aborted_in']))}")
    states = {"RUNNING", "WAITING", "WAITING_FOR_REMOTE_KVS"}
    if found["preemptions"]:
        states.add("PREEMPTED")
    assert states <= set(found["aborted_in"])
