"""``resize`` of a live server: its store grows while engines load and store."""

from __future__ import annotations

import concurrent.futures
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import lmcache_persist
from lmcache_persist import failpoints, protocol
from lmcache_persist.connector import CacheClient, ClientOptions
from lmcache_persist.errors import PersistError, StoreBusy, StoreGone
from lmcache_persist.protocol.fields import Message
from lmcache_persist.server import live_grow
from support import mounts
from support.data_dirs import make
from support.filled import fill, hits
from support.in_process import LocalServer, local_server
from support.load import Ledger, Worker, judge, running
from support.server import ServerProcess, cli_here, json_here, run_cli
from support.waiting import wait_until
from support.web import fetch, free_port

MakeServer = Callable[..., ServerProcess]
MIB = 1 << 20
PATIENT = ClientOptions(request_timeout_s=10.0)


def size_of(data_dir: Path) -> int:
    """Length of the data file."""
    return (data_dir / "store" / "data.mdb").stat().st_size


def grow(data_dir: Path, capacity: str) -> dict[str, Any]:
    """The verb, which has to go well."""
    return json_here("resize", str(data_dir), "--capacity", capacity)


def test_it_grows_and_everything_says_so(make_server: MakeServer) -> None:
    """Nothing is lost, and whoever tells the capacity tells the new one; so do later starts."""
    port = free_port()
    server = make_server("--http", f"127.0.0.1:{port}").start()
    fill(server, 100)
    code, out, err = cli_here("resize", str(server.data_dir), "--capacity", "96MiB")
    assert (code, out) == (0, "capacity: 64.00 MiB before, 96.00 MiB now\nkept: 100 objects\n")
    assert f"this needs 32.00 MiB ({32 * MIB} bytes) more on the server's disk" in err
    assert "started with a capacity of 64MiB (--capacity): set that to 96MiB" in err
    assert os.stat(server.data_dir / "store" / "data.mdb").st_blocks * 512 >= 96 * MIB
    document = json_here("inspect", str(server.data_dir))
    assert document["store"]["capacity_bytes"] == 96 * MIB
    assert document["server"]["disk"]["capacity_bytes"] == 96 * MIB
    told = re.search(r"disk_capacity_bytes ([\d.e+]+)$", fetch(port, "/metrics")[1], re.MULTILINE)
    assert told is not None
    assert float(told[1]) == 96 * MIB
    assert hits(server, 100) == 100 * 256
    assert "the store grew from 64MiB to 96MiB while in use" in server.log()
    assert grow(server.data_dir, "96MiB") == {
        "capacity_before_bytes": 96 * MIB,
        "capacity_bytes": 96 * MIB,
        "objects": 100,
        "dropped_objects": 0,
        "dropped_bytes": 0,
    }
    assert server.terminate() == 0
    assert list(lmcache_persist.check(server.data_dir)) == []


def test_a_start_with_the_setting_that_it_overtook(make_server: MakeServer) -> None:
    """The store keeps what it grew to, with a warning; another smaller setting is refused."""
    server = make_server().start()
    fill(server, 10)
    grow(server.data_dir, "96MiB")
    server.kill()  # its unit file still says 64 MiB
    server.start()
    assert "capacity is set to 64MiB, which the store was grown beyond" in server.log()
    assert json_here("inspect", str(server.data_dir))["store"]["capacity_bytes"] == 96 * MIB
    assert hits(server, 10) == 10 * 256
    # Once more, from there: it is still 64 MiB that is set.
    code, _, err = cli_here("resize", str(server.data_dir), "--capacity", "128MiB")
    assert (code, "started with a capacity of 64MiB" in err) == (0, True)
    server.terminate()
    at = server.command.index("--capacity") + 1
    server.command[at] = "96MiB"
    code, log = server.refused()
    assert (code, "does not shrink" in log) == (2, True)


def test_without_a_setting_there_is_none_to_follow(make_server: MakeServer) -> None:
    """Where nothing is set, a store keeps what it grew to, and nobody is told to set it."""
    server = make_server()
    make(server.data_dir)
    at = server.command.index("--capacity")
    del server.command[at : at + 2]
    server.start()
    code, _, err = cli_here("resize", str(server.data_dir), "--capacity", "80MiB")
    assert (code, "was started without --capacity: its next start keeps that" in err) == (0, True)


def test_what_a_live_server_cannot_do_is_refused(server: ServerProcess) -> None:
    """Shrinking, sizes that are none, no room: refused with numbers and the way out."""
    fill(server, 10)
    root = str(server.data_dir)
    before = size_of(server.data_dir)
    code, out, err = cli_here("resize", root, "--capacity", "32MiB")
    assert (code, out) == (2, "")
    assert f"{32 * MIB} bytes" in err
    assert f"{64 * MIB} bytes" in err
    assert "stop that server and run this again" in err
    assert f"lmcache-persist prune {root} --down-to 32MiB" in err
    assert cli_here("resize", root, "--capacity", "1MiB")[0] == 2
    code, out, err = cli_here("resize", root, "--capacity", "1000TiB")
    assert (code, out) == (5, "")
    assert "available, expected" in err
    assert size_of(server.data_dir) == before
    assert hits(server, 10) == 10 * 256
    assert fetch_problems(server) == []
    folder = server.data_dir / "store"
    folder.rename(server.data_dir / "away")
    code, _, err = cli_here("resize", root, "--capacity", "80MiB")
    assert (code, "store_gone" in err) == (6, True)
    (server.data_dir / "away").rename(folder)
    assert size_of(server.data_dir) == before
    grow(server.data_dir, "80MiB")


def fetch_problems(server: ServerProcess) -> list[str]:
    """What the server itself finds wrong, but that no engine is there."""
    problems = json_here("inspect", str(server.data_dir))["server"]["problems"]
    return [one["reason"] for one in problems if one["reason"] != "no_engine"]


def test_a_disk_that_fills_up_meanwhile(make_server: MakeServer, root: Path) -> None:
    """What looked like enough room is not: both numbers, the old length, and it goes on."""
    with mounts.tmpfs(root / "small", "160m") as small:
        server = make_server(name="small/d", pool_dir=root / "shm")
        server.log_path = root / "server.log"
        server._env[failpoints.ENV] = f"grow.while_allocating=pause:{root / 'go'}"
        server.start()
        fill(server, 10)
        with concurrent.futures.ThreadPoolExecutor(1) as executor:
            asked = executor.submit(
                cli_here, "resize", str(server.data_dir), "--capacity", str(64 * MIB + 160 * MIB)
            )
            code, _, err = asked.result(60)
            assert (code, "available, expected" in err) == (5, True)
            assert size_of(server.data_dir) == 64 * MIB
            # In one piece that fits; somebody else takes the rest before the sync.
            asked = executor.submit(
                cli_here, "resize", str(server.data_dir), "--capacity", str(64 * MIB + 80 * MIB)
            )
            wait_until(lambda: size_of(server.data_dir) > 64 * MIB, "it allocates")
            (root / "go").touch()
            assert asked.result(60)[0] == 0
        assert size_of(server.data_dir) == 144 * MIB
        mounts.fill(small, leave_bytes=0)
        assert hits(server, 10) == 10 * 256
        fill(server, 200)
        assert hits(server, 200) == 200 * 256
        assert server.terminate() == 0
        assert list(lmcache_persist.check(server.data_dir)) == []


def test_an_older_server_is_named(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not know the message: what to do, and no growth."""

    class Unknown(Message, frozen=True, kw_only=True, tag="admin.grows"):
        boot: str
        session: str
        binding: str = ""
        capacity_bytes: int
        growth: int

    monkeypatch.setattr(protocol, "AdminGrow", Unknown)
    code, _, err = cli_here("resize", str(server.data_dir), "--capacity", "96MiB")
    assert code == 6
    assert "does not know how to grow while it serves" in err
    assert "stop it, run this again" in err
    assert size_of(server.data_dir) == 64 * MIB


BESIDE = (
    (("verify",), ("backup", "{}/b1", "--verify")),
    (("prune", "--down-to", "16MiB", "--yes"),),
    (),
    (),
)
"""Verbs beside each growth."""


@pytest.mark.timeout(120)
def test_everything_goes_on_while_it_grows(make_server: MakeServer, root: Path, seed: int) -> None:
    """Engines, a backup, a check and a prune beside growth after growth: every byte is right."""
    print(f"seed {seed}")
    server, ledger = make_server(capacity="32MiB").start(), Ledger()
    first = Worker(server.url, 0, ledger, seed)
    first.join()
    first.flush([first.store(3)])
    first.stop()
    d = str(server.data_dir)
    with (
        running(server.url, ledger, seed) as workers,
        concurrent.futures.ThreadPoolExecutor(3) as executor,
    ):
        for step, beside in enumerate(BESIDE, start=1):
            rounds = [worker.rounds for worker in workers]
            verbs = [
                executor.submit(run_cli, verb, d, *(flag.format(root) for flag in flags))
                for verb, *flags in beside
            ]
            done = grow(server.data_dir, f"{32 + 16 * step}MiB")
            assert done["capacity_bytes"] == (32 + 16 * step) * MIB
            ended = [verb.result() for verb in verbs]
            assert [one.returncode for one in ended] == [0] * len(verbs), ended
            wait_until(
                lambda: all(w.rounds > n for w, n in zip(workers, rounds, strict=True)),  # noqa: B023
                "all engines go on",
            )
    longest_s = json_here("inspect", d)["server"]["longest_turn_s"]
    server.kill()
    # What was pruned is in nobody's count of evictions.
    ledger.durable.clear()
    found = judge(server.data_dir, ledger)
    print(
        f"{sum(w.rounds for w in workers)} rounds, {ledger.checked_objects} objects compared,"
        f" {len(found.records)} chunks left, longest turn {longest_s} s"
    )
    server.start()
    assert json_here("inspect", d)["store"]["capacity_bytes"] == 96 * MIB


# -- what only a disk that obeys shows ---------------------------------------------------------


@pytest.fixture
def local(root: Path) -> Iterator[LocalServer]:
    """A server in this process, on a disk in memory of 1 GiB."""
    with local_server(root) as made:
        yield made


@pytest.fixture
def client(local: LocalServer) -> Iterator[CacheClient]:
    """One that asks it."""
    with CacheClient(local.url, kind="cli", label="t", options=PATIENT) as made:
        made.wait_connected(20)
        yield made


def ask(client: CacheClient, capacity_bytes: int, growth: int = 0) -> dict[str, Any]:
    """One answer."""
    reply = client.request(
        protocol.AdminGrow, timeout_s=10, capacity_bytes=capacity_bytes, growth=growth
    )
    assert isinstance(reply, protocol.JsonReply)
    document: dict[str, Any] = msgspec.json.decode(reply.body)
    return document


def until_done(client: CacheClient, told: dict[str, Any]) -> dict[str, Any]:
    """The answer that says so; its refusal is raised."""
    return wait_until(
        lambda: (
            (now := ask(client, told["capacity_bytes"], told["growth"]))["phase"] == "done" and now
        ),
        "the growth is done",
    )  # type: ignore[return-value]


GIB = 1 << 30


def test_two_growths_at_once(local: LocalServer, client: CacheClient) -> None:
    """The same one is joined, another one waits for its turn, and each number tells its own."""
    inside, leave = threading.Event(), threading.Event()

    def allocate(capacity_bytes: int, on_piece: Callable[[int], None]) -> None:
        on_piece(123)
        inside.set()
        leave.wait(20)

    local.disk.allocate = allocate  # type: ignore[method-assign]
    first = ask(client, 2 * GIB)
    assert inside.wait(20)
    second = ask(client, 2 * GIB)
    assert second["growth"] == first["growth"]
    assert (second["phase"], second["allocated_bytes"]) == ("allocating", 123)
    with pytest.raises(StoreBusy, match="grows to 2GiB already"):
        ask(client, 3 * GIB)
    leave.set()
    done = until_done(client, first)
    assert (done["capacity_before_bytes"], done["capacity_bytes"]) == (GIB, 2 * GIB)
    assert ask(client, 2 * GIB, first["growth"]) == done
    later = until_done(client, ask(client, 3 * GIB))
    assert later["capacity_before_bytes"] == 2 * GIB
    with pytest.raises(StoreBusy, match="is over"):
        ask(client, 2 * GIB, first["growth"])
    assert local.disk.capacity_bytes == 3 * GIB


def test_a_read_that_hangs_makes_it_give_up(
    local: LocalServer, client: CacheClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so and gives the room back, the writer never waited, and again it works."""
    monkeypatch.setattr(live_grow, "GIVE_UP_S", 0.2)
    given_back: list[int] = []
    local.disk.give_back = lambda: given_back.append(local.disk.capacity_bytes)  # type: ignore[method-assign]
    local.disk.reads_end = lambda timeout_s: False  # type: ignore[method-assign]
    local.disk.grow = lambda *args, **fields: pytest.fail("the writer was asked")  # type: ignore[method-assign]
    with pytest.raises(StoreBusy, match="being read"):
        until_done(client, ask(client, 2 * GIB))
    assert given_back == [GIB]
    assert not local.state.writer.failing
    del local.disk.reads_end, local.disk.grow
    assert until_done(client, ask(client, 2 * GIB))["phase"] == "done"


def test_a_file_that_goes_while_room_is_taken_is_not_grown(
    local: LocalServer, client: CacheClient
) -> None:
    """The writer looks once more: what it would take into use is nobody's any more."""
    [path] = local.state.files._fds
    away, given_back = path.with_name("away"), []

    def allocate(capacity_bytes: int, on_piece: Callable[[int], None]) -> None:
        path.rename(away)

    local.disk.allocate = allocate  # type: ignore[method-assign]
    local.disk.give_back = lambda: given_back.append(True)  # type: ignore[method-assign]
    with pytest.raises(StoreGone):
        until_done(client, ask(client, 2 * GIB))
    assert (given_back, local.disk.capacity_bytes) == ([True], GIB)
    away.rename(path)
    del local.disk.allocate
    assert until_done(client, ask(client, 2 * GIB))["phase"] == "done"


def test_reads_in_the_way_are_waited_for(local: LocalServer, client: CacheClient) -> None:
    """A store that is busy for a moment is tried again; that says nothing about the disk."""
    tries: list[int] = []
    real = local.disk.grow

    def grow_later(capacity_bytes: int, *, over_bytes: int = 0) -> None:
        tries.append(capacity_bytes)
        if len(tries) < 3:
            raise StoreBusy("not now")
        real(capacity_bytes)

    local.disk.grow = grow_later  # type: ignore[method-assign]
    assert until_done(client, ask(client, 2 * GIB))["phase"] == "done"
    assert tries == [2 * GIB] * 3
    assert (local.state.writer.failing, local.state.writer.failures) == (False, 0)


def test_a_writer_that_hangs_makes_it_give_up(
    local: LocalServer, client: CacheClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the writer has not begun is taken back: it never grows when nobody expects it."""
    monkeypatch.setattr(live_grow, "GIVE_UP_S", 0.2)
    monkeypatch.setattr(live_grow, "_LOOK_S", 0.05)
    leave = threading.Event()
    blocked = local.state.writer.run(lambda: leave.wait(20))
    told = ask(client, 2 * GIB)
    with pytest.raises(StoreBusy, match="being written"):
        until_done(client, told)
    leave.set()
    assert blocked.result(20)
    local.state.writer.run(lambda: None).result(20)
    assert local.disk.capacity_bytes == GIB
    assert until_done(client, ask(client, 2 * GIB))["phase"] == "done"


def test_a_stop_ends_a_growth(local: LocalServer, client: CacheClient) -> None:
    """Between two pieces; what the writer is at already is not cut off under it."""
    pieces: list[int] = []
    given_back: list[bool] = []
    local.disk.give_back = lambda: given_back.append(True)  # type: ignore[method-assign]

    def allocate(capacity_bytes: int, on_piece: Callable[[int], None]) -> None:
        while True:
            pieces.append(1)
            on_piece(len(pieces))

    local.disk.allocate = allocate  # type: ignore[method-assign]
    told = ask(client, 2 * GIB)
    growing = local.service.growing
    assert not growing.ended(0.05)
    growing.stop()
    assert growing.ended(20)
    with pytest.raises(PersistError, match="the server stops"):
        until_done(client, told)
    del local.disk.allocate
    # The next one is at the writer, which takes long.
    inside, leave = threading.Event(), threading.Event()

    def slow(capacity_bytes: int, *, over_bytes: int = 0) -> None:
        inside.set()
        leave.wait(20)

    local.disk.grow = slow  # type: ignore[method-assign]
    ask(client, 2 * GIB)
    assert inside.wait(20)
    growing.stop()
    assert growing.ended(20)
    assert given_back == []
    leave.set()


def test_whatever_a_client_sends(client: CacheClient, local: LocalServer) -> None:
    """Numbers that are no capacity, or no growth: an error reply each, and nothing happens."""
    for capacity_bytes, growth in (
        (0, 0),
        (1, 0),
        (GIB + 1, 0),
        (GIB - 4096, 0),
        (2**62 + 1, 0),
        (2 * GIB, 7),
    ):
        with pytest.raises(PersistError):
            ask(client, capacity_bytes, growth)
    assert local.disk.capacity_bytes == GIB
    assert threading.active_count() < 60
    assert local.state.counters.defects == 0
