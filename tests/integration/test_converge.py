"""Two servers that agree: ``--chunk-size-from``, and clients that insist."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmcache_persist.connector import CacheClient, ClientOptions
from lmcache_persist.connector.vllm.counters import Counters
from lmcache_persist.connector.vllm.settings import ConnectorSettings
from lmcache_persist.connector.vllm.startup import start_client
from lmcache_persist.errors import (
    ConfigError,
    PersistError,
    ServerUnreachable,
    UnexpectedChunkSize,
)
from lmcache_persist.geometry import groups_from_sizes
from support.emulated import EmulatedEngine
from support.server import ServerProcess, inspect, run_cli
from support.waiting import wait_until

MakeServer = Callable[..., ServerProcess]
PATIENT = ClientOptions(request_timeout_s=10.0)
TIMEOUT_S = 30.0


@pytest.fixture
def pair(make_server: MakeServer, root: Path) -> tuple[ServerProcess, ServerProcess]:
    """A first server and one that takes its chunk size, neither started."""
    first = make_server(name="a", pool_dir=root / "shm", pool_size="8MiB", capacity="16MiB")
    second = make_server(
        "--chunk-size-from",
        f"ipc://{root / 'a' / 'server.sock'}",
        name="b",
        pool_dir=root / "shm",
        pool_size="8MiB",
        capacity="16MiB",
    )
    return first, second


def bound_size(server: ServerProcess) -> int | None:
    """The chunk size of a running server's stats."""
    with CacheClient(server.url, kind="cli", options=PATIENT) as client:
        client.wait_connected(TIMEOUT_S)
        size: int | None = client.stats()["chunk_size"]
        return size


def bind(server: ServerProcess, size: int, timeout_s: float = TIMEOUT_S) -> int:
    """What an engine with blocks of ``size`` tokens gets."""
    with CacheClient(server.url, kind="cli", options=PATIENT) as client:
        client.wait_connected(TIMEOUT_S)
        outcome = client.bind(groups_from_sizes([size]), who=f"of {size}", timeout_s=timeout_s)
        return outcome.binding.chunk_size


def agrees_with(second: ServerProcess, size: int) -> None:
    """The second server comes to be bound to ``size``."""
    wait_until(lambda: bound_size(second) == size, f"the second server is bound to {size}")


@contextlib.contextmanager
def stopped(server: ServerProcess) -> Iterator[None]:
    """A server that gives no answer and does not go away."""
    assert server.process is not None
    os.killpg(server.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(server.process.pid, signal.SIGCONT)


Pair = tuple[ServerProcess, ServerProcess]


def test_the_size_of_a_bound_server_is_taken_at_start(pair: Pair) -> None:
    """The first is bound: the second is bound likewise before it says ready."""
    first, second = pair
    first.start()
    assert bind(first, 544) == 544
    second.start()
    assert bound_size(second) == 544
    bindings = [inspect(server.data_dir)["binding"] for server in pair]
    assert bindings[0]["boundary_id"] == bindings[1]["boundary_id"]
    assert bindings[0]["binding_id"] != bindings[1]["binding_id"]
    assert bindings[1]["mode"] == "fixed"
    live = inspect(second.data_dir)["server"]["chunk_size_from"]
    assert (live["endpoint"], live["trouble"]) == (first.url, None)


def test_binds_are_passed_on_while_both_are_unbound(pair: Pair) -> None:
    """An engine at the second server binds both; a dry run binds neither."""
    first, second = pair
    first.command += ["--base-chunk-size", "1024"]
    first.start()
    second.start()
    done = run_cli("negotiate", "--server", second.url, "--groups", "544", "--dry-run", "--json")
    document = json.loads(done.stdout)
    assert (document["outcome"], document["binding"]["chunk_size"]) == ("bound", 1088)
    assert (bound_size(first), bound_size(second)) == (None, None)
    # The first server's base counts, not the second one's.
    assert bind(second, 544) == 1088
    assert (bound_size(first), bound_size(second)) == (1088, 1088)
    with EmulatedEngine(second.url, [544], options=PATIENT) as engine:
        engine.join()
        hashes = engine.hashes(list(range(1089)))
        assert engine.store(hashes) == 1
        assert engine.lookup(hashes, 1089).tokens == 1088


def test_a_bind_at_the_first_reaches_the_second(pair: Pair) -> None:
    """Nobody asks the second one, and it is bound all the same."""
    first, second = pair
    first.start()
    second.start()
    assert bind(first, 640) == 640
    agrees_with(second, 640)


def test_refusals_of_the_first_are_passed_on(pair: Pair) -> None:
    """What the first one refuses is refused by the second in the same words."""
    first, second = pair
    first.start()
    second.start()
    with pytest.raises(PersistError) as refusal:
        bind(second, 16400)
    assert refusal.value.code == "alignment_too_large"
    assert (bound_size(first), bound_size(second)) == (None, None)


def test_racing_engines_on_both_end_with_one_size(pair: Pair) -> None:
    """Engines of two geometries at two servers at once: one size, the rest is refused."""
    first, second = pair
    first.start()
    second.start()
    answers: list[tuple[int, int | str]] = []
    barrier = threading.Barrier(8)

    def race(server: ServerProcess, size: int) -> None:
        barrier.wait(TIMEOUT_S)
        try:
            answers.append((size, bind(server, size)))
        except PersistError as error:
            answers.append((size, error.code))

    racers = [
        threading.Thread(target=race, args=(server, size))
        for server in pair
        for size in (544, 640, 400, 272)
    ]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(TIMEOUT_S)
    size = bound_size(first)
    assert size is not None
    assert bound_size(second) == size
    for wanted, got in answers:
        assert got == (size if size % wanted == 0 else "incompatible_alignment")
    assert len(answers) == 8


def test_the_first_is_down(pair: Pair) -> None:
    """Without the first the second is ready and unbound; binds name the first; then it agrees."""
    first, second = pair
    second.start()
    with pytest.raises(ServerUnreachable, match="--chunk-size-from") as refusal:
        bind(second, 544, timeout_s=1.0)
    assert refusal.value.retryable
    assert str(first.data_dir / "server.sock") in refusal.value.message
    assert bound_size(second) is None
    assert inspect(second.data_dir)["server"]["chunk_size_from"]["trouble"]
    answer: list[int] = []
    engine = threading.Thread(target=lambda: answer.append(bind(second, 544)))
    engine.start()  # an engine that is patient needs nothing but the first server's start
    first.start()
    engine.join(TIMEOUT_S)
    assert answer == [544]
    assert (bound_size(first), bound_size(second)) == (544, 544)


def test_the_first_is_slow(pair: Pair) -> None:
    """A first server that hangs delays a start for a bounded time, and nothing is guessed."""
    first, second = pair
    first.start()
    with stopped(first):
        second.start()
        with pytest.raises(PersistError) as refusal:
            bind(second, 544, timeout_s=8.0)
        assert refusal.value.retryable
        assert bound_size(second) is None
    assert bind(second, 640) == 640
    assert bound_size(first) == 640


def test_the_first_is_restarted(pair: Pair) -> None:
    """Unbound or bound, the first one may come and go; the second follows it once."""
    first, second = pair
    first.start()
    second.start()
    first.kill()
    first.start()
    assert bind(first, 400) == 400
    agrees_with(second, 400)
    first.kill()
    # Bound itself, the second one needs nobody; also over a restart of its own.
    assert bind(second, 400) == 400
    second.terminate()
    second.start()
    assert bound_size(second) == 400
    assert bind(second, 200) == 400


def test_servers_that_disagree_are_told(pair: Pair, make_server: MakeServer) -> None:
    """Bound to something else, a start is refused and names both; a later difference is said."""
    first, second = pair
    first.start()
    assert bind(first, 544) == 544
    flags = second.command[-2:]
    assert flags[0] == "--chunk-size-from"
    del second.command[-2:]
    second.start()
    assert bind(second, 640) == 640
    second.terminate()
    second.command += flags
    code, log = second.refused()
    assert code == 5
    assert "544" in log
    assert "640" in log
    assert first.url in log
    first.terminate()
    second.start()  # nobody there to disagree with
    first.start()
    wait_until(
        lambda: inspect(second.data_dir)["server"]["chunk_size_from"]["agrees"] is False,
        "the difference is noticed",
    )
    assert "544" in second.log()
    assert bind(second, 640) == 640


def test_a_size_above_the_maximum_is_not_taken(pair: Pair) -> None:
    """The second one keeps its own maximum: its start is refused, not its rule."""
    first, second = pair
    first.start()
    assert bind(first, 1024) == 1024
    second.command += ["--max-chunk-size", "512"]
    code, log = second.refused()
    assert code == 2
    assert "1024" in log
    assert "512" in log


def test_servers_that_go_round_in_a_circle_say_so(make_server: MakeServer, root: Path) -> None:
    """Three that each wait for the next one: a bind is refused at once; broken up, it holds."""
    names = ("a", "b", "c")
    servers = [
        make_server(
            "--chunk-size-from",
            f"ipc://{root / after / 'server.sock'}",
            name=name,
            pool_dir=root / "shm",
            pool_size="8MiB",
            capacity="16MiB",
        )
        for name, after in zip(names, (*names[1:], names[0]), strict=True)
    ]
    for server in servers:
        server.launch()
    for server in servers:
        server.wait_ready()
    wait_until(lambda: all(connected_to_first(server) for server in servers), "they are connected")
    for server in servers:
        with pytest.raises(ConfigError, match=r"circle: of 3 servers") as caught:
            bind(server, 544)
        assert "without --chunk-size-from" in str(caught.value.hint)
    assert [bound_size(server) for server in servers] == [None, None, None]
    last = servers[-1]
    assert last.terminate() == 0
    last.command = [part for part in last.command if "chunk-size-from" not in part]
    last.command.remove(f"ipc://{root / 'a' / 'server.sock'}")
    last.start()
    wait_until(lambda: all(connected_to_first(server) for server in servers[:2]), "all is well")
    assert bind(servers[0], 544) == 544
    for server in servers:
        agrees_with(server, 544)


def connected_to_first(server: ServerProcess) -> bool:
    """Whether a server's first server answers it."""
    with CacheClient(server.url, kind="cli", options=PATIENT) as client:
        client.wait_connected(TIMEOUT_S)
        return client.stats()["chunk_size_from"]["trouble"] is None


def test_clients_compare_two_servers(make_server: MakeServer) -> None:
    """Two clients agree, or the refusal names both servers and both sizes."""
    servers = [make_server("--chunk-size", size, name=size).start() for size in ("512", "640")]
    with contextlib.ExitStack() as stack:
        one, two = (
            stack.enter_context(CacheClient(server.url, kind="cli", options=PATIENT))
            for server in servers
        )
        for client in (one, two):
            client.wait_connected(TIMEOUT_S)
        one.check_agrees(one)
        with pytest.raises(UnexpectedChunkSize) as refusal:
            one.check_agrees(two)
    for word in (servers[0].url, servers[1].url, "512", "640"):
        assert word in refusal.value.message


def test_an_expected_size_is_insisted_on(make_server: MakeServer) -> None:
    """``persist.expect_chunk_size``: another size is refused, and binds no unbound server."""
    bound = make_server("--chunk-size", "512", name="bound").start()
    unbound = make_server(name="unbound").start()

    def start(server: ServerProcess, expected: int) -> int:
        settings = ConnectorSettings.from_extra_config(
            {"persist.server": server.url, "persist.expect_chunk_size": expected}
        )
        client = start_client(
            settings, Counters(), groups_from_sizes([64]), kind="scheduler", label="t", who="t"
        )
        with client:
            assert client.binding is not None
            return client.binding.chunk_size

    assert start(bound, 512) == 512
    for server, found in ((bound, "512"), (unbound, "256")):
        with pytest.raises(UnexpectedChunkSize) as refusal:
            start(server, 640)
        for word in (server.url, found, "640"):
            assert word in refusal.value.message
    assert bound_size(unbound) is None
    assert start(unbound, 256) == 256


def test_an_expectation_outlives_every_reconnect(make_server: MakeServer, root: Path) -> None:
    """Another data dir behind the same address, of another size: cold, both named, nothing
    bound; hot again once the size is right, be it that somebody binds the unbound one.
    """
    url = f"ipc://{root}/s.sock"
    flags = {"512": ("--chunk-size", "512"), "640": ("--chunk-size", "640"), "auto": ()}
    servers = {name: make_server("--listen", url, *more, name=name) for name, more in flags.items()}
    settings = ConnectorSettings.from_extra_config(
        {"persist.server": url, "persist.expect_chunk_size": 640, "persist.required": False}
    )
    counters = Counters()
    servers["512"].start()
    groups = groups_from_sizes([64])
    with start_client(settings, counters, groups, kind="scheduler", label="t", who="t") as client:
        assert counters.snapshot() == {"start_without_cache": 1}

        def turns_cold(found: str) -> None:
            wait_until(lambda: client.cold is not None, "it is refused")
            assert isinstance(client.cold, UnexpectedChunkSize)
            for word in (url, found, "640"):
                assert word in client.cold.message

        def comes_next(name: str) -> ServerProcess:
            boot = client.boot_id
            servers[name].start()
            wait_until(lambda: client.boot_id not in (boot, None), "the next one is known")
            return servers[name]

        turns_cold("512")
        servers["512"].kill()
        unbound = comes_next("auto")
        turns_cold("256")
        assert bound_size(unbound) is None
        assert bind(unbound, 640) == 640
        wait_until(lambda: client.cold is None, "it is what was expected now")
        unbound.kill()
        comes_next("512")
        turns_cold("512")
        servers["512"].kill()
        comes_next("640")
        assert client.cold is None
        assert client.binding is not None
        assert client.binding.chunk_size == 640
