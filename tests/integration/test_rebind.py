"""``rebind`` of a data dir that a real server filled, and what servers and clients make of it."""

from __future__ import annotations

import json
from collections.abc import Callable

import zmq

from lmcache_persist import protocol
from support import raw
from support.files import snapshot
from support.filled import engine_of, fill, filled, hits, prompt
from support.server import ServerProcess, cli_here, inspect, json_here, run_cli
from support.waiting import wait_until

MakeServer = Callable[..., ServerProcess]
NUM_OBJECTS = 1000


def rebind(server: ServerProcess, size: int, *flags: str) -> dict[str, object]:
    """The verb on a server's data dir; the binding that it printed."""
    done = run_cli(
        "rebind", str(server.data_dir), "--chunk-size", str(size), "--yes", "--json", *flags
    )
    assert done.returncode == 0, done.stderr
    binding: dict[str, object] = json.loads(done.stdout)["binding"]
    return binding


def stale(server: ServerProcess) -> int:
    """Stale objects, as inspect shows them."""
    return int(inspect(server.data_dir)["store"]["stale_objects"])


def test_a_thousand_objects_become_stale_and_are_swept(make_server: MakeServer) -> None:
    """After a rebind nothing is found, all is counted as stale, and the number falls to 0."""
    server = filled(make_server, NUM_OBJECTS)
    before = inspect(server.data_dir)["binding"]
    after = rebind(server, 512)
    document = inspect(server.data_dir)
    assert document["binding"] == after
    assert (document["binding"]["chunk_size"], document["binding"]["mode"]) == (512, "fixed")
    assert document["binding"]["store"] == before["store"]
    assert document["binding"]["binding_id"] != before["binding_id"]
    assert (document["store"]["objects"], document["store"]["stale_objects"]) == (0, NUM_OBJECTS)
    assert run_cli("verify", str(server.data_dir)).returncode == 0
    server.start()
    assert hits(server, NUM_OBJECTS) == 0
    wait_until(lambda: stale(server) < NUM_OBJECTS, "stale objects are removed")
    wait_until(lambda: stale(server) == 0, "all stale objects are removed")
    assert inspect(server.data_dir)["store"]["objects"] == 0
    server.kill()
    assert run_cli("verify", str(server.data_dir)).returncode == 0


def test_the_same_size_again_is_another_binding(make_server: MakeServer) -> None:
    """Bound back to the old size, what was stored under it is still stale."""
    server = filled(make_server, 10)
    first = inspect(server.data_dir)["binding"]
    ids = {first["binding_id"], rebind(server, 512)["binding_id"]}
    third = rebind(server, 256)
    assert len(ids | {third["binding_id"]}) == 3
    assert third["boundary_id"] == first["boundary_id"]
    server.start()
    assert hits(server, 10) == 0
    fill(server, 10)
    assert hits(server, 10) == 10 * 256
    wait_until(lambda: stale(server) == 0, "all stale objects are removed")
    assert hits(server, 10) == 10 * 256


def test_the_size_that_it_has_is_left_alone(make_server: MakeServer) -> None:
    """To repeat a rebind costs nothing and asks nothing; with --force all becomes stale."""
    server = filled(make_server, 10)
    before, bytes_before = inspect(server.data_dir)["binding"], snapshot(server.data_dir)
    words = ("rebind", str(server.data_dir), "--chunk-size", "256")
    code, out, err = cli_here(*words)
    assert (code, out) == (
        0,
        f"nothing to do: bound to chunk size 256 already, binding {before['binding_id']}\n",
    )
    assert "--force" in err
    assert "where it is set, by a flag, in LMCACHE_PERSIST_CHUNK_SIZE or in a config file" in err
    assert "set it to 256 or auto now" in err
    assert json_here(*words, "--yes") == {"binding": before, "outcome": "unchanged"}
    assert snapshot(server.data_dir) == bytes_before
    code, _, err = cli_here(*words, "--force")
    assert code == 2
    assert "is bound to chunk size 256 already, since" in err
    assert "throws away 10 chunks, 10 objects" in err
    assert snapshot(server.data_dir) == bytes_before
    done = json_here(*words, "--force", "--yes")
    assert done["outcome"] == "bound"
    assert done["binding"]["boundary_id"] == before["boundary_id"]
    assert done["binding"]["binding_id"] != before["binding_id"]
    assert stale(server) == 10


def test_a_living_client_starts_over(make_server: MakeServer) -> None:
    """A client that lives through a rebind gets the new binding by itself and works on."""
    server = filled(make_server, 10)
    server.start()
    with engine_of(server) as engine:
        engine.join()
        old = engine.hashes(prompt(0, 10, 256))
        assert engine.lookup(old, 2561).tokens == 2560
        assert engine.client.binding is not None
        old_id = engine.client.binding.binding_id
        server.terminate()
        new_id = rebind(server, 512)["binding_id"]
        server.start()
        wait_until(
            lambda: (
                engine.client.connected
                and engine.client.binding is not None
                and engine.client.binding.binding_id == new_id
            ),
            "the client has the new binding",
        )
        assert engine.client.cold is None
        assert engine.lookup(old, 2561).tokens == 0
        hashes = engine.hashes(prompt(7, 3, 512))
        assert engine.store(hashes) == 3
        assert engine.lookup(hashes, 512 * 3 + 1).tokens == 512 * 3
        assert old_id != new_id


def test_an_old_binding_id_is_told_so(make_server: MakeServer) -> None:
    """A message of the present boot and session under the old binding is answered ``stale``."""
    server = filled(make_server, 1)
    old_id = inspect(server.data_dir)["binding"]["binding_id"]
    new_id = rebind(server, 512)["binding_id"]
    server.start()
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    try:
        socket.connect(server.url)
        welcome = raw.hello(socket)
        answers = {}
        for name in (old_id, new_id):
            lookup = protocol.Lookup(
                boot=welcome.boot,
                session=welcome.session,
                binding=name,
                lookup=1,
                engine="e",
                num_tokens=1,
            )
            answers[name] = raw.ask(socket, lookup)
        refused = answers[old_id]
        assert isinstance(refused, protocol.ErrorReply)
        assert refused.code == "stale"
        other = answers[new_id]
        assert not isinstance(other, protocol.ErrorReply) or other.code != "stale"
    finally:
        socket.close()
        context.term()


def test_it_asks_and_changes_nothing_without_a_yes(make_server: MakeServer) -> None:
    """Without a confirmation every byte stays; what would be lost has been said."""
    server = filled(make_server, 10)
    before = snapshot(server.data_dir)
    done = run_cli("rebind", str(server.data_dir), "--chunk-size", "512")
    assert done.returncode == 2
    assert "throws away 10 chunks, 10 objects (40.00 KiB)" in done.stderr
    assert "emulated/model" in done.stderr
    assert "bytes) more" in done.stderr
    assert "256" in done.stderr
    assert "nothing was changed" in done.stderr
    assert snapshot(server.data_dir) == before


def test_sizes_that_cannot_be_are_refused(make_server: MakeServer) -> None:
    """A refused size changes nothing."""
    server = filled(make_server, 1)
    before = snapshot(server.data_dir)
    for size, word in (("0", "positive"), ("x", "positive"), ("16385", "16384")):
        done = run_cli("rebind", str(server.data_dir), "--chunk-size", size, "--yes")
        assert done.returncode == 2
        assert word in done.stderr
    assert snapshot(server.data_dir) == before


def test_a_living_server_and_an_unbound_data_dir_are_refused(make_server: MakeServer) -> None:
    """A server that holds the data dir is named; what is not bound cannot be bound anew."""
    server = make_server().start()
    done = run_cli("rebind", str(server.data_dir), "--chunk-size", "512", "--yes")
    assert done.returncode == 5
    assert server.url in done.stderr
    server.terminate()
    done = run_cli("rebind", str(server.data_dir), "--chunk-size", "512", "--yes")
    assert done.returncode == 3
    assert "--chunk-size 512" in done.stderr


def test_a_start_with_the_old_size_names_the_way_out(make_server: MakeServer) -> None:
    """--chunk-size with another number than the bound one is refused and names ``rebind``."""
    server = filled(make_server, 1)
    server.command += ["--chunk-size", "512"]
    code, log = server.refused()
    assert code == 5
    assert f"lmcache-persist rebind {server.data_dir} --chunk-size 512" in log
    rebind(server, 512)
    server.start()
    assert inspect(server.data_dir)["binding"]["chunk_size"] == 512
