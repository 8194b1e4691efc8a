"""Geometries from the field, from one chunk to hundreds, golden over restarts of either side.

Every object codes chunk, group and rank: what is swapped, stale or left over is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from lmcache_persist.connector import ClientOptions
from lmcache_persist.errors import PersistError
from lmcache_persist.geometry import Group, GroupKind
from support.emulated import EmulatedEngine
from support.server import ServerProcess
from support.waiting import wait_until

PATIENT = ClientOptions(request_timeout_s=10.0, lookup_timeout_s=20.0)
LENGTHS = (1, 2, 41, 83, 114, 127, 128, 129, 256)
FULL_640 = Group(GroupKind.FULL, 640, 640)
SCRATCH = Group(GroupKind.SCRATCH, 0)
STATE_640 = Group(GroupKind.RECURRENT, 640, 1)
SLIDING_640 = Group(GroupKind.SLIDING, 640, 640, 2000)
HYBRID_784 = (
    Group(GroupKind.RECURRENT, 784, 1),
    Group(GroupKind.FULL, 784, 784),
    Group(GroupKind.SLIDING, 112, 112, 500),
)
HYBRID_544 = (Group(GroupKind.RECURRENT, 544, 1), Group(GroupKind.FULL, 544, 544))
HYBRID = (STATE_640, SCRATCH, STATE_640, FULL_640, SLIDING_640, FULL_640)

GEOMETRIES: dict[str, tuple[Sequence[int | Group], int, int]] = {
    # name: (groups, ranks, chunk size)
    "[640,0,640,640,640,640]": ([640, 0, 640, 640, 640, 640], 1, 640),
    "[400,400] with 100 slots": ([400, Group(GroupKind.FULL, 400, 100)], 2, 400),
    "[544,64]": ([544, 64], 1, 1088),
    "[3584,4,3584,64]": ([3584, 4, 3584, 64], 1, 3584),
    "hybrid of 784": (HYBRID_784, 1, 784),
    "five groups of 4 to 256": ([4, 16, 64, 128, 256], 2, 256),
}
SIZES = {"capacity": "256MiB", "pool_size": "64MiB"}


class Fleet:
    """One server and the engines that come and go beside it."""

    def __init__(self, server: ServerProcess, groups: Sequence[int | Group], ranks: int) -> None:
        self.server = server
        self._groups, self._ranks = groups, ranks
        self.engine = self._new_engine()

    def _new_engine(self) -> EmulatedEngine:
        engine = EmulatedEngine(
            self.server.url,
            self._groups,
            object_bytes=700,
            world_size=self._ranks,
            options=PATIENT,
        )
        return engine.join()

    def restart_engine(self) -> None:
        """Another client, with a session of its own."""
        self.engine.client.close()
        self.engine = self._new_engine()

    def restart_server(self) -> None:
        """SIGKILL it; the client finds the new one by itself, and its ranks are known again."""
        self.server.kill()
        self.server.start()

        def registered() -> bool:
            try:
                stats = self.engine.client.stats(timeout_s=10.0)
            except PersistError:
                return False
            return any(one["fingerprint"] for one in stats["engines"])

        wait_until(registered, "all ranks are registered with the new server", 30.0)

    def restart_both(self) -> None:
        """SIGKILL the server; another client for the next one."""
        self.engine.client.close()
        self.server.kill()
        self.server.start()
        self.engine = self._new_engine()

    def prompt(self, num_chunks: int) -> list[bytes]:
        """The hashes of a prompt that shares nothing with prompts of other lengths."""
        tokens = [num_chunks, *range(1, num_chunks * self.engine.chunk_size)]
        return list(self.engine.hashes(tokens))

    def hit(self, hashes: Sequence[bytes], beyond: int = 1) -> int:
        """Chunks of a hit; every byte of it was compared."""
        size = self.engine.chunk_size
        tokens = self.engine.lookup(hashes, len(hashes) * size + beyond).tokens
        assert tokens % size == 0
        return tokens // size


@pytest.mark.parametrize("name", GEOMETRIES)
def test_prompts_of_any_length_are_golden(
    make_server: Callable[..., ServerProcess], name: str
) -> None:
    """Stored, flushed; then each side is started again alone, then both."""
    groups, ranks, chunk_size = GEOMETRIES[name]
    fleet = Fleet(make_server(**SIZES).start(), groups, ranks)
    assert fleet.engine.chunk_size == chunk_size
    prompts = [fleet.prompt(length) for length in LENGTHS]
    for prompt in prompts:
        assert fleet.engine.store(prompt) == len(prompt)
    fleet.engine.client.flush(30)

    for restart in (fleet.restart_engine, fleet.restart_server, fleet.restart_both):
        restart()
        assert [fleet.hit(prompt) for prompt in prompts] == list(LENGTHS)
        # A prompt that ends with its last chunk leaves a token to compute.
        assert [fleet.hit(prompt, beyond=0) for prompt in prompts] == [n - 1 for n in LENGTHS]
    fleet.engine.client.close()


def states_of(length: int) -> list[int]:
    """Chunks of a prompt whose state the engine kept: every seventh, and the last."""
    return sorted({*range(6, length, 7), length - 1})


def test_states_at_some_boundaries_only(make_server: Callable[..., ServerProcess]) -> None:
    """A hit ends at the last kept state; states that come later than their chunk are merged."""
    server = make_server(**SIZES).start()
    fleet = Fleet(server, HYBRID, 2)
    assert fleet.engine.chunk_size == 640
    states, rest = 0b000101, 0b111000
    prompts = {length: fleet.prompt(length) for length in LENGTHS}
    for length, prompt in prompts.items():
        kept = states_of(length)[:-1]
        masks = [rest | (states if chunk in kept else 0) for chunk in range(length)]
        fleet.engine.store(prompt, masks=masks)
        assert fleet.hit(prompt) == max((chunk + 1 for chunk in kept), default=0)
    # The last state of a prompt comes alone: to a chunk that is in the pool...
    half = list(LENGTHS[::2])
    for length in half:
        fleet.engine.store(prompts[length][-1:], masks=[states])
    fleet.engine.client.flush(30)
    # ...or is on disk only.
    fleet.restart_server()
    for length in set(LENGTHS).difference(half):
        fleet.engine.store(prompts[length][-1:], masks=[states])
    assert {length: fleet.hit(prompt) for length, prompt in prompts.items()} == {
        length: length for length in LENGTHS
    }
    fleet.engine.client.flush(30)
    for restart in (fleet.restart_engine, fleet.restart_server, fleet.restart_both):
        restart()
        for length, prompt in prompts.items():
            assert fleet.hit(prompt) == length
            for part in (length // 2, length - 1):
                expected = max((s + 1 for s in states_of(length) if s < part), default=0)
                assert fleet.hit(prompt[:part]) == expected
    stats = fleet.engine.client.stats(timeout_s=10.0)
    assert stats["leased_bytes"] == 0
    assert stats["pool"]["reservations"] == 0
    fleet.engine.client.close()


@pytest.mark.parametrize(
    ("groups", "hits"),
    [
        ([Group(GroupKind.FULL, 16, 16)], {512: 256, 513: 512, 511: 256, 256: 0, 257: 256}),
        (HYBRID_544, {544: 0, 1088: 544, 1089: 1088, 1087: 544}),
    ],
)
def test_whole_prompt_is_stored(
    server: ServerProcess, groups: Sequence[Group], hits: dict[int, int]
) -> None:
    """However much is there, a token is left to compute; a state is never stepped back from."""
    fleet = Fleet(server, groups, 1)
    for num_tokens, expected in hits.items():
        hashes = fleet.engine.hashes([num_tokens, *range(1, num_tokens)])
        fleet.engine.store(hashes)
        assert (num_tokens, fleet.engine.lookup(hashes, num_tokens).tokens) == (
            num_tokens,
            expected,
        )
    fleet.engine.client.close()
