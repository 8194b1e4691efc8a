"""Clients that stop, die, fork, share a process or live in another PID namespace."""

from __future__ import annotations

import grp
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_persist.connector import CacheClient, ClientOptions, LookupHandle
from lmcache_persist.errors import LeaseError
from lmcache_persist.hashing import ChunkHash, ChunkHasher
from lmcache_persist.server.lookup import Lookup
from lmcache_persist.server.lookups import Lookups
from support.client_child import ClientProcess
from support.emulated import EmulatedEngine
from support.in_process import local_server
from support.results import SOAKING
from support.server import ServerProcess
from support.waiting import stays, wait_until

OBJECT = 1 << 20
SHARE = 16
"""Objects of that size in half of the pool of 32 MiB."""
STOPPED_S = 180.0 if SOAKING else 2.0
"""Seconds that a client is stopped for. Sessions without a lock are forgotten after 120."""
MakeClient = Callable[..., ClientProcess]


@pytest.fixture
def client(server: ServerProcess) -> Iterator[MakeClient]:
    """Makes clients as processes of their own, joined under a name; all are killed at the end."""
    made: list[ClientProcess] = []

    def make(name: str, prefix: list[str] | None = None) -> ClientProcess:
        made.append(ClientProcess(server.url, prefix or []))
        made[-1].call("join", name, OBJECT)
        return made[-1]

    yield make
    for one in made:
        one.kill()


@pytest.fixture
def stats(server: ServerProcess) -> Iterator[Callable[[], dict[str, Any]]]:
    """Asks the server for its numbers."""
    with CacheClient(server.url, kind="cli", options=ClientOptions(request_timeout_s=5)) as cli:
        cli.wait_connected(20)
        yield lambda: cli.stats(20)


def locks(server: ServerProcess) -> list[str]:
    """The client lock files beside the pool."""
    return sorted(path.name for path in server.pool_dir.glob("*.clients/*"))


Stats = Callable[[], dict[str, Any]]


@pytest.mark.timeout(STOPPED_S + 120)
def test_a_stopped_client_keeps_its_share_only(client: MakeClient, stats: Stats) -> None:
    """Others store and load beside a stopped client; its own load is good when it wakes."""
    sleeper, other = client("sleeper"), client("other")

    def keeps_its_share() -> bool:
        found = stats()
        held = found["leased_bytes"], found["pool"]["reservations"]
        return held == (8 * OBJECT, SHARE - 8) and not found["counters"]["dead_clients"]

    assert sleeper.call("store", 1, 8) == 8
    sleeper.call("flush")
    assert sleeper.call("hold", 1, 8) == 8
    # With leases of 8 there is room for 8 reservations, whatever it asks for.
    assert len(sleeper.call("reserve", 2, 12)) == SHARE - 8
    sleeper.call("fill")
    sleeper.signal(signal.SIGSTOP)
    try:
        # Far more than the pool goes through the half that is left.
        deadline, prompts = time.monotonic() + STOPPED_S, itertools.count(10)
        while (prompt := next(prompts)) < 16 or time.monotonic() < deadline:
            assert other.call("store", prompt, 6) == 6
            other.call("flush")
            assert other.call("lookup", prompt, 6) == 6
            # The other's own release may be on its way still.
            wait_until(keeps_its_share, "only what the sleeper has is held")
            if prompt >= 16:
                stays(keeps_its_share, "it keeps what it has", 1.0)
        print(f"stopped for {STOPPED_S:g} s at least, {6 * (prompt - 10)} chunks by the other")
        assert keeps_its_share()
    finally:
        sleeper.signal(signal.SIGCONT)
    assert sleeper.call("check") == 8
    assert sleeper.call("commit") == []
    assert sleeper.call("lookup", 2, 8) == 8
    sleeper.call("release")
    wait_until(lambda: stats()["leased_bytes"] == 0, "leases are back")


@pytest.mark.timeout(STOPPED_S + 120)
def test_a_silent_client_is_not_reaped(client: MakeClient, stats: Stats) -> None:
    """Silence of any length is no death: a stopped client is there, and served when it wakes."""
    quiet = client("quiet")
    assert quiet.call("store", 1, 2) == 2
    sessions = stats()["sessions"]
    quiet.signal(signal.SIGSTOP)
    try:
        # Longer than several looks at the locks; the server decides by nothing but them.
        stays(lambda: stats()["sessions"] == sessions, "its session is there", STOPPED_S)
    finally:
        quiet.signal(signal.SIGCONT)
    assert quiet.call("lookup", 1, 2) == 2


def test_one_process_has_one_share(client: MakeClient) -> None:
    """A scheduler and a worker in one process hold half of the pool between them."""
    both, other = client("both"), client("other")
    both.call("join_scheduler")
    assert both.call("store", 1, 12) == 12
    both.call("flush")
    assert both.call("hold", 1, 12) == 12
    assert len(both.call("reserve", 2, 12)) == SHARE - 12
    assert other.call("store", 3, 8) == 8
    assert both.call("check") == 12


def test_a_prefix_that_many_requests_share_counts_once(root: Path) -> None:
    """Requests of one engine that wait with the same prefix all hit, and leave room for stores."""
    options = ClientOptions(request_timeout_s=10.0, lookup_timeout_s=20.0)
    with (
        local_server(root) as server,
        EmulatedEngine(server.url, [256], object_bytes=OBJECT, options=options).join() as made,
    ):
        # Half of the pool is 4 objects.
        hashes = made.hashes(range(5 * 256))
        assert made.store(hashes[:3]) == 3
        made.client.flush(20)
        asked = {"engine": made.name, "hashes": hashes[:3], "num_tokens": 3 * 256 + 1}
        leases = [made.client.lookup(**asked) for _ in range(5)]
        found = [lease.wait(20) for lease in leases]
        assert [one and one.tokens for one in found] == [3 * 256] * 5
        assert made.client.stats(20)["leased_bytes"] == 3 * OBJECT
        assert made.store(hashes[3:]) == 1
        for lease in leases:
            lease.release()
        wait_until(lambda: made.client.stats(20)["leased_bytes"] == 0, "leases are back")
        assert made.store(hashes[3:]) == 2


def test_many_lookups_that_wait_do_not_keep_the_server_busy(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room that comes back wakes one of a process, not all of them for each bit of room."""
    claims: list[int] = []
    claim = Lookups._claim

    def counted(self: Lookups, lookup: Lookup) -> None:
        claims.append(lookup.number)
        claim(self, lookup)

    options = ClientOptions(request_timeout_s=10.0, lookup_timeout_s=20.0)
    with (
        local_server(root) as server,
        EmulatedEngine(server.url, [256], object_bytes=OBJECT, options=options).join() as made,
    ):
        held, wanted = made.hashes(range(4 * 256)), made.hashes(range(1, 4 * 256 + 1))
        for hashes in (held, wanted):
            assert made.store(hashes) == 4
            made.client.flush(20)

        def ask(hashes: list[ChunkHash]) -> LookupHandle:
            return made.client.lookup(engine=made.name, hashes=hashes, num_tokens=4 * 256 + 1)

        def waiting() -> int:
            return int(made.client.stats(20)["lookups_by_phase"]["waiting"])

        holder = ask(held)
        assert holder.wait(20) is not None
        handles = [ask(wanted) for _ in range(20)]
        wait_until(lambda: waiting() == 20, "all of them wait")
        monkeypatch.setattr(Lookups, "_claim", counted)

        def retry() -> None:
            for _ in range(100):
                server.service.lookups.retry_waiting()

        server.state.mailbox.post(retry)
        wait_until(lambda: claims, "tried again")
        made.client.ping(20)  # answered in a later turn of the loop
        assert len(claims) < 20
        for handle in handles[10:]:
            handle.release()
        holder.release()
        found = [handle.wait(20) for handle in handles[:10]]
        assert [one and one.tokens for one in found] == [4 * 256] * 10


def test_scheduler_and_worker_in_one_process_die_together(
    client: MakeClient, stats: Stats, server: ServerProcess
) -> None:
    """Two clients of one process share one lock; closing one leaves the other alive."""
    both = client("both")
    both.call("join_scheduler")
    assert len(locks(server)) == 1
    assert both.call("store", 1, 4) == 4
    assert both.call("hold", 1, 4) == 4
    assert stats()["sessions"] == 3
    stays(lambda: stats()["counters"]["dead_clients"] == 0, "nobody is dead", 1.2)
    both.kill()
    wait_until(lambda: stats()["sessions"] == 1, "both sessions ended")
    assert stats()["leased_bytes"] == 0
    wait_until(lambda: locks(server) == [], "its lock file is gone")


def test_death_between_reserve_and_commit(client: MakeClient, stats: Stats) -> None:
    """What a killed client had reserved and written is never found, and its slots come back."""
    dying, other = client("dying"), client("other")
    assert len(dying.call("reserve", 5, 8)) == 8
    dying.call("fill")
    free = stats()["pool"]["free_bytes"]
    dying.kill()
    wait_until(lambda: stats()["pool"]["reservations"] == 0, "reservations end")
    wait_until(lambda: stats()["pool"]["free_bytes"] == free + 8 * OBJECT, "slots are free again")
    assert other.call("lookup", 5, 8) == 0
    assert other.call("store", 5, 8) == 8
    assert other.call("lookup", 5, 8) == 8


def test_death_while_holding_leases(client: MakeClient, stats: Stats) -> None:
    """Leases of a killed client end; what it had leased can be evicted again."""
    dying, other = client("dying"), client("other")
    assert dying.call("store", 1, 12) == 12
    dying.call("flush")
    assert dying.call("hold", 1, 12) == 12
    dying.kill()
    wait_until(lambda: stats()["leased_bytes"] == 0, "leases end")
    for prompt in (2, 3, 4):
        assert other.call("store", prompt, 12) == 12
        other.call("flush")
        assert other.call("lookup", prompt, 12) == 12


def test_a_forked_child_keeps_nothing_alive(
    client: MakeClient, stats: Stats, server: ServerProcess
) -> None:
    """A forked child neither ends nor prolongs what its parent holds."""
    parent = client("parent")
    assert parent.call("store", 1, 4) == 4
    assert parent.call("hold", 1, 4) == 4
    first = parent.call("fork")
    parent.call("kill_fork", first)
    # The child's end closed its copies of all descriptors; the parent's lock stands.
    stays(lambda: stats()["counters"]["dead_clients"] == 0, "the parent lives", 1.2)
    assert parent.call("check") == 4
    assert parent.call("lookup", 1, 4) == 4
    second = parent.call("fork")
    try:
        os.kill(parent.pid, signal.SIGKILL)
        wait_until(lambda: stats()["leased_bytes"] == 0, "the dead parent's leases end")
        os.kill(second, 0)  # the child lives, and holds nothing
    finally:
        os.kill(second, signal.SIGKILL)
    wait_until(lambda: locks(server) == [], "the lock file is gone")


def test_clients_in_other_pid_namespaces(
    client: MakeClient, stats: Stats, namespaces: list[str]
) -> None:
    """Two clients that are both PID 1 are told apart, and the death of one is noticed."""
    one, two = client("one", namespaces), client("two", namespaces)
    assert one.call("store", 1, 4) == 4
    assert one.call("hold", 1, 4) == 4
    assert two.call("store", 2, 4) == 4
    assert two.call("hold", 2, 4) == 4
    stays(lambda: stats()["counters"]["dead_clients"] == 0, "both live", 1.2)
    one.kill()
    wait_until(lambda: stats()["leased_bytes"] == 4 * OBJECT, "the dead one's leases end")
    assert two.call("check") == 4
    assert two.call("lookup", 1, 4) == 4
    assert stats()["counters"]["dead_clients"] == 1


def test_a_server_in_another_pid_namespace(
    make_server: Callable[..., ServerProcess], namespaces: list[str]
) -> None:
    """A server that is PID 1 sees clients of another namespace live and die."""
    server = make_server()
    server.command = [*namespaces, *server.command]
    server.start()
    with ClientProcess(server.url) as one, ClientProcess(server.url) as two:
        one.call("join", "one", OBJECT)
        two.call("join", "two", OBJECT)
        assert one.call("store", 1, 4) == 4
        assert len(one.call("reserve", 2, 8)) == 8
        with CacheClient(server.url, kind="cli") as cli:
            cli.wait_connected(20)
            stays(lambda: cli.stats(20)["pool"]["reservations"] == 8, "it lives", 1.2)
            one.kill()
            wait_until(lambda: cli.stats(20)["pool"]["reservations"] == 0, "it died")
        assert two.call("lookup", 1, 4) == 4


def test_a_pool_of_a_server_in_another_pid_namespace_stays(
    make_server: Callable[..., ServerProcess], namespaces: list[str], root: Path
) -> None:
    """A start sweeps the pools of the dead only, whatever the PID namespace of the living."""
    shared = root / "shm"
    first = make_server(name="a", pool_dir=shared)
    first.command = [*namespaces, *first.command]
    first.start()
    second = make_server(name="b", pool_dir=shared)
    second.command = [*namespaces, *second.command]
    second.start()
    assert len(list(shared.glob("*.pool"))) == 2
    with ClientProcess(first.url) as one:
        one.call("join", "one", OBJECT)
        assert one.call("store", 1, 4) == 4
        second.kill()
        second.start()
        assert len(list(shared.glob("*.pool"))) == 2
        assert one.call("lookup", 1, 4) == 4


def as_user(number: int, *groups: int) -> list[str]:
    """A command prefix that starts a process as another user."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("becoming another user takes root and setpriv")
    ids = [f"--reuid={number}", f"--regid={number}"]
    more = [f"--groups={','.join(map(str, groups))}"] if groups else ["--clear-groups"]
    prefix = ["setpriv", *ids, *more]
    if subprocess.run([*prefix, sys.executable, "-c", "import lmcache_persist.errors"]).returncode:
        pytest.skip("other users cannot read this checkout")
    return prefix


def as_service(server: ServerProcess, gid: int) -> ServerProcess:
    """Start it as a user of its own, that is a member of a group."""
    server.data_dir.parent.chmod(0o755)
    server.pool_dir.chmod(0o1777)
    server.data_dir.mkdir()
    os.chown(server.data_dir, 20001, 20001)
    server.command = [*as_user(20001, gid), *server.command]
    return server.start()


ENGINES = ["a member of the group", "root", "root without the group"]


@pytest.mark.parametrize("user", ENGINES)
def test_an_engine_of_another_user_is_served_and_watched(
    make_server: Callable[..., ServerProcess], user: str
) -> None:
    """A server that is not root serves members of --group, and root, and sees them die."""
    group = next(entry for entry in grp.getgrall() if entry.gr_gid)
    flags = [] if "without" in user else ["--group", group.gr_name]
    service = as_service(make_server(*flags), group.gr_gid)
    member = as_user(20002, group.gr_gid)
    client = ClientProcess(service.url, [] if "root" in user else member)
    try:
        client.call("join", "engine", OBJECT)
        assert client.call("store", 1, 3) == 3
        assert client.call("lookup", 1, 3) == 3
        assert len(locks(service)) == 1
    finally:
        client.kill()
    wait_until(lambda: not locks(service), "the dead client's lock is removed")
    assert "cannot be looked at" not in service.log()


def test_an_engine_of_a_user_outside_the_group_cannot_connect(
    make_server: Callable[..., ServerProcess],
) -> None:
    """The socket is the owner's and the group's."""
    group = next(entry for entry in grp.getgrall() if entry.gr_gid)
    service = as_service(make_server("--group", group.gr_name), group.gr_gid)
    verb = ["flush", "--server", service.url, "--timeout", "0.5"]
    done = subprocess.run(
        [*as_user(20003), sys.executable, "-m", "lmcache_persist.cli", *verb],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 4, done.stderr


def test_the_group_may_look_at_a_server_that_is_gone(
    make_server: Callable[..., ServerProcess],
) -> None:
    """Members of --group inspect and verify the files, nobody else; without it nobody does."""
    group = next(entry for entry in grp.getgrall() if entry.gr_gid)
    service = as_service(make_server("--group", group.gr_name), group.gr_gid)
    folder, member = service.data_dir, as_user(20002, group.gr_gid)

    def look(verb: str, *flags: str, user: list[str] = member) -> dict[str, Any]:
        command = [*user, sys.executable, "-m", "lmcache_persist.cli", verb, str(folder), *flags]
        done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def open_to(bits: int) -> set[str]:
        paths = [path for path in (folder, *folder.rglob("*")) if not path.is_socket()]
        return {path.name for path in paths if path.stat().st_mode & bits}

    with ClientProcess(service.url) as client:
        client.call("join", "engine", OBJECT)
        assert client.call("store", 1, 3) == 3
        client.call("flush")
    service.kill()
    assert (folder / "manifest.sqlite-wal").exists()
    assert look("inspect")["store"]["objects"] == 3
    # A verb of the owner's leaves it so.
    assert look("verify", "--repair", user=as_user(20001, group.gr_gid))["ok"]
    assert look("verify")["ok"]
    assert open_to(0o027) == set()
    service.command = [one for one in service.command if one not in ("--group", group.gr_name)]
    service.start().terminate()
    assert open_to(0o077) == set()


def test_a_client_without_a_lock_holds_nothing(server: ServerProcess) -> None:
    """A session without a client lock gets neither slots nor leases."""
    with CacheClient(server.url, kind="cli", options=ClientOptions(request_timeout_s=5)) as cli:
        cli.wait_connected(20)
        with pytest.raises(LeaseError, match="client lock"):
            cli.reserve(engine="e", rank=0, hashes=[b"h" * 32], masks=[1]).result(20)


def test_a_lookup_outlives_its_worker(
    server: ServerProcess, client: MakeClient, stats: Stats
) -> None:
    """A worker that dies while its scheduler's lookup waits for room costs no answer, no lease."""
    worker, first, second = client("worker"), client("first"), client("second")
    assert worker.call("store", 1, 4) == 4
    worker.call("flush")
    for number, holder in enumerate((first, second)):
        assert holder.call("store", 10 + number, SHARE) == SHARE
        holder.call("flush")
        assert holder.call("hold", 10 + number, SHARE) == SHARE
    options = ClientOptions(request_timeout_s=5, lookup_timeout_s=20)
    with CacheClient(server.url, kind="scheduler", options=options) as scheduler:
        scheduler.wait_connected(20)
        hashes: list[ChunkHash] = []
        ChunkHasher(256).extend(hashes, [1, *range(4 * 256)])
        handle = scheduler.lookup(engine="worker", hashes=hashes, num_tokens=4 * 256 + 1)
        wait_until(lambda: stats()["lookups_open"] == 3, "the lookup is there")
        stays(lambda: handle.poll() is None, "it waits: the pool is held", 0.5)
        worker.kill()
        wait_until(lambda: len(stats()["engines"]) == 2, "the worker is gone")
        first.call("release")
        result = wait_until(handle.poll, "the lookup is decided")
        assert (result.tokens, result.error) == (4 * 256, None)
        handle.release()
        second.call("release")
        wait_until(lambda: stats()["leased_bytes"] == 0, "all leases are back")
    assert "defect in the server" not in server.log()
