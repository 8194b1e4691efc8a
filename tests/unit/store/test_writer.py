"""The writer thread: outcomes, failures, the end."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from functools import partial

import pytest

from lmcache_persist.errors import StoreFull, StoreIOError
from lmcache_persist.store import writer as writer_module
from lmcache_persist.store.base import ChunkKey, ChunkWrite, DropReason, Place, WriteReport
from lmcache_persist.store.memory_disk import MemoryDisk
from lmcache_persist.store.writer import Outcome, WriteJob, Writer
from store_support import binding, chunk
from support.waiting import wait_until

TIMEOUT_S = 20.0


def job(number: int) -> WriteJob:
    """A chunk with one object."""
    return WriteJob(
        ChunkKey(number.to_bytes(64, "big")), {Place(0, 0): memoryview(b"x" * 4096)}, number
    )


class Gate(MemoryDisk):
    """A disk tier that waits, or fails, when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Event()
        self.fail = False
        self.batches: list[int] = []
        self.evicts: list[ChunkKey] = []

    def write(self, batch: Sequence[ChunkWrite]) -> WriteReport:
        self.entered.set()
        self.open.wait(TIMEOUT_S)
        self.batches.append(len(batch))
        if self.fail:
            raise StoreIOError("disk is on strike")
        report = super().write(batch)
        report.evicted += self.evicts
        return report


def collect(outcomes: queue.SimpleQueue[Outcome], count: int) -> dict[object, bool]:
    """Outcomes of so many jobs, by token."""
    found: dict[object, bool] = {}
    while len(found) < count:
        for done, durable in outcomes.get(timeout=TIMEOUT_S).jobs:
            found[done.token] = durable
    return found


def test_what_comes_while_a_batch_is_written_makes_the_next_one() -> None:
    """Group commit: one transaction for all that gathered meanwhile."""
    disk, outcomes = Gate(), queue.SimpleQueue[Outcome]()
    writer = Writer(disk, outcomes.put)
    disk.open.clear()
    writer.submit(job(0))
    assert disk.entered.wait(TIMEOUT_S)
    for number in range(1, 50):
        writer.submit(job(number))
    disk.open.set()
    assert collect(outcomes, 50) == dict.fromkeys(range(50), True)
    assert disk.batches == [1, 49]
    assert writer.close(TIMEOUT_S)


def test_a_failing_disk_costs_the_batch_only() -> None:
    """A batch that failed is reported as not durable, and the next one is written."""
    disk, outcomes = Gate(), queue.SimpleQueue[Outcome]()
    writer = Writer(disk, outcomes.put)
    disk.fail = True
    writer.submit(job(1))
    assert collect(outcomes, 1) == {1: False}
    disk.fail = False
    writer.submit(job(2))
    assert collect(outcomes, 1) == {2: True}
    assert (writer.failures, writer.last_error) == (1, "disk is on strike")
    assert writer.alive
    assert writer.close(TIMEOUT_S)
    assert disk.find([job(1).key, job(2).key])[0] is None


def test_the_end_waits_for_the_backlog_for_a_bounded_time() -> None:
    """Close writes what is queued; if the disk hangs it says so instead of waiting on."""
    disk, outcomes = Gate(), queue.SimpleQueue[Outcome]()
    writer = Writer(disk, outcomes.put)
    for number in range(10):
        writer.submit(job(number))
    assert writer.close(TIMEOUT_S)
    assert collect(outcomes, 10) == dict.fromkeys(range(10), True)
    hung = Gate()
    hung.open.clear()
    writer = Writer(hung, outcomes.put)
    writer.submit(job(1))
    assert hung.entered.wait(TIMEOUT_S)
    assert not writer.close(0.05)
    hung.open.set()


def test_bad_chunks_are_dropped_and_touches_applied() -> None:
    """Drops and touches reach the disk without anything being written."""
    disk, outcomes = Gate(), queue.SimpleQueue[Outcome]()
    writer = Writer(disk, outcomes.put)
    writer.submit(job(1))
    writer.submit(job(2))
    collect(outcomes, 2)
    writer.touch([job(2).key])
    stored = disk.find([job(1).key])[0]
    assert stored is not None
    writer.drop({job(1).key: stored.serial, job(2).key: stored.serial})
    assert writer.close(TIMEOUT_S)
    first, second = disk.find([job(1).key, job(2).key])
    assert first is None
    assert second is not None
    assert second.hits == 1


def test_an_idle_writer_sweeps_what_is_stale() -> None:
    """Nothing asks for it: while there is nothing to write, stale chunks are removed."""
    disk = MemoryDisk()
    disk.write_stamp(binding())
    disk.write([chunk(number, 1000) for number in range(300)])
    disk.restamp(binding(1280), replaces=binding().binding_id)
    writer = Writer(disk, lambda outcome: None)
    wait_until(lambda: disk.usage().stale_objects == 0, "all stale chunks are removed")
    assert writer.close(TIMEOUT_S)


def test_what_was_swept_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """One line at the end of a sweep, with all that it removed."""
    caplog.set_level("INFO")
    left = iter([3, 4])

    class Stale(MemoryDisk):
        def sweep_stale(self) -> int:
            return next(left, 0)

    writer = Writer(Stale(), lambda outcome: None)
    wait_until(lambda: caplog.messages, "it is told")
    assert writer.close(TIMEOUT_S)
    assert caplog.messages == ["7 stale objects are removed"]


def test_a_sweep_that_fails_costs_nothing_else() -> None:
    """A disk that fails while it sweeps is counted, and the writer goes on."""

    class Failing(MemoryDisk):
        def sweep_stale(self) -> int:
            raise StoreIOError("disk is on strike")

    outcomes = queue.SimpleQueue[Outcome]()
    writer = Writer(Failing(), outcomes.put)
    wait_until(lambda: writer.failures > 0, "the sweep failed")
    writer.submit(job(1))
    assert collect(outcomes, 1) == {1: True}
    assert writer.close(TIMEOUT_S)


def test_hits_during_a_hang_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of very many touches that cannot be applied, the latest are kept."""
    monkeypatch.setattr(writer_module, "MAX_PENDING_TOUCHES", 10)
    disk, outcomes = Gate(), queue.SimpleQueue[Outcome]()
    writer = Writer(disk, outcomes.put)
    for number in range(3):
        writer.submit(job(number))
    collect(outcomes, 3)
    disk.open.clear()
    disk.entered.clear()
    writer.submit(job(3))
    assert disk.entered.wait(TIMEOUT_S)
    for number in (0, *[1] * 9, 2):
        writer.touch([job(number).key])
    disk.open.set()
    assert writer.close(TIMEOUT_S)
    hits = [record.hits for record in disk.find([job(n).key for n in range(3)]) if record]
    assert hits == [0, 9, 1]


def test_a_task_is_done_between_batches() -> None:
    """What was queued before it is written before it, and its result is told."""
    disk, outcomes = Gate(), queue.SimpleQueue[Outcome]()
    writer = Writer(disk, outcomes.put)
    disk.open.clear()
    writer.submit(job(0))
    assert disk.entered.wait(TIMEOUT_S)
    writer.submit(job(1))
    done = writer.run(lambda: list(disk.batches))
    writer.submit(job(2))
    disk.open.set()
    assert done.result(TIMEOUT_S) == [1, 1]
    assert collect(outcomes, 3) == dict.fromkeys(range(3), True)
    assert disk.batches == [1, 1, 1]
    assert writer.close(TIMEOUT_S)


def test_a_task_that_fails_is_told_and_costs_nothing_else() -> None:
    """A failing disk is counted; a store that is busy with a slow read is no failing disk."""

    def fail(error: Exception) -> None:
        raise error

    disk, outcomes = Gate(), queue.SimpleQueue[Outcome]()
    writer = Writer(disk, outcomes.put)
    for error, failures in ((StoreFull("busy"), 0), (StoreIOError("on strike"), 1)):
        assert writer.run(partial(fail, error)).exception(TIMEOUT_S) is error
        wait_until(lambda: writer.failures == failures, "counted")  # noqa: B023 - called now
        assert writer.failing is bool(failures)
    writer.submit(job(1))
    assert collect(outcomes, 1) == {1: True}
    assert writer.close(TIMEOUT_S)


def test_a_task_after_the_end_is_cancelled() -> None:
    """Nobody waits for a thread that has ended."""
    disk = Gate()
    writer = Writer(disk, lambda outcome: None)
    disk.open.clear()
    writer.submit(job(0))
    assert disk.entered.wait(TIMEOUT_S)
    assert not writer.close(0.01)
    late = writer.run(lambda: None)
    disk.open.set()
    wait_until(late.cancelled, "the late task is cancelled")


@pytest.mark.parametrize("looks", [[False], [True, False]])
def test_what_goes_into_a_file_that_is_gone_is_not_durable(looks: list[bool]) -> None:
    """Whether it went before the transaction or during it; the next one may be durable again."""
    outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    left = iter([*looks, True, True])
    disk = Gate()
    disk.evicts = [job(9).key]
    writer = Writer(disk, outcomes.put, lambda: next(left))
    writer.submit(job(1))
    outcome = outcomes.get(timeout=TIMEOUT_S)
    assert [durable for _, durable in outcome.jobs] == [False]
    assert outcome.dropped == {job(1).key: DropReason.STORE_GONE}
    assert outcome.seconds is None
    assert len(disk.batches) == len(looks) - 1
    # That is so when it is moved back, too.
    assert list(outcome.evicted) == disk.evicts * len(disk.batches)
    writer.submit(job(2))
    assert collect(outcomes, 1) == {2: True}
    assert writer.close(TIMEOUT_S)
